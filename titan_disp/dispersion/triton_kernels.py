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


@triton.jit
def arccos_and_slope(c):
    """Return arccos c, with an error below 4e-7, and 1/√(1 − c²) of a tile of |c| < 1.

    Abramowitz & Stegun 1964, 4.4.46: √(1 − |c|) times a polynomial, within 2e-8; the
    rest is rounding. Triton's interpreter has no arccos.
    """
    a = tl.abs(c)
    p = -0.0012624911
    p = p * a + 0.0066700901
    p = p * a - 0.0170881256
    p = p * a + 0.0308918810
    p = p * a - 0.0501743046
    p = p * a + 0.0889789874
    p = p * a - 0.2145988016
    p = p * a + 1.5707963050
    inverse = tl.rsqrt(1.0 - a)
    angle = (1.0 - a) * inverse * p
    return tl.where(c < 0.0, PI - angle, angle), inverse * tl.rsqrt(1.0 + a)


@triton.jit
def clamp(c, bound):
    """Return c within ±bound, and NaN for NaN, which shows a fault of the tokens."""
    return tl.clamp(c, -bound, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def angular_tile(c, k, bound):
    angle, slope = arccos_and_slope(clamp(c, bound))
    w = tl.exp(-k * angle)
    return w, k * w * slope


@triton.jit
def orthogonalization_tile(c, bound):
    angle, slope = arccos_and_slope(clamp(c, bound))
    near = 0.5 - angle / PI
    near = tl.maximum(near, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return near * near, near * slope * (2.0 / PI)


@triton.jit
def uniformity_tile(c, slope):
    w = tl.exp((c - 1.0) * slope)
    return w, w * slope


@triton.jit
def span_kernel(
    x_rows,
    x_rows_strides,
    x_cols,
    x_cols_strides,
    scale_rows,
    scale_rows_strides,
    scale_cols,
    scale_cols_strides,
    marks_rows,
    marks_rows_strides,
    marks_cols,
    marks_cols_strides,
    q,
    q_strides,
    sums,
    rows,
    cols,
    constants,
    FEATURES: tl.constexpr,
    FUNCTION: tl.constexpr,
    MIRRORED: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Each program computes the tile in row i and column j of tiles of one sequence."""
    program = tl.program_id(0)
    tiles_across = tl.cdiv(cols, TILE)
    tiles = tl.cdiv(rows, TILE) * tiles_across
    sequence = (program // tiles).to(tl.int64)
    i = program % tiles // tiles_across
    j = program % tiles_across
    if MIRRORED & (j < i):
        tl.store(sums + program, 0.0)
        return

    row = i * TILE + tl.arange(0, TILE)
    col = j * TILE + tl.arange(0, TILE)
    is_inside = (row < rows)[:, None] & (col < cols)[None]
    # Beyond the end, any token is read, and left out by ``is_inside``.
    row_token = (row % rows).to(tl.int64)
    col_token = (col % cols).to(tl.int64)

    x_rows += sequence * x_rows_strides[0]
    x_cols += sequence * x_cols_strides[0]
    feature = tl.arange(0, STEP)
    a_at = x_rows + row_token[:, None] * x_rows_strides[1] + feature * x_rows_strides[2]
    b_at = x_cols + col_token * x_cols_strides[1] + feature[:, None] * x_cols_strides[2]
    products = tl.zeros((TILE, TILE), tl.float32)
    for first in range(0, FEATURES, STEP):
        is_feature = feature < FEATURES - first
        a = tl.load(a_at, mask=is_feature[None], other=0.0)
        b = tl.load(b_at, mask=is_feature[:, None], other=0.0)
        if INTERPRETED:  # the interpreter multiplies bf16 as integers
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        products = tl.dot(a, b, products, input_precision="ieee")
        a_at += STEP * x_rows_strides[2]
        b_at += STEP * x_cols_strides[2]

    scale_rows += sequence * scale_rows_strides[0]
    scale_cols += sequence * scale_cols_strides[0]
    s_rows = tl.load(scale_rows + row_token * scale_rows_strides[1])[:, None]
    s_cols = tl.load(scale_cols + col_token * scale_cols_strides[1])[None]
    w, r = FUNCTION(products * s_rows * s_cols, *constants)

    is_pair = is_inside
    if MIRRORED:
        is_pair = is_pair & (row[:, None] != col)
    if marks_rows is not None:
        marks_rows += sequence * marks_rows_strides[0]
        marks_cols += sequence * marks_cols_strides[0]
        mark_rows = tl.load(marks_rows + row_token * marks_rows_strides[1])
        mark_cols = tl.load(marks_cols + col_token * marks_cols_strides[1])
        is_pair = (
            is_pair & (mark_rows[:, None] == mark_cols) & (mark_rows >= 0)[:, None]
        )
    w = tl.where(is_pair, w, 0.0)
    if MIRRORED:
        # A tile on the diagonal holds its own transpose, except for the columns beyond
        # the rows.
        has_transpose = (i == j) & (col < rows)
        w = tl.where(has_transpose, w, 2.0 * w)
    tl.store(sums + program, tl.sum(w))

    tile = tl.where(is_pair, r * s_rows * s_cols, 0.0).to(q.dtype.element_ty)
    q += sequence * q_strides[0]
    tl.store(q + row[:, None] * q_strides[1] + col, tile, mask=is_inside)
    if MIRRORED & (i < j) & (j * TILE < rows):
        is_row = (col < rows)[:, None] & (row < rows)
        tl.store(q + col[:, None] * q_strides[1] + row, tl.trans(tile), mask=is_row)
