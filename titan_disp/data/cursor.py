"""A cursor returns the usable documents of a slot, one after another.

The rules for skipping depend on one slot and one file only, so the same documents are
skipped on any number of ranks. Everything between two usable documents of a slot is
skipped in one call. No stored position lies between the two documents, so a resume
skips the same documents.
"""

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

import numpy as np
from torchtitan.tools.logging import logger

from titan_disp.data.assignment import Part, Segment
from titan_disp.data.formats import (
    COMPRESSED,
    BadDocument,
    Empty,
    Garbage,
    Record,
    size_of,
    text_of,
)
from titan_disp.data.listing import DataFile
from titan_disp.data.options import StreamOptions
from titan_disp.data.passes import FileEnd, Passes
from titan_disp.data.position import Position
from titan_disp.errors import DataError

# The rest of a file is skipped after …
# … this many documents in a row that cannot be parsed, if the file is compressed: its
# bytes are flipped, which spoils the rest of the file
_GARBAGE = 8
# … this many documents in a row that cannot be used: the rest of the file is likely to
# be of the same kind
_BAD_ROW = 1000
# A file is damaged if it ends with this many unusable documents in a row.
_BAD_END = 100

# A slot gives up after …
# … this many unusable documents in a row, if it has read its whole share
_BAD = 1000
# … this many epochs in a row per slot of the run, if it found no document in them: this
# happens in a sound corpus with probability e⁻²⁰
_EPOCHS = 20
# … this many unusable documents in a row, in any case, because other ranks are waiting
_HOPELESS = 20_000
_HOPELESS_FILES = 20  # … this many damaged files in a row, for the same reason

_MOST_LOGGED = 1000  # faults that a rank logs


class Faults:
    """Reports a rank's unusable documents and files, and decides when the rest of a file
    is skipped.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        options: StreamOptions,
        first_files: Sequence[int] = (0,),
    ) -> None:
        """``first_files`` holds the index of each source's first file."""
        self.files = files
        self.options = options
        self._first_files = first_files
        self._sources = [
            files[first:end] for first, end in pairwise([*first_files, len(files)])
        ]
        self._logged: set[str] = set()

    def files_of_source(self, file: int) -> Sequence[DataFile]:
        """Return all files of the source to which the file with this index belongs."""
        return self._sources[bisect_right(self._first_files, file) - 1]

    def report(self, fault: str, limit: int = _MOST_LOGGED) -> None:
        """Log a fault, unless it or ``limit`` other faults were logged before.

        ``fault`` names what is skipped and says why. If stream.on_bad_data is "fail",
        nothing is skipped, and this raises DataError with ``fault``.
        """
        if self.options.on_bad_data == "fail":
            raise DataError(f'{fault}. stream.on_bad_data = "skip" would pass over it')
        if len(self._logged) < limit:
            self.warn_once(fault, f"skipped: {fault}")

    def warn_once(self, key: str, text: str) -> None:
        """Log a warning, unless one with this key was logged before."""
        if key not in self._logged:
            self._logged.add(key)
            logger.warning(text)

    def too_many(self, file: int, in_a_row: int, threshold: int) -> str | None:
        """Return the reason to skip the rest of a file whose last ``in_a_row`` documents
        cannot be used, or None to read on.

        Reading continues if ``in_a_row`` is less than ``threshold``, or if the file is
        larger than the fraction stream.max_skipped_fraction of its source.
        """
        if in_a_row < threshold:
            return None
        source_size = sum(file.size for file in self.files_of_source(file))
        if self.files[file].size > self.options.max_skipped_fraction * source_size:
            return None
        return f"{in_a_row} documents in a row cannot be used"


@dataclass(frozen=True)
class Document:
    """A usable document of a slot. It is not empty."""

    content: str | np.ndarray  # a text, or token ids as stored
    size: int  # bytes in UTF-8, or of the ids as stored
    # [k] int64, the slot's position before this document, and before the unusable
    # documents of its file that directly precede it
    start: np.ndarray
    end: np.ndarray  # [k] int64, the slot's position after this document


