"""The first numbers of a report: whether runs finished, which loss they reached, how
condensed their embeddings are, and what dispersion changed and cost.
"""

from collections.abc import Mapping, Sequence
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
    unlike,
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
    per_step,
    xlabel_of,
)
from titan_disp.lab.report.tables import median_speed, state
from titan_disp.lab.statistics import paired_by_seed, standard_error, with_error
from titan_disp.text import NOTHING, number

# The first of these series that all runs have is compared.
LOSSES = (HELD_OUT, VALIDATION, SMOOTHED, CROSS_ENTROPY)


@dataclass(frozen=True)
class Outcome:
    """A number of each run: at the latest step (or number of tokens) that all runs have
    logged, or over the whole run.
    """

    label: str
    values: Mapping[int, float]  # by the index of the run; a run may have none
    note: str  # such as "at step 300"
    # whether differences are relative, such as "-5.1%" for tokens/s
    is_relative: bool = False

    def mean(self, condition: Condition) -> str:
        """Return the mean over a condition's runs as text, or "–" if no run has a value.

        The text includes the standard error over several runs, unless ``is_relative``.
        """
        values = [
            self.values[place] for place in condition.places if place in self.values
        ]
        if not values:
            return NOTHING
        if self.is_relative:
            return number(np.mean(values), 4)
        return with_error(float(np.mean(values)), standard_error(values))


