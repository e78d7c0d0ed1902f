"""These checks refuse a config that cannot work, with one message that says what to
change.

Every start of training runs these checks, and so do plan, preflight, submit, sweeps and
the node check. They build no model and need no GPU. ``check_inputs`` also opens the
data, the tokenizer and the checkpoint that the config names. Each check raises
ConfigError for the first problem that it finds. Other checks are elsewhere:
``cluster.preflight`` runs one real step, and ``cluster.job_check`` runs these checks
for a SLURM job.
"""

import copy
import importlib
import importlib.util
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch._dynamo
import torch.distributed as dist
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.protocols.model_converter import _registry_model_converter_cls

from titan_disp import cpu
from titan_disp.config.batch import (
    data_parallel_degree,
    global_batch_size,
    resolve_steps,
    slot_count,
)
from titan_disp.config.keys import Facts, has, value_of, written
from titan_disp.config.types import JobConfig
from titan_disp.data.findings import after_left_out, check_content
from titan_disp.data.index import IN_MEMORY, with_index
from titan_disp.data.listing import DataFile
from titan_disp.data.options import stream_options
from titan_disp.data.sources import (
    DataSet,
    check_overlaps,
    data_sets,
    source_shares,
)
from titan_disp.data.tokenizer import (
    check_fits,
    encoder,
    find_tokenizer,
    load_tokenizer,
)
from titan_disp.data.tokenizer_check import tokenizer_warnings
from titan_disp.data.validation import validation_sequences
from titan_disp.dispersion.loss import DispersionLoss
from titan_disp.errors import (
    ConfigError,
    Problems,
    RanksError,
    counted,
    did_you_mean,
    prefixed,
    reported,
)
from titan_disp.job_config import all_facts
from titan_disp.models.arguments import activation_indices, text_of_flavor
from titan_disp.models.baselines import check_baseline
from titan_disp.models.registry import args_of, find_model
from titan_disp.run.checkpoint import check_initial_load, missing_step
from titan_disp.run.integrity import checkpoints
from titan_disp.schedules import check_schedules, schedule_warnings
from titan_disp.tables import LOSSES, OPTIONS, check_table, parse_overrides

# How many larger numbers of ranks or nodes ``nearest_hint`` tries, if the batch sets no
# limit
MOST_MORE = 1024
# The types of the keys of [[dispersion.losses]]
LOSS_TYPES = {f.name: f.type for f in fields(DispersionLoss) if f.name != "seed"} | {
    "weight": float,
    "variant": str,
    "options": Mapping,
}


def check_config(
    job_config: JobConfig, world_size: int, problems: Problems | None = None
) -> None:
    """Check everything that follows from the config and the number of ranks.

    ``problems`` may collect all errors. By default, the first error is raised.

    The config is also completed: budget.tokens determines training.steps; the −1 of
    data_parallel_replicate_degree and of validation.seq_len is replaced; and
    model.overrides and dispersion.options become tables.
    """
    if not hasattr(job_config, "dispersion"):
        raise ConfigError(
            "the config has no [dispersion]: add custom_config_module = "
            '"titan_disp.job_config" to [job]'
        )
    find_model(job_config.model.name)
    resolve_tables(job_config)
    problems = problems or Problems()
    passes = problems.pass_
    keys_pass = check_keys(job_config, problems)
    passes(check_names_of_code, job_config)
    if passes(check_mesh, job_config, world_size) and passes(
        check_batch, job_config, world_size
    ):
        passes(check_stream, job_config, world_size)
    if passes(resolve_steps, job_config, world_size) and keys_pass:
        passes(check_schedules, job_config)
    for check in (
        check_model,
        check_validation,
        check_profiling,
        check_loading,
        check_retention,
        check_baseline,
    ):
        passes(check, job_config)


