"""A cursor gives the documents of a slot, one after another, without those that cannot
be used.

The rules for skipping look at one slot and one file only, so that any number of ranks
skips the same documents. All that lies between two usable documents of a slot is
skipped in one call, so that no stored position lies within it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torchtitan.tools.logging import logger

from titan_disp.data.assignment import Part, Segment
from titan_disp.data.formats import (
    COMPRESSED,
    BadDocument,
    Empty,
    Garbage,
    size_of,
    text_of,
)
from titan_disp.data.listing import DataFile
from titan_disp.data.options import StreamOptions
from titan_disp.data.passes import Passes
from titan_disp.data.position import Field, Position
from titan_disp.errors import DataError

# The rest of a file is skipped after …
# … documents in a row of a compressed file that are not JSON: flipped bytes, which
# spoil the rest of it
_GARBAGE = 8
# … documents in a row that cannot be used: the rest is likely to be of the same kind
_WRONG = 1000
# … documents in a row that cannot be used, when the file ends with them
_WRONG_END = 100

# A slot gives up after …
_BAD = 1000  # … unusable documents in a row, once it has read its whole share
# … times S epochs in a row without any document: this happens to a sound corpus with
# probability e⁻²⁰
_EPOCHS = 20
# … unusable documents in a row anywhere, because the other ranks wait in the meantime
_HOPELESS = 20_000
_HOPELESS_FILES = 20  # … damaged files in a row, for the same reason


class Faults:
    """Decide what happens to documents and files that cannot be used."""

    def __init__(
        self,
        files: Sequence[DataFile],
        options: StreamOptions,
        first_files: Sequence[int] = (0,),
    ) -> None:
        """``first_files`` holds the index of each source's first file."""
        self.names = [file.name for file in files]
        self.sizes = [file.size for file in files]
        self.options = options
        self._first_files = first_files
        self._sources = [
            slice(*bounds) for bounds in pairwise([*first_files, len(files)])
        ]
        # bytes
        self._expendable = [
            options.max_skipped_fraction * sum(self.sizes[source])
            for source in self._sources
        ]
        self._told: set[tuple[int, int]] = set()
        self._told_of_slots = False

    def bad(self, file: int, index: int, reason: str) -> None:
        """Log once that a document, or the rest of a file (index −1), is skipped.

        Raise DataError if on_bad_data is "fail".
        """
        name = self.names[file]
        text = (
            f"{name}, document {index}: {reason}"
            if index >= 0
            else f"{name} is damaged and ends early: {reason}"
        )
        if self.options.on_bad_data == "fail":
            raise DataError(f'{text}. stream.on_bad_data = "skip" would pass over it')
        if (file, index) not in self._told and (index < 0 or len(self._told) < 1000):
            self._told.add((file, index))
            logger.warning(f"skipped: {text}")

    def no_documents(self, position: Position) -> None:
        if not self._told_of_slots:
            self._told_of_slots = True
            logger.warning(
                f"data: slot {position.slot} of {position.assignment.slots} has no "
                f"documents in epoch {position.epoch - 1}. If there are hardly more "
                "documents than slots, their order and shares are poor: lower "
                "stream.slots"
            )

    def wrong(self, file: int, in_a_row: int, least: int) -> str | None:
        """Return why the rest of a file is skipped, or None.

        One that is too large to be skipped is read to its end.
        """
        if in_a_row < least or self.sizes[file] > self._expendable[self._source(file)]:
            return None
        return f"{in_a_row} documents in a row cannot be used"

    def beside(self, file: int) -> list[str]:
        return self.names[self._sources[self._source(file)]]

    def _source(self, file: int) -> int:
        return bisect_right(self._first_files, file) - 1


@dataclass(frozen=True)
class Document:
    """Hold a usable document of a slot: a text, or token ids as stored; not empty."""

    content: str | np.ndarray
    size: int  # bytes in UTF-8, or of the ids as stored
    start: np.ndarray  # [k] int64, the slot's position at its first token …
    end: np.ndarray  # … and after its last one


@dataclass
class _Search:
    """Count what a slot has met since its last usable document."""

    epochs: int = 0  # that ended
    empty: int = 0  # documents without text
    bad: int = 0  # documents that cannot be used
    row: int = 0  # of these, the most recent ones, all in the current file …
    row_bytes: int = 0  # … and their bytes
    # of these, the most recent ones that are not JSON, in a compressed file
    garbage: int = 0
    counted: int = 0  # those of the bad documents that are not in a damaged file
    damaged: int = 0  # damaged files without a sound file between them


