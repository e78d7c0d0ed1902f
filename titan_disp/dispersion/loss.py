"""The dispersion loss: a variant and an estimator, for any sharding of the sequence."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.autograd import (
    Group,
    objects_of_ranks,
    process_group,
    size_of,
)
from titan_disp.dispersion.kernels import accumulation_dtype, bf16_autocast
from titan_disp.dispersion.layers import (
    Layers,
    SampledLayers,
    WholeLayers,
    order,
)
from titan_disp.dispersion.masks import TokenMask, token_mask
from titan_disp.dispersion.variants import (
    VARIANTS,
    Variant,
    build_variant,
    options_of,
    users_of,
)
from titan_disp.errors import did_you_mean

Function = TypeVar("Function", bound=Callable[..., Tensor])
ESTIMATORS = ("exact", "moments", "sampled")


@dataclass(frozen=True)
class DispersionLoss:
    """The dispersion loss with its options. Call the object to compute the loss.

    An option that the variant or the estimator does not use must keep its default.

    Attributes:
        variant: a name in ``VARIANTS``, "package.module:Class", or an object of such a
            class, which has its own options. docs/losses.md has the formulas and the
            options of each variant.
        estimator: exact (all pairs); moments (approximates all pairs in time linear in
            N; only for variants with a smooth w); sampled (the pairs of ``max_tokens``
            positions).
        tau: τ, the temperature.
        clamp: κ. Cosines are clamped to [−1+κ, 1−κ].
        norm_eps: ε, added to the norms. The default is from the authors, and is large:
            if a token's norm is not far above ε, its cosines are noticeably smaller.
        norm_coeff: λ_norm of l2_repel, which keeps distances from growing without
            bound.
        include_diagonal: whether the mean of l2_repel includes the pair of each token
            with itself, as in the authors' code.
        max_tokens: positions per sequence of the sampled estimator.
        seed: the seed of these positions. The other estimators draw nothing.
        options: a dict of the variant's options that are not attributes of this class.

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
                f"estimator is {self.estimator!r}, "
                f"expected one of {', '.join(ESTIMATORS)}"
            )
        for option in fields(self):
            if isinstance(getattr(self, option.name), Tensor):
                raise ValueError(
                    f"{option.name} is a tensor, expected a number: "
                    "options get no gradient"
                )
        variant = self._variant
        if self.estimator not in variant.estimators:
            supported = ", ".join(variant.estimators)
            if variant.linear_in_tokens:
                supported += (
                    " (the time of its exact form grows only linearly with the tokens "
                    "beyond the number of features)"
                )
            raise ValueError(
                f"estimator is {self.estimator!r}, which variant {self.variant!r} "
                f"does not support: expected one of {supported}"
            )
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}, expected at least 2")
        self._refuse_unused_options()

    def _refuse_unused_options(self) -> None:
        used: list[str] = []
        if isinstance(self.variant, str):  # an object has its own options only
            used = options_of(type(self._variant))
        for key in self._keys():
            if key not in used:
                users = ", ".join(users_of(key))
                self._refuse_unused(key, f"variant {self.variant!r}", users)
        if self.estimator != "sampled":
            self._refuse_unused(
                "max_tokens", f"estimator {self.estimator!r}", "sampled"
            )

    def _refuse_unused(self, key: str, not_using: str, using: str) -> None:
        """Raise ValueError if the attribute ``key`` does not have its default.

        ``not_using`` is the variant or estimator that does not use the attribute, and
        ``using`` names those that do.
        """
        value = getattr(self, key)
        default = getattr(DispersionLoss, key)
        if value != default:
            raise ValueError(
                f"{key} is {value}, but {not_using} does not use it: "
                f"leave it at {default} (it is an option of {using})"
            )

    @classmethod
    def _keys(cls) -> list[str]:
        """Return the names of the attributes that are options of variants."""
        return [option.name for option in fields(cls) if users_of(option.name)]

    @property
    def name(self) -> str:
        """The name of the variant, without its module."""
        if isinstance(self.variant, str):
            return self.variant.rpartition(":")[2]
        return type(self.variant).__name__

    @cached_property
    def _variant(self) -> Variant:
        if isinstance(self.variant, str):
            return build_variant(
                self.variant,
                keys={key: getattr(self, key) for key in self._keys()},
                defaults={key: getattr(DispersionLoss, key) for key in self._keys()},
                options=self.options or {},
            )
        if not isinstance(self.variant, Variant):
            raise ValueError(
                f"variant is {self.variant!r}, expected a name, "
                "or an object such as MyLoss(margin=0.5)"
            )
        if self.options:
            raise ValueError(
                f"options are {self.options}, but the variant is an object, "
                "which has its own: leave them out"
            )
        return self.variant

    @property
    def saved_tokens(self) -> int | None:
        """The number of positions per sequence with a gradient; None if all have one."""
        return self.max_tokens if self.estimator == "sampled" else None

    def __call__(
        self,
        zs: Iterable[Tensor],
        group: Group = None,
        step: int = 0,
        fit_errors: list[Tensor] | None = None,
        valid: Tensor | None = None,
        segments: Tensor | TokenMask | None = None,
        first: int = 0,
        arriving: list[Tensor] | None = None,
        in_hooks: bool = False,
    ) -> Tensor:
        """Return the loss per layer and sequence.

        Args:
            zs: one [B, N, F] tensor per layer, or this rank's [B, N/p, F] shards if
                ``group`` is given. The shards must have equal shapes on all ranks in
                every call. The ranks compare shapes only in the first call with these
                shapes. Layers may differ in dtype and, except with the sampled
                estimator, in F. The exact loss does not depend on the order of the
                tokens, nor on which rank has which tokens.
            group: process group or 1-D mesh over which the sequence is sharded.
            step: training step, which determines the positions of the sampled
                estimator. The same step gives the same positions.
            fit_errors: list to which the moments estimator appends one error [B] per
                layer: the relative leave-one-out error of the fitted slopes, in which
                pairs are weighted by their contribution to the gradient. Without the
                list, the host waits for the errors and warns if one is above 10 %.
            valid: bool [B, N], or this rank's [B, N/p]: True at tokens, False at
                padding, where z may be anything. The loss ignores padding. The loss of
                a sequence with fewer than two tokens is 0.
            segments: int [B, N], or this rank's [B, N/p], instead of ``valid``: the
                index of each token's document in its sequence, or −1 at padding. The
                loss then takes only the pairs *within* documents, and is 0 if there are
                none. Losses of cosines and l2_repel support this with the exact and the
                sampled estimator. The host waits for these indices.
            first: the index of the first layer of ``zs`` among all layers of the loss.
            arriving: for ``compute_in_backward``: a list with one entry, the gradient
                that the only layer gets from the rest of the model. Backward may remove
                this gradient, and then returns the sum of it and the loss's gradient.
            in_hooks: whether the sampled estimator may add its gradient by hooks on
                ``zs``. Each of ``zs`` must then also get a gradient from the rest of
                the model.

        Returns:
            [len(zs), B] in float32 (float64 for float64 input), the same full value on
                every rank of ``group``. Each rank's own shard receives its complete
                gradient. If B is 0, the result is empty, and its mean is NaN.

        Raises:
            ValueError: a shape or dtype is wrong, a sequence has fewer than 2 positions
                (without ``valid`` and ``segments``), or the loss does not support
                segments.

        Source: arXiv 2602.00217, Table 1; ``variants`` and ``moments`` have the
        formulas.
        """
        pg = process_group(group)
        if isinstance(zs, Tensor):
            raise ValueError(
                f"zs is a tensor of shape {tuple(zs.shape)}, expected one tensor per "
                "layer in a list: for a single layer, call dispersion_loss"
            )
        zs = list(zs)
        all_are_tokens = valid is None and segments is None
        length = _length(zs, shards=size_of(pg), least=2 if all_are_tokens else 1)
        takes_sample = self.estimator == "sampled" and self.max_tokens < length
        features = [z.shape[2] for z in zs]
        if takes_sample and len(set(features)) > 1:
            raise ValueError(
                f"layers differ in features: {features}, "
                "which the sampled estimator does not support"
            )
        if pg is not None:
            _check_shards(tuple(tuple(z.shape) for z in zs), pg)
        mask = self._mask(valid, segments, zs[0], pg)
        if not len(zs[0]):  # without a sequence, no maximum is defined
            return torch.stack(
                [z.sum((1, 2), dtype=accumulation_dtype(z.dtype)) for z in zs]
            )
        device = zs[0].device.type
        # Autocast is off, because it would round cosines to bf16, which loses the
        # digits near the clamp.
        in_bf16 = bf16_autocast(device) and self._variant.bf16_products
        with torch.autocast(device, enabled=False):
            layers: Layers
            if takes_sample:
                orders = [
                    order(length, self.seed, step, first + layer)
                    for layer in range(len(zs))
                ]
                layers = SampledLayers(
                    zs,
                    orders,
                    count=self.max_tokens,
                    mask=mask,
                    group=pg,
                    in_bf16=in_bf16,
                )
            else:
                layers = WholeLayers(
                    zs, length=length, mask=mask, group=pg, in_bf16=in_bf16
                )
            layers.step = step
            layers.first = first
            layers.arriving = arriving
            layers.in_hooks = in_hooks
            if self.estimator == "moments":
                losses = self._variant.moments(layers, fit_errors)
            else:
                losses = self._variant.exact(layers)
            if mask is not None:
                losses = losses.masked_fill(layers.without_pairs(), 0.0)
            return losses

    def _mask(
        self,
        valid: Tensor | None,
        segments: Tensor | TokenMask | None,
        z: Tensor,
        group: dist.ProcessGroup | None,
    ) -> TokenMask | None:
        """Return the mask of the whole sequences; None if all positions are tokens."""
        if isinstance(segments, TokenMask):
            return segments
        if segments is not None:
            self._check_segments(segments, valid, z)
            return token_mask(segments, group)
        if valid is not None:
            _check_valid(valid, z)
            return token_mask(valid, group)
        return None

    def _check_segments(
        self, segments: Tensor, valid: Tensor | None, z: Tensor
    ) -> None:
        if valid is not None:
            raise ValueError(
                "segments and valid are both given: leave valid out, "
                "and write −1 in segments at padding"
            )
        is_whole_number = segments.dtype in (torch.int32, torch.int64)
        if not is_whole_number or segments.shape != z.shape[:2]:
            raise ValueError(
                f"segments has shape {tuple(segments.shape)} and dtype "
                f"{segments.dtype}, expected int32 or int64 {tuple(z.shape[:2])}, "
                "the number of each token's document, or -1 at padding"
            )
        self.check_within_segments()

    def check_within_segments(self) -> None:
        """Raise ValueError if the loss cannot take the pairs within segments only."""
        if self.estimator == "moments":
            raise ValueError(
                "estimator is 'moments', which cannot be limited to pairs within "
                "documents, as it would need one F×F matrix per document: use exact, "
                "which skips tiles without pairs, or sampled"
            )
        if not self._variant.of_pairs:
            of_pairs = [name for name in VARIANTS if VARIANTS[name].of_pairs]
            raise ValueError(
                f"variant is {self.variant!r}, which is not a loss of pairs, so it "
                "cannot be limited to pairs within documents: "
                f"expected one of {', '.join(of_pairs)}"
            )


