"""This module predicts a run's mesh, batches, bytes, FLOPs and days.

The prediction needs no data, tokenizer or GPU.
"""

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from titan_disp.checks import (
    check_config,
    config_warnings,
    fits_ranks,
    listed_inputs,
    nearest_hint,
    resolve_tables,
)
from titan_disp.cluster import cost
from titan_disp.cluster.job_check import hub_warnings
from titan_disp.config.batch import (
    data_parallel_degree,
    global_batch_size,
    slot_count,
    tokens_per_step,
)
from titan_disp.config.command_options import Machine, check_least
from titan_disp.config.types import JobConfig
from titan_disp.data.assignment import (
    Assignment,
    Share,
    far_from_weights,
    one_share,
)
from titan_disp.data.findings import measured as with_densities
from titan_disp.data.listing import DataFile
from titan_disp.data.options import stream_options
from titan_disp.data.passes import bytes_before
from titan_disp.data.position import Position
from titan_disp.data.sources import DataSet, readings, shares_of, source_shares
from titan_disp.errors import ConfigError, Problems, RanksError, counted
from titan_disp.models.decoder import DispModel
from titan_disp.models.registry import args_of, find_model
from titan_disp.schedules import (
    Curve,
    coeff_curve,
    learning_rate,
)
from titan_disp.templates import templates
from titan_disp.text import estimated_duration

MAX_NODES = 1024  # largest number of nodes that is tried
NOTICED = 0.1  # a plan warns if communication or checkpoints take a larger part
LONG = 3600.0  # a plan warns of more seconds between two checkpoints
GATHERED = 20e6  # a plan warns if rank 0 gathers more bytes in a save


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
    """The size of a model, and its cost in one step.

    Attributes:
        parameters: number of parameters; a tied embedding counts once.
        parameters_non_embedding: without the output and the embeddings of tokens and
            positions.
        flops: of forward and backward, without recomputation.
        dispersion_flops: further FLOPs of dispersion.
        dispersion_bytes: bytes that dispersion reads and writes outside of its matrix
            products.
    """

    parameters: int
    parameters_non_embedding: int
    flops: float
    dispersion_flops: float
    dispersion_bytes: float


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run.

    Attributes:
        size: bytes of a full checkpoint, without the few numbers of streams and
            schedules.
        parts: entries in the .metadata of a checkpoint. Rank 0 gathers the plan of each
            entry in every save.
        saved: how many checkpoints are saved.
        kept: how many are left at the end of the run.
        disk: most bytes at any time. This is one checkpoint more than are kept, because
            the oldest is deleted after the newest is complete.
        interval_seconds: time between two checkpoints; 0 without checkpoints.
        seconds: time to write a checkpoint at the machine's storage_bandwidth.
            Asynchronous modes hide most of this time.
    """

    size: int
    parts: int
    saved: int
    kept: int
    disk: int
    interval_seconds: float
    seconds: float

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the plans that rank 0 gathers in every save."""
        return self.parts * cost.PLANNED_BYTES

    @property
    def metadata_bytes(self) -> int:
        """Bytes of .metadata."""
        return self.parts * cost.METADATA_BYTES


@dataclass(frozen=True)
class Time:
    """The time of a step, and of all steps.

    Attributes:
        computing_seconds: time of a step's products at the machine's ``mfu`` of the bf16
            peak, and of reading and writing ``dispersion_bytes``.
        within_bytes: bytes that a GPU sends in a step to other GPUs of its node
            (``traffic``).
        between_bytes: bytes that a GPU sends in a step to other nodes.
        within_seconds, between_seconds: time to send these bytes.
        exposed_seconds: lower bound of the communication that computing cannot hide.
        step_seconds: computing and exposed communication.
        tokens_per_second_per_gpu: throughput.
        days: time of all steps, without start-ups, checkpoints, validation and
            measurements.
        days_without_dispersion: the same with dispersion off.
        days_fp32_dispersion: the same with dispersion's products at the fp32 peak, as
            for fp32 activations and l2_repel.
    """

    computing_seconds: float
    within_bytes: float
    between_bytes: float
    within_seconds: float
    between_seconds: float
    exposed_seconds: float
    step_seconds: float
    tokens_per_second_per_gpu: float
    days: float
    days_without_dispersion: float
    days_fp32_dispersion: float


