"""The default loss as text, its highest possible value, and a check of λ.

docs/loss.md explains the symbols. Pages and model cards print the text, and
tests/test_formula.py evaluates it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

# arccos has an infinite slope at ±1. A smaller κ is raised to this value, which bounds
# the slope by 1/√(2κ) ≈ 700.
MIN_CLAMP = 1e-6

TEXT = """\
u_i = z_i / (‖z_i‖ + ε)                                  ε = {norm_eps:g}
c_ij = u_i · u_j
c̃_ij = clamp(c_ij, −1 + κ, 1 − κ)                        κ = {clamp:g}
D_ij = arccos(c̃_ij) / π
L_disp = log mean_{{i≠j}} exp(−D_ij / τ)                   τ = {tau:g}
L = L_CE + λ · mean of L_disp over layers and sequences  λ = {coeff:g}"""

NOTE = """\
L_disp is {orthogonal:.3f} where all tokens are orthogonal. It cannot rise above
{ceiling:.3f}, the value where every cosine is at least {bound:g}. There, the curve of
the loss is flat, but the gradient still {moves}: look at the mean cosine."""

PUSHES = "pushes the tokens apart"
PULLS = "pulls the tokens together"


def check_coeff(name: str, coeff: float) -> None:
    """Raise ValueError if λ is not finite. ``name`` is the option's name."""
    if not math.isfinite(coeff):
        raise ValueError(f"{name} is {coeff}, expected a finite number")


def condensing(coeff: float) -> str | None:
    """Return a warning if λ is negative, as in the control of an experiment."""
    if coeff >= 0:
        return None
    return (
        f"λ is {coeff:g}, which is negative: it condenses the embeddings, which a "
        "positive λ disperses"
    )


def bound_of(clamp: float) -> float:
    """Return the largest |c̃|."""
    return 1.0 - max(clamp, MIN_CLAMP)


@dataclass(frozen=True)
class AngularFormula:
    """The options of the total loss with the variant ``angular``.

    Attributes:
        coeff: λ.
        tau: τ.
        clamp: κ.
        norm_eps: ε.
    """

    coeff: float = 0.1
    tau: float = 1.0
    clamp: float = 0.25
    norm_eps: float = 0.01

    @classmethod
    def of_run(cls, section: Mapping[str, Any]) -> "AngularFormula | None":
        """Return the formula of a run, given the section [dispersion] of its config;
        None if ``angular`` is not the run's only dispersion loss.
        """
        is_angular = section.get("variant", "angular") == "angular"
        if not section.get("enabled") or not is_angular or section.get("losses"):
            return None
        names = [option.name for option in fields(cls)]
        # The config of an earlier version may lack an option.
        return cls(**{name: section[name] for name in names if name in section})

    @property
    def text(self) -> str:
        """The formula in six lines. The last column has the values of the options."""
        return TEXT.format(**vars(self))

    @property
    def ceiling(self) -> float:
        """The highest L_disp. L_disp has this value if every cosine is at least 1 − κ."""
        return -math.acos(bound_of(self.clamp)) / (math.pi * self.tau)

    @property
    def value_if_orthogonal(self) -> float:
        """L_disp of tokens whose cosines are 0.

        The loss of many tokens cannot be much lower, because the tokens cannot all be
        opposite to each other.
        """
        return -0.5 / self.tau

    @property
    def note(self) -> str:
        """One line about special values of the loss, for a reader of the loss curve."""
        lines = NOTE.format(
            orthogonal=self.value_if_orthogonal,
            ceiling=self.ceiling,
            bound=bound_of(self.clamp),
            moves=PUSHES if self.coeff >= 0 else PULLS,
        )
        return lines.replace("\n", " ").replace("-", "−")
