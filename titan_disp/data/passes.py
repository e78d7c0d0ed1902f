"""This module reads the files of a rank: one *pass* over a file serves all slots that
share the file.

A pass is one sequential read of a file in one epoch. The slots of a rank that own
documents of the file each have a queue in it. When a slot asks for its next document,
the pass reads on until this document comes, and queues the documents of other slots.
"""

import concurrent.futures as futures
import math
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from titan_disp.data.assignment import Segment
from titan_disp.data.documents import Documents
from titan_disp.data.formats import DamagedFile, Record, size_of
from titan_disp.data.listing import DataFile
from titan_disp.data.options import StreamOptions
from titan_disp.data.position import Position

PROGRESS_SECONDS = 10.0  # between two reports of ``Passes.seek``
# bytes; a shuffling window of longer documents (on average) holds fewer of them
DOCUMENT_BYTES = 1 << 13


@dataclass(frozen=True)
class FileEnd:
    """The end of a file: there are no more documents for a slot."""

    documents: int  # documents in the file, or before the damage in a damaged file
    damage: str | None  # why a damaged file ends early


@dataclass(frozen=True)
class Progress:
    """How far a resume has read up to its positions."""

    read: int  # stored bytes
    expected: int  # stored bytes in all; an estimate, at least ``read``
    seconds_left: float  # estimated; infinite before the first byte
    finished: bool

    def __str__(self) -> str:
        text = f"reading to the position, {self.read / 1e9:.2f} of {self.expected / 1e9:.2f} GB"
        if math.isfinite(self.seconds_left):
            text += f", about {self.seconds_left:.0f} s"
        return text


@dataclass
class _Queue:
    """The documents of a file that were read for a slot but not taken yet."""

    segment: Segment  # the slot's documents of the file
    start: int  # index of the first document that the slot wants
    documents: deque[tuple[int, Record]] = field(default_factory=deque)  # with indices
    size: int = 0  # bytes of these documents
    fed: bool = True  # whether the pass still adds documents to the queue


