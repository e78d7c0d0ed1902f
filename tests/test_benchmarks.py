"""The benchmarks run and print what they say, on little data."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks.measurement import busiest_rank, cost, heatmaps
from tests.command_line import ROOT, environment
from titan_disp.config.load import load_config


def rows(script, *options):
    argv = [sys.executable, str(ROOT / "benchmarks" / script), *options, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)["rows"]


@pytest.mark.slow
def test_dispersion():
    found = rows(
        "dispersion.py", "--n", "300", "--f", "16", "--estimators", "naive", "floor", "exact", "moments", "sampled"
    )
    assert [r["estimator"] for r in found] == ["naive", "floor", "exact", "moments", "sampled"]
    for row in found:
        assert (row["n"], row["f"], row["b"], row["dtype"]) == (300, 16, 1, "float32")
        assert row["seconds"] > 0
        assert row["peak_bytes"] >= 0
    assert found[0]["gradient_cosine"] > 0.99  # plain autograd clamps hard


@pytest.mark.slow
def test_step():
    options = (
        "--overrides=--model.overrides=n_layers=2",
        "--seq-len",
        "64",
        "--steps",
        "1",
        "--rounds",
        "1",
        "--estimators",
        "off",
        "exact",
    )
    found = rows("step.py", *options)
    assert [r["estimator"] for r in found] == ["off", "exact"]
    assert all(r["tokens_per_second"] > 0 for r in found)
    assert found[0]["overhead"] == found[0]["cpu_overhead"] == found[0]["loss_cpu_overhead"] == 0
    assert 0 < found[1]["loss_cpu_seconds"] < found[1]["cpu_seconds"]
    assert found[1]["loss_alone_cpu_seconds"] > 0


def test_checkpoint():
    found = rows("checkpoint.py", "--gib", "0.001", "--tensors", "2", "--rounds", "2")
    assert [r["what"] for r in found] == ["dcp", "pieces", "hashed", "verify"]
    for row in found:
        assert row["gigabytes"] == pytest.approx(2**30 * 1e-12, rel=1e-4)
        assert 0 < row["least"] <= row["seconds"]
        assert len(row["all"]) == 2
    assert found[0]["ratio"] == 1


def test_cost_of_a_measurement():
    """The 0.6B on 8 to 640 GPUs, against the arithmetic of docs/measurements.md: at most 0.2 % of the time."""
    job_config = load_config(["--job.config_file", str(ROOT / "train_configs" / "qwen3_0.6b_c4.toml")])
    found = {}
    for ranks, step_seconds in ((8, 6.8), (64, 0.858), (640, 0.088)):
        plan = SimpleNamespace(
            machine=SimpleNamespace(gpu="H100", mfu=0.4),
            model=SimpleNamespace(flops=1.96e16),
            mesh=SimpleNamespace(data_parallel=ranks),
            batch=SimpleNamespace(steps=39_673, global_batch_size=1920, local_batch_size=1, seq_len=2048),
            time=SimpleNamespace(step_seconds=step_seconds),
        )
        found[ranks] = cost(job_config, plan, {"eigenvalues": 0.014, "heatmap": 0.16, "files": 0.003})
    assert found[640] == {
        "layers": 1,
        "forward": pytest.approx(1.96e16 / 1920 / 3 / (0.4 * 989.4e12)),  # 8.6 ms
        "cross-entropy": pytest.approx(2048 * 151_936 * 20 / 3.35e12),  # 1.9 ms
        "products": pytest.approx(4 * 512**2 * 1024 / 60e12),  # 0.02 ms
        "eigenvalues": 0.014,
        "files": 0.003,
        "heatmaps": 0.16 * 17 / 80,
        "all": pytest.approx(0.0615, abs=1e-4),
        "steps": 44,
        "part": pytest.approx(0.0014, abs=1e-5),
    }
    assert [found[ranks]["layers"] for ranks in (8, 64)] == [30, 4]
    assert max(one["part"] for one in found.values()) <= 0.002


def test_who_measures_most():
    """Of 8 sequences and 30 layers: 2 × 30 on 4 ranks; with batches of 3, all go through the model, again and again."""
    assert busiest_rank(4, 8, 1, 30) == (2, 60)
    assert busiest_rank(1, 8, 4, 30) == (8, 240)
    assert busiest_rank(8, 8, 3, 30) == (3, 30)
    assert heatmaps(range(0, 5000, 500)) == 8  # 0, 500, 1000, 1500, 2000, 2500, 3500, 4500
