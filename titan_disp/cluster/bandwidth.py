"""``torchrun … -m titan_disp.cluster.bandwidth --out FILE``: how fast nodes reach each other, and whose clock is off.

An all-reduce over all ranks tells that something is slow; exchanges between neighbouring pairs of nodes tell who: every node
is measured with two others, and one that is slow with both is the slow one. Started once per node like training; rank 0
writes FILE, see ``measure``.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from titan_disp.cluster.nodecheck import in_order, node_name
from titan_disp.run.folder import write_json

GPU_BYTES = 256 << 20  # about what FSDP over 8 GPUs reduces of the 0.6B model: 2.4 GB of fp32 gradients in 8 shards
CPU_BYTES = 4 << 20
SLOW = 0.5  # of the median
T = TypeVar("T")
Pair = tuple[str, str, float]  # two nodes, and bytes per second each way


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """A ring of neighbours in as few rounds as possible, in each of which a node is in one pair at most."""
    if nodes < 2:
        return []
    ring = [(i, i + 1) for i in range(nodes - 1)]
    if nodes == 2:
        return [ring]
    last = (nodes - 1, 0)
    return [ring[0::2], [*ring[1::2], last]] if nodes % 2 == 0 else [ring[0::2], ring[1::2], [last]]


def pair_bandwidths(times: Iterable[tuple[str, Mapping[str, float]]], size: int) -> list[Pair]:
    """Bytes per second each way, of all ranks of a node together; the slowest rank counts.

    Args:
        times: of every rank, its node and the seconds of its exchange with the partner on another node, by node.
        size: bytes that every rank sends and receives.
    """
    by_pair: dict[tuple[str, str], list[float]] = defaultdict(list)
    for node, seconds in times:
        for other, value in seconds.items():
            first, second = in_order((node, other))
            by_pair[first, second].append(value)
    return [(a, b, len(values) // 2 * size / max(values)) for (a, b), values in by_pair.items()]


def best_bandwidths(pairs: Iterable[Pair]) -> dict[str, float]:
    """Node → bytes per second with the better of its neighbours."""
    best: dict[str, float] = {}
    for a, b, bandwidth in pairs:
        for node in (a, b):
            best[node] = max(best.get(node, 0.0), bandwidth)
    return best


def usual_bandwidth(pairs: Sequence[Pair]) -> float:
    """The median of the nodes' best.

    The median of the pairs would not do: one slow node makes two of them slow, which are most of the three of three nodes.
    """
    return statistics.median_high(best_bandwidths(pairs).values()) if pairs else 0.0


def slow_nodes(pairs: Sequence[Pair]) -> dict[str, float]:
    """Nodes that are slow with all their neighbours, with their best. Of two nodes none can be told to be the slow one."""
    limit = SLOW * usual_bandwidth(pairs)
    return {node: bandwidth for node, bandwidth in best_bandwidths(pairs).items() if bandwidth < limit}


def slow_links(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs that are slow though both nodes are not, with their other neighbours: a cable, or the switches' topology."""
    limit, slow = SLOW * usual_bandwidth(pairs), slow_nodes(pairs)
    return [pair for pair in pairs if pair[2] < limit and pair[0] not in slow and pair[1] not in slow]


def clock_skews(readings: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Seconds by which a node's clock is ahead of the nodes' median.

    Args:
        readings: of every node, its clock right after the same three or more barriers. The median of the differences counts,
            as a rank may be late to read once.
    """
    medians = [statistics.median_low(column) for column in zip(*readings.values(), strict=True)]
    return {
        node: statistics.median(value - median for value, median in zip(values, medians, strict=True))
        for node, values in readings.items()
    }


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def median_seconds(operation: Callable[[], Any], warmup: int = 2, repeats: int = 5) -> float:
    times = []
    for i in range(warmup + repeats):
        start = time.perf_counter()
        operation()
        _synchronize()
        if i >= warmup:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _gather(value: T) -> list[T]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def measure(node: str, local_rank: int, device: torch.device, size: int) -> dict[str, Any]:
    """All measurements; a collective call with the same result on every rank.

    Args:
        node: this rank's. local_rank: on it; ranks of the same number are partners. size: bytes of a buffer.

    Returns:
        ``ranks``; ``all_reduce``: {bytes, seconds, bus_bandwidth}, in bytes per second as nccl-tests define it;
        ``pairs``: [node, node, bytes per second each way]; ``clock_skew``: node → seconds ahead.
    """
    ranks = dist.get_world_size()
    send = torch.zeros(size // 4, dtype=torch.float32, device=device)
    receive = torch.empty_like(send)

    def barrier() -> None:
        one = torch.ones(1, device=device)
        dist.all_reduce(one)
        one.item()

    barrier()  # connects; the first P2P operation of a group must not be its first operation
    clocks = []
    for _ in range(3):
        barrier()
        clocks.append(time.time())
    all_reduce = median_seconds(lambda: dist.all_reduce(send))

    placed = {place: rank for rank, place in enumerate(_gather((node, local_rank)))}
    nodes = in_order({name for name, _ in placed})
    seconds: dict[str, float] = {}
    for pairs in rounds(len(nodes)):
        barrier()
        for pair in pairs:
            names = [nodes[i] for i in pair]
            if node not in names:
                continue
            (other,) = (name for name in names if name != node)
            partner = placed.get((other, local_rank))
            if partner is not None:
                seconds[other] = median_seconds(lambda partner=partner: _exchange(partner, send, receive))  # type: ignore[misc]
    barrier()

    gathered = _gather((node, local_rank, all_reduce, seconds, clocks))
    slowest = max(g[2] for g in gathered)
    return {
        "ranks": ranks,
        "all_reduce": {
            "bytes": size,
            "seconds": slowest,
            "bus_bandwidth": 2 * (ranks - 1) / ranks * size / slowest,
        },
        "pairs": [list(pair) for pair in pair_bandwidths([(g[0], g[3]) for g in gathered], size)],
        "clock_skew": clock_skews({g[0]: g[4] for g in gathered if g[1] == 0}),
    }


def _exchange(partner: int, send: torch.Tensor, receive: torch.Tensor) -> None:
    both = [dist.P2POp(dist.isend, send, partner), dist.P2POp(dist.irecv, receive, partner)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


@record
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="file for the result, on a shared file system")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(local_rank)
        device = torch.device(torch.accelerator.current_accelerator().type, local_rank)  # type: ignore[union-attr]
    dist.init_process_group(dist.get_default_backend_for_device(device), timeout=timedelta(minutes=5))
    result = measure(node_name(), local_rank, device, CPU_BYTES if device.type == "cpu" else GPU_BYTES)
    result["backend"] = dist.get_backend()
    if dist.get_rank() == 0:
        write_json(args.out, result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
