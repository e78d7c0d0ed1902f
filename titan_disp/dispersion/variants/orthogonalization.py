"""Orthogonalization: L = mean_{i≠j} max(0, ½ − D_ij)², D = arccos(c̃)/π, c̃ = clamp(c, −1+κ, 1−κ)."""

import functools
import math
from dataclasses import dataclass

from torch import Tensor

from titan_disp.dispersion.masks import Count
from titan_disp.dispersion.pairwise import PairFunction
from titan_disp.dispersion.variants.base import CosineVariant, bound_of, check_clamp, slope_of_arccos
from titan_disp.dispersion.vectors import Normalized, check_norm_eps


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
class Orthogonalization(CosineVariant):
    """L = S / (N(N−1)), w = max(0, ½ − D)²."""

    clamp: float
    norm_eps: float

    def __post_init__(self) -> None:
        check_clamp(self.clamp)
        check_norm_eps(self.norm_eps)

    @property
    def pair(self) -> PairFunction:
        return orthogonalization_pair(self.clamp)

    def units(self, z: Tensor) -> Normalized:
        return Normalized(z, self.norm_eps)

    def normalize(self, sums: Tensor, tokens: Count) -> Tensor:
        return sums / (tokens * (tokens - 1))
