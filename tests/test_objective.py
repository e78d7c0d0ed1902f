"""The training objective, cross-entropy + λ · dispersion, and the ledger of its terms, against the formula."""

import pytest
import torch

from tests.oracle import angular, drawing_order
from titan_disp.dispersion import DispersionLoss, DispersionObjective, LossLedger

PARAMETERS = {"tau": 1.0, "clamp": 0.25, "norm_eps": 1e-2}


def cross_entropy(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 10, 7, generator=generator).double()
    layers = [torch.randn(4, 10, 5, generator=generator).double() for _ in range(3)]
    labels = torch.randint(7, (4, 10), generator=generator)
    labels[0, :7] = -100
    return logits, layers, labels


def summed_dispersion(layers, labels):
    """The oracle's mean over layers, summed over the valid labels of every sequence."""
    per_sequence = torch.stack([angular(z, **PARAMETERS) for z in layers]).mean(0)
    return ((labels != -100).sum(1) * per_sequence).sum()


def test_mean_over_valid_tokens_whatever_the_accumulation(batch):
    logits, layers, labels = batch
    objective = DispersionObjective(cross_entropy, DispersionLoss(**PARAMETERS), lambda step: 0.5)
    valid = (labels != -100).sum()
    expected = (cross_entropy(logits, labels) + 0.5 * summed_dispersion(layers, labels)) / valid
    for size in (1, 2, 4):
        parts = [
            objective((logits[i : i + size], [z[i : i + size] for z in layers]), labels[i : i + size])
            for i in range(0, 4, size)
        ]
        torch.testing.assert_close(sum(parts) / valid, expected)


def test_coeff_follows_the_step(batch):
    logits, layers, labels = batch
    ce, dispersion = cross_entropy(logits, labels), summed_dispersion(layers, labels)
    for step in (0, 3):
        objective = DispersionObjective(
            cross_entropy, DispersionLoss(**PARAMETERS), coeff=float, step=lambda now=step: now
        )
        torch.testing.assert_close(objective((logits, layers), labels), ce + step * dispersion)


def test_sampled_tokens_follow_the_step(batch):
    logits, layers, labels = batch
    loss = DispersionLoss(**PARAMETERS, estimator="sampled", max_tokens=4, seed=5)
    totals = []
    for step in (0, 1):
        objective = DispersionObjective(cross_entropy, loss, lambda step: 2.0, step=lambda now=step: now)
        totals.append(objective((logits, layers), labels))
        chosen = [z[:, drawing_order(10, 5, step, layer)[:4]] for layer, z in enumerate(layers)]
        expected = cross_entropy(logits, labels) + 2.0 * summed_dispersion(chosen, labels)
        torch.testing.assert_close(totals[-1], expected)
    assert totals[0] != totals[1]


def test_plain_logits_give_cross_entropy(batch):
    logits, _, labels = batch
    objective = DispersionObjective(cross_entropy, DispersionLoss(**PARAMETERS), lambda step: 0.5)
    assert torch.equal(objective(logits, labels), cross_entropy(logits, labels))


def test_plain_logits_are_recorded(batch):
    logits, _, labels = batch
    ledger = LossLedger()
    objective = DispersionObjective(
        cross_entropy, DispersionLoss(**PARAMETERS), lambda step: 0.5, ledger=ledger, ignore_index=-100
    )
    ce = objective(logits.requires_grad_(), labels)
    assert ledger.mean(None) == {"ce": pytest.approx(ce.item() / (labels != -100).sum().item()), "dispersion": 0.0}


def test_ledger_sums_over_batches_of_different_sizes():
    ledger = LossLedger()
    for ce, dispersion, count in ((1.0, 2.0, 3), (5.0, -1.0, 1)):
        ledger.add(torch.tensor(ce), torch.tensor(dispersion), torch.tensor(count))
    assert ledger.mean(None) == {"ce": 1.5, "dispersion": 0.25}


def test_ledger_keeps_terms_apart_and_unscaled(batch):
    logits, layers, labels = batch
    ledger = LossLedger()
    objective = DispersionObjective(cross_entropy, DispersionLoss(**PARAMETERS), lambda step: 0.5, ledger=ledger)
    assert ledger.mean(None) is None
    with torch.no_grad():  # validation must not show in the training curves
        objective(logits, labels)
    assert ledger.mean(None) is None
    for _ in range(3):
        loss = objective((logits.requires_grad_(), layers), labels)
    assert not ledger._sums.requires_grad  # or it would keep the graph of every step until the next log
    terms = ledger.mean(None)
    total = loss.item() / (labels != -100).sum().item()
    assert terms["ce"] + 0.5 * terms["dispersion"] == pytest.approx(total, abs=1e-12)
    ledger.reset()
    assert ledger.mean(None) is None


def test_ledger_knows_which_term_is_not_finite():
    ledger = LossLedger()
    assert ledger.non_finite() is None
    for ce, dispersion in ((1.0, 2.0), (1.0, float("inf")), (1.0, 2.0)):
        ledger.add(torch.tensor(ce), torch.tensor(dispersion), torch.tensor(3))
    assert ledger.non_finite().tolist() == [False, True]


def test_ledger_receives_the_worst_fit_of_training(batch):
    logits, layers, labels = batch
    ledger, errors = LossLedger(), []
    loss = DispersionLoss(**PARAMETERS, estimator="moments")
    loss(layers, fit_errors=errors)
    objective = DispersionObjective(cross_entropy, loss, lambda step: 0.5, ledger=ledger)
    with torch.no_grad():
        objective((logits, layers), labels)
    assert ledger.worst_fit(None) is None
    objective((logits, layers), labels)
    assert ledger.worst_fit(None) == max(error.max().item() for error in errors)


def test_ledger_keeps_the_worst_fit_until_it_is_reset():
    ledger = LossLedger()
    for errors in ([[0.1, 0.2]], [[0.3, 0.1]], [[0.2, 0.2]]):
        ledger.add_fit_errors(torch.tensor(errors))
    assert ledger.worst_fit(None) == pytest.approx(0.3)
    ledger.reset()
    assert ledger.worst_fit(None) is None
