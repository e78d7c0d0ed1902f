"""Draw the pictures of docs/evidence.md, and write docs/evidence.csv, which has all
conditions of the experiments.

    python -m benchmarks.evidence_pictures

Each row of the table is about a measure of a condition, such as test cross-entropy. It has
the mean over the seeds, and the mean difference from the baseline over the same seeds, with
Student's 95 % interval and the unadjusted p value of the sign-flip test.
"""

from operator import methodcaller

import numpy as np
from matplotlib.axes import Axes

from benchmarks.evidence import (
    CURVES,
    PREREGISTERED,
    RATES,
    changes_by_loss,
    comparisons,
    tuning_curves,
)
from benchmarks.evidence_runs import (
    ROOT,
    Key,
    Row,
    Runs,
    blocks_cosine,
    interval,
    order_of,
    paired,
    read_runs,
    seconds,
    sign_flip,
)
from benchmarks.preregistered import on_minus_off, read_values
from titan_disp.condensation.heatmap import new_figure
from titan_disp.lab.plots import OKABE_ITO
from titan_disp.text import csv_text

DOCS = ROOT / "docs"
HEADER = [
    "part",
    "condition",
    "number",
    "seeds",
    "mean",
    "baseline",
    "pairs",
    "difference",
    "low",
    "high",
    "p",
]


def numbers(row: Row) -> dict[str, float]:
    """Return all numbers of a run, by name."""
    content = {}
    for text, scores in row["numbers"].items():
        for name in ("cross_entropy", "accuracy", "last_word"):
            content[f"{text} {name}"] = scores[name]
        for source, cross_entropy in scores["by_source"].items():
            content[f"{text} cross_entropy of {source}"] = cross_entropy
        content[f"{text} mean_cosine of the blocks"] = blocks_cosine(row, text)
        content[f"{text} Spearman's ρ"] = order_of(scores["mean_cosine"])
    if history := row.get("history"):
        content["plateau_end"] = history["plateau_end"]
        content["block_cosine over time"] = history["block_cosine"]
        content["seconds"] = seconds(row)
    return content


def baseline_of(part: str, condition: str) -> Key:
    """Return the baseline of a condition. A baseline is its own baseline."""
    if part in ("noise", "restored"):
        return "main", "off"
    if part == "losses":
        return "widths", "off-192"
    if "-192" in condition or part.endswith("tuning") or part == "widths":
        return part, condition.replace("on", "off", 1)
    return part, "off"


def table(runs: Runs) -> str:
    """Return the content of docs/evidence.csv."""
    content = Runs([])
    for key, by_seed in sorted(runs.rows.items()):
        content.rows[key] = {seed: numbers(row) for seed, row in by_seed.items()}
    rows = [HEADER]
    for key, of_seeds in content.rows.items():
        baseline = baseline_of(*key)
        for name in of_seeds[min(of_seeds)]:
            number = methodcaller("get", name)
            values = content.values(*key, number)
            row = [*key, name, str(len(values)), f"{np.mean([*values.values()]):.5f}"]
            cells = [""] * 6
            # off was not run at some rates.
            if key != baseline and baseline in content.rows:
                differences = paired(values, content.values(*baseline, number))
                if len(differences) > 0:
                    cells = [" ".join(baseline), *compared(differences)]
            rows.append([*row, *cells])
    return csv_text(rows).replace("\r\n", "\n")


def compared(differences: np.ndarray) -> list[str]:
    """Return the cells from "pairs" to "p". With one pair, interval and p are empty."""
    cells = [str(len(differences)), f"{differences.mean():.5f}"]
    if len(differences) == 1:
        return [*cells, "", "", ""]
    test = (*interval(differences), sign_flip(differences))
    return [*cells, *(f"{number:.5f}" for number in test)]


def panel(height: float, label: str) -> Axes:
    """Return empty axes as wide as the page, with a label of the x axis."""
    axes = new_figure(8, height).subplots()
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)
    return axes


def rates(runs: Runs) -> Axes:
    """Draw on − off over the learning rate: the curves of the first experiment's tuning,
    and experiment A's means with their intervals.
    """
    axes = panel(3.6, "learning rate of both")
    curves = tuning_curves(runs)
    names = [
        f"tuning (development text): warm-up {warmup:.0%}, seed {101 + index}"
        for warmup, index in CURVES
    ]
    for curve, name, color in zip(curves, names, OKABE_ITO, strict=False):
        axes.plot(RATES, curve, "o-", color=color, alpha=0.6, label=name)
    by_rate = on_minus_off(read_values([str(PREREGISTERED)]))
    by_seed = np.array([*by_rate.values()])
    means = by_seed.mean(-1)
    axes.errorbar(
        [*map(float, by_rate)],
        means,
        abs(np.array(interval(by_seed)) - means),
        fmt="ks",
        capsize=3,
        label="experiment A (test text): mean of 8 seeds, 95 % interval",
    )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    axes.set_ylabel("on − off, cross-entropy (nats;\nabove 0, dispersion is worse)")
    axes.legend(fontsize=8)
    return axes


def losses(runs: Runs) -> Axes:
    """Draw the change of cross-entropy against the change of the cosine, with a dot for each
    auxiliary loss.
    """
    axes = panel(3.6, "mean cosine of the blocks, minus off's")
    for name, change in changes_by_loss(runs).items():
        axes.plot(*change, "o", color=OKABE_ITO[0])
        label = name.removesuffix("-192")
        offset = (4, 4)
        if label == "on":
            label = "angular"
            offset = (4, -12)  # below the dot: l2_repel is beside it
        axes.annotate(label, change, offset, textcoords="offset points", fontsize=8)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylabel("test cross-entropy,\nminus off's (nats)")
    axes.margins(x=0.12)
    return axes


def differences(runs: Runs) -> Axes:
    """Draw the comparisons in the table of docs/evidence.md: a dot for each seed, and the
    mean with its interval.
    """
    rows = comparisons(runs)
    label = "on − off, test cross-entropy (nats; right of 0, dispersion is worse)"
    axes = panel(0.34 * len(rows) + 1, label)
    for place, by_seed in enumerate(rows.values()):
        low, high = interval(by_seed)
        mean = by_seed.mean()
        axes.plot(
            by_seed, [place] * len(by_seed), "o", color=OKABE_ITO[0], ms=3, alpha=0.5
        )
        axes.errorbar(
            mean, place, xerr=[[mean - low], [high - mean]], fmt="ks", capsize=3
        )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.invert_yaxis()
    return axes


def main() -> None:
    runs = read_runs()
    (DOCS / "evidence.csv").write_text(table(runs))
    for draw in (rates, losses, differences):
        figure = draw(runs).get_figure(root=True)
        assert figure is not None
        figure.savefig(DOCS / f"evidence_{draw.__name__}.png", dpi=120)


if __name__ == "__main__":
    main()
