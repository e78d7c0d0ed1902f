"""This module reads the documents of one file, one after another, by the reader of its format.

Documents that no slot of this rank owns are passed over without being parsed.
"""

import gzip
import io
import zlib
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from isal import igzip, isal_zlib

from titan_disp.data import token_ids
from titan_disp.data.files import DataFile
from titan_disp.data.formats import (
    HEAD,
    PARQUET,
    PLAIN_TEXT,
    TOKEN_IDS,
    DamagedFile,
    OtherContent,
    Record,
    json_line_records,
    mistaken,
    parquet_records,
    text_records,
)
from titan_disp.data.options import StreamOptions
from titan_disp.data.storage import LocalFile, RemoteFile
from titan_disp.errors import DataError

BUFFER = 1 << 16  # small, because a rank may hold two thousand files open


def _decompressed(stored: io.BufferedReader, name: str) -> Any:
    """Return a stream with ``read`` and ``readline``, decompressed if the suffix says that the file is compressed."""
    if name.endswith(".gz"):
        return igzip.IGzipFile(fileobj=stored, mode="rb")
    if name.endswith(".zst"):
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(stored, "r"), "zstd"), 1 << 18)
    return stored


class _CountingFile(io.RawIOBase):
    """Count the stored (compressed) bytes that are read from a raw file."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self.raw = raw
        self.count = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self.raw.seekable()

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.raw.seek(offset, whence)

    def tell(self) -> int:
        return self.raw.tell()

    def readinto(self, buffer: Any) -> int:
        data = self.raw.read(len(buffer))
        buffer[: len(data)] = data
        self.count += len(data)
        return len(data)

    def close(self) -> None:
        self.raw.close()
        super().close()


class Documents:
    """Read the documents of one file sequentially.

    Attributes:
        position: index of the next document.
    """

    def __init__(self, file: DataFile, options: StreamOptions, start: int = 0) -> None:
        """Open nothing yet: the file is opened at the first read.

        Args:
            file: what to read.
            options: how documents are found, which are too long, and how long a failing read is tried again.
            start: index of the first document to read; the documents before it are passed over without being parsed.
        """
        self.file, self.options, self.position = file, options, start
        self._earlier_bytes = 0
        self._raw: _CountingFile | None = None
        self._remote: RemoteFile | None = None
        self._records: Iterator[Record] = iter(())

    @property
    def bytes_read(self) -> int:
        """Return the number of stored (compressed) bytes read so far."""
        return self._earlier_bytes + (self._raw.count if self._raw else 0)

    def read(self) -> Record | None:
        """Read the next document, unparsed.

        Returns:
            The document, a BadDocument in place of one that cannot be used, or None at the end of the file.

        Raises:
            DamagedFile: the file is truncated or corrupt from here on.
            DataError: the file is missing, not readable or of another size than listed, or the disk or hub failed for
                ``retry_seconds``; the file may be sound, so that skipping it would lose data. Or the config does not
                fit a sound file: it has no such column, or its token ids are another tokenizer's.
        """
        try:
            if self._raw is None:
                self._start()
            record = next(self._records, None)
            self.position += record is not None
            return record
        except (DamagedFile, DataError):
            raise
        except (EOFError, zlib.error, isal_zlib.error, gzip.BadGzipFile) as error:  # type: ignore[misc]  # isal's stub
            raise DamagedFile(f"{type(error).__name__}: {error}") from error
        except Exception as error:  # pyarrow raises its own
            lost = self._remote.error if self._remote is not None else None
            self.close()
            if lost is not None:
                raise DataError(
                    f"cannot read {self.file.url} within {self.options.retry_seconds:g} s (stream.retry_seconds): "
                    f"{type(lost).__name__}: {lost}"
                ) from error
            # Decoders raise OSError too, but only the operating system sets errno.
            if self._remote is not None or not (isinstance(error, OSError) and error.errno is not None):
                raise DamagedFile(f"{type(error).__name__}: {error}") from error
            raise DataError(f"cannot read {self.file.url}: {type(error).__name__}: {error}") from error

    def seek(self) -> None:
        """Open the file and pass over the documents before ``position``. Errors are left for ``read`` to raise."""
        try:
            self._start()
        except Exception:
            self.close()

    def _start(self) -> None:
        if self.file.size == 0:  # as a full disk leaves it; gzip would take it for a regular end
            raise DamagedFile("the file is empty")
        if self.file.url.startswith("hf://"):
            self._remote = RemoteFile(self.file, self.options)
        self._raw = _CountingFile(self._remote or LocalFile(self.file, self.options))
        # Parquet readers jump about in the file, to where its footer points.
        buffer = io.DEFAULT_BUFFER_SIZE if self.file.name.endswith(PARQUET) else BUFFER
        self._records = self._reader(io.BufferedReader(self._raw, buffer))
        deque(islice(self._records, self.position), maxlen=0)

    def _reader(self, stored: io.BufferedReader) -> Iterator[Record]:
        """Return the file's records, by the reader that the suffix of its name selects."""
        name = self.file.name
        if name.endswith(PARQUET):
            return parquet_records(stored, self.file.url, self.options)
        if name.endswith(TOKEN_IDS):
            return token_ids.records(stored, self.file, self.options.format)
        head = stored.peek(HEAD)[:HEAD]
        if len(head) < min(HEAD, self.file.size):  # a piece of the hub's answer may be a single byte
            head = stored.read(HEAD)
            stored.seek(0)
        if (found := mistaken(head, name)) is not None:
            raise OtherContent(found)
        if name.endswith(PLAIN_TEXT):
            return text_records(_decompressed(stored, name), self.options)
        return json_line_records(_decompressed(stored, name), self.options)

    def close(self) -> None:
        """Close the file. A later ``read`` opens it again and continues."""
        if self._raw is not None:
            self._earlier_bytes += self._raw.count
            raw, self._raw, self._remote = self._raw, None, None
            raw.close()
