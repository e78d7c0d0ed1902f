"""This module builds the tables of the page as text."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import groupby
from statistics import median
from typing import Any

import numpy as np

from titan_disp.condensation.record import Condensation, blocks_mean
from titan_disp.errors import counted
from titan_disp.lab.report.conditions import ABSENT, conditions, defaults, side_by_side, unlike
from titan_disp.lab.report.gather import Run
from titan_disp.run.history import Attempt, Goodput, together
from titan_disp.run.reader import flatten
from titan_disp.text import NOTHING, duration, number

# This module decides from a run's files whether it is complete, alive or dead.


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


LAST_ROWS = 10  # rows over which a training loss is averaged, because one batch's loss is noisy

Rows = dict[str, list[str]]  # a cell for each run, by heading


def when(seconds: float) -> str:
    """Format seconds since the epoch as a date and time in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _setting(value: Any) -> str:
    """Format a value as JSON, which distinguishes the empty string, null and false."""
    return json.dumps(value, ensure_ascii=False)


def _filled(cells: Mapping[str, Callable[[Run], str]], runs: Sequence[Run]) -> Rows:
    rows = {heading: [cell(run) for run in runs] for heading, cell in cells.items()}
    return {heading: row for heading, row in rows.items() if set(row) != {NOTHING}}


def _dispersion(run: Run) -> str:
    s = run.settings
    if not s.get("dispersion.enabled"):
        return "off"
    named = {"λ": "coeff", "τ": "tau", "layers": "layers", "variant": "variant", "estimator": "estimator"}
    return ", ".join(f"{name} {s.get(f'dispersion.{key}', NOTHING)}" for name, key in named.items())


def _failures(run: Run) -> str:
    count = run.failures.get("failures")
    return f"{count} in a row; the last: {run.failures.get('reason', NOTHING)}" if count else NOTHING


def percent(part: Goodput) -> str:
    """Format a goodput's fraction."""
    return f"{part.fraction:.1%}" if part.total else NOTHING


def _goodput(run: Run) -> str:
    """Describe the goodput since the first allocation began, and the rest of the time."""
    if not run.goodputs:
        return NOTHING
    every = together(run.goodputs)
    lost = ", ".join(f"{name} {duration(seconds)}" for name, seconds in every.lost().items())
    return f"{percent(every)} of {duration(every.total)}" + (f"; {lost}" if lost else "")


def _stragglers(run: Run) -> str:
    """Describe the ranks that the others waited for, the most frequent first."""
    slow = [(row["step"], row["straggler"]) for row in run.written if row.get("straggler")]
    if not slow:
        return NOTHING
    last = {(found["host"], found["rank"]): (step, found) for step, found in slow}
    counted = Counter((found["host"], found["rank"]) for _, found in slow)
    told = []
    for (host, rank), count in counted.most_common(3):
        step, found = last[host, rank]
        seconds = f"{number(found['seconds'], 3)} s, median {number(found['median'], 3)} s"
        told.append(
            f"rank {rank} on {host} in {count} of {len(run.written)} rows, last at step {number(step)}: {seconds}"
        )
    return "; ".join(told) + (f"; and {len(last) - 3} more" if len(last) > 3 else "")


