"""Unit vectors of tokens, and the tokens' gradient, given the unit vectors' gradient.

Unit vectors are u = s x, with x and scales s computed from tokens z [B, n, F]. For a
function S of u, W = s ∂S/∂u is computed first. A single pass over W then computes ∂S/∂z,
scales it, adds the gradient from the rest of the model, and casts the sum
(``Gradient``). Separate passes would read and write the gradient several times.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from titan_disp.dispersion.kernels import accumulation_dtype, fused, operand_dtype

# The ε of losses without an option for ε. It is so small that it changes no digit. The
# gradient of zero tokens is multiplied by 1/ε², which is finite in float32.
UNIT_EPS = 1e-15
ALL_ROWS = slice(None)
BLOCK_ELEMENTS = 1 << 18  # elements of z per block of rows: 1 MiB in fp32


class Units(Protocol):
    """The unit vectors u = s x of tokens z [B, n, F]."""

    x: Tensor  # [B, n, F], in the dtype of z or of products of z
    scale: Tensor  # s [B, n, 1], in the accumulation dtype

    def vectors(self) -> Tensor:
        """Return u [B, n, F] in the accumulation dtype, in new memory."""

    def gradient(self, w: Tensor) -> "Gradient":
        """Return ∂S/∂z, given W [B, n, F] in the accumulation dtype.

        W may be overwritten.
        """


@dataclass
class Gradient:
    """The gradient ∂S/∂z of some sequences, before the last pass.

    Attributes:
        w: W [B, n, F].
        units: the unit vectors whose norm the last pass differentiates; None if W is
            already ∂S/∂z.
        tokens: bool [B, n, 1], False where the gradient is 0; None if True everywhere.
    """

    w: Tensor
    units: "Normalized | None" = None
    tokens: Tensor | None = None

    def write(
        self, out: Tensor, factor: Tensor | None = None, arriving: Tensor | None = None
    ) -> None:
        """Write factor · ∂S/∂z + arriving into ``out``.

        Args:
            out: [B, n, F] in any dtype.
            factor: [B]; None means 1.
            arriving: [B, n, F]; None means 0.
        """
        for rows in row_blocks(out):
            along = None
            if self.units is not None:
                units = self.units
                along = (
                    _rows_of(units.x, rows),
                    _rows_of(units.norm, rows),
                    _rows_of(units.scale, rows),
                )
            _write(
                _rows_of(out, rows),
                _rows_of(self.w, rows),
                along,
                factor,
                _rows_of(self.tokens, rows),
                _rows_of(arriving, rows),
            )

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Return ∂S/∂z [B, n, F]. It may be the same tensor as W."""
        is_complete = self.units is None and self.tokens is None
        if is_complete and self.w.dtype == dtype:
            return self.w
        out = torch.empty_like(self.w, dtype=dtype)
        self.write(out)
        return out


@fused
def _write(
    out: Tensor,
    w: Tensor,
    along: tuple[Tensor, Tensor, Tensor] | None,
    factor: Tensor | None,
    tokens: Tensor | None,
    arriving: Tensor | None,
) -> None:
    """Write some rows of a ``Gradient``. ``along`` has z, ‖z‖ and s of these rows."""
    grad = w
    if along is not None:
        grad = _through_norm(w, *along)
    if factor is not None:
        grad = grad * factor[:, None, None]
    if tokens is not None:
        grad = grad.where(tokens, 0.0)
    if arriving is not None:
        grad = grad + arriving
    out.copy_(grad)


def _through_norm(w: Tensor, z: Tensor, norm: Tensor, scale: Tensor) -> Tensor:
    """Return ∂S/∂z = W − z (z·W) s / ‖z‖.

    The derivative of ‖z‖ at z = 0 is taken as 0, as in autograd.
    """
    z = z.to(w.dtype)
    tiny = torch.finfo(norm.dtype).tiny
    # Divide before multiplying, because s / ‖z‖ would be infinite for a tiny ‖z‖. For
    # an infinite norm, adding 0 · norm gives NaN; otherwise, s = 0 would hide the norm.
    radial = (z * w).sum(-1, keepdim=True) / norm.clamp_min(tiny) * scale + 0 * norm
    return torch.addcmul(w, z, radial, value=-1)


def row_blocks(x: Tensor) -> list[slice]:
    """Return slices of the rows of x [B, n, F], each of which fits into a core's cache.

    On a GPU, a single slice has all rows, because one fused kernel processes them.
    """
    if x.device.type != "cpu" or x.numel() <= BLOCK_ELEMENTS:
        return [ALL_ROWS]
    rows = max(1, BLOCK_ELEMENTS // max(1, x.shape[0] * x.shape[2]))
    return [slice(i, i + rows) for i in range(0, x.shape[1], rows)]


def _rows_of(x: Any, rows: slice) -> Any:
    """Return rows of a tensor [B, n, …]; None if it is None.

    For all rows, this is the tensor itself, because a view takes time on the host.
    """
    if x is None or rows == ALL_ROWS:
        return x
    return x[:, rows]


def norms(z: Tensor) -> Tensor:
    """Return ‖z‖ over the last dimension, [..., 1], in the accumulation dtype."""
    return torch.linalg.vector_norm(
        z, dim=-1, keepdim=True, dtype=accumulation_dtype(z.dtype)
    )


def shown(norm: Tensor) -> Tensor:
    """Return the norms with NaN instead of infinity.

    Division by infinity would turn a faulty token into 0, and so hide the fault.
    """
    return norm.masked_fill(norm.isinf(), torch.nan)


class Raw:
    """No normalization: u = z."""

    def __init__(self, z: Tensor) -> None:
        self.x = z
        self.scale = z.new_ones((*z.shape[:2], 1), dtype=accumulation_dtype(z.dtype))

    def vectors(self) -> Tensor:
        return self.x.to(self.scale.dtype, copy=True)

    def gradient(self, w: Tensor) -> Gradient:
        return Gradient(w)


class Normalized:
    """u = z / (‖z‖ + ε).

    The unit vectors are not stored: x is z itself, which is exact in its dtype.
    """

    def __init__(self, z: Tensor, norm_eps: float) -> None:
        self.x = z
        self.norm_eps = norm_eps
        self.norm = norms(z)
        self.scale = 1 / (self.norm + norm_eps)

    def vectors(self) -> Tensor:
        return self.x / (shown(self.norm) + self.norm_eps)

    def gradient(self, w: Tensor) -> Gradient:
        return Gradient(w, units=self)


class Standardized:
    """u = (z − μ) / (σ √(F − 1)), with the mean μ and the unbiased deviation σ of a
    token's F ≥ 2 features.

    u_i·u_j is then the Pearson correlation of two tokens. A token whose features are all
    equal has u = 0 and no gradient.
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

    def gradient(self, w: Tensor) -> Gradient:
        for rows in row_blocks(w):
            u = self.u[:, rows]
            g = w[:, rows]
            norm = self.norm[:, rows]
            g.sub_(g.mean(-1, keepdim=True)).addcmul_(
                u, (u * g).sum(-1, keepdim=True), value=-1
            )
            has_direction = u.square().sum(-1, keepdim=True) > 0
            g.mul_(torch.where(has_direction, 1.0 / norm, 0.0))
        return Gradient(w)
