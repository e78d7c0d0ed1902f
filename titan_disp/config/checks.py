"""These checks refuse a config that cannot work, with one message that says what to change.

Every command and every start of training runs them, in its own process, before it allocates anything. They build no
model and need no GPU. ``check_inputs`` also opens the data, the tokenizer and the checkpoint that the config names.
Other checks are elsewhere: ``cluster.preflight`` runs one real step, ``cluster.job_check`` runs these checks for a
SLURM job, and ``cluster.node_health`` checks a node and not the config.
"""

import importlib.util
import math
import os
from dataclasses import fields

from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig

from titan_disp import cpu
from titan_disp.config.batch import data_parallel_degree, global_batch_size, resolve_steps, slot_count
from titan_disp.data.options import stream_options
from titan_disp.data.sources import check_content, data_sets, source_shares
from titan_disp.data.tokenizer import load_tokenizer_for
from titan_disp.data.validation import validation_sequences
from titan_disp.dispersion import CoeffSchedule, DispersionLoss
from titan_disp.errors import ConfigError, counted
from titan_disp.models.arguments import activation_indices, named, parse_overrides
from titan_disp.models.baselines import check_baseline
from titan_disp.models.registry import args_of, find_model
from titan_disp.run.checkpoint import check_initial_load
from titan_disp.run.integrity import checkpoints

# This module computes replicas and shards from a config and a number of ranks.


def resolve_replicas(job_config: JobConfig, world_size: int) -> None:
    """Replace data_parallel_replicate_degree = −1 by the number of replicas that the ranks allow.

    A second call changes nothing. The shard degree is then an upper bound: 8 is right for any number of nodes of 8
    GPUs, and for 1, 2 or 4 GPUs, which hold one replica. TorchTitan 0.2.2 does not accept −1 here, so this must run
    before it sees the config. The ranks must be a multiple of the degrees of context and tensor parallelism.

    Raises:
        ConfigError: the number of shards per replica is not set, or the ranks are not a multiple of it.
    """
    p = job_config.parallelism
    if p.data_parallel_replicate_degree != -1:
        return
    if p.data_parallel_shard_degree < 1:
        raise ConfigError(
            f"parallelism.data_parallel_replicate_degree is -1, but data_parallel_shard_degree is "
            f"{p.data_parallel_shard_degree}: only one of them can follow from the number of ranks. Set "
            "data_parallel_shard_degree to the number of GPUs per node"
        )
    inside = p.context_parallel_degree * p.tensor_parallel_degree
    left = world_size // inside
    shard = min(p.data_parallel_shard_degree, left)
    if left % shard:
        raise ConfigError(
            f"data_parallel_replicate_degree = -1 needs a multiple of data_parallel_shard_degree {shard} × "
            f"context_parallel_degree {p.context_parallel_degree} × tensor_parallel_degree {p.tensor_parallel_degree} "
            f"= {shard * inside} ranks, but there are {world_size}: use another number of ranks, or set "
            f"data_parallel_shard_degree to a divisor of {left}"
        )
    p.data_parallel_shard_degree, p.data_parallel_replicate_degree = shard, left // shard


# This module builds the loss and its weight λ from the [dispersion] section.


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


def check_config(job_config: JobConfig, world_size: int) -> None:
    """Check everything that follows from the config and the number of ranks.

    Also set training.steps from budget.tokens, replace data_parallel_replicate_degree and validation.seq_len of −1, and
    turn model.overrides into a table.

    Raises:
        ConfigError: the first problem found.
    """
    if not hasattr(job_config, "dispersion"):
        raise ConfigError(
            'the config has no [dispersion] section: add custom_config_module = "titan_disp.job_config" to [job]'
        )
    find_model(job_config.model.name)
    job_config.model.overrides = parse_overrides(job_config.model.overrides)  # type: ignore[attr-defined]
    check_mesh(job_config, world_size)
    check_batch(job_config, world_size)
    resolve_steps(job_config, world_size)
    check_model(job_config)
    check_validation(job_config)
    check_stream(job_config, world_size)
    check_operations(job_config)
    check_condensation(job_config)
    check_baseline(job_config)


def check_device(job_config: JobConfig) -> None:
    """Check that this machine, with its kind of device and its packages, can run the config.

    Raises:
        ConfigError: context parallelism or CPU offload on a CPU, or Weights & Biases without its package. (TorchTitan
            would only log an error for that and train on.)
    """
    if job_config.metrics.enable_wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "metrics.enable_wandb is true, but the package wandb is not installed: pip install 'titan-disp[wandb]', "
            "or set metrics.enable_wandb = false"
        )
    if job_config.training.enable_cpu_offload and cpu.active():
        raise ConfigError(
            "training.enable_cpu_offload is true, but there is no accelerator to offload from: set it to false"
        )
    cp = job_config.parallelism.context_parallel_degree
    if cp > 1 and cpu.active():
        raise ConfigError(
            f"context_parallel_degree is {cp}, expected 1 on a CPU: ring attention needs a GPU's attention kernels"
        )


