"""How GPT-2 is parallelized: its tensor-parallel plan in ``models.parallelize``."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.tensor_parallel import maybe_enable_async_tp
from torchtitan.models.qwen3.infra.parallelize import _op_sac_save_list
from torchtitan.tools.logging import logger

from titan_disp.models.model import DispModel
from titan_disp.models.parallelize import parallelize_model

# A product with a bias is aten.addmm. TorchTitan's list knows aten.mm, of which its policy keeps every second one; of these, all.
SAVED_OPS = _op_sac_save_list | {torch.ops.aten.addmm.default}


def parallelize(model: DispModel, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """As ``models.parallelize.parallelize_model``."""
    return parallelize_model(model, parallel_dims, job_config, _apply_tp, SAVED_OPS)


def _apply_tp(model: DispModel, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    """As TorchTitan's plan for Llama: heads, feed-forward and vocabulary are shared out, and between blocks the sequence.

    The table of positions is shared out by rows like that of the tokens: its gradient is whole on the rank that holds a row.
    """
    mesh = parallel_dims.get_mesh("tp")
    loss_parallel = not job_config.parallelism.disable_loss_parallel
    table: dict[str, Any] = {"input_layouts": Replicate(), "output_layouts": Shard(1)}
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(**table),
            "pos_embeddings": RowwiseParallel(**table),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if loss_parallel else Replicate(),
                use_local_output=not loss_parallel,
            ),
        },
    )
    gather: dict[str, Any] = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for block in model.layers.values():
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(**gather),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(**gather),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    maybe_enable_async_tp(job_config, mesh)
    logger.info("Applied Tensor Parallelism to the model")