def _length(zs: Sequence[Tensor], shards: int, least: int) -> int:
    """Return the number of positions of a whole sequence.

    Raises ValueError if this is below ``least``, or a layer has a wrong shape or dtype.
    """
    if not zs:
        raise ValueError("no layers given, expected at least one [B, N, F] tensor")
    for layer, z in enumerate(zs):
        if not isinstance(z, Tensor):
            raise ValueError(
                f"layer {layer} is {z!r}, expected a float tensor [B, N, F]"
            )
        if z.ndim != 3 or not z.is_floating_point():
            hint = ""
            if not z.is_floating_point():
                hint = ": pass the outputs of blocks, not token ids"
            raise ValueError(
                f"z has shape {tuple(z.shape)} and dtype {z.dtype}, "
                f"expected a float tensor [B, N, F]{hint}"
            )
        if not z.shape[2]:
            raise ValueError(
                f"z of shape {tuple(z.shape)} has no features, "
                "expected a float tensor [B, N, F]"
            )
    for z in zs:
        if z.shape[:2] != zs[0].shape[:2]:
            raise ValueError(
                "layers differ in sequences or tokens per sequence: "
                f"{tuple(zs[0].shape)}, {tuple(z.shape)}"
            )
    length = zs[0].shape[1] * shards
    if length < least:
        raise ValueError(
            f"a sequence has {length} token(s), expected at least {least}: "
            "dispersion is over pairs"
        )
    return length


