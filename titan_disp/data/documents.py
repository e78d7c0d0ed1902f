"""This module reads the documents of one file, with the reader of the file's format."""

import codecs
import io
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any, BinaryIO

from isal import igzip

from titan_disp.data import formats, token_ids
from titan_disp.data.blocks import Visits
from titan_disp.data.formats import BadDocument, DamagedFile, OtherContent, Record
from titan_disp.data.listing import DataFile
from titan_disp.data.options import StreamOptions
from titan_disp.data.storage import RetryingFile, opened
from titan_disp.errors import DataError

BUFFER = 1 << 16  # small, because a rank may hold two thousand files open


def _decompressed(stored: io.BufferedReader, name: str) -> Any:
    """Return a stream with ``read`` and ``readline``. The stream is decompressed if the
    name's suffix says that the file is compressed.
    """
    if name.endswith(".gz"):
        return igzip.IGzipFile(fileobj=stored, mode="rb")
    if name.endswith(".zst"):
        return io.BufferedReader(_Zstd(stored), _READ)
    return stored


_READ = 1 << 18  # decompressed bytes


class _Zstd(io.RawIOBase):
    """The decompressed content of a zstd file, by pyarrow.

    When a read fails, pyarrow drops what this read has decompressed. The file is then
    decompressed again up to the place of this read, and byte by byte from there on.
    """

    def __init__(self, stored: io.BufferedReader) -> None:
        self._stored = stored
        self._place = 0  # decompressed bytes that were read
        self._most = _READ  # most bytes of a read
        self._stream = self._open()

    def _open(self) -> Any:
        """Return pyarrow's stream of the decompressed file."""
        import pyarrow

        # A stream that fails closes its file.
        file = SimpleNamespace(read=self._stored.read, close=lambda: None, closed=False)
        return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._most)
        try:
            data = self._stream.read(size)
        except Exception:
            raw: Any = self._stored.raw
            # Reading the file failed, or all sound bytes have been read.
            if raw.error is not None or self._most == 1:
                raise
            self._most = 1
            self._stored.seek(0)
            self._stream = self._open()
            before = self._place
            while before:
                before -= len(self._stream.read(min(before, _READ)))
            return self.readinto(buffer)
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


class _AsUtf8(io.RawIOBase):
    """The text of a stream in another encoding, converted to UTF-8.

    (``codecs`` has such readers, but their time grows with the square of the number of
    lines.)
    """

    def __init__(self, stream: Any, encoding: str) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        self._rest = io.BytesIO()  # converted, and not read yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        is_end = False
        while not (size := self._rest.readinto(buffer)) and not is_end:
            data = self._stream.read(_READ)
            is_end = not data
            self._rest = io.BytesIO(self._decoder.decode(data, is_end).encode())
        return size


