"""Apply the rules of docs/preregistration.md to the results of its experiments A and B. The
rules were written before the runs. (``benchmarks.midtraining`` does this for C.)

    python -m benchmarks.preregistered outputs/sweeps/rate/rates/values.csv …

``titan-disp sweep table`` writes the files, with the metrics validation and, for B2,
mean_cosine. ``benchmarks.abilities`` writes the file with the retrieval and next-token
metrics. The order of the files does not matter.

The program prints each prediction for which two seeds or more have finished, with the
interval of its outcome and a verdict. Then it prints the difference between the conditions
"on" and "off" in each secondary metric, with an interval and without a verdict.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas
import tyro
from pandas import DataFrame, MultiIndex, Series
from tyro.conf import Positional

from benchmarks.evidence_runs import ends, interval

# Learning rates and doses, as in the names of the sweeps' conditions
RATES = ("0.001", "0.004", "0.016")
DOSES = ("off", "dose_coeff-0.03", "on", "dose_coeff-0.3", "dose_coeff--0.1")
DRAWS = 20_000  # number of simulated experiments

# Says whether a statement is true of an interval, given its two ends
Rule = Callable[[np.ndarray, np.ndarray], np.ndarray]


def described(outcome: np.ndarray | Series, level: float) -> str:
    """Return the mean of an outcome [seeds] and Student's interval, as text."""
    bounds = f"{100 * level:.0f} % interval {ends(outcome, level)}"
    return f"{outcome.mean():+.4f} ({bounds}, {len(outcome)} seeds)"


@dataclass(frozen=True)
class Prediction:
    """A prediction about Student's interval of the mean over the seeds.

    If both rules apply to the interval, there is an effect, but it is smaller than predicted.
    """

    seeds: int  # number of seeds that are needed
    level: float  # level of the interval, such as 0.95
    holds: Rule
    falsified: Rule

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
        """Return the fraction of simulated experiments in which the rule ``holds`` applies,
        given the true effect and the standard deviation over seeds.
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
RISES = Prediction(8, 0.95, lambda low, _: low > 0, lambda low, _: low <= 0)
GAINS = Prediction(8, 0.95, lambda low, _: low > 0, lambda _, high: high < 0.0066)
PREDICTIONS = {
    "A1": RISES,
    "A2": Prediction(8, 0.95, lambda _, high: high < 0, lambda low, _: low > 0),
    "A3": replace(SAME, seeds=24),
    "B1": Prediction(16, 0.95, lambda _, high: high < 0, lambda low, _: low > -0.02),
    "B1, no difference of 0.01 or more": SAME,
    "B2": RISES,
    "C1": GAINS,
    "C2": GAINS,
}


def slopes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the slopes of y over x by least squares, [...], given [..., points]."""
    x = x - x.mean(-1, keepdims=True)
    return (x * y).sum(-1) / (x**2).sum(-1)


def read_values(files: Sequence[str]) -> DataFrame:
    """Return the values of all files, with NaN for missing runs. The rows are named by the
    text of the runs' seeds, and the columns by (metric, condition).

    Raises ValueError if two rows of a run and metric differ.
    """
    rows = pandas.concat(map(pandas.read_csv, files)).drop_duplicates()
    return rows.pivot(index="seeds", columns=["metric", "point"], values="value")


def difference(values: DataFrame, metric: str, condition: str, baseline: str) -> Series:
    """Return condition − baseline in a metric, for the seeds that have both."""
    pairs = values.reindex(columns=[(metric, condition), (metric, baseline)]).dropna()
    return pairs[metric, condition] - pairs[metric, baseline]


def on_minus_off(values: DataFrame) -> DataFrame:
    """Return on − off in experiment A, by seed and learning rate."""
    return DataFrame(
        {
            rate: difference(values, "validation", f"on_lr-{rate}", f"off_lr-{rate}")
            for rate in RATES
        }
    )


def outcomes(values: DataFrame) -> dict[str, np.ndarray]:
    """Return the outcome [seeds] of each prediction of A and B, for the seeds of which all
    runs have finished.
    """

    def loss(condition: str, baseline: str) -> np.ndarray:
        return difference(values, "validation", condition, baseline).to_numpy()

    doublings = np.log2([float(rate) for rate in RATES])
    columns = MultiIndex.from_product((("mean_cosine", "validation"), DOSES))
    doses = values.reindex(columns=columns).dropna()
    on = loss("on", "off")
    return {
        "A1": slopes(doublings, on_minus_off(values).dropna().to_numpy()),
        "A2": loss("on_lr-0.001", "off_lr-0.001"),
        "A3": loss("off_lr-0.0015", "on_lr-0.001"),
        "B1": on,
        "B1, no difference of 0.01 or more": on,
        "B2": slopes(doses["mean_cosine"].to_numpy(), doses["validation"].to_numpy()),
    }


def main(files: Positional[tuple[str, ...]]) -> None:
    """Print the outcomes of these CSV files."""
    values = read_values(files)
    for name, outcome in outcomes(values).items():
        if len(outcome) > 1:
            print(f"{name}: {PREDICTIONS[name].verdict(outcome)}")
    metrics = values.columns.unique("metric")
    for metric in metrics.drop("validation", errors="ignore"):
        on_off = difference(values, metric, "on", "off")
        if len(on_off) > 1:
            print(f"{metric}: {described(on_off, 0.95)}")


if __name__ == "__main__":
    tyro.cli(main)
