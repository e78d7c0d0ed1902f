"""The exact estimator against the float64 oracle: values, gradients, dtypes, degenerate tokens, and memory."""

import numpy as np
import pytest
import torch

from tests.oracle import angular, loss_and_gradient, tokens
from titan_disp.dispersion import dispersion_loss, dispersion_losses, pairwise, vectors
from titan_disp.dispersion.variants.angular import angular_pair

PARAMETERS = {"tau": 1.0, "clamp": 0.25, "norm_eps": 1e-2}


def assert_agrees(z, loss_tolerance, grad_tolerance, **parameters):
    parameters = PARAMETERS | parameters
    loss, grad = loss_and_gradient(dispersion_loss, z, **parameters)
    expected, expected_grad = loss_and_gradient(angular, z.double(), **parameters)
    assert loss.isfinite().all()
    assert grad.isfinite().all()
    torch.testing.assert_close(loss, expected, rtol=0, atol=loss_tolerance)
    error = (grad - expected_grad).norm() / expected_grad.norm()
    assert error <= grad_tolerance, f"relative gradient error {error:.1e}"


# fp32 keeps about 1e-7 a product; over the tile sums 2e-6 (value) and 1e-5 (gradient) leave room for any order of summation.
@pytest.mark.parametrize("n", [2, 3, 47, 513])
@pytest.mark.parametrize("f", [2, 7, 64, 1000])
def test_odd_shapes(n, f):
    assert_agrees(tokens(2, n, f), 2e-6, 1e-5)


@pytest.mark.parametrize("tau", [0.05, 0.2, 1.0, 2.0])
def test_temperatures(tau):
    # At small τ the sum is dominated by few pairs: the error of a cosine is multiplied by 1/(πτ).
    assert_agrees(tokens(3, 47, 64), 2e-6 / tau, 1e-5 / min(tau, 1), tau=tau)


@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_bfloat16(mean):
    # The loss is computed in fp32 from the given bf16 values; the returned gradient is rounded to bf16 (2^-9 relative).
    assert_agrees(tokens(2, 130, 64, mean=mean).bfloat16(), 2e-6, 2**-8)


def test_float16_bears_the_gradient_of_the_sum():
    """∂S/∂z, which is saved, is far beyond float16's 65504 here; ∂L/∂z, which is returned, is about 1."""
    assert_agrees(1e-4 * tokens(1, 600, 3, mean=0.0).half(), 2e-6, 2**-11, norm_eps=1e-5)


def test_float64_is_exact():
    assert_agrees(tokens(2, 47, 7).double(), 1e-13, 1e-12)


@pytest.mark.parametrize("side", [2, 3, 16])
def test_pairs_between_two_shards_in_tiles(side):
    """Σ exp(cosine) of all pairs of an own and another token, by numpy; W the sum of weights times the other's tokens."""
    own, other = (torch.nn.functional.normalize(tokens(2, n, 4, seed=n).double(), dim=-1) for n in (5, 7))

    def pair(cosines):
        return cosines.exp(), cosines.exp()

    ones = [torch.ones(2, n, 1, dtype=torch.float64) for n in (5, 7)]
    w = torch.zeros_like(own)
    s = pairwise.add_pairs_with(
        pairwise.Tiles(own, ones[0], tile=side), pairwise.Tiles(other, ones[1], tile=side), w, pair
    )
    weights = np.exp(np.einsum("bnf,bmf->bnm", own.numpy(), other.numpy()))
    np.testing.assert_allclose(s.numpy(), weights.sum((1, 2)), rtol=1e-12)
    np.testing.assert_allclose(w.numpy(), np.einsum("bnm,bmf->bnf", weights, other.numpy()), rtol=1e-12)


def test_small_tiles_agree_with_one_tile():
    z = tokens(2, 100, 16).double()
    scale = 1 / vectors.norms(z)
    s, v = pairwise.all_pairs(pairwise.Tiles(z, scale), angular_pair(1.0, 0.25))
    for tile in (1, 16, 33, 99):
        s_tiled, v_tiled = pairwise.all_pairs(pairwise.Tiles(z, scale, tile=tile), angular_pair(1.0, 0.25))
        torch.testing.assert_close(s_tiled, s)
        torch.testing.assert_close(v_tiled, v)


