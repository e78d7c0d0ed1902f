"""A file on a local or shared file system, read again where the system fails for a moment."""

import errno
import io
import time
from collections.abc import Callable
from typing import TypeVar

from torchtitan.tools.logging import logger

from titan_disp.errors import DataError

T = TypeVar("T")
PASSING = (
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EAGAIN,
)  # of network file systems whose server changes or restarts
FIRST_PAUSE = 1.0  # seconds, doubled up to …
LONGEST_PAUSE = 15.0


class LocalFile(io.RawIOBase):
    """Sequential or random reads; a failure that may pass is tried again at the same place of a newly opened file."""

    def __init__(self, path: str, size: int, retry_seconds: float) -> None:
        """Args: size: bytes, as listed. retry_seconds: for a read, with growing pauses.

        Raises:
            DataError: it has another size now.
            OSError: it cannot be opened.
        """
        self._path, self._size, self._retry_seconds, self._place = path, size, retry_seconds, 0
        self._file: io.FileIO | None = None
        self._again(self._open)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def read(self, size: int = -1) -> bytes:
        """At most ``size`` bytes; none at the end."""
        found = self._again(lambda: self._read(size))
        self._place += len(found)
        return found

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        super().close()

    def _open(self) -> io.FileIO:
        if self._file is None:
            self._file = io.FileIO(self._path)
            now = self._file.seek(0, io.SEEK_END)
            if now != self._size:
                raise DataError(
                    f"{self._path} has {now} bytes, but had {self._size} when the files were listed: it was changed or cut off "
                    "meanwhile, or another node sees another copy. Restore it, or start the run again to list the files anew"
                )
        return self._file

    def _read(self, size: int) -> bytes:
        file = self._open()
        if file.tell() != self._place:
            file.seek(self._place)
        return file.read(size)

    def _again(self, attempt: Callable[[], T]) -> T:
        deadline, pause = time.monotonic() + self._retry_seconds, FIRST_PAUSE
        while True:
            try:
                return attempt()
            except OSError as error:
                if self._file is not None:
                    self._file.close()
                    self._file = None
                if error.errno not in PASSING or time.monotonic() + pause > deadline:
                    raise
                logger.warning(f"data: {self._path}: {error}: tried again in {pause:g} s")
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
