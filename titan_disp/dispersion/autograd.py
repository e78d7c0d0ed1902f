"""Autograd functions that compute a layer's value together with its gradient, and sum
values over ranks.

There are two ways. In the first, forward computes value and gradient and saves the
gradient, and backward only scales the gradient. In the second, a hook computes value
and gradient in the backward pass (``add_in_backward``); the last pass over the gradient
then also adds the gradient from the rest of the model.

If a sequence is sharded, each rank saves the complete gradient of its own tokens. The
derivative of a sum over ranks is then the identity, so backward needs no communication.
A sequence may be sharded over a process group or a 1-D mesh.
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
    """Return ``group`` as a process group; None without a group or with one rank.

    Raises:
        ValueError: ``group`` is a mesh with several dimensions.
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
    """Return each rank's x [B, …], as [ranks, B, …]. Without a group: all ranks."""
    return Gathering(x, group).of_ranks()


def objects_of_ranks(x: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return each rank's object x. Without a group: all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, x, group=group)
    return gathered


class Gathering:
    """A running all-gather of z [B, …], in the dtype of z. (Normalized vectors in
    float32 would cost more traffic for no gain.)
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
    """Return the values [k, B] of the k layers zs, which one call of ``compute`` returns
    as [k·B].

    If ``arriving`` is None, forward saves the gradient, and backward scales it (in
    place, unless the graph is retained). Otherwise, only backward writes the gradient.
    It also removes the only entry of ``arriving``, and adds that entry to the gradient.
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
    """Return the dtype in which forward saves ∂S/∂z: z's dtype, or float32 if z is
    float16, because ∂S/∂z grows with N and could overflow.
    """
    return torch.float32 if dtype == torch.float16 else dtype


# AOTAutograd calls this private function too. If torch lacks the function, backward
# does not overwrite the saved gradient.
graph_is_retained = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


# Takes the index of a layer, the gradient of the value, and z's gradient from the rest
# of the model. Returns z's total gradient, in new memory.
Add = Callable[[int, Tensor, Tensor], Tensor]


def add_in_backward(
    zs: Sequence[Tensor],
    value: Tensor,
    add: Add,
    finish: Callable[[], None] | None = None,
) -> Tensor:
    """Return ``value``, with hooks on ``zs`` [B, n, F] that compute its gradient in the
    backward pass.

    When a gradient arrives for a layer from the rest of the model, the layer's hook
    replaces the gradient by the result of ``add``. The hook of the last layer then
    calls ``finish``. In a backward pass that does not reach ``value``, hooks do
    nothing.

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
    """The latest backward pass that has reached a value."""

    number = -1  # autograd's id of the pass
    factor: Tensor  # the gradient of the value
    layers: set[int]  # the layers whose gradients have arrived


class _InPass(torch.autograd.Function):
    """Return ``value``. Backward only stores the gradient of ``value`` and autograd's
    id of the backward pass.

    The tokens are inputs, so backward runs before any gradient of the tokens is
    complete. The hooks on the tokens then add the gradient of ``value``.
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
    """Return ``value`` [B], whose gradient is already computed: ``grads`` [B, m, F] for
    the given rows of z (as in ``add_rows``), and 0 for all other rows.
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
    """Return a copy of x [B, n, F] in which ``grads`` [B, m, F] are added to ``rows``
    [B·m] of x.flatten(0, 1).
    """
    added = grads.flatten(0, 1).to(x.dtype)
    return x.flatten(0, 1).index_add(0, rows, added).view(x.shape)


def only_first_derivative(grad: Tensor, value: Tensor, grad_value: Tensor) -> Tensor:
    """Return ``grad``, which raises RuntimeError if it is differentiated again.

    In backward, ``grad`` is a constant and not a function of z, so a second derivative
    would be silently wrong. ``value``, the saved output of forward, connects the result
    to z. ``grad_value`` connects the result to the factors of the loss, such as a
    learned λ. (torch's ``once_differentiable`` connects the result to neither, so
    ``torch.autograd.grad`` would drop part of a second derivative without an error.)
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
    """Return the sum of x over the ranks of a group.

    Backward is the identity, because each rank has the whole gradient of its own rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
