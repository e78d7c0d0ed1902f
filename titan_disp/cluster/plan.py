"""This module predicts a run's mesh, batches, bytes, FLOPs and days. It needs no data, tokenizer or GPU."""

import copy
from dataclasses import dataclass

import torch
from torchtitan.config import JobConfig

from titan_disp.cluster.cost import GPUS, Memory, checkpoint_bytes, checkpoint_counts, estimate, find_gpu, traffic
from titan_disp.cluster.job_check import hub_warnings
from titan_disp.config.batch import data_parallel_degree, global_batch_size, slot_count, tokens_per_step
from titan_disp.config.checks import check_config, tokenizer_of
from titan_disp.data.assignment import Share
from titan_disp.data.options import stream_options
from titan_disp.data.sources import check_content, data_sets, source_shares
from titan_disp.data.tokenizer import find_tokenizer
from titan_disp.errors import ConfigError, counted
from titan_disp.models.arguments import DispModelArgs
from titan_disp.models.decoder import DispModel
from titan_disp.models.registry import args_of, find_model

MAX_NODES = 1024  # largest number of nodes that is tried
STORAGE = 2e9  # bytes/s that all ranks together write: our guess for a modest shared file system
# A plan warns if communication or checkpoints take more than this fraction of the time, or a source's share is off by
# more.
NOTICED = 0.1


@dataclass(frozen=True)
class NodeCount:
    """Hold a possible number of nodes, and its data_parallel_replicate_degree. The degree −1 adapts to any number."""

    nodes: int
    replicate: int


@dataclass(frozen=True)
class Plan:
    """Hold the prediction for a run. ``dataclasses.asdict`` turns it into JSON values.

    FLOPs are those of forward and backward, without recomputation.

    Attributes:
        parameters: number of parameters; a tied embedding counts once.
        parameters_non_embedding: without the output and the embeddings of tokens and positions.
        memory_total: sum of ``memory``, for one GPU.
        checkpoint_bytes: size of one full checkpoint, without the few numbers of streams and schedules.
        checkpoints: checkpoints that the run saves.
        checkpoints_kept: checkpoints that are left at its end.
        checkpoint_disk_bytes: the most at any time. This is one checkpoint more than are kept, because the oldest is
            deleted after the newest is complete.
        flops_per_step, total_flops: FLOPs of the model.
        dispersion_flops_per_step, total_dispersion_flops: FLOPs that dispersion adds.
        computing_seconds: time of a step's products, with dispersion, at ``mfu`` of the bf16 peak.
        within_bytes, between_bytes: bytes that one GPU sends in a step to others of its node, and to other nodes (see
            ``traffic``).
        within_seconds, between_seconds: time of these at node_bandwidth and network_bandwidth, in bytes/s.
        exposed_seconds: communication time that computing cannot hide, a lower bound.
        step_seconds: computing and exposed communication.
        checkpoint_interval_seconds: time from one checkpoint to the next; 0 without checkpoints.
        checkpoint_seconds: time to write one at storage_bandwidth, in bytes/s. Asynchronous modes hide most of it.
        days: time of all steps, without start-ups, checkpoints, validation and measurements.
        days_fp32_dispersion: the same, with dispersion's products at the fp32 peak. These are in fp32 if the
            activations are, and for l2_repel.
        sources: share of the tokens of each of [[stream.sources]].
        node_counts: possible numbers of nodes up to MAX_NODES, with the same number of GPUs per node.
    """

    config: str
    nodes: int
    gpus_per_node: int
    gpu: str
    mfu: float
    replicate: int
    shard: int
    context_parallel: int
    tensor_parallel: int
    seq_len: int
    local_batch_size: int
    global_batch_size: int
    data_parallel: int
    accumulation_steps: int
    tokens_per_step: int
    steps: int
    total_tokens: int
    parameters: int
    parameters_non_embedding: int
    memory: Memory
    memory_total: int
    gpu_memory: float
    checkpoint_bytes: int
    checkpoints: int
    checkpoints_kept: int
    checkpoint_disk_bytes: int
    flops_per_step: float
    dispersion_flops_per_step: float
    total_flops: float
    total_dispersion_flops: float
    computing_seconds: float
    within_bytes: float
    between_bytes: float
    node_bandwidth: float
    network_bandwidth: float
    within_seconds: float
    between_seconds: float
    exposed_seconds: float
    step_seconds: float
    tokens_per_second_per_gpu: float
    checkpoint_interval_seconds: float
    checkpoint_seconds: float
    storage_bandwidth: float
    days: float
    days_without_dispersion: float
    days_fp32_dispersion: float
    sources: list[Share]
    node_counts: list[NodeCount]
    warnings: list[str]


