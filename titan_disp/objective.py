"""The training objective CE + λ · dispersion, scaled for a trainer that sums its losses.

TorchTitan 0.2.2 sums CE over the local tokens, divides by the *global* number of valid
tokens, and sums gradients over ranks and microbatches. If the mean dispersion were simply
added, it would be multiplied by ranks × accumulation steps. Instead, the dispersion of
each sequence is multiplied by the sequence's number of valid labels. The division by the
number of valid tokens then gives a mean over sequences, weighted by their valid labels,
for any mesh and any accumulation. λ may change over a run (``schedules.CoeffSchedule``).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan_disp.dispersion.autograd import Group, process_group
from titan_disp.dispersion.kernels import bf16_autocast
from titan_disp.dispersion.layers import compute_in_backward, packed
from titan_disp.dispersion.loss import DispersionLoss
from titan_disp.dispersion.masks import TokenMask, token_mask
from titan_disp.metric import Metric
from titan_disp.models.decoder import Predictions


class LossLedger:
    """The sums of the loss terms since the last reset.

    The sums stay on the device, so adding never waits for the GPU.

    Attributes:
        sources: a dict from a source of data to the number of this rank's slots
            (streams of documents) that read this source, in the order of the slots. The
            sequences of a rank come from its slots in turn. If the dict is empty, there
            are no means of single sources.
    """

    def __init__(self) -> None:
        self.sources: dict[str, int] = {}
        self.reset()

    def reset(self) -> None:
        self._names: list[str] = []
        self._sums: Tensor | None = None  # this rank's sums, float64 [names]
        # Cross-entropy and valid tokens of each sequence, [2, B] per microbatch
        self._rows: list[Tensor] = []
        self._worst_fit: Tensor | None = None

    def add(
        self,
        ce: Tensor,
        dispersion: Tensor,
        tokens: Tensor,
        losses: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Add a microbatch.

        Args:
            ce: cross-entropy, summed over the valid tokens.
            dispersion: dispersion without λ, summed over the valid tokens.
            tokens: number of valid tokens.
            losses: if dispersion is a weighted sum of several losses, these losses
                without their weights, by name.
        """
        self._names = [
            "ce",
            "dispersion",
            "tokens",
            *(f"dispersion_{name}" for name in losses),
        ]
        sums = torch.stack(
            [
                term.detach().double()
                for term in (ce, dispersion, tokens, *losses.values())
            ]
        )
        if self._sums is not None:
            sums = self._sums + sums
        self._sums = sums

    def add_rows(self, ce: Tensor, tokens: Tensor) -> None:
        """Add the next sequences.

        Args:
            ce: [B], the cross-entropy of each sequence, summed over its valid tokens.
            tokens: [B], the number of valid tokens of each sequence.
        """
        self._rows.append(torch.stack([ce.detach().double(), tokens.double()]))

    def add_fit_errors(self, errors: Tensor) -> None:
        """Record relative errors, of any shape, of the moments estimator's fits.

        Only the largest error since the last reset is stored.
        """
        worst = errors.detach().max()
        if self._worst_fit is not None:
            worst = torch.maximum(self._worst_fit, worst)
        self._worst_fit = worst

    def non_finite(self) -> Tensor | None:
        """Return whether CE and dispersion are not finite on this rank, bool [2] on the
        device; None before the first ``add``.
        """
        if self._sums is None:
            return None
        return ~self._sums[:2].isfinite()

    def worst_fit(self, mesh: DeviceMesh | None) -> float | None:
        """Return the largest error of a fit on all ranks of ``mesh``; None if nothing was
        fitted. This is a collective call.
        """
        if self._worst_fit is None:
            return None
        worst = self._worst_fit.clone()
        if mesh is not None:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=mesh.get_group())
        return worst.item()

    def mean(self, mesh: DeviceMesh | None) -> dict[Metric, float] | None:
        """Return the means over the valid tokens of all ranks of ``mesh``, by name.

        The names are "ce" and "dispersion", "dispersion_NAME" for each loss if there
        are several, and "ce/NAME" for each source if rows were added. A mean over no
        token is NaN. Before the first ``add``, the result is None. This is a collective
        call.
        """
        if self._sums is None:
            return None
        sums = torch.cat([self._sums, *self._source_sums()])
        if mesh is not None:
            dist.all_reduce(sums, group=mesh.get_group())
        term_sums, source_sums = sums.cpu().tensor_split([len(self._names)])
        terms = dict(zip(self._names, term_sums.tolist(), strict=True))
        tokens = terms.pop("tokens") or math.nan
        means = {Metric(name): total / tokens for name, total in terms.items()}
        # Without rows, there are no sums of sources.
        for source, (ce, tokens) in zip(
            self.sources, source_sums.view(-1, 2).tolist(), strict=False
        ):
            means[Metric("ce", source)] = ce / (tokens or math.nan)
        return means

    def _source_sums(self) -> list[Tensor]:
        """Return this rank's sums of cross-entropy and valid tokens, float64 [2] for each
        source. The list is empty if no rows were added.
        """
        if not self._rows:
            return []
        slots = list(self.sources.values())
        # Row i of the rank is a sequence of slot (i mod number of slots).
        slot_sums = torch.cat(self._rows, 1).unflatten(1, (-1, sum(slots))).sum(1)
        return [source_sums.sum(1) for source_sums in slot_sums.split(slots, 1)]


