"""A preflight runs a reduced config, without the parts that one step on this machine cannot run or does not need."""

import copy
from typing import Any

from torchtitan.config import JobConfig

from titan_disp import cpu
from titan_disp.config_checks import check_mesh
from titan_disp.errors import ConfigError
from titan_disp.model_overrides import shown
from titan_disp.models.arguments import activation_indices
from titan_disp.registry import args_of, find_model

SEQ_LEN = 128  # tokens per sequence without an accelerator


class Reduced:
    """Hold a changed copy of a config.

    Attributes:
        job_config: the copy.
        changes: changes that make the step smaller than the run's or different from it, as "key old → new" or "key old
            → new: reason".
    """

    def __init__(self, job_config: JobConfig) -> None:
        self.job_config = copy.deepcopy(job_config)
        self.changes: list[str] = []

    def set(self, key: str, new: Any, reason: str = "", *, said: bool = True) -> None:
        """Set ``section.key``. The change is recorded if the value is new and ``said`` is true."""
        section, name = key.split(".")
        holder = getattr(self.job_config, section)
        old = getattr(holder, name)
        setattr(holder, name, new)
        if said and old != new:
            self.changes.append(f"{key} {shown(old)} → {shown(new)}" + (f": {reason}" if reason else ""))


def small_flavor(job_config: JobConfig, ranks: int) -> str:
    """Return the smallest flavor that fits the mesh and ties its embedding if the config's flavor does.

    Tied embeddings change FSDP's groups. Flavors are in ascending order, up to the config's own flavor.
    """
    tied = args_of(job_config).enable_weight_tying
    for name, args in find_model(job_config.model.name).flavors.items():
        if name == job_config.model.flavor:
            break
        if args.enable_weight_tying == tied and _fits(job_config, name, ranks):
            return name
    return job_config.model.flavor


def _fits(job_config: JobConfig, flavor: str, ranks: int) -> bool:
    other = copy.deepcopy(job_config)
    other.model.flavor, other.model.overrides = flavor, {}  # type: ignore[attr-defined]
    try:
        check_mesh(other, ranks)
    except ConfigError:
        return False
    return True


def reduce(job_config: JobConfig, ranks: int, flavor: str | None = None, seq_len: int | None = None) -> Reduced:
    """Reduce a config to one step with fake communication. On a CPU, the model is small, too.

    Args:
        job_config: a config that has passed ``config_checks.check_config``, which sets training.steps. It is not changed.
        ranks: number of ranks of the whole job.
        flavor, seq_len: replacements for the config's. None means the config's on an accelerator, or else small ones.
    """
    r = Reduced(job_config)
    one_step(r)
    if cpu.active():
        for_cpu(r)
        p = r.job_config.parallelism
        unit = p.tensor_parallel_degree * 2 * p.context_parallel_degree
        seq_len = min(job_config.training.seq_len, -(-SEQ_LEN // unit) * unit) if seq_len is None else seq_len
        flavor = small_flavor(job_config, ranks) if flavor is None else flavor
    if seq_len is not None:
        r.set("training.seq_len", seq_len)
    if flavor is not None:
        r.set("model.flavor", flavor)
        if flavor != job_config.model.flavor:
            r.set("model.overrides", {}, "they are for the config's own flavor")
        try:
            dispersion = r.job_config.dispersion  # type: ignore[attr-defined]
            activation_indices(dispersion.layers, dispersion.final_norm, args_of(r.job_config).n_layers)
        except ConfigError:  # the indices are for the config's own model
            r.set("dispersion.layers", "all", f"{flavor} has another number of blocks")
    return r


def one_step(r: Reduced) -> None:
    """Switch off files and data, and keep the learning rate of the run's first step."""
    job = r.job_config
    r.set("lr_scheduler.total_steps", job.lr_scheduler.total_steps or job.training.steps, said=False)
    for key, value in {
        "training.steps": 1,
        "dispersion.warmup_steps": 0,
        "budget.tokens": 0,
        "budget.stop_at_tokens": 0,
        "stream.slots": 0,
        "checkpoint.create_seed_checkpoint": False,
        "comm.mode": "fake_backend",
        "metrics.disable_color_printing": True,
    }.items():
        r.set(key, value, said=False)
    for key in (
        "checkpoint.enable",
        "validation.enable",
        "metrics.enable_tensorboard",
        "metrics.enable_wandb",
        "profiling.enable_profiling",
        "profiling.enable_memory_snapshot",
    ):
        r.set(key, False)
    r.set("parallelism.enable_async_tensor_parallel", False, "it needs real communication")


def for_cpu(r: Reduced) -> None:
    """Switch off what only accelerators support."""
    job = r.job_config
    p, t = job.parallelism, job.training
    cp = p.context_parallel_degree
    if cp > 1:
        # FSDP shards over data_parallel_shard × context ranks, so the shards keep their size.
        r.set("parallelism.context_parallel_degree", 1, "ring attention needs a GPU; its ranks get other sequences")
        if p.data_parallel_shard_degree != -1:
            r.set("parallelism.data_parallel_shard_degree", p.data_parallel_shard_degree * cp)
        if t.global_batch_size != -1:
            r.set("training.global_batch_size", t.global_batch_size * cp, "the same accumulation")
    if job.activation_checkpoint.mode == "memory_budget" and job.compile.enable:
        r.set("activation_checkpoint.mode", "full", "a memory budget needs the compiler")
    r.set("compile.enable", False)
    if job.optimizer.implementation == "fused":
        r.set("optimizer.implementation", "foreach")
    r.set("model.converters", [], "low precision needs a GPU")
    r.set("training.enable_cpu_offload", False)
