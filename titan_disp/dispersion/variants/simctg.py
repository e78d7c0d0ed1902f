"""The contrastive term of SimCTG (Su et al. 2022, arXiv 2202.06417): L = mean_{i≠j}
max(0, ρ − 1 + c_ij).
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from titan_disp.dispersion.pairwise import PairFunction
from titan_disp.dispersion.variants.base import CosineVariant


@functools.cache
def simctg_pair(margin: float) -> PairFunction:
    """w = max(0, ρ − 1 + c); r = 1 where w > 0, else 0."""

    def pair(c: Tensor) -> tuple[Tensor, Tensor]:
        w = c.add_(margin - 1.0).clamp_min_(0.0)
        return w, (w > 0).to(w.dtype)

    return pair


@dataclass(frozen=True)
class SimCTG(CosineVariant):
    name: ClassVar[str] = "simctg"

    margin: float = 0.5  # ρ

    def __post_init__(self) -> None:
        if not 0 < self.margin <= 2:
            raise ValueError(
                f"margin is {self.margin}, expected a number in (0, 2]: a cosine is between -1 and 1"
            )

    @property
    def pair(self) -> PairFunction:
        return simctg_pair(self.margin)
