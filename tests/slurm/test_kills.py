"""This test kills processes of a two-node job of a local SLURM at random moments, KILLS times.

KILLS=20 SEED=1 python -m pytest tests/slurm/test_kills.py

Each kill takes half a minute. `make test-night` does the same without SLURM (tests/test_training.py).
"""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.command_line import DEMO, train
from tests.slurm.local import processes_with
from tests.slurm.test_pretrain import INTERVAL, OPTIONS, jobs, slurm, values  # noqa: F401
from titan_disp.run.integrity import checkpoints, damage, problem
from titan_disp.run.reader import read_metrics

KILLS = int(os.environ.get("KILLS", 0))
SEED = int(os.environ.get("SEED", 1))
STEPS = 16 + 24 * KILLS
LATEST = float(os.environ.get("LATEST", 20))  # seconds after a start, of which the first ten pass before training
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(300 + 90 * KILLS),
    pytest.mark.skipif(not KILLS, reason="KILLS says how many"),
]


def processes(job):
    """Return the ids of the ranks, of torchrun and of srun.

    The batch script and the supervisor are left out, because their death ends the job.
    """
    commands = processes_with(f"SLURM_JOB_ID={job}\0")
    helpers = set()  # srun forks one, without which it goes on
    for pid, command in commands.items():
        with suppress(OSError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if command.startswith("srun ") and commands.get(parent, "").startswith("srun "):
                helpers.add(pid)
    parts = ("faulty_train", "torch.distributed.run", "srun ")
    return sorted(pid for pid, command in commands.items() if any(p in command for p in parts) and pid not in helpers)


def test_killed_at_random_moments(jobs, sample, tmp_path):  # noqa: F811
    """Processes are killed by kill -9 during start, training or saving.

    The losses equal those of an uninterrupted run, and no checkpoint is lost.
    """
    chance = random.Random(SEED)
    options = ("--training.steps", str(STEPS), "--checkpoint.async_mode", "async")
    run = tmp_path / "run"
    job = jobs.submit(run, *options, TITAN_DISP_MAX_RETRIES=str(KILLS))
    killed, complete = [], set()
    for start in range(KILLS):
        jobs.slurm.wait(job, ("RUNNING", "COMPLETED"), timeout=120, restarts=start)
        time.sleep(chance.uniform(0, LATEST))
        while not (victims := processes(job)):
            if jobs.slurm.job(job)["JobState"] == "COMPLETED":
                break
            time.sleep(0.05)
        else:
            step = max(read_metrics(run), default=0) if (run / "metrics.jsonl").exists() else 0
            killed.append(step)
            os.kill(chance.choice(victims), signal.SIGKILL)
            # What is complete at that moment stays.
            complete |= set(checkpoints(run / "checkpoint"))
            jobs.slurm.wait(job, ("PENDING", "RUNNING"), timeout=120, restarts=start + 1)
            assert complete <= set(checkpoints(run / "checkpoint"))
    jobs.completed(job, restarts=len(killed), more=True)
    print(f"killed after steps {killed}")
    assert len(killed) == KILLS
    assert checkpoints(run / "checkpoint") == list(range(INTERVAL, STEPS + 1, INTERVAL))
    for step in checkpoints(run / "checkpoint"):
        folder = run / "checkpoint" / f"step-{step}"
        assert problem(folder) is None
        assert damage(folder) is None
    whole = tmp_path / "whole"
    train(DEMO, sample, whole, *OPTIONS, *options, nproc=2)
    assert values(run) == values(whole)
