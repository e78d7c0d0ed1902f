"""The dispersion loss of whole or sequence-sharded activations (tensor parallel, context parallel, or both).

Exact and sharded: all-gather z in its own dtype along the sequence, meanwhile compute own rows × own columns, then × the
others', all-reduce S. The rows' own gradient is then complete, so backward needs no communication. One autograd node per layer
returns its partial sum and saves the gradient; one stacked all-reduce serves all layers, and its backward is the identity.
Moments need no gather, but one all-reduce of F×F numbers a layer; sampled tokens one of m×F a layer, for all layers at once.

Convention: with a group, every rank gets the full L, and backward returns grad_output · ∂L/∂z_local.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion import pairwise
from titan_disp.dispersion.collectives import Gathering, all_gather
from titan_disp.dispersion.kernels import accumulation_dtype
from titan_disp.dispersion.l2_repel import PairExponents
from titan_disp.dispersion.pairwise import PairFunction

Units = Callable[[Tensor], tuple[Tensor, Tensor]]
Compute = Callable[[Tensor], tuple[Tensor, Tensor]]  # z [B, n, F] → value [B], ∂value/∂z [B, n, F]

# Of z, whose float32 sums are in memory at a time, whatever the batch: 32 MiB, and 128 MiB on a GPU, which needs few and large
# kernels.
GROUP_ELEMENTS = 1 << 23
GPU_GROUP_ELEMENTS = 1 << 25


class Node(torch.autograd.Function):
    """A number per sequence whose gradient is computed with it: ``compute(z)`` → value [B], ∂value/∂z [B, n, F].

    Forward saves the gradient in z's dtype; backward scales it, in its own memory unless the graph is retained.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, compute: Compute) -> Tensor:  # type: ignore[override]
        value, grad = compute(z.detach())
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(grad.to(saved_dtype(z.dtype)))
            ctx.dtype = z.dtype
        return value

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (grad,) = ctx.saved_tensors
        scale = grad_value[:, None, None]
        out = torch.empty_like(grad) if _graph_is_retained() else grad
        return torch.mul(grad, scale, out=out).to(ctx.dtype), None


# Private, but what AOTAutograd asks too; where it is missing, memory is not reused.
_graph_is_retained = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def saved_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of a saved gradient: z's own, but fp16 could overflow, as ∂S/∂z grows with N. bf16 has fp32's range."""
    return torch.float32 if dtype == torch.float16 else dtype


def a_few_at_a_time(z: Tensor, compute: Compute) -> tuple[Tensor, Tensor]:
    """``compute(z)``, for some sequences after the others, so that its temporaries do not grow with the batch."""
    elements = GROUP_ELEMENTS if z.device.type == "cpu" else GPU_GROUP_ELEMENTS
    few = max(1, elements // (z.shape[1] * z.shape[2]))
    if few >= len(z):
        return compute(z)
    grad = torch.empty_like(z, dtype=saved_dtype(z.dtype))
    values = []
    for i in range(0, len(z), few):
        value, part = compute(z[i : i + few])
        values.append(value)
        grad[i : i + few] = part
    return torch.cat(values), grad


def pair_sums(
    x: Tensor, scale: Tensor, z: Tensor, units: Units, pair: PairFunction, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """This rank's part of S [B], and W [B, n, F] of its rows; see ``pairwise``.

    Args:
        x, scale: ``units(z)``. units: z [B, n, F] → x [B, n, F] and scales [B, n, 1], for the other ranks' shards.
    """
    gathering = Gathering(z, group) if group is not None else None
    s, w = pairwise.all_pairs(x, scale, pair)
    for shard in gathering.other_shards() if gathering is not None else ():
        s += pairwise.add_rows_against((x, scale), units(shard), w, pair)
    return s, w


def pair_exponents(z: Tensor, tau: float, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """This rank's part of A = log Σ exp(−‖z_i − z_j‖²/τ) [B], and its gradient; see ``l2_repel``."""
    dtype = accumulation_dtype(z.dtype)
    gathering = Gathering(z, group) if group is not None else None
    rows = PairExponents(z.to(dtype), tau)
    rows.add()
    for shard in gathering.other_shards() if gathering is not None else ():
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
