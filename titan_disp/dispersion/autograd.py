"""These autograd functions compute a layer's value together with its gradient, and sum
values over ranks.

Either forward does so and saves the gradient, which backward only scales, or a hook
does so in the backward pass (``add_in_backward``), where the last pass over the gradient
also adds the gradient that arrives from the rest of the model. If a sequence is sharded,
each rank saves the complete gradient of its own tokens, so backward needs no
communication: the derivative of a sum over ranks is the identity. A sequence may be
sharded over a process group or a 1-D mesh.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_disp.dispersion.gradients import Gradient, as_tensor

# torch 2.13 renamed this function and warns about the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Group = dist.ProcessGroup | DeviceMesh | None
Result = tuple[Tensor, Gradient]  # value [B], ∂value/∂z


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


class LayerValue(torch.autograd.Function):
    """The values that ``compute`` returns for the k layers zs, which it computes
    together: [k·B], returned as [k, B].

    Without ``arriving``, forward saves the gradient, and backward scales it in place
    unless the graph is retained. With it, backward writes the gradient for the first
    time, and adds the only entry of ``arriving``, which it takes out of the list.
    """

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[[], Result],
        arriving: list[Tensor] | None,
        *zs: Tensor,
    ) -> Tensor:
        value, gradient = compute()
        value = value.view(len(zs), -1)
        if not any(ctx.needs_input_grad):
            return value
        ctx.shape = (value.numel(), *zs[0].shape[1:])
        ctx.dtype = zs[0].dtype
        ctx.arriving = arriving
        if arriving is None:
            ctx.save_for_backward(value, as_tensor(gradient, ctx.shape, zs[0]))
        else:
            ctx.gradient = gradient
            ctx.save_for_backward(value)
        return value

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor | None, ...]:
        value, *saved = ctx.saved_tensors
        with torch.no_grad():
            if saved:
                (grad,) = saved
                out = torch.empty_like(grad) if _graph_is_retained() else grad
                out = torch.mul(grad, grad_value.reshape(-1, 1, 1), out=out)
                out = out.to(ctx.dtype)
            else:
                out = torch.empty(ctx.shape, dtype=ctx.dtype, device=value.device)
                arriving = ctx.arriving.pop() if ctx.arriving else None
                ctx.gradient.write(out, grad_value.reshape(-1), arriving)
                ctx.gradient = None
        layers = only_first_derivative(out, value, grad_value).chunk(len(value))
        return None, None, *layers


# AOTAutograd calls this private function too. If torch lacks it, backward does not
# reuse the memory.
_graph_is_retained = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


# Returns the loss of layer ``index`` of z [B, n, F], a scalar. If the list has the
# gradient that arrives for z, the derivative of the loss may take it out and contain it.
LossOfLayer = Callable[[int, Tensor, list[Tensor] | None], Tensor]


def add_in_backward(zs: Sequence[Tensor], loss: LossOfLayer) -> Tensor:
    """Return 0, whose backward adds the gradient of ``loss`` to that of each of ``zs``
    [B, n, F].

    The loss is computed when the gradient of z arrives. Until then only z is kept,
    which the layer after it keeps as well, unless it is checkpointed together with
    others. Each z must have a gradient from elsewhere, as from that layer.
    """
    kept: list[Tensor | None] = [z.detach() for z in zs]
    factor = Factors()

    def arrived(index: int, grad: Tensor | None) -> Tensor | None:
        if not factor.is_known():
            return grad
        z = kept[index]
        assert z is not None
        grad = _from_elsewhere(grad, index)
        if not _graph_is_retained():
            kept[index] = None
        # Under create_graph, the sum must be differentiable.
        arriving = None if torch.is_grad_enabled() else [grad]
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            value = loss(index, z, arriving)
            (total,) = torch.autograd.grad(value, z, factor.value)
        was_added = arriving == []
        if not was_added:
            total = total + grad
        return only_first_derivative(total, z, factor.value)

    for index, z in enumerate(zs):
        z.register_hook(partial(arrived, index))
    dtype = torch.promote_types(zs[0].dtype, torch.float32)  # float64 stays
    value = zs[0].new_zeros((), dtype=dtype)
    return _Factor.apply(factor, value, *zs)


def _from_elsewhere(grad: Tensor | None, index: int) -> Tensor:
    """Return the gradient that arrives for a layer, or raise RuntimeError if none
    does.
    """
    if grad is None:
        raise RuntimeError(
            f"activation {index} gets a gradient from dispersion only: another layer "
            "must take it as input"
        )
    return grad


class Factors:
    """What a loss is multiplied by in a backward pass.

    Hooks on z also run in other backward passes, which do not reach the loss: in those,
    it is not known.
    """

    value: Tensor

    def __init__(self) -> None:
        self._pass = -1  # autograd's number of the backward pass of ``value``

    def set(self, value: Tensor) -> None:
        self.value = value
        self._pass = torch._C._current_graph_task_id()

    def is_known(self) -> bool:
        """Return whether the current backward pass has reached the loss."""
        return self._pass == torch._C._current_graph_task_id()


class _Factor(torch.autograd.Function):
    """Return ``value``, and learn by what it is multiplied.

    As the tokens are inputs, this is known before a gradient of them is complete. Their
    gradients come from hooks.
    """

    @staticmethod
    def forward(ctx: Any, factor: Factors, value: Tensor, *zs: Tensor) -> Tensor:
        ctx.factor = factor
        ctx.none = (None,) * (2 + len(zs))
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.factor.set(grad)
        return ctx.none


def add_rows_in_backward(
    zs: Sequence[Tensor],
    values: Tensor,
    rows: Sequence[Tensor],
    positions: Sequence[Tensor],
) -> Tensor:
    """Return ``values`` [L, B], whose backward adds the rows of each layer to the
    gradient that arrives for its z [B, n, F], so that none of its size begins at 0.

    ``rows`` and ``positions`` are those of ``SavedRows``. Each z must have a gradient
    from elsewhere.
    """
    factor = Factors()

    def arrived(index: int, grad: Tensor | None) -> Tensor | None:
        if not factor.is_known():
            return grad
        grad = _from_elsewhere(grad, index)
        factor_of_layer = factor.value[index][:, None, None]
        scaled = (rows[index] * factor_of_layer).to(grad.dtype)
        where = positions[index]
        if where.ndim == 1:
            total = grad.index_add(1, where, scaled)
        else:
            total = grad.scatter_add(1, where[..., None].expand_as(scaled), scaled)
        return only_first_derivative(total, values, factor.value)

    for index, z in enumerate(zs):
        z.register_hook(partial(arrived, index))
    return _Factor.apply(factor, values, *zs)


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
