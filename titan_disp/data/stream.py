"""Documents → packed sequences, slot by slot, with a position of a few integers.

    files ──one pass each──▶ FilePass ──raw documents──▶ Slot ──tokens, joined with EOS──▶ sequences of seq_len + 1

A slot's sequences depend on (files, tokenizer, seq_len, seed, S) only. A position is re-read on resume, not restored from a
buffer of text.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from torchtitan.tools.logging import logger

from titan_disp.data.documents import BadDocument, DamagedFile, Documents, text_of
from titan_disp.data.plan import Plan, Run, Segment
from titan_disp.data.shards import DataFile
from titan_disp.errors import DataError


class Field(IntEnum):
    """Columns of the position tensor [S, k], int64."""

    EPOCH = 0
    HEAD = 1  # documents taken from the run's head …
    BODY = 2  # … from all of its whole files …
    BODY_FILE = 3  # … of which this is the current one …
    BODY_DOCUMENT = 4  # … and this its next document …
    TAIL = 5  # … and from the tail
    DONE = 6  # bits: head, body, tail read to the end
    OFFSET = 7  # tokens already taken from the next document
    GOOD = 8  # documents used in this epoch
    DOCUMENTS = 9  # since the start of the run, as are the following
    BYTES = 10  # of text, UTF-8
    SKIPPED = 11
    SKIPPED_FILES = 12


@dataclass(frozen=True)
class StreamOptions:
    """What decides how documents become sequences, and what happens to bad ones."""

    seq_len: int
    seed: int = 0
    on_bad_data: str = "skip"
    max_skipped_fraction: float = 0.01
    max_document_bytes: int = 16 << 20
    retry_seconds: float = 60.0
    queue_bytes: int = 32 << 20


@dataclass
class _Queue:
    """Documents of a shared file that one slot has yet to take."""

    segment: Segment
    start: int
    documents: deque = field(default_factory=deque)
    bytes: int = 0
    fed: bool = True


class FilePass:
    """One sequential read of a file for all slots of this rank that own documents of it."""

    def __init__(self, epoch: int, documents: Documents, queues: dict[int, _Queue], queue_bytes: int) -> None:
        self.epoch = epoch
        self.documents = documents
        self.queues = queues
        self.queue_bytes = queue_bytes
        self.queued = 0  # bytes in all queues
        self.ended = False
        self.damage: str | None = None
        classes = next(iter(queues.values())).segment.classes
        self.by_class: list[list[int]] = [[] for _ in range(classes)]
        for slot, queue in queues.items():
            for c in range(queue.segment.low, queue.segment.high):
                self.by_class[c].append(slot)

    def advance(self, asking: int) -> None:
        """Read one document and hand it to the slot that owns it."""
        index = self.documents.position
        try:
            document = self.documents.read()
        except DamagedFile as error:
            self.damage = str(error)
            document = None
        if document is None:
            self.ended = True
            self.documents.close()
            return
        for slot in self.by_class[index % len(self.by_class)]:
            queue = self.queues.get(slot)
            if queue is not None and queue.fed and index >= queue.start:
                queue.documents.append((index, document))
                size = 0 if isinstance(document, BadDocument) else len(document)
                queue.bytes += size
                self.queued += size
        if self.queued > self.queue_bytes:
            # A slot far behind keeps what it has and will read the rest by itself: memory stays bounded.
            others = {s: q for s, q in self.queues.items() if s != asking and q.fed}
            if others:
                others[max(others, key=lambda s: others[s].bytes)].fed = False


class RankStreams:
    """The slots of one rank, and the files they read."""

    def __init__(
        self,
        files: Sequence[DataFile],
        slots: range,
        positions: np.ndarray,
        plan: Plan,
        encode: Callable[[str], list[int]],
        options: StreamOptions,
    ) -> None:
        """Args:
        files: all files of the split. slots: this rank's. positions: [len(slots), k] int64, taken over, not shared.
        plan: of all slots. encode: text → token ids that end in EOS. options: see there.
        """
        self.files, self.plan, self.encode, self.options = files, plan, encode, options
        self.slots = {slot: Slot(slot, positions[i].copy(), self) for i, slot in enumerate(slots)}
        self.passes: dict[int, list[FilePass]] = {}
        self._closed_bytes: Counter[tuple[int, int]] = Counter()
        self._told: set[tuple[int, int]] = set()

    def bytes_read(self) -> Counter[tuple[int, int]]:
        """Stored bytes read so far, by (epoch, file)."""
        total = self._closed_bytes.copy()
        for file, passes in self.passes.items():
            for one in passes:
                total[one.epoch, file] += one.documents.bytes_read
        return total

    def _pass(self, slot: int, epoch: int, file: int) -> FilePass | None:
        """The pass over a file that feeds this slot in this epoch. (Another slot may be an epoch ahead, in the same file.)"""
        return next((p for p in self.passes.get(file, ()) if p.epoch == epoch and slot in p.queues), None)

    def fetch(
        self, slot: int, epoch: int, segment: Segment, index: int
    ) -> tuple[bytes | str | BadDocument | None, str | None]:
        """Document ``index`` of a file, unparsed, or (None, damage) at its end. Indices of a slot only grow."""
        mine = self._pass(slot, epoch, segment.file) or self._open(slot, epoch, segment, index)
        queue = mine.queues[slot]
        while True:
            while queue.documents:
                found, document = queue.documents.popleft()
                size = 0 if isinstance(document, BadDocument) else len(document)
                queue.bytes -= size
                mine.queued -= size
                if found == index:
                    return document, None
            if not queue.fed:
                self._leave(slot, segment.file, mine)
                return self.fetch(slot, epoch, segment, index)
            if mine.ended:
                self._leave(slot, segment.file, mine)
                return None, mine.damage
            mine.advance(slot)

    def _open(self, slot: int, epoch: int, segment: Segment, index: int) -> FilePass:
        """A new pass over a file, for this slot and for every other slot of the rank that will want it in this epoch."""
        queues = {slot: _Queue(segment, index)}
        for other in self.slots.values():
            if other.index != slot and self._pass(other.index, epoch, segment.file) is None:
                wanted = other.wants(segment.file, epoch)
                if wanted is not None:
                    queues[other.index] = _Queue(*wanted)
        options = self.options
        documents = Documents(
            self.files[segment.file],
            options.max_document_bytes,
            options.retry_seconds,
            start=min(queue.start for queue in queues.values()),
        )
        new = FilePass(epoch, documents, queues, options.queue_bytes)
        self.passes.setdefault(segment.file, []).append(new)
        return new

    def _leave(self, slot: int, file: int, left: FilePass) -> None:
        left.queued -= left.queues.pop(slot).bytes
        if not left.queues:
            left.documents.close()
            self.passes[file].remove(left)
            self._closed_bytes[left.epoch, file] += left.documents.bytes_read
            if not self.passes[file]:
                del self.passes[file]

    def bad(self, file: int, index: int, reason: str) -> None:
        """One document or (index −1) the rest of a file that cannot be used: say so once, or stop."""
        name = self.files[file].name
        text = f"{name}, document {index}: {reason}" if index >= 0 else f"{name} is damaged and ends early: {reason}"
        if self.options.on_bad_data == "fail":
            raise DataError(f'{text}. stream.on_bad_data = "skip" would pass over it')
        if (file, index) not in self._told and len(self._told) < 1000:
            self._told.add((file, index))
            logger.warning(f"skipped: {text}")

    def check_skipped(self) -> None:
        """Stop a run whose data is broken, not just blemished."""
        fields = np.stack([slot.position for slot in self.slots.values()])
        skipped, good = int(fields[:, Field.SKIPPED].sum()), int(fields[:, Field.DOCUMENTS].sum())
        limit = self.options.max_skipped_fraction
        if skipped + good >= 1000 and skipped > limit * (skipped + good):
            raise DataError(
                f"{skipped} of {skipped + good} documents could not be used, more than stream.max_skipped_fraction {limit} "
                "allows: the reasons are in the log above"
            )

    def close(self) -> None:
        for passes in self.passes.values():
            for one in passes:
                one.documents.close()


class Slot:
    """One document stream of the run."""

    def __init__(self, index: int, position: np.ndarray, streams: RankStreams) -> None:
        self.index = index
        self.position = position
        self.streams = streams
        self._tokens: list[int] | None = None  # of the next document, once it is loaded
        self._part = 0
        self._size = 0

    def run(self) -> Run:
        return self.streams.plan.run(self.index, int(self.position[Field.EPOCH]))

    def wants(self, file: int, epoch: int) -> tuple[Segment, int] | None:
        """(segment, index of the first document still wanted) of a shared file in an epoch that is not over for this slot."""
        now = int(self.position[Field.EPOCH])
        if now > epoch:
            return None
        run = self.streams.plan.run(self.index, epoch)
        for part, segment, column in ((0, run.head, Field.HEAD), (2, run.tail, Field.TAIL)):
            if segment is not None and segment.file == file:
                if now < epoch:
                    return segment, segment.index(0)
                if not self.position[Field.DONE] >> part & 1:
                    return segment, segment.index(int(self.position[column]))
        return None

    def sequence(self) -> np.ndarray:
        """The next seq_len + 1 tokens, int64; the position moves with them."""
        need = self.streams.options.seq_len + 1
        out = np.empty(need, dtype=np.int64)
        filled = 0
        while filled < need:
            if self._tokens is None:
                self._load()
            assert self._tokens is not None
            offset = int(self.position[Field.OFFSET])
            piece = self._tokens[offset : offset + need - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            self.position[Field.OFFSET] += len(piece)
            if self.position[Field.OFFSET] >= len(self._tokens):
                self._finish()
        return out

    def _finish(self) -> None:
        p = self.position
        p[Field.OFFSET] = 0
        p[Field.GOOD] += 1
        p[Field.DOCUMENTS] += 1
        p[Field.BYTES] += self._size
        self._tokens = None
        self._take(self._part)

    def _take(self, part: int) -> None:
        p = self.position
        if part == 1:
            p[Field.BODY_DOCUMENT] += 1
        p[(Field.HEAD, Field.BODY, Field.TAIL)[part]] += 1

    def _choose(self, run: Run) -> int | None:
        """Head, body or tail: the one furthest behind its share. None when all are read."""
        p, weights = self.position, run.weights
        taken = (int(p[Field.HEAD]), int(p[Field.BODY]), int(p[Field.TAIL]))
        left = [i for i in range(3) if weights[i] and not p[Field.DONE] >> i & 1]
        return _furthest_behind(left, taken, weights)

    def _load(self) -> None:
        """Find, parse and tokenize the next document that can be used."""
        p, streams = self.position, self.streams
        while True:
            run = self.run()
            part = self._choose(run)
            if part is None:
                self._next_epoch()
                continue
            segment: Segment
            if part == 1:
                segment = run.body[int(p[Field.BODY_FILE])]
                index = int(p[Field.BODY_DOCUMENT])
            else:
                segment = run.head if part == 0 else run.tail  # type: ignore[assignment]
                index = segment.index(int(p[Field.HEAD if part == 0 else Field.TAIL]))
            raw, damage = streams.fetch(self.index, int(p[Field.EPOCH]), segment, index)
            if raw is None:
                self._end_of_file(part, segment, damage, len(run.body))
                continue
            try:
                if isinstance(raw, BadDocument):
                    raise raw
                text = text_of(raw)
            except BadDocument as error:
                streams.bad(segment.file, index, str(error))
                p[Field.SKIPPED] += 1
                p[Field.OFFSET] = 0
                self._take(part)
                streams.check_skipped()
                continue
            self._part, self._tokens, self._size = part, streams.encode(text), len(text.encode())
            return

    def _end_of_file(self, part: int, segment: Segment, damage: str | None, files: int) -> None:
        p = self.position
        if damage is not None:
            self.streams.bad(segment.file, -1, damage)
            p[Field.SKIPPED_FILES] += segment.low == 0  # one slot counts it
        if part == 1:
            p[Field.BODY_FILE] += 1
            p[Field.BODY_DOCUMENT] = 0
            if p[Field.BODY_FILE] < files:
                return
        p[Field.DONE] |= 1 << part

    def _next_epoch(self) -> None:
        p = self.position
        if p[Field.GOOD] == 0:
            names = {self.streams.files[segment.file].name for segment in self.run().segments}
            raise DataError(
                f"slot {self.index} of {self.streams.plan.slots} found no usable document in a whole epoch "
                f"({', '.join(sorted(names)[:4])}): use fewer slots (stream.slots, or training.global_batch_size) or more data"
            )
        p[Field.EPOCH] += 1
        for column in (
            Field.HEAD,
            Field.BODY,
            Field.BODY_FILE,
            Field.BODY_DOCUMENT,
            Field.TAIL,
            Field.DONE,
            Field.GOOD,
        ):
            p[column] = 0


def _furthest_behind(left: list[int], taken: tuple[int, int, int], weights: tuple[int, int, int]) -> int | None:
    """The index with the smallest (taken + ½) / weight, compared without rounding; the first of equals."""
    best = None
    for i in left:
        if best is None or (2 * taken[i] + 1) * weights[best] < (2 * taken[best] + 1) * weights[i]:
            best = i
    return best
