"""Mean pairwise cosine of a layer's token embeddings (arXiv 2602.00217, §3.1), in linear time."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def mean_cosine(z: Tensor, group: dist.ProcessGroup | DeviceMesh | None = None) -> Tensor:
    """Mean of all N² pairwise cosines, the N of a token with itself included, as the paper defines it.

    Σ_ij u_i·u_j = ‖Σ_i u_i‖², so that no N×N matrix is needed.

    Args:
        z: [B, N, F], or this rank's [B, N/p, F] shard of the sequence when ``group`` is given.
        group: process group or 1-D mesh over which the sequence is sharded.

    Returns:
        [B] float64, the same on every rank of ``group``. An all-zero token counts as cosine 0 to every other.
    """
    u = torch.nn.functional.normalize(z.double(), dim=-1)
    total, n = u.sum(1), z.shape[1]
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    if group is not None:
        dist.all_reduce(total, group=group)
        n *= dist.get_world_size(group)
    return total.square().sum(-1) / n**2
