"""The exact estimator sums over all pairs of tokens of a sequence, in one pass and with
O(N·F) memory.

Most variants sum a function w of the cosine c over all pairs of tokens (arXiv
2602.00217, Table 1)::

    u_i = s_i x_i       c_ij = u_i·u_j            S = Σ_{i≠j} w(c_ij)
    r = dw/dc           V_i = Σ_{j≠i} r(c_ij) u_j     ∂S/∂u_i = 2 V_i

``variants`` defines w and r. Both S and the gradient need each cosine once, so the
matrix of cosines is computed tile by tile and never stored.

Matrix products are computed from x instead of u, because x is exact in its own dtype
(see ``vectors``). A cosine is the product x_i·x_j times s_i s_j. The estimator returns
W, from which ``vectors`` computes the gradient of the tokens::

    q_ij = 2 s_i r_ij s_j       W_i = Σ_{j≠i} q_ij x_j = s_i ∂S/∂u_i

The N tokens of a shard are divided into *blocks*. A block of rows and a block of
columns make a *tile*.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from types import FunctionType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from titan_disp.dispersion import triton_pairs
from titan_disp.dispersion.autograd import Gathering
from titan_disp.dispersion.kernels import (
    accumulation_dtype,
    add_product_,
    fused,
    operand_dtype,
    part_size,
    product,
)
from titan_disp.dispersion.masks import Marks, TokenMask, apart, marked_shards
from titan_disp.dispersion.triton_pairs import PairFunction
from titan_disp.dispersion.vectors import Units

# The marks of a tile's rows [B, m, 1] and of its columns [B, 1, n]
TileMarks = tuple[Tensor, Tensor]

# On 2 cores, 768 is 3 % slower than 1024 but saves 20 MiB of peak memory at N = 4096, F
# = 1024. A GPU needs larger products to fill its cores (2048² is two waves of 128²
# tiles on 132 cores).
CPU_TILE = 768
GPU_TILE = 2048
# The largest number of elements of a tile, over the whole batch: 64 MiB in fp32
TILE_ELEMENTS = 1 << 24


def tile_size(tokens: int, batch: int, device: str = "cpu") -> int:
    """Return the number of tokens per block.

    A tile of ``batch`` sequences has at most TILE_ELEMENTS elements, but a block has at
    least 16 tokens. If all tokens fit, they are one block. Otherwise, a block on a CPU
    has the largest size. On a GPU, a kernel is compiled for each shape of tile, so
    blocks should be equal. The size is therefore the largest multiple of 128 that
    divides ``tokens`` and is more than half of the largest size. If there is none, 16
    takes the place of 128. Without such a size, the last block may be much smaller than
    the others.
    """
    side = math.isqrt(max(1, TILE_ELEMENTS // max(1, batch)))
    largest = max(16, min(CPU_TILE if device == "cpu" else GPU_TILE, side // 16 * 16))
    if device == "cpu" or tokens <= largest:
        return min(tokens, largest)
    for multiple in (128, 16):
        for size in range(largest // multiple * multiple, largest // 2, -multiple):
            if tokens % size == 0:
                return size
    multiple = min(128, largest)
    return part_size(tokens, largest // multiple * multiple, multiple)


# Weak references, because a variant may create a new pair function for each call.
_epilogues: WeakKeyDictionary[PairFunction, Callable[..., tuple[Tensor, Tensor]]] = (
    WeakKeyDictionary()
)


def epilogue_of(pair: PairFunction) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a copy of ``_epilogue`` that is compiled for this pair function.

    Dynamo limits recompilations per code object, so each pair function needs its own.
    """
    if pair not in _epilogues:
        code = _epilogue.__code__.replace(co_name=f"epilogue_{id(pair)}")
        _epilogues[pair] = fused(
            FunctionType(code, globals(), "epilogue", _epilogue.__defaults__)
        )
    return _epilogues[pair]