class Cursor:
    """Walk over the documents of one slot, epoch after epoch.

    The cursor moves ``position``.
    """

    def __init__(self, position: Position, passes: Passes, faults: Faults) -> None:
        self.position = position
        self.passes = passes
        self.faults = faults
        self._search = _Search()

    def next(self) -> Document:
        """Return the next usable document, of this or a later epoch.

        Raise DataError if on_bad_data says so, or it gives up.
        """
        while (document := self.next_of_epoch()) is None:
            self.end_epoch()
        return document

    def next_of_epoch(self) -> Document | None:
        position = self.position
        p = self.position.values
        while True:
            part = position.choose()
            if part is None:
                return None
            segment, first = position.next(part)
            index, raw, damage = self.passes.fetch(
                position.slot, position.epoch, segment, first
            )
            if raw is None:
                self._end_file(
                    part,
                    segment,
                    damage
                    or self.faults.wrong(segment.file, self._search.row, _WRONG_END),
                )
                continue
            try:
                content = (
                    raw
                    if isinstance(raw, np.ndarray)
                    else text_of(raw, self.passes.options.format.text_field)
                )
            except BadDocument as error:
                self._pass_over(part, segment, index, error, error.size or size_of(raw))
                continue
            size = len(content.encode()) if isinstance(content, str) else content.nbytes
            start = p.copy()
            p[Field.DOCUMENTS] += 1
            p[Field.BYTES] += size
            position.take(part, index, size)
            self._search = _Search()
            return Document(content, size, start, p.copy())

    def _pass_over(
        self, part: Part, segment: Segment, index: int, error: BadDocument, size: int
    ) -> None:
        search = self._search
        if isinstance(error, Empty):
            search.empty += 1
        else:
            self.faults.bad(segment.file, index, str(error))
            search.bad = search.bad + 1
            search.counted = search.counted + 1
            self.position.values[[Field.SKIPPED, Field.SKIPPED_BYTES]] += 1, size
            search.row = search.row + 1
            search.row_bytes = search.row_bytes + size
        garbage = isinstance(error, Garbage) and self.faults.names[
            segment.file
        ].endswith(COMPRESSED)
        search.garbage = search.garbage + 1 if garbage else 0
        self.position.take(part, index, 0)
        damage = self.faults.wrong(segment.file, search.row, _WRONG)
        if search.garbage == _GARBAGE:
            damage = f"{_GARBAGE} documents in a row are not JSON"
        if damage is not None:
            self.passes.leave(self.position.slot, self.position.epoch, segment.file)
            self._end_file(part, segment, damage)
        if search.bad + search.empty == _HOPELESS:
            self._give_up()

    def _end_file(self, part: Part, segment: Segment, damage: str | None) -> None:
        p = self.position.values
        search = self._search
        row = search.row
        row_bytes = search.row_bytes
        rest = segment.text - self.position.taken(part)
        search.row = search.row_bytes = search.garbage = 0
        self.position.end_file(part)
        if damage is not None:
            self.faults.bad(segment.file, -1, damage)
            # of all slots that share the file, one counts it …
            p[Field.SKIPPED_FILES] += segment.low == 0
            # … and the documents that revealed the damage count as part of it
            p[Field.SKIPPED] -= row
            p[Field.SKIPPED_BYTES] += max(0, rest - row_bytes)
            search.counted -= row
            search.damaged += 1
            if search.damaged == _HOPELESS_FILES:
                self._give_up()
        elif not row:
            search.damaged = 0

    def end_epoch(self) -> None:
        """Go on to the next epoch.

        With few documents, a slot has none in some epochs, but on average one in S
        epochs.
        """
        search = self._search
        self.position.end_epoch()
        search.epochs += 1
        if search.epochs == 2:
            self.faults.no_documents(self.position)
        if (
            search.counted >= _BAD
            or search.epochs > _EPOCHS * self.position.assignment.slots
        ):
            self._give_up()

    def _give_up(self) -> None:
        search = self._search
        slots = self.position.assignment.slots
        names = self.faults.beside(self.position.run().segments[0].file)
        advice = "They hold no documents for this slot: add data, or lower stream.slots"
        if search.bad or search.damaged:
            advice = "The log above says why: repair or remove these files"
        raise DataError(
            f"slot {self.position.slot} of {slots} found no usable document "
            f"(completed epochs: {search.epochs}, bad documents: {search.bad}, "
            f"damaged files: {search.damaged}, documents without text: "
            f"{search.empty}) in these files: {len(names)}, from {names[0]} to "
            f"{names[-1]}. {advice}"
        )


# The counts are those of all ranks together, so that all ranks and any number of ranks
# decide alike.
_FIRST = 1000  # documents; among fewer, a few bad ones are a large fraction
# damaged files per epoch; with fewer, a small data set may still be worth a run
_FEW = 10


def check_documents(skipped: float, used: float, allowed: float) -> None:
    """Raise DataError if too many documents cannot be used; never among the first
    1000.
    """
    every = skipped + used
    if every >= _FIRST and skipped > allowed * every:
        raise DataError(
            f"{skipped:.0f} of {every:.0f} documents could not be used, more than "
            f"stream.max_skipped_fraction {allowed} allows: the reasons are in the "
            "logs above (of all ranks)"
        )


def check_bytes(skipped: float, every: float, documents: float, allowed: float) -> None:
    """Raise DataError if too much of the text is lost, ``every`` being that of all
    epochs begun.
    """
    if documents >= _FIRST and skipped > allowed * every:
        raise DataError(
            f"about {skipped:,.0f} of {every:,.0f} bytes of text could not be used, "
            f"more than stream.max_skipped_fraction {allowed} allows: the reasons are "
            "in the logs above (of all ranks)"
        )


def check_files(skipped: float, begun: float, files: int, allowed: float) -> None:
    """Raise DataError if too many of the data's ``files`` are damaged and end early: at
    least 10 per epoch.
    """
    # Per epoch: otherwise one damaged file among a few would stop a run in its tenth
    # epoch, and after every resume.
    if skipped * files >= _FEW * begun and skipped > allowed * begun:
        raise DataError(
            f"{skipped:.0f} of {begun:.0f} files are damaged and end early, more than "
            f"stream.max_skipped_fraction {allowed} allows: their names are in the "
            "logs above (of all ranks)"
        )
