"""This module applies the [baseline] section to training.

A *slot* is one of the run's document streams. Each data-parallel rank reads some of the slots.
"""

import math
from collections.abc import Callable

from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from titan_disp.baselines import OPTIONS
from titan_disp.baselines.forgetting import ForgettingOptimizers, with_own_schedule
from titan_disp.baselines.noise import NoisyEmbedding
from titan_disp.batch import global_batch_size, slot_count
from titan_disp.errors import ConfigError


def check_baseline(job_config: JobConfig) -> None:
    """Check [baseline]. training.steps must be known.

    Raises:
        ConfigError: an option is out of range or unused by the method, or dispersion is on without with_dispersion.
    """
    section = job_config.baseline  # type: ignore[attr-defined]
    method, dispersion = section.method, job_config.dispersion.enabled  # type: ignore[attr-defined]
    for name, of in OPTIONS.items():
        if method != of and getattr(section, name) != getattr(type(section)(), name):
            raise ConfigError(
                f"baseline.{name} is {getattr(section, name)}, but baseline.method {method!r} does not use it: "
                f"set the method to {of!r}, or leave {name} out"
            )
    if method != "none" and dispersion and not section.with_dispersion:
        raise ConfigError(
            f"baseline.method is {method!r} and dispersion.enabled is true, but a baseline is what dispersion is "
            "compared with: set dispersion.enabled = false, or baseline.with_dispersion = true to train with both"
        )
    if section.with_dispersion and not (method != "none" and dispersion):
        raise ConfigError(
            f"baseline.with_dispersion is true, but baseline.method is {method!r} and dispersion.enabled is "
            f"{str(dispersion).lower()}: leave it out, or switch both on"
        )
    if not (section.noise_alpha > 0 and math.isfinite(section.noise_alpha)):
        raise ConfigError(f"baseline.noise_alpha is {section.noise_alpha}, expected a number > 0")
    if not (section.forget_lr >= 0 and math.isfinite(section.forget_lr)):
        raise ConfigError(f"baseline.forget_lr is {section.forget_lr}, expected a number ≥ 0 (0 = optimizer.lr)")
    if not 0 <= section.forget_warmup < 1:
        raise ConfigError(f"baseline.forget_warmup is {section.forget_warmup}, expected a number in [0, 1)")
    steps = job_config.training.steps
    # A preflight takes one step, and no upper limit applies to it.
    if method == "active_forgetting" and not 2 <= section.forget_every < (steps if steps > 1 else math.inf):
        raise ConfigError(
            f"baseline.forget_every is {section.forget_every}, expected 2 or more steps, but fewer than the {steps} of "
            "the run: nothing is forgotten after its last step"
        )


def build_noise(job_config: JobConfig, parallel_dims: ParallelDims, step: Callable[[], int]) -> NoisyEmbedding:
    """Return this rank's part of noisy_embedding.

    Args:
        step: returns the number of completed optimizer steps.
    """
    dp = parallel_dims.dp_replicate * parallel_dims.dp_shard
    batch, tp = parallel_dims.get_optional_mesh("batch"), parallel_dims.get_optional_mesh("tp")
    slots = slot_count(job_config, dp)
    own = slots // dp
    return NoisyEmbedding(
        alpha=job_config.baseline.noise_alpha,  # type: ignore[attr-defined]
        seq_len=job_config.training.seq_len,
        seed=job_config.debug.seed or 0,
        step=step,
        slots=slots,
        own_slots=own,
        first_slot=own * (batch.get_local_rank() if batch is not None else 0),
        per_step=global_batch_size(job_config, dp) // dp,
        tp_rank=tp.get_local_rank() if tp is not None else 0,
    )


def build_forgetting(
    inner: OptimizersContainer, job_config: JobConfig, step: Callable[[], int]
) -> ForgettingOptimizers:
    """Return TorchTitan's optimizers with active_forgetting.

    Args:
        step: returns the number of completed optimizer steps.
    """
    section = job_config.baseline  # type: ignore[attr-defined]
    return ForgettingOptimizers(inner, section.forget_lr, section.forget_every, job_config.debug.seed or 0, step)


def build_forgetting_schedule(schedulers: LRSchedulersContainer, job_config: JobConfig) -> LRSchedulersContainer:
    """Return TorchTitan's schedule, with the embedding's own schedule added."""
    section = job_config.baseline  # type: ignore[attr-defined]
    return with_own_schedule(schedulers, section.forget_every, section.forget_warmup)
