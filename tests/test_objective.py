"""The training objective, cross-entropy + λ · dispersion, and the ledger of its terms,
against the formula.
"""

import gc
import math
import weakref
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracle import angular, cross_entropy, drawing_order
from titan_disp.dispersion import AutogradVariant, DispersionLoss, masks
from titan_disp.objective import DispersionObjective, LossLedger

PARAMETERS = {"tau": 1.0, "clamp": 0.25, "norm_eps": 1e-2}


def objective(coeff=lambda step: 0.5, loss=None, **others):
    return DispersionObjective(
        cross_entropy, loss or DispersionLoss(**PARAMETERS), coeff, **others
    )


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 10, 7, generator=generator).double()
    layers = [torch.randn(4, 10, 5, generator=generator).double() for _ in range(3)]
    labels = torch.randint(7, (4, 10), generator=generator)
    labels[0, :7] = -100
    return logits.requires_grad_(), layers, labels


def summed_dispersion(layers, labels, **options):
    """The oracle's mean over layers, summed over the valid labels of every sequence."""
    per_sequence = torch.stack(
        [angular(z, **PARAMETERS | options) for z in layers]
    ).mean(0)
    return ((labels != -100).sum(1) * per_sequence).sum()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sums_over_valid_tokens_whatever_the_accumulation(batch, size):
    """Of several losses, each with its weight.

    The ledger has the means without weights, and nothing of validation.
    """
    logits, layers, labels = batch
    ledger = LossLedger()
    valid = (labels != -100).sum().item()
    losses = {
        "angular": (1.0, DispersionLoss(**PARAMETERS)),
        "other": (3.0, DispersionLoss(tau=0.5)),
    }
    loss = objective(loss=losses, ledger=ledger)
    with torch.no_grad():
        loss((logits, layers), labels)
    assert ledger.mean(None) is None
    found = sum(
        loss((logits[i], [z[i] for z in layers]), labels[i])
        for i in torch.arange(4).split(size)
    )
    ce = cross_entropy(logits, labels)
    first = summed_dispersion(layers, labels)
    second = summed_dispersion(layers, labels, tau=0.5)
    torch.testing.assert_close(found, ce + 0.5 * (first + 3 * second))
    # or it would keep the graph of every step until the next log
    assert not ledger._sums.requires_grad
    terms = {
        "ce": ce,
        "dispersion": first + 3 * second,
        "dispersion_angular": first,
        "dispersion_other": second,
    }
    assert ledger.mean(None) == pytest.approx(
        {name: term.item() / valid for name, term in terms.items()}, rel=1e-6
    )
    ledger.reset()
    assert ledger.mean(None) is None


@pytest.mark.parametrize("step", [0, 3])
def test_coeff_and_sampled_tokens_follow_the_step(batch, step):
    logits, layers, labels = batch
    sampled = DispersionLoss(**PARAMETERS, estimator="sampled", max_tokens=4, seed=5)
    found = objective(lambda step: step + 0.5, sampled, step=lambda: step)(
        (logits, layers), labels
    )
    chosen = [
        z[:, drawing_order(10, 5, step, layer)[:4]] for layer, z in enumerate(layers)
    ]
    expected = cross_entropy(logits, labels) + (step + 0.5) * summed_dispersion(
        chosen, labels
    )
    torch.testing.assert_close(found, expected)


def test_plain_logits_give_cross_entropy(batch):
    """The ledger knows which term is not finite, and has no mean where no token is
    valid.
    """
    logits, _, labels = batch
    ledger = LossLedger()
    assert ledger.non_finite() is None
    ce = objective(ledger=ledger)(logits, labels)
    assert torch.equal(ce, cross_entropy(logits, labels))
    assert ledger.mean(None) == {
        "ce": pytest.approx(ce.item() / (labels != -100).sum().item()),
        "dispersion": 0.0,
    }
    ledger.add(torch.tensor(1.0), torch.tensor(math.inf), torch.tensor(3))
    assert ledger.non_finite().tolist() == [False, True]
    ledger.reset()
    objective(ledger=ledger)(logits, torch.full_like(labels, -100))
    assert all(math.isnan(mean) for mean in ledger.mean(None).values())


def test_ledger_receives_the_worst_fit_of_training(batch):
    logits, layers, labels = batch
    ledger = LossLedger()
    errors = []
    moments = DispersionLoss(**PARAMETERS, estimator="moments")
    moments(layers, fit_errors=errors)
    with torch.no_grad():
        objective(loss=moments, ledger=ledger)((logits, layers), labels)
    assert ledger.worst_fit(None) is None
    objective(loss=moments, ledger=ledger)((logits, layers), labels)
    worst = max(error.max().item() for error in errors)
    assert ledger.worst_fit(None) == worst
    for more, kept in (
        (worst / 2, worst),
        (worst + 0.25, worst + 0.25),
        (worst, worst + 0.25),
    ):
        ledger.add_fit_errors(torch.tensor([[more, 0.0]], dtype=torch.float64))
        assert ledger.worst_fit(None) == pytest.approx(kept)
    ledger.reset()
    assert ledger.worst_fit(None) is None


