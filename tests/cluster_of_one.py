"""Run the command line as a user does, in processes of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.distributed import free_port
from titan_disp.run.folder import read_metrics

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "train_configs" / "demo_cpu.toml"


def command(config, sample, run, *options, nproc=1):
    return [
        *(sys.executable, "-m", "titan_disp.cli", "train", str(config), "--nproc", str(nproc)),
        *("--job.dump_folder", str(run), "--model.hf_assets_path", f"{sample}/tokenizer"),
        *("--training.dataset_path", str(sample), *options),
    ]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def rank_environment(rank=0, world_size=1):
    """What torchrun would set."""
    return environment() | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def train(config, sample, run, *options, nproc=1, check=True):
    """Train to the end; returns the completed process with its console text."""
    done = subprocess.run(
        command(config, sample, run, *options, nproc=nproc),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    if check:
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def train_and_kill(config, sample, run, step, *options, nproc=1):
    """Train until ``step`` is in metrics.jsonl, then SIGKILL every process of the job."""
    with open(f"{run}.killed.log", "w") as log:
        job = subprocess.Popen(
            command(config, sample, run, *options, nproc=nproc),
            cwd=ROOT,
            env=environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + 200
    try:
        while not (run / "metrics.jsonl").exists() or max(read_metrics(run), default=0) < step:
            assert job.poll() is None, f"the job ended before step {step}"
            assert time.monotonic() < deadline, f"step {step} not reached in time"
            time.sleep(0.02)
    finally:
        _kill_tree(job.pid)
        job.wait()


def _kill_tree(pid):
    """torchrun starts its ranks in sessions of their own: kill the children first, by parent."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in children:
        _kill_tree(int(child))
