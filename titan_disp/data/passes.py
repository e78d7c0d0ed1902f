"""A pass is one sequential read of a file, which serves all slots of a rank in one
epoch.
"""

import concurrent.futures as futures
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchtitan.tools.logging import logger

from titan_disp.data.assignment import Segment
from titan_disp.data.documents import Documents
from titan_disp.data.formats import DamagedFile, Record, size_of
from titan_disp.data.listing import DataFile
from titan_disp.data.options import StreamOptions
from titan_disp.data.position import Position
from titan_disp.errors import counted

PROGRESS_SECONDS = 10.0
# a shuffling window holds fewer documents if they are longer than this on average
DOCUMENT_BYTES = 1 << 13


@dataclass
class _Queue:
    """Hold documents of a shared file that were read for a slot and that it has not
    taken yet.
    """

    segment: Segment  # the slot's documents of the file
    start: int  # index of the first document that the slot wants
    documents: deque = field(default_factory=deque)  # (index, document) of each
    bytes: int = 0  # of these documents
    fed: bool = True  # whether the pass still adds documents


class _Pass:
    """Read a file once and sequentially for those slots of this rank that own documents
    of it.
    """

    def __init__(
        self, epoch: int, documents: Documents, queues: dict[int, _Queue]
    ) -> None:
        self.epoch = epoch
        self.documents = documents
        self.queues = queues
        documents.wants = self.wants
        self.queued = 0  # bytes in all queues
        self.counted = 0  # stored bytes at the last call of newly_read
        # all documents read, whichever slot owns them
        self.read = 0
        self.read_bytes = 0
        self.ended = False
        self.damage: str | None = None
        # Sorted by the first of their keys, for bisection.
        owners = sorted(
            (queue.segment.low, queue.segment.high, slot)
            for slot, queue in queues.items()
        )
        self.lows, self.highs, self.slots = (
            [owner[i] for owner in owners] for i in range(3)
        )
        # the same in all segments of a file
        self.key = next(iter(queues.values())).segment.key

    def owner(self, unit: int) -> _Queue | None:
        """Return the queue of the slot that owns a document, or a visit if blocks are
        dealt out.
        """
        key = self.key(unit)
        i = bisect_right(self.lows, key) - 1
        return (
            self.queues.get(self.slots[i]) if i >= 0 and key < self.highs[i] else None
        )

    def wants(self, visit: int) -> bool:
        """Return whether a visit gives any slot a document."""
        visits = self.documents.visits
        if visits is None or not visits.dealt:
            return True
        queue = self.owner(visit)
        return queue is not None and queue.fed and queue.start < visits.first[visit + 1]

    def advance(self, asking: int) -> None:
        """Read one document for the slot that owns it.

        The queue of the slot that asks is always fed.
        """
        try:
            document = self.documents.read()
        except DamagedFile as error:
            self.damage = str(error)
            document = None
        if document is None:
            self.ended = True
            self.documents.close()
            return
        size = size_of(document)
        self.read += 1
        self.read_bytes += size
        index = self.documents.position - 1
        queue = self.owner(self.documents.unit)
        if queue is not None and queue.fed and index >= queue.start:
            queue.documents.append((index, document))
            queue.bytes += size
            self.queued += size
        if (
            self.queued > self.documents.options.queue_bytes
            and self.queued > self.limit()
        ):
            # To bound the memory, the slot furthest behind gets no more; it will read
            # the rest by a pass of its own.
            others = {s: q for s, q in self.queues.items() if s != asking and q.fed}
            if others:
                others[max(others, key=lambda s: others[s].bytes)].fed = False

    def newly_read(self) -> int:
        before = self.counted
        self.counted = self.documents.bytes_read
        return self.counted - before

    def limit(self) -> float:
        """Return the bytes that all queues may hold.

        A slot that fills its window reads a window ahead of the others.
        """
        options = self.documents.options
        mean = min(self.read_bytes / self.read, DOCUMENT_BYTES)
        return options.queue_bytes + len(self.queues) * options.shuffle_window * mean


