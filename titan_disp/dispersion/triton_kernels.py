"""The functions that Triton compiles for ``triton_pairs``.

This module imports Triton, so it is imported only when the kernel is used. Triton
compiles the source of functions decorated with ``triton.jit``, in which Python's
operators apply to tiles. ``constexpr`` arguments are known to the compiler.

Functions named ``…_tile`` are the second form of pair functions in ``variants``: they
return w and r of a tile of cosines in float32.
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
    """Return arccos c̃, with an error below 4e-7, and 1/√(1 − c̃²), for a tile of cosines
    c. c̃ is c clamped to ±bound.

    arccos |c̃| is approximated by √(1 − |c̃|) times a polynomial, with an error of 2e-8;
    the remaining error is rounding. Triton's interpreter has no arccos.
    """
    # NaN stays NaN, so that a faulty token is noticed.
    c = tl.clamp(c, -bound, bound, propagate_nan=tl.PropagateNan.ALL)
    a = tl.abs(c)
    polynomial = 0.0
    for k in tl.static_range(8):  # the interpreter does not support len(ARCCOS)
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
    """Return pointers to values of a sequence, given ``triton_pairs.Values`` and offsets
    from the beginning of the sequence.
    """
    return values.first + sequence * values.stride + offset


@triton.jit
def tile_products(x_rows, x_cols, FEATURES, TILE, STEP):
    """Return the products x_i·x_j of a tile, float32 [TILE, TILE], given pointers to the
    first feature of each row [TILE, 1] and of each column [1, TILE].
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
    """Return which tokens form pairs, given their marks: bool, or indices of segments.

    This is the negation of ``masks.apart``.
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
    """Write q of a span, and Σ w of each of its tiles, for ``triton_pairs.span_sums``.

    ``rows`` and ``cols`` are of type ``triton_pairs.Side``. Each program computes one
    tile of one sequence, the tile in row i and column j.
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
    # Rows and columns beyond the end read other tokens, which ``is_inside`` leaves out.
    # Offsets in memory may exceed 32 bits; positions of tokens do not.
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
        # Of the tiles in the square, only those on the diagonal have both (i, j) and
        # (j, i). Pairs in all other tiles count twice.
        w *= tl.where((i == j) & in_square, 1.0, 2.0)

    tile = tl.where(is_pair, r * (2.0 * s_rows) * s_cols, 0.0)
    first = sequence * rows.tokens
    tl.store(q + (first + row) * q_width + col, tile, mask=is_inside)
    # After q, so that r occupies registers for a shorter time
    tl.store(sums + program, tl.sum(tl.where(is_pair, w, 0.0)))
    if MIRRORED & (i < j) & (j * TILE < rows.tokens):
        # the transposed tile, below the diagonal
        in_both = is_inside & in_square
        tl.store(q + (first + col) * q_width + row, tile, mask=in_both)
