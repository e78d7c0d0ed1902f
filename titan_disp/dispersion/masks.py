"""A mask says which positions of padded sequences hold tokens.

The mask is known on the device only, so no shape may depend on it. Where the number of chosen tokens varies between
sequences, they are put into a fixed number of *slots*, some of which stay empty.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.autograd import all_gather

Count = int | Tensor  # a number of tokens: one for all sequences, or [B]


@dataclass(frozen=True)
class TokenMask:
    shards: tuple[Tensor, ...]  # for each rank of the group, in rank order, [B, n] bool
    rank: int = 0  # index of this rank's shard

    def __getitem__(self, sequences: slice) -> "TokenMask":
        return TokenMask(tuple(shard[sequences] for shard in self.shards), self.rank)

    def repeat(self, times: int) -> "TokenMask":
        """Return the mask of the same sequences several times in a row."""
        return self if times == 1 else TokenMask(tuple(shard.repeat(times, 1) for shard in self.shards), self.rank)

    @property
    def own(self) -> Tensor:
        """This rank's positions, [B, n, 1]."""
        return self.shards[self.rank][..., None]

    @cached_property
    def whole(self) -> Tensor:
        """The whole sequences, [B, N]."""
        return torch.cat(self.shards, dim=1)

    @cached_property
    def counts(self) -> Tensor:
        """The number of tokens of each sequence, [B]."""
        return self.whole.sum(1)


def token_mask(valid: Tensor, group: dist.ProcessGroup | None) -> TokenMask:
    """Gather the mask from this rank's ``valid`` [B, n]. A sequence of a single token has no pair and counts as empty."""
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
    """Return the masks [B, n, 1] of the other ranks, or an endless iterator of None if there is no mask."""
    if mask is None:
        return repeat(None)
    return [shard[..., None] for rank, shard in enumerate(mask.shards) if rank != mask.rank]


def slots_of(chosen: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Return positions [B, slots], and whether they are chosen, [B, slots] bool: the chosen ones first, in order.

    ``chosen`` is [B, N] bool, at most ``slots`` per sequence. No position is returned twice.
    """
    positions = chosen.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :slots]
    return positions, torch.arange(slots, device=chosen.device) < chosen.sum(1, keepdim=True)


def own_tokens(z: Tensor, positions: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens at ``positions`` [B, m] of whole sequences: [B, m, F], 0 where another rank holds the position.

    Return also which of them this rank holds, [B, m, 1] bool, and their indices in z, [B, m].
    """
    n, rank = z.shape[1], 0 if group is None else dist.get_rank(group)
    mine = (positions // n == rank)[..., None]
    local = (positions - rank * n).clamp(0, n - 1)
    return torch.where(mine, z.take_along_dim(local[..., None], dim=1), 0.0), mine, local
