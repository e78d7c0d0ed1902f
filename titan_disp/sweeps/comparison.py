"""A sweep's conditions, and what they differ by from one of them: means over seeds, and differences paired by seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from titan_disp.errors import ConfigError
from titan_disp.evaluate.compare import Difference, holm, paired_difference, standard_error
from titan_disp.sweeps.definition import Point, Sweep, points
from titan_disp.sweeps.final import DEFAULTS, check_metric, final
from titan_disp.sweeps.folder import state
from titan_disp.sweeps.sign_flip import sign_flip_p

Seeds = tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class Condition:
    """Points that differ in their seeds only.

    Attributes:
        points: how many there are.
        values: the metric of those that are finished, by seeds.
        missing: why the others have none, by name of the point.
        pairs: the seeds that the condition shares with the one that it is compared with.
        difference: to that one, over these pairs; its p value is the sign-flip test's. None without a pair, and of that one itself.
    """

    name: str
    points: int
    values: Mapping[Seeds, float]
    missing: Mapping[str, str]
    pairs: tuple[Seeds, ...] = ()
    difference: Difference | None = None

    @property
    def mean(self) -> float | None:
        return float(np.mean(list(self.values.values()))) if self.values else None

    @property
    def standard_error(self) -> float | None:
        """Of the mean, over seeds; None of a single one."""
        return standard_error(list(self.values.values()))


@dataclass(frozen=True)
class Comparison:
    """A sweep's conditions in the order of its file. ``against``: the name of the one that the others are compared with, or None."""

    metric: str
    against: str | None
    conditions: list[Condition]


def compare(sweep: Sweep, metric: str | None = None, against: str | None = None) -> Comparison:
    """Read the runs of a sweep.

    Args:
        metric: of ``final``; default: the sweep's own, else held-out cross-entropy, else the training's.
        against: a condition; default: the sweep's own.

    Raises:
        ConfigError: no such metric or condition.
    """
    found = points(sweep)
    states = {point.name: state(point.folder) for point in found}
    finished = [point for point in found if states[point.name][0] == "finished"]
    metric = metric or sweep.metric or _default_metric(finished)
    check_metric(metric)
    against = against or sweep.against
    by_condition: dict[str, list[Point]] = {}
    for point in found:
        by_condition.setdefault(point.condition, []).append(point)
    if against is not None and against not in by_condition:
        raise ConfigError(f"sweep.against or --against is {against!r}, expected one of {', '.join(by_condition)}")
    conditions = [_condition(name, members, states, metric) for name, members in by_condition.items()]
    return Comparison(metric, against, differences(conditions, against))


def _default_metric(finished: Sequence[Point]) -> str:
    return next((name for name in DEFAULTS if any(final(p.folder, name) is not None for p in finished)), DEFAULTS[-1])


def _condition(name: str, members: Sequence[Point], states: Mapping[str, tuple[str, str]], metric: str) -> Condition:
    values, missing = {}, {}
    for point in members:
        word, detail = states[point.name]
        value = final(point.folder, metric) if word == "finished" else None
        if value is not None:
            values[tuple(sorted(point.seeds.items()))] = value
        else:
            missing[point.name] = f"finished without a finite {metric}" if word == "finished" else f"{word}: {detail}"
    return Condition(name, len(members), values, missing)


def differences(conditions: Sequence[Condition], against: str | None) -> list[Condition]:
    """The same with their differences to one of them, and Holm's p values over all that have one."""
    baseline = next((condition for condition in conditions if condition.name == against), None)
    if baseline is None:
        return list(conditions)
    compared = [condition if condition is baseline else _paired(condition, baseline) for condition in conditions]
    with_one = [condition for condition in compared if condition.difference is not None]
    adjusted = holm([condition.difference.p_value for condition in with_one if condition.difference is not None])
    by_name = dict(zip([condition.name for condition in with_one], adjusted, strict=True))
    return [
        condition
        if condition.difference is None
        else replace(condition, difference=replace(condition.difference, holm=by_name[condition.name]))
        for condition in compared
    ]


def _paired(condition: Condition, baseline: Condition) -> Condition:
    pairs = tuple(seeds for seeds in condition.values if seeds in baseline.values)
    if not pairs:
        return condition
    own, other = (np.array([one.values[seeds] for seeds in pairs]) for one in (condition, baseline))
    found = replace(paired_difference(own, other), p_value=sign_flip_p(own - other))
    return replace(condition, pairs=pairs, difference=found)
