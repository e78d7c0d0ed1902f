"""titan-disp selftest: it passes here, on one rank and on two, and says what is wrong
where something is.
"""

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torchtitan.train

from tests.command_line import ROOT, SECONDS, environment, typed
from tests.distributed import spawn
from tests.oracle import angular, loss_and_gradient, tokens
from titan_disp.config.command_options import SelftestOptions
from titan_disp.config.load import load_config
from titan_disp.dispersion import DispersionLoss, kernels, pairwise
from titan_disp.lab import selftest
from titan_disp.train import DispTrainer


def only(patch, *names):
    for name in {"accuracy", "path", "meshes", "resume", "cost"} - set(names):
        patch.setattr(selftest, name, mock.Mock(return_value=(), __name__=name))


def train(argv):
    """As the command does, in a process that need not import everything first and does
    not sleep at the end.
    """
    torchtitan.train.time = SimpleNamespace(
        sleep=lambda seconds: None, perf_counter=torchtitan.train.time.perf_counter
    )
    trainer = DispTrainer(load_config(argv))
    trainer.train()
    trainer.close()


@pytest.fixture(autouse=True)
def new_record(monkeypatch):
    monkeypatch.setattr(kernels, "_functions", {})
    monkeypatch.setattr(kernels, "_products", set())


@pytest.fixture
def trains_quickly(monkeypatch, sample):
    def run(command, env, **options):
        python, dash_m, module, *argv = command
        assert (python, dash_m, module, options["timeout"]) == (
            sys.executable,
            "-m",
            "titan_disp.train",
            500,
        )
        assert not [name for name in env if name.startswith("TORCHELASTIC_")]
        assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_PORT"]) == ("0", "1", "0")
        spawn(1, train, argv)
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of the selftest")
    monkeypatch.setattr(
        selftest, "write_sample", lambda folder: shutil.copytree(sample, folder)
    )
    monkeypatch.setattr(selftest.subprocess, "run", run)


