"""Decides whether a run is complete, running or interrupted, and builds the cells of the
page's tables.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import chain, pairwise
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from titan_disp.lab.report.gather import (
    ABSENT,
    RunRecord,
    defaults,
    side_by_side,
    unlike,
)
from titan_disp.lab.report.series import (
    CONDENSATION,
    COSINE,
    LAST_ROWS,
    LOSSES,
    OPTIMIZATION,
    SMOOTHED,
    SPEED,
    Series,
)
from titan_disp.run.console import SYMBOLS
from titan_disp.run.history import Goodput, together, trained_nothing
from titan_disp.run.reader import flatten
from titan_disp.tables import written_out
from titan_disp.text import NOTHING, duration, number

# A run counts as interrupted after this many seconds without a row, or after ten log
# intervals if that is longer.
ALIVE = 900.0

Rows = dict[str, list[str]]  # a cell for each run, by heading


class State(NamedTuple):
    word: str  # empty, complete, stopped, running or interrupted
    explanation: str


def state(run: RunRecord, at: float) -> State:
    """Return the state of a run at the time ``at``, in seconds since the epoch."""
    if not run.attempts:
        return State("empty", "nothing was logged yet")
    last = run.attempts[-1]
    trained = [
        start
        for start in run.attempts
        if start.end is None or not trained_nothing(start.end)
    ]
    steps_done = last.first_step
    if trained and trained[-1].complete:
        steps_done = run.step
    if run.steps is not None and steps_done >= run.steps:
        return State("complete", f"all {run.steps:,} steps are done")
    if last.end is not None:
        word = "stopped"
        if last.end["event"] == "save_failed":
            word = "interrupted"
        return State(word, f"{last.how()}, after step {run.step:,}")
    intervals = [after - before for before, after in pairwise(last.times)]
    silence = at - last.ended
    if silence < max(ALIVE, 10 * median(intervals or [0])):
        return State(
            "running", f"by its latest line, {duration(silence)} before this report"
        )
    return State("interrupted", f"no end recorded, last activity at step {run.step:,}")


def when(seconds: float) -> str:
    """Return seconds since the epoch as a date and time in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime(
        "%Y-%m-%d %H:%M:%S UTC"
    )


def _to_json(value: Any) -> str:
    """Return a value as JSON, which distinguishes the empty string, null and false."""
    return json.dumps(value, ensure_ascii=False)


def _without_empty(rows: Rows) -> Rows:
    return {heading: row for heading, row in rows.items() if set(row) != {NOTHING}}


def dispersion(run: RunRecord) -> str:
    """Return as text the [dispersion] keys that define the run's losses, or "off"."""
    if not run.disperses:
        return "off"
    section = run.config["dispersion"]
    parts = [
        f"{SYMBOLS.get(key, key)} {section.get(key, NOTHING)}"
        for key in (*SYMBOLS, "layers", "variant", "estimator")
    ]
    parts.append(written_out(section.get("options", {})))
    parts += [f"and {written_out(table)}" for table in section.get("losses", [])]
    return ", ".join(filter(None, parts))


def percent(spent: Goodput) -> str:
    """Return the share of time spent in steps that were not repeated later, such as
    "87.7%", or "–" if no time was recorded.
    """
    if not spent.total:
        return NOTHING
    return f"{spent.fraction:.1%}"


def goodput(run: RunRecord) -> Goodput:
    """Return how all starts together spent their time; all zeros if the run did not
    record the time.
    """
    return together(run.goodputs)


def stragglers(run: RunRecord) -> list[list[Mapping[str, Any]]]:
    """Return a list for each slow rank: the rows that name this rank, in order of time.

    The rank that is named most often comes first.
    """
    rows_by_rank: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in run.written:
        if straggler := row.get("straggler"):
            rows_by_rank[straggler["host"], straggler["rank"]].append(row)
    return sorted(rows_by_rank.values(), key=len, reverse=True)


def median_speed(run: RunRecord) -> float:
    """Return the median of the tokens/s of a rank, or NaN if none was logged."""
    speeds = run.series("tps")
    finite = speeds[np.isfinite(speeds)]
    if not len(finite):
        return float("nan")
    return float(np.median(finite))


def _last(series: Series, run: RunRecord) -> str:
    """Return the last number of a series as text, with its step if the run has later
    steps.
    """
    by_step = series.by_step(run)
    if not by_step:
        return NOTHING
    step = max(by_step)
    text = number(by_step[step])
    if step == run.step or text == NOTHING:
        return text
    return f"{text} (step {number(step)})"


