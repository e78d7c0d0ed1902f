"""``titan-disp plan --suggest`` tries other local batches, meshes and modes of activation
checkpointing, and lists the configs with the shortest steps: the best one of each mode,
and the best one with the largest local batch.

Each config passes the checks of a start, and keeps the global batch. Its step time is
the plan's step time plus the time for what activation checkpointing computes again. The
estimate does not know that some kernels are slow for small sizes.
"""

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any

from titan_disp.checks import check_config
from titan_disp.cluster.cost import find_gpu
from titan_disp.cluster.plan import find_machine, meta_model, predict
from titan_disp.config.batch import data_parallel_degree, global_batch_size
from titan_disp.config.command_options import Machine
from titan_disp.config.keys import set_value, value_of
from titan_disp.config.types import JobConfig
from titan_disp.errors import ConfigError
from titan_disp.text import estimated_duration

# step times count as equal if they differ by less than this fraction of the shortest
EQUAL = 0.01
# Fraction of the GPU's memory that a config may fill. The rest is for the CUDA context,
# NCCL and fragmentation.
FILLED = 0.9
CHUNK = 2048  # of training.head_chunk_tokens
# By mode: the part of the forward pass that backward computes again. "op" keeps every
# second product and the attention.
AGAIN = {"none": 0.0, "selective": 0.5, "full": 1.0}
BATCH = "training.local_batch_size"
GLOBAL = "training.global_batch_size"
TENSOR = "parallelism.tensor_parallel_degree"
SHARD = "parallelism.data_parallel_shard_degree"
REPLICATE = "parallelism.data_parallel_replicate_degree"
MODE = "activation_checkpoint.mode"
OPTION = "activation_checkpoint.selective_ac_option"
HEAD = "training.head_chunk_tokens"
KEYS = (BATCH, GLOBAL, TENSOR, SHARD, REPLICATE, MODE, OPTION, HEAD)
Values = dict[str, Any]  # of ``KEYS``


@dataclass(frozen=True)
class Suggestion:
    options: list[str]  # what differs from the config, as on the command line
    step_seconds: float  # including what activation checkpointing computes again
    memory: int  # bytes per GPU

    def line(self) -> str:
        changed = " ".join(self.options) or "the config as it is"
        return f"{estimated_duration(self.step_seconds)} per step, {self.memory / 1e9:.1f} GB: {changed}"


def suggest(job_config: JobConfig, machine: Machine) -> list[Suggestion]:
    """Return the config as it is, then the best other configs that fit the memory,
    sorted by step time.

    If times are equal, the config with the fewest changes comes first, then the one with
    the largest batch. Raises ConfigError if the config is refused as it is.
    """
    machine = find_machine(machine)
    module = meta_model(job_config)
    memory = FILLED * find_gpu(machine).memory
    as_is = {key: value_of(job_config, key) for key in KEYS}
    fitting: dict[tuple[str, ...], tuple[Suggestion, Values]] = {}
    for values in [as_is, *_tries(job_config, machine, as_is)]:
        trial = copy.deepcopy(job_config)
        for key, value in values.items():
            set_value(trial, key, value)
        # ``_tries`` has checked the config as it is, so an error is about this trial.
        with suppress(ConfigError):
            check_config(trial, machine.nodes * machine.gpus_per_node)
            prediction = predict(trial, module, machine)
            # Forward is a third of the computing
            again = prediction.time.computing_seconds * _again(trial) / 3
            suggestion = Suggestion(
                options=[f"--{k}={v}" for k, v in values.items() if v != as_is[k]],
                step_seconds=prediction.time.step_seconds + again,
                memory=prediction.memory.total,
            )
            if values is as_is or suggestion.memory <= memory:
                fitting.setdefault(tuple(suggestion.options), (suggestion, values))
    (current, _), *trials = fitting.values()
    return [current, *_best(trials, as_is[TENSOR])]


def _best(trials: list[tuple[Suggestion, Values]], tensor: int) -> list[Suggestion]:
    """Return the best trial of each mode of checkpointing, and the best one with this
    degree of tensor parallelism and the largest local batch, by step time.
    """
    least = min((trial.step_seconds for trial, _ in trials), default=1.0)

    def order(trial: tuple[Suggestion, Values]) -> tuple[float, ...]:
        suggestion, values = trial
        times = suggestion.step_seconds / least // EQUAL
        changes = len(suggestion.options)
        return times, changes, -values[BATCH], suggestion.memory

    batches = [values[BATCH] for _, values in trials if values[TENSOR] == tensor]
    largest = (tensor, max(batches, default=0))
    best: dict[str, Suggestion] = {}
    for suggestion, values in sorted(trials, key=order):
        best.setdefault(values[MODE], suggestion)
        if (values[TENSOR], values[BATCH]) == largest:
            best.setdefault(BATCH, suggestion)
    unique = {id(suggestion): suggestion for suggestion in best.values()}
    return sorted(unique.values(), key=attrgetter("step_seconds"))


def _again(job_config: JobConfig) -> float:
    """Return the part of the forward pass that backward computes again."""
    checkpointing = job_config.activation_checkpoint
    option = checkpointing.selective_ac_option
    if checkpointing.mode == "selective" and option != "op":
        return 1 / (int(option) or 1)
    return AGAIN.get(checkpointing.mode, 1 - checkpointing.memory_budget)


def _tries(job_config: JobConfig, machine: Machine, as_is: Values) -> Iterator[Values]:
    """Yield other values of ``KEYS`` with the same global batch."""
    trial = copy.deepcopy(job_config)
    world = machine.nodes * machine.gpus_per_node
    check_config(trial, world)
    context = job_config.parallelism.context_parallel_degree
    sequences = global_batch_size(trial, data_parallel_degree(trial, world))
    option = as_is[OPTION]
    choices = {
        BATCH: [n for n in range(1, sequences + 1) if sequences % n == 0],
        TENSOR: [2**i for i in range(20) if machine.gpus_per_node % 2**i == 0],
        # Sharding over all nodes is not tried: it has long latencies, which the plan
        # ignores.
        SHARD: {as_is[SHARD], machine.gpus_per_node},
        MODE: [("none", option), ("selective", "op"), ("full", option)],
        HEAD: {as_is[HEAD], 0, CHUNK},
    }
    for choice in product(*choices.values()):
        values = {**as_is, **dict(zip(choices, choice, strict=True))}
        values[MODE], values[OPTION] = values[MODE]
        if values[SHARD] > 0:
            values[REPLICATE] = -1
        microbatch = values[BATCH] * world // (values[TENSOR] * context)
        # The default, −1, means a global batch of one microbatch per rank.
        if microbatch != sequences:
            values[GLOBAL] = sequences
        if microbatch <= sequences:
            yield values
