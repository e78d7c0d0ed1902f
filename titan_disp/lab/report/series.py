"""Declares the series (numbers of a run by step) that the page draws, and whose last
values it lists.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from titan_disp.condensation.record import OF_PAPER, PLACES, Measurement, blocks_mean
from titan_disp.lab import plots
from titan_disp.lab.report import charts
from titan_disp.lab.report.charts import Scale
from titan_disp.lab.report.gather import RunRecord

# Rows over which a training loss is averaged, because the loss of a batch is noisy.
LAST_ROWS = 10
# function that reads (steps, values) from a run
Points = Callable[[RunRecord], tuple[Iterable[float], Iterable[float]]]


@dataclass(frozen=True)
class Series:
    """A number of a run by step."""

    label: str
    points: Points
    scale: Scale = charts.as_it_is  # of axis y

    def by_step(self, run: RunRecord) -> dict[float, float]:
        """Return the run's numbers by step, in ascending order of steps."""
        steps, values = self.points(run)
        return dict(zip(steps, values, strict=True))


def tokens_per_step(runs: Sequence[RunRecord]) -> float | None:
    """Return the tokens per step of all runs, or None if runs differ or nothing was
    logged.
    """
    numbers = {run.tokens_per_step for run in runs if run.rows}
    if len(numbers) == 1:
        return numbers.pop()
    return None


def xlabel_of(runs: Sequence[RunRecord]) -> str:
    """Return "step", or "tokens" if the runs differ in their tokens per step."""
    if tokens_per_step(runs) is None and any(run.rows for run in runs):
        return "tokens"
    return "step"


def per_step(run: RunRecord, xlabel: str) -> float:
    """Return the growth of x in a step of the run, or NaN if the growth is unknown."""
    if xlabel == "tokens":
        return run.tokens_per_step
    return 1.0


def logged(key: str) -> Points:
    return lambda run: (run.series("step"), run.series(key))


def measured(read: Callable[[Measurement], float]) -> Points:
    return lambda run: (run.condensation.keys(), map(read, run.condensation.values()))


def _dispersion(run: RunRecord) -> tuple[Iterable[float], Iterable[float]]:
    if not run.disperses:
        return (), ()
    return logged("dispersion")(run)


def _smoothed(run: RunRecord) -> tuple[Iterable[float], Iterable[float]]:
    values = run.series("ce")
    if len(values) < LAST_ROWS:
        return (), ()
    means = np.convolve(values, np.ones(LAST_ROWS) / LAST_ROWS, "valid")
    return run.series("step")[LAST_ROWS - 1 :], means


CROSS_ENTROPY = Series(
    "training cross-entropy", logged("ce"), charts.without_the_beginning
)
SMOOTHED = Series(f"training cross-entropy, mean of {LAST_ROWS} rows", _smoothed)
VALIDATION = Series(
    "validation cross-entropy",
    lambda run: (run.validation.keys(), run.validation.values()),
)
HELD_OUT = Series(
    "cross-entropy on held-out text",
    measured(lambda measurement: measurement.cross_entropy),
)
DISPERSION = Series("dispersion loss (without λ)", _dispersion)
SPEED = Series("tokens/s of one rank", logged("tps"), charts.from_zero)
COSINE = Series("mean cosine of all blocks", measured(blocks_mean))

LOSSES = (CROSS_ENTROPY, DISPERSION, VALIDATION, HELD_OUT)
OPTIMIZATION = (
    Series("learning rate", logged("lr")),
    Series("gradient norm, before clipping", logged("grad_norm"), charts.by_factors),
    SPEED,
)
CONDENSATION = (
    COSINE,
    Series(
        "mean cosine of the last block",
        measured(lambda measurement: measurement.mean_cosine[measurement.last_block]),
    ),
    Series(
        "mean cosine after the final norm",
        measured(lambda measurement: measurement.mean_cosine[-1]),
    ),
    *(
        Series(f"{name} {PLACES[OF_PAPER]}", measured(read), charts.correlation)
        for name, read in plots.MEASURES.items()
    ),
    Series(
        "effective rank of the last block",
        measured(
            lambda measurement: measurement.effective_rank[measurement.last_block]
        ),
        charts.from_zero,
    ),
)
