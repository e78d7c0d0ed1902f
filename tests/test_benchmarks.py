"""The benchmarks run and print what they say, on little data."""

import importlib
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import tyro

from tests.command_line import ROOT, SECONDS, environment
from tests.pages import loaded
from titan_disp.dispersion import DispersionLoss, kernels, triton_pairs
from titan_disp.dispersion.cost import cost_of
from titan_disp.dispersion.variants.paper import angular_pair


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
    found = printed("checkpoint", "--gib 0.001 --rounds 2")
    assert [r["what"] for r in found] == ["dcp", "hashed", "pieces", "verify"]
    for row in found:
        assert row["seconds"] > 0
        assert row["cpu_seconds"] > 0


def results_of(script, options):
    """Return what a benchmark prints in a process of its own."""
    argv = [sys.executable, str(ROOT / "benchmarks" / script), *options.split()]
    done = subprocess.run(
        [*argv, "--json"],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.night
def test_step():
    options = "--overrides=--model.overrides=n_layers=2 --seq-len 64 --steps 1 --rounds 1 --estimators off exact"
    off, exact = results_of("step.py", options)["rows"]
    assert (off["estimator"], exact["estimator"]) == ("off", "exact")
    assert off["overhead"] == 0 < exact["tokens_per_second"]
    overhead = exact["seconds"] / off["seconds"] - 1
    assert exact["overhead"] == pytest.approx(overhead, rel=1e-3)
    assert 0 < off["peak_bytes"] < exact["peak_bytes"]


@pytest.fixture
def gpu_cost(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("benchmarks.gpu_cost")


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (lambda x, rows: x + 1, 128 + 128),
        (lambda x, rows: x.mul_(x[:].view(4, 8)), 128 + 128 + 128),
        (lambda x, rows: x.zero_(), 128),
        (lambda x, rows: x.new_zeros(4, 8), 128),
        (lambda x, rows: x * x.new_empty(1).expand(4, 8), 128 + 4 + 128),
        (lambda x, rows: x[rows], 64 + 16 + 64),
        (lambda x, rows: x.index_put_((rows,), x[:2]), 64 + 16 + 64),
        (lambda x, rows: in_place(x, x.new_empty(2, 8), rows), 128 + 64 + 128 + 8),
    ],
)
def test_bytes_of_ops(gpu_cost, op, expected):
    """By hand, for x [4, 8] in float32, 128 bytes, and the numbers of two rows."""
    x = torch.empty(4, 8, device="meta")
    rows = torch.empty(2, dtype=torch.int64, device="meta")
    with gpu_cost.counting(amp=False) as counter:
        op(x, rows)
    assert (counter.other_bytes, counter.kernels) == (expected, 1)


@kernels.fused
def in_place(x, added, unused):
    """One kernel that reads and writes x, and returns two numbers in new memory."""
    return x.add_(1).add_(added.sum()).sum(-1)[:2].clone()


def test_count_of_a_product(gpu_cost):
    x = torch.empty(3, 4, 8, device="meta", requires_grad=True)
    with gpu_cost.counting(amp=False) as counter:
        y = torch.bmm(x.detach(), x.detach().transpose(1, 2))
        live_bytes = counter.live_bytes()
        del y
    assert counter.product_flops == 3 * 2 * 4 * 8 * 4
    assert (counter.other_bytes, counter.kernels) == (0, 1)
    assert (live_bytes, counter.live_bytes()) == (3 * 4 * 4 * 4, 0)


@pytest.mark.parametrize(
    # Of 3 × 3 tiles of 128 tokens (the last: 64), those below the diagonal are left out.
    ("mirrored", "pairs"),
    [(True, 320**2 - 128 * 128 - 64 * 256), (False, 320**2)],
)
def test_count_of_the_kernel_of_pairs(gpu_cost, mirrored, pairs):
    """One kernel that reads rows, columns and scales, and writes q and a sum for each
    tile, and another one that adds the sums.
    """
    x = torch.empty(2, 320, 64, dtype=torch.bfloat16, device="meta")
    pair = angular_pair(1.0, 0.25)
    with gpu_cost.counting(amp=False) as counter:
        scale = x.new_empty(2, 320, 1, dtype=torch.float32)
        tokens = triton_pairs.Tokens(x=x, scale=scale, marks=None)
        assert triton_pairs.takes(x, pair)
        assert not triton_pairs.takes(x.float(), pair)
        counter.other_bytes = counter.kernels = 0
        triton_pairs.span_sums(tokens, tokens, pair, mirrored=mirrored)
    assert counter.product_flops == 2 * 2 * pairs * 64
    sums = 2 * 9 * 4
    q = 2 * 320 * 320 * 2
    read = 2 * (2 * 320 * 64 * 2 + 2 * 320 * 4)
    assert counter.other_bytes == (read + q + sums) + (sums + 2 * 4)
    assert counter.kernels == 2


