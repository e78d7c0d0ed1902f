"""This package implements the dispersion loss in plain PyTorch; it does not import TorchTitan.

Liu et al., "Dispersion loss counteracts embedding condensation and improves generalization in small
language models" (ICML 2026, arXiv 2602.00217).

Shapes: B sequences, N tokens per sequence, F features per token, L layers. A sequence may be sharded over p ranks; each
rank then holds n = N/p tokens.
"""

from titan_disp.dispersion.loss import DispersionLoss, dispersion_loss, dispersion_losses
from titan_disp.dispersion.objective import CoeffSchedule, DispersionObjective, LossLedger

__all__ = [
    "CoeffSchedule",
    "DispersionLoss",
    "DispersionObjective",
    "LossLedger",
    "dispersion_loss",
    "dispersion_losses",
]
