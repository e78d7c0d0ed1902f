"""The training objective is CE + λ · dispersion, scaled for a trainer that sums its
losses.

TorchTitan 0.2.2 sums CE over the local tokens, divides by the *global* number of valid
tokens, and sums gradients over ranks and microbatches. A mean auxiliary loss added
naively would therefore be multiplied by ranks × accumulation steps. Here each
sequence's dispersion is multiplied by its number of valid labels (over the whole
sequence). The same division then makes it a mean over sequences, weighted by their
valid labels, for any mesh and any accumulation. λ may change over a run
(``schedules.CoeffSchedule``).
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
    """Accumulate the loss terms since the last reset.

    The sums stay on the device, so adding never waits for the GPU.

    Attributes:
        sources: number of this rank's slots (streams of documents) that read each
            source of data, in the order of the slots, if each source shall have a mean
            of its own. The sequences of a rank come from its slots in turn.
    """

    def __init__(self) -> None:
        self.sources: dict[str, int] = {}
        self.reset()

    def reset(self) -> None:
        self._names: list[str] = []
        self._sums: Tensor | None = None  # [names] float64, on this rank
        # for each microbatch [2, B]: cross-entropy and valid tokens of each sequence
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
            losses: if dispersion is a weighted sum of several losses, each without its
                weight.
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
        self._sums = sums if self._sums is None else self._sums + sums

    def add_rows(self, ce: Tensor, tokens: Tensor) -> None:
        """Add the next sequences.

        Args:
            ce: [B], the cross-entropy of each, summed over its valid tokens.
            tokens: [B], the number of these tokens.
        """
        self._rows.append(torch.stack([ce.detach().double(), tokens.double()]))

    def add_fit_errors(self, errors: Tensor) -> None:
        """Add relative errors, of any shape, of the moments estimator's fits.

        The largest since the last reset is kept.
        """
        worst = errors.detach().max()
        self._worst_fit = (
            worst if self._worst_fit is None else torch.maximum(self._worst_fit, worst)
        )

    def non_finite(self) -> Tensor | None:
        """Return whether CE and dispersion are not finite on this rank.

        The result is [2] bool on the device, or None before any add.
        """
        return None if self._sums is None else ~self._sums[:2].isfinite()

    def worst_fit(self, mesh: DeviceMesh | None) -> float | None:
        """Return the largest error of a fit on all ranks of ``mesh``.

        Returns None if nothing was fitted. A collective call.
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
        token is NaN. Returns None before any add. A collective call.
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
        """Return for each source this rank's cross-entropy and valid tokens.

        Each is [2] float64. The list is empty if no rows were added.
        """
        if not self._rows:
            return []
        slots = list(self.sources.values())
        # Row i of the rank is a sequence of slot i modulo the number of slots.
        slot_sums = torch.cat(self._rows, 1).unflatten(1, (-1, sum(slots))).sum(1)
        return [source_sums.sum(1) for source_sums in slot_sums.split(slots, 1)]


def in_backward(
    losses: Iterable[DispersionLoss], zs: Sequence[Tensor], sharded: bool
) -> bool:
    """Return whether to compute the gradients of losses in a trainer's backward pass.

    This needs layers ``zs`` so large that each is computed alone anyway, and sequences
    that are not sharded. Otherwise, forward gathers the next layer while it computes
    one, and a rank saves only its own shard's gradient. Sampled losses save rows.
    """
    return (
        not sharded
        and all(loss.estimator != "sampled" for loss in losses)
        and len(packed(zs)) == len(zs)
    )


@dataclass(eq=False)
class _Microbatch:
    """What the losses of one forward pass need.

    Hooks on the activations hold it, so it must not hold the activations: neither would
    be freed.
    """

    ce: Tensor  # detached; summed over this rank's valid tokens
    tokens: Tensor  # number of this rank's valid tokens
    weights: Tensor  # [B], number of valid labels of each whole sequence
    step: int
    layers: int
    mask: TokenMask | None  # documents, if only the pairs within them count
    ledger: "LossLedger | None"  # None in validation
    fit_errors: list[Tensor] = field(default_factory=list)  # which the losses append


