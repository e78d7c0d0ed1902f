"""Heatmaps draw cosine histograms by layer.

The heatmaps follow arXiv 2602.00217 (Figures 2, 4 and 6). Figures are made without
pyplot, which keeps all figures in a global. Drawing is therefore safe in threads and
while a model trains.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from titan_disp.condensation.record import EDGES, Measurement

# The fraction of a layer's pairs at which the colour scale begins. Emptier bins are
# blank.
LEAST_FRACTION = 1e-3


def plain(name: str) -> str:
    """Return a name, escaped so that matplotlib shows it unchanged.

    Otherwise, matplotlib would show $…$ as mathematics, and a legend would omit names
    that begin with _.
    """
    escaped = name.replace("$", r"\$")
    if escaped.startswith("_"):
        return f" {escaped}"
    return escaped


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches. A README page is 8 inches wide."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def layer_label(measurements: Sequence[Measurement], gap: str = " ") -> str:
    """Return the label of an axis of layers. The label names the special layers.

    If ``gap`` is a line break, the label has two lines.
    """
    last = measurements[0].last_block
    logits = ", logits" * measurements[0].logits
    if any(measurement.last_block != last for measurement in measurements):
        count = "three" if logits else "two"
        end = f"last {count}: last block, final norm{logits}"
    else:
        end = f"{last}: last block, {last + 1}: final norm{logits}"
    return f"layer (0: embedding,{gap}{end})"


def of_random_vectors(tokens: int, features: int) -> np.ndarray:
    """Return the expected histogram of the cosines of Gaussian vectors, [128] fractions
    of N² pairs.

    N is ``tokens``, and F is ``features``. The cosine c of two vectors has (1 + c)/2 ~
    Beta(a, a) with a = (F − 1)/2.
    """
    from scipy import stats  # imported here, because the import takes a second

    a = (features - 1) / 2
    below = stats.beta.cdf((EDGES + 1) / 2, a, a) * (1 - 1 / tokens)
    # 1/N of all pairs are pairs of a vector with itself. Their cosine is 1, in the last
    # bin.
    below[-1] = 1
    return np.diff(below)


def heatmaps(
    rows: Sequence[Mapping[str, Measurement]], title: str = "", dashed: str = "step 0"
) -> Figure:
    """Return a figure with a grid of heatmaps, which share one scale of colours.

    Each of ``rows`` maps titles of heatmaps to measurements. Each layer is a column of
    128 bins of the cosine, and the line is the mean. The scale is logarithmic from 10⁻³
    to 1, so that layers whose pairs fill a single bin are as readable as layers whose
    pairs fill a hundred bins. If F is known, a column of random vectors is added. A
    dashed line shows the means before training, or those of the published model that
    the run continues. The label describes this line with the text ``dashed``.
    """
    measurements = list(chain.from_iterable(row.values() for row in rows))
    columns = max(map(len, rows))
    figure = new_figure(max(7, 1.1 + 2.6 * columns), 1.1 + 2.7 * len(rows))
    figure.suptitle(plain(fill(title, 80)))
    layer_counts = {measurement.layer_count for measurement in measurements}
    have_equal_layers = len(layer_counts) == 1
    grid = figure.subplots(
        len(rows), columns, sharex=have_equal_layers, sharey=True, squeeze=False
    )
    for axes_row, row in zip(grid, rows, strict=True):
        for axes, (name, measurement) in zip(axes_row, row.items(), strict=False):
            image = _draw(axes, measurement)
            axes.set_title(plain(fill(name, 24)), fontsize=10)
        for axes in axes_row[len(row) :]:
            axes.set_axis_off()
    figure.supxlabel(layer_label(measurements), fontsize=11)
    lines = "line: mean"
    if any(panel.untrained_mean_cosine is not None for panel in measurements):
        lines += f",\ndashed: {dashed}"
    figure.supylabel(f"cosine of two tokens ({lines})", fontsize=11)
    figure.colorbar(image, ax=grid, label="fraction of pairs", fraction=0.05, aspect=30)
    return figure


def _draw(axes: Axes, measurement: Measurement) -> AxesImage:
    """Draw one measurement. Return the image, from which the colour bar is made."""
    layers = measurement.layer_count
    columns = measurement.histogram
    if measurement.features:
        random = of_random_vectors(measurement.tokens, measurement.features)
        columns = np.vstack([columns, random])
    image = axes.imshow(
        np.ma.masked_less(columns.T, LEAST_FRACTION),
        origin="lower",
        extent=(-0.5, len(columns) - 0.5, -1, 1),
        aspect="auto",
        interpolation="nearest",
        cmap="magma_r",
        norm=LogNorm(LEAST_FRACTION, 1),
    )
    outline = [withStroke(linewidth=3, foreground="black")]
    axes.plot(
        measurement.mean_cosine,
        "o-",
        color="white",
        markersize=2.5,
        path_effects=outline,
    )
    if measurement.untrained_mean_cosine is not None:
        axes.plot(
            measurement.untrained_mean_cosine,
            "--",
            color="tab:cyan",
            path_effects=outline,
        )
    if measurement.features:
        axes.axvline(layers - 0.5, color="black", linewidth=0.8)
        axes.text(
            layers,
            -0.98,
            "random vectors",
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=8,
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.set_yticks([-1, -0.5, 0, 0.5, 1])
    # A condensed layer fills only the last bin, which the frame would hide.
    axes.set_ylim(-1.05, 1.05)
    return image
