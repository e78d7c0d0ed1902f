"""Condensation is measured by the cosines of all pairs of a sequence's tokens in each
layer (arXiv 2602.00217, §3.1).

``Accumulator`` pools the pairs of all sequences. Everything is float64: this code is
off the hot path, and arccos near 1 loses half the digits.

``AveragedCosines`` is for the heatmaps of the paper, which average a layer's N×N
cosines over the sequences before they count them. This narrows the histogram:
differences between sequences cancel out. The mean over all pairs stays.

``Monitor`` measures condensation and cross-entropy on held-out text while a model
trains. It takes no gradients, draws no random numbers, and has its own data. The
sequences are the same in every run and are divided among the data-parallel ranks. If
there are more ranks than sequences, several ranks take the same sequence and divide its
layers. If a sequence is sharded (TP, CP), its activations are gathered first. The
numbers therefore do not depend on the mesh.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, pad

from titan_disp.condensation.record import BINS, Condensation

_ROWS = 1024  # rows of the N×N matrix at a time
SCALARS = 4  # numbers before the histogram in a row of statistics
# Tokens whose logits are in float32 at a time: 0.3 GB with Qwen's vocabulary, and as
# much again for their logarithms.
_TOKENS = 512


def _unit(z: Tensor) -> Tensor:
    return torch.nn.functional.normalize(
        z.double(), dim=-1, eps=torch.finfo(torch.float64).tiny
    )


def _statistics(z: Tensor) -> Tensor:
    """Return mean cosine, mean squared cosine, mean angle, effective rank, and the
    histogram of one sequence [N, F].

    Both means of cosines and the histogram are over all N² pairs, including each token
    with itself, as in the paper (mean) and in the authors' released code (histogram).
    The angle arccos(c)/π is over the N(N−1) pairs of different tokens. An all-zero
    token has cosine 0 with every other. If a number of z is not finite, all numbers are
    NaN.
    """
    u = _unit(z)
    n = u.shape[0]
    # bincount and eigvalsh would raise, and end a run that the guard may still save
    if not u.isfinite().all():
        return u.new_full((SCALARS + BINS,), math.nan)
    histogram = u.new_zeros(BINS)
    angles = u.new_zeros(())
    for start in range(0, n, _ROWS):
        c = (u[start : start + _ROWS] @ u.T).clamp_(-1, 1)
        # torch.histc has no deterministic form on CUDA; bincount of integers is exact
        # everywhere.
        bins = ((c + 1) * (BINS / 2)).long().clamp_(max=BINS - 1)
        histogram += torch.bincount(bins.flatten(), minlength=BINS)
        # a token's angle to itself is 0, but rounding makes it 1e-8
        c.diagonal(start).fill_(1)
        angles += c.arccos_().sum()
    gram = u @ u.T if n <= u.shape[1] else u.T @ u
    # ‖UᵀU‖²_F = ΣΣ c²; ‖Σu‖² = ΣΣ c
    scalars = [
        u.sum(0).square().sum() / n**2,
        gram.square().sum() / n**2,
        angles / (math.pi * n * (n - 1)),
    ]
    return torch.cat(
        [
            torch.stack([*scalars, _effective_rank(torch.linalg.eigvalsh(gram))]),
            histogram / n**2,
        ]
    )


def _effective_rank(squares: Tensor) -> Tensor:
    """Return exp of the entropy of normalized singular values, from their ascending
    squares (Roy & Vetterli 2007).
    """
    noise = len(squares) * torch.finfo(squares.dtype).eps * squares[-1]
    p = torch.where(squares > noise, squares, 0).sqrt()
    p = p / p.sum().clamp_min(torch.finfo(p.dtype).tiny)  # all tokens zero: rank 1
    return torch.special.entr(p).sum().exp()


class Accumulator:
    """Average statistics over sequences of equal weight.

    The sums of several ranks can be added.
    """

    def __init__(self, layers: int, device: torch.device | str = "cpu") -> None:
        # Rows of statistics, then a row that holds the number of sequences.
        self.sums = torch.zeros(
            layers + 1, SCALARS + BINS, dtype=torch.float64, device=device
        )
        self.features = 0

    @torch.no_grad()
    def add(self, layer: int, z: Tensor) -> None:
        """Add one layer's activations, [B, N, F] with N ≥ 2, of whole sequences."""
        for sequence in z:
            # a model may be spread over several devices
            self.sums[layer] += _statistics(sequence).to(self.sums.device)
        if layer == 0:
            self.sums[-1] += len(z)
            self.features = z.shape[-1]

    def result(self, tokens: int) -> Condensation:
        """Return the averages over sequences of N ``tokens``."""
        sums = self.sums.cpu().numpy()
        rows = sums[:-1] / sums[-1, 0]
        sequences = int(sums[-1, 0])
        mean, square, angle, rank = rows[:, :SCALARS].T
        std = (square - mean**2).clip(0) ** 0.5
        return Condensation(
            mean,
            std,
            angle,
            rank,
            rows[:, SCALARS:],
            tokens,
            sequences,
            features=self.features,
        )