@dataclass
class DispersionObjective:
    """Compute TorchTitan's ``loss_fn(predictions, labels)`` with dispersion added.

    Attributes:
        cross_entropy: takes logits [B, N, V], or what the model returns in their place,
            and labels [B, N]. Returns CE summed over the valid tokens, or a pair of
            this and CE of each token [B · N], which the ledger needs to tell sources
            apart.
        losses: the dispersion loss, or a dict from name to (weight, loss).
        coeff: λ as a function of the number of completed steps.
        step: returns the number of completed steps, which also decides which positions
            are sampled.
        group: ranks over which the sequence of the activations is sharded (TP, CP, or
            CP×TP flattened).
        cp_group: ranks over which the labels are sharded too (CP).
        within_documents: whether the losses take only the pairs within documents.
            Predictions must then have segments.
        defer: whether to compute the gradients of large layers in the backward pass, so
            that none is saved. The loss returned then does not contain dispersion:
            ``take_late`` returns it after the backward pass.
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
    # whose backward passes have not reached all activations. Those that nobody will
    # run, after an error, are forgotten with their graphs, but not the last one.
    _awaited: WeakSet[_Microbatch] = field(default_factory=WeakSet, init=False)
    _last: _Microbatch | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        losses = self.losses
        if isinstance(losses, DispersionLoss):
            losses = {losses.name: (1.0, losses)}
        self._losses = losses

    def __call__(self, predictions: Predictions | Tensor, labels: Tensor) -> Tensor:
        """Return the loss summed over the valid tokens, a scalar.

        The trainer divides it by their global number. The values of all DP and CP ranks
        add up to the global sum. Each rank's backward gives the complete gradient of
        its own shard exactly once.

        Args:
            predictions: what the model returns, or a tuple of the same fields, or
                logits alone, whose loss has no dispersion.
            labels: [B, N] token ids, or this CP rank's [B, N/cp].
        """
        fields = predictions if isinstance(predictions, tuple) else (predictions,)
        logits, activations, segments = Predictions(*fields)
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
            mask=self._documents(segments) if self.within_documents else None,
            ledger=self._training_ledger(),
        )
        coeff = self.coeff(batch.step)
        if self.deferred(activations):
            return ce + coeff * self._in_backward(activations, batch, coeff)
        return ce + coeff * self._in_forward(activations, batch)

    def deferred(self, zs: Sequence[Tensor]) -> bool:
        """Return whether this call computes the losses' gradients in backward."""
        losses = [loss for _, loss in self._losses.values()]
        sharded = process_group(self.group) is not None
        return self._in_hooks(zs) and in_backward(losses, zs, sharded)

    def _in_hooks(self, zs: Sequence[Tensor]) -> bool:
        """Return whether hooks may add gradients to those that arrive for zs."""
        return (
            self.defer
            and torch.is_grad_enabled()
            and len(zs[0]) > 0
            and all(z.requires_grad for z in zs)
        )

    def take_late(self) -> Tensor | None:
        """Return λ · dispersion of the backward passes since the last call, summed over
        the valid tokens.

        Returns None if the losses contained it. Raises RuntimeError if the
        backward passes have not reached all activations.
        """
        late = self._late
        is_missing = len(self._awaited) > 0
        self._late = None
        self._last = None
        self._awaited.clear()
        if is_missing:
            raise RuntimeError(
                "the gradients of some activations have not arrived, so that these "
                "were not dispersed"
            )
        return late

    def _cross_entropy(self, logits: Any, labels: Tensor, valid: Tensor) -> Tensor:
        result = self.cross_entropy(logits, labels)
        ce, of_tokens = result if isinstance(result, tuple) else (result, None)
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

    def _documents(self, segments: Tensor | None) -> TokenMask:
        """Return the documents of the whole sequences.

        ``token_mask`` gathers them from the ranks' shards of ``segments``. This is done
        once for all layers and losses, because the host waits for the device.
        """
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
        # Every CP rank has the value of the whole sequence, and the trainer adds them
        # up: return 1/cp of the value, but the gradient undivided.
        part = self._record(losses.detach() / dist.get_world_size(cp_group), batch)
        return dispersion - dispersion.detach() + part

    def _in_backward(
        self, activations: Sequence[Tensor], batch: _Microbatch, coeff: float
    ) -> Tensor:
        """Return 0, whose backward computes the losses and adds their gradients.

        The gradients are multiplied by the gradient that arrives here, which contains λ
        because the caller multiplies by it. ``coeff`` is λ for the value that backward
        adds to ``_late``, λ · dispersion.
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
                losses = self._losses_of([z], batch, layer, part, arriving)
            losses_of_parts[layer, part.start] = losses.detach()
            return self._weighted_sum(losses)

        def finish() -> None:
            losses = reduce(torch.add, losses_of_parts.values())
            losses_of_parts.clear()  # the graph may be retained for another pass
            late = coeff * self._record(losses, batch)
            self._late = late if self._late is None else self._late + late
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

        Of the mean over layers, it has the part of these layers, and of the batch,
        ``part``. ``arriving`` is that of ``DispersionLoss``; the first loss takes it.
        """
        mask = None if batch.mask is None else batch.mask[part]
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
        """Add the terms to the ledger. Return dispersion."""
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
    # Under loss parallel, CE is a DTensor, which cannot be added to plain tensors.
    return x.to_local() if isinstance(x, DTensor) else x
