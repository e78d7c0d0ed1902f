"""Statistics to compare conditions (runs of a sweep, or evaluated models): differences
over documents and over seeds, their tests, and Holm's adjustment.
"""

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from scipy import stats

from titan_disp.text import NOTHING

# For up to this many differences, all sign patterns are counted, in three seconds
EXACT = 18
EQUAL = 1e-12  # relative; smaller differences are rounding errors

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Difference:
    """Mean difference between a condition and the baseline, over documents or over
    seeds.

    With a single pair, or if all differences are equal, only the mean and the p value of
    the sign-flip test are defined. The other fields are then None.
    """

    mean: float
    standard_error: float | None
    low: float | None  # 95 % interval of the mean, by Student's t
    high: float | None
    # two-sided; from the paired t-test for documents, the sign-flip test for pairs of
    # seeds, and Welch's t-test for seeds that are not paired
    p_value: float | None
    pairs: int  # number of documents, or of shared seeds; 0 if seeds are not paired
    holm: float | None = None  # p adjusted for the number of tasks or conditions

    @property
    def interval(self) -> str:
        """The 95 % interval as text, such as ``-0.1000 … +0.2000``."""
        if self.low is None or self.high is None:
            return NOTHING
        return f"{self.low:+.4f} … {self.high:+.4f}"

    def __str__(self) -> str:
        return with_error(self.mean, self.standard_error, "+")


COLUMNS = ("mean", "standard_error", "low", "high", "p_value", "holm")


def csv_cells(difference: Difference | None) -> list[float | None]:
    """Return the cells of ``COLUMNS`` for a CSV file; all are None without a
    difference.
    """
    return [getattr(difference, name, None) for name in COLUMNS]


def standard_error(values: Sequence[float] | np.ndarray) -> float | None:
    """Return the standard error of the mean, or None for fewer than two numbers."""
    if len(values) < 2:
        return None
    return float(stats.sem(values))


def with_error(mean: float, error: float | None, sign: str = "") -> str:
    """Return a mean and its standard error as text, such as ``4.0000 ± 0.0577``.

    ``sign`` is "+" for differences, so that positive means have a sign, too.
    """
    if error is None:
        return f"{mean:{sign}.4f}"
    return f"{mean:{sign}.4f} ± {error:.4f}"


def paired_difference(values: np.ndarray, baseline: np.ndarray) -> Difference:
    """Return the mean difference of paired values, [pairs], with a paired t-test."""
    differences = values - baseline
    mean = float(differences.mean())
    # The t-test is undefined for equal differences, which may have rounding errors.
    if np.ptp(differences) <= EQUAL * np.abs(differences).max():
        return Difference(mean, None, None, None, p_value=None, pairs=len(differences))
    test = stats.ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(0.95)
    return Difference(
        mean=mean,
        standard_error=_defined(stats.sem(differences)),
        low=_defined(low),
        high=_defined(high),
        p_value=_defined(test.pvalue),
        pairs=len(differences),
    )


def paired_by_seed(
    values_by_seed: Mapping[Key, float], baseline_by_seed: Mapping[Key, float]
) -> Difference | None:
    """Return the difference between a condition and the baseline over their shared
    seeds, with the p value of the sign-flip test.

    Returns None if the condition and the baseline share no seed.
    """
    pairs = [seed for seed in values_by_seed if seed in baseline_by_seed]
    if not pairs:
        return None
    values = np.array([values_by_seed[seed] for seed in pairs])
    baseline = np.array([baseline_by_seed[seed] for seed in pairs])
    difference = paired_difference(values, baseline)
    return replace(difference, p_value=sign_flip_p(values - baseline))


def sign_flip_p(differences: Sequence[float] | np.ndarray) -> float | None:
    """Return the two-sided p value of the sign-flip test of n differences.

    Returns None if n < 2 or a difference is not finite. The p value is the fraction of
    all 2ⁿ sign patterns whose sum is at least as far from 0 as the observed sum. For n
    above ``EXACT``, the p value is estimated with ``2**EXACT`` random patterns.

    Under the null hypothesis, each difference is equally likely with the opposite sign.
    No distribution is assumed. The smallest p value is 2/2ⁿ, so 5 pairs cannot reach
    0.05, and 6 pairs can.
    """
    d = np.asarray(differences, dtype=np.float64)
    if len(d) < 2 or not np.isfinite(d).all():
        return None
    d = d / (np.abs(d).sum() or 1.0)  # makes the rounding in ``total`` relative

    def total(signed: np.ndarray, axis: int) -> np.ndarray:
        # Sums that differ only by rounding errors must count as equal
        return signed.sum(axis).round(12)

    test = stats.permutation_test(
        (d,), total, permutation_type="samples", n_resamples=2**EXACT, random_state=0
    )
    return float(test.pvalue)


def unpaired_difference(
    values: Sequence[float], baseline: Sequence[float]
) -> Difference | None:
    """Return the difference of two means by Welch's t-test.

    Returns None if either side has fewer than two numbers.
    """
    if min(len(values), len(baseline)) < 2:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two constants give NaN, which becomes None
        test: Any = stats.ttest_ind(values, baseline, equal_var=False)
        interval = test.confidence_interval(0.95)
    return Difference(
        mean=float(np.mean(values) - np.mean(baseline)),
        standard_error=float(np.hypot(stats.sem(values), stats.sem(baseline))),
        low=_defined(interval.low),
        high=_defined(interval.high),
        p_value=_defined(test.pvalue),
        pairs=0,
    )


def differences_over_seeds(
    conditions: Mapping[str, Mapping[Any, float]], baseline: str
) -> dict[str, Difference]:
    """Return the difference between each other condition and the baseline.

    Runs of one seed share their initial weights and the order of their data, so that
    their scores are correlated. Conditions are therefore compared over the seeds that
    they share, or by Welch's t-test if they share none. A condition is left out if
    neither comparison is possible.

    Args:
        conditions: each condition's score by seed. If seeds are unknown, any key that
            differs between runs stands in for the seed.
    """
    first = conditions[baseline]
    differences = {}
    for name, scores in conditions.items():
        difference = paired_by_seed(scores, first)
        if difference is None:
            difference = unpaired_difference([*scores.values()], [*first.values()])
        if difference is not None and name != baseline:
            differences[name] = difference
    return differences


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p values adjusted for multiple tests (Holm 1979; scipy only adjusts the
    false discovery rate).

    If all adjusted values below α are called significant, the probability of any false
    positive is below α. The i-th smallest of m values is multiplied by m − i + 1, and
    raised to the previous adjusted value if the product is smaller. None stays None,
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


def with_holm(tests: Sequence[Difference]) -> list[Difference]:
    """Return the tests with Holm's p values over all tests."""
    adjusted = holm([test.p_value for test in tests])
    return [replace(test, holm=p) for test, p in zip(tests, adjusted, strict=True)]


def _defined(number: float) -> float | None:
    """Return the number, or None if it is not finite."""
    if np.isfinite(number):
        return float(number)
    return None