def _epilogue(
    products: Tensor,
    pair: PairFunction,
    s_rows: Tensor,
    s_cols: Tensor,
    diagonal: bool,
    dtype: torch.dtype,
    marks: TileMarks | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return Σ w [B] and q [B, m, n] of a tile, given its products x_i·x_j [B, m, n]."""
    # A new tensor, because otherwise the compiled kernel would also write the products.
    cosines = (products * s_rows).mul_(s_cols)
    result = pair(cosines)
    if isinstance(result, Tensor):  # of two sequences, it would unpack as w and r
        raise ValueError(
            f"the pair function of a loss returned one tensor {list(result.shape)}, "
            "expected two of this shape: w and dw/dc"
        )
    w, r = result
    # Eager code writes q and w into tiles that are no longer needed. (Compiled code
    # stores no temporaries.) The memory of w and r is not reused, because a pair
    # function may return the same tensor as w and as r, or store a tensor that it
    # returns.
    eager = not torch.compiler.is_compiling()
    memory_q = products if eager else None
    memory_w = cosines if eager else None
    q = torch.mul(r, 2 * s_rows, out=memory_q).mul_(s_cols).to(dtype)
    zero = w.new_zeros(())
    if diagonal:  # a token and itself are not a pair
        index = torch.arange(products.shape[1], device=products.device)
        same = index[:, None] == index
        w = torch.where(same, zero, w, out=memory_w)
        q.masked_fill_(same, 0.0)
    if marks is not None:
        no_pair = apart(*marks)
        w = torch.where(no_pair, zero, w, out=memory_w)
        # Without segments, only pairs with padding are left out. At padding, x is 0,
        # so q has no effect.
        has_segments = marks[0].dtype != torch.bool
        if has_segments:
            q.masked_fill_(no_pair, 0.0)
    return w.sum(-1).sum(-1), q if out is None else out.copy_(q)


@dataclass(frozen=True)
class Block(triton_pairs.Tokens):
    """Consecutive tokens of a shard: the rows or the columns of a tile."""

    shard: "Shard"
    where: slice  # the tokens' positions in the shard


class Shard:
    """One rank's unit vectors, x [B, n, F] with scales s [B, n, 1], divided into
    blocks.

    Args:
        marks: which tokens form pairs; None if all do.
        pair: the pair function, if the kernel of ``triton_pairs`` may be used.
    """

    def __init__(
        self,
        units: Units,
        marks: Marks | None = None,
        pair: PairFunction | None = None,
    ) -> None:
        self.x = units.x.to(operand_dtype(units.x))
        self.scale = units.scale
        self.marks = marks
        self.in_triton = pair is not None and triton_pairs.takes(self.x, pair)
        batch, tokens, _ = self.x.shape
        has_ranges = marks is not None and marks.ranges is not None
        if self.in_triton and not has_ranges:
            size = triton_pairs.rows_at_once(tokens, batch)
        else:  # With small blocks, many tiles have no segment in common.
            size = tile_size(tokens, batch, self.x.device.type)
        self.blocks = [slice(i, min(i + size, tokens)) for i in range(0, tokens, size)]
        self.segments = {
            i.start: None if marks is None else marks.span(i) for i in self.blocks
        }

    @property
    def wide(self) -> bool:
        """Whether one matrix product adds several adjacent tiles to W.

        On a CPU, each tile is added separately, while it is in the core's cache.
        """
        return self.x.device.type != "cpu"

    def block(self, where: slice) -> Block:
        marks = None if self.marks is None else self.marks.tokens[:, where]
        return Block(
            shard=self,
            where=where,
            x=self.x[:, where],
            scale=self.scale[:, where],
            marks=marks,
        )

    def spans(self, rows: Block, first: int = 0) -> Iterator[list[slice]]:
        """Yield lists of adjacent blocks of this shard. Each list is a span: the columns
        of one matrix product with ``rows``.

        A span has a single block, or as many as possible if ``wide``. The first span
        begins with block number ``first``. Blocks that have no segment in common with
        ``rows`` are left out. ``rows`` may belong to another shard.
        """
        for may_pair, blocks in groupby(
            self.blocks[first:], key=lambda cols: self._may_pair(rows, cols)
        ):
            if may_pair and self.wide:
                yield list(blocks)
            elif may_pair:
                yield from ([block] for block in blocks)

    def _may_pair(self, rows: Block, cols: slice) -> bool:
        """Return whether the rows and these columns of this shard may have a segment in
        common. They have none if the rows or the columns are only padding.
        """
        of_rows = rows.shard.segments[rows.where.start]
        of_cols = self.segments[cols.start]
        if of_rows is None or of_cols is None:
            return True
        lowest_row, highest_row = of_rows
        lowest_col, highest_col = of_cols
        return lowest_row <= highest_col and lowest_col <= highest_row


def tile_pairs(
    rows: Block, cols: Block, pair: PairFunction, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return Σ w [B] and q [B, m, n] of one tile. If ``out`` is not None, q is written
    there.
    """
    marks = None
    if rows.marks is not None and cols.marks is not None:
        marks = (rows.marks, cols.marks.transpose(1, 2))
    diagonal = rows.shard is cols.shard and rows.where == cols.where
    products = product(rows.x, cols.x.transpose(1, 2))
    return epilogue_of(pair)(
        products,
        pair,
        rows.scale,
        cols.scale.transpose(1, 2),
        diagonal,
        rows.x.dtype,
        marks,
        out,
    )


def span_pairs(
    rows: Block, cols: Block, span: list[slice], pair: PairFunction
) -> tuple[Tensor, Tensor]:
    """Return Σ w [B] and q [B, m, n] of the pairs of ``rows`` with ``cols``, which are
    the blocks of ``span`` in a row.

    If rows and columns belong to the same shard, Σ w counts tiles off the diagonal
    twice, because their transposes are not computed.
    """
    if rows.shard.in_triton:
        # In the rows' shard, a span begins with the block of the rows or after it. In
        # the first case, the kernel itself counts pairs off the diagonal twice.
        mirrored = rows.shard is cols.shard and rows.where.start == cols.where.start
        sums, q = triton_pairs.span_sums(rows, cols, pair, mirrored=mirrored)
        if not mirrored:
            sums *= _multiplicity(rows, cols)
        return sums, q
    if len(span) == 1:
        sums, q = tile_pairs(rows, cols, pair)
        return _multiplicity(rows, cols) * sums, q
    # As wide as the whole shard, so that the strides are the same for every span. (A
    # kernel is compiled for each set of strides.)
    q = cols.x.new_empty(*rows.x.shape[:2], cols.shard.x.shape[1])
    s = rows.scale.new_zeros(len(rows.x))
    for where in span:
        tile_cols = cols.shard.block(where)
        sums, _ = tile_pairs(rows, tile_cols, pair, out=q[..., where])
        s += _multiplicity(rows, tile_cols) * sums
    return s, q[..., cols.where]


def _multiplicity(rows: Block, cols: Block) -> int:
    """Return how often a tile counts in S: 2 if it is off the diagonal of one shard,
    because it also stands for its transpose, otherwise 1.
    """
    return 2 if rows.shard is cols.shard and rows.where != cols.where else 1


def pair_sums(
    units: Units,
    to_units: Callable[[Tensor], Units],
    gathering: Gathering | None,
    mask: TokenMask | None,
    pair: PairFunction,
) -> tuple[Tensor, Tensor]:
    """Return this rank's part of S, [B], and W of its tokens, [B, n, F].

    The part has all pairs of this rank's tokens i with all tokens j ≠ i.

    Args:
        units: the unit vectors of this rank's tokens z, which are 0 at padding.
        to_units: the function that returned ``units`` for z.
        gathering: the all-gather of z, if the sequence is sharded.
    """
    marks = None if mask is None else mask.marks(mask.rank)
    shard = Shard(units, marks, pair)
    s, w = all_pairs(shard, pair)
    for other_z, other_marks in marked_shards(gathering, mask):
        other = Shard(to_units(other_z), other_marks, pair)
        s += add_pairs_with(shard, other, w, pair)
    return s, w


def all_pairs(shard: Shard, pair: PairFunction) -> tuple[Tensor, Tensor]:
    """Return S [B] and W [B, n, F] over all pairs i ≠ j of a shard.

    Only the tiles on and above the diagonal are computed. A tile above the diagonal also
    stands for its transpose.
    """
    s = shard.scale.new_zeros(len(shard.x))
    # If no tile is left out, W need not be initialized, because the first row of tiles
    # writes all of W. The first span writes W of the top rows, and each span writes W of
    # the tokens in its columns.
    all_written = shard.marks is None or shard.marks.ranges is None
    new = torch.empty_like if all_written else torch.zeros_like
    w = new(shard.x, dtype=accumulation_dtype(shard.x.dtype))
    for k, i in enumerate(shard.blocks):
        rows = shard.block(i)
        for span in shard.spans(rows, first=k):
            begin = span[0].start
            end = span[-1].stop
            cols = shard.block(slice(begin, end))
            sums, q = span_pairs(rows, cols, span, pair)
            s += sums
            add_product_(w[:, i], q, cols.x, overwrite=all_written and begin == 0)
            # The transposes of the tiles above the diagonal
            below = max(begin, i.stop)
            if below < end:
                transposed = q[..., below - begin :].transpose(1, 2)
                add_product_(
                    w[:, below:end],
                    transposed,
                    rows.x,
                    overwrite=all_written and k == 0,
                )
    return s, w


def add_pairs_with(shard: Shard, other: Shard, w: Tensor, pair: PairFunction) -> Tensor:
    """Return S [B] over the pairs of this shard's tokens with the other shard's tokens.
    To ``w`` [B, n, F], add what these pairs contribute to W.
    """
    s = w.new_zeros(len(w))
    for i in shard.blocks:
        rows = shard.block(i)
        for span in other.spans(rows):
            cols = other.block(slice(span[0].start, span[-1].stop))
            sums, q = span_pairs(rows, cols, span, pair)
            s += sums
            add_product_(w[:, i], q, cols.x)
    return s
