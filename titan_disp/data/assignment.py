"""Which slot reads which documents: decided by files, slots, seed and epoch, never by the ranks.

In every epoch the files stand in a line, shuffled by (seed, epoch), each as long as its stored bytes. The line is cut into S runs
of equal length: slot s owns run s. Ranks own contiguous slots, hence contiguous runs, so that a file is read by the few
ranks whose runs it lies in: at most files + ranks reads. A cut that would fall close to a file's edge is put there, since
a slot with a sliver of a file has to read all of it; the runs that follow divide the rest of the line among them.

A file in which cuts lie is dealt among its slots by its documents' *keys*, (index · STEP + shift) mod 2⁶⁴, which are spread
evenly from 0 to 2⁶⁴ however many documents there are. A slot whose run covers the file from fraction a to b owns the keys from
a · 2⁶⁴ to b · 2⁶⁴. Nobody needs to know the number of documents, which only a read of the whole file would tell.

A slot's run is the end of one file (``head``), whole files (``body``), and the beginning of another (``tail``). Head and tail are
shared with the neighbours. Read one after the other, neighbours would be at different places of the shared file, and a
rank would have to read it twice or hold it in memory. So a slot *interleaves* head, body and tail in proportion to their
bytes: every slot then is at the same fraction of every file it shares, up to the spread of document lengths, and one
pass over a file serves all slots of a rank.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from titan_disp.data.files import DataFile

VERSION = 5  # in the fingerprint: positions of another one mean other documents
KEYS = 1 << 64
STEP = 0x9E3779B97F4A7C15  # 2⁶⁴ / golden ratio, odd: the multiples of no other number are spread as evenly
_EDGE = 8  # a cut closer to the edge of a file than 1/8 of a run is put on the edge
_BLOCK = 1 << 16
_KEPT = 1 << 18  # files and cuts of all lines kept: about 20 MB


@dataclass(frozen=True)
class Segment:
    """Documents of one file that a slot owns in one epoch: those with ``low ≤ (index · STEP + shift) mod KEYS < high``.

    Attributes:
        length: its stored bytes, times the number of slots.
    """

    file: int
    low: int
    high: int
    shift: int
    length: int

    def key(self, index: int) -> int:
        """The key of the file's document ``index``, whoever owns it."""
        return (index * STEP + self.shift) % KEYS

    def owns_any(self, start: int, end: int) -> bool:
        """Whether a document from ``start`` to before ``end`` is of this segment."""
        low, high = np.uint64(self.low), np.uint64(self.high - 1)
        for first in range(start, end, _BLOCK):
            index = np.arange(first, min(first + _BLOCK, end), dtype=np.uint64)
            keys = index * np.uint64(STEP) + np.uint64(self.shift)  # modulo KEYS
            if ((low <= keys) & (keys <= high)).any():
                return True
        return False


@dataclass(frozen=True)
class Run:
    """What one slot reads in one epoch. ``body`` holds whole files; head and tail are partial files or None."""

    head: Segment | None
    body: tuple[Segment, ...]
    tail: Segment | None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Head, body and tail, as far as there are."""
        return tuple(s for s in (self.head, *self.body, self.tail) if s is not None)

    @cached_property
    def weights(self) -> tuple[int, int, int]:
        """Lengths of head, body and tail: their shares in the interleaving."""
        return (
            self.head.length if self.head else 0,
            sum(s.length for s in self.body),
            self.tail.length if self.tail else 0,
        )


@dataclass(frozen=True)
class _Line:
    """The files of one epoch, and where it is cut.

    Attributes:
        order: files as they stand in it. shifts: of their documents' keys.
        place: of each file, in ``order``.
        edges: where they begin, and the end of the last one. cuts: where the slots' runs begin, and the end of the last one.
    """

    order: list[int]
    shifts: list[int]
    place: list[int]
    edges: list[int]
    cuts: list[int]


class Assignment:
    """Runs of all slots."""

    def __init__(self, files: Sequence[DataFile], slots: int, seed: int) -> None:
        """Args:
        files: names and sizes, which with seed and epoch decide everything. slots: S. seed: of the stream.
        """
        self.names, self.slots, self.seed = [file.name for file in files], slots, seed
        self.first_files = [0]  # of each source: here is one
        # In S-ths of a byte: no run is empty, however many slots there are. An empty file is somebody's too, who reports it.
        self.lengths = [max(file.size, 1) * slots for file in files]
        # Where documents are few, slots are many epochs apart; the memory is bounded.
        self._line = lru_cache(maxsize=max(8, _KEPT // (len(files) + slots)))(self._make_line)
        self.run = lru_cache(maxsize=8 * slots)(self._run)

    def _make_line(self, epoch: int) -> _Line:
        # By hash rather than a library's shuffle: the order must outlive versions of Python and numpy.
        hashes = [hashlib.sha256(f"{self.seed}/{epoch}/{name}".encode()).digest() for name in self.names]
        order = sorted(range(len(hashes)), key=hashes.__getitem__)
        edges, place = [0], [0] * len(order)
        for i, file in enumerate(order):
            place[file] = i
            edges.append(edges[-1] + self.lengths[file])
        shifts = [int.from_bytes(hashes[file][-8:], "big") for file in order]
        return _Line(order, shifts, place, edges, _cut(edges, self.slots))

    def order(self, epoch: int) -> list[int]:
        """The files of an epoch, shuffled."""
        return self._line(epoch).order

    def _run(self, slot: int, epoch: int) -> Run:
        line = self._line(epoch)
        begin, end = line.cuts[slot], line.cuts[slot + 1]
        parts = range(bisect_right(line.edges, begin) - 1, bisect_left(line.edges, end))
        segments = [self._segment(line, i, begin, end) for i in parts]
        head = segments[0] if segments and not _is_whole(segments[0]) else None
        tail = segments[-1] if len(segments) > 1 and not _is_whole(segments[-1]) else None
        return Run(head, tuple(segments[head is not None : len(segments) - (tail is not None)]), tail)

    def _segment(self, line: _Line, i: int, begin: int, end: int) -> Segment:
        """The part from ``begin`` to ``end`` of the i-th file in the line."""
        first, length = line.edges[i], line.edges[i + 1] - line.edges[i]
        begin, end = max(begin - first, 0), min(end - first, length)
        return Segment(line.order[i], begin * KEYS // length, end * KEYS // length, line.shifts[i], end - begin)

    def owners(self, file: int, epoch: int) -> range:
        """The slots that own documents of a file."""
        line = self._line(epoch)
        i = line.place[file]
        return range(bisect_right(line.cuts, line.edges[i]) - 1, bisect_left(line.cuts, line.edges[i + 1]))

    def files_of(self, slots: range, epoch: int) -> set[int]:
        """The files that a rank with these slots reads in an epoch."""
        return {segment.file for slot in slots for segment in self.run(slot, epoch).segments}


def _is_whole(segment: Segment) -> bool:
    return segment.low == 0 and segment.high == KEYS


def _cut(edges: list[int], slots: int) -> list[int]:
    """``slots`` + 1 places from the first to the last edge: each run is an equal part of what the runs before it left."""
    cuts = [0]
    for left in range(slots, 1, -1):
        share = (edges[-1] - cuts[-1]) // left
        cut = cuts[-1] + share
        after = bisect_left(edges, cut)
        near = min(edges[after - 1 : after + 1], key=lambda edge: abs(edge - cut))
        cuts.append(near if abs(near - cut) * _EDGE < share else cut)
    return [*cuts, edges[-1]]
