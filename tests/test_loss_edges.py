"""The estimators that do not take all pairs: which tokens they take, and how close
moments are to exact (docs/loss.md).
"""

import dataclasses
import inspect
import math
import re

import numpy as np
import pytest
import torch

from tests.command_line import ROOT
from tests.oracle import (
    EVERY_ESTIMATOR,
    drawing_order,
    drawn,
    loss_and_gradient,
    tokens,
)
from titan_disp.dispersion import DispersionLoss, dispersion_loss, dispersion_losses
from titan_disp.dispersion.layers import order
from titan_disp.dispersion.moments import sample
from titan_disp.dispersion.variants import VARIANTS

pytestmark = pytest.mark.filterwarnings(
    "ignore:the moments estimator fits some tokens badly"
)


def compared(z, **options):
    """Of each sequence, the relative error of the moments' gradient to exact's, and
    that which is logged; both values.
    """
    (exact, grad), (value, found) = (
        loss_and_gradient(dispersion_loss, z, estimator=estimator, **options)
        for estimator in ("exact", "moments")
    )
    logged = []
    DispersionLoss(estimator="moments", **options)([z], fit_errors=logged)
    return (
        (found - grad).flatten(1).norm(dim=1) / grad.flatten(1).norm(dim=1),
        logged[0],
        exact,
        value,
    )


def centres(count, n=1024, f=256):
    """Tokens that repeat but for noise, as in a list or a table."""
    torch.manual_seed(0)
    return (
        torch.randn(count, f)[torch.randint(count, (n,))] + 0.1 * torch.randn(n, f)
    )[None].double()


def test_errors_of_tokens_that_repeat():
    """The table of docs/loss.md.

    The logged error is that of the gradient, so nobody needs to compute exact to see
    it.
    """
    text = (ROOT / "docs" / "loss.md").read_text()
    rows = re.findall(
        r"(?m)^  \| τ = ([\d.]+) \| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) % \|$", text
    )
    assert len(rows) == 5
    for tau, *percents in rows:
        for clamp, percent in zip((0.25, 0.1, 0.01), map(float, percents), strict=True):
            found = [
                compared(centres(count), tau=float(tau), clamp=clamp)
                for count in (10, 100)
            ]
            assert max(error.item() for error, *_ in found) == pytest.approx(
                percent / 100, rel=0.05, abs=0.005
            )
            assert all(
                0.45 * error < logged < 1.6 * error for error, logged, *_ in found
            )


def test_errors_of_uniformity():
    torch.manual_seed(0)
    cases = {"no common direction": torch.randn(1, 512, 64), "10 vectors": centres(10)}
    text = (ROOT / "docs" / "losses.md").read_text()
    for case, z in cases.items():
        (percents,) = re.findall(
            rf"(?m)^  \| {case}.* \| (\d+) % \| (\d+) % \| (\d+) % \|$", text
        )
        for t, percent in zip((0.5, 1.0, 2.0), map(int, percents), strict=True):
            error, logged, *_ = compared(z, variant="uniformity", options={"t": t})
            assert error.item() == pytest.approx(percent / 100, abs=0.006)
            assert 0.7 * error < logged < 1.2 * error


def test_fit_error_is_reported():
    """Per layer and sequence; against numpy's own least squares without each pair,
    where all are compared with all.
    """
    layers = [tokens(2, 24, 16, seed).double() for seed in range(2)]
    errors = []
    DispersionLoss(estimator="moments", tau=0.5)(layers, fit_errors=errors)
    for z, error in zip(
        torch.cat(layers).numpy(), torch.cat(errors).tolist(), strict=True
    ):
        length = np.linalg.norm(z, axis=-1, keepdims=True) + 1e-2
        u = z / length
        residuals = []
        slopes = []
        for i in range(24):
            others = np.delete(u, i, axis=0)
            c = others @ u[i]
            angle = np.arccos(c.clip(-0.75, 0.75))
            slope = np.exp(-angle / (0.5 * np.pi)) / (0.5 * np.pi * np.sin(angle))
            # What is left of a token without its part along u_i.
            across = np.linalg.norm(
                others - np.outer(c, u[i]) / (u[i] @ u[i]), axis=-1
            ) * np.linalg.norm(u[i])
            residual = slope.copy()
            for j in range(23):
                rest = np.delete(np.arange(23), j)
                residual[j] -= np.polyval(
                    np.polyfit(c[rest], slope[rest], 1, w=np.sqrt(across[rest])), c[j]
                )
            residuals.append(across * residual / length[i])
            slopes.append(across * slope / length[i])
        # Ridge, floor
        assert error == pytest.approx(
            np.linalg.norm(residuals) / np.linalg.norm(slopes), rel=1e-3
        )


