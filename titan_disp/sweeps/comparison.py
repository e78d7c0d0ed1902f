"""A sweep's conditions, and what they differ by from one of them: means over seeds, and differences paired by seed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from titan_disp.errors import ConfigError
from titan_disp.evaluate.compare import Difference, holm, paired_difference, standard_error
from titan_disp.sweeps.definition import Point, Sweep, points
from titan_disp.sweeps.final import DEFAULTS, FALLBACK, check_metric, final
from titan_disp.sweeps.sign_flip import sign_flip_p
from titan_disp.sweeps.state import state

Seeds = tuple[tuple[str, object], ...]  # key and value


@dataclass(frozen=True)
class Member:
    """A point of a condition. ``value``: its metric; None where it has none, and ``missing`` says why."""

    name: str
    seeds: Seeds
    value: float | None
    missing: str = ""


@dataclass(frozen=True)
class Condition:
    """Points that differ in their seeds only.

    Attributes:
        pairs: the seeds that the condition shares with the one that it is compared with.
        difference: to that one, over these pairs; its p value is the sign-flip test's. None without a pair, and of that one.
    """

    name: str
    members: tuple[Member, ...]
    pairs: tuple[Seeds, ...] = ()
    difference: Difference | None = None

    @property
    def values(self) -> dict[Seeds, float]:
        """The metric by seeds, of the points that have it."""
        return {member.seeds: member.value for member in self.members if member.value is not None}

    @property
    def mean(self) -> float | None:
        return float(np.mean(list(self.values.values()))) if self.values else None

    @property
    def standard_error(self) -> float | None:
        """Of the mean, over seeds; None of a single one."""
        return standard_error(list(self.values.values()))


@dataclass(frozen=True)
class Comparison:
    """A sweep's conditions in the order of its file.

    Attributes:
        against: the name of the one that the others are compared with; None: they are not compared.
        held_out_is_missing: nobody asked for this metric, but no run has measured held-out text.
    """

    metric: str
    against: str | None
    conditions: list[Condition]
    held_out_is_missing: bool = False


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
    asked = metric or sweep.metric
    metric = asked or _default_metric([p for p in found if states[p.name][0] == "finished"])
    check_metric(metric)
    against = against or sweep.against
    by_condition: dict[str, list[Point]] = {}
    for point in found:
        by_condition.setdefault(point.condition, []).append(point)
    if against is not None and against not in by_condition:
        raise ConfigError(f"sweep.against or --against is {against!r}, expected one of {', '.join(by_condition)}")
    conditions = [
        Condition(name, tuple(_member(point, *states[point.name], metric) for point in members))
        for name, members in by_condition.items()
    ]
    return Comparison(metric, against, differences(conditions, against), not asked and metric == FALLBACK)


def _default_metric(finished: Sequence[Point]) -> str:
    return next((name for name in DEFAULTS if any(final(p.folder, name) is not None for p in finished)), FALLBACK)


def _member(point: Point, word: str, detail: str, metric: str) -> Member:
    seeds = tuple(sorted(point.seeds.items()))
    if word != "finished":
        return Member(point.name, seeds, None, f"{word}: {detail}")
    value = final(point.folder, metric)
    return Member(
        point.name, seeds, value, "" if value is not None else f"finished without a finite {metric} at its end"
    )


def differences(conditions: Sequence[Condition], against: str | None) -> list[Condition]:
    """The same with their differences to one of them, and Holm's p values over all that have one."""
    baseline = next((condition for condition in conditions if condition.name == against), None)
    if baseline is None:
        return list(conditions)
    paired = [one if one is baseline else _paired(one, baseline) for one in conditions]
    adjusted = iter(holm([one.difference.p_value for one in paired if one.difference is not None]))
    return [
        one if one.difference is None else replace(one, difference=replace(one.difference, holm=next(adjusted)))
        for one in paired
    ]


def _paired(condition: Condition, baseline: Condition) -> Condition:
    pairs = tuple(seeds for seeds in condition.values if seeds in baseline.values)
    if not pairs:
        return condition
    own, other = (np.array([one.values[seeds] for seeds in pairs]) for one in (condition, baseline))
    found = replace(paired_difference(own, other), p_value=sign_flip_p(own - other))
    return replace(condition, pairs=pairs, difference=found)
