"""This module compares two conditions: paired differences, differences over seeds,
their tests, and Holm's adjustment.
"""

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from scipy import stats

# Most differences of which all sign patterns are counted, within three seconds
EXACT = 18

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class OverSeeds:
    """Uncertainty over seeds of the difference between two conditions' mean scores, by
    Welch's t-test.
    """

    standard_error: float  # √(s²/n + s₀²/n₀)
    p_value: float | None  # two-sided; None if it is undefined
    holm: float | None = None  # adjusted for the number of tasks


@dataclass(frozen=True)
class Difference:
    """Mean difference of a condition to the baseline over pairs, which are documents or
    seeds.

    Fields are None if they are undefined, with a single pair or if all differences are
    equal.
    """

    mean: float
    standard_error: float | None
    low: float | None  # 95 % interval of the mean, by Student's t
    high: float | None
    # two-sided, of a paired t-test, or of the sign-flip test if the pairs are seeds
    p_value: float | None
    holm: float | None = None  # adjusted for the number of tasks or conditions
    # if the pairs are documents and both models have at least two seeds
    over_seeds: OverSeeds | None = None


Test = TypeVar("Test", Difference, Difference | None, OverSeeds | None)


def standard_error(values: Sequence[float] | np.ndarray) -> float | None:
    """Return the standard error of the mean, or None for fewer than two numbers."""
    return float(stats.sem(values)) if len(values) > 1 else None


def with_error(mean: float, error: float | None, sign: str = "") -> str:
    """Format a mean and its standard error such as ``4.0000 ± 0.0577``.

    The sign is a ``+`` for differences.
    """
    return f"{mean:{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")


def paired_difference(values: np.ndarray, baseline: np.ndarray) -> Difference:
    """Run a paired t-test of two models' values, each [pairs]."""
    differences = values - baseline
    with warnings.catch_warnings():
        # a single pair or equal differences give NaN, which becomes None
        warnings.simplefilter("ignore")
        test = stats.ttest_1samp(differences, 0.0)
        low, high = test.confidence_interval(0.95)
        error = stats.sem(differences)
    error, low, high, p_value = map(_defined, (error, low, high, test.pvalue))
    return Difference(float(differences.mean()), error, low, high, p_value)


def paired_by_seed(
    own: Mapping[Key, float], other: Mapping[Key, float]
) -> tuple[tuple[Key, ...], Difference | None]:
    """Return the seeds that two conditions share, and the difference of the first to
    the second over these.

    The seeds have the order of ``own``. The difference has the p value of the sign-flip
    test, and is None without pairs.
    """
    pairs = tuple(seed for seed in own if seed in other)
    if not pairs:
        return pairs, None
    values, others = (np.array([one[seed] for seed in pairs]) for one in (own, other))
    return pairs, replace(
        paired_difference(values, others), p_value=sign_flip_p(values - others)
    )


def sign_flip_p(differences: Sequence[float] | np.ndarray) -> float | None:
    """Return the two-sided p value of the sign-flip test, or None for fewer than two
    differences, or one not finite.

    It is the fraction of all 2ⁿ sign patterns whose sum is at least as far from 0 as
    the observed one. Of more than ``EXACT`` differences, 2 to the power of ``EXACT``
    random patterns are counted.

    If the two conditions were equal, each pair's difference would be as likely with the
    opposite sign. No distribution is assumed. The smallest p value is 2/2ⁿ, so 5 pairs
    cannot reach 0.05, and 6 can.
    """
    d = np.asarray(differences, dtype=np.float64)
    if len(d) < 2 or not np.isfinite(d).all():
        return None
    d = d / (np.abs(d).sum() or 1.0)

    def total(signed: np.ndarray, axis: int) -> np.ndarray:
        # Sums that differ only by rounding errors are equal
        return signed.sum(axis).round(12)

    test = stats.permutation_test(
        (d,), total, permutation_type="samples", n_resamples=2**EXACT, random_state=0
    )
    return float(test.pvalue)


def difference_over_seeds(
    seeds: Sequence[float], baseline: Sequence[float]
) -> OverSeeds | None:
    """Run Welch's t-test of the seeds' scores.

    Returns None if either side has a single seed.

    The test is not paired, because seeds need not correspond. If they do, it is
    conservative.
    """
    if min(len(seeds), len(baseline)) < 2:
        return None
    error = np.hypot(stats.sem(seeds), stats.sem(baseline))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # equal scores give NaN, which becomes None
        return OverSeeds(
            float(error),
            _defined(stats.ttest_ind(seeds, baseline, equal_var=False).pvalue),
        )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjust p values for their number (Holm 1979; scipy has only adjustments of the
    false discovery rate).

    If all adjusted values below α are called significant, the probability of any false
    one among them is below α. The i-th smallest of m values is multiplied by m − i + 1,
    and is at least as large as the one before it. An undefined value stays undefined,
    and counts as 1.
    """
    p = np.array([1.0 if value is None else value for value in p_values])
    order = np.argsort(p)
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(
        (len(p) - np.arange(len(p))) * p[order]
    ).clip(max=1)
    return [
        None if value is None else float(a)
        for value, a in zip(p_values, adjusted, strict=True)
    ]


def with_holm(found: Sequence[Test]) -> list[Test]:
    """Add Holm's p values over all tests. None is not a test."""
    adjusted = iter(holm([one.p_value for one in found if one is not None]))
    return [one if one is None else replace(one, holm=next(adjusted)) for one in found]


def _defined(number: float) -> float | None:
    return float(number) if np.isfinite(number) else None
