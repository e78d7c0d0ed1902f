"""Losses of other papers, for comparison."""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from titan_disp.dispersion import pairwise
from titan_disp.dispersion.masks import Count
from titan_disp.dispersion.triton_pairs import PairFunction, in_triton
from titan_disp.dispersion.variants.base import (
    MIN_TAU,
    AutogradVariant,
    Context,
    CosineVariant,
    MomentsVariant,
    log_of_mean,
    off_diagonal,
    scatter,
)
from titan_disp.dispersion.vectors import UNIT_EPS, norms, shown

NEAREST_EPS = 1e-8  # added to distances, so that equal tokens have a finite loss


def identity(c: Tensor) -> tuple[Tensor, Tensor]:
    """Return w = c and r = 1."""
    return c, torch.ones_like(c)


@dataclass(frozen=True)
class Cosine(CosineVariant):
    """L = mean_{i≠j} c_ij: cosine regularization (Gao et al. 2019, arXiv 1907.12009)."""

    name: ClassVar[str] = "cosine"
    quadratic: ClassVar[tuple[float, float] | None] = (1.0, 0.0)

    @property
    def pair(self) -> PairFunction:
        return identity


@functools.cache
def uniformity_pair(t: float) -> PairFunction:
    """Return the pair function w = exp(−2t (1 − c)), r = 2t w."""

    @in_triton("uniformity_tile", 2.0 * t)
    def pair(c: Tensor) -> tuple[Tensor, Tensor]:
        w = c.sub_(1.0).mul_(2.0 * t).exp_()
        return w, w * (2.0 * t)

    return pair


@dataclass(frozen=True)
class Uniformity(CosineVariant):
    """L = log mean_{i≠j} exp(−t ‖u_i − u_j‖²), where ‖u_i − u_j‖² = 2 − 2c.

    Wang & Isola 2020, arXiv 2005.10242.
    """

    name: ClassVar[str] = "uniformity"
    estimators: ClassVar[tuple[str, ...]] = ("exact", "moments", "sampled")

    t: float = 2.0

    def __post_init__(self) -> None:
        most = 1 / (4 * MIN_TAU)
        if not 0 < self.t <= most:
            raise ValueError(
                f"t is {self.t}, expected a number in (0, {most:g}]: "
                "exp(-4t) must be representable in float32"
            )

    @property
    def pair(self) -> PairFunction:
        return uniformity_pair(self.t)

    def normalize(self, sums: Tensor, pairs: Count) -> Tensor:
        return log_of_mean(super().normalize(sums, pairs), math.exp(-4 * self.t))


@functools.cache
def simctg_pair(margin: float) -> PairFunction:
    """Return the pair function w = max(0, ρ − 1 + c), r = 1 where w > 0, else 0."""

    def pair(c: Tensor) -> tuple[Tensor, Tensor]:
        w = c.add_(margin - 1.0).clamp_min_(0.0)
        return w, (w > 0).to(w.dtype)

    return pair


@dataclass(frozen=True)
class SimCTG(CosineVariant):
    """L = mean_{i≠j} max(0, ρ − 1 + c_ij): the contrastive term of SimCTG.

    Su et al. 2022, arXiv 2202.06417.
    """

    name: ClassVar[str] = "simctg"

    margin: float = 0.5  # ρ

    def __post_init__(self) -> None:
        if not 0 < self.margin <= 2:
            raise ValueError(
                f"margin is {self.margin}, expected a number in (0, 2]: "
                "a cosine is between -1 and 1"
            )

    @property
    def pair(self) -> PairFunction:
        return simctg_pair(self.margin)


@torch.no_grad()
def nearest(u: Tensor, valid: Tensor) -> Tensor:
    """Return the index of each token's nearest other token, int [B, N].

    ``u`` are the tokens' unit vectors, [B, N, F]; ``valid`` is bool [B, N].
    """
    batch, n, _ = u.shape
    size = max(1, pairwise.TILE_ELEMENTS // max(1, batch * n))
    indices = []
    for i in range(0, n, size):
        c = u[:, i : i + size] @ u.transpose(1, 2)
        c.masked_fill_(~valid[:, None], -torch.inf).diagonal(i, 1, 2).fill_(-torch.inf)
        indices.append(c.argmax(-1))
    return torch.cat(indices, 1)


@dataclass(frozen=True)
class KoLeo(AutogradVariant):
    """L = −1/N Σ_i log min_{j≠i} ‖u_i − u_j‖ (Sablayrolles et al. 2019, arXiv
    1806.03198).
    """

    name: ClassVar[str] = "koleo"

    def loss(self, z: Tensor, valid: Tensor, context: Context) -> Tensor:
        u = z / (shown(norms(z)) + UNIT_EPS)
        neighbours = u.gather(1, nearest(u, valid)[..., None].expand_as(u))
        logs = (norms(u - neighbours)[..., 0] + NEAREST_EPS).log()
        return -logs.where(valid, 0.0).sum(1) / valid.sum(1).clamp_min(1)


@dataclass(frozen=True)
class FeatureDecorrelation(MomentsVariant):
    """L = mean_{f≠g} r_fg², where r is the Pearson correlation of two features over the
    tokens.

    (``Decorrelation`` takes the correlation of two tokens over the features.)
    """

    name: ClassVar[str] = "feature_decorrelation"
    centred: ClassVar[bool] = True

    def loss(self, s: Tensor, m: Tensor, tokens: Tensor) -> Tensor:
        products = scatter(s, m, tokens)
        squares = products.diagonal(dim1=1, dim2=2)
        # If a feature is the same for all tokens, its variance is only a rounding error.
        varies = squares > 4 * torch.finfo(m.dtype).eps * m.diagonal(dim1=1, dim2=2)
        scale = torch.where(varies, squares, 1.0).rsqrt() * varies
        r = products * scale[:, :, None] * scale[:, None]
        features = m.shape[1]
        return off_diagonal(r).square().sum((1, 2)) / max(1, features * (features - 1))


@dataclass(frozen=True)
class VICReg(MomentsVariant):
    """The variance and covariance terms of VICReg, over the tokens of a sequence.

        C = Σ (z_i − z̄)(z_i − z̄)ᵀ / (N − 1)
        L = a/F Σ_f max(0, γ − √(C_ff + ε)) + b/F Σ_{f≠g} C_fg²

    Bardes et al. 2022, arXiv 2105.04906, which has a = 25 and b = 1.
    """

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
