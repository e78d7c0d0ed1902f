"""What a run meets at night: NaN, a full disk, damaged checkpoints, signals. Real ranks on gloo."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.command_line import DEMO, ROOT, environment, train
from tests.distributed import free_port
from titan_disp.cluster.plan import make_plan
from titan_disp.config.load import load_config
from titan_disp.config.options import Machine
from titan_disp.run.integrity import checkpoints, problem
from titan_disp.run.reader import read_json_lines, read_metrics

SHORT = (
    *("--training.seq_len", "32", "--metrics.log_freq", "1", "--lr_scheduler.warmup_steps", "2"),
    *("--condensation.interval", "0"),  # seconds of every start, and tested elsewhere
)
pytestmark = [pytest.mark.slow, pytest.mark.night]


def torchrun(sample, run, *options, faults="", nproc=2, check=True, timeout=200):
    """The faulty trainer under torchrun, as the batch script starts it."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc)),
            *("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-backend", "c10d"),
            *("--log-dir", f"{run}.logs", "--redirects", "3", "--tee", "3", "--role", "rank"),
            *("-m", "tests.faulty_train", "--job.config_file", str(DEMO), "--job.dump_folder", str(run)),
            *("--model.hf_assets_path", f"{sample}/tokenizer", "--training.dataset_path", str(sample)),
            *SHORT,
            *options,
        ],
        cwd=ROOT,
        env=environment() | {"FAULTS": faults},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    text = done.stdout + done.stderr
    assert not check or done.returncode == 0, text[-5000:]
    return done.returncode, text


def events(run, *names):
    return [e for e in read_json_lines(run / "events.jsonl") if not names or e["event"] in names]


def test_non_finite_steps_are_skipped_on_all_ranks_alike(sample, tmp_path):
    """NaN in one rank's loss, an infinite gradient on another: skipped, counted in the checkpoint, weights sound and equal."""
    run = tmp_path / "run"
    _, text = torchrun(
        sample,
        run,
        *("--training.steps", "8", "--checkpoint.interval", "3"),
        faults="nan_loss:3@1,inf_gradient:4@0,inf_gradient:6@1",
    )
    for rank in (0, 1):
        assert f"[rank{rank}]" in text
        assert (
            text.count("step 3 is skipped on all ranks: cross-entropy and gradient norm not finite (1 in a row)") == 2
        )
        assert text.count("step 4 is skipped on all ranks: gradient norm not finite (2 in a row)") == 2
    skips = [(e["step"], e["terms"], e["in_a_row"]) for e in events(run, "skip")]
    assert skips == [
        (3, ["cross-entropy", "gradient norm"], 1),
        (4, ["gradient norm"], 2),
        (6, ["gradient norm"], 1),
    ]
    # Due at 3, 6 and (the last) 8; put off to the next good step.
    assert checkpoints(run / "checkpoint") == [5, 7, 8]
    losses = {step: r["ce"] for step, r in read_metrics(run).items()}
    assert [step for step, ce in losses.items() if ce != ce] == [3]
    assert losses[8] < losses[1]
    guard = load_key(run / "checkpoint" / "step-8", "optimizer.guard", torch.zeros(3, dtype=torch.int64))
    assert guard.tolist() == [8, 3, 0]
    # The count goes on after a resume.
    torchrun(sample, run, "--training.steps", "10", faults="nan_loss:9@0")
    guard = load_key(run / "checkpoint" / "step-10", "optimizer.guard", torch.zeros(3, dtype=torch.int64))
    assert guard.tolist() == [10, 4, 0]


def load_key(folder, key, like):
    import torch.distributed.checkpoint as dcp

    state = {key: like}
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    return state[key]


def test_full_disk_during_an_asynchronous_save(sample, tmp_path):
    """Loud, on all ranks, within a step; the last good checkpoint stays, and a resume continues from it."""
    run = tmp_path / "run"
    options = ("--training.steps", "30", "--checkpoint.interval", "4", "--checkpoint.async_mode", "async")
    start = time.monotonic()
    code, text = torchrun(sample, run, *options, faults="nospace:8-30@1,slow:9-30@0", check=False)
    assert code != 0
    assert time.monotonic() - start < 90
    assert "the checkpoint of step 8 could not be saved" in text
    assert "No space left on device" in text
    assert "The last good one is step 4" in text
    assert max(read_metrics(run)) < 12  # not only at the next save
    assert checkpoints(run / "checkpoint") == [4]
    assert problem(run / "checkpoint" / "step-8").startswith("it is incomplete")
    assert [e["step"] for e in events(run, "save_failed")] == [8]
    torchrun(sample, run, *options[2:], "--training.steps", "9")
    assert events(run, "resume")[-1]["step"] == 4
    assert checkpoints(run / "checkpoint") == [4, 8, 9]


