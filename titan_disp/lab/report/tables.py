"""This module decides whether a run is complete, alive or dead, and builds the tables
of the page as text.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import groupby, pairwise, zip_longest
from statistics import median
from typing import Any

import numpy as np

from titan_disp.condensation.record import (
    PLACES,
    RANKS,
    Measurement,
    blocks_mean,
    over_depth,
)
from titan_disp.errors import counted
from titan_disp.lab.report.gather import (
    ABSENT,
    RunRecord,
    conditions,
    defaults,
    side_by_side,
    unlike,
)
from titan_disp.run.history import Goodput, together, trained_nothing
from titan_disp.run.reader import flatten
from titan_disp.tables import written_out
from titan_disp.text import NOTHING, duration, number

# a run counts as dead after so many seconds without a row, or ten log intervals if they
# are longer
ALIVE = 900.0
# rows over which a training loss is averaged, because one batch's loss is noisy
LAST_ROWS = 10

Rows = dict[str, list[str]]  # a cell for each run, by heading


def state(run: RunRecord, now: float) -> tuple[str, str]:
    """Return the state (empty, complete, stopped, running or interrupted), and an
    explanation.
    """
    found = run.attempts
    if not found:
        return "empty", "nothing was logged yet"
    last = found[-1]
    trained = [one for one in found if one.end is None or not trained_nothing(one.end)]
    done = run.step if trained and trained[-1].complete else last.first_step
    if run.steps is not None and done >= run.steps:
        return "complete", f"all {run.steps:,} steps are done"
    if last.end is not None:
        word = "interrupted" if last.end["event"] == "save_failed" else "stopped"
        return word, f"{last.how()}, after step {run.step:,}"
    gaps = [b - a for a, b in pairwise(last.times)]
    silent = now - last.ended
    if silent < max(ALIVE, 10 * median(gaps or [0])):
        return "running", f"by its latest line, {duration(silent)} before this report"
    return "interrupted", f"no end recorded, last activity at step {run.step:,}"


def when(seconds: float) -> str:
    """Format seconds since the epoch as a date and time in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime(
        "%Y-%m-%d %H:%M:%S UTC"
    )


def _setting(value: Any) -> str:
    """Format a value as JSON, which distinguishes the empty string, null and false."""
    return json.dumps(value, ensure_ascii=False)


def _filled(rows: Rows) -> Rows:
    return {heading: row for heading, row in rows.items() if set(row) != {NOTHING}}


def _dispersion(run: RunRecord) -> str:
    s = run.settings
    if not s.get("dispersion.enabled"):
        return "off"
    named = {
        "λ": "coeff",
        "τ": "tau",
        "layers": "layers",
        "variant": "variant",
        "estimator": "estimator",
    }
    told = [
        f"{name} {s.get(f'dispersion.{key}', NOTHING)}" for name, key in named.items()
    ]
    section = run.config["dispersion"]
    further = [f"and {written_out(table)}" for table in section.get("losses", [])]
    return ", ".join(
        filter(None, [*told, written_out(section.get("options", {})), *further])
    )


def _failures(run: RunRecord) -> str:
    count = run.failures.get("failures")
    return (
        f"{count} in a row; the last: {run.failures.get('reason', NOTHING)}"
        if count
        else NOTHING
    )


def _percent(part: Goodput) -> str:
    return f"{part.fraction:.1%}" if part.total else NOTHING


def _goodput(run: RunRecord) -> str:
    if not run.goodputs:
        return NOTHING
    every = together(run.goodputs)
    lost = ", ".join(
        f"{name} {duration(seconds)}" for name, seconds in every.lost().items()
    )
    return f"{_percent(every)} of {duration(every.total)}" + (
        f"; {lost}" if lost else ""
    )


def _stragglers(run: RunRecord) -> str:
    """Describe the ranks that the others waited for, the most frequent first."""
    slow = [
        (row["step"], row["straggler"]) for row in run.written if row.get("straggler")
    ]
    if not slow:
        return NOTHING
    last = {(found["host"], found["rank"]): (step, found) for step, found in slow}
    told = []
    for (host, rank), count in Counter(
        (found["host"], found["rank"]) for _, found in slow
    ).most_common(3):
        step, found = last[host, rank]
        often = f"in {count} of {len(run.written)} rows, last at step {number(step)}"
        seconds = (
            f"{number(found['seconds'], 3)} s, median {number(found['median'], 3)} s"
        )
        told.append(f"rank {rank} on {host} {often}: {seconds}")
    return "; ".join(told) + (f"; and {len(last) - 3} more" if len(last) > 3 else "")


