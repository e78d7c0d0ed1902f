"""Which steps the guard skips and counts, and what the trainer does with what the ranks
agreed on. No model is trained.

With two ranks: ``test_ranks_agree``. In the real trainer: ``test_quiet_step``.
"""

import math
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.train import Trainer

from titan_disp import train
from titan_disp.errors import (
    EXIT_CODE,
    CheckpointError,
    ConfigError,
    DataError,
    EndedError,
    NonFiniteError,
)
from titan_disp.objective import LossLedger
from titan_disp.run.guard import GuardedOptimizers
from titan_disp.run.liveness import Clock
from titan_disp.train import DispTrainer


class Training:
    """Two parameters of one element, which begin at 1 and 2.

    The terms of a step's loss go through a real ledger.
    """

    def __init__(self, max_skipped_steps=3, fused=False):
        self.model = nn.ParameterDict(
            {
                name: nn.Parameter(torch.tensor([x]))
                for name, x in (("a", 1.0), ("b", 2.0))
            }
        )
        self.ledger = LossLedger()
        kind, options = (
            (torch.optim.AdamW, {"fused": True})
            if fused
            else (torch.optim.SGD, {"momentum": 0.5})
        )
        inner = OptimizersContainer([self.model], kind, {"lr": 0.5, **options})
        self.optimizers = GuardedOptimizers(
            inner, self.ledger.non_finite, max_skipped_steps
        )

    @property
    def weights(self):
        return [p.item() for p in self.model.parameters()]

    def step(self, *gradients, ce=2.0, dispersion=-1.0):
        self.ledger.reset()
        self.ledger.add(torch.tensor(ce), torch.tensor(dispersion), torch.tensor(4))
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = torch.tensor([gradient])
        self.optimizers.step()

    @property
    def counts(self):
        return self.optimizers.state_dict()["guard"].tolist()


def test_a_finite_step_is_taken():
    training = Training()
    assert (training.optimizers.bad_terms, training.optimizers.agreed) == ([], {})
    # float32 would stop counting at 2²⁴ steps
    assert training.optimizers.state_dict()["guard"].dtype == torch.int64
    training.step(0.0, -2.0)  # a gradient of zero, or none, is no reason to skip
    assert (training.weights, training.optimizers.bad_terms, training.counts) == (
        [1.0, 3.0],
        [],
        [1, 0, 0],
    )
    training.optimizers.zero_grad()
    assert all(p.grad is None for p in training.model.parameters())
    training.model["a"].grad = torch.tensor([1.0])
    training.optimizers.step()
    assert training.weights == [0.5, 3.0]
    training.optimizers.zero_grad()
    training.optimizers.step()  # without any gradient
    assert (training.optimizers.bad_terms, training.counts) == (
        ["zero gradients"],
        [3, 1, 1],
    )


def test_steps_in_a_row_end_the_run(caplog):
    training = Training(max_skipped_steps=3)
    bad = (math.nan, 1.0)
    for gradients in (bad, bad, (1.0, 1.0), bad, bad):
        training.step(*gradients)
        assert training.optimizers.bad_terms == ["gradient norm"] * (gradients == bad)
    assert (
        "step 4 is skipped on all ranks: gradient norm not finite (1 in a row)"
        in caplog.messages
    )
    with pytest.raises(
        NonFiniteError, match=r"step 6: gradient norm not finite, 3 steps in a row"
    ):
        training.step(*bad)
    assert (training.counts, training.weights) == ([6, 5, 3], [0.5, 1.5])


def test_gradients_of_zero_end_the_run_with_advice_of_their_own():
    training = Training(max_skipped_steps=1)
    with pytest.raises(
        NonFiniteError,
        match="^step 1: all gradients are zero, 1 step in a row .* does not depend on",
    ):
        training.step(0.0, 0.0)


def test_the_state_goes_on_after_a_resume():
    """The counts and the momentum continue: v = 0.5 v + g, w = w − 0.5 v."""
    before = Training()
    after = Training(max_skipped_steps=2)
    before.step(1.0, 1.0)
    before.step(math.nan, 1.0)
    state = before.optimizers.state_dict()
    after.optimizers.load_state_dict(state)
    with pytest.raises(NonFiniteError):  # the second bad step in a row
        after.step(math.nan, 1.0)
    assert state["guard"].tolist() == [2, 1, 1]
    after.step(1.0, 1.0)
    assert (after.counts, after.weights) == ([4, 2, 0], [1 - 0.75, 2 - 0.75])


