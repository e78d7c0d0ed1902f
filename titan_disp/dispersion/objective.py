"""The training objective is CE + λ · dispersion, scaled for a trainer that sums its
losses.

TorchTitan 0.2.2 sums CE over the local tokens, divides by the *global* number of valid
tokens, and sums gradients over ranks and microbatches. A mean auxiliary loss added
naively would therefore be multiplied by ranks × accumulation steps. Here each
sequence's dispersion is multiplied by its number of valid labels (over the whole
sequence). The same division then makes it a mean over sequences, weighted by their
valid labels, for any mesh and any accumulation. λ may change over a run
(``CoeffSchedule``).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan_disp.dispersion.autograd import Group, add_in_backward, process_group
from titan_disp.dispersion.kernels import bf16_autocast
from titan_disp.dispersion.layers import packed
from titan_disp.dispersion.loss import DispersionLoss
from titan_disp.dispersion.masks import TokenMask, token_mask

# Logits, or (logits, activations), or (logits, activations, segments).
Predictions = (
    Tensor | tuple[Tensor, Sequence[Tensor]] | tuple[Tensor, Sequence[Tensor], Tensor]
)


class LossLedger:
    """Accumulate the loss terms since the last reset.

    The sums stay on the device, so adding never waits for the GPU.

    Attributes:
        sources: for each of several sources of data, how many of this rank's slots
            belong to it, in the order of the slots. The rank's sequences come from its
            slots in turn. Empty: sources are not told apart.
    """

    def __init__(self) -> None:
        self.sources: dict[str, int] = {}
        self._rows: list[Tensor] = []  # of each microbatch
        self._sums: Tensor | None = None
        self._names: list[str] = []  # of further losses
        self._worst_fit: Tensor | None = None

    def add(
        self,
        ce: Tensor,
        dispersion: Tensor,
        tokens: Tensor,
        losses: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Add scalars: both terms summed over valid tokens, without λ, and the number
        of valid tokens.

        ``losses`` are the parts of ``dispersion``, if it has several, without their
        weights.
        """
        terms = torch.stack(
            [
                term.detach().double()
                for term in (ce, dispersion, tokens, *losses.values())
            ]
        )
        self._names = list(losses)
        self._sums = terms if self._sums is None else self._sums + terms

    def add_rows(self, ce: Tensor, tokens: Tensor) -> None:
        """Add the next sequences' cross-entropies, each summed over its valid tokens,
        and numbers of valid tokens, [B].
        """
        self._rows.append(torch.stack([ce.detach().double(), tokens.double()]))

    def non_finite(self) -> Tensor | None:
        """Return whether CE and dispersion are not finite on this rank: [2] bool on the
        device; None before any add.
        """
        return None if self._sums is None else ~self._sums[:2].isfinite()

    def add_fit_errors(self, errors: Tensor) -> None:
        """Take in relative errors of the moments' fits, of any shape, and keep the
        largest.
        """
        worst = errors.detach().max()
        self._worst_fit = (
            worst if self._worst_fit is None else torch.maximum(self._worst_fit, worst)
        )

    def worst_fit(self, mesh: DeviceMesh | None) -> float | None:
        """Return the largest error on all ranks of ``mesh``, or None if nothing was
        fitted. A collective call.
        """
        if self._worst_fit is None:
            return None
        worst = self._worst_fit.clone()
        if mesh is not None:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=mesh.get_group())
        return worst.item()

    def reset(self) -> None:
        self._sums = self._worst_fit = None
        self._rows = []

    def mean(self, mesh: DeviceMesh | None) -> dict[str, float] | None:
        """Return the means over the valid tokens of all ranks of ``mesh`` (a collective
        call); None before any add.

        They are named "ce" and "dispersion", "dispersion_NAME" for each of several
        losses, and "ce/NAME" for each of several sources.
        """
        if self._sums is None:
            return None
        sums = torch.cat([self._sums, *self._of_sources()])
        if mesh is not None:
            dist.all_reduce(sums, group=mesh.get_group())
        ce, dispersion, tokens, *others = sums.tolist()
        tokens = tokens or math.nan
        n = len(self._names)
        losses = zip(self._names, others[:n], strict=True)
        # nothing, before ``add_rows``
        of_sources = zip(self.sources, others[n::2], others[n + 1 :: 2], strict=False)
        means = {"ce": ce / tokens, "dispersion": dispersion / tokens}
        means |= {f"dispersion_{name}": x / tokens for name, x in losses}
        return means | {
            f"ce/{name}": x / (count or math.nan) for name, x, count in of_sources
        }

    def _of_sources(self) -> list[Tensor]:
        """Return this rank's cross-entropy and valid tokens of each source, [2]
        float64.
        """
        if not self._rows:
            return []
        counts = list(self.sources.values())
        of_slots = torch.cat(self._rows, 1).unflatten(1, (-1, sum(counts))).sum(1)
        return [part.sum(1) for part in of_slots.split(counts, 1)]


