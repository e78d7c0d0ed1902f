"""Goodput: the part of the time since an allocation began that went into steps which count."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from titan_disp.report.attempts import Attempt, attempts


@dataclass(frozen=True)
class Goodput:
    """Seconds of one start, or of several.

    Attributes:
        kept: in steps that no later start repeated. repeated: in steps that one did.
        start_up: from the begin of the allocation through the first step, which compiles, or to the last line, if earlier.
        waiting: from the last line that the start before wrote to the begin of this allocation, unless it had completed the run.
            When a start was killed nobody tells, so that a hang before it is waiting too.
        other: what is none of these, such as logging.
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
        """NaN of no time."""
        return self.kept / self.total if self.total else float("nan")

    def in_its_allocation(self) -> "Goodput":
        """Of one start, without the time before it."""
        return replace(self, waiting=0.0)

    def lost(self) -> dict[str, float]:
        """Seconds that were not kept, by kind, the longest first; none that are nothing."""
        parts = {
            name.replace("_", "-"): seconds for name, seconds in vars(self).items() if name != "kept" and seconds >= 0.5
        }
        return dict(sorted(parts.items(), key=lambda part: -part[1]))


def _of(attempt: Attempt, before: Attempt | None, kept_until: int) -> Goodput:
    """Of one start; the steps after ``kept_until`` were repeated later."""
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
        # An allocation that held an earlier start began before that one's end.
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
    """Of every start, in order; none where the rows do not say what was spent.

    Args:
        written: training rows of metrics.jsonl, all of them.
        events: of events.jsonl, with times in seconds.
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
    """Of all these starts."""
    parts = list(parts)
    return Goodput(**{f.name: sum(getattr(part, f.name) for part in parts) for f in fields(Goodput)})
