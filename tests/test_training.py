"""Whole runs: against stock TorchTitan, on other numbers of ranks, and killed at random
moments.
"""

import dataclasses
import math
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command_line import (
    DEMO,
    ROOT,
    children,
    environment,
    faulty_python,
    kill_tree,
    rank_environment,
    train,
)
from tests.distributed import free_port, spawn
from titan_disp.run.reader import read_events, read_metrics, read_rows

SHORT = (
    *(
        "--training.seq_len",
        "64",
        "--metrics.log_freq",
        "1",
        "--lr_scheduler.warmup_steps",
        "2",
    ),
    *("--condensation.interval", "0"),  # seconds of every run, and tested elsewhere
    # with the demo's, Adam's first steps amplify the order of sums beyond the
    # tolerances
    *("--optimizer.lr", "4e-3"),
)


def two_nodes(sample, run, start, *options):
    """A start of the run as SLURM makes it: a torchrun of one rank on each of two
    nodes, with steps of 0.2 s or more.
    """
    shared = environment() | {
        **{
            "SLURM_NNODES": "2",
            "SLURM_JOB_ID": "7",
            "SLURM_RESTART_COUNT": str(start),
            "GLOO_SOCKET_IFNAME": "lo",
        },
        **{
            "TITAN_DISP_START": f"7.{start}",
            "TITAN_DISP_ENDPOINT": f"127.0.0.1:{free_port()}",
        },
        **{
            "TITAN_DISP_NPROC": "1",
            "TITAN_DISP_LOCAL": str(run.parent),
            "TITAN_DISP_PYTHON": faulty_python(run.parent),
        },
        **{"FAULTS": "slow:1-1000@0", "SLOW": "0.2"},
    }
    command = [
        *(
            "bash",
            ROOT / "slurm" / "node.sh",
            "train",
            run,
            "--job.config_file",
            DEMO,
            "--job.dump_folder",
            run,
        ),
        *(
            "--model.hf_assets_path",
            f"{sample}/tokenizer",
            "--training.dataset_path",
            sample,
            *options,
        ),
    ]
    run.mkdir(exist_ok=True)
    with open(run.parent / f"{run.name}.log", "a") as log:
        how = {"cwd": ROOT, "stdout": log, "stderr": log, "start_new_session": True}
        return [
            subprocess.Popen(command, env=shared | {"SLURM_NODEID": node}, **how)
            for node in ("0", "1")
        ]


def count(file, of):
    return file.read_bytes().count(of) if file.exists() else 0


@pytest.mark.night
@pytest.mark.timeout(3600)
def test_killed_at_random_moments_equals_uninterrupted(sample, tmp_path):
    """kill -9 of a node, or of one of its processes: every loss ever written is right,
    bit for bit, and nothing is lost.

    Each start goes on from the newest checkpoint that was said to be complete, or from
    a newer one. KILLS: how many moments.
    """
    kills = int(os.environ.get("KILLS", "8"))
    steps = 20 + 8 * kills  # more than are trained between the kills
    options = (
        *(
            *SHORT,
            "--training.steps",
            str(steps),
            "--checkpoint.interval",
            "3",
            "--comm.train_timeout_seconds",
            "20",
        ),
        # Tokens drawn and λ depend on the step, which a resume must know.
        *("--dispersion.estimator", "sampled", "--dispersion.max_tokens", "16"),
        *(
            "--dispersion.warmup_steps",
            "3",
            "--dispersion.decay",
            "cosine",
            "--dispersion.final_coeff",
            "0.01",
        ),
    )
    run = tmp_path / "run"
    whole = tmp_path / "whole"
    metrics = run / "metrics.jsonl"
    events = run / "events.jsonl"

    def log():
        return "".join(file.read_text()[-4000:] for file in tmp_path.glob("*.log"))

    assert [node.wait() for node in two_nodes(sample, whole, 0, *options)] == [0, 0], (
        log()
    )
    moments = random.Random(0)
    for start in range(kills):
        nodes = two_nodes(sample, run, start, *options)
        if start % 3 == 0:  # while it starts
            time.sleep(moments.uniform(0, 12))
        # while it trains and saves: after its first step, or after its first save, so
        # that there is one to resume from
        else:
            file, of = (
                (metrics, b'"step"') if start % 3 == 1 else (events, b'"checkpoint"')
            )
            before = count(file, of)
            while count(file, of) == before and nodes[0].poll() is None:
                time.sleep(0.02)
            time.sleep(moments.uniform(0, 3))
        running = [node for node in nodes if node.poll() is None]
        assert running, log()
        victim = moments.choice(running).pid
        kill_tree(moments.choice([victim, *children(victim)]))
        time.sleep(moments.uniform(0, 1))
        for node in nodes:  # srun --kill-on-bad-exit
            kill_tree(node.pid)
            node.wait()
    nodes = two_nodes(sample, run, kills, *options)
    assert [node.wait() for node in nodes] == [0, 0], log()

    keys = ("loss", "ce", "dispersion", "grad_norm", "lr")
    expected = {row["step"]: [row[key] for key in keys] for row in read_rows(whole)}
    assert sorted(expected) == list(range(1, steps + 1))
    rows = [(row["step"], [row[key] for key in keys]) for row in read_rows(run)]
    assert all(values == expected[step] for step, values in rows)
    assert {step for step, _ in rows} == set(expected)
    saved = 0
    resumed = 0
    for event in read_events(run):
        if event["event"] == "checkpoint":
            saved = event["step"]
        elif event["event"] in ("start", "resume"):
            assert event["step"] >= saved
            resumed += event["step"] > 0
    assert resumed >= kills // 3  # of three kills in a row, one comes after a save


