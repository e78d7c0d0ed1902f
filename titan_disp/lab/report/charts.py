"""This module draws charts of training.

The number of points is limited, and a run has the same style in all charts.

The line of several runs that differ only in their seeds is their mean, in a band from
the smallest to the largest.
"""

import base64
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from scipy.stats import binned_statistic

from titan_disp.condensation.heatmap import layer_label, new_figure, plain
from titan_disp.condensation.record import Measurement
from titan_disp.lab.plots import LINES, MEAN_COSINE, OKABE_ITO
from titan_disp.lab.report.gather import RunRecord, conditions
from titan_disp.run.history import WHILE_LOADING, Attempt
from titan_disp.text import short

BINS = 500  # most points of a line: two pixels each in the widest chart
POINTS = 3000  # most points of a chart: of many lines, nobody sees the details
SIZE = (5.6, 3.3)  # inches: a column on a laptop, and still readable at a phone's width
MANY = 12  # most lines that a chart has in full, with a legend of its own
# Fraction of a run: at first the loss is so high that the rest would look flat
BEGINNING = 0.05
FAULTS = ("skip", "save_failed", *WHILE_LOADING)  # events


def drawing() -> AbstractContextManager[None]:
    """Return a context for making and writing figures.

    Text stays text, and equal figures have equal bytes.
    """
    return matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "titan-disp", "font.size": 9.5}
    )


def to_uri(figure: Figure) -> str:
    """Return a picture as text.

    Points of lines are rounded to 0.01 pt, which saves a sixth of a report's size.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    svg = re.sub(
        r"^(L -?\d+\.\d\d)\d* (-?\d+\.\d\d)\d*",
        r"\1 \2",
        file.getvalue(),
        flags=re.MULTILINE,
    )
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


@dataclass(frozen=True)
class Line:
    """Represent the line of one run or condition in a chart.

    Points with a non-finite number are left out.
    """

    name: str
    x: np.ndarray  # [n]
    y: np.ndarray
    # Index of the run or condition in the report, which sets its colour and dashes
    place: int
    # values of x at which the run resumed, which are marked on the axis
    resumes: Sequence[float] = ()
    # smallest value over the seeds with mean ``y``; None for a single run
    low: np.ndarray | None = None
    high: np.ndarray | None = None  # largest value

    @property
    def all_y(self) -> np.ndarray:
        """Return all values that are drawn, [1 or 3, n]."""
        return np.stack([y for y in (self.y, self.low, self.high) if y is not None])

    @property
    def style(self) -> dict[str, Any]:
        dashes = LINES[self.place % len(LINES)]
        width = 1.5 * (1 + self.place // (len(OKABE_ITO) * len(LINES)) % 2)
        return {
            "color": OKABE_ITO[self.place % len(OKABE_ITO)],
            "linestyle": dashes,
            "linewidth": width,
        }


def by_condition(runs: Sequence[RunRecord], lines: Sequence[Line]) -> list[Line]:
    """Turn lines of runs, whose ``place`` is the run's, into lines of conditions, at
    the values of x that all seeds have.

    If they share fewer than two, each seed keeps its own line in the condition's
    colour.
    """
    found: list[Line] = []
    for place, (name, members) in enumerate(conditions(runs)):
        of_it = [replace(line, place=place) for line in lines if line.place in members]
        finite = [line.x[np.isfinite(line.x + line.y)] for line in of_it]
        if len(of_it) > 1 and len(x := reduce(np.intersect1d, finite)) > 1:
            y = np.stack([line.y[np.isin(line.x, x)] for line in of_it])
            resumes = sorted(at for line in of_it for at in line.resumes)
            told = (
                name
                if len(of_it) == len(members)
                else f"{name}, {len(of_it)} of them drawn"
            )
            of_it = [
                Line(told, x, y.mean(0), place, resumes, low=y.min(0), high=y.max(0))
            ]
        found += of_it
    return found


def bins(lines: int) -> int:
    """Return the most points of a line in a chart of so many lines."""
    return BINS if lines <= MANY else POINTS // lines


def binned(
    x: np.ndarray, y: np.ndarray, count: int = BINS
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return mean x, mean y, smallest y and largest y of the finite points in at most
    ``count`` bins of equal width in x.
    """
    finite = np.isfinite(x) & np.isfinite(y)
    x = x[finite]
    y = y[finite]
    if len(x) <= count:
        return x, y, y, y
    means, _, place = binned_statistic(x, [x, y], "mean", count)
    low, high = (
        binned_statistic(x, y, name, count).statistic for name in ("min", "max")
    )
    filled = np.unique(place) - 1
    return means[0][filled], means[1][filled], low[filled], high[filled]


