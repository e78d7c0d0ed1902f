"""GPT-2 is parallelized by ``models.parallelize`` with this tensor-parallel plan."""

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

# A linear layer with a bias is aten.addmm. TorchTitan's list has aten.mm, and its policy keeps every second one of
# those; of addmm it keeps all.
SAVED_OPS = _op_sac_save_list | {torch.ops.aten.addmm.default}


def parallelize(model: DispModel, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """Parallelize the model in place, as ``models.parallelize.parallelize_model`` describes."""
    return parallelize_model(model, parallel_dims, job_config, _apply_tp, SAVED_OPS)


def _apply_tp(model: DispModel, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    """Shard heads, feed-forward and vocabulary, and the sequence between blocks, as in TorchTitan's plan for Llama.

    The table of positions is sharded by rows like that of the tokens, so each row's whole gradient is on the rank that
    holds it.
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
