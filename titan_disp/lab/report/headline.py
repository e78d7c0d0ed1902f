"""This module answers what a person asks first of runs: did they finish, what did they
reach, are their embeddings condensed, what did dispersion change, and what did it cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from titan_disp.errors import counted
from titan_disp.lab.report.gather import (
    Condition,
    RunRecord,
    Seeds,
    conditions,
    seeds_of,
)
from titan_disp.lab.report.series import (
    COSINE,
    CROSS_ENTROPY,
    DISPERSION,
    HELD_OUT,
    SMOOTHED,
    SPEED,
    VALIDATION,
    Series,
)
from titan_disp.lab.report.tables import median_speed, state
from titan_disp.lab.statistics import paired_by_seed, standard_error, with_error
from titan_disp.text import NOTHING, number

# The first one that all runs have is compared.
LOSSES = (HELD_OUT, VALIDATION, SMOOTHED, CROSS_ENTROPY)


@dataclass(frozen=True)
class Outcome:
    """A number of each run, at the latest step that all runs have."""

    label: str
    values: np.ndarray  # [runs] float64
    note: str  # such as "at step 300"
    # Whether differences are relative, such as "-5.1%" for tokens/s
    is_relative: bool = False

    def mean(self, condition: Condition) -> str:
        """Return the mean over a condition's runs. If it is not relative, several runs
        have their standard error.
        """
        values = self.values[condition.places]
        if self.is_relative:
            return number(values.mean(), 4)
        return with_error(values.mean(), standard_error(values))


class Tile(NamedTuple):
    """A number of the first screen, as text."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Headline:
    """What a page says first about runs."""

    runs: Sequence[RunRecord]
    written: float  # time of the page, in seconds since the epoch

    @cached_property
    def conditions(self) -> list[Condition]:
        return conditions(self.runs)

    @cached_property
    def baseline(self) -> Condition:
        """Return the first condition without dispersion, or the first one."""
        for condition in self.conditions:
            if not self.runs[condition.places[0]].disperses:
                return condition
        return self.conditions[0]

    @cached_property
    def outcomes(self) -> list[Outcome]:
        """Return what is compared: a loss, the mean cosine, the dispersion loss and the
        speed, without those that a run lacks.
        """
        losses = (_outcome(series, self.runs) for series in LOSSES)
        loss = next((outcome for outcome in losses if outcome is not None), None)
        speeds = np.array([median_speed(run) for run in self.runs])
        speed = None
        if np.isfinite(speeds).all():
            speed = Outcome(SPEED.label, speeds, note="median", is_relative=True)
        cosine = _outcome(COSINE, self.runs)
        dispersion = _outcome(DISPERSION, self.runs)
        return list(filter(None, (loss, cosine, dispersion, speed)))

    @cached_property
    def tiles(self) -> list[Tile]:
        """Return the numbers of one condition, or the differences of two.

        It is empty for more conditions, for which the page has a table.
        """
        if len(self.conditions) == 1:
            return [Tile(o.label, o.mean(self.baseline), o.note) for o in self.outcomes]
        if len(self.conditions) > 2:
            return []
        (condition,) = self.compared
        tiles = [self.difference(outcome, condition) for outcome in self.outcomes]
        return [*tiles, Tile("complete", self._progress)]

    @property
    def compared(self) -> list[Condition]:
        """Return the conditions but the baseline."""
        return [c for c in self.conditions if c is not self.baseline]

    @property
    def _progress(self) -> str:
        words = [state(run, self.written).word for run in self.runs]
        return f"{words.count('complete')} of {counted(len(words), 'run')}"

    @property
    def sentence(self) -> str:
        """Return the result in words: the state of a single run or how many runs are
        complete, and the first two numbers or differences.
        """
        if len(self.conditions) > 2:
            return f"{self._progress} complete. The baseline is {self.baseline.name}."
        if len(self.conditions) == 2:
            pair = f"{self.compared[0].name} minus {self.baseline.name}"
            results = [f"{label} {x} ({note})" for label, x, note in self.tiles[:2]]
            return f"{pair}: {'; '.join(results)}."
        progress = f"{self._progress} complete."
        if len(self.runs) == 1:
            word, explanation = state(self.runs[0], self.written)
            progress = f"{self.runs[0].name} is {word}: {explanation}."
        results = [f"The {tile.label} is {tile.value}." for tile in self.tiles[:2]]
        return " ".join([progress, *results])

    def difference(self, outcome: Outcome, condition: Condition) -> Tile:
        """Return the mean difference of a condition to the baseline over pairs of runs
        with the same seeds, with its 95 % interval as the note.

        It is "–" without such a pair. A relative difference is that of logarithms, as a
        percentage of the baseline.
        """
        values = outcome.values
        number_format = "+.4f"
        if outcome.is_relative:
            values = np.log(values)
            number_format = "+.1%"
        pairs, difference = paired_by_seed(
            self._by_seed(values, condition), self._by_seed(values, self.baseline)
        )
        if difference is None:
            return Tile(outcome.label, NOTHING, "no seed in common")
        numbers = [difference.mean, difference.low, difference.high]
        if outcome.is_relative:
            numbers = [x if x is None else np.expm1(x) for x in numbers]
        mean, low, high = numbers
        note = f"{counted(len(pairs), 'pair')} of seeds"
        if low is not None and high is not None:
            interval = f"{low:{number_format}} to {high:{number_format}}"
            note = f"95\N{NO-BREAK SPACE}%: {interval}, {note}"
        return Tile(outcome.label, f"{mean:{number_format}}", note)

    def _by_seed(self, values: np.ndarray, condition: Condition) -> dict[Seeds, float]:
        return {seeds_of(self.runs[place]): values[place] for place in condition.places}


def _finite(series: Series, run: RunRecord) -> dict[float, float]:
    """Return the finite values of a series by step."""
    points = zip(*series.points(run), strict=True)
    return {step: value for step, value in points if np.isfinite(value)}


def _outcome(series: Series, runs: Sequence[RunRecord]) -> Outcome | None:
    """Return the outcome of a series, or None if the runs have it at no common step
    above 0.
    """
    columns = [_finite(series, run) for run in runs]
    shared = set.intersection(*map(set, columns)) - {0}
    if not shared:
        return None
    step = max(shared)
    values = np.array([column[step] for column in columns], np.float64)
    return Outcome(series.label, values, note=f"at step {number(step)}")
