"""ℓ2-repel: L = log mean exp(−‖z_i − z_j‖²/τ) + λ_norm mean(z²), in one pass and O(N·F)
memory.

The authors' code takes the mean over all N² pairs, which include each token with itself
(exp(0) = 1):

    L = log((N + Σ_{i≠j} exp(−‖z_i − z_j‖²/τ)) / N²) + λ_norm mean(z²)

The N in the numerator bounds the gradients: distant pairs have none. Without it, the
closest pairs share a gradient of 2‖z_i − z_j‖/τ, however far apart they are.

Distances are unbounded, so the exponents need a running maximum, kept per sequence.
With e_ij = −‖z_i − z_j‖²/τ, their maximum M, and w_ij = exp(e_ij − M):

    A = log Σ_{i≠j} exp(e_ij) = M + log Σ w_ij        ∂A/∂z_i = −4/(τ Σw) Σ_{j≠i} w_ij (z_i − z_j)

A rank sums over its own rows × all columns. The other half of each pair belongs to the
other token's rank.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from titan_disp.dispersion.autograd import Gathering, Result
from titan_disp.dispersion.kernels import accumulation_dtype
from titan_disp.dispersion.layers import Layers
from titan_disp.dispersion.masks import Count, TokenMask, apart, others_of
from titan_disp.dispersion.pairwise import tile_size
from titan_disp.dispersion.variants.base import Variant, check_tau


@dataclass(frozen=True)
class L2Repel(Variant):
    """L = log(N + exp A) − log N² + λ_norm mean(z²), or A − log(N(N−1)) + λ_norm
    mean(z²) without the diagonal.

    With λ_norm = 0, distances could grow without bound.
    """

    name: ClassVar[str] = "l2_repel"
    bf16_products: ClassVar[bool] = False  # distances are differences
    of_pairs: ClassVar[bool] = True

    tau: float
    norm_coeff: float
    include_diagonal: bool

    def __post_init__(self) -> None:
        check_tau(self.tau)
        if not (math.isfinite(self.norm_coeff) and self.norm_coeff >= 0):
            raise ValueError(f"norm_coeff is {self.norm_coeff}, expected a number ≥ 0")

    def exact(self, layers: Layers) -> Tensor:
        sums = layers.logsumexp_over_group(
            layers.each(
                lambda z, mask: pair_exponents(z, mask, self.tau, layers.gather(z))
            )
        )
        losses = self.normalize(sums, layers.pairs(), layers.tokens(layers.mask))
        return (
            losses + self.norm_coeff * layers.mean_square()
            if self.norm_coeff
            else losses
        )

    def normalize(self, sums: Tensor, pairs: Count, tokens: Count) -> Tensor:
        """Return the log of the mean, given A [L, B] and the numbers of pairs i ≠ j and
        of tokens per sequence.
        """
        if not self.include_diagonal:
            return sums - _log(pairs, sums)
        return torch.logaddexp(sums, _log(tokens, sums)) - _log(pairs + tokens, sums)


def _log(count: Count, like: Tensor) -> Tensor:
    return (
        count.to(like.dtype).log()
        if isinstance(count, Tensor)
        else torch.full_like(like, math.log(count))
    )


def pair_exponents(
    z: Tensor, mask: TokenMask | None, tau: float, gathering: Gathering | None
) -> Result:
    """Return this rank's part of A [B], and its gradient [B, n, F]."""
    dtype = accumulation_dtype(z.dtype)
    rows = PairExponents(
        z.to(dtype), tau, None if mask is None else mask.marks(mask.rank).tokens
    )
    rows.add()
    if gathering is not None:
        for shard, marks in zip(
            gathering.other_shards(), others_of(mask), strict=False
        ):
            rows.add(shard.to(dtype), None if marks is None else marks.tokens)
    return rows.result()