def of_stock_torchtitan(sample, tokenizer, folder):
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
    from torchtitan.train import Trainer

    from tests.mesh import build, job_config
    from titan_disp.data.loader import build_dataloader

    options = (
        *SHORT,
        "--training.seq_len",
        "32",
        "--training.steps",
        "4",
        "--dispersion.no-enabled",
    )
    options += (
        "--model.flavor",
        "debugmodel",
        "--model.hf_assets_path",
        tokenizer,
        "--lr_scheduler.warmup_steps",
        "0",
    )
    ours = build(sample, Path(folder) / "ours", *options)
    weights = {
        name: value.clone() for name, value in ours.model_parts[0].state_dict().items()
    }
    ours.train()
    ours.close()
    register_train_spec(
        "qwen3",
        dataclasses.replace(
            get_train_spec("qwen3"), build_dataloader_fn=build_dataloader
        ),
    )
    losses = [0.0] * 5

    class Recorder(Trainer):
        def forward_backward_step(self, **kwargs):
            loss = super().forward_backward_step(**kwargs)
            losses[self.step] += loss.item()
            return loss

    stock = Recorder(
        job_config(sample, Path(folder) / "stock", *options, "--model.name", "qwen3")
    )
    stock.model_parts[0].load_state_dict(weights)
    stock.train()
    stock.close()
    rows = read_metrics(Path(folder) / "ours")
    assert [(step, row["dispersion"]) for step, row in rows.items()] == [
        (step, 0) for step in (1, 2, 3, 4)
    ]
    assert [row["loss"] for row in rows.values()] == pytest.approx(losses[1:], abs=1e-6)


@pytest.mark.slow
def test_dispersion_off_is_stock_torchtitan(sample, hf_tokenizer, tmp_path):
    spawn(1, of_stock_torchtitan, str(sample), str(hf_tokenizer), str(tmp_path))


def train_in_stock_trainer(sample, run, *options):
    """Train the demo in TorchTitan's own trainer, on one rank."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torchtitan.train", "--job.config_file", DEMO),
            *("--job.dump_folder", run, *options),
            *("--model.hf_assets_path", f"{sample}/tokenizer"),
            *("--training.dataset_path", sample),
        ],
        cwd=ROOT,
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    "masks", [(), ("--stream.document_mask", "--stream.restart_positions")]
)
def test_stock_trainer_loads_the_plugin(sample, tmp_path, masks):
    done = train_in_stock_trainer(
        sample, tmp_path, *SHORT, "--training.steps", "2", *masks
    )
    assert "  dispersion -0." in done.stdout
    assert "this is TorchTitan's own trainer" in done.stdout
    metrics = read_metrics(tmp_path)
    assert metrics[2]["loss"] == pytest.approx(
        metrics[2]["ce"] + 0.1 * metrics[2]["dispersion"], abs=1e-5
    )
    assert any((tmp_path / "tb").iterdir())


@pytest.mark.slow
def test_stock_trainer_resumes(sample, tmp_path):
    """TorchTitan's own trainer goes on from our checkpoint as ours does."""
    options = (*SHORT, "--checkpoint.enable", "--condensation.interval", "0")
    ours = tmp_path / "ours"
    stock = tmp_path / "stock"
    train(DEMO, sample, ours, *options, "--training.steps", "2")
    shutil.copytree(ours, stock)
    train(DEMO, sample, ours, *options, "--training.steps", "3")
    train_in_stock_trainer(sample, stock, *options, "--training.steps", "3")
    assert [row["step"] for row in read_rows(stock)] == [1, 2, 3]  # none came again
    expected = read_metrics(ours)[3]
    metrics = read_metrics(stock)[3]
    for name in ("ce", "dispersion"):
        assert metrics[name] == pytest.approx(expected[name], abs=1e-6)


