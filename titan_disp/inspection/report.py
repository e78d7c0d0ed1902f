"""What ``titan-disp condensation`` writes: numbers as .npz, JSON and CSV, and pictures."""

import csv
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any

from titan_disp.condensation.plot import (
    AVERAGED,
    POOLED,
    averaged,
    both_heatmaps,
    depth_bars,
    mean_cosine_by_layer,
    over_training,
    side_by_side,
)
from titan_disp.condensation.record import Condensation
from titan_disp.condensation.trends import by_size, over_steps, pairs
from titan_disp.inspection.targets import Target, end_of_name
from titan_disp.run.folder import write_json

PLACES, RANKS = ("before_norm", "after_norm"), ("spearman", "kendall")


@dataclass(frozen=True)
class Measured:
    """A model, and what was found. ``parameters``: a tied embedding counts once."""

    target: Target
    parameters: int
    condensation: Condensation


@dataclass(frozen=True)
class Groups:
    """Models that are drawn together, by their names for files.

    Attributes:
        families: models of different sizes.
        pairs: a model, and one made from it.
    """

    families: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pairs: Sequence[tuple[str, str]] = ()


def write_metrics(out: Path, found: Mapping[str, Measured], settings: Mapping[str, Any]) -> list[str]:
    """metrics.json, with ``settings`` of the measurement, and metrics.csv, a row for each layer of each target. Both name the
    layers, and give ρ and τ with the last layer before the final norm and after it.

    Returns:
        The names of the files.
    """
    content = [
        {
            **{"name": name, "folder": str(one.target.folder), "step": one.target.step},
            **{"revision": one.target.revision, "parameters": one.parameters},
            **one.condensation.to_json(),
        }
        for name, one in found.items()
    ]
    write_json(out / "metrics.json", {**settings, "targets": content})
    with open(out / "metrics.csv", "w", newline="") as file:
        rows = csv.writer(file)
        for one in content:
            by_layer = found[one["name"]].condensation.by_layer()
            if file.tell() == 0:
                rows.writerow(
                    ["target", "layer", "layer_name", *by_layer, *(f"{c}_{p}" for p in PLACES for c in RANKS)]
                )
            correlations = [one[place][rank] for place in PLACES for rank in RANKS]  # None: empty
            for layer, numbers in enumerate(zip(one["layers"], *by_layer.values(), strict=True)):
                rows.writerow([one["name"], layer, *numbers, *correlations])
    return ["metrics.json", "metrics.csv"]


def write_figures(out: Path, found: Mapping[str, Measured], groups: Groups) -> list[str]:
    """Both heatmaps of each target; all targets' heatmaps of a kind side by side, mean cosines, ρ and τ; where several steps of a
    run or revisions of a model were measured, these over training; families by size, and pairs.

    Returns:
        The names of the files.
    """
    measured = {name: one.condensation for name, one in found.items()}
    figures = {f"heatmap-{name}.png": both_heatmaps(one, name) for name, one in measured.items()}
    figures["side_by_side_pooled.png"] = side_by_side(measured, POOLED)
    figures["side_by_side_averaged.png"] = side_by_side({name: averaged(m) for name, m in measured.items()}, AVERAGED)
    figures["mean_cosine.png"] = mean_cosine_by_layer(measured)
    figures["depth.png"] = depth_bars(measured)
    by_step, by_revision = _over_training(found)
    if by_step or by_revision:
        figures["over_training.png"] = over_training({**by_step, **by_revision})
    if by_step:
        figures["over_steps.png"] = over_steps(by_step)
    if groups.families:
        families = {
            family: {name: (found[name].parameters, measured[name]) for name in members}
            for family, members in groups.families.items()
        }
        figures["by_size.png"] = by_size(families)
    if groups.pairs:
        figures["pairs.png"] = pairs([((a, measured[a]), (b, measured[b])) for a, b in groups.pairs])
    for name, figure in figures.items():
        figure.savefig(out / name, dpi=150)
    return list(figures)


def _over_training(
    found: Mapping[str, Measured],
) -> tuple[dict[str, dict[int, Condensation]], dict[str, dict[str, Condensation]]]:
    """Runs and models of which several steps or revisions were measured: by step, and where revisions do not name steps, by
    revision in the order given."""
    several: dict[str, list[Measured]] = defaultdict(list)
    for name, one in found.items():
        if end := end_of_name(one.target):
            several[name.removesuffix(end)].append(one)
    by_step: dict[str, dict[int, Condensation]] = {}
    by_revision: dict[str, dict[str, Condensation]] = {}
    for name, many in several.items():
        steps = [step_of(one.target) for one in many]
        numbered = {step: one.condensation for step, one in zip(steps, many, strict=True) if step is not None}
        if len(numbered) == len(many) > 1:
            by_step[name] = dict(sorted(numbered.items()))
        elif len(many) > 1:
            by_revision[name] = {str(one.target.revision): one.condensation for one in many}
    return by_step, by_revision


def step_of(target: Target) -> int | None:
    """A checkpoint's, or the one that a revision names, as step1000 (Pythia) and stage1-step140000-tokens294B (OLMo) do."""
    matched = re.search(r"step[-_]?(\d+)", target.revision or "")
    return int(matched[1]) if matched else target.step


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
