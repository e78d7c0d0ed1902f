"""Padding: positions that hold no token. Which these are is known on the device only, so that shapes do not depend on it."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.collectives import all_gather

Count = int | Tensor  # of tokens: one for all sequences, or [B]


@dataclass(frozen=True)
class TokenMask:
    """Which positions hold tokens.

    Attributes:
        shards: [B, n] bool of every rank of the group, in its order.
        rank: whose positions are this rank's own.
    """

    shards: tuple[Tensor, ...]
    rank: int = 0

    def __getitem__(self, sequences: slice) -> "TokenMask":
        return TokenMask(tuple(shard[sequences] for shard in self.shards), self.rank)

    @property
    def own(self) -> Tensor:
        """[B, n, 1], of this rank's positions."""
        return self.shards[self.rank][..., None]

    @cached_property
    def whole(self) -> Tensor:
        """[B, N], of the whole sequence."""
        return torch.cat(self.shards, dim=1)

    @cached_property
    def counts(self) -> Tensor:
        """Tokens of every sequence, [B]."""
        return self.whole.sum(1)


def token_mask(valid: Tensor, group: dist.ProcessGroup | None) -> TokenMask:
    """The mask of ``valid`` [B, n], this rank's positions. A sequence with a single token has no pair, and counts as empty."""
    shards, rank = [valid], 0
    if group is not None:
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        own = valid.to(torch.uint8).contiguous()
        every = own.new_empty((world * own.shape[0], own.shape[1]))
        all_gather(every, own, group=group)
        shards = list(every.bool().chunk(world))
    pairs = sum(shard.sum(1, keepdim=True) for shard in shards) > 1
    return TokenMask(tuple(shard & pairs for shard in shards), rank)


def others_of(mask: TokenMask | None) -> Iterable[Tensor | None]:
    """[B, n, 1] of each of the other ranks; None for ever where there is no mask."""
    if mask is None:
        return repeat(None)
    return [shard[..., None] for rank, shard in enumerate(mask.shards) if rank != mask.rank]


def slots_of(chosen: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Positions of the chosen tokens in a fixed number of slots.

    Args:
        chosen: [B, N] bool, at most ``slots`` in every sequence.

    Returns:
        [B, slots] positions, first the chosen ones in ascending order, then others, none twice; [B, slots] bool, which slots hold
        a chosen one.
    """
    positions = chosen.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :slots]
    return positions, torch.arange(slots, device=chosen.device) < chosen.sum(1, keepdim=True)


def own_tokens(z: Tensor, positions: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens at ``positions`` [B, m] of the whole sequence as far as this rank holds them.

    Returns:
        [B, m, F], 0 where a position is another rank's; [B, m, 1] bool, which are this rank's; [B, m], where in z.
    """
    n, rank = z.shape[1], 0 if group is None else dist.get_rank(group)
    mine = (positions // n == rank)[..., None]
    local = (positions - rank * n).clamp(0, n - 1)
    return torch.where(mine, z.take_along_dim(local[..., None], dim=1), 0.0), mine, local
