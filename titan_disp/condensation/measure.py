"""Condensation is measured in each layer, by the cosines of all pairs of a sequence's
tokens (arXiv 2602.00217, §3.1).

``Accumulator`` pools the pairs of all sequences. Everything is float64: this code is
off the hot path, and arccos near 1 loses half the digits.

``AveragedCosines`` is for the paper's heatmaps, in which a layer's N×N cosines are
averaged over the sequences before the cosines are counted. Averaging narrows the
histogram, because differences between sequences cancel out. The mean over all pairs
stays the same.

``Monitor`` measures condensation and cross-entropy on held-out text while a model
trains. Measuring computes no gradients, draws no random numbers, and has its own data.
The sequences are the same in every run and are divided among the data-parallel ranks.
If there are more ranks than sequences, several ranks take the same sequence and divide
its layers. If a sequence is sharded (TP, CP), its activations are gathered first. The
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
from torch.nn.functional import cross_entropy, normalize, pad

from titan_disp.condensation.record import BINS, Isotropy, Measurement

_ROWS = 1024  # number of rows of the N×N matrix that are computed at a time
# The count of numbers before the histogram in a row of statistics: mean cosine, mean
# squared cosine, mean angle and effective rank.
_SCALARS = 4
# The number of tokens whose logits are converted to float32 at a time. With Qwen's
# vocabulary, the logits take 0.3 GB, and their logarithms another 0.3 GB.
_TOKENS = 512


def _unit(z: Tensor) -> Tensor:
    """Return the tokens, [..., F], divided by their norms, in float64."""
    # Every token counts by its direction, however short it is.
    least_norm = torch.finfo(torch.float64).tiny
    return normalize(z.double(), dim=-1, eps=least_norm)


def _histogram(cosines: Tensor) -> Tensor:
    """Return the number of cosines in each bin, [128] int64. All cosines must be
    finite.
    """
    # torch.histc has no deterministic form on CUDA; bincount of integers is exact
    # everywhere.
    bins = ((cosines + 1) * (BINS / 2)).long().clamp_(max=BINS - 1)
    return torch.bincount(bins.flatten(), minlength=BINS)


def _statistics(z: Tensor) -> Tensor:
    """Return the statistics of one sequence [N, F] as a row, [4 + 128] float64.

    The row has mean cosine, mean squared cosine, mean angle, effective rank, and the
    histogram as fractions. Mean cosine, mean squared cosine and histogram are over all
    N² pairs, including each token with itself, as in the paper (mean) and in the
    authors' released code (histogram). The mean angle arccos(c)/π is
    over the N(N−1) pairs of different tokens. An all-zero token has cosine 0 with every
    other token. If an element of z is not finite, all statistics are NaN.
    """
    u = _unit(z)
    n, features = u.shape
    # Otherwise, bincount and eigvalsh would raise errors and end a run that the guard
    # could save.
    if not u.isfinite().all():
        return u.new_full((_SCALARS + BINS,), math.nan)
    histogram = u.new_zeros(BINS)
    angles = u.new_zeros(())
    for i, rows in enumerate(u.split(_ROWS)):
        c = (rows @ u.T).clamp_(-1, 1)
        histogram += _histogram(c)
        # a token's angle to itself is 0, but rounding makes it 1e-8
        c.diagonal(i * _ROWS).fill_(1)
        angles += c.arccos_().sum()
    # U Uᵀ and UᵀU have the same eigenvalues, except zeros.
    if n <= features:
        gram = u @ u.T
    else:
        gram = u.T @ u
    # ‖UᵀU‖²_F = ΣΣ c²; ‖Σu‖² = ΣΣ c
    pairs = n**2
    mean_cosine = u.sum(0).square().sum() / pairs
    mean_square = gram.square().sum() / pairs
    mean_angle = angles / (math.pi * n * (n - 1))
    rank = _effective_rank(torch.linalg.eigvalsh(gram))
    scalars = torch.stack([mean_cosine, mean_square, mean_angle, rank])
    return torch.cat([scalars, histogram / pairs])


def _effective_rank(squares: Tensor) -> Tensor:
    """Return exp of the entropy of the normalized singular values, a scalar ≥ 1.

    ``squares`` are the squared singular values in ascending order (Roy & Vetterli
    2007).
    """
    precision = torch.finfo(squares.dtype)
    noise = len(squares) * precision.eps * squares[-1]
    singular = torch.where(squares > noise, squares, 0).sqrt()
    # If all tokens are zero, the rank is 1.
    p = singular / singular.sum().clamp_min(precision.tiny)
    return torch.special.entr(p).sum().exp()


class Accumulator:
    """Average statistics over sequences of equal weight.

    Attributes:
        sums: [layers + 1, 4 + 128] float64. A row of statistics per layer, summed over
            sequences, and a last row with the number of sequences. The sums of several
            ranks can be added.
        features: F of the first layer; 0 before this layer is added.
    """

    def __init__(self, layers: int, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(
            layers + 1, _SCALARS + BINS, dtype=torch.float64, device=device
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

    def result(self, tokens: int) -> Measurement:
        """Return the averages over sequences of N ``tokens``."""
        sums = self.sums.cpu().numpy()
        sequences = sums[-1, 0]
        averages = sums[:-1] / sequences
        mean_cosine, mean_square, mean_angle, rank = averages[:, :_SCALARS].T
        variance = (mean_square - mean_cosine**2).clip(0)
        return Measurement(
            mean_cosine=mean_cosine,
            std_cosine=variance**0.5,
            mean_angle=mean_angle,
            effective_rank=rank,
            histogram=averages[:, _SCALARS:],
            tokens=tokens,
            sequences=int(sequences),
            features=self.features,
        )


class AveragedCosines:
    """Average cosine matrices over sequences of one length.

    The sums of a layer are N² float32 numbers on the layer's device.

    The authors' package ``embedding-condensation`` does the same, but divides a token z
    by max(‖z‖, 1e-3). Here tokens shorter than 1e-3 count by their direction, too.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}  # by layer, [N, N]
        self._sequences: Counter[int] = Counter()  # by layer

    @torch.no_grad()
    def add(self, layer: int, z: Tensor) -> None:
        """Add one layer's activations, [B, N, F], of whole sequences."""
        for sequence in z:
            u = _unit(sequence).float()
            cosines = (u @ u.T).clamp_(-1, 1)
            if layer in self._sums:
                self._sums[layer] += cosines
            else:
                self._sums[layer] = cosines
            self._sequences[layer] += 1

    def matrix(self, layer: int) -> np.ndarray:
        """Return the mean over all sequences, [N, N] float64 on the host."""
        mean = self._sums[layer].double() / self._sequences[layer]
        return mean.cpu().numpy()

    def histogram(self) -> np.ndarray:
        """Return the histogram of each layer's averaged cosine matrix, [layers, 128].

        Numbers are fractions of the N² pairs of positions. If a cosine of a layer is
        not finite, the layer's row is NaN.
        """
        rows = []
        for layer in sorted(self._sums):
            cosines = torch.from_numpy(self.matrix(layer))
            if cosines.isfinite().all():
                rows.append(_histogram(cosines).double() / cosines.numel())
            else:
                rows.append(cosines.new_full((BINS,), math.nan))
        return torch.stack(rows).numpy()


