"""The TrainSpec of each model, which tells TorchTitan which parts to use."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torchtitan.components.loss import IGNORE_INDEX, LossFunction, cross_entropy_loss
from torchtitan.components.lr_scheduler import (
    LRSchedulersContainer,
    build_lr_schedulers,
)
from torchtitan.components.optimizer import OptimizersContainer, build_optimizers
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.job_config import LRScheduler
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import (
    TrainSpec,
    _extra_train_specs,
    register_train_spec,
)
from torchtitan.tools.logging import logger

from titan_disp import checks, schedules
from titan_disp.config.types import JobConfig
from titan_disp.data.loader import StreamLoader, build_dataloader
from titan_disp.data.validation import build_validator
from titan_disp.models.baselines import (
    ForgettingOptimizers,
    build_noise,
    forgetting_schedule,
)
from titan_disp.models.decoder import DispModel
from titan_disp.models.head import (
    HiddenStates,
    chunked_cross_entropy,
    loss_and_gradient,
)
from titan_disp.models.parallelize import parallelize_model
from titan_disp.models.registry import MODELS, ModelEntry
from titan_disp.objective import DispersionObjective, LossLedger
from titan_disp.run.guard import GuardedOptimizers
from titan_disp.run.metrics import DispersionMetrics


def sequence_mesh(parallel_dims: ParallelDims) -> DeviceMesh | None:
    """Return the 1-D mesh over which block outputs are sharded along the sequence: TP,
    CP, or CP×TP flattened. Return None if block outputs are not sharded.
    """
    names = [
        name
        for name in ("cp", "tp")
        if parallel_dims.get_optional_mesh(name) is not None
    ]
    if not names:
        return None
    if len(names) == 1:
        return parallel_dims.get_mesh(names[0])
    return parallel_dims.get_mesh(names)._flatten("sequence")


def build_tokenizer(job_config: JobConfig) -> BaseTokenizer:
    """Return the tokenizer, after a check of the whole config.

    The check is here because TorchTitan's trainer calls this hook first.
    """
    checks.check_config(job_config, dist.get_world_size())
    checks.check_device(job_config)
    return checks.tokenizer_of(job_config)


def cross_entropies(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return TorchTitan's ``cross_entropy_loss``, and the cross-entropy of each token
    [B · N], which has no gradient.
    """
    of_tokens = F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(0, 1),
        reduction="none",
        ignore_index=IGNORE_INDEX,
    )
    return of_tokens.sum(), of_tokens.detach()


def build_cross_entropy(
    job_config: JobConfig, parallel_dims: ParallelDims
) -> LossFunction:
    """Return a function of predictions and labels that returns the cross-entropy, summed
    over the valid tokens.

    With several sources of data, the function returns a pair, whose second entry is the
    cross-entropy of each token. Predictions are ``HiddenStates`` in training with a
    chunked head, and logits otherwise. The function is compiled if the config says so
    and the gradient stays right.
    """
    several_sources = len(job_config.stream.sources) > 1
    loss_parallel = (
        parallel_dims.tp_enabled and not job_config.parallelism.disable_loss_parallel
    )
    compiled = job_config.compile.enable and "loss" in job_config.compile.components
    of_logits = cross_entropies if several_sources else cross_entropy_loss
    if loss_parallel and compiled:
        # Inductor on torch 2.13 (CPU) returned wrong gradients for vocabulary-sharded
        # logits, without an error. Each rank holds only a part of the vocabulary, so
        # the eager loss costs little memory.
        logger.warning(
            "compile.components: the loss is not compiled, because loss parallel "
            "shards its logits"
        )
    elif compiled:
        of_logits = torch.compile(of_logits, backend=job_config.compile.backend)
    chunk = job_config.training.head_chunk_tokens
    if not chunk:
        return of_logits
    of_chunk = loss_and_gradient
    if compiled and not parallel_dims.tp_enabled:
        of_chunk = torch.compile(of_chunk, backend=job_config.compile.backend)

    def cross_entropy(predictions: Tensor | HiddenStates, labels: Tensor) -> Any:
        if not isinstance(predictions, HiddenStates):
            return of_logits(predictions, labels)
        ce, of_tokens = chunked_cross_entropy(predictions, labels, chunk, of_chunk)
        if several_sources:
            return ce, of_tokens
        return ce

    return cross_entropy


