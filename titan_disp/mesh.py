"""The arithmetic of meshes: how a config and a number of ranks become replicas and shards."""

from torchtitan.config import JobConfig

from titan_disp.errors import ConfigError


def resolve_replicas(job_config: JobConfig, world_size: int) -> None:
    """Set data_parallel_replicate_degree = −1 to what the ranks leave beside the shards. Calling it again changes nothing.

    The shard degree is then an upper bound: 8 serves nodes of 8 GPUs in any number, and 1, 2 or 4 GPUs, which hold one
    replica. TorchTitan 0.2.2 knows no −1 here, so this runs before it sees the config. The degrees of context and tensor
    parallelism divide the ranks.

    Raises:
        ConfigError: nothing says how many shards a replica has, or the ranks are no multiple of them.
    """
    p = job_config.parallelism
    if p.data_parallel_replicate_degree != -1:
        return
    if p.data_parallel_shard_degree < 1:
        raise ConfigError(
            f"parallelism.data_parallel_replicate_degree is -1, but data_parallel_shard_degree is "
            f"{p.data_parallel_shard_degree}: only one of them can be what is left. Set data_parallel_shard_degree to the "
            "GPUs of a node"
        )
    inside = p.context_parallel_degree * p.tensor_parallel_degree
    left = world_size // inside
    shard = min(p.data_parallel_shard_degree, left)
    if left % shard:
        raise ConfigError(
            f"data_parallel_replicate_degree = -1 takes what {world_size} ranks leave, but these are not a multiple of "
            f"data_parallel_shard_degree {shard} × context_parallel_degree {p.context_parallel_degree} × "
            f"tensor_parallel_degree {p.tensor_parallel_degree} = {shard * inside}: use another number of ranks, or set "
            "data_parallel_shard_degree to a divisor of them"
        )
    p.data_parallel_shard_degree, p.data_parallel_replicate_degree = shard, left // shard
