"""This module reads the bytes of a file: on a local or shared file system, or on the hub. Failed reads are tried again.

A file on the hub is read by one request that is held open. Only its content is requested: its place and size were found
once, on rank 0. ``HfFileSystem`` would ask for the repository and list its folder in every thread of every rank, and
the hub answers 429 to hundreds of ranks. The hub counts requests, not bytes. As long as reads go forward, a file
therefore takes one request, from the first byte wanted to its end, and one more after each broken connection.
"""

import errno
import io
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

from torchtitan.tools.logging import logger

from titan_disp.data.files import DataFile
from titan_disp.data.formats import PARQUET
from titan_disp.data.options import StreamOptions
from titan_disp.errors import DataError

T = TypeVar("T")
FIRST_PAUSE = 1.0  # seconds on average; it doubles with every try up to …
LONGEST_PAUSE = 15.0

# Ranks that failed at the same time must not try again at the same time. The randomness is the system's, because
# DataLoader seeds ``random`` alike in the prefetch workers of all ranks (from debug.seed).
uniform = random.SystemRandom().uniform


ZEROS = bytes(4096)


class RetryingFile(io.RawIOBase):
    """Represent a file that can be read at any place. Subclasses say which failures are tried again.

    A file ends where a block of it was never written, which ``damage`` then says. A decoder would take zeros for text.
    """

    def __init__(self, file: DataFile, options: StreamOptions) -> None:
        self._name, self._size, self._place = file.url, file.size, 0
        self.count = 0  # bytes that a buffer has read
        self._retry_seconds = options.retry_seconds
        self.error: Exception | None = None  # on giving up; decoders hide it in exceptions of their own
        # What is wrong with the content. Parquet files may hold zeros, and say themselves what is damaged.
        self.damage: str | None = None
        self._zeros = b"" if file.name.endswith(PARQUET) else ZEROS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer)) if self.damage is None else b""
        if self._zeros and self._zeros in data:  # the documents before them are sound
            self.damage = f"{len(ZEROS):,} bytes of zeros in a row, as a disk that was full or failed leaves them"
            data = data.partition(ZEROS)[0]
        buffer[: len(data)] = data
        self.count += len(data)
        return len(data)

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        """Return at most ``size`` bytes, as many as have come, or b"" at the end of the file."""
        left = max(0, self._size - self._place)
        wanted = left if size < 0 else min(size, left)
        if not wanted:
            return b""
        try:
            found = self._again(lambda: self._read(wanted))
        except Exception as error:  # httpx and huggingface_hub raise their own
            self.error = error
            raise
        self._place += len(found)
        return found

    def close(self) -> None:
        self._let_go()
        super().close()

    def _read(self, size: int) -> bytes:
        raise NotImplementedError

    def _let_go(self) -> None:
        """Close what the reads hold open; the next one opens it again."""
        raise NotImplementedError

    def _may_pass(self, error: Exception) -> bool:
        return True

    def _pauses(self, error: Exception, pause: float) -> tuple[float, float]:
        """Return the shortest and the longest pause before the next try, in seconds. ``pause`` is their usual mean."""
        return pause / 2, pause * 3 / 2

    def _pause(self, error: Exception, seconds: float) -> None:
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


# Network file systems raise these while their server changes or restarts.
PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN)


class LocalFile(RetryingFile):
    """Read a local file. After a transient failure, it is reopened and read again."""

    def __init__(self, file: DataFile, options: StreamOptions) -> None:
        super().__init__(file, options)
        self._file: io.FileIO | None = None
        self._again(self._open)

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
            f"{self._name} has {now} bytes, but had {self._size} when the files were listed: it was changed meanwhile, or "
            "another node sees another copy. Restore it, or start the run again to list the files anew"
        )

    def _read(self, size: int) -> bytes:
        file = self._open()
        if file.tell() != self._place:
            file.seek(self._place)
        if not (found := file.read(size)):  # a reader would take this for the end of the documents, or for damage
            raise self._changed(self._place)
        return found

    def _let_go(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _may_pass(self, error: Exception) -> bool:
        if not isinstance(error, OSError):
            return False
        self._let_go()  # the next attempt opens it again
        return error.errno in PASSING


GAP = 4 << 20  # up to this many bytes are read and dropped to get to a later place; a new request takes about as long
REQUEST_SECONDS = 10.0  # time-out without a byte


class RemoteFile(RetryingFile):
    """Read a file named hf://datasets/OWNER/NAME@COMMIT/PATH. After any failure of the hub, the read is tried again."""

    def __init__(self, file: DataFile, options: StreamOptions) -> None:
        from huggingface_hub import hf_hub_url

        super().__init__(file, options)
        matched = re.fullmatch(r"hf://datasets/([^/]+/[^/@]+)@([^/]+)/(.+)", file.url)
        assert matched is not None, file.url
        self._url = hf_hub_url(matched[1], matched[3], repo_type="dataset", revision=matched[2])
        self._answer: _Answer | None = None

    def _read(self, size: int) -> bytes:
        try:
            if self._answer is None or not 0 <= self._place - self._answer.place <= GAP:
                self._let_go()
                self._answer = _Answer(self._url, self._place, self._size)
            while self._answer.place < self._place:
                self._answer.take(self._place - self._answer.place)
            found = self._answer.take(size)
        except Exception:
            self._let_go()
            raise
        if self._place + len(found) == self._size:
            self._let_go()
        return found

    def _let_go(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def _pauses(self, error: Exception, pause: float) -> tuple[float, float]:
        """Return at least what the hub asks for, and so long a range that the ranks wait for different times."""
        asked = _seconds_asked(error)
        if asked is None:
            return super()._pauses(error, pause)
        return asked, asked + min(max(1.0, asked / 4), LONGEST_PAUSE)


class _Answer:
    """Hold the hub's answer to one request. ``place`` is the place in the file of its next byte."""

    def __init__(self, url: str, begin: int, size: int) -> None:
        """Request a file of ``size`` bytes from byte ``begin`` on. The answer may begin earlier."""
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        headers = {**build_hf_headers(), "Range": f"bytes={begin}-", "Accept-Encoding": "identity"}
        request = _client().build_request("GET", url, headers=headers, timeout=REQUEST_SECONDS)
        self._response = _client().send(request, stream=True)
        try:
            hf_raise_for_status(self._response)
            self.place = _first_byte(self._response, begin, size)
        except Exception:
            self._response.close()
            raise
        self._pieces: Iterator[bytes] = self._response.iter_raw()
        self._piece = memoryview(b"")

    def take(self, size: int) -> bytes:
        while not self._piece:
            piece = next(self._pieces, None)
            if piece is None:
                raise OSError(f"the hub's answer ended at byte {self.place}")
            self._piece = memoryview(piece)
        taken, self._piece = self._piece[:size], self._piece[size:]
        self.place += len(taken)
        return bytes(taken)

    def close(self) -> None:
        self._response.close()


def _first_byte(response: Any, begin: int, size: int) -> int:
    """Return the place of an answer's first byte: ``begin``, or 0 if the server does not support ranges."""
    if response.status_code == 200:
        first, right = 0, response.headers.get("Content-Length", str(size)) == str(size)
    else:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        first = int(found[1]) if found else -1
        right = found is not None and first == begin and found[2] in ("*", str(size))
    if not right:
        answered = response.headers.get("Content-Range") or f"{response.headers.get('Content-Length')} bytes"
        raise OSError(f"asked for bytes {begin}- of {size}, the hub answered {response.status_code}, {answered}")
    return first


def _seconds_asked(error: Exception) -> float | None:
    """Return the seconds that the hub asks to wait, by RateLimit in an answer 429 or by Retry-After, or None."""
    from huggingface_hub.utils import parse_ratelimit_headers

    response = getattr(error, "response", None)
    if response is None:
        return None
    limit = parse_ratelimit_headers(response.headers) if response.status_code == 429 else None
    if limit is not None and limit.remaining == 0:  # every answer has this header
        return float(limit.reset_in_seconds)
    after = response.headers.get("Retry-After", "").strip()
    return float(after) if after.isdecimal() else None


@cache
def _client() -> Any:
    """Return this process's HTTP client. huggingface_hub's own allows 100 connections: too few for many slots."""
    from huggingface_hub.utils import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    return httpx.Client(follow_redirects=True, limits=limits)


os.register_at_fork(after_in_child=_client.cache_clear)  # a prefetch worker must not share its parent's connections
