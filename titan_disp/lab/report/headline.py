"""This module answers what a person asks first of runs: did they finish, what did they
reach, are their embeddings condensed, what did dispersion change, and what did it cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from titan_disp.errors import counted
from titan_disp.lab.report.gather import Condition, RunRecord, conditions, seeds_of
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
    is_ratio: bool = False  # whether two numbers are compared by their ratio

    def mean(self, condition: Condition) -> str:
        """Return the mean over a condition's runs, with its standard error if there are
        several.
        """
        values = self.values[condition.places]
        if self.is_ratio:
            return number(values.mean(), 4)
        return with_error(values.mean(), standard_error(values))


class Tile(NamedTuple):
    """A number of the first screen, as text."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Headline:
    """What a page says first about runs, as text."""

    sentence: str
    tiles: list[Tile]  # of one or two conditions
    # Of more conditions: means, and differences to the baseline, by condition
    table: Mapping[str, list[str]] = field(default_factory=dict)
    headings: Sequence[str] = ()  # of the table's columns


def _outcome(series: Series, runs: Sequence[RunRecord]) -> Outcome | None:
    """Return the outcome of a series, or None if the runs have no step above 0 in
    common.
    """
    columns = [dict(zip(*series.points(run), strict=True)) for run in runs]
    shared = set.intersection(*map(set, columns)) - {0}
    if not shared:
        return None
    step = max(shared)
    values = np.array([column[step] for column in columns], np.float64)
    return Outcome(series.label, values, note=f"at step {number(step)}")


def _outcomes(runs: Sequence[RunRecord]) -> list[Outcome]:
    """Return what is compared: a loss, the mean cosine, the dispersion loss and the
    speed, without those that a run lacks.
    """
    losses = [_outcome(series, runs) for series in LOSSES]
    loss = next((outcome for outcome in losses if outcome is not None), None)
    speeds = np.array([median_speed(run) for run in runs])
    speed = Outcome(SPEED.label, speeds, note="median", is_ratio=True)
    candidates = (loss, _outcome(COSINE, runs), _outcome(DISPERSION, runs), speed)
    return [
        outcome
        for outcome in candidates
        if outcome is not None and np.isfinite(outcome.values).all()
    ]


def _difference(
    outcome: Outcome,
    runs: Sequence[RunRecord],
    condition: Condition,
    baseline: Condition,
) -> Tile:
    """Return the difference of a condition to the baseline, paired by seed, with its
    95 % interval as the note.
    """
    values = outcome.values
    digits = ".4f"
    if outcome.is_ratio:
        values = np.log(values)
        digits = ".1%"
    by_seed, baseline_by_seed = (
        {seeds_of(runs[place]): values[place] for place in group.places}
        for group in (condition, baseline)
    )
    pairs, difference = paired_by_seed(by_seed, baseline_by_seed)
    if difference is None:
        return Tile(outcome.label, NOTHING, "no seed in common")
    ends = [difference.mean, difference.low, difference.high]
    if outcome.is_ratio:
        ends = [end if end is None else np.expm1(end) for end in ends]
    mean, low, high = ends
    note = "one pair of seeds, so no interval"
    if low is not None and high is not None:
        note = f"{low:+{digits}} to {high:+{digits}}, {len(pairs)} pairs of seeds"
    return Tile(outcome.label, f"{mean:+{digits}}", note)


def headline(runs: Sequence[RunRecord], now: float) -> Headline:
    """Return what is said first, at a time in seconds since the epoch.

    The baseline is the first condition without dispersion, or the first one.
    """
    groups = conditions(runs)
    plain = [group for group in groups if not runs[group.places[0]].disperses]
    baseline = (plain or groups)[0]
    others = [group for group in groups if group is not baseline]
    outcomes = _outcomes(runs)
    states = [state(run, now) for run in runs]
    complete = sum(word == "complete" for word, _ in states)
    progress = f"{complete} of {counted(len(runs), 'run')} complete"
    if not others:
        if len(runs) == 1:
            progress = f"{runs[0].name} is {': '.join(states[0])}"
        tiles = [Tile(o.label, o.mean(baseline), o.note) for o in outcomes]
        results = [f"The {tile.label} is {tile.value}." for tile in tiles[:2]]
        return Headline(" ".join([f"{progress}.", *results]), tiles)
    if len(others) == 1:
        tiles = [_difference(o, runs, others[0], baseline) for o in outcomes]
        results = [f"{tile.label} {tile.value} ({tile.note})" for tile in tiles[:2]]
        sentence = f"{others[0].name} against {baseline.name}: {'; '.join(results)}."
        tiles.append(Tile("complete", f"{complete} of {counted(len(runs), 'run')}"))
        return Headline(sentence, tiles)
    headings: list[str] = []
    for outcome in outcomes:
        headings += [f"{outcome.label}, {outcome.note}", f"against {baseline.name}"]
    table = {baseline.name: [], **{group.name: [] for group in groups}}
    for group in groups:
        for outcome in outcomes:
            tile = _difference(outcome, runs, group, baseline)
            difference = NOTHING
            if group is not baseline:
                difference = f"{tile.value} ({tile.note})"
            table[group.name] += [outcome.mean(group), difference]
    sentence = f"{progress}. The baseline is {baseline.name}."
    return Headline(sentence, [], table, headings)