Scale = Callable[[Axes, Sequence[Line]], None]


def as_it_is(axes: Axes, lines: Sequence[Line]) -> None:
    """Let axis y show all values."""


def from_zero(axes: Axes, lines: Sequence[Line]) -> None:
    """Start axis y at 0, for numbers whose ratios matter."""
    top = max(np.nanmax(line.all_y) for line in lines)
    # Otherwise nearly equal numbers would lie on the frame
    axes.set_ylim(0, 1.05 * top if top > 0 else None)
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))


def correlation(axes: Axes, lines: Sequence[Line]) -> None:
    """Let axis y show the range of a correlation."""
    axes.set_ylim(-1.05, 1.05)


def by_factors(axes: Axes, lines: Sequence[Line]) -> None:
    """Make axis y logarithmic if the values differ by more than a factor of 30."""
    y = np.concatenate([line.all_y[np.isfinite(line.all_y)] for line in lines])
    if y.min() > 0 and y.max() > 30 * y.min():
        axes.set_yscale("log")


def without_the_beginning(axes: Axes, lines: Sequence[Line]) -> None:
    """Let axis y show the values after the ``BEGINNING`` of the longest run."""
    start = BEGINNING * max(np.nanmax(line.x) for line in lines)
    later = np.concatenate([y[line.x > start] for line in lines for y in line.all_y])
    later = later[np.isfinite(later)]
    if len(later) > 30 * len(lines):
        margin = 0.05 * np.ptp(later) + 1e-9
        axes.set_ylim(later.min() - margin, later.max() + margin)


def draw_lines(
    axes: Axes, lines: Sequence[Line], xlabel: str, ylabel: str, scale: Scale
) -> None:
    """Draw a line for each run or condition, in a band from smallest to largest value
    if its points are means.

    Of more than ``MANY`` lines, only those of several seeds have a band.
    """
    count = bins(len(lines))
    for line in lines:
        x, y, low, high = binned(line.x, line.y, count)
        if line.low is not None and line.high is not None:
            low = binned(line.x, line.low, count)[2]
            high = binned(line.x, line.high, count)[3]
        if (len(x) == count and len(lines) <= MANY) or line.low is not None:
            axes.fill_between(
                x, low, high, color=line.style["color"], alpha=0.2, linewidth=0
            )
        marker = "o" if len(x) <= 30 else None
        axes.plot(
            x, y, label=plain(line.name), marker=marker, markersize=3, **line.style
        )
        heights = [0.025] * len(line.resumes)
        on_axis = axes.get_xaxis_transform()
        axes.plot(
            line.resumes,
            heights,
            "^",
            color=line.style["color"],
            markersize=5,
            transform=on_axis,
        )
    axes.set(xlabel=xlabel, ylabel=fill(ylabel, 40))
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    scale(axes, lines)
    axes.grid(alpha=0.3)


def curves(
    lines: Sequence[Line],
    xlabel: str,
    ylabel: str,
    scale: Scale,
    with_legend: bool = True,
) -> Figure:
    """Draw a chart of ``draw_lines`` with a legend above it, unless that is a picture
    of its own.
    """
    figure = new_figure(*SIZE)
    draw_lines(figure.subplots(), lines, xlabel, ylabel, scale)
    if with_legend:
        figure.legend(
            loc="outside upper center", ncols=_columns(line.name for line in lines)
        )
    return figure


