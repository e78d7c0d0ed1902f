"""Gradients of a layer's tokens, up to the last pass over them."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from titan_disp.dispersion.kernels import fused

BLOCK_ELEMENTS = 1 << 18  # elements of z per block of rows: 1 MiB in fp32


class Gradient(Protocol):
    """∂value/∂z of some sequences [B, n, F], up to the last pass over it.

    That pass scales, adds what arrives from elsewhere and casts, so that the gradient is
    not read and written for each of these.
    """

    def write(
        self, out: Tensor, factor: Tensor | None, arriving: Tensor | None
    ) -> None:
        """Write factor · ∂value/∂z + arriving. It may overwrite its own memory, so it
        can be called once.

        Args:
            out: [B, n, F] in any dtype. It is not read.
            factor: [B]; None is 1.
            arriving: [B, n, F]; None is 0.
        """


def saved_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return z's dtype, or float32 for float16, in which ∂S/∂z could overflow, since it
    grows with N.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def row_blocks(x: Tensor) -> list[slice]:
    """Split rows [B, n, F] into blocks that fit into a core's cache.

    A GPU's fused kernel takes all rows at once.
    """
    if x.device.type != "cpu":
        return [slice(None)]
    rows = max(1, BLOCK_ELEMENTS // max(1, x.shape[0] * x.shape[2]))
    return [slice(i, i + rows) for i in range(0, x.shape[1], rows)]


@dataclass
class Known:
    """A gradient [B, n, F] that needs no further pass of its own."""

    grad: Tensor

    def write(
        self, out: Tensor, factor: Tensor | None, arriving: Tensor | None
    ) -> None:
        for rows in row_blocks(out):
            _write_known(
                out[:, rows], self.grad[:, rows], factor, rows_of(arriving, rows)
            )


@dataclass
class Masked:
    """A gradient that is 0 where there is no token."""

    gradient: Gradient
    tokens: Tensor  # [B, n, 1] bool

    def write(
        self, out: Tensor, factor: Tensor | None, arriving: Tensor | None
    ) -> None:
        self.gradient.write(out, factor, None)
        out.masked_fill_(~self.tokens, 0.0)
        if arriving is not None:
            out.add_(arriving)


@dataclass
class Parts:
    """The gradients of parts of a batch."""

    gradients: list[tuple[slice, Gradient]]

    def write(
        self, out: Tensor, factor: Tensor | None, arriving: Tensor | None
    ) -> None:
        for part, gradient in self.gradients:
            gradient.write(
                out[part],
                None if factor is None else factor[part],
                None if arriving is None else arriving[part],
            )


def rows_of(x: Tensor | None, rows: slice) -> Tensor | None:
    return None if x is None else x[:, rows]


def add_to_arriving(
    grad: Tensor, factor: Tensor | None, arriving: Tensor | None
) -> Tensor:
    """Return factor · grad + arriving."""
    if factor is not None:
        grad = grad * factor[:, None, None]
    if arriving is not None:
        grad = grad + arriving
    return grad


@fused
def _write_known(
    out: Tensor, grad: Tensor, factor: Tensor | None, arriving: Tensor | None
) -> None:
    out.copy_(add_to_arriving(grad, factor, arriving))


def as_tensor(gradient: Gradient, shape: tuple[int, ...], z: Tensor) -> Tensor:
    """Return a gradient of this shape as a tensor to save, for tokens z."""
    dtype = saved_dtype(z.dtype)
    if isinstance(gradient, Known) and gradient.grad.dtype == dtype:
        return gradient.grad
    out = z.new_empty(shape, dtype=dtype)
    gradient.write(out, None, None)
    return out
