"""This module mixes several sources by weights ([[stream.sources]]). Each slot belongs to one source.

All promises about slots therefore hold for each source: ranks, resumes and prefetch decide nothing, one pass over a
file serves all slots of a rank, and each source has its own epochs. The documents of a source come in its slots as in a
run of this source alone with this number of slots. Only the shuffling differs, because it depends on the slot's
number.

The S slots are divided among the sources in proportion to their weights, by largest remainder. Every slot gives one
sequence in turn, so that in every S sequences a source's fraction of the tokens is exactly its fraction of the slots.
The slots of a source are contiguous, so that a rank reads files of few sources.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from titan_disp.data.assignment import Assignment, Run, Segment
from titan_disp.data.files import DataFile
from titan_disp.errors import ConfigError


@dataclass(frozen=True)
class Share:
    """Describe one source's share of the run.

    Attributes:
        name: of the source.
        first: its first slot.
        slots: its number of slots.
        total: S.
        asked: the fraction of the tokens that its weight asks for.
    """

    name: str
    first: int
    slots: int
    total: int
    asked: float

    def owns(self, file: DataFile) -> bool:
        """Return whether a file whose name is ``prefixed`` belongs to this source."""
        return file.name.startswith(f"{self.name}/")

    @property
    def tokens(self) -> float:
        """Return the source's fraction of the tokens."""
        return self.slots / self.total

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.tokens:.2%} of the tokens ({self.asked:.2%} asked for), "
            f"{self.slots} of {self.total} slots"
        )


def shares(weights: dict[str, float], slots: int) -> list[Share]:
    """Divide the slots among the sources by largest remainder of their weights; ties go to the first source.

    Args:
        weights: by source name, each > 0.
        slots: S.

    Raises:
        ConfigError: some source gets no slot.
    """
    exact = {name: Fraction(repr(weight)) for name, weight in weights.items()}  # 0.1 is exactly one tenth
    quotas = {name: slots * weight / sum(exact.values()) for name, weight in exact.items()}
    counts = {name: math.floor(quota) for name, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda name: counts[name] - quotas[name])
    for name in by_remainder[: slots - sum(counts.values())]:
        counts[name] += 1
    if without := [name for name, count in counts.items() if not count]:
        least = math.ceil(slots / min(quotas.values()))
        raise ConfigError(
            f"stream.sources: {slots} slots are too few for {', '.join(without)}, whose weight asks for "
            f"{', '.join(f'{float(quotas[name]):.2g}' for name in without)} of them, and a slot belongs to one source: "
            f"raise training.global_batch_size (and stream.slots, if it is set) until there are at least {least} slots, or "
            "raise the weight"
        )
    found, first = [], 0
    for name, count in counts.items():
        found.append(Share(name, first, count, slots, float(quotas[name] / slots)))
        first += count
    return found


def prefixed(name: str, files: Sequence[DataFile]) -> list[DataFile]:
    """Put the source's name before its files' names, because other sources may have files of the same names."""
    return [replace(file, name=f"{name}/{file.name}") for file in files]


@dataclass(frozen=True)
class _Part:
    """Hold one source: its slots, its files among those of all sources, and the assignment within the source."""

    slots: range
    files: range
    assignment: Assignment


class Mixture:
    """Compute all slots' runs, with the interface of ``Assignment``. Each source has an ``Assignment`` of its own."""

    def __init__(self, files: Sequence[DataFile], shares: Sequence[Share], seed: int) -> None:
        """Make one assignment for each source.

        Args:
            files: the ``prefixed`` files of all sources, in the order of ``shares``.
            shares: of all sources.
            seed: ``stream.seed``.
        """
        self.slots, self.seed = sum(share.slots for share in shares), seed
        self._parts = []
        end = 0
        for share in shares:
            own = [replace(file, name=file.name.partition("/")[2]) for file in files if share.owns(file)]
            slots, numbers = range(share.first, share.first + share.slots), range(end, end + len(own))
            self._parts.append(_Part(slots, numbers, Assignment(own, share.slots, seed)))
            end = numbers.stop
        self._first_slots = [part.slots.start for part in self._parts]
        self.first_files = [part.files.start for part in self._parts]
        self.run = lru_cache(maxsize=8 * self.slots)(self._run)

    def _run(self, slot: int, epoch: int) -> Run:
        part = self._parts[bisect_right(self._first_slots, slot) - 1]
        run = part.assignment.run(slot - part.slots.start, epoch)

        def moved(segment: Segment) -> Segment:
            return replace(segment, file=part.files[segment.file])

        head, tail = (moved(segment) if segment is not None else None for segment in (run.head, run.tail))
        return Run(head, tuple(map(moved, run.body)), tail)

    def owners(self, file: int, epoch: int) -> range:
        """Return the slots that own documents of a file in an epoch."""
        part = self._parts[bisect_right(self.first_files, file) - 1]
        own = part.assignment.owners(file - part.files.start, epoch)
        return part.slots[own.start : own.stop]

    def order(self, epoch: int) -> list[int]:
        """Return the indices of the files of an epoch, shuffled within each source."""
        return [part.files[file] for part in self._parts for file in part.assignment.order(epoch)]

    def files_of(self, slots: range, epoch: int) -> set[int]:
        """Return the indices of the files that a rank with these slots reads in an epoch."""
        return {segment.file for slot in slots for segment in self.run(slot, epoch).segments}
