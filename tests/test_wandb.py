"""One Weights & Biases run across the starts of a run folder. The package is a stub; TorchTitan's logger is the real one."""

import os
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torchtitan.config import JobConfig

import titan_disp.plugin  # noqa: F401
from tests.mesh import dims
from titan_disp.config.checks import check_device
from titan_disp.dispersion import LossLedger
from titan_disp.run.folder import continue_wandb, wandb_run_id
from titan_disp.run.metrics import DispersionMetrics


def test_a_requeue_continues_the_run(tmp_path, monkeypatch):
    """A requeued job has the environment that it was submitted with."""
    inits = []
    stub = SimpleNamespace(__spec__=ModuleSpec("wandb", None), run=None)
    stub.init = lambda **settings: inits.append((settings["id"], os.environ["WANDB_RESUME"]))
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    config = JobConfig()
    config.metrics.enable_wandb = True
    for folder in ("run", "run", "other"):
        for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
            monkeypatch.setenv(name, "")  # so that what is set here is undone after the test
            monkeypatch.delenv(name)
        config.job.dump_folder = str(tmp_path / folder)
        check_device(config)
        DispersionMetrics(config, dims(1), LossLedger()).close()
    ids = [(tmp_path / folder / "wandb_run_id").read_text().strip() for folder in ("run", "run", "other")]
    assert inits == [(each, "allow") for each in ids]
    assert len({*ids}) == 2


def test_an_id_that_never_reached_the_disk_is_made_again(tmp_path):
    """W&B would begin another run at every start with an empty one."""
    (tmp_path / "wandb_run_id").write_text("\n")
    made = wandb_run_id(tmp_path)
    assert (len(made), wandb_run_id(tmp_path)) == (32, made)


@pytest.mark.parametrize(
    ("given", "rank", "added"),
    [
        ({"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}, None, {}),
        ({"WANDB_FORK_FROM": "a?_step=1"}, 3, {"WANDB_RUN_ID": "folder-rank3"}),
    ],
)
def test_what_the_user_has_set_stays(given, rank, added):
    before = dict(given)
    continue_wandb("folder", rank, given)
    assert given == before | added
