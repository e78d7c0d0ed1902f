"""This module compares a sweep's conditions: means over seeds, and differences to one condition, paired by seed."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from titan_disp.condensation.record import Condensation
from titan_disp.errors import ConfigError
from titan_disp.lab.evaluate.compare import Difference, holm, paired_difference, standard_error
from titan_disp.lab.statistics import sign_flip_p
from titan_disp.lab.sweeps.definition import Point, Sweep, points
from titan_disp.lab.sweeps.folder import state
from titan_disp.run.reader import read_condensation, read_metrics, read_validation

# This module reads a finished run's final number by the name of a metric.


TRAINING = ("loss", "ce", "dispersion", "grad_norm")  # of the last logged step
OVER_DEPTH = ("spearman", "kendall")
BY_PART = ("mean_cosine", "std_cosine", "mean_angle", "effective_rank")
FALLBACK = "ce"
DEFAULTS = ("validation", "cross_entropy", FALLBACK)  # the first one that any finished run has is the default
LABELS = {
    "validation": "held-out cross-entropy (validation)",
    "cross_entropy": "held-out cross-entropy",
    "ce": "training cross-entropy of the last logged step",
    "loss": "training loss of the last logged step",
    "dispersion": "dispersion loss of the last logged step",
    "grad_norm": "gradient norm of the last logged step",
    "spearman": "Spearman's ρ of the mean cosine with depth",
    "kendall": "Kendall's τ of the mean cosine with depth",
}


def check_metric(name: str) -> None:
    """Check the name of a metric.

    Raises:
        ConfigError: There is no metric of this name.
    """
    if name not in LABELS and name.partition(".")[0] not in BY_PART:
        raise ConfigError(
            f"the metric is {name!r} (--metric, or sweep.metric in the file), expected {', '.join(LABELS)}, or "
            f"{', '.join(BY_PART)}, each with a part of the model such as mean_cosine.middle_blocks (the default is .blocks, "
            "which means all blocks)"
        )


def label(name: str) -> str:
    """Describe a metric in words."""
    return LABELS.get(name) or " of the ".join(part.replace("_", " ") for part in _parts(name))


def final_metric(run: Path, name: str) -> float | None:
    """Return a number at the end of a run, or None if the run has not measured it or it is not finite.

    ``validation`` is TorchTitan's validation loss. The run measures ``cross_entropy`` and everything about cosines on
    held-out text after its last step (``[condensation]``).
    """
    check_metric(name)
    rows = read_metrics(run)
    last = max(rows, default=0)
    if name in TRAINING:
        value = rows[last].get(name) if rows else None
    elif name == "validation":
        value = _at_the_end(read_validation(run), last)
    else:
        value = _measured(run, name, last)
    return value if value is not None and math.isfinite(value) else None


def _parts(name: str) -> tuple[str, str]:
    kind, _, part = name.partition(".")
    return kind, part or "blocks"


def _measured(run: Path, name: str, last: int) -> float | None:
    by_step = read_condensation(run)
    found = _at_the_end(by_step, last)
    if found is None:
        return None
    if name == "cross_entropy":
        return found.get("cross_entropy")
    if name in OVER_DEPTH:
        return (found.get("after_norm") or {}).get(name)
    kind, part = _parts(name)
    file = run / "condensation" / f"step-{max(by_step)}.npz"
    if not file.is_file():
        return None
    parts = Condensation.load(file).by_part()[kind]
    if part not in parts:
        raise ConfigError(
            f"the metric {name!r} (--metric, or sweep.metric in the file): {kind} has no part {part!r}; it has {', '.join(parts)}"
        )
    return parts[part]


def _at_the_end(by_step: Mapping[int, Any], last: int) -> Any:
    """Return the newest entry, or None if the run logged later steps, because it is then not from the end."""
    newest = max(by_step, default=-1)
    return by_step[newest] if newest >= last else None


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
