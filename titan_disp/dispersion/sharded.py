"""The dispersion loss of whole or sequence-sharded activations (tensor parallel, context parallel, or both).

Sharded: all-gather z in its own dtype along the sequence, compute own rows × all columns, all-reduce S. V's own rows
are then complete, so backward needs no communication. One autograd node per layer returns its partial S and saves
∂S/∂z; one stacked all-reduce serves all layers, and its backward is the identity.

Convention: with a group, every rank gets the full L, and backward returns grad_output · ∂L/∂z_local.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_disp.dispersion import pairwise

# torch 2.13 renamed it and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Group = dist.ProcessGroup | DeviceMesh | None


def process_group(group: Group) -> dist.ProcessGroup | None:
    """The process group behind a 1-D mesh; None where there is nothing to communicate."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"the mesh over the sequence has {group.ndim} dimensions, expected 1: flatten it first")
        group = group.get_group()
    if group is not None and dist.get_world_size(group) == 1:
        return None
    return group


class _PairSum(torch.autograd.Function):
    """Own rows × all columns → this rank's part of S, [B]. Saves ∂S/∂z of the own rows in z's dtype."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, z: Tensor, tau: float, clamp: float, norm_eps: float, group: dist.ProcessGroup | None
    ) -> Tensor:
        u, norm = pairwise.normalize(z, norm_eps)
        if group is None:
            s, v = pairwise.all_pairs(u, tau, clamp)
        else:
            s, v = _gathered_pairs(z, u, tau, clamp, norm_eps, group)
        if ctx.needs_input_grad[0]:
            # fp16 could overflow: ∂S/∂z grows with N. bf16 has fp32's range.
            keep = torch.float32 if z.dtype == torch.float16 else z.dtype
            ctx.save_for_backward(pairwise.normalize_backward(z, norm, v.mul_(2), norm_eps).to(keep))
            ctx.dtype = z.dtype
        return s

    @staticmethod
    def backward(ctx: Any, grad_s: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        (ds_dz,) = ctx.saved_tensors
        scaled = ds_dz.to(grad_s.dtype) * grad_s[:, None, None]
        return scaled.to(ctx.dtype), None, None, None, None


def _gathered_pairs(
    z: Tensor, u: Tensor, tau: float, clamp: float, norm_eps: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    batch, n, features = z.shape
    gathered = z.new_empty((world * batch, n, features))
    # Normalising locally and gathering u would cost fp32 traffic; z travels in its own dtype and loses nothing.
    _all_gather(gathered, z.detach().contiguous(), group=group)
    s, v = pairwise.all_pairs(u, tau, clamp)
    for other, shard in enumerate(gathered.chunk(world)):
        if other != rank:
            cols, _ = pairwise.normalize(shard, norm_eps)
            s += pairwise.add_rows_against(u, cols, v, tau, clamp)
    return s, v


class _SumOverGroup(torch.autograd.Function):
    """All-reduce (sum). Backward is the identity: every rank already holds the whole gradient of its own rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def dispersion_losses(
    zs: Sequence[Tensor], *, tau: float = 1.0, clamp: float = 0.25, norm_eps: float = 1e-2, group: Group = None
) -> Tensor:
    """Exact dispersion loss per layer and sequence.

    Args:
        zs: one [B, N, F] tensor per layer, or this rank's [B, N/p, F] shards when ``group`` is given.
            Shards must have equal shapes on all ranks; which tokens a rank holds, and in which order, does not matter.
        tau: temperature τ.
        clamp: κ, the straight-through clamp of the cosines to [−1+κ, 1−κ].
        norm_eps: ε added to the norms.
        group: process group or 1-D mesh over which the sequence is sharded.

    Returns:
        [len(zs), B], float32 (float64 for float64 input): log of the mean of exp(−D/τ) over all ordered pairs i ≠ j;
        the same full value on every rank of ``group``. Gradients reach each rank's own shard, complete.

    Raises:
        ValueError: bad shape, fewer than 2 tokens per sequence, or parameters out of range.

    Source: arXiv 2602.00217, angular dispersion; see ``pairwise`` for the formulas.
    """
    pairwise.check_parameters(tau, clamp, norm_eps)
    pg = process_group(group)
    world = 1 if pg is None else dist.get_world_size(pg)
    if not zs:
        raise ValueError("no layers given, expected at least one [B, N, F] tensor")
    for z in zs:
        if z.ndim != 3 or not z.is_floating_point():
            raise ValueError(f"z has shape {tuple(z.shape)} and dtype {z.dtype}, expected a float tensor [B, N, F]")
    tokens = zs[0].shape[1] * world
    if any(z.shape[1] * world != tokens for z in zs):
        raise ValueError(f"layers differ in tokens per sequence: {[z.shape[1] for z in zs]}")
    if tokens < 2:
        raise ValueError(f"a sequence has {tokens} token(s), expected at least 2: dispersion is defined over pairs")
    # Under AMP the products would silently fall to bf16 and lose the digits near the clamp.
    with torch.autocast(zs[0].device.type, enabled=False):
        s = torch.stack([_PairSum.apply(z, tau, clamp, norm_eps, pg) for z in zs])
        if pg is not None:
            s = _SumOverGroup.apply(s, pg)
        return torch.log(s / (tokens * (tokens - 1)))


def dispersion_loss(
    z: Tensor, *, tau: float = 1.0, clamp: float = 0.25, norm_eps: float = 1e-2, group: Group = None
) -> Tensor:
    """Exact dispersion loss of one layer, [B]: ``dispersion_losses([z], …)[0]``; see there."""
    return dispersion_losses([z], tau=tau, clamp=clamp, norm_eps=norm_eps, group=group)[0]
