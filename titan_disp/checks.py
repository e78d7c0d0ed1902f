"""These checks refuse a config that cannot work, with one message that says what to
change.

Every start of training runs them, and so do plan, preflight, submit, sweeps and the
node check. They build no model and need no GPU. ``check_inputs`` also opens the data,
the tokenizer and the checkpoint that the config names. Each raises ConfigError for the
first problem that it finds. Other checks are elsewhere: ``cluster.preflight`` runs one
real step, and ``cluster.job_check`` runs these checks for a SLURM job.
"""

import copy
import importlib
import importlib.util
import itertools
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch._dynamo
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.protocols.model_converter import _registry_model_converter_cls

from titan_disp import cpu
from titan_disp.config.batch import (
    data_parallel_degree,
    global_batch_size,
    resolve_steps,
    slot_count,
)
from titan_disp.config.keys import Facts, value_of, written
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
from titan_disp.data.validation import validation_sequences
from titan_disp.dispersion.loss import DispersionLoss
from titan_disp.dispersion.variants import checked
from titan_disp.errors import (
    ConfigError,
    Problems,
    counted,
    did_you_mean,
    fits,
    prefixed,
    reported,
)
from titan_disp.job_config import all_facts
from titan_disp.models.arguments import activation_indices, named
from titan_disp.models.baselines import check_baseline
from titan_disp.models.registry import args_of, find_model
from titan_disp.run.checkpoint import check_initial_load
from titan_disp.run.integrity import checkpoints
from titan_disp.schedules import check_schedules
from titan_disp.tables import LOSSES, OPTIONS, parse_overrides

# Numbers of ranks or nodes that are tried above the asked one, where no batch limits
# them
MOST_MORE = 1024


def check_config(
    job_config: JobConfig, world_size: int, problems: Problems | None = None
) -> None:
    """Check everything that follows from the config and the number of ranks.

    ``problems`` may collect all that is wrong; by default, the first of it is raised.

    Also set training.steps from budget.tokens, replace data_parallel_replicate_degree
    and validation.seq_len of −1, and turn model.overrides and dispersion.options into
    tables.
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
    fits = passes(check_mesh, job_config, world_size) and passes(
        check_batch, job_config, world_size
    )
    has_steps = passes(resolve_steps, job_config, world_size)
    passes(check_model, job_config)
    if keys_pass and has_steps:
        passes(check_schedules, job_config)
    passes(check_validation, job_config)
    if fits:
        passes(check_stream, job_config, world_size)
    passes(check_profiling, job_config)
    passes(check_loading, job_config)
    passes(check_baseline, job_config)


def check_ranks(job_config: JobConfig, world_size: int) -> None:
    """Check a config as ``check_config``. If mesh or batch do not fit the number of
    ranks, the message names the nearest numbers that they fit.
    """
    asked = copy.copy(job_config)
    asked.parallelism = copy.copy(job_config.parallelism)
    try:
        check_config(job_config, world_size)
    except ConfigError as error:
        hint = nearest_hint(asked, world_size, "rank")
        raise ConfigError(f"{error}{hint}") from error


def fits_ranks(job_config: JobConfig, world_size: int) -> bool:
    """Return whether mesh and batch of a config, whose tables are resolved, fit a
    number of ranks. The config is not changed.
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
    """Return the end of a message: the next smaller and the next larger number of nodes
    or ranks that mesh and batch fit, or "" if they fit ``count``.

    ``job_config``: with the degrees of parallelism of the file, which checks change.
    ``ranks_each``: ranks of a node, or 1.
    """
    if not check_keys(job_config, Problems(collect=True)):
        return ""
    p = job_config.parallelism

    def fits(count: int) -> bool:
        return fits_ranks(job_config, count * ranks_each)

    if fits(count):
        return ""
    largest = count + MOST_MORE
    batch = job_config.training.global_batch_size
    if batch > 0:
        # Every data-parallel rank has at least one microbatch.
        microbatches = batch // job_config.training.local_batch_size
        ranks_of_sequence = p.tensor_parallel_degree * p.context_parallel_degree
        largest = microbatches * ranks_of_sequence // ranks_each
    smaller = filter(fits, range(min(count - 1, largest), 0, -1))
    larger = filter(fits, range(count + 1, largest + 1))
    nearest = [*itertools.islice(smaller, 1), *itertools.islice(larger, 1)]
    if not nearest:
        return ""
    *others, last = nearest
    numbers = " or ".join([*map(str, others), counted(last, noun)])
    return f"; {numbers} would work with this mesh and batch"


def resolve_tables(job_config: JobConfig) -> None:
    """Turn what may be written as words into tables."""
    model = job_config.model
    dispersion = job_config.dispersion
    model.overrides = parse_overrides(model.overrides)
    dispersion.options = parse_overrides(dispersion.options, OPTIONS)


