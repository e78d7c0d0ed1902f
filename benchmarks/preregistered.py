"""Apply the rules of docs/preregistration.md to the results of its sweeps. The rules were
written before the runs.

    python -m benchmarks.preregistered outputs/sweeps/rate/values.csv …

``titan-disp sweep table`` writes the files for the page's sweeps, with the metrics
validation and, for B2, mean_cosine. ``benchmarks.abilities`` writes the file of further
metrics. The order of the files does not matter. Each prediction with finished runs is
printed with its interval, and then on − off in each secondary metric, without a verdict.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import pandas
import tyro
from tyro.conf import Positional

from benchmarks.evidence_runs import ends, interval

RATES = ("0.001", "0.004", "0.016")
DOSES = ("off", "dose_coeff-0.03", "on", "dose_coeff-0.3", "dose_coeff--0.1")
DRAWS = 20_000  # number of simulated experiments

Bounds = Callable[
    [np.ndarray, np.ndarray], np.ndarray
]  # takes both ends of an interval


def described(outcome: np.ndarray, level: float) -> str:
    """Return the mean with Student's interval, as text, given an outcome [seeds]."""
    bounds = f"{level:.0%} interval {ends(outcome, level)}"
    return f"{outcome.mean():+.4f} ({bounds}, {len(outcome)} seeds)"


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
        return f"{described(outcome, self.level)}: {words}"

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

    Raises ValueError if a run has two different values.
    """
    rows = pandas.concat(map(pandas.read_csv, files)).drop_duplicates()
    return rows.pivot(index="seeds", columns=["metric", "point"], values="value")


def finished(
    values: pandas.DataFrame, metric: str, *conditions: str
) -> pandas.DataFrame:
    """Return a metric by seeds and conditions, for the seeds that all conditions have."""
    return values.reindex(columns=[(metric, name) for name in conditions]).dropna()


def difference(
    values: pandas.DataFrame, metric: str, condition: str, baseline: str
) -> np.ndarray:
    """Return the differences of a metric between two conditions, [seeds]."""
    pairs = finished(values, metric, condition, baseline)
    return -np.diff(pairs.to_numpy())[:, 0]


def outcomes(values: pandas.DataFrame) -> dict[str, np.ndarray]:
    """Return the outcome of each prediction, [seeds]; empty where runs are missing."""
    loss = partial(difference, values, "validation")
    states = map("_lr-".join, product(("on", "off"), RATES))
    on_then_off = finished(values, "validation", *states).to_numpy()
    doublings = np.log2([float(rate) for rate in RATES])
    losses = finished(values, "validation", *DOSES)
    cosines = finished(values, "mean_cosine", *DOSES)
    seeds = losses.index.intersection(cosines.index)
    pairs = zip(cosines.loc[seeds].values, losses.loc[seeds].values, strict=True)
    on = loss("on", "off")
    return {
        "A1": np.array([slope(doublings, x[:3] - x[3:]) for x in on_then_off]),
        "A2": loss("on_lr-0.001", "off_lr-0.001"),
        "A3": loss("off_lr-0.0015", "on_lr-0.001"),
        "B1": on,
        "B1, no difference of 0.01 or more": on,
        "B2": np.array([slope(cosine, loss) for cosine, loss in pairs]),
    }


def secondary(values: pandas.DataFrame) -> dict[str, np.ndarray]:
    """Return on − off in each metric but the validation loss, [seeds]."""
    metrics = values.columns.unique("metric").drop("validation", errors="ignore")
    return {metric: difference(values, metric, "on", "off") for metric in metrics}


def main(files: Positional[tuple[str, ...]]) -> None:
    """Print the outcomes of these CSV files."""
    values = read_values(files)
    for name, outcome in outcomes(values).items():
        if len(outcome) > 1:
            print(f"{name}: {PREDICTIONS[name].verdict(outcome)}")
    for metric, outcome in secondary(values).items():
        if len(outcome) > 1:
            print(f"{metric}: {described(outcome, 0.95)}")


if __name__ == "__main__":
    tyro.cli(main)
