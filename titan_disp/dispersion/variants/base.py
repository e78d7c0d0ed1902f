"""This module defines what every variant of the loss implements, and what the kinds of
variants share.

A loss is a function of the cosines of pairs (``CosineVariant``), of the tokens' second
moments (``MomentsVariant``), or plain autograd code over all tokens
(``AutogradVariant``). docs/losses.md shows how to write one.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.autograd import Result
from titan_disp.dispersion.kernels import accumulation_dtype, operand_dtype, product
from titan_disp.dispersion.layers import Compute, Layers
from titan_disp.dispersion.masks import Count, TokenMask
from titan_disp.dispersion.moments import (
    Quadratic,
    UnitTokens,
    fit,
    gram,
    over_group,
    quadratic_sum_,
    sample,
)
from titan_disp.dispersion.pairwise import PairFunction, pair_sums
from titan_disp.dispersion.vectors import UNIT_EPS, Gradient, Normalized, Raw, Units

LARGE_FIT_ERROR = 0.1  # about the relative error of the gradient, by docs/loss.md

# exp(−1/τ) must be a normal fp32 number (exp(−80) ≈ 2e−35); otherwise a sum of such
# numbers could underflow to 0.
MIN_TAU = 1.0 / 80.0


def bad_fit(error: float) -> str | None:
    """Return a warning if the error of the moments' slopes is large."""
    if error <= LARGE_FIT_ERROR:
        return None
    return (
        "the moments estimator fits some tokens badly: the error of its gradient may "
        f'be {error:.0%}. Use estimator "exact", or larger tau and clamp (a smaller t '
        "of uniformity)"
    )


def check_tau(tau: float) -> None:
    if not (math.isfinite(tau) and tau >= MIN_TAU):
        raise ValueError(
            f"tau is {tau}, expected a number ≥ {MIN_TAU}: "
            "exp(-1/tau) must be representable in float32"
        )


