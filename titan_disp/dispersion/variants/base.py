"""This module defines what every variant of the loss implements, and what functions of cosines and of angles share."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from titan_disp.dispersion.autograd import Result
from titan_disp.dispersion.kernels import operand_dtype
from titan_disp.dispersion.layers import Layers
from titan_disp.dispersion.masks import Count, TokenMask
from titan_disp.dispersion.moments import Quadratic, fit, quadratic_sum_, sample, sample_tokens
from titan_disp.dispersion.pairwise import PairFunction, pair_sums
from titan_disp.dispersion.vectors import Normalized, Units, check_norm_eps

# Takes tokens z [B, n, F], their mask, their units and the units' vectors; returns the quadratics that stand for w.
QuadraticOf = Callable[[Tensor, TokenMask | None, Units, Tensor], Quadratic]

LARGE_FIT_ERROR = 0.1  # about the relative error of the gradient, by docs/loss.md

# exp(−1/τ) must be a normal fp32 number (exp(−80) ≈ 2e−35); otherwise a sum of such numbers could underflow to 0.
MIN_TAU = 1.0 / 80.0
# arccos has an infinite slope at ±1. A smaller κ is raised to this value, which bounds the slope by 1/√(2κ) ≈ 700.
MIN_CLAMP = 1e-6


def bad_fit(error: float) -> str | None:
    """Return a warning if the error of the moments' slopes is large."""
    if error <= LARGE_FIT_ERROR:
        return None
    return (
        f"the moments estimator fits some tokens badly: the error of its gradient may be {error:.0%}. Use estimator "
        '"exact", or larger tau and clamp'
    )


def check_tau(tau: float) -> None:
    if not (math.isfinite(tau) and tau >= MIN_TAU):
        raise ValueError(f"tau is {tau}, expected a number ≥ {MIN_TAU}: exp(-1/tau) must be representable in float32")


@dataclass(frozen=True)
class Variant(ABC):
    """A variant is a frozen dataclass. Its fields are the options of ``DispersionLoss`` that it uses."""

    name: ClassVar[str]  # DispersionLoss.variant
    estimators: ClassVar[tuple[str, ...]] = ("exact", "sampled")  # which it supports
    bf16_products: ClassVar[bool] = True  # under AMP
    linear_in_tokens: ClassVar[bool] = False  # the time of the exact form

    @abstractmethod
    def exact(self, layers: Layers) -> Tensor:
        """Return the loss over all pairs of the tokens, [L, B]."""

    def moments(self, layers: Layers, fit_errors: list[Tensor] | None) -> Tensor:
        """Return the loss by moments, [L, B]. ``fit_errors`` receives the relative error [B] of every layer's fit."""
        raise NotImplementedError


@dataclass(frozen=True)
class CosineVariant(Variant):
    """The loss is a function of S = Σ_{i≠j} w(c_ij), where c_ij is the cosine of two tokens' unit vectors."""

    @property
    @abstractmethod
    def pair(self) -> PairFunction:
        """Return w and r = dw/dc. Equal options give the same object, so that its compiled code is reused."""

    @abstractmethod
    def units(self, z: Tensor) -> Units:
        """Return the unit vectors of z [B, n, F]."""

    def normalize(self, sums: Tensor, tokens: Count) -> Tensor:
        """Return the loss [L, B], given S [L, B] and the number of tokens per sequence: the mean over pairs i ≠ j."""
        return sums / (tokens * (tokens - 1))

    def exact(self, layers: Layers) -> Tensor:
        def own_part(z: Tensor, mask: TokenMask | None) -> Result:
            units = self.units(z)
            s, w = pair_sums(units, self.units, z, mask, self.pair, layers.group)
            return s, units.backward_(w.mul_(2 / units.scale))

        return self.normalize(layers.sum_over_group(layers.each(own_part)), layers.tokens(layers.mask))

    def moments(self, layers: Layers, fit_errors: list[Tensor] | None) -> Tensor:
        errors: list[Tensor] = []

        def fitted(z: Tensor, mask: TokenMask | None, units: Units, u: Tensor) -> Quadratic:
            sampled = sample(z, layers.length, layers.group) if mask is None else sample_tokens(z, mask, layers.group)
            some = self.units(sampled.z).vectors()
            quadratic, sums = fit(u, units.scale, some, sampled, self.pair, mask, operand_dtype(z))
            errors.append(sums)
            return quadratic

        losses = self.of_quadratic(layers, fitted)
        of_error, of_slope = layers.sum_over_group(torch.cat(errors)).unbind(-1)
        relative = (of_error / of_slope.clamp_min(torch.finfo(of_slope.dtype).tiny)).sqrt().view_as(losses)
        if fit_errors is None:
            if warning := bad_fit(relative.max().item()):
                warnings.warn(warning, stacklevel=4)
        else:
            fit_errors.extend(relative)
        return losses

    def of_quadratic(self, layers: Layers, quadratic: QuadraticOf) -> Tensor:
        """Return the loss [L, B] in time linear in the tokens, where w is a quadratic function of c for each token."""

        def own_part(z: Tensor, mask: TokenMask | None) -> Result:
            units = self.units(z)
            u = units.vectors()
            own = quadratic(z, mask, units, u)
            s, grad = quadratic_sum_(u, own, layers.tokens(mask), layers.group, operand_dtype(z))
            return s, units.backward_(grad)

        return self.normalize(layers.sum_over_group(layers.each(own_part)), layers.tokens(layers.mask))


@dataclass(frozen=True)
class AngleVariant(CosineVariant):
    """w is a function of the angle D = arccos(c̃)/π between unit vectors, where c̃ = clamp(c, −1+κ, 1−κ).

    The clamp is straight-through: beyond the bound, the gradient keeps the slope that it has at the bound. A hard clamp
    would zero the gradient exactly where tokens have collapsed onto each other.
    """

    clamp: float
    norm_eps: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.clamp < 1.0:
            raise ValueError(f"clamp is {self.clamp}, expected a number in [0, 1)")
        check_norm_eps(self.norm_eps)

    def units(self, z: Tensor) -> Normalized:
        return Normalized(z, self.norm_eps)


def bound_of(clamp: float) -> float:
    """Return the largest |c̃|."""
    return 1.0 - max(clamp, MIN_CLAMP)


def slope_of_arccos(c: Tensor) -> Tensor:
    # 1/√(1 − c²) with 1 − c² = (1 − c)(1 + c) = t + tc: near the bound, squaring c would lose the digits that matter.
    t = 1.0 - c
    return t.addcmul_(t, c).rsqrt_()
