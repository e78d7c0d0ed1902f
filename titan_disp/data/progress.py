"""How far the slots are in their epochs, by the text that they have handed out.

A position tells how many bytes of text a slot has taken from the current parts of its run, but not how many there are: of files,
the stored bytes are known. So the worker measures the text in a stored byte while it reads (``Density``). What it has read ahead
decides nothing, and after a resume the number goes on where it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan_disp.data.assignment import Run
from titan_disp.data.files import DataFile
from titan_disp.data.formats import COMPRESSED
from titan_disp.data.mixture import Share
from titan_disp.data.place import TAKEN, Field

_ENOUGH = 4 << 20  # stored bytes of a file that is not read to its end: buffers and decoders hold up to 512 KiB of them
_RATIO = 2.5  # bytes of documents in a stored byte of a compressed file, before one is measured


@dataclass(frozen=True)
class Group:
    """Slots that have epochs in common: all of the run, or those of one source.

    Attributes:
        suffix: of its counters' names. slots: of all ranks. files: how many they read in an epoch.
    """

    suffix: str
    slots: range
    files: int


def groups_of(files: Sequence[DataFile], slots: int, shares: Sequence[Share]) -> list[Group]:
    """One for each source, or one for all."""
    if not shares:
        return [Group("", range(slots), len(files))]
    return [Group(f"/{s.name}", range(s.first, s.first + s.slots), sum(map(s.owns, files))) for s in shares]


@dataclass
class Density:
    """Bytes of text in a stored byte of some files: documents in a stored byte, times text in a document as stored.

    Attributes:
        compressed: whether they are. documents, stored: bytes of all documents, whoever owns them, and where they were stored.
        parsed, text: bytes of the documents that this rank uses, and of their text.
    """

    compressed: bool
    documents: int = 0
    stored: float = 0
    parsed: int = 0
    text: int = 0

    def measured(self, documents: int, stored: float, ended: bool) -> None:
        """``documents`` bytes were read from ``stored`` bytes of a file, to its end or not."""
        if ended or stored >= _ENOUGH:
            self.documents += documents
            self.stored += stored

    def value(self) -> float:
        """The text's bytes in a stored byte; 0 where nothing is read."""
        ratio = self.documents / self.stored if self.stored else _RATIO if self.compressed else 1.0
        return ratio * self.text / max(1, self.parsed)


def densities(files: Sequence[DataFile], starts: Sequence[int]) -> list[Density]:
    """Nothing measured yet. starts: the first file of each source."""
    return [Density(files[start].name.endswith((*COMPRESSED, ".parquet"))) for start in starts]


def fraction_read(position: np.ndarray, run: Run, slots: int, density: float) -> float:
    """The part of its run that a slot has handed out: 0 to 1.

    Args:
        position: [k] int64, of the slot. run: of its epoch.
        slots: of which each has a run of the epoch, as ``Segment.length`` counts them. density: bytes of text in a stored byte.
    """
    every, read = sum(run.weights), 0.0
    for part, length in enumerate(run.weights):
        least, most = 0, length
        if int(position[Field.DONE]) >> part & 1:
            least = length
        elif part == 1 and length:  # the current one of the whole files is known
            current = int(position[Field.BODY_FILE])
            least = sum(segment.length for segment in run.body[:current])
            most = least + run.body[current].length
        taken = int(position[TAKEN[part]]) * slots / density if density else 0.0
        read += min(max(taken, least), most)
    if (
        density
    ):  # all above is of the window's beginning; of its documents only the number used is known, and their mean length
        window = int(position[Field.IN_WINDOW]) * int(position[Field.BYTES]) / max(1, int(position[Field.DOCUMENTS]))
        read = min(read + window * slots / density, every)
    return read / every if every else 0.0
