"""Compares the conditions of a sweep by a metric at the end of each run, and writes the
comparison as tables and a picture.

The value of a condition is the mean over its seeds. The user chooses a condition as the
baseline. Differences from the baseline are paired by seed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from titan_disp.condensation.heatmap import new_figure, plain
from titan_disp.condensation.record import OF_PAPER, RANKS, Measurement, over_depth
from titan_disp.config.command_options import SweepTableOptions
from titan_disp.errors import ConfigError, counted
from titan_disp.files import atomic_write, make_writable
from titan_disp.lab.plots import OKABE_ITO, picture_formats
from titan_disp.lab.statistics import (
    EXACT,
    Difference,
    csv_cells,
    differences_over_seeds,
    standard_error,
    with_error,
    with_holm,
)
from titan_disp.lab.sweeps.definition import Point, Sweep, points
from titan_disp.lab.sweeps.preparation import state
from titan_disp.run.reader import (
    last_row,
    read_condensation,
    read_events,
    read_validation,
)
from titan_disp.text import NOTHING, csv_text, latex_table, markdown_table

TRAINING = ("loss", "ce", "dispersion", "grad_norm")  # of the last logged step
BY_PART = ("mean_cosine", "std_cosine", "mean_angle", "effective_rank")
# parts of a model that follow a name of BY_PART after a dot
PARTS = (
    "blocks",
    "early_blocks",
    "middle_blocks",
    "late_blocks",
    "last_block",
    "final_norm",
)
FALLBACK = "ce"
# The default metric is the first of these that a finished run has.
DEFAULTS: tuple[str, ...] = ("validation", "cross_entropy", FALLBACK)
LABELS = {
    "validation": "held-out cross-entropy (validation)",
    "cross_entropy": "held-out cross-entropy",
    "ce": "training cross-entropy of the last logged step",
    "loss": "training loss of the last logged step",
    "dispersion": "dispersion loss of the last logged step",
    "grad_norm": "gradient norm of the last logged step",
} | {
    name: f"{rank} of the mean cosine with depth, without the embedding"
    for name, rank in RANKS.items()
}


def check_metric(name: str) -> None:
    """Raise ConfigError if there is no metric of this name."""
    quantity, part = _parts(name)
    if name not in LABELS and (quantity not in BY_PART or part not in PARTS):
        raise ConfigError(
            f"the metric is {name!r} (--metric, or sweep.metric in the file), "
            f"expected {', '.join(LABELS)}, or a statistic such as mean_cosine or "
            "mean_cosine.middle_blocks. Statistics are "
            f"{', '.join(BY_PART)}. Parts of the model are {', '.join(PARTS)}. Without "
            "a part, a statistic is the mean over all blocks"
        )


def label(name: str) -> str:
    """Return the description of a metric for headings and axes."""
    return LABELS.get(name) or " of the ".join(
        part.replace("_", " ") for part in _parts(name)
    )


def final_metric(run: Path, name: str) -> float | None:
    """Return a metric at the end of a run, or None if the metric was not measured at
    the end or is not finite.

    Cross-entropies are in nats, and angles are fractions of π. ``validation`` is
    TorchTitan's validation loss. ``cross_entropy`` and the statistics of cosines
    come from the condensation measurement after the last step.

    Raises ConfigError if there is no such metric, or a file of the run cannot be read.
    """
    check_metric(name)
    row = last_row(run)
    # Events such as "complete" may be at later steps than the last logged row.
    last = max([row.get("step", 0), *(event["step"] for event in read_events(run))])
    if name in TRAINING:
        value = row.get(name)
    elif name == "validation":
        value = _at_the_end(read_validation(run), last)
    else:
        value = _measured(run, name, last)
    if value is None or not math.isfinite(value):
        return None
    return value


def _parts(name: str) -> tuple[str, str]:
    """Return (quantity, part of the model) for the name of a metric."""
    quantity, _, part = name.partition(".")
    return quantity, part or "blocks"


def _measured(run: Path, name: str, last: int) -> float | None:
    """Return a metric of the condensation measurement at step ``last``, or None."""
    by_step = read_condensation(run)
    row = _at_the_end(by_step, last)
    if row is None:
        return None
    if name == "cross_entropy":
        return row.get("cross_entropy")
    quantity, part = _parts(name)
    file = run / "condensation" / f"step-{max(by_step)}.npz"
    if not file.is_file():
        return None
    measured = Measurement.load(file)
    if name in RANKS:
        return over_depth(OF_PAPER, name)(measured)
    return measured.by_part()[quantity].get(part)


def _at_the_end(by_step: Mapping[int, Any], last: int) -> Any:
    """Return the newest entry, or None if it is older than the run's ``last`` step."""
    newest = max(by_step, default=-1)
    if newest < last:
        return None
    return by_step[newest]