def in_backward(
    losses: Iterable[DispersionLoss], zs: Sequence[Tensor], sharded: bool
) -> bool:
    """Return whether a trainer's backward pass should compute the gradients of losses
    of layers ``zs``.

    This needs layers so large that each is computed alone anyway, and whole sequences:
    of shards, the next layer is gathered while one is computed, and a rank saves only
    its part. Sampled losses save little.
    """
    return (
        not sharded
        and all(loss.estimator != "sampled" for loss in losses)
        and len(packed(zs)) == len(zs)
    )


@dataclass
class DispersionObjective:
    """Compute TorchTitan's ``loss_fn(predictions, labels)`` with dispersion added.

    Attributes:
        cross_entropy: takes logits [B, N, V], or what the model returns in their place,
            and labels [B, N]; returns CE summed over the valid tokens. If the ledger
            tells sources apart, that of each token [B · N] follows.
        losses: the dispersion loss, or several, each with its weight, by name.
        coeff: λ as a function of the number of completed steps.
        step: returns the number of completed steps, which also decides which positions
            are sampled.
        group: ranks over which the sequence of the activations is sharded (TP, CP, or
            CP×TP flattened).
        cp_group: ranks over which the labels are sharded too (CP).
        within_documents: whether the losses take only the pairs within documents, whose
            numbers the predictions then have.
        defer: whether gradients of large layers are computed in the backward pass, so
            that none is saved (``deferred``). The loss returned then has no dispersion,
            which ``take_late`` has after the backward pass.
        ledger: receives all terms separately, in training only.
        ignore_index: the label of tokens that do not count.
    """

    cross_entropy: Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]
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
    # whether a backward pass has to come
    _awaited: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        given = self.losses
        self._losses = (
            {given.name: (1.0, given)} if isinstance(given, DispersionLoss) else given
        )

    def __call__(self, predictions: Predictions, labels: Tensor) -> Tensor:
        """Return the loss summed over the valid tokens.

        The trainer divides it by their global number.

        Args:
            predictions: logits, or (logits, activations) with one [B, N/p, F] tensor
                per layer. The numbers of the tokens' documents may follow, [B, N] int.
            labels: [B, N] token ids, or this CP rank's [B, N/cp].

        Returns:
            Scalar. Its value summed over DP and CP ranks is the global sum. Each rank's
                backward gives the complete
            gradient of its own shard exactly once.
        """
        logits, activations = (
            predictions[:2] if isinstance(predictions, tuple) else (predictions, None)
        )
        cross = self.cross_entropy(logits, labels)
        parts = cross if isinstance(cross, tuple) else (cross,)
        # Under loss parallel, the sum below would mix DTensor and Tensor.
        ce, *of_tokens = (x.to_local() if isinstance(x, DTensor) else x for x in parts)
        weights = (labels != self.ignore_index).sum(1)
        local_tokens = weights.sum()
        if of_tokens and self.ledger is not None and torch.is_grad_enabled():
            self.ledger.add_rows(
                of_tokens[0].view_as(labels).sum(1, dtype=torch.float64), weights
            )
        if not activations:
            self._record(ce, None, local_tokens)
            return ce
        cp_group = process_group(self.cp_group)
        if cp_group is not None:
            weights = weights.clone()
            dist.all_reduce(weights, group=cp_group)
        step = self.step()
        layers = len(activations)
        fit_errors = list[Tensor]()
        coeff = self.coeff(step)
        segments = (
            self._own_segments(*predictions[2:]) if self.within_documents else None
        )

        # one number for each loss
        def losses_of(zs: Sequence[Tensor], first: int = 0) -> Tensor:
            given = self.group, step, fit_errors, None, segments, first
            every = [
                loss(zs, *given).sum(0) / layers for _, loss in self._losses.values()
            ]
            return torch.stack([(weights * loss).sum() for loss in every])

        if self.deferred(activations):
            self._awaited = True
            found = list[Tensor]()
            plain = ce.detach()
            in_bf16 = bf16_autocast(ce.device.type)

            # activations hold it, so that it must not refer to them
            def of_layer(layer: int, z: Tensor) -> Tensor:
                # which backward is not under
                with torch.autocast(z.device.type, torch.bfloat16, enabled=in_bf16):
                    losses = losses_of([z], layer)
                found.append(losses.detach())
                # the last one: the gradients of the others arrive before
                if layer == 0:
                    late = self._record(
                        plain, torch.stack(found).sum(0), local_tokens, fit_errors
                    )
                    self._late = coeff * late
                    self._awaited = False
                return self._together(losses)

            return ce + coeff * add_in_backward(activations, of_layer)
        losses = losses_of(activations)
        dispersion = self._together(losses)
        if cp_group is None:
            self._record(ce, losses.detach(), local_tokens, fit_errors)
        else:
            # The trainer sums values over CP ranks, which all hold the same full value;
            # gradients stay undivided.
            part = self._record(
                ce,
                losses.detach() / dist.get_world_size(cp_group),
                local_tokens,
                fit_errors,
            )
            dispersion = dispersion - dispersion.detach() + part
        return ce + coeff * dispersion

    def deferred(self, zs: Sequence[Tensor]) -> bool:
        """Return whether the gradients of the losses are computed in the backward pass
        of this call.
        """
        possible = (
            self.defer and torch.is_grad_enabled() and all(z.requires_grad for z in zs)
        )
        losses = [loss for _, loss in self._losses.values()]
        return possible and in_backward(
            losses, zs, process_group(self.group) is not None
        )

    def take_late(self) -> Tensor | None:
        """Return λ · dispersion, summed over the valid tokens, of the backward pass;
        None if it was in the loss already.
        """
        if self._awaited:
            raise RuntimeError(
                "the gradients of some activations have not arrived, so that these were not dispersed"
            )
        late = self._late
        self._late = None
        return late

    def _together(self, losses: Tensor) -> Tensor:
        both = zip(self._losses.values(), losses, strict=True)
        return torch.stack(
            [loss if weight == 1 else weight * loss for (weight, _), loss in both]
        ).sum()

    # once for all layers and losses: the host waits for it
    def _own_segments(self, segments: Tensor) -> TokenMask:
        group = process_group(self.group)
        own = (
            segments
            if group is None
            else segments.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]
        )
        return token_mask(own, group)

    def _record(
        self,
        ce: Tensor,
        losses: Tensor | None,
        tokens: Tensor,
        fit_errors: Sequence[Tensor] = (),
    ) -> Tensor:
        """Add the terms to the ledger, and return dispersion."""
        dispersion = ce.new_zeros(()) if losses is None else self._together(losses)
        if self.ledger is not None and torch.is_grad_enabled():
            several = (
                {}
                if losses is None or len(losses) == 1
                else dict(zip(self._losses, losses, strict=True))
            )
            self.ledger.add(ce, dispersion, tokens, several)
            if fit_errors:
                self.ledger.add_fit_errors(torch.stack(list(fit_errors)))
        return dispersion


