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
from torch.nn.functional import normalize, pad

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
SIDES = {0: "left", 20: "right", 300: "left"}  # of the labels that are at the points


def weight(cosine: ArrayLike, formula: AngularFormula) -> np.ndarray:
    """Return exp(−D/τ) of pairs with these cosines."""
    clamped = np.clip(cosine, formula.clamp - 1, 1 - formula.clamp)
    return np.exp(-np.arccos(clamped) / (math.pi * formula.tau))


def loss(mean_cosine: float, formula: AngularFormula) -> float:
    """Return the dispersion loss, without ε, of 256 tokens in a cone, whose cosines have
    this mean.
    """
    generator = torch.Generator().manual_seed(0)
    around = torch.randn(1, 256, 63, generator=generator, dtype=torch.float64)
    around = math.sqrt(1 - mean_cosine) * normalize(around, dim=-1)
    tokens = pad(around, (1, 0), value=math.sqrt(mean_cosine))
    options = {"tau": formula.tau, "clamp": formula.clamp, "norm_eps": 1e-12}
    return dispersion_loss(tokens, **options).item()


def draw_pair(axes: Axes) -> None:
    """Draw exp(−D/τ) over the cosine, and the slope of the gradient beyond ±0.75."""
    # Equal steps of the angle, because arccos is steep at ±1
    cosine = np.cos(np.linspace(math.pi, 0, 181))
    axes.plot(cosine, weight(cosine, WITHOUT), "--", color=RED, label="without κ")
    axes.plot(cosine, weight(cosine, FORMULA), color=BLUE, label="with κ = 0.25")
    bound = 1 - FORMULA.clamp
    slope = 1 / (math.pi * FORMULA.tau * math.sqrt(1 - bound**2))  # of −D/τ
    for sign, label in ((1, "slope that the gradient keeps"), (-1, None)):
        beyond = sign * np.array([bound, 1])
        value = weight(beyond[0], FORMULA)
        line = value * (1 + slope * (beyond - beyond[0]))
        axes.plot(beyond, line, ":", color=BLUE, linewidth=2.5, label=label)
        axes.axvspan(*beyond, color="0.93", zorder=0)
    axes.text(0.98, 0.6, "beyond 0.75,\nthe value is flat", ha="right")
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
    demo = {(mean, loss(mean, FORMULA)): step for step, mean in DEMO.items()}
    axes.plot(*zip(*demo, strict=True), "ko", label="make demo, by step")
    for point, step in demo.items():
        axes.annotate(f"  step {step}  ", point, ha=SIDES[step], va="top")
    axes.axhline(FORMULA.ceiling, color=BLUE, linewidth=0.8, alpha=0.5)
    label = f"ceiling: {FORMULA.ceiling:.3f}".replace("-", "−")
    axes.text(0.02, FORMULA.ceiling + 0.012, label, color=BLUE)
    axes.set_title("The loss of a cone of tokens")
    axes.set_xlabel("mean cosine of the tokens")
    axes.set_ylabel("L_disp")
    axes.set_xlim(-0.03, 1.03)
    axes.set_ylim(-0.56, 0.03)


def picture() -> Figure:
    """Return the picture."""
    figure = new_figure(8.4, 3.9)
    pair, cones = figure.subplots(1, 2)
    draw_pair(pair)
    draw_cone(cones)
    for axes in (pair, cones):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4)
    return figure


if __name__ == "__main__":
    picture().savefig(PICTURE, dpi=150)
