"""What a *position* is: the 19 integers from which a slot continues.

A checkpoint stores one row of integers for each slot. From these rows, any number of
ranks reads on at the next token. ``Field`` names the integers, which are of four kinds:

- *Documents.* A slot reads its run in three parts, see ``assignment``. For each part
  there is the index of the next document, and how much text was taken from the part:
  the text of documents that were used, and of unusable documents before them.
- *Window.* If documents are shuffled, the fields above describe the beginning of the
  current window, and IN_WINDOW says how many of its documents were used.
- *Offset.* How many tokens of the next document were used.
- *Totals* since the start of the run.

All changes of a position are made here. ``Cursor`` moves a ``Position`` past the
documents that it reads. A ``Document`` holds two copies of the position, from before
and after the document. The loader keeps each slot's position after the last sequence
trained on.
"""

from enum import IntEnum
from fractions import Fraction

import numpy as np

from titan_disp.data.assignment import Assignment, Part, Run, Segment


class Field(IntEnum):
    """The columns of the tensor of positions, [S, k] int64."""

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
    OFFSET_BYTES = 13  # approximate size of these tokens' text
    DOCUMENTS = 14  # used since the start of the run
    BYTES = 15  # of text, in UTF-8, of the documents used
    SKIPPED = 16  # documents skipped since the start of the run
    SKIPPED_FILES = 17  # files that ended early
    SKIPPED_BYTES = 18  # approximate size of what was skipped


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
    """The position up to which a slot's documents are read.

    Attributes:
        slot: the slot's number.
        values: [k] int64, one for each ``Field``. The methods change them in place.
        assignment: the runs of all slots.
    """

    def __init__(self, slot: int, values: np.ndarray, assignment: Assignment) -> None:
        self.slot = slot
        self.values = values
        self.assignment = assignment

    @classmethod
    def within_epoch(
        cls, slot: int, assignment: Assignment, fraction: float
    ) -> "Position":
        """Return the approximate position of a slot that has read a fraction of an
        epoch's text. Only the bytes taken are estimated, not the indices of documents.
        """
        position = cls(slot, np.zeros(len(Field), dtype=np.int64), assignment)
        for part, segments in position.run().parts.items():
            text = int(fraction * sum(segment.text for segment in segments))
            for segment in segments:
                if text < segment.text:
                    position.use(part, 0, text)
                    break
                text -= segment.text
                position.end_file(part)
        return position

    @property
    def epoch(self) -> int:
        return int(self.values[Field.EPOCH])

    @property
    def window(self) -> int:
        return int(self.values[Field.WINDOW])

    # ---- which document comes next

    def run(self) -> Run:
        """Return what the slot reads in this epoch."""
        return self.assignment.run(self.slot, self.epoch)

    def unread(self) -> list[Part]:
        """Return the parts of the run that are not read to their end."""
        return [part for part in self.run().parts if not self._is_read(part)]

    def _is_read(self, part: Part) -> bool:
        return bool(self.values[Field.DONE] >> part & 1)

    def choose(self) -> Part | None:
        """Return the unread part furthest behind its share, or None if all are read.

        This is the part with the smallest taken / length, or the first of equal parts.
        """
        lengths = self.run().lengths
        return min(
            self.unread(),
            key=lambda part: Fraction(int(self.values[TAKEN[part]]), lengths[part]),
            default=None,
        )

    def next(self, part: Part) -> tuple[Segment, int]:
        """Return an unread part's current segment, and the index in its file of the
        first document at which the slot has not looked yet.
        """
        segments = self.run().parts[part]
        number = int(self.values[Field.BODY_FILE]) if part == Part.BODY else 0
        return segments[number], int(self.values[NEXT[part]])

    def wants(self, file: int, epoch: int) -> tuple[Segment, int] | None:
        """Return what the slot still needs of a file that several slots share: the
        segment and the index of its next document in ``epoch``.

        Return None if the slot needs nothing of the file, or no more, in that epoch.
        """
        if self.epoch > epoch:
            return None
        ahead = self
        if self.epoch < epoch:
            ahead = Position(self.slot, np.zeros_like(self.values), self.assignment)
            ahead.values[Field.EPOCH] = epoch
        for segment, start in map(ahead.next, ahead.unread()):
            if segment.file == file:
                return segment, start
        return None

    def taken(self, part: Part) -> int:
        """Return the bytes of text taken from a part's current file."""
        field = Field.FILE_BYTES if part == Part.BODY else TAKEN[part]
        return int(self.values[field])

    # ---- moves

    def use(self, part: Part, index: int, size: int, skipped: int = 0) -> None:
        """Move past document ``index`` of a part. The document has ``size`` bytes of
        text, and the unusable documents directly before it have ``skipped`` bytes.
        """
        self.pass_over(part, index)
        self.values[TAKEN[part]] += skipped + size
        self.values[Field.DOCUMENTS] += 1
        self.values[Field.BYTES] += size
        if part == Part.BODY:
            self.values[Field.FILE_BYTES] += skipped + size

    def pass_over(self, part: Part, index: int) -> None:
        """Move past the unusable document ``index`` of a part. ``choose`` stays with
        the part.
        """
        self.values[NEXT[part]] = index + 1

    def end_file(self, part: Part) -> None:
        """Go to the part's next file, or mark the part as read."""
        if part == Part.BODY:
            self.values[Field.BODY_FILE] += 1
            self.values[[Field.BODY_DOCUMENT, Field.FILE_BYTES]] = 0
            if self.values[Field.BODY_FILE] < len(self.run().parts[part]):
                return
        self.values[Field.DONE] |= 1 << part

    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self.values[Field.EPOCH] += 1
        self.values[list(OF_AN_EPOCH)] = 0

    def count_skipped(self, documents: int, size: int, files: int = 0) -> None:
        """Add to the totals of skipped documents, bytes (``size``) and files."""
        skipped = [Field.SKIPPED, Field.SKIPPED_BYTES, Field.SKIPPED_FILES]
        self.values[skipped] += documents, size, files

    # ---- within a window and a document

    def rewind_window(self) -> int:
        """Go back to the beginning of the window, and return how many of its documents
        were used.

        BYTES still includes these documents, because their size is known only after the
        window has been read again.
        """
        used = int(self.values[Field.IN_WINDOW])
        self.values[Field.IN_WINDOW] = 0
        self.values[Field.DOCUMENTS] -= used
        return used

    def end_window(self, size_used: int) -> None:
        """Go to the next window, when the documents of this one have been read.

        ``size_used`` is the size in bytes of the documents that were used before
        ``rewind_window``. BYTES has counted these documents twice.
        """
        self.values[Field.WINDOW] += 1
        self.values[Field.BYTES] -= size_used

    def rewind_document(self) -> int:
        """Go back to the beginning of the document that would be continued next, and return
        how many of its tokens were used.
        """
        tokens = int(self.values[Field.OFFSET])
        self.values[[Field.OFFSET, Field.OFFSET_BYTES]] = 0
        return tokens


def in_window(values: np.ndarray, documents: int, size: int) -> np.ndarray:
    """Return the position after ``documents`` more documents of a window. Together,
    these documents have ``size`` bytes of text.
    """
    moved = values.copy()
    moved[Field.IN_WINDOW] += documents
    moved[Field.DOCUMENTS] += documents
    moved[Field.BYTES] += size
    return moved


def in_document(values: np.ndarray, tokens: int, size: int) -> np.ndarray:
    """Return the position after the first ``tokens`` tokens of the next document. The
    text of these tokens has approximately ``size`` bytes.
    """
    moved = values.copy()
    moved[Field.OFFSET] = tokens
    moved[Field.OFFSET_BYTES] = size
    return moved
