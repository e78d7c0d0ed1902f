"""Draw the pictures of docs/evidence.md, and write docs/evidence.csv, which has every
condition of the experiments.

    python -m benchmarks.evidence_pictures

A row of the table is one number of a condition: its mean over the seeds, and its
difference to the baseline with the same seeds, with Student's 95 % interval and p of
the sign-flip test, which is not adjusted.
"""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from benchmarks.evidence import (
    CURVES,
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
    """Return all numbers of a run by name."""
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
    """Return the condition that a condition is compared with, which may be itself."""
    if part in ("noise", "restored"):
        return "main", "off"
    if part == "losses":
        return "widths", "off-192"
    if "-192" in condition or part.endswith("tuning") or part == "widths":
        return part, condition.replace("on", "off", 1)
    return part, "off"


def table(runs: Runs) -> str:
    """Return the content of docs/evidence.csv."""
    content = {
        key: {seed: numbers(row) for seed, row in sorted(by_seed.items())}
        for key, by_seed in sorted(runs.rows.items())
    }
    rows = [HEADER]
    for key, of_seeds in content.items():
        baseline = baseline_of(*key)
        others = content.get(baseline, {})  # off was not run at some rates
        for name in of_seeds[min(of_seeds)]:
            values = with_number(of_seeds, name)
            row = [*key, name, str(len(values)), f"{np.mean([*values.values()]):.5f}"]
            differences = paired(values, with_number(others, name))
            if key == baseline or len(differences) == 0:
                rows.append([*row, *[""] * 6])
            else:
                rows.append([*row, " ".join(baseline), *compared(differences)])
    return csv_text(rows).replace("\r\n", "\n")


def with_number(
    of_seeds: Mapping[int, Mapping[str, float | None]], name: str
) -> dict[int, float]:
    """Return a number by seed, of the runs that have it."""
    known = {seed: numbers.get(name) for seed, numbers in of_seeds.items()}
    return {seed: number for seed, number in known.items() if number is not None}


def compared(differences: np.ndarray) -> list[str]:
    """Return the cells from "pairs" to "p". A single pair has no interval and no p."""
    cells = [str(len(differences)), f"{differences.mean():.5f}"]
    if len(differences) == 1:
        return [*cells, "", "", ""]
    test = (*interval(differences), sign_flip(differences))
    return [*cells, *(f"{number:.5f}" for number in test)]


def rates(runs: Runs) -> Figure:
    """Draw the tuning's on − off over the learning rate: the curves and their mean."""
    figure = new_figure(8, 3.6)
    axes = figure.subplots()
    curves = tuning_curves(runs)
    names = [f"warm-up {warmup:.0%}, seed {101 + place}" for warmup, place in CURVES]
    for curve, name, color in zip(curves, names, OKABE_ITO, strict=False):
        axes.plot(RATES, curve, "o-", color=color, alpha=0.6, label=name)
    axes.plot(RATES, curves.mean(0), "s-", color="black", linewidth=2, label="mean")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    axes.set_xlabel("learning rate of both")
    axes.set_ylabel("on − off, development\ncross-entropy (nats)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def losses(runs: Runs) -> Figure:
    """Draw the change of cross-entropy over that of the cosine, a dot for each loss."""
    figure = new_figure(8, 3.6)
    axes = figure.subplots()
    for name, change in changes_by_loss(runs).items():
        axes.plot(*change, "o", color=OKABE_ITO[0])
        label = "angular" if name == "on-192" else name.removesuffix("-192")
        below = label == "angular"  # beside l2_repel
        offset = (4, -12 if below else 4)
        axes.annotate(label, change, offset, textcoords="offset points", fontsize=8)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("mean cosine of the blocks, minus off's")
    axes.set_ylabel("test cross-entropy,\nminus off's (nats)")
    axes.grid(alpha=0.3)
    axes.margins(x=0.12)
    return figure


def differences(runs: Runs) -> Figure:
    """Draw the page's table: a dot for each seed, and the mean in its interval."""
    rows = comparisons(runs)
    figure = new_figure(8, 0.34 * len(rows) + 1)
    axes = figure.subplots()
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
    axes.set_xlabel(
        "on − off, test cross-entropy (nats; right of 0, dispersion is worse)"
    )
    axes.grid(alpha=0.3)
    return figure


def main() -> None:
    runs = read_runs()
    (DOCS / "evidence.csv").write_text(table(runs))
    for draw in (rates, losses, differences):
        draw(runs).savefig(DOCS / f"evidence_{draw.__name__}.png", dpi=120)


if __name__ == "__main__":
    main()
