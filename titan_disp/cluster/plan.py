"""This module predicts a run's mesh, batches, bytes, FLOPs and days.

It needs no data, tokenizer or GPU.
"""

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from titan_disp.checks import check_config, missing_inputs
from titan_disp.cluster import cost
from titan_disp.cluster.job_check import hub_warnings
from titan_disp.config.batch import (
    data_parallel_degree,
    global_batch_size,
    slot_count,
    tokens_per_step,
)
from titan_disp.config.command_options import Machine
from titan_disp.config.types import JobConfig
from titan_disp.data.assignment import Assignment, Share, far_from_weights
from titan_disp.data.listing import DataFile
from titan_disp.data.options import stream_options
from titan_disp.data.sources import DataSet, source_shares
from titan_disp.data.sources import measured as with_densities
from titan_disp.errors import ConfigError, counted
from titan_disp.models.decoder import DispModel
from titan_disp.models.registry import args_of, find_model
from titan_disp.text import estimated_duration

MAX_NODES = 1024  # largest number of nodes that is tried
NOTICED = 0.1  # a plan warns if communication or checkpoints take a larger part


@dataclass(frozen=True)
class NodeCount:
    nodes: int
    replicate: int  # data_parallel_replicate_degree; −1 adapts to any number


@dataclass(frozen=True)
class Mesh:
    replicate: int
    shard: int
    context: int
    tensor: int
    data_parallel: int


@dataclass(frozen=True)
class Batch:
    seq_len: int
    local_batch_size: int
    global_batch_size: int
    accumulation_steps: int
    tokens_per_step: int
    steps: int
    total_tokens: int


@dataclass(frozen=True)
class Model:
    parameters: int  # a tied embedding counts once
    # without the output and the embeddings of tokens and positions
    parameters_non_embedding: int
    flops: float  # of forward and backward in a step, without recomputation
    dispersion_flops: float  # that dispersion adds to these


@dataclass(frozen=True)
class Checkpoints:
    # bytes of one full checkpoint, without the few numbers of streams and schedules
    size: int
    saved: int
    kept: int  # at the end of the run
    # most bytes at any time: one more than are kept, as the oldest is deleted after the
    # newest is complete
    disk: int
    interval_seconds: float  # 0 without checkpoints
    # to write one at the machine's storage_bandwidth; asynchronous modes hide most of
    # it
    seconds: float


@dataclass(frozen=True)
class Time:
    # of a step's products at the machine's ``mfu`` of the bf16 peak (dispersion: half
    # of it)
    computing_seconds: float
    # that one GPU sends in a step to others of its node (see ``traffic``)
    within_bytes: float
    between_bytes: float  # to other nodes
    within_seconds: float
    between_seconds: float
    exposed_seconds: float  # communication that computing cannot hide, a lower bound
    step_seconds: float  # computing and exposed communication
    tokens_per_second_per_gpu: float
    # of all steps, without start-ups, checkpoints, validation and measurements
    days: float
    days_without_dispersion: float
    # with dispersion's products at the fp32 peak, as for fp32 activations and l2_repel
    days_fp32_dispersion: float


@dataclass(frozen=True)
class Plan:
    """Hold the prediction for a run.

    ``dataclasses.asdict`` turns it into JSON values.
    """

    config: str
    machine: Machine  # with all its bandwidths, in GB/s
    mesh: Mesh
    batch: Batch
    model: Model
    memory: cost.Memory
    checkpoints: Checkpoints
    time: Time
    sources: list[Share]
    # of each local source's text, the fraction that an epoch's tokens leave unread,
    # about
    unseen: dict[str, float]
    # up to MAX_NODES, with the same number of GPUs per node
    node_counts: list[NodeCount]
    warnings: list[str]


def meta_model(job_config: JobConfig) -> DispModel:
    """Build the config's model on the meta device, without storage."""
    args = args_of(job_config)
    args.update_from_config(job_config)
    with torch.device("meta"):
        return find_model(job_config.model.name).model_cls(args)


