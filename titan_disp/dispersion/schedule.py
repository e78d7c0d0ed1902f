"""λ over the run: warm-up, then constant or decaying. The paper's is constant."""

import math
from dataclasses import dataclass

DECAYS = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class CoeffSchedule:
    """λ by the number of steps completed.

    Attributes:
        coeff: λ after warm-up. warmup_steps: it grows linearly to that over so many steps; the first has coeff / warmup_steps.
        decay: from there on, constant, linear, or half a cosine to ``final_coeff``.
        total_steps: of the run.
        decay_steps: after so many steps of decay it is ``final_coeff``, and stays; 0: at the last step.

    Raises:
        ValueError: out of range.
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
                f"warmup_steps is {self.warmup_steps}, expected 0 to the {self.total_steps} steps of the run"
            )
        if self.decay not in DECAYS:
            raise ValueError(f"decay is {self.decay!r}, expected one of {', '.join(DECAYS)}")
        left = self.total_steps - self.warmup_steps
        if not 0 <= self.decay_steps <= left:
            raise ValueError(f"decay_steps is {self.decay_steps}, expected 0 to the {left} steps after warm-up")
        if self.decay_steps and self.decay == "constant":
            raise ValueError(
                f"decay_steps is {self.decay_steps}, but decay is 'constant': expected 0, or another decay"
            )

    def __call__(self, step: int) -> float:
        """λ of the step after ``step`` completed ones."""
        if step < self.warmup_steps:
            return self.coeff * (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.coeff
        # The last step has final_coeff exactly.
        steps = self.decay_steps or max(1, self.total_steps - 1 - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / steps)
        left = 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.final_coeff + (self.coeff - self.final_coeff) * left
