"""What ``titan-disp condensation`` writes: numbers as .npz, JSON and CSV, and pictures."""

import csv
from collections import defaultdict
from collections.abc import Mapping
from math import isnan
from pathlib import Path
from typing import Any

from titan_disp.condensation.plot import depth_bars, heatmap, mean_cosine_by_layer, over_training, side_by_side
from titan_disp.condensation.record import Condensation
from titan_disp.inspection.targets import Target
from titan_disp.run.folder import write_json

PLACES, RANKS = ("before_norm", "after_norm"), ("spearman", "kendall")


def write_metrics(
    out: Path, targets: Mapping[str, Target], found: Mapping[str, Condensation], settings: Mapping[str, Any]
) -> list[str]:
    """metrics.json, with ``settings`` of the measurement, and metrics.csv, a row for each layer of each target. Both name the
    layers, and give ρ and τ with the last layer before the final norm and after it.

    Returns:
        The names of the files.
    """
    content = [
        {"name": name, "folder": str(targets[name].folder), "step": targets[name].step, **one.to_json()}
        for name, one in found.items()
    ]
    write_json(out / "metrics.json", {**settings, "targets": content})
    with open(out / "metrics.csv", "w", newline="") as file:
        rows = csv.writer(file)
        for one in content:
            by_layer = found[one["name"]].by_layer()
            if file.tell() == 0:
                rows.writerow(
                    ["target", "layer", "layer_name", *by_layer, *(f"{c}_{p}" for p in PLACES for c in RANKS)]
                )
            correlations = [one[place][rank] for place in PLACES for rank in RANKS]  # None: empty
            for layer, numbers in enumerate(zip(one["layers"], *by_layer.values(), strict=True)):
                rows.writerow([one["name"], layer, *numbers, *correlations])
    return ["metrics.json", "metrics.csv"]


def write_figures(out: Path, targets: Mapping[str, Target], found: Mapping[str, Condensation]) -> list[str]:
    """A heatmap for each target, all of them side by side, mean cosines, ρ and τ; and where several steps of a run were
    measured, mean cosines over training.

    Returns:
        The names of the files.
    """
    figures = {f"heatmap-{name}.png": heatmap(one, name) for name, one in found.items()}
    figures["side_by_side.png"] = side_by_side(found)
    figures["mean_cosine.png"] = mean_cosine_by_layer(found)
    figures["depth.png"] = depth_bars(found)
    runs: dict[str, dict[int, Condensation]] = defaultdict(dict)
    for name, one in found.items():
        step = targets[name].step
        if step is not None:
            runs[name.removesuffix(f"-step-{step}")][step] = one
    if any(len(steps) > 1 for steps in runs.values()):
        figures["over_training.png"] = over_training(runs)
    for name, figure in figures.items():
        figure.savefig(out / name, dpi=150)
    return list(figures)


def table(found: Mapping[str, Condensation]) -> str:
    """Mean cosines of the embedding, the middle and the last block, and after the final norm; their rank correlations with depth,
    up to the last block and up to the final norm, or dashes where the mean cosines differ too little."""
    width = max(map(len, found))
    lines = [
        f"{'':{width}}         mean cosine                        up to the last block  up to the final norm",
        f"{'':{width}}  blocks  embedding  mid block  last block  final norm      ρ      τ      ρ      τ",
    ]
    for name, one in found.items():
        last = one.last_block
        embedding, middle, block, norm = one.mean_cosine[[0, (last + 1) // 2, last, -1]]
        cosines = f"{embedding:9.3f}  {middle:9.3f}  {block:10.3f}  {norm:10.3f}"
        ranks = [getattr(over_depth, rank) for over_depth in (one.before_norm, one.after_norm) for rank in RANKS]
        shown = " ".join(f"{'–':>6}" if isnan(value) else f"{value:6.3f}" for value in ranks)
        lines.append(f"{name:{width}}  {last:6}  {cosines}  {shown}")
    return "\n".join(lines)
