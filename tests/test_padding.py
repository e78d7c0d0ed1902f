"""Padded positions are no tokens: the loss of z with ``valid`` is that of every z[b, valid[b]] alone.

On 2 and 4 ranks: ``test_sharded_loss``.
"""

import math

import pytest
import torch

from tests.padding import CASES, NARROW_AND_WIDE, STRIDES, TOKENS, check, padded
from titan_disp.dispersion import DispersionLoss, dispersion_loss, layers, pairwise


@pytest.mark.parametrize(("features", "case"), NARROW_AND_WIDE, ids=str)
def test_padding_is_as_if_it_were_not_there(features, case, monkeypatch):
    monkeypatch.setattr(pairwise, "TILE_ELEMENTS", 3 * 32 * 32)  # several tiles
    monkeypatch.setattr(layers, "BATCH_ELEMENTS", 3 * 64 * features)  # some sequences after the others
    check(features, case)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_may_hold_anything(garbage, dtype):
    for variant, estimator, options in CASES:
        results = []
        for filling in (garbage, 0.0):
            z, valid = padded(TOKENS, 6, filling)
            z = z.to(dtype).requires_grad_(True)
            value = dispersion_loss(z, variant=variant, estimator=estimator, valid=valid, **options)
            value.sum().backward()
            results.append((value.detach(), z.grad))
        for found, expected in zip(*results, strict=True):
            assert found.isfinite().all()
            assert torch.equal(found, expected)


def test_l2_is_accurate_far_from_the_origin():
    """Tokens are taken relative to their mean, in which padding has no part: else ‖a‖² + ‖b‖² − 2ab would lose the digits."""
    z, valid = padded((50, 3), 16)
    z = (z + 1000.0).float()
    options = {"variant": "l2_repel", "tau": 20.0, "norm_coeff": 0.0}
    found = dispersion_loss(z, valid=valid, **options)
    expected = [dispersion_loss(z[b : b + 1, valid[b]].double(), **options) for b in range(2)]
    torch.testing.assert_close(found.double(), torch.cat(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mask_of_tokens_only_changes_nothing(case):
    """Not the tokens that are drawn either."""
    variant, estimator, options = case
    z, _ = padded((300, 300), 6)
    loss = DispersionLoss(variant, estimator, **options)
    results = []
    for valid in (None, torch.ones(2, 300, dtype=torch.bool)):
        ours = z.nan_to_num(0.0).requires_grad_(True)
        value = loss([ours], step=5, valid=valid)
        value.sum().backward()
        results.append((value.detach(), ours.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_fit_errors_of_padded_sequences():
    """Of a sequence without two tokens there is nothing to fit, and no error."""
    z, valid = padded(tuple(STRIDES), 6)
    errors, alone = [], []
    loss = DispersionLoss(estimator="moments")
    loss([z], fit_errors=errors, valid=valid)
    for b, tokens in enumerate(STRIDES):
        if tokens > 1:
            loss([z[b : b + 1, valid[b]]], fit_errors=alone)
    torch.testing.assert_close(errors[0][:-2], torch.cat(alone))
    assert (errors[0][-2:] == 0).all()


@pytest.mark.parametrize(
    ("valid", "message"),
    [
        (torch.ones(2, 5), r"valid has shape \(2, 5\) and dtype torch.float32, expected bool \(2, 5\)"),
        (torch.ones(2, 4, dtype=torch.bool), r"valid has shape \(2, 4\) .* expected bool \(2, 5\)"),
    ],
)
def test_refused(valid, message):
    with pytest.raises(ValueError, match=message):
        dispersion_loss(torch.ones(2, 5, 3), valid=valid)
