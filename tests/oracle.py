"""The dispersion loss as the paper writes it: plain float64 autograd over the whole N×N matrix."""

import math

import torch
from torch import Tensor


class StraightThroughClamp(torch.autograd.Function):
    """arccos(clamp(c)) whose slope beyond the bound stays the slope at the bound."""

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
    """[B, N, F] of any dtype → [B] float64, differentiable."""
    z = z.double()
    n = z.shape[1]
    u = z / (torch.linalg.vector_norm(z, dim=-1, keepdim=True) + norm_eps)
    d = StraightThroughClamp.apply(u @ u.transpose(1, 2), 1 - clamp) / math.pi
    off_diagonal = ~torch.eye(n, dtype=torch.bool)
    return torch.logsumexp(-d[:, off_diagonal] / tau, dim=1) - math.log(n * (n - 1))
