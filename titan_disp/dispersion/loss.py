"""The loss family: four variants, three estimators, any sharding of the sequence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion import functions, sampled
from titan_disp.dispersion.collectives import Group, process_group
from titan_disp.dispersion.kernels import accumulation_dtype, bf16_autocast, operand_dtype
from titan_disp.dispersion.moments import fit, quadratic_sum_, sample
from titan_disp.dispersion.pairwise import PairFunction
from titan_disp.dispersion.sharded import (
    LogSumExpOverGroup,
    Node,
    SumOverGroup,
    a_few_at_a_time,
    pair_exponents,
    pair_sums,
)
from titan_disp.dispersion.vectors import normalize_backward_, norms, standardize, standardize_backward_

VARIANTS = ("angular", "decorrelation", "l2_repel", "orthogonalization")
ESTIMATORS = ("exact", "moments", "sampled")
Result = tuple[Tensor, Tensor]  # value [B], gradient [B, n, F]


@dataclass(frozen=True)
class DispersionLoss:
    """Attributes:
    variant: of the paper's Table 1: angular, decorrelation, l2_repel, orthogonalization.
    estimator: exact (all pairs); moments (all pairs, linear in N; angular only); sampled (``max_tokens`` positions).
    tau: temperature of angular and l2_repel. clamp: κ, of angular and orthogonalization. norm_eps: ε added to the norms there.
    norm_coeff: λ_norm of l2_repel, whose distances could otherwise grow for ever.
    max_tokens, seed: of the sampled estimator.

    Raises:
        ValueError: unknown, out of range, or an estimator that the variant has not.
    """

    variant: str = "angular"
    estimator: str = "exact"
    tau: float = 1.0
    clamp: float = 0.25
    norm_eps: float = 1e-2
    norm_coeff: float = 0.1
    max_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant is {self.variant!r}, expected one of {', '.join(VARIANTS)}")
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"estimator is {self.estimator!r}, expected one of {', '.join(ESTIMATORS)}")
        if self.estimator == "moments" and self.variant != "angular":
            raise ValueError(
                f"estimator is 'moments', which variant {self.variant!r} has not: expected 'exact' or 'sampled'"
                + (" (exact decorrelation is linear in the tokens already)" if self.variant == "decorrelation" else "")
            )
        functions.check_parameters(self.tau, self.clamp, self.norm_eps)
        if not (math.isfinite(self.norm_coeff) and self.norm_coeff >= 0):
            raise ValueError(f"norm_coeff is {self.norm_coeff}, expected a number ≥ 0")
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}, expected at least 2")

    def __call__(
        self, zs: Sequence[Tensor], group: Group = None, step: int = 0, fit_errors: list[Tensor] | None = None
    ) -> Tensor:
        """Loss per layer and sequence.

        Args:
            zs: one [B, N, F] tensor per layer, or this rank's [B, N/p, F] shards when ``group`` is given. Shards must have equal
                shapes on all ranks; which tokens a rank holds, and in which order, does not matter.
            group: process group or 1-D mesh over which the sequence is sharded.
            step: of training, for the sampled estimator.
            fit_errors: receives, per layer, the relative error [B] of the moments' fit.

        Returns:
            [len(zs), B], float32 (float64 for float64 input), the same full value on every rank of ``group``. Gradients reach
            each rank's own shard, complete.

        Raises:
            ValueError: bad shape, or fewer than 2 tokens per sequence.

        Source: arXiv 2602.00217, Table 1; see ``functions``, ``l2_repel`` and ``moments`` for the formulas.
        """
        pg = process_group(group)
        tokens = _check(zs, 1 if pg is None else dist.get_world_size(pg))
        device = zs[0].device.type
        half = bf16_autocast(device) and self.variant != "l2_repel"  # whose distances are differences
        # The loss itself knows what may be in bf16: AMP would round cosines, and lose the digits near the clamp.
        with torch.autocast(device, enabled=False):
            if self.estimator == "sampled" and self.max_tokens < tokens:
                return self._sampled(zs, tokens, pg, step, half)
            linear = self.estimator == "moments" or (self.variant == "decorrelation" and zs[0].shape[2] < tokens)
            compute = partial(self._layer, linear=linear, tokens=tokens, group=pg, half=half, fit_errors=fit_errors)
            values = torch.stack([Node.apply(z, compute) for z in zs])
            if pg is not None and not linear:  # the linear forms' values are whole already
                over_group = LogSumExpOverGroup if self.variant == "l2_repel" else SumOverGroup
                values = over_group.apply(values, pg)
            losses = self._finish(values, tokens)
            if self.variant == "l2_repel" and self.norm_coeff:
                squares = torch.stack([Node.apply(z, _mean_square) for z in zs])
                if pg is not None:
                    squares = SumOverGroup.apply(squares / dist.get_world_size(pg), pg)
                losses = losses + self.norm_coeff * squares
            return losses

    def _sampled(
        self, zs: Sequence[Tensor], tokens: int, group: dist.ProcessGroup | None, step: int, half: bool
    ) -> Tensor:
        drawn = [sampled.positions(tokens, self.max_tokens, self.seed, step, layer) for layer in range(len(zs))]
        some, mine, local = sampled.gather([z.detach() for z in zs], drawn, group)

        def compute(part: Tensor) -> Result:
            value, grad = self._exact(_operand(part, half), None)
            if self.variant == "l2_repel" and self.norm_coeff:
                square, of_square = _mean_square(part)
                value, grad = value + self.norm_coeff * square, grad.add_(of_square, alpha=self.norm_coeff)
            return value, grad

        # All layers' few tokens at once: alone, they would be as many small kernels for each.
        values, grads = a_few_at_a_time(some.flatten(0, 1), compute)
        rows = [grad[:, own] for grad, own in zip(grads.view_as(some), mine, strict=True)]
        parts = zip(zs, values.view(len(zs), -1), rows, local, strict=True)
        return self._finish(torch.stack([_Chosen.apply(*part) for part in parts]), self.max_tokens)

    def _finish(self, values: Tensor, tokens: int) -> Tensor:
        pairs = tokens * (tokens - 1)
        if self.variant == "l2_repel":
            return values - math.log(pairs)
        if self.variant == "angular":
            # The moments' sum is of a fit, which nothing forbids to be negative for odd inputs.
            return torch.log(values.clamp_min(torch.finfo(values.dtype).tiny) / pairs)
        return values / pairs

    def _pair(self) -> PairFunction:
        if self.variant == "angular":
            return functions.angular(self.tau, self.clamp)
        if self.variant == "orthogonalization":
            return functions.orthogonalization(self.clamp)
        return functions.square

    def _layer(
        self,
        z: Tensor,
        linear: bool,
        tokens: int,
        group: dist.ProcessGroup | None,
        half: bool,
        fit_errors: list[Tensor] | None,
    ) -> Result:
        errors: list[Tensor] = []

        def compute(some: Tensor) -> Result:
            some = _operand(some, half)
            return self._linear(some, tokens, group, errors) if linear else self._exact(some, group)

        # In a group, each part of the batch would cost one more collective call, and shards are small.
        result = a_few_at_a_time(z, compute) if group is None else compute(z)
        if fit_errors is not None and errors:
            fit_errors.append(torch.cat(errors))
        return result

    def _exact(self, z: Tensor, group: dist.ProcessGroup | None) -> Result:
        """This rank's part of the sum over all pairs."""
        if self.variant == "l2_repel":
            return pair_exponents(z, self.tau, group)
        if self.variant == "decorrelation":
            u, norm = standardize(z)
            x, one = _standardized(z, u)
            s, w = pair_sums(x, one, z, lambda shard: _standardized(shard, standardize(shard)[0]), self._pair(), group)
            return s, standardize_backward_(u, norm, w.mul_(2))
        norm = norms(z)
        scale = 1 / (norm + self.norm_eps)
        s, w = pair_sums(z, scale, z, lambda shard: (shard, 1 / (norms(shard) + self.norm_eps)), self._pair(), group)
        return s, normalize_backward_(z, norm, w.mul_(2 / scale), self.norm_eps)

    def _linear(self, z: Tensor, tokens: int, group: dist.ProcessGroup | None, fit_errors: list[Tensor]) -> Result:
        """The whole sequence's sum."""
        if self.variant == "decorrelation":
            u, norm = standardize(z)
            coefficients = u.new_zeros(u.shape[0], 3)
            coefficients[:, 2] = 1.0  # a kernel; a tensor of Python's numbers would make the host wait for its copy
            s, grad = quadratic_sum_(u.clone(), coefficients, tokens, group, operand_dtype(z))
            return s, standardize_backward_(u, norm, grad)
        norm = norms(z)
        u = z / (norm + self.norm_eps)
        coefficients, error = fit(sample(u, tokens, group), self._pair())
        fit_errors.append(error)
        s, grad = quadratic_sum_(u, coefficients, tokens, group, operand_dtype(z))
        return s, normalize_backward_(z, norm, grad, self.norm_eps)