@pytest.fixture
def every_layer_alone(monkeypatch):
    monkeypatch.setattr("titan_disp.dispersion.layers.PACK_ELEMENTS", 0)


class Blocks(torch.nn.ModuleList):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(6, 6) for _ in range(4))

    def forward(self, h):
        activations = []
        for layer in self:
            h = layer(h).tanh()
            activations.append(h)
        return h, tuple(activations)


@pytest.mark.parametrize("retain", [False, True])
def test_gradients_in_the_backward_pass(
    every_layer_alone, monkeypatch, request, retain
):
    """They are those of the forward pass, with every factor; the terms are known
    afterwards, and nothing holds a layer.
    """
    tokens = torch.randn(2, 2, 9, 6)
    labels = torch.randint(6, (2, 9))
    labels[0, 3:] = -100
    monkeypatch.setattr(OfLayer, "seen", seen := [])
    gc.disable()
    request.addfinalizer(gc.enable)
    every = (
        DispersionLoss(estimator="moments"),
        DispersionLoss("l2_repel"),
        DispersionLoss(OfLayer()),
    )
    losses = dict(zip("abc", zip((1.0, 3.0, 0.5), every, strict=True), strict=True))
    found = {}
    for defer in (False, True):
        model = Blocks()
        ledger = LossLedger()
        layers = []
        printed = []
        loss = objective(loss=losses, ledger=ledger, defer=defer)
        for microbatch in tokens.unbind():
            predictions = model(microbatch)
            layers.append(weakref.ref(predictions[1][1]))
            value = loss(predictions, labels) / 7
            del predictions
            for left in range(1 + retain, 0, -1):
                value.backward(retain_graph=left > 1)
            late = loss.take_late()
            assert (late is None) != defer
            printed.append(value.detach() + (late / 7 if defer else 0))
        assert not any(layer() is not None for layer in layers), (
            "something holds the graph that it belongs to"
        )
        gradients = [p.grad for p in model.parameters()]
        found[defer] = (
            gradients,
            torch.stack(printed),
            ledger.mean(None),
            ledger.worst_fit(None),
        )
    if retain:  # the second pass adds its terms again
        found = {defer: gradients for defer, (gradients, *_) in found.items()}
    # float32's, also for the means
    torch.testing.assert_close(found[True], found[False], rtol=1.3e-6, atol=1e-5)
    assert sorted(seen) == [i for i in range(4) for _ in range(2 + 2 * (1 + retain))]


@pytest.mark.parametrize("padded", [False, True])
def test_sampled_rows_are_added_to_the_gradients_that_arrive(padded):
    """The gradients are those of the forward pass, also of a float64 model, and no
    layer's gradient begins as zeros.
    """
    tokens = torch.randn(2, 9, 6).double()
    labels = torch.randint(6, (2, 9))
    if padded:
        labels[0, 3:] = -100
    sampled = DispersionLoss(**PARAMETERS, estimator="sampled", max_tokens=4, seed=5)
    found = {}
    for defer in (False, True):
        torch.manual_seed(0)
        model = Blocks().double()
        loss = objective(loss=sampled, defer=defer)
        segments = torch.where(labels >= 0, 0, -1) if padded else None
        loss.within_documents = padded
        logits, activations = model(tokens)[:2]
        value = loss((logits, activations, segments), labels)
        with Operations() as operations:
            value.backward()
        assert loss.take_late() is None
        shapes = [shape for name, shape in operations.seen if name == "expand"]
        assert (activations[0].shape in shapes) != defer
        found[defer] = [value.detach(), *(p.grad for p in model.parameters())]
    torch.testing.assert_close(found[True], found[False], rtol=1e-6, atol=1e-8)


def test_sampled_rows_need_a_gradient_to_be_added_to():
    sampled = DispersionLoss(**PARAMETERS, estimator="sampled", max_tokens=4)
    h = torch.randn(2, 9, 6, requires_grad=True)
    lost = torch.randn(2, 9, 6, requires_grad=True)
    value = objective(loss=sampled, defer=True)(
        (h, (lost, h)), torch.randint(6, (2, 9))
    )
    with pytest.raises(RuntimeError, match="activation 0 gets a gradient from disp"):
        value.backward()


class Operations(TorchDispatchMode):
    """Names and result shapes of the operations, in order."""

    def __enter__(self):
        self.seen = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        shape = getattr(result, "shape", None)
        self.seen.append((function.overloadpacket.__name__, shape))
        return result


class OfLayer(AutogradVariant):
    seen = []

    def loss(self, z, valid, context):
        self.seen.append(context.layer)
        return (context.layer + 1) * z.square().sum((1, 2))


