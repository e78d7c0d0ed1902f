"""Apply a variant to the tokens of several layers, which may be sharded along the
sequence (TP, CP, or both).

Communication if the sequence is sharded, by estimator and type of variant:

exact
    All-gather z in its own dtype, one layer ahead: the next layer is gathered while the
    pairs of a layer are computed. All-reduce S, stacked over the layers.
moments
    Per layer, all-reduce about 64 sampled tokens and F×F numbers per sequence.
exact, ``MomentsVariant``
    Per layer, all-reduce F×F numbers per sequence.
exact, ``AutogradVariant``
    Per layer, all-gather z in its own dtype. Every rank computes the whole loss.
sampled
    All-reduce m×F numbers per sequence and layer, for all layers at once (m sampled
    tokens).

With a group, every rank gets the full loss, and backward returns grad_output ·
∂loss/∂z_local.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.autograd import (
    Gathering,
    LayerValue,
    Result,
    SavedRows,
    SumOverGroup,
    add_in_backward,
    add_rows,
    graph_is_retained,
    of_ranks,
    rank_in,
    saved_dtype,
)
from titan_disp.dispersion.kernels import accumulation_dtype, part_size
from titan_disp.dispersion.masks import (
    Count,
    TokenMask,
    first_of_orders,
    held_positions,
    in_a_row,
    slots_of,
)
from titan_disp.dispersion.vectors import Gradient

# Takes this rank's tokens z [B, n, F] of some sequences of one layer, and their mask.
# Returns a value [B] and ∂value/∂z. With a mask, z is 0 at padded positions, and the
# gradient there is ignored.
Compute = Callable[[Tensor, TokenMask | None], Result]

# The number of elements of z that are processed at a time, so that memory does not grow
# with the batch. In float32, this is 32 MiB on a CPU, and 128 MiB on a GPU, which needs
# few and large kernels.
BATCH_ELEMENTS = 1 << 23
GPU_BATCH_ELEMENTS = 1 << 25
# Small layers are computed as one batch of at most this many elements. On a CPU, such
# a batch fits into the caches. On a GPU, copying larger layers into one batch would
# take longer than launching their kernels one by one.
PACK_ELEMENTS = 1 << 20
GPU_PACK_ELEMENTS = 1 << 21


class Layers(ABC):
    """The tokens of several layers, to which a variant is applied."""

    step: int = 0  # the training step
    first: int = 0  # the index of the first layer
    # the gradient that the only layer gets from the rest of the model, in a list
    # (``compute_in_backward``)
    arriving: list[Tensor] | None = None
    in_hooks: bool = False  # whether sampled layers add their gradients in hooks

    def __init__(
        self,
        zs: Sequence[Tensor],
        length: int,
        mask: TokenMask | None,
        group: dist.ProcessGroup | None,
        in_bf16: bool,
    ) -> None:
        """Store the tokens and their layout.

        Args:
            zs: one [B, N, F] per layer, or this rank's [B, n, F].
            length: positions per sequence in the loss, over all ranks.
            mask: which positions of the whole sequences hold tokens; None if all do.
            group: ranks over which the tokens are sharded; None if each rank has all
                tokens.
            in_bf16: whether float32 tokens are rounded to bf16 first.
        """
        self.zs = zs
        self.length = length
        self.mask = mask
        self.group = group
        self.features = [z.shape[2] for z in zs]
        self.in_bf16 = in_bf16
        # whether only the pairs within segments count
        self.segmented = mask is not None and mask.segments is not None

    @abstractmethod
    def each(self, *computes: Compute) -> Tensor:
        """Return the values of ``computes`` [L, B]: this rank's part of a sum over the
        ranks, or the whole loss.

        ``computes`` has one function per layer, or one function for all layers, which
        may then get several layers as one batch.
        """

    def tokens(self, mask: TokenMask | None) -> Count:
        """Return the number of tokens per sequence, at least 2. (The loss of shorter
        sequences is later set to 0.)
        """
        if mask is None:
            return self.length
        return mask.counts.clamp_min(2)

    def pairs(self) -> Count:
        """Return the number of pairs i ≠ j in the loss of a sequence, at least 1: an int,
        [B] or [L, B].
        """
        if self.mask is None:
            return self.length * (self.length - 1)
        return self._masked_pairs().clamp_min(1)

    def without_pairs(self) -> Tensor:
        """Return which sequences have no pair, bool [B] or [L, B]. Their loss is 0.

        There must be a mask.
        """
        return self._masked_pairs() == 0

    def _masked_pairs(self) -> Tensor:
        assert self.mask is not None
        return self.mask.squares - self.mask.counts

    def sum_over_group(self, values: Tensor) -> Tensor:
        if self.group is None:
            return values
        return SumOverGroup.apply(values, self.group)

    def logsumexp_over_group(self, values: Tensor) -> Tensor:
        """Return log Σ exp of the values over the ranks. Only this rank's values have a
        gradient.
        """
        if self.group is None:
            return values
        # The values of other ranks are constants, because those ranks compute the
        # gradients of these values.
        of_all = of_ranks(values.detach(), self.group)
        of_all[rank_in(self.group)] = values
        return of_all.logsumexp(0)

    def mean_square(self) -> Tensor:
        """Return mean(z²) over tokens and features, [L, B]."""

        def sum_of_squares(z: Tensor, mask: TokenMask | None) -> Result:
            z = z.to(accumulation_dtype(z.dtype))
            return z.square().sum((1, 2)), Gradient(2 * z)

        sums = self.sum_over_group(self.each(sum_of_squares))
        tokens = self.tokens(self.mask)
        if len(set(self.features)) == 1:
            return sums / (tokens * self.features[0])
        return sums / (tokens * torch.tensor(self.features)[:, None].to(sums))

    def gather(self, z: Tensor) -> Gathering | None:
        """Return an all-gather of z, the tokens that a ``Compute`` has received. Return
        None if z already has the tokens of all ranks.
        """
        return None

    def _prepared(self, z: Tensor, mask: TokenMask | None) -> Tensor:
        """Return z with 0 for padding, in bf16 if ``in_bf16``."""
        if mask is not None:
            z = z.where(mask.own, 0.0)  # padding may be NaN
        if self.in_bf16 and z.dtype == torch.float32:
            z = z.bfloat16()
        return z

    def _apply(self, compute: Compute, z: Tensor, mask: TokenMask | None) -> Result:
        """Return the value and the gradient of z, which is 0 at padding."""
        value, gradient = compute(self._prepared(z, mask), mask)
        if mask is not None:
            gradient = replace(gradient, tokens=mask.own)
        return value, gradient


class WholeLayers(Layers):
    """All tokens of each layer."""

    _following: Sequence[Tensor] = ()  # the layers that are computed next
    _ahead: Gathering | None = None  # the all-gather of these, if it has begun

    def each(self, *computes: Compute) -> Tensor:
        if len(computes) == 1:
            packs = packed(self.zs)
            computes = computes * len(packs)
        else:
            packs = [[z] for z in self.zs]
        values: list[Tensor] = []
        for number, compute in enumerate(computes):
            pack = packs[number]
            self._following = [*packs, []][number + 1]  # see ``gather``
            of_pack = partial(self._of_pack, compute, pack)
            values.append(LayerValue.apply(of_pack, self.arriving, *pack))
        return values[0] if len(values) == 1 else torch.cat(values)

    def gather(self, z: Tensor) -> Gathering | None:
        """Return an all-gather of z, and start the all-gather of the next layers, which
        then runs during the work for z.

        A ``Compute`` must call this exactly once for each batch of layers, in order, or
        never: if the previous call has started an all-gather, a call returns this
        all-gather and ignores z.
        """
        if self.group is None:
            return None
        gathering = self._ahead or Gathering(z, self.group)
        self._ahead = None
        if self._following:
            self._ahead = Gathering(
                self._prepared(*self._together(self._following)), self.group
            )
        return gathering

    def _of_pack(self, compute: Compute, pack: list[Tensor]) -> Result:
        """Return the values [k·B] and the gradient of k layers, computed as one batch."""
        z, mask = self._together(pack)
        if self.group is None:
            return in_parts(z, mask, partial(self._apply, compute))
        # The batch is not split, because each part would need a collective call of its
        # own, and shards are small.
        return self._apply(compute, z, mask)

    def _together(self, pack: Sequence[Tensor]) -> tuple[Tensor, TokenMask | None]:
        if len(pack) == 1:
            z = pack[0].detach()
        else:
            z = torch.cat([z.detach() for z in pack])
        mask = self.mask
        if mask is not None:
            mask = mask.repeat(len(pack))
        return z, mask


def packed(zs: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the layers in lists, each of which is computed as one batch.

    Consecutive small layers of equal shape and dtype are in one list, because one batch
    needs as many kernels as a single layer.
    """
    most = PACK_ELEMENTS if zs[0].device.type == "cpu" else GPU_PACK_ELEMENTS
    packs = [[zs[0]]]
    for z in zs[1:]:
        last = packs[-1]
        are_alike = (z.shape, z.dtype) == (last[0].shape, last[0].dtype)
        if are_alike and (len(last) + 1) * z.numel() <= most:
            last.append(z)
        else:
            packs.append([z])
    return packs


