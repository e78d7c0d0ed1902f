"""Linear in N: sums over pairs of a quadratic function of the cosine collapse into moments of the tokens.

    w(c_ij) ≈ a_i + b_i c_ij + ½ d_i c_ij²      s = Σ u_j      M = UᵀU  (F×F)      q_i = ‖u_i‖²

    S = Σ_i Σ_{j≠i} w(c_ij) ≈ Σ_i a_i (N−1) + b_i (u_i·s − q_i) + ½ d_i (u_i·M u_i − q_i²)
    ∂S/∂u_i = 2 Σ_{j≠i} r(c_ij) u_j ≈ 2 b_i (s − u_i) + 2 d_i (M u_i − q_i u_i)

Exact for decorrelation (a = b = 0, d = 2). For the angular loss w(c) is so smooth that a quadratic carries it. Every token has
its own, fitted to its cosines with some tokens of the sequence. One for all would fit the cosines that most pairs have. While
embeddings collapse, these are those within a narrow cone, where the gradient nearly vanishes; most of it is of the few tokens
outside, for whom that fit is wrong by as much as the slope itself.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.collectives import all_gather
from titan_disp.dispersion.kernels import accumulation_dtype, fused, product
from titan_disp.dispersion.masks import Count, TokenMask, own_tokens, slots_of
from titan_disp.dispersion.pairwise import PairFunction
from titan_disp.dispersion.vectors import norms, row_blocks

FIT_TOKENS = 64  # of a sequence, evenly spaced, with which all others are compared
GRAM_BLOCK = 256  # features
RIDGE = 1e-6  # on the variance of a token's cosines: identical tokens have none
FLOOR = 1e-3  # of sin θ: a token that all others are parallel to has no gradient, but a fit all the same


def gram(u: Tensor) -> Tensor:
    """UᵀU [B, F, F] of u [B, n, F], in the accumulation dtype. It is symmetric: blocks below the diagonal are copies."""
    batch, _, f = u.shape
    if u.device.type != "cpu":
        return product(u.transpose(1, 2), u)  # too small for its cores as it is
    m = u.new_empty((batch, f, f), dtype=accumulation_dtype(u.dtype))
    for i in range(0, f, GRAM_BLOCK):
        block = product(u[:, :, i : i + GRAM_BLOCK].transpose(1, 2), u[:, :, i:])
        m[:, i : i + GRAM_BLOCK, i:] = block
        m[:, i:, i : i + GRAM_BLOCK] = block.transpose(1, 2)
    return m


class Quadratic(NamedTuple):
    """w(c_ij) ≈ offset + slope c_ij + ½ curvature c_ij², each [B, n, 1] for the tokens i, or one for all of them, [B, 1, 1]."""

    offset: Tensor
    slope: Tensor
    curvature: Tensor


def quadratic_sum_(
    u: Tensor, quadratic: Quadratic, tokens: Count, group: dist.ProcessGroup | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Σ_i Σ_{j≠i} of these tokens i with all tokens j of the sequence, and ∂S/∂u of S, the sum over all i, in u's memory.

    Args:
        u: [B, n, F], in the accumulation dtype; 0 where there is no token, whose gradient does not matter.
        quadratic: its offset is 0 where there is no token.
        tokens: N of the whole sequence.
        dtype: of the operands of products.

    Returns:
        [B], this rank's part of S; [B, n, F].
    """
    x = u.to(dtype)
    parts = [gram(x), u.sum(1)]
    if group is not None:
        sizes = [part[0].numel() for part in parts]
        flat = torch.cat([part.flatten(1) for part in parts], dim=1)  # one all-reduce
        dist.all_reduce(flat, group=group)
        parts = [flat_part.view_as(part) for flat_part, part in zip(flat.split(sizes, dim=1), parts, strict=True)]
    m, s = parts[0].to(dtype), parts[1][:, None]
    others = tokens - 1 if isinstance(tokens, int) else (tokens - 1)[:, None, None]
    total = u.new_zeros(u.shape[0])
    for rows in row_blocks(u):  # u is read for the last time
        own = Quadratic(*(part if part.shape[1] == 1 else part[:, rows] for part in quadratic))
        total += _combine_(u[:, rows], product(x[:, rows], m), s, own, others)
    return total, u


@fused
def _combine_(u: Tensor, um: Tensor, s: Tensor, quadratic: Quadratic, others: Count) -> Tensor:
    """u becomes 2 slope (s − u) + 2 curvature (M u − ‖u‖² u); the sum over these tokens and all others, [B]."""
    offset, slope, curvature = quadratic
    squares = u.square().sum(-1, keepdim=True)
    first = (u * s).sum(-1, keepdim=True) - squares
    second = (u * um).sum(-1, keepdim=True) - squares.square()
    sums = offset * others + slope * first + curvature * second / 2
    u.mul_(-2 * (slope + curvature * squares)).addcmul_(um, 2 * curvature).addcmul_(s, 2 * slope)
    return sums.sum((1, 2))


class Sample(NamedTuple):
    """Some tokens of the sequence, the same on every rank of the group.

    Attributes:
        z: [B, m, F].
        rows: [B or 1, m], where they are among this rank's tokens; −1: they are another rank's.
        filled: [B, m] bool, which of them are tokens; None: all are.
    """

    z: Tensor
    rows: Tensor
    filled: Tensor | None = None