def overview(runs: Sequence[RunRecord], now: float) -> Rows:
    def last_activity(run: RunRecord) -> str:
        end = run.attempts[-1].ended
        return f"{when(end)}, {duration(now - end)} before this report"

    several = [
        (name, members) for name, members in conditions(runs) if len(members) > 1
    ]
    of_condition = {
        runs[place].name: name for name, members in several for place in members
    }
    cells: dict[str, Callable[[RunRecord], str]] = {
        "condition": lambda run: of_condition.get(run.name, NOTHING),
        "state": lambda run: ": ".join(state(run, now)),
        "step": lambda run: f"{number(run.step)} of {number(run.steps)}",
        "tokens seen": lambda run: number(run.step * run.tokens_per_step),
        "tokens per step": lambda run: number(run.tokens_per_step),
        "started": lambda run: when(run.attempts[0].began) if run.attempts else NOTHING,
        "last activity": lambda run: last_activity(run) if run.attempts else NOTHING,
        "goodput": _goodput,
        "slow ranks": _stragglers,
        "failures without a new checkpoint": _failures,
        "model": lambda run: run.model,
        "parameters": lambda run: number(run.parameters),
        "dispersion": _dispersion,
        "ranks": lambda run: number(run.environment.get("world_size")),
        "description": lambda run: run.settings.get("job.description") or NOTHING,
        "folder": lambda run: str(run.path),
        "not readable": lambda run: "; ".join(run.problems) or NOTHING,
    }
    return _filled(
        {heading: [cell(run) for run in runs] for heading, cell in cells.items()}
    )


@dataclass(frozen=True)
class Cell:
    """Hold a number of a run, its step, and a note on how to read it."""

    value: float | None = None
    step: int | None = None
    note: str = ""


def _with_steps(cells: Sequence[Cell]) -> list[str]:
    """Format numbers of several runs. If their steps differ, each shows its own."""
    numbers = [number(cell.value) for cell in cells]
    differ = (
        len(
            {
                cell.step
                for cell, shown in zip(cells, numbers, strict=True)
                if shown != NOTHING
            }
        )
        > 1
    )

    def with_notes(cell: Cell, shown: str) -> str:
        step = f"step {number(cell.step)}" if differ and cell.step is not None else ""
        notes = ", ".join(filter(None, [cell.note, step])).replace(
            " ", "\N{NO-BREAK SPACE}"
        )
        return f"{shown} ({notes})" if notes and shown != NOTHING else shown

    return list(map(with_notes, cells, numbers))


def final_numbers(runs: Sequence[RunRecord]) -> Rows:
    """Collect the final numbers, and compare runs of different lengths at the latest
    step that all have logged.
    """
    shared = set.intersection(*({row["step"] for row in run.rows} for run in runs))
    found = [
        _final_numbers(run, max(shared) if len(runs) > 1 and shared else None)
        for run in runs
    ]
    return _filled(
        {
            heading: _with_steps([cells[heading] for cells in found])
            for heading in found[0]
        }
    )


def _final_numbers(run: RunRecord, compared: int | None) -> dict[str, Cell]:
    step = run.rows[-1]["step"] if run.rows else None

    def last(key: str) -> Cell:
        return Cell(run.series(key)[-1], step) if run.rows else Cell()

    def measured(read: Callable[[Measurement], float], which: int = -1) -> Cell:
        if not run.condensation:
            return Cell()
        at, found = list(run.condensation.items())[which]
        return Cell(read(found), at)

    ce = run.series("ce")[-LAST_ROWS:]
    tps = run.series("tps")
    ce_there = next(
        (row.get("ce") for row in run.rows if row["step"] == compared), None
    )
    few = f"of {counted(len(ce), 'row')}" if len(ce) < LAST_ROWS else ""
    highest = Cell()
    if run.condensation:
        most = run.most_condensed
        highest = Cell(blocks_mean(run.condensation[most]), note=f"step {number(most)}")
    return {
        "cross-entropy, last row": last("ce"),
        f"cross-entropy, mean of the last {LAST_ROWS} rows": Cell(ce.mean(), step, few)
        if run.rows
        else Cell(),
        f"cross-entropy at step {number(compared)}, the latest shared step": Cell(
            ce_there
        ),
        "validation loss, last": Cell(*list(run.validation.items())[-1][::-1])
        if run.validation
        else Cell(),
        "cross-entropy on held-out text, last": measured(
            lambda found: found.cross_entropy
        ),
        "dispersion loss, last row": last("dispersion") if run.disperses else Cell(),
        "gradient norm, last row": last("grad_norm"),
        "tokens/s of one rank, median": Cell(np.median(tps[np.isfinite(tps)]))
        if np.isfinite(tps).any()
        else Cell(),
        "mean cosine of all blocks, highest": highest,
        "mean cosine of the last block, first": measured(
            lambda found: found.mean_cosine[found.last_block], 0
        ),
        "mean cosine of the last block, last": measured(
            lambda found: found.mean_cosine[found.last_block]
        ),
        "mean cosine after the final norm, last": measured(
            lambda found: found.mean_cosine[-1]
        ),
        **{
            f"{name} {told}, last": measured(over_depth(place, rank))
            for rank, name in RANKS.items()
            for place, told in PLACES.items()
        },
        "effective rank of the last block, last": measured(
            lambda found: found.effective_rank[found.last_block]
        ),
    }


