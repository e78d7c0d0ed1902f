"""The paper's three functions of cosines (arXiv 2602.00217, Table 1).

``formula`` defines the angle D and the clamped cosine c̃. ``l2_repel`` has the paper's
fourth variant.
"""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from titan_disp.dispersion.formula import bound_of
from titan_disp.dispersion.masks import Count
from titan_disp.dispersion.triton_pairs import PairFunction, in_triton
from titan_disp.dispersion.variants.base import (
    CosineVariant,
    check_tau,
    log_of_mean,
)
from titan_disp.dispersion.vectors import Normalized, Standardized


def slope_of_arccos(c: Tensor) -> Tensor:
    """Return 1/√(1 − c²), in the shape of c."""
    # 1 − c² = (1 − c)(1 + c) = t + tc, because near the bound, squaring c would lose
    # important digits.
    t = 1.0 - c
    return t.addcmul_(t, c).rsqrt_()


@dataclass(frozen=True)
class AngleVariant(CosineVariant):
    """The loss is a mean of w(D), where D is the angle between two unit vectors.

    The clamp is straight-through: beyond the bound, the slope stays as it is at the
    bound. A hard clamp would zero the gradient exactly where tokens have collapsed onto
    each other.
    """

    clamp: float
    norm_eps: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.clamp < 1.0:
            raise ValueError(f"clamp is {self.clamp}, expected a number in [0, 1)")
        smallest = torch.finfo(torch.float32).tiny
        if not smallest <= self.norm_eps < math.inf:
            raise ValueError(
                f"norm_eps is {self.norm_eps}, expected a number > 0, at least "
                f"{smallest:.3g}: an all-zero token is divided by it"
            )

    def units(self, z: Tensor) -> Normalized:
        return Normalized(z, self.norm_eps)


@functools.cache
def angular_pair(tau: float, clamp: float) -> PairFunction:
    """Return the pair function w = exp(−D/τ), r = w / (πτ √(1 − c̃²))."""
    k = 1.0 / (math.pi * tau)
    bound = bound_of(clamp)

    @in_triton("angular_tile", k, bound)
    def pair(c: Tensor) -> tuple[Tensor, Tensor]:
        slope = slope_of_arccos(c.clamp_(-bound, bound))
        w = c.acos_().mul_(-k).exp_()
        return w, slope.mul_(k).mul_(w)

    return pair


@dataclass(frozen=True)
class Angular(AngleVariant):
    """L = log mean_{i≠j} exp(−D_ij/τ).

    As 0 ≤ D ≤ 1, the exponent lies in [−1/τ, 0] and no running maximum is needed.
    """

    name: ClassVar[str] = "angular"
    # w is smooth enough to be approximated by quadratics.
    estimators: ClassVar[tuple[str, ...]] = ("exact", "moments", "sampled")

    tau: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tau(self.tau)

    @property
    def pair(self) -> PairFunction:
        return angular_pair(self.tau, self.clamp)

    def normalize(self, sums: Tensor, pairs: Count) -> Tensor:
        return log_of_mean(super().normalize(sums, pairs), math.exp(-1 / self.tau))


@functools.cache
def orthogonalization_pair(clamp: float) -> PairFunction:
    """Return the pair function w = max(0, ½ − D)², r = 2 max(0, ½ − D) / (π √(1 − c̃²))."""
    bound = bound_of(clamp)

    @in_triton("orthogonalization_tile", bound)
    def pair(c: Tensor) -> tuple[Tensor, Tensor]:
        slope = slope_of_arccos(c.clamp_(-bound, bound))
        near = c.acos_().mul_(-1.0 / math.pi).add_(0.5).clamp_min_(0.0)
        r = slope.mul_(2.0 / math.pi).mul_(near)
        return near.square_(), r

    return pair


@dataclass(frozen=True)
class Orthogonalization(AngleVariant):
    """L = mean_{i≠j} max(0, ½ − D_ij)²."""

    name: ClassVar[str] = "orthogonalization"

    @property
    def pair(self) -> PairFunction:
        return orthogonalization_pair(self.clamp)


def square(c: Tensor) -> tuple[Tensor, Tensor]:
    """Return w = c² and r = 2c."""
    return c.square(), c.mul_(2.0)


@dataclass(frozen=True)
class Decorrelation(CosineVariant):
    """L = mean_{i≠j} c_ij², where c is the Pearson correlation of two tokens'
    features.
    """

    name: ClassVar[str] = "decorrelation"
    quadratic: ClassVar[tuple[float, float] | None] = (0.0, 2.0)

    @property
    def pair(self) -> PairFunction:
        return square

    def units(self, z: Tensor) -> Standardized:
        return Standardized(z)
