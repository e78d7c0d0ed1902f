"""A sequence may be sharded over a process group. This module resolves the group and gathers shards over it."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renamed this function and warns about the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Group = dist.ProcessGroup | DeviceMesh | None


def process_group(group: Group) -> dist.ProcessGroup | None:
    """Return the process group of ``group``, or None if there is nothing to communicate.

    Raises:
        ValueError: the mesh has more than one dimension.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"the mesh over the sequence has {group.ndim} dimensions, expected 1: flatten it first")
        group = group.get_group()
    if group is not None and dist.get_world_size(group) == 1:
        return None
    return group


class Gathering:
    """Start an all-gather of z [B, N/p, F] in its own dtype.

    Normalized float32 vectors would cost more traffic for no gain.
    """

    def __init__(self, z: Tensor, group: dist.ProcessGroup) -> None:
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.gathered = z.new_empty((self.world * z.shape[0], *z.shape[1:]))
        self.work = all_gather(self.gathered, z.contiguous(), group=group, async_op=True)

    def other_shards(self) -> list[Tensor]:
        """Wait for the all-gather and return the other ranks' shards, each [B, N/p, F]."""
        self.work.wait()
        return [shard for other, shard in enumerate(self.gathered.chunk(self.world)) if other != self.rank]