def legend(names: Sequence[str]) -> Figure:
    """Draw nothing but the names of all runs or conditions with their styles."""
    columns = 2 * _columns(names)
    figure = new_figure(9, 0.3 + 0.2 * -(-len(names) // columns))
    lines = [
        Line(name, np.empty(0), np.empty(0), place) for place, name in enumerate(names)
    ]
    handles = [Line2D([], [], label=plain(line.name), **line.style) for line in lines]
    figure.legend(handles=handles, loc="center", ncols=columns, fontsize=8)
    return figure


def crowded(names: Sequence[str]) -> bool:
    """Return whether a legend of these names would take more rows of a chart than
    ``MANY`` short ones.
    """
    return len(names) * 3 > MANY * _columns(names)


def _columns(names: Iterable[str]) -> int:
    return 1 if max(map(len, names)) > 24 else 3


def _tick(value: float, _: int) -> str:
    return short(value)


def draw_layer_map(
    axes: Axes, by_step: Mapping[int, Measurement], title: str, end: int
) -> QuadMesh:
    """Draw at least two measurements' mean cosines by layer, up to the run's last step
    ``end``, in one colour scale.
    """
    measured = list(by_step.values())
    values = np.array([found.mean_cosine for found in measured]).T
    layers = np.arange(len(values))
    mesh = axes.pcolormesh(
        list(by_step), layers, values, cmap="magma_r", vmin=0, vmax=1, rasterized=True
    )
    axes.set_xlim(min(by_step), max(end, *by_step))
    axes.set_title(plain(title), fontsize=10)
    axes.set(xlabel="step", ylabel=layer_label(measured, gap="\n"))
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return mesh


def layer_map(by_step: Mapping[int, Measurement], name: str, end: int) -> Figure:
    figure = new_figure(*SIZE)
    mesh = draw_layer_map(figure.subplots(), by_step, name, end)
    figure.colorbar(
        mesh,
        label=f"{MEAN_COSINE} (of random vectors: {1 / next(iter(by_step.values())).tokens:.2g})",
    )
    return figure


def _dates(seconds: Sequence[float] | np.ndarray) -> np.ndarray:
    return (np.asarray(seconds, dtype=np.float64) * 1000).astype("datetime64[ms]")


def timeline(found: Sequence[Attempt], events: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw steps against time (UTC), a row for each kind of event, and the time between
    starts in grey.
    """
    kinds = list(dict.fromkeys(event["event"] for event in events)) or ["no events"]
    height = 0.22 * len(kinds) + 0.1
    figure = new_figure(9, 3.1 + height)
    above, below = figure.subplots(2, sharex=True, height_ratios=[2.4, height])
    for attempt in found:
        times, steps, *_ = binned(
            np.array(attempt.times), np.array(attempt.steps, dtype=np.float64)
        )
        above.plot(
            _dates(times),
            steps,
            color=OKABE_ITO[0],
            linewidth=1.8,
            marker="o" if len(times) < 3 else None,
        )
    for one, following in pairwise(found):
        for axes in (above, below):
            axes.axvspan(
                *_dates([one.ended, following.began]), color="0.85", linewidth=0
            )
    for row, kind in enumerate(kinds):
        times = _dates([event["time"] for event in events if event["event"] == kind])
        marker, color = ("X", OKABE_ITO[1]) if kind in FAULTS else ("|", "black")
        below.plot(times, [row] * len(times), marker, color=color, markersize=7)
    below.set_yticks(
        range(len(kinds)), [plain(kind.replace("_", " ")) for kind in kinds]
    )
    below.set(ylim=(len(kinds) - 0.5, -0.5), xlabel="time (UTC)")
    above.set(ylim=(0, None), ylabel="step")
    above.yaxis.set_major_formatter(FuncFormatter(_tick))
    for axes in (above, below):
        axes.grid(axis="x", alpha=0.3)
    locator = AutoDateLocator()
    below.xaxis.set_major_locator(locator)
    below.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    return figure