def overview(runs: Sequence[Run], now: float) -> Rows:
    """Describe the runs and their states."""

    def times(run: Run) -> tuple[str, str]:
        found = run.attempts
        if not found:
            return NOTHING, NOTHING
        end = found[-1].ended
        return when(found[0].began), f"{when(end)}, {duration(now - end)} before this report"

    of_condition = {
        runs[place].name: condition.name
        for condition in conditions(runs)
        for place in condition.members
        if len(condition.members) > 1
    }
    cells: dict[str, Callable[[Run], str]] = {
        "condition": lambda run: of_condition.get(run.name, NOTHING),
        "state": lambda run: ": ".join(state(run, now)),
        "step": lambda run: f"{number(run.step)} of {number(run.steps)}",
        "tokens seen": lambda run: number(run.step * run.tokens_per_step),
        "tokens per step": lambda run: number(run.tokens_per_step),
        "started": lambda run: times(run)[0],
        "last activity": lambda run: times(run)[1],
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
    return _filled(cells, runs)


@dataclass(frozen=True)
class Cell:
    """Hold a number of a run, its step, and a note on how to read it."""

    value: float | None
    step: int | None = None
    note: str = ""


def _with_steps(cells: Sequence[Cell]) -> list[str]:
    """Format numbers of several runs. If their steps differ, each shows its own."""
    numbers = [number(cell.value) for cell in cells]
    differ = len({cell.step for cell, shown in zip(cells, numbers, strict=True) if shown != NOTHING}) > 1

    def with_notes(cell: Cell, shown: str) -> str:
        step = f"step {number(cell.step)}" if differ and cell.step is not None else ""
        notes = ", ".join(filter(None, [cell.note, step])).replace(" ", "\N{NO-BREAK SPACE}")
        return f"{shown} ({notes})" if notes and shown != NOTHING else shown

    return list(map(with_notes, cells, numbers))


def final_numbers(runs: Sequence[Run]) -> Rows:
    """Collect the final numbers, and compare runs of different lengths at the latest step that all have logged."""
    shared = set.intersection(*({row["step"] for row in run.rows} for run in runs))
    compared = max(shared) if len(runs) > 1 and shared else None

    def last(key: str) -> Callable[[Run], Cell]:
        return lambda run: Cell(run.series(key)[-1], run.rows[-1]["step"]) if run.rows else Cell(None)

    def mean_of_last(run: Run) -> Cell:
        if not run.rows:
            return Cell(None)
        found = run.series("ce")[-LAST_ROWS:]
        few = f"of {counted(len(found), 'row')}" if len(found) < LAST_ROWS else ""
        return Cell(found.mean(), run.rows[-1]["step"], few)

    def at_compared(run: Run) -> Cell:
        return Cell(next((row.get("ce") for row in run.rows if row["step"] == compared), None))

    def validated(run: Run) -> Cell:
        return Cell(*list(run.validation.items())[-1][::-1]) if run.validation else Cell(None)

    def measured(read: Callable[[Condensation], float], which: int = -1) -> Callable[[Run], Cell]:
        def cell(run: Run) -> Cell:
            if not run.condensation:
                return Cell(None)
            step, found = list(run.condensation.items())[which]
            return Cell(read(found), step)

        return cell

    def highest(run: Run) -> Cell:
        if not run.condensation:
            return Cell(None)
        step = run.most_condensed
        return Cell(blocks_mean(run.condensation[step]), note=f"step {number(step)}")

    def throughput(run: Run) -> Cell:
        tps = run.series("tps")
        return Cell(np.median(tps[np.isfinite(tps)]) if np.isfinite(tps).any() else None)

    cells: dict[str, Callable[[Run], Cell]] = {
        "cross-entropy, last row": last("ce"),
        f"cross-entropy, mean of the last {LAST_ROWS} rows": mean_of_last,
        f"cross-entropy at step {number(compared)}, the latest shared step": at_compared,
        "validation loss, last": validated,
        "cross-entropy on held-out text, last": measured(lambda found: found.cross_entropy),
        "dispersion loss, last row": lambda run: last("dispersion")(run) if run.disperses else Cell(None),
        "gradient norm, last row": last("grad_norm"),
        "tokens/s of one rank, median": throughput,
        "mean cosine of all blocks, highest": highest,
        "mean cosine of the last block, first": measured(lambda found: found.mean_cosine[found.last_block], 0),
        "mean cosine of the last block, last": measured(lambda found: found.mean_cosine[found.last_block]),
        "mean cosine after the final norm, last": measured(lambda found: found.mean_cosine[-1]),
        "Spearman's ρ up to the last block, last": measured(lambda found: found.before_norm.spearman),
        "Spearman's ρ up to the final norm, last": measured(lambda found: found.after_norm.spearman),
        "Kendall's τ up to the last block, last": measured(lambda found: found.before_norm.kendall),
        "Kendall's τ up to the final norm, last": measured(lambda found: found.after_norm.kendall),
        "effective rank of the last block, last": measured(lambda found: found.effective_rank[found.last_block]),
    }
    rows = {heading: _with_steps([cell(run) for run in runs]) for heading, cell in cells.items()}
    return {heading: row for heading, row in rows.items() if set(row) != {NOTHING}}


def data_counters(runs: Sequence[Run]) -> Rows:
    """Return the data loaders' counters at the last row: sums over ranks, but maxima for epoch and waiting time."""
    counters = [run.rows[-1].get("data") or {} if run.rows else {} for run in runs]
    steps = [number(run.rows[-1]["step"]) if run.rows else NOTHING for run in runs]
    told = {"up to step": steps} if any(counters) and len(set(steps)) > 1 else {}
    return told | {
        key.replace("_", " "): [number(None if value is ABSENT else value) for value in values]
        for key, values in side_by_side(counters).items()
    }


def config_differences(runs: Sequence[Run]) -> tuple[Rows, Rows]:
    """Compare configs: keys in which runs differ, and keys with a common value that is not the default."""
    every = side_by_side([defaults(), *(run.settings for run in runs)])
    differ = {key: values for key, values in every.items() if unlike(values[1:])}
    shared = {key: values for key, values in every.items() if unlike(values) and key not in differ}
    return _as_settings(differ), _as_settings(shared)


def environments(runs: Sequence[Run]) -> Rows:
    """Return environment.json: packages, machine and accelerators of the latest start."""
    return _as_settings(side_by_side([flatten(run.environment) for run in runs]))


def _as_settings(rows: Mapping[str, Sequence[Any]]) -> Rows:
    return {key: [NOTHING if value is ABSENT else _setting(value) for value in values] for key, values in rows.items()}


def repeated_steps(found: Sequence[Attempt]) -> list[int]:
    """Return the number of each start's steps that were lost, so that the next start repeated them."""
    return [max(0, a.last_step - b.first_step) for a, b in zip(found, found[1:], strict=False)]


def downtimes(found: Sequence[Attempt]) -> list[float]:
    """Return the seconds from the last activity of each start to the beginning of the next."""
    return [b.began - a.ended for a, b in zip(found, found[1:], strict=False)]


def starts(run: Run, now: float) -> list[list[str]]:
    """Return a line for each start.

    Its cells are number, SLURM job, beginning, duration, first and last step, tokens/s, repeated steps, goodput, time
    to the next start, and end.
    """
    found = run.attempts
    repeated, gaps = [*repeated_steps(found), None], [*downtimes(found), None]
    goodputs = [percent(part.in_its_allocation()) for part in run.goodputs] or [NOTHING] * len(found)
    ends = [one.how() for one in found]
    if state(run, now)[0] == "running":
        ends[-1] = "not yet"
    lines = []
    for i, one in enumerate(found):
        seconds = one.ended - one.began
        pace = (one.last_step - one.first_step) * run.tokens_per_step / seconds if seconds else None
        begin = [str(i + 1), one.job or NOTHING, when(one.began), duration(seconds)]
        steps = [number(one.first_step), number(one.last_step), number(pace, 4), number(repeated[i])]
        steps.append(goodputs[i])
        lines.append([*begin, *steps, NOTHING if (gap := gaps[i]) is None else duration(gap), ends[i]])
    return lines


def _collapsed(events: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Group consecutive checkpoints, and consecutive skips. Any other event is its own group."""

    def key(numbered: tuple[int, dict[str, Any]]) -> str | int:
        i, event = numbered
        return event["event"] if event["event"] in ("checkpoint", "skip") else i

    for _, group in groupby(enumerate(events), key):
        yield [event for _, event in group]


def events(run: Run) -> list[list[str]]:
    """Return time, event, step and details of each event. Consecutive checkpoints share a line, and so do skips."""
    lines = []
    for group in _collapsed(run.events):
        first, last = group[0], group[-1]
        more = len(group) > 1
        details = {k: v for k, v in last.items() if k not in ("time", "event", "step") and v not in ({}, "", None)}
        lines.append(
            [
                when(first["time"]) + (f" – {when(last['time'])}" if more else ""),
                first["event"].replace("_", " ") + (f" × {len(group)}" if more else ""),
                number(first["step"]) + (f" – {number(last['step'])}" if more else ""),
                "; ".join(
                    f"{key.replace('_', ' ')}: {value if isinstance(value, str) else _setting(value)}"
                    for key, value in details.items()
                ),
            ]
        )
    return lines
