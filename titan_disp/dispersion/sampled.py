"""The paper's own shortcut: the loss of a few positions of every sequence, drawn anew each step."""

import torch
import torch.distributed as dist
from torch import Tensor


def positions(tokens: int, count: int, seed: int, step: int, layer: int) -> Tensor:
    """``count`` distinct positions below ``tokens``, ascending, int64 on the CPU.

    Drawn from (seed, step, layer) alone: a resume, and every rank that holds a part of the sequence, draws the same.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + layer)
    return torch.randperm(tokens, generator=generator)[:count].sort().values


def gather(z: Tensor, chosen: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """The chosen tokens of the whole sequence, on every rank of the group.

    Args:
        z: [B, N/p, F]; rank r is taken to hold positions r·N/p … (which tokens these are does not matter).
        chosen: [m] positions in the whole sequence.

    Returns:
        [B, m, F] in z's dtype; where in it this rank's tokens are, [k]; and where in z, [k]. Both on z's device.
    """
    n = z.shape[1]
    rank = 0 if group is None else dist.get_rank(group)
    mine = (chosen // n == rank).nonzero()[:, 0]
    local = chosen[mine] - rank * n
    mine, local = mine.to(z.device, non_blocking=True), local.to(z.device, non_blocking=True)
    if group is None:
        return z[:, local], mine, local
    some = z.new_zeros(z.shape[0], len(chosen), z.shape[2])
    some[:, mine] = z[:, local]
    dist.all_reduce(some, group=group)  # a sum of one token and zeros: exact in any dtype
    return some, mine, local
