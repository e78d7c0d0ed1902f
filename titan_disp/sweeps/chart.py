"""This module draws a sweep's comparison: every seed, means, and differences with their intervals."""

from textwrap import fill

from matplotlib.figure import Figure

from titan_disp.condensation.plot import OKABE_ITO, new_figure, plain
from titan_disp.sweeps.comparison import Comparison
from titan_disp.sweeps.final_metric import label


def draw(comparison: Comparison) -> Figure:
    """Draw a row of dots for each condition, one per seed, with mean ± standard error, and the paired differences."""
    conditions = comparison.conditions
    two = any(condition.difference is not None for condition in conditions)
    figure = new_figure(10 if two else 6.5, 1.6 + 0.36 * len(conditions))
    panels = figure.subplots(1, 2 if two else 1, sharey=True, squeeze=False)[0]
    for place, condition in enumerate(conditions):
        values = list(condition.values.values())
        panels[0].plot(values, [place] * len(values), "o", color=OKABE_ITO[5], markersize=5, alpha=0.8)
        if condition.mean is not None:
            panels[0].errorbar(
                condition.mean, place, xerr=condition.standard_error, fmt="|", color="black", markersize=12, capsize=4
            )
    panels[0].set_yticks(range(len(conditions)), [plain(fill(condition.name, 40)) for condition in conditions])
    panels[0].set_ylim(len(conditions) - 0.5, -0.5)
    panels[0].set_xlabel(fill(label(comparison.metric), 40) + "\n(a dot per seed; mean ± standard error)")
    panels[0].grid(axis="x", alpha=0.3)
    for axes in panels:
        axes.locator_params(axis="x", nbins=6)
    if not two:
        return figure
    for place, condition in enumerate(conditions):
        found = condition.difference
        if found is None:
            continue
        low, high = (
            (found.low, found.high) if found.low is not None and found.high is not None else (found.mean, found.mean)
        )
        reach = [[found.mean - low], [high - found.mean]]
        panels[1].errorbar(found.mean, place, xerr=reach, fmt="o", color=OKABE_ITO[0], markersize=6, capsize=4)
    panels[1].axvline(0, color="black", linewidth=0.8)
    panels[1].set_xlabel(plain(f"difference to {comparison.against}, paired by seed\n(95 % interval)"))
    panels[1].grid(axis="x", alpha=0.3)
    return figure
