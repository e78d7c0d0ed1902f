"""This module writes a sweep's comparison as Markdown for people, as CSV at full precision, and as a picture."""

from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure

from titan_disp.condensation.heatmap import new_figure, plain
from titan_disp.errors import counted
from titan_disp.files import atomic_write
from titan_disp.lab.plots import OKABE_ITO
from titan_disp.lab.sweeps.comparison import Comparison, Condition, compare, label
from titan_disp.lab.sweeps.definition import Sweep
from titan_disp.text import NOTHING, csv_text, markdown_table

# This module draws a sweep's comparison: every seed, means, and differences with their intervals.


def draw(comparison: Comparison) -> Figure:
    """Draw a row of dots for each condition, one per seed, with mean ± standard error, and the paired differences."""
    conditions = comparison.conditions
    two = any(condition.difference is not None for condition in conditions)
    figure = new_figure(10 if two else 6.5, 1.6 + 0.36 * len(conditions))
    panels = figure.subplots(1, 2 if two else 1, sharey=True, squeeze=False)[0]
    for place, condition in enumerate(conditions):
        values = list(condition.values.values())
        panels[0].plot(values, [place] * len(values), "o", color=OKABE_ITO[5], markersize=5, alpha=0.8)
        if condition.mean is not None:
            panels[0].errorbar(
                condition.mean, place, xerr=condition.standard_error, fmt="|", color="black", markersize=12, capsize=4
            )
    panels[0].set_yticks(range(len(conditions)), [plain(fill(condition.name, 40)) for condition in conditions])
    panels[0].set_ylim(len(conditions) - 0.5, -0.5)
    panels[0].set_xlabel(fill(label(comparison.metric), 40) + "\n(a dot per seed; mean ± standard error)")
    panels[0].grid(axis="x", alpha=0.3)
    for axes in panels:
        axes.locator_params(axis="x", nbins=6)
    if not two:
        return figure
    for place, condition in enumerate(conditions):
        found = condition.difference
        if found is None:
            continue
        low, high = (
            (found.low, found.high) if found.low is not None and found.high is not None else (found.mean, found.mean)
        )
        reach = [[found.mean - low], [high - found.mean]]
        panels[1].errorbar(found.mean, place, xerr=reach, fmt="o", color=OKABE_ITO[0], markersize=6, capsize=4)
    panels[1].axvline(0, color="black", linewidth=0.8)
    panels[1].set_xlabel(plain(f"difference to {comparison.against}, paired by seed\n(95 % interval)"))
    panels[1].grid(axis="x", alpha=0.3)
    return figure


def write_table(sweep: Sweep, out: Path | None = None, metric: str | None = None, against: str | None = None) -> str:
    """Write table.md, table.csv, values.csv and table.png to ``out`` or the sweep's folder, and return the Markdown.

    Raises:
        ConfigError: The metric or the condition does not exist.
    """
    comparison = compare(sweep, metric, against)
    out = out or sweep.folder
    out.mkdir(parents=True, exist_ok=True)
    text = to_markdown(comparison)
    for name, content in (
        ("table.md", text),
        ("table.csv", to_csv(comparison)),
        ("values.csv", values_csv(comparison)),
    ):
        with atomic_write(out / name) as partial:
            partial.write_text(content)
    if any(condition.values for condition in comparison.conditions):
        with atomic_write(out / "table.png") as partial:
            draw(comparison).savefig(partial, format="png", dpi=120)
    return text


def to_markdown(comparison: Comparison) -> str:
    """Return Markdown with a row for each condition, with an explanation and the missing points below."""
    header = ["condition", "seeds", label(comparison.metric)]
    if comparison.against is not None:
        header += [f"difference to {comparison.against}", "pairs", "95 % interval", "p", "Holm"]
    rows = [_row(condition, comparison.against) for condition in comparison.conditions]
    table = markdown_table([header, *rows], left=1)
    return "\n\n".join([table, *_notes(comparison)]) + "\n"


def _row(condition: Condition, against: str | None) -> list[str]:
    seeds = f"{len(condition.values)} of {len(condition.members)}"
    cells = [condition.name, seeds, _with_error(condition.mean, condition.standard_error)]
    if against is None:
        return cells
    found = condition.difference
    if found is None:
        return [*cells, *[NOTHING] * 5]
    interval = NOTHING if found.low is None or found.high is None else f"{found.low:+.4f} … {found.high:+.4f}"
    difference = _with_error(found.mean, found.standard_error, "+")
    return [*cells, difference, str(len(condition.pairs)), interval, _p(found.p_value), _p(found.holm)]


def _with_error(mean: float | None, error: float | None, sign: str = "") -> str:
    if mean is None:
        return NOTHING
    return f"{mean:{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")


def _p(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2g}"


def _notes(comparison: Comparison) -> list[str]:
    notes = [f"Numbers are means ± standard errors over seeds of the {label(comparison.metric)}."]
    if comparison.held_out_is_missing:
        notes[0] += " (No finished run has measured held-out text.)"
    if comparison.against is not None:
        notes[0] += (
            f"\nDifferences to {comparison.against} are paired by seed: mean ± standard error, and the 95 % interval "
            "by Student's t.\np is the two-sided p value of the exact sign-flip test, which is at least 2/2ⁿ for n "
            "pairs. Holm is p adjusted for the number of differences."
        )
    members = [member for condition in comparison.conditions for member in condition.members]
    missing = [f"- {member.name}: {member.missing}" for member in members if member.missing]
    if missing:
        count = f"**The table lacks {len(missing)} of {counted(len(members), 'point')}**"
        notes.append(f"{count}. The numbers are those of the others.\n\n" + "\n".join(missing))
    return notes


def to_csv(comparison: Comparison) -> str:
    """Return CSV with a row for each condition. Undefined cells are empty."""
    header = ["point", "points", "finished", "mean", "standard_error"]
    header += ["against", "pairs", "difference", "difference_standard_error", "low", "high", "p", "holm"]

    def row(condition: Condition) -> list[Any]:
        counts = [len(condition.members), len(condition.values)]
        cells = [condition.name, *counts, condition.mean, condition.standard_error]
        found = condition.difference
        if found is None:
            return [*cells, *[None] * 8]
        numbers = (found.mean, found.standard_error, found.low, found.high, found.p_value, found.holm)
        return [*cells, comparison.against, len(condition.pairs), *numbers]

    return csv_text([header, *map(row, comparison.conditions)])


def values_csv(comparison: Comparison) -> str:
    """Return CSV with a row for each run, with the numbers behind the table and the reasons for missing ones."""
    rows = [
        [
            member.name,
            condition.name,
            " ".join(f"{key}={value}" for key, value in member.seeds),
            comparison.metric,
            member.value,
            member.missing,
        ]
        for condition in comparison.conditions
        for member in condition.members
    ]
    return csv_text([["run", "point", "seeds", "metric", "value", "missing"], *rows])
