"""The prefetch worker is a process of each rank that reads and tokenizes ahead of
training.

The worker is forked from the rank. A fork of a process that communicates by NCCL or
RCCL is safe only if environment variables announce forks to the network's libraries.
Otherwise, the two processes would share memory that a network card writes to (man 3
ibv_fork_init). The trainer therefore forks the worker before it makes the process
group. What the worker must read is known later, and is then sent to the worker::

    rank    fork ── process group, data, model, checkpoint ── positions ── batches …
    worker   └────────── waits ──────── streams: a tokenizer ────── └─ reads ahead …

The fork takes 0.04 s and 3 MB, because both processes share the modules that the rank
has imported. A new process, of multiprocessing's "forkserver" or "spawn", would import
the modules again from the file system that all ranks share, which takes 3.4 s of CPU
and 330 MB.

TorchTitan's own trainer makes the process group before it calls any of our parts. With
that trainer, the worker is therefore forked at the first batch, and the variables of
slurm/sites must make this fork safe.
"""

from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from titan_disp.data.options import StreamOptions
from titan_disp.data.passes import Progress
from titan_disp.data.stream import (
    Microbatches,
    RankStreams,
    Sequences,
    worker_signals,
)
from titan_disp.errors import ConfigError

_GROUP = 32  # the prefetch worker sends up to this many microbatches at once …
# … but no more tokens than these, unless a single microbatch has more
_GROUP_TOKENS = 1 << 16

Arrival = Progress | Microbatches | ConfigError


class OpenStreams(Protocol):
    """Opens a rank's streams at ``positions``, [slots of the rank, k] int64."""

    def __call__(self, *, positions: np.ndarray) -> RankStreams: ...


def arrivals(
    open_streams: Callable[[], RankStreams], options: StreamOptions, batch: int
) -> Iterator[Arrival]:
    """Return an iterator over what ``Sequences`` yields, in microbatches of ``batch``
    sequences.

    With stream.prefetch, this forks a worker, which calls ``open_streams`` and reads
    ahead at once. Otherwise, this process reads a batch when the iterator is asked for
    a batch. An error in reading is yielded as a ConfigError, which is the last item.
    """
    group = 1
    worker: dict[str, Any] = {}
    if options.prefetch:
        # Microbatches are sent in groups, because a transfer costs the two processes as
        # much time as thousands of tokens.
        group = max(1, min(_GROUP, _GROUP_TOKENS // (batch * options.seq_len)))
        worker = {
            "num_workers": 1,
            # stated, because it is not the default of Python 3.14
            "multiprocessing_context": "fork",
            "worker_init_fn": worker_signals,
            "prefetch_factor": -(-options.prefetch // group),
        }
    loader = DataLoader(
        Sequences(open_streams, batch, group),
        batch_size=None,
        # DataLoader's own function would turn arrays into tensors in the worker.
        collate_fn=lambda arrival: arrival,
        # DataLoader draws a seed, which must not come from the generator of training.
        generator=torch.Generator(),
        **worker,
    )
    return iter(loader)


class Worker:
    """A prefetch worker that starts before the rank knows what must be read."""

    def __init__(self, options: StreamOptions, batch: int) -> None:
        """Fork this process. The worker waits for ``send`` and ``begin``.

        ``options.prefetch`` must be above 0, because nothing is forked otherwise.
        """
        receiver, self._sender = Pipe(duplex=False)
        self._arrivals = arrivals(
            partial(_sent_streams, receiver, self._sender), options, batch
        )
        receiver.close()  # only the worker, which has a copy, needs the receiver

    def send(self, open_streams: OpenStreams) -> None:
        """Send the function that opens the streams. This is done before the positions
        are known, because unpickling a tokenizer may take a second.
        """
        self._sender.send(open_streams)

    def begin(self, positions: np.ndarray) -> Iterator[Arrival]:
        """Let the worker read from these positions on, and return an iterator over what
        it reads, as ``arrivals`` does. This can be called once.
        """
        self._sender.send(positions)
        started = self._arrivals
        # The worker ends when nothing refers to the iterator any more. From now on,
        # only the caller refers to it.
        del self._arrivals
        return started

    def close(self) -> None:
        """End the worker if it still waits for something to read. Otherwise do nothing."""
        self._sender.close()


def _sent_streams(receiver: Connection, sender: Connection) -> RankStreams:
    """Return the streams that the rank has sent to this worker.

    Raises EOFError if the rank ends without them.
    """
    # The worker has a copy of the sender. If the copy stayed open, ``recv`` would wait
    # forever after the rank's end.
    sender.close()
    open_streams: OpenStreams = receiver.recv()
    return open_streams(positions=receiver.recv())