class PairExponents:
    """Keep the running sums of one pass: M [B], Σw [B], Σ_j w_ij [B, n, 1] and Σ_j w_ij
    z_j [B, n, F].

    The rows i are [B, n, F] in the accumulation dtype, and 0 where their ``marks`` [B,
    n, 1] say no token. Their mean is subtracted from all tokens, which changes no
    difference: far from the origin, ‖a‖² + ‖b‖² − 2ab and the gradient would lose
    digits.
    """

    def __init__(self, rows: Tensor, tau: float, marks: Tensor | None = None) -> None:
        if marks is None:
            self.centre = rows.mean(1, keepdim=True)
        else:
            valid = marks if marks.dtype == torch.bool else marks >= 0
            self.centre = rows.sum(1, keepdim=True) / valid.sum(
                1, keepdim=True
            ).clamp_min(1)
        self.rows = rows - self.centre
        self.tau = tau
        self.marks = marks
        self.maximum = rows.new_full((rows.shape[0],), -torch.inf)
        # Not 0, because its log is infinite, and not so small that 4/(τ·total) is: rows
        # may have no pair.
        self.total = rows.new_full(
            (rows.shape[0],), torch.finfo(rows.dtype).tiny ** 0.5
        )
        self.weights = rows.new_zeros(*rows.shape[:2], 1)
        self.vectors = torch.zeros_like(rows)

    def add(
        self,
        cols: Tensor | None = None,
        cols_marks: Tensor | None = None,
        tile: int | None = None,
    ) -> None:
        """Add all pairs of the rows with ``cols`` [B, m, F].

        Without ``cols``, add the pairs i ≠ j of the rows.
        """
        same = cols is None
        cols, cols_marks = (
            (self.rows, self.marks)
            if cols is None
            else (cols - self.centre, cols_marks)
        )
        batch, n, _ = self.rows.shape
        tile = tile or tile_size(n, batch, self.rows.device.type)
        for i in range(0, n, tile):
            rows = self.rows[:, i : i + tile]
            # without ``cols``, a tile above the diagonal serves both sides
            first = i if same else 0
            for j in range(first, cols.shape[1], tile):
                some = cols[:, j : j + tile]
                e = _exponents(rows, some, self.tau)
                if same and i == j:
                    e.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
                if self.marks is not None and cols_marks is not None:
                    none = apart(
                        self.marks[:, i : i + tile],
                        cols_marks[:, j : j + tile].transpose(1, 2),
                    )
                    e.masked_fill_(none, -torch.inf)
                self._raise_maximum(e.amax((1, 2)))
                w = e.sub_(self.maximum[:, None, None]).exp_()
                both = same and j > i
                self.total += w.sum((1, 2)) * (2 if both else 1)
                self.weights[:, i : i + tile] += w.sum(-1, keepdim=True)
                self.vectors[:, i : i + tile].baddbmm_(w, some)
                if both:
                    self.weights[:, j : j + tile] += w.sum(1)[..., None]
                    self.vectors[:, j : j + tile].baddbmm_(w.transpose(1, 2), rows)

    def _raise_maximum(self, found: Tensor) -> None:
        # A tile without pairs, such as a token with itself, has the maximum −inf and
        # must not rescale anything.
        new = torch.maximum(self.maximum, found)
        scale = torch.where(new > self.maximum, (self.maximum - new).exp(), 1.0)
        self.maximum = torch.where(
            new.isneginf(), torch.full_like(new, torch.finfo(new.dtype).min), new
        )
        self.total *= scale
        self.weights *= scale[:, None, None]
        self.vectors *= scale[:, None, None]

    def result(self) -> tuple[Tensor, Tensor]:
        """Return A [B], and ∂A/∂z [B, n, F] of the rows relative to this rank's own
        Σw.
        """
        a = self.maximum + self.total.log()
        grad = self.rows * self.weights - self.vectors
        return a, grad.mul_((-4.0 / (self.tau * self.total))[:, None, None])


def _exponents(rows: Tensor, cols: Tensor, tau: float) -> Tensor:
    """Return −‖z_i − z_j‖²/τ, [B, m, n], at most 0."""
    e = torch.baddbmm(
        rows.square().sum(-1, keepdim=True), rows, cols.transpose(1, 2), alpha=-2.0
    )
    return e.add_(cols.square().sum(-1)[:, None]).clamp_min_(0.0).mul_(-1.0 / tau)
