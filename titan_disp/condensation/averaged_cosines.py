"""The heatmaps of arXiv 2602.00217 average a layer's N×N cosines over the sequences before they count them.

Averaging narrows the histogram: differences between sequences cancel out, and what depends on the two positions stays.
The mean over all pairs equals that of the pooled pairs (measure.py), and so do its rank correlations with depth.
"""

import numpy as np
import torch
from torch import Tensor

from titan_disp.condensation.record import BINS


class AveragedCosines:
    """Sum cosine matrices over sequences of one length: layers · N² float32 numbers, each layer's on its own device.

    The authors' package ``embedding-condensation`` computes the same matrices, also in float32. It divides a token z by
    max(‖z‖, 1e-3) and this class by ‖z‖, so that tokens shorter than 1e-3 count by their direction, too.
    """

    def __init__(self, layers: int) -> None:
        self._sums: list[Tensor | None] = [None] * layers
        self._sequences = [0] * layers

    @torch.no_grad()
    def add(self, layer: int, z: Tensor) -> None:
        """Add one layer's activations, [B, N, F], of whole sequences."""
        for sequence in z:
            u = torch.nn.functional.normalize(sequence.double(), dim=-1, eps=torch.finfo(torch.float64).tiny).float()
            cosines = (u @ u.T).clamp_(-1, 1)
            summed = self._sums[layer]
            self._sums[layer] = cosines if summed is None else summed.add_(cosines)
            self._sequences[layer] += 1

    def matrix(self, layer: int) -> np.ndarray:
        """Return the mean over all sequences, [N, N] float64 on the host."""
        summed = self._sums[layer]
        assert summed is not None
        return summed.double().cpu().numpy() / self._sequences[layer]

    def histogram(self) -> np.ndarray:
        """Return the fractions of the N² pairs of positions by averaged cosine, [layers, 128].

        The bins are those of ``Condensation.histogram``. A layer with a cosine that is not finite has NaN.
        """
        rows = []
        for layer in range(len(self._sums)):
            averaged = self.matrix(layer)
            if not np.isfinite(averaged).all():
                rows.append(np.full(BINS, np.nan))
                continue
            bins = ((averaged + 1) * (BINS / 2)).astype(np.int64).clip(0, BINS - 1)
            rows.append(np.bincount(bins.ravel(), minlength=BINS) / averaged.size)
        return np.stack(rows)
