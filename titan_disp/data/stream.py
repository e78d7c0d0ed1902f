"""The slots of a rank tokenize documents and pack them into sequences of seq_len + 1
tokens.

    files ──one pass each──▶ Passes ──documents──▶ Cursor ──▶ Shuffle ──text, tokenized ahead──▶ Slot ──▶ sequences

A slot's sequences depend only on what the fingerprint holds and, if many documents in a
row are bad, on ``stream.max_skipped_fraction``. After a resume, the documents at a
slot's position are read again. Documents are read some sequences ahead and tokenized by
threads, because tokenizing takes 97 % of the time, and the tokenizers release the GIL.
(gigatoken takes less time than waking a thread.) The prefetch worker, a process of each
rank, works ahead of training.
"""

import math
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle
from traceback import format_exc

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from titan_disp.data.assignment import Assignment
from titan_disp.data.cursor import Cursor, Document, Faults
from titan_disp.data.listing import DataFile
from titan_disp.data.options import StreamOptions
from titan_disp.data.passes import Passes, Progress
from titan_disp.data.position import Field, Position, in_document
from titan_disp.data.shuffle import Shuffle
from titan_disp.data.tokenizer import NO_SEPARATOR
from titan_disp.errors import ConfigError, DataError
from titan_disp.files import allow_open_files

# bytes of text that a rank tokenizes ahead, in all its slots together …
AHEAD_BYTES = 1 << 17
AHEAD_SEQUENCES = 16  # … but at most this many sequences
# bytes of text for one task of a thread: tokenizing them takes about 4 ms, and the task
# itself 0.05 ms
TASK_BYTES = 1 << 13

Encode = Callable[[str], Sequence[int] | np.ndarray]


class RankStreams:
    """The slots of one rank, by number, and the files that they read."""

    def __init__(
        self,
        files: Sequence[DataFile],
        slots: range,
        positions: np.ndarray,
        assignment: Assignment,
        encode: Encode,
        options: StreamOptions,
    ) -> None:
        """Start at copies of ``positions``, [len(slots), k] int64.

        ``files`` are the files of all sources. ``encode`` turns a text into token ids
        that end in EOS. Several threads call it.
        """
        self.encode = encode
        self.options = options
        of_slots = [
            Position(slot, values.copy(), assignment)
            for slot, values in zip(slots, positions, strict=True)
        ]
        self.faults = Faults(files, options, assignment.first_files)
        self.passes = Passes(files, of_slots, options)
        self.executor = ThreadPoolExecutor(
            options.tokenizer_threads, thread_name_prefix="tokenize"
        )
        self.slots = {
            position.slot: Slot(Cursor(position, self.passes, self.faults), self)
            for position in of_slots
        }
        self._bytes_per_token = 4.0  # a running mean, for the amount to read ahead

    def seek(self) -> Iterator[Progress]:
        """Return an iterator that reads up to the positions of a resume, and yields the
        progress, the last time at the end.

        Errors of files are not raised, because ``Slot.fill`` meets them again. (Without
        this method, ``Slot.fill`` would read up to the positions, one file after the
        other.)
        """
        return self.passes.seek(self.executor)

    def read_ahead(self, slot: int) -> None:
        """Begin to tokenize the documents of the rank's next sequences, which come from
        all slots of the rank in turn, ``slot`` first.

        Raises DataError as ``Cursor.next`` does.
        """
        sequence = (self.options.seq_len + 1) * self._bytes_per_token
        window = min(AHEAD_SEQUENCES, max(2, math.ceil(AHEAD_BYTES / sequence)))
        count = len(self.slots)
        first = next(iter(self.slots))
        for j in range(window):
            sequences = j // count + 1
            of_turn = first + (slot - first + j) % count
            self.slots[of_turn].read_ahead(sequences * sequence)

    def learn(self, document: Document, tokens: int) -> None:
        """Update the mean of bytes per token with a document of ``tokens`` tokens."""
        self._bytes_per_token += 0.01 * (
            document.size / max(tokens, 1) - self._bytes_per_token
        )

    def tokenize(
        self, contents: list[str | np.ndarray]
    ) -> Callable[[], list[np.ndarray]]:
        """Begin to tokenize the texts among ``contents``. Return a function that waits
        until this is done and returns each document's ids (int32). The ids end in EOS
        unless stream.separator is "none".

        The function raises what ``encode`` raises. With stream.fast_tokenizer, the texts
        are tokenized at once, and this method raises the error.
        """
        if not self.options.fast_tokenizer:
            return self.executor.submit(self._tokenize, contents).result
        ids = self._tokenize(contents)
        return lambda: ids

    def _tokenize(self, contents: list[str | np.ndarray]) -> list[np.ndarray]:
        return [self._ids(content).astype(np.int32, copy=False) for content in contents]

    def _ids(self, content: str | np.ndarray) -> np.ndarray:
        """Return the ids of a text, or stored ids. The result ends in the separator
        unless stream.separator is "none".
        """
        if isinstance(content, str):
            return np.asarray(self.encode(content), dtype=np.int32)
        eos_id = self.options.format.eos_id
        if eos_id == NO_SEPARATOR or content[-1] == eos_id:
            return content
        assert eos_id is not None  # without it, the reader would have refused the ids
        return np.append(content, eos_id)

    def close(self) -> None:
        """Close the files and end the threads, without waiting for files or threads."""
        # The garbage collector may call this in a thread that holds a lock of
        # ``threading``, and waiting would take the same lock.
        self.executor.shutdown(wait=False, cancel_futures=True)
        self.passes.close()


