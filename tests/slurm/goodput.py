"""What a failure costs with a requeue and with a restart within the job: ``python -m tests.slurm.goodput SAMPLE FOLDER``.

SAMPLE is the sample corpus, and FOLDER gets the runs and must have a short path. On a local SLURM, a rank of a two-node
job is killed with kill -9 at steps that are drawn at a fixed rate, the same ones for both. cred_expire is SLURM's
default, which is how long a requeued job waits, and no pause is added.
"""

import os
import random
import signal
import sys
from datetime import datetime
from pathlib import Path

from tests.slurm import local
from tests.slurm.test_pretrain import Jobs
from titan_disp.run.history import goodputs, together
from titan_disp.run.reader import read_events, read_rows

STEPS, MEAN, SEED = 160, 40, 0
NAMES = {"none": "no failure", "0": "requeue", "1": "restart within the job"}


def train(jobs: Jobs, run: Path, kills: list[int], inside: str) -> float:
    """Train a run in which a rank is killed at these steps; return the seconds from its beginning to its end."""
    given = {"TITAN_DISP_RESTART_IN_JOB": inside, "TITAN_DISP_CHECK_NODES": "1", "TITAN_DISP_MAX_RETRIES": "99"}
    job = jobs.submit(
        run, "--training.steps", str(STEPS), "--checkpoint.keep_latest_k", "2", sbatch=("--time=60",), **given
    )
    for step in kills:
        jobs.until_step(job, run, step, timeout=900)
        ranks = [
            pid for pid, command in local.processes_with(f"SLURM_JOB_ID={job}\0").items() if "faulty_train" in command
        ]
        os.kill(max(ranks), signal.SIGKILL)
    jobs.slurm.wait(job, "COMPLETED", timeout=900)
    events = read_events(run)
    return events[-1]["time"] - events[0]["allocated"]


def main() -> None:
    sample, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True)
    local.install()
    local.CONFIG = local.CONFIG.replace("cred_expire=5", "cred_expire=120")
    chance, kills = random.Random(SEED), [0]
    while kills[-1] < STEPS:
        kills.append(kills[-1] + 1 + int(chance.expovariate(1 / MEAN)))
    print(f"{datetime.now():%Y-%m-%d}: {STEPS} steps, a rank is killed after steps {kills[1:-1]}")
    print("| | seconds | lost per failure | of that repeated steps | goodput |\n|---|---|---|---|---|")
    with local.LocalSlurm(folder / "slurm") as slurm:
        jobs, whole = Jobs(slurm, sample, folder), 0.0
        for inside, name in NAMES.items():
            run, killed = folder / name.replace(" ", "-"), [] if inside == "none" else kills[1:-1]
            seconds = train(jobs, run, killed, inside)
            whole = whole or seconds
            spent = together(goodputs(read_rows(run), read_events(run)))
            lost = f"{(seconds - whole) / len(killed):.0f} s" if killed else ""
            repeated = f"{spent.repeated / len(killed):.0f} s" if killed else ""
            print(f"| {name} | {seconds:.0f} | {lost} | {repeated} | {spent.fraction:.1%} |", flush=True)


if __name__ == "__main__":
    main()