def sample(z: Tensor, tokens: int, group: dist.ProcessGroup | None) -> Sample:
    """About FIT_TOKENS evenly spaced tokens.

    The stride is a power of two, so that shards of a common length take the tokens that one process would.
    """
    stride = 1 << max(0, (tokens // FIT_TOKENS).bit_length() - 1)
    own = z[:, ::stride].contiguous()
    rows = torch.arange(0, z.shape[1], stride, device=z.device)
    if group is None:
        return Sample(own, rows[None])
    world, rank, m = dist.get_world_size(group), dist.get_rank(group), own.shape[1]
    every = own.new_empty((world * own.shape[0], *own.shape[1:]))
    all_gather(every, own, group=group)
    every_row = rows.new_full((1, world * m), -1)
    every_row[0, rank * m : (rank + 1) * m] = rows
    return Sample(every.view(world, *own.shape).transpose(0, 1).reshape(own.shape[0], -1, own.shape[2]), every_row)


def sample_tokens(z: Tensor, mask: TokenMask, group: dist.ProcessGroup | None) -> Sample:
    """What ``sample`` would take of every sequence without its padding, in 2 FIT_TOKENS slots."""
    length, counts = mask.whole.shape[1], mask.counts[:, None]
    stride = torch.ones_like(counts)
    twice = 2 * FIT_TOKENS
    while twice <= length:
        stride = torch.where(counts >= twice, 2 * stride, stride)
        twice *= 2
    number = mask.whole.cumsum(1) - 1  # of every token, from 0
    positions, filled = slots_of(mask.whole & (number % stride == 0), min(length, 2 * FIT_TOKENS))
    every, mine, local = own_tokens(z, positions, group)
    if group is not None:
        dist.all_reduce(every, group=group)  # a sum of one token and zeros
    return Sample(every, local.where(mine[..., 0], -1), filled)


def fit(
    u: Tensor,
    scale: Tensor,
    some: Tensor,
    sampled: Sample,
    pair: PairFunction,
    mask: TokenMask | None,
    dtype: torch.dtype,
) -> tuple[Quadratic, Tensor]:
    """Every token's own quadratic, fitted to w and r over its cosines with the sampled tokens.

    Args:
        u: [B, n, F] unit vectors of this rank's tokens. scale: [B, n, 1], 1/‖z‖.
        some: [B, m, F] unit vectors of the sampled ones.
        dtype: of the operands of products.

    Returns:
        The quadratics. [B, 2]: Σ e² and Σ r² over the pairs of this rank's tokens with the sampled ones, where e is the error of
        the fitted slope, and each pair counts by the length of what it adds to the gradient.
    """
    x, some = u.to(dtype), some.to(dtype)
    squares, some_squares = norms(x).square_(), norms(some).square_().transpose(1, 2)
    c = product(x, some.transpose(1, 2))
    index = torch.arange(u.shape[1], device=u.device)[:, None]
    coefficients = u.new_empty(*u.shape[:2], 3)
    sums = u.new_zeros(u.shape[0], 2)
    for rows in row_blocks(c):
        valid = None if mask is None else mask.own[:, rows]
        coefficients[:, rows], found = _fit(
            c[:, rows],
            squares[:, rows],
            some_squares,
            scale[:, rows],
            index[rows],
            sampled.rows,
            valid,
            sampled.filled,
            pair,
        )
        sums += found
    return Quadratic(*coefficients.split(1, dim=-1)), sums


@fused  # some forty small kernels otherwise
def _fit(
    c: Tensor,
    squares: Tensor,
    some_squares: Tensor,
    scale: Tensor,
    index: Tensor,
    sampled: Tensor,
    valid: Tensor | None,
    filled: Tensor | None,
    pair: PairFunction,
) -> tuple[Tensor, Tensor]:
    """Of the cosines c [B, n, m]: offset, slope and curvature [B, n, 3], and the sums [B, 2]."""
    w, r = pair(c.clone())
    pairs = sampled[:, None] != index  # a token with itself is no pair
    if valid is not None and filled is not None:
        pairs = pairs & valid & filled[:, None]
    square = c.square()
    # ‖u_i‖ ‖u_j‖ sin θ_ij, the length of what token j adds to the gradient of token i, and of what r is to be right for.
    weight = (squares * some_squares - square).clamp_min_(0.0).add_(FLOOR**2).sqrt_().mul_(pairs)

    def mean(x: Tensor, weight: Tensor) -> Tensor:
        return (x * weight).sum(-1, keepdim=True)

    share = weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(c.dtype).tiny)
    centred = c - mean(c, share)
    curvature = mean(r, centred * share) / (mean(centred.square(), share) + RIDGE)
    slope = mean(r - curvature * c, share)
    error = r - slope - curvature * c
    equal = pairs.to(c.dtype) / pairs.sum(-1, keepdim=True).clamp_min(1)
    offset = mean(w - slope * c - curvature / 2 * square, equal)
    weight = weight * scale
    sums = [(x * weight).square().sum((1, 2)) for x in (error, r)]
    return torch.cat([offset, slope, curvature], dim=-1), torch.stack(sums, dim=-1)
