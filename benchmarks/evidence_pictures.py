"""Draw the pictures of docs/evidence.md, and write docs/evidence.csv, which has all
conditions of the experiments.

    python -m benchmarks.evidence_pictures

Each row of the table is about a measure of a condition, such as test cross-entropy. It has
the mean over the seeds, and the mean difference from the baseline over the same seeds, with
Student's 95 % interval and the unadjusted p value of the sign-flip test. The interval is
empty for a single pair, and if all differences are equal.
"""

import numpy as np
from matplotlib.axes import Axes
from pandas import DataFrame

from benchmarks.evidence_runs import (
    CURVES,
    PREREGISTERED,
    RATES,
    ROOT,
    changes_by_loss,
    comparisons,
    difference_of,
    interval,
    paired,
    read_runs,
    sign_flip,
    tuning_curves,
)
from benchmarks.preregistered import on_minus_off, read_values
from titan_disp.condensation.heatmap import new_figure
from titan_disp.lab.plots import OKABE_ITO

DOCS = ROOT / "docs"


def baseline_of(part: str, condition: str) -> tuple[str, str]:
    """Return the baseline of a condition. A baseline is its own baseline."""
    if part in ("noise", "restored"):
        return "main", "off"
    if part == "losses":
        return "widths", "off-192"
    if "-192" in condition or part.endswith("tuning") or part == "widths":
        return part, condition.replace("on", "off", 1)
    return part, "off"


def table(runs: DataFrame) -> str:
    """Return the content of docs/evidence.csv."""
    rows = []
    for part, condition, number in runs:
        values = runs[part, condition, number].dropna()
        row = {"part": part, "condition": condition, "number": number}
        row |= {"seeds": len(values), "mean": values.mean()}
        baseline = baseline_of(part, condition)
        # off was not run at some rates.
        if baseline != (part, condition) and (*baseline, number) in runs:
            differences = paired(values, runs[(*baseline, number)])
            if len(differences) > 0:
                row |= {"baseline": " ".join(baseline), **compared(differences)}
        rows.append(row)
    frame = DataFrame(rows).astype({"pairs": "Int64"})
    return frame.to_csv(index=False, float_format="%.5f")


def compared(differences: np.ndarray) -> dict[str, float | None]:
    """Return the cells from "pairs" to "p". With one pair, interval and p are missing."""
    mean = difference_of(differences)
    cells = {"pairs": mean.pairs, "difference": mean.mean, "low": mean.low}
    cells["high"] = mean.high
    if mean.pairs > 1:
        cells["p"] = float(sign_flip(differences))
    return cells


def rates(axes: Axes, runs: DataFrame) -> None:
    """Draw on − off over the learning rate: the curves of the first experiment's tuning,
    and experiment A's means with their intervals.
    """
    curves = zip(CURVES, tuning_curves(runs), OKABE_ITO, strict=False)
    for (warmup, seed), curve, color in curves:
        name = f"tuning (development text): warm-up {warmup:.0%}, seed {101 + seed}"
        axes.plot(RATES, curve, "o-", color=color, alpha=0.6, label=name)
    by_rate = on_minus_off(read_values([str(PREREGISTERED)]))
    low, high = interval(by_rate.T)
    axes.errorbar(
        [*map(float, by_rate)],
        by_rate.mean(),
        (high - low) / 2,
        fmt="ks",
        capsize=3,
        label="experiment A (test text): mean of 8 seeds, 95 % interval",
    )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    axes.set_xlabel("learning rate of both")
    axes.set_ylabel("on − off, cross-entropy (nats;\nabove 0, dispersion is worse)")
    axes.legend(fontsize=8)


def losses(axes: Axes, runs: DataFrame) -> None:
    """Draw the change of cross-entropy against the change of the cosine, with a dot for each
    auxiliary loss.
    """
    changes = changes_by_loss(runs)
    axes.plot(*changes.T.to_numpy(), "o", color=OKABE_ITO[0])
    for name, change in changes.iterrows():
        label = str(name).removesuffix("-192")
        offset = (4, 4)
        if label == "on":
            label = "angular"
            offset = (4, -12)  # below the dot: l2_repel is beside it
        axes.annotate(label, change, offset, textcoords="offset points", fontsize=8)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("mean cosine of the blocks, minus off's")
    axes.set_ylabel("test cross-entropy,\nminus off's (nats)")
    axes.margins(x=0.12)


def differences(axes: Axes, runs: DataFrame) -> None:
    """Draw the comparisons in the table of docs/evidence.md: a dot for each seed, and the
    mean with its interval.
    """
    rows = comparisons(runs)
    for place, by_seed in enumerate(rows.values()):
        places = [place] * len(by_seed)
        axes.plot(by_seed, places, "o", color=OKABE_ITO[0], ms=3, alpha=0.5)
        low, high = interval(by_seed)
        error = (high - low) / 2
        axes.errorbar(by_seed.mean(), place, xerr=error, fmt="ks", capsize=3)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(
        "on − off, test cross-entropy (nats; right of 0, dispersion is worse)"
    )


def main() -> None:
    runs = read_runs()
    (DOCS / "evidence.csv").write_text(table(runs))
    for draw, height in ((rates, 3.6), (losses, 3.6), (differences, 4.1)):
        figure = new_figure(8, height)
        axes = figure.subplots()
        axes.grid(alpha=0.3)
        draw(axes, runs)
        figure.savefig(DOCS / f"evidence_{draw.__name__}.png", dpi=120)


if __name__ == "__main__":
    main()
