"""This module submits a sweep as an array of SLURM jobs, with one task for each unfinished point."""

from collections.abc import Sequence
from itertools import groupby

from titan_disp.cluster.plan import make_plan
from titan_disp.cluster.plan_text import render
from titan_disp.cluster.submit import command, send
from titan_disp.config import load_config
from titan_disp.sweeps.definition import Sweep
from titan_disp.sweeps.folder import prepare
from titan_disp.sweeps.state import FAILED, state
from titan_disp.wording import counted

SCRIPT = "sweep.sbatch"


def submit(
    sweep: Sweep,
    jobs: int,
    nodes: int,
    gpus_per_node: int,
    gpu: str,
    site: str,
    options: Sequence[str],
    dry_run: bool,
) -> int:
    """Check all points, print the plan of the first one, submit, and return sbatch's exit status.

    It is safe to submit again while an array waits or runs: the second of two tasks with the same point ends at once.

    Args:
        sweep: the sweep.
        jobs: number of tasks that run at the same time.
        nodes: nodes per point.
        gpus_per_node: GPUs per node.
        gpu: kind of GPU for the plan.
        site: name of a file in slurm/sites without .sh, or a path.
        options: further options of sbatch without dashes.
        dry_run: whether to print the command instead of running it.

    Raises:
        ConfigError: A point would fail at its start, or this machine has no sbatch or no scripts.
    """
    prepared = prepare(sweep, nodes * max(1, gpus_per_node), inputs=False)
    todo = [one for one in prepared if state(one.point.folder)[0] != "finished"]
    print(
        f"{counted(len(prepared), 'point')} in {sweep.folder}: {len(prepared) - len(todo)} finished, {len(todo)} to submit"
    )
    if not todo:
        return 0
    first = load_config(["--job.config_file", *todo[0].argv])
    print(f"{todo[0].point.name}:\n{render(make_plan(first, nodes, max(1, gpus_per_node), gpu))}", flush=True)
    array = f"array={ranges([one.place for one in todo])}%{jobs}"
    line = command([str(sweep.folder)], nodes, gpus_per_node, site, [array, *options], SCRIPT)
    if not dry_run:
        for one in todo:
            (one.point.folder / FAILED).unlink(missing_ok=True)  # left by a start on this machine
    return send(line, dry_run)


def ranges(numbers: Sequence[int]) -> str:
    """Format numbers for sbatch --array, such as 0-3,7."""
    runs = [
        [number for _, number in group]
        for _, group in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
