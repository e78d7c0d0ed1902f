"""Experiment C of docs/preregistration.md: train the runs of a sweep, evaluate all of
their checkpoints, and apply the page's rules.

    python -m benchmarks.midtraining train_configs/sweeps/paper/gpt2_eight_seeds.toml --jobs 8

The sweep must have two conditions, of which its key ``against`` names the baseline. Type
the command again after an interruption: finished runs and evaluations are kept. In the
folder of the sweep, evaluation/RUN contains the scores of a run's checkpoints, as written by
``titan-disp evaluate``, and evaluation/result.md contains what this command prints. To
evaluate other tasks, move the folder evaluation away.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
import tyro
from tyro.conf import Positional

from benchmarks.evidence_runs import paired
from benchmarks.preregistered import PREDICTIONS
from titan_disp.errors import ConfigError
from titan_disp.lab.statistics import differences_over_seeds, with_holm
from titan_disp.lab.sweeps import runner
from titan_disp.lab.sweeps.definition import Point, points, read_sweep
from titan_disp.run.integrity import checkpoints
from titan_disp.text import markdown_table

CHECKPOINTS = 5  # of each run, as in the authors' script
MEAN = "mean"  # over the tasks, as titan-disp evaluate calls it
LAST = -1
Scores = Mapping[str, np.ndarray]  # accuracies of a run by task, [checkpoints]
Values = Mapping[str, Mapping[str, float]]  # by condition and seed


def main(
    sweep: Positional[Path],
    jobs: int = 1,
    tasks: tuple[str, ...] = ("paper",),
    include_path: Path | None = None,
) -> None:
    """Train and evaluate, then print and write the result.

    Args:
        sweep: file of a sweep with two conditions.
        jobs: number of runs and of evaluations at a time. Give it the number of GPUs.
        tasks: tasks as titan-disp evaluate takes them; "paper" means the paper's ten tasks.
        include_path: folder with your own task files.
    """
    definition = read_sweep(sweep)
    runs = points(definition)
    conditions = {run.condition for run in runs}
    if len(conditions) != 2 or definition.against not in conditions:
        raise ConfigError(
            f"the sweep has the conditions {', '.join(sorted(conditions))}, and "
            f"sweep.against is {definition.against!r}, expected two conditions, and one of "
            "them as sweep.against"
        )
    trained = runner.run(definition, jobs)
    if any(result.outcome != "finished" for result in trained):
        sys.exit("\n".join(runner.summary(trained)))
    options = ["--tasks", *tasks]
    if include_path is not None:
        options += ["--include-path", str(include_path)]
    out = definition.folder / "evaluation"
    out.mkdir(exist_ok=True)
    evaluate_all(runs, out, options, jobs)
    scores: dict[str, dict[str, Scores]] = {}  # by condition and seed
    for run in runs:
        of_seeds = scores.setdefault(run.condition, {})
        of_seeds[str(run.seeds)] = read_scores(out / run.name)
    text = report(scores, str(definition.against))
    (out / "result.md").write_text(text)
    print(text)


def evaluate_all(
    runs: Sequence[Point], out: Path, options: Sequence[str], jobs: int
) -> None:
    """Evaluate the runs that have no folder in ``out`` yet, ``jobs`` at a time, each on a GPU
    or, without GPUs, on the CPU.
    """
    gpus = torch.cuda.device_count()
    free = SimpleQueue[str]()
    for job in range(jobs):
        free.put(f"cuda:{job % gpus}" if gpus else "cpu")

    def on_a_free_device(run: Point) -> None:
        device = free.get()
        try:
            evaluate(run, out, [*options, "--device", device])
        finally:
            free.put(device)

    missing = [run for run in runs if not (out / run.name).exists()]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(on_a_free_device, missing))


def evaluate(run: Point, out: Path, options: Sequence[str]) -> None:
    """Evaluate all checkpoints of a run, and create ``out/RUN`` with their scores after the
    last one.

    Raises ConfigError if the number of checkpoints is not ``CHECKPOINTS``, and
    CalledProcessError if the evaluation fails.
    """
    steps = checkpoints(run.folder / "checkpoint")
    if len(steps) != CHECKPOINTS:
        raise ConfigError(
            f"{run.folder} has checkpoints of the steps {steps}, expected "
            f"{CHECKPOINTS} checkpoints"
        )
    unfinished = out / f".{run.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    models = [f"{run.folder}/{step}" for step in steps]
    words = ["evaluate", *models, *options, "--out", str(unfinished)]
    print(f"{run.name}: evaluating the steps {steps}; log: {out / run.name}.log")
    with open(out / f"{run.name}.log", "w") as log:
        command = [sys.executable, "-m", "titan_disp", *words]
        subprocess.run(command, check=True, stdout=log, stderr=log)
    unfinished.rename(out / run.name)


def read_scores(folder: Path) -> Scores:
    """Return a run's scores by task, as written by titan-disp evaluate. The last entry,
    ``MEAN``, has the means over the tasks.
    """
    comparison = json.loads((folder / "results.json").read_text())["comparison"]
    rows = [*comparison["tasks"], comparison[MEAN]]
    return {row["task"]: np.array([*row["scores"].values()]) for row in rows}


def report(scores: Mapping[str, Mapping[str, Scores]], baseline: str) -> str:
    """Return the verdicts of the predictions C1 and C2, by how much the choice of the best
    checkpoint raises each condition's mean, and a table of the tasks at the last checkpoint.
    """

    def values(task: str, choose: Callable[[np.ndarray], float]) -> Values:
        return {
            condition: {seed: choose(run[task]) for seed, run in of_seeds.items()}
            for condition, of_seeds in scores.items()
        }

    first_run = next(iter(scores[baseline].values()))
    last = {task: values(task, itemgetter(LAST)) for task in first_run}
    best = values(MEAN, np.max)
    lines = [
        f"C1, last checkpoint: {verdict('C1', last[MEAN], baseline)}",
        f"C2, best of {CHECKPOINTS} checkpoints: {verdict('C2', best, baseline)}",
    ]
    for condition in scores:
        gain = mean_of(best[condition]) - mean_of(last[MEAN][condition])
        lines.append(
            f"{condition}: the best checkpoint scores {gain:.4f} more than the last "
            "one, partly because it is chosen by its scores on these tasks"
        )
    return "\n\n".join([*lines, markdown_table(task_table(last, baseline), 1)]) + "\n"


def mean_of(of_seeds: Mapping[str, float]) -> float:
    return float(np.mean([*of_seeds.values()]))


def verdict(name: str, values: Values, baseline: str) -> str:
    """Return what a prediction's rule says about the differences to the baseline."""
    (other,) = values.keys() - {baseline}
    return PREDICTIONS[name].verdict(paired(values[other], values[baseline]))


def task_table(last: Mapping[str, Values], baseline: str) -> list[list[str]]:
    """Return a heading, a row for each task, and a row for the mean of the tasks.

    A difference is the mean of other − baseline over pairs of runs with the same seeds.
    Holm's p is p adjusted for the number of tasks.
    """
    (other,) = last[MEAN].keys() - {baseline}
    differences = [
        differences_over_seeds(values, baseline)[other] for values in last.values()
    ]
    *of_tasks, of_mean = differences
    rows = [["task", baseline, other, "difference", "95 % interval", "p", "Holm's p"]]
    for (task, values), difference in zip(
        last.items(), [*with_holm(of_tasks), of_mean], strict=True
    ):
        means = [mean_of(values[name]) for name in (baseline, other)]
        p_values = [difference.p_value, difference.holm]
        rows.append(
            [
                task,
                *(f"{mean:.4f}" for mean in means),
                str(difference),
                difference.interval,
                *("" if p is None else f"{p:.3f}" for p in p_values),
            ]
        )
    return rows


if __name__ == "__main__":
    tyro.cli(main)
