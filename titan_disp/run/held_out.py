"""This module measures condensation and cross-entropy on held-out text while a model
trains.
"""

from dataclasses import replace
from functools import partial

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from titan_disp.condensation.measure import (
    Forward,
    MeshPosition,
    Monitor,
    cross_entropies,
)
from titan_disp.condensation.record import Measurement
from titan_disp.data.validation import held_out_sequences
from titan_disp.dispersion.autograd import process_group
from titan_disp.run import dry


def build_monitor(trainer: Trainer) -> Monitor | None:
    """Return the monitor of the trainer's model. Return None if condensation.interval is
    0, in a dry run, and if there is no held-out text (with a warning).

    A collective call. Raises ConfigError if the text is too short.
    """
    job = trainer.job_config
    section = job.condensation
    if not section.interval or dry.is_dry(job):
        return None
    assert trainer.tokenizer is not None
    rows = held_out_sequences(job, trainer.tokenizer, section.sequences)
    if rows is None:
        logger.warning(
            "condensation is not measured: no validation split was found (one is "
            "looked for only on the hub or in a folder). Set validation.enable = "
            "true with validation.dataset_path, or condensation.interval = 0"
        )
        return None
    sequences, *segments = (row.to(trainer.device) for row in rows)
    position = MeshPosition(
        sequence_group=process_group(trainer.loss_fn.group),
        label_group=process_group(trainer.loss_fn.cp_group),
    )
    mesh = trainer.parallel_dims.get_optional_mesh("batch")
    if mesh is not None:
        position = replace(
            position,
            dp_rank=mesh.get_local_rank(),
            dp_degree=mesh.size(),
            dp_group=mesh.get_group(),
        )
    return Monitor(
        sequences,
        job.training.local_batch_size,
        section.max_tokens,
        position,
        *segments,
    )


def measure(trainer: Trainer, monitor: Monitor) -> Measurement:
    """Return condensation and cross-entropy of the trainer's model, the same on all
    ranks. A collective call that changes nothing.
    """
    model = trainer.model_parts[0]
    model.eval()
    measurement = monitor.measure(partial(_forward, trainer))
    model.train()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A backward pass does this, too. If the head stayed gathered, a save would
            # not find the parameters of the optimizer.
            module.reshard()
    return measurement


def _forward(
    trainer: Trainer, tokens: Tensor, labels: Tensor, segments: Tensor | None = None
) -> Forward:
    """Return the model's activations and cross-entropies for a batch. ``tokens``,
    ``labels`` and ``segments`` are [B, N].
    """
    batch = {"input": tokens}
    if segments is not None:
        batch["segments"] = segments
    inputs, labels, extra, kwargs = trainer.post_dataloading_process(batch, labels)
    layers = range(trainer.model_args.n_layers + 2)
    with trainer.train_context():
        with trainer.maybe_enable_amp:
            predictions = trainer.model_parts[0](
                inputs, **extra, **kwargs, return_activations=layers
            )
        ce = cross_entropies(predictions.logits, labels)
    positions = kwargs.get("positions")  # [1, N] under context parallelism
    if positions is not None:
        positions = positions[0]
    return Forward(predictions.activations, ce, positions)
