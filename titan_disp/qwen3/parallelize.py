"""Qwen3 is parallelized by ``models.parallelize`` with TorchTitan's tensor-parallel plan."""

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.qwen3.infra.parallelize import _op_sac_save_list, apply_non_moe_tp

from titan_disp.models.model import DispModel
from titan_disp.models.parallelize import parallelize_model


def parallelize(model: DispModel, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """Parallelize the model in place, as ``models.parallelize.parallelize_model`` describes."""
    return parallelize_model(model, parallel_dims, job_config, _apply_tp, _op_sac_save_list)


def _apply_tp(model: DispModel, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    recipe = job_config.quantize.linear.float8.recipe_name
    apply_non_moe_tp(
        model,
        parallel_dims.get_mesh("tp"),
        loss_parallel=not job_config.parallelism.disable_loss_parallel,
        # Rowwise float8 recipes all-gather in high precision, so they use ordinary TP.
        enable_float8_tensorwise_tp="float8" in job_config.model.converters
        and recipe not in ("rowwise", "rowwise_with_gw_hp"),
        enable_async_tp=job_config.parallelism.enable_async_tensor_parallel,
        cp_enabled=parallel_dims.cp_enabled,
    )