def parts(z: Tensor) -> list[slice]:
    """Return slices of the sequences of z [B, n, F], B ≥ 1.

    The slices are processed one after another, so that the memory of temporaries does
    not grow with the batch.
    """
    elements = BATCH_ELEMENTS if z.device.type == "cpu" else GPU_BATCH_ELEMENTS
    most = max(1, elements // (z.shape[1] * z.shape[2]))
    size = part_size(len(z), most)
    return [slice(i, i + size) for i in range(0, len(z), size)]


def in_parts(z: Tensor, mask: TokenMask | None, compute: Compute) -> Result:
    """Return ``compute(z, mask)``, computed for a few sequences at a time (``parts``).

    If there are several parts, the gradient is in ``saved_dtype``.
    """
    slices = parts(z)
    if len(slices) == 1:
        return compute(z, mask)
    grad = torch.empty_like(z, dtype=saved_dtype(z.dtype))
    values = []
    for part in slices:
        value, gradient = compute(z[part], None if mask is None else mask[part])
        values.append(value)
        gradient.write(grad[part])
    return torch.cat(values), Gradient(grad)


# Takes the index of a layer, the tokens [b, n, F] of some sequences, the slice of these
# sequences in the batch, and a list with one entry: the tokens' gradient from the rest
# of the model. Returns the loss, a scalar. The loss's backward may remove this gradient
# from the list; it then returns the sum of this gradient and the loss's own gradient.
LossOfPart = Callable[[int, Tensor, slice, list[Tensor]], Tensor]


def compute_in_backward(
    zs: Sequence[Tensor], loss: LossOfPart, finish: Callable[[], None]
) -> Tensor:
    """Return a scalar 0. Its backward adds the gradient of ``loss``, multiplied by the
    gradient of the scalar, to the gradient of each of ``zs`` [B, n, F]. After the last
    layer, it calls ``finish``.

    The loss is computed when a gradient of z arrives from the rest of the model. The
    rest of the model must therefore use z, too. Until then, only z is stored. The next
    layer of the model usually stores z as well, except when several layers are
    checkpointed together.

    Raises:
        RuntimeError: in backward, for the reasons of ``add_in_backward`` or because z was
            modified in place.
    """
    kept: list[Tensor | None] = [z.detach() for z in zs]
    versions = [z._version for z in zs]

    # ``factor`` is the gradient of the returned scalar.
    def add(layer: int, factor: Tensor, grad: Tensor) -> Tensor:
        z = kept[layer]
        assert z is not None
        if z._version != versions[layer]:
            raise RuntimeError(
                f"activation {layer} has been modified by an in-place operation after "
                "the loss was called: the loss needs it unchanged in the backward pass"
            )
        if not graph_is_retained():
            kept[layer] = None
        grads = [of_part(layer, z[part], part, factor, grad[part]) for part in parts(z)]
        return grads[0] if len(grads) == 1 else torch.cat(grads)

    def of_part(
        layer: int, z: Tensor, part: slice, factor: Tensor, grad: Tensor
    ) -> Tensor:
        arriving = [grad]
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            value = loss(layer, z, part, arriving)
            (of_loss,) = torch.autograd.grad(value, z, factor)
        if arriving:  # the loss's backward has not added ``grad``
            return of_loss + grad
        return of_loss

    dtype = accumulation_dtype(zs[0].dtype)
    return add_in_backward(zs, zs[0].new_zeros((), dtype=dtype), add, finish)


def order(tokens: int, seed: int, step: int, layer: int) -> Tensor:
    """Return the positions 0 to ``tokens`` − 1 in a random order, int64 on the CPU.

    The order depends only on the arguments.
    """
    generator = torch.Generator().manual_seed(
        ((seed * 1_000_003 + step) * 1_009 + layer) % 2**64
    )
    return torch.randperm(tokens, generator=generator)


class SampledLayers(Layers):
    """A sample of the tokens: in each sequence, the first ``count`` positions of the
    layer's random order that hold tokens, or all tokens if there are fewer.

    Without a mask, the positions are the same for all sequences. The authors' released
    code samples by default: 256 positions, drawn anew for every layer and microbatch.
    Here the sample depends only on the seed, the step and the layer, so it is the same
    on every mesh and after a resume.

    Every rank computes the loss of the whole sample, and keeps the gradient of its own
    tokens.
    """

    def __init__(
        self,
        zs: Sequence[Tensor],
        orders: list[Tensor],
        count: int,
        mask: TokenMask | None,
        group: dist.ProcessGroup | None,
        in_bf16: bool,
    ) -> None:
        # The group is None, because every rank has the whole sample.
        super().__init__(zs, length=count, mask=mask, group=None, in_bf16=in_bf16)
        # One mask serves for all layers, because each fills the same number of slots.
        self.mask = None
        self.mask_of_all: TokenMask | None = None  # for all layers' sequences in a row
        batch, n, _ = zs[0].shape
        device = zs[0].device
        if mask is None:
            drawn = torch.stack(orders)[:, :count].sort().values
            on_device = drawn.to(device, non_blocking=True)
            positions = on_device[:, None].expand(-1, batch, -1)
        else:
            on_device = torch.stack(orders).to(device, non_blocking=True)
            positions = self._draw_tokens(mask, on_device)
        is_held, index = held_positions(positions, n, group)
        self.rows = in_a_row(index, n)  # rows of z.flatten(0, 1), [L, B·m]
        tokens = [
            z.detach().flatten(0, 1).index_select(0, rows)
            for z, rows in zip(zs, self.rows, strict=True)
        ]
        self.z = torch.stack(tokens).unflatten(1, (batch, count))  # [L, B, m, F]
        self.is_held = None
        if group is not None:
            self.is_held = is_held[..., None]
            self.z = self.z.where(self.is_held, 0.0)
            # The sum adds only zeros to each token, so it is exact in any dtype.
            dist.all_reduce(self.z, group=group)

    def _draw_tokens(self, mask: TokenMask, orders: Tensor) -> Tensor:
        """Return the positions of the sample, [L, B, m], and set its masks.

        Empty slots have arbitrary other positions of the sequence.
        """
        layers = len(orders)
        chosen = first_of_orders(mask, orders, self.length).flatten(0, 1)
        positions, filled = slots_of(chosen, self.length)
        self.mask = TokenMask((filled[: len(mask.whole)],))
        segments = None
        if mask.segments is not None:
            numbers = torch.cat(mask.segments, dim=1).repeat(layers, 1)
            segments = (numbers.gather(1, positions).masked_fill(~filled, -1),)
        self.mask_of_all = TokenMask((filled,), segments=segments)
        return positions.unflatten(0, (layers, -1))

    def each(self, *computes: Compute) -> Tensor:
        if len(computes) == 1:
            # All layers as one batch, which needs as many kernels as a single layer.
            values, grads = self._computed(
                self.z.flatten(0, 1), self.mask_of_all, *computes
            )
        else:
            results = [
                self._computed(z, self.mask, compute)
                for z, compute in zip(self.z, computes, strict=True)
            ]
            values, grads = map(torch.cat, zip(*results, strict=True))
        values = values.view(len(self.zs), -1)
        grads = grads.view_as(self.z)
        if self.is_held is not None:
            grads = grads.where(self.is_held, 0.0)
        rows = self.rows
        if self.in_hooks:

            def add(layer: int, factor: Tensor, arriving: Tensor) -> Tensor:
                of_layer = grads[layer] * factor[layer][:, None, None]
                return add_rows(arriving, of_layer, rows[layer])

            return add_in_backward(self.zs, values, add)
        layers = zip(self.zs, values, grads, rows, strict=True)
        return torch.stack([SavedRows.apply(*layer) for layer in layers])

    def _computed(
        self, z: Tensor, mask: TokenMask | None, compute: Compute
    ) -> tuple[Tensor, Tensor]:
        """Return values [b] and gradients [b, m, F] of sampled tokens z [b, m, F]. z
        has the sequences of one layer, or of all layers one after another.

        The gradients are in the accumulation dtype, but rounded to ``saved_dtype`` if
        ``in_parts`` has several parts.
        """
        value, gradient = in_parts(z, mask, partial(self._apply, compute))
        return value, gradient.tensor(accumulation_dtype(z.dtype))

    def _masked_pairs(self) -> Tensor:
        assert self.mask_of_all is not None
        pairs = self.mask_of_all.squares - self.mask_of_all.counts
        return pairs.view(len(self.zs), -1)
