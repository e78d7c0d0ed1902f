"""The loss of a few positions of every sequence, drawn anew for every step and layer, the same ones for all sequences.

The authors' released code does this by default, with 256 positions that it draws anew for every layer and microbatch. Here the
draw depends on the step and the layer alone, so that it is the same on every mesh and after a resume.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.dispersion.autograd import Compute, SavedRows
from titan_disp.dispersion.layers import Layers, in_parts


def positions(tokens: int, count: int, seed: int, step: int, layer: int) -> Tensor:
    """``count`` distinct positions below ``tokens``, ascending, int64 on the CPU.

    Drawn from (seed, step, layer) alone: a resume, and every rank that holds a part of the sequence, draws the same.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + layer)
    return torch.randperm(tokens, generator=generator)[:count].sort().values


class SampledLayers(Layers):
    """The tokens of the drawn positions, on every rank.

    Args:
        zs: one [B, N, F] for each layer, or this rank's [B, N/p, F] where the sequence is sharded over ``group``.
        drawn: [m] positions in the whole sequence, for each layer.
    """

    def __init__(
        self, zs: Sequence[Tensor], drawn: Sequence[Tensor], group: dist.ProcessGroup | None, in_bf16: bool
    ) -> None:
        self.zs, self.tokens, self.features = zs, len(drawn[0]), zs[0].shape[2]
        self.group, self.in_bf16 = None, in_bf16
        self.z, self.mine, self.local = gather([z.detach() for z in zs], drawn, group)

    def each(self, compute: Compute) -> Tensor:
        # All layers' few tokens at once: alone, they would be as many small kernels for each.
        values, grads = in_parts(self.z.flatten(0, 1), lambda z: compute(self.operand(z)))
        rows = [grad[:, mine] for grad, mine in zip(grads.view_as(self.z), self.mine, strict=True)]
        parts = zip(self.zs, values.view(len(self.zs), -1), rows, self.local, strict=True)
        return torch.stack([SavedRows.apply(*part) for part in parts])


def gather(
    zs: Sequence[Tensor], drawn: Sequence[Tensor], group: dist.ProcessGroup | None
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The drawn tokens of the whole sequence and of all layers, on every rank of the group.

    Args:
        zs: a [B, N/p, F] for each layer; rank r is taken to hold positions r·N/p … (which tokens these are does not matter).
        drawn: [m] positions in the whole sequence, for each layer.

    Returns:
        [L, B, m, F] in z's dtype; for each layer, where in it this rank's tokens are, [k], and where in z, [k], on z's device.
    """
    rank = 0 if group is None else dist.get_rank(group)
    gathered = zs[0].new_zeros(len(zs), zs[0].shape[0], len(drawn[0]), zs[0].shape[2])
    mine, local = [], []
    for z, positions, out in zip(zs, drawn, gathered, strict=True):
        n = z.shape[1]
        own = (positions // n == rank).nonzero()[:, 0]
        mine.append(own.to(z.device, non_blocking=True))
        local.append((positions[own] - rank * n).to(z.device, non_blocking=True))
        out[:, mine[-1]] = z[:, local[-1]]
    if group is not None:
        dist.all_reduce(gathered, group=group)  # a sum of one token and zeros: exact in any dtype
    return gathered, mine, local