# Megabytes of passes that are not products, per layer of two. Of the code before the
# gradient was scaled, cast and added in one pass, an independent count had 857 + 201 in
# the first shape, and this one 1058.
MEGABYTES = {
    ("8x2048x1024:amp", "exact", "saved"): 789,
    ("8x2048x1024:amp", "exact", "hook"): 521,
    ("8x4096x1024:bfloat16", "exact", "hook"): 908,
    ("1x8192x1024:bfloat16", "exact", "hook"): 353,
    ("8x2048x1024:amp", "moments", "hook"): 1040,
    ("8x4096x1024:bfloat16", "moments", "hook"): 1684,
    ("8x2048x1024:amp", "sampled", "hook"): 234,
}


KERNEL_MEGABYTES = {
    ("8x2048x1024:amp", "exact", "hook"): 504,
    ("8x4096x1024:bfloat16", "exact", "hook"): 773,
    ("1x8192x1024:bfloat16", "exact", "hook"): 269,
}


def counts_of(results):
    return {(r["shape"], r["estimator"], r["way"]): r for r in results["counts"]}


def test_gpu_cost():
    results = results_of("gpu_cost.py", "--layers 2")
    counts = counts_of(results)
    for key, megabytes in KERNEL_MEGABYTES.items():
        assert counts[key]["other_bytes"] == pytest.approx(megabytes * 1e6, rel=3e-3)
    exact = counts["8x2048x1024:amp", "exact", "saved"]
    # Of 16 × 16 tiles of cosines, those below the diagonal are left out. Then the
    # product with z.
    cosines = (16 * 17 / 2) / 16**2
    assert exact["product_flops"] == (2 * cosines + 2) * 8 * 2048**2 * 1024
    assert {row["host_waits"] for row in counts.values()} == {0}

    assert {row["sent_bytes"] for row in counts.values()} == {0}
    exact, moments = (
        counts["1x8192x1024:bfloat16", estimator, "saved"]["H200_ms"]
        for estimator in ("exact", "moments")
    )
    assert moments / exact == pytest.approx(0.34, abs=0.005)  # docs/benchmarks.md


def test_gpu_cost_of_a_sequence_on_eight_ranks():
    options = "--layers 2 --ranks 8 --shapes 1x1024x1024:bfloat16"
    counts = counts_of(results_of("gpu_cost.py", options))
    exact, moments = (
        counts["1x1024x1024:bfloat16", estimator, "saved"]
        for estimator in ("exact", "moments")
    )
    # of z in bf16, and of M in float32, twice
    assert exact["sent_bytes"] == pytest.approx(7 / 8 * 8192 * 1024 * 2, rel=1e-3)
    assert moments["sent_bytes"] == pytest.approx(7 / 8 * 8 * 1024**2, rel=0.05)
    # The collectives take less time than what they save.
    assert 0 < moments["H200_ms"] < 0.6 * exact["H200_ms"]


def test_gpu_cost_without_the_kernel(monkeypatch):
    monkeypatch.setenv("TITAN_DISP_TRITON", "0")
    counts = counts_of(results_of("gpu_cost.py", "--layers 2"))
    for key, megabytes in MEGABYTES.items():
        assert counts[key]["other_bytes"] == pytest.approx(megabytes * 1e6, rel=3e-3)
    for (shape, estimator, way), row in counts.items():
        if way == "hook" and estimator != "sampled":
            saved = counts[shape, estimator, "saved"]
            assert row["other_bytes"] < saved["other_bytes"]
            assert row["saved_bytes"] < 100 < saved["saved_bytes"]
    assert {row["host_waits"] for row in counts.values()} == {0}
    # what the plan takes for tokens in bf16, in the way of the trainer
    for estimator in ("exact", "moments", "sampled"):
        loss = DispersionLoss(estimator=estimator)
        for shape, sequences, tokens in (
            ("8x4096x1024:bfloat16", 8, 4096),
            ("1x8192x1024:bfloat16", 1, 8192),
        ):
            of_sequence = cost_of(loss, tokens, features=1024, shards=1)
            other_bytes = counts[shape, estimator, "hook"]["other_bytes"]
            assert sequences * of_sequence.bytes == pytest.approx(other_bytes, rel=0.15)

    exact = counts["8x2048x1024:amp", "exact", "saved"]
    # of two blocks, three of four tiles of cosines, and their product with z
    assert exact["product_flops"] == (2 * 3 / 4 + 2) * 8 * 2048**2 * 1024
    # a gradient in float32, and the loss
    assert exact["saved_bytes"] == pytest.approx(4 * 8 * 2048 * 1024, rel=1e-5)
    assert 28 * exact["H200_ms"] == pytest.approx(13.8, abs=0.1)
    moments = counts["8x4096x1024:bfloat16", "moments", "saved"]
    # M, its product with z, and the cosines with 64 tokens of each sequence
    assert moments["product_flops"] == (4 * 1024 + 2 * 64) * 8 * 4096 * 1024


@pytest.mark.slow
def test_gpu_cost_on_this_machine():
    options = "--layers 2 --shapes 2x64x16:float32 --estimators exact --measure"
    counts = counts_of(results_of("gpu_cost.py", options))
    assert counts.keys() == {("2x64x16:float32", "exact", w) for w in ("saved", "hook")}
    assert all(row["measured_ms"] > 0 for row in counts.values())


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
