"""What the trainer does with what the ranks agreed on in a step. No model is trained."""

import time
from types import SimpleNamespace
from unittest import mock

import pytest
from torchtitan.train import Trainer

from titan_disp import train
from titan_disp.errors import EXIT_CODE, CheckpointError, ConfigError, DataError, NonFiniteError
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
    trainer.optimizers.settle = lambda: calls.append("settle")
    trainer.metrics_processor = SimpleNamespace(should_log=lambda step: step == 4)
    trainer._record_path = lambda: None  # of what ran so far in this process
    trainer.run_folder, trainer.aside = object(), SimpleNamespace(wake=lambda: calls.append("wake"))
    trainer.checkpointer = SimpleNamespace(wait=lambda: calls.append("wait"), force=lambda: calls.append("force"))
    comm, training = SimpleNamespace(mode="default", train_timeout_seconds=77), SimpleNamespace(steps=9)
    condensation = SimpleNamespace(interval=5)
    trainer.job_config = SimpleNamespace(condensation=condensation, comm=comm, training=training)
    trainer.parallel_dims, trainer.clock = None, Clock(0.0)
    trainer.heartbeat = SimpleNamespace(begin=lambda doing, step: None, step=lambda step: None)
    trainer.measure_condensation = lambda: calls.append("condensation")
    trainer.event = lambda name, step, **details: calls.append((name, step, details))
    monkeypatch.setattr(train, "set_pg_timeouts", lambda timeout, parallel_dims: calls.append(timeout.total_seconds()))
    return trainer


@pytest.mark.parametrize(
    ("step", "agreed", "calls", "goes_on"),
    [
        (4, {}, ["settle"], True),  # a step that logs
        (5, {}, ["condensation"], True),
        (6, {}, [], True),
        (5, {"stop": True}, ["settle", "force"], False),
        (9, {}, ["settle", "force"], False),  # budget.stop_at_tokens may end it at a step that needs no checkpoint
    ],
)
def test_what_follows_a_step(trainer, step, agreed, calls, goes_on):
    """Time-outs become shorter after the first step of a start; TorchTitan does that after step 1 only."""
    trainer.step = step
    trainer.optimizers.agreed |= agreed
    trainer.train_step(iter(()))
    assert trainer.calls == ["wake", 77, *calls]
    assert trainer.should_continue_training() == goes_on
    trainer.train_step(iter(()))
    assert trainer.calls == ["wake", 77, *calls, "wake", *calls]


def test_what_went_wrong_in_a_step(trainer):
    trainer.optimizers.bad_terms, trainer.optimizers.in_a_row = ["dispersion"], 2
    for late, step in ((True, 4), (False, 5)):
        trainer._skipped(late)
        assert trainer.calls[-1] == ("skip", step, {"terms": ["dispersion"], "in_a_row": 2})
    trainer.optimizers.in_a_row = 0
    trainer.optimizers.settle = lambda: setattr(trainer.optimizers, "in_a_row", 1)
    assert not trainer.healthy()  # a save knows of the step before it
    trainer.optimizers.agreed["save_failed"] = True
    with pytest.raises(CheckpointError, match="step 5: an asynchronous save failed on another rank"):
        trainer.train_step(iter(()))
    assert trainer.calls[-1] == "wait"  # which raises where this rank knows the reason


def test_complete_is_said_after_the_last_save(trainer, monkeypatch):
    """An asynchronous one may take minutes, which are the checkpoints'."""
    monkeypatch.setattr(Trainer, "train", lambda self: None)
    trainer.step, trainer.report = 9, lambda: None
    trainer.stop_request = SimpleNamespace(held=lambda: False, done=lambda: None)
    wait = lambda: trainer.calls.append("wait") or time.sleep(0.05)  # noqa: E731
    trainer.checkpointer = SimpleNamespace(ended_at=lambda: None, wait=wait)
    trainer.train()
    *before, (name, step, details) = trainer.calls
    assert (before, name, step) == (["wake", "wait", "condensation"], "complete", 9)
    assert 0.05 <= details["spent"]["checkpoints"] < 5


def test_a_start_that_trains_nothing_says_where_the_run_stands(trainer, caplog):
    """Not step 0, where this start is, as nothing was loaded: reports show what the run has up to its newest event."""
    trainer.step, trainer.clock = 0, Clock(123.0)
    trainer.checkpointer = SimpleNamespace(newest=lambda: 6, ended_at=lambda: 9)
    trainer.run_folder = SimpleNamespace(config_changes={"dispersion.enabled": [True, False]})
    for held in (True, False):
        trainer.stop_request = SimpleNamespace(held=lambda held=held: held, file="RUN/stop")
        trainer.train()
    reason = "the file RUN/stop was there before the start"
    stop = ("stop", 6, {"allocated": 123.0, "kind": "file", "reason": reason})
    assert trainer.calls == [stop, ("complete", 9, {"allocated": 123.0})]
    assert "The config differs from that of the last start: dispersion.enabled: True → False" in caplog.text


@pytest.mark.parametrize("error", [ConfigError, CheckpointError, DataError, NonFiniteError])
def test_errors_of_the_user_are_said_without_a_traceback(monkeypatch, capsys, error):
    monkeypatch.setattr(train, "load_config", lambda argv: None)
    monkeypatch.setattr(train, "run", mock.Mock(side_effect=error("what was found, and what to change")))
    with pytest.raises(SystemExit) as exit:
        train.main([])
    assert exit.value.code == EXIT_CODE
    assert capsys.readouterr().err.splitlines()[-1] == "titan-disp: error: what was found, and what to change"
    assert issubclass(error, ConfigError) == (error not in (CheckpointError, NonFiniteError))
