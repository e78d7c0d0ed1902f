"""This module computes replicas and shards from a config and a number of ranks."""

from torchtitan.config import JobConfig

from titan_disp.errors import ConfigError


def resolve_replicas(job_config: JobConfig, world_size: int) -> None:
    """Replace data_parallel_replicate_degree = −1 by the number of replicas that the ranks allow.

    A second call changes nothing. The shard degree is then an upper bound: 8 is right for any number of nodes of 8
    GPUs, and for 1, 2 or 4 GPUs, which hold one replica. TorchTitan 0.2.2 does not accept −1 here, so this must run
    before it sees the config. The ranks must be a multiple of the degrees of context and tensor parallelism.

    Raises:
        ConfigError: the number of shards per replica is not set, or the ranks are not a multiple of it.
    """
    p = job_config.parallelism
    if p.data_parallel_replicate_degree != -1:
        return
    if p.data_parallel_shard_degree < 1:
        raise ConfigError(
            f"parallelism.data_parallel_replicate_degree is -1, but data_parallel_shard_degree is "
            f"{p.data_parallel_shard_degree}: only one of them can follow from the number of ranks. Set "
            "data_parallel_shard_degree to the number of GPUs per node"
        )
    inside = p.context_parallel_degree * p.tensor_parallel_degree
    left = world_size // inside
    shard = min(p.data_parallel_shard_degree, left)
    if left % shard:
        raise ConfigError(
            f"data_parallel_replicate_degree = -1 needs a multiple of data_parallel_shard_degree {shard} × "
            f"context_parallel_degree {p.context_parallel_degree} × tensor_parallel_degree {p.tensor_parallel_degree} "
            f"= {shard * inside} ranks, but there are {world_size}: use another number of ranks, or set "
            f"data_parallel_shard_degree to a divisor of {left}"
        )
    p.data_parallel_shard_degree, p.data_parallel_replicate_degree = shard, left // shard
