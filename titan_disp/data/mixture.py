"""Several sources with weights, [[stream.sources]]: a slot belongs to one source.

So everything that holds for the slots of one corpus holds here: ranks, resumes and prefetch decide nothing, a file is read in one
pass, and each source has its own epochs. Its documents come in its slots as in a run of its own with so many slots, but for their
order within a window (``shuffle``), which the slot's number decides.

Of S slots, a source has a number in proportion to its weight, by largest remainder. Every slot gives one sequence in turn, so
that the source's part of the tokens is its part of the slots, exactly, in every S sequences. Its slots are contiguous: a rank
reads files of few sources.
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
    """What a source has of the run.

    Attributes:
        slots: how many, from ``first`` on; of ``total``.
        asked: the part of the tokens that its weight asks for.
    """

    name: str
    first: int
    slots: int
    total: int
    asked: float

    def owns(self, file: DataFile) -> bool:
        """Whether a file, ``prefixed``, is of this source."""
        return file.name.startswith(f"{self.name}/")

    @property
    def tokens(self) -> float:
        """The part of the tokens that it has."""
        return self.slots / self.total

    def __str__(self) -> str:
        return f"{self.name}: {self.tokens:.2%} of the tokens ({self.asked:.2%} asked for), {self.slots} of {self.total} slots"


def shares(weights: dict[str, float], slots: int) -> list[Share]:
    """Slots of each source, by largest remainder of its weight; of equal remainders, the first.

    Args:
        weights: by name, each > 0. slots: S.

    Raises:
        ConfigError: there are too few slots for the lightest source to get one.
    """
    exact = {name: Fraction(repr(weight)) for name, weight in weights.items()}  # 0.1 is a tenth
    quotas = {name: slots * weight / sum(exact.values()) for name, weight in exact.items()}
    counts = {name: math.floor(quota) for name, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda name: counts[name] - quotas[name])
    for name in by_remainder[: slots - sum(counts.values())]:
        counts[name] += 1
    if without := [name for name, count in counts.items() if not count]:
        least = math.ceil(slots / min(quotas.values()))
        raise ConfigError(
            f"stream.sources: {slots} slots are too few for {', '.join(without)}, whose weight asks for "
            f"{', '.join(f'{float(quotas[name]):.2g}' for name in without)} of them, and a slot belongs to one source: set "
            f"stream.slots (0: training.global_batch_size) to {least} or more, or raise the weight"
        )
    found, first = [], 0
    for name, count in counts.items():
        found.append(Share(name, first, count, slots, float(quotas[name] / slots)))
        first += count
    return found


def prefixed(name: str, files: Sequence[DataFile]) -> list[DataFile]:
    """A source's files under the names that they have in a mixture: other sources may have files of the same names."""
    return [replace(file, name=f"{name}/{file.name}") for file in files]


@dataclass(frozen=True)
class _Part:
    """One source. slots, files: its own, of all."""

    slots: range
    files: range
    assignment: Assignment


class Mixture:
    """Runs of all slots, each of files of one source; as ``Assignment``, which it has one of for each source."""

    def __init__(self, files: Sequence[DataFile], shares: Sequence[Share], seed: int) -> None:
        """Args:
        files: of all sources, in the order of the shares, ``prefixed``. seed: of the stream.
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
        """The slots that own documents of a file."""
        part = self._parts[bisect_right(self.first_files, file) - 1]
        own = part.assignment.owners(file - part.files.start, epoch)
        return part.slots[own.start : own.stop]

    def order(self, epoch: int) -> list[int]:
        """The files of an epoch, shuffled within each source."""
        return [part.files[file] for part in self._parts for file in part.assignment.order(epoch)]

    def files_of(self, slots: range, epoch: int) -> set[int]:
        """The files that a rank with these slots reads in an epoch."""
        return {segment.file for slot in slots for segment in self.run(slot, epoch).segments}
