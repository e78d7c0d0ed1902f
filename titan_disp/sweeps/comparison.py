"""This module compares a sweep's conditions: means over seeds, and differences to one condition, paired by seed."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from titan_disp.errors import ConfigError
from titan_disp.evaluate.compare import Difference, holm, paired_difference, standard_error
from titan_disp.sweeps.definition import Point, Sweep, points
from titan_disp.sweeps.final_metric import DEFAULTS, FALLBACK, check_metric, final_metric
from titan_disp.sweeps.sign_flip import sign_flip_p
from titan_disp.sweeps.state import state

Seeds = tuple[tuple[str, object], ...]  # keys and values of the config
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Member:
    """Represent a point of a condition. ``value`` is its metric, or None with the reason in ``missing``."""

    name: str
    seeds: Seeds
    value: float | None
    missing: str = ""


@dataclass(frozen=True)
class Condition:
    """Hold the points that differ only in their seeds.

    Attributes:
        pairs: the seeds that this condition and the baseline have in common.
        difference: difference to the baseline over these pairs, with the p value of the sign-flip test. None for the
            baseline itself, and without pairs.
    """

    name: str
    members: tuple[Member, ...]
    pairs: tuple[Seeds, ...] = ()
    difference: Difference | None = None

    @property
    def values(self) -> dict[Seeds, float]:
        """Return the metric by seeds, for points that have it."""
        return {member.seeds: member.value for member in self.members if member.value is not None}

    @property
    def mean(self) -> float | None:
        return float(np.mean(list(self.values.values()))) if self.values else None

    @property
    def standard_error(self) -> float | None:
        """Return the standard error of the mean over seeds, or None for fewer than two seeds."""
        return standard_error(list(self.values.values()))


@dataclass(frozen=True)
class Comparison:
    """Hold a sweep's conditions in the order of its file.

    Attributes:
        against: name of the baseline, the condition that the others are compared with; None without a comparison.
        held_out_is_missing: whether the metric is training cross-entropy because no run has measured held-out text.
    """

    metric: str
    against: str | None
    conditions: list[Condition]
    held_out_is_missing: bool = False


def compare(sweep: Sweep, metric: str | None = None, against: str | None = None) -> Comparison:
    """Read the runs of a sweep and compare them.

    Args:
        sweep: the sweep.
        metric: a metric of ``final_metric``. The default is the sweep's own, or else held-out or else training cross-entropy.
        against: a condition. The default is the sweep's own.

    Raises:
        ConfigError: The metric or the condition does not exist.
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
    return next(
        (name for name in DEFAULTS if any(final_metric(p.folder, name) is not None for p in finished)), FALLBACK
    )


def _member(point: Point, word: str, detail: str, metric: str) -> Member:
    seeds = tuple(sorted(point.seeds.items()))
    if word != "finished":
        return Member(point.name, seeds, None, f"{word}: {detail}")
    value = final_metric(point.folder, metric)
    return Member(
        point.name, seeds, value, "" if value is not None else f"finished without a finite {metric} at its end"
    )


def differences(conditions: Sequence[Condition], against: str | None) -> list[Condition]:
    """Add the differences to one condition, and Holm's p values over all differences."""
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
    pairs, found = paired_by_seed(condition.values, baseline.values)
    return replace(condition, pairs=pairs, difference=found)


def paired_by_seed(own: Mapping[Key, float], other: Mapping[Key, float]) -> tuple[tuple[Key, ...], Difference | None]:
    """Return the seeds that two conditions share, and the difference of the first to the second over these.

    Args:
        own: the metric by seed.
        other: the metric of the other condition by seed.

    Returns:
        The seeds in the order of ``own``; and the difference with the p value of the sign-flip test, or None without a pair.
    """
    pairs = tuple(seed for seed in own if seed in other)
    if not pairs:
        return pairs, None
    values, others = (np.array([one[seed] for seed in pairs]) for one in (own, other))
    return pairs, replace(paired_difference(values, others), p_value=sign_flip_p(values - others))