class _Pass:
    """One sequential read of a file, for some slots of this rank in one epoch.

    Attributes:
        queues: the queue of each slot, by slot.
        queued: bytes in all queues.
        end: the end of the file, once it is reached.
    """

    def __init__(
        self, epoch: int, documents: Documents, queues: dict[int, _Queue]
    ) -> None:
        self.epoch = epoch
        self.documents = documents
        self.queues = queues
        documents.wants = self.wants
        self.queued = 0
        self.end: FileEnd | None = None
        self._counted = 0  # stored bytes at the last call of newly_read
        # the number and bytes of all documents read, whichever slot owns them
        self._read = 0
        self._read_bytes = 0
        self._by_key = sorted(queues.values(), key=_lowest_key)

    def owner(self, unit: int) -> _Queue | None:
        """Return the queue of the slot that owns a unit (see ``Segment.key``).

        Return None if none of the pass's slots owns the unit, or if the pass adds no
        more documents to the slot's queue.
        """
        # ``key`` is the same function for all segments of a file in an epoch.
        key = self._by_key[0].segment.key(unit)
        i = bisect_right(self._by_key, key, key=_lowest_key) - 1
        queue = self._by_key[i]
        return queue if queue.fed and queue.segment.owns(unit) else None

    def wants(self, visit: int) -> bool:
        """Return whether to read the block of a visit. A block is not read if blocks are
        dealt out and the block's owner wants none of its documents any more.
        """
        visits = self.documents.visits
        if visits is None or not visits.dealt:
            return True
        queue = self.owner(visit)
        return queue is not None and queue.start < visits.first[visit + 1]

    def advance(self, slot: int) -> None:
        """Read the next document, and queue it if the slot that owns the document
        wants it. At the end of the file, or where the file is damaged, set ``end`` and
        close the file.

        ``slot`` waits for a document. If the queues hold too much, the pass stops
        feeding another slot. Raises DataError as ``Documents.read`` does.
        """
        damage = None
        try:
            document = self.documents.read()
        except DamagedFile as error:
            document = None
            damage = str(error)
        if document is None:
            self.end = FileEnd(self.documents.position, damage)
            self.documents.close()
            return
        size = size_of(document)
        self._read += 1
        self._read_bytes += size
        index = self.documents.position - 1
        queue = self.owner(self.documents.unit)
        if queue is not None and index >= queue.start:
            queue.documents.append((index, document))
            queue.size += size
            self.queued += size
        if self.queued > self.limit():
            self._stop_feeding(slot)

    def limit(self) -> float:
        """Return the bytes that all queues together may hold. At least one document must
        have been read.

        A slot that fills its shuffling window reads a window ahead of the others. The
        second term is the size of these windows.
        """
        options = self.documents.options
        mean = min(self._read_bytes / self._read, DOCUMENT_BYTES)
        return options.queue_bytes + len(self.queues) * options.shuffle_window * mean

    def _stop_feeding(self, slot: int) -> None:
        """Add no more documents to the fullest of the other slots' queues, if any.

        The slot of this queue is furthest behind. It will read the rest of the file in
        a pass of its own.
        """
        fed = [
            queue for owner, queue in self.queues.items() if owner != slot and queue.fed
        ]
        if fed:
            max(fed, key=lambda queue: queue.size).fed = False

    def take(self, slot: int) -> tuple[int, Record] | None:
        """Remove and return the next (index, document) of a slot's queue, or return None
        if the queue is empty.
        """
        queue = self.queues[slot]
        if not queue.documents:
            return None
        index, document = queue.documents.popleft()
        size = size_of(document)
        queue.size -= size
        self.queued -= size
        return index, document

    def drop(self, slot: int) -> None:
        """Drop a slot's queue with its documents, and close the file after the last
        queue.
        """
        queue = self.queues.pop(slot)
        queue.fed = False
        queue.documents.clear()
        self.queued -= queue.size
        if not self.queues:
            self.documents.close()

    def newly_read(self) -> int:
        """Return the stored bytes read since the last call."""
        before = self._counted
        self._counted = self.documents.bytes_read
        return self._counted - before


def _lowest_key(queue: _Queue) -> int:
    return queue.segment.low


