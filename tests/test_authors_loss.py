"""Ours against the loss that the paper's authors released, written here from its formulas: plain float64 autograd, N×N.

Their code takes one sequence without padding at a time; a padded one is compared with theirs of its tokens alone. Their angular
value has a constant of 0.01 more, which has no gradient.
"""

import math

import pytest
import torch

from titan_disp.dispersion import dispersion_loss

KAPPA, EPSILON, TAU, NORM_COEFF = 0.25, 1e-2, 1.0, 0.1  # theirs by default
THEIR_CONSTANT = {"angular": 0.01}  # of the value


def distances(z):
    """arccos(c)/π. The straight-through clamp: the value of the clamped cosine, the derivative of the cosine itself."""
    u = z / (z.norm(dim=-1, keepdim=True) + EPSILON)
    c = u @ u.T
    return torch.acos(c + (c.clamp(-1 + KAPPA, 1 - KAPPA) - c).detach()) / math.pi


def mean_of_others(x):  # i ≠ j
    return x[~torch.eye(len(x), dtype=torch.bool)].mean()


def angular(z):
    return mean_of_others(torch.exp(-distances(z) / TAU)).log() + THEIR_CONSTANT["angular"]


def orthogonalization(z):
    return mean_of_others((0.5 - distances(z)).relu() ** 2)


def decorrelation(z):
    standard = (z - z.mean(-1, keepdim=True)) / z.std(-1, keepdim=True)
    return mean_of_others((standard @ standard.T / (z.shape[-1] - 1)) ** 2)


def l2_repel(z):
    squares = (z[:, None] - z[None]).pow(2).sum(-1)  # the diagonal, exp(0) = 1, is in the mean
    return torch.exp(-squares / TAU).mean().log() + NORM_COEFF * z.pow(2).mean()


THEIRS = {f.__name__: f for f in (angular, orthogonalization, decorrelation, l2_repel)}


@pytest.mark.parametrize("case", ["random", "collapsed", "identical", "padded"])
@pytest.mark.parametrize("variant", THEIRS)
def test_value_and_gradient_are_the_authors(variant, case):
    """To 1e-12 of their norms, but for one gradient: identical tokens are perfectly correlated, whichever they are.

    Decorrelation's derivative is 0 there, and what either computes is rounding.
    """
    z = torch.randn(3, 40, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64) / 4
    valid = torch.ones(3, 40, dtype=torch.bool)
    if case == "collapsed":
        z = z[:, :1] + 1e-3 * z
    elif case == "identical":
        z = z[:, :1].repeat(1, 40, 1)
    elif case == "padded":
        valid[1, 25:] = valid[2, :3] = valid[2, 20:30] = False
        z = z.masked_fill(~valid[..., None], math.nan)
    ours = z.clone().requires_grad_(True)
    values = dispersion_loss(ours, variant=variant, valid=valid if case == "padded" else None)
    values.sum().backward()
    for b in range(len(z)):
        theirs = z[b, valid[b]].clone().requires_grad_(True)
        expected = THEIRS[variant](theirs)
        expected.backward()
        assert values[b].item() + THEIR_CONSTANT.get(variant, 0.0) == pytest.approx(expected.item(), rel=1e-12)
        error, norm = (ours.grad[b, valid[b]] - theirs.grad).norm(), theirs.grad.norm()
        if (variant, case) == ("decorrelation", "identical"):
            assert max(error, norm) <= 1e-14
        else:
            assert error <= 1e-12 * norm
