"""``Assignment`` decides which documents each slot reads in each epoch.

This module reads no file. The assignment depends on the files, the number of slots, the
seed and the epoch, but not on the number of ranks.

In each epoch, the files of a source are laid end to end on a line and the line is cut
into one *run* per slot::

    files   |    f3    | f0 |        f2        |   f1    |     in an order that (seed, epoch) decides
    runs    |     slot 0     |     slot 1     |   slot 2   |     of equal length

A file's length on the line is its size in bytes. If the files of a source differ in
their text per byte, a file's length is its size times its text per byte. A rank owns
neighbouring slots, and therefore one stretch of the line. A rank reads only the files
of its stretch. In one epoch, R ranks together therefore open F files at most F + R
times.

A run consists of the end of one file (*head*), whole files (*body*) and the beginning
of one file (*tail*). The slot alternates between these parts, so that it is always at
the same fraction of each part. All slots that share a file are therefore at about the
same place in the file, and a rank can serve all its slots with one pass over the file.

When a cut falls inside a file, each document of the file has a *key*, which decides its
slot: (index · STEP + shift) mod 2⁶⁴. Keys are spread evenly over 0 … 2⁶⁴, so a slot
whose run covers a fraction of the file owns the same fraction of the keys. If the file
has an index with enough blocks, each block has a key instead of each document, and a
rank skips the blocks of other ranks (see ``blocks``).

With several sources ([[stream.sources]]), each source has its own slots, lines and
epochs, as if it were alone. Its name is part of its files' names, so that two sources
read the same files in different orders.
"""

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain
from typing import Any

from titan_disp.data.blocks import STEP, Blocks, Visits
from titan_disp.data.listing import DataFile
from titan_disp.errors import ConfigError

# part of the fingerprint: increment it whenever the same position would mean other
# documents
VERSION = 6
KEYS = 1 << 64
# A cut that is closer to a file's edge than 1/8 of a run moves to the edge. Otherwise, a
# slot would read a whole file for a very small part of it.
_MIN_PART = 8
# If a piece of a file that is as long as a run has at least this many blocks, the
# slots share the file's blocks instead of its documents.
_MIN_BLOCKS = 16
_CACHED_NUMBERS = 1 << 18  # bounds the cached lines to about 20 MB


@dataclass(frozen=True)
class Segment:
    """The documents of one file that a slot owns: those whose key is in [low, high)."""

    file: int  # index among the files of all sources
    low: int  # first key, from 0
    high: int  # key after the last one, at most 2⁶⁴
    shift: int  # added to all keys, see ``key``
    length: int  # length on the line, in units of 1/S byte
    text: int = 0  # estimated bytes of text
    # Whether a slot owns whole blocks of the file. Each *unit* of a file is owned by
    # one slot. The units are the visits of the file's blocks if ``dealt``, else its
    # documents.
    dealt: bool = False

    @property
    def whole(self) -> bool:
        """Whether the slot owns all documents of the file."""
        return self.low == 0 and self.high == KEYS

    def key(self, unit: int) -> int:
        """Return the key, 0 to 2⁶⁴ − 1, of a unit. ``unit`` is the number of a visit if
        blocks are dealt out, else the index of a document in the file.
        """
        return (unit * STEP + self.shift) % KEYS

    def owns(self, unit: int) -> bool:
        """Return whether the slot owns a unit, which is numbered as in ``key``."""
        return self.low <= self.key(unit) < self.high

    def owns_any(self, start: int, end: int) -> bool:
        """Return whether the slot owns any of the units ``start`` to ``end`` − 1."""
        return any(map(self.owns, range(start, end)))

    def visits(self, blocks: Blocks | None) -> Visits | None:
        """Return the order in which a pass reads the ``blocks`` of the segment's file,
        or None if the file has no blocks.

        If slots own whole blocks of the file, each epoch has a different order.
        Otherwise, the blocks are read in stored order.
        """
        if blocks is None:
            return None
        return Visits(blocks, self.shift if self.dealt else None)


