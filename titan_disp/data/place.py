"""Where a slot is in its documents: a position of a few integers, and what follows from it."""

from enum import IntEnum

import numpy as np

from titan_disp.data.assignment import Assignment, Run, Segment


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


class Place:
    """One slot's position, and the walk over its files that it stands for.

    Attributes:
        index: of the slot.
        position: [k] int64, of a document's beginning; moved by the methods.
    """

    def __init__(self, index: int, position: np.ndarray, assignment: Assignment) -> None:
        """Args: position: taken over."""
        self.index, self.position, self.assignment = index, position, assignment

    @property
    def epoch(self) -> int:
        return int(self.position[Field.EPOCH])

    def run(self) -> Run:
        """What the slot reads in its epoch."""
        return self.assignment.run(self.index, self.epoch)

    def choose(self) -> int | None:
        """Head (0), body (1) or tail (2): the one furthest behind its share. None when all are read."""
        head, body, tail = (int(self.position[column]) for column in TAKEN)
        return _furthest_behind(self._left(), (head, body, tail), self.run().weights)

    def next(self, part: int) -> tuple[Segment, int]:
        """(segment, index in its file of the next document) of a part that is not over."""
        p, run = self.position, self.run()
        if part == 1:
            return run.body[int(p[Field.BODY_FILE])], int(p[Field.BODY_DOCUMENT])
        segment = run.head if part == 0 else run.tail
        assert segment is not None
        return segment, segment.index(int(p[TAKEN[part]]))

    def upcoming(self) -> list[tuple[Segment, int]]:
        """(segment, index of the next document) of the files that the slot reads from now: up to three."""
        return [self.next(part) for part in self._left()]

    def wants(self, file: int, epoch: int) -> tuple[Segment, int] | None:
        """(segment, index of the first document still wanted) of a shared file in an epoch that is not over for this slot."""
        if self.epoch > epoch:
            return None
        run = self.assignment.run(self.index, epoch)
        for part, segment, column in ((0, run.head, Field.HEAD), (2, run.tail, Field.TAIL)):
            if segment is not None and segment.file == file:
                if self.epoch < epoch:
                    return segment, segment.index(0)
                if not self.position[Field.DONE] >> part & 1:
                    return segment, segment.index(int(self.position[column]))
        return None

    def take(self, part: int) -> None:
        """Pass the next document of a part."""
        if part == 1:
            self.position[Field.BODY_DOCUMENT] += 1
        self.position[TAKEN[part]] += 1

    def end_file(self, part: int) -> None:
        """Pass the end of a part's file."""
        p = self.position
        if part == 1:
            p[Field.BODY_FILE] += 1
            p[Field.BODY_DOCUMENT] = 0
            if p[Field.BODY_FILE] < len(self.run().body):
                return
        p[Field.DONE] |= 1 << part

    def end_epoch(self) -> None:
        self.position[Field.EPOCH] += 1
        self.position[list(OF_AN_EPOCH)] = 0

    def _left(self) -> list[int]:
        weights = self.run().weights
        return [part for part in range(3) if weights[part] and not self.position[Field.DONE] >> part & 1]


def _furthest_behind(left: list[int], taken: tuple[int, int, int], weights: tuple[int, int, int]) -> int | None:
    """The index with the smallest (taken + ½) / weight, compared without rounding; the first of equals."""
    best = None
    for i in left:
        if best is None or (2 * taken[i] + 1) * weights[best] < (2 * taken[best] + 1) * weights[i]:
            best = i
    return best
