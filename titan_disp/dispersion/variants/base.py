"""The base classes of all variants of the loss.

A loss is a function of the cosines of pairs (``CosineVariant``), a function of the
tokens' second moments (``MomentsVariant``), or plain autograd code over all tokens
(``AutogradVariant``). docs/losses.md shows how to write a variant.
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

# docs/loss.md: the error of the slopes is about the relative error of the gradient.
LARGE_FIT_ERROR = 0.1

# exp(−1/τ) must be a normal fp32 number (exp(−80) ≈ 2e−35). Otherwise, a sum of such
# numbers could underflow to 0.
MIN_TAU = 1.0 / 80.0


def bad_fit(error: float) -> str | None:
    """Return a warning if the moments estimator fits slopes with a large relative error;
    None otherwise.
    """
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
    """A loss. Subclasses are frozen dataclasses, whose fields are the options."""

    name: ClassVar[str]  # in ``VARIANTS``
    estimators: ClassVar[tuple[str, ...]] = ("exact", "sampled")  # the supported ones
    bf16_products: ClassVar[bool] = True  # whether AMP may round the tokens to bf16
    linear_in_tokens: ClassVar[bool] = False  # whether the time of ``exact`` is linear
    of_pairs: ClassVar[bool] = False  # whether it can take only pairs within segments

    @abstractmethod
    def exact(self, layers: Layers) -> Tensor:
        """Return the loss over all pairs of the tokens, [L, B]."""

    def moments(self, layers: Layers, fit_errors: list[Tensor] | None) -> Tensor:
        """Return the loss [L, B] with the moments estimator.

        The relative error [B] of each layer's fitted slopes is appended to
        ``fit_errors``. Without the list, the host waits for the errors, and warns if one
        is large.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class CosineVariant(Variant):
    """The loss is a function of S = Σ_{i≠j} w(c_ij), where c_ij is the cosine of two
    tokens' unit vectors.
    """

    of_pairs: ClassVar[bool] = True
    # If w is the quadratic b c + ½ d c², set this to (b, d). Where F < N, the exact form
    # then takes time linear in N.
    quadratic: ClassVar[tuple[float, float] | None] = None

    def __init_subclass__(cls) -> None:
        cls.linear_in_tokens = cls.quadratic is not None

    @property
    @abstractmethod
    def pair(self) -> PairFunction:
        """The pair function, which returns w and r = dw/dc.

        For equal options, it should be the same object, so that compiled code is
        reused.
        """

    @cached_property
    # One object per variant, even if ``pair`` returns a new object every time
    def _pair(self) -> PairFunction:
        return self.pair

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes but ``_pair``, as local functions cannot be pickled."""
        return {name: value for name, value in vars(self).items() if name != "_pair"}

    def units(self, z: Tensor) -> Units:
        """Return the unit vectors of z [B, n, F], by default u = z / (‖z‖ + UNIT_EPS)."""
        return Normalized(z, UNIT_EPS)

    def normalize(self, sums: Tensor, pairs: Count) -> Tensor:
        """Return the loss [L, B], by default the mean of w over the pairs i ≠ j.

        ``sums`` is S [L, B]. ``pairs`` is the number of pairs: an int, [B] or [L, B].
        """
        return sums / pairs

    def exact(self, layers: Layers) -> Tensor:
        is_linear = self.quadratic is not None and max(layers.features) < layers.length
        if is_linear and not layers.segmented:  # moments mix the segments
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
        """Return the ``quadratic`` of the class, the same for all tokens."""
        assert self.quadratic is not None
        # new_full fills these on the device. With torch.tensor, the host would wait for
        # a copy.
        parts = (
            tokens.u.new_full((len(tokens.u), 1, 1), value)
            for value in (0.0, *self.quadratic)
        )
        return Quadratic(*parts)

    def of_quadratic(
        self, layers: Layers, quadratic: Callable[[UnitTokens], Quadratic]
    ) -> Tensor:
        """Return the loss [L, B] in time linear in the tokens.

        w is replaced by the quadratic functions of c that ``quadratic`` returns for each
        token.
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
    """The loss is plain autograd code, and a function of s = Σ u_i [B, F], M = Σ u_i u_iᵀ
    [B, F, F] and the number of tokens.

    The loss takes time linear in the tokens, and memory for F² numbers per sequence. A
    rank needs only its own tokens:

        ∂L/∂u_i = ∂L/∂s + (∂L/∂M + (∂L/∂M)ᵀ) u_i
    """

    linear_in_tokens: ClassVar[bool] = True
    # Whether the mean of the tokens is subtracted first, which avoids rounding errors.
    # Only for losses that do not depend on this mean.
    centred: ClassVar[bool] = False

    @abstractmethod
    def loss(self, s: Tensor, m: Tensor, tokens: Tensor) -> Tensor:
        """Return the loss [B], given s, M and the number of tokens [B]."""

    def units(self, z: Tensor) -> Units:
        """Return the vectors u of z [B, n, F], by default z itself (``Raw``)."""
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

        # Every rank has the moments of all tokens, and therefore the whole loss.
        return layers.each(of_rank)


