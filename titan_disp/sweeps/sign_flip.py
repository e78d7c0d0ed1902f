"""The exact sign-flip test of paired differences."""

from collections.abc import Sequence

import numpy as np

MOST = 50  # differences: half of them make 2²⁵ sums, 0.3 GB
ROUNDING = 1e-12  # sums that differ by less, relative to the sum of all absolute values, count as equal


def sign_flip_p(differences: Sequence[float]) -> float | None:
    """Two-sided p: the fraction of all 2ⁿ sign patterns whose sum is at least as far from 0 as the observed one.

    Had the two conditions been the same, each pair's difference would be as likely with the other sign. No distribution is
    assumed. The smallest p is 2/2ⁿ, so that 5 pairs cannot reach 0.05, and 6 can. None for no pair, or more than ``MOST``.

    All patterns are counted without walking through them: the sums over one half of the pairs, sorted, tell for each sum over the
    other half how many of them reach far enough.
    """
    d = np.asarray(differences, dtype=np.float64)
    if not 0 < len(d) <= MOST:
        return None
    far = abs(d.sum()) - ROUNDING * np.abs(d).sum()
    if far <= 0:
        return 1.0
    first, second = _sums(d[: len(d) // 2]), np.sort(_sums(d[len(d) // 2 :]))
    above = len(second) - np.searchsorted(second, far - first, side="left")
    below = np.searchsorted(second, -far - first, side="right")
    return float((above.sum() + below.sum()) / 2.0 ** len(d))


def _sums(values: np.ndarray) -> np.ndarray:
    """[2ⁿ] of all sign patterns."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums
