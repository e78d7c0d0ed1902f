"""This module holds what local and remote files share: a place that reads advance, and reads that are tried again."""

import io
import random
import time
from collections.abc import Callable
from typing import TypeVar

from torchtitan.tools.logging import logger

T = TypeVar("T")
FIRST_PAUSE = 1.0  # seconds on average; it doubles with every try up to …
LONGEST_PAUSE = 15.0

# Ranks that failed at the same time must not try again at the same time. The randomness is the system's, because
# DataLoader seeds ``random`` alike in the prefetch workers of all ranks (from debug.seed).
uniform = random.SystemRandom().uniform


class RetryingFile(io.RawIOBase):
    """Represent a file of known size that can be read at any place. Subclasses say which failures are tried again.

    Args:
        name: path or URL, for messages.
        size: in bytes, as listed.
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

    def _at_most(self, size: int) -> int:
        """Return how many bytes ``read(size)`` may give: none beyond the end, all that are left for a negative size."""
        left = max(0, self._size - self._place)
        return left if size < 0 else min(size, left)

    def _may_pass(self, error: Exception) -> bool:
        """Return whether another try may succeed after this error."""
        return True

    def _pauses(self, error: Exception, pause: float) -> tuple[float, float]:
        """Return the shortest and the longest pause before the next try, in seconds. ``pause`` is their usual mean."""
        return pause / 2, pause * 3 / 2

    def _pause(self, error: Exception, seconds: float) -> None:
        """Wait before another try."""
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        logger.warning(f"data: {self._name}: {reason}: trying again in {seconds:.2g} s")
        time.sleep(seconds)

    def _again(self, attempt: Callable[[], T]) -> T:
        """Return what ``attempt`` returns. Errors that may pass are tried again for ``retry_seconds``, then raised."""
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
