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


def test_a_requeue_continues_the_run(tmp_path, monkeypatch):
    """A requeued job has the environment that it was submitted with."""
    stub = types.ModuleType("wandb")
    stub.__spec__, stub.run = importlib.machinery.ModuleSpec("wandb", None), None
    inits = []
    stub.init = lambda **settings: inits.append((settings["id"], os.environ["WANDB_RESUME"]))
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    alone = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "world_size"), 1)
    config = JobConfig()
    config.metrics.enable_wandb = True
    for folder in ("run", "run", "other"):
        for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
            monkeypatch.setenv(name, "")  # so that what is set here is undone after the test
            monkeypatch.delenv(name)
        config.job.dump_folder = str(tmp_path / folder)
        check_device(config)
        DispersionMetrics(config, ParallelDims(**alone), LossLedger()).close()
    ids = [(tmp_path / folder / "wandb_run_id").read_text().strip() for folder in ("run", "run", "other")]
    assert inits == [(each, "allow") for each in ids]
    assert len({*ids}) == 2


def test_an_id_that_never_reached_the_disk_is_made_again(tmp_path):
    """W&B would begin another run at every start with an empty one."""
    (tmp_path / "wandb_run_id").write_text("\n")
    made = wandb_run_id(tmp_path)
    assert (len(made), wandb_run_id(tmp_path)) == (32, made)


@pytest.mark.parametrize(
    ("given", "rank", "expected"),
    [
        ({"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}, None, {"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}),
        ({"WANDB_FORK_FROM": "a?_step=1"}, 3, {"WANDB_FORK_FROM": "a?_step=1", "WANDB_RUN_ID": "folder-rank3"}),
    ],
)
def test_what_the_user_has_set_stays(given, rank, expected):
    continue_wandb("folder", rank, given)
    assert given == expected