def check_inputs(job_config: JobConfig) -> None:
    """Check what the config names on disk: the tokenizer, the data, and the initial weights.

    Raises:
        ConfigError: something is missing or unreadable, the model's vocabulary is too small for the tokenizer,
            documents are not what the config says, or weights belong to another model.
    """
    options = stream_options(job_config, tokenizer=tokenizer_of(job_config))
    for data in data_sets(job_config):
        check_content(data.check(), options, data.key)
    checkpoint = job_config.checkpoint
    if not checkpoint.enable or not checkpoints(os.path.join(job_config.job.dump_folder, checkpoint.folder)):
        adapter = find_model(job_config.model.name).adapter(args_of(job_config), None)
        check_initial_load(checkpoint, job_config.model.hf_assets_path, adapter)


def tokenizer_of(job_config: JobConfig) -> BaseTokenizer:
    """Return the tokenizer in ``model.hf_assets_path``.

    Raises:
        ConfigError: it is missing or unreadable, or has more tokens than the model's vocabulary.
    """
    model = job_config.model
    name = named(model.flavor, model.overrides)  # type: ignore[attr-defined]
    return load_tokenizer_for(name, args_of(job_config).vocab_size, model.hf_assets_path)


def check_model(job_config: JobConfig) -> None:
    """Check the flavor, the training length and the [dispersion] section."""
    args = args_of(job_config)
    dispersion = job_config.dispersion  # type: ignore[attr-defined]
    training = job_config.training
    if training.seq_len < 1 + dispersion.enabled:
        raise ConfigError(f"training.seq_len is {training.seq_len}, expected at least {1 + dispersion.enabled}")
    if args.max_positions is not None and training.seq_len > args.max_positions:
        flavor = named(job_config.model.flavor, job_config.model.overrides)  # type: ignore[attr-defined]
        raise ConfigError(
            f"training.seq_len is {training.seq_len}, but {job_config.model.name} {flavor!r} has learned "
            f"positions for {args.max_positions} tokens: set training.seq_len to at most that"
        )
    if training.steps < 1:
        raise ConfigError(f"training.steps is {training.steps}, expected at least 1")
    build_dispersion_loss(job_config)
    build_coeff_schedule(job_config)
    activation_indices(dispersion.layers, dispersion.final_norm, args.n_layers)


def _dp_shard(job_config: JobConfig, world_size: int) -> int:
    p = job_config.parallelism
    if p.data_parallel_shard_degree != -1:
        return p.data_parallel_shard_degree
    return max(
        1, world_size // (p.data_parallel_replicate_degree * p.context_parallel_degree * p.tensor_parallel_degree)
    )


