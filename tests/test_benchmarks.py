"""The benchmarks run and print what they say, on little data."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro

from tests.command_line import ROOT, environment
from tests.pages import changed, loaded, understood


@pytest.fixture
def printed(monkeypatch, capsys):
    """Run a benchmark in this process; the rows that it prints."""

    def run(name, *words):
        monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as Python does for a script: one imports another by its name
        module = importlib.import_module(f"benchmarks.{name}")
        monkeypatch.setattr(module, "in_a_fresh_process", lambda function, *args: function(*args), raising=False)
        monkeypatch.setattr("sys.argv", [name, *words, "--json"])
        module.main(*([tyro.cli(module.Options)] if name == "dispersion" else []))
        return json.loads(capsys.readouterr().out)["rows"]

    return run


def test_dispersion(printed):
    estimators = ["naive", "floor", "exact", "moments", "sampled"]
    found = printed("dispersion", "--n", "300", "--f", "16", "--estimators", *estimators)
    assert [r["estimator"] for r in found] == estimators
    for row in found:
        assert (row["n"], row["f"], row["b"], row["dtype"]) == (300, 16, 1, "float32")
        assert row["seconds"] > 0
        assert isinstance(row["peak_bytes"], int)  # in one process, the high-water mark need not rise
    assert found[0]["gradient_cosine"] > 0.99  # plain autograd clamps hard


def test_checkpoint(printed):
    found = printed("checkpoint", "--gib", "0.001", "--tensors", "2", "--rounds", "2")
    assert [r["what"] for r in found] == ["dcp", "pieces", "hashed", "verify"]
    for row in found:
        assert row["gigabytes"] == pytest.approx(2**30 * 1e-12, rel=1e-4)
        assert 0 < row["least"] <= row["seconds"]
        assert len(row["all"]) == 2
    assert found[0]["ratio"] == 1


@pytest.mark.slow
def test_step():
    options = "--overrides=--model.overrides=n_layers=2 --seq-len 64 --steps 1 --rounds 1 --estimators off exact --json"
    argv = [sys.executable, str(ROOT / "benchmarks" / "step.py"), *options.split()]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    off, exact = json.loads(done.stdout)["rows"]
    assert (off["estimator"], exact["estimator"]) == ("off", "exact")
    assert min(off["tokens_per_second"], exact["tokens_per_second"]) > 0
    assert off["overhead"] == off["cpu_overhead"] == off["loss_cpu_overhead"] == 0
    assert 0 < exact["loss_cpu_seconds"] < exact["cpu_seconds"]
    assert exact["loss_alone_cpu_seconds"] > 0


def test_cost_of_a_measurement():
    """The 0.6B on 8 to 640 GPUs, against the arithmetic of docs/measurements.md: at most 0.2 % of the time."""
    from benchmarks.measurement import cost

    job_config, found = loaded(ROOT / "train_configs" / "qwen3_0.6b_c4.toml"), {}
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
    from benchmarks.measurement import busiest_rank, heatmaps

    assert busiest_rank(4, 8, 1, 30) == (2, 60)
    assert busiest_rank(1, 8, 4, 30) == (8, 240)
    assert busiest_rank(8, 8, 3, 30) == (3, 30)
    assert heatmaps(range(0, 5000, 500)) == 8  # 0, 500, 1000, 1500, 2000, 2500, 3500, 4500


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_checks_of_a_gpu(gpus, monkeypatch, tmp_path):
    """What make gpu runs are commands and configs that exist. With fewer GPUs, it says what they cannot run."""
    from benchmarks.gpu import Options, checks
    from titan_disp.config.checks import check_config

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    found = {check.name: check for check in checks(Options(tmp_path, Path("data/sample")), gpus)}
    several = {"selftest-ranks", "train-offload", "train-context", "train-async-tensor"}
    cannot = {name for name, check in found.items() if "two GPUs" in check.cannot}
    assert cannot == {8: set(), 1: several, 0: several - {"selftest-ranks"}}[gpus]
    assert (found["train-compile"].cannot == "") == (gpus > 0)
    for check in found.values():
        script, *words = check.words
        if script.startswith("benchmarks/"):
            tyro.cli(importlib.import_module(script.removesuffix(".py").replace("/", ".")).Options, args=words)
        if words[:1] == ["titan_disp.cli"]:
            name, options = understood(words[1:])
            if name == "train":
                config = loaded(*options.argv[1:])
                if not check.cannot and gpus:
                    check_config(changed(config, {"model.converters": []}), options.nproc)


def test_a_check_that_fails(monkeypatch, tmp_path, capsys):
    from benchmarks import gpu

    of_a_status = [
        gpu.Check(f"with-{n}", "a test", ("-c", f"import sys; print('said'); sys.exit({n})")) for n in (0, 3)
    ]
    never = gpu.Check("never", "a test", ("-c", "1 / 0"), "it needs two GPUs")
    monkeypatch.setattr(gpu, "checks", lambda options, gpus: [*of_a_status, never])
    assert gpu.main(gpu.Options(tmp_path / "out")) == 1
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert summary in capsys.readouterr().out
    results = [line.split("|")[3].strip() for line in summary.splitlines() if "| a test" in line]
    assert results == ["ok", "FAILED with status 3", "not run: it needs two GPUs"]
    assert (tmp_path / "out" / "with-3.txt").read_text() == "said\n"