class Documents:
    """Reads the documents of one file.

    ``position`` is the index of the next document, in the order of the visits.
    """

    def __init__(
        self,
        file: DataFile,
        options: StreamOptions,
        start: int = 0,
        visits: Visits | None = None,
    ) -> None:
        """The file is not opened yet.

        Documents before index ``start`` will be passed over unparsed. With ``visits``,
        the file is read block by block, without the visits that ``wants`` refuses.
        """
        self.file = file
        self.options = options
        self.position = start
        self.visits = visits
        self.wants = lambda visit: True
        self._visit = 0  # the next visit
        self._in_block = False  # whether a block that is dealt out is being read
        self._earlier_bytes = 0
        self._raw: RetryingFile | None = None
        self.stored: io.BufferedReader | None = None
        self._records: Iterator[Record] = iter(())
        self._at: Callable[..., Iterator[Record]] = lambda *span: iter(())
        self.table: Any = None  # the open Parquet file
        # if the file holds token ids: where the last document read begins, in bytes
        self.place: int | None = None

    @property
    def unit(self) -> int:
        """The unit (``Segment.key``) of the document that was read last: its visit if
        blocks are dealt out, else its index.
        """
        if self.visits is not None and self.visits.dealt:
            return self._visit - 1
        return self.position - 1

    @property
    def bytes_read(self) -> int:
        """The number of stored (compressed) bytes read so far."""
        return self._earlier_bytes + (self._raw.count if self._raw else 0)

    def read(self) -> Record | None:
        """Return the next document, unparsed, or None at the end of the file. A
        BadDocument stands for a document that cannot be used.

        If blocks are dealt out, a BadDocument also stands for the rest of a damaged
        block. On any number of ranks, only the slot that owns the block loses it.

        Raises:
            DamagedFile: the file is truncated or corrupt from here on.
            DataError: the file cannot be read but may be sound, so that skipping it
                could lose data; or the file is sound, but the config names another
                column or tokenizer.
        """
        try:
            return self._read()
        except DamagedFile as error:
            if not self._in_block:
                raise
            return self._pass_over_block(error)

    def _read(self) -> Record | None:
        """Return the next document as ``read`` does, but raise DamagedFile for a damaged
        block, too.
        """
        try:
            if self._raw is None:
                self._start()
            record = next(self._records, None)
            while record is None and self._begin_visit():
                record = next(self._records, None)
            damage = self._damage()
            if record is None and damage:
                raise DamagedFile(damage)
            self.position += record is not None
            return record
        except (DamagedFile, DataError):
            raise
        except Exception as error:  # decoders raise their own types
            raise self._failure(error) from error

    def _pass_over_block(self, error: DamagedFile) -> BadDocument:
        """Go to the visit after the damaged one, and return a BadDocument with the size
        of the part that could not be read.
        """
        assert self.visits is not None
        visit = self._visit - 1
        begin = self.visits.first[visit]
        end = self.visits.first[visit + 1]
        part = (end - self.position) / max(end - begin, 1)
        (first_byte, last_byte) = self.visits.spans[visit]
        self.close()
        self.position = end
        return BadDocument(
            f"its block cannot be read: {error}", int(part * (last_byte - first_byte))
        )

    def _failure(self, error: Exception) -> DamagedFile | DataError:
        """Return the exception to raise for a decoder's error: DataError if the bytes
        could not be read but may be sound, else DamagedFile.
        """
        damage = self._damage()
        if damage:
            return DamagedFile(damage)
        cause = self._raw.error if self._raw is not None else None
        # Decoders raise OSError too, but only the operating system sets errno.
        if cause is None and isinstance(error, OSError) and error.errno is not None:
            cause = error
        within = ""
        if self._raw is not None and cause is not None and self._raw.may_pass(cause):
            seconds = self.options.retry_seconds
            within = f" within {seconds:g} s (stream.retry_seconds)"
        self.close()
        if cause is None:
            return DamagedFile(f"{type(error).__name__}: {error}")
        return DataError(
            f"cannot read {self.file.url}{within}: {type(cause).__name__}: {cause}"
        )

    def _damage(self) -> str | None:
        """Return what is wrong after the readable part of the file, or None if no
        damage is known.
        """
        if self._raw is not None and self._raw.damage is not None:
            return self._raw.damage
        return self.file.damage if self.visits is not None else None

    def seek(self) -> None:
        """Open the file and pass over the documents before ``position``.

        Errors are left for ``read`` to raise.
        """
        try:
            self._start()
        except Exception:
            self.close()

    def _start(self) -> None:
        """Open the file at document ``position``, or at the visit that contains it."""
        self._in_block = False
        if self.file.left_out:
            return
        # A full disk leaves an empty file, which gzip would accept as complete. An empty
        # .txt file is an empty document.
        if self.file.size == 0 and not self.file.name.endswith(".txt"):
            raise DamagedFile("the file is empty")
        self._raw = opened(self.file, self.options)
        self.stored = io.BufferedReader(self._raw, self._buffer_size())
        self._at = self._reader(self.stored)
        if self.visits is not None:
            self._visit = self.visits.of(self.position)
            self._records = iter(())
        else:
            self._records = self._at()
            deque(islice(self._records, self.position), maxlen=0)

    def _buffer_size(self) -> int:
        """Return the size of the buffer that reads ahead, in bytes."""
        # small, because pyarrow jumps to the places that the footer names
        if self.file.name.endswith(formats.PARQUET):
            return io.DEFAULT_BUFFER_SIZE
        if self.visits is None:
            return BUFFER
        # small, so that little more than the block is read
        return min(max(self.file.size // (4 * len(self.visits.spans)), 512), BUFFER)

    def _begin_visit(self) -> bool:
        """Go to the next wanted visit, and return whether there is one."""
        self._in_block = False
        if self.visits is None:
            return False
        first = self.visits.first
        spans = self.visits.spans
        while self._visit < len(spans) and not self.wants(self._visit):
            self._visit += 1
        begin = first[self._visit]
        self.position = max(self.position, begin)
        if self._visit == len(spans):
            return False
        self._records = islice(
            self._at(*spans[self._visit]),
            self.position - begin,
            first[self._visit + 1] - begin,
        )
        self._visit += 1
        self._in_block = self.visits.dealt
        return True

    def _reader(self, stored: io.BufferedReader) -> Callable[..., Iterator[Record]]:
        """Return a function that yields the documents of the whole file, or of the block
        between two places.
        """
        name = self.file.name
        how = self.options.format
        if name.endswith(formats.PARQUET):
            self.table = formats.parquet_table(stored, name)
            rows = formats.rows_at_a_time(self.table.metadata)
            return partial(formats.parquet_records, self.table, self.options, rows)
        if not self.file.holds_ids:
            return self._text_reader(stored)
        of_megatron = token_ids.megatron_reader(stored, self.file, how)
        if of_megatron is not None:
            return of_megatron
        return partial(self._ids, stored, token_ids.layout_of(stored, self.file, how))

    def _text_reader(
        self, stored: io.BufferedReader
    ) -> Callable[..., Iterator[Record]]:
        """Return the function of ``_reader`` for a file of text.

        Raises OtherContent if the file has another format.
        """
        name = self.file.name
        encoding = self.file.encoding
        head = stored.peek(formats.HEAD)[: formats.HEAD]
        # the hub's answer may come in pieces as small as one byte
        if len(head) < min(formats.HEAD, self.file.size):
            head = stored.read(formats.HEAD)
            stored.seek(0)
        mistake = formats.mistaken(head, name)
        if mistake is not None and not encoding:
            raise OtherContent(mistake)
        read = formats.reader_of(name, self.options.format)

        def at(begin: int = 0, end: int = 0) -> Iterator[Record]:
            stored.seek(begin)
            stream: Any
            # A block is read at once, unless it is a single long document.
            if 0 < end - begin <= 1 << 20:
                stream = io.BytesIO(stored.read(end - begin))
            else:
                stream = _decompressed(stored, name)
            if encoding:
                stream = io.BufferedReader(_AsUtf8(stream, encoding), _READ)
            return read(stream, self.options.max_document_bytes)

        return at

    def _ids(
        self, stored: BinaryIO, layout: token_ids.Layout, *span: int
    ) -> Iterator[Record]:
        """Yield each document's ids, and set ``place`` to the document's beginning."""
        for self.place, ids in token_ids.located(stored, layout, *span):
            yield ids

    def close(self) -> None:
        """Close the file. A later ``read`` opens it again and continues."""
        if self._raw is not None:
            self._earlier_bytes += self._raw.count
            raw = self._raw
            self._raw = None
            raw.close()