class Covariance:
    """Sum the products of all pairs of features over all tokens.

    The sums of a layer are (F + 1)² float64 numbers on the layer's device.
    """

    def __init__(self) -> None:
        self._centers: dict[int, Tensor] = {}  # by layer, [F]
        # By layer, [F + 1, F + 1]: Σ x xᵀ over the tokens z, with x = (z − center, 1).
        # The last row therefore holds Σ (z − center) and the number of tokens.
        self._products: dict[int, Tensor] = {}

    @torch.no_grad()
    def add(self, layer: int, z: Tensor) -> None:
        """Add one layer's activations, [B, N, F]."""
        tokens = z.flatten(0, 1).double()
        if layer not in self._centers:
            # Without a center, a mean far from zero would cost digits of the variance.
            self._centers[layer] = tokens.mean(0)
            size = tokens.shape[1] + 1
            self._products[layer] = tokens.new_zeros(size, size)
        x = pad(tokens - self._centers[layer], (0, 1), value=1.0)
        self._products[layer].addmm_(x.T, x)

    def result(self, layer: int, dimensions: int, zeta: float = 0.0) -> Isotropy:
        """Return the measures in ``Isotropy`` for one layer.

        IsoScore* (Rudman & Eickhoff 2024, arXiv 2305.19358) is (t² − 1)/(n − 1) with t
        = Σλ/‖λ‖, for the eigenvalues λ of (1 − ζ) Σ_X + ζ Σ_S in n ``dimensions``. Σ_S
        is the identity times the mean variance. (The paper writes the score with the
        distance δ² = (n − √n·t)/(n − √n), which cancels.)
        """
        products = self._products[layer]
        count = products[-1, -1]
        total = products[-1, :-1]
        mean_products = total.outer(total) / count  # count · mean meanᵀ
        scatter = products[:-1, :-1] - mean_products  # count · covariance
        variances = torch.linalg.eigvalsh(scatter).clamp_min(0)  # count · λ of Σ_X
        trace = variances.sum()
        weight = (1 - zeta) ** 2
        # Σλ² of the mixture: each λ becomes (1 − ζ) λ + ζ · trace / n.
        isotropic = (1 - weight) * trace**2 / dimensions
        squared_norm = weight * variances.square().sum() + isotropic
        t_squared = trace**2 / squared_norm
        score = (t_squared - 1) / (dimensions - 1)
        return Isotropy(
            iso_score_star=score.item(),
            covariance_rank=_effective_rank(variances).item(),
            first_component=(variances[-1] / trace).item(),
        )


