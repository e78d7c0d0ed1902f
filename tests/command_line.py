"""These helpers run the command line like a user, most of them in separate
processes.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "train_configs" / "demo_cpu.toml"
SECONDS = 900  # of a command, on a slow machine that also does other work


def command(config, sample, run, *options, nproc=1):
    argv = [
        sys.executable,
        "-m",
        "titan_disp.cli",
        "train",
        str(config),
        "--nproc",
        str(nproc),
    ]
    argv += [
        "--job.dump_folder",
        str(run),
        "--model.hf_assets_path",
        f"{sample}/tokenizer",
    ]
    return [*argv, "--training.dataset_path", str(sample), *options]


def typed(monkeypatch, *argv):
    """Type titan-disp with these words, in this process, and return its exit status."""
    from titan_disp import cli

    monkeypatch.setattr("sys.argv", ["titan-disp", *map(str, argv)])
    try:
        cli.main()
    except SystemExit as exit:
        return exit.code
    return 0


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def rank_environment(rank=0, world_size=1):
    # Imports torch, which tests of pages do without
    from tests.distributed import free_port

    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_PORT": free_port(),
    }
    return (
        environment()
        | {"MASTER_ADDR": "127.0.0.1"}
        | {name: str(number) for name, number in numbers.items()}
    )


def train(config, sample, run, *options, nproc=1, check=True):
    argv = command(config, sample, run, *options, nproc=nproc)
    how = {"cwd": ROOT, "env": environment(), "timeout": SECONDS}
    done = subprocess.run(argv, capture_output=True, text=True, **how)
    if check:
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def children(pid):
    """Return the children of a running process. torchrun starts its ranks in separate
    sessions.
    """
    return [
        int(child)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


def kill_tree(pid):
    try:
        below = children(pid)
        os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in below:
        kill_tree(child)


def is_running(pid):
    """Return whether a process has not ended.

    One that has ended stays in /proc until its parent asks for its status, which the
    first process of some containers never does.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    state = stat.rpartition(") ")[2][0]
    return state not in "ZX"


def faulty_python(folder):
    """Return the path of a Python in this folder that trains with the faults of
    tests/faulty_train.py.
    """
    file = folder / "faulty_python"
    words = '"${@/#titan_disp.train/tests.faulty_train}"'
    file.write_text(f"#!/bin/bash\nexec {sys.executable} {words}\n")
    file.chmod(0o755)
    return str(file)
