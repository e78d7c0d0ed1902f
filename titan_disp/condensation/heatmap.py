"""Heatmaps draw cosine histograms by layer, as in arXiv 2602.00217 (Figures 2, 4 and
6).

Figures are made without pyplot, which keeps all of them in a global: they are safe in
threads and while a model trains.
"""

from collections.abc import Mapping, Sequence
from textwrap import fill

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from titan_disp.condensation.record import EDGES, Condensation


def plain(name: str) -> str:
    """Escape a name for matplotlib, which takes $…$ for mathematics and omits names
    that begin with _ from legends.
    """
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of this size in inches. A README is 8 inches wide."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def layer_label(found: Sequence[Condensation], gap: str = " ") -> str:
    """Return the label of an axis of layers, which says which layer is what.

    ``gap`` may break it into two lines.
    """
    last = found[0].last_block
    logits = ", logits" * found[0].logits
    if any(one.last_block != last for one in found):
        return f"layer (0: embedding,{gap}last {'three' if logits else 'two'}: last block, final norm{logits})"
    return (
        f"layer (0: embedding,{gap}{last}: last block, {last + 1}: final norm{logits})"
    )


def of_random_vectors(tokens: int, features: int) -> np.ndarray:
    """Return the expected fractions of the N² cosines of Gaussian vectors by bin: (1 +
    c)/2 ~ Beta((F − 1)/2, (F − 1)/2).
    """
    from scipy import stats  # imported here as in record.py

    below = stats.beta.cdf((EDGES + 1) / 2, (features - 1) / 2, (features - 1) / 2) * (
        1 - 1 / tokens
    )
    below[-1] = 1  # with the pairs of a vector with itself
    return np.diff(below)


def heatmaps(
    rows: Sequence[Mapping[str, Condensation]], title: str = "", dashed: str = "step 0"
) -> Figure:
    """Draw measurements by title, in rows, with shared axes and one colour scale.

    Each layer is a column of 128 bins of the cosine, and the line is the mean. The
    scale is logarithmic from 10⁻³ to 1, so that one can read both a layer whose pairs
    fill a single bin and one whose pairs fill a hundred. Emptier bins are blank. For
    comparison, there are a column of random vectors, if F is known, and a ``dashed``
    line of the means before training: of a run that continues a published model, these
    are that model's.
    """
    figure = new_figure(max(7, 1.1 + 2.6 * max(map(len, rows))), 1.1 + 2.7 * len(rows))
    figure.suptitle(plain(fill(title, 80)))
    alike = len({len(found.mean_cosine) for row in rows for found in row.values()}) == 1
    grid = figure.subplots(
        len(rows), max(map(len, rows)), sharex=alike, sharey=True, squeeze=False
    )
    least = 1e-3
    for axes_row, row in zip(grid, rows, strict=True):
        for axes in axes_row[len(row) :]:
            axes.set_axis_off()
        for axes, (title, found) in zip(axes_row, row.items(), strict=False):
            layers = len(found.mean_cosine)
            columns = found.histogram
            if found.features:
                columns = np.vstack(
                    [columns, of_random_vectors(found.tokens, found.features)]
                )
            image = axes.imshow(
                np.ma.masked_less(columns.T, least),
                origin="lower",
                extent=(-0.5, len(columns) - 0.5, -1, 1),
                aspect="auto",
                interpolation="nearest",
                cmap="magma_r",
                norm=LogNorm(least, 1),
            )
            outline = [withStroke(linewidth=3, foreground="black")]
            axes.plot(
                range(layers),
                found.mean_cosine,
                "o-",
                color="white",
                markersize=2.5,
                path_effects=outline,
            )
            if found.untrained_mean_cosine is not None:
                axes.plot(
                    found.untrained_mean_cosine,
                    "--",
                    color="tab:cyan",
                    path_effects=outline,
                )
            if found.features:
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
            axes.set_title(plain(fill(title, 24)), fontsize=10)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
            axes.set_yticks([-1, -0.5, 0, 0.5, 1])
            # a condensed layer fills only the last bin, which the frame would hide
            axes.set_ylim(-1.05, 1.05)
    drawn = [found for row in rows for found in row.values()]
    figure.supxlabel(layer_label(drawn), fontsize=11)
    other = f",\ndashed: {dashed}" * any(
        found.untrained_mean_cosine is not None for found in drawn
    )
    figure.supylabel(f"cosine of two tokens (line: mean{other})", fontsize=11)
    figure.colorbar(image, ax=grid, label="fraction of pairs", fraction=0.05, aspect=30)
    return figure
