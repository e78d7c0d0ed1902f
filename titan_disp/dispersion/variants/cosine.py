"""Cosine regularization (Gao et al. 2019, arXiv 1907.12009): L = mean_{i≠j} c_ij."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from titan_disp.dispersion.pairwise import PairFunction
from titan_disp.dispersion.variants.base import CosineVariant


def identity(c: Tensor) -> tuple[Tensor, Tensor]:
    """w = c; r = 1."""
    return c, torch.ones_like(c)


@dataclass(frozen=True)
class Cosine(CosineVariant):
    name: ClassVar[str] = "cosine"
    quadratic: ClassVar[tuple[float, float] | None] = (1.0, 0.0)

    @property
    def pair(self) -> PairFunction:
        return identity
