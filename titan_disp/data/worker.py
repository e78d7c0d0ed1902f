"""The prefetch worker: a process of each rank that makes its sequences ahead of time."""

import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from titan_disp.data.place import Field
from titan_disp.data.stream import RankStreams
from titan_disp.errors import ConfigError

_WATCH_SECONDS = 2.0  # between looks of the worker whether its rank is alive


def as_it_is(batch: Any) -> Any:
    """DataLoader would make tensors of arrays already in the worker."""
    return batch


class Sequences(IterableDataset):
    """Runs in the prefetch worker: (tokens [n, seq_len + 1], positions [n, k], bytes newly read by (epoch, file), bytes of text
    in a stored byte by source), or a ConfigError.

    n is ``batch`` times up to ``group``; less only before an error, which comes after all that was read before it.
    """

    def __init__(self, make: Any, batch: int, group: int) -> None:
        self.make, self.batch, self.group = make, batch, group

    def __iter__(self) -> Iterator[Any]:
        streams: RankStreams | None = None
        _allow_many_files()
        try:
            streams = self.make()
            slots = list(streams.slots.values())
            turn = 0
            while True:
                # Arrays travel through the worker's pipe faster than tensors, which would go through shared memory.
                # int64 already here, as the model wants it: this process has the time.
                tokens = np.empty((self.batch * self.group, streams.options.seq_len + 1), dtype=np.int64)
                positions = np.empty((len(tokens), len(Field)), dtype=np.int64)
                done, failed = 0, None
                try:
                    for row, position in zip(tokens, positions, strict=True):
                        slot = slots[turn]
                        slot.fill(row)
                        position[:] = slot.position
                        turn = (turn + 1) % len(slots)
                        done += 1
                except ConfigError as error:
                    failed = error
                whole = done - done % self.batch
                if whole:
                    yield tokens[:whole], positions[:whole], streams.bytes_read(), streams.text_per_stored_byte()
                if failed is not None:
                    raise failed
        except ConfigError as error:
            yield error  # raised by the consumer: a worker's traceback would bury the message
        finally:
            if streams is not None:
                streams.close()


def _allow_many_files() -> None:
    """A rank of many slots holds a file open for each: raise the soft limit (often 1024) to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def worker_signals(worker: int) -> None:
    """Ignore what asks the *rank* to stop: it will save a checkpoint first, and a dead worker would fail its next step.

    SIGTERM from the rank itself still ends the worker: multiprocessing sends it when Python exits, and then waits. So does the
    rank's death: DataLoader's own watch would wait for the pipe to be read, for ever.
    """
    for name in ("SIGUSR1", "SIGUSR2", "SIGINT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while os.getppid() == parent.pid:
            heard = signal.sigtimedwait({signal.SIGTERM}, _WATCH_SECONDS)
            if heard is not None and heard.si_pid == parent.pid:
                break
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
    torch.set_num_threads(1)
