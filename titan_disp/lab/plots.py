"""Summaries of condensation are drawn by layer, over training, and against the size of
a model or its distillation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from titan_disp.condensation.heatmap import heatmaps, layer_label, new_figure, plain
from titan_disp.condensation.record import (
    OF_PAPER,
    RANKS,
    Measurement,
    blocks_mean,
    most_condensed,
    over_depth,
    telling_steps,
)
from titan_disp.errors import ConfigError
from titan_disp.text import number, short

MEAN_COSINE = "mean pairwise cosine"
POOLED = "all pairs of all sequences"
AVERAGED = "cosines averaged over the sequences first, as in the paper"
# The paper's two measures are rank correlations with depth, of the blocks, with the
# last layer after the final norm.
MEASURES = {name: over_depth(OF_PAPER, rank) for rank, name in RANKS.items()}
UNDEFINED = "– (mean cosines are equal)"
COLUMNS = 3  # of panels
FORMATS = ("png", "svg", "pdf")
# Okabe & Ito's colours, which colour-blind readers can distinguish, without yellow,
# which is faint on white.
OKABE_ITO = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":")


def picture_formats(words: Sequence[str]) -> list[str]:
    """Return the formats that --format names, in one word or several."""
    formats = ",".join(words).split(",")
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(
                f"--format is {name!r}, expected some of {', '.join(FORMATS)}"
            )
    return formats


def averaged(found: Measurement) -> Measurement:
    """Return the measurement with the paper's histogram in place of the pooled one, for
    any heatmap.
    """
    assert found.averaged_histogram is not None
    # An averaged cosine of S sequences is that of S vectors one after another, with S
    # times the features.
    return replace(
        found,
        histogram=found.averaged_histogram,
        features=found.features * found.sequences,
    )


def side_by_side(found: Mapping[str, Measurement], title: str) -> Figure:
    """Draw heatmaps of several measurements by name.

    ``title`` says what all of them show.
    """
    items = iter(found.items())
    return heatmaps(
        list(iter(lambda: dict(islice(items, COLUMNS)), {})), title, dashed="untrained"
    )


def styles() -> Iterator[dict[str, Any]]:
    """Yield line styles that differ in colour, marker and dashes, so that up to eight
    lines need no colour.
    """
    for color, marker, line in zip(
        cycle(OKABE_ITO), cycle(MARKERS), cycle(LINES), strict=False
    ):
        yield {"color": color, "marker": marker, "linestyle": line}


def mean_cosine_by_layer(found: Mapping[str, Measurement]) -> Figure:
    """Draw one line for each measurement, over its layers, or over relative depth if
    the models differ in depth.
    """
    figure = new_figure(8, 4 + 0.22 * len(found))
    axes = figure.subplots()
    relative = len({one.last_block for one in found.values()}) > 1
    for (name, one), style in zip(found.items(), styles(), strict=False):
        depth = np.arange(len(one.mean_cosine))
        last = one.last_block
        if relative:
            depth = np.where(depth <= last, depth / last, 1 + 0.05 * (depth - last))
        axes.plot(depth, one.mean_cosine, label=plain(name), markersize=5, **style)
    if relative:
        logits = ", logits" * one.logits
        axes.set_xlabel(
            f"relative depth (0: embedding, 1: last block, beyond: final norm{logits})",
            fontsize=11,
        )
    else:
        axes.set_xlabel(layer_label(list(found.values())), fontsize=11)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(MEAN_COSINE, fontsize=11)
    axes.grid(alpha=0.3)
    figure.legend(
        loc="outside lower center", ncols=1 if max(map(len, found)) > 36 else 2
    )
    return figure


def depth_bars(found: Mapping[str, Measurement]) -> Figure:
    """Draw Spearman's ρ and Kendall's τ of the mean cosine with depth, which are 1 if
    it grows with every layer.
    """
    figure = new_figure(8, 1.5 + 0.55 * len(found))
    axes = figure.subplots()
    place = np.arange(len(found))
    looks = zip(OKABE_ITO, ("", "//"), (-0.19, 0.19), strict=False)
    for (label, measure), (color, hatch, offset) in zip(
        MEASURES.items(), looks, strict=True
    ):
        values = [measure(one) for one in found.values()]
        bars = axes.barh(
            place + offset,
            np.nan_to_num(values),
            0.36,
            label=label,
            color=color,
            hatch=hatch,
            ec="white",
        )
        axes.bar_label(
            bars, [UNDEFINED if np.isnan(v) else f"{v:+.2f}" for v in values], padding=4
        )
    ranges = [one.over_depth[OF_PAPER].range for one in found.values()]
    axes.set_yticks(
        place,
        [
            f"{plain(fill(name, 34))}\nrange {number(value_range, 2)}"
            for name, value_range in zip(found, ranges, strict=True)
        ],
    )
    axes.invert_yaxis()
    axes.set_xlim(-1.25, 1.25)
    axes.set_xticks([-1, -0.5, 0, 0.5, 1])
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel(
        "rank correlation of the mean cosine with depth\n"
        "(last block: after the final norm; range: largest minus smallest mean cosine)",
        fontsize=11,
    )
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def over_training(
    runs: Mapping[str, Mapping[int, Measurement] | Mapping[str, Measurement]],
) -> Figure:
    """Draw the mean cosine by layer at several steps: a panel for each run, a line for
    each step.

    Lines of the same step have the same colour. Steps are numbers, or names of
    revisions, which keep their order.
    """
    columns = min(COLUMNS, len(runs))
    rows = -(-len(runs) // columns)
    figure = new_figure(max(7, 1.5 + 3.2 * columns), 0.4 + 3.8 * rows)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes in grid.flat[len(runs) :]:
        axes.set_axis_off()
    steps: list[Any] = sorted(
        dict.fromkeys(chain.from_iterable(runs.values())),
        key=lambda step: step if isinstance(step, int) else 0,
    )
    colors: dict[Any, Any] = dict(
        zip(steps, colormaps["viridis"](np.linspace(0, 0.93, len(steps))), strict=True)
    )
    lines: dict[Any, Any] = {}
    for axes, (name, by_step) in zip(grid.flat, runs.items(), strict=False):
        for (step, one), marker in zip(by_step.items(), cycle(MARKERS), strict=False):
            (lines[step],) = axes.plot(
                one.mean_cosine, color=colors[step], marker=marker, markersize=4
            )
        axes.set_title(plain(fill(name, 34)), fontsize=11)
        axes.set_xlabel(layer_label(list(by_step.values()), gap="\n"), fontsize=11)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    for axes in grid[:, 0]:
        axes.set_ylabel(MEAN_COSINE, fontsize=11)
    names = [f"{step:,}" if isinstance(step, int) else plain(step) for step in steps]
    title = "step" if all(isinstance(step, int) for step in steps) else "revision"
    figure.legend(
        [lines[step] for step in steps], names, title=title, loc="outside right center"
    )
    return figure


def some_steps(
    runs: Mapping[str, Mapping[int, Measurement]],
) -> dict[str, dict[int, Measurement]]:
    """Return some measurements of each run by step, for ``over_training``, whose lines
    can then be told apart.

    They are those at a few of the steps of all runs, which include the first one, and
    the most condensed and the last one of each run.
    """
    steps = set().union(*runs.values())
    highest = set(map(most_condensed, runs.values()))
    chosen = set(map(max, runs.values()))
    chosen.update(telling_steps(sorted(steps), highest))
    return {
        name: {
            step: measurement for step, measurement in by_step.items() if step in chosen
        }
        for name, by_step in runs.items()
    }


def heatmap_panels(
    name: str, by_step: Mapping[int, Measurement]
) -> dict[str, Measurement]:
    """Return the first, the most condensed and the last measurement by title. They also
    have the mean cosines before training, if they were measured, for a dashed line.
    """
    untrained = None
    if 0 in by_step:
        untrained = by_step[0].mean_cosine
    steps = {min(by_step), most_condensed(by_step), max(by_step)}
    return {
        f"{name}, step {step:,}": replace(
            by_step[step], untrained_mean_cosine=untrained
        )
        for step in sorted(steps)
    }


def draw_layer_map(
    axes: Axes, by_step: Mapping[Any, Measurement], title: str, end: float
) -> QuadMesh:
    """Draw at least two measurements' mean cosines by layer, up to the run's last step
    ``end``, in one colour scale. ``by_step`` may be by tokens as well.
    """
    measurements = list(by_step.values())
    values = np.array([measurement.mean_cosine for measurement in measurements]).T
    layers = np.arange(len(values))
    mesh = axes.pcolormesh(
        list(by_step), layers, values, cmap="magma_r", vmin=0, vmax=1, rasterized=True
    )
    axes.set_xlim(min(by_step), max(end, *by_step))
    axes.set_title(plain(fill(title, 50)), fontsize=10)
    axes.set(xlabel="step", ylabel=layer_label(measurements, gap="\n"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x)))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return mesh


def add_cosine_scale(
    figure: Figure, mesh: QuadMesh, by_step: Mapping[int, Measurement]
) -> None:
    """Add the bar of colours of layer maps."""
    tokens = next(iter(by_step.values())).tokens
    label = f"{MEAN_COSINE} (of random vectors: {1 / tokens:.2g})"
    figure.colorbar(mesh, ax=figure.axes, label=label)


def size(parameters: float) -> str:
    """Return a large number in three digits, as in names of models: ``427k``, ``124M``,
    ``1.72B``.
    """
    return short(parameters, 3).replace(" ", "")


def _explain_if_empty(axes: Axes) -> None:
    """Write into a panel whose lines have no point why it has none."""
    values = [line.get_ydata() for line in axes.get_lines()[1:]]  # the first is 0
    if not np.isfinite(np.concatenate(values).astype(float)).any():
        reason = "nothing to draw: the mean cosines\nof all layers are equal"
        axes.text(0.5, 0.75, reason, ha="center", transform=axes.transAxes)


def _correlation_axis(axes: Axes, label: str) -> None:
    axes.set_ylim(-1.08, 1.08)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_title(f"{label} of the mean cosine with depth", fontsize=10.5)
    axes.grid(alpha=0.3)


def by_size(families: Mapping[str, Mapping[str, tuple[int, Measurement]]]) -> Figure:
    """Draw ρ and τ against the number of parameters, which stands beside a measurement.

    Each family is a line.
    """
    figure = new_figure(9, 4.6 + 0.22 * -(-sum(map(len, families.values())) // 2))
    grid = figure.subplots(1, len(MEASURES), sharex=True, sharey=True)
    for axes, label in zip(grid, MEASURES, strict=True):
        _correlation_axis(axes, label)
        axes.set_xscale("log")
        # all sizes may lie within one power of ten
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(x)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("parameters")
    lines = []
    names = []
    for (family, members), style in zip(families.items(), styles(), strict=False):
        ordered = sorted(members.items(), key=lambda member: member[1][0])
        parameters = [n for _, (n, _) in ordered]
        for axes, measure in zip(grid, MEASURES.values(), strict=True):
            (line,) = axes.plot(
                parameters,
                [measure(one) for _, (_, one) in ordered],
                markersize=6,
                **style,
            )
        lines.append(line)
        names.append(
            plain(
                _broken(
                    f"{family}: {', '.join(f'{name} {size(n)}' for name, (n, _) in ordered)}",
                    100,
                )
            )
        )
    for axes in grid:
        _explain_if_empty(axes)
    figure.legend(lines, names, loc="outside lower center")
    return figure


def _broken(text: str, width: int) -> str:
    """Break text into lines of about this many characters, after commas only, so that
    names stay whole.
    """
    lines = [""]
    for part in text.split(", "):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += f", {part}" if lines[-1] else part
    return ",\n    ".join(lines)


def pairs(
    found: Sequence[tuple[tuple[str, Measurement], tuple[str, Measurement]]],
) -> Figure:
    """Draw ρ and τ of each model and of one made from it, such as a distilled one.

    Each pair is a row.
    """
    figure = new_figure(9, 1.9 + 0.6 * len(found))
    grid = figure.subplots(1, len(MEASURES), sharex=True, sharey=True)
    rows = np.arange(len(found))
    for axes, (label, measure) in zip(grid, MEASURES.items(), strict=True):
        first, second = (
            np.array([measure(pair[i][1]) for pair in found]) for i in (0, 1)
        )
        axes.hlines(rows, first, second, color="0.6", linewidth=2)
        axes.plot(
            first,
            rows,
            "o",
            color=OKABE_ITO[0],
            markersize=9,
            label="first of the pair (base model)",
        )
        axes.plot(
            second,
            rows,
            "s",
            color=OKABE_ITO[1],
            markersize=8,
            label="second of the pair (made from it)",
        )
        axes.set_xlim(-1.08, 1.08)
        axes.axvline(0, color="black", linewidth=0.6)
        axes.set_title(f"{label}\nof the mean cosine with depth", fontsize=10.5)
        axes.grid(axis="x", alpha=0.3)
    labels = [plain(f"{base}\n→ {other}") for (base, _), (other, _) in found]
    grid[0].set_yticks(rows, labels)
    grid[0].set_ylim(len(found) - 0.5, -0.5)
    figure.legend(
        *grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=2
    )
    return figure


def over_steps(runs: Mapping[str, Mapping[int, Measurement]]) -> Figure:
    """Draw the mean cosine (of all blocks, and of the last one), ρ and τ against the
    step, a line for each run.

    The axis is logarithmic if the steps span more than a factor of 100, as those of
    published checkpoints do.
    """
    panels: dict[str, Callable[[Measurement], float]] = {
        "mean over all blocks": blocks_mean,
        "last block": lambda found: found.mean_cosine[found.last_block],
        **MEASURES,
    }
    figure = new_figure(9, 6.2 + 0.22 * -(-len(runs) // 2))
    grid = figure.subplots(2, 2, sharex=True)
    positive = [step for step in chain.from_iterable(runs.values()) if step > 0]
    for axes, (label, measure) in zip(grid.flat, panels.items(), strict=True):
        for (name, by_step), style in zip(runs.items(), styles(), strict=False):
            values = [measure(one) for one in by_step.values()]
            axes.plot(list(by_step), values, label=plain(name), markersize=5, **style)
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
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=1 if max(map(len, labels)) > 36 else 2,
    )
    return figure
