"""This module decides the state of a point from the files of its run."""

import contextlib
import json
from pathlib import Path
from typing import Literal

from titan_disp.report.attempts import BEGIN, END
from titan_disp.run.folder import read_events, read_json_lines
from titan_disp.run.heartbeat import FILE as HEARTBEAT

FAILED = "failed.json"  # ``local`` writes it
State = Literal["finished", "failed", "unfinished", "not started"]


def state(run: Path) -> tuple[State, str]:
    """Return a point's state and an explanation. A point in training is unfinished."""
    events = read_events(run)
    marks = [event for event in events if event["event"] in (*BEGIN, *END)]
    if marks and (marks[-1]["event"] == "complete" or marks[-1].get("reason") == "budget.stop_at_tokens"):
        return "finished", f"step {marks[-1]['step']}"
    if failure := _failure(run):
        return "failed", failure
    if not marks:
        return "not started", "it has not begun to train"
    last = marks[-1]
    how = last.get("reason") or last.get("error")
    if how:
        return "unfinished", f"{last['event'].replace('_', ' ')} at step {last['step']}: {how}"
    return "unfinished", f"begun, step {max(event['step'] for event in events)} or later"


def _failure(run: Path) -> str:
    """Return the reason why the last start failed, or "" if it did not."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return json.loads((run / FAILED).read_text())["error"]
    with contextlib.suppress(OSError):
        last = (read_json_lines(run / "supervisor.jsonl") or [{}])[-1]
        if last.get("state") == "give up":
            return str(last.get("reason"))
    return ""


def step_of(run: Path, since: float) -> int | None:
    """Return the steps in the run's heartbeat, or None if it is older than ``since`` (seconds since the epoch)."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        beat = json.loads((run / HEARTBEAT).read_text())
        return int(beat["step"]) if beat["time"] >= since else None
    return None
