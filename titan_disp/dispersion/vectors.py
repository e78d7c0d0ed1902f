"""This module turns tokens into unit vectors, and gradients of unit vectors back into
gradients of tokens, which the last pass scales and adds to others
(``gradients``).
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from titan_disp.dispersion.gradients import (
    Gradient,
    Known,
    add_to_arriving,
    row_blocks,
    rows_of,
)
from titan_disp.dispersion.kernels import accumulation_dtype, fused, operand_dtype

# Of losses without an ε: it changes no digit. 1/ε², by which zero tokens are
# multiplied, is finite in float32.
UNIT_EPS = 1e-15


class Units(Protocol):
    """Unit vectors are u = s x for tokens z [B, n, F].

    ``pairwise`` forms products of x.
    """

    x: Tensor  # [B, n, F], in the dtype of z or of products of z
    scale: Tensor  # s [B, n, 1], in the accumulation dtype

    def vectors(self) -> Tensor:
        """Return u [B, n, F] in the accumulation dtype, in new memory."""

    def backward_(self, grad: Tensor) -> Tensor:
        """Return ∂/∂z [B, n, F] of a function of u, given ∂/∂u in the accumulation
        dtype, whose memory is reused.
        """

    def of_pairs(self, w: Tensor) -> Gradient:
        """Return ∂S/∂z of a sum S over pairs, given W = s V [B, n, F] in the
        accumulation dtype (``pairwise``): ∂S/∂u = 2 V.
        """


def check_norm_eps(norm_eps: float) -> None:
    smallest = torch.finfo(torch.float32).tiny
    if not (math.isfinite(norm_eps) and norm_eps >= smallest):
        raise ValueError(
            f"norm_eps is {norm_eps}, expected a number > 0, at least {smallest:.3g}: "
            "an all-zero token is divided by it"
        )


def norms(z: Tensor) -> Tensor:
    """Return ‖z‖ over the last dimension, [..., 1], in the accumulation dtype."""
    return torch.linalg.vector_norm(
        z, dim=-1, keepdim=True, dtype=accumulation_dtype(z.dtype)
    )


def shown(norm: Tensor) -> Tensor:
    """Return norms with NaN for infinity, by which finite tokens would be divided to 0
    and so be hidden.
    """
    return norm.masked_fill(norm.isinf(), torch.nan)


class Raw:
    """The tokens themselves: u = z."""

    def __init__(self, z: Tensor) -> None:
        self.x = z
        self.scale = z.new_ones((*z.shape[:2], 1), dtype=accumulation_dtype(z.dtype))

    def vectors(self) -> Tensor:
        return self.x.to(self.scale.dtype, copy=True)

    def backward_(self, grad: Tensor) -> Tensor:
        return grad

    def of_pairs(self, w: Tensor) -> Gradient:
        return Known(w.mul_(2))


class Normalized:
    """Compute u = z / (‖z‖ + ε).

    Unit vectors are not stored: x is z itself, exact in its own dtype.
    """

    def __init__(self, z: Tensor, norm_eps: float) -> None:
        self.x = z
        self.norm_eps = norm_eps
        self.norm = norms(z)
        self.scale = 1 / (self.norm + norm_eps)

    def vectors(self) -> Tensor:
        return self.x / (shown(self.norm) + self.norm_eps)

    def backward_(self, grad: Tensor) -> Tensor:
        """The derivative of ‖z‖ at z = 0 is taken as 0, as in autograd."""
        for rows in row_blocks(grad):
            _normalize_backward_(
                grad[:, rows], self.x[:, rows], self.norm[:, rows], self.norm_eps
            )
        return grad

    def of_pairs(self, w: Tensor) -> Gradient:
        return _OfPairs(self, w)


@dataclass
class _OfPairs:
    """With n = ‖z‖ and s = 1/(n + ε), ∂S/∂z = 2 (W − z (z·W) s / n)."""

    units: Normalized
    w: Tensor

    def write(
        self, out: Tensor, factor: Tensor | None, arriving: Tensor | None
    ) -> None:
        for rows in row_blocks(out):
            _write_of_pairs(
                out[:, rows],
                self.w[:, rows],
                self.units.x[:, rows],
                self.units.norm[:, rows],
                self.units.norm_eps,
                factor,
                rows_of(arriving, rows),
            )


@fused
def _write_of_pairs(
    out: Tensor,
    w: Tensor,
    z: Tensor,
    norm: Tensor,
    norm_eps: float,
    factor: Tensor | None,
    arriving: Tensor | None,
) -> None:
    z = z.to(w.dtype)
    # Two divisions, because the product of the two numbers could underflow to 0.
    radial = (
        (z * w).sum(-1, keepdim=True)
        / norm.clamp_min(torch.finfo(norm.dtype).tiny)
        / (norm + norm_eps)
    )
    grad = torch.addcmul(w, z, radial, value=-1)
    out.copy_(add_to_arriving(grad * 2, factor, arriving))


@fused
def _normalize_backward_(g: Tensor, z: Tensor, norm: Tensor, norm_eps: float) -> None:
    z = z.to(g.dtype)
    scale = norm + norm_eps
    # Two divisions, because the product of the two numbers could underflow to 0.
    radial = (
        (z * g).sum(-1, keepdim=True)
        / norm.clamp_min(torch.finfo(norm.dtype).tiny)
        / scale
    )
    g.addcmul_(z, radial, value=-1).div_(scale)


class Standardized:
    """Compute u = (z − μ) / (σ √(F − 1)) over the F ≥ 2 features, with the unbiased σ.

    u_i·u_j is then the Pearson correlation. A token whose features are all equal has u
    = 0 and no gradient.
    """

    def __init__(self, z: Tensor) -> None:
        dtype = operand_dtype(z)
        z = z.to(accumulation_dtype(z.dtype))
        centred = z - z.mean(-1, keepdim=True)
        # σ √(F − 1)
        self.norm = shown(torch.linalg.vector_norm(centred, dim=-1, keepdim=True))
        # Centring a constant token leaves rounding errors, which have no meaningful
        # direction.
        floor = (
            4
            * torch.finfo(z.dtype).eps
            * torch.linalg.vector_norm(z, dim=-1, keepdim=True)
        )
        self.u = torch.where(self.norm <= floor, 0.0, centred / self.norm)
        self.x = self.u.to(dtype)
        self.scale = torch.ones_like(self.norm)

    def vectors(self) -> Tensor:
        return self.u.clone()

    def backward_(self, grad: Tensor) -> Tensor:
        for rows in row_blocks(grad):
            u = self.u[:, rows]
            g = grad[:, rows]
            norm = self.norm[:, rows]
            g.sub_(g.mean(-1, keepdim=True)).addcmul_(
                u, (u * g).sum(-1, keepdim=True), value=-1
            )
            direction = u.square().sum(-1, keepdim=True) > 0
            g.mul_(torch.where(direction, 1.0 / norm, 0.0))
        return grad

    def of_pairs(self, w: Tensor) -> Gradient:
        return Known(self.backward_(w.mul_(2)))
