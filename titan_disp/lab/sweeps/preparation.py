"""Prepares and reads a sweep's folder, and submits its unfinished points as an array of
SLURM jobs.

The config of each point is checked and written before the point runs. docs/sweeps.md
lists the files of a point. points.json lists the points in the order in which they were
first prepared. The tasks of a SLURM array are indices into this list.
"""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from titan_disp.checks import (
    check_config,
    check_device,
    check_inputs,
    resolve_tables,
)
from titan_disp.cluster.freeze import SCRIPTS
from titan_disp.cluster.launch import check_request, command, plan_job, send
from titan_disp.config.batch import data_parallel_degree, last_step
from titan_disp.config.command_options import SweepOptions
from titan_disp.config.load import load_config
from titan_disp.config.types import JobConfig
from titan_disp.errors import ConfigError, counted, reported
from titan_disp.files import atomic_write, progress
from titan_disp.lab.report.gather import defaults
from titan_disp.lab.sweeps.definition import Point, Sweep, points
from titan_disp.run.history import BEGIN, END, trained_nothing
from titan_disp.run.reader import (
    EVENTS,
    flatten,
    read_events,
    read_heartbeat,
    read_transitions,
)
from titan_disp.run.storage import write_json
from titan_disp.tables import TABLES

RECORD = "point.json"
CONFIG = "point.toml"
LIST = "points.json"
FAILED = "failed.json"  # written by ``runner``
NAMED = 5  # a message lists at most this many problems
# Beginnings of the keys that check_inputs and check_device read
READ_BY_CHECKS = (
    "model.",
    "training.dataset",
    "training.seq_len",
    "validation.",
    "stream.",
    "checkpoint.",
    "training.enable_cpu_offload",
    "parallelism.",
    "compile.",
    "activation_checkpoint.mode",
    "profiling.",
    "metrics.enable_wandb",
)
State = Literal["finished", "failed", "unfinished", "not started"]


def state(run: Path) -> tuple[State, str]:
    """Return the state of the point in the folder ``run``, and an explanation.

    A point that is being trained is "unfinished".
    """
    events = read_events(run)
    marks = [event for event in events if event["event"] in (*BEGIN, *END)]
    trained = [mark for mark in marks if not trained_nothing(mark)]
    if trained and (
        trained[-1]["event"] == "complete"
        or trained[-1].get("reason") == "budget.stop_at_tokens"
    ):
        return "finished", f"step {trained[-1]['step']}"
    if failure := _failure(run):
        return "failed", failure
    if not marks:
        return "not started", "it has not begun to train"
    last = marks[-1]
    if reason := last.get("reason") or last.get("error"):
        event_name = last["event"].replace("_", " ")
        return "unfinished", f"{event_name} at step {last['step']}: {reason}"
    newest = max(event["step"] for event in events)
    return "unfinished", f"begun, step {newest} or later"


def _failure(run: Path) -> str:
    """Return the reason why the last start failed, or "" if it did not fail."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return json.loads((run / FAILED).read_text())["error"]
    with contextlib.suppress(OSError):
        last = (read_transitions(run) or [{}])[-1]
        if last.get("state") == "give up":
            return str(last.get("reason"))
    return ""


def step_of(run: Path, since: float) -> int | None:
    """Return the step in the run's heartbeat, or None if there is no heartbeat after
    ``since`` (seconds since the epoch).
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        beat = read_heartbeat(run)
        if beat["time"] >= since:
            return int(beat["step"])
    return None


@dataclass(frozen=True)
class Prepared:
    """A point whose config has been checked and written."""

    point: Point
    # CONFIG and overrides of the training, recorded when the point was first prepared
    argv: tuple[str, ...]
    steps: int  # number of steps of the whole run
    checkpoints: str  # name of the checkpoint folder in the run folder
    place: int = -1  # index in points.json


