"""The functions that Triton compiles for ``triton_pairs``.

This module imports Triton, so it is imported only where the kernel is to be used. Triton
reads the source of a function decorated with ``triton.jit``, in which Python's operators
apply to tiles. ``constexpr`` arguments are known to the compiler.

Those named ``…_tile`` return w and r of a tile of cosines in float32, as the pair
functions of ``variants`` that name them.
"""

import triton
import triton.language as tl

PI = tl.constexpr(3.141592653589793)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


# Abramowitz & Stegun 1964, 4.4.46
ARCCOS = tl.constexpr(
    (
        -0.0012624911,
        0.0066700901,
        -0.0170881256,
        0.0308918810,
        -0.0501743046,
        0.0889789874,
        -0.2145988016,
        1.5707963050,
    )
)


@triton.jit
def angle_and_slope(c, bound):
    """Return arccos c̃, with an error below 4e-7, and 1/√(1 − c̃²) of a tile of cosines,
    where c̃ is c within ±bound.

    arccos |c̃| is √(1 − |c̃|) times a polynomial, within 2e-8; the rest is rounding.
    Triton's interpreter has no arccos.
    """
    # NaN stays NaN, and so shows a fault of a token.
    c = tl.clamp(c, -bound, bound, propagate_nan=tl.PropagateNan.ALL)
    a = tl.abs(c)
    polynomial = 0.0
    for k in tl.static_range(8):  # the interpreter knows no len(ARCCOS)
        polynomial = polynomial * a + ARCCOS[k]
    angle = tl.sqrt(1.0 - a) * polynomial
    slope = tl.rsqrt((1.0 - a) * (1.0 + a))
    return tl.where(c < 0.0, PI - angle, angle), slope


@triton.jit
def angular_tile(c, k, bound):
    angle, slope = angle_and_slope(c, bound)
    w = tl.exp(-k * angle)
    return w, k * w * slope


@triton.jit
def orthogonalization_tile(c, bound):
    angle, slope = angle_and_slope(c, bound)
    near = tl.maximum(0.5 - angle / PI, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return near * near, near * slope * (2.0 / PI)


@triton.jit
def uniformity_tile(c, slope):
    w = tl.exp((c - 1.0) * slope)
    return w, w * slope


@triton.jit
def values_at(values, sequence, offset):
    """Return pointers to ``triton_pairs.Values`` of a sequence, given their offsets."""
    return values.first + sequence * values.stride + offset


@triton.jit
def tile_products(x_rows, x_cols, FEATURES, TILE, STEP):
    """Return x_i·x_j of a tile in float32, given pointers to the first features of its
    rows [TILE, 1] and of its columns [1, TILE].
    """
    products = tl.zeros((TILE, TILE), tl.float32)
    feature = tl.arange(0, STEP)
    a_at = x_rows + feature[None]
    b_at = x_cols + feature[:, None]
    for first in range(0, FEATURES, STEP):
        is_feature = feature < FEATURES - first
        a = tl.load(a_at, mask=is_feature[None], other=0.0)
        b = tl.load(b_at, mask=is_feature[:, None], other=0.0)
        if INTERPRETED:  # the interpreter multiplies bf16 as integers
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        products = tl.dot(a, b, products, input_precision="ieee")
        a_at += STEP
        b_at += STEP
    return products


@triton.jit
def form_pairs(row_marks, col_marks):
    """Return which tokens form pairs, given bool marks of a mask or numbers of segments:
    the contrary of ``masks.apart``.
    """
    if row_marks.dtype == tl.int1:
        return row_marks & col_marks
    return (row_marks == col_marks) & (row_marks >= 0)


@triton.jit
def span_kernel(
    rows,
    cols,
    q,
    q_width,
    sums,
    constants,
    FEATURES: tl.constexpr,
    FUNCTION: tl.constexpr,
    MIRRORED: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write what ``triton_pairs.span_sums`` returns: q, and Σ w of each tile.

    ``rows`` and ``cols`` are a ``triton_pairs.Side`` each. Each program computes the
    tile in row i and column j of tiles of one sequence.
    """
    program = tl.program_id(0)
    tiles_across = tl.cdiv(cols.tokens, TILE)
    tiles = tl.cdiv(rows.tokens, TILE) * tiles_across
    i = program % tiles // tiles_across
    j = program % tiles_across
    if MIRRORED & (j < i):  # the tile (j, i) writes the q of this one
        tl.store(sums + program, 0.0)
        return

    row = i * TILE + tl.arange(0, TILE)[:, None]
    col = j * TILE + tl.arange(0, TILE)[None]
    is_inside = (row < rows.tokens) & (col < cols.tokens)
    # Beyond the end, any token is read, and left out by ``is_inside``. Offsets in
    # memory may exceed 32 bits; positions of tokens do not.
    sequence = (program // tiles).to(tl.int64)
    row_token = (row % rows.tokens).to(tl.int64)
    col_token = (col % cols.tokens).to(tl.int64)

    products = tile_products(
        values_at(rows.x, sequence, row_token * FEATURES),
        values_at(cols.x, sequence, col_token * FEATURES),
        FEATURES=FEATURES,
        TILE=TILE,
        STEP=STEP,
    )
    s_rows = tl.load(values_at(rows.scale, sequence, row_token))
    s_cols = tl.load(values_at(cols.scale, sequence, col_token))
    w, r = FUNCTION(products * s_rows * s_cols, *constants)

    is_pair = is_inside
    if rows.marks is not None:
        row_marks = tl.load(values_at(rows.marks, sequence, row_token))
        col_marks = tl.load(values_at(cols.marks, sequence, col_token))
        is_pair &= form_pairs(row_marks, col_marks)
    in_square = col < rows.tokens  # if mirrored, these columns are the rows
    if MIRRORED:
        is_pair &= row != col
        # Only the square's tiles on its diagonal hold (i, j) as well as (j, i).
        w *= tl.where((i == j) & in_square, 1.0, 2.0)

    tile = tl.where(is_pair, r * (2.0 * s_rows) * s_cols, 0.0)
    first = sequence * rows.tokens
    tl.store(q + (first + row) * q_width + col, tile, mask=is_inside)
    # after q, so that r is in registers for a shorter time
    tl.store(sums + program, tl.sum(tl.where(is_pair, w, 0.0)))
    if MIRRORED & (i < j) & (j * TILE < rows.tokens):
        # its transpose, below the diagonal
        in_both = is_inside & in_square
        tl.store(q + (first + col) * q_width + row, tile, mask=in_both)
