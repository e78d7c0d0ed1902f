"""The tokens that the loss is computed of: whole or sequence-sharded activations (tensor parallel, context parallel, or both).

Exact and sharded: all-gather z in its own dtype along the sequence, meanwhile compute own rows × own columns, then × the
others', all-reduce S: one stacked all-reduce for all layers. Moments need no gather, but one all-reduce of F×F numbers a layer;
sampled tokens one of m×F a layer, for all layers at once.

Convention: with a group, every rank gets the full L, and backward returns grad_output · ∂L/∂z_local.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.autograd import Compute, LogSumExpOverGroup, Result, SavedGradient, SumOverGroup, saved_dtype
from titan_disp.dispersion.kernels import accumulation_dtype

# Of z, whose float32 sums are in memory at a time, whatever the batch: 32 MiB, and 128 MiB on a GPU, which needs few and large
# kernels.
BATCH_ELEMENTS = 1 << 23
GPU_BATCH_ELEMENTS = 1 << 25


class Layers(ABC):
    """The tokens of every layer that the loss is computed of.

    Attributes:
        tokens: N of a whole sequence.
        features: F.
        group: over which the tokens are sharded; None where every rank holds all of them.
        in_bf16: whether float32 tokens are to be rounded to bf16.
    """

    tokens: int
    features: int
    group: dist.ProcessGroup | None
    in_bf16: bool

    @abstractmethod
    def each(self, compute: Compute) -> Tensor:
        """A value for each layer and sequence, [L, B]. ``compute`` sees this rank's tokens of some sequences of one layer."""

    def sum_over_group(self, values: Tensor) -> Tensor:
        """Σ over the ranks that share a sequence."""
        return values if self.group is None else SumOverGroup.apply(values, self.group)

    def logsumexp_over_group(self, values: Tensor) -> Tensor:
        """log Σ exp over the ranks that share a sequence."""
        return values if self.group is None else LogSumExpOverGroup.apply(values, self.group)

    def mean_square(self) -> Tensor:
        """mean(z²) over tokens and features, [L, B]."""
        count = self.tokens * self.features

        def own_part(z: Tensor) -> Result:
            z = z.to(accumulation_dtype(z.dtype))
            return z.square().sum((1, 2)) / count, z * (2.0 / count)

        return self.sum_over_group(self.each(own_part))

    def operand(self, z: Tensor) -> Tensor:
        return z.bfloat16() if self.in_bf16 and z.dtype == torch.float32 else z


class WholeLayers(Layers):
    """All tokens of ``zs``: one [B, N, F] for each layer, or this rank's [B, N/p, F]."""

    def __init__(self, zs: Sequence[Tensor], tokens: int, group: dist.ProcessGroup | None, in_bf16: bool) -> None:
        self.zs, self.tokens, self.features = zs, tokens, zs[0].shape[2]
        self.group, self.in_bf16 = group, in_bf16

    def each(self, compute: Compute) -> Tensor:
        def of_layer(z: Tensor) -> Result:
            # In a group, each part of the batch would cost one more collective call, and shards are small.
            return in_parts(z, of_part) if self.group is None else of_part(z)

        def of_part(z: Tensor) -> Result:
            return compute(self.operand(z))

        return torch.stack([SavedGradient.apply(z, of_layer) for z in self.zs])


def in_parts(z: Tensor, compute: Compute) -> Result:
    """``compute(z)``, for some sequences after the others, so that its temporaries do not grow with the batch."""
    elements = BATCH_ELEMENTS if z.device.type == "cpu" else GPU_BATCH_ELEMENTS
    size = max(1, elements // (z.shape[1] * z.shape[2]))
    if size >= len(z):
        return compute(z)
    grad = torch.empty_like(z, dtype=saved_dtype(z.dtype))
    values = []
    for i in range(0, len(z), size):
        value, part = compute(z[i : i + size])
        values.append(value)
        grad[i : i + size] = part
    return torch.cat(values), grad
