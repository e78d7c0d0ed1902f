"""Padded positions are no tokens: the loss of z with ``valid`` is that of each z[b,
valid[b]] alone, by float64.
"""

import math

import pytest
import torch

from tests.oracle import EVERY_LOSS, drawing_order, drawn, moments_oracle, oracle
from titan_disp.dispersion import (
    DispersionLoss,
    dispersion_loss,
    dispersion_losses,
    layers,
    pairwise,
)
from titan_disp.dispersion.variants import VARIANTS

CASES = [(v, e, options | drawn(e, 24)) for v, e, options in EVERY_LOSS]
# Decorrelation has one form for few features and another one for many.
NARROW_AND_WIDE = [(6, case) for case in CASES] + [
    (70, case) for case in CASES if VARIANTS[case[0]].linear_in_tokens
]

TOKENS = (64, 61, 30, 21, 3, 2, 1, 0)
# For the moments: number of tokens → stride of those that all are compared with, the
# largest 2ⁿ that leaves 64 of them.
STRIDES = {600: 8, 512: 8, 511: 4, 256: 4, 255: 2, 127: 1, 2: 1, 1: 0, 0: 0}


def padded(counts, features, garbage=math.nan):
    """z [B, N, F] and valid [B, N]: ``counts`` tokens per sequence, scattered in every
    second one, and ``garbage``.
    """
    generator = torch.Generator().manual_seed(7)
    length = max(counts)
    z = (
        torch.randn(
            len(counts), length, features, generator=generator, dtype=torch.float64
        )
        + 0.3
    )
    valid = torch.zeros(len(counts), length, dtype=torch.bool)
    for b, count in enumerate(counts):
        start = (37 * b) % (length - count + 1)
        where = (
            torch.randperm(length, generator=generator)[:count]
            if b % 2
            else slice(start, start + count)
        )
        valid[b, where] = True
    return z.masked_fill(~valid[..., None], garbage), valid


def without_padding(z, valid, weights, case, layer):
    """Loss [B] and gradient [B, N, F], computed sequence by sequence without padding; 0
    for fewer than two tokens.
    """
    variant, estimator, options = case
    options = {name: value for name, value in options.items() if name != "max_tokens"}
    order = drawing_order(z.shape[1], seed=3, step=5, layer=layer).tolist()
    values = torch.zeros(len(z), dtype=torch.float64)
    grad = torch.zeros_like(z)
    for b, tokens in enumerate(valid.sum(1).tolist()):
        if tokens < 2:
            continue
        where = valid[b].nonzero()[:, 0]
        if estimator == "sampled":
            where = torch.tensor(
                [i for i in order if valid[b, i]][: case[2]["max_tokens"]]
            )
        short = z[b : b + 1, where].clone().requires_grad_(True)
        if estimator == "moments":
            value = moments_oracle(variant, short, STRIDES[tokens], **options)
        else:
            value = oracle(variant, short, **options)
        (weights[b] * value).sum().backward()
        values[b] = value.detach()
        grad[b, where] = short.grad
    return values, grad


def check(features, case, group=None, rank=0, world=1):
    """Compare two layers with the oracles.

    With a group, a rank holds a contiguous part, which may be padding only.
    """
    variant, estimator, options = case
    z, valid = padded(tuple(STRIDES) if estimator == "moments" else TOKENS, features)
    seed = {"seed": 3} if estimator == "sampled" else {}
    own = torch.arange(z.shape[1]).chunk(world)[rank]
    zs = [
        z[:, own].clone().requires_grad_(True),
        (2 * z)[:, own].clone().requires_grad_(True),
    ]
    weights = torch.linspace(1, 2, len(z), dtype=torch.float64)
    loss = {"variant": variant, "estimator": estimator, **options, **seed}
    values = dispersion_losses(zs, group=group, step=5, valid=valid[:, own], **loss)
    (values * weights).sum().backward()
    for layer, (value, ours) in enumerate(zip(values, zs, strict=True)):
        expected, grad = without_padding(
            (1 + layer) * z.nan_to_num(0.0), valid, weights, case, layer
        )
        torch.testing.assert_close(
            value.detach(),
            expected,
            rtol=1e-11,
            atol=1e-11,
            msg=lambda m: f"{case}: {m}",
        )
        error = (ours.grad - grad[:, own]).norm() / grad.norm()
        assert error <= 1e-11, (case, layer, error)
        assert (ours.grad[~valid[:, own]] == 0).all(), case
        assert (ours.grad[valid.sum(1) < 2] == 0).all(), case


@pytest.mark.parametrize(("features", "case"), NARROW_AND_WIDE, ids=str)
def test_padding_is_as_if_it_were_not_there(features, case, monkeypatch):
    monkeypatch.setattr(pairwise, "TILE_ELEMENTS", 3 * 32 * 32)  # several tiles
    # Some sequences after the others
    monkeypatch.setattr(layers, "BATCH_ELEMENTS", 3 * 64 * features)
    check(features, case)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_may_hold_anything(garbage, dtype):
    for variant, estimator, options in CASES:
        results = []
        for filling in (garbage, 0.0):
            z, valid = padded(TOKENS, 6, filling)
            z = z.to(dtype).requires_grad_(True)
            value = dispersion_loss(
                z, variant=variant, estimator=estimator, valid=valid, **options
            )
            value.sum().backward()
            results.append((value.detach(), z.grad))
        for found, expected in zip(*results, strict=True):
            assert found.isfinite().all()
            assert torch.equal(found, expected)


def test_one_padded_token_has_no_pair():
    for variant, estimator, options in CASES:
        z = torch.randn(3, 1, 4).requires_grad_(True)
        valid = torch.tensor([[True], [False], [True]])
        losses = dispersion_losses(
            [z, z], variant=variant, estimator=estimator, valid=valid, **options
        )
        assert torch.equal(losses, torch.zeros(2, 3))
        losses.sum().backward()
        assert not z.grad.any()


def test_fit_errors_of_padded_sequences():
    """Of a sequence without two tokens there is nothing to fit, and no error."""
    z, valid = padded(tuple(STRIDES), 6)
    errors = []
    alone = []
    loss = DispersionLoss(estimator="moments")
    loss([z], fit_errors=errors, valid=valid)
    for b, tokens in enumerate(STRIDES):
        if tokens > 1:
            loss([z[b : b + 1, valid[b]]], fit_errors=alone)
    torch.testing.assert_close(errors[0][:-2], torch.cat(alone))
    assert (errors[0][-2:] == 0).all()


@pytest.mark.parametrize(("length", "dtype"), [(5, torch.float32), (4, torch.bool)])
def test_refused(length, dtype):
    message = (
        rf"valid has shape \(2, {length}\) and dtype {dtype}, expected bool \(2, 5\)"
    )
    with pytest.raises(ValueError, match=message):
        dispersion_loss(torch.ones(2, 5, 3), valid=torch.ones(2, length, dtype=dtype))
