"""Parallelize a model, in this order: TP, weight tying, CP, activation checkpointing,
compile, FSDP2 or HSDP.

TorchTitan 0.2.2's order fails for tied embeddings. TP replaces both parameters, which
unties them, and separate FSDP groups for the embedding and the output layer either
raise an error or train two matrices. Here the parameters are tied again after TP, and
the embeddings, the final norm and the output layer form one FSDP group.
"""

import logging
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.distributed.context_parallel import apply_cp_to_attention_module
from torchtitan.models.llama3.infra.parallelize import disable_fsdp_gradient_division
from torchtitan.models.llama4.infra.parallelize import apply_compile

from titan_disp import cpu
from titan_disp.config.types import JobConfig
from titan_disp.errors import ConfigError
from titan_disp.models.decoder import DispModel
from titan_disp.models.head import ChunkedHead, chunked

logger = logging.getLogger(__name__)  # not for the console: see run.console
ApplyTP = Callable[[DispModel, ParallelDims, JobConfig], None]


def parallelize_model(
    model: DispModel,
    parallel_dims: ParallelDims,
    job_config: JobConfig,
    apply_tp: ApplyTP,
    saved_ops: Collection[torch._ops.OpOverload],
) -> nn.Module:
    """Parallelize a model on the meta device in place, as the config says, and return
    the model.

    ``checks.check_config``, which refuses combinations that do not work, must have
    accepted the config.
    """
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    tp_mesh = parallel_dims.get_optional_mesh("tp")
    if tp_mesh is not None:
        apply_tp(model, parallel_dims, job_config)
    if job_config.training.head_chunk_tokens:
        if type(model.output) is not nn.Linear:
            raise ConfigError(
                f"training.head_chunk_tokens needs an output layer of class Linear, but model.converters made it a "
                f'{type(model.output).__name__}: add "output" to the filter_fqns of the converter, or set '
                "head_chunk_tokens = 0"
            )
        model.output = chunked(
            model.output, tp_mesh, not job_config.parallelism.disable_loss_parallel
        )
    model.tie_weights()  # TP and a chunked head replace parameters
    if parallel_dims.cp_enabled:
        attentions = [attention.inner_attention for attention in _attentions(model)]
        apply_cp_to_attention_module(attentions, parallel_dims.get_mesh("cp"), "sdpa")
    masked = model.model_args.attn_type == "flex"
    if tp_mesh is not None and (parallel_dims.cp_enabled or masked or cpu.active()):
        for attention in _attentions(model):
            attention.inner_attention = LocalHeads(attention.inner_attention)
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=compiled,
            op_sac_save_list=saved_ops,
            base_folder=job_config.job.dump_folder,
        )
    if compiled:
        apply_compile(model, job_config.compile, parallel_dims.ep_enabled)
    if parallel_dims.fsdp_enabled:
        _apply_fsdp(model, parallel_dims, job_config)
    cpu.adapt(model)
    return model


class LocalHeads(nn.Module):
    """Attention on this rank's heads of q, k, v [B, heads, N, head_dim], as plain tensors.

    TP shards the heads, so nothing needs to be sent. torch's context parallelism, flex
    attention and torch's attention on a CPU do not support DTensors.
    """

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, q: Tensor, k: Any, v: Any, **kwargs: Any) -> Tensor:
        if not isinstance(q, DTensor):
            return self.attention(q, k, v, **kwargs)  # q, k and v are already local
        out = self.attention(q.to_local(), k.to_local(), v.to_local(), **kwargs)
        return DTensor.from_local(out, q.device_mesh, q.placements, run_check=False)


def _attentions(model: DispModel) -> list[Any]:
    """Return the attention module of each block."""
    return [block.attention for block in model.layers.values()]


def _apply_fsdp(
    model: DispModel, parallel_dims: ParallelDims, job_config: JobConfig
) -> None:
    dimensions = ["fsdp"]
    name = "FSDP"
    if parallel_dims.dp_replicate_enabled:
        dimensions = ["dp_replicate", "fsdp"]
        name = "HSDP"
    offload: OffloadPolicy = OffloadPolicy()
    if job_config.training.enable_cpu_offload:
        offload = CPUOffloadPolicy()
    config: dict[str, Any] = {
        "mesh": parallel_dims.get_mesh(dimensions),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_reduce],
        ),
        "offload_policy": offload,
        "shard_placement_fn": _columns_where_rows_are_uneven,
    }
    policy = job_config.parallelism.fsdp_reshard_after_forward
    for block in model.layers.values():
        fully_shard(block, reshard_after_forward=policy != "never", **config)
    head = [model.norm, model.output]
    if model.model_args.enable_weight_tying:
        head = [*model.embeddings, *head]  # one FSDP group for the shared parameter
    else:
        fully_shard(model.embeddings, reshard_after_forward=policy != "never", **config)
    # Backward begins with this group. If the group were resharded after forward, it
    # would be gathered again at once. The loss of a chunked head reads the weight after
    # forward.
    fully_shard(
        head,
        reshard_after_forward=policy == "always"
        and not isinstance(model.output, ChunkedHead),
        **config,
    )
    fully_shard(model, **config)
    # The objective divides by the global number of valid tokens; FSDP must only sum.
    disable_fsdp_gradient_division(model)
    logger.info(f"Applied {name} to the model")


def _columns_where_rows_are_uneven(param: nn.Parameter) -> Shard | None:
    """Return a placement that shards columns if TP has divided the rows unevenly, as with
    GPT-2's 50,257 tokens. Otherwise return None, with which FSDP shards rows.

    DTensor (torch 2.13) assumes that TP divides the rows of each FSDP shard in the same
    proportion as all rows. But in the last of 8 shards of the 50,257 rows, 2 TP ranks have
    3135 and 3141 rows, so that initial weights and checkpoints would mix up rows.
    """
    if isinstance(param, DTensor):
        for degree, placement in zip(
            param.device_mesh.shape, param.placements, strict=True
        ):
            if placement.is_shard(dim=0) and param.shape[0] % degree:
                return Shard(1)
    return None
