"""What files on disk and on the hub have in common: a place that moves with reads, and reads that are tried again."""

import io
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
FIRST_PAUSE = 1.0  # seconds, doubled up to …
LONGEST_PAUSE = 15.0


class RetryingFile(io.RawIOBase):
    """A file of a known size, read at any place. Subclasses say which failures of a read may pass.

    Args:
        size: bytes, as listed.
        retry_seconds: how long a read is tried again, with growing pauses.
    """

    def __init__(self, size: int, retry_seconds: float) -> None:
        self._size, self._retry_seconds, self._place = size, retry_seconds, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def _may_pass(self, error: Exception) -> bool:
        """Whether what failed with this error is worth another try."""
        return True

    def _pause(self, error: Exception, seconds: float) -> None:
        """Wait before another try."""
        time.sleep(seconds)

    def _again(self, attempt: Callable[[], T]) -> T:
        """What ``attempt`` returns or raises, tried again until ``retry_seconds`` are over: one deadline for all tries."""
        deadline, pause = time.monotonic() + self._retry_seconds, FIRST_PAUSE
        while True:
            try:
                return attempt()
            except Exception as error:
                if not self._may_pass(error) or time.monotonic() + pause > deadline:
                    raise
                self._pause(error, pause)
                pause = min(2 * pause, LONGEST_PAUSE)
