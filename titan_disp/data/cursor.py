"""Which document of a slot comes next: a position of a few integers, and the walk over the slot's files."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from torchtitan.tools.logging import logger

from titan_disp.data.assignment import Assignment, Run, Segment
from titan_disp.data.documents import BadDocument, text_of
from titan_disp.data.passes import Passes
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


TAKEN = (Field.HEAD, Field.BODY, Field.TAIL)
OF_AN_EPOCH = (*TAKEN, Field.BODY_FILE, Field.BODY_DOCUMENT, Field.DONE, Field.GOOD)


class Faults:
    """What happens to documents and files that cannot be used."""

    def __init__(self, names: list[str], on_bad_data: str, max_skipped_fraction: float) -> None:
        """Args: names: of all files. on_bad_data: "skip" or "fail". max_skipped_fraction: of a rank's documents."""
        self.names, self.on_bad_data, self.max_skipped_fraction = names, on_bad_data, max_skipped_fraction
        self.positions: list[np.ndarray] = []  # of the rank's cursors
        self._told: set[tuple[int, int]] = set()

    def bad(self, file: int, index: int, reason: str) -> None:
        """One document or (index −1) the rest of a file that cannot be used: say so once, or stop."""
        name = self.names[file]
        text = f"{name}, document {index}: {reason}" if index >= 0 else f"{name} is damaged and ends early: {reason}"
        if self.on_bad_data == "fail":
            raise DataError(f'{text}. stream.on_bad_data = "skip" would pass over it')
        if (file, index) not in self._told and len(self._told) < 1000:
            self._told.add((file, index))
            logger.warning(f"skipped: {text}")

    def check(self) -> None:
        """Stop a run whose data is broken, not just blemished."""
        columns = np.stack(self.positions).sum(0)
        skipped, every = int(columns[Field.SKIPPED]), int(columns[Field.SKIPPED] + columns[Field.DOCUMENTS])
        if every >= 1000 and skipped > self.max_skipped_fraction * every:
            raise DataError(
                f"{skipped} of {every} documents could not be used, more than stream.max_skipped_fraction "
                f"{self.max_skipped_fraction} allows: the reasons are in the log above"
            )


@dataclass(frozen=True)
class Document:
    """Attributes:
    text: not empty. size: its bytes in UTF-8.
    start, end: the slot's position at its first token and after its last, [k] int64.
    """

    text: str
    size: int
    start: np.ndarray
    end: np.ndarray


class Cursor:
    """Walks over one slot's documents, epoch after epoch."""

    def __init__(
        self, index: int, position: np.ndarray, assignment: Assignment, passes: Passes, faults: Faults
    ) -> None:
        """Args: index: of the slot. position: [k] int64, of a document's beginning; taken over and moved."""
        self.index, self.position, self.assignment = index, position, assignment
        self.passes, self.faults = passes, faults
        faults.positions.append(position)

    def next(self) -> Document:
        """The next document that can be used.

        Raises:
            DataError: see ``Faults``; or a whole epoch without a usable document; or a file that cannot be reached.
        """
        p = self.position
        while True:
            run = self._run()
            part = self._choose(run)
            if part is None:
                self._next_epoch(run)
                continue
            segment, index = self._place(run, part)
            raw, damage = self.passes.fetch(self.index, int(p[Field.EPOCH]), segment, index)
            if raw is None:
                self._end_of_file(part, segment, damage, len(run.body))
                continue
            try:
                if isinstance(raw, BadDocument):
                    raise raw
                text = text_of(raw)
            except BadDocument as error:
                self.faults.bad(segment.file, index, str(error))
                p[Field.SKIPPED] += 1
                self._take(part)
                self.faults.check()
                continue
            start, size = p.copy(), len(text.encode())
            p[Field.GOOD] += 1
            p[Field.DOCUMENTS] += 1
            p[Field.BYTES] += size
            self._take(part)
            return Document(text, size, start, p.copy())

    def wants(self, file: int, epoch: int) -> tuple[Segment, int] | None:
        """(segment, index of the first document still wanted) of a shared file in an epoch that is not over for this slot."""
        now = int(self.position[Field.EPOCH])
        if now > epoch:
            return None
        run = self.assignment.run(self.index, epoch)
        for part, segment, column in ((0, run.head, Field.HEAD), (2, run.tail, Field.TAIL)):
            if segment is not None and segment.file == file:
                if now < epoch:
                    return segment, segment.index(0)
                if not self.position[Field.DONE] >> part & 1:
                    return segment, segment.index(int(self.position[column]))
        return None

    def upcoming(self) -> list[tuple[Segment, int]]:
        """(segment, index of the next document) of the files that the slot reads from now: up to three."""
        run = self._run()
        return [self._place(run, part) for part in self._left(run)]

    def _run(self) -> Run:
        return self.assignment.run(self.index, int(self.position[Field.EPOCH]))

    def _left(self, run: Run) -> list[int]:
        return [part for part in range(3) if run.weights[part] and not self.position[Field.DONE] >> part & 1]

    def _choose(self, run: Run) -> int | None:
        """Head, body or tail: the one furthest behind its share. None when all are read."""
        head, body, tail = (int(self.position[column]) for column in TAKEN)
        return _furthest_behind(self._left(run), (head, body, tail), run.weights)

    def _place(self, run: Run, part: int) -> tuple[Segment, int]:
        p = self.position
        if part == 1:
            return run.body[int(p[Field.BODY_FILE])], int(p[Field.BODY_DOCUMENT])
        segment = run.head if part == 0 else run.tail
        assert segment is not None
        return segment, segment.index(int(p[TAKEN[part]]))

    def _take(self, part: int) -> None:
        if part == 1:
            self.position[Field.BODY_DOCUMENT] += 1
        self.position[TAKEN[part]] += 1

    def _end_of_file(self, part: int, segment: Segment, damage: str | None, files: int) -> None:
        p = self.position
        if damage is not None:
            self.faults.bad(segment.file, -1, damage)
            p[Field.SKIPPED_FILES] += segment.low == 0  # one slot counts it
        if part == 1:
            p[Field.BODY_FILE] += 1
            p[Field.BODY_DOCUMENT] = 0
            if p[Field.BODY_FILE] < files:
                return
        p[Field.DONE] |= 1 << part

    def _next_epoch(self, run: Run) -> None:
        if self.position[Field.GOOD] == 0:
            names = {self.faults.names[segment.file] for segment in run.segments}
            raise DataError(
                f"slot {self.index} of {self.assignment.slots} found no usable document in a whole epoch "
                f"({', '.join(sorted(names)[:4])}): use fewer slots (stream.slots, or training.global_batch_size) or more data"
            )
        self.position[Field.EPOCH] += 1
        self.position[list(OF_AN_EPOCH)] = 0


def _furthest_behind(left: list[int], taken: tuple[int, int, int], weights: tuple[int, int, int]) -> int | None:
    """The index with the smallest (taken + ½) / weight, compared without rounding; the first of equals."""
    best = None
    for i in left:
        if best is None or (2 * taken[i] + 1) * weights[best] < (2 * taken[best] + 1) * weights[i]:
            best = i
    return best
