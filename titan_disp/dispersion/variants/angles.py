"""Angles between unit vectors, as the variants that use them take them: D = arccos(c̃)/π, c̃ = clamp(c, −1+κ, 1−κ).

The clamp is straight-through: beyond the bound the slope stays the slope at the bound, because a hard clamp would zero the
gradient exactly where tokens have collapsed onto each other.
"""

from torch import Tensor

# arccos has an infinite slope at ±1. κ below this is raised to it: the slope is then bounded by 1/√(2κ) ≈ 700.
MIN_CLAMP = 1e-6


def check_clamp(clamp: float) -> None:
    """Raise ValueError unless κ is in [0, 1)."""
    if not 0.0 <= clamp < 1.0:
        raise ValueError(f"clamp is {clamp}, expected a number in [0, 1)")


def bound_of(clamp: float) -> float:
    """The largest |c̃|."""
    return 1.0 - max(clamp, MIN_CLAMP)


def slope_of_arccos(c: Tensor) -> Tensor:
    """1/√(1 − c²), of (1 − c)(1 + c) = t + tc with t = 1 − c: near the bound the square would lose the digits that matter."""
    t = 1.0 - c
    return t.addcmul_(t, c).rsqrt_()