class Slot:
    """One document stream of the run.

    Attributes:
        position: [k] int64, the position after the last sequence that ``fill`` has
            written. The cursor's position is further on, after the documents read
            ahead.
        source: returns the slot's documents one by one.
    """

    def __init__(self, cursor: Cursor, streams: RankStreams) -> None:
        self.cursor = cursor
        self.streams = streams
        self.position = cursor.position.values.copy()
        # tokens already taken from the next document
        self._offset = cursor.position.rewind_document()
        window = streams.options.shuffle_window
        self.source = Shuffle(cursor, window) if window > 1 else cursor
        # Documents read ahead, each with a function that returns the token ids of
        # several documents, and with the document's index among these.
        self._ahead: deque[tuple[Document, Callable[[], list[np.ndarray]], int]] = (
            deque()
        )
        self._bytes = 0.0  # text read ahead and not packed yet

    def read_ahead(self, size: float) -> None:
        """Read documents until ``size`` bytes of the slot's text are tokenized or being
        tokenized, and not packed yet.

        Raises DataError as ``Cursor.next`` does.
        """
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
        """Write the next len(out) tokens into ``out``, and move ``position`` past them.

        ``segments``, if given, has the same length. The number of each token's document
        is written into it: 0 for the first document in ``out``, which may have begun
        before ``out``, 1 for the next, and so on. Raises DataError as ``Cursor.next``
        does, and what ``encode`` raises.
        """
        # gigatoken gains nothing from reading ahead
        if not self.streams.options.fast_tokenizer:
            self.streams.read_ahead(self.cursor.position.slot)
        filled = 0
        number = 0
        while filled < len(out):
            if not self._ahead:
                # This drops rounding errors, and the part of a document that was packed
                # before a resume.
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
                size = document.size * self._offset // len(tokens)
                self.position = in_document(document.start, self._offset, size)
            else:
                self.streams.learn(document, len(tokens))
                self._ahead.popleft()
                self._offset = 0
                self.position = document.end


Batch = tuple[dict[str, Tensor], Tensor]


def as_batch(tokens: Tensor, segments: Tensor | None = None) -> Batch:
    """Return (inputs, labels) for TorchTitan's trainer, from tokens [B, N + 1] int64.
    The inputs are a view of the first N tokens, and the labels of the last N tokens.

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
    """Return arrays [count, seq_len + 1], not filled, for rows of ``Slot.fill``: an
    array of tokens, and, if ``options.segments``, an array of segments (int32).
    """
    dtypes = [dtype, np.int32] if options.segments else [dtype]
    return [np.empty((count, options.seq_len + 1), dtype) for dtype in dtypes]


@dataclass(frozen=True)
class Microbatches:
    """Microbatches that the prefetch worker sends together.

    Attributes:
        rows: the arrays of ``empty_rows`` for each microbatch, filled. Arrays pass
            through the worker's pipe faster than tensors, which would go through shared
            memory. They are int64, as the model wants, because the worker has the time
            to convert them.
        positions: for each microbatch, the positions after its sequences, [B, k].
        bytes_read: stored bytes read since the last group, by (epoch, file).
    """

    rows: list[list[np.ndarray]]
    positions: list[np.ndarray]
    bytes_read: Counter[tuple[int, int]]


class Sequences(IterableDataset):
    """Yields the rank's sequences, in the prefetch worker if there is one.

    First, the iterator yields the ``Progress`` of reading up to the positions. Then, it
    yields ``Microbatches`` without end, with ``group`` microbatches of ``batch``
    sequences each. The iterator raises nothing. If opening the streams or reading fails
    with a ConfigError (DataError is one), the iterator yields the complete microbatches
    that were read before, then the error, and ends. After any other error, it drops
    these microbatches, yields a DataError with the traceback, and ends.
    """

    def __init__(
        self, open_streams: Callable[[], RankStreams], batch: int, group: int
    ) -> None:
        self.open_streams = open_streams
        self.batch = batch
        self.group = group

    def __iter__(self) -> Iterator[Progress | Microbatches | ConfigError]:
        allow_open_files()  # a rank may hold a file open for each slot
        try:
            with closing(self.open_streams()) as streams:
                yield from streams.seek()
                yield from self._groups(streams)
        except ConfigError as error:
            # The consumer raises the error, because a worker's traceback would bury the
            # message.
            yield error
        except Exception:  # DataLoader would add the rank's traceback
            yield DataError(
                "reading the data failed, for a reason that titan-disp does not "
                f"know:\n{format_exc()}"
            )

    def _groups(self, streams: RankStreams) -> Iterator[Microbatches]:
        """Yield groups of microbatches. Raises ConfigError after the last one."""
        slots = cycle(streams.slots.values())
        failure = None
        while failure is None:
            group = Microbatches([], [], Counter())
            try:
                for _ in range(self.group):
                    rows = empty_rows(self.batch, streams.options)
                    positions = np.empty((self.batch, len(Field)), dtype=np.int64)
                    for *row, position in zip(*rows, positions, strict=True):
                        slot = next(slots)
                        slot.fill(*row)
                        position[:] = slot.position
                    group.rows.append(rows)
                    group.positions.append(positions)
            except ConfigError as error:
                failure = error
            group.bytes_read.update(streams.passes.bytes_read())
            if group.rows:
                yield group
        raise failure


_WATCH_SECONDS = 2.0  # how often the worker checks that its rank is alive


def worker_signals(worker: int) -> None:
    """Ignore, in the prefetch worker, signals that ask the *rank* to stop. The rank saves
    a checkpoint first, and needs the worker until then.

    SIGTERM from the rank itself still ends the worker: multiprocessing sends it when
    Python exits, and then waits. The rank's death ends the worker, too. DataLoader's own
    check for the rank's death would wait forever for the pipe to be read.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
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
