"""The TOML sections that titan-disp adds to TorchTitan's JobConfig (``[job] custom_config_module``).

No ``from __future__ import annotations`` here: TorchTitan merges the classes by their real types.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Dispersion:
    enabled: bool = False
    """Whether to add λ · dispersion to the cross-entropy. Off is identical to TorchTitan's Qwen3."""

    coeff: float = 0.1
    """λ, weight of the dispersion loss. The paper: 0.1."""

    tau: float = 1.0
    """τ, temperature. The paper: 1.0."""

    layers: list[int] | Literal["all", "last", "early_half", "late_half"] = "all"
    """Blocks whose outputs are dispersed: all, last, early_half, late_half, or a list of block indices from 0."""

    clamp: float = 0.25
    """κ: cosines are clamped to [−1+κ, 1−κ], straight-through. 0.25 is what the authors' released code uses."""

    norm_eps: float = 1e-2
    """ε added to token norms. 1e-2 is what the authors' released code uses."""


@dataclass
class Checkpoint:
    last_save_model_only: bool = False
    """
    Whether the last checkpoint holds the model only. TorchTitan's default is true, which makes a finished run
    impossible to continue; export reads full checkpoints as well.
    """


@dataclass
class JobConfig:
    dispersion: Dispersion = field(default_factory=Dispersion)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
