"""This module writes the files of ``titan-disp condensation``: numbers as .npz, JSON and CSV, and pictures."""

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
    """A model, the number of its parameters (a tied embedding counts once), and its measurement."""

    target: Target
    parameters: int
    condensation: Condensation


@dataclass(frozen=True)
class Groups:
    """Models that are drawn together. They are named as in file names.

    Attributes:
        families: models of different sizes, by the name of the family.
        pairs: a base model and a model made from it.
    """

    families: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pairs: Sequence[tuple[str, str]] = ()


def write_metrics(out: Path, found: Mapping[str, Measured], settings: Mapping[str, Any]) -> list[str]:
    """Write metrics.json, which includes ``settings``, and metrics.csv, with a row for each layer of each target.

    Both files name the layers. They give ρ and τ over depth twice: up to the last block, and up to the final norm.

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
            correlations = [one[place][rank] for place in PLACES for rank in RANKS]  # csv writes None as an empty cell
            for layer, numbers in enumerate(zip(one["layers"], *by_layer.values(), strict=True)):
                rows.writerow([one["name"], layer, *numbers, *correlations])
    return ["metrics.json", "metrics.csv"]


def write_figures(out: Path, found: Mapping[str, Measured], groups: Groups) -> list[str]:
    """Draw all pictures.

    These are two heatmaps of each target, all targets' heatmaps of a kind side by side, mean cosines, ρ and τ. Several
    steps of a run or revisions of a model are drawn over training, families by size, and pairs side by side.

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
    """Group the measurements of several steps of a run, or several revisions of a model.

    The first result is by step. The second one is by revision in the given order, for revisions that do not name steps.
    """
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
    """Return the step of a checkpoint or revision, such as step1000 (Pythia) or stage1-step140000-tokens294B (OLMo)."""
    matched = re.search(r"step[-_]?(\d+)", target.revision or "")
    return int(matched[1]) if matched else target.step


def table(found: Mapping[str, Condensation]) -> str:
    """Render a table of mean cosines and their rank correlations with depth.

    The mean cosines are those of the embedding, of the middle and the last block, and after the final norm. The
    correlations are up to the last block and up to the final norm, or dashes if the mean cosines differ too little.
    """
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