Seeds = tuple[tuple[str, object], ...]  # keys and values of the config


@dataclass(frozen=True)
class Member:
    """A point of a condition with the value of its metric.

    If the value is None, ``missing`` has the reason.
    """

    name: str
    seeds: Seeds
    value: float | None
    missing: str = ""


@dataclass(frozen=True)
class Condition:
    """Points that differ only in their seeds."""

    name: str
    members: tuple[Member, ...]
    # difference from the baseline; None for the baseline, or if it cannot be computed
    difference: Difference | None = None

    @property
    def values(self) -> dict[Seeds, float]:
        """The values of the metric by seeds, without points that have no value."""
        return {
            member.seeds: member.value
            for member in self.members
            if member.value is not None
        }

    @property
    def mean(self) -> float | None:
        if not self.values:
            return None
        return float(np.mean(list(self.values.values())))

    @property
    def standard_error(self) -> float | None:
        return standard_error(list(self.values.values()))


@dataclass(frozen=True)
class SweepComparison:
    """The conditions of a sweep, in the order of its file, with their metric."""

    metric: str
    against: str | None  # name of the baseline
    conditions: list[Condition]
    # whether the metric is training cross-entropy only because no run has measured
    # held-out text
    held_out_is_missing: bool


def compare(
    sweep: Sweep, metric: str | None = None, against: str | None = None
) -> SweepComparison:
    """Return the conditions of a sweep with their metric (``final_metric``), and their
    differences from the condition ``against``.

    By default, the sweep's file names the metric and ``against``. If the file names no
    metric, the first of ``DEFAULTS`` that a run has is used. Raises ConfigError if
    there is no such metric or condition.
    """
    chosen_metric = metric or sweep.metric
    against = against or sweep.against
    candidates = DEFAULTS
    if chosen_metric:
        candidates = (chosen_metric,)
    for name in candidates:
        check_metric(name)
        by_condition: dict[str, list[Member]] = {}
        for point in points(sweep):
            by_condition.setdefault(point.condition, []).append(_member(point, name))
        members = chain.from_iterable(by_condition.values())
        if any(member.value is not None for member in members):
            break
    if against is not None and against not in by_condition:
        raise ConfigError(
            f"sweep.against or --against is {against!r}, expected one of "
            f"{', '.join(by_condition)}"
        )
    conditions = [
        Condition(condition, tuple(members))
        for condition, members in by_condition.items()
    ]
    return SweepComparison(
        metric=name,
        against=against,
        conditions=with_differences(conditions, against),
        held_out_is_missing=not chosen_metric and name == FALLBACK,
    )


def _member(point: Point, metric: str) -> Member:
    """Return a point with its metric, or with the reason why the metric is missing.

    A run that cannot be read gives a reason, not an error, so that the other runs are
    compared.
    """
    value = None
    try:
        word, detail = state(point.folder)
        missing = f"{word}: {detail}"
        if word == "finished":
            value = final_metric(point.folder, metric)
            missing = ""
            if value is None:
                missing = f"finished without a finite {metric} at its end"
    except ConfigError as error:
        missing = f"unreadable: {error}"
    return Member(point.name, tuple(sorted(point.seeds.items())), value, missing)


