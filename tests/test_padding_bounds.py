"""Appendix D: cosines after padding, against integrals and against the bounds."""

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from titan_disp.errors import ConfigError
from titan_disp.lab.inspection.padding import COLUMNS, PaddedCosines


def expected_factor(length, added):
    """E[‖x‖ / √(‖x‖² + χ²)] by numerical integration."""
    chi2 = stats.chi2(added)
    value, error = integrate.quad(
        lambda x: length / np.sqrt(length**2 + x) * chi2.pdf(x),
        *chi2.ppf([1e-12, 1 - 1e-12]),
    )
    assert error < 1e-7
    return value


def test_the_papers_upper_bound_fails_in_its_own_case():
    """From 768 to 1,600 features, for tokens of length 1."""
    factor = expected_factor(1.0, 832)
    assert factor == pytest.approx(0.034679, abs=5e-7)
    assert 1 / np.sqrt(833) < factor
    assert 1 / np.sqrt(832) == pytest.approx(0.034669, abs=5e-7)
    assert factor > 1 / np.sqrt(832)
    for length in (0.01, 1, 10, 100):
        for added in (3, 10, 832):
            factor = expected_factor(length, added)
            bounds = [length / np.sqrt(length**2 + added - i) for i in (0, 2)]
            assert bounds[0] <= factor * (1 + 1e-9)
            assert factor <= bounds[1] * (1 + 1e-9)


def test_padded_cosines_have_their_expectation():
    torch.manual_seed(1)
    z = 3 * torch.nn.functional.normalize(torch.randn(64, 12, 8) + 0.8, dim=-1)
    padded = PaddedCosines(24, seed=0)
    padded.add(1, z[:32])
    padded.add(1, z[32:])
    padded.add(0, -z.abs())
    first, numbers = padded.result()
    found = dict(zip(COLUMNS, numbers, strict=True))
    unit = z.double() / 3
    cosines = unit @ unit.transpose(1, 2)
    mean = (cosines.sum() - 64 * 12) / (64 * 12 * 11)
    assert found["mean_cosine"] == pytest.approx(mean.item(), rel=1e-6)
    expected = mean.item() * expected_factor(3.0, 16) ** 2
    # 64 × 132 pairs, with a standard deviation of about 0.2
    assert found["padded_mean_cosine"] == pytest.approx(expected, abs=0.01)
    assert found["papers_upper_bound"] == pytest.approx(mean.item() * 9 / (9 + 15))
    assert first[COLUMNS.index("lower_bound")] < first[COLUMNS.index("upper_bound")]
    with pytest.raises(ConfigError, match="--pad is 10, expected at least 11"):
        PaddedCosines(10, seed=0).add(0, z)


def test_negative_cosines_change_the_bounds_places():
    padded = PaddedCosines(5, seed=0)
    padded.add(0, torch.tensor([[[1.0, 0], [-1.0, 0]]]))
    found = dict(zip(COLUMNS, padded.result()[0], strict=True))
    bounds = (found["lower_bound"], found["upper_bound"])
    assert bounds == pytest.approx((-1 / 2, -1 / 4))