def admitted_node_counts(
    job_config: JobConfig, gpus_per_node: int, shard: int
) -> list[NodeCount]:
    """Return the numbers of nodes for which ``check_config`` passes.

    Two meshes are tried for each number: as many replicas of the same shard degree as
    fit, and the config as it is. The replicas come first if one fits into a node.
    """
    steps = job_config.training.steps
    trial = copy.deepcopy(job_config)
    p = trial.parallelism
    given = job_config.parallelism
    inside = shard * p.context_parallel_degree * p.tensor_parallel_degree
    admitted = []
    for nodes in range(1, MAX_NODES + 1):
        world = nodes * gpus_per_node
        resolves = given.data_parallel_replicate_degree == -1
        meshes = (
            [(world // inside, shard)] if world % inside == 0 and not resolves else []
        )
        meshes.append(
            (given.data_parallel_replicate_degree, given.data_parallel_shard_degree)
        )
        if inside > gpus_per_node:
            meshes.reverse()
        for p.data_parallel_replicate_degree, p.data_parallel_shard_degree in meshes:
            # an earlier check may have set it from the token budget
            trial.training.steps = steps
            try:
                check_config(trial, world)
            except ConfigError:
                continue
            admitted.append(
                NodeCount(nodes, -1 if resolves else p.data_parallel_replicate_degree)
            )
            break
    return admitted


def unseen_shares(
    job_config: JobConfig,
    listed: Sequence[tuple[DataSet, list[DataFile]]],
    slots: int,
    shares: Sequence[Share],
) -> dict[str, float]:
    """Predict which fraction of each local source's text the cuts leave unread in an
    epoch's tokens.

    Lengths of documents add to it: the fewer a slot has, and the more they differ, the
    more.
    """
    found = {}
    options = stream_options(job_config)
    own = {share.name: share.slots for share in shares}
    for one, files in listed:
        # no index of token ids without a tokenizer, or too much for memory
        with contextlib.suppress(ConfigError):
            if files and one.key != "validation":
                assignment = Assignment(
                    with_densities(files, options),
                    own.get(one.source, slots),
                    options.seed,
                )
                found[one.source] = assignment.unseen()
    return found


def find_machine(machine: Machine) -> Machine:
    """Return the machine with the GPU's own bandwidths where it names none, or raise
    ConfigError.
    """
    machine = replace(machine, gpu=cost.gpu_name(machine.gpu))
    gpu = cost.find_gpu(machine)
    if machine.nodes < 1 or machine.gpus_per_node < 1:
        raise ConfigError(
            f"nodes is {machine.nodes} and gpus_per_node is {machine.gpus_per_node}, expected at least 1 of both"
        )
    if not 0 < machine.mfu <= 1:
        raise ConfigError(f"mfu is {machine.mfu}, expected a number in (0, 1]")
    bandwidths = {
        "node": gpu.node_bandwidth / 1e9
        if machine.node_bandwidth is None
        else machine.node_bandwidth,
        "network": gpu.network_bandwidth / 1e9
        if machine.network_bandwidth is None
        else machine.network_bandwidth,
        "storage": machine.storage_bandwidth,
    }
    for kind, value in bandwidths.items():
        if not value > 0:
            raise ConfigError(
                f"{kind} bandwidth is {value:g} GB/s, expected a number > 0"
            )
    found: dict[str, Any] = {
        f"{kind}_bandwidth": value for kind, value in bandwidths.items()
    }
    return replace(
        machine, gpu_memory=gpu.memory / 1e9, gpu_flops=gpu.bf16_flops / 1e12, **found
    )


def make_plan(job_config: JobConfig, machine: Machine, strict: bool = False) -> Plan:
    """Plan a config, which is not changed, on a machine.

    With ``strict``, missing data or a missing tokenizer is an error.

    Raises ConfigError if the run would fail at its start, or a number of the machine is
    out of range.
    """
    machine = find_machine(machine)
    given = job_config
    job_config = copy.deepcopy(job_config)
    gpu = cost.find_gpu(machine)
    world = machine.nodes * machine.gpus_per_node
    try:
        check_config(job_config, world)
    except ConfigError as error:
        gpus = f"{counted(machine.nodes, 'node')} of {counted(machine.gpus_per_node, 'GPU')}"
        raise ConfigError(
            f"{error}. This is for {gpus} (--nodes, --gpus-per-node)"
        ) from error
    missing, listed = missing_inputs(job_config, strict)
    warnings = missing + hub_warnings(job_config, world, machine.nodes)
    module = meta_model(job_config)
    mesh, batch, model, memory, time = measured(job_config, module, machine)
    if memory.total > gpu.memory:
        warnings.append(
            f"a GPU would need about {memory.total / 1e9:.1f} GB, but {machine.gpu} has {gpu.memory / 1e9:.0f} GB: lower "
            'training.local_batch_size, or set activation_checkpoint.mode = "full", a larger data_parallel_shard_degree or '
            "tensor_parallel_degree"
        )
    slots = slot_count(job_config, mesh.data_parallel)
    sources = source_shares(job_config, slots)
    if (coarse := far_from_weights(sources)) is not None:
        warnings.append(coarse)
    if time.exposed_seconds > NOTICED * time.step_seconds:
        warnings.append(
            f"communication that computing cannot hide takes {time.exposed_seconds / time.step_seconds:.0%} of a step: use "
            "fewer nodes, or raise training.local_batch_size, which splits the same batch into fewer microbatches"
        )
    size = cost.checkpoint_bytes(job_config, module)
    (saved, kept, on_disk) = cost.checkpoint_counts(job_config)
    between = job_config.checkpoint.interval * time.step_seconds if saved else 0.0
    checkpoints = Checkpoints(
        size,
        saved,
        kept,
        on_disk * size,
        between,
        size / (machine.storage_bandwidth * 1e9),
    )
    if saved and checkpoints.seconds > max(NOTICED * between, 0.1):
        warnings.append(
            f"a checkpoint is saved every {between:.1f} s and takes about {checkpoints.seconds:.1f} s to write: raise "
            "checkpoint.interval"
        )
    config = job_config.job.config_file or ""
    counts = admitted_node_counts(given, machine.gpus_per_node, mesh.shard)
    unseen = unseen_shares(job_config, listed, slots, sources)
    return Plan(
        config,
        machine,
        mesh,
        batch,
        model,
        memory,
        checkpoints,
        time,
        sources,
        unseen,
        counts,
        warnings,
    )


def measured(
    job_config: JobConfig, module: DispModel, machine: Machine
) -> tuple[Mesh, Batch, Model, cost.Memory, Time]:
    """Return what follows from a checked config, its model on the meta device and a
    machine of ``find_machine``.
    """
    p = job_config.parallelism
    t = job_config.training
    world = machine.nodes * machine.gpus_per_node
    cp = p.context_parallel_degree
    tp = p.tensor_parallel_degree
    replicate = p.data_parallel_replicate_degree
    dp = data_parallel_degree(job_config, world)
    mesh = Mesh(replicate, world // (replicate * cp * tp), cp, tp, dp)
    sequences = global_batch_size(job_config, dp)
    step_tokens = tokens_per_step(job_config, dp)
    accumulation = sequences // (t.local_batch_size * dp)
    total = t.steps * step_tokens
    batch = Batch(
        t.seq_len,
        t.local_batch_size,
        sequences,
        accumulation,
        step_tokens,
        t.steps,
        total,
    )
    args = module.model_args
    parameters, flops_per_token = args.get_nparams_and_flops(module, t.seq_len)
    embeddings = {
        id(w): w.numel()
        for part in (*module.embeddings, module.output)
        for w in part.parameters()
    }
    flops = flops_per_token * step_tokens
    dispersed = sequences * cost.dispersion_cost(job_config, args).flops
    model = Model(
        parameters,
        parameters - sum(embeddings.values()),
        float(flops),
        float(dispersed),
    )
    memory = cost.estimate(job_config, module, mesh.shard * cp, accumulation > 1)
    return mesh, batch, model, memory, _time(job_config, module, machine, model, batch)


# dispersion's FLOPs than the model's, rounded from the exact estimator on one H200
# (docs/benchmarks.md)
SLOWER = 2.0


def _time(
    job_config: JobConfig,
    module: DispModel,
    machine: Machine,
    model: Model,
    batch: Batch,
) -> Time:
    assert machine.node_bandwidth is not None  # ``find_machine`` has filled it in
    assert machine.network_bandwidth is not None
    within = machine.node_bandwidth * 1e9
    between = machine.network_bandwidth * 1e9
    world = machine.nodes * machine.gpus_per_node
    gpu = cost.find_gpu(machine)
    sent = cost.traffic(job_config, module, machine.gpus_per_node, world)
    bf16, fp32 = (
        world * machine.mfu * peak for peak in (gpu.bf16_flops, gpu.fp32_flops)
    )

    def days(computing: float) -> float:
        return (
            batch.steps * (computing + sent.exposed(computing, within, between)) / 86400
        )

    computing = (model.flops + SLOWER * model.dispersion_flops) / bf16
    exposed = sent.exposed(computing, within, between)
    return Time(
        computing_seconds=computing,
        within_bytes=sent.total.within,
        between_bytes=sent.total.between,
        within_seconds=sent.total.within / within,
        between_seconds=sent.total.between / between,
        exposed_seconds=exposed,
        step_seconds=computing + exposed,
        tokens_per_second_per_gpu=batch.tokens_per_step / (computing + exposed) / world,
        days=days(computing),
        days_without_dispersion=days(model.flops / bf16),
        days_fp32_dispersion=days(
            model.flops / bf16 + SLOWER * model.dispersion_flops / fp32
        ),
    )


SHOWN = 24  # most node counts on the line


def _size(count: float) -> str:
    # GB wherever they show two digits, so that the lines of a plan compare at a glance
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"


def _days(days: float) -> str:  # not known to a tenth of a minute
    minutes = days * 1440
    if minutes < 1:
        return "less than a minute"
    return (
        estimated_duration(days * 86400) if minutes >= 120 else f"{minutes:.0f} minutes"
    )


def _node_counts(counts: list[NodeCount]) -> str:
    degrees = {c.replicate for c in counts}
    if all(c.replicate == c.nodes for c in counts):
        degree = "= nodes"
    else:
        degree = f"= {degrees.pop()}" if len(degrees) == 1 else "in brackets"
    shown = [
        f"{c.nodes} ({c.replicate})" if degree == "in brackets" else str(c.nodes)
        for c in counts
    ]
    if len(shown) > SHOWN:
        shown[SHOWN - 1 : -1] = ["…"]
    nodes = "node" if [c.nodes for c in counts] == [1] else "nodes"
    return f"{', '.join(shown)} {nodes}; data_parallel_replicate_degree {degree} (tried up to {MAX_NODES})"


# name and text; a name that begins with blanks belongs to the row above
Row = tuple[str, str]


def render(plan: Plan) -> str:
    """Render the plan as about 35 lines of text."""
    rows = (
        _run_rows(plan) + _memory_rows(plan) + _checkpoint_rows(plan) + _time_rows(plan)
    )
    rows.append(("also runs on", _node_counts(plan.node_counts)))
    lines = [f"{name:<15} {text}" for name, text in rows]
    return "\n".join(lines + [f"warning: {warning}" for warning in plan.warnings])


def _run_rows(plan: Plan) -> list[Row]:
    machine = plan.machine
    mesh = plan.mesh
    batch = plan.batch
    model = plan.model
    gpus = f"{counted(machine.nodes, 'node')} × {machine.gpus_per_node} {machine.gpu}"
    degrees = f"replicate {mesh.replicate} × shard {mesh.shard} × context {mesh.context} × tensor {mesh.tensor}"
    ranks = counted(mesh.data_parallel, "rank")
    microbatches = f"{batch.local_batch_size} × {ranks} × {counted(batch.accumulation_steps, 'accumulation step')}"
    sequences = (
        f"{counted(batch.global_batch_size, 'sequence')} of {batch.seq_len:,} tokens"
    )
    source_names = ["sources"] + [""] * len(plan.sources)  # one heading for all
    return [
        ("plan", plan.config),
        (
            "machine",
            f"{gpus} = {counted(machine.nodes * machine.gpus_per_node, 'GPU')}",
        ),
        ("mesh", f"{degrees}; {counted(mesh.data_parallel, 'data-parallel rank')}"),
        ("batch", f"{sequences} = {microbatches}"),
        (
            "steps",
            f"{batch.steps:,} of {batch.tokens_per_step:,} tokens = {batch.total_tokens:,} tokens",
        ),
        *zip(source_names, map(str, plan.sources), strict=False),
        *(
            (
                f"data {name}".strip(),
                f"at least {fraction:.1%} of an epoch is not read in its tokens",
            )
            for name, fraction in plan.unseen.items()
        ),
        (
            "parameters",
            f"{model.parameters:,}; {model.parameters_non_embedding:,} without embedding and output",
        ),
    ]


def _memory_rows(plan: Plan) -> list[Row]:
    notes = {
        "unsharded": " of gathered weights and their gradients",
        "dispersion": " of saved gradients",
    }
    memory = plan.memory
    limit = f"{cost.find_gpu(plan.machine).memory / 1e9:.0f} GB"
    total = f"{_size(memory.total)} of {limit} per GPU at the peak, estimated (1 GB = 1e9 bytes)"
    parts = [
        (f"  {part}", _size(size) + notes.get(part, ""))
        for part, size in vars(memory).items()
    ]
    return [("memory", total), *parts]


def _checkpoint_rows(plan: Plan) -> list[Row]:
    saves = plan.checkpoints
    every = "never"
    if saves.saved:
        bandwidth = f"{plan.machine.storage_bandwidth:g} GB/s (--storage-bandwidth)"
        interval = estimated_duration(saves.interval_seconds)
        every = (
            f"{interval}; written in {estimated_duration(saves.seconds)} at {bandwidth}"
        )
    return [
        ("checkpoint", _size(saves.size)),
        (
            "  over the run",
            f"{saves.saved} saved, {saves.kept} kept; at most {_size(saves.disk)} on disk",
        ),
        ("  every", every),
    ]


def _time_rows(plan: Plan) -> list[Row]:
    machine = plan.machine
    model = plan.model
    time = plan.time
    took = estimated_duration
    steps = plan.batch.steps
    total = f"{model.flops:.3e} per step, {model.flops * steps:.3e} in total"
    dispersion = (
        f"{model.dispersion_flops:.3e} and {model.dispersion_flops * steps:.3e}"
    )
    share = f"{model.dispersion_flops / model.flops:.1%}, at half the speed"
    peak = f"{cost.find_gpu(machine).bf16_flops / 1e12:g} TFLOP/s per GPU"
    computing = f"{took(time.computing_seconds)} of computing at {machine.mfu:.0%} of the bf16 peak, {peak}"
    node = f"{took(time.within_seconds)} at {machine.node_bandwidth:g} GB/s (--node-bandwidth)"
    network = f"{took(time.between_seconds)} at {machine.network_bandwidth:g} GB/s (--network-bandwidth)"
    exposed = f"{time.exposed_seconds / time.step_seconds:.1%} of a step"
    rows = [
        ("FLOPs", f"{total}; dispersion adds {dispersion} ({share})"),
        ("step", f"{took(time.step_seconds)}: {computing}, plus communication"),
        ("  within nodes", f"{_size(time.within_bytes)} sent per GPU, {node}"),
        ("  between", f"{_size(time.between_bytes)}, {network}"),
        ("  not hidden", f"{took(time.exposed_seconds)}, {exposed}"),
        ("throughput", f"{time.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"),
        ("time", f"{_days(time.days)} for all steps"),
    ]
    if model.dispersion_flops:
        fp32 = "if dispersion computes in fp32 (fp32 activations or l2_repel)"
        rows.append(
            ("  without", f"{_days(time.days_without_dispersion)} with dispersion off")
        )
        rows.append(("  fp32", f"{_days(time.days_fp32_dispersion)} {fp32}"))
    return rows
