"""Feature decorrelation: L = mean_{f≠g} r_fg², where r is the Pearson correlation of
two features over the tokens.

``decorrelation`` has the tokens in the features' place.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from titan_disp.dispersion.variants.base import MomentsVariant, off_diagonal, scatter


@dataclass(frozen=True)
class FeatureDecorrelation(MomentsVariant):
    name: ClassVar[str] = "feature_decorrelation"
    centred: ClassVar[bool] = True

    def loss(self, s: Tensor, m: Tensor, tokens: Tensor) -> Tensor:
        products = scatter(s, m, tokens)
        squares = products.diagonal(dim1=1, dim2=2)
        # Of a feature that is equal for all tokens, rounding leaves a variance, which
        # has no meaning.
        varies = squares > 4 * torch.finfo(m.dtype).eps * m.diagonal(dim1=1, dim2=2)
        scale = torch.where(varies, squares, 1.0).rsqrt() * varies
        r = products * scale[:, :, None] * scale[:, None]
        features = m.shape[1]
        return off_diagonal(r).square().sum((1, 2)) / max(1, features * (features - 1))
