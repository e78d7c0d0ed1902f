"""This module reads the documents of one file by the reader of its format."""

import codecs
import gzip
import io
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any, BinaryIO

from isal import igzip, isal_zlib

from titan_disp.data import formats, megatron, token_ids
from titan_disp.data.blocks import Visits
from titan_disp.data.formats import BadDocument, DamagedFile, OtherContent, Record
from titan_disp.data.listing import DataFile
from titan_disp.data.options import StreamOptions
from titan_disp.data.storage import RetryingFile, opened
from titan_disp.errors import DataError

BUFFER = 1 << 16  # small, because a rank may hold two thousand files open


def _decompressed(stored: io.BufferedReader, name: str) -> Any:
    """Return a stream with ``read`` and ``readline``, decompressed if the suffix says
    that the file is compressed.
    """
    if name.endswith(".gz"):
        return igzip.IGzipFile(fileobj=stored, mode="rb")
    return (
        io.BufferedReader(_Zstd(stored), 1 << 18) if name.endswith(".zst") else stored
    )


class _Zstd(io.RawIOBase):
    """Decompress a file by pyarrow, which drops what a failing read has decompressed:
    that is read again byte by byte.
    """

    def __init__(self, stored: io.BufferedReader) -> None:
        self._stored = stored
        self._place = 0
        self._error: Exception | None = None
        self._open()

    def _open(self) -> None:
        import pyarrow

        # A stream that fails closes its file.
        file = SimpleNamespace(read=self._stored.read, close=lambda: None, closed=False)
        self._stream = pyarrow.CompressedInputStream(
            pyarrow.PythonFile(file, "r"), "zstd"
        )

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._error is not None:
            raise self._error
        try:
            data = self._stream.read(len(buffer))
        except Exception as error:
            raw: Any = self._stored.raw
            if raw.error is not None:  # the content is not to blame
                raise
            data = self._up_to(self._place + len(buffer))
            self._error = error
            if not data:
                raise
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def _up_to(self, end: int) -> bytes:
        """Return what can be decompressed from ``_place`` on, before the failure."""
        self._stored.seek(0)
        self._open()
        left = self._place
        found = bytearray()
        while left:
            left -= len(self._stream.read(min(left, 1 << 18)))
        with suppress(Exception):
            while self._place + len(found) < end and (byte := self._stream.read(1)):
                found += byte
        return bytes(found)


