"""Draw docs/formula.png: the effect of κ on the dispersion loss.

    python -m benchmarks.formula_figure

The left panel shows a pair's term of the mean, over the pair's cosine. The right panel
shows the loss of a cone of tokens, over their mean cosine.
"""

import math
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from PIL import Image
from torch import Tensor

from titan_disp.condensation.heatmap import new_figure
from titan_disp.dispersion import dispersion_loss
from titan_disp.dispersion.formula import AngularFormula
from titan_disp.lab.plots import OKABE_ITO

PICTURE = Path(__file__).parent.parent / "docs" / "formula.png"
FORMULA = AngularFormula()  # the defaults
WITHOUT = AngularFormula(clamp=0.0)
BLUE = OKABE_ITO[0]
RED = OKABE_ITO[1]
# Mean cosine of all blocks of make demo at steps 0, 20 and 300: the table in README.md
DEMO = {0: 0.02, 20: 0.99, 300: 0.12}
PLACES = ((0.12, -0.497), (0.46, -0.39), (0.22, -0.462))  # positions of the labels


def weight(cosine: ArrayLike, formula: AngularFormula) -> np.ndarray:
    """Return exp(−D/τ) of pairs with these cosines."""
    clamped = np.clip(cosine, formula.clamp - 1, 1 - formula.clamp)
    return np.exp(-np.arccos(clamped) / (math.pi * formula.tau))


def cone(mean_cosine: float) -> Tensor:
    """Return tokens around an axis, [1, 256, 64], whose cosines have this mean."""
    generator = torch.Generator().manual_seed(0)
    around = torch.randn(1, 256, 64, generator=generator, dtype=torch.float64)
    around[..., 0] = 0
    around /= torch.linalg.vector_norm(around, dim=-1, keepdim=True)
    tokens = math.sqrt(1 - mean_cosine) * around
    tokens[..., 0] = math.sqrt(mean_cosine)
    return tokens


def loss(mean_cosine: float, formula: AngularFormula) -> float:
    """Return the dispersion loss of a cone of tokens, without ε."""
    return dispersion_loss(
        cone(mean_cosine), tau=formula.tau, clamp=formula.clamp, norm_eps=1e-12
    ).item()


def draw_pair(axes: Axes) -> None:
    """Draw exp(−D/τ) over the cosine, and the slope of the gradient beyond ±0.75."""
    # Equal steps of the angle, because arccos is steep at ±1
    cosine = np.cos(np.linspace(math.pi, 0, 181))
    axes.plot(cosine, weight(cosine, WITHOUT), "--", color=RED, label="without κ")
    axes.plot(cosine, weight(cosine, FORMULA), color=BLUE, label="with κ = 0.25")
    bound = 1 - FORMULA.clamp
    for at_bound, end in ((bound, 1.0), (-bound, -1.0)):
        beyond = np.array([at_bound, end])
        value = weight(at_bound, FORMULA)
        slope = value / (math.pi * FORMULA.tau * math.sqrt(1 - bound**2))
        axes.plot(
            beyond,
            value + slope * (beyond - at_bound),
            ":",
            color=BLUE,
            linewidth=2.5,
            label="slope that the gradient keeps" if end > 0 else None,
        )
        axes.axvspan(at_bound, end, color="0.93", zorder=0)
    axes.annotate(
        "beyond 0.75,\nthe value is flat",
        (0.875, weight(bound, FORMULA) - 0.005),
        xytext=(0.68, 0.44),
        ha="right",
        arrowprops={"arrowstyle": "->"},
    )
    axes.set_title("What a pair of tokens adds to the mean")
    axes.set_xlabel("cosine of the two tokens")
    axes.set_ylabel("exp(−D / τ)")
    axes.set_xticks([-1, -0.75, -0.4, 0, 0.4, 0.75, 1])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(-1, 1)


def draw_cone(axes: Axes) -> None:
    """Draw the loss over the mean cosine, and the mean cosines of the nano demo."""
    # Steps are smaller near 1, where the curve without κ is steep.
    cosine = 1 - np.linspace(1, 0, 101) ** 2
    axes.plot(cosine, [loss(mean, WITHOUT) for mean in cosine], "--", color=RED)
    axes.plot(cosine, [loss(mean, FORMULA) for mean in cosine], color=BLUE)
    for (step, mean), place in zip(DEMO.items(), PLACES, strict=True):
        value = loss(mean, FORMULA)
        axes.plot(mean, value, "o", color="black")
        axes.annotate(
            f"nano demo, step {step}: {mean}",
            (mean, value),
            xytext=place,
            va="center",
            arrowprops={"arrowstyle": "-", "color": "0.4"},
        )
    axes.axhline(FORMULA.ceiling, color=BLUE, linewidth=0.8, alpha=0.5)
    label = f"ceiling: {FORMULA.ceiling:.3f}".replace("-", "−")
    axes.text(0.02, FORMULA.ceiling + 0.012, label, color=BLUE)
    axes.set_title("The loss of a cone of tokens")
    axes.set_xlabel("mean cosine of the tokens")
    axes.set_ylabel("L_disp")
    axes.set_xlim(-0.03, 1.03)


def picture() -> Figure:
    """Return the picture."""
    figure = new_figure(8.4, 3.9)
    pair, cones = figure.subplots(1, 2)
    draw_pair(pair)
    draw_cone(cones)
    for axes in (pair, cones):
        axes.grid(alpha=0.3)
    figure.legend(
        *pair.get_legend_handles_labels(), loc="outside lower center", ncols=3
    )
    return figure


def save(figure: Figure, path: Path) -> None:
    """Save a picture with 64 colours, which saves two thirds of the bytes."""
    figure.set_dpi(150)
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())
    Image.fromarray(pixels).convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    save(picture(), PICTURE)
