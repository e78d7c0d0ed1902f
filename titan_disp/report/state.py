"""This module decides from a run's files whether it is complete, alive or dead."""

from statistics import median

from titan_disp.report.gather import Run

ALIVE = 900.0  # a run counts as dead after so many seconds without a row, or ten log intervals if they are longer


def state(run: Run, now: float) -> tuple[str, str]:
    """Return the state (empty, complete, stopped, running or interrupted), and an explanation."""
    found = run.attempts
    if not found:
        return "empty", "nothing was logged yet"
    last = found[-1]
    if run.steps is not None and (run.step if last.complete else last.first_step) >= run.steps:
        return "complete", f"all {run.steps:,} steps are done"
    if last.end is not None and last.end["event"] != "save_failed":
        return "stopped", f"{last.how()}, after step {run.step:,}"
    gaps = [b - a for a, b in zip(last.times, last.times[1:], strict=False)]
    silent = now - last.ended
    if last.end is None and silent < max(ALIVE, 10 * median(gaps or [0])):
        return "running", f"by its latest line, {duration(silent)} before this report"
    if last.end is None:
        return "interrupted", f"no end recorded, last activity at step {run.step:,}"
    return "interrupted", f"{last.how()}, after step {run.step:,}"


def duration(seconds: float) -> str:
    """Format seconds in at most two units, such as ``2 d 3 h``, ``3 h 12 min``, ``4 min 5 s`` or ``12 s``."""
    left = round(seconds)
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        parts.append((count, unit))
    while len(parts) > 1 and not parts[0][0]:
        parts.pop(0)
    return " ".join(f"{count} {unit}" for count, unit in parts[:2])
