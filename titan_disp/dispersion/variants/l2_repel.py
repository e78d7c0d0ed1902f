"""ℓ2-repel: L = log mean exp(−‖z_i − z_j‖²/τ) + λ_norm mean(z²), in one pass and O(N·F)
memory.

The authors' code takes the mean over all N² pairs, which include each token with itself
(exp(0) = 1):

    L = log((N + Σ_{i≠j} exp(−‖z_i − z_j‖²/τ)) / N²) + λ_norm mean(z²)

The N in the numerator makes the gradient vanish if all pairs are distant. Without the N,
the closest pairs share a gradient of 2‖z_i − z_j‖/τ, however far apart they are.

Distances are unbounded, so a running maximum of the exponents is kept per sequence. With
e_ij = −‖z_i − z_j‖²/τ, the maximum M of all e_ij, and w_ij = exp(e_ij − M):

    A = log Σ_{i≠j} exp(e_ij) = M + log Σ w_ij        ∂A/∂z_i = −4/(τ Σw) Σ_{j≠i} w_ij (z_i − z_j)

A rank sums over the pairs (i, j) of its own tokens i with all tokens j. The rank of token
j sums over (j, i).
"""

import math
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from titan_disp.dispersion.autograd import Gathering, Result
from titan_disp.dispersion.kernels import accumulation_dtype
from titan_disp.dispersion.layers import Layers
from titan_disp.dispersion.masks import Count, Marks, TokenMask, apart, marked_shards
from titan_disp.dispersion.pairwise import Block, Shard
from titan_disp.dispersion.variants.base import Variant, check_tau
from titan_disp.dispersion.vectors import Gradient, Raw


@dataclass(frozen=True)
class L2Repel(Variant):
    """L = log(N + exp A) − log N² + λ_norm mean(z²), or A − log(N(N−1)) + λ_norm
    mean(z²) without the diagonal.

    With λ_norm = 0, distances could grow without bound.
    """

    name: ClassVar[str] = "l2_repel"
    bf16_products: ClassVar[bool] = False  # would lose small distances
    of_pairs: ClassVar[bool] = True

    tau: float
    norm_coeff: float
    include_diagonal: bool

    def __post_init__(self) -> None:
        check_tau(self.tau)
        if not (math.isfinite(self.norm_coeff) and self.norm_coeff >= 0):
            raise ValueError(f"norm_coeff is {self.norm_coeff}, expected a number ≥ 0")

    def exact(self, layers: Layers) -> Tensor:
        def of_rank(z: Tensor, mask: TokenMask | None) -> Result:
            return pair_exponents(z, mask, self.tau, layers.gather(z))

        sums = layers.logsumexp_over_group(layers.each(of_rank))
        losses = self.normalize(sums, layers.pairs(), layers.tokens(layers.mask))
        if self.norm_coeff:
            losses = losses + self.norm_coeff * layers.mean_square()
        return losses

    def normalize(self, sums: Tensor, pairs: Count, tokens: Count) -> Tensor:
        """Return the log of the mean [L, B], given A [L, B].

        ``pairs`` and ``tokens`` are the numbers of pairs i ≠ j and of tokens per
        sequence.
        """
        if not self.include_diagonal:
            return sums - _log(pairs, sums)
        return torch.logaddexp(sums, _log(tokens, sums)) - _log(pairs + tokens, sums)


def _log(count: Count, like: Tensor) -> Tensor:
    if isinstance(count, Tensor):
        return count.to(like.dtype).log()
    return torch.full_like(like, math.log(count))


def pair_exponents(
    z: Tensor, mask: TokenMask | None, tau: float, gathering: Gathering | None
) -> Result:
    """Return this rank's part of A [B], and its gradient [B, n, F]."""
    dtype = accumulation_dtype(z.dtype)
    sums = PairExponents(z.to(dtype), mask, tau)
    sums.add_pairs_with(sums.shard)
    for x, marks in marked_shards(gathering, mask):
        sums.add_pairs_with(sums.centred(x.to(dtype), marks))
    return sums.result()


