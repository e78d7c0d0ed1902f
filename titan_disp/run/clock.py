"""This module counts how a job spends its wall time. metrics.jsonl and events.jsonl record it as ``spent``."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

KINDS = ("start_up", "steps", "checkpoints", "condensation", "validation")


def process_began() -> float:
    """Return when this process started, in seconds since the epoch. Outside of Linux, return the present time."""
    with suppress(OSError, ValueError, StopIteration, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if "btime" in line)
        return min(time.time(), boot + ticks / os.sysconf("SC_CLK_TCK"))
    return time.time()


def allocation_began(environment: Mapping[str, str] = os.environ) -> float:
    """Return when SLURM started the job, in seconds since the epoch, or without SLURM, when this process started.

    SLURM sets the start anew when it requeues a job.
    """
    with suppress(KeyError, ValueError):
        return min(time.time(), float(environment["SLURM_JOB_START_TIME"]))
    return process_began()


class Clock:
    """Count the seconds since the allocation began, by kind.

    The first step counts as start-up, because most of it is compilation. So does the time before it that has no kind of
    its own. After the first step, such time belongs to no kind.
    Setting the machine's clock has no effect.
    """

    def __init__(self, began: float) -> None:
        self.began = began
        self._offset = time.time() - time.monotonic()
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._running: tuple[str, float] | None = None
        self._stepped = False

    def _now(self) -> float:
        return self._offset + time.monotonic()

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Count the time in this context as ``kind``. Contexts cannot be nested."""
        self._running = (kind, self._now())
        try:
            yield
        finally:
            self._seconds, self._running = self.spent(), None
            self._stepped = self._stepped or kind == "steps"

    def spent(self) -> dict[str, float]:
        """Return the seconds of each kind up to now, including the context that is running."""
        seconds, now = dict(self._seconds), self._now()
        kind, since = self._running or ("", now)
        if kind and (self._stepped or kind != "steps"):
            seconds[kind] += now - since
        if not self._stepped and kind in ("", "steps"):  # everything up to now that has no kind of its own
            seconds["start_up"] = now - self.began - sum(s for k, s in seconds.items() if k != "start_up")
        return seconds

    def rounded(self) -> dict[str, float]:
        """Return ``spent`` rounded to milliseconds, for a line of JSON."""
        return {kind: round(seconds, 3) for kind, seconds in self.spent().items()}
