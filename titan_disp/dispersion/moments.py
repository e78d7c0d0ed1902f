"""The moments estimator sums over all pairs in time linear in N.

If a function of the cosine is quadratic, its sum over all pairs follows from moments of
the tokens:

    w(c_ij) ≈ a_i + b_i c_ij + ½ d_i c_ij²      s = Σ u_j      M = UᵀU  (F×F)      q_i = ‖u_i‖²

    S = Σ_i Σ_{j≠i} w(c_ij) ≈ Σ_i a_i (N−1) + b_i (u_i·s − q_i) + ½ d_i (u_i·M u_i − q_i²)
    ∂S/∂u_i = 2 Σ_{j≠i} r(c_ij) u_j ≈ 2 b_i (s − u_i) + 2 d_i (M u_i − q_i u_i)

This is exact for decorrelation (a = b = 0, d = 2). For the angular loss, w(c) is smooth
enough to be approximated by quadratics. Each token has its own quadratic, fitted to the
token's cosines with a sample of the sequence. One quadratic for all tokens would not be
enough. When embeddings collapse, most pairs lie within a narrow cone, where the
gradient nearly vanishes, and most of the gradient belongs to the few tokens outside the
cone. For these few tokens, the error in a common quadratic's slope would be as large as
the slope.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.kernels import (
    accumulation_dtype,
    fused,
    operand_dtype,
    product,
)
from titan_disp.dispersion.masks import Count, TokenMask, held_positions, tokens_at
from titan_disp.dispersion.pairwise import PairFunction
from titan_disp.dispersion.vectors import norms, row_blocks

FIT_TOKENS = 64  # tokens spread over a sequence, with which every token is compared
GOLDEN = 2654435769  # 2**32 divided by the golden ratio
GRAM_BLOCK = 256  # features
# Added to the variance of a token's cosines, which is 0 for identical tokens
RIDGE = 1e-6
# The smallest sin θ in a weight of the fit, and the smallest 1 − leverage. A token that
# is parallel to all others has no gradient but still needs a fit.
FLOOR = 1e-3


def gram(u: Tensor) -> Tensor:
    """Return UᵀU [B, F, F] of u [B, n, F] in the accumulation dtype.

    On a CPU, blocks below the diagonal are copied from those above it.
    """
    batch, _, f = u.shape
    if u.device.type != "cpu":
        # No blocks on a GPU, as even the whole product is too small to fill the GPU.
        return product(u.transpose(1, 2), u)
    m = u.new_empty((batch, f, f), dtype=accumulation_dtype(u.dtype))
    for i in range(0, f, GRAM_BLOCK):
        block = product(u[:, :, i : i + GRAM_BLOCK].transpose(1, 2), u[:, :, i:])
        m[:, i : i + GRAM_BLOCK, i:] = block
        m[:, i:, i : i + GRAM_BLOCK] = block.transpose(1, 2)
    return m


def over_group(parts: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the sum of each of ``parts`` over the ranks, with a single all-reduce."""
    if group is None:
        return parts
    flat = torch.cat([part.flatten(1) for part in parts], dim=1)
    dist.all_reduce(flat, group=group)
    sums = flat.split([part[0].numel() for part in parts], dim=1)
    return [total.view_as(part) for total, part in zip(sums, parts, strict=True)]


class Quadratic(NamedTuple):
    """The coefficients in w(c_ij) ≈ offset + slope c_ij + ½ curvature c_ij².

    Each is [B, n, 1], one per token i, or [B, 1, 1], the same for all tokens.
    """

    offset: Tensor
    slope: Tensor
    curvature: Tensor


class UnitTokens(NamedTuple):
    """This rank's tokens of some sequences of one layer, with their unit vectors."""

    z: Tensor  # [B, n, F]
    mask: TokenMask | None
    scale: Tensor  # 1/(‖z‖ + ε) [B, n, 1]
    u: Tensor  # [B, n, F] in the accumulation dtype


