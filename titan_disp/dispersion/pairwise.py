"""The exact estimator sums over all pairs of a sequence's tokens in one pass, with
O(N·F) memory.

Most variants are functions w of cosines c, summed over pairs (arXiv 2602.00217, Table
1):

    u_i = s_i x_i     c_ij = u_i·u_j     S = Σ_{i≠j} w(c_ij)
    r = dw/dc         V_i = Σ_{j≠i} r(c_ij) u_j     ∂S/∂u_i = 2 V_i

One walk over tiles of c therefore yields both S and ∂S/∂z. ``variants`` defines w and
r. Products are formed of x (see ``vectors``), and c is the product times s_i s_j. W is
what the walk adds up, with the symmetric q:

    q_ij = s_i r_ij s_j     W_i = Σ_{j≠i} q_ij x_j = s_i V_i
"""

import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from titan_disp.dispersion.autograd import Gathering
from titan_disp.dispersion.kernels import (
    accumulation_dtype,
    add_product_,
    fused,
    operand_dtype,
    product,
)
from titan_disp.dispersion.masks import Marks, TokenMask, apart, others_of
from titan_disp.dispersion.vectors import Units

# marks of the rows [B, m, 1] and of the columns [B, 1, n] of a tile
TileMarks = tuple[Tensor, Tensor]
# cosines [B, m, n], which it may overwrite → w and r = dw/dc
PairFunction = Callable[[Tensor], tuple[Tensor, Tensor]]

# On 2 cores, 768 is 3 % slower than 1024 but saves 20 MiB of peak memory at N = 4096, F
# = 1024. A GPU needs larger products to fill its cores (2048² is two waves of 128²
# tiles on 132 cores).
CPU_TILE = 768
GPU_TILE = 2048
# elements of one tile of c over the whole batch: 64 MiB in fp32, independent of N
TILE_ELEMENTS = 1 << 24


