"""The documents of a slot, one after another: what is read, used and passed over."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torchtitan.tools.logging import logger

from titan_disp.data.assignment import Segment
from titan_disp.data.documents import COMPRESSED, BadDocument, Garbage, text_of
from titan_disp.data.passes import Passes
from titan_disp.data.place import Field, Place
from titan_disp.errors import DataError

_BAD = 1000  # documents in a row that cannot be used, with which a slot gives up when it has read its whole share …
_EPOCHS = 20  # … or, times S, epochs in a row without any document: e⁻²⁰ is the chance of a sound corpus

_GARBAGE = 8  # documents in a row that are no JSON: flipped bytes in a compressed file, which spoil the rest of it


class Faults:
    """What happens to documents and files that cannot be used."""

    def __init__(
        self, names: list[str], places: Sequence[Place], on_bad_data: str, max_skipped_fraction: float
    ) -> None:
        """Args:
        names: of all files. places: of the rank's slots.
        on_bad_data: "skip" or "fail". max_skipped_fraction: of the rank's documents.
        """
        self.names, self.on_bad_data, self.max_skipped_fraction = names, on_bad_data, max_skipped_fraction
        self.positions = [place.position for place in places]
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

    def __init__(self, place: Place, passes: Passes, faults: Faults) -> None:
        """Args: place: taken over and moved."""
        self.place, self.passes, self.faults = place, passes, faults
        self._epoch = place.epoch  # in which the last usable document was …
        self._bad = 0  # … and how many since then cannot be used

    @property
    def position(self) -> np.ndarray:
        """[k] int64, of the next document's beginning."""
        return self.place.position

    def next(self) -> Document:
        """The next document that can be used, of this epoch or of the next one that has any for this slot.

        Raises:
            DataError: see ``Faults``; or no usable document in many epochs; or a file that cannot be reached.
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
                self._end_file(part, segment, damage)
                continue
            try:
                if isinstance(raw, BadDocument):
                    raise raw
                text = text_of(raw)
            except BadDocument as error:
                self.faults.bad(segment.file, index, str(error))
                p[Field.SKIPPED] += 1
                self._bad += 1
                garbage = isinstance(error, Garbage) and self.faults.names[segment.file].endswith(COMPRESSED)
                if place.take(part, index, 0, garbage) == _GARBAGE:
                    self.passes.leave(place.index, place.epoch, segment.file)
                    self._end_file(part, segment, f"{_GARBAGE} documents in a row are no JSON")
                self.faults.check()
                continue
            start, size = p.copy(), len(text.encode())
            p[Field.DOCUMENTS] += 1
            p[Field.BYTES] += size
            place.take(part, index, size)
            self._epoch, self._bad = place.epoch, 0
            return Document(text, size, start, p.copy())

    def _end_file(self, part: int, segment: Segment, damage: str | None) -> None:
        if damage is not None:
            self.faults.bad(segment.file, -1, damage)
            self.place.position[Field.SKIPPED_FILES] += segment.low == 0  # one slot counts it
        self.place.end_file(part)

    def end_epoch(self) -> None:
        """Go on to the next epoch. One may have nothing for this slot, where documents are few or their lengths differ much.

        Raises:
            DataError: nothing can be expected any more. A slot finds a document in one of S epochs at least, on average.
        """
        self.place.end_epoch()
        epochs, slots = self.place.epoch - self._epoch, self.place.assignment.slots
        if self._bad >= _BAD or epochs > _EPOCHS * slots:
            names = self.faults.names
            raise DataError(
                f"slot {self.place.index} of {slots} found no usable document in {epochs} epochs, and {self._bad} that cannot be "
                f"used, in {len(names)} files, {names[0]} to {names[-1]}: the log above says what is wrong with them"
            )
