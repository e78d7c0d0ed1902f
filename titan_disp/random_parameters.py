"""Random parameters are the same on every mesh: each rank draws the whole parameter on the CPU and keeps its shard."""

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return a generator on the CPU whose numbers depend on the seed and the name only."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


@torch.no_grad()
def fill_(param: nn.Parameter, full: Tensor) -> None:
    """Copy a whole parameter, which every rank has, into one that may be sharded, in its dtype and on its device."""
    full = full.to(param.dtype)
    if isinstance(param, DTensor):
        # src_data_rank=None: every rank has the same full tensor, so nothing is sent.
        full = full.to(param.to_local().device)
        param.copy_(distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None))
    else:
        param.copy_(full)
