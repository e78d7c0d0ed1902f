"""These are the variants of the loss (arXiv 2602.00217, Table 1). A new one is a file and a line in ``VARIANTS``."""

from titan_disp.dispersion.variants.angular import Angular
from titan_disp.dispersion.variants.base import Variant
from titan_disp.dispersion.variants.decorrelation import Decorrelation
from titan_disp.dispersion.variants.l2_repel import L2Repel
from titan_disp.dispersion.variants.orthogonalization import Orthogonalization

_ALL: tuple[type[Variant], ...] = (Angular, Decorrelation, L2Repel, Orthogonalization)
VARIANTS = {kind.name: kind for kind in _ALL}

__all__ = ["VARIANTS", "Variant"]
