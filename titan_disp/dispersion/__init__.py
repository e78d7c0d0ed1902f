"""The dispersion loss in plain PyTorch. This package does not import TorchTitan.

Liu et al., "Dispersion loss counteracts embedding condensation and improves
generalization in small language models" (ICML 2026, arXiv 2602.00217).

Shapes: B sequences, N tokens per sequence, F features per token, L layers. A sequence
may be sharded over p ranks; each rank then holds n = N/p tokens.

hooks         compute the loss of an unchanged model
  ▼
loss          checks the options, and combines a variant with an estimator
  ▼
layers        apply a variant to layers: all tokens or a sample, sharded or not
masks         mark padding and documents
  ▼
variants      define the formula of each loss; the package builds one from its name
  paper         this paper's three functions of cosines
  l2_repel      this paper's function of distances
  others        losses of other papers
  base          the base classes of all variants
  formula       prints the default loss, and computes its highest value
  ▼
pairwise      sums over all pairs exactly, tile by tile
moments       sums over all pairs in linear time
triton_pairs  sums over pairs in one GPU kernel; triton_kernels is its source
kernels       matrix products, and compiled pointwise operations
  ▼
autograd      decides when a gradient is computed and added, and runs the collectives
vectors       compute unit vectors, and turn their gradients into the tokens' gradients
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