@torch.no_grad()
def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each sequence, summed over its tokens, in nats, [B]
    float64.

    Logits are [B, N, V], and may be a DTensor that is sharded over the vocabulary
    within ``loss_parallel()``. Labels are [B, N].
    """
    sums = torch.zeros(len(labels), dtype=torch.float64, device=labels.device)
    for i, sequence in enumerate(labels):
        parts = zip(logits[i].split(_TOKENS), sequence.split(_TOKENS), strict=True)
        for logits_of_part, labels_of_part in parts:
            ce = cross_entropy(logits_of_part.float(), labels_of_part, reduction="sum")
            if isinstance(ce, DTensor):
                ce = ce.to_local()
            sums[i] += ce
    return sums


def gather_sequence(z: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return whole sequences [B, N, F] from the shards [B, N/p, F] of p ranks.

    Every rank joins the shards in the order of ranks. This is a collective call.
    Without a group, z is whole.
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
    # [B] float64, sums over this rank's labels: N per sequence, or N/cp under CP
    cross_entropies: Tensor
    # [N/cp] positions of these labels in the sequence; None if labels are in order
    positions: Tensor | None = None


@dataclass(frozen=True)
class MeshPosition:
    """This process's position in the mesh of ranks. The default is a single process."""

    dp_rank: int = 0  # data-parallel rank
    dp_degree: int = 1  # number of data-parallel ranks
    # the data-parallel ranks, whose sums are added up
    dp_group: dist.ProcessGroup | None = None
    # ranks over which the activations of a sequence are sharded (TP, CP, or both)
    sequence_group: dist.ProcessGroup | None = None
    # ranks over which the labels of a sequence are sharded (CP); they are a part of
    # ``sequence_group``
    label_group: dist.ProcessGroup | None = None


