"""Whole runs through the command line, in processes of their own."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch

from tests.command_line import DEMO, ROOT, children, environment, kill_tree, rank_environment, train
from tests.distributed import free_port
from titan_disp.condensation.record import load_steps
from titan_disp.run.reader import read_events, read_json_lines, read_metrics, read_rows

SHORT = (
    *("--training.seq_len", "64", "--metrics.log_freq", "1", "--lr_scheduler.warmup_steps", "2"),
    *("--condensation.interval", "0"),  # seconds of every run, and tested elsewhere
    *("--optimizer.lr", "4e-3"),  # with the demo's, Adam's first steps amplify the order of sums beyond the tolerances
)
pytestmark = pytest.mark.slow


def terms(metrics, *names):
    return {step: tuple(record[name] for name in names) for step, record in metrics.items()}


def test_demo(sample, tmp_path):
    """Two ranks: the loss falls, both terms are logged apart, the folder is complete, a second run says so."""
    run = tmp_path / "run"
    options = ("--training.steps", "40", "--lr_scheduler.warmup_steps", "4", "--training.seq_len", "128")
    done = train(DEMO, sample, run, *options, nproc=2)
    metrics = read_metrics(run)
    assert list(metrics) == [1, 10, 20, 30, 40]
    assert metrics[40]["ce"] < metrics[1]["ce"] - 1
    for step, record in metrics.items():
        assert record["loss"] == pytest.approx(record["ce"] + 0.1 * record["dispersion"], abs=1e-5)
        assert record["tokens"] == step * 16 * 128
        assert record["grad_norm"] > 0
    config = json.loads((run / "config.json").read_text())
    assert config["dispersion"]["enabled"]
    assert config["training"]["steps"] == 40
    assert json.loads((run / "environment.json").read_text())["world_size"] == 2
    assert [e["event"] for e in read_json_lines(run / "events.jsonl")] == ["start", "checkpoint", "complete"]
    assert (run / "checkpoint" / "step-40" / ".metadata").is_file()
    goodput = r"Goodput of this start: \d+\.\d%, 0:\d\d:\d\d in steps that count, of 0:\d\d:\d\d; .*start-up 0:"
    assert re.search(goodput, done.stdout)
    spent, (begin, *_, end) = metrics[40]["spent"], read_events(run)
    assert begin["allocated"] < begin["time"]
    assert end["spent"]["checkpoints"] > 0  # the last step's, which is saved after its row
    assert 0 < spent["steps"] < sum(end["spent"].values()) <= end["time"] - begin["allocated"] + 0.01
    assert f"Checkpoints: {run}/checkpoint" in done.stdout
    assert f"tensorboard --logdir {run}/tb" in done.stdout
    cosines = done.stdout.split("embedding → last block: ")[-1].split("  ")[0].split()
    measured = load_steps(run / "condensation")
    assert list(measured) == [0, 10, 20, 30, 40]
    assert cosines == [f"{c:.2f}" for c in measured[40].mean_cosine[:-1]]
    for step, one in measured.items():  # the last lines: how condensation went
        numbers = [f"{one.cross_entropy:.3f}", f"{one.mean_cosine[1:7].mean():.2f}", f"{one.mean_cosine[6]:.2f}"]
        assert re.search(rf" {step} +{' +'.join(map(re.escape, numbers))}", done.stdout.split("On held-out text")[1])

    again = train(DEMO, sample, run, *options, nproc=2)
    assert "already complete: step 40 of 40" in again.stdout
    assert read_metrics(run) == metrics

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tb")).Reload()
    assert {
        "loss_metrics/cross_entropy",
        "loss_metrics/dispersion",
        "loss_metrics/global_avg_loss",
        "grad_norm",
    } <= set(board.Tags()["scalars"])
    assert [e.step for e in board.Scalars("n_tokens_seen")] == [1, 10, 20, 30, 40]
    assert board.Scalars("n_tokens_seen")[-1].value == 40 * 16 * 128


def two_nodes(sample, run, start, *options):
    """A start of the run as SLURM makes it: a torchrun of one rank on each of two nodes, with steps of 0.2 s or more."""
    start = str(start)
    shared = environment() | {
        **{"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": start, "GLOO_SOCKET_IFNAME": "lo"},
        **{
            "TITAN_DISP_START": f"7.{start}",
            "TITAN_DISP_ENDPOINT": f"127.0.0.1:{free_port()}",
            "TITAN_DISP_NPROC": "1",
        },
        **{"TITAN_DISP_PYTHON": sys.executable, "TITAN_DISP_LOCAL": str(run.parent), "TITAN_DISP_RUN": str(run)},
        **{"TITAN_DISP_MODULE": "tests.faulty_train", "FAULTS": "slow:1-1000@0", "SLOW": "0.2"},
    }
    command = [
        *("bash", ROOT / "slurm" / "node.sh", "train", "--job.config_file", DEMO, "--job.dump_folder", run),
        *("--model.hf_assets_path", f"{sample}/tokenizer", "--training.dataset_path", sample, *options),
    ]
    run.mkdir(exist_ok=True)
    with open(run / "log", "a") as log:
        return [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=shared | {"SLURM_NODEID": str(node)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            for node in (0, 1)
        ]


def count(file, of):
    return file.read_bytes().count(of) if file.exists() else 0


@pytest.mark.night
@pytest.mark.timeout(3600)
def test_killed_at_random_moments_equals_uninterrupted(sample, tmp_path):
    """kill -9 of a node, or of one of its processes, at random moments: every loss ever written is right, bit for bit.

    Nothing lost: each start goes on from the newest checkpoint that was said to be complete, or from a newer one.
    KILLS says how many moments; a start takes some 15 seconds.
    """
    kills = int(os.environ.get("KILLS", "8"))
    steps = 20 + 8 * kills  # more than are trained between the kills
    options = (
        *(*SHORT, "--training.steps", str(steps), "--checkpoint.interval", "3", "--comm.train_timeout_seconds", "20"),
        # Tokens drawn and λ depend on the step, which a resume must know.
        *("--dispersion.estimator", "sampled", "--dispersion.max_tokens", "16"),
        *("--dispersion.warmup_steps", "3", "--dispersion.decay", "cosine", "--dispersion.final_coeff", "0.01"),
    )
    run, whole = tmp_path / "run", tmp_path / "whole"
    began = time.monotonic()
    nodes = two_nodes(sample, whole, 0, *options)
    while not count(whole / "metrics.jsonl", b'"step"'):
        assert nodes[0].poll() is None, (whole / "log").read_text()[-4000:]
        time.sleep(0.05)
    startup = time.monotonic() - began
    assert [node.wait() for node in nodes] == [0, 0]

    moments = random.Random(0)
    for start in range(kills):
        nodes = two_nodes(sample, run, start, *options)
        if start % 3 == 0:  # while it starts
            time.sleep(moments.uniform(0, startup))
        else:  # while it trains and saves: after its first step, or after its first save, so that there is one to resume from
            file, of = (run / "metrics.jsonl", b'"step"') if start % 3 == 1 else (run / "events.jsonl", b'"checkpoint"')
            before = count(file, of)
            while count(file, of) == before and nodes[0].poll() is None:
                time.sleep(0.02)
            time.sleep(moments.uniform(0, 3))
        assert None in (node.poll() for node in nodes), (run / "log").read_text()[-4000:]
        victim = moments.choice([node for node in nodes if node.poll() is None]).pid
        kill_tree(moments.choice([victim, *children(victim)]))
        time.sleep(moments.uniform(0, 1))
        for node in nodes:  # srun --kill-on-bad-exit
            kill_tree(node.pid)
            node.wait()
    nodes = two_nodes(sample, run, kills, *options)
    assert [node.wait() for node in nodes] == [0, 0], (run / "log").read_text()[-4000:]

    keys = ("loss", "ce", "dispersion", "grad_norm", "lr")
    expected = {row["step"]: [row[key] for key in keys] for row in read_rows(whole)}
    assert sorted(expected) == list(range(1, steps + 1))
    rows = [(row["step"], [row[key] for key in keys]) for row in read_rows(run)]
    assert all(values == expected[step] for step, values in rows)
    assert {step for step, _ in rows} == set(expected)
    saved, resumed = 0, 0
    for event in read_json_lines(run / "events.jsonl"):
        if event["event"] == "checkpoint":
            saved = event["step"]
        elif event["event"] in ("start", "resume"):
            assert event["step"] >= saved
            resumed += event["step"] > 0
    assert resumed >= kills // 3  # of three kills in a row, one comes after a save


def test_dispersion_off_is_stock_torchtitan(sample, hf_tokenizer, tmp_path):
    """TorchTitan's own registered Qwen3, in its own process without this plugin's spec, from the same weights and data."""
    common = (
        *("--model.flavor", "debugmodel", "--model.hf_assets_path", str(hf_tokenizer), *SHORT),
        *("--training.steps", "4", "--training.global_batch_size", "4", "--checkpoint.interval", "100"),
    )
    off = ("--dispersion.no-enabled",)
    ours = tmp_path / "ours"
    seed = tmp_path / "seed"
    train(DEMO, sample, seed, *common, *off, "--checkpoint.create_seed_checkpoint")
    train(DEMO, sample, ours, *common, *off)
    stock = tmp_path / "stock"
    script = """
