"""The heatmap of arXiv 2602.00217: a layer's N×N cosines are averaged over the sequences first, then their histogram is taken.

Averaging narrows the spread: what differs between sequences cancels out, and what depends on the two positions stays. The mean
over all pairs is that of the pooled pairs (measure.py), and so are its rank correlations with depth.
"""

import numpy as np
import torch
from torch import Tensor

from titan_disp.condensation.record import BINS


class AveragedCosines:
    """Sums of cosine matrices over sequences of one length: layers · N² float32 numbers, those of a layer on its own device.

    Float32 as in the authors' package ``embedding-condensation``, whose matrices these are. It divides a token z by
    max(‖z‖, 1e-3), this by ‖z‖: tokens shorter than 1e-3 count here by their direction, too.
    """

    def __init__(self, layers: int) -> None:
        self._sums: list[Tensor | None] = [None] * layers
        self._sequences = [0] * layers

    @torch.no_grad()
    def add(self, layer: int, z: Tensor) -> None:
        """Take in one layer's activations, [B, N, F], whole sequences."""
        for sequence in z:
            u = torch.nn.functional.normalize(sequence.double(), dim=-1, eps=torch.finfo(torch.float64).tiny).float()
            cosines = (u @ u.T).clamp_(-1, 1)
            summed = self._sums[layer]
            self._sums[layer] = cosines if summed is None else summed.add_(cosines)
            self._sequences[layer] += 1

    def matrix(self, layer: int) -> np.ndarray:
        """[N, N] float64 on the host: the mean over all sequences."""
        summed = self._sums[layer]
        assert summed is not None
        return summed.double().cpu().numpy() / self._sequences[layer]

    def histogram(self) -> np.ndarray:
        """[layers, 128] fraction of the N² pairs of positions by averaged cosine, in the bins of ``Condensation.histogram``."""
        rows = []
        for layer in range(len(self._sums)):
            averaged = self.matrix(layer)
            bins = ((averaged + 1) * (BINS / 2)).astype(np.int64).clip(0, BINS - 1)
            rows.append(np.bincount(bins.ravel(), minlength=BINS) / averaged.size)
        return np.stack(rows)