def test_damaged_checkpoints(sample, tmp_path):
    """Truncated, garbled, unfinished: the newest that loads is taken, nothing deleted; none loads: an error, no fresh start."""
    run = tmp_path / "run"
    folder = run / "checkpoint"
    options = ("--checkpoint.interval", "2", "--checkpoint.keep_latest_k", "0")
    train(DEMO, sample, run, *SHORT, *options, "--training.steps", "8", nproc=2)
    backup = tmp_path / "backup"
    shutil.copytree(folder, backup)
    whole = {step: r["loss"] for step, r in read_metrics(run).items()}
    truncate(folder / "step-8")
    # Right lengths, wrong content: only loading finds it.
    file = next((folder / "step-6").glob("__0_*.distcp"))
    file.write_bytes(os.urandom(file.stat().st_size))
    (folder / "step-7").mkdir()  # unfinished
    done = train(DEMO, sample, run, *SHORT, *options, "--training.steps", "8", nproc=2)
    assert "step-8 cannot be loaded: __" in done.stdout
    assert "expected" in done.stdout
    # TorchTitan sets them after step 1 only.
    assert "adjusting timeout for all ProcessGroups to 0:01:40" in done.stdout
    assert [e["step"] for e in events(run, "checkpoint_damaged")] == [8, 6]
    assert events(run, "resume")[-1]["step"] == 4
    assert (folder / "damaged-8").is_dir()
    assert (folder / "damaged-6").is_dir()
    assert checkpoints(folder) == [2, 4, 6, 8]
    assert {step: r["loss"] for step, r in read_metrics(run).items()} == whole  # bit for bit

    # load_step: no falling back, no overwriting.
    options = (*options, "--checkpoint.load_step", "4", "--training.steps", "9")
    refused = train(DEMO, sample, run, *SHORT, *options, nproc=2, check=False)
    assert refused.returncode == 2
    assert "holds newer checkpoints (6, 8), which training on would overwrite" in refused.stderr

    for step in (2, 4, 6, 8):
        truncate(folder / f"step-{step}")
    refused = train(DEMO, sample, run, *SHORT, "--training.steps", "9", nproc=2, check=False)
    assert refused.returncode == 2
    assert "can be loaded (4 tried)" in refused.stderr
    assert "Nothing was trained" in refused.stderr
    assert checkpoints(folder) == [2, 4, 6, 8]


def truncate(folder):
    largest = max(folder.glob("*.distcp"), key=lambda p: p.stat().st_size)
    with open(largest, "r+b") as file:
        file.truncate(largest.stat().st_size // 2)


@pytest.mark.parametrize("how", ["USR1 to one rank", "stop file"])
def test_asked_to_stop(sample, tmp_path, how):
    """All ranks save at the same step and end with status 0; the next start continues, bit for bit."""
    options = (*SHORT, "--training.steps", "14", "--checkpoint.interval", "100")
    run = tmp_path / "run"
    if how == "stop file":  # one left by an earlier job stops nothing
        run.mkdir()
        (run / "stop").write_text("123.0")
    job = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "-m", "tests.faulty_train"),
            *("--job.config_file", str(DEMO), "--job.dump_folder", str(run), *options),
            *("--model.hf_assets_path", f"{sample}/tokenizer", "--training.dataset_path", str(sample)),
        ],
        cwd=ROOT,
        env=environment() | {"FAULTS": "slow:1-6@0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or max(read_metrics(run), default=0) < 3:
        assert job.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if how == "stop file":
        (run / "stop").touch()
    else:
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGUSR1)
    text, _ = job.communicate(timeout=120)
    stopped = events(run, "stop")[-1]
    assert 3 <= stopped["step"] < 14, text[-3000:]
    assert checkpoints(run / "checkpoint") == [stopped["step"]]
    assert (run / "stop").exists() == (how == "stop file")  # a user's file stays until the user removes it
    assert job.returncode == 0, text[-3000:]
    slow = {step: row["straggler"] for step, row in read_metrics(run).items() if 2 <= step <= min(6, stopped["step"])}
    # Half a second slower a step: SLOW of tests/faulty_train.py.
    assert {found["rank"] for found in slow.values()} == {0}
    assert all(found["seconds"] - found["median"] == pytest.approx(0.5, abs=0.25) for found in slow.values())
    assert f"step 2: rank 0 on {socket.gethostname()} is slow" in text
    if how == "USR1 to one rank":
        train(DEMO, sample, run, *options, nproc=2)
        train(DEMO, sample, tmp_path / "whole", *options, nproc=2)
        keys = ("loss", "ce", "dispersion", "grad_norm", "lr")
        got, expected = (
            {s: [r[k] for k in keys] for s, r in read_metrics(tmp_path / n).items()} for n in ("run", "whole")
        )
        assert got == expected


def test_budget(sample, tmp_path):
    """Tokens decide the steps and the schedule; stop_at_tokens ends early and changes neither. (In tests/slurm too.)"""
    run = tmp_path / "run"
    options = (
        *SHORT,
        "--training.steps",
        "-1",
        "--budget.tokens",
        str(16 * 32 * 6 - 5),
        "--checkpoint.interval",
        "100",
    )
    train(DEMO, sample, tmp_path / "whole", *options)
    expected = read_metrics(tmp_path / "whole")
    assert list(expected) == [1, 2, 3, 4, 5, 6]
    plan = make_plan(load_config(["--job.config_file", str(DEMO), *options]), Machine(1, 1))
    assert (plan.batch.steps, plan.batch.total_tokens) == (6, expected[6]["tokens"])
    done = train(DEMO, sample, run, *options, "--budget.stop_at_tokens", str(16 * 32 * 4))
    assert "tokens: 2,048 of 2,048 (100.0%" in done.stdout
    assert events(run)[-1]["reason"] == "budget.stop_at_tokens"
    assert checkpoints(run / "checkpoint") == [4]
    done = train(DEMO, sample, run, *options, "--budget.stop_at_tokens", str(16 * 32 * 4))
    assert "stop_at_tokens was already reached" in done.stdout
    done = train(DEMO, sample, run, *options)
    assert "tokens: 3,072 of 3,072 (100.0%" in done.stdout
    got = read_metrics(run)
    assert {s: (r["loss"], r["lr"], r["tokens"]) for s, r in got.items()} == {
        s: (r["loss"], r["lr"], r["tokens"]) for s, r in expected.items()
    }
    assert json.loads((run / "config.json").read_text())["training"]["steps"] == 6
