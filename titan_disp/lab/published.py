"""Published numbers (published.toml) in one table with the scores of an evaluation, or
with the costs of runs.
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
    "Published numbers are from other models, budgets, data, GPUs and documents, "
    "unless you chose the same. The standard errors of published numbers are unknown. "
    "Source P is the text of arXiv 2602.00217, and source R is a review of its ICML "
    "version. P and R do not always agree. In a news article, the authors call the "
    "gains modest. Our standard errors are over seeds. GPU-hours are those of all "
    "ranks, without repeated steps."
)
# our numbers as text, by (task, quantity) and by the name of the model or run
Ours = Mapping[tuple[str, str], Mapping[str, str]]
Lines = list[tuple[str, ...]]  # a cell for each of ``HEADINGS``


def beside(ours: Ours, source: str) -> Lines:
    """Return the lines of a table: for each published task, our numbers above the
    published numbers.

    Our numbers without a published counterpart are left out. ``source`` says where our
    numbers come from.
    """
    text = (Path(__file__).parent / "published.toml").read_text(encoding="utf-8")
    lines = Lines()
    for group in tomli.loads(text)["published"]:
        key = (group["task"], group["what"])
        numbers = ours.get(key)
        if not numbers:
            continue
        lines += [(*key, name, value, source) for name, value in numbers.items()]
        for published in group["numbers"]:
            name = f"{published['of']} ({group['run']})"
            lines.append((*key, name, str(published["value"]), published["source"]))
    return lines


def gpu_seconds(run: RunRecord) -> float:
    """Return the seconds that all ranks spent in the run's steps, or NaN without rows.

    A repeated step counts once.
    """
    seconds = np.diff(run.series("tokens"), prepend=0.0) / run.series("tps")
    return float(np.nansum(seconds)) or math.nan


def _seconds_per_token(run: RunRecord) -> float:
    return gpu_seconds(run) / (run.step * run.tokens_per_step)


def costs(runs: Sequence[RunRecord]) -> Ours:
    """Return the GPU-hours of runs, and the relative time per token of runs with
    dispersion or a baseline method.

    The time is divided by the time of the first run with plain cross-entropy that has
    the same model and machine.
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
