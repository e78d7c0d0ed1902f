"""Linear in N: sums over pairs of a quadratic function of the cosine collapse into moments of the tokens.

    Σ_{i≠j} (a0 + a1 c_ij + a2 c_ij²) = a0 N(N−1) + a1 (‖s‖² − Σ‖u_i‖²) + a2 (‖M‖²_F − Σ‖u_i‖⁴)      s = Σ u_j,  M = UᵀU  (F×F)
    ∂/∂u_i = 2 a1 (s − u_i) + 4 a2 (M u_i − ‖u_i‖² u_i)

Exact for decorrelation (a2 = 1). For the angular loss w(c) is so smooth that a quadratic carries it: its slope a1 + 2 a2 c is
fitted by least squares to r(c) over the cosines among some tokens of the sequence, and a0 makes the means of w agree.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.collectives import all_gather
from titan_disp.dispersion.kernels import accumulation_dtype, fused, product
from titan_disp.dispersion.masks import Count, TokenMask, own_tokens, slots_of
from titan_disp.dispersion.pairwise import PairFunction
from titan_disp.dispersion.vectors import row_blocks

FIT_TOKENS = 128  # of a sequence, evenly spaced
GRAM_BLOCK = 256  # features
RIDGE = 1e-6  # on the variance of the cosines: identical tokens have none


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


def quadratic_sum_(
    u: Tensor, coefficients: Tensor, tokens: Count, group: dist.ProcessGroup | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Σ_{i≠j} (a0 + a1 c + a2 c²) over the whole sequence, and ∂/∂u of it for these tokens, in u's memory.

    Args:
        u: [B, n, F], in the accumulation dtype; 0 where there is no token, whose gradient does not matter.
        coefficients: [B, 3], a0, a1, a2.
        tokens: N of the whole sequence.
        dtype: of the operands of products.

    Returns:
        [B], the same on every rank of the group; [B, n, F].
    """
    squares = torch.linalg.vector_norm(u, dim=-1, keepdim=True).square_()
    x = u.to(dtype)
    parts = [gram(x), u.sum(1), torch.stack([squares.sum((1, 2)), squares.square().sum((1, 2))], dim=-1)]
    if group is not None:
        sizes = [part[0].numel() for part in parts]
        flat = torch.cat([part.flatten(1) for part in parts], dim=1)  # one all-reduce
        dist.all_reduce(flat, group=group)
        parts = [flat_part.view_as(part) for flat_part, part in zip(flat.split(sizes, dim=1), parts, strict=True)]
    m, s, norms = parts
    total, s, own = _weigh_(m, s, norms, squares, coefficients, tokens)
    m = m.to(dtype)
    for rows in row_blocks(u):  # u is read for the last time
        _combine_(u[:, rows], product(x[:, rows], m), own[:, rows], s)
    return total, u


@fused
def _weigh_(
    m: Tensor, s: Tensor, norms: Tensor, squares: Tensor, coefficients: Tensor, tokens: Count
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum [B], and what ∂/∂u = u (4 a2 M) + own u + … is made of: … = 2 a1 s [B, 1, F], own = −4 a2 ‖u‖² − 2 a1 [B, n, 1].

    M becomes 4 a2 M in its own memory.
    """
    a0, a1, a2 = coefficients.unbind(-1)
    total = (
        a0 * (tokens * (tokens - 1))
        + a1 * (s.square().sum(-1) - norms[:, 0])
        + a2 * (m.square().sum((1, 2)) - norms[:, 1])
    )
    a1, a2 = a1[:, None, None], a2[:, None, None]
    m.mul_(4 * a2)
    return total, (2 * a1) * s[:, None], squares * (-4 * a2) - 2 * a1


@fused
def _combine_(u: Tensor, um: Tensor, own: Tensor, s: Tensor) -> None:
    u.mul_(own).add_(um).add_(s)


def sample(u: Tensor, tokens: int, group: dist.ProcessGroup | None) -> Tensor:
    """About FIT_TOKENS evenly spaced tokens of the sequence, [B, m, F], the same on every rank of the group.

    The stride is a power of two, so that shards of a common length take the tokens that one process would.
    """
    stride = 1 << max(0, (tokens // FIT_TOKENS).bit_length() - 1)
    own = u[:, ::stride].contiguous()
    if group is None:
        return own
    world = dist.get_world_size(group)
    every = own.new_empty((world * own.shape[0], *own.shape[1:]))
    all_gather(every, own, group=group)
    return every.view(world, *own.shape).transpose(0, 1).reshape(own.shape[0], -1, own.shape[2])


def sample_tokens(u: Tensor, mask: TokenMask, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """What ``sample`` would take of every sequence without its padding, in 2 FIT_TOKENS slots.

    Returns:
        [B, m, F], the same on every rank of the group; [B, m] bool, which slots hold a token.
    """
    length, counts = mask.whole.shape[1], mask.counts[:, None]
    stride = torch.ones_like(counts)
    twice = 2 * FIT_TOKENS
    while twice <= length:
        stride = torch.where(counts >= twice, 2 * stride, stride)
        twice *= 2
    number = mask.whole.cumsum(1) - 1  # of every token, from 0
    positions, filled = slots_of(mask.whole & (number % stride == 0), min(length, 2 * FIT_TOKENS))
    every, _, _ = own_tokens(u, positions, group)
    if group is not None:
        dist.all_reduce(every, group=group)  # a sum of one token and zeros
    return every, filled


@fused  # some forty small kernels otherwise
def fit(some: Tensor, pair: PairFunction, filled: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """a0, a1, a2 [B, 3], and the relative root mean square error of the fitted slope [B].

    Args:
        some: [B, m, F] unit vectors.
        filled: [B, m] bool, which of them are tokens, where not all are.
    """
    c = _off_diagonal(torch.bmm(some, some.transpose(1, 2)))
    w, r = pair(c.clone())
    weights = None
    if filled is not None:
        weights = _off_diagonal(filled[:, :, None] & filled[:, None]).to(c.dtype)
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1.0)

    def mean(x: Tensor) -> Tensor:
        return x.mean(-1, keepdim=True) if weights is None else (x * weights).sum(-1, keepdim=True)

    mean_c, mean_r = mean(c), mean(r)
    centred = c - mean_c
    slope = mean(centred * (r - mean_r)) / (mean(centred.square()) + RIDGE)
    a1, a2 = mean_r - slope * mean_c, slope / 2
    a0 = mean(w - a1 * c - a2 * c.square())
    scale = mean(r.square()).sqrt().clamp_min(torch.finfo(r.dtype).tiny)  # of an empty sequence it is 0
    error = mean((mean_r + slope * centred - r).square()).sqrt() / scale
    return torch.cat([a0, a1, a2], dim=-1), error[:, 0]


def _off_diagonal(x: Tensor) -> Tensor:
    """[B, m, m] → [B, m(m−1)], by shape alone: a mask would make the host wait for the GPU to count."""
    m = x.shape[1]
    return x.flatten(1)[:, 1:].view(-1, m - 1, m + 1)[:, :, :-1].flatten(1)
