"""The dispersion loss of whole or sequence-sharded activations (tensor parallel, context parallel, or both).

Exact and sharded: all-gather z in its own dtype along the sequence, compute own rows × all columns, all-reduce S. The rows' own
gradient is then complete, so backward needs no communication. One autograd node per layer returns its partial sum and
saves the gradient; one stacked all-reduce serves all layers, and its backward is the identity. Moments need no gather, but one
all-reduce of F×F numbers a layer; sampled tokens one of m×F.

Convention: with a group, every rank gets the full L, and backward returns grad_output · ∂L/∂z_local.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion import pairwise
from titan_disp.dispersion.collectives import all_gather, other_shards
from titan_disp.dispersion.l2_repel import PairExponents
from titan_disp.dispersion.pairwise import PairFunction
from titan_disp.dispersion.vectors import accumulation_dtype

Units = Callable[[Tensor], Tensor]  # z [B, n, F] → unit vectors


class Node(torch.autograd.Function):
    """A number per sequence whose gradient is computed with it: ``compute(z)`` → value [B], ∂value/∂z [B, n, F].

    Forward saves the gradient in z's dtype; backward scales it.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, compute: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:  # type: ignore[override]
        value, grad = compute(z.detach())
        if ctx.needs_input_grad[0]:
            # fp16 could overflow: ∂S/∂z grows with N. bf16 has fp32's range.
            ctx.save_for_backward(grad.to(torch.float32 if z.dtype == torch.float16 else z.dtype))
            ctx.dtype = z.dtype
        return value

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (grad,) = ctx.saved_tensors
        return (grad.to(grad_value.dtype) * grad_value[:, None, None]).to(ctx.dtype), None


def pair_sums(
    z: Tensor, u: Tensor, units: Units, pair: PairFunction, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """This rank's part of S [B], and V [B, n, F] of its rows; see ``pairwise``.

    Args:
        z: [B, n, F]; u: its unit vectors. units: z → unit vectors, for the other ranks' shards.
    """
    s, v = pairwise.all_pairs(u, pair)
    if group is not None:
        for shard in other_shards(z, group):
            s += pairwise.add_rows_against(u, units(shard), v, pair)
    return s, v


def pair_exponents(z: Tensor, tau: float, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """This rank's part of A = log Σ exp(−‖z_i − z_j‖²/τ) [B], and its gradient; see ``l2_repel``."""
    dtype = accumulation_dtype(z.dtype)
    rows = PairExponents(z.to(dtype), tau)
    rows.add()
    if group is not None:
        for shard in other_shards(z, group):
            rows.add(shard.to(dtype))
    return rows.result()


class SumOverGroup(torch.autograd.Function):
    """All-reduce (sum). Backward is the identity: every rank already holds the whole gradient of its own rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class LogSumExpOverGroup(torch.autograd.Function):
    """log Σ_ranks exp(x). Backward scales by exp(x − total): x's own gradient is relative to its own sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        world = dist.get_world_size(group)
        every = x.new_empty((world * x.shape[0], *x.shape[1:]))
        all_gather(every, x.contiguous(), group=group)
        total = every.view(world, *x.shape).logsumexp(0)
        ctx.save_for_backward((x - total).exp())
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (share,) = ctx.saved_tensors
        return grad * share, None
