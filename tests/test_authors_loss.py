"""Ours against the loss that the paper's authors released, whose formulas are those of tests/oracle.py.

Their code takes one sequence without padding at a time; a padded one is compared with theirs of its tokens alone. Their angular
value has a constant of 0.01 more, which has no gradient.
"""

import math

import pytest
import torch

from tests.oracle import ORACLES, PAPERS, loss_and_gradient
from titan_disp.dispersion import dispersion_loss


@pytest.mark.parametrize("case", ["random", "collapsed", "identical", "padded"])
@pytest.mark.parametrize("variant", PAPERS)
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
        expected, grad = loss_and_gradient(ORACLES[variant], z[b : b + 1, valid[b]])
        torch.testing.assert_close(values[b : b + 1], expected, rtol=1e-12, atol=1e-14)
        error, norm = (ours.grad[b, valid[b]] - grad[0]).norm(), grad.norm()
        if (variant, case) == ("decorrelation", "identical"):
            assert max(error, norm) <= 1e-14
        else:
            assert error <= 1e-12 * norm
