"""The learning rate and λ over a run, computed before the run for checks, warnings and
plans.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import torch
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.config.job_config import LRScheduler
from torchtitan.tools.logging import logger

from titan_disp.config.types import JobConfig
from titan_disp.dispersion.formula import check_coeff, condensing
from titan_disp.errors import ConfigError, prefixed

# A longer run's schedule is computed at about this many steps. All steps of a run of
# 156 B tokens would take up to a second, and a plan tries a thousand numbers of nodes.
POINTS = 2000
ENDS = 64  # the number of first steps, and of last steps, that are all computed
# Smaller differences of learning rates, relative to the highest, are rounding errors.
ROUNDING = 1e-6
# The errors of TorchTitan's schedule at steps without a value
NO_VALUE = (AssertionError, ArithmeticError, ValueError)


@dataclass(frozen=True)
class Curve:
    """The values of a schedule by step, counted from 1. The steps include the first and
    the last step of the run.
    """

    values: dict[int, float]

    @property
    def first(self) -> float:
        return next(iter(self.values.values()))

    @property
    def last(self) -> float:
        return next(reversed(self.values.values()))

    @property
    def peak_step(self) -> int:
        """The first step with the largest absolute value."""
        return max(self.values, key=lambda step: abs(self.values[step]))

    @property
    def peak(self) -> float:
        return self.values[self.peak_step]

    @property
    def rise(self) -> float:
        """The largest increase of the value after its peak; 0 if it never rises again."""
        peak_step = self.peak_step
        after = [v for step, v in self.values.items() if step >= peak_step]
        lowest = accumulate(after, min)
        return max(v - low for v, low in zip(after, lowest, strict=True))

    def step_of(self, test: Callable[[float], bool]) -> int | None:
        """Return the first step whose value passes the test; None if there is none."""
        return next((step for step, v in self.values.items() if test(v)), None)


def curve(
    schedule: Callable[[int], float], steps: int, corners: Iterable[int] = ()
) -> Curve:
    """Return the values of a schedule over a run of ``steps``.

    A long run is sampled at evenly spaced steps, at both ends, and at ``corners``.
    ``schedule`` takes a number of completed steps. ``corners`` are numbers of completed
    steps, too.
    """
    ends = (*range(ENDS), *range(steps - ENDS, steps), *corners)
    completed = set(range(0, steps, max(1, steps // POINTS)))
    completed.update(step for step in ends if 0 <= step < steps)
    return Curve({step + 1: schedule(step) for step in sorted(completed)})


def learning_rate(job_config: JobConfig) -> Curve:
    """Return the learning rate over the run, NaN at steps where TorchTitan's schedule
    fails.

    training.steps must be known.
    """
    options = tuple(vars(job_config.lr_scheduler).items())
    return _learning_rate(job_config.optimizer.lr, job_config.training.steps, options)


@functools.lru_cache(maxsize=16)
def _learning_rate(
    rate: float, steps: int, options: tuple[tuple[str, Any], ...]
) -> Curve:
    config = LRScheduler(**dict(options))
    factor = _factor(config, steps)

    def scheduled(completed: int) -> float:
        try:
            return rate * factor(completed)
        except NO_VALUE:
            return math.nan

    warmup = config.warmup_steps
    return curve(scheduled, steps, corners=(warmup - 1, warmup))


def _factor(config: LRScheduler, steps: int) -> Callable[[int], float]:
    """Return TorchTitan's schedule: a function that takes the number of completed steps
    and returns a factor of the learning rate.
    """
    optimizers: Any = [torch.optim.SGD([torch.zeros(1)], lr=1.0)]
    logger.disabled = True  # the trainer will print the same warnings
    try:
        (scheduler,) = build_lr_schedulers(optimizers, config, steps)
    except NO_VALUE:
        return lambda completed: math.nan
    finally:
        logger.disabled = False
    return scheduler.lr_lambdas[0]


DECAYS = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class CoeffSchedule:
    """λ as a function of the number of completed steps. The paper's λ is constant.

    Attributes:
        coeff: λ after warm-up. If λ is negative at any step, the embeddings condense,
            and there is a warning.
        warmup_steps: steps over which λ grows linearly to ``coeff``; the first step has
            coeff / warmup_steps.
        decay: the curve of λ from ``coeff`` to ``final_coeff``: "linear" or "cosine"
            (half a period). With "constant", λ stays at ``coeff``.
        final_coeff: λ at the end of the decay.
        total_steps: steps of the run.
        decay_steps: steps of the decay, after which λ stays at ``final_coeff``; 0: the
            decay ends at the last step.

    Raises:
        ValueError: an option is out of range.
    """

    coeff: float
    warmup_steps: int = 0
    decay: str = "constant"
    final_coeff: float = 0.0
    total_steps: int = 1
    decay_steps: int = 0

    def __post_init__(self) -> None:
        check_coeff("coeff", self.coeff)
        check_coeff("final_coeff", self.final_coeff)
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}, expected 0 to "
                f"{self.total_steps}, the steps of the run"
            )
        if self.decay not in DECAYS:
            raise ValueError(
                f"decay is {self.decay!r}, expected one of {', '.join(DECAYS)}"
            )
        after_warmup = self.total_steps - self.warmup_steps
        if not 0 <= self.decay_steps <= after_warmup:
            raise ValueError(
                f"decay_steps is {self.decay_steps}, expected 0 to {after_warmup}, "
                "the steps after warm-up"
            )
        if self.decay_steps and self.decay == "constant":
            raise ValueError(
                f"decay_steps is {self.decay_steps}, but decay is 'constant': "
                "expected 0 or another decay"
            )
        if warning := condensing(self.lowest):
            warnings.warn(warning, stacklevel=3)

    @property
    def lowest(self) -> float:
        """The lowest λ after warm-up."""
        if self.decay == "constant":
            return self.coeff
        return min(self.coeff, self.final_coeff)

    def __call__(self, step: int) -> float:
        """Return λ of the next step after ``step`` completed steps."""
        if step < self.warmup_steps:
            return self.coeff * (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.coeff
        # The last step has final_coeff exactly.
        steps = self.decay_steps or max(1, self.total_steps - 1 - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / steps)
        remaining = 1.0 - progress
        if self.decay == "cosine":
            remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_coeff + (self.coeff - self.final_coeff) * remaining


def build_coeff_schedule(job_config: JobConfig) -> CoeffSchedule:
    """Return the schedule of λ in [dispersion]. training.steps must be known."""
    section = job_config.dispersion
    steps = job_config.training.steps
    keys = {
        f.name: getattr(section, f.name)
        for f in fields(CoeffSchedule)
        if f.name != "total_steps"
    }
    with prefixed("dispersion."), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ``schedule_warnings`` yields the same warning
        return CoeffSchedule(**keys, total_steps=steps)


def coeff_curve(job_config: JobConfig) -> Curve:
    """Return λ over the run. training.steps must be known."""
    return _coeff_curve(build_coeff_schedule(job_config))


@functools.lru_cache(maxsize=16)
def _coeff_curve(schedule: CoeffSchedule) -> Curve:
    warmup = schedule.warmup_steps
    return curve(schedule, schedule.total_steps, corners=(warmup - 1, warmup))


def check_schedules(job_config: JobConfig) -> None:
    """Raise ConfigError if a learning rate of the run is negative or not finite, or if λ
    is not finite.
    """
    rate = learning_rate(job_config)
    bad_step = rate.step_of(lambda value: not (0 <= value < math.inf))
    if bad_step is not None:
        schedule_steps = job_config.lr_scheduler.total_steps
        cure = "change [lr_scheduler]"
        if schedule_steps is not None:
            cure = (
                f"lr_scheduler.total_steps is {schedule_steps}, but training.steps is "
                f"{job_config.training.steps}. Leave total_steps out"
            )
        raise ConfigError(
            f"the learning rate of step {bad_step} is {rate.values[bad_step]:.3g}, "
            f"expected a finite number ≥ 0: {cure}"
        )
    coeff = coeff_curve(job_config)
    bad_step = coeff.step_of(lambda value: not math.isfinite(value))
    if bad_step is not None:
        raise ConfigError(
            f"λ of step {bad_step} is {coeff.values[bad_step]}, expected a finite "
            "number: lower dispersion.coeff or dispersion.final_coeff"
        )


def _shortened(job_config: JobConfig) -> Iterator[str]:
    """Yield a warning if TorchTitan shortens a schedule that is too long."""
    section = job_config.lr_scheduler
    steps = section.total_steps or job_config.training.steps
    warmup = section.warmup_steps
    decay = round(steps * (section.decay_ratio or 0))
    if warmup + decay > steps:
        yield (
            f"lr_scheduler.warmup_steps {warmup} and decay_ratio need {warmup + decay} "
            f"steps, more than the {steps} of the schedule: TorchTitan shortens them to "
            f"{min(warmup, steps)} of warm-up and {max(steps - warmup, 0)} of decay"
        )


def schedule_warnings(job_config: JobConfig) -> Iterator[str]:
    """Yield warnings about the learning rate and λ over the run. training.steps must be
    known.
    """
    rate = learning_rate(job_config)
    highest = job_config.optimizer.lr
    if highest == 0:
        yield "optimizer.lr is 0: no weight changes"
    elif rate.peak < highest * (1 - ROUNDING):
        yield (
            f"the learning rate never reaches optimizer.lr {highest:g}: the highest is "
            f"{rate.peak:g}, in step {rate.peak_step} of {job_config.training.steps}. "
            "Lower lr_scheduler.warmup_steps"
        )
    if rate.rise > highest * ROUNDING:
        yield (
            f"the learning rate rises again after its peak, to {rate.last:g} in the "
            f"last step, {job_config.training.steps}, because lr_scheduler.total_steps "
            f"is {job_config.lr_scheduler.total_steps}. Leave total_steps out"
        )
    # If the schedule ends before the run, TorchTitan's linear decay goes on.
    floor = highest * job_config.lr_scheduler.min_lr_factor
    if rate.last < min(rate.peak, floor * (1 - ROUNDING)):
        yield (
            f"the learning rate falls to {rate.last:g} in the last step, below "
            f"optimizer.lr × lr_scheduler.min_lr_factor = {floor:g}"
        )
    yield from _shortened(job_config)
    coeff_warning = condensing(build_coeff_schedule(job_config).lowest)
    if coeff_warning is not None and job_config.dispersion.enabled:
        yield coeff_warning
