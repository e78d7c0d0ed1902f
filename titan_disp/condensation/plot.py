"""This module draws cosine histograms by layer, as in arXiv 2602.00217 (Figures 2, 4 and 6), and summaries of them.

Figures are made without pyplot, which keeps all of them in a global. They are therefore safe in threads and while a
model trains.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, FigureBase
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from titan_disp.condensation.record import LEAST_RANGE, Condensation, alike

MEAN_COSINE = "mean pairwise cosine"
POOLED = "all pairs of all sequences"
AVERAGED = "cosines averaged over the sequences first, as in the paper"
COLUMNS = 3  # of panels
# Okabe & Ito's colours, which colour-blind readers can distinguish, without yellow, which is faint on white.
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":")


def plain(name: str) -> str:
    """Escape a name for matplotlib, which takes $…$ for mathematics and omits names that begin with _ from legends."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of this size in inches. A README is 8 inches wide."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def layer_label(found: Sequence[Condensation], gap: str = " ") -> str:
    """Return the label of an axis of layers, which says which layer is what.

    Args:
        gap: " ", or "\\n" for two lines.
    """
    normed = any(one.final_norm for one in found)
    last = found[0].last_block
    if any(one.last_block != last for one in found):
        ends = "last two: last block, final norm" if normed else "last: last block"
    else:
        ends = f"{last}: last block, {last + 1}: final norm" if normed else f"{last}: last block"
    return f"layer (0: embedding,{gap}{ends})"


def draw_heatmaps(figure: FigureBase, rows: Sequence[Mapping[str, Condensation]]) -> None:
    """Draw measurements by title, in rows, with shared axes and one colour scale.

    Each layer is a column of 128 bins of the cosine, and the line is the mean. The scale is logarithmic from 10⁻³ to 1,
    so that one can read both a layer whose pairs fill a single bin and one whose pairs fill a hundred. Emptier bins are
    blank.
    """
    alike = len({len(found.mean_cosine) for row in rows for found in row.values()}) == 1
    grid = figure.subplots(len(rows), max(map(len, rows)), sharex=alike, sharey=True, squeeze=False)
    least = 1e-3
    for axes_row, row in zip(grid, rows, strict=True):
        for axes in axes_row[len(row) :]:
            axes.set_axis_off()
        for axes, (title, found) in zip(axes_row, row.items(), strict=False):
            layers = len(found.mean_cosine)
            image = axes.imshow(
                np.ma.masked_less(found.histogram.T, least),
                origin="lower",
                extent=(-0.5, layers - 0.5, -1, 1),
                aspect="auto",
                interpolation="nearest",
                cmap="magma_r",
                norm=LogNorm(least, 1),
            )
            outline = [withStroke(linewidth=3, foreground="black")]
            axes.plot(range(layers), found.mean_cosine, "o-", color="white", markersize=2.5, path_effects=outline)
            axes.set_title(plain(fill(title, 24)), fontsize=10)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
            axes.set_yticks([-1, -0.5, 0, 0.5, 1])
            axes.set_ylim(-1.05, 1.05)  # a condensed layer fills only the last bin, which the frame would hide
    figure.supxlabel(layer_label([found for row in rows for found in row.values()]), fontsize=11)
    figure.supylabel("cosine of two tokens (line: mean)", fontsize=11)
    figure.colorbar(image, ax=grid, label="fraction of pairs", fraction=0.05, aspect=30)


def heatmap(found: Condensation, title: str) -> Figure:
    """Draw one measurement, layer against cosine, with all pairs pooled."""
    figure = new_figure(6, 4)
    draw_heatmaps(figure, [{title: found}])
    return figure


def averaged(found: Condensation) -> Condensation:
    """Return the measurement with the paper's histogram in place of the pooled one, for any heatmap."""
    assert found.averaged_histogram is not None
    return replace(found, histogram=found.averaged_histogram)


def both_heatmaps(found: Condensation, title: str) -> Figure:
    """Draw one measurement twice: with the pairs of all sequences pooled, and with averaged cosines as in the paper."""
    figure = new_figure(8, 4.4)
    figure.suptitle(plain(fill(title, 80)))
    draw_heatmaps(figure, [{POOLED: found, AVERAGED: averaged(found)}])
    return figure


def side_by_side(found: Mapping[str, Condensation], title: str = "") -> Figure:
    """Draw heatmaps of several measurements by name. ``title`` says what all of them show."""
    items = iter(found.items())
    rows = list(iter(lambda: dict(islice(items, COLUMNS)), {}))
    figure = new_figure(max(6, 1.1 + 2.3 * len(rows[0])), 0.9 + 2.7 * len(rows))
    if title:
        figure.suptitle(title)
    draw_heatmaps(figure, rows)
    return figure


def styles() -> Iterator[dict[str, Any]]:
    """Yield line styles that differ in colour, marker and dashes, so that up to eight lines need no colour."""
    for color, marker, line in zip(cycle(OKABE_ITO), cycle(MARKERS), cycle(LINES), strict=False):
        yield {"color": color, "marker": marker, "linestyle": line}