def test_flags_are_asked_once_a_step(caplog):
    training = Training()
    asked = []
    training.optimizers.flags["stop"] = lambda: (
        bool(asked.append("stop")) or len(asked) > 2
    )
    training.optimizers.flags["save_failed"] = lambda: bool(asked.append("save_failed"))
    # flags are asked in a bad step too
    for gradient, stop in ((1.0, False), (math.nan, True)):
        training.step(gradient, 1.0)
        assert training.optimizers.agreed == {"stop": stop, "save_failed": False}
    assert asked == ["stop", "save_failed"] * 2
    assert "TorchTitan's own trainer" not in caplog.text
    # as under the stock trainer, which is told once what it lacks
    training.optimizers.flags.clear()
    for _ in range(2):
        training.step(1.0, 1.0)
    assert caplog.text.count("this is TorchTitan's own trainer") == 1


@pytest.mark.parametrize(
    "gradient",
    [None, torch.ones(1), torch.ones(1, device="meta")],
    ids=["none", "CPU", "GPU"],
)
@pytest.mark.parametrize("loss", [True, False])
def test_a_message_waits_for_nothing(gradient, loss):
    """The GPU is "meta", which has no data: whatever looks at a value raises.

    Gradients may be offloaded to the CPU.
    """
    training = Training()
    training.optimizers.flags["stop"] = lambda: True
    training.optimizers._parameters = [
        Mock(grad=gradient, device="meta") for _ in range(2)
    ]
    training.optimizers.non_finite_terms = lambda: (
        torch.zeros(2, dtype=torch.bool, device="meta") if loss else None
    )
    message = training.optimizers._message()
    # NCCL reduces this message: two numbers for the norms, two terms, a flag.
    assert (message.device.type, message.shape, message.dtype) == (
        "meta",
        (5,),
        torch.float32,
    )


@pytest.mark.parametrize(
    ("gradients", "loss", "bad_terms", "message"),
    [
        ((1.0, math.nan), {}, ["gradient norm"], "gradient norm not finite"),
        ((-math.inf, 1.0), {}, ["gradient norm"], "gradient norm not finite"),
        # Clipping by a norm that overflowed leaves zeros
        ((0.0, 0.0), {}, ["zero gradients"], "all gradients are zero (1"),
        ((1.0, 1.0), {"ce": math.nan}, ["cross-entropy"], "cross-entropy not finite"),
        (
            (0.0, 0.0),
            {"ce": math.nan},
            ["cross-entropy", "zero gradients"],
            "cross-entropy not finite, and all gradients are zero (1",
        ),
        ((1.0, 1.0), {"dispersion": math.nan}, ["dispersion"], "dispersion not finite"),
        ((1.0, 1.0), {"dispersion": math.inf}, ["dispersion"], "dispersion not finite"),
        (
            (math.nan, 1.0),
            {"ce": math.nan},
            ["cross-entropy", "gradient norm"],
            "cross-entropy and gradient norm not finite",
        ),
    ],
)
def test_a_fused_optimizer_takes_the_verdict_from_the_device(
    gradients, loss, bad_terms, message, caplog
):
    """The host reads it in the next step. The other steps give what they give alone."""
    alone, training = (Training(max_skipped_steps=9, fused=True) for _ in range(2))
    for optimizers in (alone.optimizers, training.optimizers):
        optimizers.flags["stop"] = lambda: False
    late = []
    training.optimizers.on_skip = late.append
    # Even the first one, which makes the optimizer's state
    training.step(*gradients, **loss)
    assert training.weights == [1.0, 2.0]
    for value in (1.0, 3.0):
        for one in (alone, training):
            one.step(value, -2.0)
        training.step(*gradients, **loss)
        assert training.weights == alone.weights
    optimizers = training.optimizers
    assert optimizers._counts.tolist() == [4, 2, 0]  # the last is unread
    assert (optimizers.bad_terms, late) == ([], [True, True])
    assert "step 5" not in caplog.text
    # as a save reads it
    state, expected = (one.optimizers.state_dict() for one in (training, alone))
    assert (state.pop("guard").tolist(), expected.pop("guard").tolist()) == (
        [5, 3, 1],
        [2, 0, 0],
    )
    assert (optimizers.bad_terms, late) == (bad_terms, [True, True, False])
    assert f"step 5 is skipped on all ranks: {message}" in caplog.text
    assert str(state) == str(expected)  # the weights' moments and steps
    assert not hasattr(optimizers.optimizers[0], "found_inf")
    optimizers.settle()
    assert training.counts == [5, 3, 1]


def test_a_late_message_ends_the_run_before_the_next_step():
    for most, act in (
        (2, lambda training: training.step(1.0, 1.0)),
        (1, lambda training: training.counts),
    ):
        training = Training(max_skipped_steps=most, fused=True)
        for _ in range(most):
            training.step(math.nan, 1.0)
        with pytest.raises(
            NonFiniteError, match=f"step {most}: gradient norm not finite, {most} step"
        ):
            act(training)  # neither a step nor a save hides it
        assert training.weights == [1.0, 2.0]