@pytest.mark.parametrize("clamp", [0.0, 0.25, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_degenerate_tokens_are_finite(clamp, dtype):
    base = tokens(1, 1, 32)
    identical = base.expand(1, 20, 32)
    antiparallel = torch.cat([identical, -identical], 1)
    zeros = torch.zeros(1, 20, 32)
    mixed = torch.cat([identical[:, :10], -identical[:, :5], zeros[:, :3], tokens(1, 4, 32)], 1)
    huge = 1e4 * identical
    for z in (identical, antiparallel, zeros, mixed, huge):
        loss, grad = loss_and_gradient(dispersion_loss, z.to(dtype), tau=0.05, clamp=clamp, norm_eps=1e-2)
        assert loss.isfinite().all()
        assert grad.isfinite().all()


@pytest.mark.parametrize("case", ["identical", "antiparallel", "with zeros"])
def test_degenerate_tokens_agree(case):
    base = tokens(1, 1, 32).double()
    z = base.repeat(1, 20, 1)
    if case == "antiparallel":
        z = torch.cat([z, -z], 1)
    if case == "with zeros":
        # The oracle's ‖z‖ has subgradient 0 at 0, as here.
        z = torch.cat([z[:, :5], torch.zeros(1, 4, 32), tokens(1, 4, 32)], 1)
    loss, grad = loss_and_gradient(dispersion_loss, z, **PARAMETERS)
    expected, expected_grad = loss_and_gradient(angular, z, **PARAMETERS)
    torch.testing.assert_close(loss, expected)
    # Beside identical tokens the tangential gradient vanishes; compare with an absolute floor.
    torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-12)


def test_all_zero_tokens():
    loss, grad = loss_and_gradient(dispersion_loss, torch.zeros(2, 9, 8), **PARAMETERS)
    torch.testing.assert_close(loss, torch.full((2,), -0.5, dtype=torch.double))  # every pair is orthogonal: D = 1/2
    assert (grad == 0).all()


def test_clamp_is_straight_through():
    # Two tokens in one narrow cone, far beyond the clamp: a hard clamp would give them no gradient at all.
    z = torch.tensor([[[1.0, 0.01], [1.0, -0.01]]])
    _, grad = loss_and_gradient(dispersion_loss, z, **PARAMETERS)
    assert grad[0, 0, 1] < 0 < grad[0, 1, 1]  # descending moves them apart


def test_descent_disperses():
    z = tokens(1, 64, 16, mean=2.0).requires_grad_(True)
    start = dispersion_loss(z, **PARAMETERS)
    optimizer = torch.optim.Adam([z], lr=0.1)
    for _ in range(50):
        optimizer.zero_grad()
        dispersion_loss(z, **PARAMETERS).sum().backward()
        optimizer.step()
    assert dispersion_loss(z, **PARAMETERS) < start - 0.1


def test_gradcheck():
    z = tokens(2, 5, 3).double().requires_grad_(True)
    # Without clamped pairs the loss is differentiable in the ordinary sense.
    assert torch.autograd.gradcheck(lambda z: dispersion_loss(z, tau=0.5, clamp=1e-6, norm_eps=1e-2), (z,))


def test_layers_are_independent():
    zs = [tokens(2, 30, 8, seed=1), tokens(2, 30, 16, seed=2)]
    losses = dispersion_losses(zs, **PARAMETERS)
    assert losses.shape == (2, 2)
    for row, z in zip(losses, zs, strict=True):
        torch.testing.assert_close(row, dispersion_loss(z, **PARAMETERS))


def test_autocast_does_not_reach_inside():
    z = tokens(2, 100, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = dispersion_loss(z, **PARAMETERS)
    assert torch.equal(inside, dispersion_loss(z, **PARAMETERS))


def test_no_n_by_n_matrix(monkeypatch):
    """Peak memory of forward + backward grows like N, not N²: no tensor that autograd or the walk holds is larger than a tile."""
    monkeypatch.setattr(pairwise, "TILE_ELEMENTS", 64 * 64)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    z = tokens(1, 1024, 8).requires_grad_(True)
    with Watch():
        dispersion_loss(z, **PARAMETERS).sum().backward()
    assert largest <= max(1024 * 8, 64 * 64) * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tau": 0.0}, "tau is 0.0"),
        ({"tau": 1e-3}, "tau is 0.001"),
        ({"tau": float("nan")}, "tau is nan"),
        ({"clamp": 1.0}, "clamp is 1.0"),
        ({"clamp": -0.1}, "clamp is -0.1"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
    ],
)
def test_bad_parameters(change, message):
    with pytest.raises(ValueError, match=message):
        dispersion_loss(tokens(1, 4, 4), **(PARAMETERS | change))


def test_bad_shapes():
    with pytest.raises(ValueError, match=r"1 token\(s\), expected at least 2"):
        dispersion_loss(tokens(1, 1, 4), **PARAMETERS)
    with pytest.raises(ValueError, match=r"shape \(4, 4\)"):
        dispersion_loss(torch.ones(4, 4), **PARAMETERS)
    with pytest.raises(ValueError, match="no layers"):
        dispersion_losses([], **PARAMETERS)
    with pytest.raises(ValueError, match=r"tokens per sequence: \(1, 4, 4\), \(1, 6, 4\)"):
        dispersion_losses([tokens(1, 4, 4), tokens(1, 6, 4)], **PARAMETERS)
