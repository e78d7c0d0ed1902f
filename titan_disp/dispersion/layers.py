"""The loss is computed from the tokens of several layers, which may be sharded along
the sequence (TP, CP, or both).

Communication of a sharded sequence, of a loss that is

exact
    All-gather z in its own dtype, one step ahead: while a layer's own rows × own
    columns and own rows × other columns are computed, the next layer is gathered.
    All-reduce S, stacked over the layers.
by moments
    Per layer, all-gather about 64 tokens per sequence and all-reduce F×F numbers per
    sequence.
exact, of a function of moments
    Per layer, all-reduce F×F numbers per sequence.
exact, of autograd code
    Per layer, all-gather z in its own dtype. Every rank computes the whole loss.
sampled
    All-reduce m×F numbers per sequence and layer, for all layers at once (m sampled
    tokens).

With a group, every rank gets the full loss, and backward returns grad_output ·
∂loss/∂z_local.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.autograd import (
    Gathering,
    LayerValue,
    LogSumExpOverGroup,
    Result,
    SumOverGroup,
)
from titan_disp.dispersion.gradients import (
    Gradient,
    Known,
    Masked,
    Parts,
    saved_dtype,
)
from titan_disp.dispersion.kernels import accumulation_dtype
from titan_disp.dispersion.masks import Count, TokenMask

# Takes this rank's tokens of some sequences of one layer, z [B, n, F], and their mask.
# Returns value [B] and ∂value/∂z. Under a mask, z is 0 at padded positions, and the
# gradient there is ignored.
Compute = Callable[[Tensor, TokenMask | None], Result]

# The number of elements of z that are processed at a time, so that memory does not grow
# with the batch. In float32 they take 32 MiB, or 128 MiB on a GPU, which needs few and
# large kernels.
BATCH_ELEMENTS = 1 << 23
GPU_BATCH_ELEMENTS = 1 << 25
# Of layers that are computed together. On a CPU, they fit into its caches. On a GPU,
# their copies would cost more than the kernels of larger ones.
PACK_ELEMENTS = 1 << 20
GPU_PACK_ELEMENTS = 1 << 21


class Layers(ABC):
    length: int  # positions per sequence that the loss takes, over all ranks
    features: list[int]  # F of each layer
    mask: TokenMask | None  # which positions hold tokens; None if all do
    # ranks over which the tokens are sharded; None if every rank holds all of them
    group: dist.ProcessGroup | None
    in_bf16: bool  # whether float32 tokens are rounded to bf16 first

    segmented: bool = False  # whether only the pairs within segments count
    step: int = 0  # that was given with the layers
    first: int = 0  # the index of the first of them
    # the gradient that arrives for the only layer, in a hook (``add_in_backward``)
    arriving: list[Tensor] | None = None
    # whether rows of gradients are added by hooks (``add_rows_in_backward``)
    in_hooks: bool = False

    @abstractmethod
    def each(self, *computes: Compute) -> Tensor:
        """Apply one ``compute`` to every layer, or to each its own, and return the
        values, [L, B].
        """

    def tokens(self, mask: TokenMask | None) -> Count:
        """Return the number of tokens per sequence, at least 2: the loss 0 of shorter
        ones is filled in later.
        """
        if mask is None:
            return self.length
        return mask.counts.clamp_min(2)

    def pairs(self) -> Count:
        """Return the number of pairs i ≠ j that the loss takes, per sequence or [L, B];
        at least 1, as ``tokens``.
        """
        if self.mask is None:
            return self.length * (self.length - 1)
        return self._masked_pairs().clamp_min(1)

    def without_pairs(self) -> Tensor:
        """Return which sequences have no pair under a mask, [B] or [L, B]: their loss
        is 0.
        """
        return self._masked_pairs() == 0

    def _masked_pairs(self) -> Tensor:
        assert self.mask is not None
        return self.mask.squares - self.mask.counts

    def sum_over_group(self, values: Tensor) -> Tensor:
        if self.group is None:
            return values
        return SumOverGroup.apply(values, self.group)

    def logsumexp_over_group(self, values: Tensor) -> Tensor:
        if self.group is None:
            return values
        return LogSumExpOverGroup.apply(values, self.group)

    def mean_square(self) -> Tensor:
        """Return mean(z²) over tokens and features, [L, B]."""

        def sum_of_squares(z: Tensor, mask: TokenMask | None) -> Result:
            z = z.to(accumulation_dtype(z.dtype))
            return z.square().sum((1, 2)), Known(2 * z)

        sums = self.sum_over_group(self.each(sum_of_squares))
        tokens = self.tokens(self.mask)
        if len(set(self.features)) == 1:
            return sums / (tokens * self.features[0])
        return sums / (tokens * torch.tensor(self.features)[:, None].to(sums))

    def gather(self, z: Tensor) -> Gathering | None:
        """Start to gather the tokens z, which a ``Compute`` has received, from all
        ranks; None if z is the whole already.
        """
        return None

    def _prepared(self, z: Tensor, mask: TokenMask | None) -> Tensor:
        if mask is not None:
            z = z.where(mask.own, 0.0)  # padding may be NaN
        if self.in_bf16 and z.dtype == torch.float32:
            z = z.bfloat16()
        return z

    def _apply(self, compute: Compute, z: Tensor, mask: TokenMask | None) -> Result:
        value, gradient = compute(self._prepared(z, mask), mask)
        if mask is not None:
            gradient = Masked(gradient, mask.own)
        return value, gradient


class WholeLayers(Layers):
    """All tokens of ``zs``, which holds one [B, N, F] per layer, or this rank's [B, n,
    F].
    """

    def __init__(
        self,
        zs: Sequence[Tensor],
        length: int,
        mask: TokenMask | None,
        group: dist.ProcessGroup | None,
        in_bf16: bool,
    ) -> None:
        self.zs = zs
        self.mask = mask
        self.group = group
        self.in_bf16 = in_bf16
        self.length = length
        self.features = [z.shape[2] for z in zs]
        self.segmented = mask is not None and mask.segments is not None

        self._following: list[Tensor] = []  # the layers that are computed next
        self._ahead: Gathering | None = None  # of these layers

    def each(self, *computes: Compute) -> Tensor:
        if len(computes) == 1:
            packs = packed(self.zs)
            computes = computes * len(packs)
        else:
            packs = [[z] for z in self.zs]
        values = []
        for pack, self._following, compute in zip(
            packs, [*packs[1:], []], computes, strict=True
        ):
            of_pack = partial(self._of_pack, compute, pack)
            values.append(LayerValue.apply(of_pack, self.arriving, *pack))
        return torch.cat(values)

    def gather(self, z: Tensor) -> Gathering | None:
        """Also start to gather the layers that follow, so that this takes no time
        beside the work for z.
        """
        if self.group is None:
            return None
        gathering = self._ahead or Gathering(z, self.group)
        self._ahead = None
        if self._following:
            self._ahead = Gathering(
                self._prepared(*self._together(self._following)), self.group
            )
        return gathering

    def _of_pack(self, compute: Compute, pack: list[Tensor]) -> Result:
        z, mask = self._together(pack)
        if self.group is None:
            save = self.arriving is None
            return in_parts(z, mask, partial(self._apply, compute), save)
        # The batch is not split: each part would need a collective call of its own, and
        # shards are small.
        return self._apply(compute, z, mask)

    def _together(self, pack: list[Tensor]) -> tuple[Tensor, TokenMask | None]:
        if len(pack) == 1:
            z = pack[0].detach()
        else:
            z = torch.cat([z.detach() for z in pack])
        mask = self.mask
        if mask is not None:
            mask = mask.repeat(len(pack))
        return z, mask


def packed(zs: Sequence[Tensor]) -> list[list[Tensor]]:
    """Put small layers of one kind together, because each alone would take as many
    kernels, all of them small.
    """
    most = PACK_ELEMENTS if zs[0].device.type == "cpu" else GPU_PACK_ELEMENTS
    packs = [[zs[0]]]
    for z in zs[1:]:
        last = packs[-1]
        are_alike = (z.shape, z.dtype) == (last[0].shape, last[0].dtype)
        if are_alike and (len(last) + 1) * z.numel() <= most:
            last.append(z)
        else:
            packs.append([z])
    return packs


def in_parts(z: Tensor, mask: TokenMask | None, compute: Compute, save: bool) -> Result:
    """Return ``compute(z, mask)``, computed for a few sequences at a time to bound the
    memory of temporaries.

    With ``save``, the gradient of each part is written before the next is computed.
    """
    elements = BATCH_ELEMENTS if z.device.type == "cpu" else GPU_BATCH_ELEMENTS
    most = max(1, elements // (z.shape[1] * z.shape[2]))
    if most >= len(z):
        return compute(z, mask)
    size = math.ceil(len(z) / math.ceil(len(z) / most))
    saved = torch.empty_like(z, dtype=saved_dtype(z.dtype)) if save else None
    values = []
    gradients: list[tuple[slice, Gradient]] = []
    for i in range(0, len(z), size):
        part = slice(i, i + size)
        value, gradient = compute(z[part], None if mask is None else mask[part])
        values.append(value)
        if saved is None:
            gradients.append((part, gradient))
        else:
            gradient.write(saved[part], None, None)
    whole = Parts(gradients) if saved is None else Known(saved)
    return torch.cat(values), whole
