"""These are the variants of the loss. A new one is a file and a line in ``VARIANTS``.

The first four are the paper's (arXiv 2602.00217, Table 1); the others are of other
papers, to compare with.
"""

from titan_disp.dispersion.variants.angular import Angular
from titan_disp.dispersion.variants.base import Variant
from titan_disp.dispersion.variants.cosine import Cosine
from titan_disp.dispersion.variants.decorrelation import Decorrelation
from titan_disp.dispersion.variants.feature_decorrelation import FeatureDecorrelation
from titan_disp.dispersion.variants.koleo import KoLeo
from titan_disp.dispersion.variants.l2_repel import L2Repel
from titan_disp.dispersion.variants.orthogonalization import Orthogonalization
from titan_disp.dispersion.variants.simctg import SimCTG
from titan_disp.dispersion.variants.uniformity import Uniformity
from titan_disp.dispersion.variants.vicreg import VICReg

OF_THE_PAPER: tuple[type[Variant], ...] = (
    Angular,
    Decorrelation,
    L2Repel,
    Orthogonalization,
)
OF_OTHERS: tuple[type[Variant], ...] = (
    Cosine,
    FeatureDecorrelation,
    KoLeo,
    SimCTG,
    Uniformity,
    VICReg,
)
VARIANTS = {kind.name: kind for kind in (*OF_THE_PAPER, *OF_OTHERS)}

__all__ = ["OF_OTHERS", "OF_THE_PAPER", "VARIANTS", "Variant"]