class Monitor:
    """Measure a model on fixed sequences.

    Args:
        sequences: [n, N + 1] token ids, int64, the same on all ranks, on the device.
        batch_size: sequences in every forward. A compiled model thus sees one shape.
        max_tokens: number of positions per sequence whose activations are measured,
            evenly spaced; all N if ``max_tokens`` is larger.
        mesh: decides which sequences and layers this process measures.
        segments: [n, N + 1] numbers of the tokens' documents
            (``data.stream.Slot.fill``), if the model needs them.
    """

    def __init__(
        self,
        sequences: Tensor,
        batch_size: int,
        max_tokens: int,
        mesh: MeshPosition = MeshPosition(),
        segments: Tensor | None = None,
    ) -> None:
        count = sequences.shape[0]
        n = sequences.shape[1] - 1
        # All ranks make the same number of forwards, which are collective calls. Place
        # p, counted over the batches of all ranks, holds copy p // count of sequence
        # p % count.
        places_per_forward = mesh.dp_degree * batch_size
        places = places_per_forward * math.ceil(count / places_per_forward)
        place = torch.arange(mesh.dp_rank, places, mesh.dp_degree).view(-1, batch_size)
        # Copy c of a sequence measures layers c, c + copies, … If only some sequences
        # have a last copy, this copy measures no layer.
        self.copies = places // count
        self.copy = place // count  # [forwards, B]
        sequence = place % count
        batches = sequences[sequence.to(sequences.device)]
        tokens = batches[..., :-1]
        labels = batches[..., 1:]
        inputs = [tokens, labels]
        if segments is not None:
            documents = segments[sequence.to(segments.device)]
            inputs.append(documents[..., :-1])
        # for each forward: token ids, labels, and segments if there are any, [B, N]
        self.inputs = list(zip(*inputs, strict=True))
        self.labels = count * n  # number of labels of all sequences
        self.tokens = min(max_tokens, n)
        positions = torch.linspace(0, n - 1, self.tokens, dtype=torch.float64)
        self.positions = positions.round().long()
        self.mesh = mesh
        self.device = sequences.device

    @torch.no_grad()
    def measure(self, forward: Callable[..., Forward]) -> Measurement:
        """Return the measurement of a model, the same on all ranks. A collective call.

        ``forward`` takes token ids, labels, and segments if there are any, each [B, N].
        """
        sums: Accumulator | None = None
        ce = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch, copy in zip(self.inputs, self.copy, strict=True):
            outputs = forward(*batch)
            ce += outputs.cross_entropies[copy == 0].sum()
            if sums is None:
                sums = Accumulator(len(outputs.activations), self.device)
            columns = self._measured_columns(outputs.positions)
            for layer, z in enumerate(outputs.activations):
                is_measured = copy == layer % self.copies
                # ``is_measured`` is the same on all ranks that share a sequence.
                if is_measured.any():
                    gathered = gather_sequence(z, self.mesh.sequence_group)
                    sums.add(layer, gathered[is_measured][:, columns])
        assert sums is not None
        if self.mesh.label_group is not None:
            dist.all_reduce(ce, group=self.mesh.label_group)
        if self.mesh.dp_group is not None:
            dist.all_reduce(sums.sums, group=self.mesh.dp_group)
            dist.all_reduce(ce, group=self.mesh.dp_group)
        measurement = sums.result(self.tokens)
        return replace(measurement, cross_entropy=ce.item() / self.labels)

    def _measured_columns(self, positions: Tensor | None) -> Tensor:
        """Return the measured positions' indices in a gathered sequence, [tokens].

        ``positions`` is ``Forward.positions``, which CP permutes to balance the load.
        """
        if positions is None:
            return self.positions
        shard = positions[None, :, None]
        order = gather_sequence(shard, self.mesh.label_group).flatten()
        return order.argsort()[self.positions.to(order.device)]
