"""The group over which a sequence is sharded, and what is gathered over it."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renamed it and warns about the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

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


class Gathering:
    """An all-gather of z [B, N/p, F] under way, in z's own dtype: normalised fp32 would cost more traffic and gain nothing."""

    def __init__(self, z: Tensor, group: dist.ProcessGroup) -> None:
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.gathered = z.new_empty((self.world * z.shape[0], *z.shape[1:]))
        self.work = all_gather(self.gathered, z.contiguous(), group=group, async_op=True)

    def other_shards(self) -> list[Tensor]:
        """The other ranks' [B, N/p, F], once they are here."""
        self.work.wait()
        return [shard for other, shard in enumerate(self.gathered.chunk(self.world)) if other != self.rank]