class AveragedCosines:
    """Sum cosine matrices over sequences of one length: layers · N² float32 numbers,
    each layer's on its own device.

    The authors' package ``embedding-condensation`` does the same, but divides a token z
    by max(‖z‖, 1e-3). Here tokens shorter than 1e-3 count by their direction, too.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._sequences: Counter[int] = Counter()

    @torch.no_grad()
    def add(self, layer: int, z: Tensor) -> None:
        """Add one layer's activations, [B, N, F], of whole sequences."""
        for sequence in z:
            u = _unit(sequence).float()
            cosines = (u @ u.T).clamp_(-1, 1)
            self._sums[layer] = (
                self._sums[layer].add_(cosines) if layer in self._sums else cosines
            )
            self._sequences[layer] += 1

    def matrix(self, layer: int) -> np.ndarray:
        """Return the mean over all sequences, [N, N] float64 on the host."""
        return self._sums[layer].double().cpu().numpy() / self._sequences[layer]

    def histogram(self) -> np.ndarray:
        """Return the fractions of the N² pairs of positions by averaged cosine,
        [layers, 128]; NaN if not finite.
        """
        rows = []
        for averaged in map(self.matrix, sorted(self._sums)):
            if not np.isfinite(averaged).all():
                rows.append(np.full(BINS, np.nan))
                continue
            bins = ((averaged + 1) * (BINS / 2)).astype(np.int64).clip(0, BINS - 1)
            rows.append(np.bincount(bins.ravel(), minlength=BINS) / averaged.size)
        return np.stack(rows)


class Covariance:
    """Sum the products of features over all tokens: layers · (F + 1)² float64 numbers,
    each layer's on its own device.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def add(self, layer: int, z: Tensor) -> None:
        """Add one layer's activations, [B, N, F]."""
        points = z.flatten(0, 1).double()
        # a mean far from zero would cancel the digits of the variance
        if layer not in self._sums:
            self._sums[layer] = (
                points.mean(0),
                points.new_zeros(points.shape[1] + 1, points.shape[1] + 1),
            )
        center, sums = self._sums[layer]
        # whose products hold the sums and the number of tokens, too
        points = pad(points - center, (0, 1), value=1.0)
        sums.addmm_(points.T, points)

    def result(
        self, layer: int, dimensions: int, zeta: float = 0.0
    ) -> tuple[float, float, float]:
        """Return IsoScore*, the effective rank of the centered tokens, and the first
        component's fraction of variance.

        IsoScore* (Rudman & Eickhoff 2024, arXiv 2305.19358) is (t² − 1)/(n − 1) with t
        = Σλ/‖λ‖, for the eigenvalues λ of (1 − ζ) Σ_X + ζ Σ_S in n ``dimensions``: it
        is the paper's form, with δ²(n − √n) = n − √n·t inserted. Σ_S is the identity
        times the mean variance. If all tokens are equal, it is NaN, and so is the
        fraction.
        """
        _, sums = self._sums[layer]
        count = sums[-1, -1]
        total = sums[-1, :-1]
        variances = torch.linalg.eigvalsh(
            sums[:-1, :-1] - total.outer(total) / count
        ).clamp_min(0)
        whole = variances.sum()
        kept = (1 - zeta) ** 2
        ratio = whole**2 / (
            kept * variances.square().sum() + (1 - kept) * whole**2 / dimensions
        )
        score = (ratio - 1) / (dimensions - 1)
        return (
            score.item(),
            _effective_rank(variances).item(),
            (variances[-1] / whole).item(),
        )


@torch.no_grad()
def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each sequence, summed over its tokens, in nats, as
    [B] float64.

    Logits are [B, N, V], and may be a DTensor that is sharded over the vocabulary
    within ``loss_parallel()``.
    """
    sums = torch.zeros(len(labels), dtype=torch.float64, device=labels.device)
    for i, sequence in enumerate(labels):
        for start in range(0, len(sequence), _TOKENS):
            some = slice(start, start + _TOKENS)
            of_some = cross_entropy(
                logits[i, some].float(), sequence[some], reduction="sum"
            )
            sums[i] += of_some.to_local() if isinstance(of_some, DTensor) else of_some
    return sums


def gather_sequence(z: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return [B, N, F] on every rank, from the [B, N/p, F] shards of the sequence in
    rank order.
    """
    if group is None:
        return z
    shards = [torch.empty_like(z) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, z.contiguous(), group=group)
    return torch.cat(shards, dim=1)