def with_differences(
    conditions: Sequence[Condition], against: str | None
) -> list[Condition]:
    """Return the conditions with their differences from the condition ``against``.

    Holm's p values are over all differences.
    """
    if against is None:
        return list(conditions)
    by_seed = {condition.name: condition.values for condition in conditions}
    differences = differences_over_seeds(by_seed, against)
    # A single pair has no p value, but Holm would count the pair as a comparison. 0
    # pairs mean Welch's t-test, which has a p value.
    comparable = {name: test for name, test in differences.items() if test.pairs != 1}
    adjusted = with_holm(list(comparable.values()))
    differences |= dict(zip(comparable, adjusted, strict=True))
    return [
        replace(condition, difference=differences.get(condition.name))
        for condition in conditions
    ]


def write_table(sweep: Sweep, options: SweepTableOptions) -> str:
    """Write table.md, table.csv, values.csv and a picture to ``options.out`` or the
    sweep's folder, and return the text of table.md.
    """
    comparison = compare(sweep, options.metric, options.against)
    formats = picture_formats(options.format)
    out = options.out or sweep.folder
    make_writable(out, "--out")
    cells = table(comparison)
    text = "\n\n".join([markdown_table(cells, 1), *_notes(comparison)]) + "\n"
    contents = {
        "table.md": text,
        "table.csv": to_csv(comparison),
        "values.csv": values_csv(comparison),
    }
    if options.latex:
        contents["table.tex"] = latex_table(cells, 1)
    for name, content in contents.items():
        with atomic_write(out / name) as partial:
            partial.write_text(content)
    if any(condition.values for condition in comparison.conditions):
        figure = draw(comparison)
        for suffix in formats:
            with atomic_write(out / f"table.{suffix}") as partial:
                figure.savefig(partial, format=suffix, dpi=120)
    return text


def table(comparison: SweepComparison) -> list[list[str]]:
    """Return the rows of the table: a header, and a row for each condition."""
    header = ["condition", "seeds", label(comparison.metric)]
    if comparison.against is not None:
        header += [
            f"difference to {comparison.against}",
            "pairs",
            "95 % interval",
            "p",
            "Holm",
        ]
    rows = [_row(condition)[: len(header)] for condition in comparison.conditions]
    return [header, *rows]


def _row(condition: Condition) -> list[str]:
    mean = NOTHING
    if condition.mean is not None:
        mean = with_error(condition.mean, condition.standard_error)
    cells = [
        condition.name,
        f"{len(condition.values)} of {len(condition.members)}",
        mean,
    ]
    difference = condition.difference
    if difference is None:
        return [*cells, *[NOTHING] * 5]
    cells += [str(difference), str(difference.pairs), difference.interval]
    for p in (difference.p_value, difference.holm):
        if p is None:
            cells.append(NOTHING)
        else:
            cells.append(f"{p:.2g}")
    return cells


def _notes(comparison: SweepComparison) -> list[str]:
    """Return the paragraphs below the table."""
    notes = [
        f"Numbers are means ± standard errors over seeds of the {label(comparison.metric)}."
    ]
    if comparison.held_out_is_missing:
        notes[0] += " (No finished run has measured held-out text.)"
    if comparison.against is not None:
        notes[0] += (
            f"\nDifferences to {comparison.against} are paired by seed: mean ± "
            "standard error, and the 95 % interval by Student's t.\np is the "
            "two-sided p value of the sign-flip test, which is exact for up to "
            f"{EXACT} pairs, and at least 2/2ⁿ for n pairs. Holm is p adjusted for "
            "the number of differences."
        )
        if any(c.difference and not c.difference.pairs for c in comparison.conditions):
            notes[0] += (
                "\nWithout a pair of equal seeds (pairs 0), difference, interval and p "
                "are those of Welch's t-test."
            )
    members = list(chain.from_iterable(c.members for c in comparison.conditions))
    missing = [
        f"- {member.name}: {member.missing}" for member in members if member.missing
    ]
    if missing:
        count = (
            f"**The table lacks {len(missing)} of {counted(len(members), 'point')}**"
        )
        notes.append(
            f"{count}. The numbers are those of the other points.\n\n"
            + "\n".join(missing)
        )
    return notes