@dataclass(frozen=True)
class Variant(ABC):
    """A variant is a frozen dataclass, whose fields are its options."""

    name: ClassVar[str]  # in ``VARIANTS``
    estimators: ClassVar[tuple[str, ...]] = ("exact", "sampled")  # which it supports
    bf16_products: ClassVar[bool] = True  # under AMP
    linear_in_tokens: ClassVar[bool] = False  # the time of the exact form
    of_pairs: ClassVar[bool] = False  # so that it can take those within segments alone

    @abstractmethod
    def exact(self, layers: Layers) -> Tensor:
        """Return the loss over all pairs of the tokens, [L, B]."""

    def moments(self, layers: Layers, fit_errors: list[Tensor] | None) -> Tensor:
        """Return the loss by moments, [L, B].

        ``fit_errors`` receives the relative error [B] of every layer's fitted slopes.
        Without it, the host waits for the errors, and a large one is warned of.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class CosineVariant(Variant):
    """The loss is a function of S = Σ_{i≠j} w(c_ij), where c_ij is the cosine of two
    tokens' unit vectors.

    If w is itself a quadratic, b c + ½ d c², name (b, d): the exact form then takes
    time linear in N where F < N.
    """

    of_pairs: ClassVar[bool] = True
    quadratic: ClassVar[tuple[float, float] | None] = None

    def __init_subclass__(cls) -> None:
        cls.linear_in_tokens = cls.quadratic is not None

    @property
    @abstractmethod
    def pair(self) -> PairFunction:
        """Return w and r = dw/dc.

        Equal options give the same object, so that its compiled code is reused.
        """

    @cached_property
    # Also of a variant whose ``pair`` is another object every time
    def _pair(self) -> PairFunction:
        return self.pair

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes but ``_pair``: local functions cannot be pickled."""
        return {name: value for name, value in vars(self).items() if name != "_pair"}

    def units(self, z: Tensor) -> Units:
        """Return z [B, n, F] with the scales that make unit vectors of its tokens. By
        default, u = z / (‖z‖ + UNIT_EPS).
        """
        return Normalized(z, UNIT_EPS)

    def normalize(self, sums: Tensor, pairs: Count) -> Tensor:
        """Return the loss [L, B], given S [L, B] and the number of pairs i ≠ j, per
        sequence or [L, B]. By default, it is the mean of w over the pairs.
        """
        return sums / pairs

    def exact(self, layers: Layers) -> Tensor:
        is_linear = self.quadratic is not None and max(layers.features) < layers.length
        if is_linear and not layers.segmented:  # moments do not tell segments apart
            return self.of_quadratic(layers, self._same_for_all)

        def of_rank(z: Tensor, mask: TokenMask | None) -> Result:
            units = self.units(z)
            s, w = pair_sums(
                units,
                to_units=self.units,
                gathering=layers.gather(z),
                mask=mask,
                pair=self._pair,
            )
            return s, units.gradient(w)

        sums = layers.sum_over_group(layers.each(of_rank))
        return self.normalize(sums, layers.pairs())

    def moments(self, layers: Layers, fit_errors: list[Tensor] | None) -> Tensor:
        squares: list[Tensor] = []  # of the errors and of the slopes, [B, 2] each

        def fitted(tokens: UnitTokens) -> Quadratic:
            sampled = sample(tokens.z, layers.length, tokens.mask, layers.group)
            vectors = self.units(sampled.z).vectors()
            quadratic, squares_of_layer = fit(tokens, sampled, vectors, self._pair)
            squares.append(squares_of_layer)
            return quadratic

        losses = self.of_quadratic(layers, fitted)
        of_errors, of_slopes = layers.sum_over_group(torch.cat(squares)).unbind(-1)
        tiny = torch.finfo(of_slopes.dtype).tiny
        relative = (of_errors / of_slopes.clamp_min(tiny)).sqrt().view_as(losses)
        if fit_errors is not None:
            fit_errors.extend(relative)
        elif warning := bad_fit(relative.max().item()):
            warnings.warn(warning, stacklevel=4)
        return losses

    def _same_for_all(self, tokens: UnitTokens) -> Quadratic:
        """Return the ``quadratic`` of the class, for all tokens."""
        assert self.quadratic is not None
        # These are filled on the device. With torch.tensor, the host would wait for the
        # copy.
        parts = (
            tokens.u.new_full((len(tokens.u), 1, 1), value)
            for value in (0.0, *self.quadratic)
        )
        return Quadratic(*parts)

    def of_quadratic(
        self, layers: Layers, quadratic: Callable[[UnitTokens], Quadratic]
    ) -> Tensor:
        """Return the loss [L, B] in time linear in the tokens, as if w were a quadratic
        function of c, which ``quadratic`` returns for each token.
        """

        def of_rank(z: Tensor, mask: TokenMask | None) -> Result:
            units = self.units(z)
            tokens = UnitTokens(z=z, mask=mask, scale=units.scale, u=units.vectors())
            s, w = quadratic_sum_(
                tokens, quadratic(tokens), layers.tokens(mask), group=layers.group
            )
            return s, units.gradient(w)

        sums = layers.sum_over_group(layers.each(of_rank))
        return self.normalize(sums, layers.pairs())


@dataclass(frozen=True)
class MomentsVariant(Variant):
    """The loss is a function of s = Σ u_i [B, F] and M = Σ u_i u_iᵀ [B, F, F] in plain
    autograd code, with n tokens.

    Its time is linear in the tokens. It holds F² numbers per sequence. Of the tokens, a
    rank needs only its own:

        ∂L/∂u_i = ∂L/∂s + (∂L/∂M + (∂L/∂M)ᵀ) u_i
    """

    linear_in_tokens: ClassVar[bool] = True
    # Whether to take tokens relative to their mean: of a loss that this does not
    # change, it keeps the digits.
    centred: ClassVar[bool] = False

    @abstractmethod
    def loss(self, s: Tensor, m: Tensor, tokens: Tensor) -> Tensor:
        """Return the loss [B], given s, M and n [B]."""

    def units(self, z: Tensor) -> Units:
        """Return the vectors u of z [B, n, F]: ``Raw``, z itself, or ``Normalized``."""
        return Raw(z)

    def exact(self, layers: Layers) -> Tensor:
        def of_rank(z: Tensor, mask: TokenMask | None) -> Result:
            units = self.units(z)
            u = units.vectors()
            count = layers.tokens(mask)
            if isinstance(count, Tensor):
                tokens = count.to(u.dtype)
            else:
                tokens = u.new_full((len(u),), count)
            if self.centred:
                (total,) = over_group([u.sum(1, keepdim=True)], layers.group)
                u.sub_(total / tokens[:, None, None])
                if mask is not None:
                    u.masked_fill_(~mask.own, 0.0)
            x = u.to(operand_dtype(z))
            s, m = over_group([x.sum(1, dtype=u.dtype), gram(x)], layers.group)
            value, (of_s, of_m) = _differentiated(
                self, lambda: self.loss(s, m, tokens), s, m
            )
            grad = product(x, (of_m + of_m.transpose(1, 2)).to(x.dtype))
            of_u = grad.add_(of_s[:, None])
            return value, units.gradient(of_u.mul_(units.scale))

        # every rank has the moments of all tokens, and so the whole loss
        return layers.each(of_rank)


