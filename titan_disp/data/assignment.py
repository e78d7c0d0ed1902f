"""Decide which documents each slot reads in each epoch.

The result depends on the files, the number of slots, the seed and the epoch. It does
not depend on the number of ranks.

In each epoch, the files of a source are laid end to end on a line and the line is cut
into one *run* per slot::

    files   |    f3    | f0 |        f2        |   f1    |     in an order that (seed, epoch) decides
    runs    |     slot 0     |     slot 1     |   slot 2   |     of equal length

The length of a file on the line is its size in bytes. If the files of a source hold
different amounts of text per byte, it is the size times that amount. A rank owns
neighbouring slots, and therefore one stretch of the line. It reads only the files of
this stretch, so all ranks together open a file at most files + ranks times.

A run consists of the end of one file (*head*), whole files (*body*) and the beginning
of one file (*tail*). The slot alternates between them so that it is always at the same
fraction of each. All slots that share a file are therefore at about the same place in
it, and a rank can serve all its slots with one pass over the file.

When a cut falls inside a file, the file's documents are divided by *key*: (index · STEP
+ shift) mod 2⁶⁴. Keys are spread evenly over 0 … 2⁶⁴, so a slot whose run covers a
fraction of the file owns the same fraction of the keys. If the file has an index with
enough blocks, whole blocks are divided in this way instead, and a rank skips the blocks
of other ranks (see ``blocks``).

With several sources ([[stream.sources]]), each source has its own slots, lines and
epochs, as if it were alone. Its name is part of its files' names, so that two sources
with the same files read them in different orders.
"""

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np

from titan_disp.data.blocks import STEP, Blocks, Visits
from titan_disp.data.listing import DataFile
from titan_disp.errors import ConfigError

# part of the fingerprint: increment it whenever the same position would mean other
# documents
VERSION = 6
KEYS = 1 << 64
# a cut closer to a file's edge than 1/8 of a run moves to it: for a sliver, a slot
# would read the file
_MIN_PART = 8
# blocks are divided, instead of documents, if each slot would get at least this many
_MIN_BLOCKS = 16
_KEYS_AT_ONCE = 1 << 16
_CACHED_NUMBERS = 1 << 18  # bounds the cached lines to about 20 MB


@dataclass(frozen=True)
class Segment:
    """The documents of one file that a slot owns: those whose key is in [low, high)."""

    file: int  # index of the file
    low: int
    high: int
    shift: int  # of the keys, see ``key``
    length: int  # on the line, in 1/S byte
    text: int = 0  # estimated bytes of text
    # whether the file is divided by blocks. ``key`` then takes the number of a visit of
    # a block
    dealt: bool = False

    @property
    def whole(self) -> bool:
        return self.low == 0 and self.high == KEYS

    def key(self, index: int) -> int:
        return (index * STEP + self.shift) % KEYS

    def visits(self, blocks: Blocks | None) -> Visits | None:
        """Return the order in which this epoch reads the file's blocks, or None if it
        has none.
        """
        return (
            None
            if blocks is None
            else Visits(blocks, self.shift if self.dealt else None)
        )

    def owns_any(self, start: int, end: int) -> bool:
        """Return whether any of the documents ``start`` … ``end`` − 1 belongs to this
        segment.
        """
        low = np.uint64(self.low)
        last = np.uint64(self.high - 1)  # ``high`` itself may be 2⁶⁴
        for first in range(start, end, _KEYS_AT_ONCE):
            index = np.arange(first, min(first + _KEYS_AT_ONCE, end), dtype=np.uint64)
            # uint64 wraps around: this is modulo KEYS
            keys = index * np.uint64(STEP) + np.uint64(self.shift)
            if ((low <= keys) & (keys <= last)).any():
                return True
        return False