@pytest.mark.parametrize("defer", [False, True])
def test_the_host_waits_for_documents_once_a_microbatch(every_layer_alone, defer):
    losses = {"a": (1.0, DispersionLoss()), "b": (2.0, DispersionLoss("l2_repel"))}
    segments = torch.arange(9).div(3).int().expand(3, 9)
    labels = torch.zeros(3, 9, dtype=torch.long)
    loss = objective(loss=losses, defer=defer, within_documents=True)
    with mock.patch.object(masks, "_ranges", wraps=masks._ranges) as ranges:
        loss((*Blocks()(torch.randn(3, 9, 6)), segments), labels).backward()
    assert ranges.call_count == 1


def test_what_a_hook_in_the_backward_pass_refuses(every_layer_alone):
    model = Blocks()
    tokens = torch.randn(3, 9, 6)
    labels = torch.zeros(3, 9, dtype=torch.long)
    h, activations = model(tokens)
    value = objective(defer=True)((h, (model[0](tokens), *activations)), labels)
    with pytest.raises(
        RuntimeError, match="activation 0 gets a gradient from dispersion only"
    ):
        value.backward()
    value = objective(defer=True)(model(tokens), labels)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(value, model[0].weight, create_graph=True)
    h, activations = model(tokens)
    value = objective(defer=True)((h + 0, activations), labels)  # + saves nothing
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(RuntimeError, match="activation 3 has been modified"):
        value.backward()


def test_layers_in_any_order_and_twice(every_layer_alone, monkeypatch):
    """A layer may stand in the list twice, and the first may get its gradient before
    the last. A large batch is computed in parts.
    """
    monkeypatch.setattr("titan_disp.dispersion.layers.BATCH_ELEMENTS", 2 * 9 * 6)
    tokens = torch.randn(3, 9, 6)
    labels = torch.zeros(3, 9, dtype=torch.long)
    labels[1, 4:] = -100
    found = {}
    for defer in (False, True):
        model = Blocks()
        ledger = LossLedger()
        loss = objective(defer=defer, ledger=ledger)
        h, activations = model(tokens)
        layers = [activations[3], activations[0], activations[1], activations[0]]
        loss((h, layers), labels).backward()
        assert (loss.take_late() is not None) == defer
        found[defer] = [*(p.grad for p in model.parameters()), ledger.mean(None)]
    torch.testing.assert_close(found[True], found[False], rtol=1.3e-6, atol=1e-5)


def test_a_backward_pass_that_does_not_reach_all_activations(every_layer_alone):
    model = Blocks()
    labels = torch.zeros(3, 9, dtype=torch.long)
    loss = objective(defer=True)
    value = loss(model(torch.randn(3, 9, 6)), labels)
    loss(model(torch.randn(3, 9, 6)), labels).backward()
    with pytest.raises(RuntimeError, match="has not reached some activations"):
        loss.take_late()
    assert loss.take_late() is None  # nothing of that step is left
    value.backward()
    late = loss.take_late()
    del value
    # An error in a backward pass ends that step, not the next one.
    predictions = model(torch.randn(3, 9, 6))
    hook = predictions[1][1].register_hook(stop)
    failed = loss(predictions, labels)
    with pytest.raises(KeyError):
        failed.backward()
    hook.remove()
    del failed, predictions
    loss(model(torch.randn(3, 9, 6)), labels).backward()
    assert loss.take_late().abs() < 10 * late.abs()


def stop(grad):
    raise KeyError


def test_a_microbatch_without_sequences(every_layer_alone):
    model = Blocks()
    loss = objective(defer=True)
    loss(model(torch.randn(0, 9, 6)), torch.zeros(0, 9, dtype=torch.long)).backward()
    assert loss.take_late() is None


def test_lambda_is_exact_in_float64(every_layer_alone):
    """In float32, 0.1 has eight digits."""
    gradients = {}
    for defer in (False, True):
        model = Blocks().double()
        tokens = torch.randn(3, 9, 6, generator=torch.Generator().manual_seed(0))
        labels = torch.zeros(3, 9, dtype=torch.long)
        loss = objective(lambda step: 0.1, defer=defer)
        loss(model(tokens.double()), labels).backward()
        gradients[defer] = [p.grad for p in model.parameters()]
    torch.testing.assert_close(gradients[True], gradients[False], rtol=1e-12, atol=0)


def test_late_terms_of_several_backward_passes_add_up(every_layer_alone):
    """Two forward passes may come before both backward passes, and one of these may be
    repeated.
    """
    labels = torch.zeros(3, 9, dtype=torch.long)
    ledger = LossLedger()
    loss = objective(defer=True, ledger=ledger)
    predictions = [Blocks()(torch.randn(3, 9, 6)) for _ in range(2)]
    first, second = (
        0.5 * summed_dispersion([z.detach() for z in layers], labels)
        for _, layers in predictions
    )
    losses = [loss(prediction, labels) for prediction in predictions]
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    torch.testing.assert_close(loss.take_late(), first + second)
    assert loss.take_late() is None
    ledger.reset()
    losses[0].backward()
    torch.testing.assert_close(loss.take_late(), first)
    dispersion = ledger.mean(None)["dispersion"] * labels.numel()
    assert 0.5 * dispersion == pytest.approx(first.item(), rel=1e-5)
