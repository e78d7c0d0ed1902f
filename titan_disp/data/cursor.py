"""The documents of a slot, one after another: what is read, used and passed over.

What cannot be used is passed over by rules that know one slot and one file, so that any number of ranks passes over the same:
what comes between two usable documents of a slot is passed in one call, and no position lies in the middle of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torchtitan.tools.logging import logger

from titan_disp.data.assignment import Segment
from titan_disp.data.files import DataFile
from titan_disp.data.formats import COMPRESSED
from titan_disp.data.passes import Passes
from titan_disp.data.place import Field, Place
from titan_disp.data.records import BadDocument, Garbage, Record, size_of, text_of
from titan_disp.errors import DataError

_GARBAGE = 8  # documents in a row that are no JSON: flipped bytes in a compressed file, which spoil the rest of it
_WRONG = 1000  # documents of a file in a row that cannot be used: the rest of it is of the same kind …
_WRONG_END = 100  # … as is a file that ends with so many

_BAD = 1000  # documents in a row that cannot be used, with which a slot gives up when it has read its whole share …
_EPOCHS = 20  # … or, times S, epochs in a row without any document: e⁻²⁰ is the chance of a sound corpus …
_HOPELESS = 20_000  # … or, wherever it is, so many documents in a row …
_HOPELESS_FILES = 20  # … or so many damaged files: the other ranks wait meanwhile


class Faults:
    """What happens to documents and files that cannot be used."""

    def __init__(
        self,
        files: Sequence[DataFile],
        on_bad_data: str,
        max_skipped_fraction: float,
        first_files: Sequence[int] = (0,),
    ) -> None:
        """Args:
        files: all of them. on_bad_data: "skip" or "fail". max_skipped_fraction: of documents, and of files.
        first_files: of each source.
        """
        self.names, self.sizes = [file.name for file in files], [file.size for file in files]
        self.on_bad_data = on_bad_data
        self._sources = [slice(*bounds) for bounds in pairwise([*first_files, len(files)])]
        self._expendable = [max_skipped_fraction * sum(self.sizes[source]) for source in self._sources]  # bytes
        self._told: set[tuple[int, int]] = set()

    def bad(self, file: int, index: int, reason: str) -> None:
        """One document or (index −1) the rest of a file that cannot be used: say so once, or stop."""
        name = self.names[file]
        text = f"{name}, document {index}: {reason}" if index >= 0 else f"{name} is damaged and ends early: {reason}"
        if self.on_bad_data == "fail":
            raise DataError(f'{text}. stream.on_bad_data = "skip" would pass over it')
        if (file, index) not in self._told and (index < 0 or len(self._told) < 1000):
            self._told.add((file, index))
            logger.warning(f"skipped: {text}")

    def wrong(self, file: int, in_a_row: int, least: int) -> str | None:
        """Why the rest of a file of the wrong kind is passed over, or None.

        A file that is more of its source than may be skipped is not passed over: its documents are judged one by one.
        """
        if in_a_row < least or self.sizes[file] > self._expendable[self._source(file)]:
            return None
        return f"{in_a_row} documents in a row cannot be used"

    def beside(self, file: int) -> list[str]:
        """Names of the files of a file's source."""
        return self.names[self._sources[self._source(file)]]

    def _source(self, file: int) -> int:
        return next(i for i, source in enumerate(self._sources) if file < source.stop)


@dataclass(frozen=True)
class Document:
    """Attributes:
    content: a text, or token ids as stored; not empty. size: bytes of the text in UTF-8, or of the ids as stored.
    start, end: the slot's position at its first token and after its last, [k] int64.
    """

    content: str | np.ndarray
    size: int
    start: np.ndarray
    end: np.ndarray


@dataclass
class _Search:
    """What a slot has met on the way to its next usable document.

    Attributes:
        epochs: whose end it has passed.
        bad: documents. row: of these, the last ones, all of the current file. garbage: of these, the last ones that are no JSON
            in a compressed file. counted: of the bad ones, those of no damaged file.
        damaged: files, without a sound one between them.
    """

    epochs: int = 0
    bad: int = 0
    row: int = 0
    garbage: int = 0
    counted: int = 0
    damaged: int = 0


