"""What files on disk and on the hub have in common: a place that moves with reads, and reads that are tried again."""

import io
import random
import time
from collections.abc import Callable
from typing import TypeVar

from torchtitan.tools.logging import logger

T = TypeVar("T")
FIRST_PAUSE = 1.0  # seconds, on average, doubled up to …
LONGEST_PAUSE = 15.0

# Ranks that failed together must not ask again together. It is the system's randomness because DataLoader seeds ``random`` in
# the prefetch workers of all ranks alike, from debug.seed.
uniform = random.SystemRandom().uniform


class RetryingFile(io.RawIOBase):
    """A file of a known size, read at any place. Subclasses say which failures of a read may pass.

    Args:
        name: path or url, for messages.
        size: bytes, as listed.
        retry_seconds: how long a read is tried again, with growing pauses.
    """

    def __init__(self, name: str, size: int, retry_seconds: float) -> None:
        self._name, self._size, self._retry_seconds, self._place = name, size, retry_seconds, 0

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

    def _pauses(self, error: Exception, pause: float) -> tuple[float, float]:
        """The shortest and the longest pause before another try, seconds. ``pause`` is the usual one, after so many tries."""
        return pause / 2, pause * 3 / 2

    def _pause(self, error: Exception, seconds: float) -> None:
        """Wait before another try."""
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        logger.warning(f"data: {self._name}: {reason}: tried again in {seconds:.2g} s")
        time.sleep(seconds)

    def _again(self, attempt: Callable[[], T]) -> T:
        """What ``attempt`` returns or raises, tried again until ``retry_seconds`` are over: one deadline for all tries."""
        deadline, pause = time.monotonic() + self._retry_seconds, FIRST_PAUSE
        while True:
            try:
                return attempt()
            except Exception as error:
                shortest, longest = self._pauses(error, pause)
                left = deadline - time.monotonic()
                if not self._may_pass(error) or shortest > left:
                    raise
                self._pause(error, min(uniform(shortest, longest), left))
                pause = min(2 * pause, LONGEST_PAUSE)
