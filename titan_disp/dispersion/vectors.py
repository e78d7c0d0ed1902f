"""Tokens → unit vectors, and gradients back."""

import torch
from torch import Tensor

from titan_disp.dispersion.kernels import accumulation_dtype, fused

BLOCK_ELEMENTS = 1 << 18  # of z, per block of rows: 1 MiB in fp32


def norms(z: Tensor) -> Tensor:
    """‖z‖ over the last dimension, [..., 1], in the accumulation dtype."""
    return torch.linalg.vector_norm(z, dim=-1, keepdim=True, dtype=accumulation_dtype(z.dtype))


def row_blocks(x: Tensor) -> list[slice]:
    """Rows [B, n, F] in blocks that stay in a core's cache, and whose temporaries cost no memory to speak of.

    All in one on a GPU, where what is done with them is one kernel without temporaries.
    """
    if x.device.type != "cpu":
        return [slice(None)]
    rows = max(1, BLOCK_ELEMENTS // max(1, x.shape[0] * x.shape[2]))
    return [slice(i, i + rows) for i in range(0, x.shape[1], rows)]


def normalize_backward_(z: Tensor, norm: Tensor, grad_u: Tensor, norm_eps: float) -> Tensor:
    """∂/∂z of a function of u, given ∂/∂u, whose memory is used. At z = 0 the derivative of ‖z‖ is taken as 0, as autograd does.

    Args:
        z: [B, n, F]; norm: [B, n, 1]; grad_u: [B, n, F] in the accumulation dtype.

    Returns:
        [B, n, F] in the accumulation dtype.
    """
    for rows in row_blocks(grad_u):
        _normalize_backward_(grad_u[:, rows], z[:, rows], norm[:, rows], norm_eps)
    return grad_u


@fused
def _normalize_backward_(g: Tensor, z: Tensor, norm: Tensor, norm_eps: float) -> None:
    z, scale = z.to(g.dtype), norm + norm_eps
    radial = (z * g).sum(-1, keepdim=True) / (norm.clamp_min(torch.finfo(norm.dtype).tiny) * scale)
    g.addcmul_(z, radial, value=-1).div_(scale)


def standardize(z: Tensor) -> tuple[Tensor, Tensor]:
    """u = (z − μ) / (σ √(F − 1)) over the last dimension, σ unbiased: u_i·u_j is the Pearson correlation of two tokens.

    A token of equal features has no correlation with any: its u is 0.

    Args:
        z: [..., F], F ≥ 2, any float dtype.

    Returns:
        u [..., F] and σ √(F − 1) = ‖z − μ‖ [..., 1], both in the accumulation dtype.
    """
    z = z.to(accumulation_dtype(z.dtype))
    centred = z - z.mean(-1, keepdim=True)
    norm = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
    # What rounding leaves of a constant token is no direction.
    floor = 4 * torch.finfo(z.dtype).eps * torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return torch.where(norm > floor, centred / norm, 0.0), norm


def standardize_backward_(u: Tensor, norm: Tensor, grad_u: Tensor) -> Tensor:
    """∂/∂z of a function of u = ``standardize(z)``, given ∂/∂u, whose memory is used; 0 where u is 0.

    Args:
        u, grad_u: [B, n, F]; norm: [B, n, 1]; all in the accumulation dtype.
    """
    for rows in row_blocks(grad_u):
        some, g, length = u[:, rows], grad_u[:, rows], norm[:, rows]
        g.sub_(g.mean(-1, keepdim=True)).addcmul_(some, (some * g).sum(-1, keepdim=True), value=-1)
        direction = some.square().sum(-1, keepdim=True) > 0
        g.mul_(torch.where(direction, 1.0 / length, 0.0))
    return grad_u