def in_backward(
    losses: Iterable[DispersionLoss], zs: Sequence[Tensor], sharded: bool
) -> bool:
    """Return whether to compute the gradients of losses in a trainer's backward pass.

    Doing so saves memory. The result is true if the layers ``zs`` are so large that
    each is computed alone anyway, and sequences are not sharded. If sequences are
    sharded, forward is faster, because it gathers the next layer while it computes one,
    and a rank saves only its own shard's gradient. Sampled losses save only a few rows.
    """
    return (
        not sharded
        and all(loss.estimator != "sampled" for loss in losses)
        and len(packed(zs)) == len(zs)
    )


@dataclass(eq=False)
class _Microbatch:
    """The inputs of the losses in one forward pass, except the activations.

    Hooks on the activations hold this object. If this object also held the activations,
    the reference cycle would keep the object and the activations in memory.
    """

    ce: Tensor  # detached; summed over this rank's valid tokens
    tokens: Tensor  # number of this rank's valid tokens
    weights: Tensor  # [B], number of valid labels of each whole sequence
    step: int  # number of completed steps
    layers: int  # number of layers
    mask: TokenMask | None  # the documents, if only pairs within documents count
    ledger: "LossLedger | None"  # None in validation
    fit_errors: list[Tensor] = field(default_factory=list)  # the losses append errors


