"""A step that neither logs nor saves waits for nothing more than TorchTitan's own does,
and learns one step later.
"""

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer

from tests import step_counts
from tests.distributed import spawn
from tests.mesh import build
from titan_disp import safe_dcp
from titan_disp.errors import NonFiniteError
from titan_disp.run.guard import GuardedOptimizers
from titan_disp.run.integrity import checkpoints
from titan_disp.run.liveness import StopRequest
from titan_disp.run.reader import read_events, read_metrics

LAYERS = 2
QUIET = (
    "--metrics.log_freq",
    "1000",
    "--optimizer.implementation",
    "fused",
    "--condensation.interval",
    "0",
)


def counts(sample, folder):
    found = {}
    for case in step_counts.CASES:
        options = step_counts.options_of(Path(sample), Path(folder) / case)
        found[case] = step_counts.count(case, options, LAYERS, warmup=2, steps=3)
        dist.barrier()
    if dist.get_rank() == 0:
        (Path(folder) / "counts.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_counts_of_a_quiet_step(sample, tmp_path):
    spawn(2, counts, str(sample), str(tmp_path))
    stock, off, exact = json.loads((tmp_path / "counts.json").read_text()).values()
    # Valid tokens, gradient norm, and two more of TorchTitan
    assert stock["all_reduces"] == 4
    for ours in (off, exact):
        assert ours["all_reduces"] == stock["all_reduces"] + 1  # the guard's message
        assert ours["others"] == stock["others"]  # gathers and scatters of FSDP2
        assert ours["host_reads"] == stock["host_reads"]
        assert (ours["late_reads"], stock["late_reads"]) == (1, 0)
        assert ours["files"] == stock["files"] == 0  # of the main thread
    parameters = 11 * LAYERS + 3
    # On a CPU: norms of the gradients (4), and the optimizer's steps, which do not
    # advance if the step is skipped (3).
    assert 0 < off["aten_operations"] - stock["aten_operations"] < 8 * parameters + 60


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_not_waited_for():
    """torch raises where the host would wait.

    (A step reads the message of the one before, which has arrived.)
    """
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    inner = OptimizersContainer(
        [nn.ParameterList([weight])], torch.optim.AdamW, {"lr": 0.1, "fused": True}
    )
    optimizers = GuardedOptimizers(inner, lambda: None, 3)
    optimizers.flags["stop"] = lambda: True
    weight.grad = torch.ones(3, device="cuda")
    optimizers.step()  # makes the optimizer's state
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizers.step()
        weight.grad.fill_(torch.nan)
        optimizers.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizers.agreed == {"stop": True}
    assert optimizers.state_dict()["guard"].tolist() == [3, 1, 1]
    assert weight.isfinite().all()


def quiet_run(sample, run, *options, at=lambda step: 1.0):
    """Train on every rank, with cross-entropies that ``at`` multiplies.

    Returns the last step, and weights before each.
    """
    usual = (
        "--model.overrides",
        "n_layers=1",
        "--training.steps",
        "9",
        "--checkpoint.enable",
        *QUIET,
    )
    trainer = build(sample, run, *usual, "--checkpoint.interval", "100", *options)
    cross_entropy = trainer.loss_fn.cross_entropy
    weights = {}

    def faulty(logits, labels):
        if trainer.step not in weights:
            weights[trainer.step] = [
                p.detach().clone() for p in trainer.model_parts[0].parameters()
            ]
        return cross_entropy(logits, labels) * at(trainer.step)

    trainer.loss_fn.cross_entropy = faulty
    try:
        trainer.train()
    finally:
        trainer.close()
        dist.barrier()
    return trainer.step, weights


def same(weights, others):
    return all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def events(run):
    return [(e["event"], e["step"]) for e in read_events(run)]


def counted(run, step):
    guard = torch.zeros(3, dtype=torch.int64)
    safe_dcp.load(
        {"optimizer.guard": guard}, run / "checkpoint" / f"step-{step}", no_dist=True
    )
    return guard.tolist()


def two_ranks(sample, folder):
    folder = Path(folder)
    rank = dist.get_rank()

    def nan_on_rank_1(*steps):
        return lambda step: float("nan") if rank == 1 and step in steps else 1.0

    # One rank's NaN in steps 3, 4 and 8: no rank changes its weights. At step 4 a save
    # is due, which is put off.
    run = folder / "skips"
    bad = (3, 4, 8)
    _, weights = quiet_run(
        sample, run, "--checkpoint.interval", "4", at=nan_on_rank_1(*bad)
    )
    assert [step for step in range(1, 9) if same(weights[step], weights[step + 1])] == [
        *bad
    ]
    said = [
        ("start", 0),
        ("skip", 3),
        ("skip", 4),
        ("checkpoint", 5),
        ("skip", 8),
        ("checkpoint", 9),
        ("complete", 9),
    ]
    if rank == 0:
        assert events(run) == said
        skips = [
            (event["terms"], event["in_a_row"])
            for event in read_events(run)
            if event["event"] == "skip"
        ]
        assert skips == [(["cross-entropy", "gradient norm"], n) for n in (1, 2, 1)]
        assert (counted(run, 5), counted(run, 9)) == ([5, 2, 0], [9, 3, 0])
    dist.barrier()

    # Too many in a row: all ranks end, before the next step changes a weight. No save
    # in between hides it, and no step would tell of the last one.
    few = ("--guard.max_skipped_steps", "2")
    for name, bad in (("ends", (3, 4)), ("last", (8, 9))):
        reason = f"step {bad[1]}: cross-entropy and gradient norm not finite, 2 steps in a row"
        with pytest.raises(NonFiniteError, match=reason):
            quiet_run(sample, folder / name, *few, at=nan_on_rank_1(*bad))

    # A signal during step 5 is heard one step later by all ranks, which save that step;
    # its own NaN is counted, too.
    run = folder / "signalled"

    def signalled(step):
        if step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return nan_on_rank_1(6)(step)

    assert quiet_run(sample, run, at=signalled)[0] == 6
    if rank == 0:
        assert events(run) == [
            ("start", 0),
            ("skip", 6),
            ("checkpoint", 6),
            ("stop", 6),
        ]
        assert read_events(run)[-1]["kind"] == "signal"
        assert counted(run, 6) == [6, 1, 1]
    dist.barrier()
    # It goes on, and the first step of this start does not log
    assert quiet_run(sample, run)[0] == 9
    if rank == 0:
        assert (
            checkpoints(run / "checkpoint"),
            counted(run, 9),
            list(read_metrics(run)),
        ) == ([6, 9], [9, 1, 0], [1])
    dist.barrier()

    # A file that appears during step 2 is found by rank 0's thread.
    run = folder / "stopped"
    heard = threading.Event()
    look = StopRequest.__call__

    def note(stop_request):
        asked = look(stop_request)
        if asked:
            heard.set()
        return asked

    def stopped(step):
        if step == 2 and rank == 0:
            (run / "stop").touch()
        if step == 3 and rank == 0:
            assert heard.wait(100)
        return 1.0

    StopRequest.__call__ = note
    last, _ = quiet_run(sample, run, at=stopped)
    StopRequest.__call__ = look
    assert last in (3, 4)
    if rank == 0:
        assert events(run)[-1] == ("stop", last)
        assert read_events(run)[-1]["kind"] == "file"

    # Messages are read one step late, and nothing else differs from a run that reads
    # each at once, because it logs.
    keys = (
        "--baseline.method",
        "active_forgetting",
        "--baseline.forget_every",
        "3",
        "--dispersion.no-enabled",
    )
    keys += ("--parallelism.tensor_parallel_degree", "2", "--metrics.log_freq")
    late, at_once = (
        quiet_run(sample, folder / f, *keys, f, at=nan_on_rank_1(2, 3, 5))[1]
        for f in ("1000", "1")
    )
    assert all(same(late[step], at_once[step]) for step in range(1, 10))
    assert same(late[2], late[3])


@pytest.mark.slow
def test_two_ranks(sample, tmp_path):
    spawn(2, two_ranks, str(sample), str(tmp_path))
