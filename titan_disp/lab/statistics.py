"""This module has the exact sign-flip test of paired differences."""

from collections.abc import Sequence

import numpy as np

MOST = 50  # most differences: half of them make 2²⁵ sums of 0.3 GB
ROUNDING = 1e-12  # sums that differ by less count as equal, relative to the sum of all absolute values


def sign_flip_p(differences: Sequence[float]) -> float | None:
    """Return the two-sided p value of the sign-flip test.

    It is the fraction of all 2ⁿ sign patterns whose sum is at least as far from 0 as the observed one.

    If the two conditions were equal, each pair's difference would be as likely with the opposite sign. No distribution
    is assumed. The smallest p value is 2/2ⁿ, so 5 pairs cannot reach 0.05, and 6 can. Without pairs, with more than
    ``MOST``, or with a difference that is not finite, the result is None.

    The patterns are counted without enumerating them: for each sum over one half of the pairs, a search in the sorted
    sums over the other half counts those that reach far enough.
    """
    d = np.asarray(differences, dtype=np.float64)
    if not 0 < len(d) <= MOST or not np.isfinite(d).all():
        return None
    far = abs(d.sum()) - ROUNDING * np.abs(d).sum()
    if far <= 0:
        return 1.0
    first, second = _sums(d[: len(d) // 2]), np.sort(_sums(d[len(d) // 2 :]))
    above = len(second) - np.searchsorted(second, far - first, side="left")
    below = np.searchsorted(second, -far - first, side="right")
    return float((above.sum() + below.sum()) / 2.0 ** len(d))


def _sums(values: np.ndarray) -> np.ndarray:
    """Return the sums of all sign patterns, [2ⁿ]."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums
