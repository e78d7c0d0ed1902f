"""What the variants of the loss do to a cosine (arXiv 2602.00217, Table 1): w(c), and r = dw/dc.

    angular            w = exp(−D/τ)            L = log S − log(N(N−1))
    orthogonalization  w = max(0, ½ − D)²       L = S / (N(N−1))
    decorrelation      w = c²                   L = S / (N(N−1)), c the correlation of two tokens' features

with D = arccos(c̃)/π, c̃ = clamp(c, −1+κ, 1−κ). The clamp is straight-through: beyond the bound the slope stays the slope at the
bound, because a hard clamp would zero the gradient exactly where tokens have collapsed onto each other. As 0 ≤ D ≤ 1, the
exponent lies in [−1/τ, 0] and no running maximum is needed. ℓ2-repel is no function of cosines: see ``l2_repel``.
"""

import functools
import math

from torch import Tensor

from titan_disp.dispersion.pairwise import PairFunction

# arccos has an infinite slope at ±1. κ below this is raised to it: the slope is then bounded by 1/√(2κ) ≈ 700.
MIN_CLAMP = 1e-6

# exp(−1/τ) must stay a normal fp32 number (exp(−80) ≈ 2e−35), else S could underflow to 0 and log S to −inf.
MIN_TAU = 1.0 / 80.0


def check_parameters(tau: float, clamp: float, norm_eps: float) -> None:
    """Raise ValueError where the loss is not defined or could not stay finite in fp32.

    Args:
        tau: temperature τ, at least ``MIN_TAU``.
        clamp: κ in [0, 1).
        norm_eps: ε > 0, added to the norms.
    """
    if not (math.isfinite(tau) and tau >= MIN_TAU):
        raise ValueError(f"tau is {tau}, expected a number ≥ {MIN_TAU}: exp(-1/tau) must be representable in float32")
    if not 0.0 <= clamp < 1.0:
        raise ValueError(f"clamp is {clamp}, expected a number in [0, 1)")
    if not (math.isfinite(norm_eps) and norm_eps > 0.0):
        raise ValueError(f"norm_eps is {norm_eps}, expected a number > 0: an all-zero token is divided by it")


def _slope(c: Tensor) -> Tensor:
    """1/√(1 − c²), of (1 − c)(1 + c) = t + tc with t = 1 − c: near the bound the square would lose the digits that matter."""
    t = 1.0 - c
    return t.addcmul_(t, c).rsqrt_()


@functools.cache  # one function per parameters, so that what is compiled of it is found again
def angular(tau: float, clamp: float) -> PairFunction:
    """w = exp(−D/τ); r = w / (πτ √(1 − c̃²))."""
    k, bound = 1.0 / (math.pi * tau), 1.0 - max(clamp, MIN_CLAMP)

    def pair(c: Tensor) -> tuple[Tensor, Tensor]:
        slope = _slope(c.clamp_(-bound, bound))
        w = c.acos_().mul_(-k).exp_()
        return w, slope.mul_(k).mul_(w)

    return pair


@functools.cache
def orthogonalization(clamp: float) -> PairFunction:
    """w = max(0, ½ − D)²; r = 2 max(0, ½ − D) / (π √(1 − c̃²))."""
    bound = 1.0 - max(clamp, MIN_CLAMP)

    def pair(c: Tensor) -> tuple[Tensor, Tensor]:
        slope = _slope(c.clamp_(-bound, bound))
        near = c.acos_().mul_(-1.0 / math.pi).add_(0.5).clamp_min_(0.0)
        r = slope.mul_(2.0 / math.pi).mul_(near)
        return near.square_(), r

    return pair


def square(c: Tensor) -> tuple[Tensor, Tensor]:
    """w = c²; r = 2c."""
    return c.square(), c.mul_(2.0)
