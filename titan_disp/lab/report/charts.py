"""Draws charts of training as SVG.

The number of points is limited, and a run has the same style in all charts. Runs that
differ only in their seeds are drawn as one line, the mean, in a band from the smallest
to the largest value.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from scipy.stats import binned_statistic

from titan_disp.condensation.heatmap import new_figure, plain
from titan_disp.lab.plots import LINES, OKABE_ITO
from titan_disp.lab.report.gather import Condition
from titan_disp.run.history import WHILE_LOADING, Attempt
from titan_disp.text import short

BINS = 500  # most points of a line: two pixels per point in the widest chart
POINTS = 3000  # most points of a chart with more than MANY lines
SIZE = (5.6, 3.3)  # inches: half of a laptop's width, and readable on a phone
TALL = (5.6, 4.2)  # inches: two charts above one another, or several maps
MANY = 12  # most lines that are drawn with BINS points and bands
# The first losses are so high that the other losses would look flat. The values of this
# first fraction of a run do not affect the range of axis y.
BEGINNING = 0.05
# With fewer points per line after the beginning, axis y shows all values.
LEAST_POINTS = 30
# events that the timeline marks as faults
FAULTS = ("skip", "step_back", "save_failed", *WHILE_LOADING)
# names of the two scales of an x axis; the page shows one of the scales
STEP_SCALE = "scale-step"
TOKEN_SCALE = "scale-tokens"


def drawing() -> AbstractContextManager[None]:
    """Return a context for making and writing figures, in which text stays text in SVG."""
    return matplotlib.rc_context({"svg.fonttype": "none", "font.size": 9.5})


def to_svg(figure: Figure, salt: str) -> str:
    """Return a picture as an <svg> element. Equal figures with equal salts have equal
    bytes.

    ``salt`` must be unique on the page, because the ids of clip paths and markers depend
    on it. Coordinates of lines are cut to 0.01 pt, which saves a sixth of a report's
    size.
    """
    file = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    _, start, rest = file.getvalue().partition("<svg")
    svg = re.sub(
        r"^(L -?\d+\.\d\d)\d* (-?\d+\.\d\d)\d*", r"\1 \2", rest, flags=re.MULTILINE
    )
    # The style sheet of the page selects a scale by its class.
    svg = re.sub(r'id="(scale-\w+)"', r'class="\1"', svg)
    # The SVG refers to clip paths (p…), markers (m…) and images by their ids. Other ids
    # are removed, because pictures of a page would share them.
    other_id = r' id="(?!p[0-9a-f]{10}"|m[0-9a-f]{10}"|image)[^"]*"'
    return start + re.sub(other_id, "", svg)


@dataclass(frozen=True)
class Line:
    """The line of a run or condition in a chart.

    Points with a number that is not finite are not drawn.
    """

    name: str
    x: np.ndarray  # [n]
    y: np.ndarray
    # index of the run or condition in the report; determines colour and dashes
    place: int
    # values of x at which the run resumed; they are marked on the axis
    resumes: Sequence[float] = ()
    # smallest value over seeds; None for a single run
    low: np.ndarray | None = None
    high: np.ndarray | None = None  # largest value over seeds

    @property
    def all_y(self) -> np.ndarray:
        """All values that are drawn, [1 or 3, n]."""
        return np.stack([y for y in (self.y, self.low, self.high) if y is not None])

    @property
    def style(self) -> dict[str, Any]:
        """The keywords of ``Axes.plot``, which differ for the first 56 places.

        Colours repeat after 7 places and dashes after 4, so that their pairs repeat
        after 28 places. The next 28 lines are wider.
        """
        rounds = self.place // (len(OKABE_ITO) * len(LINES))
        return {
            "color": OKABE_ITO[self.place % len(OKABE_ITO)],
            "linestyle": LINES[self.place % len(LINES)],
            "linewidth": 1.5 * (1 + rounds % 2),
        }


def by_condition(conditions: Sequence[Condition], lines: Sequence[Line]) -> list[Line]:
    """Return the lines of conditions, from the lines of runs.

    The line of several seeds is the mean of their lines at shared values of x. With
    fewer than two shared values, each seed keeps its own line. In ``lines``, ``place``
    is the index of the run, and in the result, the index of the condition.
    """
    drawn: list[Line] = []
    for place, condition in enumerate(conditions):
        seeds = [
            replace(line, place=place)
            for line in lines
            if line.place in condition.places
        ]
        mean = _mean_line(seeds)
        if mean is None:
            drawn += seeds
            continue
        name = condition.name
        if len(seeds) < len(condition.places):
            name += f", {len(seeds)} of them drawn"
        drawn.append(replace(mean, name=name))
    return drawn


def _mean_line(seeds: Sequence[Line]) -> Line | None:
    """Return the mean of several seeds' lines at the values of x that they share.

    Returns None if there is only one line, or if the lines share fewer than two values.
    """
    if len(seeds) < 2:
        return None
    x = reduce(np.intersect1d, [line.x[np.isfinite(line.x + line.y)] for line in seeds])
    if len(x) < 2:
        return None
    y = np.stack([line.y[np.isin(line.x, x)] for line in seeds])
    resumes: list[float] = []
    for line in seeds:
        resumes += line.resumes
    return replace(
        seeds[0], x=x, y=y.mean(0), low=y.min(0), high=y.max(0), resumes=sorted(resumes)
    )


def bins(lines: int) -> int:
    """Return the largest number of points per line in a chart with this many lines."""
    if lines <= MANY:
        return BINS
    return POINTS // lines


@dataclass(frozen=True)
class Binned:
    """Means of a line in bins of equal width in x, in ascending order, each [bins]."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray  # smallest y of each bin
    high: np.ndarray  # largest y


