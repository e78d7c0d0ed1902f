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
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import tyro
from pandas import DataFrame
from tyro.conf import Positional

from benchmarks.evidence_runs import paired
from benchmarks.preregistered import PREDICTIONS
from titan_disp.errors import ConfigError
from titan_disp.files import atomic_folder
from titan_disp.lab.statistics import differences_over_seeds, with_holm
from titan_disp.lab.sweeps import runner
from titan_disp.lab.sweeps.definition import Point, points, read_sweep
from titan_disp.run.integrity import checkpoints
from titan_disp.text import markdown_table

CHECKPOINTS = 5  # of each run, as in the authors' script
MEAN = "mean"  # over the tasks, as titan-disp evaluate calls it


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
    text = report(read_scores(runs, out), str(definition.against))
    (out / "result.md").write_text(text)
    print(text)


def evaluate_all(
    runs: Sequence[Point], out: Path, options: Sequence[str], jobs: int
) -> None:
    """Evaluate the runs that have no folder in ``out`` yet, in ``jobs`` threads. Each thread
    has a GPU or, without GPUs, the CPU. The errors are those of ``evaluate``.
    """
    devices = [f"cuda:{gpu}" for gpu in range(torch.cuda.device_count())] or ["cpu"]
    missing = [run for run in runs if not (out / run.name).exists()]

    def evaluate_share(job: int) -> None:
        for run in missing[job::jobs]:
            evaluate(run, out, [*options, "--device", devices[job % len(devices)]])

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(evaluate_share, range(jobs)))


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
    log_file = out / f"{run.name}.log"
    print(f"{run.name}: evaluating the steps {steps}; log: {log_file}")
    command = [sys.executable, "-m", "titan_disp", "evaluate"]
    command += [f"{run.folder}/{step}" for step in steps]
    with open(log_file, "w") as log, atomic_folder(out / run.name) as unfinished:
        command += [*options, "--out", str(unfinished)]
        subprocess.run(command, check=True, stdout=log, stderr=log)


def read_scores(runs: Sequence[Point], out: Path) -> DataFrame:
    """Return the accuracies of the runs' checkpoints, as written by titan-disp evaluate, with
    a row per seed and a column per (condition, task, checkpoint).

    The last task, ``MEAN``, has the means over the tasks. Checkpoints are counted from 0.
    """
    columns: dict[tuple[str, str, int], dict[str, float]] = {}
    for run in runs:
        results = json.loads((out / run.name / "results.json").read_text())
        comparison = results["comparison"]
        for task in (*comparison["tasks"], comparison[MEAN]):
            for checkpoint, score in enumerate(task["scores"].values()):
                column = (run.condition, task["task"], checkpoint)
                columns.setdefault(column, {})[str(run.seeds)] = score
    return DataFrame(columns).rename_axis(columns=["condition", "task", "checkpoint"])


def report(scores: DataFrame, baseline: str) -> str:
    """Return the verdicts of the predictions C1 and C2, by how much the choice of the best
    checkpoint raises each condition's mean, and a table of the tasks at the last checkpoint.

    ``scores`` has the accuracies of two conditions, as ``read_scores`` returns them.
    """
    (other,) = scores.columns.unique("condition").drop(baseline)
    last = scores.xs(CHECKPOINTS - 1, axis=1, level="checkpoint")
    last_mean = last.xs(MEAN, axis=1, level="task")
    means = scores.xs(MEAN, axis=1, level="task")
    # of each run's checkpoints
    best_mean = means.T.groupby("condition").max().T
    of_last = paired(last_mean[other], last_mean[baseline])
    of_best = paired(best_mean[other], best_mean[baseline])
    best = f"best of {CHECKPOINTS} checkpoints"
    lines = [
        f"C1, last checkpoint: {PREDICTIONS['C1'].verdict(of_last)}",
        f"C2, {best}: {PREDICTIONS['C2'].verdict(of_best)}",
    ]
    for condition, gain in (best_mean - last_mean).mean().items():
        lines.append(
            f"{condition}: the best checkpoint scores {gain:.4f} more than the last "
            "one, partly because it is chosen by its scores on these tasks"
        )
    table = task_table(last, baseline, other)
    return "\n\n".join([*lines, markdown_table(table, 1)]) + "\n"


def task_table(last: DataFrame, baseline: str, other: str) -> list[list[str]]:
    """Return a heading, a row for each task, and a row for the mean of the tasks.

    A difference is the mean of other − baseline over pairs of runs with the same seeds.
    Holm's p is p adjusted for the number of tasks.
    """
    means = last.mean()
    by_task = {
        task: last.xs(task, axis=1, level="task").to_dict()
        for task in last.columns.unique("task")
    }
    *of_tasks, of_mean = (
        differences_over_seeds(scores, baseline)[other] for scores in by_task.values()
    )
    differences = [*with_holm(of_tasks), of_mean]
    rows = [["task", baseline, other, "difference", "95 % interval", "p", "Holm's p"]]
    for task, difference in zip(by_task, differences, strict=True):
        p_values = [difference.p_value, difference.holm]
        rows.append(
            [
                task,
                f"{means[baseline, task]:.4f}",
                f"{means[other, task]:.4f}",
                str(difference),
                difference.interval,
                *("" if p is None else f"{p:.3f}" for p in p_values),
            ]
        )
    return rows


if __name__ == "__main__":
    tyro.cli(main)
