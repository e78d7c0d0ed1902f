"""A mask says which positions of padded sequences hold tokens.

The mask is known on the device only, so no shape may depend on it. Where the number of
chosen tokens varies between sequences, they are put into a fixed number of *slots*,
some of which stay empty.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.autograd import all_gather

Count = int | Tensor  # a number of tokens: one for all sequences, or [B]


BLOCK = 128  # tokens of which the lowest and the highest segment are kept


@dataclass(frozen=True)
class TokenMask:
    shards: tuple[Tensor, ...]  # for each rank of the group, in rank order, [B, n] bool
    rank: int = 0  # index of this rank's shard
    # of the same tokens, [B, n] int, −1 where there is none
    segments: tuple[Tensor, ...] | None = None
    # on the CPU: of each block of tokens, [B, blocks, 2]
    ranges: tuple[Tensor, ...] | None = None

    def _with(self, function: Callable[[Tensor], Tensor]) -> "TokenMask":
        every = (
            None if part is None else tuple(map(function, part))
            for part in (self.segments, self.ranges)
        )
        return TokenMask(tuple(map(function, self.shards)), self.rank, *every)

    def __getitem__(self, sequences: slice) -> "TokenMask":
        return self._with(lambda part: part[sequences])

    def repeat(self, times: int) -> "TokenMask":
        """Return the mask of the same sequences several times in a row."""
        return (
            self if times == 1 else self._with(lambda part: torch.cat([part] * times))
        )

    @property
    def own(self) -> Tensor:
        """This rank's positions, [B, n, 1]."""
        return self.shards[self.rank][..., None]

    def marks(self, rank: int) -> "Marks":
        """Return what decides which tokens of a rank form pairs with others."""
        part = self.shards if self.segments is None else self.segments
        return Marks(
            part[rank][..., None], None if self.ranges is None else self.ranges[rank]
        )

    @cached_property
    def whole(self) -> Tensor:
        """The whole sequences, [B, N]."""
        return torch.cat(self.shards, dim=1)

    @cached_property
    def counts(self) -> Tensor:
        """The number of tokens of each sequence, [B]."""
        return self.whole.sum(1)

    @cached_property
    def squares(self) -> Tensor:
        """The number of pairs of each sequence that the loss takes, with those of each
        token with itself, [B].
        """
        if self.segments is None:
            return self.counts.square()
        ids = torch.cat(self.segments, dim=1).sort(1).values
        run = ids.diff(dim=1, prepend=ids[:, :1]).ne(0).cumsum(1)
        lengths = torch.zeros_like(run).scatter_add_(1, run, ids.ge(0).to(run.dtype))
        return lengths.square().sum(1)


@dataclass(frozen=True)
class Marks:
    """Some tokens are bool [B, n, 1], or int if they are of segments, −1 where there is
    none.
    """

    tokens: Tensor
    ranges: Tensor | None = None

    def span(self, some: slice) -> tuple[int, int] | None:
        """Return the lowest and the highest segment of these tokens, and maybe of
        others; None if it is not known.
        """
        if self.ranges is None:
            return None
        blocks = self.ranges[:, some.start // BLOCK : (some.stop - 1) // BLOCK + 1]
        return int(blocks[..., 0].amin()), int(blocks[..., 1].amax())


def apart(rows: Tensor, cols: Tensor) -> Tensor:
    """Return which tokens of rows [B, m, 1] and columns [B, 1, n] form no pair, [B, m,
    n], given their marks.
    """
    return ~(rows & cols) if rows.dtype == torch.bool else (rows != cols) | (rows < 0)


def token_mask(given: Tensor, group: dist.ProcessGroup | None) -> TokenMask:
    """Gather the mask from this rank's ``valid`` or segments [B, n].

    A sequence of a single token has no pair and counts as empty. The host waits for the
    ranges of segments.
    """
    valid = given.dtype == torch.bool
    shards = [given]
    rank = 0
    if group is not None:
        world = dist.get_world_size(group)
        rank = dist.get_rank(group)
        own = (given.to(torch.uint8) if valid else given).contiguous()
        every = own.new_empty((world * own.shape[0], own.shape[1]))
        all_gather(every, own, group=group)
        shards = list((every.bool() if valid else every).chunk(world))
    tokens = [shard if valid else shard >= 0 for shard in shards]
    pairs = sum(shard.sum(1, keepdim=True) for shard in tokens) > 1
    tokens = [shard & pairs for shard in tokens]
    if valid:
        return TokenMask(tuple(tokens), rank)
    segments = tuple(
        shard.long().masked_fill(~some, -1)
        for shard, some in zip(shards, tokens, strict=True)
    )
    return TokenMask(tuple(tokens), rank, segments, _ranges(segments))


def _ranges(segments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    every = torch.stack(segments)
    blocks = torch.nn.functional.pad(
        every, (0, -every.shape[2] % BLOCK), value=-1
    ).unflatten(2, (-1, BLOCK))
    low = blocks.masked_fill(blocks < 0, torch.iinfo(torch.int64).max).amin(-1)
    return tuple(torch.stack([low, blocks.amax(-1)], dim=-1).cpu())  # one copy


def others_of(mask: TokenMask | None) -> Iterable[Marks | None]:
    """Return the marks of the other ranks, or an endless iterator of None if there is
    no mask.
    """
    if mask is None:
        return repeat(None)
    return [mask.marks(rank) for rank in range(len(mask.shards)) if rank != mask.rank]


def slots_of(chosen: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Return positions [B, slots], and whether they are chosen, [B, slots] bool: the
    chosen ones first, in order.

    ``chosen`` is [B, N] bool, at most ``slots`` per sequence. No position is returned
    twice.
    """
    positions = (
        chosen.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :slots]
    )
    return positions, torch.arange(slots, device=chosen.device) < chosen.sum(
        1, keepdim=True
    )


def own_tokens(
    z: Tensor, positions: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens at ``positions`` [B, m] of whole sequences: [B, m, F], 0 where
    another rank holds the position.

    Return also which of them this rank holds, [B, m, 1] bool, and their indices in z,
    [B, m].
    """
    n = z.shape[1]
    rank = 0 if group is None else dist.get_rank(group)
    mine = (positions // n == rank)[..., None]
    local = (positions - rank * n).clamp(0, n - 1)
    return (
        torch.where(mine, z.take_along_dim(local[..., None], dim=1), 0.0),
        mine,
        local,
    )
