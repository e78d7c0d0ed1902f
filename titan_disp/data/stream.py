"""The slots of a rank tokenize documents and pack them into sequences of seq_len + 1
tokens.

    files ──one pass each──▶ Passes ──documents──▶ Cursor ──▶ Shuffle ──text, tokenized ahead──▶ Slot ──▶ sequences

A slot's sequences depend only on what the fingerprint holds and, if many documents in a
row are bad, on ``stream.max_skipped_fraction``. After a resume, the documents at a
slot's position are read again. Documents are read some sequences ahead and tokenized by
threads: this takes 97 % of the time, and the tokenizers release the GIL. (gigatoken
takes less time than waking a thread.) The prefetch worker, a process of each rank,
works ahead of training.
"""

import math
import multiprocessing
import os
import resource
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from traceback import format_exc
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from titan_disp.data.assignment import Assignment
from titan_disp.data.cursor import Cursor, Document, Faults
from titan_disp.data.listing import DataFile
from titan_disp.data.options import StreamOptions
from titan_disp.data.passes import Passes
from titan_disp.data.position import Field, Position
from titan_disp.data.shuffle import Shuffle
from titan_disp.data.tokenizer import NO_SEPARATOR
from titan_disp.errors import ConfigError, DataError

# of text that a rank tokenizes ahead, in all its slots together …
AHEAD_BYTES = 1 << 17
AHEAD_SEQUENCES = 16  # … but no more sequences than these
# of text for one task of a thread: tokenizing takes about 4 ms, the task itself 0.05 ms
TASK_BYTES = 1 << 13


class RankStreams:
    """Hold the slots of one rank, and the files they read."""

    def __init__(
        self,
        files: Sequence[DataFile],
        slots: range,
        positions: np.ndarray,
        assignment: Assignment,
        encode: Callable[[str], Sequence[int] | np.ndarray],
        options: StreamOptions,
    ) -> None:
        """Start at ``positions``, [len(slots), k] int64, copied.

        After a resume, first pass over what was read before.

        ``files`` are those of all sources. ``encode`` makes token ids that end in EOS
        of a text; several threads call it.
        """
        self.encode = encode
        self.options = options
        own = [
            Position(slot, values.copy(), assignment)
            for slot, values in zip(slots, positions, strict=True)
        ]
        self.faults = Faults(files, options, assignment.first_files)
        self.passes = Passes(files, own, options)
        self.executor = ThreadPoolExecutor(
            options.tokenizer_threads, thread_name_prefix="tokenize"
        )
        self.slots = {
            position.slot: Slot(Cursor(position, self.passes, self.faults), self)
            for position in own
        }
        self._bytes_per_token = 4.0  # a mean, by which reading ahead is measured
        if positions[:, [Field.HEAD, Field.BODY_DOCUMENT, Field.TAIL]].any():
            self.passes.seek(self.executor)

    def read_ahead(self, slot: int) -> None:
        """Begin to tokenize the documents of the rank's next sequences, of all its
        slots in turn from this one on.
        """
        sequence = (self.options.seq_len + 1) * self._bytes_per_token
        window = min(AHEAD_SEQUENCES, max(2, math.ceil(AHEAD_BYTES / sequence)))
        own = len(self.slots)
        first = next(iter(self.slots))
        for j in range(min(window, own)):
            rounds = math.ceil((window - j) / own)
            self.slots[first + (slot - first + j) % own].read_ahead(rounds * sequence)

    def learn(self, document: Document, tokens: int) -> None:
        self._bytes_per_token += 0.01 * (
            document.size / max(tokens, 1) - self._bytes_per_token
        )

    def tokenize(
        self, contents: list[str | np.ndarray]
    ) -> Callable[[], list[np.ndarray]]:
        """Begin to tokenize documents.

        Return a function that waits for the ids of each, int32, ending in EOS if that
        separates documents.
        """
        if not self.options.fast_tokenizer:
            return self.executor.submit(self._tokenize, contents).result
        done = self._tokenize(contents)
        return lambda: done

    def _tokenize(self, contents: list[str | np.ndarray]) -> list[np.ndarray]:
        eos_id = self.options.format.eos_id
        found = []
        for content in contents:
            if isinstance(content, str):
                content = np.asarray(self.encode(content), dtype=np.int32)
            elif eos_id != NO_SEPARATOR and content[-1] != eos_id:
                # Without it, the reader would have refused the ids
                assert eos_id is not None
                content = np.append(content, eos_id)
            found.append(content.astype(np.int32, copy=False))
        return found

    def close(self) -> None:
        # Without waiting: the garbage collector may close this in a thread that holds a
        # lock of threading, which a join takes.
        self.executor.shutdown(wait=False, cancel_futures=True)
        self.passes.close()