import json, sys
import dataclasses
import titan_disp.plugin  # the CPU's device type, and the spec that this run does not use
import torchtitan.train as train
from titan_disp.data.loader import build_dataloader
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
# TorchTitan's own spec, but for the data, which must be the same in both runs.
register_train_spec("qwen3", dataclasses.replace(get_train_spec("qwen3"), build_dataloader_fn=build_dataloader))
original = train.Trainer.forward_backward_step
losses = []
def recorded(self, **kwargs):
    loss = original(self, **kwargs)
    losses.append((self.step, loss.item()))
    return loss
class Recorder(train.Trainer):
    forward_backward_step = recorded
train.main(Recorder)
json.dump({"losses": losses}, open(sys.argv[-1] + ".json", "w"))
"""
    result = tmp_path / "stock"
    environ = rank_environment()
    arguments = [
        *("--job.config_file", str(DEMO), "--training.dataset_path", str(sample), "--model.name", "qwen3", *common),
        *("--checkpoint.initial_load_path", str(seed / "checkpoint" / "step-0"), "--job.dump_folder", str(result)),
    ]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    stock_losses: dict[int, float] = {}
    for step, loss in json.loads((tmp_path / "stock.json").read_text())["losses"]:
        stock_losses[step] = stock_losses.get(step, 0.0) + loss
    assert stock.is_dir()
    for step, record in read_metrics(ours).items():
        assert record["loss"] == pytest.approx(stock_losses[step], abs=1e-6)
        assert record["dispersion"] == 0
    assert len(stock_losses) == 4


def test_stock_trainer_loads_the_plugin(sample, tmp_path):
    """python -m torchtitan.train with custom_import: model, loss and separate terms work there too."""
    environ = rank_environment()
    arguments = [
        "--job.config_file",
        str(DEMO),
        "--training.dataset_path",
        str(sample),
        *SHORT,
        "--training.steps",
        "2",
    ]
    arguments += ["--model.hf_assets_path", f"{sample}/tokenizer", "--job.dump_folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan.train", *arguments],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "dispersion: -0." in done.stdout
    assert "this is TorchTitan's own trainer" in done.stdout
    metrics = read_metrics(tmp_path)
    assert metrics[2]["loss"] == pytest.approx(metrics[2]["ce"] + 0.1 * metrics[2]["dispersion"], abs=1e-5)
    assert any((tmp_path / "tb").iterdir())


@pytest.mark.night
def test_demo_config_on_four_ranks_with_tp(sample, tmp_path):
    """The demo's config unchanged on FSDP2 × TP 2 follows the same curve as on FSDP2."""
    options = (*SHORT, "--training.steps", "2", "--checkpoint.no-enable")
    train(DEMO, sample, tmp_path / "fsdp", *options, nproc=2)
    train(DEMO, sample, tmp_path / "fsdp_tp", *options, "--parallelism.tensor_parallel_degree", "2", nproc=4)
    for name in ("loss", "ce", "dispersion", "grad_norm"):
        values = [[r[name] for r in read_metrics(tmp_path / run).values()] for run in ("fsdp", "fsdp_tp")]
        # fp32 in another order of summation, two steps: 1e-5 relative leaves room; a wrong scale would be far off.
        assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_one_step_of_the_full_model(sample, tmp_path):
    """Qwen3-0.6B itself, one rank, a short sequence; weights in bf16, as most of the time is taken by fresh memory."""
    options = ("--model.flavor", "0.6B", "--training.steps", "1", "--checkpoint.no-enable")
    options += ("--training.local_batch_size", "1", "--training.global_batch_size", "1", "--training.dtype", "bfloat16")
    train(DEMO, sample, tmp_path, *SHORT, *options, "--training.seq_len", "32")
    (record,) = read_metrics(tmp_path).values()
    assert abs(record["ce"] - torch.tensor(151936.0).log()) < 1  # an untrained model guesses
    assert -0.8 < record["dispersion"] < -0.2  # D/τ lies between arccos(0.75)/π and 1 − that


