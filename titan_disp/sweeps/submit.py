"""A sweep as an array of SLURM jobs: one task for each point that is not finished, some at a time."""

from collections.abc import Sequence
from itertools import groupby

from titan_disp.cluster.plan import make_plan
from titan_disp.cluster.plan_text import render
from titan_disp.cluster.submit import command, send
from titan_disp.config import load_config
from titan_disp.sweeps.definition import Sweep
from titan_disp.sweeps.folder import prepare
from titan_disp.sweeps.state import FAILED, state

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
    """Check all points, print the plan of the first one, and submit; returns sbatch's exit status.

    Submitting again while an array waits or runs does no harm: of two tasks with one point, the second ends at once.

    Args:
        jobs: tasks that run at a time.
        nodes, gpus_per_node: of each point.

    Raises:
        ConfigError: what would fail at the start, no sbatch here, or no scripts.
    """
    prepared = prepare(sweep, nodes * max(1, gpus_per_node), inputs=False)
    todo = [one for one in prepared if state(one.point.folder)[0] != "finished"]
    print(f"{len(prepared)} points in {sweep.folder}: {len(prepared) - len(todo)} are finished, {len(todo)} to submit")
    if not todo:
        return 0
    first = load_config(["--job.config_file", *todo[0].argv])
    print(f"{todo[0].point.name}:\n{render(make_plan(first, nodes, max(1, gpus_per_node), gpu))}", flush=True)
    array = f"array={ranges([one.place for one in todo])}%{jobs}"
    line = command([str(sweep.folder)], nodes, gpus_per_node, site, [array, *options], SCRIPT)
    if not dry_run:
        for one in todo:
            (one.point.folder / FAILED).unlink(missing_ok=True)  # of a start on this machine
    return send(line, dry_run)


def ranges(numbers: Sequence[int]) -> str:
    """As sbatch --array takes them: 0-3,7."""
    runs = [
        [number for _, number in group]
        for _, group in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
