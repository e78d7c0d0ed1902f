"""The files, the number of slots S, seed and epoch decide which slot reads which
documents; the ranks do not.

In every epoch the files are laid end to end, each as long as its stored bytes (times
its text per stored byte, if it is not the same in all files), in an order that (seed,
epoch) decides. This line is cut into S runs of equal length (``_cut``), and slot s
reads run s. Ranks own contiguous slots and therefore contiguous runs. A file is read
only by the ranks whose runs it overlaps, so that an epoch takes at most files + ranks
reads.

The documents of a file that contains cuts are dealt out to its slots by their *keys*,
(index · STEP + shift) mod 2⁶⁴, which are spread evenly, however many documents there
are. A slot whose run covers the file from fraction a to fraction b owns the keys from a
· 2⁶⁴ to b · 2⁶⁴. If an index of the data knows enough places where reading can begin,
whole blocks are dealt out in this way instead of documents (``blocks``), and a rank
reads only the blocks of its slots.

A slot's run consists of the end of one file (``head``), whole files (``body``) and the
beginning of another file (``tail``). A slot *interleaves* them in proportion to their
bytes. All slots are then at about the same fraction of every file that they share, and
one pass over a file serves all slots of a rank. Read one after another, these parts
would have neighbours at different places of the shared file, and a rank would read this
file twice or hold it in memory.

Of several sources ([[stream.sources]]), each has some of the S slots and epochs of its
own. Its documents come as in a run of this source alone with this name and this number
of slots. (Only the shuffling differs, because it depends on the slot's number.) The
name counts because otherwise copies of a file in two sources would come at the same
time. The slots of a source are contiguous, so that a rank reads files of few sources.
"""

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

from titan_disp.data.blocks import STEP, Blocks, Visits
from titan_disp.data.files import DataFile
from titan_disp.errors import ConfigError

# part of the fingerprint: under another version, the same position means other
# documents
VERSION = 6
KEYS = 1 << 64
# a cut closer to the edge of a file than 1/8 of a run is moved there: a slot that owns
# a sliver reads it all
_EDGE = 8
_BLOCKS = 16  # blocks are dealt out if a slot has at least so many of the file
_BLOCK = 1 << 16
_KEPT = 1 << 18  # bound on the files and cuts in all cached lines: about 20 MB


@dataclass(frozen=True)
class Segment:
    """Describe the documents of one file that a slot owns: those with ``low ≤ (index ·
    STEP + shift) mod KEYS < high``.

    ``file`` is the index of the file; ``length`` is the segment's stored bytes, times
    the number of slots; ``text`` is about the bytes of its text.
    """

    file: int
    low: int
    high: int
    shift: int
    length: int
    text: int = 0
    # whether the blocks of the file are dealt out, by their visits, instead of its
    # documents
    dealt: bool = False

    def key(self, index: int) -> int:
        return (index * STEP + self.shift) % KEYS

    def visits(self, blocks: Blocks | None) -> Visits | None:
        """Return how the file is read in this epoch."""
        return (
            None
            if blocks is None
            else Visits(blocks, self.shift if self.dealt else None)
        )

    def owns_any(self, start: int, end: int) -> bool:
        low = np.uint64(self.low)
        high = np.uint64(self.high - 1)
        for first in range(start, end, _BLOCK):
            index = np.arange(first, min(first + _BLOCK, end), dtype=np.uint64)
            keys = index * np.uint64(STEP) + np.uint64(self.shift)  # modulo KEYS
            if ((low <= keys) & (keys <= high)).any():
                return True
        return False


@dataclass(frozen=True)
class Run:
    """Hold what one slot reads in one epoch: the end of a file, whole files, and the
    beginning of a file.
    """

    head: Segment | None
    body: tuple[Segment, ...]
    tail: Segment | None

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(s for s in (self.head, *self.body, self.tail) if s is not None)

    @cached_property
    def weights(self) -> tuple[int, int, int]:
        """Return the lengths of head, body and tail, which are their shares in the
        interleaving.
        """
        head, tail = (part.length if part else 0 for part in (self.head, self.tail))
        return head, sum(s.length for s in self.body), tail


@dataclass(frozen=True)
class _Line:
    """Hold the files of one epoch laid end to end, and where this line is cut.

    Its unit is 1/S of a stored byte.
    """

    order: list[int]  # indices of the files, in the order of the line
    shifts: list[int]  # the shift of each file's keys, in the same order
    place: list[int]  # the place in ``order`` of each file
    edges: list[int]  # where each file begins, and where the last one ends
    cuts: list[int]  # where each slot's run begins, and where the last one ends


