"""Some variants use the angle between unit vectors: D = arccos(c̃)/π, c̃ = clamp(c, −1+κ, 1−κ).

The clamp is straight-through: beyond the bound, the gradient keeps the slope that it has at the bound. A hard clamp
would zero the gradient exactly where tokens have collapsed onto each other.
"""

from torch import Tensor

# arccos has an infinite slope at ±1. A smaller κ is raised to this value, which bounds the slope by 1/√(2κ) ≈ 700.
MIN_CLAMP = 1e-6


def check_clamp(clamp: float) -> None:
    """Raise ValueError unless κ is in [0, 1)."""
    if not 0.0 <= clamp < 1.0:
        raise ValueError(f"clamp is {clamp}, expected a number in [0, 1)")


def bound_of(clamp: float) -> float:
    """Return the largest |c̃|."""
    return 1.0 - max(clamp, MIN_CLAMP)


def slope_of_arccos(c: Tensor) -> Tensor:
    """Return 1/√(1 − c²), computed from (1 − c)(1 + c) = t + tc with t = 1 − c.

    Near the bound, squaring c would lose the digits that matter.
    """
    t = 1.0 - c
    return t.addcmul_(t, c).rsqrt_()
