"""Appendix D of the paper: padding embeddings with noise alone lowers condensation.

Each token's F features are padded to D with independent standard normal entries. The
expected cosine of two tokens x and y is then cos(x, y) g(x) g(y), with
g(x) = E[‖x‖ / √(‖x‖² + χ²)], where χ² has m = D − F degrees of freedom. By Jensen's
inequality, g is at least ‖x‖ / √(‖x‖² + m).

The paper's upper bound of g, ‖x‖ / √(‖x‖² + m − 1), is wrong for small ‖x‖². If GPT-2's
768 features are padded to the 1,600 of GPT-2 XL, for example, m is 832. For ‖x‖ = 1, g
is then 0.034679, and the paper's upper bound is 0.034669. With m − 2, the bound holds
for all x, because E[1/χ²] is 1/(m − 2), and 1/E[1/(‖x‖² + χ²)] grows at least as fast
as ‖x‖².
"""

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from titan_disp.errors import ConfigError

COLUMNS = (
    "mean_cosine",  # of different tokens, without padding
    "padded_mean_cosine",
    "lower_bound",
    "papers_upper_bound",
    "upper_bound",
)


class PaddedCosines:
    """Mean cosines of different tokens by layer, before and after padding, and bounds
    of the expected value after padding.
    """

    def __init__(self, features: int, seed: int) -> None:
        """``features`` is D, the number of features with padding."""
        self.features = features
        self.generator = torch.Generator().manual_seed(seed)
        self.rows: dict[int, list[Tensor]] = defaultdict(list)  # by layer

    def add(self, layer: int, z: Tensor) -> None:
        """Add a layer's activations, [B, N, F]. Raises ConfigError unless F ≤ D − 3."""
        added = self.features - z.shape[-1]
        if added < 3:
            raise ConfigError(
                f"--pad is {self.features}, expected at least {z.shape[-1] + 3}: "
                f"the model has {z.shape[-1]} features"
            )
        for sequence in z.double().cpu():
            size = (len(sequence), added)
            noise = torch.randn(size, generator=self.generator, dtype=torch.float64)
            padded = torch.cat([sequence, noise], 1)
            cosines = _cosines(sequence)
            lower = _bound(sequence, cosines, added)
            papers = _bound(sequence, cosines, added - 1)
            upper = _bound(sequence, cosines, added - 2)
            # For a negative cosine, ``lower`` is larger than ``upper``.
            bounds = torch.stack([lower, upper]).sort(0).values
            columns = (cosines, _cosines(padded), bounds[0], papers, bounds[1])
            self.rows[layer].append(torch.stack([_mean(c) for c in columns]))

    def result(self) -> np.ndarray:
        """Return the means over sequences, [layers, len(``COLUMNS``)] float64."""
        return torch.stack(
            [torch.stack(rows).mean(0) for _, rows in sorted(self.rows.items())]
        ).numpy()


def _cosines(z: Tensor) -> Tensor:
    unit = normalize(z, dim=-1)
    return unit @ unit.T


def _bound(z: Tensor, cosines: Tensor, added: int) -> Tensor:
    """Return cos(x, y) ‖x‖‖y‖ / √((‖x‖² + added)(‖y‖² + added)) for all pairs, [N, N]."""
    squares = z.square().sum(-1)
    factors = (squares / (squares + added)).sqrt()
    return cosines * factors[:, None] * factors


def _mean(cosines: Tensor) -> Tensor:
    """Return the mean over pairs of different tokens."""
    n = len(cosines)
    return (cosines.sum() - cosines.diagonal().sum()) / (n * (n - 1))