def quadratic_sum_(
    tokens: UnitTokens,
    quadratic: Quadratic,
    counts: Count,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Return this rank's part of S, and W [B, n, F] of its tokens. W overwrites u.

    The part, Σ_i Σ_{j≠i} w(c_ij) [B], has this rank's tokens i and all tokens j. W is
    scale · ∂S/∂u, where S is the sum over all i (``vectors``).

    u and the quadratic's offset must be 0 at padding. ``counts`` are the numbers of
    tokens of the whole sequences.
    """
    u = tokens.u
    x = u.to(operand_dtype(tokens.z))
    m, s = over_group([gram(x), u.sum(1, keepdim=True)], group)
    m = m.to(x.dtype)
    partners = counts - 1  # of each token
    if isinstance(partners, Tensor):
        partners = partners[:, None, None]
    total = u.new_zeros(u.shape[0])
    for rows in row_blocks(u):  # overwrites u, which is not needed afterwards
        of_rows = Quadratic(
            *(part if part.shape[1] == 1 else part[:, rows] for part in quadratic)
        )
        total += _combine_(
            u[:, rows],
            um=product(x[:, rows], m),
            s=s,
            quadratic=of_rows,
            partners=partners,
            scale=tokens.scale[:, rows],
        )
    return total, u


@fused
def _combine_(
    u: Tensor,
    um: Tensor,
    s: Tensor,
    quadratic: Quadratic,
    partners: Count,
    scale: Tensor,
) -> Tensor:
    """Return the sum over the pairs of these tokens, [B], and replace u by
    scale · (2 slope (s − u) + 2 curvature (M u − ‖u‖² u)). ``um`` is M u.
    """
    offset, slope, curvature = quadratic
    squares = u.square().sum(-1, keepdim=True)
    first = (u * s).sum(-1, keepdim=True) - squares
    second = (u * um).sum(-1, keepdim=True) - squares.square()
    sums = offset * partners + slope * first + curvature * second / 2
    of_s = 2 * scale * slope
    of_um = 2 * scale * curvature
    u.mul_(-(of_s + of_um * squares)).addcmul_(um, of_um).addcmul_(s, of_s)
    return sums.sum((1, 2))


class Sample(NamedTuple):
    """Sampled tokens of each sequence, the same on every rank of the group."""

    z: Tensor  # [B, m, F]
    # [B or 1, m], their index among this rank's tokens; −1 if another rank holds them
    rows: Tensor
    filled: Tensor  # bool [B or 1, m], which entries hold tokens


def block_size(counts: Count, length: int) -> Count:
    """Return the number of tokens per block: the largest power of two with which
    ``counts`` tokens have 64 or more blocks, or 1 if there are fewer than 64 tokens.

    ``length`` is the highest possible count.
    """
    size: Count = 1
    least = 2 * FIT_TOKENS
    while least <= length:
        size = size * (1 + (counts >= least))
        least *= 2
    return size


def offset_in_block(block: Tensor, size: Count) -> Tensor:
    """Return the offset of the sampled token in each block of ``size`` tokens.

    The offset is the fractional part of (block · golden ratio), times the size. These
    offsets spread evenly. With equal offsets, the sampled tokens could all be alike, as
    in a table. The offset in the first block is 0, so that the first token is sampled:
    in a language model, the first token is often unlike all others.
    """
    return ((block * GOLDEN) % 2**32) * size >> 32


def sample(
    z: Tensor, length: int, mask: TokenMask | None, group: dist.ProcessGroup | None
) -> Sample:
    """Return one token of each block of the whole sequences, of which z is a shard.

    A sequence has 64 to 128 blocks, or one block per token if it has fewer than 64
    tokens. Padding does not count. ``length`` is the number of positions.
    """
    counts: Count = length
    if mask is not None:
        counts = mask.counts[:, None]
    size = block_size(counts, length)
    if isinstance(size, int):
        slots = math.ceil(length / size)
    else:  # the number of blocks is known on the device only
        slots = min(length, 2 * FIT_TOKENS)
    block = torch.arange(slots, device=z.device)[None]
    begin = block * size
    positions = (begin + offset_in_block(block, size)).clamp_max(counts - 1)
    if mask is not None:
        # Token number i is at the first position up to which there are i + 1 tokens.
        positions = torch.searchsorted(mask.whole.cumsum(1), positions + 1)
    filled = begin < counts
    if group is None:
        return Sample(tokens_at(z, positions), positions, filled)
    is_held, index = held_positions(positions, z.shape[1], group)
    tokens = tokens_at(z, index).where(is_held[..., None], 0.0)
    dist.all_reduce(tokens, group=group)  # exact: adds only zeros to each token
    return Sample(tokens, index.where(is_held, -1), filled)


class _Rows(NamedTuple):
    """This rank's tokens i. A quadratic is fitted to each."""

    squares: Tensor  # ‖u_i‖² [B, n, 1]
    scale: Tensor  # 1/(‖z_i‖ + ε) [B, n, 1]
    local_index: Tensor  # among this rank's tokens, int [1, n, 1]
    valid: Tensor  # True at tokens, False at padding, bool [B or 1, n, 1]

    def part(self, rows: slice) -> "_Rows":
        return _Rows(*(of_rows[:, rows] for of_rows in self))


class _Columns(NamedTuple):
    """The sampled tokens j, with which each of the rows is compared."""

    squares: Tensor  # ‖u_j‖² [B, 1, m]
    # among this rank's tokens, int [B or 1, 1, m]; −1 if another rank holds the token
    local_index: Tensor
    filled: Tensor  # which entries hold tokens, bool [B or 1, 1, m]


def fit(
    tokens: UnitTokens, sampled: Sample, vectors: Tensor, pair: PairFunction
) -> tuple[Quadratic, Tensor]:
    """Return a quadratic for each of this rank's tokens, and Σ e² and Σ r² [B, 2].

    A quadratic is fitted to w and r of the token's cosines with the sampled tokens,
    whose unit vectors are ``vectors`` [B, m, F]. The sums are over all these pairs. e is
    the leave-one-out error of the slope for a pair. Each pair is weighted by the length
    of its contribution to the gradient.
    """
    u = tokens.u
    x = u.to(operand_dtype(tokens.z))
    y = vectors.to(x.dtype)
    local_index = torch.arange(u.shape[1], device=u.device)[None, :, None]
    if tokens.mask is None:
        valid = local_index >= 0  # True for all
    else:
        valid = tokens.mask.own
    rows = _Rows(
        squares=norms(x).square_(),
        scale=tokens.scale,
        local_index=local_index,
        valid=valid,
    )
    columns = _Columns(
        squares=norms(y).square_().transpose(1, 2),
        local_index=sampled.rows[:, None],
        filled=sampled.filled[:, None],
    )
    c = product(x, y.transpose(1, 2))
    coefficients = u.new_empty(*u.shape[:2], 3)
    sums = u.new_zeros(u.shape[0], 2)
    for block in row_blocks(c):
        coefficients[:, block], sums_of_block = _fit(
            c[:, block], rows.part(block), columns, pair
        )
        sums += sums_of_block
    return Quadratic(*coefficients.split(1, dim=-1)), sums


@fused  # otherwise about forty small kernels
def _fit(
    c: Tensor, rows: _Rows, columns: _Columns, pair: PairFunction
) -> tuple[Tensor, Tensor]:
    """Return offset, slope and curvature [B, n, 3] for cosines c [B, n, m], and the sums
    [B, 2] that ``fit`` returns.
    """
    w, r = pair(c.clone())
    is_other = columns.local_index != rows.local_index
    pairs = is_other & rows.valid & columns.filled
    square = c.square()
    # The fit weights pairs by ‖u_i‖ ‖u_j‖ sin θ_ij. This weight times r_ij is the length
    # of token j's contribution to the gradient of token i.
    weight = (
        (rows.squares * columns.squares - square)
        .clamp_min_(0.0)
        .add_(FLOOR**2)
        .sqrt_()
        .mul_(pairs)
    )

    def mean(x: Tensor, share: Tensor) -> Tensor:
        return (x * share).sum(-1, keepdim=True)

    share = weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(c.dtype).tiny)
    centred = c - mean(c, share)
    variance = mean(centred.square(), share) + RIDGE
    curvature = mean(r, centred * share) / variance
    slope = mean(r - curvature * c, share)
    # The leave-one-out error of a pair: its error in a fit to all other pairs. In a fit
    # to all pairs, a pair that alone determines the fit would have no error.
    leverage = share * (1 + centred.square() / variance)
    error = (r - slope - curvature * c) / (1 - leverage).clamp_min(FLOOR)
    equal = pairs.to(c.dtype) / pairs.sum(-1, keepdim=True).clamp_min(1)
    offset = mean(w - slope * c - curvature / 2 * square, equal)
    weight = weight * rows.scale
    sums = [(x * weight).square().sum((1, 2)) for x in (error, r)]
    return torch.cat([offset, slope, curvature], dim=-1), torch.stack(sums, dim=-1)