@dataclass(frozen=True)
class Context:
    """The arguments of a loss besides the tokens.

    (Labels and segments of the tokens would be further fields.)
    """

    step: int  # number of completed training steps
    layer: int  # index of the layer among the layers of the loss
    # The ranks over which the sequence is sharded. Each computes the whole loss, and the
    # gradient of its own tokens.
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class AutogradVariant(Variant):
    """The loss is plain autograd code over all tokens of a sequence.

    Such a loss is slower than the other types, because products are in float32, and
    every rank of a sharded sequence computes the whole loss.
    """

    bf16_products: ClassVar[bool] = False

    @abstractmethod
    def loss(self, z: Tensor, valid: Tensor, context: Context) -> Tensor:
        """Return the loss [B].

        Args:
            z: [B, N, F] in float32 (or float64), 0 at padding. Tokens of other ranks are
                constants. The shards are concatenated in the order of the ranks, which
                is not the order of the sequence under context parallelism.
            valid: bool [B, N], True at tokens. The loss of a sequence with fewer than
                two tokens is ignored.
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
    """Return the value [B] of ``loss()``, and its derivatives with respect to the leaves
    [B, …].
    """
    batch = len(leaves[0])
    with torch.enable_grad():
        for leaf in leaves:
            leaf.requires_grad_()
        value = loss()
        is_tensor = isinstance(value, Tensor)
        if not (is_tensor and value.shape == (batch,) and value.requires_grad):
            result = repr(value)
            if is_tensor:
                result = f"shape {tuple(value.shape)}"
                result += "" if value.requires_grad else " without a gradient"
            raise ValueError(
                f"{type(variant).__name__}.loss returned {result}, "
                f"expected shape ({batch},), one number per sequence, "
                "that autograd has computed from the tokens"
            )
        grads = torch.autograd.grad(
            value.sum(), leaves, allow_unused=True, materialize_grads=True
        )
    # Contiguous, because the caller overwrites the gradients, which may be expanded.
    return value.detach(), tuple(grad.contiguous() for grad in grads)


def scatter(s: Tensor, m: Tensor, tokens: Tensor) -> Tensor:
    """Return Σ (u_i − ū)(u_i − ū)ᵀ [B, F, F], given the arguments of
    ``MomentsVariant.loss``.
    """
    return m - s[:, :, None] * s[:, None] / tokens[:, None, None]


def off_diagonal(x: Tensor) -> Tensor:
    """Return x [B, F, F] with zeros on the diagonals."""
    return x - torch.diag_embed(x.diagonal(dim1=1, dim2=2))


def log_of_mean(mean: Tensor, least: float) -> Tensor:
    """Return log(mean), where ``mean`` is a mean of w, and w is at least ``least``.

    The moments estimator may return a mean far below ``least``. The result is then NaN,
    so that the error is noticed. Without pairs, the result is also NaN, and is replaced
    later.
    """
    return torch.log(mean.where(mean >= least / 2, torch.nan))
