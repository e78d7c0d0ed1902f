"""This module reconstructs the starts of a run: what ended each of them, and what was lost between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BEGIN = ("start", "resume")
END = ("complete", "stop", "save_failed")
WHILE_LOADING = ("checkpoint_damaged", "streams_restarted")  # a start writes these before its resume event
FAULTS = ("skip", "save_failed", *WHILE_LOADING)


@dataclass
class Attempt:
    """Represent one start of the training processes, reconstructed from its records. Times are seconds since the epoch.

    Attributes:
        began: time of its start or resume event.
        job: SLURM's JOB.RESTARTS; empty without SLURM.
        first_step: number of steps done at its beginning.
        times, steps: time and step of its records in order, including its beginning.
        end: its event of ``END``, or None.
        allocated: beginning of its allocation, from its first record; otherwise the same as ``began``.
        spent: (step, seconds by kind since the allocation) of the records that have them.
    """

    began: float
    job: str
    first_step: int
    times: list[float]
    steps: list[int]
    end: Mapping[str, Any] | None = None
    allocated: float = 0.0
    spent: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)

    @property
    def ended(self) -> float:
        return self.times[-1]

    @property
    def last_step(self) -> int:
        return max(self.steps)

    @property
    def complete(self) -> bool:
        return self.end is not None and self.end["event"] == "complete"

    def how(self) -> str:
        """Describe what ended the start, by its events."""
        if self.end is None:
            return "no end recorded"
        reason = self.end.get("reason") or self.end.get("error")
        return self.end["event"].replace("_", " ") + (f": {reason}" if reason else "")


def attempts(written: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """Return the starts in order of time. Without events, there is one start.

    Args:
        written: all training rows of metrics.jsonl.
        events: events of events.jsonl, with times in seconds like those of the rows.
    """
    signs = [e for e in events if e["event"] not in WHILE_LOADING]
    records = sorted([*written, *signs], key=lambda record: record["time"])
    found: list[Attempt] = []
    for record in records:
        name = record.get("event")
        # A start that trains nothing has no event for its beginning; its end has the beginning of its allocation.
        if name in BEGIN or "allocated" in record or not found:
            allocated = record.get("allocated", record["time"])
            found.append(Attempt(record["time"], record.get("job", ""), record["step"], [], [], allocated=allocated))
        current = found[-1]
        current.times.append(record["time"])
        current.steps.append(record["step"])
        if "spent" in record:
            current.spent.append((record["step"], record["spent"]))
        if name in END:
            current.end = record
    return found


def repeated_steps(found: Sequence[Attempt]) -> list[int]:
    """Return the number of each start's steps that were lost, so that the next start repeated them."""
    return [max(0, a.last_step - b.first_step) for a, b in zip(found, found[1:], strict=False)]


def downtimes(found: Sequence[Attempt]) -> list[float]:
    """Return the seconds from the last activity of each start to the beginning of the next."""
    return [b.began - a.ended for a, b in zip(found, found[1:], strict=False)]
