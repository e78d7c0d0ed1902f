"""``torchrun … -m titan_disp.cluster.bandwidth FILE`` measures the network
between nodes and compares clocks.

An all-reduce over all ranks shows whether something is slow. Exchanges between
neighbouring nodes show which node is slow: a node that is slow with both of its
neighbours. The command is started once per node. Rank 0 writes the result of
``measure`` to FILE.
"""

import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan.tools import utils

# This sets the device type and, on CPUs, gives gloo groups one thread.
import titan_disp.plugin  # noqa: F401
from titan_disp.cluster.node_health import in_order, node_name
from titan_disp.dispersion.autograd import objects_of_ranks
from titan_disp.run.storage import write_json

# FSDP over 8 ranks reduces the fp32 gradients of the 0.6B model (2.4 GB). A shard has
# about this size.
GPU_BYTES = 256 << 20
CPU_BYTES = 4 << 20
SLOW = 0.5  # nodes and links below this fraction of the median are slow
Pair = tuple[str, str, float]  # two nodes, and bytes per second in each direction


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of neighbours in a ring of nodes, in as few rounds as possible. A
    node is in at most one pair of each round.
    """
    ring = [(i, (i + 1) % nodes) for i in range(nodes if nodes > 2 else nodes - 1)]
    # If the number of pairs is odd, the last pair has a round of its own.
    even = len(ring) // 2 * 2
    return [pairs for pairs in (ring[0:even:2], ring[1:even:2], ring[even:]) if pairs]


def pair_bandwidths(
    times: Iterable[tuple[str, Mapping[str, float]]], size: int
) -> list[Pair]:
    """Return the bandwidth of each pair of nodes: the bytes of all ranks of a node,
    divided by the time of the slowest rank.

    ``times`` has, for each rank, the rank's node and {other node: seconds that an
    exchange of ``size`` bytes took}.
    """
    by_pair: dict[tuple[str, str], list[float]] = defaultdict(list)
    for node, seconds in times:
        for other, value in seconds.items():
            first, second = in_order((node, other))
            by_pair[first, second].append(value)
    return [
        (a, b, len(values) // 2 * size / max(values))
        for (a, b), values in by_pair.items()
    ]


def best_bandwidths(pairs: Iterable[Pair]) -> dict[str, float]:
    """Return the bytes per second that each node reaches with the faster of its
    neighbours.
    """
    best: dict[str, float] = {}
    for a, b, bandwidth in pairs:
        best |= {node: max(best.get(node, 0.0), bandwidth) for node in (a, b)}
    return best


def usual_bandwidth(pairs: Sequence[Pair]) -> float:
    """Return the median of the nodes' best bandwidths."""
    # The median of the pairs would mislead: with three nodes, a slow node slows two of
    # the three pairs.
    return statistics.median_high(best_bandwidths(pairs).values()) if pairs else 0.0


def slow_nodes(pairs: Sequence[Pair]) -> dict[str, float]:
    """Return the nodes that are slow with all neighbours, and their best bandwidths.

    With two nodes, the slow one cannot be identified.
    """
    limit = SLOW * usual_bandwidth(pairs)
    return {
        node: bandwidth
        for node, bandwidth in best_bandwidths(pairs).items()
        if bandwidth < limit
    }


def slow_links(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the slow pairs whose nodes are fast with their other neighbours. The
    reason may be a bad cable.
    """
    limit = SLOW * usual_bandwidth(pairs)
    slow = slow_nodes(pairs)
    return [
        pair
        for pair in pairs
        if pair[2] < limit and pair[0] not in slow and pair[1] not in slow
    ]


def clock_skews(readings: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the seconds by which each node's clock is ahead of the median of all
    nodes.

    ``readings`` has, for each node, the times that its clock showed right after the
    same three or more barriers. The median of the differences counts, because a rank
    may be late once.
    """
    medians = [
        statistics.median_low(column) for column in zip(*readings.values(), strict=True)
    ]
    return {
        node: statistics.median(
            value - median for value, median in zip(values, medians, strict=True)
        )
        for node, values in readings.items()
    }


def _median_seconds(operation: Callable[[], Any]) -> float:
    times = []
    for _ in range(7):
        start = time.perf_counter()
        operation()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])  # the first two warm up


def measure(
    node: str, local_rank: int, device: torch.device, size: int
) -> dict[str, Any]:
    """Measure with buffers of ``size`` bytes, and return all results. This is a
    collective call, and all ranks get the same results.

    ``all_reduce.bus_bandwidth`` is in bytes per second, as defined by nccl-tests.
    ``pairs`` are [node, node, bytes per second in each direction], measured between
    ranks with the same local rank. ``clock_skew`` has the seconds by which each node's
    clock is ahead.
    """
    ranks = dist.get_world_size()
    send = torch.zeros(size // 4, dtype=torch.float32, device=device)
    receive = torch.empty_like(send)

    def barrier() -> None:
        element = torch.ones(1, device=device)
        dist.all_reduce(element)
        element.item()

    # This connects the ranks, because the first operation of a group must not be P2P.
    barrier()
    clocks = []
    for _ in range(3):
        barrier()
        clocks.append(time.time())
    all_reduce = _median_seconds(lambda: dist.all_reduce(send))

    placed = {
        place: rank for rank, place in enumerate(objects_of_ranks((node, local_rank)))
    }
    nodes = in_order({name for name, _ in placed})
    seconds: dict[str, float] = {}
    for pairs in rounds(len(nodes)):
        barrier()
        for a, b in pairs:
            other = {nodes[a]: nodes[b], nodes[b]: nodes[a]}.get(node, "")
            if (partner := placed.get((other, local_rank))) is not None:
                seconds[other] = _median_seconds(
                    partial(_exchange, partner, send, receive)
                )
    barrier()

    gathered = objects_of_ranks((node, local_rank, all_reduce, seconds, clocks))
    slowest = max(g[2] for g in gathered)
    return {
        "ranks": ranks,
        "all_reduce": {
            "bytes": size,
            "seconds": slowest,
            "bus_bandwidth": 2 * (ranks - 1) / ranks * size / slowest,
        },
        "pairs": [
            list(pair)
            for pair in pair_bandwidths([(g[0], g[3]) for g in gathered], size)
        ],
        "clock_skew": clock_skews({g[0]: g[4] for g in gathered if g[1] == 0}),
    }


def _exchange(partner: int, send: torch.Tensor, receive: torch.Tensor) -> None:
    operations = [
        dist.P2POp(dist.isend, send, partner),
        dist.P2POp(dist.irecv, receive, partner),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


@record
def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    utils.device_module.set_device(local_rank)
    backend = dist.get_default_backend_for_device(utils.device_type)
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    result = measure(
        node_name(),
        local_rank,
        torch.device(utils.device_type),
        CPU_BYTES if utils.device_type == "cpu" else GPU_BYTES,
    )
    result["backend"] = backend
    if dist.get_rank() == 0:
        write_json(Path(sys.argv[1]), result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
