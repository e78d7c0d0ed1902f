"""This module repeats attempts that failed because of a file system or the hub, if the
reason may pass. The pauses between the attempts grow.
"""

import errno
import random
import time
from collections.abc import Callable, Iterator
from datetime import timezone
from email.utils import parsedate_to_datetime
from types import SimpleNamespace
from typing import Any, TypeVar

from torchtitan.tools.logging import logger

from titan_disp.errors import UserError

T = TypeVar("T")
FIRST_PAUSE = 1.0  # seconds on average; each try doubles the pause
LONGEST_PAUSE = 15.0  # seconds

# Ranks that failed at the same time must not try again at the same time. The random
# numbers are the operating system's, because DataLoader seeds ``random`` alike in the
# prefetch workers of all ranks (from debug.seed).
uniform = random.SystemRandom().uniform
sleep = time.sleep


def retried(
    attempt: Callable[[], T],
    seconds: float,
    name: str,
    may_pass: Callable[[Exception], bool],
) -> T:
    """Return what ``attempt`` returns.

    After an error that ``may_pass``, the attempt is repeated for ``seconds``; then the
    error is raised. Each failure is logged as a warning that begins with ``name``. A
    pause is at least as long as the hub asks for, and random, so that the ranks wait for
    different times.
    """
    deadline = time.monotonic() + seconds
    pause = FIRST_PAUSE
    while True:
        try:
            return attempt()
        # httpx, huggingface_hub and datasets have exceptions of their own
        except Exception as error:
            remaining = deadline - time.monotonic()
            shortest = seconds_asked(error)
            spread = pause
            if shortest is None:
                shortest = pause / 2
            else:
                spread = min(max(1.0, shortest / 4), LONGEST_PAUSE)
            if not may_pass(error) or shortest > remaining:
                raise
            wait = min(uniform(shortest, shortest + spread), remaining)
            reason = (str(error).splitlines() or [""])[0]
            logger.warning(
                f"{name}: {reason or type(error).__name__}: trying again in "
                f"{wait:.2g} s"
            )
            sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE)


# A network file system raises these while its server changes or restarts.
PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that it was raised from. (The package datasets
    raises its own errors from the hub's errors.)
    """
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def response_of(error: Exception) -> Any:
    """Return the server's response that an error reports, with ``status_code`` and
    ``headers``, or None.
    """
    for cause in chain(error):
        response = getattr(cause, "response", None)
        code = getattr(cause, "code", None)
        if isinstance(response, dict):  # from S3
            about = response.get("ResponseMetadata", {})
            after = about.get("HTTPHeaders", {}).get("retry-after", "")
            return SimpleNamespace(
                status_code=about.get("HTTPStatusCode", 0),
                headers={"Retry-After": after},
            )
        if response is not None:
            return response
        if isinstance(code, int):  # from Google
            return SimpleNamespace(status_code=code, headers={})
    return None


REFUSALS = (
    PermissionError,
    FileNotFoundError,
    ValueError,
    TypeError,
    AttributeError,
    ImportError,
    UserError,
)


def may_recover(error: Exception) -> bool:
    """Return whether the same request may succeed later. It cannot succeed if the
    server refuses access or has no such object.
    """
    if (response := response_of(error)) is not None:
        return response.status_code in (408, 429) or response.status_code >= 500
    refused = (
        isinstance(cause, REFUSALS) or "Credentials" in type(cause).__name__
        for cause in chain(error)
    )
    return not any(refused) and not str(error).startswith("Forbidden")


def seconds_asked(error: Exception) -> float | None:
    """Return the seconds that the hub asks to wait, or None. A response 429 has these
    seconds in the header RateLimit or Retry-After.
    """
    from huggingface_hub.utils import parse_ratelimit_headers

    response = response_of(error)
    if response is None:
        return None
    if response.status_code == 429:
        limit = parse_ratelimit_headers(response.headers)
        if limit is not None and limit.remaining == 0:
            return float(limit.reset_in_seconds)
    after = response.headers.get("Retry-After", "").strip()
    if after.isdecimal():
        return float(after)
    try:
        when = parsedate_to_datetime(after)
    except ValueError:
        return None
    return max(
        0.0, when.replace(tzinfo=when.tzinfo or timezone.utc).timestamp() - time.time()
    )
