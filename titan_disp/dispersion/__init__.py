"""Dispersion loss in plain PyTorch; knows nothing of TorchTitan.

Liu et al., "Dispersion loss counteracts embedding condensation and improves generalization in small
language models" (ICML 2026, arXiv 2602.00217).
"""

from titan_disp.dispersion.loss import DispersionLoss, dispersion_loss, dispersion_losses
from titan_disp.dispersion.objective import DispersionObjective, LossLedger
from titan_disp.dispersion.schedule import CoeffSchedule

__all__ = [
    "CoeffSchedule",
    "DispersionLoss",
    "DispersionObjective",
    "LossLedger",
    "dispersion_loss",
    "dispersion_losses",
]