def check_ranks(job_config: JobConfig, world_size: int) -> None:
    """Check a config as ``check_config`` does. If the mesh or the batch does not fit the
    number of ranks, the message names the nearest numbers that would work.
    """
    # The checks replace degrees of −1.
    asked = copy.deepcopy(job_config)
    try:
        check_config(job_config, world_size)
    except RanksError as error:
        hint = nearest_hint(asked, world_size, "rank")
        raise ConfigError(f"{error}{hint}") from error


def fits_ranks(job_config: JobConfig, world_size: int) -> bool:
    """Return whether the mesh and the batch of a config fit a number of ranks.

    The config must have passed ``resolve_tables``, and is not changed.
    """
    trial = copy.copy(job_config)
    trial.parallelism = copy.copy(job_config.parallelism)
    with suppress(ConfigError):
        check_mesh(trial, world_size)
        check_batch(trial, world_size)
        check_stream(trial, world_size)
        return True
    return False


def nearest_hint(
    job_config: JobConfig, count: int, noun: str, ranks_each: int = 1
) -> str:
    """Return the end of a message: the next smaller and the next larger number of ranks
    or nodes that would work. The end is empty if there are no such numbers.

    Args:
        job_config: the config before ``check_mesh``, which replaces degrees of −1.
        count: the number of ranks or nodes that does not fit the mesh and the batch.
        noun: "rank" or "node".
        ranks_each: the ranks per node, or 1 if ranks are counted.
    """
    if not check_keys(job_config, Problems(collect=True)):
        return ""
    p = job_config.parallelism
    largest = count + MOST_MORE
    batch = job_config.training.global_batch_size
    if batch > 0:
        # Every data-parallel rank has at least one microbatch.
        microbatches = batch // job_config.training.local_batch_size
        ranks_of_sequence = p.tensor_parallel_degree * p.context_parallel_degree
        largest = min(largest, microbatches * ranks_of_sequence // ranks_each)
    nearest = [
        next((n for n in counts if fits_ranks(job_config, n * ranks_each)), 0)
        for counts in (
            range(min(count - 1, largest), 0, -1),
            range(count + 1, largest + 1),
        )
    ]
    numbers = " or ".join(str(number) for number in nearest if number)
    if not numbers:
        return ""
    plural = "" if numbers == "1" else "s"
    return f"; {numbers} {noun}{plural} would work with this mesh and batch"


def resolve_tables(job_config: JobConfig) -> None:
    """Turn model.overrides and dispersion.options into tables, if they are text."""
    model = job_config.model
    dispersion = job_config.dispersion
    model.overrides = parse_overrides(model.overrides)
    dispersion.options = parse_overrides(dispersion.options, OPTIONS)


def check_keys(job_config: JobConfig, problems: Problems) -> bool:
    """Check every key of TorchTitan and titan-disp, and return whether all pass."""
    passed = [
        problems.pass_(check_key, key, facts, job_config)
        for key, facts in all_facts().items()
    ]
    return all(passed)


def check_key(key: str, facts: Facts, job_config: JobConfig) -> None:
    """Check the value of a key, and the values that this key needs in other keys. A key
    that is false needs nothing.
    """
    if not _holds(facts, job_config):
        return
    value = value_of(job_config, key)
    facts.check(key, value)
    for other, needed in facts.needs.items():
        actual = value_of(job_config, other)
        if value is not False and not has(actual, needed):
            raise ConfigError(
                f"{key} is {written(value)}, but {other} is {written(actual)}"
                f"{facts.ending}. Set {other} = {written(needed)}"
            )


def _holds(facts: Facts, job_config: JobConfig) -> bool:
    """Return whether the limits of a key apply, given the values of other keys."""

    def all_have(values: Mapping[str, Any]) -> bool:
        return all(has(value_of(job_config, key), values[key]) for key in values)

    return all_have(facts.when) and not (facts.unless and all_have(facts.unless))


def config_warnings(job_config: JobConfig) -> Iterator[str]:
    """Yield warnings about keys that have no effect, and about the schedules. The
    config must have passed ``check_config``.
    """
    defaults = type(job_config)()
    for key, facts in all_facts().items():
        value = value_of(job_config, key)
        changed = value != value_of(defaults, key)
        if changed and facts.unused and _holds(facts, job_config):
            yield f"{key} is {written(value)}, which has no effect: {facts.unused}"
    yield from schedule_warnings(job_config)


def check_names_of_code(job_config: JobConfig) -> None:
    """Check experimental.custom_import, model.converters and compile.backend, which name
    code.

    The module of custom_import is imported first, because it may register converters
    and backends.
    """
    module = job_config.experimental.custom_import
    if module:
        with reported(
            f"experimental.custom_import is {module!r}, which cannot be imported",
            Exception,
        ):
            importlib.import_module(module)
    converters = _registry_model_converter_cls
    for name in job_config.model.converters:
        if name not in converters:
            raise ConfigError(
                f"model.converters has {name!r}, expected {' or '.join(converters)}, "
                "or one that the module in experimental.custom_import registers"
            )
    backend = job_config.compile.backend
    # Backends for debugging are allowed, but not suggested.
    allowed = torch._dynamo.list_backends(exclude_tags=())
    if job_config.compile.enable and backend not in allowed:
        usual = torch._dynamo.list_backends()
        raise ConfigError(
            f"compile.backend is {backend!r}, expected one of {', '.join(usual)}"
            f"{did_you_mean(backend, usual)}"
        )


def resolve_replicas(job_config: JobConfig, world_size: int) -> None:
    """Replace data_parallel_replicate_degree = −1 by the number of replicas that the
    ranks allow.

    A second call changes nothing. With −1, the shard degree is an upper bound. For
    example, a shard degree of 8 is right for any number of nodes of 8 GPUs, and for 1,
    2 or 4 GPUs, which then hold one replica. TorchTitan 0.2.2 does not accept −1, so
    call this before TorchTitan sees the config. The number of ranks must be a multiple
    of the degrees of context and tensor parallelism.
    """
    p = job_config.parallelism
    if p.data_parallel_replicate_degree != -1:
        return
    if p.data_parallel_shard_degree < 1:
        raise ConfigError(
            "parallelism.data_parallel_replicate_degree is -1, but "
            f"data_parallel_shard_degree is {p.data_parallel_shard_degree}: only one "
            "of them can follow from the number of ranks. Set "
            "data_parallel_shard_degree to the number of GPUs per node"
        )
    inside = p.context_parallel_degree * p.tensor_parallel_degree
    ranks = max(1, world_size // inside)
    shard = min(p.data_parallel_shard_degree, ranks)
    if ranks % shard:
        raise RanksError(
            "data_parallel_replicate_degree = -1 needs a multiple of "
            f"data_parallel_shard_degree {shard} × context_parallel_degree "
            f"{p.context_parallel_degree} × tensor_parallel_degree "
            f"{p.tensor_parallel_degree} = {shard * inside} ranks, but there are "
            f"{world_size}: use another number of ranks, or set "
            f"data_parallel_shard_degree to a divisor of {ranks}"
        )
    p.data_parallel_shard_degree = shard
    p.data_parallel_replicate_degree = ranks // shard


def check_mesh(job_config: JobConfig, world_size: int) -> None:
    """Check the degrees of parallelism, and refuse what TorchTitan 0.2.2 or titan-disp
    cannot train correctly.
    """
    resolve_replicas(job_config, world_size)
    shards = _check_shards(job_config, world_size)
    _check_sharded_sizes(job_config, shards)


def _check_shards(job_config: JobConfig, world_size: int) -> int:
    """Return the number of shards into which FSDP divides the weights, over the ranks of
    data and context parallelism. Also check the degrees of data parallelism.
    """
    p = job_config.parallelism
    tp = p.tensor_parallel_degree
    cp = p.context_parallel_degree
    replicate = p.data_parallel_replicate_degree
    shard = p.data_parallel_shard_degree
    if shard == -1:
        shard = max(1, world_size // (replicate * cp * tp))
    if replicate * shard * cp * tp != world_size:
        raise RanksError(
            f"data_parallel_replicate_degree {replicate} × data_parallel_shard_degree "
            f"{shard} × context_parallel_degree {cp} × tensor_parallel_degree {tp} = "
            f"{replicate * shard * cp * tp}, but the number of ranks is {world_size}: "
            "set data_parallel_replicate_degree = -1 (then fewer ranks also make fewer "
            "shards) or data_parallel_shard_degree = -1, so that this degree follows "
            "from the number of ranks, or use another number of ranks"
        )
    if replicate > 1 and shard * cp == 1:
        raise ConfigError(
            f"pure data parallelism (data_parallel_replicate_degree {replicate}, "
            "data_parallel_shard_degree 1) is refused: TorchTitan 0.2.2 averages the "
            "gradients a second time, which makes them too small. Set "
            "data_parallel_replicate_degree = 1 (FSDP) or data_parallel_shard_degree "
            "≥ 2 (HSDP)"
        )
    if job_config.training.enable_cpu_offload and shard * cp == 1:
        raise ConfigError(
            "training.enable_cpu_offload is true, but only FSDP offloads, and FSDP is "
            "off with data_parallel_shard_degree 1: set enable_cpu_offload = false, "
            "or data_parallel_shard_degree ≥ 2"
        )
    return shard * cp


def _check_sharded_sizes(job_config: JobConfig, shards: int) -> None:
    """Check that the model's sizes and the sequence divide into equal parts.

    ``shards`` is the number of shards into which FSDP divides the weights.
    """
    tp = job_config.parallelism.tensor_parallel_degree
    cp = job_config.parallelism.context_parallel_degree
    args = args_of(job_config)
    flavor = _flavor(job_config)
    for name, size in (
        ("attention heads", args.n_heads),
        ("key/value heads", args.n_kv_heads),
        ("hidden units of the MLP (hidden_dim)", args.hidden_dim),
    ):
        if size % tp:
            raise ConfigError(
                f"tensor_parallel_degree {tp} does not divide the {size} {name} of "
                f"{flavor!r}: lower it"
            )
    for rows in (args.vocab_size, args.max_positions):
        if rows is not None and rows % tp and args.dim % shards:
            raise ConfigError(
                f"tensor_parallel_degree {tp} does not divide the {rows} rows of an "
                f"embedding of {flavor!r}, and the {args.dim} columns, which FSDP "
                f"shards in this case, are not a multiple of {shards} "
                "(data_parallel_shard_degree × context_parallel_degree): set a "
                "data_parallel_shard_degree with which this product is a divisor of "
                f"{args.dim}, or tensor_parallel_degree = 1"
            )
    parts = tp * (2 * cp if cp > 1 else 1)
    if job_config.training.seq_len % parts:
        raise ConfigError(
            f"training.seq_len {job_config.training.seq_len} is not divisible by "
            f"{parts} (tensor_parallel_degree "
            f"{tp}{f' × 2 × context_parallel_degree {cp}' if cp > 1 else ''}): each "
            "rank holds an equal part of the sequence"
        )


def _flavor(job_config: JobConfig) -> str:
    """Return the name of the model's flavor with its overrides, for messages."""
    return text_of_flavor(job_config.model.flavor, job_config.model.overrides)


def check_batch(job_config: JobConfig, world_size: int) -> None:
    """Check that the global batch divides into equal microbatches over the
    data-parallel ranks.
    """
    t = job_config.training
    dp = data_parallel_degree(job_config, world_size)
    unit = t.local_batch_size * dp
    if t.global_batch_size != -1 and t.global_batch_size % unit:
        multiple = t.global_batch_size // unit * unit
        nearest = [str(size) for size in (multiple, multiple + unit) if size]
        raise RanksError(
            f"training.global_batch_size {t.global_batch_size} is not a positive "
            f"multiple of local_batch_size {t.local_batch_size} × "
            f"{counted(dp, 'data-parallel rank')} = {unit}; the nearest: "
            f"{', '.join(nearest)}"
        )


def check_model(job_config: JobConfig) -> None:
    """Check the flavor, the sequence length and the [dispersion] section."""
    args = args_of(job_config)
    dispersion = job_config.dispersion
    training = job_config.training
    if args.max_positions is not None and training.seq_len > args.max_positions:
        raise ConfigError(
            f"training.seq_len is {training.seq_len}, but {job_config.model.name} "
            f"{_flavor(job_config)!r} has learned positions for {args.max_positions} "
            "tokens: set training.seq_len to at most that"
        )
    build_dispersion_losses(job_config)
    activation_indices(dispersion.layers, dispersion.final_norm, args.n_layers)


def check_validation(job_config: JobConfig) -> None:
    """Check the length of validation sequences.

    They must not be longer than training.seq_len, the length of rotary embeddings.
    """
    v = job_config.validation
    seq_len = job_config.training.seq_len
    if not v.enable:
        return
    if v.seq_len == -1:
        v.seq_len = seq_len
    if v.seq_len > seq_len:
        raise ConfigError(
            f"validation.seq_len is {v.seq_len}, expected 1 to training.seq_len "
            f"{seq_len}, because the model has no more positions. Leave it out to use "
            "the training length"
        )
    tp = job_config.parallelism.tensor_parallel_degree
    if v.seq_len % tp:
        raise ConfigError(
            f"validation.seq_len is {v.seq_len}, expected a multiple of "
            f"tensor_parallel_degree {tp}"
        )


def check_slots(job_config: JobConfig, world_size: int) -> None:
    """Check that the global batch is a multiple of the number of slots, and that this
    number is a multiple of the number of data-parallel ranks.
    """
    dp = data_parallel_degree(job_config, world_size)
    batch = global_batch_size(job_config, dp)
    slots = slot_count(job_config, dp)
    if batch % slots or slots % dp:
        raise RanksError(
            f"stream.slots is {slots}; expected a divisor of the global batch {batch} "
            f"that is a multiple of the number of data-parallel ranks, {dp}"
        )


def check_stream(job_config: JobConfig, world_size: int) -> None:
    """Check the slots, their sources, and the number of validation sequences."""
    check_slots(job_config, world_size)
    dp = data_parallel_degree(job_config, world_size)
    source_shares(job_config, slot_count(job_config, dp))
    if job_config.validation.enable:
        validation_sequences(job_config, dp)


def check_profiling(job_config: JobConfig) -> None:
    """Check that the profiler's warm-up and active steps fit into its cycle."""
    section = job_config.profiling
    cycle = section.profiler_warmup + section.profiler_active
    if section.enable_profiling and section.profile_freq < cycle:
        raise ConfigError(
            f"profiling.profile_freq is {section.profile_freq}, expected at least "
            f"profiler_warmup {section.profiler_warmup} + profiler_active "
            f"{section.profiler_active} = {cycle}"
        )


def check_loading(job_config: JobConfig) -> None:
    """Check that a checkpoint's train_state is left out only together with its
    lr_scheduler, because both count the steps.
    """
    excluded = set(job_config.checkpoint.exclude_from_loading)
    counts = {"train_state", "lr_scheduler"}
    if "train_state" in excluded and not counts <= excluded:
        raise ConfigError(
            "checkpoint.exclude_from_loading has 'train_state' without 'lr_scheduler', "
            "expected both: steps would begin at 1 in the middle of the schedule"
        )


def check_retention(job_config: JobConfig) -> None:
    """Check that a checkpoint is saved at every multiple of checkpoint.keep_every."""
    checkpoint = job_config.checkpoint
    if checkpoint.enable and checkpoint.keep_every % checkpoint.interval:
        raise ConfigError(
            f"checkpoint.keep_every is {checkpoint.keep_every}, expected a multiple "
            f"of checkpoint.interval ({checkpoint.interval})"
        )


def check_device(job_config: JobConfig) -> None:
    """Check that this machine's device, packages and environment variables suit the
    config.
    """
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        raise ConfigError(
            "the environment variable TORCH_DISTRIBUTED_DEBUG is DETAIL, expected INFO "
            'or nothing: TorchTitan 0.2.2 uses torch\'s backend "fake", which fails '
            "with DETAIL"
        )
    # Without the package, TorchTitan would only log an error and train on.
    if job_config.metrics.enable_wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "metrics.enable_wandb is true, but wandb is not installed: pip install wandb"
        )
    for key in (
        "training.enable_cpu_offload",
        "profiling.enable_profiling",
        "profiling.enable_memory_snapshot",
    ):
        if cpu.active() and value_of(job_config, key):
            raise ConfigError(
                f"{key} is true, but there is no accelerator: set it to false"
            )
    _check_converters(job_config)
    cp = job_config.parallelism.context_parallel_degree
    if cp > 1 and cpu.active():
        raise ConfigError(
            f"context_parallel_degree is {cp}, expected 1 on a CPU: ring attention "
            "needs a GPU's kernels"
        )
    checkpointed = job_config.activation_checkpoint.mode != "none"
    if (
        cpu.active()
        and _is_compiled(job_config)
        and checkpointed
        and job_config.parallelism.tensor_parallel_degree > 1
    ):
        raise ConfigError(
            "tensor parallelism, activation checkpointing and compile.enable are on, expected at most two of them on a CPU: "
            'torch cannot compile attention with all three. Set activation_checkpoint.mode = "none"'
        )


def _check_converters(job_config: JobConfig) -> None:
    """Check that this machine can run the model converters."""
    float8 = "quantize.linear.float8"
    emulated = job_config.quantize.linear.float8.emulate and not _is_compiled(
        job_config
    )
    supported = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (
        8,
        9,
    )
    if float8 in job_config.model.converters and not (emulated or supported):
        raise ConfigError(
            f"model.converters has {float8!r}, which needs a GPU of compute capability "
            f"8.9 or higher: leave it out, or set {float8}.emulate = true and "
            "compile.enable = false"
        )


def _is_compiled(job_config: JobConfig) -> bool:
    return job_config.compile.enable and "model" in job_config.compile.components


def check_launched(job_config: JobConfig) -> None:
    """Check that torchrun has started this process, and that rank 0 can listen on the
    port where the ranks meet.
    """
    if "LOCAL_RANK" not in os.environ:
        config = job_config.job.config_file
        raise ConfigError(
            "the environment has no LOCAL_RANK, which torchrun sets: start with "
            f"titan-disp train {config}, or torchrun --nproc-per-node N -m "
            f"titan_disp.train --job.config_file {config}"
        )
    # torchrun's own process may already listen on this port.
    listens = os.environ.get("RANK") == "0" and not dist.is_initialized()
    if not listens or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    port = int(os.environ.get("MASTER_PORT", "0"))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"MASTER_PORT is {port}, on which the ranks would meet, but this "
                f"machine does not let this process listen there ({error.strerror}): "
                "set another port"
            ) from error


def check_inputs(job_config: JobConfig) -> None:
    """Check the files that the config names: the tokenizer, the data and the initial
    weights.
    """
    listed_inputs(job_config, missing=Problems(), warnings=[])


def check_checkpoint(job_config: JobConfig) -> None:
    """Check that the checkpoint of ``checkpoint.load_step`` exists.

    For a run without checkpoints, check the initial weights, if the config names any.
    """
    checkpoint = job_config.checkpoint
    folder = os.path.join(job_config.job.dump_folder, checkpoint.folder)
    steps: list[int] = []
    if checkpoint.enable:
        with reported(f"the run's folder of checkpoints {folder!r}", OSError):
            steps = checkpoints(folder)
        if checkpoint.load_step not in (-1, *steps):
            raise ConfigError(missing_step(checkpoint.load_step, folder, steps))
    if not steps:
        adapter = find_model(job_config.model.name).adapter(args_of(job_config), None)
        check_initial_load(checkpoint, job_config.model.hf_assets_path, adapter)


def listed_inputs(
    job_config: JobConfig, missing: Problems, warnings: list[str]
) -> list[tuple[DataSet, list[DataFile]]]:
    """Return each existing data set that the config names, with its files.

    ``missing`` may collect the errors about a missing tokenizer, data set or checkpoint.
    Warnings about a tokenizer that does not suit the data are added to ``warnings``.
    Raises ConfigError if something exists but is wrong.
    """
    tokenizer = None
    if missing.pass_(find_tokenizer, job_config.model.hf_assets_path):
        tokenizer = tokenizer_of(job_config)
    options = stream_options(job_config, tokenizer=tokenizer)
    listed: list[tuple[DataSet, list[DataFile]]] = []
    for data in data_sets(job_config):
        data.check_name()
        files = None
        with missing.collected():
            files = data.check()
        if files is not None:
            if data.key != "validation":
                files = after_left_out(files, options, data.prefix)
            files = check_content(files, options, data.key)
            if tokenizer is not None:
                warnings += tokenizer_warnings(tokenizer, files, options)
            listed.append((data, files))
            if (
                files
                and options.index not in ("", IN_MEMORY)
                and data.key != "validation"
            ):
                with_index(files, options)
    check_overlaps(listed)
    missing.pass_(check_checkpoint, job_config)
    return listed


def tokenizer_of(job_config: JobConfig) -> BaseTokenizer:
    """Return the tokenizer in ``model.hf_assets_path``, if the model's vocabulary is
    large enough for it.
    """
    folder = job_config.model.hf_assets_path
    tokenizer = load_tokenizer(folder, job_config.stream.separator)
    encoder(tokenizer)  # raises ConfigError without an EOS token
    size = tokenizer.get_vocab_size()
    advice = f"choose a flavor with a larger vocabulary, a smaller tokenizer, or --model.overrides.vocab_size={size}"
    check_fits(
        size,
        folder,
        vocab_size=args_of(job_config).vocab_size,
        model=f"model.flavor {_flavor(job_config)!r}",
        advice=advice,
    )
    return tokenizer


def build_dispersion_losses(
    job_config: JobConfig,
) -> dict[str, tuple[float, DispersionLoss]]:
    """Return the (weight, loss) of each dispersion loss by its name.

    The first loss is from [dispersion] and has weight 1. The others are from
    [[dispersion.losses]]. λ multiplies all of them. If several losses have the same
    name, the second is called NAME_2, and so on. ``debug.seed`` decides which positions
    are sampled.
    """
    section = job_config.dispersion
    options = parse_overrides(section.options, OPTIONS) or None
    keys = LOSS_TYPES.keys() - {"weight", "options"}
    values = {key: getattr(section, key) for key in keys} | {"options": options}
    main = _build_loss("dispersion.", values, job_config)
    losses = {main.name: (1.0, main)}
    for i, table in enumerate(section.losses):
        where = f"{LOSSES}[{i}]"
        check_table(where, table, LOSS_TYPES, required="variant")
        values = {"weight": 1.0, **table}
        weight = values.pop("weight")
        Facts(above=0).check(f"{where}.weight", weight)
        loss = _build_loss(f"{where}.", values, job_config)
        name = loss.name
        count = 1
        # No loss is called fit_error, because dispersion_fit_error is the name of
        # another number in metrics.jsonl.
        while name in (*losses, "fit_error"):
            count += 1
            name = f"{loss.name}_{count}"
        losses[name] = float(weight), loss
    return losses


def _build_loss(
    where: str, values: Mapping[str, Any], job_config: JobConfig
) -> DispersionLoss:
    """Return a loss with the options ``values``.

    ``where`` is the text before the names of options in messages: "dispersion." or
    "dispersion.losses[0].".
    """
    with prefixed(where):
        loss = DispersionLoss(**values, seed=job_config.debug.seed or 0)
    with prefixed(where, ", or set dispersion.within_documents = false"):
        if job_config.dispersion.within_documents:
            loss.check_within_segments()
    return loss