class Assignment:
    """Compute the runs of all slots in every epoch: ``run(slot, epoch)`` returns
    one.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        slots: int,
        seed: int,
        first_slot: int = 0,
        first_file: int = 0,
    ) -> None:
        """Only the names of the files, their sizes and their densities decide.

        They are all files of one source.

        Slots and files are numbered from ``first_slot`` and ``first_file`` on, if there
        are other sources before it.
        """
        self.names = [file.name for file in files]
        self.slots = slots
        self.seed = seed
        # the first file of each source
        self.first_slot = first_slot
        self.first_files = [first_file]
        self.least = min((file.density for file in files if file.density), default=1.0)
        # In units of 1/S byte, so that no run is empty. An empty file counts as one
        # byte: some slot must report it.
        self.lengths = [
            max(round(file.size * file.density / self.least), 1) * slots
            for file in files
        ]
        whole = sum(self.lengths)
        self.dealt = [
            file.blocks is not None
            and len(file.blocks) * whole >= _BLOCKS * slots * length
            for file, length in zip(files, self.lengths, strict=True)
        ]
        # With few documents, slots can be many epochs apart and need many lines. The
        # cache bounds the memory.
        self._line = lru_cache(maxsize=max(8, _KEPT // (len(files) + slots)))(
            self._make_line
        )
        self.run = lru_cache(maxsize=8 * slots)(self._run)

    def _make_line(self, epoch: int) -> _Line:
        # A hash instead of a library's shuffle: the order must not change with the
        # version of Python or numpy. Names of files are bytes: those that are not UTF-8
        # have surrogates.
        named = (
            f"{self.seed}/{epoch}/{name}".encode(errors="surrogateescape")
            for name in self.names
        )
        hashes = [hashlib.sha256(name).digest() for name in named]
        order = sorted(range(len(hashes)), key=hashes.__getitem__)
        edges = [0]
        place = [0] * len(order)
        for i, file in enumerate(order):
            place[file] = i
            edges.append(edges[-1] + self.lengths[file])
        shifts = [int.from_bytes(hashes[file][-8:], "big") for file in order]
        return _Line(order, shifts, place, edges, _cut(edges, self.slots))

    def _run(self, slot: int, epoch: int) -> Run:
        line = self._line(epoch)
        first = slot - self.first_slot
        begin, end = line.cuts[first : first + 2]
        parts = range(bisect_right(line.edges, begin) - 1, bisect_left(line.edges, end))
        segments = [self._segment(line, i, begin, end) for i in parts]
        whole = [segment.low == 0 and segment.high == KEYS for segment in segments]
        head = segments[0] if segments and not whole[0] else None
        tail = segments[-1] if len(segments) > 1 and not whole[-1] else None
        return Run(
            head,
            tuple(segments[head is not None : len(segments) - (tail is not None)]),
            tail,
        )

    def _segment(self, line: _Line, i: int, begin: int, end: int) -> Segment:
        first = line.edges[i]
        length = line.edges[i + 1] - line.edges[i]
        begin = max(begin - first, 0)
        end = min(end - first, length)
        text = int((end - begin) / self.slots * self.least)
        low = begin * KEYS // length
        high = end * KEYS // length
        file = line.order[i]
        return Segment(
            self.first_files[0] + file,
            low,
            high,
            line.shifts[i],
            end - begin,
            text,
            self.dealt[file],
        )

    def owners(self, file: int, epoch: int) -> range:
        line = self._line(epoch)
        first = self.first_slot
        i = line.place[file - self.first_files[0]]
        begin = bisect_right(line.cuts, line.edges[i]) - 1
        end = bisect_left(line.cuts, line.edges[i + 1])
        return range(first + begin, first + end)

    def unseen(self) -> float:
        """Return the fraction of the text that the slots have not read after an epoch's
        bytes, as far as cuts decide.
        """
        text = [
            sum(segment.text for segment in self.run(slot, 0).segments)
            for slot in range(self.slots)
        ]
        mean = sum(text) / self.slots
        return sum(max(0.0, own - mean) for own in text) / max(1, sum(text))

    def files_of(self, slots: range, epoch: int) -> set[int]:
        """Return the indices of the files that a rank with these slots reads in an
        epoch.
        """
        return {
            segment.file for slot in slots for segment in self.run(slot, epoch).segments
        }


def _cut(edges: list[int], slots: int) -> list[int]:
    """Cut the line, [slots + 1]: each run takes an equal part of what the runs before
    it have left.
    """
    cuts = [0]
    for left in range(slots, 1, -1):
        share = (edges[-1] - cuts[-1]) // left
        cut = cuts[-1] + share
        after = bisect_left(edges, cut)
        near = min(edges[after - 1 : after + 1], key=lambda edge: abs(edge - cut))
        cuts.append(near if abs(near - cut) * _EDGE < share else cut)
    return [*cuts, edges[-1]]


@dataclass(frozen=True)
class Share:
    """Describe one source's slots: ``slots`` of them from ``first`` on, of ``total`` in
    the run.
    """

    name: str
    first: int
    slots: int
    total: int
    asked: float  # the fraction of the tokens that the weight asks for

    def owns(self, file: DataFile) -> bool:
        """Return whether a ``prefixed`` file belongs to this source.

        One without a name owns all.
        """
        return not self.name or file.name.startswith(f"{self.name}/")

    @property
    def suffix(self) -> str:
        """Return what is appended to the names of the source's counters."""
        return f"/{self.name}" if self.name else ""

    def slots_among(self, slots: range) -> int:
        return len(
            range(
                max(self.first, slots.start), min(self.first + self.slots, slots.stop)
            )
        )

    @property
    def tokens(self) -> float:
        return self.slots / self.total

    def __str__(self) -> str:
        of_tokens = f"{self.tokens:.2%} of the tokens ({self.asked:.2%} asked for)"
        return f"{self.name}: {of_tokens}, {self.slots} of {self.total} slots"


