"""One Weights & Biases run across the starts of a run folder. The package is a stub; TorchTitan's logger is the real one."""

import importlib.machinery
import os
import sys
import types

import pytest
import torch.distributed as dist
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

import titan_disp.plugin  # noqa: F401
from titan_disp.config.checks import check_device
from titan_disp.dispersion import LossLedger
from titan_disp.run.folder import continue_wandb, wandb_run_id
from titan_disp.run.metrics import DispersionMetrics


@pytest.fixture
def wandb(monkeypatch):
    """A stub whose ``init`` notes the id that it is given, and how wandb would resume by the environment."""
    stub = types.ModuleType("wandb")
    stub.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    stub.inits, stub.run = [], None
    stub.init = lambda **settings: stub.inits.append((settings["id"], os.environ["WANDB_RESUME"]))
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    return stub


def start(folder):
    config = JobConfig()
    config.job.dump_folder, config.metrics.enable_wandb = str(folder), True
    check_device(config)
    alone = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "world_size"), 1)
    DispersionMetrics(config, ParallelDims(**alone), LossLedger()).close()


def test_a_requeue_continues_the_run(wandb, tmp_path, monkeypatch):
    for folder in ("run", "run", "other"):
        for name in ("WANDB_RUN_ID", "WANDB_RESUME"):  # a requeued job has the environment that it was submitted with
            monkeypatch.setenv(name, "")  # so that what is set here is undone after the test
            monkeypatch.delenv(name)
        start(tmp_path / folder)
    first, again, other = wandb.inits
    assert first == again == ((tmp_path / "run" / "wandb_run_id").read_text().strip(), "allow")
    assert len(first[0]) == 32
    assert other[0] != first[0]
    assert other[1] == "allow"


def test_an_id_that_never_reached_the_disk_is_made_again(tmp_path):
    """W&B would begin another run at every start with an empty one."""
    (tmp_path / "wandb_run_id").write_text("\n")
    made = wandb_run_id(tmp_path)
    assert len(made) == 32
    assert wandb_run_id(tmp_path) == made


def test_what_the_user_has_set_stays():
    mine = {"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}
    continue_wandb("folder", None, mine)
    assert mine == {"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}
    forked = {"WANDB_FORK_FROM": "other?_step=100"}
    continue_wandb("folder", 3, forked)
    assert forked == {"WANDB_FORK_FROM": "other?_step=100", "WANDB_RUN_ID": "folder-rank3"}