def test_flags_are_known_one_step_late():
    training = Training(fused=True)
    answers = [False, True, False]
    training.optimizers.flags["stop"] = lambda: answers.pop(0)
    assert not training.optimizers.agreed["stop"]  # before there is any message
    for known in (False, False, True):
        before = training.weights
        training.step(1.0, 1.0)
        assert training.weights != before  # a request to stop skips no step
        assert training.optimizers.agreed["stop"] == known
    training.optimizers.settle()
    assert training.optimizers.agreed == {"stop": False}


@pytest.mark.parametrize("change", ["unfused", "offloaded"])
def test_optimizers_that_cannot_take_the_verdict_from_the_device_wait(
    monkeypatch, change
):
    """``fused`` may come from a checkpoint, so that it counts when a step is taken.

    (Offloaded: the message is elsewhere.)
    """
    training = Training(fused=True)
    if change == "unfused":
        training.optimizers.optimizers[0].param_groups[0]["fused"] = False
    else:
        training.optimizers._parameters = [
            Mock(grad=p.grad, device="cpu:1") for p in training.model.parameters()
        ]
        monkeypatch.setattr(
            training.optimizers, "_message", lambda: torch.tensor([1.0, 1.0, 0.0, 0.0])
        )
    training.step(math.nan, 1.0)
    assert (training.optimizers.bad_terms, training.optimizers._counts.tolist()) == (
        ["gradient norm"],
        [1, 1, 1],
    )
    assert training.weights == [1.0, 2.0]


@pytest.fixture
def trainer(monkeypatch):
    """At step 5 of 9, which went well. ``calls``: what it asked of its parts."""
    monkeypatch.setattr(Trainer, "train_step", lambda self, data: None)
    trainer = object.__new__(DispTrainer)
    trainer.calls = calls = []
    trainer.step = 5
    trainer.last_step = 9
    trainer.optimizers = SimpleNamespace(
        bad_terms=[], in_a_row=0, agreed={"stop": False, "save_failed": False}
    )
    trainer.optimizers.settle = lambda: calls.append("settle")
    trainer.metrics_processor = SimpleNamespace(should_log=lambda step: step == 4)
    trainer._record_kernels = lambda: None  # of what ran so far in this process
    trainer.run_folder = object()
    trainer.aside = SimpleNamespace(wake=lambda: calls.append("wake"))
    trainer.checkpointer = SimpleNamespace(
        wait=lambda: calls.append("wait"),
        force=lambda: calls.append("force"),
        saves_again=False,
    )
    comm = SimpleNamespace(mode="default", train_timeout_seconds=77)
    training = SimpleNamespace(steps=9)
    condensation = SimpleNamespace(interval=5)
    trainer.job_config = SimpleNamespace(
        condensation=condensation, comm=comm, training=training
    )
    trainer.parallel_dims = None
    trainer.loss_fn = SimpleNamespace(group=None)
    trainer.clock = Clock(0.0)
    trainer.heartbeat = SimpleNamespace(
        begin=lambda doing, step: None, step=lambda step: None
    )
    trainer.measure_condensation = lambda: calls.append("condensation")
    trainer.event = lambda name, step, **details: calls.append((name, step, details))
    monkeypatch.setattr(
        train,
        "set_pg_timeouts",
        lambda timeout, parallel_dims: calls.append(timeout.total_seconds()),
    )
    return trainer


def test_a_full_disk_does_not_hide_why_a_run_ends(trainer, monkeypatch):
    monkeypatch.setattr(
        Trainer, "close", Mock(side_effect=OSError(28, "No space left on device"))
    )
    trainer.taken_by = lambda: None
    trainer._start_step = 5
    for name in ("aside", "heartbeat", "stop_request", "dataloader", "run_folder"):
        setattr(trainer, name, Mock())
    trainer.close()
    trainer.run_folder.close.assert_called_once()


@pytest.mark.parametrize(
    ("step", "agreed", "calls", "goes_on"),
    [
        (4, {}, ["settle"], True),  # a step that logs
        (5, {}, ["condensation"], True),
        (6, {}, [], True),
        (5, {"stop": True}, ["settle", "force"], False),
        # budget.stop_at_tokens may end it at a step that needs no checkpoint
        (9, {}, ["settle", "force"], False),
    ],
)
def test_what_follows_a_step(trainer, step, agreed, calls, goes_on):
    trainer.step = step
    trainer.optimizers.agreed |= agreed
    trainer.train_step(iter(()))
    assert trainer.calls == ["wake", 77, *calls]
    assert trainer.should_continue_training() == goes_on
    trainer.train_step(iter(()))
    assert trainer.calls == ["wake", 77, *calls, "wake", *calls]