def binned(x: np.ndarray, y: np.ndarray, count: int = BINS) -> Binned:
    """Return the finite points of a line in at most ``count`` bins.

    If there are at most ``count`` points, each point is a bin of its own.
    """
    finite = np.isfinite(x) & np.isfinite(y)
    x = x[finite]
    y = y[finite]
    if len(x) <= count:
        return Binned(x, y, low=y, high=y)
    means, _, numbers = binned_statistic(x, [x, y], "mean", count)
    filled = np.unique(numbers) - 1  # SciPy counts bins from 1
    mean_x, mean_y = means[:, filled]
    return Binned(
        mean_x,
        mean_y,
        low=binned_statistic(x, y, "min", count).statistic[filled],
        high=binned_statistic(x, y, "max", count).statistic[filled],
    )


Scale = Callable[[Axes, Sequence[Line]], None]


def as_it_is(axes: Axes, lines: Sequence[Line]) -> None:
    """Let axis y show all values."""


def from_zero(axes: Axes, lines: Sequence[Line]) -> None:
    """Start axis y at 0, for numbers whose ratios matter."""
    top = max(np.nanmax(line.all_y) for line in lines)
    axes.set_ylim(bottom=0)
    if top > 0:  # with a margin, so that nearly equal numbers are not on the upper edge
        axes.set_ylim(top=1.05 * top)
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
    """Fit axis y to the values after the beginning (the fraction ``BEGINNING`` of the
    longest run).

    If the lines have fewer than ``LEAST_POINTS`` such values on average, axis y shows
    all values.
    """
    start = BEGINNING * max(np.nanmax(line.x) for line in lines)
    later = np.concatenate([line.all_y[:, line.x > start].ravel() for line in lines])
    later = later[np.isfinite(later)]
    if len(later) > LEAST_POINTS * len(lines):
        margin = 0.05 * np.ptp(later) + 1e-9
        axes.set_ylim(later.min() - margin, later.max() + margin)


