"""The variance and covariance terms of VICReg (Bardes et al. 2022, arXiv 2105.04906),
over the tokens of a sequence.

C = Σ (z_i − z̄)(z_i − z̄)ᵀ / (N − 1)      L = a/F Σ_f max(0, γ − √(C_ff + ε)) + b/F
Σ_{f≠g} C_fg²
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from titan_disp.dispersion.variants.base import MomentsVariant, off_diagonal, scatter


@dataclass(frozen=True)
class VICReg(MomentsVariant):
    """The paper has a = 25 and b = 1."""

    name: ClassVar[str] = "vicreg"
    centred: ClassVar[bool] = True

    variance_coeff: float = 25.0  # a
    covariance_coeff: float = 1.0  # b
    gamma: float = 1.0
    eps: float = 1e-4

    def __post_init__(self) -> None:
        for option in ("variance_coeff", "covariance_coeff", "gamma"):
            value = getattr(self, option)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{option} is {value}, expected a number ≥ 0")
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ValueError(
                f"eps is {self.eps}, expected a number > 0: the root has no slope at 0"
            )

    def loss(self, s: Tensor, m: Tensor, tokens: Tensor) -> Tensor:
        c = scatter(s, m, tokens) / (tokens - 1)[:, None, None]
        deviations = (c.diagonal(dim1=1, dim2=2).clamp_min(0.0) + self.eps).sqrt()
        variance = (self.gamma - deviations).clamp_min(0.0).mean(1)
        covariance = off_diagonal(c).square().sum((1, 2)) / m.shape[1]
        return self.variance_coeff * variance + self.covariance_coeff * covariance
