"""A mask says which positions of padded sequences hold tokens.

The mask is known on the device only, so no shape may depend on it. Where the number of
chosen tokens varies between sequences, they are put into a fixed number of *slots*,
some of which stay empty.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.autograd import of_ranks, rank_in

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
        mask = replace(self, shards=tuple(map(function, self.shards)))
        if self.segments is not None:
            mask = replace(mask, segments=tuple(map(function, self.segments)))
        if self.ranges is not None:
            mask = replace(mask, ranges=tuple(map(function, self.ranges)))
        return mask

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
    if group is not None and has_segments:
        shards = list(of_ranks(marks, group))
    elif group is not None:
        shards = list(of_ranks(marks.to(torch.uint8), group).bool())
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


def first_of_order(mask: TokenMask, order: Tensor, count: int) -> Tensor:
    """Return the first ``count`` positions of the order that hold tokens, as [B, N]
    bool.
    """
    in_order = mask.whole[:, order]
    chosen = torch.empty_like(in_order)
    chosen[:, order] = in_order & (in_order.cumsum(1) <= count)
    return chosen


def tokens_at(z: Tensor, positions: Tensor) -> Tensor:
    """Return the tokens of z [B, n, F] at ``positions`` [B or 1, m], as [B, m, F]."""
    batch, n, _ = z.shape
    rows = in_a_row(positions.expand(batch, -1), n)
    # Many times faster on a CPU than take_along_dim
    return z.flatten(0, 1).index_select(0, rows).unflatten(0, (batch, -1))


@dataclass(frozen=True)
class HeldTokens:
    """The tokens at some positions of whole sequences, as far as this rank has them."""

    z: Tensor  # [B, m, F], 0 where another rank holds the position
    held: Tensor  # whether this rank holds the position, [B, m, 1] bool
    local_index: Tensor  # the index among this rank's tokens where held, [B, m] int


def held_tokens(
    z: Tensor, positions: Tensor, group: dist.ProcessGroup | None
) -> HeldTokens:
    """Return the tokens at ``positions`` [B or 1, m] of whole sequences, of which z
    [B, n, F] is a shard.
    """
    n = z.shape[1]
    rank = rank_in(group)
    held = (positions // n == rank)[..., None]
    local_index = (positions - rank * n).clamp(0, n - 1)
    tokens = tokens_at(z, local_index)
    return HeldTokens(torch.where(held, tokens, 0.0), held, local_index)


def in_a_row(index: Tensor, n: int) -> Tensor:
    """Return positions [B, m] in sequences of n tokens as positions [B·m] in all
    sequences in a row.
    """
    sequence = torch.arange(len(index), device=index.device)[:, None]
    return (index + sequence * n).flatten()