class Passes:
    """Hold the open files of a rank, and what it has read of them."""

    def __init__(
        self,
        files: Sequence[DataFile],
        positions: Sequence[Position],
        options: StreamOptions,
    ) -> None:
        self.files = files
        self.positions = {position.slot: position for position in positions}
        self.options = options
        self._open: dict[int, list[_Pass]] = {}
        # For each file that was read to its end: its number of documents, and what was
        # damaged.
        self._ends: dict[int, tuple[int, str | None]] = {}
        # since the last call of bytes_read
        self._closed_bytes: Counter[tuple[int, int]] = Counter()

    def bytes_read(self) -> Counter[tuple[int, int]]:
        """Return the number of stored bytes read since the last call, by (epoch,
        file).
        """
        new = self._closed_bytes
        self._closed_bytes = Counter()
        for file, passes in self._open.items():
            for one in passes:
                new[one.epoch, file] += one.newly_read()
        return new

    def fetch(
        self, slot: int, epoch: int, segment: Segment, start: int
    ) -> tuple[int, Record | None, str | None]:
        """Return the first document of a segment at or after index ``start``, unparsed:
        (index, document, None).

        At the end of the file, it is (documents in the file, None, damage or None).
        ``start`` must not decrease.
        """
        mine = self._pass(slot, epoch, segment.file)
        if mine is None:
            count, damage = self._ends.get(segment.file, (None, None))
            if (
                count is not None
                and not segment.dealt
                and not segment.owns_any(start, count)
            ):
                return count, None, damage
            mine = self._begin(slot, epoch, segment, start)
        queue = mine.queues[slot]
        while True:
            while queue.documents:
                index, document = queue.documents.popleft()
                size = size_of(document)
                queue.bytes -= size
                mine.queued -= size
                if index >= start:
                    return index, document, None
            if not queue.fed:
                self._leave(slot, segment.file, mine)
                return self.fetch(slot, epoch, segment, start)
            if mine.ended:
                self._leave(slot, segment.file, mine)
                self._ends[segment.file] = mine.documents.position, mine.damage
                return mine.documents.position, None, mine.damage
            mine.advance(slot)

    def seek(self, executor: futures.Executor) -> None:
        """After a resume, pass over what was read before, in all files at once.

        Decompression releases the GIL.
        """
        waiting: set[futures.Future[None]] = set()
        for slot, position in self.positions.items():
            for segment, start in map(position.next, position.unread()):
                if self._pass(slot, position.epoch, segment.file) is None:
                    new = self._begin(slot, position.epoch, segment, start)
                    if new.documents.position:
                        waiting.add(executor.submit(new.documents.seek))
        every = len(waiting)
        began = time.monotonic()
        while waiting:
            _, waiting = futures.wait(waiting, timeout=PROGRESS_SECONDS)
            if waiting:
                done = every - len(waiting)
                seconds = time.monotonic() - began
                left = (
                    f", about {seconds * len(waiting) / done:.0f} s left"
                    if done
                    else ""
                )
                files = counted(every, "file")
                logger.info(
                    f"data: finding the place in {files}: {done} done in "
                    f"{seconds:.0f} s{left}"
                )

    def _pass(self, slot: int, epoch: int, file: int) -> _Pass | None:
        """Return the pass over a file for this slot and epoch, or None.

        Another slot may be an epoch ahead in it.
        """
        return next(
            (
                p
                for p in self._open.get(file, ())
                if p.epoch == epoch and slot in p.queues
            ),
            None,
        )

    def _begin(self, slot: int, epoch: int, segment: Segment, start: int) -> _Pass:
        """Begin a pass over a file for this slot and for the rank's other slots that
        still want it in this epoch.
        """
        queues = {slot: _Queue(segment, start)}
        for other in self.positions[slot].assignment.owners(segment.file, epoch):
            if (
                other != slot
                and other in self.positions
                and self._pass(other, epoch, segment.file) is None
            ):
                wanted = self.positions[other].wants(segment.file, epoch)
                if wanted is not None:
                    queues[other] = _Queue(*wanted)
        first = min(queue.start for queue in queues.values())
        file = self.files[segment.file]
        new = _Pass(
            epoch,
            Documents(file, self.options, first, segment.visits(file.blocks)),
            queues,
        )
        self._open.setdefault(segment.file, []).append(new)
        return new

    def leave(self, slot: int, epoch: int, file: int) -> None:
        """Drop a slot from a file's pass: it needs no more of the file in this
        epoch.
        """
        if (mine := self._pass(slot, epoch, file)) is not None:
            self._leave(slot, file, mine)

    def _leave(self, slot: int, file: int, left: _Pass) -> None:
        left.queued -= left.queues.pop(slot).bytes
        if not left.queues:
            left.documents.close()
            self._open[file].remove(left)
            self._closed_bytes[left.epoch, file] += left.newly_read()
            if not self._open[file]:
                del self._open[file]

    def close(self) -> None:
        for passes in self._open.values():
            for one in passes:
                one.documents.close()