def tile_size(tokens: int, batch: int, device: str = "cpu") -> int:
    """Return the number of rows (and columns) of a tile such that ``batch`` tiles hold
    at most TILE_ELEMENTS elements.

    GPU kernels are compiled for the shape of a tile. The size on a GPU is therefore a
    multiple of 128, or else of 16, that divides ``tokens`` and is more than half of the
    largest size allowed. Without one, the last tile is smaller.
    """
    side = math.isqrt(max(1, TILE_ELEMENTS // max(1, batch)))
    most = max(16, min(CPU_TILE if device == "cpu" else GPU_TILE, side // 16 * 16))
    if device == "cpu" or tokens <= most:
        return min(tokens, most)
    for unit in (128, 16):
        for equal in range(most // unit * unit, most // 2, -unit):
            if tokens % equal == 0:
                return equal
    unit = min(128, most)
    count = math.ceil(tokens / (most // unit * unit))
    return math.ceil(tokens / count / unit) * unit


@functools.cache
def _epilogue(pair: PairFunction) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function from a tile of products to Σ w [B] and q [B, m, n], cached as
    compiling it takes seconds.
    """

    def epilogue(
        c: Tensor,
        s_rows: Tensor,
        s_cols: Tensor,
        diagonal: bool,
        dtype: torch.dtype,
        marks: TileMarks | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        # in place, the compiled kernel would have to write c back
        cosines = (c * s_rows).mul_(s_cols)
        w, r = pair(cosines)
        # A pair function may return one tensor as both, or one that it keeps, so that
        # neither is overwritten. The results take the memory of tiles that are not read
        # again, but a compiled kernel would have to write these, too.
        memory_q, memory_w = (
            (None, None) if torch.compiler.is_compiling() else (c, cosines)
        )
        q = torch.mul(r, s_rows, out=memory_q).mul_(s_cols).to(dtype)
        if diagonal:  # a token and itself are not a pair
            index = torch.arange(c.shape[1], device=c.device)
            same = index[:, None] == index
            w = torch.where(same, w.new_zeros(()), w, out=memory_w)
            q.masked_fill_(same, 0.0)
        if marks is not None:
            # Subtracting w(0) from the sum afterwards would cancel digits at small τ.
            none = apart(*marks)
            w = torch.where(none, w.new_zeros(()), w, out=memory_w)
            # of padding alone, q multiplies x = 0 in the gradient of a token
            if marks[0].dtype != torch.bool:
                q.masked_fill_(none, 0.0)
        return w.sum(-1).sum(-1), q if out is None else out.copy_(q)

    # Dynamo counts recompilations by code. With code of its own, no function uses up
    # another one's.
    epilogue.__code__ = epilogue.__code__.replace(co_name=f"epilogue_{id(pair)}")
    return fused(epilogue)


class Tiles:
    """Divide tokens x [B, n, F] with scales s [B, n, 1] into tiles; with ``marks``
    where not all form pairs.

    ``wide``: whether q of a whole block of rows is kept, so that one product adds it to
    W. By default, this is so on a GPU. The cache of a CPU's core holds q of one tile.
    """

    def __init__(
        self,
        x: Tensor,
        scale: Tensor,
        marks: Marks | None = None,
        tile: int | None = None,
        wide: bool | None = None,
    ) -> None:
        self.x = x
        self.scale = scale
        self.marks = marks
        self.dtype = operand_dtype(x)
        self.wide = x.device.type != "cpu" if wide is None else wide
        n = x.shape[1]
        side = tile or tile_size(x.shape[1], x.shape[0], x.device.type)
        self.slices = [slice(i, min(i + side, n)) for i in range(0, n, side)]
        self.reach = {
            i.start: None if marks is None else marks.span(i) for i in self.slices
        }

    def __getitem__(self, where: slice) -> Tensor:
        return self.x[:, where].to(self.dtype)

    def pairs(
        self,
        rows: Tensor,
        i: slice,
        other: "Tiles",
        cols: Tensor,
        j: slice,
        pair: PairFunction,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return Σ w [B] and q [B, m, n] of own tokens i and the other's tokens j; q in
        ``out`` if it is given.
        """
        products = product(rows, cols.transpose(1, 2))
        s_cols = other.scale[:, j].transpose(1, 2)
        marks = None
        if self.marks is not None and other.marks is not None:
            marks = self.marks.tokens[:, i], other.marks.tokens[:, j].transpose(1, 2)
        diagonal = other is self and i == j
        return _epilogue(pair)(
            products, self.scale[:, i], s_cols, diagonal, self.dtype, marks, out
        )

    def spans(self, i: slice, others: "Tiles", first: int = 0) -> Iterator[list[slice]]:
        """Yield the other's tiles from the ``first`` one on, in groups of those of
        whose q one product is formed.

        They are neighbours. Tiles that have no segment in common with the own tokens i
        are left out.
        """
        span: list[slice] = []
        for j in others.slices[first:]:
            meets = self._meets(i, others, j)
            if span and not (meets and others.wide):
                yield span
                span = []
            if meets:
                span.append(j)
        if span:
            yield span

    def _meets(self, i: slice, others: "Tiles", j: slice) -> bool:
        own = self.reach[i.start]
        other = others.reach[j.start]
        return not (own and other) or (own[0] <= other[1] and other[0] <= own[1])

    def span_pairs(
        self,
        rows: Tensor,
        i: slice,
        others: "Tiles",
        span: list[slice],
        pair: PairFunction,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return Σ w [B] and q [B, m, n] of own tokens i and a span of ``others``, and
        the tokens of the span.

        If these are own tokens too, the pairs beyond the tile on the diagonal count
        twice.
        """
        begin = span[0].start
        end = span[-1].stop
        x = others[begin:end]
        s = self.scale.new_zeros(self.x.shape[0])
        q = None
        if (
            len(span) > 1
            # of the width of the whole, so that the strides, for which kernels are
            # compiled, stay the same
        ):
            q = x.new_empty(x.shape[0], i.stop - i.start, others.x.shape[1])[
                ..., begin:end
            ]
        for j in span:
            at = slice(j.start - begin, j.stop - begin)
            sums, found = self.pairs(
                rows, i, others, x[:, at], j, pair, None if q is None else q[..., at]
            )
            s += 2 * sums if others is self and i != j else sums
        return s, found if q is None else q, x


def pair_sums(
    units: Units,
    to_units: Callable[[Tensor], Units],
    gathering: Gathering | None,
    mask: TokenMask | None,
    pair: PairFunction,
) -> tuple[Tensor, Tensor]:
    """Return this rank's part of S [B], and W [B, n, F] of its rows.

    ``units`` are ``to_units(z)`` of this rank's tokens, which are 0 where the mask has
    no token. ``gathering`` is that of z.
    """
    own = Tiles(units.x, units.scale, None if mask is None else mask.marks(mask.rank))
    s, w = all_pairs(own, pair)
    if gathering is not None:
        for shard, marks in zip(
            gathering.other_shards(), others_of(mask), strict=False
        ):
            others = to_units(shard)
            s += add_pairs_with(own, Tiles(others.x, others.scale, marks), w, pair)
    return s, w


def all_pairs(tiles: Tiles, pair: PairFunction) -> tuple[Tensor, Tensor]:
    """Return S [B] and W [B, N, F] over all i ≠ j.

    Each tile above the diagonal serves both sides.
    """
    s = tiles.scale.new_zeros(tiles.x.shape[0])
    fresh = (
        tiles.marks is None or tiles.marks.ranges is None
    )  # no tile is left out, so that the first row writes all of W
    w = (torch.empty_like if fresh else torch.zeros_like)(
        tiles.x, dtype=accumulation_dtype(tiles.x.dtype)
    )
    for k, i in enumerate(tiles.slices):
        rows = tiles[i]
        for span in tiles.spans(i, tiles, k):
            sums, q, x = tiles.span_pairs(rows, i, tiles, span, pair)
            s += sums
            begin = span[0].start
            end = span[-1].stop
            add_product_(w[:, i], q, x, to_zero=fresh and begin == 0)
            below = max(begin, i.stop)
            if below < end:
                add_product_(
                    w[:, below:end],
                    q[..., below - begin :].transpose(1, 2),
                    rows,
                    to_zero=fresh and k == 0,
                )
    return s, w


def add_pairs_with(own: Tiles, others: Tiles, w: Tensor, pair: PairFunction) -> Tensor:
    """Return S [B] over all pairs of an own and another shard's token, and add their
    part of W to ``w`` [B, n, F].
    """
    s = w.new_zeros(w.shape[0])
    for i in own.slices:
        rows = own[i]
        for span in own.spans(i, others):
            sums, q, x = own.span_pairs(rows, i, others, span, pair)
            s += sums
            add_product_(w[:, i], q, x)
    return s
