"""What one of two ranks knows, both do: bad steps, flags, damaged files, saves and
loads that failed. One spawn for all.
"""

import json
import math
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchtitan.components.optimizer import OptimizersContainer

from tests.distributed import COLLECTIVE, spawn
from tests.test_checkpoint import Run, flip, full_disk
from tests.test_guard import Training
from tests.test_metrics import DamagedFiles, metrics
from titan_disp.data.listing import on_rank_0
from titan_disp.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    InUseError,
    NonFiniteError,
)
from titan_disp.metric import Metric
from titan_disp.run import integrity
from titan_disp.run.guard import GuardedOptimizers
from titan_disp.run.identity import read_identity
from titan_disp.run.integrity import checkpoints, damage

GOOD = ((1.0, -2.0), {})


def check_verdicts():
    """(the steps of rank 0 and rank 1, the terms that both name)."""
    rank = dist.get_rank()
    nothing = ((0.0, 0.0), {})
    training = Training(max_skipped_steps=10)
    training.optimizers.flags["stop"] = lambda: rank == 1
    training.optimizers.flags["save_failed"] = lambda: False
    for *steps, bad_term in (
        (GOOD, ((math.nan, 1.0), {}), "gradient norm"),
        (((1.0, math.inf), {}), GOOD, "gradient norm"),
        (GOOD, ((1.0, -2.0), {"ce": math.nan}), "cross-entropy"),
        (((1.0, -2.0), {"dispersion": math.nan}), GOOD, "dispersion"),
        (nothing, nothing, "zero gradients"),
    ):
        gradients, loss = steps[rank]
        training.step(*gradients, **loss)
        assert training.optimizers.bad_terms == [bad_term]
        assert training.optimizers.agreed == {"stop": True, "save_failed": False}
        assert training.weights == [1.0, 2.0]
    assert training.counts == [5, 5, 5]
    # A rank whose own gradients are zero has nothing against a step.
    training.step(*((0.0, 0.0) if rank == 0 else (1.0, -2.0)))
    assert (training.optimizers.bad_terms, training.counts) == ([], [6, 5, 0])
    assert training.weights == ([1.0, 2.0] if rank == 0 else [0.5, 3.0])


def check_verdicts_on_shards():
    """FSDP2's parameters, and a fused optimizer: one rank's NaN keeps all ranks'
    shards, moments and steps as they are.
    """
    mesh = init_device_mesh("cpu", (2,))
    # rank 1 has one row of it, and nothing of the second weight
    whole = torch.arange(6.0).reshape(3, 2)
    model = nn.ParameterList(
        nn.Parameter(distribute_tensor(x, mesh, [Shard(0)]))
        for x in (whole, whole[:1].clone())
    )
    inner = OptimizersContainer([model], torch.optim.AdamW, {"lr": 0.1, "fused": True})
    optimizers = GuardedOptimizers(inner, lambda: None, 3)

    def step(*of_ranks):
        before = [p.full_tensor() for p in model]
        for p in model:
            local = torch.full_like(p.to_local(), of_ranks[dist.get_rank()])
            p.grad = DTensor.from_local(
                local, mesh, [Shard(0)], shape=p.shape, stride=p.stride()
            )
        optimizers.step()
        (state,) = {float(inner.optimizers[0].state[p]["step"]) for p in model}
        return [
            torch.equal(x, p.full_tensor()) for x, p in zip(before, model, strict=True)
        ], state

    for of_ranks, bad_term in (
        ((1.0, math.nan), "gradient norm"),
        ((math.inf, 1.0), "gradient norm"),
        ((0.0, 0.0), "zero gradients"),
        ((math.nan, math.nan), "gradient norm"),
    ):
        assert step(*of_ranks) == ([True, True], 0.0)
        optimizers.settle()
        assert optimizers.bad_terms == [bad_term], of_ranks
        optimizers._counts[2] = 0
    assert step(1.0, 1.0) == ([False, False], 1.0)
    assert step(1.0, math.nan) == ([True, True], 1.0)
    assert step(1.0, 0.0)[1] == 2.0
    assert optimizers.state_dict()["guard"].tolist() == [7, 5, 0]


class Files(DamagedFiles):
    def counters(self):
        rank = dist.get_rank()
        own = {
            Metric("epoch"): rank,
            Metric("seconds_waited"): self.waited,
            Metric("epoch", "web"): 2 * rank,
            Metric("epochs_read", "web"): 1.5,
        }
        return super().counters() | own


def check_data_metrics(folder):
    """41 of 200 files, begun in two epochs: sums over the ranks, but for the latest
    epochs and the longest waits.

    In 4 s rank 0 waits for 3 s and reads 1000 bytes, rank 1 2 s and 3000; in the next 2
    s, 0.5 and 100, and 1 and nothing.
    """
    rank = dist.get_rank()
    loader = Files(20 + rank)
    logged = metrics(folder, loader, dp_shard=2)
    loader.read, loader.waited = (1000, 3.0) if rank == 0 else (3000, 2.0)
    expected = {
        **{
            "documents": 0,
            "skipped_documents": 0,
            "skipped_bytes": 0,
            "skipped_files": 41,
            "epoch": 1,
            "epoch/web": 2,
        },
        **{
            "epochs_read": 0.75,
            "epochs_read/web": 3.0,
            "stored_bytes": 4000,
            "seconds_waited": 3.0,
        },
        **{"stored_bytes_per_second": 1000.0, "wait_fraction": 0.75},
    }
    assert logged.data_metrics(4.0) == expected
    loader.read, loader.waited = (1100, 3.5) if rank == 0 else (3000, 3.0)
    found = logged.data_metrics(2.0)
    assert (
        found["stored_bytes_per_second"],
        found["wait_fraction"],
        found["seconds_waited"],
    ) == (50.0, 0.5, 3.5)
    logged.data_loading_times.append(0.0)
    with pytest.raises(DataError, match="41 of 200 files are damaged"):
        logged.log(10, 3.0, 3.0, 1.0)


