"""Tokens → unit vectors, and gradients back."""

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 18  # of z, per block of rows: 1 MiB in fp32


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


def row_blocks(x: Tensor) -> list[slice]:
    """Rows [B, n, F] in blocks that stay in a core's cache, and whose temporaries cost no memory to speak of."""
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
        some, g, length = z[:, rows].to(grad_u.dtype), grad_u[:, rows], norm[:, rows]
        scale = length + norm_eps
        radial = (some * g).sum(-1, keepdim=True) / (length.clamp_min(torch.finfo(norm.dtype).tiny) * scale)
        g.addcmul_(some, radial, value=-1).div_(scale)
    return grad_u


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
