"""This module compares a sweep's conditions by one number of each run, and writes
tables and a picture of it.

The number is the run's metric after its last step. A condition has its mean over seeds,
and its difference to one condition, the baseline, is paired by seed.
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
# of a deep model
PARTS = (
    "blocks",
    "early_blocks",
    "middle_blocks",
    "late_blocks",
    "last_block",
    "final_norm",
)
FALLBACK = "ce"
# the first one that any finished run has is the default
DEFAULTS = ("validation", "cross_entropy", FALLBACK)
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
    kind, part = _parts(name)
    if name not in LABELS and (kind not in BY_PART or part not in PARTS):
        raise ConfigError(
            f"the metric is {name!r} (--metric, or sweep.metric in the file), "
            f"expected {', '.join(LABELS)}, or {', '.join(BY_PART)}, each with a part "
            "of the model such as mean_cosine.middle_blocks (the parts are "
            f"{', '.join(PARTS)}; the default is blocks, which means all of them)"
        )


def label(name: str) -> str:
    return LABELS.get(name) or " of the ".join(
        part.replace("_", " ") for part in _parts(name)
    )


def final_metric(run: Path, name: str) -> float | None:
    """Return a number at the end of a run, or None if the run has not measured it or it
    is not finite.

    Raises ConfigError if there is no such metric, or a file of the run cannot be read.
    Cross-entropies are in nats, and angles are fractions of π.

    ``validation`` is TorchTitan's validation loss. The run measures ``cross_entropy``
    and everything about cosines on held-out text after its last step
    (``[condensation]``).
    """
    check_metric(name)
    row = last_row(run)
    # Events, such as complete, know later steps than the last logged row.
    last = max([row.get("step", 0), *(event["step"] for event in read_events(run))])
    if name in TRAINING:
        value = row.get(name)
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
    kind, part = _parts(name)
    file = run / "condensation" / f"step-{max(by_step)}.npz"
    if not file.is_file():
        return None
    measured = Measurement.load(file)
    if name in RANKS:
        return over_depth(OF_PAPER, name)(measured)
    return measured.by_part()[kind].get(part)


def _at_the_end(by_step: Mapping[int, Any], last: int) -> Any:
    """Return the newest entry, or None if the run logged later steps, because it is
    then not from the end.
    """
    newest = max(by_step, default=-1)
    return by_step[newest] if newest >= last else None


Seeds = tuple[tuple[str, object], ...]  # keys and values of the config


@dataclass(frozen=True)
class Member:
    """Represent a point of a condition.

    ``value`` is its metric, or None with the reason in ``missing``.
    """

    name: str
    seeds: Seeds
    value: float | None
    missing: str = ""


@dataclass(frozen=True)
class Condition:
    """Hold the points that differ only in their seeds."""

    name: str
    members: tuple[Member, ...]
    # to the baseline; None for the baseline itself, and where there is none
    difference: Difference | None = None

    @property
    def values(self) -> dict[Seeds, float]:
        """Return the metric by seeds, for points that have it."""
        return {
            member.seeds: member.value
            for member in self.members
            if member.value is not None
        }

    @property
    def mean(self) -> float | None:
        return float(np.mean(list(self.values.values()))) if self.values else None

    @property
    def standard_error(self) -> float | None:
        return standard_error(list(self.values.values()))


@dataclass(frozen=True)
class SweepComparison:
    """Hold a sweep's conditions in the order of its file."""

    metric: str
    against: str | None  # name of the baseline
    conditions: list[Condition]
    # the metric is training cross-entropy because no run has measured held-out text
    held_out_is_missing: bool


def compare(
    sweep: Sweep, metric: str | None = None, against: str | None = None
) -> SweepComparison:
    """Read the runs of a sweep and compare them by a metric of ``final_metric`` with
    the condition ``against``.

    The defaults are the sweep's own. Without a metric of its own, it is the first of
    ``DEFAULTS`` that any run has.
    """
    every = points(sweep)
    asked = metric or sweep.metric
    against = against or sweep.against
    for name in [asked] if asked else DEFAULTS:
        check_metric(name)
        by_condition: dict[str, list[Member]] = {}
        for point in every:
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
        held_out_is_missing=not asked and name == FALLBACK,
    )


def _member(point: Point, metric: str) -> Member:
    """Return a point with its metric if it has finished.

    One run that cannot be read must not cost the others' table.
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
    """Return the conditions with their differences to one of them, the baseline.

    Holm's p values are over all differences.
    """
    if against is None:
        return list(conditions)
    by_seed = {condition.name: condition.values for condition in conditions}
    differences = differences_over_seeds(by_seed, against)
    # A single pair has no p value, and Holm would count it as a comparison. (Without
    # pairs, Welch's t-test has one.)
    comparable = {name: test for name, test in differences.items() if test.pairs != 1}
    adjusted = with_holm(list(comparable.values()))
    differences |= dict(zip(comparable, adjusted, strict=True))
    return [
        replace(condition, difference=differences.get(condition.name))
        for condition in conditions
    ]


def write_table(sweep: Sweep, options: SweepTableOptions) -> str:
    """Write table.md, table.csv, values.csv and a picture to ``options.out`` or the
    sweep's folder, and return the Markdown.
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
    """Return the cells of a header and of a row for each condition."""
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
    return [
        *cells,
        str(difference),
        str(difference.pairs),
        difference.interval,
        *(
            NOTHING if p is None else f"{p:.2g}"
            for p in (difference.p_value, difference.holm)
        ),
    ]


def _notes(comparison: SweepComparison) -> list[str]:
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
                "\nWithout a pair of equal seeds (pairs 0), they and p are those of "
                "Welch's t-test."
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
            f"{count}. The numbers are those of the others.\n\n" + "\n".join(missing)
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


def values_csv(comparison: SweepComparison) -> str:
    """Return CSV with a row for each run, with the numbers behind the table and the
    reasons for missing ones.
    """
    rows: list[list[Any]] = [["run", "point", "seeds", "metric", "value", "missing"]]
    for condition in comparison.conditions:
        for member in condition.members:
            seeds = " ".join(f"{key}={value}" for key, value in member.seeds)
            rows.append(
                [
                    member.name,
                    condition.name,
                    seeds,
                    comparison.metric,
                    member.value,
                    member.missing,
                ]
            )
    return csv_text(rows)


def draw(comparison: SweepComparison) -> Figure:
    """Draw a row of dots for each condition, one per seed, with mean ± standard error,
    and the paired differences.
    """
    conditions = comparison.conditions
    two = any(condition.difference is not None for condition in conditions)
    figure = new_figure(10 if two else 6.5, 1.6 + 0.36 * len(conditions))
    panels = figure.subplots(1, 2 if two else 1, sharey=True, squeeze=False)[0]
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
    if two:
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
    """Draw a condition's difference with its interval, and that of each pair."""
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