def meta_model(job_config: JobConfig) -> DispModel:
    """Build the config's model on the meta device, without storage."""
    args = args_of(job_config)
    args.update_from_config(job_config)
    with torch.device("meta"):
        return find_model(job_config.model.name).model_cls(args)


def dispersion_flops(args: DispModelArgs, seq_len: int, sequence_shards: int) -> int:
    """Count the FLOPs of dispersion for one sequence. All of them are in the forward pass: backward only scales.

    The cosines take 2N²F FLOPs and V another 2N²F. If the sequence is not sharded, each tile above the diagonal serves
    both sides, which saves half of the cosines. In a sharded sequence, only a rank's own tokens do; this is ignored.
    """
    return len(args.activations) * (3 if sequence_shards == 1 else 4) * seq_len**2 * args.dim


def admitted_node_counts(job_config: JobConfig, gpus_per_node: int, shard: int) -> list[NodeCount]:
    """Return the numbers of nodes for which ``check_config`` passes.

    Two meshes are tried for each number: as many replicas of the same shard degree as fit, and the config as it is. The
    replicas come first if a replica fits into a node; otherwise the config comes first.
    """
    steps, trial = job_config.training.steps, copy.deepcopy(job_config)
    p, given = trial.parallelism, job_config.parallelism
    inside = shard * p.context_parallel_degree * p.tensor_parallel_degree
    admitted = []
    for nodes in range(1, MAX_NODES + 1):
        world = nodes * gpus_per_node
        resolves = given.data_parallel_replicate_degree == -1
        meshes = [(world // inside, shard)] if world % inside == 0 and not resolves else []
        meshes.append((given.data_parallel_replicate_degree, given.data_parallel_shard_degree))
        if inside > gpus_per_node:
            meshes.reverse()
        for p.data_parallel_replicate_degree, p.data_parallel_shard_degree in meshes:
            trial.training.steps = steps  # an earlier check may have set it from the token budget
            try:
                check_config(trial, world)
            except ConfigError:
                continue
            admitted.append(NodeCount(nodes, -1 if resolves else p.data_parallel_replicate_degree))
            break
    return admitted


def missing_inputs(job_config: JobConfig, strict: bool) -> list[str]:
    """Return messages about data and a tokenizer that the config names and the disk does not have.

    Raises:
        ConfigError: The tokenizer exists but is unreadable or too large for the model, a data set's name is unknown, or
            the documents are not what the config says. With ``strict``, also if anything is missing.
    """
    missing, tokenizer = [], None
    try:
        find_tokenizer(job_config.model.hf_assets_path)
    except ConfigError as error:
        if strict:
            raise
        missing.append(str(error))
    else:
        tokenizer = tokenizer_of(job_config)
    for one in data_sets(job_config):
        one.check_name()
        try:
            files = one.check()
        except ConfigError as error:
            if strict:
                raise
            missing.append(str(error))
        else:
            check_content(files, stream_options(job_config, tokenizer=tokenizer), one.key)
    return missing


def make_plan(
    job_config: JobConfig,
    nodes: int,
    gpus_per_node: int,
    gpu: str = "H100",
    mfu: float = 0.4,
    *,
    strict: bool = False,
    node_bandwidth: float | None = None,
    network_bandwidth: float | None = None,
    storage_bandwidth: float = STORAGE,
) -> Plan:
    """Plan a config on ``nodes`` × ``gpus_per_node`` GPUs.

    Args:
        job_config: from ``load_config``; it is not changed.
        nodes: number of nodes.
        gpus_per_node: number of GPUs per node.
        gpu: a name in ``hardware.GPUS``.
        mfu: assumed fraction of the bf16 peak for all computing, including dispersion.
        strict: whether a missing tokenizer or missing data is an error rather than a warning.
        node_bandwidth: bytes/s that one GPU sends to others of its node; None takes the value of ``hardware.GPUS``.
        network_bandwidth: bytes/s that one GPU sends to other nodes; None takes the value of ``hardware.GPUS``.
        storage_bandwidth: bytes/s that all GPUs together write.

    Raises:
        ConfigError: The run would fail at its start, or an argument is out of range.
    """
    if nodes < 1 or gpus_per_node < 1:
        raise ConfigError(f"nodes is {nodes} and gpus_per_node is {gpus_per_node}, expected at least 1 of both")
    if not 0 < mfu <= 1:
        raise ConfigError(f"mfu is {mfu}, expected a number in (0, 1]")
    device, given = find_gpu(gpu), job_config
    node_bandwidth = device.node_bandwidth if node_bandwidth is None else node_bandwidth
    network_bandwidth = device.network_bandwidth if network_bandwidth is None else network_bandwidth
    for name, value in (("node", node_bandwidth), ("network", network_bandwidth), ("storage", storage_bandwidth)):
        if not value > 0:
            raise ConfigError(f"{name} bandwidth is {value / 1e9:g} GB/s, expected a number > 0")
    job_config = copy.deepcopy(given)
    world = nodes * gpus_per_node
    check_config(job_config, world)
    warnings = missing_inputs(job_config, strict) + hub_warnings(job_config, world, nodes)

    p, t = job_config.parallelism, job_config.training
    cp, tp, replicate = p.context_parallel_degree, p.tensor_parallel_degree, p.data_parallel_replicate_degree
    shard = world // (replicate * cp * tp)
    dp = data_parallel_degree(job_config, world)
    batch, step_tokens = global_batch_size(job_config, dp), tokens_per_step(job_config, dp)
    model = meta_model(job_config)
    args = model.model_args
    parameters, flops_per_token = args.get_nparams_and_flops(model, t.seq_len)
    embeddings = {id(w): w.numel() for module in (*model.embeddings, model.output) for w in module.parameters()}
    memory = estimate(job_config, model, shard * cp)
    if memory.total > device.memory:
        warnings.append(
            f"a GPU would need about {memory.total / 1e9:.1f} GB, but {gpu} has {device.memory / 1e9:.0f} GB: lower "
            'training.local_batch_size, or set activation_checkpoint.mode = "full", a larger data_parallel_shard_degree or '
            "tensor_parallel_degree"
        )
    sources = source_shares(job_config, slot_count(job_config, dp))
    if coarse := [str(share) for share in sources if abs(share.tokens - share.asked) > NOTICED * share.asked]:
        warnings.append(
            f"there are too few slots to follow the weights of stream.sources: {'; '.join(coarse)}. Raise "
            "training.global_batch_size (and stream.slots, if it is set)"
        )
    saved, kept, on_disk = checkpoint_counts(job_config)
    model_flops = float(flops_per_token * step_tokens)
    added_flops = float(batch * dispersion_flops(args, t.seq_len, cp * tp))
    sent = traffic(job_config, model, gpus_per_node, world)

    def exposed(computing: float) -> float:
        return sent.exposed(computing, node_bandwidth, network_bandwidth)

    def days(computing: float) -> float:
        return t.steps * (computing + exposed(computing)) / 86400

    bf16, fp32 = (world * mfu * peak for peak in (device.bf16_flops, device.fp32_flops))
    computing = (model_flops + added_flops) / bf16
    step = computing + exposed(computing)
    checkpoint = checkpoint_bytes(job_config, model)
    between_checkpoints = job_config.checkpoint.interval * step if saved else 0.0
    writing = checkpoint / storage_bandwidth
    if exposed(computing) > NOTICED * step:
        warnings.append(
            f"communication that computing cannot hide takes {exposed(computing) / step:.0%} of a step: use fewer nodes, or "
            "raise training.local_batch_size, which splits the same batch into fewer microbatches"
        )
    if saved and writing > NOTICED * between_checkpoints:
        warnings.append(
            f"a checkpoint is saved every {between_checkpoints:.1f} s and takes about {writing:.1f} s to write: raise "
            "checkpoint.interval"
        )
    return Plan(
        config=job_config.job.config_file or "",
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu=gpu,
        mfu=mfu,
        replicate=replicate,
        shard=shard,
        context_parallel=cp,
        tensor_parallel=tp,
        seq_len=t.seq_len,
        local_batch_size=t.local_batch_size,
        global_batch_size=batch,
        data_parallel=dp,
        accumulation_steps=batch // (t.local_batch_size * dp),
        tokens_per_step=step_tokens,
        steps=t.steps,
        total_tokens=t.steps * step_tokens,
        parameters=parameters,
        parameters_non_embedding=parameters - sum(embeddings.values()),
        memory=memory,
        memory_total=memory.total,
        gpu_memory=device.memory,
        checkpoint_bytes=checkpoint,
        checkpoints=saved,
        checkpoints_kept=kept,
        checkpoint_disk_bytes=on_disk * checkpoint,
        flops_per_step=model_flops,
        dispersion_flops_per_step=added_flops,
        total_flops=model_flops * t.steps,
        total_dispersion_flops=added_flops * t.steps,
        computing_seconds=computing,
        within_bytes=sent.total.within,
        between_bytes=sent.total.between,
        node_bandwidth=node_bandwidth,
        network_bandwidth=network_bandwidth,
        within_seconds=sent.total.within / node_bandwidth,
        between_seconds=sent.total.between / network_bandwidth,
        exposed_seconds=exposed(computing),
        step_seconds=step,
        tokens_per_second_per_gpu=step_tokens / step / world,
        checkpoint_interval_seconds=between_checkpoints,
        checkpoint_seconds=writing,
        storage_bandwidth=storage_bandwidth,
        days=days(computing),
        days_without_dispersion=days(model_flops / bf16),
        days_fp32_dispersion=days(model_flops / bf16 + added_flops / fp32),
        sources=sources,
        node_counts=admitted_node_counts(given, gpus_per_node, shard),
        warnings=warnings,
    )


# This module prints a plan for people.


_SHOWN = 24  # most node counts on the line


def _duration(days: float) -> str:
    if days >= 2:
        return f"{days:.1f} days"
    return f"{days * 24:.1f} hours" if days * 24 >= 2 else f"{days * 1440:.0f} minutes"


def _seconds(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _size(count: float) -> str:
    """Format a number of bytes, with 1 GB = 1e9 bytes."""
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"


def _node_counts(plan: Plan) -> str:
    counts = plan.node_counts
    degrees = {c.replicate for c in counts}
    if all(c.replicate == c.nodes for c in counts):
        degree = "= nodes"
    else:
        degree = f"= {degrees.pop()}" if len(degrees) == 1 else "in brackets"
    shown = [f"{c.nodes} ({c.replicate})" if degree == "in brackets" else str(c.nodes) for c in counts]
    if len(shown) > _SHOWN:
        shown[_SHOWN - 1 : -1] = ["…"]
    return f"{', '.join(shown)}; data_parallel_replicate_degree {degree} (tried up to {MAX_NODES})"


def render(plan: Plan) -> str:
    """Render the plan as about 35 lines of text. Warnings come last."""
    m, gpu = plan.memory, GPUS[plan.gpu]
    world = plan.nodes * plan.gpus_per_node
    share = plan.dispersion_flops_per_step / plan.flops_per_step
    rows = [
        ("plan", plan.config),
        ("machine", f"{counted(plan.nodes, 'node')} × {plan.gpus_per_node} {plan.gpu} = {counted(world, 'GPU')}"),
        (
            "mesh",
            f"replicate {plan.replicate} × shard {plan.shard} × context {plan.context_parallel} × "
            f"tensor {plan.tensor_parallel}; {counted(plan.data_parallel, 'data-parallel rank')}",
        ),
        (
            "batch",
            f"{counted(plan.global_batch_size, 'sequence')} of {plan.seq_len:,} tokens = {plan.local_batch_size} × "
            f"{counted(plan.data_parallel, 'rank')} × {counted(plan.accumulation_steps, 'accumulation step')}",
        ),
        (
            "steps",
            f"{plan.steps:,} of {plan.tokens_per_step:,} tokens = {plan.total_tokens:,} tokens",
        ),
        *(("sources" if i == 0 else "", str(share)) for i, share in enumerate(plan.sources)),
        ("parameters", f"{plan.parameters:,}; {plan.parameters_non_embedding:,} without embedding and output"),
        (
            "memory",
            f"{_size(plan.memory_total)} of {plan.gpu_memory / 1e9:.0f} GB per GPU, estimated (1 GB = 1e9 bytes)",
        ),
        ("  weights", _size(m.weights)),
        ("  gradients", _size(m.gradients)),
        ("  optimizer", _size(m.optimizer)),
        ("  unsharded", f"{_size(m.unsharded)} of gathered weights and their gradients"),
        ("  activations", _size(m.activations)),
        ("  dispersion", f"{_size(m.dispersion)} of saved gradients"),
        ("  logits", _size(m.logits)),
        ("checkpoint", _size(plan.checkpoint_bytes)),
        (
            "  over the run",
            f"{plan.checkpoints} saved, {plan.checkpoints_kept} kept; at most {_size(plan.checkpoint_disk_bytes)} on disk",
        ),
        (
            "  every",
            f"{_seconds(plan.checkpoint_interval_seconds)}; written in {_seconds(plan.checkpoint_seconds)} at "
            f"{plan.storage_bandwidth / 1e9:g} GB/s (--storage-bandwidth)"
            if plan.checkpoints
            else "never",
        ),
        (
            "FLOPs",
            f"{plan.flops_per_step:.3e} per step, {plan.total_flops:.3e} in total; dispersion adds "
            f"{plan.dispersion_flops_per_step:.3e} and {plan.total_dispersion_flops:.3e} ({share:.1%})",
        ),
        (
            "step",
            f"{_seconds(plan.step_seconds)}: {_seconds(plan.computing_seconds)} of computing at {plan.mfu:.0%} of the bf16 "
            f"peak, {gpu.bf16_flops / 1e12:g} TFLOP/s per GPU, plus communication",
        ),
        (
            "  within nodes",
            f"{_size(plan.within_bytes)} sent per GPU, {_seconds(plan.within_seconds)} at "
            f"{plan.node_bandwidth / 1e9:g} GB/s (--node-bandwidth)",
        ),
        (
            "  between",
            f"{_size(plan.between_bytes)}, {_seconds(plan.between_seconds)} at {plan.network_bandwidth / 1e9:g} GB/s "
            "(--network-bandwidth)",
        ),
        ("  not hidden", f"{_seconds(plan.exposed_seconds)}, {plan.exposed_seconds / plan.step_seconds:.1%} of a step"),
        ("throughput", f"{plan.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"),
        ("time", f"{_duration(plan.days)} for all steps"),
    ]
    if share:
        rows += [
            ("  without", f"{_duration(plan.days_without_dispersion)} with dispersion off"),
            (
                "  fp32",
                f"{_duration(plan.days_fp32_dispersion)} if dispersion computes in fp32 (fp32 activations or l2_repel)",
            ),
        ]
    rows.append(("node counts", _node_counts(plan)))
    lines = [f"{name:<15} {text}" for name, text in rows]
    return "\n".join(lines + [f"warning: {warning}" for warning in plan.warnings])
