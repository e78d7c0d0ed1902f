"""What a failure costs with a requeue and with a restart within the job: ``python -m
tests.slurm.goodput SAMPLE FOLDER``.

SAMPLE is the sample corpus, and FOLDER gets the runs and must have a short path. On a
local SLURM, a process of a rank of a two-node job is killed with kill -9 after steps
that are drawn at a fixed rate, the same ones for both. cred_expire is SLURM's default,
which is how long a requeued job waits, and no pause is added. This takes half an hour.
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

STEPS = 160
MEAN = 40
SEEDS = (0, 1, 2)
NAMES = {"none": "no failure", "0": "requeue", "now": "restart within the job"}


def draw(seed: int) -> list[int]:
    """Return the steps after which a process is killed."""
    chance = random.Random(seed)
    kills = [0]
    while kills[-1] < STEPS:
        kills.append(kills[-1] + 1 + int(chance.expovariate(1 / MEAN)))
    return kills[1:-1]


def train(jobs: Jobs, run: Path, kills: list[int], retry: str) -> tuple[float, float]:
    """Train a run; return the seconds from its beginning to its end, and its
    goodput.
    """
    given = {
        "TITAN_DISP_RETRIES": ",".join([retry] * 99),
        "TITAN_DISP_CHECK_SECONDS": "600",
    }
    options = ("--training.steps", str(STEPS), "--checkpoint.keep_latest_k", "2")
    job = jobs.submit(run, *options, sbatch=("--time=60",), **given)
    for step in kills:
        jobs.until_step(job, run, step, timeout=900)
        commands = local.processes_with(f"SLURM_JOB_ID={job}\0")
        os.kill(
            max(pid for pid, command in commands.items() if "faulty_train" in command),
            signal.SIGKILL,
        )
    jobs.slurm.wait(job, "COMPLETED", timeout=900)
    events = read_events(run)
    return events[-1]["time"] - events[0]["allocated"], together(
        goodputs(read_rows(run), events)
    ).fraction


def main() -> None:
    sample = Path(sys.argv[1])
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True)
    local.install()
    local.CONFIG = local.CONFIG.replace("cred_expire=5", "cred_expire=120")
    print(
        f"{datetime.now():%Y-%m-%d}: {STEPS} steps, a process is killed after steps "
        f"{[draw(seed) for seed in SEEDS]}"
    )
    print(
        "| | seconds | seconds lost per failure | goodput |\n|---|---|---|---|",
        flush=True,
    )
    with local.LocalSlurm(folder / "slurm") as slurm:
        jobs = Jobs(slurm, sample, folder)
        whole = 0.0
        for inside, name in NAMES.items():
            kills = [draw(seed) if inside != "none" else [] for seed in SEEDS]
            found = [
                train(jobs, folder / f"{inside}-{seed}", kills[seed], inside)
                for seed in SEEDS
            ]
            seconds, goodput = zip(*found, strict=True)
            whole = whole or sum(seconds) / len(SEEDS)
            lost = [
                (s - whole) / len(k) for s, k in zip(seconds, kills, strict=True) if k
            ]
            each = (
                f"{sum(map(len, kills))} failures: {min(lost):.0f} to {max(lost):.0f}"
                if lost
                else ""
            )
            mean = [sum(values) / len(SEEDS) for values in (seconds, goodput)]
            print(f"| {name} | {mean[0]:.0f} | {each} | {mean[1]:.1%} |", flush=True)


if __name__ == "__main__":
    main()
