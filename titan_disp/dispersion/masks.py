"""A mask says which positions of padded sequences hold tokens.

The mask is known on the device only, so no shape may depend on it. Where the number of
chosen tokens varies between sequences, they are put into a fixed number of *slots*,
some of which stay empty.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.autograd import Gathering, of_ranks, rank_in

Count = int | Tensor  # a number of tokens: one for all sequences, or [B]


BLOCK = 128  # tokens of which the lowest and the highest segment are kept


@dataclass(frozen=True)
class TokenMask:
    shards: tuple[Tensor, ...]  # for each rank of the group, in rank order, [B, n] bool
    rank: int = 0  # index of this rank's shard
    # The segments of the same tokens, [B, n] int, −1 where there is no token.
    segments: tuple[Tensor, ...] | None = None
    # on the CPU: of each block of tokens, [B, blocks, 2]
    ranges: tuple[Tensor, ...] | None = None

    def _with(self, function: Callable[[Tensor], Tensor]) -> "TokenMask":
        parts: dict[str, Any] = {  # the shards of the ranks
            name: tuple(map(function, shards))
            for name, shards in vars(self).items()
            if isinstance(shards, tuple)
        }
        return replace(self, **parts)

    def __getitem__(self, sequences: slice) -> "TokenMask":
        batch = len(self.shards[0])
        if sequences.indices(batch) == (0, batch, 1):
            return self  # with what it has cached
        return self._with(lambda part: part[sequences])

    def repeat(self, times: int) -> "TokenMask":
        """Return the mask of the same sequences several times in a row."""
        if times == 1:
            return self
        return self._with(lambda part: torch.cat([part] * times))

    @property
    def own(self) -> Tensor:
        """This rank's positions, [B, n, 1]."""
        return self.shards[self.rank][..., None]

    def marks(self, rank: int) -> "Marks":
        """Return what decides which tokens of a rank form pairs with others."""
        if self.segments is None:
            return Marks(self.shards[rank][..., None])
        ranges = None if self.ranges is None else self.ranges[rank]
        return Marks(self.segments[rank][..., None], ranges)

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

    def span(self, where: slice) -> tuple[int, int] | None:
        """Return the lowest and the highest segment of these tokens, and maybe of
        others; None if it is not known.
        """
        if self.ranges is None:
            return None
        blocks = self.ranges[:, where.start // BLOCK : (where.stop - 1) // BLOCK + 1]
        return int(blocks[..., 0].amin()), int(blocks[..., 1].amax())


def apart(rows: Tensor, cols: Tensor) -> Tensor:
    """Return which tokens of rows [B, m, 1] and columns [B, 1, n] form no pair, [B, m,
    n], given their marks.
    """
    if rows.dtype == torch.bool:
        return ~(rows & cols)
    return (rows != cols) | (rows < 0)


def token_mask(marks: Tensor, group: dist.ProcessGroup | None) -> TokenMask:
    """Gather the mask from this rank's ``valid`` or segments [B, n].

    A sequence of a single token has no pair and counts as empty. The host waits for the
    ranges of segments.
    """
    has_segments = marks.dtype != torch.bool
    shards = [marks]
    if group is not None:
        shards = list(of_ranks(marks, group))
    rank = rank_in(group)
    tokens = shards
    if has_segments:
        tokens = [shard >= 0 for shard in shards]
    has_pair = sum(shard.sum(1, keepdim=True) for shard in tokens) > 1
    tokens = [shard & has_pair for shard in tokens]
    if not has_segments:
        return TokenMask(tuple(tokens), rank)
    segments = tuple(
        shard.long().masked_fill(~is_token, -1)
        for shard, is_token in zip(shards, tokens, strict=True)
    )
    return TokenMask(tuple(tokens), rank, segments, _ranges(segments))


def _ranges(segments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    shards = torch.stack(segments)
    padding = -shards.shape[2] % BLOCK
    blocks = torch.nn.functional.pad(shards, (0, padding), value=-1).unflatten(
        2, (-1, BLOCK)
    )
    low = blocks.masked_fill(blocks < 0, torch.iinfo(torch.int64).max).amin(-1)
    return tuple(torch.stack([low, blocks.amax(-1)], dim=-1).cpu())  # one copy


def marked_shards(
    gathering: Gathering | None, mask: TokenMask | None
) -> Iterator[tuple[Tensor, Marks | None]]:
    """Yield the tokens [B, n, F] of each of the other ranks, with their marks."""
    if gathering is None:
        return
    for rank, shard in enumerate(gathering.of_ranks()):
        if rank != gathering.rank:
            yield shard, None if mask is None else mask.marks(rank)


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


def first_of_orders(mask: TokenMask, orders: Tensor, count: int) -> Tensor:
    """Return the first ``count`` positions of each order [L, N] that hold tokens, as
    [L, B, N] bool.
    """
    in_order = mask.whole[:, orders].transpose(0, 1)
    is_first = in_order & (in_order.cumsum(2) <= count)
    index = orders[:, None].expand_as(is_first)
    return torch.empty_like(is_first).scatter_(2, index, is_first)


def held_positions(
    positions: Tensor, n: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return which positions of whole sequences this rank holds, of which each rank has
    n, and their index among its own, both [..., B, m].

    The index of a position of another rank is that of any token.
    """
    rank = rank_in(group)
    index = (positions - rank * n).clamp(0, n - 1)
    return positions // n == rank, index


def tokens_at(z: Tensor, positions: Tensor) -> Tensor:
    """Return the tokens of z [B, n, F] at ``positions`` [B or 1, m], as [B, m, F]."""
    batch, n, _ = z.shape
    rows = in_a_row(positions.expand(batch, -1), n)
    return z.flatten(0, 1).index_select(0, rows).unflatten(0, (batch, -1))


def in_a_row(index: Tensor, n: int) -> Tensor:
    """Return positions [..., B, m] in sequences of n tokens as positions [..., B·m] in
    all sequences in a row.

    With these, rows of z.flatten(0, 1) are taken and added many times faster on a CPU
    than rows of z along its second dimension.
    """
    sequence = torch.arange(index.shape[-2], device=index.device)[:, None]
    return (index + sequence * n).flatten(-2)