@dataclass(frozen=True)
class Run:
    """What one slot reads in one epoch: the end of a file, whole files, and the
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
        """The lengths of head, body and tail.

        The slot takes text from them in these proportions.
        """
        return (
            self.head.length if self.head else 0,
            sum(segment.length for segment in self.body),
            self.tail.length if self.tail else 0,
        )


@dataclass(frozen=True)
class _Line:
    """The files of one epoch laid end to end, and the cuts between the slots' runs.

    Edges and cuts are in units of 1/S byte, where S is the number of slots: even one
    byte can be cut into S runs.
    """

    order: list[int]  # for each place on the line, the file
    place: list[int]  # for each file, its place
    shifts: list[int]  # for each place, the shift of the file's keys
    edges: list[int]  # for each place, where the file begins; then the end of the line
    cuts: list[int]  # for each slot, where its run begins; then the end of the line


class Assignment:
    """The runs of all slots in every epoch: ``run(slot, epoch)`` returns one."""

    def __init__(
        self,
        files: Sequence[DataFile],
        slots: int,
        seed: int,
        first_slot: int = 0,
        first_file: int = 0,
    ) -> None:
        """``files`` are the files of one source.

        Only their names, sizes and densities matter.

        ``first_slot`` and ``first_file`` are the numbers of its first slot and file, if
        other sources come before it.
        """
        self.names = [file.name for file in files]
        self.slots = slots
        self.seed = seed
        self.first_slot = first_slot
        self.first_files = [first_file]  # one for each source, see ``Mixture``
        self.min_density = min(
            (file.density for file in files if file.density), default=1.0
        )
        # An empty file has a length of one byte, because some slot must read it to
        # report that it is empty.
        self.lengths = [
            max(round(file.size * file.density / self.min_density), 1) * slots
            for file in files
        ]
        self.dealt = [
            file.blocks is not None
            and len(file.blocks) * sum(self.lengths) >= _MIN_BLOCKS * slots * length
            for file, length in zip(files, self.lengths, strict=True)
        ]
        # If there are few documents, slots can be many epochs apart, and each epoch has
        # its own line.
        self._line = lru_cache(maxsize=max(8, _CACHED_NUMBERS // (len(files) + slots)))(
            self._make_line
        )
        self.run = lru_cache(maxsize=8 * slots)(self._run)

    def _make_line(self, epoch: int) -> _Line:
        hashes = [_hash(f"{self.seed}/{epoch}/{name}") for name in self.names]
        order = sorted(range(len(hashes)), key=lambda file: hashes[file])
        place = [0] * len(order)
        for i, file in enumerate(order):
            place[file] = i
        edges = list(accumulate((self.lengths[file] for file in order), initial=0))
        shifts = [int.from_bytes(hashes[file][-8:], "big") for file in order]
        return _Line(order, place, shifts, edges, cuts=_cut(edges, self.slots))

    def _run(self, slot: int, epoch: int) -> Run:
        line = self._line(epoch)
        begin = line.cuts[slot - self.first_slot]
        end = line.cuts[slot - self.first_slot + 1]
        segments = [
            self._segment(line, i, begin, end)
            for i in _overlapping(line.edges, begin, end)
        ]
        # Only the first and the last segment can be parts of files.
        head = tail = None
        if not segments[0].whole:
            head = segments[0]
        if len(segments) > 1 and not segments[-1].whole:
            tail = segments[-1]
        return Run(head, tuple(segment for segment in segments if segment.whole), tail)

    def _segment(self, line: _Line, place: int, begin: int, end: int) -> Segment:
        """Return the part between ``begin`` and ``end`` of the file at this place on
        the line.
        """
        file = line.order[place]
        length = self.lengths[file]
        begin = max(begin - line.edges[place], 0)
        end = min(end - line.edges[place], length)
        return Segment(
            file=self.first_files[0] + file,
            low=begin * KEYS // length,
            high=end * KEYS // length,
            shift=line.shifts[place],
            length=end - begin,
            text=int((end - begin) / self.slots * self.min_density),
            dealt=self.dealt[file],
        )

    def owners(self, file: int, epoch: int) -> range:
        """Return the slots that own documents of a file in an epoch."""
        line = self._line(epoch)
        place = line.place[file - self.first_files[0]]
        runs = _overlapping(line.cuts, line.edges[place], line.edges[place + 1])
        return range(self.first_slot + runs.start, self.first_slot + runs.stop)

    def unseen(self) -> float:
        """Estimate the fraction of the text that is still unread when the slots have
        read one epoch's number of bytes.

        Slots read equally fast, so this is the text by which some runs are longer than
        the average run.
        """
        text = [
            sum(segment.text for segment in self.run(slot, 0).segments)
            for slot in range(self.slots)
        ]
        mean = sum(text) / self.slots
        return sum(max(0.0, of_slot - mean) for of_slot in text) / max(1, sum(text))

    def files_of(self, slots: range, epoch: int) -> set[int]:
        """Return the indices of the files that a rank with these slots reads in an
        epoch.
        """
        return {
            segment.file for slot in slots for segment in self.run(slot, epoch).segments
        }


def _hash(name: str) -> bytes:
    """A hash instead of a library's shuffle: the order must not change with the version
    of Python or numpy.
    """
    # names of files need not be UTF-8
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def _overlapping(edges: list[int], begin: int, end: int) -> range:
    """Return the numbers of the intervals [edges[i], edges[i + 1]) that overlap [begin,
    end).
    """
    return range(bisect_right(edges, begin) - 1, bisect_left(edges, end))


def _cut(edges: list[int], slots: int) -> list[int]:
    """Return where each slot's run begins on the line, and where the last one ends.

    A run gets an equal share of what the runs before it have left. A cut close to the
    edge of a file moves to the edge.
    """
    end = edges[-1]
    cuts = [0]
    for remaining_slots in range(slots, 1, -1):
        share = (end - cuts[-1]) // remaining_slots
        cut = cuts[-1] + share
        i = bisect_left(edges, cut)
        edge = min(edges[i - 1], edges[i], key=lambda edge: abs(edge - cut))
        is_close = abs(edge - cut) * _MIN_PART < share
        cuts.append(edge if is_close else cut)
    return [*cuts, end]


@dataclass(frozen=True)
class Share:
    """One source's slots: ``slots`` of the run's ``total``, from number ``first``
    on.
    """

    name: str
    first: int
    slots: int
    total: int
    asked: float  # the source's weight divided by the sum of the weights

    def owns(self, file: DataFile) -> bool:
        """Return whether a ``prefixed`` file belongs to this source.

        A source without a name owns all files.
        """
        return not self.name or file.name.startswith(f"{self.name}/")

    @property
    def suffix(self) -> str:
        """What is appended to the names of the source's counters."""
        return f"/{self.name}" if self.name else ""

    def slots_among(self, slots: range) -> int:
        """Return how many of ``slots`` belong to this source."""
        return len(
            range(
                max(self.first, slots.start), min(self.first + self.slots, slots.stop)
            )
        )

    @property
    def tokens(self) -> float:
        """The fraction of the run's tokens that come from this source.

        Every slot supplies the same number.
        """
        return self.slots / self.total

    def __str__(self) -> str:
        of_tokens = f"{self.tokens:.2%} of the tokens ({self.asked:.2%} asked for)"
        return f"{self.name}: {of_tokens}, {self.slots} of {self.total} slots"


