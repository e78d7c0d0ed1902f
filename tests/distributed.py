"""Real processes on gloo."""

import faulthandler
import os
import signal
import socket
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

DONE = "done"  # what a rank tells at the end of its work
CRASHES = {-signal.SIGABRT, -signal.SIGSEGV}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _worker(
    rank: int, world_size: int, port: int, function: Callable[..., None], args: tuple[Any, ...], told: Any
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
        faulthandler.enable()  # where it stands when native code crashes
        function(*args)
        dist.barrier()
        told.put((rank, DONE))
        dist.destroy_process_group()
    except BaseException:
        told.put((rank, traceback.format_exc()))
        os._exit(1)


def spawn(world_size: int, function: Callable[..., None], *args: Any) -> None:
    """Run ``function(*args)`` in ``world_size`` ranks; any rank's exception fails the test with its traceback.

    A crash in ``destroy_process_group``, when every rank has finished its work, is a warning. (The forkserver's children end
    without finalizing the interpreter, where gloo's threads are known to abort: pytorch issue 190489.) A crash of native code at
    work fails when it happens twice. Seen twice in a day of runs, after a dozen trainers in one process, in the wait for an
    asynchronous all-gather ("malloc(): unaligned tcache chunk"). Its cause has not been found: glibc's checks (LD_PRELOAD of
    libc_malloc_debug.so.0, MALLOC_CHECK_=3) found nothing in 48 trainers on two ranks, nor in 148,000 asynchronous collectives.
    """
    exit_codes, told = _run(world_size, function, args)
    if _crashed(exit_codes, told):
        warnings.warn(f"ranks ended with {exit_codes}: a crash in native code; tried again", stacklevel=2)
        exit_codes, told = _run(world_size, function, args)
    failures = "".join(f"\nrank {rank} failed:\n{text}" for rank, text in told if text != DONE)
    crashed = _crashed(exit_codes, told)
    assert not crashed, f"ranks {crashed} of {world_size} died at work: {exit_codes}{failures}"
    assert not failures, failures
    assert None not in exit_codes, f"{exit_codes.count(None)} of {world_size} ranks hang"
    if any(exit_codes):
        assert {code for code in exit_codes if code} <= CRASHES, exit_codes
        warnings.warn(f"ranks ended with {exit_codes}, after their work: a crash in native code at exit", stacklevel=2)


def _crashed(exit_codes: list[int | None], told: list[tuple[int, str]]) -> list[int]:
    """Ranks that ended in the middle of their work without a word."""
    return [rank for rank, code in enumerate(exit_codes) if code in CRASHES and rank not in dict(told)]


def _run(
    world_size: int, function: Callable[..., None], args: tuple[Any, ...]
) -> tuple[list[int | None], list[tuple[int, str]]]:
    """Exit codes (None: it hung), and what the ranks told, in order: (rank, traceback or DONE)."""
    # Forks of one process that has imported all of it, and has started no threads: seconds less for every rank.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["titan_disp.train", "tests.mesh"])
    told = context.SimpleQueue()
    port = free_port()
    ranks = [
        context.Process(target=_worker, args=(rank, world_size, port, function, args, told))
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
    texts = []
    while not told.empty():
        texts.append(told.get())
    return exit_codes, texts
