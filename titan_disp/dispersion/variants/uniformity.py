"""Uniformity (Wang & Isola 2020, arXiv 2005.10242): L = log mean_{i≠j} exp(−t ‖u_i −
u_j‖²), with ‖u_i − u_j‖² = 2 − 2c.
"""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from titan_disp.dispersion.masks import Count
from titan_disp.dispersion.pairwise import PairFunction
from titan_disp.dispersion.variants.base import MIN_TAU, CosineVariant, log_of_mean


@functools.cache
def uniformity_pair(t: float) -> PairFunction:
    """w = exp(−2t (1 − c)); r = 2t w."""

    def pair(c: Tensor) -> tuple[Tensor, Tensor]:
        w = c.sub_(1.0).mul_(2.0 * t).exp_()
        return w, w * (2.0 * t)

    return pair


@dataclass(frozen=True)
class Uniformity(CosineVariant):
    name: ClassVar[str] = "uniformity"
    estimators: ClassVar[tuple[str, ...]] = ("exact", "moments", "sampled")

    t: float = 2.0

    def __post_init__(self) -> None:
        most = 1 / (4 * MIN_TAU)
        if not 0 < self.t <= most:
            raise ValueError(
                f"t is {self.t}, expected a number in (0, {most:g}]: exp(-4t) must be representable in float32"
            )

    @property
    def pair(self) -> PairFunction:
        return uniformity_pair(self.t)

    def normalize(self, sums: Tensor, pairs: Count) -> Tensor:
        return log_of_mean(super().normalize(sums, pairs), math.exp(-4 * self.t))
