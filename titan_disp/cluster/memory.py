"""This module computes one GPU's peak memory in a step, and the size of checkpoints, from shapes alone.

The activations are counted as eager PyTorch saves them for backward, with flash attention and a fused norm. A compiled
block saves less, so the estimate errs on the safe side. tests/test_plan.py compares it with the live storages in a step
of the real model. It has not been compared with a GPU's memory yet.
"""

from dataclasses import dataclass

import torch
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig

from titan_disp.models.arguments import DispModelArgs
from titan_disp.models.model import DispModel


@dataclass(frozen=True)
class Memory:
    """Hold the bytes on one GPU. The terms do not all peak at the same moment, so their sum is an upper estimate.

    Attributes:
        weights, gradients, optimizer: the rank's shards; 0 with training.enable_cpu_offload.
        unsharded: weights gathered (or cast by autocast) for computing, and their gradients before the reduction.
        activations: activations saved for backward, and those of one block while it is recomputed.
        dispersion: the saved ∂S/∂z of all dispersed layers.
        logits: all copies that the loss makes of the logits, log-probabilities and their gradients.
    """

    weights: int
    gradients: int
    optimizer: int
    unsharded: int
    activations: int
    dispersion: int
    logits: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def compute_dtype(job_config: JobConfig, fsdp_degree: int) -> torch.dtype:
    """Return the dtype of products and block outputs.

    FSDP or autocast sets it. TorchTitan 0.2.2 uses neither for TP without FSDP.
    """
    t = job_config.training
    mixed = fsdp_degree > 1 or job_config.parallelism.tensor_parallel_degree == 1
    return TORCH_DTYPE_MAP[t.mixed_precision_param if mixed else t.dtype]


def block_elements(job_config: JobConfig, args: DispModelArgs) -> float:
    """Count the saved activations of all blocks, with one block's recomputation: elements per token of a CP rank."""
    ac = job_config.activation_checkpoint
    saved = args.saved_elements(job_config.parallelism.tensor_parallel_degree)
    none, full, layers = saved["none"], saved["full"], args.n_layers
    if ac.mode == "none":
        return layers * none
    if ac.mode == "memory_budget":  # the compiler interpolates: 0 is full, 1 is none
        return layers * (full + ac.memory_budget * (none - full))
    if ac.mode == "full":
        return layers * full + none
    if ac.selective_ac_option == "op":
        return layers * saved["op"] + none
    every = int(ac.selective_ac_option)
    checkpointed = layers // every if every else 0
    return checkpointed * full + (layers - checkpointed) * none + none


def logit_bytes(job_config: JobConfig, args: DispModelArgs, itemsize: int) -> int:
    """Return the bytes for logits per token of a CP rank, at the peak in the loss's backward."""
    tp = job_config.parallelism.tensor_parallel_degree
    loss_parallel = tp > 1 and not job_config.parallelism.disable_loss_parallel
    compiled = job_config.compile.enable and "loss" in job_config.compile.components and not loss_parallel
    # A compiled loss holds the logits and their gradient. An eager loss holds three tensors in fp32: the
    # log-probabilities, their gradient, and the gradient of the logits.
    return args.vocab_size // (tp if loss_parallel else 1) * (2 * itemsize if compiled else 12)


def estimate(job_config: JobConfig, model: DispModel, fsdp_degree: int) -> Memory:
    """Estimate the memory of one rank.

    Args:
        job_config: a config that has passed ``config_checks.check_config``.
        model: the model on the meta device.
        fsdp_degree: number of ranks over which FSDP shards: data_parallel_shard_degree × context_parallel_degree.
    """
    p, t, args = job_config.parallelism, job_config.training, model.model_args
    tp = p.tensor_parallel_degree

    def held(module: torch.nn.Module) -> int:
        """Count a rank's elements before FSDP: TP shards matrices and replicates the vectors of norms."""
        return sum(w.numel() // tp if w.ndim > 1 else w.numel() for w in module.parameters())

    dtype = compute_dtype(job_config, fsdp_degree)
    parameter_bytes = 0 if t.enable_cpu_offload else TORCH_DTYPE_MAP[t.dtype].itemsize
    shard = -(-held(model) // fsdp_degree) * parameter_bytes
    blocks = sum(held(block) for block in model.layers.values())
    if fsdp_degree == 1:  # autocast keeps the cast weights for backward; they have no gradients of their own
        unsharded = held(model) * dtype.itemsize if dtype != TORCH_DTYPE_MAP[t.dtype] else 0
    else:
        # The final norm, the output and a tied model's embeddings stay gathered until their backward. Of the blocks,
        # the current and the next one are gathered. Untied embeddings are not gathered while the output is.
        never = p.fsdp_reshard_after_forward == "never"
        gathered = blocks if never else 2 * blocks // args.n_layers
        elsewhen = 0 if never or args.enable_weight_tying else sum(map(held, model.embeddings))
        unsharded = (held(model) - blocks - elsewhen + gathered) * dtype.itemsize * 2
    tokens = t.local_batch_size * t.seq_len // p.context_parallel_degree
    head = args.dim / tp + args.dim  # the final norm's input and output
    return Memory(
        weights=shard,
        gradients=shard,
        optimizer=2 * shard,  # Adam's two moments
        unsharded=unsharded,
        activations=round(tokens * dtype.itemsize * (block_elements(job_config, args) + head)),
        # Outputs of blocks are counted as saved inputs of the next blocks. The tiles are freed before the logits' peak.
        dispersion=len(args.activations) * tokens // tp * args.dim * dtype.itemsize,
        logits=tokens * logit_bytes(job_config, args, dtype.itemsize),
    )


def checkpoint_bytes(job_config: JobConfig, model: DispModel) -> int:
    """Return the size of a full checkpoint.

    It holds the weight of every key in the state dict, so a tied matrix counts twice. Adam's two moments count once.
    """
    names = sum(w.numel() for _, w in model.named_parameters(remove_duplicate=False))
    moments = 2 * sum(w.numel() for w in model.parameters())
    return (names + moments) * TORCH_DTYPE_MAP[job_config.training.dtype].itemsize


def checkpoint_counts(job_config: JobConfig) -> tuple[int, int, int]:
    """Return how many checkpoints are saved over the run, how many are kept, and the most on disk at any time."""
    c, steps = job_config.checkpoint, job_config.training.steps
    if not c.enable or c.load_only:
        return 0, 0, 0
    saved = -(-steps // c.interval)  # the last step is saved too
    if c.enable_first_step_checkpoint and c.interval > 1 and steps > 1:
        saved += 1
    kept = min(saved, c.keep_latest_k) if c.keep_latest_k > 0 else saved
    return saved, kept, min(saved, kept + 1)
