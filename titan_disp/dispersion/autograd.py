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

from titan_disp.dispersion.vectors import Gradient

# torch 2.13 renamed this function and warns about the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Group = dist.ProcessGroup | DeviceMesh | None
Result = tuple[Tensor, Gradient]  # value [B], ∂value/∂z

NO_SECOND_DERIVATIVE = (
    "the dispersion loss has no second derivative: its gradient is computed beside its "
    "value, and is a constant"
)


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
    return Gathering(x, group).of_ranks()


def objects_of_ranks(x: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the object x of each rank of the group (by default all)."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, x, group=group)
    return gathered


class Gathering:
    """An all-gather of z [B, …] in its own dtype: normalized float32 vectors would cost
    more traffic for no gain.
    """

    def __init__(self, z: Tensor, group: dist.ProcessGroup | None) -> None:
        self.rank = dist.get_rank(group)
        self.gathered = z.new_empty((dist.get_world_size(group), *z.shape))
        self.work = all_gather(
            self.gathered.flatten(0, 1), z.contiguous(), group=group, async_op=True
        )

    def of_ranks(self) -> Tensor:
        """Wait for the all-gather, and return z of each rank, [ranks, B, …]."""
        self.work.wait()
        return self.gathered


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
        ctx.dtype = zs[0].dtype
        ctx.arriving = arriving
        if arriving is None:
            saved = gradient.tensor(saved_dtype(ctx.dtype))
            ctx.save_for_backward(value, saved)
        else:
            ctx.gradient = gradient
            ctx.save_for_backward(value)
        return value

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor | None, ...]:
        value, *saved = ctx.saved_tensors
        factor = grad_value.reshape(-1)
        with torch.no_grad():
            if saved:
                (grad,) = saved
                out = torch.empty_like(grad) if graph_is_retained() else grad
                out = torch.mul(grad, factor[:, None, None], out=out).to(ctx.dtype)
            else:
                arriving = ctx.arriving.pop() if ctx.arriving else None
                out = torch.empty_like(ctx.gradient.w, dtype=ctx.dtype)
                ctx.gradient.write(out, factor, arriving)
                ctx.gradient = None
        layers = only_first_derivative(out, value, grad_value).chunk(len(value))
        return None, None, *layers


def saved_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return z's dtype, or float32 for float16, in which ∂S/∂z could overflow, since it
    grows with N.
    """
    return torch.float32 if dtype == torch.float16 else dtype


# AOTAutograd calls this private function too. If torch lacks it, backward does not
# reuse the memory.
graph_is_retained = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


# Takes the index of a layer, the gradient of the value, and the one that arrives for z.
# Returns the latter with what the value contributes to it, in new memory.
Add = Callable[[int, Tensor, Tensor], Tensor]


def add_in_backward(
    zs: Sequence[Tensor],
    value: Tensor,
    add: Add,
    finish: Callable[[], None] | None = None,
) -> Tensor:
    """Return ``value``, in whose backward hooks ``add`` its gradients to those that
    arrive for each of ``zs`` [B, n, F], and then ``finish``.

    Hooks run in every backward pass through z; they do nothing in one that does not
    reach the value.

    Raises:
        RuntimeError: in backward, if no other gradient arrives for a layer, or under
            ``create_graph``.
    """
    current = _Pass()
    count = len(zs)  # the hooks must not hold zs

    def arrived(layer: int, grad: Tensor | None) -> Tensor | None:
        if current.number != torch._C._current_graph_task_id():
            return grad
        if grad is None:
            raise RuntimeError(
                f"activation {layer} gets a gradient from dispersion only: another "
                "layer must take it as input, and not within the same compiled function"
            )
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND_DERIVATIVE)
        total = add(layer, current.factor, grad)
        current.layers.add(layer)
        if finish is not None and len(current.layers) == count:
            finish()
        return total

    for layer, z in enumerate(zs):
        z.register_hook(partial(arrived, layer))
    return _InPass.apply(current, value, *zs)


class _Pass:
    """A backward pass that has reached a value."""

    number = -1  # autograd's
    factor: Tensor  # the gradient of the value
    layers: set[int]  # whose gradients have arrived


class _InPass(torch.autograd.Function):
    """Return ``value``, and describe the backward pass that reaches it.

    As the tokens are inputs, this happens before a gradient of them is complete. Their
    gradients come from hooks.
    """

    @staticmethod
    def forward(ctx: Any, current: _Pass, value: Tensor, *zs: Tensor) -> Tensor:
        ctx.current = current
        ctx.none = (None,) * (2 + len(zs))
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.current.number = torch._C._current_graph_task_id()
        ctx.current.factor = grad
        ctx.current.layers = set()
        return ctx.none


class SavedRows(torch.autograd.Function):
    """Attach a known gradient to a value [B]: ``grads`` [B, m, F] of some rows of z
    (``add_rows``), and 0 of the others.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, value: Tensor, grads: Tensor, rows: Tensor
    ) -> Tensor:
        value = value.clone()
        ctx.save_for_backward(grads, rows, value)
        ctx.shape = z.shape
        ctx.dtype = z.dtype
        return value

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor, None, None, None]:
        grads, rows, value = ctx.saved_tensors
        with torch.no_grad():
            zero = torch.zeros((), dtype=ctx.dtype, device=grads.device)
            scaled = grads * grad_value[:, None, None]
            grad = add_rows(zero.expand(ctx.shape), scaled, rows)
        return only_first_derivative(grad, value, grad_value), None, None, None


def add_rows(x: Tensor, grads: Tensor, rows: Tensor) -> Tensor:
    """Return x [B, n, F] with ``grads`` [B, m, F] added to ``rows`` [B·m] of
    x.flatten(0, 1), in new memory.
    """
    added = grads.flatten(0, 1).to(x.dtype)
    return x.flatten(0, 1).index_add(0, rows, added).view(x.shape)


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
        raise RuntimeError(NO_SECOND_DERIVATIVE)


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
