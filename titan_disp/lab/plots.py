"""Draws measurements of condensation by layer, over training, by the size of the model,
and for pairs of models.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
# The paper's two measures: rank correlations of the mean cosine with depth. All blocks
# are included, but not the embedding. The last block is measured after the final norm.
MEASURES = {name: over_depth(OF_PAPER, rank) for rank, name in RANKS.items()}
UNDEFINED = "– (mean cosines are equal)"
COLUMNS = 3  # panels side by side
FORMATS = ("png", "svg", "pdf")
# The colours of Okabe and Ito, which colour-blind readers can distinguish. Yellow is left
# out, because it is faint on white.
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
    """Return the formats that --format names, in one word or several words.

    Raises ConfigError for an unknown format.
    """
    formats = ",".join(words).split(",")
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(
                f"--format is {name!r}, expected some of {', '.join(FORMATS)}"
            )
    return formats


def averaged(measurement: Measurement) -> Measurement:
    """Return the measurement with the paper's histogram (``averaged_histogram``) in
    place of the pooled histogram.
    """
    assert measurement.averaged_histogram is not None
    # The average of S cosines behaves like a single cosine of vectors with S times the
    # features.
    return replace(
        measurement,
        histogram=measurement.averaged_histogram,
        features=measurement.features * measurement.sequences,
    )


def side_by_side(measurements: Mapping[str, Measurement], title: str) -> Figure:
    """Return a figure with the heatmap of each measurement under its name.

    ``title`` says what all heatmaps show.
    """
    items = iter(measurements.items())
    return heatmaps(
        list(iter(lambda: dict(islice(items, COLUMNS)), {})), title, dashed="untrained"
    )


def styles() -> Iterator[dict[str, Any]]:
    """Yield line styles that differ in colour, marker and dashes.

    The first eight can be distinguished without colours.
    """
    for color, marker, line in zip(
        cycle(OKABE_ITO), cycle(MARKERS), cycle(LINES), strict=False
    ):
        yield {"color": color, "marker": marker, "linestyle": line}


def _legend_columns(names: Iterable[str]) -> int:
    """Return the number of columns of a legend below a figure: 1 if a name is long,
    else 2.
    """
    if max(map(len, names)) > 36:
        return 1
    return 2


def mean_cosine_by_layer(measurements: Mapping[str, Measurement]) -> Figure:
    """Return a figure with a line for each measurement, over its layers, or over
    relative depth if the models differ in depth.
    """
    figure = new_figure(8, 4 + 0.22 * len(measurements))
    axes = figure.subplots()
    relative = len({m.last_block for m in measurements.values()}) > 1
    for (name, measurement), style in zip(measurements.items(), styles(), strict=False):
        mean = measurement.mean_cosine
        depth = np.arange(len(mean))
        last = measurement.last_block
        if relative:
            depth = np.where(depth <= last, depth / last, 1 + 0.05 * (depth - last))
        axes.plot(depth, mean, label=plain(name), markersize=5, **style)
    if relative:
        logits = ", logits" * measurement.logits
        axes.set_xlabel(
            f"relative depth (0: embedding, 1: last block, beyond: final norm{logits})",
            fontsize=11,
        )
    else:
        axes.set_xlabel(layer_label(list(measurements.values())), fontsize=11)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(MEAN_COSINE, fontsize=11)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=_legend_columns(measurements))
    return figure


def depth_bars(measurements: Mapping[str, Measurement]) -> Figure:
    """Return a figure with bars for Spearman's ρ and Kendall's τ of the mean cosine with
    depth.

    ρ and τ are 1 if the mean cosine grows with each layer.
    """
    figure = new_figure(8, 1.5 + 0.55 * len(measurements))
    axes = figure.subplots()
    place = np.arange(len(measurements))
    looks = zip(OKABE_ITO, ("", "//"), (-0.19, 0.19), strict=False)
    for (label, measure), (color, hatch, offset) in zip(
        MEASURES.items(), looks, strict=True
    ):
        values = list(map(measure, measurements.values()))
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
    labels = []
    for name, measurement in measurements.items():
        value_range = number(measurement.over_depth[OF_PAPER].range, 2)
        labels.append(f"{plain(fill(name, 34))}\nrange {value_range}")
    axes.set_yticks(place, labels)
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
    """Return a figure of the mean cosine by layer, with a panel for each run and a line
    for each step.

    Lines of the same step have the same colour. A step is a number, or the name of a
    revision. Revisions keep their order.
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
        for (step, measurement), marker in zip(
            by_step.items(), cycle(MARKERS), strict=False
        ):
            (lines[step],) = axes.plot(
                measurement.mean_cosine, color=colors[step], marker=marker, markersize=4
            )
        axes.set_title(plain(fill(name, 34)), fontsize=11)
        axes.set_xlabel(layer_label(list(by_step.values()), gap="\n"), fontsize=11)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    for axes in grid[:, 0]:
        axes.set_ylabel(MEAN_COSINE, fontsize=11)
    title = "step"
    names = []
    for step in steps:
        if isinstance(step, int):
            names.append(f"{step:,}")
        else:
            names.append(plain(step))
            title = "revision"
    figure.legend(
        [lines[step] for step in steps], names, title=title, loc="outside right center"
    )
    return figure


