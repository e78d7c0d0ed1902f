"""The pictures of docs/evidence.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks import evidence_analysis as analysis
from benchmarks.evidence_analysis import MARGIN, NO_CHANGE, Paired
from benchmarks.evidence_parts import NAMES, PARTS, TEXTS, TRAINED, Row
from titan_disp.condensation.heatmap import new_figure
from titan_disp.lab.plots import MEAN_COSINE, OKABE_ITO

LABELS = {part: PARTS[part] for part in TRAINED}
LIMIT = 0.2  # nats; larger differences occur only in the first steps


def difference_over_tokens(rows: Sequence[Row]) -> Figure:
    """Draw development cross-entropy of on − off over tokens, as the mean over seeds in
    its 95 % interval.
    """
    figure = new_figure(3.2 * len(LABELS), 3.6)
    grid = figure.subplots(1, len(LABELS), sharey=True)
    for part, axes, color in zip(LABELS, grid, OKABE_ITO, strict=False):
        _, tokens, d = analysis.curve_differences(rows, part)
        low, high = analysis.interval(d)
        axes.set_title(LABELS[part], fontsize=10)
        axes.axhspan(
            -MARGIN,
            MARGIN,
            color="black",
            alpha=0.08,
            linewidth=0,
            label=f"±{MARGIN:g}: margin of the design",
        )
        axes.axhline(0, color="black", linewidth=0.8)
        axes.grid(alpha=0.3)
        x = np.array(tokens) / 1e6
        axes.plot(x, d.mean(axis=0), color=color, label=f"mean of {len(d)} seeds")
        axes.fill_between(
            x,
            low,
            high,
            color=color,
            alpha=0.25,
            linewidth=0,
            label="95 % interval over seeds",
        )
        axes.legend(fontsize=7, loc="upper right")
        axes.set_xlabel("training tokens (millions)", fontsize=9)
    grid[0].set_ylim(*np.clip(grid[0].get_ylim(), -LIMIT, LIMIT))
    label = "cross-entropy on one dictionary page,\non − off (nats; above 0, dispersion is worse)"
    grid[0].set_ylabel(label, fontsize=9)
    return figure


def cosine_maps(rows: Sequence[Row]) -> Figure:
    """Draw the mean cosine by layer and step, averaged over seeds, with off beside
    on.
    """
    figure = new_figure(8, 2.4 * len(LABELS))
    grid = figure.subplots(len(LABELS), 2, sharey="row", sharex="row")
    for part, axes_row in zip(LABELS, grid, strict=True):
        for state, axes in zip(("off", "on"), axes_row, strict=True):
            own = [
                row["history"] for row in analysis.finished(rows, part, state).values()
            ]
            mean = np.mean(
                [one["mean_cosine"] for one in own if one["steps"] == own[0]["steps"]],
                axis=0,
            )
            extent = (0, own[0]["steps"][-1], -0.5, mean.shape[1] - 0.5)
            image = axes.imshow(
                mean.T,
                origin="lower",
                aspect="auto",
                vmin=0,
                vmax=1,
                cmap="magma_r",
                extent=extent,
            )
            axes.set_title(f"{LABELS[part]}, dispersion {state}", fontsize=9)
            last = mean.shape[1] - 1
            blocks = {
                block + 1: f"block {block}"
                for block in (*range(0, last - 2, 3), last - 2)
            }
            names = {0: "embedding", **blocks, last: "final norm"}
            axes.set_yticks(list(names), list(names.values()), fontsize=7)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    figure.colorbar(
        image, ax=grid.ravel().tolist(), label=f"{MEAN_COSINE} (1: same direction)"
    )
    return figure


def contrasts(rows: Sequence[Row]) -> Figure:
    """Draw every contrast with off."""
    found = analysis.outcomes(rows)
    places = {"midtraining": lambda text: f"mid-training, {TEXTS[text]}"}
    labels = [
        f"{places[part](text) if part in places else PARTS[part]}: {NAMES[name]}"
        for part, name, text in found
    ]
    return _differences(dict(zip(labels, found.values(), strict=True)), MARGIN)


def widths(rows: Sequence[Row]) -> Figure:
    """Draw on − off at each MLP width of the second experiment, and at the middle one
    with other seeds.
    """
    found = analysis.second_experiment(rows, analysis.loss("test"))
    return _differences(
        {f"MLP width {name}": one for name, one in found.items()}, NO_CHANGE
    )


def _differences(found: Mapping[str, Paired], margin: float) -> Figure:
    """Draw the seeds' differences, and the mean in its 95 % interval."""
    figure = new_figure(8, 0.32 * len(found) + 1.2)
    axes = figure.subplots()
    axes.axvspan(
        -margin,
        margin,
        color="black",
        alpha=0.08,
        linewidth=0,
        label=f"±{margin:g}: margin of the design",
    )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.grid(alpha=0.3)
    for y, one in enumerate(found.values()):
        seeds = [*one.differences.values()]
        axes.plot(
            seeds, [y] * len(seeds), "o", color=OKABE_ITO[0], markersize=3, alpha=0.5
        )
        axes.errorbar(
            one.mean,
            y,
            xerr=[[one.mean - one.low], [one.high - one.mean]],
            fmt="s",
            color="black",
            capsize=3,
        )
    axes.set_yticks(range(len(found)), list(found), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("test cross-entropy, condition − off (nats; right of 0 is worse)")
    figure.legend(fontsize=7, loc="outside upper right")
    return figure


def draw(rows: Sequence[Row], docs: Path) -> None:
    pictures = {
        "loss": difference_over_tokens,
        "cosine": cosine_maps,
        "contrasts": contrasts,
    }
    if analysis.complete(rows, "widths", "widths-again"):
        pictures["widths"] = widths
    for name, drawn in pictures.items():
        drawn(rows).savefig(docs / f"evidence_{name}.png", dpi=120)
