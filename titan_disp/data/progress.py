"""This module measures how far the slots are in their epochs, by the text that they have handed out.

A position holds the bytes of text that a slot has taken from its run, but the size of the run is known in stored bytes
only. The worker therefore measures the bytes of text per stored byte while it reads (``Density``). Text that is
prefetched does not count, and after a resume the fraction continues where it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan_disp.data.assignment import Run
from titan_disp.data.files import DataFile
from titan_disp.data.formats import COMPRESSED
from titan_disp.data.mixture import Share
from titan_disp.data.place import TAKEN, Field

# Stored bytes that must be read of an unfinished file before it is measured: buffers and decoders hold up to 512 KiB.
_ENOUGH = 4 << 20
_RATIO = 2.5  # bytes of documents per stored byte of a compressed file, until it is measured


@dataclass(frozen=True)
class Group:
    """Describe slots whose epochs are counted together: all slots of the run, or those of one source.

    Attributes:
        suffix: appended to the names of the group's counters.
        slots: the group's slots, over all ranks.
        files: how many files these slots read in an epoch.
    """

    suffix: str
    slots: range
    files: int


def groups_of(files: Sequence[DataFile], slots: int, shares: Sequence[Share]) -> list[Group]:
    """Return one group for each of [[stream.sources]], or one for all slots if there are none."""
    if not shares:
        return [Group("", range(slots), len(files))]
    return [Group(f"/{s.name}", range(s.first, s.first + s.slots), sum(map(s.owns, files))) for s in shares]


@dataclass
class Density:
    """Measure the bytes of text per stored byte: (documents / stored) · (text / parsed).

    Attributes:
        compressed: whether the files are compressed.
        documents: bytes of all documents read, whichever slot owns them.
        stored: stored bytes of these documents.
        parsed: bytes of the documents that this rank uses.
        text: bytes of their text.
    """

    compressed: bool
    documents: int = 0
    stored: float = 0
    parsed: int = 0
    text: int = 0

    def measured(self, documents: int, stored: float, ended: bool) -> None:
        """Add a measurement: ``stored`` bytes of a file, read to its end or not, held ``documents`` bytes."""
        if ended or stored >= _ENOUGH:
            self.documents += documents
            self.stored += stored

    def value(self) -> float:
        """Return the bytes of text per stored byte, or 0 if nothing has been read."""
        ratio = self.documents / self.stored if self.stored else _RATIO if self.compressed else 1.0
        return ratio * self.text / max(1, self.parsed)


def densities(files: Sequence[DataFile], starts: Sequence[int]) -> list[Density]:
    """Make one empty Density for each source. ``starts`` holds the index of each source's first file."""
    return [Density(files[start].name.endswith((*COMPRESSED, ".parquet"))) for start in starts]


def fraction_read(position: np.ndarray, run: Run, slots: int, density: float) -> float:
    """Return the fraction of its run that a slot has handed out, from 0 to 1.

    Args:
        position: [k] int64, the slot's position.
        run: the slot's run in its current epoch.
        slots: the number of slots that ``Segment.length`` was multiplied by.
        density: bytes of text per stored byte.
    """
    every, read = sum(run.weights), 0.0
    for part, length in enumerate(run.weights):
        least, most = 0, length
        if int(position[Field.DONE]) >> part & 1:
            least = length
        elif part == 1 and length:  # the files before the current one are read, those after it are not
            current = int(position[Field.BODY_FILE])
            least = sum(segment.length for segment in run.body[:current])
            most = least + run.body[current].length
        taken = int(position[TAKEN[part]]) * slots / density if density else 0.0
        read += min(max(taken, least), most)
    # Up to here, only text before the shuffling window counts. For the documents used of the window, only their number
    # is known; they are taken to have the mean length.
    if density:
        window = int(position[Field.IN_WINDOW]) * int(position[Field.BYTES]) / max(1, int(position[Field.DOCUMENTS]))
        read = min(read + window * slots / density, every)
    return read / every if every else 0.0
