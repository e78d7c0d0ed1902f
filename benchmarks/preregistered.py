"""Apply the rules of docs/preregistration.md to the results of its sweeps. The rules were
written before the runs.

    python -m benchmarks.preregistered outputs/sweeps/rate/values.csv …

``titan-disp sweep table`` writes the files for the page's sweeps, with the metrics
validation and, for B2, mean_cosine. Their order does not matter. Each prediction with
finished runs is printed with its interval.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas

from benchmarks.evidence_runs import interval

RATES = ("0.001", "0.004", "0.016")
DOSES = ("off", "dose_coeff-0.03", "on", "dose_coeff-0.3", "dose_coeff--0.1")
DRAWS = 20_000  # number of simulated experiments

Bounds = Callable[
    [np.ndarray, np.ndarray], np.ndarray
]  # takes both ends of an interval


@dataclass(frozen=True)
class Prediction:
    """A prediction about Student's interval of the mean over the seeds."""

    seeds: int  # how many are needed
    level: float  # of the interval
    holds: Bounds  # whether an interval confirms the prediction
    falsified: Bounds  # whether an interval contradicts it

    def verdict(self, outcome: np.ndarray) -> str:
        """Return a line with the mean, the interval and the verdict."""
        low, high = interval(outcome, self.level)
        words = "undecided"
        if len(outcome) < self.seeds:
            words = "seeds are missing"
        elif self.falsified(low, high):
            words = "falsified" + " (as to its size)" * bool(self.holds(low, high))
        elif self.holds(low, high):
            words = "holds"
        ends = f"{self.level:.0%} interval {low:+.4f} … {high:+.4f}"
        return f"{outcome.mean():+.4f} ({ends}, {len(outcome)} seeds): {words}"

    def power(self, effect: float, deviation: float) -> float:
        """Return the fraction of simulated experiments in which the prediction holds, if
        the true effect and the standard deviation over seeds are these.
        """
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
    """Return the slope of y over x, by least squares."""
    return float(np.polyfit(x, y, 1)[0])


def read_values(files: Sequence[str]) -> pandas.DataFrame:
    """Return the values of all files: a row for each combination of seeds, and a column
    for each (metric, condition). Values of missing runs are NaN.
    """
    rows = pandas.concat(map(pandas.read_csv, files))
    return rows.pivot_table("value", index="seeds", columns=["metric", "point"])


def outcomes(values: pandas.DataFrame) -> dict[str, np.ndarray]:
    """Return the outcome of each prediction, [seeds]; empty where runs are missing."""

    def of(metric: str, *conditions: str) -> pandas.DataFrame:
        """Return a metric by seeds and conditions, where all runs have finished."""
        columns = [(metric, condition) for condition in conditions]
        return values.reindex(columns=columns).dropna()

    def difference(condition: str, baseline: str) -> np.ndarray:
        pairs = of("validation", condition, baseline)
        return -np.diff(pairs.to_numpy())[:, 0]

    states = map("_lr-".join, product(("on", "off"), RATES))
    on_then_off = of("validation", *states).to_numpy()
    doublings = np.log2([float(rate) for rate in RATES])
    losses = of("validation", *DOSES)
    cosines = of("mean_cosine", *DOSES)
    seeds = losses.index.intersection(cosines.index)
    pairs = zip(cosines.loc[seeds].values, losses.loc[seeds].values, strict=True)
    on = difference("on", "off")
    return {
        "A1": np.array([slope(doublings, x[:3] - x[3:]) for x in on_then_off]),
        "A2": difference("on_lr-0.001", "off_lr-0.001"),
        "A3": difference("off_lr-0.0015", "on_lr-0.001"),
        "B1": on,
        "B1, no difference of 0.01 or more": on,
        "B2": np.array([slope(cosine, loss) for cosine, loss in pairs]),
    }


def main(files: Sequence[str]) -> None:
    for name, outcome in outcomes(read_values(files)).items():
        if len(outcome) > 1:
            print(f"{name}: {PREDICTIONS[name].verdict(outcome)}")


if __name__ == "__main__":
    main(sys.argv[1:])
