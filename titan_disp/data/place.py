"""Where a slot is in its documents: a position of a few integers, and what follows from it."""

from enum import IntEnum

import numpy as np

from titan_disp.data.assignment import Assignment, Run, Segment
from titan_disp.data.mixture import Mixture


class Field(IntEnum):
    """Columns of the position tensor [S, k], int64."""

    EPOCH = 0
    HEAD = 1  # index in the file of the run's head from which on it is still to be read …
    HEAD_BYTES = 2  # … and bytes of text taken from it
    BODY_FILE = 3  # of the whole files, the current one …
    BODY_DOCUMENT = 4  # … its next document …
    BODY_BYTES = 5  # … and bytes of text taken from all of them
    TAIL = 6  # as of the head
    TAIL_BYTES = 7
    DONE = 8  # bits: head, body, tail read to the end
    WINDOW = (
        9  # number, in the epoch, of the window of documents that is being shuffled; all above is of its beginning …
    )
    IN_WINDOW = 10  # … and how many of its documents have been used
    OFFSET = 11  # tokens already taken from the next document
    DOCUMENTS = 12  # used since the start of the run, as are the following
    BYTES = 13  # of text, UTF-8
    SKIPPED = 14
    SKIPPED_FILES = 15


NEXT = (Field.HEAD, Field.BODY_DOCUMENT, Field.TAIL)  # index of the next document in head, body, tail
TAKEN = (Field.HEAD_BYTES, Field.BODY_BYTES, Field.TAIL_BYTES)
OF_AN_EPOCH = (*NEXT, *TAKEN, Field.BODY_FILE, Field.DONE, Field.WINDOW)


class Place:
    """One slot's position, and the walk over its files that it stands for.

    Attributes:
        index: of the slot.
        position: [k] int64, of a document's beginning; moved by the methods.
    """

    def __init__(self, index: int, position: np.ndarray, assignment: Assignment | Mixture) -> None:
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
        taken, weights = [int(self.position[column]) for column in TAKEN], self.run().weights
        best = None
        for part in self._left():  # the smallest taken / weight, compared without rounding; the first of equals
            if best is None or taken[part] * weights[best] < taken[best] * weights[part]:
                best = part
        return best

    def next(self, part: int) -> tuple[Segment, int]:
        """(segment, index in its file from which on it is still to be read) of a part that is not over."""
        run = self.run()
        segment = (run.head, run.body[int(self.position[Field.BODY_FILE])] if part == 1 else None, run.tail)[part]
        assert segment is not None
        return segment, int(self.position[NEXT[part]])

    def upcoming(self) -> list[tuple[Segment, int]]:
        """``next`` of all parts that are not over: up to three."""
        return [self.next(part) for part in self._left()]

    def wants(self, file: int, epoch: int) -> tuple[Segment, int] | None:
        """(segment, index from which on it is still to be read) of a shared file in an epoch that is not over for this slot."""
        if self.epoch > epoch:
            return None
        run = self.assignment.run(self.index, epoch)
        for part, segment in ((0, run.head), (2, run.tail)):
            if segment is not None and segment.file == file:
                if self.epoch < epoch:
                    return segment, 0
                if not self.position[Field.DONE] >> part & 1:
                    return segment, int(self.position[NEXT[part]])
        return None

    def take(self, part: int, index: int, size: int) -> None:
        """Pass document ``index`` of a part, of ``size`` bytes of text; 0 where it cannot be used."""
        self.position[NEXT[part]] = index + 1
        self.position[TAKEN[part]] += size

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