def prepare(
    sweep: Sweep, world_size: int, inputs: bool = True, write: bool = True
) -> list[Prepared]:
    """Check the configs of all points for ``world_size`` ranks, write the configs of
    points that have not started, and return the points.

    Configs that an earlier call checked are not loaded again, because each takes a
    quarter of a second. With ``inputs``, the tokenizer and the data of unfinished points
    are checked as well, for a start on this machine. With ``write=False``, nothing is
    written.

    Raises ConfigError before anything is written if a config cannot work, or differs
    from the config with which its point was started.
    """
    preparation = _Preparation(world_size, inputs)
    problems: list[str] = []
    for point in progress("checking configs", "point", items=points(sweep)):
        try:
            preparation.check(point)
        except ConfigError as error:
            problems.append(f"the point {point.name}: {error}")
    if problems:
        lines = problems[:NAMED]
        if len(problems) > NAMED:
            lines.append(f"… and {len(problems) - NAMED} more")
        raise ConfigError("\n".join(lines))
    places = {}
    if write:
        places = preparation.write(sweep.folder)
    return [
        Prepared(
            point=point,
            argv=tuple(record["argv"]),
            steps=record["steps"],
            checkpoints=record["resolved"]["checkpoint.folder"],
            place=places.get(point.name, i),
        )
        for i, (point, record) in enumerate(preparation.checked)
    ]


class _Preparation:
    """Checks points one after another, collects their records, and writes new ones."""

    def __init__(self, world_size: int, inputs: bool) -> None:
        self.world_size = world_size
        self.inputs = inputs
        self.known = defaults()
        self.read: set[str] = set()  # keys of ``_inputs_to_check`` that were checked
        # all points with their records
        self.checked: list[tuple[Point, dict[str, Any]]] = []
        # points whose record must be written
        self.new: list[tuple[Point, dict[str, Any]]] = []

    def check(self, point: Point) -> None:
        """Check a point and keep its record, or raise ConfigError."""
        before = _record(point)
        fingerprint = self._fingerprint(point)
        unchanged = before is not None and before.get("fingerprint") == fingerprint
        if (
            before is not None
            and unchanged
            and not self._inputs_to_check(point, before["resolved"])
        ):
            self.checked.append((point, before))
            return
        if not (point.folder / EVENTS).exists():  # not started: the config may change
            before = None
        job_config = _load(point)
        resolve_tables(job_config)
        resolved = flatten(json.loads(json.dumps(job_config.to_dict())))
        if before is not None:
            _compare(point, {**self.known, **before["resolved"]}, resolved)
        check_config(job_config, self.world_size)
        if key := self._inputs_to_check(point, resolved):
            check_device(job_config)
            check_inputs(job_config)
            self.read.add(key)
        argv = point.argv(point.folder / CONFIG)
        if before is not None:
            argv = before["argv"]
        record = {
            "name": point.name,
            "config": point.config,
            "overrides": list(point.overrides),
            "argv": argv,
            "resolved": resolved,
            "steps": last_step(
                job_config, data_parallel_degree(job_config, self.world_size)
            ),
            "fingerprint": fingerprint,
        }
        self.checked.append((point, record))
        if not unchanged:
            self.new.append((point, record))

    def _fingerprint(self, point: Point) -> str:
        """Return a hash of everything that determines the resolved config and its checks."""
        with reported(f"cannot read the config {point.config!r}", OSError):
            text = Path(point.config).read_text(errors="replace")
        return hashlib.sha256(
            json.dumps([text, point.overrides, self.known, self.world_size]).encode()
        ).hexdigest()

    def _inputs_to_check(self, point: Point, resolved: Mapping[str, Any]) -> str | None:
        """Return the settings that the checks of inputs read, as text to compare, or
        None if these checks are not needed.

        These checks are not needed if the point has finished, or another point with the
        same settings was checked.
        """
        if not self.inputs or state(point.folder)[0] == "finished":
            return None
        read = {
            key: value
            for key, value in resolved.items()
            if key.startswith(READ_BY_CHECKS) and key != "stream.seed"
        }
        key = json.dumps(read)
        if key in self.read:
            return None
        return key

    def write(self, folder: Path) -> dict[str, int]:
        """Write the new records and the list of points, and return the index of each
        point in the list, by name.

        A lock makes other calls wait.
        """
        with reported(f"sweep.folder {str(folder)!r} is not writable", OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / ".sweep.lock", "a") as lock:
                with contextlib.suppress(OSError):  # some file systems have no locks
                    fcntl.flock(lock, fcntl.LOCK_EX)
                for point, record in self.new:
                    point.folder.mkdir(exist_ok=True)
                    if not (point.folder / EVENTS).exists():
                        with atomic_write(point.folder / CONFIG) as partial:
                            partial.write_bytes(Path(point.config).read_bytes())
                    write_json(point.folder / RECORD, record)
                return _places(folder, [record for _, record in self.checked])


