"""This module lets a run survive when files of its folder cannot be read or written for
some seconds, for example because the server of a shared file system restarts
(docs/run_folder.md has the table).

*Telemetry* (``JsonLines``) never fails, because lines that cannot be written wait.
Other reads and writes are tried again by ``patiently``, and fail when ``PATIENCE`` is
over.
"""

import errno
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.tools.logging import logger

from titan_disp import retry
from titan_disp.errors import UnreadableError, counted
from titan_disp.files import atomic_write
from titan_disp.retry import chain, retried

T = TypeVar("T")

# Errors of a file system that may pass. A full disk (ENOSPC) is not one of them,
# because it stays full until somebody deletes something.
PASSING = {
    *retry.PASSING,
    errno.EROFS,
    errno.EDQUOT,
    errno.EHOSTDOWN,
    errno.ENOTCONN,
    errno.ESHUTDOWN,
    errno.EREMOTEIO,
    errno.EAGAIN,  # from a server that is overloaded
}
# Seconds for which an operation is tried again. Shorter than the time-outs of ranks
# that wait meanwhile (comm.init_timeout_seconds is 300 by default); our choice.
PATIENCE = 60.0
# Seconds between the tries of a collective operation, such as a save. They are fixed, so
# that all ranks make the same number of tries; our choice.
PAUSES = (1.0, 4.0, 15.0, 40.0)
sleep = time.sleep
# The largest number of waiting lines, about a day with one line per second; our choice.
MOST_LINES = 100_000


def may_pass(error: BaseException) -> bool:
    """Return whether an error may pass by itself: an UnreadableError, an OSError in
    ``PASSING``, or an error raised from such an OSError.

    DCP's CheckpointException has ``failures``: {rank: (error, traceback)}. If there are
    any, the result is True if the error of at least one rank may pass.
    """
    if isinstance(error, UnreadableError):
        return True
    failures = getattr(error, "failures", {})
    causes = [cause for cause, _ in failures.values()] or [error]
    return any(map(_has_passing_cause, causes))


def _has_passing_cause(error: BaseException) -> bool:
    return any(
        isinstance(cause, OSError) and cause.errno in PASSING for cause in chain(error)
    )


def patiently(action: Callable[..., T], *arguments: Any) -> T:
    """Return what ``action(*arguments)`` returns.

    After an error that ``may_pass``, the action is tried again for ``PATIENCE`` seconds,
    with warnings; then the error is raised. Other errors are raised at once.
    """
    return retried(partial(action, *arguments), PATIENCE, "run folder", may_pass)


def together(action: Callable[..., T], *arguments: Any) -> T:
    """Return what a collective ``action(*arguments)`` returns.

    All ranks raise an UnreadableError or CheckpointException together. If this
    error ``may_pass``, the action is tried again after each of ``PAUSES``, and then the
    error is raised. Other errors are raised at once.
    """
    for pause in PAUSES:
        try:
            return action(*arguments)
        # DCP's CheckpointException is not an Exception; DCP raises it on all ranks.
        except (UnreadableError, CheckpointException) as error:
            if not may_pass(error):
                raise
            logger.warning(f"{one_line(error)}: trying again in {pause:.0f} s")
            sleep(pause)
    return action(*arguments)


def one_line(error: BaseException) -> str:
    """Return the reason of a failure in one line of at most 600 characters.

    The text of DCP's CheckpointException contains the tracebacks of all ranks; only the
    reason of each rank is returned.
    """
    failures = getattr(error, "failures", None) or {"": (error, None)}
    reasons = []
    for rank, (cause, _) in failures.items():
        prefix = "" if rank == "" else f"rank {rank}: "
        reasons.append(f"{prefix}{type(cause).__name__}: {cause}")
    return " ".join("; ".join(reasons).split())[:600]


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    with atomic_write(path) as partial:
        text = json.dumps(content, indent=2, ensure_ascii=False)
        partial.write_text(text + "\n", encoding="utf-8")


def to_line(record: dict[str, Any]) -> bytes:
    """Return a record as a line of JSON. NaN and infinities become null, because other
    readers refuse what Python writes for them.
    """
    finite = json.loads(json.dumps(record), parse_constant=lambda _: None)
    return json.dumps(finite).encode() + b"\n"


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file.

    If an earlier failure left the last line unfinished, this ends it first. After an
    OSError, the new line may have been written, in part or as a whole.
    """
    with open(path, "ab+", buffering=0) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def append_json(path: Path, record: dict[str, Any]) -> None:
    """Append a record to a .jsonl file. Raises OSError as ``append_line`` does."""
    append_line(path, to_line(record))


class JsonLines:
    """Append records to a .jsonl file, in order, without ever raising OSError.

    Lines that cannot be written wait for the next call of ``append`` or ``flush``. If
    more than ``MOST_LINES`` wait, the oldest are lost. A line may be written twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lost = 0  # number of lines lost since the last successful write
        self._waiting: deque[bytes] = deque()
        self._writing = threading.Lock()
        self._failing = False

    def append(self, record: dict[str, Any]) -> None:
        """Write a record now, or as soon as the file system lets it."""
        self._waiting.append(to_line(record))
        self.flush()

    def flush(self) -> None:
        """Write the waiting lines, unless another thread is writing them."""
        if not self._writing.acquire(blocking=False):
            return
        try:
            self._write_lines()
        except OSError as error:
            self._failed(error)
        else:
            self._recovered()
        finally:
            self._writing.release()

    def _write_lines(self) -> None:
        while self._waiting:
            append_line(self.path, self._waiting[0])
            self._waiting.popleft()

    def _failed(self, error: OSError) -> None:
        """Log the first failure in a row as a warning, and drop the oldest lines if more
        than ``MOST_LINES`` wait.
        """
        if not self._failing:
            logger.warning(
                f"{self.path} cannot be written: {error}. Its lines wait in memory "
                "until it can"
            )
        self._failing = True
        while len(self._waiting) > MOST_LINES:
            self._waiting.popleft()
            self._lost += 1

    def _recovered(self) -> None:
        if not self._failing:
            return
        self._failing = False
        lost = f", but {counted(self._lost, 'line')} were lost" if self._lost else ""
        self._lost = 0
        logger.info(f"{self.path} can be written again{lost}")

    def close(self) -> None:
        """Write the waiting lines, and log how many could not be written within
        ``PATIENCE`` seconds.
        """
        with self._writing:
            try:
                patiently(self._write_lines)
            except OSError as error:
                lines = counted(len(self._waiting), "line")
                logger.warning(f"{lines} of {self.path} could not be written: {error}")
