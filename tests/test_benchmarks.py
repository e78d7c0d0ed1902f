"""The benchmarks run and print what they say, on little data."""

import json
import subprocess
import sys

import pytest

from tests.cluster_of_one import ROOT, environment


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
    options = ("--seq-len", "64", "--steps", "1", "--rounds", "1", "--estimators", "off", "exact")
    found = rows("step.py", *options)
    assert [r["estimator"] for r in found] == ["off", "exact"]
    assert all(r["tokens_per_second"] > 0 for r in found)
    assert found[0]["overhead"] == 0


def test_checkpoint():
    found = rows("checkpoint.py", "--gib", "0.001", "--tensors", "2", "--rounds", "2")
    assert [r["what"] for r in found] == ["dcp", "pieces", "hashed", "verify"]
    for row in found:
        assert row["gigabytes"] == pytest.approx(2**30 * 1e-12, rel=1e-4)
        assert 0 < row["least"] <= row["seconds"]
        assert len(row["all"]) == 2
    assert found[0]["ratio"] == 1
