"""Draw docs/formula.png: the effect of κ on the dispersion loss of tokens whose pairs all
have the same cosine.

    python -m benchmarks.formula_figure
"""

import math
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from titan_disp.condensation.heatmap import new_figure
from titan_disp.dispersion.formula import AngularFormula
from titan_disp.lab.plots import OKABE_ITO

PICTURE = Path(__file__).parent.parent / "docs" / "formula.png"
FORMULA = AngularFormula()  # the defaults
WITHOUT = AngularFormula(clamp=0.0)
BLUE = OKABE_ITO[0]
RED = OKABE_ITO[1]
# Mean cosine of all blocks of make demo at steps 0, 20 and 300: the table in README.md
DEMO = {0: 0.02, 20: 0.99, 300: 0.12}


def loss(cosine: ArrayLike, formula: AngularFormula) -> np.ndarray:
    """Return −D/τ of each of these cosines, the loss of tokens that all have it."""
    clamped = np.clip(cosine, formula.clamp - 1, 1 - formula.clamp)
    return -np.arccos(clamped) / (math.pi * formula.tau)


def picture() -> Figure:
    """Return the picture: the loss over the cosine, the slope of the gradient beyond ±0.75,
    and the mean cosines of the nano demo.
    """
    figure = new_figure(8.4, 4.2)
    axes = figure.subplots()
    # Equal steps of the angle, because arccos is steep at ±1
    cosine = np.cos(np.linspace(math.pi, 0, 181))
    axes.plot(cosine, loss(cosine, WITHOUT), "--", color=RED, label="without κ")
    axes.plot(cosine, loss(cosine, FORMULA), color=BLUE, label="with κ = 0.25")
    bound = 1 - FORMULA.clamp
    slope = 1 / (math.pi * FORMULA.tau * math.sqrt(1 - bound**2))
    for sign, label in ((1, "slope that the gradient keeps"), (-1, None)):
        beyond = sign * np.array([bound, 1])
        kept = loss(beyond[0], FORMULA) + slope * (beyond - beyond[0])
        axes.plot(beyond, kept, ":", color=BLUE, linewidth=2.5, label=label)
        axes.axvspan(*beyond, color="0.93", zorder=0)
    cosines = list(DEMO.values())
    axes.plot(cosines, loss(cosines, FORMULA), "ko", label="make demo, mean cosine")
    for step, mean in DEMO.items():
        text = f"step {step}  "
        point = (mean, loss(mean, FORMULA))
        axes.annotate(text, point, ha="right", rotation=45, rotation_mode="anchor")
    ceiling = f"ceiling: {FORMULA.ceiling:.3f}".replace("-", "−")
    axes.axhline(FORMULA.ceiling, color=BLUE, linewidth=0.8, alpha=0.5)
    axes.text(-0.98, FORMULA.ceiling + 0.02, ceiling, color=BLUE)
    axes.set_xlabel("cosine of all pairs of tokens")
    axes.set_ylabel("L_disp")
    axes.set_xticks([-1, -0.75, -0.4, 0, 0.4, 0.75, 1])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(-1, 1)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4)
    return figure


if __name__ == "__main__":
    picture().savefig(PICTURE, dpi=150)
