"""This module computes batch sizes, slots, tokens per step and steps from a config and
a number of ranks.

A *slot* is one of the run's document streams. Each data-parallel rank reads some of the
slots.
"""

from titan_disp.config.types import JobConfig
from titan_disp.errors import ConfigError, counted


def data_parallel_degree(job_config: JobConfig, world_size: int) -> int:
    """Return the number of ranks that read different data: the ranks divided by the
    degrees of TP and CP.
    """
    p = job_config.parallelism
    return world_size // (p.context_parallel_degree * p.tensor_parallel_degree)


def global_batch_size(job_config: JobConfig, dp_degree: int) -> int:
    """Return the sequences per step.

    TorchTitan's −1 stands for one microbatch on every data-parallel rank.
    """
    t = job_config.training
    if t.global_batch_size > 0:
        return t.global_batch_size
    return t.local_batch_size * dp_degree


def slot_count(job_config: JobConfig, dp_degree: int) -> int:
    """Return the number of slots: stream.slots, or the global batch size."""
    return job_config.stream.slots or global_batch_size(job_config, dp_degree)


def tokens_per_step(job_config: JobConfig, dp_degree: int) -> int:
    """Return the number of tokens that one optimizer step trains on."""
    return global_batch_size(job_config, dp_degree) * job_config.training.seq_len


def resolve_steps(job_config: JobConfig, world_size: int) -> None:
    """Set training.steps from budget.tokens, or raise ConfigError.

    A second call changes nothing.
    """
    training = job_config.training
    budget = job_config.budget
    per_step = tokens_per_step(job_config, data_parallel_degree(job_config, world_size))
    if budget.tokens:
        steps = -(-budget.tokens // per_step)
        if training.steps not in (-1, steps):
            raise ConfigError(
                f"training.steps is {training.steps}, but budget.tokens "
                f"{budget.tokens:,} at {per_step:,} tokens per step makes "
                f"{counted(steps, 'step')}: set only one of them (--budget.tokens 0 "
                "leaves training.steps)"
            )
        training.steps = steps
    if training.steps == -1:
        raise ConfigError(
            "neither budget.tokens nor training.steps is set; set one of them, to say "
            "when the run ends"
        )
    if budget.stop_at_tokens > training.steps * per_step >= 0:
        raise ConfigError(
            f"budget.stop_at_tokens is {budget.stop_at_tokens:,}, more than the "
            f"{training.steps * per_step:,} tokens of the whole run "
            f"({counted(training.steps, 'step')}): lower it, or raise budget.tokens "
            "or training.steps"
        )


def last_step(job_config: JobConfig, dp_degree: int) -> int:
    """Return the step after which this job ends: the step that reaches
    budget.stop_at_tokens, or the last step of the run.
    """
    stop = job_config.budget.stop_at_tokens
    steps = job_config.training.steps
    if not stop:
        return steps
    return min(steps, -(-stop // tokens_per_step(job_config, dp_degree)))
