"""This module reads a run's folder (docs/run_folder.md). Files may be missing, and lines
of .jsonl files may be cut.
"""

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from titan_disp.errors import ConfigError
from titan_disp.files import check_regular

CONFIG = "config.json"
ENVIRONMENT = "environment.json"
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
HEARTBEAT = "heartbeat.json"
STOP = "stop"
LOCK = ".lock"
# slurm/supervise.py writes these; earlier versions wrote requeue.json
JOB = "job.json"
REQUEUE = "requeue.json"
SUPERVISOR = "supervisor.jsonl"
# a row of metrics.jsonl with one of these keys is no training row
MEASURED = ("condensation", "validation")
# fields of metrics.jsonl that are objects; all other fields are numbers or null
NESTED = ("condensation", "data", "spent", "straggler")


def is_run(path: str | Path) -> bool:
    """Return whether a path is the folder of a run that has logged something."""
    return (Path(path) / CONFIG).is_file() and (Path(path) / METRICS).is_file()


def read_config(run: str | Path) -> dict[str, Any]:
    """Read the resolved config of the newest start that trained.

    Raises ConfigError if the file is missing or is not a config.
    """
    path = Path(run) / CONFIG
    try:
        config = _read_object(path)
        if not all(isinstance(section, dict) for section in config.values()):
            raise ValueError("a section is not an object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read: {error}; expected the config of a run"
        ) from error
    return config


def _read_optional(name: str, run: str | Path) -> dict[str, Any]:
    """Read a file of a run, or return {} if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return _read_object(Path(run) / name)
    return {}


# Read the hardware and software of the newest start that trained.
read_environment = partial(_read_optional, ENVIRONMENT)
# Read what rank 0 announced last. The file exists while a process trains.
read_heartbeat = partial(_read_optional, HEARTBEAT)


def read_failures(run: str | Path) -> dict[str, Any]:
    """Read the supervisor's record of failures in a row without a new checkpoint, or
    return {} if there are none.
    """
    job = _read_optional(JOB, run) or _read_optional(REQUEUE, run)
    return job if job.get("failures") else {}


def read_transitions(run: str | Path) -> list[dict[str, Any]]:
    """Read the supervisor's states and their reasons, in order."""
    return read_json_lines(Path(run) / SUPERVISOR)


def read_rows(run: str | Path) -> list[dict[str, Any]]:
    """Read the training rows in the order of writing, including steps repeated after a
    resume.
    """
    return [
        record for record in _records(Path(run) / METRICS) if not is_measured(record)
    ]


def is_measured(row: Mapping[str, Any]) -> bool:
    return any(key in row for key in MEASURED)


def read_metrics(run: str | Path) -> dict[int, dict[str, Any]]:
    """Read the training rows ``by_step``."""
    return by_step(read_rows(run))


def last_row(run: str | Path, last: float = math.inf) -> dict[str, Any]:
    """Read the training row of the largest step up to ``last``, or return {} if there is
    none. A run may have a million rows, so they are not all kept in memory.
    """
    newest: dict[str, Any] = {}
    for row in _records(Path(run) / METRICS):
        if not is_measured(row) and newest.get("step", 0) <= row["step"] <= last:
            newest = row
    return newest


def read_condensation(run: str | Path) -> dict[int, dict[str, Any]]:
    """Read the measurements on held-out text by step, as ``Measurement.to_json`` wrote
    them.
    """
    return _by_step(_records(Path(run) / METRICS), "condensation")


def read_validation(run: str | Path) -> dict[int, float]:
    """Read the validation losses by step, ascending. NaN stands for a loss that is not
    finite.
    """
    return validation_losses(_records(Path(run) / METRICS))


def read_written(run: str | Path) -> list[dict[str, Any]]:
    """Read all rows in the order of writing: of training, condensation and
    validation.
    """
    return list(_records(Path(run) / METRICS))


def validation_losses(rows: Iterable[dict[str, Any]]) -> dict[int, float]:
    return {
        step: math.nan if loss is None else loss
        for step, loss in _by_step(rows, "validation").items()
    }


def _by_step(rows: Iterable[dict[str, Any]], key: str) -> dict[int, Any]:
    return {
        step: row[key]
        for step, row in by_step([row for row in rows if key in row]).items()
    }


def read_events(run: str | Path) -> list[dict[str, Any]]:
    """Read the events in order, with times in seconds since the epoch as in the
    rows.
    """
    return list(_records(Path(run) / EVENTS))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of metrics.jsonl or events.jsonl.

    Raises ConfigError at a record that titan-disp would not write.
    """
    events = path.name == EVENTS
    fields = "numbers with 'step' and 'time'"
    if events:
        fields = "'step', 'time' (ISO 8601) and 'event'"
    for record in _json_lines(path):
        sound = False
        types: dict[str, Any]
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if events:
                record["time"] = datetime.fromisoformat(record["time"]).timestamp()
                types = {"event": str}
            else:
                types = dict.fromkeys(record, int | float | None)
                types |= dict.fromkeys(record.keys() & set(NESTED), dict)
            sound = (
                type(record["step"]) is int
                and record["step"] >= -events
                and math.isfinite(record["time"])
                and all(isinstance(record[key], types[key]) for key in types)
            )
        if not sound:
            raise ConfigError(
                f"{str(path)!r} cannot be read: expected {fields} in each line, found "
                f"{str(record):.99}"
            )
        yield record


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """Read the records of a .jsonl file, or return [] if there is no such file.

    Lines that a killed process left unfinished are skipped, and so is a line that
    repeats the previous line.
    """
    return list(_json_lines(Path(path)))


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        check_regular(path)
        before = b""
        with open(path, "rb") as lines:
            for line in lines:
                # After an error, a line that is in the file may be written again.
                if line == before:
                    continue
                before = line
                with contextlib.suppress(ValueError):
                    if isinstance(record := json.loads(line), dict):
                        yield record


def by_step(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Index rows by step, ascending.

    If a step was repeated after a resume, its last row counts.
    """
    return dict(sorted({row["step"]: row for row in rows}.items()))


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a config's values by dotted key. A list is one value."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= (
            flatten(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return flat


def _read_object(path: Path) -> dict[str, Any]:
    check_regular(path)
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(
            f"the file holds a {type(content).__name__}, expected a JSON object"
        )
    return content