class Tile(NamedTuple):
    """A number on the first screen, as text."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Headline:
    """The first numbers and sentences of a page about runs."""

    runs: Sequence[RunRecord]
    written: float  # time of the page, in seconds since the epoch

    @cached_property
    def conditions(self) -> list[Condition]:
        return conditions(self.runs)

    @cached_property
    def baseline(self) -> Condition:
        """The first condition whose first run has no dispersion, or else the first
        condition.
        """
        for condition in self.conditions:
            if not self.runs[condition.places[0]].disperses:
                return condition
        return self.conditions[0]

    @cached_property
    def compared(self) -> list[Condition]:
        """All conditions except the baseline."""
        return [c for c in self.conditions if c is not self.baseline]

    @cached_property
    def places(self) -> list[int]:
        """The indices of the compared runs: runs whose seeds occur in all conditions,
        or all runs if there are no such seeds.
        """
        seeds_of_conditions = [
            {seeds_of(self.runs[place]) for place in condition.places}
            for condition in self.conditions
        ]
        shared = set.intersection(*seeds_of_conditions)
        places = [i for i, run in enumerate(self.runs) if seeds_of(run) in shared]
        return places or list(range(len(self.runs)))

    @cached_property
    def outcomes(self) -> list[Outcome]:
        """The compared outcomes of the runs in ``places`` that have logged a row.

        These are a loss, the mean cosine, the dispersion loss if there is only one
        condition, and the speed. Each outcome except the speed is left out if a run
        lacks it.
        """
        runs = {
            place: self.runs[place] for place in self.places if self.runs[place].rows
        }
        if not runs:
            return []
        losses = list(LOSSES)
        if unlike([run.settings.get("metrics.log_freq") for run in self.runs]):
            # The mean of ten rows would cover different numbers of steps.
            losses.remove(SMOOTHED)
        of_losses = (_outcome(series, runs) for series in losses)
        loss = next(filter(None, of_losses), None)
        further = [_outcome(COSINE, runs)]
        if not self.compared:  # conditions may differ in their definition of this loss
            further.append(_outcome(DISPERSION, runs))
        speeds = {
            place: speed
            for place, run in runs.items()
            if (speed := median_speed(run)) > 0  # not NaN
        }
        further.append(Outcome(SPEED.label, speeds, "median", is_relative=True))
        return list(filter(None, [loss, *further]))

    @cached_property
    def tiles(self) -> list[Tile]:
        """The numbers of a single condition, or the differences between two conditions.

        For more conditions, the list is empty, and the page has a table.
        """
        if not self.compared:
            return [Tile(o.label, o.mean(self.baseline), o.note) for o in self.outcomes]
        if len(self.compared) > 1:
            return []
        tiles = []
        for outcome in self.outcomes:
            difference = self.difference(outcome, self.compared[0])
            means = [outcome.mean(c) for c in (self.baseline, self.compared[0])]
            note = f"{difference.note}; {' → '.join(means)} {outcome.note}"
            tiles.append(difference._replace(note=note))
        return tiles

    @property
    def progress(self) -> Tile:
        """The number of complete runs, and the states of the other runs."""
        states = {run.name: state(run, self.written).word for run in self.runs}
        incomplete = [
            f"{name} is {word}" for name, word in states.items() if word != "complete"
        ]
        complete = len(self.runs) - len(incomplete)
        text = f"{complete} of {counted(len(self.runs), 'run')}"
        return Tile("complete", text, ", ".join(incomplete))

    @property
    def sentence(self) -> str:
        """The result in words.

        For a single condition: the state of its run, or the number of complete runs, and
        the first two numbers. For two conditions: the first difference. For more
        conditions: the number of complete runs.
        """
        if len(self.compared) > 1:
            baseline = self.baseline.name
            return f"{self.progress.value} complete. The baseline is {baseline}."
        if self.compared:
            pair = f"{self.compared[0].name} minus {self.baseline.name}"
            results = [f"{label} {x} ({note})" for label, x, note in self.tiles[:1]]
            return f"{pair}: {''.join(results) or 'nothing is measured in both'}."
        progress = f"{self.progress.value} complete."
        if len(self.runs) == 1:
            word, explanation = state(self.runs[0], self.written)
            progress = f"{self.runs[0].name} is {word}: {explanation}."
        results = [f"The {tile.label} is {tile.value}." for tile in self.tiles[:2]]
        return " ".join([progress, *results])

    def difference(self, outcome: Outcome, condition: Condition) -> Tile:
        """Return the mean difference between a condition and the baseline over pairs of
        runs with the same seeds. The note has the 95 % interval of this mean.

        The value is "–" if there is no such pair. A relative difference is the geometric
        mean of the ratios, minus 1, in percent.
        """
        values = outcome.values
        number_format = "+.4f"
        if outcome.is_relative:
            values = {place: np.log(value) for place, value in values.items()}
            number_format = "+.1%"
        difference = paired_by_seed(
            self._by_seed(values, condition), self._by_seed(values, self.baseline)
        )
        if difference is None:
            return Tile(outcome.label, NOTHING, "no seed in common")

        def as_text(value: float) -> str:
            if outcome.is_relative:
                value = np.expm1(value)
            return f"{value:{number_format}}"

        note = f"{counted(difference.pairs, 'pair')} of seeds"
        if difference.low is not None and difference.high is not None:
            interval = f"{as_text(difference.low)} to {as_text(difference.high)}"
            note = f"95\N{NO-BREAK SPACE}%: {interval}, {note}"
        return Tile(outcome.label, as_text(difference.mean), note)

    def _by_seed(
        self, values: Mapping[int, float], condition: Condition
    ) -> dict[Seeds, float]:
        """Return the values of a condition's runs by seeds, without runs that have no
        value or whose seed is not set.
        """
        by_seed = {}
        for place in condition.places:
            seeds = seeds_of(self.runs[place])
            # A seed that is not set is drawn at random, so that the run has no partner.
            if place in values and None not in seeds:
                by_seed[seeds] = values[place]
        return by_seed


def _outcome(series: Series, runs: Mapping[int, RunRecord]) -> Outcome | None:
    """Return the outcome of a series for ``runs`` (by index).

    Returns None if a run has no finite number, or if the runs share no step except 0.
    """
    xlabel = xlabel_of(list(runs.values()))
    columns = {}
    for place, run in runs.items():
        by_step = series.by_step(run)
        if not np.isfinite(list(by_step.values())).any():
            return None
        columns[place] = {
            step * per_step(run, xlabel): value for step, value in by_step.items()
        }
    shared = set.intersection(*map(set, columns.values())) - {0}
    if not shared:
        return None
    x = max(shared)
    note = f"at step {number(x)}"
    if xlabel == "tokens":
        note = f"at {number(x)} tokens"
    values = {place: float(column[x]) for place, column in columns.items()}
    return Outcome(series.label, values, note)
