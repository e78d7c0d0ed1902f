"""Real processes on gloo."""

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _worker(
    rank: int, world_size: int, port: int, function: Callable[..., None], args: tuple[Any, ...], errors: Any
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    try:
        dist.init_process_group("gloo")
        function(*args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        errors.put((rank, traceback.format_exc()))
        os._exit(1)


def spawn(world_size: int, function: Callable[..., None], *args: Any) -> None:
    """Run ``function(*args)`` in ``world_size`` ranks; any rank's exception fails the test with its traceback."""
    context = mp.get_context("spawn")
    errors = context.SimpleQueue()
    port = free_port()
    ranks = [
        context.Process(target=_worker, args=(rank, world_size, port, function, args, errors))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(400)
    alive = [process for process in ranks if process.is_alive()]
    for process in alive:
        process.kill()
    if not errors.empty():
        rank, text = errors.get()
        raise AssertionError(f"rank {rank} failed:\n{text}")
    assert not alive, f"{len(alive)} of {world_size} ranks hang"
    assert all(process.exitcode == 0 for process in ranks), [process.exitcode for process in ranks]