@dataclass(frozen=True)
class Context:
    """What a loss may need to know besides the tokens.

    (Labels and segments of the tokens would be further fields.)
    """

    step: int  # completed training steps
    layer: int  # the index of the layer among those that are dispersed
    # ranks that compute this loss together, each for the gradient of its own tokens
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class AutogradVariant(Variant):
    """The loss is plain autograd code over all tokens of a sequence.

    It is slower: products are in float32, and every rank of a sharded sequence computes
    the whole loss.
    """

    bf16_products: ClassVar[bool] = False

    @abstractmethod
    def loss(self, z: Tensor, valid: Tensor, context: Context) -> Tensor:
        """Return the loss [B] of z [B, N, F] in float32 (or float64), where valid [B,
        N] bool says which are tokens.

        z is 0 where there is no token. The loss of a sequence with fewer than two
        tokens is ignored. The tokens of other ranks are constants. The shards are
        joined in the order of the ranks: under context parallelism, this is not the
        order of the tokens in the sequence.
        """

    def exact(self, layers: Layers) -> Tensor:
        def of_layer(layer: int) -> Compute:
            context = Context(layers.step, layers.first + layer, layers.group)

            def of_rank(z: Tensor, mask: TokenMask | None) -> Result:
                leaf = z.detach().to(accumulation_dtype(z.dtype))
                shards = [leaf]  # of all ranks, in their order
                if (gathering := layers.gather(z)) is not None:
                    shards = [x.to(leaf.dtype) for x in gathering.of_ranks()]
                    shards[gathering.rank] = leaf

                def loss() -> Tensor:
                    x = torch.cat(shards, dim=1)
                    if mask is None:
                        valid = x.new_ones(x.shape[:2], dtype=torch.bool)
                    else:
                        valid = mask.whole
                    return self.loss(x, valid, context)

                value, (grad,) = _differentiated(self, loss, leaf)
                return value, Gradient(grad)

            return of_rank

        return layers.each(*map(of_layer, range(len(layers.features))))


def _differentiated(
    variant: Variant, loss: Callable[[], Tensor], *leaves: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a loss [B] that autograd code computes of leaves [B, …], and its
    derivatives with respect to these.
    """
    batch = len(leaves[0])
    with torch.enable_grad():
        for leaf in leaves:
            leaf.requires_grad_()
        value = loss()
        is_tensor = isinstance(value, Tensor)
        if not (is_tensor and value.shape == (batch,) and value.requires_grad):
            result = f"shape {tuple(value.shape)}" if is_tensor else repr(value)
            raise ValueError(
                f"{type(variant).__name__}.loss returned {result}, "
                f"expected shape ({batch},), one number per sequence, "
                "that autograd has computed from the tokens"
            )
        grads = torch.autograd.grad(
            value.sum(), leaves, allow_unused=True, materialize_grads=True
        )
    # The gradients are overwritten, and may be expanded.
    return value.detach(), tuple(grad.contiguous() for grad in grads)


def scatter(s: Tensor, m: Tensor, tokens: Tensor) -> Tensor:
    """Return Σ (u_i − ū)(u_i − ū)ᵀ [B, F, F], given the arguments of
    ``MomentsVariant.loss``.
    """
    return m - s[:, :, None] * s[:, None] / tokens[:, None, None]


def off_diagonal(x: Tensor) -> Tensor:
    """Return x [B, F, F] with 0 in the diagonals."""
    return x - torch.diag_embed(x.diagonal(dim1=1, dim2=2))


def log_of_mean(mean: Tensor, least: float) -> Tensor:
    """Return log(mean) of w ≥ ``least``.

    If the quadratics of moments give much less than is possible, the loss shows it:
    it is NaN. Without any pair, it is NaN as well, and filled in later.
    """
    return torch.log(mean.where(mean >= least / 2, torch.nan))
