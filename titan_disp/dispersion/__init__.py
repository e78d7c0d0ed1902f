"""This package implements the dispersion loss in plain PyTorch; it does not import
TorchTitan.

Liu et al., "Dispersion loss counteracts embedding condensation and improves
generalization in small language models" (ICML 2026, arXiv 2602.00217).

Shapes: B sequences, N tokens per sequence, F features per token, L layers. A sequence
may be sharded over p ranks; each rank then holds n = N/p tokens.

objective     cross-entropy + λ · dispersion, as TorchTitan calls a loss; hooks: the
loss of a model as it is
  ▼
loss          checks options, and combines a variant with an estimator; sampled: draws
positions; masks: padding
  ▼
registry      finds a variant, also of another package, and sets its options
  ▼
layers        layers of one shape together, sharded or not
  ▼
variants      each loss; base: what they share; pairwise: exact sums over tiles;
moments: in linear time; kernels: fused steps
  ▼
autograd      the gradient that forward has saved, and the collectives; vectors: norms
and their derivatives
"""

from titan_disp.dispersion.hooks import attach
from titan_disp.dispersion.loss import (
    DispersionLoss,
    dispersion_loss,
    dispersion_losses,
)
from titan_disp.dispersion.objective import (
    CoeffSchedule,
    DispersionObjective,
    LossLedger,
)
from titan_disp.dispersion.variants.base import (
    AutogradVariant,
    CosineVariant,
    MomentsVariant,
)

__all__ = [
    "AutogradVariant",
    "CoeffSchedule",
    "CosineVariant",
    "DispersionLoss",
    "DispersionObjective",
    "LossLedger",
    "MomentsVariant",
    "attach",
    "dispersion_loss",
    "dispersion_losses",
]