# (name of the group, shapes of the layers) for which all ranks had equal shards
_compared: set[tuple[str, tuple[tuple[int, ...], ...]]] = set()


def _check_shards(
    shapes: tuple[tuple[int, ...], ...], group: dist.ProcessGroup
) -> None:
    """Raise ValueError on every rank if the shapes of the layers differ between ranks.

    The same shapes are compared only once, because the comparison blocks the host.
    """
    if (group.group_name, shapes) in _compared or dist.get_backend(group) == "fake":
        return
    of_ranks = objects_of_ranks(shapes, group)
    if len(set(of_ranks)) > 1:
        text = "; ".join(
            f"rank {rank}: {[list(shape) for shape in shapes_of_rank]}"
            for rank, shapes_of_rank in enumerate(of_ranks)
        )
        raise ValueError(
            f"the shards of a sequence differ in shape ({text}), "
            "expected equal ones: pad them, and pass valid"
        )
    _compared.add((group.group_name, shapes))


def _check_valid(valid: Tensor, z: Tensor) -> None:
    if valid.dtype != torch.bool or valid.shape != z.shape[:2]:
        raise ValueError(
            f"valid has shape {tuple(valid.shape)} and dtype {valid.dtype}, "
            f"expected bool {tuple(z.shape[:2])}, True at tokens: "
            "convert an attention mask of 0 and 1 with .bool()"
        )