def some_steps(
    runs: Mapping[str, Mapping[int, Measurement]],
) -> dict[str, dict[int, Measurement]]:
    """Return measurements at a few steps, so that the lines of ``over_training`` can be
    distinguished.

    The steps are the same for all runs: the first, the most condensed and the last step
    of each run, and some steps between them.
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
    """Return the first, the most condensed and the last measurement of a run by title.

    If step 0 was measured, its mean cosines are the ``untrained_mean_cosine`` of these
    measurements, which heatmaps draw as a dashed line.
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
    """Draw a map of mean cosines by layer and step into ``axes``, and return the mesh.

    There are at least two measurements. The x axis ends at ``end``, the run's last step.
    Tokens may be used in place of steps.
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
    """Add the colour bar of layer maps to a figure."""
    tokens = next(iter(by_step.values())).tokens
    label = f"{MEAN_COSINE} (of random vectors: {1 / tokens:.2g})"
    figure.colorbar(mesh, ax=figure.axes, label=label)


def size(parameters: float) -> str:
    """Return a number of parameters as text in three digits, such as ``427k`` or
    ``1.72B``.
    """
    return short(parameters, 3).replace(" ", "")


def _explain_if_empty(axes: Axes) -> None:
    """Write an explanation into a panel whose lines have no points."""
    # The first line is the zero line of the axis.
    values = [line.get_ydata() for line in axes.get_lines()[1:]]
    if not np.isfinite(np.concatenate(values).astype(float)).any():
        reason = "nothing to draw: the mean cosines\nof all layers are equal"
        axes.text(0.5, 0.75, reason, ha="center", transform=axes.transAxes)


def _correlation_axis(axes: Axes, label: str) -> None:
    axes.set_ylim(-1.08, 1.08)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_title(f"{label} of the mean cosine with depth", fontsize=10.5)
    axes.grid(alpha=0.3)


def by_size(families: Mapping[str, Mapping[str, tuple[int, Measurement]]]) -> Figure:
    """Return a figure of ρ and τ against the number of parameters, with a line for each
    family.

    ``families`` has (parameters, measurement) by family and by the name of the model.
    """
    figure = new_figure(9, 4.6 + 0.22 * -(-sum(map(len, families.values())) // 2))
    grid = figure.subplots(1, len(MEASURES), sharex=True, sharey=True)
    for axes, label in zip(grid, MEASURES, strict=True):
        _correlation_axis(axes, label)
        axes.set_xscale("log")
        # Ticks also at 2 and 5, because all sizes may lie within a power of ten.
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(x)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("parameters")
    lines = []
    names = []
    for (family, members), style in zip(families.items(), styles(), strict=False):
        ordered = sorted(members.items(), key=lambda member: member[1][0])
        parameters = [n for _, (n, _) in ordered]
        measurements = [measurement for _, (_, measurement) in ordered]
        for axes, measure in zip(grid, MEASURES.values(), strict=True):
            values = list(map(measure, measurements))
            (line,) = axes.plot(parameters, values, markersize=6, **style)
        lines.append(line)
        models = ", ".join(f"{name} {size(n)}" for name, (n, _) in ordered)
        names.append(plain(_broken(f"{family}: {models}", 100)))
    for axes in grid:
        _explain_if_empty(axes)
    figure.legend(lines, names, loc="outside lower center")
    return figure


def _broken(text: str, width: int) -> str:
    """Return text broken into lines of about ``width`` characters, only after commas, so
    that names stay whole.
    """
    first, *rest = text.split(", ")
    lines = [first]
    for part in rest:
        if len(lines[-1]) + len(part) > width:
            lines.append(part)
        else:
            lines[-1] += f", {part}"
    return ",\n    ".join(lines)


def pairs(
    models: Sequence[tuple[tuple[str, Measurement], tuple[str, Measurement]]],
) -> Figure:
    """Return a figure of ρ and τ of pairs: a base model, and a model made from it, such
    as by distillation.

    Each pair is a row. ``models`` has (name, measurement) of both models of each pair.
    """
    figure = new_figure(9, 1.9 + 0.6 * len(models))
    grid = figure.subplots(1, len(MEASURES), sharex=True, sharey=True)
    rows = np.arange(len(models))
    for axes, (label, measure) in zip(grid, MEASURES.items(), strict=True):
        first = [measure(measurement) for (_, measurement), _ in models]
        second = [measure(measurement) for _, (_, measurement) in models]
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
    labels = [plain(f"{base}\n→ {other}") for (base, _), (other, _) in models]
    grid[0].set_yticks(rows, labels)
    grid[0].set_ylim(len(models) - 0.5, -0.5)
    figure.legend(
        *grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=2
    )
    return figure


def over_steps(runs: Mapping[str, Mapping[int, Measurement]]) -> Figure:
    """Return a figure of the mean cosine (over all blocks, and of the last block), ρ and
    τ against the step, with a line for each run.

    The x axis is logarithmic if the steps span more than a factor of 100, as the steps
    of published checkpoints do.
    """
    panels: dict[str, Callable[[Measurement], float]] = {
        "mean over all blocks": blocks_mean,
        "last block": lambda measurement: measurement.mean_cosine[
            measurement.last_block
        ],
        **MEASURES,
    }
    figure = new_figure(9, 6.2 + 0.22 * -(-len(runs) // 2))
    grid = figure.subplots(2, 2, sharex=True)
    positive = [step for step in chain.from_iterable(runs.values()) if step > 0]
    for axes, (label, measure) in zip(grid.flat, panels.items(), strict=True):
        for (name, by_step), style in zip(runs.items(), styles(), strict=False):
            values = list(map(measure, by_step.values()))
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
        ncols=_legend_columns(labels),
    )
    return figure
