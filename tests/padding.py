"""Padded sequences, and the loss of each sequence without its padding, from float64 oracles."""

import math

import pytest
import torch

from tests.oracle import EVERY_LOSS, drawing_order, drawn, oracle
from titan_disp.dispersion import dispersion_losses
from titan_disp.dispersion.variants import VARIANTS

CASES = [(v, e, options | drawn(e, 24)) for v, e, options in EVERY_LOSS]
# Decorrelation has one form for few features and another one for many.
NARROW_AND_WIDE = [(6, case) for case in CASES] + [(70, case) for case in CASES if VARIANTS[case[0]].linear_in_tokens]

TOKENS = (64, 61, 30, 21, 3, 2, 1, 0)
# For the moments: number of tokens → stride of the tokens that all others are compared with, the largest power of two
# that leaves 64 of them.
STRIDES = {600: 8, 512: 8, 511: 4, 256: 4, 255: 2, 127: 1, 2: 1, 1: 0, 0: 0}


def padded(counts, features, garbage=math.nan):
    """z [B, N, F] and valid [B, N] with ``counts`` tokens per sequence and ``garbage`` elsewhere.

    The tokens of every second sequence are scattered; those of the others are contiguous.
    """
    generator = torch.Generator().manual_seed(7)
    length = max(counts)
    z = torch.randn(len(counts), length, features, generator=generator, dtype=torch.float64) + 0.3
    valid = torch.zeros(len(counts), length, dtype=torch.bool)
    for b, count in enumerate(counts):
        start = (37 * b) % (length - count + 1)
        where = torch.randperm(length, generator=generator)[:count] if b % 2 else slice(start, start + count)
        valid[b, where] = True
    return z.masked_fill(~valid[..., None], garbage), valid


def moments_oracle(z, tau, stride):
    """The loss [1] of z [1, n, F] with w ≈ a + b c + ½ d c², which is fitted for every token to every stride-th token.

    Its gradient is the estimator's: the slope of the pair (i, j) is b + d c with the b and d of token i. The constant
    1e-6 is both the ridge of the fit and the square of the smallest weight p; 1e-2 is ε.
    """
    n = z.shape[1]
    length = torch.linalg.vector_norm(z[0], dim=-1, keepdim=True)
    u = z[0] / (length + 1e-2)
    with torch.no_grad():
        c = u @ u.T
        near = c.clamp(-0.75, 0.75)
        w = torch.exp(-torch.acos(near) / (math.pi * tau))
        slope = w / (math.pi * tau * torch.sqrt(1 - near**2))
        others = ~torch.eye(n, dtype=torch.bool)
        blocks = range(-(-n // stride))
        fitted = [min(k * stride + (k * 2654435769 % 2**32) * stride // 2**32, n - 1) for k in blocks]
        compared = others & torch.isin(torch.arange(n), torch.tensor(fitted))
        squares = u.square().sum(-1)
        p = torch.sqrt((torch.outer(squares, squares) - c**2).clamp_min(0) + 1e-6) * compared
        p = p / p.sum(1, keepdim=True)
        mean_c, mean_r = (p * c).sum(1, keepdim=True), (p * slope).sum(1, keepdim=True)
        variance = (p * (c - mean_c) ** 2).sum(1, keepdim=True) + 1e-6
        d = (p * (c - mean_c) * (slope - mean_r)).sum(1, keepdim=True) / variance
        b = mean_r - d * mean_c
        rest = (w - b * c - d / 2 * c**2) * compared
        a = rest.sum(1, keepdim=True) / compared.sum(1, keepdim=True)
        mean = ((a + b * c + d / 2 * c**2) * others).sum() / (n * (n - 1))
    of_gradient = 2 * ((b + d * c) * others * (u @ u.T.detach())).sum() / (n * (n - 1)) / mean
    return (torch.log(mean) + of_gradient - of_gradient.detach())[None]


def without_padding(z, valid, weights, case, layer):
    """Loss [B] and gradient [B, N, F], computed sequence by sequence without padding; 0 for fewer than two tokens."""
    variant, estimator, options = case
    options = dict(options)
    count = options.pop("max_tokens", None)
    order = drawing_order(z.shape[1], seed=3, step=5, layer=layer).tolist()
    values, grad = torch.zeros(len(z), dtype=torch.float64), torch.zeros_like(z)
    for b, tokens in enumerate(valid.sum(1).tolist()):
        if tokens < 2:
            continue
        where = valid[b].nonzero()[:, 0]
        if estimator == "sampled":
            where = torch.tensor([i for i in order if valid[b, i]][:count])
        short = z[b : b + 1, where].clone().requires_grad_(True)
        if estimator == "moments":
            if variant != "angular":
                pytest.fail(f"add the moments of {variant!r} to moments_oracle in tests/padding.py")
            value = moments_oracle(short, options["tau"], STRIDES[tokens])
        else:
            value = oracle(variant, short, **options)
        (weights[b] * value).sum().backward()
        values[b], grad[b, where] = value.detach(), short.grad
    return values, grad


def check(features, case, group=None, rank=0, world=1):
    """Compare two layers with the oracles. With a group, a rank holds a contiguous part, which may be padding only."""
    variant, estimator, options = case
    z, valid = padded(tuple(STRIDES) if estimator == "moments" else TOKENS, features)
    seed = {"seed": 3} if estimator == "sampled" else {}
    own = torch.arange(z.shape[1]).chunk(world)[rank]
    zs = [z[:, own].clone().requires_grad_(True), (2 * z)[:, own].clone().requires_grad_(True)]
    weights = torch.linspace(1, 2, len(z), dtype=torch.float64)
    loss = {"variant": variant, "estimator": estimator, **options, **seed}
    values = dispersion_losses(zs, group=group, step=5, valid=valid[:, own], **loss)
    (values * weights).sum().backward()
    for layer, (value, ours) in enumerate(zip(values, zs, strict=True)):
        expected, grad = without_padding((1 + layer) * z.nan_to_num(0.0), valid, weights, case, layer)
        torch.testing.assert_close(value.detach(), expected, rtol=1e-11, atol=1e-11, msg=lambda m: f"{case}: {m}")
        error = (ours.grad - grad[:, own]).norm() / grad.norm()
        assert error <= 1e-11, (case, layer, error)
        assert (ours.grad[~valid[:, own]] == 0).all(), case
        assert (ours.grad[valid.sum(1) < 2] == 0).all(), case
