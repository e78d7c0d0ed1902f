"""The sampled estimator takes a few positions of every sequence, drawn anew for every
step and layer.

All sequences share the positions. The authors' released code samples by default: 256
positions, drawn anew for every layer and microbatch. Here the draw depends on the seed,
the step and the layer alone, so it is the same on every mesh and after a resume.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.autograd import (
    SavedRows,
    add_rows_in_backward,
    rank_in,
)
from titan_disp.dispersion.gradients import as_tensor
from titan_disp.dispersion.layers import Compute, Layers, in_parts
from titan_disp.dispersion.masks import TokenMask, held_tokens, slots_of


def order(tokens: int, seed: int, step: int, layer: int) -> Tensor:
    """Return all positions below ``tokens`` in the order in which they are drawn, int64
    on the CPU.
    """
    generator = torch.Generator().manual_seed(
        ((seed * 1_000_003 + step) * 1_009 + layer) % 2**64
    )
    return torch.randperm(tokens, generator=generator)


class SampledLayers(Layers):
    """The first ``count`` positions of each layer's order, the same for all sequences.

    Every rank holds them all.
    """

    group = None
    mask: TokenMask | None = None
    mask_of_all: TokenMask | None = None  # of the sequences of all layers in a row

    def __init__(
        self,
        zs: Sequence[Tensor],
        orders: Sequence[Tensor],
        count: int,
        group: dist.ProcessGroup | None,
        in_bf16: bool,
    ) -> None:
        self.zs = zs
        self.length = count
        self.features = [z.shape[2] for z in zs]
        self.in_bf16 = in_bf16
        rank = rank_in(group)
        dtype = reduce(torch.promote_types, (z.dtype for z in zs))
        self.z = zs[0].new_zeros(
            len(zs), zs[0].shape[0], self.length, zs[0].shape[2], dtype=dtype
        )
        # For each layer: which of the drawn tokens this rank holds, [k], and their
        # indices in z, [k].
        self.held = []
        self.local_index = []
        for z, order, gathered in zip(zs, orders, self.z, strict=True):
            positions = order[:count].sort().values
            n = z.shape[1]
            held = (positions // n == rank).nonzero()[:, 0]
            local_index = positions[held] - rank * n
            self.held.append(held.to(z.device, non_blocking=True))
            self.local_index.append(local_index.to(z.device, non_blocking=True))
            tokens = z.detach()[:, self.local_index[-1]]
            gathered[:, self.held[-1]] = tokens.to(dtype)
        if group is not None:
            # Adds only zeros to each token: exact in any dtype
            dist.all_reduce(self.z, group=group)

    def each(self, *computes: Compute) -> Tensor:
        if len(computes) == 1:
            # All layers at once: each layer alone would take as many kernels, all of
            # them small.
            values, grads = self._of_all(
                self.z.flatten(0, 1), self.mask_of_all, *computes
            )
        else:
            results = [
                self._of_all(z, self.mask, compute)
                for z, compute in zip(self.z, computes, strict=True)
            ]
            values, grads = map(torch.cat, zip(*results, strict=True))
        rows = self.own_rows(grads.view_as(self.z))
        values = values.view(len(self.zs), -1)
        if self.in_hooks:
            return add_rows_in_backward(self.zs, values, rows, self.local_index)
        layers = zip(self.zs, values, rows, self.local_index, strict=True)
        return torch.stack([SavedRows.apply(*layer) for layer in layers])

    def _of_all(
        self, z: Tensor, mask: TokenMask | None, compute: Compute
    ) -> tuple[Tensor, Tensor]:
        """Return values [B] and gradients [B, m, F] of the drawn tokens of sequences."""
        value, gradient = in_parts(z, mask, partial(self._apply, compute), save=True)
        return value, as_tensor(gradient, z.shape, z)

    def own_rows(self, grads: Tensor) -> list[Tensor]:
        """Return the rows of this rank's tokens from gradients [L, B, m, F], one tensor
        per layer.
        """
        return [grad[:, held] for grad, held in zip(grads, self.held, strict=True)]


class SampledTokens(SampledLayers):
    """The first ``count`` positions of each layer's order that hold tokens in a
    sequence, or all if there are fewer.
    """

    def __init__(
        self,
        zs: Sequence[Tensor],
        orders: Sequence[Tensor],
        count: int,
        group: dist.ProcessGroup | None,
        in_bf16: bool,
        mask: TokenMask,
    ) -> None:
        self.zs = zs
        self.length = count
        self.features = [z.shape[2] for z in zs]
        self.in_bf16 = in_bf16
        self.segmented = mask.segments is not None
        # For each layer: which of the drawn tokens this rank holds, [B, m, 1], and
        # their indices in z, [B, m].
        self.held = []
        self.local_index = []
        tokens = []
        numbers = None if mask.segments is None else torch.cat(mask.segments, dim=1)
        segments = []
        for z, order in zip(zs, orders, strict=True):
            chosen = first_of_order(mask, order.to(z.device, non_blocking=True), count)
            # ``filled`` is the same for every layer
            positions, filled = slots_of(chosen, count)
            drawn = held_tokens(z.detach(), positions, group)
            tokens.append(drawn.z)
            self.held.append(drawn.held)
            self.local_index.append(drawn.local_index)
            if numbers is not None:
                segments.append(numbers.gather(1, positions).masked_fill(~filled, -1))
        self.mask = TokenMask((filled,))
        self.mask_of_all = self.mask.repeat(len(zs))
        if self.segmented:
            self.mask_of_all = replace(
                self.mask_of_all, segments=(torch.cat(segments),)
            )
        self.z = torch.stack(tokens)
        if group is not None:
            dist.all_reduce(self.z, group=group)

    def _masked_pairs(self) -> Tensor:
        assert self.mask_of_all is not None
        return (self.mask_of_all.squares - self.mask_of_all.counts).view(
            len(self.zs), -1
        )

    def own_rows(self, grads: Tensor) -> list[Tensor]:
        return [
            grad.where(held, 0.0) for grad, held in zip(grads, self.held, strict=True)
        ]


def first_of_order(mask: TokenMask, order: Tensor, count: int) -> Tensor:
    """Return the first ``count`` positions of the order that hold tokens, as [B, N]
    bool.
    """
    in_order = mask.whole[:, order]
    chosen = torch.empty_like(in_order)
    chosen[:, order] = in_order & (in_order.cumsum(1) <= count)
    return chosen
