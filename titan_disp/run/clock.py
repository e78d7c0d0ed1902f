"""Where the wall time of one start goes, as its rows in metrics.jsonl and its end in events.jsonl tell (``spent``)."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

KINDS = ("start_up", "steps", "checkpoints", "condensation", "validation")


def process_began() -> float:
    """Seconds since the epoch, as Linux tells; now where it does not."""
    with suppress(OSError, ValueError, StopIteration, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if "btime" in line)
        return min(time.time(), boot + ticks / os.sysconf("SC_CLK_TCK"))
    return time.time()


def allocation_began(environment: Mapping[str, str] = os.environ) -> float:
    """Seconds since the epoch: SLURM's start of the job, which a requeue sets anew; without SLURM, this process's start."""
    with suppress(KeyError, ValueError):
        return min(time.time(), float(environment["SLURM_JOB_START_TIME"]))
    return process_began()


class Clock:
    """Seconds by kind since the allocation began.

    The first step counts as start-up, as most of it is compilation. What no kind has is the rest of the wall time. A machine's
    clock that is set meanwhile changes nothing.
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
        """Not nested."""
        self._running = (kind, self._now())
        try:
            yield
        finally:
            self._seconds, self._running = self.spent(), None
            self._stepped = self._stepped or kind == "steps"

    def spent(self) -> dict[str, float]:
        """Seconds by kind up to now, what is running included."""
        seconds, now = dict(self._seconds), self._now()
        kind, since = self._running or ("", now)
        if kind and (self._stepped or kind != "steps"):
            seconds[kind] += now - since
        if not self._stepped and kind in ("", "steps"):  # all that came before, but for what has its own kind
            seconds["start_up"] = now - self.began - sum(s for k, s in seconds.items() if k != "start_up")
        return seconds

    def rounded(self) -> dict[str, float]:
        """``spent`` to the millisecond, for a line of JSON."""
        return {kind: round(seconds, 3) for kind, seconds in self.spent().items()}
