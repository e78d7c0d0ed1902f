"""TP → tie → activation checkpointing → compile → FSDP2/HSDP.

TorchTitan 0.2.2's own order fails for tied embeddings: TP replaces both parameters, which unties them, and separate FSDP
groups for the embedding and the output either raise or train two matrices. Here they are tied again after TP, and the
embedding, the final norm and the output form one FSDP group. Of an untied model the embedding is a group of its own, as in
TorchTitan.
"""

from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.distributed.context_parallel import apply_cp_to_attention_module
from torchtitan.models.llama3.infra.parallelize import disable_fsdp_gradient_division
from torchtitan.models.llama4.infra.parallelize import apply_compile
from torchtitan.models.qwen3.infra.parallelize import _op_sac_save_list, apply_non_moe_tp
from torchtitan.tools.logging import logger

from titan_disp import cpu
from titan_disp.qwen3.model import Qwen3DispModel


def parallelize(model: Qwen3DispModel, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """Apply everything the config asks for to a model on the meta device, in place.

    Expects a config that has passed ``checks.check_config``: combinations that do not work were refused there.
    """
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    tp_mesh = parallel_dims.get_optional_mesh("tp")
    if tp_mesh is not None:
        _apply_tp(model, parallel_dims, job_config)
        model.tie_weights()
    if parallel_dims.cp_enabled:
        attentions = [block.attention.inner_attention for block in model.layers.values()]  # type: ignore[union-attr]
        apply_cp_to_attention_module(attentions, parallel_dims.get_mesh("cp"), "sdpa")  # type: ignore[arg-type]
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=compiled,
            op_sac_save_list=_op_sac_save_list,  # type: ignore[arg-type]
            base_folder=job_config.job.dump_folder,
        )
    if compiled:
        apply_compile(model, job_config.compile, parallel_dims.ep_enabled)
    if parallel_dims.fsdp_enabled:
        _apply_fsdp(model, parallel_dims, job_config)
    cpu.adapt(model, tp_mesh)
    return model


def _apply_tp(model: Qwen3DispModel, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    recipe = job_config.quantize.linear.float8.recipe_name
    apply_non_moe_tp(
        model,
        parallel_dims.get_mesh("tp"),
        loss_parallel=not job_config.parallelism.disable_loss_parallel,
        # Rowwise float8 recipes all-gather in high precision, so they use regular TP.
        enable_float8_tensorwise_tp="float8" in job_config.model.converters
        and recipe not in ("rowwise", "rowwise_with_gw_hp"),
        enable_async_tp=job_config.parallelism.enable_async_tensor_parallel,
        cp_enabled=parallel_dims.cp_enabled,
    )


def _apply_fsdp(model: Qwen3DispModel, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    hybrid = parallel_dims.dp_replicate_enabled
    config: dict[str, Any] = {
        "mesh": parallel_dims.get_mesh(["dp_replicate", "fsdp"] if hybrid else ["fsdp"]),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_reduce],
        ),
        "offload_policy": CPUOffloadPolicy() if job_config.training.enable_cpu_offload else OffloadPolicy(),
    }
    policy = job_config.parallelism.fsdp_reshard_after_forward
    for block in model.layers.values():
        fully_shard(block, reshard_after_forward=policy != "never", **config)
    head = [model.norm, model.output]
    if model.enable_weight_tying:
        head.insert(0, model.tok_embeddings)  # the shared parameter has one owner
    else:
        fully_shard(model.tok_embeddings, reshard_after_forward=policy != "never", **config)
    # Backward starts here, so resharding after forward would only gather it twice.
    fully_shard(head, reshard_after_forward=policy == "always", **config)
    fully_shard(model, **config)
    # The objective divides by the global number of valid tokens; FSDP must only sum.
    disable_fsdp_gradient_division(model)
    logger.info(f"Applied {'HSDP' if hybrid else 'FSDP'} to the model")
