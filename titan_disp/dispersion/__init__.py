"""This package implements the dispersion loss in plain PyTorch; it does not import
TorchTitan.

Liu et al., "Dispersion loss counteracts embedding condensation and improves
generalization in small language models" (ICML 2026, arXiv 2602.00217).

Shapes: B sequences, N tokens per sequence, F features per token, L layers. A sequence
may be sharded over p ranks; each rank then holds n = N/p tokens.

hooks         the loss of a model as it is
  ▼
loss          checks options, and combines a variant with an estimator
  ▼
layers        layers of one shape together, sharded or not, or their drawn tokens
masks         padding and documents
  ▼
variants      the formula of each loss; finds a variant by its name, and builds it
  paper         three of this paper, functions of cosines
  l2_repel      the fourth one, a function of distances
  others        those of other papers
  base          what kinds of variants share
  formula       the text of the default loss, and its highest value
  ▼
pairwise      exact sums over tiles of pairs
moments       sums over all pairs in linear time
triton_pairs  pairs in one kernel of a GPU; triton_kernels is its source
kernels       fused steps
  ▼
autograd      when a gradient is computed and added, and the collectives
vectors       unit vectors, and the last pass over a gradient: through the norm, scale,
              add and cast
"""

from titan_disp.dispersion.hooks import attach
from titan_disp.dispersion.loss import (
    DispersionLoss,
    dispersion_loss,
    dispersion_losses,
)
from titan_disp.dispersion.variants.base import (
    AutogradVariant,
    CosineVariant,
    MomentsVariant,
)

__all__ = [
    "AutogradVariant",
    "CosineVariant",
    "DispersionLoss",
    "MomentsVariant",
    "attach",
    "dispersion_loss",
    "dispersion_losses",
]
