"""The dispersion losses as the paper defines them: plain float64 autograd over the full N×N matrix."""

import math

import torch
from torch import Tensor


class StraightThroughClamp(torch.autograd.Function):
    """arccos(clamp(c)), with the slope at the bound everywhere beyond the bound."""

    @staticmethod
    def forward(ctx, c, bound):
        clamped = c.clamp(-bound, bound)
        ctx.save_for_backward(clamped)
        return torch.acos(clamped)

    @staticmethod
    def backward(ctx, grad):
        (clamped,) = ctx.saved_tensors
        return -grad / torch.sqrt(1 - clamped**2), None


def dispersion_oracle(z: Tensor, tau: float, clamp: float, norm_eps: float) -> Tensor:
    """The angular loss: [B, N, F] of any dtype → [B] float64, differentiable."""
    z = z.double()
    n = z.shape[1]
    u = z / (torch.linalg.vector_norm(z, dim=-1, keepdim=True) + norm_eps)
    d = StraightThroughClamp.apply(u @ u.transpose(1, 2), 1 - clamp) / math.pi
    off_diagonal = ~torch.eye(n, dtype=torch.bool)
    return torch.logsumexp(-d[:, off_diagonal] / tau, dim=1) - math.log(n * (n - 1))


def _pairs(x: Tensor) -> Tensor:
    """Drop the diagonal: [B, N, N] → [B, N(N−1)]."""
    return x[:, ~torch.eye(x.shape[1], dtype=torch.bool)]


def orthogonalization_oracle(z: Tensor, clamp: float, norm_eps: float) -> Tensor:
    """The mean over i≠j of max(0, ½ − D)²: [B, N, F] → [B] float64."""
    z = z.double()
    u = z / (torch.linalg.vector_norm(z, dim=-1, keepdim=True) + norm_eps)
    d = StraightThroughClamp.apply(u @ u.transpose(1, 2), 1 - clamp) / math.pi
    return _pairs((0.5 - d).clamp_min(0) ** 2).mean(1)


def decorrelation_oracle(z: Tensor) -> Tensor:
    """The mean over i≠j of squared correlations, with unbiased σ: [B, N, F] → [B] float64."""
    z = z.double()
    y = (z - z.mean(-1, keepdim=True)) / z.std(-1, keepdim=True)
    return _pairs((y @ y.transpose(1, 2) / (z.shape[-1] - 1)) ** 2).mean(1)


def l2_repel_oracle(z: Tensor, tau: float, norm_coeff: float, include_diagonal: bool = True) -> Tensor:
    """log mean over all i, j (or i≠j) of exp(−‖z_i − z_j‖²/τ), plus λ_norm mean(z²): [B, N, F] → [B] float64."""
    z = z.double()
    d = (z[:, :, None] - z[:, None]).square().sum(-1)
    exponents = (-d / tau).flatten(1) if include_diagonal else _pairs(-d / tau)
    return torch.logsumexp(exponents, 1) - math.log(exponents.shape[1]) + norm_coeff * z.square().mean((1, 2))


def oracle(
    variant: str,
    z: Tensor,
    tau: float = 1.0,
    clamp: float = 0.25,
    norm_eps: float = 1e-2,
    norm_coeff: float = 0.1,
    include_diagonal: bool = True,
):
    """The loss of any variant: [B, N, F] → [B] float64."""
    if variant == "angular":
        return dispersion_oracle(z, tau, clamp, norm_eps)
    if variant == "orthogonalization":
        return orthogonalization_oracle(z, clamp, norm_eps)
    return (
        decorrelation_oracle(z) if variant == "decorrelation" else l2_repel_oracle(z, tau, norm_coeff, include_diagonal)
    )


def drawing_order(tokens: int, seed: int, step: int, layer: int) -> Tensor:
    """All positions in the order in which the sampled estimator draws them. Resumed runs rely on these numbers."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + layer)
    return torch.randperm(tokens, generator=generator)
