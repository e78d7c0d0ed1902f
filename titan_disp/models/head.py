"""The output layer and the cross-entropy, computed together for some tokens at a time:
the logits never exist in full.

In training, the model returns ``HiddenStates`` in place of logits. The loss's forward
computes, for every chunk of tokens, logits, loss and gradients, so that backward only
scales the gradients. Nothing is computed twice. ``linear_cross_entropy`` of torch 2.13
does the same, but with bfloat16 inputs it adds up the loss and the weight's gradient in
bfloat16: the loss of 2,048 tokens was wrong by 2 %. Here both are added up in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torchtitan.components.loss import IGNORE_INDEX

OfChunk = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class HiddenStates:
    """Stand for logits that are not computed yet.

    FSDP2 and pytree take this object for a leaf without tensors.
    """

    h: Tensor  # [B, N, F], the final norm's output; under TP, a replicated DTensor
    # [V, F] of the output layer, as FSDP has gathered it; under TP, a DTensor whose
    # rows are sharded
    weight: Tensor


class ChunkedHead(nn.Linear):
    """An output layer that passes hidden states on in training.

    It is called so that the hooks of FSDP2 and TP run.
    """

    def forward(self, input: Tensor) -> Tensor:
        return input if self.training else super().forward(input)


class _HeadParallel(ColwiseParallel):
    """Gather the sequence and shard the rows of the weight.

    Logits are laid out in eval only.
    """

    @staticmethod
    def _prepare_output_fn(
        layouts: Any, local: bool, head: nn.Module, outputs: Any, mesh: DeviceMesh
    ) -> Any:
        return (
            outputs
            if head.training
            else ColwiseParallel._prepare_output_fn(layouts, local, head, outputs, mesh)
        )


def chunked(
    output: nn.Linear, tp_mesh: DeviceMesh | None, loss_parallel: bool
) -> ChunkedHead:
    """Return a head to put in the place of a model's output layer on the meta device,
    after TP and before tying.
    """
    rows, features = output.weight.shape
    head = ChunkedHead(
        features, rows, bias=False, device="meta", dtype=output.weight.dtype
    )
    if tp_mesh is not None:
        layouts = Shard(-1) if loss_parallel else Replicate()
        plan = _HeadParallel(
            input_layouts=Shard(1),
            output_layouts=layouts,
            use_local_output=not loss_parallel,
        )
        parallelize_module(head, tp_mesh, plan)
    return head


def chunked_cross_entropy(
    hidden: HiddenStates, labels: Tensor, chunk: int, of_chunk: OfChunk
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy summed over the valid tokens, and that of each token [B
    · N], which has no gradient.

    Both are float32, and the same on all ranks of TP.

    ``labels`` are [B, N] token ids, or −100 for tokens that do not count. The logits of
    ``chunk`` tokens exist at a time. ``of_chunk`` is ``loss_and_gradient``, which may
    be compiled if there is no TP.
    """
    h = hidden.h
    weight = hidden.weight
    if isinstance(h, DTensor) and isinstance(weight, DTensor):
        mesh = weight.device_mesh
        # as DTensor divides rows
        first = mesh.get_local_rank() * -(-weight.shape[0] // mesh.size())
        of_chunk = partial(loss_and_gradient, first=first, group=mesh.get_group())
        # Each rank has the part of h's gradient that comes from its rows of the weight.
        h = h.to_local(grad_placements=[Partial()])
        weight = weight.to_local()
    device = h.device.type
    if torch.is_autocast_enabled(device):  # as for nn.Linear
        h, weight = (x.to(torch.get_autocast_dtype(device)) for x in (h, weight))
    with torch.autocast(device, enabled=False):
        return _ChunkedCrossEntropy.apply(
            h.flatten(0, 1), weight, labels.flatten(), chunk, of_chunk
        )


def loss_and_gradient(
    h: Tensor,
    weight: Tensor,
    labels: Tensor,
    first: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each token [C] in float32, 0 if it does not count,
    and its gradient in the logits.

    The logits h @ weightᵀ, [C, V/tp], are those of the rows of the weight from
    ``first`` on.
    """
    # Multiplied here, because a caller could not let go of the logits: ``partial`` and
    # torch.compile hold arguments.
    dtype = weight.dtype
    p = (h @ weight.T).float()
    counts = labels != IGNORE_INDEX
    own = counts & (labels >= first) & (labels < first + p.shape[1])
    at = (
        torch.arange(len(labels), device=labels.device),
        torch.where(own, labels - first, 0),
    )
    highest = p.amax(1)
    if group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    p.sub_(highest[:, None])
    target = torch.where(own, p[at], 0)
    sums = torch.stack([p.exp_().sum(1), target])
    if group is not None:
        dist.all_reduce(sums, group=group)
    whole, target = sums
    loss = torch.where(counts, whole.log() - target, 0)
    gradient = p.mul_((counts / whole)[:, None]).to(dtype)
    # In float32: bfloat16 has no number between a probability of 0.998 and 1.
    gradient[at] = torch.where(own, target.exp() / whole - 1, gradient[at]).to(dtype)
    return loss, gradient


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Compute the gradients for h [T, F] and weight [V, F] of one dtype in forward.

    Backward scales them, once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        of_chunk: OfChunk,
    ) -> tuple[Tensor, Tensor]:
        losses = torch.empty(len(h), dtype=torch.float32, device=h.device)
        h_gradient = torch.empty_like(h)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(h), chunk):
            some = slice(start, start + chunk)
            losses[some], gradient = of_chunk(h[some], weight, labels[some])
            torch.mm(gradient, weight, out=h_gradient[some])
            if weight.dtype == torch.float32:
                weight_gradient.addmm_(gradient.T, h[some])
            else:
                weight_gradient += gradient.T @ h[some]
            del gradient  # the next chunk's logits take its place
        ctx.gradients = (h_gradient, weight_gradient)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the chunked head keeps its gradients for one backward pass, but this "
                "is the second one"
            )
        (h_gradient, weight_gradient) = ctx.gradients
        ctx.gradients = None
        return (
            h_gradient.mul_(grad),
            weight_gradient.mul_(grad).to(ctx.dtype),
            None,
            None,
            None,
        )
