"""A file on the hub, read by ranges.

Nothing is asked of the hub but the content: where the file is, and how long, was found once on rank 0. ``HfFileSystem`` would ask
for the repository and list its folder in every rank's threads, and hundreds of ranks are answered 429.
"""

import io
import re
import time

BLOCK = 4 << 20  # of a request; a rank holds one for each of its open files
REQUEST_SECONDS = 10.0  # without a byte


class RemoteFile(io.RawIOBase):
    """Attributes:
    error: what ended it: a block did not come within ``retry_seconds``. Decoders hide exceptions in their own.
    """

    def __init__(self, url: str, size: int, retry_seconds: float) -> None:
        """Args: url: hf://datasets/OWNER/NAME@COMMIT/PATH. size: bytes. retry_seconds: for a block, with growing pauses."""
        from huggingface_hub import hf_hub_url

        matched = re.fullmatch(r"hf://datasets/([^/]+/[^/@]+)@([^/]+)/(.+)", url)
        assert matched is not None, url
        self._url = hf_hub_url(matched[1], matched[3], repo_type="dataset", revision=matched[2])
        self._size, self._retry_seconds = size, retry_seconds
        self._place, self._begin, self._block = 0, 0, b""
        self.error: Exception | None = None

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
        """At most ``size`` bytes, as many as the block has; none at the end."""
        if self._place >= self._size:
            return b""
        if not self._begin <= self._place < self._begin + len(self._block):
            self._begin, self._block = self._place, self._fetch(self._place, min(self._place + BLOCK, self._size))
        first = self._place - self._begin
        found = self._block[first:] if size < 0 else self._block[first : first + size]
        self._place += len(found)
        return found

    def _fetch(self, begin: int, end: int) -> bytes:
        """Bytes begin … end, tried again until ``retry_seconds`` are over: one deadline for all of it."""
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        deadline, pause = time.monotonic() + self._retry_seconds, 1.0
        while True:
            try:
                headers = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
                response = get_session().get(self._url, headers=headers, timeout=REQUEST_SECONDS)
                hf_raise_for_status(response)
                content: bytes = response.content
                if len(content) != end - begin:
                    raise OSError(f"the hub sent {len(content)} bytes, expected {end - begin}")
                return content
            except Exception as error:  # requests, httpx and huggingface_hub raise their own
                if time.monotonic() + pause > deadline:
                    self.error = error
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 15.0)
