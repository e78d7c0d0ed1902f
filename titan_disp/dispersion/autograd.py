"""These autograd functions compute a layer's value together with its gradient, and sum
values over ranks.

Either forward does so and saves the gradient, which backward only scales, or a hook
does so in the backward pass (``add_in_backward``). If a sequence is sharded, each rank
saves the complete gradient of its own tokens, so backward needs no communication: the
derivative of a sum over ranks is the identity. A sequence may be sharded over a process
group or a 1-D mesh.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renamed this function and warns about the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Group = dist.ProcessGroup | DeviceMesh | None
Result = tuple[Tensor, Tensor]  # value [B], ∂value/∂z [B, n, F]


def process_group(group: Group) -> dist.ProcessGroup | None:
    """Return the process group of ``group``, or None if there is nothing to
    communicate.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"the mesh over the sequence has {group.ndim} dimensions, expected 1: "
                "flatten it first"
            )
        group = group.get_group()
    if group is not None and dist.get_world_size(group) == 1:
        return None
    return group


def rank_in(group: dist.ProcessGroup | None) -> int:
    """Return the index of this rank in the group; 0 without a group."""
    return 0 if group is None else dist.get_rank(group)


def size_of(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks in the group; 1 without a group."""
    return 1 if group is None else dist.get_world_size(group)


def of_ranks(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return x [B, …] of each rank of the group (by default all), [ranks, B, …]."""
    ranks = dist.get_world_size(group)
    gathered = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    all_gather(gathered, x.contiguous(), group=group)
    return gathered.view(ranks, *x.shape)


def objects_of_ranks(x: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the object x of each rank of the group (by default all)."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, x, group=group)
    return gathered


class Gathering:
    """An all-gather of z [B, n, F] in its own dtype: normalized float32 vectors would
    cost more traffic for no gain.
    """

    def __init__(self, z: Tensor, group: dist.ProcessGroup) -> None:
        self.world = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.gathered = z.new_empty((self.world * z.shape[0], *z.shape[1:]))
        self.work = all_gather(
            self.gathered, z.contiguous(), group=group, async_op=True
        )

    def other_shards(self) -> list[Tensor]:
        """Wait for the all-gather and return the other ranks' shards, each [B, n,
        F].
        """
        self.work.wait()
        return [
            shard
            for other, shard in enumerate(self.gathered.chunk(self.world))
            if other != self.rank
        ]


class SavedGradient(torch.autograd.Function):
    """Save the gradient that ``compute`` returns.

    Backward scales it in place, unless the graph is retained.

    It returns the values [k·B] and the gradients [k·B, n, F] of all sequences of the k
    layers zs, which are computed together. The values are returned as [k, B].
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Result], *zs: Tensor) -> Tensor:
        value, grad = compute()
        value = value.view(len(zs), -1)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(grad.to(saved_dtype(zs[0].dtype)), value)
            ctx.dtype = zs[0].dtype
        return value

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor | None, ...]:
        grad, value = ctx.saved_tensors
        with torch.no_grad():
            out = torch.empty_like(grad) if _graph_is_retained() else grad
            out = torch.mul(grad, grad_value.reshape(-1, 1, 1), out=out).to(ctx.dtype)
        return None, *only_first_derivative(out, value, grad_value).chunk(len(value))


# AOTAutograd calls this private function too. If torch lacks it, backward does not
# reuse the memory.
_graph_is_retained = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


def saved_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return z's dtype, or float32 for float16, in which ∂S/∂z could overflow, since it
    grows with N.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def add_in_backward(
    zs: Sequence[Tensor], loss: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Return 0, whose backward adds the gradient of ``loss(index, z)``, a scalar, to
    that of each of ``zs`` [B, n, F].

    The loss is computed when the gradient of z arrives. Until then only z is kept,
    which the layer after it keeps as well, unless it is checkpointed together with
    others. Each z must have a gradient from elsewhere, as from that layer.
    """
    kept: list[Tensor | None] = [z.detach() for z in zs]
    factor: list[Tensor] = []

    def arrived(index: int, grad: Tensor | None) -> Tensor:
        z = kept[index]
        assert z is not None
        if grad is None:
            raise RuntimeError(
                f"activation {index} gets a gradient from dispersion only: another "
                "layer must take it as input"
            )
        if not _graph_is_retained():
            kept[index] = None
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            (of_loss,) = torch.autograd.grad(loss(index, z), z, factor[-1])
        if torch.is_grad_enabled():  # under create_graph
            total = of_loss + grad
        else:
            total = of_loss.add_(grad)
        return only_first_derivative(total, z, factor[-1])

    for index, z in enumerate(zs):
        z.register_hook(partial(arrived, index))
    return _Factor.apply(factor, *zs)


class _Factor(torch.autograd.Function):
    """Learn by what a loss is multiplied.

    As the tokens are inputs, this is known before a gradient of them is complete.
    """

    @staticmethod
    def forward(ctx: Any, factor: list[Tensor], *zs: Tensor) -> Tensor:
        ctx.factor = factor
        ctx.none = (None,) * (1 + len(zs))
        dtype = torch.promote_types(zs[0].dtype, torch.float32)  # float64 stays
        return zs[0].new_zeros((), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.factor.append(grad)
        return ctx.none


class SavedRows(torch.autograd.Function):
    """Attach a known gradient to a value [B]: ``rows`` [B, k, F] at some positions of
    z, and 0 at the others.

    ``positions`` is [k], distinct and shared by all sequences, or [B, k], where rows at
    the same position are added.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, value: Tensor, rows: Tensor, positions: Tensor
    ) -> Tensor:
        value = value.clone()
        ctx.save_for_backward(rows, positions, value)
        ctx.shape = z.shape
        ctx.dtype = z.dtype
        return value

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor, None, None, None]:
        rows, positions, value = ctx.saved_tensors
        with torch.no_grad():
            grad = torch.zeros(ctx.shape, dtype=ctx.dtype, device=rows.device)
            scaled = (rows * grad_value[:, None, None]).to(ctx.dtype)
            if positions.ndim == 1:
                grad[:, positions] = scaled
            else:
                grad.scatter_add_(1, positions[..., None].expand_as(scaled), scaled)
        return only_first_derivative(grad, value, grad_value), None, None, None


def only_first_derivative(grad: Tensor, value: Tensor, grad_value: Tensor) -> Tensor:
    """Return ``grad``, and raise an error if it is differentiated again.

    In backward, ``grad`` is a constant and not a function of z, so a second derivative
    would be silently wrong. ``value``, the saved output of forward, connects the graph
    to z, and ``grad_value`` to what the loss was multiplied by, such as a learned λ.
    (torch's ``once_differentiable`` connects it to neither: ``torch.autograd.grad``
    would skip it and drop part of a second derivative without an error.)
    """
    if torch.is_grad_enabled():
        return _NoSecondDerivative.apply(grad, value, grad_value)
    return grad


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, value: Tensor, grad_value: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            "the dispersion loss has no second derivative: its gradient is computed "
            "in forward and saved"
        )


class SumOverGroup(torch.autograd.Function):
    """Compute the sum over ranks.

    Backward is the identity, as each rank holds the whole gradient of its own rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class LogSumExpOverGroup(torch.autograd.Function):
    """Compute log Σ_ranks exp(x).

    Backward scales by exp(x − total), as x's gradient is relative to this rank's sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = of_ranks(x, group).logsumexp(0)
        ctx.save_for_backward((x - total).exp())
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (share,) = ctx.saved_tensors
        return grad * share, None
