"""Which slot reads which documents: decided by files, slots, seed and epoch, never by the ranks.

With n files, S slots and g = gcd(n, S), the documents of a file fall into C = S/g classes (index mod C). The (file, class)
pairs, file-major in an order shuffled by (seed, epoch), are cut into S runs of n/g pairs: slot s owns run s. Ranks own
contiguous slots, hence contiguous pairs, so a file is read by the few ranks whose pairs it holds: at most n + ranks reads.

A slot's run is the end of one file (``head``), whole files (``body``), and the beginning of another (``tail``). Head and tail are
shared with the neighbours. Read one after the other, neighbours would be at different places of the shared file, and a
rank would have to read it twice or hold it in memory. So a slot *interleaves* head, body and tail in proportion to their
classes: every slot then is at the same fraction of every file it shares, up to the spread of document lengths, and one
pass over a file serves all slots of a rank.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class Segment:
    """Documents of one file that a slot owns: those with ``low ≤ index % classes < high``."""

    file: int
    low: int
    high: int
    classes: int

    @property
    def width(self) -> int:
        return self.high - self.low

    def index(self, k: int) -> int:
        """Index in the file of the segment's k-th document."""
        return k // self.width * self.classes + self.low + k % self.width


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
        """Classes of head, body and tail: their shares in the interleaving."""
        return (
            self.head.width if self.head else 0,
            sum(s.width for s in self.body),
            self.tail.width if self.tail else 0,
        )


class Assignment:
    """Runs of all slots."""

    def __init__(self, names: list[str], slots: int, seed: int) -> None:
        """Args:
        names: file names, which with seed and epoch decide the order. slots: S. seed: of the stream.
        """
        self.names, self.slots, self.seed = names, slots, seed
        common = math.gcd(len(names), slots)
        self.classes = slots // common
        self.pairs_per_slot = len(names) // common
        self.order = lru_cache(maxsize=4)(self._order)
        self.run = lru_cache(maxsize=8 * slots)(self._run)

    def _order(self, epoch: int) -> list[int]:
        # By hash rather than a library's shuffle: the order must outlive versions of Python and numpy.
        keys = [hashlib.sha256(f"{self.seed}/{epoch}/{name}".encode()).digest() for name in self.names]
        return sorted(range(len(keys)), key=keys.__getitem__)

    def _run(self, slot: int, epoch: int) -> Run:
        order, c = self.order(epoch), self.classes
        first, end = slot * self.pairs_per_slot, (slot + 1) * self.pairs_per_slot
        segments = [
            Segment(order[p], max(first - p * c, 0), min(end - p * c, c), c)
            for p in range(first // c, (end - 1) // c + 1)
        ]
        head = segments[0] if segments[0].width < c else None
        tail = segments[-1] if segments[-1].width < c and len(segments) > 1 else None
        body = segments[bool(head) : len(segments) - bool(tail)]
        return Run(head, tuple(body), tail)

    def files_of(self, slots: range, epoch: int) -> set[int]:
        """The files that a rank with these slots reads in an epoch."""
        return {segment.file for slot in slots for segment in self.run(slot, epoch).segments}
