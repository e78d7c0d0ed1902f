"""The arithmetic of batches: how a config and a number of ranks become global batches, slots and tokens."""

from torchtitan.config import JobConfig


def data_parallel_degree(job_config: JobConfig, world_size: int) -> int:
    """Ranks that read different data: all but those of tensor and context parallelism."""
    p = job_config.parallelism
    return world_size // (p.context_parallel_degree * p.tensor_parallel_degree)


def global_batch_size(job_config: JobConfig, dp_degree: int) -> int:
    """Sequences per step; TorchTitan's −1 stands for one microbatch on every data-parallel rank."""
    t = job_config.training
    return t.global_batch_size if t.global_batch_size > 0 else t.local_batch_size * dp_degree


def slot_count(job_config: JobConfig, dp_degree: int) -> int:
    """S, document streams of the run: stream.slots, or the global batch."""
    return job_config.stream.slots or global_batch_size(job_config, dp_degree)  # type: ignore[attr-defined]


def tokens_per_step(job_config: JobConfig, dp_degree: int) -> int:
    """Tokens that one optimizer step trains on."""
    return global_batch_size(job_config, dp_degree) * job_config.training.seq_len
