"""The loss combines a variant with an estimator, for any sharding of the sequence."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.autograd import Group, process_group
from titan_disp.dispersion.kernels import bf16_autocast
from titan_disp.dispersion.layers import Layers, WholeLayers
from titan_disp.dispersion.masks import TokenMask, token_mask
from titan_disp.dispersion.registry import build, options_of
from titan_disp.dispersion.sampled import SampledLayers, SampledTokens, order
from titan_disp.dispersion.variants import VARIANTS, Variant
from titan_disp.dispersion.variants.base import Cost, cost_of_moments
from titan_disp.errors import did_you_mean

P = ParamSpec("P")
ESTIMATORS = ("exact", "moments", "sampled")
# Attributes of DispersionLoss that are options of variants.
OF_VARIANTS = ("tau", "clamp", "norm_eps", "norm_coeff", "include_diagonal")


@dataclass(frozen=True)
class DispersionLoss:
    """Compute the dispersion loss.

    An option that the variant or the estimator does not use must keep its default.

    Attributes:
        variant: a name in ``VARIANTS``, "package.module:Class", or an object of such a
            class, which has its own options. docs/losses.md has the formulas, and the
            options that each variant uses.
        estimator: exact (all pairs); moments (all pairs, in time linear in N; if the
            variant's w is smooth); sampled (the pairs of ``max_tokens`` positions).
        tau: τ, the temperature.
        clamp: κ. Cosines are clamped to [−1+κ, 1−κ].
        norm_eps: ε, added to the norms. Its default, the authors', is large: a short
            token, whose norm is not far above ε, has smaller cosines than the formula
            without ε gives.
        norm_coeff: λ_norm of l2_repel, which keeps distances from growing without
            bound.
        include_diagonal: l2_repel takes the pair of each token with itself into the
            mean, as in the authors' code.
        max_tokens: positions per sequence of the sampled estimator.
        seed: of these positions. The other estimators draw nothing.
        options: the options of the variant that are not attributes of this class, by
            name.

    Raises:
        ValueError: an option is unknown, out of range or unused, or the variant does
            not support the estimator.
    """

    variant: str | Variant = "angular"
    estimator: str = "exact"
    tau: float = 1.0
    clamp: float = 0.25
    norm_eps: float = 1e-2
    norm_coeff: float = 0.1
    include_diagonal: bool = True
    max_tokens: int = 256
    seed: int = 0
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise ValueError(
                f"estimator is {self.estimator!r}, expected one of {', '.join(ESTIMATORS)}"
            )
        for option in fields(self):
            if isinstance(getattr(self, option.name), Tensor):
                raise ValueError(
                    f"{option.name} is a tensor, expected a number: options get no gradient"
                )
        variant = self._variant
        if self.estimator not in variant.estimators:
            linear = " (the time of its exact form grows only linearly with the tokens beyond the number of features)"
            known = ", ".join(variant.estimators) + (
                linear if variant.linear_in_tokens else ""
            )
            raise ValueError(
                f"estimator is {self.estimator!r}, which variant {self.variant!r} does not support: "
                f"expected one of {known}"
            )
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}, expected at least 2")
        self._refuse_unused_options()

    def _refuse_unused_options(self) -> None:
        used = (
            [] if isinstance(self.variant, Variant) else options_of(type(self._variant))
        )
        for option in fields(self):
            value = getattr(self, option.name)
            if value == option.default:
                continue
            if option.name == "max_tokens" and self.estimator != "sampled":
                not_using = f"estimator {self.estimator!r}"
                using = "sampled"
            elif option.name in OF_VARIANTS and option.name not in used:
                variants = [
                    name
                    for name, kind in VARIANTS.items()
                    if option.name in options_of(kind)
                ]
                not_using = f"variant {self.variant!r}"
                using = ", ".join(variants)
            else:
                continue
            raise ValueError(
                f"{option.name} is {value}, but {not_using} does not use it: leave it at {option.default} "
                f"(it is an option of {using})"
            )

    @property
    def name(self) -> str:
        """The name of the variant, without its module."""
        return (
            self.variant.rpartition(":")[2]
            if isinstance(self.variant, str)
            else type(self.variant).__name__
        )

    @cached_property
    def _variant(self) -> Variant:
        if isinstance(self.variant, str):
            defaults = {option.name: option.default for option in fields(self)}
            keys = {name: (getattr(self, name), defaults[name]) for name in OF_VARIANTS}
            return build(self.variant, keys, self.options or {})
        if not isinstance(self.variant, Variant):
            raise ValueError(
                f"variant is {self.variant!r}, expected a name, or an object such as MyLoss(margin=0.5)"
            )
        if self.options:
            raise ValueError(
                f"options are {self.options}, but the variant is an object, which has its own: leave them out"
            )
        return self.variant

    @property
    def saved_tokens(self) -> int | None:
        """At how many positions of a sequence its gradient is not 0; None: at all of
        them.
        """
        return self.max_tokens if self.estimator == "sampled" else None

    def cost(
        self, tokens: int, features: int, shards: int, segmented: bool = False
    ) -> Cost:
        """Return what the loss costs for one layer of a sequence over this number of
        shards (ranks).

        If it is ``segmented``, all pairs count, although those of tiles without a
        common segment are left out.
        """
        if self.estimator == "sampled" and self.max_tokens < tokens:
            of_rank = self._variant.cost(self.max_tokens, features, shards=1)
            # every rank takes all sampled tokens
            return Cost(
                flops=of_rank.flops * shards,
                gathered=0.0,
                reduced=self.max_tokens * features,
            )
        if self.estimator == "moments":
            return cost_of_moments(tokens, features)
        return self._variant.cost(tokens, features, shards, segmented)

    def __call__(
        self,
        zs: Iterable[Tensor],
        group: Group = None,
        step: int = 0,
        fit_errors: list[Tensor] | None = None,
        valid: Tensor | None = None,
        segments: Tensor | TokenMask | None = None,
        first: int = 0,
    ) -> Tensor:
        """Return the loss per layer and sequence.

        Args:
            zs: one [B, N, F] tensor per layer, or this rank's [B, N/p, F] shards if
                ``group`` is given. The shards of all ranks must always have equal
                shapes, which are compared when they are new to a rank. Layers may
                differ in dtype, and in F except with the sampled estimator. The exact
                loss does not depend on which tokens a rank holds or on their order.
            group: process group or 1-D mesh over which the sequence is sharded.
            step: training step, from which the sampled estimator draws its positions.
                If it does not change, neither do they.
            fit_errors: list that receives, per layer, the relative error [B] of the
                slopes that the moments estimator fitted, each for a pair of tokens that
                its own fit leaves out, and weighted by the pair's contribution to the
                gradient. Without the list, the call waits for the errors and warns of
                one above 10 %.
            valid: bool [B, N], or this rank's [B, N/p]: True at tokens, False at
                padding, which may hold anything. The loss of each sequence is computed
                without its padding; it is 0 for fewer than two tokens.
            segments: int [B, N], or this rank's [B, N/p], in place of ``valid``: the
                number of each token's document in its sequence, or −1 at padding. The
                loss then takes the pairs *within* documents only; it is 0 without any.
                Losses of cosines and l2_repel can do this, exact and sampled. The host
                waits for the numbers.
            first: the index of the first of ``zs``, if they are some of all layers.

        Returns:
            [len(zs), B] in float32 (float64 for float64 input), the same full value on
                every rank of ``group``. Each
            rank's own shard receives its complete gradient.

        Raises:
            ValueError: a wrong shape or dtype, fewer than 2 positions per sequence
                without ``valid`` or ``segments``, or segments that the loss cannot
                take.

        Source: arXiv 2602.00217, Table 1; ``variants`` and ``moments`` have the
        formulas.
        """
        pg = process_group(group)
        variant = self._variant
        if isinstance(zs, Tensor):
            raise ValueError(
                f"zs is a tensor of shape {tuple(zs.shape)}, expected one tensor per layer in a list: for a single "
                "layer, call dispersion_loss"
            )
        zs = list(zs)
        length = _check(
            zs,
            1 if pg is None else dist.get_world_size(pg),
            least=2 if valid is None and segments is None else 1,
        )
        sampled = self.estimator == "sampled" and self.max_tokens < length
        if sampled and len(set(features := [z.shape[2] for z in zs])) > 1:
            raise ValueError(
                f"layers differ in features: {features}, which the sampled estimator does not support"
            )
        mask = None
        if pg is not None:
            _check_shards(tuple(tuple(z.shape) for z in zs), pg)
        if isinstance(segments, TokenMask):
            mask = segments
        elif segments is not None:
            self._check_segments(segments, valid, zs[0])
            mask = token_mask(segments, pg)
        elif valid is not None:
            _check_valid(valid, zs[0])
            mask = token_mask(valid, pg)
        device = zs[0].device.type
        # The loss chooses its dtypes itself: AMP would round cosines to bf16 and lose
        # the digits near the clamp.
        in_bf16 = bf16_autocast(device) and variant.bf16_products
        with torch.autocast(device, enabled=False):
            layers: Layers
            if sampled:
                orders = [
                    order(length, self.seed, step, first + layer)
                    for layer in range(len(zs))
                ]
                drawn = zs, orders, self.max_tokens, pg, in_bf16
                layers = (
                    SampledLayers(*drawn)
                    if mask is None
                    else SampledTokens(*drawn, mask)
                )
            else:
                layers = WholeLayers(zs, length, mask, pg, in_bf16)
            layers.step = step
            layers.first = first
            losses = (
                variant.moments(layers, fit_errors)
                if self.estimator == "moments"
                else variant.exact(layers)
            )
            return (
                losses
                if mask is None
                else losses.masked_fill(layers.without_pairs(), 0.0)
            )

    def _check_segments(
        self, segments: Tensor, valid: Tensor | None, z: Tensor
    ) -> None:
        if valid is not None:
            raise ValueError(
                "segments and valid are both given: leave valid out, and write −1 in segments at padding"
            )
        if (
            segments.dtype not in (torch.int32, torch.int64)
            or segments.shape != z.shape[:2]
        ):
            raise ValueError(
                f"segments has shape {tuple(segments.shape)} and dtype {segments.dtype}, expected int32 or int64 "
                f"{tuple(z.shape[:2])}, the number of each token's document, or -1 at padding"
            )
        self.check_within_segments()

    def check_within_segments(self) -> None:
        """Raise ValueError if the loss cannot take the pairs within segments only."""
        if self.estimator == "moments":
            raise ValueError(
                "estimator is 'moments', which cannot keep to the pairs within documents, as each of these would have an "
                "F×F matrix of its own: use exact, which leaves out tiles without pairs, or sampled"
            )
        if not self._variant.of_pairs:
            pairs = ", ".join(name for name, kind in VARIANTS.items() if kind.of_pairs)
            raise ValueError(
                f"variant is {self.variant!r}, which is no loss of pairs, so that it cannot keep to those within documents: "
                f"expected one of {pairs}"
            )


def _check(zs: Sequence[Tensor], world: int, least: int) -> int:
    """Return the number of positions of a whole sequence, which is at least
    ``least``.
    """
    if not zs:
        raise ValueError("no layers given, expected at least one [B, N, F] tensor")
    for layer, z in enumerate(zs):
        if not isinstance(z, Tensor):
            raise ValueError(
                f"layer {layer} is {z!r}, expected a float tensor [B, N, F]"
            )
        if z.ndim != 3 or not z.is_floating_point():
            raise ValueError(
                f"z has shape {tuple(z.shape)} and dtype {z.dtype}, expected a float tensor [B, N, F]"
            )
        if not z.shape[2]:
            raise ValueError(
                f"z of shape {tuple(z.shape)} has no features, expected a float tensor [B, N, F]"
            )
    first = tuple(zs[0].shape)
    if differing := [tuple(z.shape) for z in zs if z.shape[:2] != first[:2]]:
        raise ValueError(
            f"layers differ in sequences or tokens per sequence: {first}, {differing[0]}"
        )
    tokens = first[1] * world
    if tokens < least:
        raise ValueError(
            f"a sequence has {tokens} token(s), expected at least {least}: dispersion is over pairs"
        )
    return tokens


# shapes of shards that were equal in a group
_compared: set[tuple[str, tuple[tuple[int, ...], ...]]] = set()


def _check_shards(
    shapes: tuple[tuple[int, ...], ...], group: dist.ProcessGroup
) -> None:
    """Raise ValueError on every rank if shards differ.

    Shapes are compared when the ranks first meet them.
    """
    if (group.group_name, shapes) in _compared or dist.get_backend(group) == "fake":
        return
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, shapes, group=group)
    if len(set(every)) > 1:
        text = "; ".join(
            f"rank {rank}: {[list(shape) for shape in found]}"
            for rank, found in enumerate(every)
        )
        raise ValueError(
            f"the shards of a sequence differ in shape ({text}), expected equal ones: pad them, and pass valid"
        )
    _compared.add((group.group_name, shapes))


def _check_valid(valid: Tensor, z: Tensor) -> None:
    if valid.dtype != torch.bool or valid.shape != z.shape[:2]:
        raise ValueError(
            f"valid has shape {tuple(valid.shape)} and dtype {valid.dtype}, expected bool {tuple(z.shape[:2])}, True "
            "at tokens: convert an attention mask of 0 and 1 with .bool()"
        )


def _with_options(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Show the options by name in the signature of a function, for help() and
    completion.
    """
    signature = inspect.signature(function)
    given = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    named = [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type
        )
        for f in fields(DispersionLoss)
    ]
    function.__signature__ = signature.replace(parameters=[*given, *named])  # type: ignore[attr-defined]
    return function


@_with_options
def dispersion_losses(
    zs: Iterable[Tensor],
    *,
    group: Group = None,
    step: int = 0,
    valid: Tensor | None = None,
    segments: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Return the loss per layer and sequence, [len(zs), B].

    ``options`` are the attributes of ``DispersionLoss``; its ``__call__`` documents the
    arguments.
    """
    names = [option.name for option in fields(DispersionLoss)]
    for unknown in options.keys() - set(names):
        hint = (
            ": pass valid=[B, N], True at tokens"
            if "mask" in unknown
            else did_you_mean(unknown, names)
        )
        raise TypeError(f"unknown option {unknown!r}{hint}")
    return DispersionLoss(**options)(zs, group, step, valid=valid, segments=segments)


@_with_options
def dispersion_loss(
    z: Tensor,
    *,
    group: Group = None,
    step: int = 0,
    valid: Tensor | None = None,
    segments: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Return the loss of one layer, [B]: ``dispersion_losses([z], …)[0]``, which
    documents the arguments.
    """
    return dispersion_losses(
        [z], group=group, step=step, valid=valid, segments=segments, **options
    )[0]