class Part(IntEnum):
    """The parts of a run. Positions in checkpoints contain these numbers."""

    HEAD = 0
    BODY = 1
    TAIL = 2


@dataclass(frozen=True)
class Run:
    """The segments, at least one, that one slot reads in one epoch.

    Attributes:
        parts: the segments of each part that is not empty. The head is one segment: the
            end of a file, or any piece of a file if the run lies within this file. The
            body is any number of whole files. The tail is one segment: the beginning of
            a file.
    """

    parts: dict[Part, list[Segment]]

    @cached_property
    def lengths(self) -> dict[Part, int]:
        """The length of each part on the line, in units of 1/S byte. The slot takes text
        from the parts in this proportion.
        """
        return {
            part: sum(segment.length for segment in segments)
            for part, segments in self.parts.items()
        }

    @property
    def segments(self) -> list[Segment]:
        """All segments of the run, in the order of the line."""
        return [*chain.from_iterable(self.parts.values())]


@dataclass(frozen=True)
class _Line:
    """The files of one epoch laid end to end, and the cuts between the slots' runs.

    Edges and cuts are in units of 1/S byte, where S is the number of slots, so that
    even one byte can be cut into S runs.
    """

    order: list[int]  # for each place on the line, the file
    edges: list[int]  # for each place, where the file begins; then the end of the line
    cuts: list[int]  # for each slot, where its run begins; then the end of the line


@dataclass(frozen=True)
class Share:
    """The slots of one source. Their number is ``slots``, of the run's ``total`` slots,
    and they are numbered from ``first`` on.
    """

    name: str
    first: int
    slots: int
    total: int
    asked: float  # the source's weight divided by the sum of the weights

    def owns(self, file: DataFile) -> bool:
        """Return whether a file, which ``prefixed`` has renamed, belongs to this
        source.

        All files belong to a source without a name.
        """
        return not self.name or file.name.startswith(f"{self.name}/")

    def slots_among(self, slots: range) -> int:
        """Return how many of these slots belong to this source."""
        return len(
            range(
                max(self.first, slots.start), min(self.first + self.slots, slots.stop)
            )
        )

    @property
    def tokens(self) -> float:
        """The fraction of the run's tokens that come from this source, 0 to 1. Every
        slot supplies the same number of tokens.
        """
        return self.slots / self.total

    def __str__(self) -> str:
        of_tokens = f"{self.tokens:.2%} of the tokens ({self.asked:.2%} asked for)"
        return f"{self.name}: {of_tokens}, {self.slots} of {self.total} slots"


