"""A full disk and a signal meet two real ranks under torchrun. (tests/slurm does it with NaN and damaged checkpoints.)"""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.command_line import DEMO, ROOT, children, environment, train
from tests.distributed import free_port
from titan_disp.run.integrity import checkpoints, problem
from titan_disp.run.reader import read_json_lines, read_metrics

SHORT = (
    *("--training.seq_len", "32", "--metrics.log_freq", "1", "--lr_scheduler.warmup_steps", "2"),
    *("--condensation.interval", "0"),  # seconds of every start, and tested elsewhere
)
pytestmark = pytest.mark.night


def torchrun(sample, run, *options, faults=""):
    """Start the faulty trainer under torchrun, as the batch script starts it."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-backend", "c10d"),
            *("--log-dir", f"{run}.logs", "--redirects", "3", "--tee", "3", "--role", "rank"),
            *("-m", "tests.faulty_train", "--job.config_file", str(DEMO), "--job.dump_folder", str(run)),
            *("--model.hf_assets_path", f"{sample}/tokenizer", "--training.dataset_path", str(sample)),
            *(*SHORT, *options),
        ],
        cwd=ROOT,
        env=environment() | {"FAULTS": faults},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(job, code=0):
    text, _ = job.communicate(timeout=200)
    assert (job.returncode == 0) == (code == 0), text[-5000:]
    return text


def events(run, *names):
    return [e for e in read_json_lines(run / "events.jsonl") if not names or e["event"] in names]


def losses(run):
    keys = ("loss", "ce", "dispersion", "grad_norm", "lr")
    return {step: [row[key] for key in keys] for step, row in read_metrics(run).items()}


def test_full_disk_during_an_asynchronous_save(sample, tmp_path):
    """Loud, on all ranks, within a step; the last good checkpoint stays, and a resume continues from it."""
    run = tmp_path / "run"
    options = ("--checkpoint.interval", "4", "--checkpoint.async_mode", "async", "--training.steps")
    text = end(torchrun(sample, run, *options, "30", faults="nospace:8-30@1,slow:9-30@0"), code=1)
    assert "the checkpoint of step 8 could not be saved" in text
    assert "No space left on device" in text
    assert "The last good one is step 4" in text
    assert max(read_metrics(run)) < 12  # not only at the next save
    assert checkpoints(run / "checkpoint") == [4]
    assert problem(run / "checkpoint" / "step-8").startswith("it is incomplete")
    assert [e["step"] for e in events(run, "save_failed")] == [8]
    end(torchrun(sample, run, *options, "9"))
    assert events(run, "resume")[-1]["step"] == 4
    assert checkpoints(run / "checkpoint") == [4, 8, 9]


def test_asked_to_stop(sample, tmp_path):
    """One rank hears USR1. All save at the same step and end with status 0; the next start continues, bit for bit."""
    options = ("--training.steps", "14", "--checkpoint.interval", "100")
    run = tmp_path / "run"
    run.mkdir()
    (run / "stop").write_text("123.0")  # one left by an earlier job stops nothing
    job = torchrun(sample, run, *options, faults="slow:1-6@0")
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or max(read_metrics(run), default=0) < 3:
        assert job.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(children(job.pid)[-1], signal.SIGUSR1)
    text = end(job)
    stopped = events(run, "stop")[-1]["step"]
    assert 3 <= stopped < 14, text[-3000:]
    assert checkpoints(run / "checkpoint") == [stopped]
    assert not (run / "stop").exists()
    slow = {step: row["straggler"] for step, row in read_metrics(run).items() if 2 <= step <= min(6, stopped)}
    # Half a second slower a step: SLOW of tests/faulty_train.py.
    assert {found["rank"] for found in slow.values()} == {0}
    assert all(found["seconds"] - found["median"] == pytest.approx(0.5, abs=0.25) for found in slow.values())
    assert f"step 2: rank 0 on {socket.gethostname()} is slow" in text
    train(DEMO, sample, run, *SHORT, *options, nproc=2)
    train(DEMO, sample, tmp_path / "whole", *SHORT, *options, nproc=2)
    assert losses(run) == losses(tmp_path / "whole")
