"""Apply the rules of docs/preregistration.md to its sweeps. They were written before the
runs.

    python -m benchmarks.preregistered outputs/sweeps/rate/values.csv …

The files are those that ``titan-disp sweep table`` writes for the page's sweeps, in any
order, with the metrics validation and, for B2, mean_cosine. Each prediction whose runs
have all finished is printed with its interval.
"""

import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.evidence_runs import interval

RATES = ("0.001", "0.004", "0.016")
DOSES = ("off", "dose_coeff-0.03", "on", "dose_coeff-0.3", "dose_coeff--0.1")
DRAWS = 20_000  # simulated experiments for a power

Bounds = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of an interval's two ends
Values = Mapping[tuple[str, str], Mapping[str, float]]  # (metric, condition) → by seeds


@dataclass(frozen=True)
class Prediction:
    """What the interval of the mean over the seeds, at ``level``, must be.

    ``seeds`` is how many the outcome needs.
    """

    seeds: int
    level: float
    holds: Bounds
    falsified: Bounds

    def verdict(self, outcome: np.ndarray) -> str:
        low, high = interval(outcome, self.level)
        if len(outcome) < self.seeds:
            words = "seeds are missing"
        elif self.falsified(low, high):
            words = "falsified" + " (as to its size)" * bool(self.holds(low, high))
        else:
            words = "holds" if self.holds(low, high) else "undecided"
        ends = f"{self.level:.0%} interval {low:+.4f} … {high:+.4f}"
        return f"{outcome.mean():+.4f} ({ends}, {len(outcome)} seeds): {words}"

    def power(self, effect: float, deviation: float) -> float:
        """Return how often it holds in simulated experiments with a true effect."""
        size = (DRAWS, self.seeds)
        draws = np.random.default_rng(0).normal(effect, deviation, size)
        return float(self.holds(*interval(draws, self.level)).mean())


SAME = Prediction(
    seeds=16,
    level=0.9,
    holds=lambda low, high: (low > -0.01) & (high < 0.01),
    falsified=lambda low, high: (low > 0.01) | (high < -0.01),
)
PREDICTIONS = {
    "A1": Prediction(8, 0.95, lambda low, _: low > 0, lambda low, _: low <= 0),
    "A2": Prediction(8, 0.95, lambda _, high: high < 0, lambda low, _: low > 0),
    "A3": Prediction(24, 0.9, SAME.holds, SAME.falsified),
    "B1": Prediction(16, 0.95, lambda _, high: high < 0, lambda low, _: low > -0.02),
    "B1, no difference of 0.01 or more": SAME,
    "B2": Prediction(8, 0.95, lambda low, _: low > 0, lambda low, _: low <= 0),
    "C1": Prediction(8, 0.95, lambda low, _: low > 0, lambda _, high: high < 0.0066),
    "C2": Prediction(8, 0.95, lambda low, _: low > 0, lambda _, high: high < 0.0066),
}


def slope(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.polyfit(x, y, 1)[0])


def read_values(files: Sequence[str]) -> Values:
    values: dict[tuple[str, str], dict[str, float]] = {}
    for file in files:
        with Path(file).open(newline="") as lines:
            for row in csv.DictReader(lines):
                if row["value"]:
                    of_seeds = values.setdefault((row["metric"], row["point"]), {})
                    of_seeds[row["seeds"]] = float(row["value"])
    return values


def by_seed(values: Values, metric: str, *conditions: str) -> dict[str, np.ndarray]:
    """Return the values of a metric by seeds, [conditions], where all have finished."""
    of_conditions = [values.get((metric, name), {}) for name in conditions]
    seeds = set.intersection(*(set(one) for one in of_conditions))
    return {
        seed: np.array([one[seed] for one in of_conditions]) for seed in sorted(seeds)
    }


def outcomes(values: Values) -> dict[str, np.ndarray]:
    """Return the outcome of each prediction, [seeds]; empty where runs are missing."""

    def difference(condition: str, baseline: str) -> np.ndarray:
        pairs = by_seed(values, "validation", condition, baseline).values()
        return np.array([value - other for value, other in pairs])

    states = [f"{state}_lr-{rate}" for state in ("on", "off") for rate in RATES]
    at_rates = by_seed(values, "validation", *states).values()
    doublings = np.log2([float(rate) for rate in RATES])
    losses = by_seed(values, "validation", *DOSES)
    cosines = by_seed(values, "mean_cosine", *DOSES)
    on = difference("on", "off")
    return {
        "A1": np.array([slope(doublings, loss[:3] - loss[3:]) for loss in at_rates]),
        "A2": difference("on_lr-0.001", "off_lr-0.001"),
        "A3": difference("off_lr-0.0015", "on_lr-0.001"),
        "B1": on,
        "B1, no difference of 0.01 or more": on,
        "B2": np.array(
            [slope(cosines[seed], losses[seed]) for seed in losses if seed in cosines]
        ),
    }


def main(files: Sequence[str]) -> None:
    for name, outcome in outcomes(read_values(files)).items():
        if len(outcome) > 1:
            print(f"{name}: {PREDICTIONS[name].verdict(outcome)}")


if __name__ == "__main__":
    main(sys.argv[1:])