class Slot:
    """This is one document stream of the run.

    ``position``, [k] int64, is that after the last sequence handed out.
    """

    def __init__(self, cursor: Cursor, streams: RankStreams) -> None:
        self.cursor = cursor
        self.streams = streams
        self.position = cursor.position.values.copy()
        # tokens already taken from the next document
        self._offset = int(cursor.position.values[Field.OFFSET])
        cursor.position.values[[Field.OFFSET, Field.OFFSET_BYTES]] = 0
        window = streams.options.shuffle_window
        self.source = Shuffle(cursor, window) if window > 1 else cursor
        # Documents read ahead, each with a function that returns a list of token ids,
        # and its index in this list.
        self._ahead: deque[tuple[Document, Callable[[], list[np.ndarray]], int]] = (
            deque()
        )
        self._bytes = 0.0  # text read ahead and not packed yet

    def read_ahead(self, size: float) -> None:
        """Read on until ``size`` bytes of text are tokenized or being tokenized."""
        while self._bytes < size:
            documents = []
            total = 0
            while self._bytes + total < size and total < TASK_BYTES:
                documents.append(self.source.next())
                total += documents[-1].size
            task = self.streams.tokenize([document.content for document in documents])
            self._ahead.extend(
                (document, task, index) for index, document in enumerate(documents)
            )
            self._bytes += total

    def fill(self, out: np.ndarray, segments: np.ndarray | None = None) -> None:
        """Write the next len(out) tokens into ``out``, and move the position past them.

        Write the number of each token's document into ``segments``, if given: 0 for the
        first document in ``out``, which may have begun before it, 1 for the next, and
        so on.
        """
        # it gains nothing from reading ahead
        if not self.streams.options.fast_tokenizer:
            self.streams.read_ahead(self.cursor.position.slot)
        filled = number = 0
        while filled < len(out):
            if not self._ahead:
                # Drops rounding errors, and what was packed of a document before a
                # resume
                self._bytes = 0.0
                self.read_ahead(1)
            document, task, index = self._ahead[0]
            tokens = task()[index]
            piece = tokens[self._offset : self._offset + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            if segments is not None:
                segments[filled : filled + len(piece)] = number
            number += 1
            filled += len(piece)
            self._offset += len(piece)
            # without a separator, a document may have no token
            self._bytes -= document.size * len(piece) / max(len(tokens), 1)
            if self._offset < len(tokens):
                self.position = document.start
                self.position[Field.OFFSET] = self._offset
                self.position[Field.OFFSET_BYTES] = (
                    document.size * self._offset // len(tokens)
                )
            else:
                self.streams.learn(document, len(tokens))
                self._ahead.popleft()
                self._offset = 0
                self.position = document.end


Batch = tuple[dict[str, Tensor], Tensor]


def as_batch(tokens: Tensor, segments: Tensor | None = None) -> Batch:
    """Return inputs and labels [B, N], as TorchTitan's trainer takes them, of tokens
    [B, N + 1] int64.

    The trainer passes all inputs but "input" to the model's forward as keyword
    arguments. ``segments`` [B, N + 1] int32 are those that ``Slot.fill`` writes.
    """
    inputs = {"input": tokens[:, :-1]}
    if segments is not None:
        inputs["segments"] = segments[:, :-1]
    return inputs, tokens[:, 1:]


def empty_rows(
    count: int, options: StreamOptions, dtype: type = np.int64
) -> list[np.ndarray]:
    """Return arrays [count, seq_len + 1] for ``Slot.fill``: of tokens, and of segments
    if the options say so.
    """
    kinds = [dtype, np.int32] if options.segments else [dtype]
    return [np.empty((count, options.seq_len + 1), dtype=kind) for kind in kinds]


_WATCH_SECONDS = 2.0  # how often the worker checks that its rank is alive


class Sequences(IterableDataset):
    """Make the rank's sequences, in the prefetch worker if there is one.

    It yields tuples of ``empty_rows`` that it has filled, positions [n, k], and bytes
    newly read by (epoch, file). n is ``batch`` · ``group``. If reading fails, it yields
    what was read before (a smaller multiple of ``batch``) and then the ConfigError.
    """

    def __init__(self, make: Any, batch: int, group: int) -> None:
        self.make = make
        self.batch = batch
        self.group = group

    def __iter__(self) -> Iterator[Any]:
        streams: RankStreams | None = None
        _allow_many_files()
        try:
            streams = self.make()
            slots = list(streams.slots.values())
            turn = 0
            while True:
                # Arrays pass through the worker's pipe faster than tensors, which would
                # go through shared memory. They are int64, as the model wants, because
                # this process has the time to convert them.
                arrays = empty_rows(self.batch * self.group, streams.options)
                positions = np.empty(
                    (self.batch * self.group, len(Field)), dtype=np.int64
                )
                done = 0
                failed = None
                try:
                    for *row, position in zip(*arrays, positions, strict=True):
                        slot = slots[turn]
                        slot.fill(*row)
                        position[:] = slot.position
                        turn = (turn + 1) % len(slots)
                        done += 1
                except ConfigError as error:
                    failed = error
                whole = done - done % self.batch
                if whole:
                    yield (
                        [array[:whole] for array in arrays],
                        positions[:whole],
                        streams.passes.bytes_read(),
                    )
                if failed is not None:
                    raise failed
        except ConfigError as error:
            # the consumer raises it, because a worker's traceback would bury the
            # message
            yield error
        except Exception:  # DataLoader would add a traceback of the rank's own
            yield DataError(
                "reading the data failed, for a reason that titan-disp does not "
                f"know:\n{format_exc()}"
            )
        finally:
            if streams is not None:
                streams.close()


def _allow_many_files() -> None:
    """Raise the soft limit on open files (often 1024) to the hard one: a rank may hold
    a file open for each slot.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def worker_signals(worker: int) -> None:
    """Ignore signals that ask the *rank* to stop: it saves a checkpoint first, and
    needs the worker until then.

    SIGTERM from the rank itself still ends the worker: multiprocessing sends it when
    Python exits, and then waits. The rank's death ends the worker too. DataLoader's own
    check for this would wait forever for the pipe to be read.
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
