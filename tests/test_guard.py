"""Which steps the guard skips, what it counts, and when it ends the run. (tests/test_ranks_agree.py uses two ranks.)"""

import math
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer

from titan_disp.dispersion import LossLedger
from titan_disp.errors import NonFiniteError
from titan_disp.run.guard import GuardedOptimizers

LR, MOMENTUM = 0.5, 0.5


class Training:
    """Two parameters of one element, which begin at 1 and 2. The terms of a step's loss go through a real ledger."""

    def __init__(self, max_skipped_steps=3, fused=False):
        self.model = nn.ParameterDict({name: nn.Parameter(torch.tensor([x])) for name, x in (("a", 1.0), ("b", 2.0))})
        self.ledger = LossLedger()
        kind, options = (torch.optim.AdamW, {"fused": True}) if fused else (torch.optim.SGD, {"momentum": MOMENTUM})
        inner = OptimizersContainer([self.model], kind, {"lr": LR, **options})
        self.optimizers = GuardedOptimizers(inner, self.ledger.non_finite, max_skipped_steps)

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
    assert training.optimizers.state_dict()["guard"].dtype == torch.int64  # float32 would stop counting at 2²⁴ steps
    training.step(0.0, -2.0)  # a gradient of zero, or none, is no reason to skip
    assert (training.weights, training.optimizers.bad_terms, training.counts) == ([1.0, 3.0], [], [1, 0, 0])
    training.optimizers.zero_grad()
    assert all(p.grad is None for p in training.model.parameters())
    training.model["a"].grad = torch.tensor([1.0])
    training.optimizers.step()
    assert training.weights == [0.5, 3.0]
    training.optimizers.zero_grad()
    training.optimizers.step()  # without any gradient
    assert (training.optimizers.bad_terms, training.counts) == (["gradient norm"], [3, 1, 1])


def test_steps_in_a_row_end_the_run(caplog):
    training, bad = Training(max_skipped_steps=3), (math.nan, 1.0)
    for gradients in (bad, bad, (1.0, 1.0), bad, bad):
        training.step(*gradients)
        assert training.optimizers.bad_terms == ["gradient norm"] * (gradients == bad)
    assert "step 4 is skipped on all ranks: gradient norm not finite (1 in a row)" in caplog.messages
    with pytest.raises(NonFiniteError, match=r"step 6: gradient norm not finite, 3 steps in a row"):
        training.step(*bad)
    assert (training.counts, training.weights) == ([6, 5, 3], [0.5, 1.5])


def test_the_state_goes_on_after_a_resume():
    """The counts and the momentum continue: v = 0.5 v + g, w = w − 0.5 v."""
    before, after = Training(), Training(max_skipped_steps=2)
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
    training, asked = Training(), []
    training.optimizers.flags["stop"] = lambda: bool(asked.append("stop")) or len(asked) > 2
    training.optimizers.flags["save_failed"] = lambda: bool(asked.append("save_failed"))
    for gradient, stop in ((1.0, False), (math.nan, True)):  # flags are asked in a bad step too
        training.step(gradient, 1.0)
        assert training.optimizers.agreed == {"stop": stop, "save_failed": False}
    assert asked == ["stop", "save_failed"] * 2
    assert "TorchTitan's own trainer" not in caplog.text
    training.optimizers.flags.clear()  # as under the stock trainer, which is told once what it lacks
    for _ in range(2):
        training.step(1.0, 1.0)
    assert caplog.text.count("this is TorchTitan's own trainer") == 1


@pytest.mark.parametrize("gradient", [None, torch.ones(1), torch.ones(1, device="meta")], ids=["none", "CPU", "GPU"])
@pytest.mark.parametrize("loss", [True, False])
def test_a_message_waits_for_nothing(gradient, loss):
    """The GPU is "meta", which has no data: whatever looks at a value raises. Gradients may be offloaded to the CPU."""
    training = Training()
    training.optimizers.flags["stop"] = lambda: True
    training.optimizers._parameters = [Mock(grad=gradient, device="meta") for _ in range(2)]
    training.optimizers.non_finite_terms = lambda: torch.zeros(2, dtype=torch.bool, device="meta") if loss else None
    message = training.optimizers._message()
    # NCCL reduces this message: two numbers for the norms, two terms, a flag.
    assert (message.device.type, message.shape, message.dtype) == ("meta", (5,), torch.float32)


@pytest.mark.parametrize(
    ("gradients", "loss", "bad_terms"),
    [
        ((1.0, math.nan), {}, ["gradient norm"]),
        ((-math.inf, 1.0), {}, ["gradient norm"]),
        ((0.0, 0.0), {}, ["gradient norm"]),  # clipping by a norm that overflowed leaves zeros
        ((1.0, 1.0), {"ce": math.nan}, ["cross-entropy"]),
        ((1.0, 1.0), {"dispersion": math.nan}, ["dispersion"]),
        ((1.0, 1.0), {"dispersion": math.inf}, ["dispersion"]),
        ((math.nan, 1.0), {"ce": math.nan}, ["cross-entropy", "gradient norm"]),
    ],
)
def test_a_fused_optimizer_takes_the_verdict_from_the_device(gradients, loss, bad_terms, caplog):
    """The host reads it in the next step. The other steps give what they give alone."""
    alone, training = (Training(max_skipped_steps=9, fused=True) for _ in range(2))
    for optimizers in (alone.optimizers, training.optimizers):
        optimizers.flags["stop"] = lambda: False
    late = []
    training.optimizers.on_skip = late.append
    training.step(*gradients, **loss)  # even the first one, which makes the optimizer's state
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
    state, expected = (one.optimizers.state_dict() for one in (training, alone))  # as a save reads it
    assert (state.pop("guard").tolist(), expected.pop("guard").tolist()) == ([5, 3, 1], [2, 0, 0])
    assert (optimizers.bad_terms, late) == (bad_terms, [True, True, False])
    assert "step 5 is skipped on all ranks: " + " and ".join(bad_terms) in caplog.text
    assert str(state) == str(expected)  # the weights' moments and steps
    assert not hasattr(optimizers.optimizers[0], "found_inf")
    optimizers.settle()
    assert training.counts == [5, 3, 1]


def test_a_late_message_ends_the_run_before_the_next_step():
    for most, act in ((2, lambda training: training.step(1.0, 1.0)), (1, lambda training: training.counts)):
        training = Training(max_skipped_steps=most, fused=True)
        for _ in range(most):
            training.step(math.nan, 1.0)
        with pytest.raises(NonFiniteError, match=f"step {most}: gradient norm not finite, {most} step"):
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
def test_optimizers_that_cannot_take_the_verdict_from_the_device_wait(monkeypatch, change):
    """``fused`` may come from a checkpoint, so that it counts when a step is taken. (Offloaded: the message is elsewhere.)"""
    training = Training(fused=True)
    if change == "unfused":
        training.optimizers.optimizers[0].param_groups[0]["fused"] = False
    else:
        training.optimizers._parameters = [Mock(grad=p.grad, device="cpu:1") for p in training.model.parameters()]
        monkeypatch.setattr(training.optimizers, "_message", lambda: torch.tensor([1.0, 1.0, 0.0, 0.0]))
    training.step(math.nan, 1.0)
    assert (training.optimizers.bad_terms, training.optimizers._counts.tolist()) == (["gradient norm"], [1, 1, 1])
    assert training.weights == [1.0, 2.0]
