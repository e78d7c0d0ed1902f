"""Documents → packed sequences, slot by slot, with a position of a few integers.

    files ──one pass each──▶ Passes ──documents──▶ Cursor ──▶ Shuffle ──text, tokenized ahead──▶ Slot ──▶ sequences

A slot's sequences, of seq_len + 1 tokens, depend on (files, tokenizer, seq_len, seed, S, shuffle_window) only. A position is
re-read on resume, not restored from a buffer of text. Documents are read some sequences ahead and tokenized by threads:
tokenizers release the GIL, and take 97 % of the time. (``fast_tokenizer`` takes less than waking a thread does, and is called
where its tokens are needed.)
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from titan_disp.data.assignment import Assignment
from titan_disp.data.cursor import Cursor, Document, Faults
from titan_disp.data.files import DataFile
from titan_disp.data.formats import Format
from titan_disp.data.mixture import Mixture
from titan_disp.data.passes import Passes
from titan_disp.data.place import Field, Place
from titan_disp.data.shuffle import Shuffle

AHEAD_BYTES = 1 << 17  # of text that is tokenized ahead of a rank's packing, in all its slots together …
AHEAD_SEQUENCES = 16  # … but no more sequences than these
TASK_BYTES = 1 << 13  # of text for one task of a thread: about 4 ms, against 0.05 ms that a task costs


@dataclass(frozen=True)
class StreamOptions:
    """What decides how documents become sequences, and what happens to bad ones; and threads, which decide nothing."""

    seq_len: int
    seed: int = 0
    shuffle_window: int = 0
    on_bad_data: str = "skip"
    max_skipped_fraction: float = 0.01
    max_document_bytes: int = 16 << 20
    retry_seconds: float = 60.0
    queue_bytes: int = 32 << 20
    tokenizer_threads: int = 1
    fast_tokenizer: bool = False
    format: Format = Format()


class RankStreams:
    """The slots of one rank, and the files they read."""

    def __init__(
        self,
        files: Sequence[DataFile],
        slots: range,
        positions: np.ndarray,
        assignment: Assignment | Mixture,
        encode: Callable[[str], Sequence[int] | np.ndarray],
        options: StreamOptions,
    ) -> None:
        """Args:
        files: all files of the split. slots: this rank's. positions: [len(slots), k] int64, copied.
        assignment: of all slots. encode: text → token ids that end in EOS; called from several threads. options: see there.
        """
        self.encode, self.options = encode, options
        places = [Place(slot, position.copy(), assignment) for slot, position in zip(slots, positions, strict=True)]
        self.faults = Faults(files, options.on_bad_data, options.max_skipped_fraction, assignment.first_files)
        self.passes = Passes(
            files,
            places,
            options.max_document_bytes,
            options.retry_seconds,
            options.queue_bytes,
            options.shuffle_window,
            options.format,
        )
        self.executor = ThreadPoolExecutor(options.tokenizer_threads, thread_name_prefix="tokenize")
        self.slots = {place.index: Slot(Cursor(place, self.passes, self.faults), self) for place in places}
        self._bytes_per_token = 4.0
        if positions[:, [Field.HEAD, Field.BODY_DOCUMENT, Field.TAIL]].any():
            self.passes.seek(self.executor)

    def bytes_read(self) -> Counter[tuple[int, int]]:
        """Stored bytes read since the last call, by (epoch, file)."""
        return self.passes.bytes_read()

    def text_per_stored_byte(self) -> list[float]:
        """Of the files of each source, as far as they are read."""
        return self.passes.text_per_stored_byte()

    def read_ahead(self, slot: int) -> None:
        """Have the documents of the rank's next sequences, from this slot on in turn, tokenized in the background."""
        sequence = (self.options.seq_len + 1) * self._bytes_per_token
        window = min(AHEAD_SEQUENCES, max(2, math.ceil(AHEAD_BYTES / sequence)))
        own = len(self.slots)
        first = next(iter(self.slots))
        for j in range(min(window, own)):
            rounds = math.ceil((window - j) / own)
            self.slots[first + (slot - first + j) % own].read_ahead(rounds * sequence)

    def learn(self, document: Document, tokens: int) -> None:
        """Follow the text's bytes per token, by which read-ahead is measured."""
        self._bytes_per_token += 0.01 * (document.size / tokens - self._bytes_per_token)

    def tokenize(self, contents: list[str | np.ndarray]) -> Callable[[], list[np.ndarray]]:
        """Begin to tokenize; what is returned gives the token ids of each document, int32, which end in EOS. Threads do it,
        unless waking one would take longer than the work."""
        if not self.options.fast_tokenizer:
            return self.executor.submit(self._tokenize, contents).result
        done = self._tokenize(contents)
        return lambda: done

    def _tokenize(self, contents: list[str | np.ndarray]) -> list[np.ndarray]:
        return [
            self._stored_ids(content)
            if isinstance(content, np.ndarray)
            else np.asarray(self.encode(content), dtype=np.int32)
            for content in contents
        ]

    def _stored_ids(self, ids: np.ndarray) -> np.ndarray:
        eos_id = self.options.format.eos_id
        assert eos_id is not None  # or else they would not have been read
        return np.append(ids, eos_id).astype(np.int32) if ids[-1] != eos_id else ids.astype(np.int32)

    def close(self) -> None:
        self.executor.shutdown(cancel_futures=True)
        self.passes.close()