def highest_cosine(run: RunRecord) -> str:
    """Return as text the highest mean cosine over all blocks and the step, or "–"."""
    by_step = COSINE.by_step(run)
    if not by_step:
        return NOTHING
    step = run.most_condensed
    return f"{number(by_step[step])} (step {number(step)})"


def final_numbers(runs: Sequence[RunRecord]) -> Rows:
    """Return the last number of each series, the median speed and the highest mean
    cosine, without rows that no run has.
    """
    rows = {
        f"{series.label}, last": [_last(series, run) for run in runs]
        for series in (*LOSSES, SMOOTHED, *OPTIMIZATION, *CONDENSATION)
    }
    rows |= {
        f"{SPEED.label}, median": [number(median_speed(run)) for run in runs],
        f"{COSINE.label}, highest": list(map(highest_cosine, runs)),
    }
    return _without_empty(rows)


def data_counters(runs: Sequence[RunRecord]) -> Rows:
    """Return the counters of the data loader, summed over ranks, from the last row of
    each run.

    A run with several sources also has the cross-entropy of each source, averaged over
    the run's last ``LAST_ROWS`` rows.
    """
    columns = []
    for run in runs:
        column: dict[str, float] = {}
        if run.rows:
            last = run.rows[-1]
            column["up to step"] = last["step"]
            for key, value in last.get("data", {}).items():
                column[key.replace("_", " ")] = value
            for key in last:
                if key.startswith("ce/"):
                    column[key] = run.series(key)[-LAST_ROWS:].mean()
        columns.append(column)
    headings = dict.fromkeys(chain.from_iterable(columns))
    return {
        heading: [number(column.get(heading)) for column in columns]
        for heading in headings
    }


class Differences(NamedTuple):
    """Rows of config keys. The first column is the default. Each run has a column."""

    differ: Rows  # keys in which runs differ
    shared: Rows  # keys with the same value in all runs, which is not the default


def config_differences(runs: Sequence[RunRecord]) -> Differences:
    """Return the keys in which the configs differ from each other or from the defaults."""
    columns = side_by_side([defaults(), *(run.settings for run in runs)])
    differ = {key: values for key, values in columns.items() if unlike(values[1:])}
    shared = {
        key: values
        for key, values in columns.items()
        if unlike(values) and key not in differ
    }
    return Differences(_as_json(differ), _as_json(shared))


def environments(runs: Sequence[RunRecord]) -> Rows:
    """Return the entries of each run's environment.json as JSON, by dotted key."""
    return _as_json(side_by_side([flatten(run.environment) for run in runs]))


def _as_json(rows: Mapping[str, Sequence[Any]]) -> Rows:
    def cell(value: Any) -> str:
        if value is ABSENT:
            return NOTHING
        return _to_json(value)

    return {key: list(map(cell, values)) for key, values in rows.items()}


def _detail(name: str, value: Any) -> str:
    """Return the value of an entry of an event, as text."""
    if name == "allocated":
        return when(value)
    if name == "spent":
        parts = []
        for part, seconds in value.items():
            if seconds:
                parts.append(f"{part.replace('_', '-')} {duration(seconds)}")
        return ", ".join(parts)
    if name == "config_changes":
        changes = []
        for key, (old, new) in value.items():
            changes.append(f"{key} {_to_json(old)} → {_to_json(new)}")
        return ", ".join(changes)
    if isinstance(value, str):
        return value
    return _to_json(value)


def details(event: Mapping[str, Any]) -> str:
    """Return the entries of an event as text, without the time, the name, the step and
    empty entries.
    """
    parts = []
    for name, value in event.items():
        if name not in ("time", "event", "step") and value not in ({}, "", None):
            parts.append(f"{name.replace('_', ' ')}: {_detail(name, value)}")
    return "; ".join(parts)


def event_groups(run: RunRecord) -> list[list[Mapping[str, Any]]]:
    """Return the events in groups.

    Consecutive checkpoints are a group, and so are consecutive skips. Each other event
    is a group of its own.
    """
    groups: list[list[Mapping[str, Any]]] = []
    for event in run.events:
        name = event["event"]
        if groups and name in ("checkpoint", "skip") and groups[-1][0]["event"] == name:
            groups[-1].append(event)
        else:
            groups.append([event])
    return groups
