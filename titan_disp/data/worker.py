"""The prefetch worker is a process of each rank that makes the rank's sequences ahead of training."""

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

_WATCH_SECONDS = 2.0  # how often the worker checks that its rank is alive


def as_it_is(batch: Any) -> Any:
    """Return the batch unchanged. DataLoader's own collate function would turn arrays into tensors in the worker."""
    return batch


class Sequences(IterableDataset):
    """Make the rank's sequences, in the prefetch worker if there is one.

    It yields tuples of tokens [n, seq_len + 1], positions [n, k], bytes newly read by (epoch, file), and bytes of text
    per stored byte of each source. n is ``batch`` · ``group``. If reading fails, it yields what was read before (n may
    then be a smaller multiple of ``batch``) and then the ConfigError.
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
                # Arrays pass through the worker's pipe faster than tensors, which would go through shared memory. They
                # are int64, as the model wants, because this process has the time to convert them.
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
            yield error  # the consumer raises it, because a worker's traceback would bury the message
        finally:
            if streams is not None:
                streams.close()


def _allow_many_files() -> None:
    """Raise the soft limit on open files (often 1024) to the hard one: a rank may hold a file open for each slot."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def worker_signals(worker: int) -> None:
    """Ignore signals that ask the *rank* to stop: it saves a checkpoint first, and needs the worker until then.

    SIGTERM from the rank itself still ends the worker: multiprocessing sends it when Python exits, and then waits. The
    rank's death ends the worker too. DataLoader's own check for this would wait forever for the pipe to be read.
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
