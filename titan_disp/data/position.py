"""A slot's position is a few integers.

This module says what they mean in the slot's documents, and moves them.
"""

from enum import IntEnum

import numpy as np

from titan_disp.data.assignment import Assignment, Part, Run, Segment


class Field(IntEnum):
    """These are the columns of the position tensor, [S, k] int64.

    Head, body and tail are the three parts of a slot's run, see ``assignment``. If
    documents are shuffled, all columns up to WINDOW describe the beginning of the
    current window.
    """

    EPOCH = 0
    HEAD = 1  # index of the next document in the head's file
    HEAD_BYTES = 2  # of text taken from the head
    BODY_FILE = 3  # number of the current file among the body's whole files
    BODY_DOCUMENT = 4  # index of the next document in that file
    BODY_BYTES = 5  # of text taken from the whole body
    FILE_BYTES = 6  # of text taken from the body's current file
    TAIL = 7  # index of the next document in the tail's file
    TAIL_BYTES = 8  # of text taken from the tail
    DONE = 9  # a bit for each part that was read to its end
    WINDOW = 10  # number of the shuffling window in the epoch
    IN_WINDOW = 11  # how many of the window's documents have been used
    OFFSET = 12  # tokens already taken from the next document
    OFFSET_BYTES = 13  # about the bytes of text of these tokens
    DOCUMENTS = 14  # used since the start of the run
    BYTES = 15  # of text, in UTF-8, of the documents used
    SKIPPED = 16  # documents skipped since the start of the run
    SKIPPED_FILES = 17  # files that ended early
    SKIPPED_BYTES = 18  # about the bytes of both


# For each part: the index of its next document in the file, and the bytes of text
# taken.
NEXT = {
    Part.HEAD: Field.HEAD,
    Part.BODY: Field.BODY_DOCUMENT,
    Part.TAIL: Field.TAIL,
}
TAKEN = {
    Part.HEAD: Field.HEAD_BYTES,
    Part.BODY: Field.BODY_BYTES,
    Part.TAIL: Field.TAIL_BYTES,
}
OF_AN_EPOCH = (
    *NEXT.values(),
    *TAKEN.values(),
    Field.BODY_FILE,
    Field.FILE_BYTES,
    Field.DONE,
    Field.WINDOW,
)


class Position:
    """Interpret and move the position of one slot.

    Attributes:
        slot: its number.
        values: [k] int64, one for each ``Field``; the methods change them in place.
        assignment: the runs of all slots.
    """

    def __init__(self, slot: int, values: np.ndarray, assignment: Assignment) -> None:
        self.slot = slot
        self.values = values
        self.assignment = assignment

    @property
    def epoch(self) -> int:
        return int(self.values[Field.EPOCH])

    def run(self) -> Run:
        """Return what the slot reads in this epoch."""
        return self.assignment.run(self.slot, self.epoch)

    def choose(self) -> Part | None:
        """Return the part furthest behind its share, or None if all are read."""
        lengths = self.run().lengths
        taken = {part: int(self.values[TAKEN[part]]) for part in lengths}
        furthest_behind: Part | None = None
        # Find the smallest taken / length, compared without rounding; of equal ones the
        # first.
        for part in self.unread():
            if (
                furthest_behind is None
                or taken[part] * lengths[furthest_behind]
                < taken[furthest_behind] * lengths[part]
            ):
                furthest_behind = part
        return furthest_behind

    def next(self, part: Part) -> tuple[Segment, int]:
        """Return an unread part's segment and the index of its next document."""
        file = int(self.values[Field.BODY_FILE]) if part == Part.BODY else 0
        return self.run().parts[part][file], int(self.values[NEXT[part]])

    def wants(self, file: int, epoch: int) -> tuple[Segment, int] | None:
        """Return what the slot still needs of a file that several slots share.

        This is the segment and the index of its next document in ``epoch``, or None if
        the slot needs nothing of the file in that epoch (any more).
        """
        if self.epoch > epoch:
            return None
        parts = self.assignment.run(self.slot, epoch).parts
        for part in (Part.HEAD, Part.TAIL):
            for segment in parts.get(part, ()):
                if segment.file != file:
                    continue
                if self.epoch < epoch:
                    return segment, 0
                if not self._is_read(part):
                    return segment, int(self.values[NEXT[part]])
        return None

    def take(self, part: Part, index: int, size: int) -> None:
        """Move past document ``index`` of a part.

        ``size`` is its bytes of text, or 0 if it cannot be used.
        """
        self.values[NEXT[part]] = index + 1
        self.values[TAKEN[part]] += size
        if part == Part.BODY:
            self.values[Field.FILE_BYTES] += size

    def taken(self, part: Part) -> int:
        """Return the bytes of text taken from a part's current file."""
        column = Field.FILE_BYTES if part == Part.BODY else TAKEN[part]
        return int(self.values[column])

    def end_file(self, part: Part) -> None:
        """Go to the part's next file, or mark the part as read."""
        if part == Part.BODY:
            self.values[Field.BODY_FILE] += 1
            self.values[[Field.BODY_DOCUMENT, Field.FILE_BYTES]] = 0
            if self.values[Field.BODY_FILE] < len(self.run().parts[part]):
                return
        self.values[Field.DONE] |= 1 << part

    def end_epoch(self) -> None:
        self.values[Field.EPOCH] += 1
        self.values[list(OF_AN_EPOCH)] = 0

    def unread(self) -> list[Part]:
        """Return the parts that are not read to their end."""
        return [part for part in self.run().parts if not self._is_read(part)]

    def _is_read(self, part: Part) -> bool:
        return bool(self.values[Field.DONE] >> part & 1)