def check_saves_and_loads(folder):
    run = Run(folder, keep_latest_k=2)
    run.save(1, 2, 3)
    create_stream = FileSystem.create_stream
    if dist.get_rank() == 1:
        FileSystem.create_stream = full_disk
    with pytest.raises(
        CheckpointError,
        match=r"step 4 could not be saved .*: rank 1: \w+: .*No space left on device",
    ):
        run.save(4)
    FileSystem.create_stream = create_stream
    if dist.get_rank() == 0:
        run.hooks.taken_by = lambda: time.sleep(0.3) or "host far, SLURM job 9.0"
    with pytest.raises(
        InUseError,
        match="step 5 is not saved: .* was taken by another job .host far, SLURM job 9.0.",
    ):
        run.save(5)
    run.hooks.taken_by = lambda: None
    assert checkpoints(run.folder) == [2, 3]
    assert run.manager.load()
    assert run.loaded == (3, 3)
    take_up = run.trainer.load_state_dict

    def refuse(state):
        """On rank 1 alone, after both have read the files."""
        if dist.get_rank() == 1 and state["value"] == 3:
            raise RuntimeError("not this one")
        take_up(state)

    run.trainer.load_state_dict = refuse
    assert run.manager.load()
    assert run.loaded == (2, 2)
    assert run.events[-1] == ("checkpoint_damaged", 3)
    run.manager.close()  # waits for the thread that deletes
    dist.barrier()
    assert run.names == ["damaged-3", "step-2", "step-4"]


def check_late_ranks(folder):
    """While a rank saves, or deletes what was there, the others wait for as long as
    guard.save_seconds.
    """
    set_timeout = dist.distributed_c10d._set_pg_timeout
    create_stream = FileSystem.create_stream
    for mode in ("disabled", "async"):
        run = Run(folder / mode, async_mode=mode)
        for late in (0, 1):
            dist.barrier()
            set_timeout(timedelta(seconds=0.1))  # nothing in a save is subject to it
            if dist.get_rank() == late:
                FileSystem.create_stream = lambda *args: (
                    time.sleep(0.5) or create_stream(*args)
                )
                run.hooks.taken_by = lambda: time.sleep(0.5)
            run.save(late)
            run.manager.wait()
            set_timeout(timedelta(seconds=COLLECTIVE))
            FileSystem.create_stream = create_stream
            run.hooks.taken_by = lambda: None
        run.manager.close()
        assert checkpoints(run.folder) == [0, 1]


def check_damage(folder):
    """Each rank writes and hashes its own files, and verifies a share of all files.

    All agree on what is damaged.
    """
    run = Run(folder)
    run.save(1, 2, 3)
    newest = run.folder / "step-3"
    names = {path.name for path in newest.glob("*.distcp")}
    assert len(names) == 2, names
    files = json.loads((newest / "hashes.json").read_text())["files"]
    assert files == {
        n: xxhash.xxh3_128_hexdigest((newest / n).read_bytes())
        for n in names | {".metadata"}
    }
    dist.barrier()
    if dist.get_rank() == 0:
        for step, name in ((3, "__1_0.distcp"), (2, "__0_0.distcp")):
            flip(run.folder / f"step-{step}" / name, 4321)
    dist.barrier()
    # The sorted files are shared by rank: .metadata and __1_0 belong to rank 0, __0_0
    # to rank 1.
    assert [damage(newest, rank, 2) is None for rank in (0, 1)] == [False, True]
    assert [damage(run.folder / "step-2", rank, 2) is None for rank in (0, 1)] == [
        True,
        False,
    ]
    again = Run(folder)
    # Without agreement, one rank would load what the other passes over, and wait for
    # it.
    reasons = [
        again.manager._damage(str(run.folder / f"step-{step}")) for step in (1, 2, 3)
    ]
    assert [reason and reason.split()[0] for reason in reasons] == [
        None,
        "__0_0.distcp",
        "__1_0.distcp",
    ]
    assert again.manager.load()
    assert again.loaded == (1, 1)
    dist.barrier()
    assert again.names == ["damaged-2", "damaged-3", "step-1"]
    read = []
    hash_file = integrity.hash_file
    integrity.hash_file = lambda path, *others: (
        read.append(path.name) or hash_file(path)
    )
    assert again.manager._damage(str(run.folder / "step-1")) is None
    assert read == (
        [".metadata", "__1_0.distcp"] if dist.get_rank() == 0 else ["__0_0.distcp"]
    )


def check_errors_of_rank_0(folder):
    """Every error for the user reaches each rank as it is, so that one message is
    printed and no traceback.
    """
    for kind in (ConfigError, CheckpointError, NonFiniteError):
        with pytest.raises(kind, match="^a reason$"):
            on_rank_0(mock.Mock(side_effect=kind("a reason")))
    with pytest.raises(
        CheckpointError, match="cannot read which model the checkpoint .*nothing holds"
    ):
        on_rank_0(read_identity, str(folder / "nothing"))
    with pytest.raises(RuntimeError, match="^rank 0: KeyError: 'a reason'$"):
        on_rank_0(mock.Mock(side_effect=KeyError("a reason")))


def run_all(folder):
    check_verdicts()
    check_verdicts_on_shards()
    for check in (
        check_data_metrics,
        check_saves_and_loads,
        check_late_ranks,
        check_damage,
        check_errors_of_rank_0,
    ):
        check(Path(folder) / check.__name__)


def test_two_ranks(tmp_path):
    spawn(2, run_all, str(tmp_path))