def draw_lines(
    axes: Axes, lines: Sequence[Line], ylabel: str, scale: Scale = as_it_is
) -> None:
    """Draw a line for each run or condition.

    The line of several seeds has a band from the smallest to the largest value. The
    line of a single run whose points are means in bins has a band from the smallest to
    the largest value of each bin, unless there are more than ``MANY`` lines.
    """
    count = bins(len(lines))
    for line in lines:
        points = binned(line.x, line.y, count)
        marker = None
        if len(points.x) <= 30:
            marker = "o"
        if line.low is not None and line.high is not None:
            low = binned(line.x, line.low, count).low
            high = binned(line.x, line.high, count).high
            has_band = True
        else:
            low = points.low
            high = points.high
            has_band = len(points.x) == count and len(lines) <= MANY
        if has_band:
            axes.fill_between(
                points.x, low, high, color=line.style["color"], alpha=0.2, linewidth=0
            )
        axes.plot(
            points.x,
            points.y,
            label=plain(line.name),
            marker=marker,
            markersize=3,
            **line.style,
        )
        axes.plot(
            line.resumes,
            [0.025] * len(line.resumes),
            "^",
            color=line.style["color"],
            markersize=5,
            transform=axes.get_xaxis_transform(),
        )
    axes.set_ylabel(fill(ylabel, 28))
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    scale(axes, lines)
    axes.grid(alpha=0.3)


def add_tokens(axes: Axes, tokens_per_step: float | None) -> None:
    """Add a second x axis, of tokens, at the place of the axis of steps.

    A page shows one of the two axes (``STEP_SCALE``, ``TOKEN_SCALE``). Nothing is added
    if ``tokens_per_step`` is None.
    """
    if tokens_per_step is None:
        return
    axes.xaxis.set_gid(STEP_SCALE)
    tokens = axes.secondary_xaxis(
        "bottom",
        functions=(
            partial(np.multiply, tokens_per_step),
            partial(np.multiply, 1 / tokens_per_step),
        ),
    )
    tokens.set_gid(TOKEN_SCALE)
    tokens.set_xlabel("tokens")
    tokens.xaxis.set_major_formatter(FuncFormatter(_tick))
    tokens.xaxis.set_major_locator(MaxNLocator(6))


def key(conditions: Sequence[Condition]) -> list[Line]:
    """Return a line without points for each condition, to draw a legend."""
    return [
        Line(condition.name, np.empty(0), np.empty(0), place)
        for place, condition in enumerate(conditions)
    ]


def _tick(value: float, _: int) -> str:
    return short(value)


def _dates(seconds: Sequence[float] | np.ndarray) -> np.ndarray:
    return (np.asarray(seconds, dtype=np.float64) * 1000).astype("datetime64[ms]")


def timeline(starts: Sequence[Attempt], events: Sequence[Mapping[str, Any]]) -> Figure:
    """Return a figure of the steps of a run against time (UTC), with a row of marks for
    each kind of event.

    ``starts`` are in order of time. The gap between two starts is grey.
    """
    names = list(dict.fromkeys(event["event"] for event in events)) or ["no events"]
    height = 0.22 * len(names) + 0.1  # inches
    figure = new_figure(9, 3.1 + height)
    steps, rows = figure.subplots(2, sharex=True, height_ratios=[2.4, height])
    for start in starts:
        points = binned(np.array(start.times), np.array(start.steps, dtype=np.float64))
        marker = None
        if len(points.x) < 3:
            marker = "o"
        steps.plot(
            _dates(points.x),
            points.y,
            color=OKABE_ITO[0],
            linewidth=1.8,
            marker=marker,
        )
    for start, following in pairwise(starts):
        gap = _dates([start.ended, following.began])
        for axes in (steps, rows):
            axes.axvspan(*gap, color="0.85", linewidth=0)
    for row, name in enumerate(names):
        times = _dates([event["time"] for event in events if event["event"] == name])
        marker = "|"
        color = "black"
        if name in FAULTS:
            marker = "X"
            color = OKABE_ITO[1]
        rows.plot(times, [row] * len(times), marker, color=color, markersize=7)
    rows.set_yticks(
        range(len(names)), [plain(name.replace("_", " ")) for name in names]
    )
    rows.set(ylim=(len(names) - 0.5, -0.5), xlabel="time (UTC)")
    steps.set(ylim=(0, None), ylabel="step")
    steps.yaxis.set_major_formatter(FuncFormatter(_tick))
    for axes in (steps, rows):
        axes.grid(axis="x", alpha=0.3)
    locator = AutoDateLocator()
    rows.xaxis.set_major_locator(locator)
    rows.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    return figure