class Documents:
    """Read the documents of one file.

    ``position`` is the index of the next one, in the order of the visits.
    """

    def __init__(
        self,
        file: DataFile,
        options: StreamOptions,
        start: int = 0,
        visits: Visits | None = None,
    ) -> None:
        """Open nothing yet.

        The documents before index ``start`` will be passed over without being parsed.

        With ``visits``, the file is read block by block, without the visits that
        ``wants`` refuses.
        """
        self.file = file
        self.options = options
        self.position = start
        self.visits = visits
        self.wants = lambda visit: True
        # the next visit; whether the one before is of a block that is dealt out
        self._visit = 0
        self._in_block = False
        self._earlier_bytes = 0
        self._raw: RetryingFile | None = None
        self.stored: io.BufferedReader | None = None
        self._records: Iterator[Record] = iter(())
        self._at: Callable[..., Iterator[Record]] = lambda *span: iter(())
        self.table: Any = None  # of a Parquet file that is open
        # in bytes, of a document of token ids that was read last
        self.place: int | None = None

    @property
    def unit(self) -> int:
        """Return the number, for ``Segment.key``, of the document that was read last,
        or of its visit.
        """
        return (
            self._visit - 1
            if self.visits is not None and self.visits.dealt
            else self.position - 1
        )

    @property
    def bytes_read(self) -> int:
        """Return the number of stored (compressed) bytes read so far."""
        return self._earlier_bytes + (self._raw.count if self._raw else 0)

    def read(self) -> Record | None:
        """Read the next document, unparsed: a BadDocument in place of one that cannot
        be used, None at the end of the file.

        If blocks are dealt out, a damaged one is a BadDocument: on any ranks, only the
        slot that owns it loses it.

        Raises:
            DamagedFile: the file is truncated or corrupt from here on.
            DataError: it cannot be read, although it may be sound, so that skipping it
                would lose data; or the config does not fit a sound file (its column,
                its tokenizer).
        """
        try:
            return self._read()
        except DamagedFile as error:
            if not self._in_block:
                raise
            assert self.visits is not None
            visit = self._visit - 1
            begin = self.position
            self.close()
            self.position = self.visits.first[visit + 1]
            (first, last) = self.visits.spans[visit]
            part = (self.position - begin) / max(
                self.position - self.visits.first[visit], 1
            )
            return BadDocument(
                f"its block cannot be read: {error}", int(part * (last - first))
            )

    def _read(self) -> Record | None:
        try:
            if self._raw is None:
                self._start()
            record = next(self._records, None)
            while record is None and self._begin_visit():
                record = next(self._records, None)
            if record is None and (damage := self._damage()):
                raise DamagedFile(damage)
            self.position += record is not None
            return record
        except (DamagedFile, DataError):
            raise
        except (EOFError, zlib.error, isal_zlib.error, gzip.BadGzipFile) as error:  # type: ignore[misc]  # isal's stub
            raise DamagedFile(
                self._damage() or f"{type(error).__name__}: {error}"
            ) from error
        except Exception as error:  # pyarrow raises its own
            if damage := self._damage():
                raise DamagedFile(damage) from error
            remote = self._raw if self.file.remote else None
            self.close()
            if remote is not None and (lost := remote.error) is not None:
                within = (
                    f" within {self.options.retry_seconds:g} s (stream.retry_seconds)"
                    if remote.may_pass(lost)
                    else ""
                )
                raise DataError(
                    f"cannot read {self.file.url}{within}: {type(lost).__name__}: "
                    f"{lost}"
                ) from error
            # Decoders raise OSError too, but only the operating system sets errno.
            if remote is not None or not (
                isinstance(error, OSError) and error.errno is not None
            ):
                raise DamagedFile(f"{type(error).__name__}: {error}") from error
            raise DataError(
                f"cannot read {self.file.url}: {type(error).__name__}: {error}"
            ) from error

    def _damage(self) -> str | None:
        found = self._raw.damage if self._raw is not None else None
        return found or (self.file.damage if self.visits is not None else None)

    def seek(self) -> None:
        """Open the file and pass over the documents before ``position``.

        Errors are left for ``read`` to raise.
        """
        try:
            self._start()
        except Exception:
            self.close()

    def _start(self) -> None:
        self._in_block = False
        if self.file.left_out:
            return
        # A full disk leaves an empty file, which gzip would take for a regular end. As
        # text, it is an empty document.
        if self.file.size == 0 and not self.file.name.endswith(".txt"):
            raise DamagedFile("the file is empty")
        self._raw = opened(self.file, self.options)
        buffer = BUFFER
        # its readers jump about in the file, to where its footer points
        if self.file.name.endswith(formats.PARQUET):
            buffer = io.DEFAULT_BUFFER_SIZE
        elif self.visits is not None:  # little more than a block is read to its end
            buffer = min(
                max(self.file.size // (4 * len(self.visits.spans)), 512), BUFFER
            )
        self.stored = io.BufferedReader(self._raw, buffer)
        self._at = self._reader(self.stored)
        if self.visits is not None:
            self._visit = self.visits.of(self.position)
            self._records = iter(())
        else:
            self._records = self._at()
            deque(islice(self._records, self.position), maxlen=0)

    def _begin_visit(self) -> bool:
        """Go to the next visit that is wanted, and return whether there is one."""
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
        self._visit = self._visit + 1
        self._in_block = self.visits.dealt
        return True

    def _reader(self, stored: io.BufferedReader) -> Callable[..., Iterator[Record]]:
        """Return a function that reads the whole file, or the block between two
        places.
        """
        name = self.file.name
        if name.endswith(formats.PARQUET):
            self.table = formats.parquet_table(stored, name)
            rows = formats.rows_at_a_time(self.table.metadata)
            return partial(formats.parquet_records, self.table, self.options, rows)
        if name.endswith(formats.TOKEN_IDS):
            how = self.options.format
            if (reader := megatron.reader(stored, self.file, how)) is not None:
                return reader
            return partial(
                self._ids, stored, token_ids.layout_of(stored, self.file, how)
            )
        head = stored.peek(formats.HEAD)[: formats.HEAD]
        # a piece of the hub's answer may be a single byte
        if len(head) < min(formats.HEAD, self.file.size):
            head = stored.read(formats.HEAD)
            stored.seek(0)
        encoding = self.file.encoding
        if not encoding and (found := formats.mistaken(head, name)) is not None:
            raise OtherContent(found)
        read = formats.reader_of(name, self.options.format)

        def at(begin: int = 0, end: int = 0) -> Iterator[Record]:
            stored.seek(begin)
            # a block in one read; a larger one is a single long document
            whole = 0 < end - begin <= 1 << 20
            stream = (
                io.BytesIO(stored.read(end - begin))
                if whole
                else _decompressed(stored, name)
            )
            if encoding:
                stream = codecs.EncodedFile(stream, "utf-8", encoding, "replace")
            return read(stream, self.options.max_document_bytes)

        return at

    def _ids(
        self, stored: BinaryIO, layout: token_ids.Layout, *span: int
    ) -> Iterator[Record]:
        for self.place, ids in token_ids.located(stored, layout, *span):
            yield ids

    def close(self) -> None:
        """Close the file. A later ``read`` opens it again and continues."""
        if self._raw is not None:
            self._earlier_bytes += self._raw.count
            raw = self._raw
            self._raw = None
            raw.close()