@dataclass
class _Shared:
    """The state that the builders of one spec share, because TorchTitan calls them
    separately and gives each only some arguments.
    """

    # The loss adds to the ledger, and the metrics reset it.
    ledger: LossLedger = field(default_factory=LossLedger)
    # From the config, because the optimizers' builder gets only the section [optimizer]
    max_skipped_steps: int = 10
    # The whole config, for the same reason, if the baseline is active_forgetting
    forgetting: JobConfig | None = None
    # The metrics read the counters of the loader.
    loader: StreamLoader | None = None
    # The schedulers know the step, which the loss function does not get.
    schedulers: LRSchedulersContainer | None = None

    def steps_completed(self) -> int:
        if self.schedulers is None:
            return 0
        return self.schedulers.schedulers[0].last_epoch


def train_spec(entry: ModelEntry) -> TrainSpec:
    """Return the TrainSpec of a model."""
    shared = _Shared()

    def build_data(
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        job_config: JobConfig,
    ) -> StreamLoader:
        shared.max_skipped_steps = job_config.guard.max_skipped_steps
        shared.loader = build_dataloader(dp_world_size, dp_rank, tokenizer, job_config)
        shared.ledger.sources = {}  # drops the sources of an earlier trainer
        if len(shared.loader.slot_counts) > 1:
            shared.ledger.sources = shared.loader.slot_counts
        return shared.loader

    def parallelize(
        model: DispModel, parallel_dims: ParallelDims, job_config: JobConfig
    ) -> nn.Module:
        # Of the hooks after build_data, this is the first that gets the meshes.
        if shared.loader is not None:
            shared.loader.mesh = parallel_dims.get_optional_mesh("batch")
        parallelize_model(
            model,
            parallel_dims,
            job_config,
            apply_tp=entry.apply_tp,
            saved_ops=entry.saved_ops,
        )
        method = job_config.baseline.method
        shared.forgetting = None
        if method == "active_forgetting":
            shared.forgetting = job_config
        if method == "noisy_embedding":
            build_noise(job_config, parallel_dims, shared.steps_completed).install(
                model
            )
        return model

    def build_loss(
        job_config: JobConfig, parallel_dims: ParallelDims
    ) -> DispersionObjective:
        for warning in checks.config_warnings(job_config):
            logger.warning(warning)
        return DispersionObjective(
            cross_entropy=build_cross_entropy(job_config, parallel_dims),
            losses=checks.build_dispersion_losses(job_config),
            coeff=schedules.build_coeff_schedule(job_config),
            step=shared.steps_completed,
            group=sequence_mesh(parallel_dims),
            cp_group=parallel_dims.get_optional_mesh("cp"),
            within_documents=job_config.dispersion.within_documents,
            ledger=shared.ledger,
            ignore_index=IGNORE_INDEX,
        )

    def build_guarded_optimizers(*arguments: Any) -> GuardedOptimizers:
        inner = build_optimizers(*arguments)
        if shared.forgetting is not None:
            inner = ForgettingOptimizers(
                inner, shared.forgetting, shared.steps_completed
            )
        return GuardedOptimizers(
            inner, shared.ledger.non_finite, shared.max_skipped_steps
        )

    def build_schedulers(
        optimizers: OptimizersContainer, config: LRScheduler, steps: int
    ) -> LRSchedulersContainer:
        shared.schedulers = build_lr_schedulers(optimizers, config, steps)
        if shared.forgetting is not None:
            shared.schedulers = forgetting_schedule(
                shared.schedulers, shared.forgetting
            )
        return shared.schedulers

    def build_metrics(
        job_config: JobConfig, parallel_dims: ParallelDims, *_: Any
    ) -> DispersionMetrics:
        return DispersionMetrics(
            job_config, parallel_dims, shared.ledger, shared.loader
        )

    return TrainSpec(
        model_cls=entry.model_cls,
        model_args=entry.flavors,
        parallelize_fn=parallelize,
        pipelining_fn=None,
        build_optimizers_fn=build_guarded_optimizers,
        build_lr_schedulers_fn=build_schedulers,
        build_dataloader_fn=build_data,
        build_tokenizer_fn=build_tokenizer,
        build_loss_fn=build_loss,
        build_validator_fn=build_validator,
        build_metrics_processor_fn=build_metrics,
        state_dict_adapter=entry.adapter,
    )


def register() -> None:
    """Register every model. A second call changes nothing."""
    for name, entry in MODELS.items():
        if name not in _extra_train_specs:
            register_train_spec(name, train_spec(entry))
