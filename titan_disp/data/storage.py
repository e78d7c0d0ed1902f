"""This module reads the bytes of a file: on a local or shared file system, in an object
store, or on the hub. Failed reads are tried again.

A file on the hub is read by one request that is held open. Only its content is
requested, because its place and size were found once, on rank 0. ``HfFileSystem`` would
ask for the repository and list its folder in every thread of every rank, and the hub
would answer 429 to hundreds of ranks. The hub counts requests, not bytes. As long as
reads go forward, a file therefore takes one request, from the first byte wanted to the
file's end, and one more request after each broken connection.
"""

import errno
import io
import math
import os
import re
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

from titan_disp.data import stores
from titan_disp.data.formats import ARROW, PARQUET, TOKEN_IDS
from titan_disp.data.listing import DataFile
from titan_disp.data.options import StreamOptions
from titan_disp.errors import DataError
from titan_disp.retry import PASSING, may_recover, response_of, retried

ZEROS = bytes(4096)


class RetryingFile(io.RawIOBase):
    """A file that can be read at any place.

    Subclasses decide after which failures a read is tried again.

    A file of text ends at a block of zeros, because such bytes were never written.
    ``damage`` then says so. (A decoder would take the zeros for text.)
    """

    def __init__(self, file: DataFile, options: StreamOptions) -> None:
        self._name = file.url
        self._size = file.size
        self._place = 0
        self._end = file.size
        self.count = 0  # bytes that a buffer has read
        self._held: Any = None  # what is open between reads
        self._retry_seconds = options.retry_seconds
        # the error of the read that was given up; decoders hide it in their exceptions
        self.error: Exception | None = None
        self.damage: str | None = None  # what is wrong with the content
        # Parquet, Arrow and token ids may hold zeros, and their readers find damage. If
        # a file has blocks, indexing it has already looked for zeros.
        may_hold_zeros = file.name.endswith((*PARQUET, *ARROW, *TOKEN_IDS))
        self._zeros = ZEROS
        if may_hold_zeros or file.blocks is not None:
            self._zeros = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        # The documents before the zeros are sound.
        if self._zeros and (at := data.find(self._zeros)) >= 0:
            self.damage = f"{len(ZEROS):,} bytes of zeros in a row, as a disk that was full or failed leaves them"
            self._end = self._place - len(data) + at
            data = data[:at]
            self._place = self._end
        buffer[: len(data)] = data
        self.count += len(data)
        return len(data)

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        """Return at most ``size`` bytes, or b"" at the end of the file. The result is
        shorter than ``size`` if fewer bytes have come.
        """
        wanted = max(0, self._end - self._place)
        if size >= 0:
            wanted = min(size, wanted)
        if not wanted:
            return b""
        try:
            data = retried(
                lambda: self._read(wanted),
                self._retry_seconds,
                f"data: {self._name}",
                self.may_pass,
            )
        except Exception as error:  # httpx's and huggingface_hub's own types
            self.error = error
            raise
        self._place += len(data)
        return data

    def _changed(self, present: str, listed: object) -> DataError:
        return DataError(
            f"{self._name} has {present}, but had {listed} when the files were listed: it "
            "was changed meanwhile, or another node sees another copy. Restore it, or "
            "start the run again to list the files anew"
        )

    def close(self) -> None:
        self._let_go()
        super().close()

    def _read(self, size: int) -> bytes:
        raise NotImplementedError

    def _let_go(self) -> None:
        """Close what is held open between reads. The next read opens it again."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def may_pass(self, error: Exception) -> bool:
        return may_recover(error)


class LocalFile(RetryingFile):
    """Read a local file. After a transient failure, it is reopened and read again."""

    def __init__(self, file: DataFile, options: StreamOptions) -> None:
        super().__init__(file, options)
        name = f"data: {self._name}"
        retried(self._open, self._retry_seconds, name, self.may_pass)

    def _open(self) -> io.FileIO:
        if self._held is None:
            self._held = io.FileIO(self._name)
            size = self._held.seek(0, io.SEEK_END)
            if size != self._size:
                self._let_go()
                raise self._changed(f"{size} bytes", self._size)
        return self._held

    def _read(self, size: int) -> bytes:
        file = self._open()
        if file.tell() != self._place:
            file.seek(self._place)
        data = file.read(size)
        # Without this error, a reader would see the file's end here, or damage.
        if not data:
            raise self._changed(f"at most {self._place} bytes", self._size)
        return data

    def may_pass(self, error: Exception) -> bool:
        if not isinstance(error, OSError):
            return False
        self._let_go()  # the next attempt opens it again
        return error.errno in (*PASSING, errno.EAGAIN)


# bytes of an open object that are in memory: a rank may hold two thousand objects open
BLOCK = 1 << 19
LARGEST = 1 << 22  # most bytes of a request, as for a column of a Parquet file
# After this time, the object's size and checksum are requested before the next block.
UNCHECKED_SECONDS = 60.0


class ObjectFile(RetryingFile):
    """Read an object of a store, in blocks.

    After most failures of the store, a block is requested again.
    """

    def __init__(self, file: DataFile, options: StreamOptions) -> None:
        super().__init__(file, options)
        self._etag = file.etag
        self._checked = -math.inf
        self._begin = 0
        self._block = b""

    def _read(self, size: int) -> bytes:
        if not self._begin <= self._place < self._begin + len(self._block):
            if time.monotonic() - self._checked > UNCHECKED_SECONDS:
                self._check()
            asked = min(max(size, BLOCK), LARGEST, self._size - self._place)
            block = stores.ask(
                self._name, "cat_file", start=self._place, end=self._place + asked
            )
            if not 0 < len(block) <= asked:
                raise OSError(
                    f"asked for {asked} bytes from {self._place} on, the store "
                    f"answered {len(block)}"
                )
            self._begin = self._place
            self._block = block
        first = self._place - self._begin
        return self._block[first : first + size]

    def _check(self) -> None:
        info = stores.ask(self._name, "info")
        present = f"{info['size']} bytes, checksum {stores.etag_of(info)}"
        listed = f"{self._size} bytes, checksum {self._etag}"
        if present != listed:
            raise self._changed(present, listed)
        self._checked = time.monotonic()


# Up to this many bytes are read and dropped to get to a later place. A new request would
# take about as long.
GAP = 4 << 20
REQUEST_SECONDS = 10.0  # time-out if no byte comes
# If fewer bytes per second come during this time, the server has failed, even if it
# sends a byte now and then.
SLOWEST = 4096


class RemoteFile(RetryingFile):
    """Read a file named hf://datasets/OWNER/NAME@COMMIT/PATH.

    After most failures of the hub, the read is tried again.
    """

    def __init__(self, file: DataFile, options: StreamOptions) -> None:
        from huggingface_hub import hf_hub_url

        super().__init__(file, options)
        matched = re.fullmatch(r"hf://datasets/([^/]+/[^/@]+)@([^/]+)/(.+)", file.url)
        assert matched is not None, file.url
        self._url = hf_hub_url(
            matched[1], matched[3], repo_type="dataset", revision=matched[2]
        )
        self._waited = 0.0  # seconds of waiting for bytes
        self._came = 0  # bytes that came during these seconds
        self._slow = 0.0  # seconds for which the hub has been too slow

    def _read(self, size: int) -> bytes:
        began = time.monotonic()
        try:
            if self._held is None or not 0 <= self._place - self._held.place <= GAP:
                self._let_go()
                self._held = _Answer(self._url, self._place, self._size)
            first = self._held.place
            while self._held.place < self._place:
                self._held.take(self._place - self._held.place)
            data = self._held.take(size)
            self._check_speed(self._held.place - first, time.monotonic() - began)
        except Exception:
            self._let_go()
            raise
        if self._place + len(data) == self._size:
            self._let_go()
        return data

    def _check_speed(self, size: int, seconds: float) -> None:
        """Raise OSError if the hub has sent too few bytes in the last seconds."""
        self._came += size
        self._waited += seconds
        if self._waited < REQUEST_SECONDS:
            return
        speed = self._came / self._waited
        self._slow += self._waited
        self._came = 0
        self._waited = 0.0
        if speed < SLOWEST:
            raise OSError(
                f"{speed:.0f} bytes per second for {self._slow:.0f} s, expected at "
                f"least {SLOWEST}"
            )
        self._slow = 0.0

    def may_pass(self, error: Exception) -> bool:
        response = response_of(error)
        refused = response is not None and response.status_code in (401, 404)
        return not refused and self._slow <= self._retry_seconds


class _Answer:
    """The hub's answer to one request.

    ``place`` is the answer's next byte, as a number of bytes from the file's beginning.
    """

    def __init__(self, url: str, begin: int, size: int) -> None:
        """Request a file of ``size`` bytes from byte ``begin`` on.

        The answer may begin earlier.
        """
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        headers = {
            **build_hf_headers(),
            "Range": f"bytes={begin}-",
            "Accept-Encoding": "identity",
        }
        request = _client().build_request(
            "GET", url, headers=headers, timeout=REQUEST_SECONDS
        )
        self._response = _client().send(request, stream=True)
        try:
            hf_raise_for_status(self._response)
            self.place = _first_byte(self._response, begin, size)
            length = self._response.headers.get("Content-Length")
            self._pieces: Iterator[bytes] = self._response.iter_raw()
            if self._response.status_code == 200 and length != str(size):
                self._pieces = self._response.iter_bytes()  # a proxy has compressed it
        except Exception:
            self._response.close()
            raise
        self._piece = memoryview(b"")

    def take(self, size: int) -> bytes:
        while not self._piece:
            piece = next(self._pieces, None)
            if piece is None:
                raise OSError(f"the hub's answer ended at byte {self.place}")
            self._piece = memoryview(piece)
        taken = self._piece[:size]
        self._piece = self._piece[size:]
        self.place += len(taken)
        return bytes(taken)

    def close(self) -> None:
        self._response.close()


def _first_byte(response: Any, begin: int, size: int) -> int:
    """Return the place of an answer's first byte: ``begin``, or 0 if the server does
    not support ranges. Raises OSError if the server answers something else.
    """
    headers = response.headers
    place = headers.get("Content-Range", "")
    length = headers.get("Content-Length", str(size))
    if response.status_code == 200:
        # A proxy may compress the content. The length, if it is stated, is then that of
        # the compressed content.
        compressed = headers.get("Content-Encoding", "identity") != "identity"
        if compressed or length == str(size):
            return 0
    elif re.fullmatch(rf"bytes {begin}-\d+/({size}|\*)", place):
        return begin
    raise OSError(
        f"asked for bytes {begin}- of {size}, the hub answered {response.status_code}, "
        f"{place or f'{length} bytes'}"
    )


@cache
def _client() -> Any:
    """Return this process's HTTP client. huggingface_hub's own client allows only 100
    connections, too few for many slots.
    """
    from huggingface_hub.utils import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    return httpx.Client(follow_redirects=True, limits=limits)


# a prefetch worker must not share its parent's connections
os.register_at_fork(after_in_child=_client.cache_clear)


def opened(file: DataFile, options: StreamOptions) -> RetryingFile:
    """Return an open file, of the class for its URL."""
    reader: type[RetryingFile] = ObjectFile
    if not file.remote:
        reader = LocalFile
    elif file.on_hub:
        reader = RemoteFile
    return reader(file, options)