def to_csv(comparison: SweepComparison) -> str:
    """Return CSV with a row for each condition. Undefined cells are empty."""
    header = ["point", "points", "finished", "mean", "standard_error"]
    header += [
        "against",
        "pairs",
        "difference",
        "difference_standard_error",
        "low",
        "high",
        "p",
        "holm",
    ]
    rows: list[list[Any]] = [header]
    for condition in comparison.conditions:
        difference = condition.difference
        rows.append(
            [
                condition.name,
                len(condition.members),
                len(condition.values),
                condition.mean,
                condition.standard_error,
                difference and comparison.against,
                difference and difference.pairs,
                *csv_cells(difference),
            ]
        )
    return csv_text(rows)


VALUE_COLUMNS = ("run", "point", "seeds", "metric", "value", "missing")


def value_row(member: Member, condition: str, metric: str) -> Sequence[Any]:
    """Return the cells of a run's row in values.csv, in the order of
    ``VALUE_COLUMNS``.
    """
    seeds = " ".join(f"{key}={value}" for key, value in member.seeds)
    return (
        member.name,
        condition,
        seeds,
        metric,
        member.value,
        member.missing,
    )


def values_csv(comparison: SweepComparison) -> str:
    """Return CSV with a row for each run: the value of its metric, or the reason why the
    value is missing.
    """
    rows: list[Sequence[Any]] = [VALUE_COLUMNS]
    for condition in comparison.conditions:
        for member in condition.members:
            rows.append(value_row(member, condition.name, comparison.metric))
    return csv_text(rows)


def draw(comparison: SweepComparison) -> Figure:
    """Return a figure with a row for each condition: a dot per seed, and the mean ±
    standard error. A second panel has the paired differences, if there are any.
    """
    conditions = comparison.conditions
    has_differences = any(c.difference is not None for c in conditions)
    columns = 1
    width = 6.5
    if has_differences:
        columns = 2
        width = 10
    figure = new_figure(width, 1.6 + 0.36 * len(conditions))
    panels = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    for axes in panels:
        axes.locator_params(axis="x", nbins=6)
        axes.grid(axis="x", alpha=0.3)
    by_name = {condition.name: condition.values for condition in conditions}
    baseline = by_name.get(comparison.against or "", {})
    for place, condition in enumerate(conditions):
        _draw_dots(panels[0], place, list(condition.values.values()))
        if condition.mean is not None:
            panels[0].errorbar(
                condition.mean,
                place,
                xerr=condition.standard_error,
                fmt="|",
                color="black",
                markersize=12,
                capsize=4,
            )
        if condition.difference is not None:
            _draw_difference(panels[1], place, condition, baseline)
    panels[0].set_yticks(
        range(len(conditions)),
        [plain(fill(condition.name, 40)) for condition in conditions],
    )
    panels[0].set_ylim(len(conditions) - 0.5, -0.5)
    panels[0].set_xlabel(
        fill(label(comparison.metric), 40) + "\n(a dot per seed; mean ± standard error)"
    )
    if has_differences:
        panels[1].axvline(0, color="black", linewidth=0.8)
        panels[1].set_xlabel(
            plain(
                f"difference to {comparison.against}, paired by seed\n"
                "(a dot per pair; mean, 95 % interval)"
            )
        )
    return figure


def _draw_dots(axes: Axes, place: int, values: Sequence[float]) -> None:
    style: dict[str, Any] = {"color": OKABE_ITO[5], "markersize": 5, "alpha": 0.8}
    axes.plot(values, [place] * len(values), "o", **style)


def _draw_difference(
    axes: Axes, place: int, condition: Condition, baseline: Mapping[Seeds, float]
) -> None:
    """Draw a condition's mean difference with its interval, and the difference of each
    pair as a dot.
    """
    difference = condition.difference
    assert difference is not None
    pairs = [seed for seed in condition.values if seed in baseline]
    _draw_dots(axes, place, [condition.values[seed] - baseline[seed] for seed in pairs])
    reach = None
    if difference.low is not None and difference.high is not None:
        below = difference.mean - difference.low
        above = difference.high - difference.mean
        reach = [[below], [above]]
    axes.errorbar(
        difference.mean,
        place,
        xerr=reach,
        fmt="D",
        color=OKABE_ITO[0],
        markersize=6,
        capsize=4,
    )
