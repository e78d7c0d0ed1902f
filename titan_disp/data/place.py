"""A slot's position is a few integers. This module says what they mean in the slot's documents, and moves them."""

from enum import IntEnum

import numpy as np

from titan_disp.data.assignment import Assignment, Run, Segment
from titan_disp.data.mixture import Mixture


class Field(IntEnum):
    """These are the columns of the position tensor, [S, k] int64.

    Head, body and tail are the three parts of a slot's run, see ``assignment``. If documents are shuffled, all columns
    up to WINDOW describe the beginning of the current window.
    """

    EPOCH = 0
    HEAD = 1  # index of the next document in the head's file …
    HEAD_BYTES = 2  # … and bytes of text taken from the head
    BODY_FILE = 3  # number of the current file among the body's whole files …
    BODY_DOCUMENT = 4  # … index of its next document …
    BODY_BYTES = 5  # … and bytes of text taken from the whole body
    TAIL = 6  # as HEAD
    TAIL_BYTES = 7
    DONE = 8  # bits for head, body and tail: read to the end
    WINDOW = 9  # number of the shuffling window in the epoch …
    IN_WINDOW = 10  # … and how many of its documents have been used
    OFFSET = 11  # tokens already taken from the next document
    DOCUMENTS = 12  # documents used since the start of the run …
    BYTES = 13  # … their bytes of text in UTF-8 …
    SKIPPED = 14  # … documents skipped …
    SKIPPED_FILES = 15  # … and files that ended early


NEXT = (Field.HEAD, Field.BODY_DOCUMENT, Field.TAIL)  # index of the next document in head, body, tail
TAKEN = (Field.HEAD_BYTES, Field.BODY_BYTES, Field.TAIL_BYTES)
OF_AN_EPOCH = (*NEXT, *TAKEN, Field.BODY_FILE, Field.DONE, Field.WINDOW)


class Place:
    """Hold one slot's position, with the methods that interpret and move it.

    Attributes:
        index: the slot's number.
        position: [k] int64, at the beginning of a document; the methods change it.
    """

    def __init__(self, index: int, position: np.ndarray, assignment: Assignment | Mixture) -> None:
        """Take over ``position``, which is not copied."""
        self.index, self.position, self.assignment = index, position, assignment

    @property
    def epoch(self) -> int:
        return int(self.position[Field.EPOCH])

    def run(self) -> Run:
        """Return what the slot reads in its current epoch."""
        return self.assignment.run(self.index, self.epoch)

    def choose(self) -> int | None:
        """Return the part furthest behind its share: head (0), body (1) or tail (2). Return None if all are read."""
        taken, weights = [int(self.position[column]) for column in TAKEN], self.run().weights
        best = None
        for part in self._left():  # the smallest taken / weight, compared without rounding; of equal ones the first
            if best is None or taken[part] * weights[best] < taken[best] * weights[part]:
                best = part
        return best

    def next(self, part: int) -> tuple[Segment, int]:
        """Return a part's current segment and the index of the next document in its file. The part must not be over."""
        run = self.run()
        segment = (run.head, run.body[int(self.position[Field.BODY_FILE])] if part == 1 else None, run.tail)[part]
        assert segment is not None
        return segment, int(self.position[NEXT[part]])

    def upcoming(self) -> list[tuple[Segment, int]]:
        """Return ``next`` of all parts that are not over; at most three."""
        return [self.next(part) for part in self._left()]

    def wants(self, file: int, epoch: int) -> tuple[Segment, int] | None:
        """Return the segment of a shared file and the index of the next document to read of it in an epoch.

        Returns None if the slot needs nothing more of the file in this epoch.
        """
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
        """Move past document ``index`` of a part. ``size`` is its bytes of text, or 0 if it cannot be used."""
        self.position[NEXT[part]] = index + 1
        self.position[TAKEN[part]] += size

    def end_file(self, part: int) -> None:
        """Move past the end of a part's current file."""
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
