import pytest
import torch

from tests.oracle import dispersion_oracle
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


def test_mean_over_valid_tokens_whatever_the_accumulation(batch):
    logits, layers, labels = batch
    objective = DispersionObjective(cross_entropy, DispersionLoss(**PARAMETERS), lambda step: 0.5)
    valid = (labels != -100).sum(1)
    per_sequence = torch.stack([dispersion_oracle(z, **PARAMETERS) for z in layers]).mean(0)
    expected = cross_entropy(logits, labels) / valid.sum() + 0.5 * (valid * per_sequence).sum() / valid.sum()
    for size in (1, 2, 4):
        parts = [
            objective((logits[i : i + size], [z[i : i + size] for z in layers]), labels[i : i + size])
            for i in range(0, 4, size)
        ]
        torch.testing.assert_close(sum(parts) / valid.sum(), expected)


def test_plain_logits_give_cross_entropy(batch):
    logits, _, labels = batch
    objective = DispersionObjective(cross_entropy, DispersionLoss(**PARAMETERS), lambda step: 0.5)
    assert torch.equal(objective(logits, labels), cross_entropy(logits, labels))


def test_ledger_keeps_terms_apart_and_unscaled(batch):
    logits, layers, labels = batch
    ledger = LossLedger()
    objective = DispersionObjective(cross_entropy, DispersionLoss(**PARAMETERS), lambda step: 0.5, ledger=ledger)
    assert ledger.mean(None) is None
    with torch.no_grad():  # validation must not show in the training curves
        objective(logits, labels)
    assert ledger.mean(None) is None
    for _ in range(3):
        loss = objective((logits, layers), labels)
    terms = ledger.mean(None)
    total = loss.item() / (labels != -100).sum().item()
    assert terms["ce"] + 0.5 * terms["dispersion"] == pytest.approx(total, abs=1e-12)
    ledger.reset()
    assert ledger.mean(None) is None
