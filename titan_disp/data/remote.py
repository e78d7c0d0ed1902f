"""A file on the hub, read by ranges.

Nothing is asked of the hub but the content: where the file is, and how long, was found once on rank 0. ``HfFileSystem`` would ask
for the repository and list its folder in every rank's threads, and hundreds of ranks are answered 429.
"""

import re

from titan_disp.data.raw import RetryingFile

BLOCK = 4 << 20  # of a request; a rank holds one for each of its open files
REQUEST_SECONDS = 10.0  # without a byte


class RemoteFile(RetryingFile):
    """A file named hf://datasets/OWNER/NAME@COMMIT/PATH. Any failure of the hub may pass.

    Attributes:
        error: what ended it: a block did not come within ``retry_seconds``. Decoders hide exceptions in their own.
    """

    def __init__(self, url: str, size: int, retry_seconds: float) -> None:
        from huggingface_hub import hf_hub_url

        super().__init__(size, retry_seconds)
        matched = re.fullmatch(r"hf://datasets/([^/]+/[^/@]+)@([^/]+)/(.+)", url)
        assert matched is not None, url
        self._url = hf_hub_url(matched[1], matched[3], repo_type="dataset", revision=matched[2])
        self._begin, self._block = 0, b""
        self.error: Exception | None = None

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
        try:
            return self._again(lambda: self._ask(begin, end))
        except Exception as error:  # requests, httpx and huggingface_hub raise their own
            self.error = error
            raise

    def _ask(self, begin: int, end: int) -> bytes:
        """Bytes begin … end, of one request."""
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        headers = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        response = get_session().get(self._url, headers=headers, timeout=REQUEST_SECONDS)
        hf_raise_for_status(response)
        content: bytes = response.content
        if len(content) != end - begin:
            raise OSError(f"the hub sent {len(content)} bytes, expected {end - begin}")
        return content