def _load(point: Point) -> JobConfig:
    return load_config(["--job.config_file", *point.argv()])


def _record(point: Point) -> dict[str, Any] | None:
    """Return the record that an earlier call wrote for a point, or None if there is none.

    Raises ConfigError if the record is damaged, or the folder has other files.
    """
    path = point.folder / RECORD
    if not path.exists():
        # A call that was killed may have left a copy of the config and hidden files.
        if point.folder.is_dir() and any(
            f.name != CONFIG and f.name[0] != "." for f in point.folder.iterdir()
        ):
            raise ConfigError(
                f"{str(point.folder)!r} already exists and is not a point of this "
                f"sweep (it has no {RECORD}): give the sweep another folder, or move "
                "the existing folder away"
            )
        return None
    try:
        record = json.loads(path.read_text())
        if {"argv", "resolved", "steps"} <= record.keys():
            return record
        reason = "keys are missing"
    except (OSError, ValueError, AttributeError) as error:
        reason = str(error)
    raise ConfigError(
        f"{str(path)!r} cannot be read ({reason}): move {str(point.folder)!r} away"
    )


def _compare(point: Point, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raise ConfigError if the config of a point has changed since the point was created.

    Output folders and run names may differ. Keys that no longer exist are ignored.
    """
    # Names in a table are not keys of the config. A missing name is therefore a change.
    gone = [
        key for key in before if key.rpartition(".")[0] in TABLES and key not in after
    ]
    keys = [key for key in (*after, *gone) if not key.startswith("job.")]
    changed = {
        k: (before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k)
    }
    if changed:
        changes = ", ".join(
            f"{key} {old!r} → {new!r}" for key, (old, new) in changed.items()
        )
        raise ConfigError(
            f"its config has changed since {str(point.folder)!r} was created: {changes}. "
            "Its results would mix both configs: give the changed sweep another "
            "folder, undo the change, or move that folder away to run the point again"
        )


def _places(folder: Path, records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the index of each point in points.json, by name, after adding new points.

    An index is never reused, because a waiting SLURM array may refer to it.
    """
    path = folder / LIST
    before = []
    if path.exists():
        before = json.loads(path.read_text())["points"]
    listed = {entry["name"]: entry for entry in before}  # a known name keeps its place
    listed |= {
        record["name"]: {"name": record["name"], "argv": list(record["argv"])}
        for record in records
    }
    if list(listed.values()) != before:
        write_json(path, {"points": list(listed.values())})
    return {name: place for place, name in enumerate(listed)}


SCRIPT = SCRIPTS / "sweep.sbatch"


def submit(sweep: Sweep, options: SweepOptions) -> int:
    """Submit the unfinished points as a SLURM array, and return sbatch's exit status.

    First, all points are checked, and the plan of the first point is printed. It is
    safe to submit again while an array waits or runs: the second of two tasks with the
    same point ends at once.
    """
    check_request(options)
    prepared = prepare(
        sweep,
        options.nodes * max(1, options.gpus_per_node),
        inputs=False,
        write=not options.dry_run,
    )
    todo = [entry for entry in prepared if state(entry.point.folder)[0] != "finished"]
    total = counted(len(prepared), "point")
    finished = len(prepared) - len(todo)
    print(f"{total} in {sweep.folder}: {finished} finished, {len(todo)} to submit")
    if not todo:
        return 0
    first = _load(todo[0].point)
    print(
        f"{todo[0].point.name}:\n{plan_job(first, options.machine, options)}",
        flush=True,
    )
    array = f"array={ranges([entry.place for entry in todo])}%{options.jobs}"
    line = command(options, [str(sweep.folder)], SCRIPT, [array])
    if not options.dry_run:
        for entry in todo:
            # A failed start on this machine may have left this file.
            (entry.point.folder / FAILED).unlink(missing_ok=True)
    return send(line, options.dry_run)


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text for sbatch --array, such as 0-3,7."""
    # Within a range such as 4-7, each number minus its index is the same.
    groups = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    parts = []
    for _, group in groups:
        run = [number for _, number in group]
        if len(run) > 1:
            parts.append(f"{run[0]}-{run[-1]}")
        else:
            parts.append(str(run[0]))
    return ",".join(parts)