def shares(weights: dict[str, float], slots: int) -> list[Share]:
    """Divide S slots among the sources by largest remainder of their weights (> 0);
    ties go to the first source.
    """
    # 0.1 is exactly one tenth
    exact = {name: Fraction(repr(weight)) for name, weight in weights.items()}
    quotas = {
        name: slots * weight / sum(exact.values()) for name, weight in exact.items()
    }
    counts = {name: math.floor(quota) for name, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda name: counts[name] - quotas[name])
    for name in by_remainder[: slots - sum(counts.values())]:
        counts[name] += 1
    if without := [name for name, count in counts.items() if not count]:
        least = math.ceil(slots / min(quotas.values()))
        asked = ", ".join(f"{float(quotas[name]):.2g}" for name in without)
        raise ConfigError(
            f"stream.sources: {slots} slots are too few for {', '.join(without)}, whose weight asks for {asked} of them: "
            f"raise training.global_batch_size (and stream.slots, if set) to have at least {least} slots, or the weight"
        )
    found = []
    first = 0
    for name, count in counts.items():
        found.append(Share(name, first, count, slots, float(quotas[name] / slots)))
        first += count
    return found


def far_from_weights(found: Sequence[Share]) -> str | None:
    """Return a warning if a source's share of the tokens is off by more than a tenth of
    what its weight asks for.
    """
    far = [
        str(share)
        for share in found
        if abs(share.tokens - share.asked) > 0.1 * share.asked
    ]
    if not far:
        return None
    return (
        f"there are too few slots to follow the weights of stream.sources: {'; '.join(far)}. Raise "
        "training.global_batch_size (and stream.slots, if it is set)"
    )


def prefixed(name: str, files: Sequence[DataFile]) -> list[DataFile]:
    """Put the source's name before its files' names, because other sources may have
    files of the same names.
    """
    return [replace(file, name=f"{name}/{file.name}") for file in files]


class Mixture(Assignment):
    """Compute all slots' runs, with one ``Assignment`` for each source."""

    def __init__(
        self, files: Sequence[DataFile], shares: Sequence[Share], seed: int
    ) -> None:
        """``files`` are the ``prefixed`` files of all sources, in the order of
        ``shares``.
        """
        self.slots = sum(share.slots for share in shares)
        self.seed = seed
        self._parts: list[Assignment] = []
        self.first_files = []
        self.dealt = []
        for share in shares:
            own = [file for file in files if share.owns(file)]
            self._parts.append(
                Assignment(own, share.slots, seed, share.first, len(self.dealt))
            )
            self.first_files += self._parts[-1].first_files
            self.dealt += self._parts[-1].dealt
        self._first_slots = [share.first for share in shares]
        self.run = lru_cache(maxsize=8 * self.slots)(self._run)

    def _run(self, slot: int, epoch: int) -> Run:
        return self._parts[bisect_right(self._first_slots, slot) - 1].run(slot, epoch)

    def owners(self, file: int, epoch: int) -> range:
        return self._parts[bisect_right(self.first_files, file) - 1].owners(file, epoch)
