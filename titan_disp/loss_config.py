"""This module builds the loss and its weight λ from the [dispersion] section."""

from dataclasses import fields

from torchtitan.config import JobConfig

from titan_disp.dispersion import CoeffSchedule, DispersionLoss
from titan_disp.errors import ConfigError


def build_dispersion_loss(job_config: JobConfig) -> DispersionLoss:
    """Return the loss that [dispersion] describes. ``debug.seed`` decides which positions are sampled.

    Raises:
        ConfigError: an option is out of range or unused.
    """
    section = job_config.dispersion  # type: ignore[attr-defined]
    options = {field.name: getattr(section, field.name) for field in fields(DispersionLoss) if field.name != "seed"}
    try:
        return DispersionLoss(**options, seed=job_config.debug.seed or 0)
    except ValueError as error:
        raise ConfigError(f"dispersion.{error}") from error


def build_coeff_schedule(job_config: JobConfig) -> CoeffSchedule:
    """Return λ over the run, as [dispersion] describes it. training.steps must be known.

    Raises:
        ConfigError: an option is out of range.
    """
    d = job_config.dispersion  # type: ignore[attr-defined]
    try:
        return CoeffSchedule(d.coeff, d.warmup_steps, d.decay, d.final_coeff, job_config.training.steps, d.decay_steps)
    except ValueError as error:
        raise ConfigError(f"dispersion.{error}") from error
