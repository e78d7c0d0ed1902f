"""Goodput is the fraction of the time since an allocation began that went into steps which no later start repeated."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from titan_disp.report.attempts import Attempt, attempts


@dataclass(frozen=True)
class Goodput:
    """Hold the seconds that one or several starts spent, by what they spent them on.

    Attributes:
        kept: time of steps that no later start repeated.
        repeated: time of steps that a later start repeated.
        start_up: time from the beginning of the allocation through the first step, which compiles, or to the last line
            if that is earlier.
        checkpoints, condensation, validation: time of saving and measuring.
        waiting: time from the last line of the previous start to the beginning of this allocation, unless the previous
            start completed the run. The time of a kill is not recorded, so a hang before it counts as waiting.
        other: all other time, such as logging.
    """

    kept: float = 0.0
    repeated: float = 0.0
    start_up: float = 0.0
    checkpoints: float = 0.0
    condensation: float = 0.0
    validation: float = 0.0
    waiting: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def fraction(self) -> float:
        """Return the fraction of time in kept steps; NaN if there is no time."""
        return self.kept / self.total if self.total else float("nan")

    def in_its_allocation(self) -> "Goodput":
        """Return the goodput of one start without the time before it."""
        return replace(self, waiting=0.0)

    def lost(self) -> dict[str, float]:
        """Return the other seconds by kind, the longest first. Kinds below half a second are left out."""
        parts = {
            name.replace("_", "-"): seconds for name, seconds in vars(self).items() if name != "kept" and seconds >= 0.5
        }
        return dict(sorted(parts.items(), key=lambda part: -part[1]))


def _of(attempt: Attempt, before: Attempt | None, kept_until: int) -> Goodput:
    """Return the goodput of one start. The steps after ``kept_until`` were repeated later."""
    began = attempt.allocated if before is None else max(attempt.allocated, before.ended)
    steps, spent = [attempt.first_step], [0.0]
    for step, seconds in attempt.spent:
        steps.append(step)
        spent.append(seconds["steps"])
    last = attempt.spent[-1][1] if attempt.spent else {"steps": 0.0}
    kept = float(np.interp(kept_until, steps, spent))
    found = Goodput(
        kept=kept,
        repeated=last["steps"] - kept,
        # If the allocation also had an earlier start, it began before that start's end.
        start_up=max(0.0, last.get("start_up", 0.0) - (began - attempt.allocated)),
        checkpoints=last.get("checkpoints", 0.0),
        condensation=last.get("condensation", 0.0),
        validation=last.get("validation", 0.0),
        waiting=0.0 if before is None or before.complete else began - before.ended,
    )
    rest = max(0.0, attempt.ended - began - (found.total - found.waiting))
    stepped = attempt.spent or attempt.last_step > attempt.first_step
    return replace(found, other=rest) if stepped else replace(found, start_up=rest)


def goodputs(written: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> list[Goodput]:
    """Return the goodput of every start in order. The list is empty if the rows do not record how time was spent.

    Args:
        written: all training rows of metrics.jsonl.
        events: events of events.jsonl, with times in seconds.
    """
    found = attempts(written, events)
    if not any(one.spent for one in found):
        return []
    pairs = zip([None, *found], found, strict=False)
    return [
        _of(one, before, min((later.first_step for later in found[i + 1 :]), default=one.last_step))
        for i, (before, one) in enumerate(pairs)
    ]


def together(parts: Iterable[Goodput]) -> Goodput:
    """Sum the goodput of several starts."""
    parts = list(parts)
    return Goodput(**{f.name: sum(getattr(part, f.name) for part in parts) for f in fields(Goodput)})