def check_keys(job_config: JobConfig, problems: Problems) -> bool:
    """Check every key, TorchTitan's and titan-disp's, and return whether all pass."""
    passed = [
        problems.pass_(check_key, key, facts, job_config)
        for key, facts in all_facts().items()
    ]
    return all(passed)


def check_key(key: str, facts: Facts, job_config: JobConfig) -> None:
    """Check a key by the facts about it."""
    if (facts.limited or facts.needs) and _holds(facts, job_config):
        facts.check(key, value_of(job_config, key))
        _check_needs(key, facts, job_config)


def _holds(facts: Facts, job_config: JobConfig) -> bool:
    """Return whether the limits of a key hold with the values of the other keys."""

    def all_have(values: Mapping[str, Any]) -> bool:
        return all(value_of(job_config, key) == values[key] for key in values)

    return all_have(facts.when) and not (facts.unless and all_have(facts.unless))


def _check_needs(key: str, facts: Facts, job_config: JobConfig) -> None:
    """Refuse a key that is set if another key does not have the value that it needs."""
    value = value_of(job_config, key)
    if value is False or value is None:
        return
    for other, needed in facts.needs.items():
        actual = value_of(job_config, other)
        if needed not in (actual if isinstance(actual, list) else [actual]):
            off = f", or {key} = false" if value is True else ""
            raise ConfigError(
                f"{key} is {written(value)}, but {other} is {written(actual)}: "
                f"{facts.because}. Set {other} = {written(needed)}{off}"
            )


def check_names_of_code(job_config: JobConfig) -> None:
    """Check the names of a module to import, of model converters, and of a backend of
    torch.compile.

    The module is imported, because it may register more of them.
    """
    module = job_config.experimental.custom_import
    if module:
        what = f"experimental.custom_import is {module!r}, which cannot be imported"
        with reported(what, Exception):
            importlib.import_module(module)
    converters = _registry_model_converter_cls
    for name in job_config.model.converters:
        if name not in converters:
            raise ConfigError(
                f"model.converters has {name!r}, expected {' or '.join(converters)}, "
                "or one that the module in experimental.custom_import registers"
            )
    backend = job_config.compile.backend
    if job_config.compile.enable and backend not in backends():
        raise ConfigError(
            f"compile.backend is {backend!r}, expected one of {', '.join(backends())}"
        )


def backends() -> list[str]:
    """Return the names of torch.compile's backends, also of those for debugging."""
    return torch._dynamo.list_backends(exclude_tags=())