SEEN = {
    "tokens": "tokens",
    "documents": "documents",
    "bytes of text": "text_bytes",
    "epochs": "epochs_read",
}


def _counters(run: RunRecord) -> dict[str, float]:
    return run.rows[-1].get("data") or {} if run.rows else {}


def seen(runs: Sequence[RunRecord]) -> Rows:
    """Return what each of several sources has given up to the last row (``SEEN``), and
    its cross-entropy, by run and source.
    """
    rows = {}
    for run in runs:
        counters = _counters(run)
        for source in [
            key.partition("/")[2] for key in counters if key.startswith("tokens/")
        ]:
            ce = run.series(f"ce/{source}")[-LAST_ROWS:].mean()
            values = [*(counters.get(f"{name}/{source}") for name in SEEN.values()), ce]
            rows[f"{run.name}: {source}" if len(runs) > 1 else source] = list(
                map(number, values)
            )
    return rows


def data_counters(runs: Sequence[RunRecord]) -> Rows:
    """Return the loaders' other counters at the last row: sums over ranks, but maxima
    for epoch and waiting time.
    """
    counters = [
        {
            key: x
            for key, x in one.items()
            if f"tokens/{key.partition('/')[2]}" not in one
        }
        for one in map(_counters, runs)
    ]
    steps = [number(run.rows[-1]["step"]) if run.rows else NOTHING for run in runs]
    told = {"up to step": steps} if any(counters) and len(set(steps)) > 1 else {}
    return told | {
        key.replace("_", " "): [
            number(None if value is ABSENT else value) for value in values
        ]
        for key, values in side_by_side(counters).items()
    }


def config_differences(runs: Sequence[RunRecord]) -> tuple[Rows, Rows]:
    """Compare configs: keys in which runs differ, and keys with a common value that is
    not the default.
    """
    every = side_by_side([defaults(), *(run.settings for run in runs)])
    differ = {key: values for key, values in every.items() if unlike(values[1:])}
    shared = {
        key: values
        for key, values in every.items()
        if unlike(values) and key not in differ
    }
    return _as_settings(differ), _as_settings(shared)


def environments(runs: Sequence[RunRecord]) -> Rows:
    return _as_settings(side_by_side([flatten(run.environment) for run in runs]))


def _as_settings(rows: Mapping[str, Sequence[Any]]) -> Rows:
    return {
        key: [NOTHING if value is ABSENT else _setting(value) for value in values]
        for key, values in rows.items()
    }


def starts(run: RunRecord, now: float) -> list[list[str]]:
    """Return a line for each start, with the cells that page.html.j2 names."""
    found = run.attempts
    goodputs = [_percent(part.in_its_allocation()) for part in run.goodputs] or [
        NOTHING
    ] * len(found)
    ends = [one.how() for one in found]
    if state(run, now)[0] == "running":
        ends[-1] = "not yet"
    lines = []
    for i, (one, following) in enumerate(zip_longest(found, found[1:])):
        repeated = gap = NOTHING
        if following is not None:
            repeated = number(max(0, one.last_step - following.first_step))
            gap = duration(following.began - one.ended)
        seconds = one.ended - one.began
        pace = (
            (one.last_step - one.first_step) * run.tokens_per_step / seconds
            if seconds > 1
            else None
        )
        begin = [str(i + 1), one.job or NOTHING, when(one.began), duration(seconds)]
        steps = [
            number(one.first_step),
            number(one.last_step),
            number(pace, 4),
            repeated,
            goodputs[i],
        ]
        lines.append([*begin, *steps, gap, ends[i]])
    return lines


def _detail(name: str, value: Any) -> str:
    if name == "allocated":
        return when(value)
    if name == "spent":
        return ", ".join(
            f"{kind.replace('_', '-')} {duration(seconds)}"
            for kind, seconds in value.items()
            if seconds
        )
    if name == "config_changes":
        return ", ".join(
            f"{key} {_setting(old)} → {_setting(new)}"
            for key, (old, new) in value.items()
        )
    return value if isinstance(value, str) else _setting(value)


def events(run: RunRecord) -> list[list[str]]:
    """Return time, event, step and details of each event.

    Consecutive checkpoints share a line, and so do skips.
    """

    def key(place: int) -> str | int:
        event = run.events[place]["event"]
        return event if event in ("checkpoint", "skip") else place

    lines = []
    for _, places in groupby(range(len(run.events)), key):
        first, *others = group = [run.events[place] for place in places]
        last = group[-1]
        details = [
            f"{name.replace('_', ' ')}: {_detail(name, value)}"
            for name, value in last.items()
            if name not in ("time", "event", "step") and value not in ({}, "", None)
        ]
        time = when(first["time"]) + (f" – {when(last['time'])}" if others else "")
        event = first["event"].replace("_", " ") + (
            f" × {len(group)}" if others else ""
        )
        step = number(first["step"]) + (f" – {number(last['step'])}" if others else "")
        lines.append([time, event, step, "; ".join(details)])
    return lines
