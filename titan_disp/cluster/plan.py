"""What a run will be, before it is queued: mesh, batches, bytes, FLOPs, days. Needs no data, tokenizer or GPU."""

import copy
from dataclasses import dataclass

import torch
from torchtitan.config import JobConfig

from titan_disp.batch import data_parallel_degree, global_batch_size, tokens_per_step
from titan_disp.checks import check_config
from titan_disp.cluster.hardware import find_gpu
from titan_disp.cluster.memory import Memory, checkpoint_bytes, checkpoint_counts, estimate
from titan_disp.data.shards import check_data, split_of
from titan_disp.data.tokenizer import find_tokenizer, load_tokenizer_for
from titan_disp.errors import ConfigError
from titan_disp.qwen3.flavors import Qwen3DispModelArgs, flavors
from titan_disp.qwen3.model import Qwen3DispModel

MAX_NODES = 1024  # of the node counts that are tried


@dataclass(frozen=True)
class NodeCount:
    """A number of nodes that the batch admits, and the data_parallel_replicate_degree that it needs; −1 serves any."""

    nodes: int
    replicate: int


@dataclass(frozen=True)
class Plan:
    """Bytes, FLOPs (forward and backward, without recomputation) and days. JSON-able by ``dataclasses.asdict``.

    Attributes:
        parameters: a tied embedding once. parameters_non_embedding: without embedding and output.
        memory_total: sum of ``memory``, for one GPU.
        checkpoint_bytes: of one full checkpoint, without the few numbers of streams and schedules.
        checkpoints: saved over the run. checkpoints_kept: of these, at its end.
        checkpoint_disk_bytes: the most at any time: one more than are kept, as the oldest goes after the newest is complete.
        flops_per_step, total_flops: the model's. dispersion_…: what dispersion adds.
        days: of computing at ``mfu``, dispersion included, all products counted at the bf16 peak.
        days_fp32_dispersion: the same with dispersion's products at the fp32 peak: of fp32 activations, and of l2_repel.
        node_counts: up to MAX_NODES, with the GPUs per node as they are.
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
    days: float
    days_without_dispersion: float
    days_fp32_dispersion: float
    node_counts: list[NodeCount]
    warnings: list[str]


def meta_model(job_config: JobConfig) -> Qwen3DispModel:
    """The model without storage."""
    args = flavors[job_config.model.flavor]
    args.update_from_config(job_config)
    with torch.device("meta"):
        return Qwen3DispModel(args)


def dispersion_flops(args: Qwen3DispModelArgs, seq_len: int, sequence_shards: int) -> int:
    """FLOPs of one sequence's dispersion, all of them in forward; backward only scales.

    2N²F for the cosines and 2N²F for V; unsharded, tiles above the diagonal serve both sides and save half of the cosines.
    Sharded, they do so among a rank's own tokens only, which is left out here.
    """
    return len(args.activations) * (3 if sequence_shards == 1 else 4) * seq_len**2 * args.dim


def admitted_node_counts(job_config: JobConfig, gpus_per_node: int, shard: int) -> list[NodeCount]:
    """Node counts for which ``check_config`` passes: with replicas of the same shard degree, where that stays within a node,
    or with the config as it is; the other way round where it does not."""
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
            trial.training.steps = steps  # the check before may have set it from the token budget
            try:
                check_config(trial, world)
            except ConfigError:
                continue
            admitted.append(NodeCount(nodes, -1 if resolves else p.data_parallel_replicate_degree))
            break
    return admitted


def missing_inputs(job_config: JobConfig, strict: bool) -> list[str]:
    """What the config names on disk and is not there.

    Raises:
        ConfigError: the tokenizer is there but unreadable or too large for the model, a data set of no such name; with
            ``strict``: anything is missing.
    """
    missing = []
    flavor = job_config.model.flavor
    try:
        find_tokenizer(job_config.model.hf_assets_path)
    except ConfigError as error:
        if strict:
            raise
        missing.append(str(error))
    else:
        load_tokenizer_for(flavor, flavors[flavor].vocab_size, job_config.model.hf_assets_path)
    data = {"training": (job_config.training.dataset, job_config.training.dataset_path)}
    if job_config.validation.enable:
        data["validation"] = (job_config.validation.dataset, job_config.validation.dataset_path)
    for key, (dataset, path) in data.items():
        split_of(dataset, key)
        try:
            check_data(dataset, path, key)
        except ConfigError as error:
            if strict:
                raise
            missing.append(str(error))
    return missing


def make_plan(
    job_config: JobConfig, nodes: int, gpus_per_node: int, gpu: str = "H100", mfu: float = 0.4, *, strict: bool = False
) -> Plan:
    """The plan of a config on ``nodes`` × ``gpus_per_node`` GPUs.

    Args:
        job_config: from ``load_config``; left as it is.
        gpu: a name in ``hardware.GPUS``.
        mfu: part of the bf16 peak that all of the computing, dispersion included, is taken to reach.
        strict: a missing tokenizer or missing data is an error rather than a warning.

    Raises:
        ConfigError: what would also fail at the start of the run.
    """
    if nodes < 1 or gpus_per_node < 1:
        raise ConfigError(f"{nodes} nodes of {gpus_per_node} GPUs: expected at least 1 of both")
    if not 0 < mfu <= 1:
        raise ConfigError(f"mfu is {mfu}, expected a number in (0, 1]")
    device, given = find_gpu(gpu), job_config
    job_config = copy.deepcopy(given)
    world = nodes * gpus_per_node
    check_config(job_config, world)
    warnings = missing_inputs(job_config, strict)

    p, t = job_config.parallelism, job_config.training
    cp, tp, replicate = p.context_parallel_degree, p.tensor_parallel_degree, p.data_parallel_replicate_degree
    shard = world // (replicate * cp * tp)
    dp = data_parallel_degree(job_config, world)
    batch, step_tokens = global_batch_size(job_config, dp), tokens_per_step(job_config, dp)
    model = meta_model(job_config)
    args = model.model_args
    parameters, flops_per_token = args.get_nparams_and_flops(model, t.seq_len)
    embeddings = {id(w): w.numel() for w in (model.tok_embeddings.weight, model.output.weight)}
    memory = estimate(job_config, model, shard * cp)
    if memory.total > device.memory:
        warnings.append(
            f"a GPU would need about {memory.total / 1e9:.1f} GB, but {gpu} has {device.memory / 1e9:.0f} GB: lower "
            'training.local_batch_size, or set activation_checkpoint.mode = "full", a larger data_parallel_shard_degree or '
            "tensor_parallel_degree"
        )
    saved, kept, on_disk = checkpoint_counts(job_config)
    model_flops = float(flops_per_token * step_tokens)
    added_flops = float(batch * dispersion_flops(args, t.seq_len, cp * tp))
    days = t.steps / (world * mfu * 86400)  # per FLOP of a step and FLOP/s of a peak
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
        checkpoint_bytes=checkpoint_bytes(job_config, model),
        checkpoints=saved,
        checkpoints_kept=kept,
        checkpoint_disk_bytes=on_disk * checkpoint_bytes(job_config, model),
        flops_per_step=model_flops,
        dispersion_flops_per_step=added_flops,
        total_flops=model_flops * t.steps,
        total_dispersion_flops=added_flops * t.steps,
        days=days * (model_flops + added_flops) / device.bf16_flops,
        days_without_dispersion=days * model_flops / device.bf16_flops,
        days_fp32_dispersion=days * (model_flops / device.bf16_flops + added_flops / device.fp32_flops),
        node_counts=admitted_node_counts(given, gpus_per_node, shard),
        warnings=warnings,
    )