def _depths(found: Sequence[Condensation], axes: Axes) -> list[np.ndarray]:
    """Return the horizontal positions of the layers: their indices, or relative depths if the models differ in depth.

    At relative depth 1 is the last block.
    """
    if len({one.last_block for one in found}) == 1:
        axes.set_xlabel(layer_label(found), fontsize=11)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return [np.arange(len(one.mean_cosine)) for one in found]
    beyond = ", beyond: final norm" if any(one.final_norm for one in found) else ""
    axes.set_xlabel(f"relative depth (0: embedding, 1: last block{beyond})", fontsize=11)
    return [np.append(np.arange(one.last_block + 1) / one.last_block, [1.05] * one.final_norm) for one in found]


def mean_cosine_by_layer(found: Mapping[str, Condensation]) -> Figure:
    """Draw one line for each measurement."""
    figure = new_figure(8, 4 + 0.22 * len(found))
    axes = figure.subplots()
    depths = _depths(list(found.values()), axes)
    for (name, one), depth, style in zip(found.items(), depths, styles(), strict=False):
        axes.plot(depth, one.mean_cosine, label=plain(name), markersize=5, **style)
    axes.set_ylabel(MEAN_COSINE, fontsize=11)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=1 if max(map(len, found)) > 36 else 2)
    return figure


def depth_bars(found: Mapping[str, Condensation]) -> Figure:
    """Draw Spearman's ρ and Kendall's τ of the mean cosine with depth, which are 1 if it grows with every layer.

    The last layer is after the final norm, as in the paper, if all measurements have that.
    """
    figure = new_figure(8, 1.5 + 0.55 * len(found))
    axes = figure.subplots()
    place = np.arange(len(found))
    normed = all(one.final_norm for one in found.values())
    over_depth = [one.after_norm if normed else one.before_norm for one in found.values()]
    named = {
        "Spearman's ρ": [one.spearman for one in over_depth],
        "Kendall's τ": [one.kendall for one in over_depth],
    }
    flat = f"– (mean cosines within {LEAST_RANGE:g})"
    for (label, values), color, hatch, offset in zip(named.items(), OKABE_ITO, ("", "//"), (-0.19, 0.19), strict=False):
        bars = axes.barh(
            place + offset, np.nan_to_num(values), 0.36, label=label, color=color, hatch=hatch, edgecolor="white"
        )
        axes.bar_label(bars, [flat if np.isnan(v) else f"{v:+.2f}" for v in values], padding=4)
    axes.set_yticks(place, [plain(fill(name, 34)) for name in found])
    axes.invert_yaxis()
    axes.set_xlim(-1.25, 1.25)
    axes.set_xticks([-1, -0.5, 0, 0.5, 1])
    axes.axvline(0, color="black", linewidth=0.8)
    last = "after the final norm" if normed else "the last block"
    axes.set_xlabel(f"rank correlation of the mean cosine with depth\n(last layer: {last})", fontsize=11)
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def over_training(runs: Mapping[str, Mapping[int, Condensation] | Mapping[str, Condensation]]) -> Figure:
    """Draw the mean cosine by layer at several steps: a panel for each run, a line for each step.

    Lines of the same step have the same colour. Steps are numbers, or names of revisions, which keep their order.
    """
    columns = min(COLUMNS, len(runs))
    rows = -(-len(runs) // columns)
    figure = new_figure(max(7, 1.5 + 3.2 * columns), 0.4 + 3.8 * rows)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes in grid.flat[len(runs) :]:
        axes.set_axis_off()
    steps = sorted(
        dict.fromkeys(step for by_step in runs.values() for step in by_step),
        key=lambda step: step if isinstance(step, int) else 0,
    )
    colors: dict[Any, Any] = dict(zip(steps, colormaps["viridis"](np.linspace(0, 0.93, len(steps))), strict=True))
    lines: dict[Any, Any] = {}
    for axes, (name, by_step) in zip(grid.flat, runs.items(), strict=False):
        shown = alike(list(by_step.values()))
        depths = _depths(shown, axes)
        for step, one, depth, marker in zip(by_step, shown, depths, cycle(MARKERS), strict=False):
            (lines[step],) = axes.plot(depth, one.mean_cosine, color=colors[step], marker=marker, markersize=4)
        axes.set_title(plain(fill(name, 34)), fontsize=11)
        axes.set_xlabel(layer_label(shown, gap="\n"), fontsize=11)
        axes.grid(alpha=0.3)
    for axes in grid[:, 0]:
        axes.set_ylabel(MEAN_COSINE, fontsize=11)
    names = [f"{step:,}" if isinstance(step, int) else plain(step) for step in steps]
    title = "step" if all(isinstance(step, int) for step in steps) else "revision"
    figure.legend([lines[step] for step in steps], names, title=title, loc="outside right center")
    return figure
