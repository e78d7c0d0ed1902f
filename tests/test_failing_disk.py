"""A run whose file system fails, or hangs, for seconds: it ends as if nothing had been.

DRAWS is the number of runs, each with outages at other times.
"""

import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.command_line import DEMO, ROOT, environment
from tests.distributed import free_port
from tests.run_invariants import check_run
from titan_disp.run.reader import read_events, read_rows

STEPS = 40
RANKS = 2
STARTS = 6  # at most, as a supervisor starts a run again
ERRORS = (5, 116, 30, 122, 0)  # EIO, ESTALE, EROFS, EDQUOT, and waiting
NUMBERS = ("loss", "ce", "dispersion", "grad_norm", "lr")
OPTIONS = (
    "--training.steps",
    str(STEPS),
    "--training.seq_len",
    "64",
    "--metrics.log_freq",
    "1",
    "--checkpoint.interval",
    "7",
    "--condensation.interval",
    "20",
    "--lr_scheduler.warmup_steps",
    "2",
    "--optimizer.lr",
    "4e-3",
)


@dataclass
class Disk:
    """A library that makes the file operations of a process fail."""

    library: Path
    plan: Path

    def break_down(self, moments, root):
        """Draw twenty outages of up to four seconds, some seconds apart, and return the
        variables of the process that has them.
        """
        now = time.time()
        outages = []
        for _ in range(20):
            first = now + moments.uniform(3, 8)
            now = first + moments.uniform(0.5, 4)
            outages.append(f"{first} {now} {moments.choice(ERRORS)}")
        self.plan.write_text("\n".join(outages))
        return {
            "LD_PRELOAD": str(self.library),
            "FAILING_ROOT": str(root),
            "FAILING_PLAN": str(self.plan),
        }


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    if sys.platform != "linux" or shutil.which("gcc") is None:
        pytest.skip("needs Linux and gcc")
    folder = tmp_path_factory.mktemp("disk")
    library = folder / "failing_disk.so"
    source = ROOT / "tests" / "failing_disk.c"
    compile_ = ["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"]
    subprocess.run(compile_, check=True)
    return Disk(library, folder / "plan")


def start(sample, run, variables, *options):
    """Train with steps of 0.2 s or more, and return the exit status."""
    with open(run.parent / f"{run.name}.log", "a") as log:
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                f"--nproc-per-node={RANKS}",
                f"--master-port={free_port()}",
                "-m",
                "tests.faulty_train",
                "--job.config_file",
                DEMO,
                "--job.dump_folder",
                run,
                "--model.hf_assets_path",
                sample / "tokenizer",
                "--training.dataset_path",
                sample,
                *OPTIONS,
                *options,
            ],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env=environment() | {"FAULTS": "slow:1-1000@0", "SLOW": "0.2"} | variables,
        ).returncode


@pytest.mark.night
@pytest.mark.timeout(3600)
def test_a_disk_that_fails_for_seconds(sample, tmp_path, disk):
    whole = tmp_path / "whole"
    assert start(sample, whole, {}) == 0
    expected = {row["step"]: row for row in read_rows(whole)}
    assert sorted(expected) == [*range(1, STEPS + 1)]
    for draw in range(int(os.environ.get("DRAWS", "2"))):
        moments = random.Random(draw)
        run = tmp_path / f"run-{draw}"
        log = tmp_path / f"run-{draw}.log"
        mode = ("disabled", "async")[draw % 2]
        for _ in range(STARTS):
            variables = disk.break_down(moments, run)
            if start(sample, run, variables, "--checkpoint.async_mode", mode) == 0:
                break
        else:
            pytest.fail(f"{STARTS} starts failed: {log.read_text()[-4000:]}")
        rows = read_rows(run)
        assert {row["step"] for row in rows} == set(expected), log.read_text()[-9000:]
        for row in rows:
            assert [row[name] for name in NUMBERS] == [
                expected[row["step"]][name] for name in NUMBERS
            ]
        damaged = [event for event in read_events(run) if "damaged" in event["event"]]
        assert not damaged
        check_run(run)
