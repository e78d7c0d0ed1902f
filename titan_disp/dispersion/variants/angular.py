"""Angular: L = log mean_{i≠j} exp(−D_ij/τ), D = arccos(c̃)/π, c̃ = clamp(c, −1+κ, 1−κ).

As 0 ≤ D ≤ 1, the exponent lies in [−1/τ, 0] and no running maximum is needed.
"""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from titan_disp.dispersion.masks import Count
from titan_disp.dispersion.pairwise import PairFunction
from titan_disp.dispersion.variants.base import (
    AngleVariant,
    bound_of,
    check_tau,
    log_of_mean,
    slope_of_arccos,
)


@functools.cache
def angular_pair(tau: float, clamp: float) -> PairFunction:
    """w = exp(−D/τ); r = w / (πτ √(1 − c̃²))."""
    k = 1.0 / (math.pi * tau)
    bound = bound_of(clamp)

    def pair(c: Tensor) -> tuple[Tensor, Tensor]:
        slope = slope_of_arccos(c.clamp_(-bound, bound))
        w = c.acos_().mul_(-k).exp_()
        return w, slope.mul_(k).mul_(w)

    return pair


@dataclass(frozen=True)
class Angular(AngleVariant):
    name: ClassVar[str] = "angular"
    # w is smooth enough for quadratics
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
