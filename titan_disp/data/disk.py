"""This module reads files on a local or shared file system. Reads that fail transiently are tried again."""

import errno
import io

from titan_disp.data.retrying_file import RetryingFile
from titan_disp.errors import DataError

# Network file systems raise these while their server changes or restarts.
PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN)


class LocalFile(RetryingFile):
    """Read a file sequentially or at random. After a transient failure, the file is reopened and read again.

    Raises:
        DataError: the file's size is not the one that was listed, on opening or while it is read.
        OSError: the file cannot be opened or read.
    """

    def __init__(self, path: str, size: int, retry_seconds: float) -> None:
        super().__init__(path, size, retry_seconds)
        self._file: io.FileIO | None = None
        self._again(self._open)

    def read(self, size: int = -1) -> bytes:
        """Return at most ``size`` bytes, or b"" at the end of the file."""
        wanted = self._at_most(size)
        found = self._again(lambda: self._read(wanted))
        if wanted and not found:  # a reader would take this for the end of the documents, or for damage
            raise self._changed(self._place)
        self._place += len(found)
        return found

    def close(self) -> None:
        self._let_go()
        super().close()

    def _open(self) -> io.FileIO:
        if self._file is None:
            self._file = io.FileIO(self._name)
            now = self._file.seek(0, io.SEEK_END)
            if now != self._size:
                self._let_go()
                raise self._changed(now)
        return self._file

    def _changed(self, now: int) -> DataError:
        return DataError(
            f"{self._name} has {now} bytes, but had {self._size} when the files were listed: it was changed or cut off "
            "meanwhile, or another node sees another copy. Restore it, or start the run again to list the files anew"
        )

    def _read(self, size: int) -> bytes:
        file = self._open()
        if file.tell() != self._place:
            file.seek(self._place)
        return file.read(size)

    def _let_go(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _may_pass(self, error: Exception) -> bool:
        if not isinstance(error, OSError):
            return False
        self._let_go()  # the next attempt opens it again
        return error.errno in PASSING
