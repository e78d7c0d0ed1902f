"""This module counts the bytes that one GPU sends in a step, and how long communication delays the step.

The bytes follow from shapes and from ring algorithms, which NCCL and RCCL use for large messages. In a group of n
ranks, an all-gather or a reduce-scatter of B bytes sends (n−1)/n · B from every rank, and an all-reduce twice as much.
If g ranks of the group share a node, the ring leaves the node once for all of them, so each sends 1/g of its bytes over
the network. Trees, latency and other jobs on the network are ignored. The numbers have not been compared with
measurements on GPUs yet.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig

from titan_disp.batch import data_parallel_degree, global_batch_size
from titan_disp.cluster.memory import compute_dtype
from titan_disp.models.model import DispModel

BACKWARD = 2 / 3  # backward's fraction of a microbatch's computing


@dataclass(frozen=True)
class Sent:
    """Hold the bytes that one GPU sends over the links of its node and, at the same time, over the network."""

    within: float = 0.0
    between: float = 0.0

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.within + other.within, self.between + other.between)

    def __mul__(self, factor: float) -> "Sent":
        return Sent(self.within * factor, self.between * factor)

    def seconds(self, node_bandwidth: float, network_bandwidth: float) -> float:
        return max(self.within / node_bandwidth, self.between / network_bandwidth)


@dataclass(frozen=True)
class Traffic:
    """Describe the communication of one GPU in one step.

    Attributes:
        at_the_ends: communication that nothing can hide. A GPU has nothing to compute during tensor parallelism's
            collectives. A microbatch begins by gathering the embedding and ends by reducing its gradients. The FSDP
            group of a tied embedding also has the final norm and the output.
        beside: communication that can overlap with computing in any microbatch.
        beside_last_backward: the all-reduce over replicas, which waits for the last microbatch.
        microbatches: number of microbatches in a step.
    """

    at_the_ends: tuple[Sent, ...]
    beside: tuple[Sent, ...]
    beside_last_backward: tuple[Sent, ...]
    microbatches: int

    @property
    def total(self) -> Sent:
        return sum((*self.at_the_ends, *self.beside, *self.beside_last_backward), Sent())

    def exposed(self, computing: float, node_bandwidth: float, network_bandwidth: float) -> float:
        """Return the seconds that communication adds to ``computing`` seconds of a step. Bandwidths are in bytes/s.

        This is a lower bound: all of the computing hides communication that can overlap with it.
        """

        def seconds(sent: Iterable[Sent]) -> float:
            return sum(s.seconds(node_bandwidth, network_bandwidth) for s in sent)

        last_backward = BACKWARD * computing / self.microbatches
        return (
            seconds(self.at_the_ends)
            + max(0.0, seconds(self.beside) - computing)
            + max(0.0, seconds(self.beside_last_backward) - last_backward)
        )


def ring(size: int, stride: int, gpus_per_node: int, count: float) -> Sent:
    """Count what a rank sends in one all-gather or reduce-scatter.

    Args:
        size: ranks in the group.
        stride: distance between the numbers of neighbouring ranks in the group.
        gpus_per_node: GPUs per node.
        count: bytes of the whole tensor, not of a shard.
    """
    sent = (size - 1) / size * count
    together = max(1, min(size, gpus_per_node // stride))
    return Sent(sent if together > 1 else 0.0, sent / together if together < size else 0.0)


def traffic(job_config: JobConfig, model: DispModel, gpus_per_node: int, world_size: int) -> Traffic:
    """Count the communication of a step.

    Args:
        job_config: a config that has passed ``config_checks.check_config`` for ``world_size`` ranks.
        model: the model on the meta device.
        gpus_per_node: GPUs per node.
        world_size: number of ranks.
    """
    p, t, args = job_config.parallelism, job_config.training, model.model_args
    tp, cp, replicas = p.tensor_parallel_degree, p.context_parallel_degree, p.data_parallel_replicate_degree
    fsdp = world_size // (replicas * tp)  # number of shards; ranks of context parallelism are among them
    dp = data_parallel_degree(job_config, world_size)
    microbatches = global_batch_size(job_config, dp) // (t.local_batch_size * dp)

    def held(module: torch.nn.Module) -> int:
        return sum(w.numel() // tp if w.ndim > 1 else w.numel() for w in module.parameters())

    # FSDP's groups (models/parallelize.py) are the blocks, untied embeddings, and the rest.
    blocks = sum(held(block) for block in model.layers.values())
    embedding = 0 if args.enable_weight_tying else sum(map(held, model.embeddings))
    head = held(model) - blocks - embedding
    outer = embedding or head  # a microbatch begins and ends with this group
    inner = held(model) - outer
    parameter, gradient = (TORCH_DTYPE_MAP[d].itemsize for d in (t.mixed_precision_param, t.mixed_precision_reduce))
    # Weights are gathered for forward, and for backward if they were resharded. Gradients are reduced after backward.
    policy = p.fsdp_reshard_after_forward
    again = head * (policy == "always")  # backward begins with the head
    outer_bytes = outer * (parameter + gradient) + again * parameter
    inner_bytes = inner * (parameter + gradient) + (blocks + embedding) * (policy != "never") * parameter

    def sharded(count: float) -> Sent:
        return ring(fsdp, tp, gpus_per_node, count) * microbatches

    def replicated(elements: int) -> Sent:
        """Count the all-reduce of ``titan_disp.train``, once per step, as a reduce-scatter and an all-gather."""
        return ring(replicas, tp * fsdp, gpus_per_node, elements / fsdp * gradient) * 2

    tokens = t.local_batch_size * t.seq_len
    itemsize = compute_dtype(job_config, fsdp).itemsize
    activation = tokens * args.dim * itemsize
    # Each block gathers and scatters around attention and around the feed-forward, in forward and in backward.
    # Activation checkpointing repeats some of these (op keeps the scatters' outputs). Embedding and output add two more
    # in each direction.
    recomputed = {"none": 0, "selective": 2}.get(job_config.activation_checkpoint.mode, 4)
    # All sequences of a microbatch share one lookup of positions. With context parallelism, each sequence has its own.
    tables = len(model.embeddings) - 1
    positions = 2 * tables / (t.local_batch_size if cp == 1 else 1)
    tensor = ring(tp, 1, gpus_per_node, activation / cp) * ((8 + recomputed) * args.n_layers + 4 + positions)
    exact = job_config.dispersion.estimator == "exact"  # type: ignore[attr-defined]
    dispersed = ring(cp * tp, 1, gpus_per_node, activation * len(args.activations) * exact)
    # torch's ring attention gathers keys and values in forward and backward. It passes their fp32 gradients to the next
    # rank as many times as there are ranks.
    heads = 2 * tokens * args.n_kv_heads * args.head_dim // tp * args.n_layers
    gathers = 2 if job_config.activation_checkpoint.mode in ("none", "selective") else 3
    passed = heads * 4 * (cp / (cp - 1) if cp > 1 else 0)
    context = ring(cp, tp, gpus_per_node, gathers * heads * itemsize + passed)
    return Traffic(
        at_the_ends=(sharded(outer_bytes), tensor * microbatches, replicated(outer)),
        beside=(sharded(inner_bytes), dispersed * microbatches, context * microbatches),
        beside_last_backward=(replicated(inner),),
        microbatches=microbatches,
    )
