"""What ``titan-disp condensation`` writes: numbers as .npz, JSON and CSV, and pictures."""

import csv
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_disp.condensation.plot import depth_bars, heatmap, mean_cosine_by_layer, over_training, side_by_side
from titan_disp.condensation.record import Condensation
from titan_disp.inspection.targets import LAST, Target
from titan_disp.run.folder import write_json


def write_metrics(
    out: Path, targets: Mapping[str, Target], found: Mapping[str, Condensation], settings: Mapping[str, Any]
) -> list[str]:
    """metrics.json, with ``settings`` of the measurement, and metrics.csv, a row for each layer of each target.

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
                rows.writerow(["target", "layer", *by_layer, "spearman", "kendall"])
            for layer, numbers in enumerate(zip(*by_layer.values(), strict=True)):
                rows.writerow([one["name"], layer, *numbers, one["spearman"], one["kendall"]])  # None: empty
    return ["metrics.json", "metrics.csv"]


def write_figures(out: Path, targets: Mapping[str, Target], found: Mapping[str, Condensation]) -> list[str]:
    """A heatmap for each target, all of them side by side, mean cosines, ρ and τ; and where several steps of a run were
    measured, mean cosines over training.

    Returns:
        The names of the files.
    """
    figures = {f"heatmap-{name}.png": heatmap(one, name, LAST) for name, one in found.items()}
    figures["side_by_side.png"] = side_by_side(found, LAST)
    figures["mean_cosine.png"] = mean_cosine_by_layer(found, LAST)
    figures["depth.png"] = depth_bars(found)
    runs: dict[str, dict[int, Condensation]] = defaultdict(dict)
    for name, one in found.items():
        step = targets[name].step
        if step is not None:
            runs[name.removesuffix(f"-step-{step}")][step] = one
    if any(len(steps) > 1 for steps in runs.values()):
        figures["over_training.png"] = over_training(runs, LAST)
    for name, figure in figures.items():
        figure.savefig(out / name, dpi=150)
    return list(figures)


def table(found: Mapping[str, Condensation]) -> str:
    """Mean cosines of the embedding, the middle and the last layer, and their rank correlations with depth."""
    width = max(map(len, found))
    lines = [f"{'':{width}}  layers  first    mid   last      ρ      τ"]
    for name, one in found.items():
        layers = len(one.mean_cosine)
        shown = [*one.mean_cosine[[0, layers // 2, -1]], one.spearman, one.kendall]
        lines.append(f"{name:{width}}  {layers:6}" + "".join(f" {value:6.3f}" for value in shown))
    return "\n".join(lines)
