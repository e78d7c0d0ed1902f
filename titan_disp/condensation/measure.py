"""Condensation is measured by the cosines of all pairs of a sequence's tokens in each layer (arXiv 2602.00217, §3.1).

Everything is float64: this code is off the hot path, and arccos near 1 loses half the digits.
"""

import math

import numpy as np
import torch
from torch import Tensor

from titan_disp.condensation.record import BINS, Condensation

_ROWS = 1024  # rows of the N×N matrix at a time
SCALARS = 4  # numbers before the histogram in a row of statistics


def _statistics(z: Tensor) -> Tensor:
    """Return [4 + BINS] float64 of one sequence [N, F].

    These are mean cosine, mean squared cosine, mean angle, effective rank, and the histogram. Both means of cosines and
    the histogram are over all N² pairs, including each token with itself, as in the paper (mean) and in the authors'
    released code (histogram). The angle arccos(c)/π is over the N(N−1) pairs of different tokens. An all-zero token has
    cosine 0 with every other. If a number of z is not finite, all numbers are NaN.
    """
    u = torch.nn.functional.normalize(z.double(), dim=-1, eps=torch.finfo(torch.float64).tiny)
    n = u.shape[0]
    if not u.isfinite().all():  # bincount and eigvalsh would raise, and end a run that the guard may still save
        return u.new_full((SCALARS + BINS,), math.nan)
    histogram = u.new_zeros(BINS)
    angles = u.new_zeros(())
    for start in range(0, n, _ROWS):
        c = (u[start : start + _ROWS] @ u.T).clamp_(-1, 1)
        # torch.histc has no deterministic form on CUDA; bincount of integers is exact everywhere.
        bins = ((c + 1) * (BINS / 2)).long().clamp_(max=BINS - 1)
        histogram += torch.bincount(bins.flatten(), minlength=BINS)
        c.diagonal(start).fill_(1)  # a token's angle to itself is 0, but rounding makes it 1e-8
        angles += c.arccos_().sum()
    gram = u @ u.T if n <= u.shape[1] else u.T @ u
    # ‖UᵀU‖²_F = ΣΣ c²; ‖Σu‖² = ΣΣ c
    scalars = [u.sum(0).square().sum() / n**2, gram.square().sum() / n**2, angles / (math.pi * n * (n - 1))]
    return torch.cat([torch.stack([*scalars, _effective_rank(gram)]), histogram / n**2])


def _effective_rank(gram: Tensor) -> Tensor:
    """Return the effective rank of a matrix from its Gram matrix: exp of the entropy of the normalized singular values.

    Source: Roy & Vetterli 2007.
    """
    squares = torch.linalg.eigvalsh(gram)
    noise = len(squares) * torch.finfo(gram.dtype).eps * squares[-1]
    p = torch.where(squares > noise, squares, 0).sqrt()
    p = p / p.sum().clamp_min(torch.finfo(p.dtype).tiny)  # all tokens zero: rank 1
    return torch.special.entr(p).sum().exp()


class Accumulator:
    """Average statistics over sequences of equal weight. The sums of several ranks can be added.

    Attributes:
        sums: [layers + 1, 4 + BINS] float64: rows of statistics, then a row that holds the number of sequences.
    """

    def __init__(self, layers: int, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(layers + 1, SCALARS + BINS, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, layer: int, z: Tensor) -> None:
        """Add one layer's activations, [B, N, F] with N ≥ 2, of whole sequences."""
        for sequence in z:
            self.sums[layer] += _statistics(sequence).to(self.sums.device)  # a model may be spread over several devices
        if layer == 0:
            self.sums[-1] += len(z)

    def result(self, tokens: int, final_norm: bool = False) -> Condensation:
        """Return the averages.

        Args:
            tokens: N.
            final_norm: whether the last layer is after the final norm, so that the one before it is the last block.
        """
        sums = self.sums.cpu().numpy()
        rows, sequences = sums[:-1] / sums[-1, 0], int(sums[-1, 0])
        mean, square, angle, rank = rows[:, :SCALARS].T
        return Condensation(
            mean_cosine=mean,
            std_cosine=(square - mean**2).clip(0) ** 0.5,
            mean_angle=angle,
            effective_rank=rank,
            histogram=rows[:, SCALARS:],
            tokens=tokens,
            sequences=sequences,
            final_norm=final_norm,
        )


# The heatmaps of arXiv 2602.00217 average a layer's N×N cosines over the sequences before they count them.
#
# Averaging narrows the histogram: differences between sequences cancel out, and what depends on the two positions stays.
# The mean over all pairs equals that of the pooled pairs (measure.py), and so do its rank correlations with depth.


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
