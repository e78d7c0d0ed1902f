"""What a preflight leaves out of a config: all that one step on this machine cannot do or does not need."""

import copy
from typing import Any

from torchtitan.config import JobConfig

from titan_disp import cpu
from titan_disp.checks import check_mesh
from titan_disp.errors import ConfigError
from titan_disp.models.arguments import activation_indices
from titan_disp.overrides import shown
from titan_disp.registry import args_of, find_model

SEQ_LEN = 128  # tokens, without an accelerator


class Reduced:
    """A copy of a config with changes.

    Attributes:
        job_config: the copy.
        changes: those that make the step smaller or other than the run's, as "key old → new", with a reason where it needs one.
    """

    def __init__(self, job_config: JobConfig) -> None:
        self.job_config = copy.deepcopy(job_config)
        self.changes: list[str] = []

    def set(self, key: str, new: Any, reason: str = "", *, said: bool = True) -> None:
        """Set ``section.key``; a change, unless it is there already or ``said`` is off."""
        section, name = key.split(".")
        holder = getattr(self.job_config, section)
        old = getattr(holder, name)
        setattr(holder, name, new)
        if said and old != new:
            self.changes.append(f"{key} {shown(old)} → {shown(new)}" + (f": {reason}" if reason else ""))


def small_flavor(job_config: JobConfig, ranks: int) -> str:
    """The smallest flavor that the mesh admits and whose embedding is tied or not as the config's own; at most the own one.

    FSDP groups embedding and output by the latter. Flavors are in ascending order.
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
    """One step with fake communication, and on a CPU a small one.

    Args:
        job_config: has passed ``checks.check_config``, which sets training.steps; left as it is.
        flavor, seq_len: instead of the config's; None: the config's on an accelerator, small ones without.
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
            r.set("model.overrides", {}, "they are of the config's own flavor")
        try:
            dispersion = r.job_config.dispersion  # type: ignore[attr-defined]
            activation_indices(dispersion.layers, dispersion.final_norm, args_of(r.job_config).n_layers)
        except ConfigError:  # indices of the config's own model
            r.set("dispersion.layers", "all", f"{flavor} has another number of blocks")
    return r


def one_step(r: Reduced) -> None:
    """Without files and data, on the learning rate that the run's first step has."""
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
    """Without what only accelerators do."""
    job = r.job_config
    p, t = job.parallelism, job.training
    cp = p.context_parallel_degree
    if cp > 1:
        # FSDP shards over data_parallel_shard × context ranks, so that the shards stay as they are.
        r.set("parallelism.context_parallel_degree", 1, "ring attention needs a GPU; its ranks take other sequences")
        if p.data_parallel_shard_degree != -1:
            r.set("parallelism.data_parallel_shard_degree", p.data_parallel_shard_degree * cp)
        if t.global_batch_size != -1:
            r.set("training.global_batch_size", t.global_batch_size * cp, "the same accumulation")
    if job.activation_checkpoint.mode == "memory_budget" and job.compile.enable:
        r.set("activation_checkpoint.mode", "full", "a memory budget is the compiler's")
    r.set("compile.enable", False)
    if job.optimizer.implementation == "fused":
        r.set("optimizer.implementation", "foreach")
    r.set("model.converters", [], "low precision needs a GPU")
    r.set("training.enable_cpu_offload", False)