class Cursor:
    """Walks over one slot's documents, epoch after epoch."""

    def __init__(self, place: Place, passes: Passes, faults: Faults) -> None:
        """Args: place: taken over and moved."""
        self.place, self.passes, self.faults = place, passes, faults
        self._search = _Search()

    @property
    def position(self) -> np.ndarray:
        """[k] int64, of the next document's beginning."""
        return self.place.position

    def next(self) -> Document:
        """The next document that can be used, of this epoch or of the next one that has any for this slot.

        Raises:
            DataError: see ``Faults``; or no usable document in many epochs, or among many; or a file that cannot be reached.
        """
        while (document := self.next_of_epoch()) is None:
            self.end_epoch()
        return document

    def next_of_epoch(self) -> Document | None:
        """The next document of this epoch that can be used, or None at its end. Raises as ``next``."""
        place, p = self.place, self.place.position
        while True:
            part = place.choose()
            if part is None:
                return None
            segment, first = place.next(part)
            index, raw, damage = self.passes.fetch(place.index, place.epoch, segment, first)
            if raw is None:
                self._end_file(part, segment, damage or self.faults.wrong(segment.file, self._search.row, _WRONG_END))
                continue
            try:
                content, size = self._content(raw)
            except BadDocument as error:
                self._pass_over(part, segment, index, error)
                continue
            start = p.copy()
            p[Field.DOCUMENTS] += 1
            p[Field.BYTES] += size
            density = self.passes.density(segment.file)
            density.parsed += size_of(raw)
            density.text += size
            place.take(part, index, size)
            self._search = _Search()
            return Document(content, size, start, p.copy())

    def _content(self, raw: Record) -> tuple[str | np.ndarray, int]:
        """What a document holds, and its bytes."""
        if isinstance(raw, np.ndarray):
            return raw, raw.nbytes
        text = text_of(raw, self.passes.format.text_field)
        return text, len(text.encode())

    def _pass_over(self, part: int, segment: Segment, index: int, error: BadDocument) -> None:
        """One document, and the rest of its file where that will be no better."""
        search = self._search
        self.faults.bad(segment.file, index, str(error))
        self.place.position[Field.SKIPPED] += 1
        search.bad, search.row, search.counted = search.bad + 1, search.row + 1, search.counted + 1
        garbage = isinstance(error, Garbage) and self.faults.names[segment.file].endswith(COMPRESSED)
        search.garbage = search.garbage + 1 if garbage else 0
        self.place.take(part, index, 0)
        if search.garbage == _GARBAGE:
            damage: str | None = f"{_GARBAGE} documents in a row are no JSON"
        else:
            damage = self.faults.wrong(segment.file, search.row, _WRONG)
        if damage is not None:
            self.passes.leave(self.place.index, self.place.epoch, segment.file)
            self._end_file(part, segment, damage)
        if search.bad == _HOPELESS:
            self._give_up()

    def _end_file(self, part: int, segment: Segment, damage: str | None) -> None:
        p, search = self.place.position, self._search
        row = search.row
        search.row = search.garbage = 0
        self.place.end_file(part)
        if damage is not None:
            self.faults.bad(segment.file, -1, damage)
            p[Field.SKIPPED_FILES] += segment.low == 0  # one slot counts it …
            p[Field.SKIPPED] -= row  # … and with it the documents by which it was found out
            search.counted -= row
            search.damaged += 1
            if search.damaged == _HOPELESS_FILES:
                self._give_up()
        elif not row:
            search.damaged = 0

    def end_epoch(self) -> None:
        """Go on to the next epoch. One may have nothing for this slot, where documents are few or their lengths differ much.

        Raises:
            DataError: nothing can be expected any more. A slot finds a document in one of S epochs at least, on average.
        """
        search = self._search
        self.place.end_epoch()
        search.epochs += 1
        if search.counted >= _BAD or search.epochs > _EPOCHS * self.place.assignment.slots:
            self._give_up()

    def _give_up(self) -> None:
        """Where nothing can be expected any more."""
        search, slots = self._search, self.place.assignment.slots
        names = self.faults.beside(self.place.run().segments[0].file)
        files = f", and {search.damaged} damaged files" if search.damaged else ""
        raise DataError(
            f"slot {self.place.index} of {slots} found no usable document in {search.epochs} epochs, and {search.bad} that "
            f"cannot be used{files}, in {len(names)} files, {names[0]} to {names[-1]}: the log above says what is wrong with them"
        )