class _Chosen(torch.autograd.Function):
    """A value [B] whose gradient is known, and not 0 at ``local`` positions of z only: ``rows`` [B, k, F]."""

    @staticmethod
    def forward(ctx, z, value, rows, local):  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(rows, local)
        ctx.shape, ctx.dtype = z.shape, z.dtype
        return value.clone()

    @staticmethod
    def backward(ctx, grad_value):  # type: ignore[no-untyped-def, override]
        rows, local = ctx.saved_tensors
        grad = torch.zeros(ctx.shape, dtype=ctx.dtype, device=rows.device)
        grad[:, local] = (rows * grad_value[:, None, None]).to(ctx.dtype)
        return grad, None, None, None


def _operand(z: Tensor, half: bool) -> Tensor:
    return z.bfloat16() if half and z.dtype == torch.float32 else z


def _standardized(z: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Standardised tokens u of z as ``pairwise`` takes them: in the dtype of z's products, with scales of 1."""
    return u.to(operand_dtype(z)), torch.ones_like(u[..., :1])


def _mean_square(z: Tensor) -> Result:
    """mean(z²) over tokens and features."""
    z = z.to(accumulation_dtype(z.dtype))
    count = z.shape[1] * z.shape[2]
    return z.square().mean((1, 2)), z * (2.0 / count)


def _check(zs: Sequence[Tensor], world: int) -> int:
    """Tokens of a whole sequence."""
    if not zs:
        raise ValueError("no layers given, expected at least one [B, N, F] tensor")
    for z in zs:
        if z.ndim != 3 or not z.is_floating_point():
            raise ValueError(f"z has shape {tuple(z.shape)} and dtype {z.dtype}, expected a float tensor [B, N, F]")
    tokens = zs[0].shape[1] * world
    if any(z.shape[1] * world != tokens for z in zs):
        raise ValueError(f"layers differ in tokens per sequence: {[z.shape[1] for z in zs]}")
    if tokens < 2:
        raise ValueError(f"a sequence has {tokens} token(s), expected at least 2: dispersion is defined over pairs")
    return tokens


def dispersion_losses(zs: Sequence[Tensor], *, group: Group = None, step: int = 0, **options: Any) -> Tensor:
    """Loss per layer and sequence, [len(zs), B]. ``options`` are ``DispersionLoss``'s attributes; see there."""
    return DispersionLoss(**options)(zs, group, step)


def dispersion_loss(z: Tensor, *, group: Group = None, step: int = 0, **options: Any) -> Tensor:
    """Loss of one layer, [B]: ``dispersion_losses([z], …)[0]``; see there."""
    return dispersion_losses([z], group=group, step=step, **options)[0]