@dataclass(frozen=True)
class Schedule:
    """A learning rate or a λ over the run, in its first step, at its peak, and in its
    last step. The peak has the largest absolute value.
    """

    first: float
    peak: float
    peak_step: int
    last: float

    @classmethod
    def of_curve(cls, values: Curve) -> "Schedule":
        return cls(values.first, values.peak, values.peak_step, values.last)

    def __str__(self) -> str:
        return (
            f"{self.first:.3g} in step 1, {self.peak:.3g} at its peak in step "
            f"{self.peak_step:,}, {self.last:.3g} in the last step"
        )


@dataclass(frozen=True)
class Resume:
    """What a resume in the middle of an epoch reads to reach its data positions.

    Attributes:
        total_bytes: stored bytes that all data-parallel ranks together read.
        rank_bytes: stored bytes that the rank with the most bytes reads.
        seconds: time that the slowest rank needs, if storage is fast enough.
    """

    total_bytes: int
    rank_bytes: int
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """The part of a plan that follows from a config and a machine alone."""

    mesh: Mesh
    batch: Batch
    model: Model
    memory: cost.Memory  # of a GPU at the peak
    time: Time


@dataclass(frozen=True)
class Plan(Prediction):
    """The prediction for a run; ``dataclasses.asdict`` turns it into JSON values.

    Attributes:
        config: path of the file.
        machine: the machine, with all of its bandwidths in GB/s.
        learning_rate: optimizer.lr with its schedule.
        coeff: λ, or None if dispersion is off.
        checkpoints: the checkpoints of the whole run.
        sources: the shares of several sources of data.
        unseen: for each local source, the approximate fraction of its text that an
            epoch does not read.
        resume: for each local source, what a resume in the middle of an epoch reads.
        node_counts: numbers of nodes that are possible, up to MAX_NODES, with the same
            number of GPUs per node.
        warnings: whole sentences.
    """

    config: str
    machine: Machine
    learning_rate: Schedule
    coeff: Schedule | None
    checkpoints: Checkpoints
    sources: list[Share]
    unseen: dict[str, float]
    resume: dict[str, Resume]
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

    For each number, two meshes are tried, and the first mesh that passes counts. One is
    the config's mesh. The other has the config's shard degree, and as many replicas as
    the ranks allow. (With a replicate degree of −1, only the config's mesh is tried.) If
    a replica fits into a node, the other mesh is tried first.
    """
    steps = job_config.training.steps
    p = job_config.parallelism
    adapts = p.data_parallel_replicate_degree == -1
    as_it_is = (p.data_parallel_replicate_degree, p.data_parallel_shard_degree)
    replica = shard * p.context_parallel_degree * p.tensor_parallel_degree
    trial = copy.deepcopy(job_config)
    resolve_tables(trial)
    mesh = trial.parallelism
    admitted = []
    for nodes in range(1, MAX_NODES + 1):
        world = nodes * gpus_per_node
        degrees = [as_it_is]
        if world % replica == 0 and not adapts:
            degrees.append((world // replica, shard))
        if replica <= gpus_per_node:
            degrees.reverse()
        for replicate_degree, shard_degree in degrees:
            mesh.data_parallel_replicate_degree = replicate_degree
            mesh.data_parallel_shard_degree = shard_degree
            # An earlier check may have set the steps from the token budget.
            trial.training.steps = steps
            if not fits_ranks(
                trial, world
            ):  # the fastest check, which fails most often
                continue
            try:
                check_config(trial, world)
            except ConfigError:
                continue
            admitted.append(NodeCount(nodes, -1 if adapts else replicate_degree))
            break
    return admitted


def measured_files(
    job_config: JobConfig, listed: Sequence[tuple[DataSet, list[DataFile]]]
) -> dict[str, list[DataFile]]:
    """Return {name of a local source: its files, with their densities}. The name is "" if
    there is only one source.
    """
    options = stream_options(job_config)
    files_of = {}
    for data, files in listed:
        if not files or data.key == "validation":
            continue
        # An index of blocks may need too much memory, and an index of token ids needs a
        # tokenizer. A source whose files cannot be indexed is left out.
        with contextlib.suppress(ConfigError):
            files_of[data.source] = with_densities(files, options)
    return files_of


# CPU seconds to skip a gigabyte of stored bytes, on one core of a CPU of 2024. Measured
# with C4's gzip files, and with web text in the other formats.
SECONDS_PER_GB = {".gz": 5.9, ".zst": 4.0, ".parquet": 10.0}
SECONDS_PER_GB_PLAIN = 1.0


def resumes(
    files: Mapping[str, list[DataFile]], job_config: JobConfig, ranks: int
) -> dict[str, Resume]:
    """Return {name of a source: what a resume at 50 % of an epoch reads of it}, on
    ``ranks`` data-parallel ranks. ``files``: the result of ``measured_files``.
    """
    options = stream_options(job_config)
    return {
        share.name: resume_of(
            files[share.name],
            share,
            seed=options.seed,
            slots_per_rank=share.total // ranks,
            threads=options.tokenizer_threads,
        )
        for share in shares_of(files, job_config, ranks)
    }


def resume_of(
    files: list[DataFile], share: Share, seed: int, slots_per_rank: int, threads: int
) -> Resume:
    """Return what a resume at 50 % of an epoch reads of a source.

    Each rank has ``slots_per_rank`` of the source's slots, and reads as many files at
    once as it has ``threads``.
    """
    assignment = Assignment(files, one_share(share.slots), seed)
    total = 0
    largest = 0
    seconds = 0.0
    for slots in assignment.slots_of_ranks(slots_per_rank):
        positions = [Position.within_epoch(slot, assignment, 0.5) for slot in slots]
        read = bytes_before(positions, files)
        total += read.total()
        largest = max(largest, read.total())
        of_files = [_seconds(files[file], size) for file, size in read.items()]
        seconds = max([seconds, sum(of_files) / threads, *of_files])
    return Resume(total, largest, seconds)


def _seconds(file: DataFile, size: int) -> float:
    """Return the CPU seconds to skip ``size`` stored bytes of a file."""
    suffix = os.path.splitext(file.name)[1]
    return size / 1e9 * SECONDS_PER_GB.get(suffix, SECONDS_PER_GB_PLAIN)


def find_machine(machine: Machine) -> Machine:
    """Return the machine, with its missing numbers taken from its GPU.

    Raises ConfigError if a number of the machine is out of range.
    """
    for name in ("gpu_memory", "gpu_flops"):
        number = getattr(machine, name)
        if number is not None and not number > 0:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {number:g}, expected a number > 0"
            )
    memory = machine.gpu_memory
    flops = machine.gpu_flops
    if not machine.gpu and memory and flops:
        machine = replace(machine, gpu=f"GPU ({memory:g} GB, {flops:g} TFLOP/s)")
    gpu = cost.find_gpu(machine)
    check_least(machine, nodes=1, gpus_per_node=1)
    if not 0 < machine.mfu <= 1:
        raise ConfigError(f"mfu is {machine.mfu}, expected a number in (0, 1]")
    bandwidths: dict[str, Any] = {
        "node_bandwidth": gpu.node_bandwidth / 1e9,
        "network_bandwidth": gpu.network_bandwidth / 1e9,
        "storage_bandwidth": machine.storage_bandwidth,
    }
    for name in bandwidths:
        asked = getattr(machine, name)
        if asked is not None:
            bandwidths[name] = asked
        if not bandwidths[name] > 0:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {bandwidths[name]:g} GB/s, expected a "
                "number > 0"
            )
    return replace(
        machine,
        gpu=cost.gpu_name(machine.gpu),
        gpu_memory=gpu.memory / 1e9,
        gpu_flops=gpu.bf16_flops / 1e12,
        **bandwidths,
    )


def make_plan(
    job_config: JobConfig,
    machine: Machine,
    strict: bool = False,
    missing: Problems | None = None,
) -> Plan:
    """Return the plan of a config, which is not changed, on a machine.

    ``missing`` collects the errors about missing data or a missing tokenizer, which the
    plan has as warnings. Raises ConfigError if the run would fail at its start, or a
    number of the machine is out of range. With ``strict``, missing data or a missing
    tokenizer is an error, too, and the message has all problems.
    """
    machine = find_machine(machine)
    unchecked = job_config
    job_config = copy.deepcopy(job_config)
    world = machine.nodes * machine.gpus_per_node
    asked = copy.copy(job_config)
    asked.parallelism = unchecked.parallelism
    problems = Problems(collect=True)
    problems.pass_(check_config, job_config, world, problems)
    end = ""
    errors = list(problems.errors.values())
    if not strict:
        errors = errors[:1]
    if any(isinstance(error, RanksError) for error in errors):
        end = _asked_size(asked, machine)
    if errors and not strict:
        raise ConfigError(". ".join(filter(None, [str(errors[0]), end])))
    if strict:
        missing = problems
    elif missing is None:
        missing = Problems(collect=True)
    listed: list[tuple[DataSet, list[DataFile]]] = []
    of_data: list[str] = []
    problems.pass_(lambda: listed.extend(listed_inputs(job_config, missing, of_data)))
    problems.refuse(end)
    module = meta_model(job_config)
    prediction = predict(job_config, module, machine)
    checkpoints = _checkpoints(job_config, module, machine, prediction)
    mesh = prediction.mesh
    slots = slot_count(job_config, mesh.data_parallel)
    sources = source_shares(job_config, slots)
    files_of = measured_files(job_config, listed)
    local = readings(files_of, job_config, mesh.data_parallel)
    coeff = None
    if job_config.dispersion.enabled:
        coeff = Schedule.of_curve(coeff_curve(job_config))
    return Plan(
        **vars(prediction),
        config=job_config.job.config_file or "",
        machine=machine,
        learning_rate=Schedule.of_curve(learning_rate(job_config)),
        coeff=coeff,
        checkpoints=checkpoints,
        sources=sources,
        unseen={reading.source: reading.unseen for reading in local},
        resume=resumes(files_of, job_config, mesh.data_parallel),
        node_counts=admitted_node_counts(unchecked, machine.gpus_per_node, mesh.shard),
        warnings=[
            *missing.messages,
            *dict.fromkeys(of_data),
            *config_warnings(job_config),
            *(warning for reading in local for warning in reading.warnings()),
            *hub_warnings(job_config, world, machine.nodes),
            *_warnings(machine, prediction, checkpoints, sources),
        ],
    )


def _asked_size(job_config: JobConfig, machine: Machine) -> str:
    """Return a sentence about the number of nodes that the user asked for, and about
    numbers that would work.

    ``job_config`` has the degrees of parallelism that are in the config file.
    """
    hint = nearest_hint(
        job_config, machine.nodes, noun="node", ranks_each=machine.gpus_per_node
    )
    return (
        f"This is for {counted(machine.nodes, 'node')} of "
        f"{counted(machine.gpus_per_node, 'GPU')} (--nodes, --gpus-per-node){hint}"
    )


def _checkpoints(
    job_config: JobConfig,
    module: DispModel,
    machine: Machine,
    prediction: Prediction,
) -> Checkpoints:
    size = cost.checkpoint_bytes(job_config, module)
    saved, kept, on_disk = cost.checkpoint_counts(job_config)
    interval = job_config.checkpoint.interval * prediction.time.step_seconds
    mesh = prediction.mesh
    return Checkpoints(
        size=size,
        parts=cost.checkpoint_parts(module, mesh.shard * mesh.context * mesh.tensor),
        saved=saved,
        kept=kept,
        disk=on_disk * size,
        interval_seconds=interval if saved else 0.0,
        seconds=size / (machine.storage_bandwidth * 1e9),
    )


def _warnings(
    machine: Machine,
    prediction: Prediction,
    checkpoints: Checkpoints,
    sources: list[Share],
) -> Iterator[str]:
    if guess := cost.guessed_gpu(machine):
        yield guess
    memory = prediction.memory.total
    available = cost.find_gpu(machine).memory
    if memory > available:
        yield (
            f"a GPU would need about {memory / 1e9:.1f} GB, but {machine.gpu} has "
            f"{available / 1e9:.0f} GB: lower training.local_batch_size, or set "
            'activation_checkpoint.mode = "full", a larger data_parallel_shard_degree '
            "or tensor_parallel_degree"
        )
    if (coarse := far_from_weights(sources)) is not None:
        yield coarse
    time = prediction.time
    if time.exposed_seconds > NOTICED * time.step_seconds:
        part = time.exposed_seconds / time.step_seconds
        yield (
            f"communication that computing cannot hide takes {part:.0%} of a step: use "
            "fewer nodes, or raise training.local_batch_size, which splits the same "
            "batch into fewer microbatches"
        )
    interval = checkpoints.interval_seconds
    if checkpoints.saved and checkpoints.seconds > max(NOTICED * interval, 0.1):
        yield (
            f"a checkpoint is saved every {interval:.1f} s and takes about "
            f"{checkpoints.seconds:.1f} s to write: raise checkpoint.interval"
        )
    if interval > LONG:
        yield (
            f"a crash loses up to {estimated_duration(interval)} of training, the time "
            "between two checkpoints: 20 minutes are checkpoint.interval = "
            f"{round(1200 / time.step_seconds):,}"
        )
    if checkpoints.saved and checkpoints.gathered_bytes > GATHERED:
        yield (
            f"a checkpoint has {checkpoints.parts:,} parts. In every save, rank 0 gathers "
            f"{_size(checkpoints.gathered_bytes)} of plans, which slows training, and at "
            "a resume, every rank parses all parts: lower data_parallel_shard_degree, "
            "and raise data_parallel_replicate_degree by the same factor"
        )


def predict(job_config: JobConfig, module: DispModel, machine: Machine) -> Prediction:
    """Return what follows from a checked config and a result of ``find_machine``.

    ``module`` is the config's model on the meta device.
    """
    p = job_config.parallelism
    t = job_config.training
    world = machine.nodes * machine.gpus_per_node
    replicas = (
        p.data_parallel_replicate_degree
        * p.context_parallel_degree
        * p.tensor_parallel_degree
    )
    mesh = Mesh(
        replicate=p.data_parallel_replicate_degree,
        shard=world // replicas,
        context=p.context_parallel_degree,
        tensor=p.tensor_parallel_degree,
        data_parallel=data_parallel_degree(job_config, world),
    )
    sequences = global_batch_size(job_config, mesh.data_parallel)
    step_tokens = tokens_per_step(job_config, mesh.data_parallel)
    batch = Batch(
        seq_len=t.seq_len,
        local_batch_size=t.local_batch_size,
        global_batch_size=sequences,
        accumulation_steps=sequences // (t.local_batch_size * mesh.data_parallel),
        tokens_per_step=step_tokens,
        steps=t.steps,
        total_tokens=t.steps * step_tokens,
    )
    args = module.model_args
    parameters, flops_per_token = args.get_nparams_and_flops(module, t.seq_len)
    embeddings = nn.ModuleList([*module.embeddings, module.output])
    dispersion = cost.dispersion_cost(job_config, args)
    model = Model(
        parameters=parameters,
        # A tied weight is one parameter.
        parameters_non_embedding=parameters
        - sum(weight.numel() for weight in embeddings.parameters()),
        flops=float(flops_per_token * step_tokens),
        dispersion_flops=float(sequences * dispersion.flops),
        dispersion_bytes=float(sequences * dispersion.bytes),
    )
    return Prediction(
        mesh=mesh,
        batch=batch,
        model=model,
        memory=cost.estimate(
            job_config, module, mesh.shard * mesh.context, batch.accumulation_steps > 1
        ),
        time=_time(job_config, module, machine, model, batch),
    )


# The part of a GPU's memory bandwidth that dispersion gets. With this value,
# benchmarks/gpu_cost.py predicts what was measured on one H200 (docs/benchmarks.md).
BANDWIDTH_PART = 0.85


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
    bf16 = world * machine.mfu * gpu.bf16_flops  # FLOP/s of all GPUs
    fp32 = world * machine.mfu * gpu.fp32_flops

    def days(computing: float) -> float:
        seconds = computing + sent.exposed(computing, within, between)
        return batch.steps * seconds / 86400

    passes = model.dispersion_bytes / (world * BANDWIDTH_PART * gpu.memory_bandwidth)
    computing = (model.flops + model.dispersion_flops) / bf16 + passes
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
            model.flops / bf16 + model.dispersion_flops / fp32 + passes
        ),
    )


SHOWN = 24  # the plan's line of node counts has at most this many numbers


def _size(count: float) -> str:
    # GB is used from 0.01 GB on, so that the lines of a plan are easy to compare.
    if count >= 1e7:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.2f} MB"


def _days(days: float) -> str:
    minutes = days * 1440
    if minutes < 1:
        return "less than a minute"
    if minutes < 120:  # ``estimated_duration`` would show tenths
        return f"{minutes:.0f} minutes"
    return estimated_duration(days * 86400)


def _node_counts(counts: list[NodeCount]) -> str:
    numbers = [str(count.nodes) for count in counts]
    degrees = {count.replicate for count in counts}
    if all(count.replicate == count.nodes for count in counts):
        degree = "= nodes"
    elif len(degrees) == 1:
        degree = f"= {degrees.pop()}"
    else:
        degree = "in brackets"
        numbers = [f"{count.nodes} ({count.replicate})" for count in counts]
    if len(numbers) > SHOWN:
        numbers[SHOWN - 1 : -1] = ["…"]
    nodes = "node" if numbers == ["1"] else "nodes"
    return (
        f"{', '.join(numbers)} {nodes}; data_parallel_replicate_degree {degree} "
        f"(tried up to {MAX_NODES})"
    )


def render(plan: Plan) -> str:
    """Return the plan as about 35 lines of text: plan.txt.j2."""
    filters = {"size": _size, "duration": estimated_duration, "days": _days}
    template = templates(__file__, **filters).get_template("plan.txt.j2")
    counts = _node_counts(plan.node_counts)
    text = template.render(plan=plan, node_counts=counts, counted=counted, vars=vars)
    return text.rstrip("\n")