@pytest.mark.parametrize("step", [1, 5])
def test_the_time_out_of_a_group_that_torchtitan_does_not_know(
    trainer, monkeypatch, step
):
    """That of CP×TP, over which the loss communicates."""
    times = {}
    monkeypatch.setattr(
        train,
        "_set_pg_timeout",
        lambda time, group: times.update({group: time.total_seconds()}),
    )
    monkeypatch.setattr(train, "process_group", lambda group: group)
    trainer.step = step
    trainer.loss_fn.group = "CP×TP"
    trainer.train_step(iter(()))
    assert times == {"CP×TP": 77}


def test_replicas_meet_once_in_every_step(trainer, monkeypatch):
    """In the last of three microbatches, in the second step as in the first."""
    reduced = []
    model = Mock()
    model.parameters.return_value = []
    trainer.model_parts = [model]
    trainer.gradient_accumulation_steps = 3
    trainer.parallel_dims = SimpleNamespace(dp_replicate_enabled=True)
    trainer.loss_fn.take_late = lambda: None

    def microbatch(self, **arguments):
        (last_call,) = model.set_requires_all_reduce.call_args.args
        reduced.append(last_call)
        return 0.0

    def step(self, data):
        for _ in range(3):
            self.forward_backward_step()

    monkeypatch.setattr(Trainer, "forward_backward_step", microbatch)
    monkeypatch.setattr(Trainer, "train_step", step)
    for _ in range(2):
        trainer.train_step(iter(()))
    assert reduced == [False, False, True] * 2


def test_what_went_wrong_in_a_step(trainer):
    trainer.optimizers.bad_terms = ["dispersion"]
    trainer.optimizers.in_a_row = 2
    for late, step in ((True, 4), (False, 5)):
        trainer._skipped(late)
        assert trainer.calls[-1] == (
            "skip",
            step,
            {"terms": ["dispersion"], "in_a_row": 2},
        )
    trainer.optimizers.in_a_row = 0
    trainer.optimizers.settle = lambda: setattr(trainer.optimizers, "in_a_row", 1)
    # a save knows of the step before it
    assert not GuardedOptimizers.healthy(trainer.optimizers)
    trainer.optimizers.agreed["save_failed"] = True
    with pytest.raises(
        CheckpointError, match="step 5: an asynchronous save failed on another rank"
    ):
        trainer.train_step(iter(()))
    assert trainer.calls[-1] == "wait"  # which raises where this rank knows the reason


def test_complete_is_said_after_the_last_save(trainer, monkeypatch):
    """An asynchronous one may take minutes, which are the checkpoints'."""
    monkeypatch.setattr(Trainer, "train", lambda self: None)
    trainer.step = 9
    trainer.report = lambda: None
    trainer.stop_request = SimpleNamespace(held=lambda: False, done=lambda: None)
    finish = lambda step: trainer.calls.append("finish") or time.sleep(0.05)  # noqa: E731
    trainer.checkpointer = SimpleNamespace(finish=finish)
    trainer.train()
    *before, (name, step, details) = trainer.calls
    assert (before, name, step) == (["wake", "finish", "condensation"], "complete", 9)
    assert 0.05 <= details["spent"]["checkpoints"] < 100


def test_a_start_that_trains_nothing_says_where_the_run_stands(
    trainer, monkeypatch, caplog
):
    """Not step 0, where this start is, as nothing was loaded: reports show what the run
    has up to its newest event.
    """
    trainer.step = 0
    trainer.clock = Clock(123.0)
    trainer.checkpointer = SimpleNamespace(newest=lambda: 6)
    ended = EndedError("step-9 holds the model only", 9)
    monkeypatch.setattr(Trainer, "train", Mock(side_effect=ended))
    trainer.run_folder = SimpleNamespace(
        config_changes={"dispersion.enabled": [True, False]}
    )
    for held in (True, False):
        trainer.stop_request = SimpleNamespace(
            held=lambda held=held: held, file="RUN/stop"
        )
        trainer.train()
    reason = "the file RUN/stop was there before the start"
    stop = ("stop", 6, {"allocated": 123.0, "kind": "file", "reason": reason})
    assert trainer.calls == [stop, ("complete", 9, {"allocated": 123.0})]
    assert (
        "The config differs from that of the last start: dispersion.enabled: True → False"
        in caplog.text
    )


@pytest.mark.parametrize(
    "error", [ConfigError, CheckpointError, DataError, NonFiniteError]
)
def test_errors_of_the_user_are_said_without_a_traceback(monkeypatch, capsys, error):
    monkeypatch.setattr(train, "load_config", lambda argv: None)
    monkeypatch.setattr(
        train, "run", Mock(side_effect=error("what was found, and what to change"))
    )
    with pytest.raises(SystemExit) as exit:
        train.main([])
    assert exit.value.code == EXIT_CODE
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == "titan-disp: error: what was found, and what to change"
    )
