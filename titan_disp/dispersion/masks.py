"""Masks: which positions of sequences hold tokens, and in which document each token is.

A mask is known on the device only, so no shape may depend on it. Where the number of
chosen tokens varies between sequences, these tokens are put into a fixed number of
*slots*, some of which stay empty.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.autograd import Gathering, of_ranks, rank_in

Count = int | Tensor  # a number of tokens: an int for all sequences, or [B]


# The size of a block of tokens, for which the lowest and the highest segment are stored.
BLOCK = 128


@dataclass(frozen=True)
class TokenMask:
    """Which positions hold tokens, and in which segments (documents) the tokens are, if
    only pairs within segments count. The tuples have one tensor per rank of the group,
    in rank order.
    """

    shards: tuple[Tensor, ...]  # True at tokens, bool [B, n]
    rank: int = 0  # index of this rank's shard
    # The index of each token's segment, int [B, n]; −1 at padding
    segments: tuple[Tensor, ...] | None = None
    # The lowest and the highest segment of each block, [B, blocks, 2], on the CPU
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
            return self  # with its cached properties
        return self._with(lambda part: part[sequences])

    def repeat(self, times: int) -> "TokenMask":
        """Return the mask of a batch that repeats these sequences ``times`` times."""
        if times == 1:
            return self
        return self._with(lambda part: torch.cat([part] * times))

    @property
    def own(self) -> Tensor:
        """This rank's shard: True at tokens, bool [B, n, 1]."""
        return self.shards[self.rank][..., None]

    def marks(self, rank: int) -> "Marks":
        """Return the marks of a rank's tokens, which decide which tokens form pairs."""
        if self.segments is None:
            return Marks(self.shards[rank][..., None])
        ranges = None if self.ranges is None else self.ranges[rank]
        return Marks(self.segments[rank][..., None], ranges)

    @cached_property
    def whole(self) -> Tensor:
        """The mask of the whole sequences, bool [B, N]."""
        return torch.cat(self.shards, dim=1)

    @cached_property
    def counts(self) -> Tensor:
        """The number of tokens of each sequence, [B]."""
        return self.whole.sum(1)

    @cached_property
    def squares(self) -> Tensor:
        """The number of pairs in the loss of each sequence, [B]. It includes the pair of
        each token with itself.
        """
        if self.segments is None:
            return self.counts.square()
        ids = torch.cat(self.segments, dim=1).sort(1).values
        run = ids.diff(dim=1, prepend=ids[:, :1]).ne(0).cumsum(1)
        lengths = torch.zeros_like(run).scatter_add_(1, run, ids.ge(0).to(run.dtype))
        return lengths.square().sum(1)


@dataclass(frozen=True)
class Marks:
    """The marks of one rank's tokens. Two tokens form a pair if their marks are equal,
    and neither is padding.
    """

    # bool [B, n, 1], True at tokens; or the segments, int [B, n, 1], −1 at padding
    tokens: Tensor
    ranges: Tensor | None = None  # as in ``TokenMask``

    def span(self, where: slice) -> tuple[int, int] | None:
        """Return the lowest and the highest segment of the blocks that include these
        tokens; None if ``ranges`` is None.
        """
        if self.ranges is None:
            return None
        blocks = self.ranges[:, where.start // BLOCK : (where.stop - 1) // BLOCK + 1]
        return int(blocks[..., 0].amin()), int(blocks[..., 1].amax())


def apart(rows: Tensor, cols: Tensor) -> Tensor:
    """Return which tokens form no pair, bool [B, m, n], given the marks of the rows
    [B, m, 1] and of the columns [B, 1, n].
    """
    if rows.dtype == torch.bool:
        return ~(rows & cols)
    return (rows != cols) | (rows < 0)


def token_mask(marks: Tensor, group: dist.ProcessGroup | None) -> TokenMask:
    """Return the mask of whole sequences, given this rank's ``valid`` or segments [B, n].

    A sequence with a single token has no pair and counts as empty. If there are segments,
    the host waits for their ranges.
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
    return tuple(torch.stack([low, blocks.amax(-1)], dim=-1).cpu())  # a single copy


def marked_shards(
    gathering: Gathering | None, mask: TokenMask | None
) -> Iterator[tuple[Tensor, Marks | None]]:
    """Yield the tokens [B, n, F] of each other rank, and their marks."""
    if gathering is None:
        return
    for rank, shard in enumerate(gathering.of_ranks()):
        if rank != gathering.rank:
            yield shard, None if mask is None else mask.marks(rank)


def slots_of(chosen: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Return positions [B, slots], and which of them are chosen, bool [B, slots].

    The chosen positions come first, in order. Other positions fill the rest. No
    position is returned twice. ``chosen`` is bool [B, N], True at most ``slots`` times
    per sequence.
    """
    positions = (
        chosen.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :slots]
    )
    return positions, torch.arange(slots, device=chosen.device) < chosen.sum(
        1, keepdim=True
    )


def first_of_orders(mask: TokenMask, orders: Tensor, count: int) -> Tensor:
    """Return the first ``count`` positions of each order [L, N] that hold tokens, as
    bool [L, B, N] in the order of the sequence.
    """
    in_order = mask.whole[:, orders].transpose(0, 1)
    is_first = in_order & (in_order.cumsum(2) <= count)
    index = orders[:, None].expand_as(is_first)
    return torch.empty_like(is_first).scatter_(2, index, is_first)


def held_positions(
    positions: Tensor, n: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return which positions of whole sequences this rank holds, bool [..., B, m], and
    their indices among its n positions, int [..., B, m].

    If another rank holds a position, the index is valid but arbitrary.
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
    """Return rows of z.flatten(0, 1), int [..., B·m], given positions [..., B, m] in the
    sequences of z [B, n, F].

    On a CPU, indexing rows of z.flatten(0, 1) is many times faster than indexing z along
    its second dimension.
    """
    sequence = torch.arange(index.shape[-2], device=index.device)[:, None]
    return (index + sequence * n).flatten(-2)
