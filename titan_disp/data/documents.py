"""The documents of one file, one after the other: JSON lines (plain, gzip, zstd) and Parquet.

Documents that a reader does not want are passed over without being parsed.
"""

import gzip
import io
import json
import zlib
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from isal import igzip, isal_zlib

from titan_disp.data.disk import LocalFile
from titan_disp.data.files import DataFile
from titan_disp.data.remote import RemoteFile
from titan_disp.errors import DataError

COMPRESSED = (".gz", ".zst")
DRAIN = 1 << 20
BUFFER = 1 << 16  # a rank may hold two thousand files open


class BadDocument(Exception):
    """One document that cannot be used; the message says why."""


class Garbage(BadDocument):
    """One that is no JSON or no UTF-8, as flipped bytes in a compressed file make them, many in a row."""


class DamagedFile(Exception):
    """The rest of a file that cannot be read; the message says why."""


class _CountingFile(io.RawIOBase):
    """A raw file that counts what is read from it: compressed bytes, as they cross the network or the disk."""

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


def text_of(raw: bytes | str) -> str:
    """The text of a document.

    Args:
        raw: a JSON line, or the text itself (Parquet).

    Raises:
        BadDocument: no text, empty text; ``Garbage``: invalid UTF-8, malformed JSON.
    """
    if isinstance(raw, bytes):
        try:
            record = json.loads(raw)
        except UnicodeDecodeError as error:
            raise Garbage(f"invalid UTF-8: {error.reason} at byte {error.start}") from error
        except (ValueError, RecursionError) as error:
            raise Garbage(f"malformed JSON: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise BadDocument('no field "text"')
        text: str = record["text"]
    else:
        text = raw
    if not text.strip():
        raise BadDocument("empty text")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON may escape half of a surrogate pair, which no tokenizer takes
        raise BadDocument(f"invalid Unicode: {error.reason} at character {error.start}") from error
    return text


class Documents:
    """Sequential reader of one file.

    Attributes:
        position: index of the next document.
    """

    def __init__(self, file: DataFile, max_bytes: int, retry_seconds: float = 60.0, start: int = 0) -> None:
        """Open lazily, at the first read.

        Args:
            file: what to read.
            max_bytes: longer documents are bad.
            retry_seconds: how long the hub or a file system that fails is tried again, with growing pauses, before it counts.
            start: index of the first document to read; those before it are passed over unparsed.
        """
        self.file = file
        self.max_bytes = max_bytes
        self.retry_seconds = retry_seconds
        self.position = start
        self._earlier_bytes = 0
        self._raw: _CountingFile | None = None
        self._remote: RemoteFile | None = None
        self._records: Iterator[bytes | str | BadDocument] = iter(())

    @property
    def bytes_read(self) -> int:
        """Stored (compressed) bytes read so far."""
        return self._earlier_bytes + (self._raw.count if self._raw else 0)

    def read(self) -> bytes | str | BadDocument | None:
        """The next document, unparsed; a BadDocument in its place; None at the end.

        Raises:
            DamagedFile: truncated or corrupt from here on.
            DataError: missing, not permitted, of another size than listed, or a disk or hub that failed for ``retry_seconds``:
                the file may be sound, so that passing over it would lose data.
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
                    f"cannot read {self.file.url} within {self.retry_seconds:g} s (stream.retry_seconds): "
                    f"{type(lost).__name__}: {lost}"
                ) from error
            # Decoders raise OSError too, but only the operating system gives it a number.
            if self._remote is not None or not (isinstance(error, OSError) and error.errno is not None):
                raise DamagedFile(f"{type(error).__name__}: {error}") from error
            raise DataError(f"cannot read {self.file.url}: {type(error).__name__}: {error}") from error

    def seek(self) -> None:
        """Open the file and pass over what comes before the first document wanted; an error is left for ``read`` to find."""
        try:
            self._start()
        except Exception:
            self.close()

    def _start(self) -> None:
        """Open, and pass over the documents before ``position``."""
        if self.file.size == 0:  # what a full disk leaves; gzip would take it for a sound end
            raise DamagedFile("the file is empty")
        if self.file.url.startswith("hf://"):
            self._remote = RemoteFile(self.file.url, self.file.size, self.retry_seconds)
            self._raw = _CountingFile(self._remote)
        else:
            self._raw = _CountingFile(LocalFile(self.file.url, self.file.size, self.retry_seconds))
        self._records = self._parquet() if self.file.name.endswith(".parquet") else self._lines()
        deque(islice(self._records, self.position), maxlen=0)

    def _lines(self) -> Iterator[bytes | BadDocument]:
        assert self._raw is not None
        stored = io.BufferedReader(self._raw, BUFFER)
        lines: Any
        if self.file.name.endswith(".gz"):
            lines = igzip.IGzipFile(fileobj=stored, mode="rb")
        elif self.file.name.endswith(".zst"):
            import pyarrow

            lines = io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(stored, "r"), "zstd"), 1 << 18)
        else:
            lines = stored
        while line := lines.readline(self.max_bytes + 1):
            if len(line) > self.max_bytes and not line.endswith(b"\n"):
                size = len(line)
                while (rest := lines.readline(DRAIN)) and not rest.endswith(b"\n"):
                    size += len(rest)
                yield BadDocument(f"{size + len(rest):,} bytes, more than stream.max_document_mb allows")
            else:
                yield line

    def _parquet(self) -> Iterator[str | BadDocument]:
        import pyarrow.parquet

        assert self._raw is not None
        with pyarrow.parquet.ParquetFile(pyarrow.PythonFile(io.BufferedReader(self._raw), "r")) as table:
            if "text" not in table.schema_arrow.names:
                raise DamagedFile(f'no column "text", only {", ".join(table.schema_arrow.names)}')
            for batch in table.iter_batches(batch_size=256, columns=["text"]):
                for value in batch.column(0):
                    text = value.as_py()
                    if not isinstance(text, str):
                        yield BadDocument("text is null or not a string")
                    elif len(text) > self.max_bytes:
                        yield BadDocument(f"{len(text):,} characters, more than stream.max_document_mb allows")
                    else:
                        yield text

    def close(self) -> None:
        """Close the file; ``read`` would open it again and go on."""
        if self._raw is not None:
            self._earlier_bytes += self._raw.count
            raw, self._raw, self._remote = self._raw, None, None
            raw.close()
