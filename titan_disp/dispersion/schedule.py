"""λ may change over a run: it warms up, then stays constant or decays. The paper's λ is constant."""

import math
from dataclasses import dataclass

DECAYS = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class CoeffSchedule:
    """Compute λ from the number of completed steps.

    Attributes:
        coeff: λ after warm-up.
        warmup_steps: steps over which λ grows linearly to ``coeff``; the first step has coeff / warmup_steps.
        decay: how λ goes from ``coeff`` to ``final_coeff`` after warm-up: not at all (constant), linear, or half a
            cosine.
        final_coeff: λ at the end of the decay.
        total_steps: steps of the run.
        decay_steps: steps of the decay, after which λ stays at ``final_coeff``; 0: the decay ends at the last step.

    Raises:
        ValueError: an option is out of range.
    """

    coeff: float
    warmup_steps: int = 0
    decay: str = "constant"
    final_coeff: float = 0.0
    total_steps: int = 1
    decay_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("coeff", "final_coeff"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}, expected a number ≥ 0")
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}, expected 0 to {self.total_steps}, the steps of the run"
            )
        if self.decay not in DECAYS:
            raise ValueError(f"decay is {self.decay!r}, expected one of {', '.join(DECAYS)}")
        left = self.total_steps - self.warmup_steps
        if not 0 <= self.decay_steps <= left:
            raise ValueError(f"decay_steps is {self.decay_steps}, expected 0 to {left}, the steps after warm-up")
        if self.decay_steps and self.decay == "constant":
            raise ValueError(
                f"decay_steps is {self.decay_steps}, but decay is 'constant': expected 0, or another decay"
            )

    def __call__(self, step: int) -> float:
        """Return λ of the step that follows ``step`` completed steps."""
        if step < self.warmup_steps:
            return self.coeff * (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.coeff
        # The last step has final_coeff exactly.
        steps = self.decay_steps or max(1, self.total_steps - 1 - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / steps)
        left = 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.final_coeff + (self.coeff - self.final_coeff) * left