@dataclass
class _Search:
    """Counts of what a slot has met since its last usable document."""

    epochs: int = 0  # epochs that ended
    empty: int = 0  # documents without text
    bad: int = 0  # documents that cannot be used
    # The bad documents directly before the current place in the file, and their bytes.
    # Empty documents may stand between the bad ones. (``Position.choose`` stays with a
    # part until a document is used or the file ends.)
    row: int = 0
    row_bytes: int = 0
    # the last documents of ``row`` that are ``Garbage``, in a compressed file
    garbage: int = 0
    counted: int = 0  # bad documents that are not in a damaged file
    damaged: int = 0  # damaged files without a sound file between them


class Cursor:
    """Walks over the documents of one slot, epoch after epoch.

    Attributes:
        position: the slot's position, which the cursor moves.
        passes: the open files of the rank.
        faults: reports documents and files that cannot be used.
    """

    def __init__(self, position: Position, passes: Passes, faults: Faults) -> None:
        self.position = position
        self.passes = passes
        self.faults = faults
        self._search = _Search()

    def next(self) -> Document:
        """Return the next usable document, of this or a later epoch.

        Raises DataError if the slot gives up, if a document or file cannot be used and
        stream.on_bad_data is "fail", or if a file cannot be read.
        """
        while (document := self.next_of_epoch()) is None:
            self.end_epoch()
        return document

    def next_of_epoch(self) -> Document | None:
        """Return the next usable document of this epoch, or None if there is no more.

        Raises DataError as ``next`` does.
        """
        position = self.position
        while (part := position.choose()) is not None:
            if not self._search.row:
                start = position.values.copy()
            segment, first = position.next(part)
            record = self.passes.fetch(position.slot, position.epoch, segment, first)
            if isinstance(record, FileEnd):
                self._end_file(part, segment, record)
                continue
            index, raw = record
            try:
                content, size = self._content_of(raw)
            except BadDocument as error:
                size = error.size or size_of(raw)
                self._pass_over(part, segment, index, size=size, error=error)
                continue
            position.use(part, index, size, skipped=self._search.row_bytes)
            self._search = _Search()
            return Document(content, size, start, end=position.values.copy())
        return None

    def _content_of(self, raw: Record) -> tuple[str | np.ndarray, int]:
        """Return (content, size): the text of a record and its bytes in UTF-8, or its
        ids and their bytes. Raises BadDocument if the record cannot be used.
        """
        if isinstance(raw, np.ndarray):
            return raw, raw.nbytes
        text = text_of(raw, self.passes.options.format.text_field)
        return text, len(text.encode())

    def _pass_over(
        self, part: Part, segment: Segment, index: int, size: int, error: BadDocument
    ) -> None:
        """Move past an unusable document of ``size`` bytes. If there were too many such
        documents in a row, move past the rest of the file. Report the document and
        count it as skipped, unless it is ``Empty``.

        Raises DataError if stream.on_bad_data is "fail", or the slot gives up.
        """
        search = self._search
        name = self.faults.files[segment.file].name
        self.position.pass_over(part, index)
        if isinstance(error, Garbage) and name.endswith(COMPRESSED):
            search.garbage += 1
        else:
            search.garbage = 0
        if isinstance(error, Empty):
            search.empty += 1
        else:
            self.faults.report(f"{name}, document {index}: {error}")
            self.position.count_skipped(1, size)
            search.bad += 1
            search.counted += 1
            search.row += 1
            search.row_bytes += size
        damage = self.faults.too_many(segment.file, search.row, _BAD_ROW)
        if search.garbage == _GARBAGE:
            damage = f"{_GARBAGE} documents in a row cannot be parsed"
        if damage is not None:
            self.passes.leave(self.position.slot, self.position.epoch, segment.file)
            self._skip_file(part, segment, damage)
        if search.bad + search.empty == _HOPELESS:
            self._give_up()

    def _end_file(self, part: Part, segment: Segment, end: FileEnd) -> None:
        """Go on to the part's next file. The file that has ended counts as damaged if
        its reader has found damage, or if too many documents at its end cannot be used.

        Raises DataError as ``_pass_over`` does.
        """
        search = self._search
        damage = end.damage or self.faults.too_many(segment.file, search.row, _BAD_END)
        if damage is not None:
            self._skip_file(part, segment, damage)
            return
        if not search.row:
            search.damaged = 0
        self._leave_file(part)

    def _skip_file(self, part: Part, segment: Segment, damage: str) -> None:
        """Report and count a damaged file, and go on to the part's next file.

        Raises DataError as ``_pass_over`` does.
        """
        search = self._search
        name = self.faults.files[segment.file].name
        text = f"{name} is damaged and ends early: {damage}"
        self.faults.report(text, limit=sys.maxsize)
        # ``_pass_over`` has counted the documents (and bytes) that revealed the damage.
        # They are part of the damage.
        taken = self.position.taken(part) + search.row_bytes
        self.position.count_skipped(
            documents=-search.row,
            size=max(0, segment.text - taken),
            files=int(segment.low == 0),  # one slot counts a shared file
        )
        search.counted -= search.row
        search.damaged += 1
        self._leave_file(part)
        if search.damaged == _HOPELESS_FILES:
            self._give_up()

    def _leave_file(self, part: Part) -> None:
        """Go on to the part's next file, where documents in a row count anew."""
        self.position.end_file(part)
        self._search.row = 0
        self._search.row_bytes = 0
        self._search.garbage = 0

    def end_epoch(self) -> None:
        """Go on to the next epoch, after ``next_of_epoch`` has returned None.

        Raises DataError if the slot gives up. If there are few documents, a slot has no
        document in some epochs, but on average at least one document in S epochs.
        """
        search = self._search
        slots = self.position.assignment.slots
        self.position.end_epoch()
        search.epochs += 1
        if search.epochs == 2:
            self.faults.warn_once(
                "no documents",
                f"data: slot {self.position.slot} of {slots} has no documents in epoch "
                f"{self.position.epoch - 1}. If there are hardly more documents than "
                "slots, their order and shares are poor: lower stream.slots",
            )
        if search.counted >= _BAD or search.epochs > _EPOCHS * slots:
            self._give_up()

    def _give_up(self) -> NoReturn:
        """Raise DataError with the counts of the search."""
        search = self._search
        slots = self.position.assignment.slots
        files = self.faults.files_of_source(self.position.run().segments[0].file)
        advice = "They hold no documents for this slot: add data, or lower stream.slots"
        if search.bad or search.damaged:
            advice = "The log above says why: repair or remove these files"
        raise DataError(
            f"slot {self.position.slot} of {slots} found no usable document "
            f"(completed epochs: {search.epochs}, bad documents: {search.bad}, "
            f"damaged files: {search.damaged}, documents without text: "
            f"{search.empty}) in these files: {len(files)}, from {files[0].name} to "
            f"{files[-1].name}. {advice}"
        )


# Fewer documents are not judged, because a few bad ones are a large fraction of them.
FIRST = 1000
# damaged files per epoch; with fewer, a small data set may still be worth a run
FEW = 10


def check_skipped(what: str, skipped: float, total: float, allowed: float) -> None:
    """Raise DataError if ``skipped`` is more than the fraction ``allowed`` of ``total``.

    ``what`` ends the sentence of the message, such as "documents could not be used".

    The counts are those of all ranks together. All ranks therefore decide alike, and
    the decision does not depend on the number of ranks.
    """
    if skipped > allowed * total:
        raise DataError(
            f"{skipped:.0f} of {total:.0f} {what}, more than "
            f"stream.max_skipped_fraction {allowed} allows: the reasons are in the "
            "logs above (of all ranks)"
        )


def check_documents(skipped: float, used: float, allowed: float) -> None:
    """Raise DataError if more than the fraction ``allowed`` of all documents (skipped
    or used) was skipped. Fewer than 1000 documents are not judged.
    """
    if skipped + used >= FIRST:
        what = "documents could not be used"
        check_skipped(what, skipped, skipped + used, allowed)
