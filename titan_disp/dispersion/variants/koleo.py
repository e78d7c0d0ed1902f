"""KoLeo (Sablayrolles et al. 2019, arXiv 1806.03198): L = −1/N Σ_i log min_{j≠i} ‖u_i −
u_j‖.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from titan_disp.dispersion import pairwise
from titan_disp.dispersion.variants.base import AutogradVariant, Context
from titan_disp.dispersion.vectors import UNIT_EPS, norms, shown

NEAREST = 1e-8  # added to distances, so that equal tokens have a finite loss


@torch.no_grad()
def nearest(u: Tensor, valid: Tensor) -> Tensor:
    """Return the index of the token that is nearest to each of the unit vectors u [B,
    N, F], [B, N].
    """
    batch, n, _ = u.shape
    size = max(1, pairwise.TILE_ELEMENTS // max(1, batch * n))
    found = []
    for i in range(0, n, size):
        c = u[:, i : i + size] @ u.transpose(1, 2)
        c.masked_fill_(~valid[:, None], -torch.inf).diagonal(i, 1, 2).fill_(-torch.inf)
        found.append(c.argmax(-1))
    return torch.cat(found, 1)


@dataclass(frozen=True)
class KoLeo(AutogradVariant):
    name: ClassVar[str] = "koleo"

    def loss(self, z: Tensor, valid: Tensor, context: Context) -> Tensor:
        u = z / (shown(norms(z)) + UNIT_EPS)
        others = u.gather(1, nearest(u, valid)[..., None].expand_as(u))
        logs = (norms(u - others)[..., 0] + NEAREST).log()
        return -logs.where(valid, 0.0).sum(1) / valid.sum(1).clamp_min(1)
