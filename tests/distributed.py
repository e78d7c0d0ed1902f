"""Run a function in several processes with a process group: of gloo and CPUs, or of
NCCL if each rank can have a GPU.
"""

import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DONE = "done"  # what a rank reports at the end of its work
# Seconds that a rank waits for another in a collective call: one that only some ranks
# make must fail, not hang.
COLLECTIVE = 180.0
GRACE = 5.0  # seconds that the others have after a rank has failed


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _worker(rank, world_size, port, function, args, told) -> None:
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
    os.environ.update(
        {name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1"
    )
    # rank 0 sleeps for 2 seconds at its end; here is a barrier
    if trainer := sys.modules.get("torchtitan.train"):
        trainer.time = SimpleNamespace(
            perf_counter=time.perf_counter, sleep=lambda seconds: None
        )
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE))
        faulthandler.enable()  # prints the stack traces if native code crashes
        function(*args)
        dist.barrier()
        told.put((rank, DONE))
        dist.destroy_process_group()
    except BaseException:
        told.put((rank, traceback.format_exc()))
        os._exit(1)


def spawn(world_size: int, function: Callable[..., None], *args: Any) -> None:
    """Run ``function(*args)`` in ``world_size`` ranks.

    A rank that raises, hangs or dies fails the test. Only an abort after every rank has
    done its work, while the process group is destroyed, is a warning: gloo is known to
    abort at exit (PyTorch issue 190489).
    """
    exit_codes, told = _run(world_size, function, args)
    failures = "".join(
        f"\nrank {rank} failed:\n{text}" for rank, text in told if text != DONE
    )
    crashed = {rank: code for rank, code in enumerate(exit_codes) if code}
    at_work = sorted(crashed.keys() - {rank for rank, _ in told})
    assert not at_work, (
        f"ranks {at_work} of {world_size} died at work: {exit_codes}{failures}"
    )
    assert not failures, failures
    assert None not in exit_codes, (
        f"{exit_codes.count(None)} of {world_size} ranks hang"
    )
    if crashed:
        assert set(crashed.values()) == {-signal.SIGABRT}, (
            f"ranks died after their work: {exit_codes}"
        )
        warnings.warn(
            f"ranks ended with {exit_codes}: an abort after their work", stacklevel=2
        )


def _run(world_size, function, args) -> tuple[list[int | None], list[tuple[int, str]]]:
    """Return the exit codes (None for a rank that hangs), and the reports in order:
    (rank, traceback or DONE).
    """
    on_gpus = torch.cuda.device_count() >= world_size
    # Ranks are forked from one process that has imported everything and has started no
    # threads: this saves seconds per rank. CUDA does not survive a fork.
    context = mp.get_context("spawn" if on_gpus else "forkserver")
    if not on_gpus:
        context.set_forkserver_preload(["titan_disp.train", "tests.mesh"])
    told = context.SimpleQueue()
    given = (world_size, free_port(), function, args, told)
    ranks = [
        context.Process(target=_worker, args=(rank, *given))
        for rank in range(world_size)
    ]
    with mock.patch.dict(os.environ, {} if on_gpus else {"CUDA_VISIBLE_DEVICES": ""}):
        for process in ranks:
            process.start()
    end = None
    # the test's time-out: spawn says how many ranks hang
    with suppress(pytest.fail.Exception):
        while running := [process for process in ranks if process.exitcode is None]:
            if end is None and any(process.exitcode for process in ranks):
                end = time.monotonic() + GRACE
            if not wait(
                [process.sentinel for process in running],
                end and max(0.0, end - time.monotonic()),
            ):
                break
    exit_codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()  # nothing, if it has ended
    texts = []
    while not told.empty():
        texts.append(told.get())
    return exit_codes, texts