def check_mesh(job_config: JobConfig, world_size: int) -> None:
    """Check the degrees of parallelism, and refuse what TorchTitan 0.2.2 or titan-disp cannot train correctly."""
    p, args = job_config.parallelism, args_of(job_config)
    tp, cp = p.tensor_parallel_degree, p.context_parallel_degree
    if p.pipeline_parallel_degree > 1:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree is {p.pipeline_parallel_degree}, expected 1: pipeline stages pass "
            "on one tensor, while dispersion needs every block's output at the loss. Use FSDP, HSDP, TP or CP"
        )
    if p.expert_parallel_degree > 1 or p.expert_tensor_parallel_degree > 1:
        raise ConfigError(
            "parallelism.expert_parallel_degree and expert_tensor_parallel_degree must be 1: the model is dense"
        )
    for name, degree in (("tensor", tp), ("context", cp)):
        if degree < 1:
            raise ConfigError(f"parallelism.{name}_parallel_degree is {degree}, expected at least 1")
    if world_size % (cp * tp):
        raise ConfigError(
            f"context_parallel_degree {cp} × tensor_parallel_degree {tp} = {cp * tp} does not divide the number "
            f"of ranks, {world_size}: set tensor_parallel_degree or context_parallel_degree to one that does, or use "
            "another number of ranks"
        )
    resolve_replicas(job_config, world_size)
    replicate = p.data_parallel_replicate_degree
    if replicate < 1:
        raise ConfigError(
            f"parallelism.data_parallel_replicate_degree is {replicate}, expected at least 1, or -1 to compute it from "
            "the number of ranks"
        )
    shard = _dp_shard(job_config, world_size)
    if shard < 1 or replicate * shard * cp * tp != world_size:
        raise ConfigError(
            f"data_parallel_replicate_degree {replicate} × data_parallel_shard_degree {shard} × "
            f"context_parallel_degree {cp} × tensor_parallel_degree {tp} = {replicate * shard * cp * tp}, but the "
            f"number of ranks is {world_size}: set data_parallel_replicate_degree = -1 or data_parallel_shard_degree = -1, "
            "which is then computed from the number of ranks (the first also makes fewer shards if there are fewer "
            "ranks)"
        )
    if replicate > 1 and shard * cp == 1:
        raise ConfigError(
            f"pure data parallelism (data_parallel_replicate_degree {replicate}, data_parallel_shard_degree 1) is "
            "refused: TorchTitan 0.2.2 averages its gradients a second time, which makes them too small. Set "
            "data_parallel_replicate_degree = 1 (FSDP) or data_parallel_shard_degree ≥ 2 (HSDP)"
        )
    if job_config.training.enable_cpu_offload and shard * cp == 1:
        raise ConfigError(
            "training.enable_cpu_offload is true, but only FSDP offloads, and it is off with "
            "data_parallel_shard_degree 1: set enable_cpu_offload = false, or data_parallel_shard_degree ≥ 2"
        )
    flavor = named(job_config.model.flavor, job_config.model.overrides)  # type: ignore[attr-defined]
    for name, size in (
        ("attention heads", args.n_heads),
        ("key/value heads", args.n_kv_heads),
        ("hidden units of the MLP (hidden_dim)", args.hidden_dim),
    ):
        if size % tp:
            raise ConfigError(
                f"tensor_parallel_degree {tp} does not divide the {size} {name} of {flavor!r}: set one that does"
            )
    tables = [rows for rows in (args.vocab_size, args.max_positions) if rows is not None and rows % tp]
    if tables and args.dim % (shard * cp):
        raise ConfigError(
            f"tensor_parallel_degree {tp} does not divide the {tables[0]} rows of an embedding of {flavor!r}, "
            f"so that FSDP shards its {args.dim} columns, which {shard * cp} shards (data_parallel_shard_degree × "
            "context_parallel_degree) do not divide: set a data_parallel_shard_degree that does, or "
            "tensor_parallel_degree = 1"
        )
    if cp > 1 and job_config.validation.enable:
        raise ConfigError(
            "validation with context_parallel_degree > 1 fails in TorchTitan 0.2.2 (it reads freqs_cis, which the "
            "models do not have): set validation.enable = false or context_parallel_degree = 1"
        )
    if p.enable_async_tensor_parallel and not (job_config.compile.enable and "model" in job_config.compile.components):
        raise ConfigError(
            'parallelism.enable_async_tensor_parallel needs compile.enable = true, and "model" in compile.components'
        )
    if job_config.fault_tolerance.enable:
        raise ConfigError("fault_tolerance.enable (torchft) is not supported: set it to false")
    if job_config.comm.mode == "local_tensor":
        raise ConfigError('comm.mode = "local_tensor" is not supported: use "default" or "fake_backend"')
    sequence = tp * (2 * cp if cp > 1 else 1)
    if job_config.training.seq_len % sequence:
        raise ConfigError(
            f"training.seq_len {job_config.training.seq_len} is not divisible by {sequence} "
            f"(tensor_parallel_degree {tp}{f' × 2 × context_parallel_degree {cp}' if cp > 1 else ''}): each rank holds "
            "an equal part of the sequence"
        )


def check_batch(job_config: JobConfig, world_size: int) -> None:
    """Check that the global batch divides into equal microbatches over the data-parallel ranks."""
    t = job_config.training
    if t.local_batch_size < 1:
        raise ConfigError(f"training.local_batch_size is {t.local_batch_size}, expected at least 1")
    dp = data_parallel_degree(job_config, world_size)
    if t.global_batch_size != -1 and (t.global_batch_size < 1 or t.global_batch_size % (t.local_batch_size * dp)):
        raise ConfigError(
            f"training.global_batch_size {t.global_batch_size} is not a positive multiple of local_batch_size "
            f"{t.local_batch_size} × {counted(dp, 'data-parallel rank')} = {t.local_batch_size * dp}"
        )