def shares(weights: dict[str, float], slots: int) -> list[Share]:
    """Divide the slots among the sources in proportion to their weights (> 0).

    Slots that remain after rounding down go to the largest remainders, and among equal
    ones to the first source. Raises ConfigError if a source gets no slot.
    """
    # 0.1 is exactly one tenth
    exact = {name: Fraction(repr(weight)) for name, weight in weights.items()}
    quotas = {
        name: slots * weight / sum(exact.values()) for name, weight in exact.items()
    }
    counts = {name: math.floor(quota) for name, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda name: counts[name] - quotas[name])
    unassigned = slots - sum(counts.values())
    for name in by_remainder[:unassigned]:
        counts[name] += 1
    if without := [name for name, count in counts.items() if not count]:
        least = math.ceil(slots / min(quotas.values()))
        asked = ", ".join(f"{float(quotas[name]):.2g}" for name in without)
        raise ConfigError(
            f"stream.sources: {slots} slots are too few for {', '.join(without)}, whose weight asks for {asked} of them: "
            f"raise training.global_batch_size (and stream.slots, if set) to have at least {least} slots, or the weight"
        )
    first_slots = accumulate(counts.values(), initial=0)
    return [
        Share(name, first, counts[name], slots, asked=float(quotas[name] / slots))
        for name, first in zip(counts, first_slots, strict=False)
    ]


def far_from_weights(shares: Sequence[Share]) -> str | None:
    """Return a warning if a source's share of the tokens differs from its weight by
    more than a tenth of the weight.
    """
    far = [
        str(share)
        for share in shares
        if abs(share.tokens - share.asked) > 0.1 * share.asked
    ]
    if not far:
        return None
    return (
        f"there are too few slots to follow the weights of stream.sources: {'; '.join(far)}. Raise "
        "training.global_batch_size (and stream.slots, if it is set)"
    )


def prefixed(name: str, files: Sequence[DataFile]) -> list[DataFile]:
    """Put the source's name before the names of its files, because other sources may
    have files of the same names.
    """
    return [replace(file, name=f"{name}/{file.name}") for file in files]


class Mixture(Assignment):
    """The runs of all slots of several sources.

    Each source has an ``Assignment`` of its own.
    """

    def __init__(
        self, files: Sequence[DataFile], shares: Sequence[Share], seed: int
    ) -> None:
        """``files`` are the ``prefixed`` files of all sources, in the order of
        ``shares``.
        """
        self.slots = sum(share.slots for share in shares)
        self.seed = seed
        self._sources: list[Assignment] = []
        self.first_files = []
        self.dealt = []
        for share in shares:
            of_source = [file for file in files if share.owns(file)]
            source = Assignment(
                of_source, share.slots, seed, share.first, first_file=len(self.dealt)
            )
            self._sources.append(source)
            self.first_files += source.first_files
            self.dealt += source.dealt
        self._first_slots = [share.first for share in shares]
        self.run = lru_cache(maxsize=8 * self.slots)(self._run)

    def _run(self, slot: int, epoch: int) -> Run:
        source = bisect_right(self._first_slots, slot) - 1
        return self._sources[source].run(slot, epoch)

    def owners(self, file: int, epoch: int) -> range:
        source = bisect_right(self.first_files, file) - 1
        return self._sources[source].owners(file, epoch)
