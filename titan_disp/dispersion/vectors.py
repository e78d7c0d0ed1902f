"""Tokens → unit vectors, and gradients back."""

import torch
from torch import Tensor


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


def standardize_backward(u: Tensor, norm: Tensor, grad_u: Tensor) -> Tensor:
    """∂/∂z of a function of u = ``standardize(z)``, given ∂/∂u; 0 where u is 0.

    Args:
        u, grad_u: [..., F]; norm: [..., 1]; all in the accumulation dtype.
    """
    tangent = grad_u - grad_u.mean(-1, keepdim=True) - u * (u * grad_u).sum(-1, keepdim=True)
    return torch.where(u.square().sum(-1, keepdim=True) > 0, tangent / norm, 0.0)