@pytest.mark.night
def test_640_fake_ranks(sample, tmp_path):
    """The paper's mesh (HSDP 80 × 8) on the nano model, rank 0 of 640, with fake communication."""
    arguments = [
        *("--job.config_file", str(ROOT / "train_configs" / "qwen3_0.6b_c4.toml"), "--model.flavor", "nano"),
        *("--model.hf_assets_path", f"{sample}/tokenizer", "--training.dataset_path", str(sample)),
        *(
            "--comm.mode",
            "fake_backend",
            "--training.steps",
            "1",
            "--budget.tokens",
            "0",
            "--training.seq_len",
            "128",
            "--compile.no-enable",
        ),
        *("--checkpoint.no-enable", "--job.dump_folder", str(tmp_path), "--optimizer.implementation", "foreach"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "titan_disp.train", *arguments],
        cwd=ROOT,
        env=environment() | {"NGPU": "640", "LOCAL_RANK": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "dp_replicate=80, dp_shard=8" in done.stdout
    assert "Applied HSDP" in done.stdout
    assert read_metrics(tmp_path)[1]["tokens"] == 1920 * 128
    assert os.path.isfile(tmp_path / "config.json")


@pytest.mark.night
def test_elastic_resume(sample, tmp_path):
    """4 ranks (HSDP 2×2) → checkpoint → 2 (TP) → checkpoint → 1: the same batches and losses as one uninterrupted run (FSDP)."""
    options = (
        *SHORT,
        "--checkpoint.interval",
        "3",
        "--training.local_batch_size",
        "2",
        "--lr_scheduler.total_steps",
        "9",
    )
    train(DEMO, sample, tmp_path / "whole", *options, "--training.steps", "9", nproc=2)
    run = tmp_path / "elastic"
    hsdp, tp = ("--parallelism.data_parallel_replicate_degree", "2"), ("--parallelism.tensor_parallel_degree", "2")
    for nproc, steps, mesh in ((4, "3", hsdp), (2, "6", tp), (1, "9", ())):
        train(DEMO, sample, run, *options, "--training.steps", steps, *mesh, nproc=nproc)
    expected, got = read_metrics(tmp_path / "whole"), read_metrics(run)
    assert list(got) == list(range(1, 10))
    for step, record in got.items():
        # The same batches exactly; losses to fp32 in another order of summation, which Adam's first steps amplify.
        counters = ("documents", "text_bytes", "epoch")
        assert {k: record["data"][k] for k in counters} == {k: expected[step]["data"][k] for k in counters}
        assert record["ce"] == pytest.approx(expected[step]["ce"], rel=1e-4)
        assert record["dispersion"] == pytest.approx(expected[step]["dispersion"], abs=1e-3)
        assert record["tokens"] == step * 16 * 64
    resumes = [e for e in read_json_lines(run / "events.jsonl") if e["event"] == "resume"]
    assert [e["step"] for e in resumes] == [3, 6]
    assert resumes[0]["config_changes"]["training.steps"] == [3, 6]


@pytest.mark.night
def test_resume_with_other_data(sample, tmp_path):
    """Refused by name on every rank; with the switch, streams begin a new epoch and tokens seen are kept."""
    options = (*SHORT, "--checkpoint.interval", "2", "--training.steps")
    run = tmp_path / "run"
    train(DEMO, sample, run, *options, "2")
    other = ("--training.seq_len", "32")
    refused = train(DEMO, sample, run, *options, "4", *other, check=False)
    assert refused.returncode == 2
    assert (
        "titan-disp: error: the checkpoint was written with other data: training.seq_len: 64 then, 32 now"
        in refused.stderr
    )
    assert "Traceback" not in refused.stdout + refused.stderr
    training = json.loads((run / "config.json").read_text())["training"]
    assert (training["steps"], training["seq_len"]) == (2, 64)  # as the run was trained, not as the refused start asked
    train(DEMO, sample, run, *options, "4", *other, "--stream.on_mismatch", "restart", nproc=2)
    metrics = read_metrics(run)
    assert list(metrics) == [1, 2, 3, 4]
    assert metrics[3]["data"]["epoch"] == 1
    assert "streams_restarted" in [e["event"] for e in read_json_lines(run / "events.jsonl")]


@pytest.mark.night
def test_bad_data_stops_all_ranks(sample, tmp_path):
    """on_bad_data = "fail" on one rank's file: both ranks end, with the reason and without a hang."""
    broken = tmp_path / "broken"
    shutil.copytree(sample, broken)
    for shard in sorted((broken / "en").glob("c4-train*")):
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    run = tmp_path / "run"
    options = (*SHORT, "--training.steps", "200", "--checkpoint.no-enable", "--training.seq_len", "512")
    done = train(DEMO, broken, run, *options, "--stream.on_bad_data", "fail", nproc=2, check=False)
    assert done.returncode == 2
    # The reason stands at the end of the console, whatever the other rank said of its lost neighbour: above torchrun's lines
    # where rank 0 was the first to fail, else below them.
    assert "is damaged and ends early: EOFError" in "".join(done.stderr.splitlines()[-4:])
