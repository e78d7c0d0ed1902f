"""This module sets published numbers (published.toml) beside those of an evaluation,
and beside what runs cost.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tomli

from titan_disp.lab.report.gather import RunRecord
from titan_disp.text import number

HEADINGS = ("task", "what", "of", "number", "source")
NOTE = (
    "Published numbers are of other models, budgets, data, GPUs and documents, unless "
    "you made yours the same. We know no standard errors of them. P is the text of "
    "arXiv 2602.00217, R a review of its ICML version. They do not always agree. The "
    "authors call the gains modest (a news article). Errors of ours are over seeds. "
    "GPU-hours are those of all ranks in the steps that count."
)
# what was measured, by task and what, and by name
Ours = Mapping[tuple[str, str], Mapping[str, str]]
Lines = list[tuple[str, ...]]  # a cell for each of ``HEADINGS``


def beside(ours: Ours, source: str) -> Lines:
    """Return ours, which are from ``source``, above the published ones of the same
    task. Others of ours are left out.
    """
    text = (Path(__file__).parent / "published.toml").read_text(encoding="utf-8")
    lines = Lines()
    for group in tomli.loads(text)["published"]:
        key = (group["task"], group["what"])
        numbers = ours.get(key)
        if not numbers:
            continue
        lines += [(*key, name, shown, source) for name, shown in numbers.items()]
        for published in group["numbers"]:
            name = f"{published['of']} ({group['run']})"
            lines.append((*key, name, str(published["value"]), published["source"]))
    return lines


def gpu_seconds(run: RunRecord) -> float:
    """Return the seconds of all ranks in the steps that count; NaN before the first
    row.
    """
    seconds = np.diff(run.series("tokens"), prepend=0.0) / run.series("tps")
    return float(np.nansum(seconds)) or math.nan


def _seconds_per_token(run: RunRecord) -> float:
    return gpu_seconds(run) / (run.step * run.tokens_per_step)


def costs(runs: Sequence[RunRecord]) -> Ours:
    """Return what runs cost on GPUs, and the time per token of those with a method
    relative to the first run of the same model on the same machine without any.
    """
    off: dict[tuple[str, str], float] = {}
    relative = {}
    for run in runs:
        if _is_plain(run):
            off.setdefault((run.model, run.machine), _seconds_per_token(run))
    for run in runs:
        baseline = off.get((run.model, run.machine))
        if baseline is not None and not _is_plain(run):
            ratio = number(_seconds_per_token(run) / baseline, 4)
            relative[f"{run.name} ÷ off, {run.machine}"] = ratio
    hours = {
        run.name: number(gpu_seconds(run) / 3600, 4)
        for run in runs
        if run.environment.get("accelerators")
    }
    return {("cost", "GPU-hours"): hours, ("cost", "time per token"): relative}


def _is_plain(run: RunRecord) -> bool:
    return not run.disperses and run.settings.get("baseline.method", "none") == "none"
