"""The tokens that the loss is computed of: whole or sequence-sharded activations (tensor parallel, context parallel, or both).

Exact and sharded: all-gather z in its own dtype along the sequence, meanwhile compute own rows × own columns, then × the
others', all-reduce S: one stacked all-reduce for all layers. Moments gather some 64 tokens a layer
and all-reduce F×F numbers; sampled tokens m×F a layer, for all layers at once.

Convention: with a group, every rank gets the full L, and backward returns grad_output · ∂L/∂z_local.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.autograd import LogSumExpOverGroup, Result, SavedGradient, SumOverGroup, saved_dtype
from titan_disp.dispersion.kernels import accumulation_dtype
from titan_disp.dispersion.masks import Count, TokenMask

# This rank's tokens of some sequences of one layer, z [B, n, F] → value [B], ∂value/∂z [B, n, F]. Under a mask, z is 0 at padded
# positions, and what is returned as their gradient does not matter.
Compute = Callable[[Tensor, TokenMask | None], Result]

# Of z, whose float32 sums are in memory at a time, whatever the batch: 32 MiB, and 128 MiB on a GPU, which needs few and large
# kernels.
BATCH_ELEMENTS = 1 << 23
GPU_BATCH_ELEMENTS = 1 << 25


class Layers(ABC):
    """The tokens of every layer that the loss is computed of.

    Attributes:
        length: positions of a whole sequence.
        features: F.
        mask: which positions hold tokens; None where all do.
        group: over which the tokens are sharded; None where every rank holds all of them.
        in_bf16: whether float32 tokens are to be rounded to bf16.
    """

    length: int
    features: int
    mask: TokenMask | None
    group: dist.ProcessGroup | None
    in_bf16: bool

    @abstractmethod
    def each(self, compute: Compute) -> Tensor:
        """A value for each layer and sequence, [L, B]."""

    @property
    def tokens(self) -> Count:
        """N of a whole sequence."""
        return self.tokens_of(self.mask)

    def tokens_of(self, mask: TokenMask | None) -> Count:
        """N of the sequences that ``mask`` is of, at least 2: an empty sequence's loss will be replaced."""
        return self.length if mask is None else mask.counts.clamp_min(2)

    def sum_over_group(self, values: Tensor) -> Tensor:
        """Σ over the ranks that share a sequence."""
        return values if self.group is None else SumOverGroup.apply(values, self.group)

    def logsumexp_over_group(self, values: Tensor) -> Tensor:
        """log Σ exp over the ranks that share a sequence."""
        return values if self.group is None else LogSumExpOverGroup.apply(values, self.group)

    def mean_square(self) -> Tensor:
        """mean(z²) over tokens and features, [L, B]."""

        def own_part(z: Tensor, mask: TokenMask | None) -> Result:
            z = z.to(accumulation_dtype(z.dtype))
            return z.square().sum((1, 2)), 2 * z

        return self.sum_over_group(self.each(own_part)) / (self.tokens * self.features)

    def _apply(self, compute: Compute, z: Tensor, mask: TokenMask | None) -> Result:
        if mask is not None:
            z = z.where(mask.own, 0.0)  # padding may be NaN
        if self.in_bf16 and z.dtype == torch.float32:
            z = z.bfloat16()
        value, grad = compute(z, mask)
        return value, grad if mask is None else grad.masked_fill_(~mask.own, 0.0)


class WholeLayers(Layers):
    """All tokens of ``zs``: one [B, N, F] for each layer, or this rank's [B, N/p, F]."""

    def __init__(
        self, zs: Sequence[Tensor], length: int, mask: TokenMask | None, group: dist.ProcessGroup | None, in_bf16: bool
    ) -> None:
        self.zs, self.mask, self.group, self.in_bf16 = zs, mask, group, in_bf16
        self.length, self.features = length, zs[0].shape[2]

    def each(self, compute: Compute) -> Tensor:
        def of_layer(z: Tensor) -> Result:
            if self.group is None:
                return in_parts(z, self.mask, partial(self._apply, compute))
            # Each part of the batch would cost one more collective call, and shards are small.
            return self._apply(compute, z, self.mask)

        return torch.stack([SavedGradient.apply(z, of_layer) for z in self.zs])


def in_parts(z: Tensor, mask: TokenMask | None, compute: Compute) -> Result:
    """``compute(z, mask)``, for some sequences after the others, so that its temporaries do not grow with the batch."""
    elements = BATCH_ELEMENTS if z.device.type == "cpu" else GPU_BATCH_ELEMENTS
    most = max(1, elements // (z.shape[1] * z.shape[2]))
    if most >= len(z):
        return compute(z, mask)
    size = math.ceil(len(z) / math.ceil(len(z) / most))
    grad = torch.empty_like(z, dtype=saved_dtype(z.dtype))
    values = []
    for i in range(0, len(z), size):
        part = slice(i, i + size)
        value, grad[part] = compute(z[part], None if mask is None else mask[part])
        values.append(value)
    return torch.cat(values), grad