@dataclass
class _Ahead:
    """A document that was read ahead."""

    document: Document
    tokens: Callable[[], list[np.ndarray]]
    place: int  # in their list


class Slot:
    """One document stream of the run.

    Attributes:
        position: [k] int64, after the last sequence handed out.
    """

    def __init__(self, cursor: Cursor, streams: RankStreams) -> None:
        self.cursor, self.streams = cursor, streams
        self.position = cursor.position.copy()
        self._offset = int(cursor.position[Field.OFFSET])  # in the next document
        cursor.position[Field.OFFSET] = 0
        window = streams.options.shuffle_window
        self.source = Shuffle(cursor, window) if window > 1 else cursor
        self._ahead: deque[_Ahead] = deque()
        self._bytes = 0.0  # of text read ahead and not yet packed

    def read_ahead(self, size: float) -> None:
        """Read on until ``size`` bytes of text are ready or being tokenized."""
        while self._bytes < size:
            documents, total = [], 0
            while self._bytes + total < size and total < TASK_BYTES:
                documents.append(self.source.next())
                total += documents[-1].size
            task = self.streams.tokenize([document.content for document in documents])
            self._ahead.extend(_Ahead(document, task, place) for place, document in enumerate(documents))
            self._bytes += total

    def sequence(self) -> np.ndarray:
        """The next seq_len + 1 tokens, int64; the position moves with them."""
        out = np.empty(self.streams.options.seq_len + 1, dtype=np.int64)
        self.fill(out)
        return out

    def fill(self, out: np.ndarray) -> None:
        """Write the next len(out) tokens; the position moves with them."""
        if not self.streams.options.fast_tokenizer:  # which has nothing to gain from texts that wait
            self.streams.read_ahead(self.cursor.place.index)
        filled = 0
        while filled < len(out):
            if not self._ahead:
                self._bytes = 0.0  # rounding, and the part of a document that was packed before a resume
                self.read_ahead(1)
            head = self._ahead[0]
            tokens = head.tokens()[head.place]
            piece = tokens[self._offset : self._offset + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            self._offset += len(piece)
            self._bytes -= head.document.size * len(piece) / len(tokens)
            if self._offset < len(tokens):
                self.position = head.document.start
                self.position[Field.OFFSET] = self._offset
            else:
                self.streams.learn(head.document, len(tokens))
                self._ahead.popleft()
                self._offset = 0
                self.position = head.document.end
