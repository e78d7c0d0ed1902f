"""Bytes from the shapes alone: what one GPU holds at the peak of a step, and what checkpoints take on disk.

The activations are counted as eager PyTorch saves them for backward, with flash attention and a fused norm; a compiled
block saves less, so the estimate errs on the safe side. tests/test_plan.py compares it with the live storages of the real
model's step. Measured on no GPU yet.
"""

from dataclasses import dataclass

import torch
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig

from titan_disp.models.arguments import DispModelArgs
from titan_disp.models.model import DispModel


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU. The terms do not all peak at the same moment, so their sum is an upper estimate.

    Attributes:
        weights, gradients, optimizer: the rank's shards; 0 with training.enable_cpu_offload.
        unsharded: weights gathered (or cast by autocast) for computing, and their gradients before they are reduced.
        activations: saved for backward, and one block's while it is recomputed.
        dispersion: the saved ∂S/∂z of all dispersed layers.
        logits: logits, log-probabilities and their gradient, as many copies as the loss makes.
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
    """The dtype of products and block outputs: FSDP's or autocast's; TorchTitan 0.2.2 does neither for TP without FSDP."""
    t = job_config.training
    mixed = fsdp_degree > 1 or job_config.parallelism.tensor_parallel_degree == 1
    return TORCH_DTYPE_MAP[t.mixed_precision_param if mixed else t.dtype]


def block_elements(job_config: JobConfig, args: DispModelArgs) -> float:
    """Elements of all blocks' saved activations, per token of a CP rank's part, with one block's recomputation."""
    ac = job_config.activation_checkpoint
    saved = args.saved_elements(job_config.parallelism.tensor_parallel_degree)
    none, full, layers = saved["none"], saved["full"], args.n_layers
    if ac.mode == "none":
        return layers * none
    if ac.mode == "memory_budget":  # the compiler's own trade: 0 is full, 1 is none
        return layers * (full + ac.memory_budget * (none - full))
    if ac.mode == "full":
        return layers * full + none
    if ac.selective_ac_option == "op":
        return layers * saved["op"] + none
    every = int(ac.selective_ac_option)
    checkpointed = layers // every if every else 0
    return checkpointed * full + (layers - checkpointed) * none + none


def logit_bytes(job_config: JobConfig, args: DispModelArgs, itemsize: int) -> int:
    """Bytes per token of a CP rank's part, at the peak in the loss's backward."""
    tp = job_config.parallelism.tensor_parallel_degree
    loss_parallel = tp > 1 and not job_config.parallelism.disable_loss_parallel
    compiled = job_config.compile.enable and "loss" in job_config.compile.components and not loss_parallel
    # Compiled: the logits and their gradient. Eager: log-probabilities, their gradient and the logits', all fp32.
    return args.vocab_size // (tp if loss_parallel else 1) * (2 * itemsize if compiled else 12)


def estimate(job_config: JobConfig, model: DispModel, fsdp_degree: int) -> Memory:
    """Memory of one rank.

    Args:
        job_config: has passed ``checks.check_config``.
        model: on the meta device.
        fsdp_degree: ranks over which FSDP shards: data_parallel_shard_degree × context_parallel_degree.
    """
    p, t, args = job_config.parallelism, job_config.training, model.model_args
    tp = p.tensor_parallel_degree

    def held(module: torch.nn.Module) -> int:
        """Elements before FSDP: TP shards matrices and replicates the norms' vectors."""
        return sum(w.numel() // tp if w.ndim > 1 else w.numel() for w in module.parameters())

    dtype = compute_dtype(job_config, fsdp_degree)
    parameter_bytes = 0 if t.enable_cpu_offload else TORCH_DTYPE_MAP[t.dtype].itemsize
    shard = -(-held(model) // fsdp_degree) * parameter_bytes
    blocks = sum(held(block) for block in model.layers.values())
    if fsdp_degree == 1:  # autocast keeps its casts for backward; they have no gradients of their own
        unsharded = held(model) * dtype.itemsize if dtype != TORCH_DTYPE_MAP[t.dtype] else 0
    else:
        # Final norm and output, and with them the embeddings of a tied model, stay gathered until their backward; of the blocks,
        # the one at work and the next. The embeddings of an untied model are gathered when the output is not.
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
        # The blocks' outputs themselves are the next blocks' saved inputs. The tiles are gone before the logits peak.
        dispersion=len(args.activations) * tokens // tp * args.dim * dtype.itemsize,
        logits=tokens * logit_bytes(job_config, args, dtype.itemsize),
    )


def checkpoint_bytes(job_config: JobConfig, model: DispModel) -> int:
    """Weights under every key of the state dict, a tied matrix under both of its names, and Adam's two moments, once each."""
    names = sum(w.numel() for _, w in model.named_parameters(remove_duplicate=False))
    moments = 2 * sum(w.numel() for w in model.parameters())
    return (names + moments) * TORCH_DTYPE_MAP[job_config.training.dtype].itemsize


def checkpoint_counts(job_config: JobConfig) -> tuple[int, int, int]:
    """Checkpoints saved over the run; kept at its end; most on disk at any time."""
    c, steps = job_config.checkpoint, job_config.training.steps
    if not c.enable or c.load_only:
        return 0, 0, 0
    saved = -(-steps // c.interval)  # the last step is saved too
    if c.enable_first_step_checkpoint and c.interval > 1 and steps > 1:
        saved += 1
    kept = min(saved, c.keep_latest_k) if c.keep_latest_k > 0 else saved
    return saved, kept, min(saved, kept + 1)
