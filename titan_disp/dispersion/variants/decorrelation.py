"""Decorrelation: L = mean_{i≠j} c_ij², where c is the Pearson correlation of two
tokens' features.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from titan_disp.dispersion.pairwise import PairFunction
from titan_disp.dispersion.variants.base import CosineVariant
from titan_disp.dispersion.vectors import Standardized


def square(c: Tensor) -> tuple[Tensor, Tensor]:
    """w = c²; r = 2c."""
    return c.square(), c.mul_(2.0)


@dataclass(frozen=True)
class Decorrelation(CosineVariant):
    name: ClassVar[str] = "decorrelation"
    quadratic: ClassVar[tuple[float, float] | None] = (0.0, 2.0)

    @property
    def pair(self) -> PairFunction:
        return square

    def units(self, z: Tensor) -> Standardized:
        return Standardized(z)