class PairExponents:
    """The running sums of one pass over the pairs of this rank's tokens z [B, n, F].

    z is in the accumulation dtype, and 0 at padding. The mean of z is subtracted from all
    tokens, because ‖a‖² + ‖b‖² − 2ab and the gradient would lose digits far from the
    origin. Differences of tokens do not change.
    """

    shard: Shard  # this rank's tokens i
    maximum: Tensor  # M [B]
    total: Tensor  # Σw [B]
    weights: Tensor  # Σ_j w_ij [B, n, 1]
    vectors: Tensor  # Σ_j w_ij z_j [B, n, F]

    def __init__(self, z: Tensor, mask: TokenMask | None, tau: float) -> None:
        batch = len(z)
        limits = torch.finfo(z.dtype)
        marks = None
        if mask is None:
            self.mean = z.mean(1, keepdim=True)
        else:
            counts = mask.own.sum(1, keepdim=True).clamp_min(1)
            self.mean = z.sum(1, keepdim=True) / counts
            marks = mask.marks(mask.rank)
        self.tau = tau
        self.shard = self.centred(z, marks)
        self.maximum = z.new_full((batch,), limits.min)
        # The total of tokens without any pair. It is not 0, because log 0 is infinite.
        # It is so large that 4/(τ·total) is finite.
        self.total = z.new_full((batch,), limits.tiny**0.5)
        self.weights = z.new_zeros(*z.shape[:2], 1)
        self.vectors = torch.zeros_like(z)

    def centred(self, z: Tensor, marks: Marks | None) -> Shard:
        """Return tokens [B, m, F] relative to the mean of this rank's tokens."""
        return Shard(Raw(z - self.mean), marks)

    def add_pairs_with(self, other: Shard) -> None:
        """Add all pairs i ≠ j of this rank's tokens with the tokens of a shard.

        In this rank's own shard, a tile above the diagonal also stands for its transpose.
        """
        for number, where in enumerate(self.shard.blocks):
            rows = self.shard.block(where)
            first = number if other is self.shard else 0
            for columns in chain.from_iterable(other.spans(rows, first)):
                self._add_tile(rows, other.block(columns))

    def _add_tile(self, rows: Block, cols: Block) -> None:
        same_shard = rows.shard is cols.shard
        is_mirrored = same_shard and rows.where != cols.where
        e = _exponents(rows.x, cols.x, self.tau)
        if same_shard and not is_mirrored:  # a token and itself are not a pair
            e.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
        if rows.marks is not None and cols.marks is not None:
            no_pair = apart(rows.marks, cols.marks.transpose(1, 2))
            e.masked_fill_(no_pair, -torch.inf)
        self._raise_maximum(e.amax((1, 2)))
        w = e.sub_(self.maximum[:, None, None]).exp_()
        self.total.add_(w.sum((1, 2)), alpha=2 if is_mirrored else 1)
        self.weights[:, rows.where] += w.sum(-1, keepdim=True)
        self.vectors[:, rows.where].baddbmm_(w, cols.x)
        if is_mirrored:
            self.weights[:, cols.where] += w.sum(1)[..., None]
            self.vectors[:, cols.where].baddbmm_(w.transpose(1, 2), rows.x)

    def _raise_maximum(self, largest: Tensor) -> None:
        """Raise the running maximum to ``largest`` [B], and rescale the sums.

        ``largest`` is the maximum of a tile, −∞ if it has no pairs.
        """
        maximum = torch.maximum(self.maximum, largest)
        scale = (self.maximum - maximum).exp()
        self.maximum = maximum
        self.total *= scale
        self.weights *= scale[:, None, None]
        self.vectors *= scale[:, None, None]

    def result(self) -> Result:
        """Return this rank's part of A [B], and its gradient for this rank's tokens."""
        a = self.maximum + self.total.log()
        grad = self.shard.x * self.weights - self.vectors
        grad.mul_((-4.0 / (self.tau * self.total))[:, None, None])
        return a, Gradient(grad)


def _exponents(rows: Tensor, cols: Tensor, tau: float) -> Tensor:
    """Return −‖z_i − z_j‖²/τ ≤ 0, [B, m, n]."""
    e = torch.baddbmm(
        rows.square().sum(-1, keepdim=True), rows, cols.transpose(1, 2), alpha=-2.0
    )
    return e.add_(cols.square().sum(-1)[:, None]).clamp_min_(0.0).mul_(-1.0 / tau)