def check_stream(job_config: JobConfig, world_size: int) -> None:
    """Check [stream], and the number of validation sequences.

    A *slot* is one of the run's document streams. Each data-parallel rank reads some of the slots.
    """
    stream = job_config.stream  # type: ignore[attr-defined]
    dp = data_parallel_degree(job_config, world_size)
    batch, slots = global_batch_size(job_config, dp), slot_count(job_config, dp)
    if slots < 1 or batch % slots or slots % dp:
        raise ConfigError(
            f"stream.slots is {slots}; expected a divisor of the global batch {batch} that is a multiple of the "
            f"number of data-parallel ranks, {dp}"
        )
    source_shares(job_config, slots)
    if stream.prefetch < 0:
        raise ConfigError(f"stream.prefetch is {stream.prefetch}, expected 0 or more microbatches")
    if stream.shuffle_window < 0:
        raise ConfigError(
            f"stream.shuffle_window is {stream.shuffle_window}, expected 0 (no shuffling) or more documents"
        )
    if stream.tokenizer_threads < 0:
        raise ConfigError(f"stream.tokenizer_threads is {stream.tokenizer_threads}, expected 0 or more")
    if not 0 <= stream.max_skipped_fraction <= 1:
        raise ConfigError(f"stream.max_skipped_fraction is {stream.max_skipped_fraction}, expected a number in [0, 1]")
    if not stream.text_field:
        raise ConfigError('stream.text_field is "", expected the name of a field: most corpora call it "text"')
    if not (math.isfinite(stream.max_document_mb) and stream.max_document_mb > 0):
        raise ConfigError(f"stream.max_document_mb is {stream.max_document_mb}, expected a number > 0")
    if not (math.isfinite(stream.retry_seconds) and stream.retry_seconds >= 0):
        raise ConfigError(f"stream.retry_seconds is {stream.retry_seconds}, expected a number of seconds, 0 or more")
    if job_config.validation.enable:
        validation_sequences(job_config, dp)


def check_validation(job_config: JobConfig) -> None:
    """Check the length of validation sequences. Rotary embeddings are computed for training.seq_len positions."""
    v, seq_len = job_config.validation, job_config.training.seq_len
    if not v.enable:
        return
    if v.seq_len == -1:
        v.seq_len = seq_len
    if not 1 <= v.seq_len <= seq_len:
        raise ConfigError(
            f"validation.seq_len is {v.seq_len}, expected 1 to training.seq_len {seq_len}, because the model has no "
            "more positions. Leave it out to use the training length"
        )
    tp = job_config.parallelism.tensor_parallel_degree
    if v.seq_len % tp:
        raise ConfigError(
            f"validation.seq_len {v.seq_len} is not divisible by tensor_parallel_degree {tp}: each rank holds an equal "
            "part of the sequence"
        )


def check_operations(job_config: JobConfig) -> None:
    """Check [guard] and [checkpoint], and what they need from the optimizer."""
    option = job_config.activation_checkpoint.selective_ac_option
    if job_config.activation_checkpoint.mode == "selective" and option != "op" and not option.isdigit():
        raise ConfigError(
            f'activation_checkpoint.selective_ac_option is {option!r}, expected "op" or a number of layers'
        )
    guard, checkpoint = job_config.guard, job_config.checkpoint  # type: ignore[attr-defined]
    if guard.max_skipped_steps < 1:
        raise ConfigError(f"guard.max_skipped_steps is {guard.max_skipped_steps}, expected at least 1")
    for name in ("silence_seconds", "save_seconds"):
        if not getattr(guard, name) > 0:
            raise ConfigError(f"guard.{name} is {getattr(guard, name)}, expected a number > 0")
    if job_config.optimizer.early_step_in_backward:
        raise ConfigError(
            "optimizer.early_step_in_backward applies gradients before all ranks can agree that they are finite: "
            "set it to false"
        )
    if checkpoint.last_save_in_hf and not checkpoint.last_save_model_only:
        raise ConfigError(
            "checkpoint.last_save_in_hf needs checkpoint.last_save_model_only = true: safetensors hold no optimizer "
            "state"
        )
    if checkpoint.enable and checkpoint.interval < 1:
        raise ConfigError(f"checkpoint.interval is {checkpoint.interval}, expected at least 1")
    if checkpoint.enable and checkpoint.keep_latest_k == 1:
        raise ConfigError(
            "checkpoint.keep_latest_k is 1, expected 0 (keep all) or at least 2: if the newest checkpoint is damaged, "
            "the one before it is needed"
        )


def check_condensation(job_config: JobConfig) -> None:
    """Check [condensation]."""
    section = job_config.condensation  # type: ignore[attr-defined]
    for name, least in (("interval", 0), ("sequences", 1), ("max_tokens", 2)):
        if getattr(section, name) < least:
            raise ConfigError(
                f"condensation.{name} is {getattr(section, name)}, expected at least {least}"
                + (" (0 = never)" if name == "interval" else "")
            )
