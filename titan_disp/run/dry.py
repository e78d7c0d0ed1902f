"""A dry run simulates many ranks in one process: it computes the steps of rank 0, and
writes nothing (docs/training.md).

A dry run uses TorchTitan's ``comm.mode = "fake_backend"``, with which collectives
return at once with this rank's values. Losses therefore mean nothing, and must not
reach a run folder.
"""

import os

from titan_disp.config.keys import set_value
from titan_disp.config.types import JobConfig
from titan_disp.errors import ConfigError

# The keys that make a run write files. metrics.jsonl has no key.
WRITERS = (
    "checkpoint.enable",
    "metrics.enable_tensorboard",
    "metrics.enable_wandb",
    "profiling.enable_profiling",
    "profiling.enable_memory_snapshot",
)


def is_dry(job_config: JobConfig) -> bool:
    return job_config.comm.mode == "fake_backend"


def simulated_ranks() -> int:
    """Return the number of ranks that a dry run simulates.

    Raises ConfigError if NGPU in the environment is not a number of ranks.
    """
    number = os.environ.get("NGPU", "")
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(
            f"NGPU is {number!r}, expected the number of ranks that comm.mode = "
            '"fake_backend" simulates: NGPU=8 titan-disp train …'
        )
    return int(number)


def write_nothing(job_config: JobConfig) -> None:
    """Switch off everything in a checked config that reads or writes the run folder."""
    for key in WRITERS:
        set_value(job_config, key, False)
    job_config.job.save_config_file = None
    job_config.activation_checkpoint.visualize_memory_budget_pareto = False
    checkpoint = job_config.checkpoint
    checkpoint.create_seed_checkpoint = False
    checkpoint.initial_load_in_hf = False
    checkpoint.initial_load_path = None
