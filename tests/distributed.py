"""Real processes on gloo."""

import os
import signal
import socket
import traceback
import warnings
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
    """Run ``function(*args)`` in ``world_size`` ranks; any rank's exception fails the test with its traceback.

    A rank that dies of SIGABRT or SIGSEGV, which is torch's native code (gloo aborts now and then; malloc once found a broken
    chunk in the wait for an asynchronous all-gather after a dozen trainers in one process), gives one more try, with a warning.
    """
    exit_codes, failure = _run(world_size, function, args)
    if any(code in (-signal.SIGABRT, -signal.SIGSEGV) for code in exit_codes):
        warnings.warn(f"ranks ended with {exit_codes}, a crash in native code; tried again", stacklevel=2)
        exit_codes, failure = _run(world_size, function, args)
    if failure is not None:
        raise AssertionError(f"rank {failure[0]} failed:\n{failure[1]}")
    assert None not in exit_codes, f"{exit_codes.count(None)} of {world_size} ranks hang"
    assert not any(exit_codes), exit_codes


def _run(
    world_size: int, function: Callable[..., None], args: tuple[Any, ...]
) -> tuple[list[int | None], tuple[int, str] | None]:
    """Exit codes (None: it hung), and the first exception that a rank told: (rank, traceback)."""
    # Forks of one process that has imported all of it, and has started no threads: seconds less for every rank.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["titan_disp.train", "tests.mesh"])
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
    exit_codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
    return exit_codes, None if errors.empty() else errors.get()
