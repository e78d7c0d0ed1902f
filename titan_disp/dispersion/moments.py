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
from titan_disp.dispersion.pairwise import PairFunction

FIT_TOKENS = 128  # of a sequence, evenly spaced
RIDGE = 1e-6  # on the variance of the cosines: identical tokens have none


def moments(u: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """s [B, F], M [B, F, F] and Σ‖u‖², Σ‖u‖⁴ [B, 2] over the whole sequence: one all-reduce where it is sharded.

    Args:
        u: [B, N/p, F].
    """
    batch, _, f = u.shape
    flat = u.new_empty(batch, f * f + f + 2)
    torch.bmm(u.transpose(1, 2), u, out=flat[:, : f * f].view(batch, f, f))
    torch.sum(u, 1, out=flat[:, f * f : f * f + f])
    squares = u.square().sum(-1)
    flat[:, -2], flat[:, -1] = squares.sum(-1), squares.square().sum(-1)
    if group is not None:
        dist.all_reduce(flat, group=group)
    return flat[:, f * f : f * f + f], flat[:, : f * f].view(batch, f, f), flat[:, -2:]


def quadratic_sum(
    u: Tensor, coefficients: Tensor, tokens: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Σ_{i≠j} (a0 + a1 c + a2 c²) over the whole sequence, and ∂/∂u of it for these tokens.

    Args:
        u: [B, N/p, F]. coefficients: [B, 3], a0, a1, a2. tokens: N.

    Returns:
        [B], the same on every rank of the group; [B, N/p, F].
    """
    s, m, norms = moments(u, group)
    a0, a1, a2 = coefficients.unbind(-1)
    total = (
        a0 * (tokens * (tokens - 1))
        + a1 * (s.square().sum(-1) - norms[:, 0])
        + a2 * (m.square().sum((1, 2)) - norms[:, 1])
    )
    a1, a2 = a1[:, None, None], a2[:, None, None]
    # u M + … in one buffer: 4 a2 u (M − ‖u‖²) + 2 a1 (s − u)
    grad = torch.bmm(u, m.mul(4 * a2))
    grad.addcmul_(u, u.square().sum(-1, keepdim=True).mul_(-4 * a2).sub_(2 * a1))
    return total, grad.add_(2 * a1 * s[:, None])


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


def fit(some: Tensor, pair: PairFunction) -> tuple[Tensor, Tensor]:
    """a0, a1, a2 [B, 3], and the relative root mean square error of the fitted slope [B].

    Args:
        some: [B, m, F] unit vectors.
    """
    c = torch.bmm(some, some.transpose(1, 2))
    off = ~torch.eye(c.shape[1], dtype=torch.bool, device=c.device)
    c = c[:, off]
    w, r = pair(c.clone())
    mean_c, mean_r = c.mean(-1, keepdim=True), r.mean(-1, keepdim=True)
    centred = c - mean_c
    slope = (centred * (r - mean_r)).mean(-1, keepdim=True) / (centred.square().mean(-1, keepdim=True) + RIDGE)
    a1, a2 = mean_r - slope * mean_c, slope / 2
    a0 = (w - a1 * c - a2 * c.square()).mean(-1, keepdim=True)
    error = (mean_r + slope * centred - r).square().mean(-1).sqrt() / r.square().mean(-1).sqrt()
    return torch.cat([a0, a1, a2], dim=-1), error