def test_a_fitted_sum_that_cannot_be_is_nan():
    """Tokens are compared with some that lie in a narrow cone, where a line through w
    is below 0 for the others.
    """
    z = tokens(1, 256, 16, mean=0.0).double()
    (fitted,) = sample(z, length=256, mask=None, group=None).rows
    z[:, fitted] *= 0.01
    z[:, fitted, 0] += 1.0
    value, grad = loss_and_gradient(dispersion_loss, z, estimator="moments", tau=0.05)
    assert value.isnan()
    with pytest.warns(
        UserWarning, match='may be 1\\d\\d%. Use estimator "exact", or larger tau and'
    ):
        compared(centres(100), tau=0.1, clamp=0.01)


def test_options_are_shown_and_checked():
    """The functions show the options that they pass on.

    A mask has another name here.
    """
    for function, first in ((dispersion_losses, "zs"), (dispersion_loss, "z")):
        shown = inspect.signature(function).parameters
        own = [first, "group", "step", "valid", "segments"]
        assert list(shown) == [
            *own,
            *(f.name for f in dataclasses.fields(DispersionLoss)),
        ]
        assert shown["tau"].default == 1.0
    for unknown, hint in (("attention_mask", r"pass valid=\[B, N\]"), ("taau", "tau")):
        with pytest.raises(TypeError, match=rf"unknown option '{unknown}'.* {hint}"):
            dispersion_loss(tokens(1, 4, 3), **{unknown: 1.0})


def test_positions_are_drawn_from_seed_step_and_layer():
    """A resumed run must draw the same. A seed has 64 bits."""
    for of in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert torch.equal(order(4096, *of), drawing_order(4096, *of))
    assert order(4096, 11, 3, 2)[:5].tolist() == [1391, 2457, 224, 474, 350]
    assert sorted(order(10, 2**64 - 1, 10**9, 100).tolist()) == list(range(10))
    assert not torch.equal(order(100, 2**63, 0, 0), order(100, 2**63 + 1, 0, 0))


def test_all_tokens_where_there_are_no_more():
    z = tokens(1, 20, 8)
    assert torch.equal(
        dispersion_loss(z, estimator="sampled", max_tokens=21), dispersion_loss(z)
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize(("variant", "estimator"), EVERY_ESTIMATOR)
@pytest.mark.parametrize("features", [16, 80])  # decorrelation has a form for either
def test_what_is_not_finite_shows(variant, estimator, value, features):
    """Even 1e30, when squared.

    Its sign alternates: what is equal for all tokens has no part in losses of features.
    """
    z = tokens(2, 64, features)
    options = {"variant": variant, "estimator": estimator, **drawn(estimator, 40)}
    expected, _ = loss_and_gradient(dispersion_loss, z, **options)
    z[1, ::2, 3] = value
    z[1, 1::2, 3] = -value
    loss, _ = loss_and_gradient(dispersion_loss, z, **options)
    assert not loss[1].isfinite()
    assert torch.equal(loss[0], expected[0])


def test_token_ids_are_no_activations():
    ids = torch.ones(2, 8, dtype=torch.int64)
    for z in (ids, ids[..., None].expand(2, 8, 4)):
        with pytest.raises(ValueError, match="pass the outputs of blocks, not token"):
            dispersion_loss(z)


@pytest.mark.parametrize(("variant", "estimator"), EVERY_ESTIMATOR)
def test_a_batch_without_sequences(variant, estimator):
    """The loss and its gradient are empty, also of layers that differ in dtype."""
    loss = DispersionLoss(variant, estimator, **drawn(estimator, 4))
    masks = [{}, {"valid": torch.ones(0, 8, dtype=torch.bool)}]
    if VARIANTS[variant].of_pairs and estimator != "moments":
        masks.append({"segments": torch.ones(0, 8, dtype=torch.int64)})
    for mask in masks:
        zs = [
            torch.zeros(0, 8, 16, dtype=dtype, requires_grad=True)
            for dtype in (torch.bfloat16, torch.float64)
        ]
        losses = loss(zs, **mask)
        losses.sum().backward()
        assert (losses.shape, losses.dtype) == ((2, 0), torch.float64)
        assert all(z.grad.shape == z.shape for z in zs)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if VARIANTS[v].of_pairs])
def test_norms_that_overflow_show_in_the_gradient(variant):
    z = (tokens(2, 20, 8) * 1e30).requires_grad_()
    dispersion_loss(z, variant=variant).sum().backward()
    assert not z.grad.isfinite().all()