class _Source:
    """The runs of one source's slots.

    Outside of this class, slots are numbered consecutively over all sources, and so are
    files. This source's numbers begin at ``first_slot`` and ``first_file``.
    """

    def __init__(
        self, files: Sequence[DataFile], share: Share, seed: int, first_file: int
    ) -> None:
        self.names = [file.name for file in files]
        self.slots = share.slots
        self.first_slot = share.first
        self.first_file = first_file
        self.seed = seed
        densities = [file.density for file in files if file.density]
        self.min_density = min(densities, default=1.0)
        # An empty file has a length of one byte, because a slot must read the file to
        # report that it is empty.
        self.lengths = [
            max(round(file.size * file.density / self.min_density), 1) * self.slots
            for file in files
        ]
        run_length = sum(self.lengths) // self.slots  # which divides each length
        self.dealt = [
            file.blocks is not None
            and len(file.blocks) * run_length >= _MIN_BLOCKS * length
            for file, length in zip(files, self.lengths, strict=True)
        ]
        # If there are few documents, slots can be many epochs apart, and each epoch has
        # its own line.
        cached_lines = max(8, _CACHED_NUMBERS // (len(files) + self.slots))
        self._line = lru_cache(maxsize=cached_lines)(self._make_line)

    def _hash(self, epoch: int, file: int) -> bytes:
        # A hash instead of a library's shuffle, because the order must not change with
        # the version of Python or numpy. Names of files need not be UTF-8.
        text = f"{self.seed}/{epoch}/{self.names[file]}"
        return hashlib.sha256(text.encode(errors="surrogateescape")).digest()

    def _make_line(self, epoch: int) -> _Line:
        order = sorted(range(len(self.names)), key=partial(self._hash, epoch))
        edges = list(accumulate((self.lengths[file] for file in order), initial=0))
        return _Line(order, edges, cuts=_cut(edges, self.slots))

    def run(self, slot: int, epoch: int) -> Run:
        """Return what one of the source's slots reads in an epoch."""
        line = self._line(epoch)
        i = slot - self.first_slot
        begin, end = line.cuts[i : i + 2]
        parts: dict[Part, list[Segment]] = {}
        for place in _overlapping(line.edges, begin, end):
            segment = self._segment(epoch, place, begin, end)
            part = Part.BODY
            if not segment.whole:  # only the first or last file
                part = Part.TAIL if parts else Part.HEAD
            parts.setdefault(part, []).append(segment)
        return Run(parts)

    def _segment(self, epoch: int, place: int, begin: int, end: int) -> Segment:
        """Return the part of a file between the points ``begin`` and ``end`` of the
        line. The file is the one at ``place`` in the order of the line.
        """
        line = self._line(epoch)
        file = line.order[place]
        length = self.lengths[file]
        begin = max(begin - line.edges[place], 0)
        end = min(end - line.edges[place], length)
        return Segment(
            file=self.first_file + file,
            low=begin * KEYS // length,
            high=end * KEYS // length,
            shift=int.from_bytes(self._hash(epoch, file)[-8:], "big"),
            length=end - begin,
            text=int((end - begin) / self.slots * self.min_density),
            dealt=self.dealt[file],
        )

    def owners(self, file: int, epoch: int) -> range:
        """Return the slots that own documents of one of the source's files."""
        line = self._line(epoch)
        place = line.order.index(file - self.first_file)
        begin, end = line.edges[place : place + 2]
        slots = _overlapping(line.cuts, begin, end)
        return range(self.first_slot + slots.start, self.first_slot + slots.stop)


class Assignment:
    """The runs of all slots in every epoch: ``run(slot, epoch)`` returns a ``Run``.

    Attributes:
        slots: the number of slots.
        seed: the seed of the order of the files.
        first_files: the index of each source's first file.
        dealt: for each file, whether slots own whole blocks of it.
        run: ``_run`` with a cache of its results.
    """

    def __init__(
        self, files: Sequence[DataFile], shares: Sequence[Share], seed: int
    ) -> None:
        """Assign files to slots.

        Args:
            files: the files of all sources, in the order of ``shares``. If there are
                several sources, ``prefixed`` has renamed the files. Only their names,
                sizes, densities and blocks matter.
            shares: each source's slots.
            seed: the seed of the order of the files.
        """
        self._files = files
        self._shares = shares
        self.slots = sum(share.slots for share in shares)
        self.seed = seed
        self.first_files: list[int] = []
        self.dealt: list[bool] = []
        self._first_slots = [share.first for share in shares]
        self._sources: list[_Source] = []
        for share in shares:
            first_file = len(self.dealt)
            of_source = [file for file in files if share.owns(file)]
            source = _Source(of_source, share, seed, first_file)
            self._sources.append(source)
            self.first_files.append(first_file)
            self.dealt += source.dealt
        self.run = lru_cache(maxsize=8 * self.slots)(self._run)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the constructor's arguments, because the caches cannot be pickled."""
        return Assignment, (self._files, self._shares, self.seed)

    def _run(self, slot: int, epoch: int) -> Run:
        """Return what a slot reads in an epoch. Slots and epochs count from 0."""
        source = self._sources[bisect_right(self._first_slots, slot) - 1]
        return source.run(slot, epoch)

    def slots_of_ranks(self, per_rank: int) -> Iterator[range]:
        """Yield the slots of each rank: ``per_rank`` slots, or one if ``per_rank`` is
        0. The last rank may have fewer slots.
        """
        step = max(1, per_rank)
        for first in range(0, self.slots, step):
            yield range(first, min(first + step, self.slots))

    def owners(self, file: int, epoch: int) -> range:
        """Return the slots, at least one, that own documents of a file in an epoch.
        They are neighbours on the line.
        """
        source = self._sources[bisect_right(self.first_files, file) - 1]
        return source.owners(file, epoch)

    def unseen(self) -> float:
        """Return the estimated fraction of all text, 0 to 1, that is unread when every
        slot has read as many bytes as an average run of epoch 0 has. There must be only
        one source.

        Slots read equally fast. The unread text is therefore the excess of longer runs
        over the average run.
        """
        texts = [
            sum(segment.text for segment in self.run(slot, 0).segments)
            for slot in range(self.slots)
        ]
        mean = sum(texts) / self.slots
        return sum(max(0.0, text - mean) for text in texts) / max(1, sum(texts))

    def files_of(self, slots: range, epoch: int) -> set[int]:
        """Return the indices of the files that a rank with these slots reads in an
        epoch.
        """
        files: set[int] = set()
        for slot in slots:
            files.update(segment.file for segment in self.run(slot, epoch).segments)
        return files


def _overlapping(edges: list[int], begin: int, end: int) -> range:
    """Return the range of all i for which the intervals [edges[i], edges[i + 1]] and
    [begin, end] share more than a point.

    ``edges`` ascend. ``begin`` < ``end`` lie between the first and the last edge.
    """
    return range(bisect_right(edges, begin) - 1, bisect_left(edges, end))


def _cut(edges: list[int], slots: int) -> list[int]:
    """Return where each slot's run begins on the line, and where the last run ends:
    ``slots`` + 1 numbers.

    The line is cut from its beginning. Each cut gives the next slot 1/n of the uncut
    rest of the line, if n slots have no run yet. A cut close to a file's edge moves to
    the edge.
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


def one_share(slots: int) -> list[Share]:
    """Return the share of a run's only source, which has no name and owns all slots."""
    return [Share("", first=0, slots=slots, total=slots, asked=1.0)]


def shares(weights: dict[str, float], slots: int) -> list[Share]:
    """Return each source's share of the slots, in proportion to its weight (> 0).

    The shares have the order of ``weights``, and each share begins where the one before
    it ends. Slots that remain after rounding down go to the sources with the largest
    remainders; among equal remainders, the first source is served first. Raises
    ConfigError if a source gets no slot.
    """
    # repr, so that 0.1 is exactly one tenth
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
            f"stream.sources: {slots} slots are too few for {', '.join(without)}, "
            f"whose weight asks for {asked} of them: raise training.global_batch_size "
            f"(and stream.slots, if it is set) until there are at least {least} slots, "
            "or raise the weight"
        )
    first_slots = accumulate(counts.values(), initial=0)
    return [
        Share(name, first, counts[name], slots, asked=float(quotas[name] / slots))
        for name, first in zip(counts, first_slots, strict=False)
    ]


def far_from_weights(shares: Sequence[Share]) -> str | None:
    """Return a warning if a source's share of the tokens differs by more than 10 % from
    the share that its weight asks for, else None.
    """
    far = [
        str(share)
        for share in shares
        if abs(share.tokens - share.asked) > 0.1 * share.asked
    ]
    if not far:
        return None
    return (
        "there are too few slots to follow the weights of stream.sources: "
        f"{'; '.join(far)}. Raise training.global_batch_size (and stream.slots, if it "
        "is set)"
    )


def prefixed(name: str, files: Sequence[DataFile]) -> list[DataFile]:
    """Return a source's files, renamed to NAME/FILE, because other sources may have
    files of the same names.
    """
    return [replace(file, name=f"{name}/{file.name}") for file in files]
