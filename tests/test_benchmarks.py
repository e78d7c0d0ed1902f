"""The benchmarks run and print what they say, on little data."""

import importlib
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tyro

from tests.command_line import ROOT, SECONDS, environment
from tests.pages import changed, loaded, understood


@pytest.fixture
def printed(monkeypatch, capsys):
    def run(name, words):
        # As Python does for a script: one imports another by its name
        monkeypatch.syspath_prepend(ROOT / "benchmarks")
        module = importlib.import_module(f"benchmarks.{name}")
        monkeypatch.setattr(
            module,
            "in_a_fresh_process",
            lambda function, *args: function(*args),
            raising=False,
        )
        monkeypatch.setattr("sys.argv", [name, *words.split(), "--json"])
        module.main(*([tyro.cli(module.Options)] if name == "dispersion" else []))
        return json.loads(capsys.readouterr().out)["rows"]

    return run


def test_dispersion(printed):
    found = printed(
        "dispersion", "--n 300 --f 16 --estimators naive floor exact moments sampled"
    )
    assert [r["estimator"] for r in found] == [
        "naive",
        "floor",
        "exact",
        "moments",
        "sampled",
    ]
    for row in found:
        assert (row["n"], row["f"], row["seconds"] > 0) == (300, 16, True)
        # in one process, the high-water mark need not rise
        assert isinstance(row["peak_bytes"], int)
    assert found[0]["gradient_cosine"] > 0.99  # plain autograd clamps hard


def test_checkpoint(printed):
    found = printed("checkpoint", "--gib 0.001 --tensors 2 --rounds 2")
    assert [r["what"] for r in found] == ["dcp", "pieces", "hashed", "verify"]
    for row in found:
        assert row["gigabytes"] == pytest.approx(2**30 * 1e-12, rel=1e-4)
        assert (0 < row["least"] <= row["seconds"], len(row["all"])) == (True, 2)


@pytest.mark.night
def test_step():
    options = "--overrides=--model.overrides=n_layers=2 --seq-len 64 --steps 1 --rounds 1 --estimators off exact --json"
    argv = [sys.executable, str(ROOT / "benchmarks" / "step.py"), *options.split()]
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    off, exact = json.loads(done.stdout)["rows"]
    assert (off["estimator"], exact["estimator"]) == ("off", "exact")
    assert off["overhead"] == off["cpu_overhead"] == off["loss_cpu_overhead"] == 0
    assert 0 < exact["loss_cpu_seconds"] < exact["cpu_seconds"]


def test_cost_of_a_measurement(monkeypatch):
    """The 0.6B on 8 to 640 GPUs, against arithmetic by hand: at most 0.2 % of the time
    (docs/measurements.md).
    """
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from benchmarks.measurement import cost
    from titan_disp.config.command_options import Machine

    job_config = loaded(ROOT / "train_configs" / "qwen3_0.6b_c4.toml")
    found = {}
    for ranks, step_seconds in ((8, 6.8), (64, 0.858), (640, 0.088)):
        plan = SimpleNamespace(
            machine=Machine(gpu="H100"),
            model=SimpleNamespace(flops=1.96e16),
            mesh=SimpleNamespace(data_parallel=ranks),
            batch=SimpleNamespace(
                steps=39_673, global_batch_size=1920, local_batch_size=1, seq_len=2048
            ),
            time=SimpleNamespace(step_seconds=step_seconds),
        )
        found[ranks] = cost(
            job_config, plan, {"eigenvalues": 0.014, "heatmap": 0.16, "files": 0.003}
        )
    # 8.6 ms of a forward, 1.9 of cross-entropy, 0.02 of products, 14 of eigenvalues, 34
    # of heatmaps, 3 of files
    assert found[640]["sum"] == pytest.approx(0.0615, abs=1e-4)
    assert [found[ranks]["layers"] for ranks in (8, 64, 640)] == [30, 4, 1]
    assert max(one["part"] for one in found.values()) <= 0.002


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_checks_of_a_gpu(gpus, monkeypatch):
    from benchmarks.gpu import Options, checks
    from titan_disp.checks import check_config

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    found = {check.name: check for check in checks(Options(), gpus)}
    several = {"selftest-ranks", "train-offload", "train-context", "train-async-tensor"}
    cannot = {name for name, check in found.items() if "two GPUs" in check.cannot}
    assert cannot == {8: set(), 1: several, 0: several - {"selftest-ranks"}}[gpus]
    assert (found["train-compile"].cannot == "") == (gpus > 0)
    for check in found.values():
        script, *words = check.words
        if script.startswith("benchmarks/"):
            tyro.cli(
                importlib.import_module(
                    script.removesuffix(".py").replace("/", ".")
                ).Options,
                args=words,
            )
        if words[:1] == ["titan_disp.cli"]:
            name, options = understood(words[1:])
            config = loaded(*options.argv[1:]) if name == "train" else None
            if config is not None and gpus and not check.cannot:
                check_config(changed(config, {"model.converters": []}), options.nproc)


def test_a_check_that_fails(monkeypatch, tmp_path, capsys):
    from benchmarks import gpu

    said = "import sys; print('said'); sys.exit({})"
    of_a_status = [
        gpu.Check(f"with-{n}", "a test", ("-c", said.format(n))) for n in (0, 3)
    ]
    never = gpu.Check("never", "a test", ("-c", "1 / 0"), "it needs two GPUs")
    monkeypatch.setattr(gpu, "checks", lambda options, gpus: [*of_a_status, never])
    assert gpu.main(gpu.Options(tmp_path / "out")) == 1
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert summary in capsys.readouterr().out
    results = [
        line.split("|")[3].strip()
        for line in summary.splitlines()
        if "| a test" in line
    ]
    assert results == ["ok", "FAILED with status 3", "not run: it needs two GPUs"]
    assert (tmp_path / "out" / "with-3.txt").read_text() == "said\n"