class Passes:
    """The files that a rank has open, and the passes over them."""

    def __init__(
        self,
        files: Sequence[DataFile],
        positions: Sequence[Position],
        options: StreamOptions,
    ) -> None:
        self.files = files
        self.positions = {position.slot: position for position in positions}
        self.options = options
        # The passes that are open, by (slot, epoch, file). One pass serves many slots.
        self._open: dict[tuple[int, int, int], _Pass] = {}
        self._ends: dict[int, FileEnd] = {}  # of files that were read to their end
        # stored bytes of passes that a slot has left, by (epoch, file)
        self._closed_bytes: Counter[tuple[int, int]] = Counter()

    def bytes_read(self) -> Counter[tuple[int, int]]:
        """Return the stored bytes that the rank has read since the last call, by
        (epoch, file).
        """
        new = self._closed_bytes
        self._closed_bytes = Counter()
        for (_, epoch, file), reading in self._open.items():
            new[epoch, file] += reading.newly_read()
        return new

    def fetch(
        self, slot: int, epoch: int, segment: Segment, start: int
    ) -> tuple[int, Record] | FileEnd:
        """Return (index, document), the first document of a slot's segment at or after
        index ``start``, or the end of the file if there is none.

        The document is unparsed. A BadDocument may stand for a document that cannot be
        used. ``start`` is 0 at first, and then the index that follows the last document
        returned. The file is opened if no pass over it serves the slot. At the end of
        the file, or where it is damaged, the slot leaves the pass.

        Raises DataError if the file cannot be read although it may be sound, or if it
        does not fit the config.
        """
        place = slot, epoch, segment.file
        reading = self._open.get(place)
        if reading is None:
            end = self._ends.get(segment.file)
            # The file need not be read again to see that nothing is left for the slot.
            if end and not segment.dealt and not segment.owns_any(start, end.documents):
                return end
            reading = self._begin(slot, epoch, segment, start)
        while (document := reading.take(slot)) is None:
            if not reading.queues[slot].fed:
                self.leave(slot, epoch, segment.file)
                return self.fetch(slot, epoch, segment, start)
            if reading.end is not None:
                self.leave(slot, epoch, segment.file)
                self._ends[segment.file] = reading.end
                return reading.end
            reading.advance(slot)
        return document

    def _begin(self, slot: int, epoch: int, segment: Segment, start: int) -> _Pass:
        """Return a new pass over a file, for this slot and for the rank's other slots
        that still want the file in this epoch. The first read opens the file.
        """
        queues = {slot: _Queue(segment, start)}
        for other in self.positions[slot].assignment.owners(segment.file, epoch):
            position = self.positions.get(other)
            if (
                position is not None
                and other != slot
                and (other, epoch, segment.file) not in self._open
                and (wanted := position.wants(segment.file, epoch)) is not None
            ):
                queues[other] = _Queue(*wanted)
        first = min(queue.start for queue in queues.values())
        file = self.files[segment.file]
        visits = segment.visits(file.blocks)
        reading = _Pass(epoch, Documents(file, self.options, first, visits), queues)
        for of_slot in queues:
            self._open[of_slot, epoch, segment.file] = reading
        return reading

    def leave(self, slot: int, epoch: int, file: int) -> None:
        """Let a slot leave its pass over a file, if there is one. The slot needs no
        more of the file in this epoch, or begins another pass.
        """
        reading = self._open.pop((slot, epoch, file), None)
        if reading is not None:
            self._closed_bytes[epoch, file] += reading.newly_read()
            reading.drop(slot)

    def seek(self, executor: futures.Executor) -> Iterator[Progress]:
        """Begin passes at the positions of a resume, and read all their files up to
        these positions in parallel. Yield the progress every ``PROGRESS_SECONDS``, and
        at the end.

        This method raises nothing, because ``fetch`` meets the same errors. Without
        ``seek``, ``fetch`` would read up to the positions one file after the other.
        Threads can work in parallel, because decompression releases the GIL.
        """
        begun = []
        for slot, position in self.positions.items():
            for segment, start in map(position.next, position.unread()):
                if start and (slot, position.epoch, segment.file) not in self._open:
                    begun.append(self._begin(slot, position.epoch, segment, start))
        expected = sum(bytes_before(self.positions.values(), self.files).values())
        began = time.monotonic()
        tasks = [executor.submit(reading.documents.seek) for reading in begun]
        finished = False
        while not finished:
            finished = not futures.wait(tasks, timeout=PROGRESS_SECONDS).not_done
            read = sum(reading.documents.bytes_read for reading in begun)
            total = read if finished else max(read, expected)
            seconds_left = math.inf
            if read:
                seconds_left = (time.monotonic() - began) * (total - read) / read
            yield Progress(read, total, seconds_left, finished)

    def close(self) -> None:
        """Close all files."""
        for reading in self._open.values():
            reading.documents.close()


def bytes_before(
    positions: Iterable[Position], files: Sequence[DataFile]
) -> Counter[int]:
    """Return the estimated stored bytes, by file, that a rank with these positions reads
    again at a resume, before the first new document.

    Only the files of the positions' unread parts count. Files that have blocks are left
    out, because reading can begin at any block. If several positions are in a file, the
    furthest one counts. (Slots in different epochs read the file once for each epoch,
    but it is counted once.)
    """
    before: Counter[int] = Counter()
    for position in positions:
        for part in position.unread():
            segment, _ = position.next(part)
            file = files[segment.file]
            if file.blocks is None:
                fraction = min(1.0, position.taken(part) / max(1, segment.text))
                of_slot = int(fraction * file.size)
                before[segment.file] = max(before[segment.file], of_slot)
    return before
