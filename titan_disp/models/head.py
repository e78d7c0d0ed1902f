"""The output layer and the cross-entropy, computed together for one chunk of tokens at
a time, so that the logits of all tokens never exist at once.

In training, the model returns ``HiddenStates`` instead of logits. The loss's forward
computes logits, loss and gradients of each chunk, so that backward only scales the
gradients. Nothing is computed twice. ``linear_cross_entropy`` of torch 2.13 does the
same, but with bfloat16 inputs it sums the loss and the weight's gradient in bfloat16,
and the loss of 2,048 tokens had an error of 2 %. Here, loss and gradient are summed in
float32.
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

# ``loss_and_gradient``: takes hidden states, weight and labels of a chunk
OfChunk = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class HiddenStates:
    """The inputs of the output layer, instead of logits.

    FSDP2 and pytree treat this object as a leaf without tensors.
    """

    h: Tensor  # the final norm's output, [B, N, F]; under TP, a replicated DTensor
    # The output layer's weight [V, F], gathered by FSDP; under TP, a DTensor with
    # sharded rows
    weight: Tensor


class ChunkedHead(nn.Linear):
    """An output layer that returns its input in training.

    The model calls this layer in training too, so that the hooks of FSDP2 and TP run.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            return input
        return super().forward(input)


class _HeadParallel(ColwiseParallel):
    """Gathers the sequence, and shards the rows of the weight. The output layout
    applies to logits, which exist only in eval.
    """

    @staticmethod
    def _prepare_output_fn(
        layouts: Any, local: bool, head: nn.Module, outputs: Any, mesh: DeviceMesh
    ) -> Any:
        if head.training:
            return outputs
        return ColwiseParallel._prepare_output_fn(layouts, local, head, outputs, mesh)


def chunked(
    output: nn.Linear, tp_mesh: DeviceMesh | None, loss_parallel: bool
) -> ChunkedHead:
    """Return a head that replaces ``output``, a model's output layer on the meta device.

    Replace the layer after TP and before weights are tied.
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
    """Return the cross-entropy summed over the valid tokens, and the cross-entropy of
    each token [B · N]. Only the sum has a gradient.

    Both results are float32, and the same on all ranks of TP.

    Args:
        labels: token ids [B, N], or −100 for tokens that do not count.
        chunk: the number of tokens whose logits exist at a time.
        of_chunk: ``loss_and_gradient``, which may be compiled if there is no TP.
    """
    h = hidden.h
    weight = hidden.weight
    if isinstance(h, DTensor) and isinstance(weight, DTensor):
        mesh = weight.device_mesh
        # This rank's first row. DTensor rounds the rows per rank up.
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
    """Return the cross-entropy of each token in float32 [C], 0 if the token does not
    count, and the cross-entropy's gradient with respect to the logits [C, V/tp].

    The logits are h @ weightᵀ. ``weight`` has this rank's rows, which begin with row
    ``first`` of the vocabulary.
    """
    # The logits are computed here. If they were an argument, the caller could not free
    # them, because ``partial`` and torch.compile hold references to arguments.
    dtype = weight.dtype
    p = (h @ weight.T).float()
    counts = labels != IGNORE_INDEX
    # whether this rank has the row of the label
    has_row = counts & (labels >= first) & (labels < first + p.shape[1])
    at = (
        torch.arange(len(labels), device=labels.device),
        torch.where(has_row, labels - first, 0),
    )
    highest = p.amax(1)
    if group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    p.sub_(highest[:, None])
    target = torch.where(has_row, p[at], 0)
    sums = torch.stack([p.exp_().sum(1), target])
    if group is not None:
        dist.all_reduce(sums, group=group)
    total, target = sums
    loss = torch.where(counts, total.log() - target, 0)
    gradient = p.mul_((counts / total)[:, None]).to(dtype)
    # In float32, because bfloat16 would round a probability above 0.998 to 1.
    of_label = target.exp() / total - 1
    gradient[at] = torch.where(has_row, of_label, gradient[at]).to(dtype)
    return loss, gradient


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Return the summed loss and the losses of the tokens [T], given h [T, F] and weight
    [V, F] of the same dtype.

    Forward computes the gradients of h and weight. Backward scales these gradients, and
    can run only once.
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
            tokens = slice(start, start + chunk)
            losses[tokens], gradient = of_chunk(h[tokens], weight, labels[tokens])
            torch.mm(gradient, weight, out=h_gradient[tokens])
            if weight.dtype == torch.float32:
                weight_gradient.addmm_(gradient.T, h[tokens])
            else:
                weight_gradient += gradient.T @ h[tokens]
            del gradient  # frees the memory for the next chunk's logits
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