@dataclass
class DispersionObjective:
    """TorchTitan's ``loss_fn(predictions, labels)`` with dispersion added.

    Attributes:
        cross_entropy: takes logits [B, N, V] or ``HiddenStates``, and labels [B, N].
            Returns CE summed over the valid tokens, or a pair of this sum and the CE of
            each token [B · N]. The ledger needs the pair for the means of sources.
        losses: the dispersion loss, or a dict from name to (weight, loss).
        coeff: λ as a function of the number of completed steps.
        step: returns the number of completed steps, which also determines the sampled
            positions.
        group: ranks over which the sequence of the activations is sharded (TP, CP, or
            CP×TP flattened).
        cp_group: ranks over which the labels are sharded too (CP).
        within_documents: whether the losses take only the pairs within documents.
            Predictions must then have segments.
        defer: whether to compute the gradients of large layers in the backward pass, so
            that no gradient is saved. The returned loss then does not include
            dispersion: ``take_late`` returns dispersion after the backward pass.
        ledger: receives all terms separately, in training only.
        ignore_index: the label of tokens that do not count.
    """

    cross_entropy: Callable[[Any, Tensor], Tensor | tuple[Tensor, Tensor]]
    losses: DispersionLoss | Mapping[str, tuple[float, DispersionLoss]]
    coeff: Callable[[int], float]
    step: Callable[[], int] = lambda: 0
    group: Group = None
    cp_group: Group = None
    within_documents: bool = False
    defer: bool = False
    ledger: LossLedger | None = None
    ignore_index: int = -100
    _late: Tensor | None = field(default=None, init=False)
    # The microbatches whose backward passes have not reached all activations. The
    # references are weak, so that after an error, a pass that never runs disappears
    # with its graph. Only ``_last`` keeps the last microbatch.
    _awaited: WeakSet[_Microbatch] = field(default_factory=WeakSet, init=False)
    _last: _Microbatch | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        losses = self.losses
        if isinstance(losses, DispersionLoss):
            losses = {losses.name: (1.0, losses)}
        self._losses = losses

    def __call__(self, predictions: Predictions | Tensor, labels: Tensor) -> Tensor:
        """Return the loss summed over the valid tokens, a scalar.

        The trainer divides the loss by the global number of valid tokens. The values of
        all DP and CP ranks add up to the global sum. Each rank's backward gives the
        complete gradient of its own shard exactly once.

        Args:
            predictions: the model's output, or a tuple of the same fields, or only
                logits, whose loss does not include dispersion.
            labels: token ids [B, N], or this CP rank's [B, N/cp].
        """
        if isinstance(predictions, tuple):
            logits, activations, segments = Predictions(*predictions)
        else:
            logits, activations, segments = Predictions(predictions)
        valid = (labels != self.ignore_index).sum(1)
        ce = self._cross_entropy(logits, labels, valid)
        if not activations:
            if (ledger := self._training_ledger()) is not None:
                ledger.add(ce, ce.new_zeros(()), valid.sum())
            return ce
        batch = _Microbatch(
            ce=ce.detach(),
            tokens=valid.sum(),
            weights=self._sum_over_cp(valid),
            step=self.step(),
            layers=len(activations),
            mask=self._documents(segments),
            ledger=self._training_ledger(),
        )
        coeff = self.coeff(batch.step)
        if self.deferred(activations):
            return ce + coeff * self._in_backward(activations, batch, coeff)
        return ce + coeff * self._in_forward(activations, batch)

    def deferred(self, zs: Sequence[Tensor]) -> bool:
        """Return whether the gradients of the losses are computed in backward, given the
        activations.
        """
        losses = [loss for _, loss in self._losses.values()]
        sharded = process_group(self.group) is not None
        return self._in_hooks(zs) and in_backward(losses, zs, sharded)

    def _in_hooks(self, zs: Sequence[Tensor]) -> bool:
        """Return whether hooks may add the losses' gradients to those of ``zs``."""
        return (
            self.defer
            and torch.is_grad_enabled()
            and len(zs[0]) > 0
            and all(z.requires_grad for z in zs)
        )

    def take_late(self) -> Tensor | None:
        """Return λ · dispersion of the backward passes since the last call, summed over
        the valid tokens; None if the returned losses include dispersion.

        Raises RuntimeError if the backward passes have not reached all activations.
        """
        late = self._late
        is_missing = len(self._awaited) > 0
        self._late = None
        self._last = None
        self._awaited.clear()
        if is_missing:
            raise RuntimeError(
                "the backward pass has not reached some activations, so these were not "
                "dispersed"
            )
        return late

    def _cross_entropy(self, logits: Any, labels: Tensor, valid: Tensor) -> Tensor:
        """Return CE summed over the valid tokens, and add the sequences to the ledger.

        ``valid`` [B] is the number of valid tokens of each sequence.
        """
        ce = self.cross_entropy(logits, labels)
        of_tokens = None
        if isinstance(ce, tuple):
            ce, of_tokens = ce
        if of_tokens is not None and (ledger := self._training_ledger()) is not None:
            ledger.add_rows(
                _local(of_tokens).view_as(labels).sum(1, dtype=torch.float64), valid
            )
        return _local(ce)

    def _sum_over_cp(self, valid: Tensor) -> Tensor:
        cp_group = process_group(self.cp_group)
        if cp_group is None:
            return valid
        valid = valid.clone()
        dist.all_reduce(valid, group=cp_group)
        return valid

    def _documents(self, segments: Tensor | None) -> TokenMask | None:
        """Return the mask of the documents of whole sequences; None if pairs across
        documents count too.

        The mask is computed once for all layers and losses, because the host waits for
        the device.
        """
        if not self.within_documents:
            return None
        assert segments is not None
        group = process_group(self.group)
        if group is not None:
            shards = segments.chunk(dist.get_world_size(group), 1)
            segments = shards[dist.get_rank(group)]
        return token_mask(segments, group)

    def _in_forward(self, activations: Sequence[Tensor], batch: _Microbatch) -> Tensor:
        """Return dispersion, summed over the valid tokens."""
        losses = self._losses_of(activations, batch)
        dispersion = self._weighted_sum(losses)
        cp_group = process_group(self.cp_group)
        if cp_group is None:
            self._record(losses.detach(), batch)
            return dispersion
        # Every CP rank has the value of the whole sequence, and the trainer adds up the
        # values. Therefore return 1/cp of the value, but the undivided gradient.
        part = self._record(losses.detach() / dist.get_world_size(cp_group), batch)
        return dispersion - dispersion.detach() + part

    def _in_backward(
        self, activations: Sequence[Tensor], batch: _Microbatch, coeff: float
    ) -> Tensor:
        """Return a scalar 0, whose backward computes the losses and adds their gradients.

        The losses' gradients are multiplied by the gradient of the scalar, which
        includes λ because the caller multiplies the scalar by λ. Backward also needs λ
        as ``coeff``, to add λ · dispersion to ``_late``.
        """
        self._awaited.add(batch)
        self._last = batch
        losses_of_parts: dict[tuple[int, int], Tensor] = {}
        # Backward itself does not run under autocast.
        in_bf16 = bf16_autocast(batch.ce.device.type)

        def loss_of_part(
            layer: int, z: Tensor, part: slice, arriving: list[Tensor]
        ) -> Tensor:
            with torch.autocast(z.device.type, torch.bfloat16, enabled=in_bf16):
                losses = self._losses_of(
                    [z], batch, first_layer=layer, part=part, arriving=arriving
                )
            losses_of_parts[layer, part.start] = losses.detach()
            return self._weighted_sum(losses)

        def finish() -> None:
            losses = reduce(torch.add, losses_of_parts.values())
            losses_of_parts.clear()  # the graph may be retained for another pass
            late = coeff * self._record(losses, batch)
            if self._late is not None:
                late = self._late + late
            self._late = late
            self._awaited.discard(batch)

        return compute_in_backward(activations, loss_of_part, finish)

    def _losses_of(
        self,
        zs: Sequence[Tensor],
        batch: _Microbatch,
        first_layer: int = 0,
        part: slice = slice(None),
        arriving: list[Tensor] | None = None,
    ) -> Tensor:
        """Return each loss, [losses], summed over the valid tokens.

        Args:
            zs: the activations of some layers, which contribute to the mean over all
                layers.
            first_layer: the index of the first of these layers.
            part: the sequences of the batch in ``zs``.
            arriving: as in ``DispersionLoss``; the first loss removes the entry.
        """
        mask = batch.mask
        if mask is not None:
            mask = mask[part]
        sums = []
        for _, loss in self._losses.values():
            values = loss(
                zs,
                self.group,
                batch.step,
                batch.fit_errors,
                segments=mask,
                first=first_layer,
                arriving=arriving,
                in_hooks=self._in_hooks(zs),
            )
            sums.append((batch.weights[part] * values).sum() / batch.layers)
        return torch.stack(sums)

    def _weighted_sum(self, losses: Tensor) -> Tensor:
        weights = [weight for weight, _ in self._losses.values()]
        weighted = [weight * loss for weight, loss in zip(weights, losses, strict=True)]
        return reduce(torch.add, weighted)

    def _record(self, losses: Tensor, batch: _Microbatch) -> Tensor:
        """Return dispersion, given the value of each loss, and add all terms to the
        ledger.
        """
        dispersion = self._weighted_sum(losses)
        if (ledger := batch.ledger) is not None:
            parts = {}
            if len(losses) > 1:
                parts = dict(zip(self._losses, losses, strict=True))
            ledger.add(batch.ce, dispersion, batch.tokens, parts)
            if batch.fit_errors:
                ledger.add_fit_errors(torch.cat(batch.fit_errors))
        return dispersion

    def _training_ledger(self) -> LossLedger | None:
        return self.ledger if torch.is_grad_enabled() else None


def _local(x: Tensor) -> Tensor:
    """Return a plain tensor. Under loss parallel, CE is a DTensor, which cannot be added
    to plain tensors.
    """
    if isinstance(x, DTensor):
        return x.to_local()
    return x
