"""This module reconstructs the starts of a run: what ended them, what was lost, and
their goodput (docs/resilience.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from datetime import timedelta
from typing import Any

import numpy as np

BEGIN = ("start", "resume")
END = ("complete", "stop", "save_failed", "refused")
SHORT = 600  # seconds; most of a shorter start is start-up
# events that a start writes before its event ``resume``
WHILE_LOADING = ("checkpoint_damaged", "streams_restarted")


def step_back(events: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the step at which a run went back to earlier weights, or None.

    A step back counts only if the run has saved a checkpoint since then, because a
    start that was killed before such a save has not gone back.
    """
    step = None
    for event in events:
        if event["event"] == "step_back":
            step = event["step"]
        elif step is not None and event["event"] in ("checkpoint", "resume"):
            if event["step"] >= step:
                return step
            step = None  # the start was killed before it saved
    return None


def trained_nothing(event: Mapping[str, Any]) -> bool:
    """Return whether an event ended a start before its first step, because the start
    was refused or stopped. Such an event says nothing about the state of the run.
    """
    return event["event"] in ("refused", "stop") and "allocated" in event


@dataclass
class Attempt:
    """Represent one start of the training processes.

    Times are seconds since the epoch.
    """

    began: float  # time of its start or resume event
    job: str  # SLURM's JOB.RESTARTS; empty without SLURM
    first_step: int  # number of steps done at its beginning
    # times of its rows and events, in order, including its first event
    times: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # of the same rows and events
    end: Mapping[str, Any] | None = None  # the event in ``END`` that ended it
    # when its allocation began, if its first event says so; otherwise ``began``
    allocated: float = 0.0
    # (step, seconds by activity) of the rows and events with a field "spent"
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
        if self.end is None:
            return "no end recorded"
        reason = self.end.get("reason") or self.end.get("error")
        return self.end["event"].replace("_", " ") + (f": {reason}" if reason else "")


def attempts(
    written: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
) -> list[Attempt]:
    """Return the starts in order of time, from the results of ``read_rows`` and
    ``read_events``. Without events, all rows belong to one start.
    """
    signs = [e for e in events if e["event"] not in WHILE_LOADING]
    records = sorted([*written, *signs], key=lambda record: record["time"])
    starts: list[Attempt] = []
    for record in records:
        name = record.get("event")
        # A start that trains nothing has no event of ``BEGIN``; its last event has the
        # field "allocated" instead.
        if name in BEGIN or "allocated" in record or not starts:
            current = Attempt(record["time"], record.get("job", ""), record["step"])
            current.allocated = record.get("allocated", record["time"])
            starts.append(current)
        current.times.append(record["time"])
        current.steps.append(record["step"])
        if "spent" in record:
            current.spent.append((record["step"], record["spent"]))
        if name in END:
            current.end = record
    return starts


def _time(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))


@dataclass(frozen=True)
class Goodput:
    """Hold the seconds that one or several starts spent, by activity."""

    kept: float = 0.0  # steps that no later start repeated
    repeated: float = 0.0  # steps that a later start repeated
    # from the beginning of the allocation through the first step, which compiles
    start_up: float = 0.0
    checkpoints: float = 0.0
    condensation: float = 0.0
    validation: float = 0.0
    # From the last line of the previous start to the beginning of this allocation,
    # unless the previous start completed the run. The time of a kill is not recorded,
    # so a hang before it counts as waiting.
    waiting: float = 0.0
    other: float = 0.0  # such as logging

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def fraction(self) -> float:
        return self.kept / self.total if self.total else float("nan")

    def __str__(self) -> str:
        lost = ", ".join(f"{name} {_time(part)}" for name, part in self.lost().items())
        text = (
            f"{self.fraction:.1%}, {_time(self.kept)} in steps that count, of "
            f"{_time(self.total)}"
        )
        if lost:
            text += f"; {lost}"
        if self.start_up > self.kept and self.total < SHORT:
            text += ". A short run is mostly start-up"
        return text

    def in_its_allocation(self) -> "Goodput":
        return replace(self, waiting=0.0)

    def lost(self) -> dict[str, float]:
        """Return {name of a field: seconds} of all fields but ``kept``, the longest
        first. Fields below half a second are left out.
        """
        longest = sorted(vars(self).items(), key=lambda part: -part[1])
        return {
            name.replace("_", "-"): seconds
            for name, seconds in longest
            if name != "kept" and seconds >= 0.5
        }


def _of(attempt: Attempt, before: Attempt | None, kept_until: int) -> Goodput:
    """Return the goodput of one start.

    The steps after ``kept_until`` were repeated later.
    """
    previous_end = attempt.allocated
    if before is not None:
        previous_end = before.ended
    began = max(attempt.allocated, previous_end)
    waiting = began - previous_end
    if before is not None and before.complete:
        waiting = 0.0
    spent = [(attempt.first_step, {"steps": 0.0}), *attempt.spent]
    last = spent[-1][1]
    kept = float(
        np.interp(
            kept_until,
            [step for step, _ in spent],
            [seconds["steps"] for _, seconds in spent],
        )
    )
    goodput = Goodput(
        kept=kept,
        repeated=last["steps"] - kept,
        # If the previous start ran in the same allocation, the allocation began before
        # that start's end.
        start_up=max(0.0, last.get("start_up", 0.0) - (began - attempt.allocated)),
        **{
            activity: last.get(activity, 0.0)
            for activity in ("checkpoints", "condensation", "validation")
        },
        waiting=waiting,
    )
    rest = max(0.0, attempt.ended - began - (goodput.total - waiting))
    if attempt.spent or attempt.last_step > attempt.first_step:
        return replace(goodput, other=rest)
    return replace(goodput, start_up=rest)


def goodputs(
    written: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
) -> list[Goodput]:
    """Return the goodput of every start in order, or [] if no record says how time was
    spent.
    """
    goodputs: list[Goodput] = []
    starts = attempts(written, events)
    kept_until = max((start.last_step for start in starts), default=0)
    pairs = list(zip([None, *starts], starts, strict=False))
    for before, start in reversed(pairs):
        goodputs.insert(0, _of(start, before, min(kept_until, start.last_step)))
        kept_until = min(kept_until, start.first_step)
    return goodputs if any(start.spent for start in starts) else []


def together(parts: Sequence[Goodput]) -> Goodput:
    return Goodput(*map(sum, zip(*map(astuple, parts), strict=True)))
