"""Tokens → steps."""

from torchtitan.config import JobConfig

from titan_disp.batch import data_parallel_degree, tokens_per_step
from titan_disp.errors import ConfigError


def resolve_steps(job_config: JobConfig, world_size: int) -> None:
    """Set training.steps from budget.tokens. Calling it again changes nothing.

    Raises:
        ConfigError: neither is set, both are and disagree, or the budget makes no sense.
    """
    training, budget = job_config.training, job_config.budget  # type: ignore[attr-defined]
    per_step = tokens_per_step(job_config, data_parallel_degree(job_config, world_size))
    for key in ("tokens", "stop_at_tokens"):
        if getattr(budget, key) < 0:
            raise ConfigError(f"budget.{key} is {getattr(budget, key)}, expected a number of tokens, or 0 for none")
    if budget.tokens:
        steps = -(-budget.tokens // per_step)
        if training.steps not in (-1, steps):
            raise ConfigError(
                f"training.steps is {training.steps}, but budget.tokens {budget.tokens:,} at {per_step:,} tokens per step "
                f"makes {steps}: set only one of them (--budget.tokens 0 leaves training.steps)"
            )
        training.steps = steps
    if training.steps == -1:
        raise ConfigError("neither budget.tokens nor training.steps is set: one of them ends the run")
    if budget.stop_at_tokens > training.steps * per_step:
        raise ConfigError(
            f"budget.stop_at_tokens is {budget.stop_at_tokens:,}, more than the {training.steps * per_step:,} tokens of the "
            f"whole run ({training.steps} steps)"
        )


def last_step(job_config: JobConfig, dp_degree: int) -> int:
    """The step after which this job ends: budget.stop_at_tokens, or all steps."""
    stop = job_config.budget.stop_at_tokens  # type: ignore[attr-defined]
    steps = job_config.training.steps
    return min(steps, -(-stop // tokens_per_step(job_config, dp_degree))) if stop else steps
