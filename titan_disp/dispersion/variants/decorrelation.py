"""Decorrelation: L = mean_{i≠j} c_ij², where c is the Pearson correlation of two tokens' features."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from titan_disp.dispersion.layers import Layers
from titan_disp.dispersion.masks import TokenMask
from titan_disp.dispersion.moments import Quadratic
from titan_disp.dispersion.pairwise import PairFunction
from titan_disp.dispersion.variants.base import CosineVariant
from titan_disp.dispersion.vectors import Standardized, Units


def square(c: Tensor) -> tuple[Tensor, Tensor]:
    """w = c²; r = 2c."""
    return c.square(), c.mul_(2.0)


def square_of_all(z: Tensor, mask: TokenMask | None, units: Units, u: Tensor) -> Quadratic:
    """Return the quadratic c² for every token."""
    # These are filled on the device. With torch.tensor, the host would wait for the copy.
    nothing = u.new_zeros(len(u), 1, 1)
    return Quadratic(nothing, nothing, u.new_full((len(u), 1, 1), 2.0))


@dataclass(frozen=True)
class Decorrelation(CosineVariant):
    """As w = c² is a quadratic, the exact form takes time linear in N where F < N."""

    name: ClassVar[str] = "decorrelation"
    linear_in_tokens: ClassVar[bool] = True

    @property
    def pair(self) -> PairFunction:
        return square

    def units(self, z: Tensor) -> Standardized:
        return Standardized(z)

    def exact(self, layers: Layers) -> Tensor:
        if max(layers.features) < layers.length:
            return self.of_quadratic(layers, square_of_all)
        return super().exact(layers)
