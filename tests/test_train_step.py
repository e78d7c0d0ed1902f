"""What the trainer does with what the ranks agreed on in a step, and how it puts its parts together. No model is trained."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.train import Trainer

from titan_disp import train
from titan_disp.config.load import load_config
from titan_disp.errors import EXIT_CODE, CheckpointError, ConfigError, DataError, NonFiniteError
from titan_disp.models.qwen3 import flavors
from titan_disp.run.liveness import Clock
from titan_disp.train import DispTrainer


@pytest.fixture
def trainer(monkeypatch):
    """At step 5 of 9, which went well. ``calls``: what it asked of its parts."""
    monkeypatch.setattr(Trainer, "train_step", lambda self, data: None)
    trainer = object.__new__(DispTrainer)
    trainer.calls = calls = []
    trainer.step, trainer.last_step = 5, 9
    trainer.optimizers = SimpleNamespace(bad_terms=[], in_a_row=0, agreed={"stop": False, "save_failed": False})
    trainer.checkpointer = SimpleNamespace(wait=lambda: calls.append("wait"), force=lambda: calls.append("force"))
    trainer.job_config = SimpleNamespace(
        condensation=SimpleNamespace(interval=5),
        comm=SimpleNamespace(mode="default", train_timeout_seconds=77),
    )
    trainer.parallel_dims = None
    trainer.clock = Clock(0.0)
    trainer.heartbeat = SimpleNamespace(begin=lambda doing, step: None, step=lambda step: None)
    trainer.measure_condensation = lambda: calls.append("condensation")
    trainer.event = lambda name, step, **details: calls.append((name, step, details))
    monkeypatch.setattr(
        "titan_disp.train.set_pg_timeouts", lambda timeout, parallel_dims: calls.append(timeout.total_seconds())
    )
    return trainer


def test_a_good_step(trainer):
    """Time-outs become shorter once, after the first step of a start; TorchTitan does that after step 1 only."""
    trainer.train_step(iter(()))
    assert trainer.calls == [77, "condensation"]
    assert trainer.should_continue_training()
    trainer.step = 6
    trainer.train_step(iter(()))
    assert trainer.calls == [77, "condensation"]


def test_asked_to_stop(trainer):
    trainer.optimizers.agreed["stop"] = True
    trainer.train_step(iter(()))
    assert trainer.calls == [77, "force"]
    assert not trainer.should_continue_training()


def test_the_last_step_of_this_job(trainer):
    """budget.stop_at_tokens may end it at any step, of which none needs a checkpoint."""
    trainer.step = 9
    trainer.train_step(iter(()))
    assert trainer.calls == [77, "force"]
    assert not trainer.should_continue_training()


def test_an_asynchronous_save_that_failed_on_another_rank(trainer):
    trainer.optimizers.agreed["save_failed"] = True
    with pytest.raises(CheckpointError, match="step 5: an asynchronous save failed on another rank"):
        trainer.train_step(iter(()))
    assert trainer.calls == [77, "wait"]  # which raises where this rank knows the reason


def test_a_skipped_step_is_an_event(trainer):
    trainer.optimizers.bad_terms, trainer.optimizers.in_a_row = ["dispersion"], 2
    trainer.train_step(iter(()))
    assert ("skip", 5, {"terms": ["dispersion"], "in_a_row": 2}) in trainer.calls
    assert trainer.should_continue_training()


def test_complete_is_said_after_the_last_save(trainer, monkeypatch):
    """An asynchronous one may take minutes, which are the checkpoints'."""
    monkeypatch.setattr(Trainer, "train", lambda self: None)
    trainer.step, trainer.job_config.training = 9, SimpleNamespace(steps=9)
    trainer.stop_request = SimpleNamespace(held=lambda: False, done=lambda: None)

    def wait():
        trainer.calls.append("wait")
        time.sleep(0.05)

    trainer.checkpointer = SimpleNamespace(ended_at=lambda: None, wait=wait)
    trainer.report = lambda: None
    trainer.train()
    *before, (name, step, details) = trainer.calls
    assert (before, name, step) == (["wait", "condensation"], "complete", 9)
    assert 0.05 <= details["spent"]["checkpoints"] < 5


def test_a_start_that_trains_nothing_says_where_the_run_stands(trainer):
    """Not step 0, where this start is, as nothing was loaded: reports show what the run has up to its newest event."""
    trainer.step, trainer.clock = 0, Clock(123.0)
    trainer.job_config.training = SimpleNamespace(steps=9)
    trainer.stop_request = SimpleNamespace(held=lambda: True, file="RUN/stop")
    trainer.checkpointer = SimpleNamespace(newest=lambda: 6, ended_at=lambda: 9)
    trainer.train()
    trainer.stop_request.held = lambda: False
    trainer.train()
    stop, complete = trainer.calls
    reason = "the file RUN/stop was there before the start"
    assert stop == ("stop", 6, {"allocated": 123.0, "reason": reason})
    assert complete == ("complete", 9, {"allocated": 123.0})


def test_the_checkpointer_knows_the_guard_and_the_data(one_rank, tmp_path):
    model, config = (
        nn.Linear(1, 1),
        load_config(["--model.name", "qwen3_disp", "--job.dump_folder", str(tmp_path), "--checkpoint.enable"]),
    )
    trainer = object.__new__(DispTrainer)
    optimizers = OptimizersContainer([model], torch.optim.SGD, {"lr": 0.1})
    optimizers.in_a_row = 0
    trainer.job_config, trainer.train_spec = config, SimpleNamespace(state_dict_adapter=None)
    trainer.model_args, trainer.model_parts, trainer.optimizers = flavors["nano"], [model], optimizers
    trainer.dataloader = trainer.lr_schedulers = None
    trainer.clock, trainer.calls = Clock(0.0), []
    trainer.heartbeat = SimpleNamespace(begin=lambda doing, step: trainer.calls.append((doing, step)))
    manager = trainer._build_checkpointer()
    try:
        assert manager.folder == str(tmp_path / "checkpoint")
        assert manager.states["train_state"] is trainer
        kept = manager.states["identity"].content
        assert (kept["model.name"], kept["baseline.method"], kept["hidden_dim"]) == ("qwen3_disp", "none", 192)
        assert manager.hooks is trainer
        assert trainer.healthy()
        optimizers.in_a_row = 1
        assert not trainer.healthy()
        with trainer.busy("save", 3):
            assert trainer.calls == [("save", 3)]
            time.sleep(0.01)
        assert trainer.clock.spent()["checkpoints"] >= 0.01
    finally:
        manager.close()


@pytest.mark.parametrize("error", [ConfigError, CheckpointError, DataError, NonFiniteError])
def test_errors_of_the_user_are_said_without_a_traceback(monkeypatch, capsys, error):
    """Also unstable training, which is no error of the configuration."""

    def fail(job_config, trainer_class):
        raise error("what was found, and what to change")

    monkeypatch.setattr(train, "load_config", lambda argv: None)
    monkeypatch.setattr(train, "run", fail)
    with pytest.raises(SystemExit) as exit:
        train.main([])
    assert exit.value.code == EXIT_CODE
    assert capsys.readouterr().err.splitlines()[-1] == "titan-disp: error: what was found, and what to change"
    assert issubclass(error, ConfigError) == (error not in (CheckpointError, NonFiniteError))
