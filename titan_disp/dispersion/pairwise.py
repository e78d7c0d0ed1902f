"""The exact all-pairs angular dispersion in one pass and O(N·F) memory.

For one sequence, with tokens z ∈ R^{N×F} (arXiv 2602.00217; clamp and ε as in the authors' released code):

    u_i = z_i / (‖z_i‖ + ε)     c_ij = u_i·u_j     c̃ = clamp(c, −1+κ, 1−κ)
    D_ij = arccos(c̃_ij) / π     w_ij = exp(−D_ij/τ)     S = Σ_{i≠j} w_ij     L = log S − log(N(N−1))

The clamp is straight-through: beyond the bound the slope stays the slope at the bound, because a hard clamp would
zero the gradient exactly where tokens have collapsed onto each other.

As 0 ≤ D ≤ 1, the exponent lies in [−1/τ, 0] and no running maximum is needed. With k = 1/(πτ),

    r_ij = ∂w_ij/∂c_ij = k · w_ij / √(1 − c̃_ij²)     V_i = Σ_{j≠i} r_ij u_j     ∂S/∂u_i = 2 V_i,

so one walk over tiles of c yields both S and ∂S/∂z. Forward saves ∂S/∂z; backward only scales it.
"""

import math

import torch
from torch import Tensor

# arccos has an infinite slope at ±1. κ below this is raised to it: the slope is then bounded by 1/√(2κ) ≈ 700.
MIN_CLAMP = 1e-6

# exp(−1/τ) must stay a normal fp32 number (exp(−80) ≈ 2e−35), else S could underflow to 0 and log S to −inf.
MIN_TAU = 1.0 / 80.0

# Elements of one tile of c, all sequences of the batch together: 64 MiB in fp32, independent of N.
TILE_ELEMENTS = 1 << 24
MAX_TILE = 1024


def check_parameters(tau: float, clamp: float, norm_eps: float) -> None:
    """Raise ValueError where the loss is not defined or could not stay finite in fp32.

    Args:
        tau: temperature τ, at least ``MIN_TAU``.
        clamp: κ in [0, 1).
        norm_eps: ε > 0, added to the norms.
    """
    if not (math.isfinite(tau) and tau >= MIN_TAU):
        raise ValueError(f"tau is {tau}, expected a number ≥ {MIN_TAU}: exp(-1/tau) must be representable in float32")
    if not 0.0 <= clamp < 1.0:
        raise ValueError(f"clamp is {clamp}, expected a number in [0, 1)")
    if not (math.isfinite(norm_eps) and norm_eps > 0.0):
        raise ValueError(f"norm_eps is {norm_eps}, expected a number > 0: an all-zero token is divided by it")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64 (for reference computations); everything else is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def normalize(z: Tensor, norm_eps: float) -> tuple[Tensor, Tensor]:
    """u = z / (‖z‖ + ε) over the last dimension.

    Args:
        z: [..., F], any float dtype.

    Returns:
        u [..., F] and the norms ‖z‖ [..., 1], both in the accumulation dtype.
    """
    z = z.to(accumulation_dtype(z.dtype))
    norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return z / (norm + norm_eps), norm


def normalize_backward(z: Tensor, norm: Tensor, grad_u: Tensor, norm_eps: float) -> Tensor:
    """∂/∂z of a function of u, given ∂/∂u. At z = 0 the derivative of ‖z‖ is taken as 0, as autograd does.

    Args:
        z: [..., F]; norm: [..., 1]; grad_u: [..., F] in the accumulation dtype.

    Returns:
        [..., F] in the accumulation dtype.
    """
    z = z.to(grad_u.dtype)
    scale = norm + norm_eps
    radial = (z * grad_u).sum(-1, keepdim=True) / (norm.clamp_min(torch.finfo(norm.dtype).tiny) * scale)
    return (grad_u - z * radial) / scale


def tile_size(batch: int) -> int:
    """Rows (= columns) of a tile such that ``batch`` tiles hold at most TILE_ELEMENTS elements."""
    side = math.isqrt(max(1, TILE_ELEMENTS // max(1, batch)))
    return max(16, min(MAX_TILE, side // 16 * 16))


def _tile(rows: Tensor, cols: Tensor, tau: float, clamp: float, diagonal: bool) -> tuple[Tensor, Tensor]:
    """w and r for one tile of pairs.

    Args:
        rows, cols: [B, m, F] and [B, n, F] normalised tokens.
        diagonal: rows and cols are the same tokens, so that entry (i, i) pairs a token with itself.

    Returns:
        w, r: [B, m, n] each, 0 where a token meets itself.
    """
    k = 1.0 / (math.pi * tau)
    bound = 1.0 - max(clamp, MIN_CLAMP)
    c = torch.bmm(rows, cols.transpose(1, 2)).clamp_(-bound, bound)
    w = torch.acos(c).mul_(-k).exp_()
    # 1 − c² as (1 − c)(1 + c): near the bound the square would lose the digits that matter.
    r = ((1.0 - c) * (1.0 + c)).rsqrt_().mul_(k).mul_(w)
    if diagonal:
        w.diagonal(dim1=1, dim2=2).zero_()
        r.diagonal(dim1=1, dim2=2).zero_()
    return w, r


def all_pairs(u: Tensor, tau: float, clamp: float, tile: int | None = None) -> tuple[Tensor, Tensor]:
    """S and V over all ordered pairs i ≠ j of one set of tokens. Each tile above the diagonal serves both sides.

    Args:
        u: [B, N, F] normalised tokens.
        tile: rows per tile; by default as many as TILE_ELEMENTS allows.

    Returns:
        S [B] and V [B, N, F], in u's dtype.
    """
    batch, n, _ = u.shape
    tile = tile or tile_size(batch)
    s = u.new_zeros(batch)
    v = torch.zeros_like(u)
    for i in range(0, n, tile):
        rows = u[:, i : i + tile]
        w, r = _tile(rows, rows, tau, clamp, diagonal=True)
        s += w.sum((1, 2))
        v[:, i : i + tile].baddbmm_(r, rows)
        for j in range(i + tile, n, tile):
            cols = u[:, j : j + tile]
            w, r = _tile(rows, cols, tau, clamp, diagonal=False)
            s += 2 * w.sum((1, 2))
            v[:, i : i + tile].baddbmm_(r, cols)
            v[:, j : j + tile].baddbmm_(r.transpose(1, 2), rows)
    return s, v


def add_rows_against(
    rows: Tensor, cols: Tensor, v: Tensor, tau: float, clamp: float, tile: int | None = None
) -> Tensor:
    """S of one shard's tokens against another shard's; their part of V is added to ``v`` in place.

    Args:
        rows, cols: [B, n, F] and [B, m, F] normalised tokens, no token in both.
        v: [B, n, F], V of the rows so far.

    Returns:
        S [B], the sum of w over all (row, column) pairs.
    """
    batch, n, _ = rows.shape
    tile = tile or tile_size(batch)
    s = rows.new_zeros(batch)
    for i in range(0, n, tile):
        for j in range(0, cols.shape[1], tile):
            c = cols[:, j : j + tile]
            w, r = _tile(rows[:, i : i + tile], c, tau, clamp, diagonal=False)
            s += w.sum((1, 2))
            v[:, i : i + tile].baddbmm_(r, c)
    return s
