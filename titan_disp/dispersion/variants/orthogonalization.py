"""Orthogonalization: L = mean_{i≠j} max(0, ½ − D_ij)², D = arccos(c̃)/π, c̃ = clamp(c,
−1+κ, 1−κ).
"""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from titan_disp.dispersion.pairwise import PairFunction
from titan_disp.dispersion.variants.base import AngleVariant, bound_of, slope_of_arccos


@functools.cache
def orthogonalization_pair(clamp: float) -> PairFunction:
    """w = max(0, ½ − D)²; r = 2 max(0, ½ − D) / (π √(1 − c̃²))."""
    bound = bound_of(clamp)

    def pair(c: Tensor) -> tuple[Tensor, Tensor]:
        slope = slope_of_arccos(c.clamp_(-bound, bound))
        near = c.acos_().mul_(-1.0 / math.pi).add_(0.5).clamp_min_(0.0)
        r = slope.mul_(2.0 / math.pi).mul_(near)
        return near.square_(), r

    return pair


@dataclass(frozen=True)
class Orthogonalization(AngleVariant):
    name: ClassVar[str] = "orthogonalization"

    @property
    def pair(self) -> PairFunction:
        return orthogonalization_pair(self.clamp)
