"""Values whose gradients are known when they are computed, and sums over the ranks that share a sequence.

A layer's value comes with its gradient, which forward saves; backward scales it. Where a sequence is sharded, the gradient of a
rank's own tokens is complete, so that backward needs no communication: the derivative of a sum over ranks is the identity.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.collectives import all_gather

Result = tuple[Tensor, Tensor]  # value [B], ∂value/∂z [B, n, F]


class SavedGradient(torch.autograd.Function):
    """A number per sequence whose gradient is computed with it: ``compute(z)`` → value [B], ∂value/∂z [B, n, F].

    Forward saves the gradient in z's dtype; backward scales it, in its own memory unless the graph is retained.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, compute: Callable[[Tensor], Result]) -> Tensor:  # type: ignore[override]
        value, grad = compute(z.detach())
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(grad.to(saved_dtype(z.dtype)), value)
            ctx.dtype = z.dtype
        return value

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad, value = ctx.saved_tensors
        with torch.no_grad():
            out = torch.empty_like(grad) if _graph_is_retained() else grad
            out = torch.mul(grad, grad_value[:, None, None], out=out).to(ctx.dtype)
        return only_first_derivative(out, value), None


# Private, but what AOTAutograd asks too; where it is missing, memory is not reused.
_graph_is_retained = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def saved_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of a saved gradient: z's own, but fp16 could overflow, as ∂S/∂z grows with N. bf16 has fp32's range."""
    return torch.float32 if dtype == torch.float16 else dtype


class SavedRows(torch.autograd.Function):
    """A value [B] whose gradient is known, and 0 but at some positions of z.

    That is ``rows`` [B, k, F] at ``positions``: [k] of all sequences; or [B, k], where rows at the same position add up.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, value: Tensor, rows: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        value = value.clone()
        ctx.save_for_backward(rows, positions, value)
        ctx.shape, ctx.dtype = z.shape, z.dtype
        return value

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        rows, positions, value = ctx.saved_tensors
        with torch.no_grad():
            grad = torch.zeros(ctx.shape, dtype=ctx.dtype, device=rows.device)
            scaled = (rows * grad_value[:, None, None]).to(ctx.dtype)
            if positions.ndim == 1:
                grad[:, positions] = scaled
            else:
                grad.scatter_add_(1, positions[..., None].expand_as(scaled), scaled)
        return only_first_derivative(grad, value), None, None, None


def only_first_derivative(grad: Tensor, value: Tensor) -> Tensor:
    """``grad``, whose differentiation is an error: it is no function of z here, so that a second derivative would be wrong.

    ``value`` is the output that backward has saved, from which the graph leads to z. (torch's ``once_differentiable`` leads
    nowhere: ``torch.autograd.grad`` would pass over it, and leave out a part of a second derivative without an error.)
    """
    return _NoSecondDerivative.apply(grad, value) if torch.is_grad_enabled() else grad


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:  # type: ignore[override]
        raise RuntimeError(
            "the dispersion loss has no second derivative: its gradient is computed with its value, and saved"
        )


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