def _with_options(function: Function) -> Function:
    """Return the function with its options listed in its signature, for help()."""
    signature = inspect.signature(function)
    *arguments, _ = signature.parameters.values()  # the last one is **options
    options = inspect.signature(DispersionLoss).parameters.values()
    by_name = [option.replace(kind=option.KEYWORD_ONLY) for option in options]
    full = signature.replace(parameters=[*arguments, *by_name])
    function.__signature__ = full  # type: ignore[attr-defined]
    return function


def check_options(options: Iterable[str]) -> None:
    """Raise TypeError if a name is none of ``DispersionLoss``'s attributes."""
    names = [option.name for option in fields(DispersionLoss)]
    for name in options:
        if name not in names:
            hint = did_you_mean(name, names)
            if users_of(name):
                hint = f": pass options={{{name!r}: …}}"
            raise TypeError(f"unknown option {name!r}{hint}")


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

    The arguments are those of ``DispersionLoss.__call__``: ``zs`` has one [B, N, F]
    tensor per layer, or this rank's [B, N/p, F]. ``options`` are the attributes of
    ``DispersionLoss``.

    Raises:
        TypeError: an option is unknown.
        ValueError: for the reasons of ``DispersionLoss`` and its ``__call__``.
    """
    for name in options:
        if "mask" in name:
            raise TypeError(
                f"unknown option {name!r}: pass valid=[B, N], True at tokens"
            )
    check_options(options)
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
    """Return the loss of one layer, [B]: one value per sequence.

    The layer is z [B, N, F], or this rank's [B, N/p, F]. The arguments and errors are
    those of ``dispersion_losses([z], …)``.
    """
    return dispersion_losses(
        [z], group=group, step=step, valid=valid, segments=segments, **options
    )[0]
