"""This module draws condensation against the size of a model, its distillation, or the steps of its training."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from titan_disp.condensation.plot import MEAN_COSINE, OKABE_ITO, new_figure, plain, styles
from titan_disp.condensation.record import Condensation, OverDepth

MEASURES: dict[str, Callable[[Condensation], float]] = {
    "Spearman's ρ": lambda found: _over_depth(found).spearman,
    "Kendall's τ": lambda found: _over_depth(found).kendall,
}
"""These are the paper's two measures: rank correlations of the mean cosine with depth."""


def _over_depth(found: Condensation) -> OverDepth:
    """Return the change over depth, with the last layer after the final norm, as in the paper, if that was measured."""
    return found.after_norm if found.final_norm else found.before_norm


def size(parameters: float) -> str:
    """Return a large number in three digits, as in names of models: ``427k``, ``124M``, ``1.72B``."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= 0.9995 * unit:  # three digits round 999,950 to 1M
            return f"{parameters / unit:.3g}{letter}"
    return f"{parameters:.3g}"


def _correlation_axis(axes: Axes, label: str) -> None:
    axes.set_ylim(-1.08, 1.08)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_title(f"{label} of the mean cosine with depth", fontsize=10.5)
    axes.grid(alpha=0.3)


def by_size(families: Mapping[str, Mapping[str, tuple[int, Condensation]]]) -> Figure:
    """Draw ρ and τ against the number of parameters, a line for each family.

    Args:
        families: for each family's name, its models: (number of parameters, measurement) by name.
    """
    models = [(name, parameters) for family in families.values() for name, (parameters, _) in family.items()]
    figure = new_figure(9, 4.6 + 0.22 * -(-len(models) // 2))
    grid = figure.subplots(1, len(MEASURES), sharex=True, sharey=True)
    names: list[tuple[Line2D, str]] = []
    for axes, (label, measure) in zip(grid, MEASURES.items(), strict=True):
        _correlation_axis(axes, label)
        for (family, members), style in zip(families.items(), styles(), strict=False):
            ordered = sorted(members.values(), key=lambda member: member[0])
            numbers = [(parameters, measure(found)) for parameters, found in ordered]
            (line,) = axes.plot(*zip(*numbers, strict=True), label=plain(family), markersize=6, **style)
            if axes is grid[0]:
                told = ", ".join(f"{name} {size(n)}" for name, (n, _) in sorted(members.items(), key=lambda m: m[1][0]))
                names.append((line, f"{family}: {told}"))
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # all sizes may lie within one power of ten
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(x)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("parameters")
    figure.legend(
        [line for line, _ in names], [plain(_broken(text, 100)) for _, text in names], loc="outside lower center"
    )
    return figure


def _broken(text: str, width: int) -> str:
    """Break text into lines of about this many characters, after commas only, so that names stay whole."""
    lines = [""]
    for part in text.split(", "):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += f", {part}" if lines[-1] else part
    return ",\n    ".join(lines)


def pairs(found: Sequence[tuple[tuple[str, Condensation], tuple[str, Condensation]]]) -> Figure:
    """Draw ρ and τ of each model and of one made from it, such as a distilled one. Each pair is a row."""
    figure = new_figure(9, 1.9 + 0.6 * len(found))
    grid = figure.subplots(1, len(MEASURES), sharex=True, sharey=True)
    rows = np.arange(len(found))
    for axes, (label, measure) in zip(grid, MEASURES.items(), strict=True):
        first, second = (np.array([measure(pair[i][1]) for pair in found]) for i in (0, 1))
        axes.hlines(rows, first, second, color="0.6", linewidth=2)
        axes.plot(first, rows, "o", color=OKABE_ITO[0], markersize=9, label="first of the pair (base model)")
        axes.plot(second, rows, "s", color=OKABE_ITO[1], markersize=8, label="second of the pair (made from it)")
        axes.set_xlim(-1.08, 1.08)
        axes.axvline(0, color="black", linewidth=0.6)
        axes.set_title(f"{label}\nof the mean cosine with depth", fontsize=10.5)
        axes.grid(axis="x", alpha=0.3)
    labels = [plain(f"{base}\n→ {other}") for (base, _), (other, _) in found]
    grid[0].set_yticks(rows, labels)
    grid[0].set_ylim(len(found) - 0.5, -0.5)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def over_steps(runs: Mapping[str, Mapping[int, Condensation]]) -> Figure:
    """Draw the mean cosine (of all blocks, and of the last one), ρ and τ against the step, a line for each run.

    The axis is logarithmic if the steps span more than a factor of 100, as those of published checkpoints do.
    """
    panels: dict[str, Callable[[Condensation], float]] = {
        "mean over all blocks": lambda found: found.by_part()["mean_cosine"]["blocks"],
        "last block": lambda found: found.by_part()["mean_cosine"]["last_block"],
        **MEASURES,
    }
    figure = new_figure(9, 6.2 + 0.22 * -(-len(runs) // 2))
    grid = figure.subplots(2, 2, sharex=True)
    positive = [step for by_step in runs.values() for step in by_step if step > 0]
    for axes, (label, measure) in zip(grid.flat, panels.items(), strict=True):
        for (name, by_step), style in zip(runs.items(), styles(), strict=False):
            axes.plot(
                list(by_step), [measure(one) for one in by_step.values()], label=plain(name), markersize=5, **style
            )
        if label in MEASURES:
            _correlation_axis(axes, label)
            axes.set_xlabel("step")
        else:
            axes.set_title(f"{MEAN_COSINE}, {label}", fontsize=10.5)
            axes.grid(alpha=0.3)
        if positive and max(positive) > 100 * min(positive):
            axes.set_xscale("symlog", linthresh=min(positive))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(x)))
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=1 if max(map(len, labels)) > 36 else 2)
    return figure