@pytest.mark.slow
def test_one_rank(trains_quickly, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        selftest.Timer, "blocked_autorange", lambda timer: timer.timeit(1)
    )
    assert typed(monkeypatch, "selftest", "--json", tmp_path / "found.json") == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "found.json").read_text())
    assert selftest.page(result) == printed.rstrip("\n")
    assert printed.endswith("\n\neverything is as expected\n")
    rows = {(row["section"], row["check"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == printed.count("\n| ok | ")
    for case in itertools.product(
        ("exact", "moments", "sampled"),
        ("float32", "bfloat16"),
        ("random", "collapsed"),
    ):
        row = rows["accuracy", ", ".join((*case, "clamp 0.25"))]
        assert 0 < row["found"]["gradient"] <= row["expected"]["gradient"] <= 0.01
    of_kernels = {
        check: row["found"]
        for (section, check), row in rows.items()
        if section == "path" and "kernel" in check
    }
    assert of_kernels == {
        f"kernel {name}": {"ran": "eager: on a CPU"}
        for name in ("epilogue", "write", "fit", "combine")
    }
    assert ("meshes", "sharded sequences") in rows
    assert rows["resume", "steps"]["found"] == {"trained": [1, 2, 3, 2, 3]}
    losses = [
        rows["resume", f"step {step}, resumed"]["found"]["loss"] for step in (2, 3)
    ]
    assert 9 > float(losses[0]) > float(losses[1]) > 7
    costs = [
        row["found"]["ms"] for (section, _), row in rows.items() if section == "cost"
    ]
    assert (len(costs), min(costs) > 0) == (4 + 4, True)


def wrong_gradient(patch):
    right = pairwise.add_product_
    patch.setattr(
        pairwise, "add_product_", lambda out, a, b, **to: right(out, a, 1.001 * b, **to)
    )


def another_loss(patch, status=0):
    done = SimpleNamespace(returncode=status, stderr="no room\nat all")
    losses = ((1, 9.0), (2, 8.0), (3, 7.0), (2, 8.0), (3, 7.000000001))
    patch.setattr(selftest, "write_sample", lambda folder: None)
    patch.setattr(selftest.shutil, "rmtree", lambda path, **options: None)
    patch.setattr(selftest.subprocess, "run", lambda *args, **options: done)
    patch.setattr(
        selftest,
        "read_rows",
        lambda run: [{"step": step, "loss": loss} for step, loss in losses],
    )


def replaced(where, name, value):
    return lambda patch: patch.setattr(where, name, value)


def not_compiled(patch):
    patch.setattr(
        kernels, "_functions", {"fit": "eager: RuntimeError: no C++ compiler"}
    )
    if not torch.accelerator.is_available():
        patch.setattr(kernels, "EAGER_ON_CPU", "compiled")


def rounded(patch):
    right = kernels.product
    patch.setattr(
        kernels, "product", lambda a, b: right(a, b).bfloat16().to(right(a, b).dtype)
    )


def not_a_number(patch):
    patch.setattr(
        DispersionLoss,
        "__call__",
        lambda loss, zs, *others, **options: zs[0].sum((1, 2))[None] * math.nan,
    )


@pytest.mark.parametrize(
    ("plant", "section", "said"),
    [
        (
            wrong_gradient,
            "accuracy",
            r"exact, float32, random, clamp 0.25 .*, gradient 0.001 +\| .* ≤ 0.0001",
        ),
        (
            not_a_number,
            "accuracy",
            r"sampled, bfloat16, collapsed, clamp 0.25 +\| loss nan",
        ),
        (
            rounded,
            "path",
            r"errors of bfloat16 .* bmm 0.0\d+, baddbmm \S+e-07 .*≤ 0.0001",
        ),
        (
            not_compiled,
            "path",
            r"kernel fit +\| ran eager: RuntimeError: no C\+\+ compiler",
        ),
        (
            replaced(kernels, "_products", {"bmm cannot"}),
            "path",
            r"operands of products +\| dtypes .*bmm cannot",
        ),
        (
            replaced(kernels, "operand_dtype", lambda x: 1 / 0),
            "path",
            r"runs to its end +\| error ZeroDivisionError: ",
        ),
        (another_loss, "resume", r"step 3, resumed +\| loss 7.000000001 +\| loss 7.0"),
        (
            lambda patch: another_loss(patch, 3),
            "resume",
            r".* the first start ended with status 3: no room",
        ),
    ],
)
def test_planted_errors(monkeypatch, capsys, plant, section, said):
    only(monkeypatch, section, "meshes")
    monkeypatch.setattr(selftest, "CASES", selftest.CASES[:2])
    plant(monkeypatch)
    assert typed(monkeypatch, "selftest") == 1
    printed = capsys.readouterr().out
    assert re.search(rf"\| FAILED \| {section} +\| {said}", printed), printed
    assert re.search(r"\| ok +\| meshes ", printed)
    assert re.search(r"\n\d+ of \d+ checks FAILED\n$", printed)


def on_two_ranks(folder):
    patch = pytest.MonkeyPatch()
    only(patch, "accuracy", "meshes")
    patch.setattr(selftest, "CASES", selftest.CASES[:1])
    assert selftest.selftest(SelftestOptions(Path(folder) / "found.json")) == 0
    if dist.get_rank() == 1:
        wrong_gradient(patch)
    assert selftest.selftest(SelftestOptions(Path(folder) / "wrong.json")) == 1


def test_two_ranks(tmp_path):
    spawn(2, on_two_ranks, str(tmp_path))
    right, wrong = (
        json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("found", "wrong")
    )
    assert right["facts"]["ranks"] == 2
    checked = [row["check"] for row in right["rows"] if row["section"] == "meshes"]
    assert sorted(checked) == sorted(
        f"{e}, {p}, 2 ranks" for e in selftest.ESTIMATORS for p in selftest.TOLERANCES
    )
    failed = {(row["section"], row["check"]) for row in wrong["rows"] if not row["ok"]}
    assert ("accuracy, rank 1", "exact, float32, random, clamp 0.25") in failed
    assert "accuracy" not in {section for section, _ in failed}


def test_its_own_float64_form():
    """selftest cannot import the oracle, and must not rely on the loss."""
    for clamp, mean in itertools.product((0.25, 0.005), (0.0, 3.0)):
        z = tokens(2, 20, 16, mean=mean).double()
        found, expected = (
            loss_and_gradient(form, z, clamp=clamp)
            for form in (selftest.plain, angular)
        )
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.night
def test_under_torchrun():
    """All of it as a user types it, with real training runs beside torchrun's
    variables.
    """
    argv = [
        sys.executable,
        *("-m", "torch.distributed.run", "--nproc-per-node=2"),
        # not every container resolves localhost
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"),
        "--local-addr=127.0.0.1",
        "-m",
        "titan_disp.cli",
        "selftest",
    ]
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("titan-disp selftest: ") == 1