@pytest.mark.night
def test_one_step_of_the_full_model(sample, tmp_path):
    """Qwen3-0.6B itself, one rank, a short sequence.

    In bf16, a CPU without instructions for it takes ten times as long.
    """
    batch = ("--training.local_batch_size", "1", "--training.global_batch_size", "1")
    options = (
        "--model.flavor",
        "0.6B",
        "--training.steps",
        "1",
        "--checkpoint.no-enable",
        *batch,
    )
    train(DEMO, sample, tmp_path, *SHORT, *options, "--training.seq_len", "32")
    (record,) = read_metrics(tmp_path).values()
    assert abs(record["ce"] - math.log(151936)) < 1  # an untrained model guesses
    # D/τ lies between arccos(0.75)/π and 1 − that
    assert -0.8 < record["dispersion"] < -0.2


def train_here(argv):
    """Train in the ranks that call this: they have imported everything."""
    from titan_disp.config.load import load_config
    from titan_disp.train import DispTrainer

    trainer = DispTrainer(load_config(argv))
    trainer.train()
    trainer.close()


@pytest.mark.night
def test_elastic_resume(sample, tmp_path):
    """4 ranks (HSDP 2×2) → checkpoint → 2 (TP) → checkpoint → 1: the same batches and
    losses as one uninterrupted run (FSDP).
    """
    options = (*SHORT, "--checkpoint.interval", "3", "--training.local_batch_size", "2")
    options += ("--lr_scheduler.total_steps", "9", "--training.steps")
    run = tmp_path / "elastic"
    whole = tmp_path / "whole"
    data = ("--model.hf_assets_path", f"{sample}/tokenizer")
    data += ("--training.dataset_path", str(sample), "--job.dump_folder")
    argv = ["--job.config_file", str(DEMO), *data]
    spawn(2, train_here, [*argv, str(whole), *options, "9"])
    hsdp = ("--parallelism.data_parallel_replicate_degree", "2")
    tp = ("--parallelism.tensor_parallel_degree", "2")
    for nproc, steps, mesh in ((4, "3", hsdp), (2, "6", tp), (1, "9", ())):
        spawn(nproc, train_here, [*argv, str(run), *options, steps, *mesh])
    expected = read_metrics(whole)
    got = read_metrics(run)
    assert list(got) == list(range(1, 10))
    for step, record in got.items():
        # The same batches exactly; losses to fp32 in another order of summation, which
        # Adam's first steps amplify.
        for counter in ("documents", "text_bytes", "epoch"):
            assert record["data"][counter] == expected[step]["data"][counter]
        assert record["ce"] == pytest.approx(expected[step]["ce"], rel=1e-4)
        assert record["dispersion"] == pytest.approx(
            expected[step]["dispersion"], abs=1e-3
        )
        assert record["tokens"] == step * 16 * 64
    resumes = [
        (e["step"], e["config_changes"]["training.steps"])
        for e in read_events(run)
        if e["event"] == "resume"
    ]
    assert resumes == [(3, [3, 6]), (6, [6, 9])]


@pytest.mark.night
def test_bad_data_stops_all_ranks(sample, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(sample, broken)
    for shard in sorted((broken / "en").glob("c4-train*")):
        os.truncate(shard, shard.stat().st_size // 2)
    options = (
        *SHORT,
        "--training.steps",
        "200",
        "--checkpoint.no-enable",
        "--training.seq_len",
        "512",
    )
    done = train(
        DEMO,
        broken,
        tmp_path / "run",
        *options,
        "--stream.on_bad_data",
        "fail",
        nproc=2,
        check=False,
    )
    assert done.returncode == 2
    # The end of the console: torchrun's lines stand below the reason where rank 0 was
    # the first to fail, else above it.
    assert "is damaged and ends early: EOFError" in "".join(
        done.stderr.splitlines()[-4:]
    )