DECAYS = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class CoeffSchedule:
    """Compute λ from the number of completed steps. The paper's λ is constant.

    Attributes:
        coeff: λ after warm-up.
        warmup_steps: steps over which λ grows linearly to ``coeff``; the first step has
            coeff / warmup_steps.
        decay: how λ then goes from ``coeff`` to ``final_coeff``: constant (it stays),
            linear, or half a cosine.
        final_coeff: λ at the end of the decay.
        total_steps: of the run.
        decay_steps: of the decay, after which λ stays at ``final_coeff``; 0: the decay
            ends at the last step.

    Raises:
        ValueError: an option is out of range.
    """

    coeff: float
    warmup_steps: int = 0
    decay: str = "constant"
    final_coeff: float = 0.0
    total_steps: int = 1
    decay_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("coeff", "final_coeff"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}, expected a number ≥ 0")
        warmup = self.warmup_steps
        total = self.total_steps
        if not 0 <= warmup <= total:
            raise ValueError(
                f"warmup_steps is {warmup}, expected 0 to {total}, the steps of the run"
            )
        if self.decay not in DECAYS:
            raise ValueError(
                f"decay is {self.decay!r}, expected one of {', '.join(DECAYS)}"
            )
        left = total - warmup
        if not 0 <= self.decay_steps <= left:
            raise ValueError(
                f"decay_steps is {self.decay_steps}, expected 0 to {left}, the steps after warm-up"
            )
        if self.decay_steps and self.decay == "constant":
            raise ValueError(
                f"decay_steps is {self.decay_steps}, but decay is 'constant': expected 0 or another decay"
            )

    def __call__(self, step: int) -> float:
        """Return λ of the step that follows ``step`` completed steps."""
        if step < self.warmup_steps:
            return self.coeff * (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.coeff
        # The last step has final_coeff exactly.
        steps = self.decay_steps or max(1, self.total_steps - 1 - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / steps)
        left = (
            1.0 - done
            if self.decay == "linear"
            else 0.5 * (1.0 + math.cos(math.pi * done))
        )
        return self.final_coeff + (self.coeff - self.final_coeff) * left
