"""``titan-disp plan --suggest`` tries other batches, meshes and checkpointing, and
lists those with the least step time: the best of each mode of checkpointing, and the
best with the largest local batch.

Every try passes the checks of a start, and trains the same: the global batch stays. The
step's time is the plan's, with what activation checkpointing computes again. It knows
nothing of kernels that are slow for small sizes.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
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

# step times that differ by less than this fraction of the least count as equal
EQUAL = 0.01
# Fraction of the GPU's memory that a plan may fill: the rest is for the context, NCCL
# and fragmentation
FILLED = 0.9
CHUNK = 2048  # of training.head_chunk_tokens
# Mode → the part of the forward pass that backward computes again. "op" keeps every
# second product and the attention.
AGAIN = {"none": 0.0, "selective": 0.5, "full": 1.0}
BATCH, GLOBAL, TENSOR, SHARD, REPLICATE, MODE, OPTION, HEAD = KEYS = (
    "training.local_batch_size",
    "training.global_batch_size",
    "parallelism.tensor_parallel_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.data_parallel_replicate_degree",
    "activation_checkpoint.mode",
    "activation_checkpoint.selective_ac_option",
    "training.head_chunk_tokens",
)


@dataclass(frozen=True)
class Suggestion:
    options: list[str]  # what differs from the config, as on the command line
    step_seconds: float  # with what is computed again
    memory: int  # bytes per GPU

    def line(self) -> str:
        changed = " ".join(self.options) or "the config as it is"
        return f"{estimated_duration(self.step_seconds)} per step, {self.memory / 1e9:.1f} GB: {changed}"


def suggest(job_config: JobConfig, machine: Machine) -> list[Suggestion]:
    """Return the config as it is, and then the best others that fit the memory, by step
    time.

    Of those whose times are equal, the one with the fewest changes comes first, then
    the one with the largest batch. Raises ConfigError if the config is refused as it
    is.
    """
    machine = find_machine(machine)
    module = meta_model(job_config)
    memory = FILLED * find_gpu(machine).memory
    own = {key: value_of(job_config, key) for key in KEYS}
    found: dict[tuple[str, ...], tuple[Suggestion, dict[str, Any]]] = {}
    for values in [own, *_tries(job_config, machine, own)]:
        trial = copy.deepcopy(job_config)
        for key, value in values.items():
            set_value(trial, key, value)
        try:
            check_config(trial, machine.nodes * machine.gpus_per_node)
        except ConfigError:  # _tries has raised it if it is about the config as it is
            continue
        prediction = predict(trial, module, machine)
        # Forward is a third of the computing
        time = prediction.time
        memory_needed = prediction.memory.total
        seconds = time.step_seconds + time.computing_seconds * _again(trial) / 3
        options = [
            f"--{key}={value}" for key, value in values.items() if value != own[key]
        ]
        if values is own or memory_needed <= memory:
            found.setdefault(
                tuple(options), (Suggestion(options, seconds, memory_needed), values)
            )
    (now, _), *others = found.values()
    least = min((one.step_seconds for one, _ in others), default=1.0)
    others.sort(
        key=lambda it: (
            int(it[0].step_seconds / least / EQUAL),
            len(it[0].options),
            -it[1][BATCH],
            it[0].memory,
        )
    )
    same_tensor = [values for _, values in others if values[TENSOR] == own[TENSOR]]
    largest = max((values[BATCH] for values in same_tensor), default=0)
    chosen: dict[Any, Suggestion] = {}
    for one, values in others:
        chosen.setdefault(values[MODE], one)
        if values in same_tensor and values[BATCH] == largest:
            chosen.setdefault(BATCH, one)
    return [
        now,
        *sorted(
            {id(one): one for one in chosen.values()}.values(),
            key=lambda one: one.step_seconds,
        ),
    ]


def _again(job_config: JobConfig) -> float:
    checkpointing = job_config.activation_checkpoint
    every = checkpointing.selective_ac_option
    if checkpointing.mode == "selective" and every != "op":
        return 1 / (int(every) or 1)
    return AGAIN.get(checkpointing.mode, 1 - checkpointing.memory_budget)


def _tries(
    job_config: JobConfig, machine: Machine, own: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    trial = copy.deepcopy(job_config)
    world = machine.nodes * machine.gpus_per_node
    p = job_config.parallelism
    check_config(trial, world)
    sequences = global_batch_size(trial, data_parallel_degree(trial, world))
    powers = [2**i for i in range(20)]
    tensor = [n for n in powers if machine.gpus_per_node % n == 0]
    # Not over all nodes: the plan ignores latencies
    shards = {p.data_parallel_shard_degree, machine.gpus_per_node}
    batches = [n for n in range(1, sequences + 1) if sequences % n == 0]
    modes = [("none", own[OPTION]), ("selective", "op"), ("full", own[OPTION])]
    for n, tp, shard, (mode, option), head in product(
        batches, tensor, shards, modes, {own[HEAD], 0, CHUNK}
    ):
        replicate = -1 if shard > 0 else own[REPLICATE]
        together = n * world // (tp * p.context_parallel_degree)
        if together <= sequences:
            # −1 is that of a microbatch
            whole = own[GLOBAL] if together == sequences else sequences
            yield dict(
                zip(
                    KEYS,
                    (n, whole, tp, shard, replicate, mode, option, head),
                    strict=True,
                )
            )