def resolve_replicas(job_config: JobConfig, world_size: int) -> None:
    """Replace data_parallel_replicate_degree = −1 by the number of replicas that the
    ranks allow.

    A second call changes nothing. The shard degree is then an upper bound: 8 is right
    for any number of nodes of 8 GPUs, and for 1, 2 or 4 GPUs, which hold one replica.
    TorchTitan 0.2.2 does not accept −1 here, so this must run before it sees the
    config. The ranks must be a multiple of the degrees of context and tensor
    parallelism.
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
    left = world_size // inside
    shard = min(p.data_parallel_shard_degree, left)
    if left % shard:
        raise ConfigError(
            "data_parallel_replicate_degree = -1 needs a multiple of "
            f"data_parallel_shard_degree {shard} × context_parallel_degree "
            f"{p.context_parallel_degree} × tensor_parallel_degree "
            f"{p.tensor_parallel_degree} = {shard * inside} ranks, but there are "
            f"{world_size}: use another number of ranks, or set "
            f"data_parallel_shard_degree to a divisor of {left}"
        )
    p.data_parallel_shard_degree = shard
    p.data_parallel_replicate_degree = left // shard


def check_mesh(job_config: JobConfig, world_size: int) -> None:
    """Check the degrees of parallelism, and refuse what TorchTitan 0.2.2 or titan-disp
    cannot train correctly.
    """
    _check_degrees(job_config, world_size)
    resolve_replicas(job_config, world_size)
    shards = _check_shards(job_config, world_size)
    _check_sharded_sizes(job_config, shards)


def _check_degrees(job_config: JobConfig, world_size: int) -> None:
    tp = job_config.parallelism.tensor_parallel_degree
    cp = job_config.parallelism.context_parallel_degree
    if world_size % (cp * tp):
        raise ConfigError(
            f"context_parallel_degree {cp} × tensor_parallel_degree {tp} = {cp * tp} "
            f"does not divide the number of ranks, {world_size}: set "
            "tensor_parallel_degree or context_parallel_degree to one that does, or "
            "use another number of ranks"
        )


def _check_shards(job_config: JobConfig, world_size: int) -> int:
    """Check data parallelism, and return the number of ranks that share one copy of the
    weights.
    """
    p = job_config.parallelism
    tp = p.tensor_parallel_degree
    cp = p.context_parallel_degree
    replicate = p.data_parallel_replicate_degree
    shard = p.data_parallel_shard_degree
    if shard == -1:
        shard = max(1, world_size // (replicate * cp * tp))
    if shard < 1 or replicate * shard * cp * tp != world_size:
        raise ConfigError(
            f"data_parallel_replicate_degree {replicate} × data_parallel_shard_degree "
            f"{shard} × context_parallel_degree {cp} × tensor_parallel_degree {tp} = "
            f"{replicate * shard * cp * tp}, but the number of ranks is {world_size}: "
            "set data_parallel_replicate_degree = -1 or data_parallel_shard_degree = "
            "-1, which is then computed from the number of ranks (the first also "
            "makes fewer shards if there are fewer ranks)"
        )
    if replicate > 1 and shard * cp == 1:
        raise ConfigError(
            f"pure data parallelism (data_parallel_replicate_degree {replicate}, "
            "data_parallel_shard_degree 1) is refused: TorchTitan 0.2.2 averages its "
            "gradients a second time, which makes them too small. Set "
            "data_parallel_replicate_degree = 1 (FSDP) or data_parallel_shard_degree "
            "≥ 2 (HSDP)"
        )
    if job_config.training.enable_cpu_offload and shard * cp == 1:
        raise ConfigError(
            "training.enable_cpu_offload is true, but only FSDP offloads, and it is "
            "off with data_parallel_shard_degree 1: set enable_cpu_offload = false, "
            "or data_parallel_shard_degree ≥ 2"
        )
    return shard * cp


def _check_sharded_sizes(job_config: JobConfig, shards: int) -> None:
    """Check that the model's sizes and the sequence divide into equal parts.

    ``shards`` share the weights.
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
    tables = [
        rows
        for rows in (args.vocab_size, args.max_positions)
        if rows is not None and rows % tp
    ]
    if tables and args.dim % shards:
        raise ConfigError(
            f"tensor_parallel_degree {tp} does not divide the {tables[0]} rows of an "
            f"embedding of {flavor!r}, so that FSDP shards its {args.dim} columns, "
            f"which {shards} shards (data_parallel_shard_degree × "
            "context_parallel_degree) do not divide: set a data_parallel_shard_degree "
            "that does, or tensor_parallel_degree = 1"
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
    return named(job_config.model.flavor, job_config.model.overrides)


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
        raise ConfigError(
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
    if training.seq_len < 1 + dispersion.enabled:
        raise ConfigError(
            f"training.seq_len is {training.seq_len}, expected at least "
            f"{1 + dispersion.enabled}"
        )
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

    Rotary embeddings are computed for training.seq_len positions.
    """
    v = job_config.validation
    seq_len = job_config.training.seq_len
    if not v.enable:
        return
    if v.seq_len == -1:
        v.seq_len = seq_len
    if not 1 <= v.seq_len <= seq_len:
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
    """Check that the slots divide the global batch, and the ranks the slots."""
    dp = data_parallel_degree(job_config, world_size)
    batch = global_batch_size(job_config, dp)
    slots = slot_count(job_config, dp)
    if slots < 1 or batch % slots or slots % dp:
        raise ConfigError(
            f"stream.slots is {slots}; expected a divisor of the global batch {batch} "
            f"that is a multiple of the number of data-parallel ranks, {dp}"
        )


def check_stream(job_config: JobConfig, world_size: int) -> None:
    """Check the slots, their sources, and the number of validation sequences."""
    check_slots(job_config, world_size)
    dp = data_parallel_degree(job_config, world_size)
    source_shares(job_config, slot_count(job_config, dp))
    if not job_config.stream.text_field:
        raise ConfigError(
            'stream.text_field is "", expected the name of a field: most corpora call '
            'it "text"'
        )
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
    """Refuse to load only one of two parts of a checkpoint that count the same steps."""
    excluded = set(job_config.checkpoint.exclude_from_loading)
    counts = {"train_state", "lr_scheduler"}
    if "train_state" in excluded and not counts <= excluded:
        raise ConfigError(
            "checkpoint.exclude_from_loading has 'train_state' without 'lr_scheduler', "
            "expected both: steps would begin at 1 in the middle of the schedule"
        )


def check_device(job_config: JobConfig) -> None:
    """Check that this machine, with its kind of device and its packages, can run the
    config.
    """
    # Without the package, TorchTitan would only log an error and train on.
    if job_config.metrics.enable_wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "metrics.enable_wandb is true, but wandb is not installed: pip install "
            "'titan-disp[wandb]'"
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
    cp = job_config.parallelism.context_parallel_degree
    if cp > 1 and cpu.active():
        raise ConfigError(
            f"context_parallel_degree is {cp}, expected 1 on a CPU: ring attention "
            "needs a GPU's kernels"
        )
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    checkpointed = job_config.activation_checkpoint.mode != "none"
    if (
        cpu.active()
        and compiled
        and checkpointed
        and job_config.parallelism.tensor_parallel_degree > 1
    ):
        raise ConfigError(
            "tensor parallelism, activation checkpointing and compile.enable are on, expected at most two of them on a CPU: "
            'torch cannot compile its attention with all. Set activation_checkpoint.mode = "none"'
        )


def check_inputs(job_config: JobConfig) -> None:
    """Check what the config names on disk: the tokenizer, the data, and the initial
    weights.
    """
    listed_inputs(job_config, missing=Problems())
    checkpoint = job_config.checkpoint
    if not checkpoint.enable or not checkpoints(
        os.path.join(job_config.job.dump_folder, checkpoint.folder)
    ):
        adapter = find_model(job_config.model.name).adapter(args_of(job_config), None)
        check_initial_load(checkpoint, job_config.model.hf_assets_path, adapter)


def listed_inputs(
    job_config: JobConfig, missing: Problems
) -> list[tuple[DataSet, list[DataFile]]]:
    """Return the data that the config names, with the files that the disk has.

    ``missing`` may collect data and a tokenizer that are not there. What is there and
    wrong raises ConfigError.
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
            listed.append((data, files))
            if (
                files
                and options.index not in ("", IN_MEMORY)
                and data.key != "validation"
            ):
                with_index(files, options)
    check_overlaps(listed)
    return listed


def tokenizer_of(job_config: JobConfig) -> BaseTokenizer:
    """Return the tokenizer in ``model.hf_assets_path``, if the model's vocabulary is
    large enough for it.
    """
    folder = job_config.model.hf_assets_path
    model = f"model.flavor {_flavor(job_config)!r}"
    tokenizer = load_tokenizer(folder)
    encoder(tokenizer)  # raises ConfigError if it has no EOS token
    size = tokenizer.get_vocab_size()
    advice = f"choose a flavor with a larger vocabulary, a smaller tokenizer, or --model.overrides.vocab_size={size}"
    check_fits(size, folder, args_of(job_config).vocab_size, model, advice)
    return tokenizer


def build_dispersion_losses(
    job_config: JobConfig,
) -> dict[str, tuple[float, DispersionLoss]]:
    """Return the losses of [dispersion] and [[dispersion.losses]] with their weights,
    by names that differ.

    The first one is that of [dispersion]. ``debug.seed`` decides which positions are
    sampled.
    """
    section = job_config.dispersion
    seed = job_config.debug.seed or 0

    def build(where: str, values: Mapping[str, Any]) -> DispersionLoss:
        with prefixed(where):
            loss = DispersionLoss(**values, seed=seed)
        with prefixed(where, ", or set dispersion.within_documents = false"):
            if section.within_documents:
                loss.check_within_segments()
        return loss

    known = {f.name: f for f in fields(DispersionLoss) if f.name != "seed"}
    options = parse_overrides(section.options, OPTIONS) or None
    main = build(
        "dispersion.",
        {name: getattr(section, name) for name in known} | {"options": options},
    )
    found = {main.name: (1.0, main)}
    for i, table in enumerate(section.losses):
        where = f"{LOSSES}[{i}]"
        if not isinstance(table, Mapping) or not isinstance(table.get("variant"), str):
            raise ConfigError(
                f"{where} is {table!r}, expected a table with a variant, as variant = "
                '"cosine"'
            )
        given = {"weight": 1.0, **table}
        weight = given.pop("weight")
        if not (fits(weight, float) and 0 < weight < math.inf):
            raise ConfigError(f"{where}.weight is {weight!r}, expected a number > 0")
        for key in given:
            if key not in known:
                raise ConfigError(
                    f"{where}.{key} is not known{did_you_mean(key, ['weight', *known])}"
                )
        if not isinstance(given.get("options", {}), Mapping):
            raise ConfigError(
                f"{where}.options is {given['options']!r}, expected a table such as "
                f"{{margin = 0.5}}"
            )
        with prefixed(f"{where}."):
            values = {
                key: checked(key, value, known[key]) for key, value in given.items()
            }
        loss = build(f"{where}.", values)
        name = loss.name
        count = 1
        # dispersion_fit_error is another number of metrics.jsonl
        while name in (*found, "fit_error"):
            count += 1
            name = f"{loss.name}_{count}"
        found[name] = float(weight), loss
    return found