@dataclass
class Forward:
    """The results of a forward pass over B sequences."""

    # [B, N/p, F] for every layer, the last one after the final norm
    activations: Sequence[Tensor]
    # [B] float64, sums over this rank's labels: all N of them, or N/cp under CP
    cross_entropies: Tensor
    # [N/cp] of these labels in the sequence; None: in order
    positions: Tensor | None = None


class Monitor:
    """Measure a model on fixed sequences.

    Args:
        sequences: [n, N + 1] token ids, int64, the same on all ranks, on the device.
        batch_size: sequences per forward. It is always the same, so that a compiled
            model sees one shape.
        max_tokens: positions per sequence whose activations are measured, evenly
            spaced; all N if it is larger.
        ranks: data-parallel rank, and number of them.
        data_group: ranks whose sums are added up.
        sequence_group: ranks over which the activations of a sequence are sharded (TP,
            CP, or both).
        label_group: ranks over which its labels are sharded (CP), a part of
            sequence_group.
        segments: [n, N + 1] numbers of the tokens' documents
            (``data.stream.Slot.fill``), if the model needs them.
    """

    def __init__(
        self,
        sequences: Tensor,
        batch_size: int,
        max_tokens: int,
        ranks: tuple[int, int] = (0, 1),
        data_group: dist.ProcessGroup | None = None,
        sequence_group: dist.ProcessGroup | None = None,
        label_group: dist.ProcessGroup | None = None,
        segments: Tensor | None = None,
    ) -> None:
        rank, number = ranks
        count = sequences.shape[0]
        n = sequences.shape[1] - 1
        # the same on all ranks, as a forward is a collective call
        forwards = -(-count // (number * batch_size))
        # in all ranks' batches, filled with the sequences over and over
        places = number * batch_size * forwards
        own = torch.arange(rank, places, number).view(forwards, batch_size)
        self.copies = places // count
        # copy c measures layers c, c + copies, …; an incomplete copy measures none
        self.copy = own // count
        self.batches = sequences[(own % count).to(sequences.device)]
        self.segments = (
            [] if segments is None else [segments[(own % count).to(segments.device)]]
        )
        self.labels = count * n
        self.tokens = min(max_tokens, n)
        self.positions = (
            torch.linspace(0, n - 1, self.tokens, dtype=torch.float64).round().long()
        )
        self.data_group = data_group
        self.sequence_group = sequence_group
        self.label_group = label_group

    @torch.no_grad()
    def measure(self, forward: Callable[..., Forward]) -> Condensation:
        """Measure, by a collective call, and return the same on all ranks.

        ``forward`` takes token ids, labels, and segments if there are any, each [B, N].
        """
        sums: Accumulator | None = None
        ce = torch.zeros((), dtype=torch.float64, device=self.batches.device)
        for batch, copy, *segments in zip(
            self.batches, self.copy, *self.segments, strict=True
        ):
            found = forward(
                batch[:, :-1], batch[:, 1:], *(rows[:, :-1] for rows in segments)
            )
            ce += found.cross_entropies[copy == 0].sum()
            if sums is None:
                sums = Accumulator(len(found.activations), batch.device)
            chosen = self._chosen(found.positions)
            for layer, z in enumerate(found.activations):
                own = copy == layer % self.copies
                if own.any():  # the same on all ranks that share a sequence
                    sums.add(
                        layer, gather_sequence(z, self.sequence_group)[own][:, chosen]
                    )
        assert sums is not None
        if self.label_group is not None:
            dist.all_reduce(ce, group=self.label_group)
        if self.data_group is not None:
            dist.all_reduce(sums.sums, group=self.data_group)
            dist.all_reduce(ce, group=self.data_group)
        return replace(sums.result(self.tokens), cross_entropy=ce.item() / self.labels)

    def _chosen(self, positions: Tensor | None) -> Tensor:
        """Return where the measured positions are in a gathered sequence, which load
        balancing under CP permutes.
        """
        if positions is None:
            return self.positions
        order = gather_sequence(positions[None, :, None], self.label_group).flatten()
        return order.argsort()[self.positions.to(order.device)]
