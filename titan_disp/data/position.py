"""A slot's position is a few integers.

This module says what they mean in the slot's documents, and moves them.
"""

from enum import IntEnum

import numpy as np

from titan_disp.data.assignment import Assignment, Run, Segment


class Field(IntEnum):
    """These are the columns of the position tensor, [S, k] int64.

    Head, body and tail are the three parts of a slot's run, see ``assignment``. If
    documents are shuffled, all columns up to WINDOW describe the beginning of the
    current window.
    """

    EPOCH = 0
    HEAD = 1  # index of the next document in the head's file …
    HEAD_BYTES = 2  # … and bytes of text taken from the head
    BODY_FILE = 3  # number of the current file among the body's whole files …
    BODY_DOCUMENT = 4  # … index of its next document …
    BODY_BYTES = 5  # … and bytes of text taken from the whole body …
    FILE_BYTES = 6  # … and from this file
    TAIL = 7  # as HEAD
    TAIL_BYTES = 8
    DONE = 9  # bits for head, body and tail: read to the end
    WINDOW = 10  # number of the shuffling window in the epoch …
    IN_WINDOW = 11  # … and how many of its documents have been used
    OFFSET = 12  # tokens already taken from the next document …
    OFFSET_BYTES = 13  # … and about their bytes of text
    DOCUMENTS = 14  # documents used since the start of the run …
    BYTES = 15  # … their bytes of text in UTF-8 …
    SKIPPED = 16  # … documents skipped …
    SKIPPED_FILES = 17  # … files that ended early …
    SKIPPED_BYTES = 18  # … and about the bytes of both


# index of the next document in head, body, tail
NEXT = (Field.HEAD, Field.BODY_DOCUMENT, Field.TAIL)
TAKEN = (Field.HEAD_BYTES, Field.BODY_BYTES, Field.TAIL_BYTES)
OF_AN_EPOCH = (
    *NEXT,
    *TAKEN,
    Field.BODY_FILE,
    Field.FILE_BYTES,
    Field.DONE,
    Field.WINDOW,
)


class Position:
    """Hold one slot's position (``values``, [k] int64, at the beginning of a document),
    and interpret and move it.
    """

    def __init__(self, slot: int, values: np.ndarray, assignment: Assignment) -> None:
        self.slot = slot
        self.values = values
        self.assignment = assignment

    @property
    def epoch(self) -> int:
        return int(self.values[Field.EPOCH])

    def run(self) -> Run:
        return self.assignment.run(self.slot, self.epoch)

    def choose(self) -> int | None:
        """Return the part furthest behind its share: head (0), body (1) or tail (2).

        Return None if all are read.
        """
        taken = [int(self.values[column]) for column in TAKEN]
        weights = self.run().weights
        best = None
        # the smallest taken / weight, compared without rounding; of equal ones the
        # first
        for part in self.left():
            if (
                best is None
                or taken[part] * weights[best] < taken[best] * weights[part]
            ):
                best = part
        return best

    def next(self, part: int) -> tuple[Segment, int]:
        """Return a part's current segment and the index of the next document in its
        file. The part must not be over.
        """
        run = self.run()
        segment = (
            run.head,
            run.body[int(self.values[Field.BODY_FILE])] if part == 1 else None,
            run.tail,
        )[part]
        assert segment is not None
        return segment, int(self.values[NEXT[part]])

    def wants(self, file: int, epoch: int) -> tuple[Segment, int] | None:
        """Return what the slot still needs of a shared file in an epoch: the segment
        and the index of its next document.
        """
        if self.epoch > epoch:
            return None
        run = self.assignment.run(self.slot, epoch)
        for part, segment in ((0, run.head), (2, run.tail)):
            if segment is not None and segment.file == file:
                if self.epoch < epoch:
                    return segment, 0
                if not self.values[Field.DONE] >> part & 1:
                    return segment, int(self.values[NEXT[part]])
        return None

    def take(self, part: int, index: int, size: int) -> None:
        """Move past document ``index`` of a part.

        ``size`` is its bytes of text, or 0 if it cannot be used.
        """
        self.values[NEXT[part]] = index + 1
        self.values[TAKEN[part]] += size
        self.values[Field.FILE_BYTES] += size if part == 1 else 0

    def taken(self, part: int) -> int:
        """Return the bytes of text taken from a part's current file."""
        return int(self.values[Field.FILE_BYTES if part == 1 else TAKEN[part]])

    def end_file(self, part: int) -> None:
        p = self.values
        if part == 1:
            p[Field.BODY_FILE] += 1
            p[[Field.BODY_DOCUMENT, Field.FILE_BYTES]] = 0
            if p[Field.BODY_FILE] < len(self.run().body):
                return
        p[Field.DONE] |= 1 << part

    def end_epoch(self) -> None:
        self.values[Field.EPOCH] += 1
        self.values[list(OF_AN_EPOCH)] = 0

    def left(self) -> list[int]:
        weights = self.run().weights
        return [
            part
            for part in range(3)
            if weights[part] and not self.values[Field.DONE] >> part & 1
        ]
