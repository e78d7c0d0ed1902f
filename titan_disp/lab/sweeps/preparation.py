"""This module prepares and reads a sweep's folder, and submits its unfinished points as
an array of SLURM jobs.

Every point's config is checked and written before the point runs. docs/sweeps.md lists
the files of a point. points.json lists the points in the order in which they were first
seen; an array's tasks are indices into it.
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
from titan_disp.cluster.launch import command, send
from titan_disp.cluster.plan import make_plan, render
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
    OWNER,
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
FAILED = "failed.json"  # ``runner`` writes it
NAMED = 5  # most problems in one message
State = Literal["finished", "failed", "unfinished", "not started"]


def state(run: Path) -> tuple[State, str]:
    """Return a point's state and an explanation. A point in training is unfinished."""
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
    if how := last.get("reason") or last.get("error"):
        return (
            "unfinished",
            f"{last['event'].replace('_', ' ')} at step {last['step']}: {how}",
        )
    return (
        "unfinished",
        f"begun, step {max(event['step'] for event in events)} or later",
    )


def _failure(run: Path) -> str:
    """Return the reason why the last start failed, or "" if it did not."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return json.loads((run / FAILED).read_text())["error"]
    with contextlib.suppress(OSError):
        last = (read_transitions(run) or [{}])[-1]
        if last.get("state") == "give up":
            return str(last.get("reason"))
    return ""


def step_of(run: Path, since: float) -> int | None:
    """Return the steps in the run's heartbeat, or None if it is older than ``since``
    (seconds since the epoch).
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        beat = read_heartbeat(run)
        return int(beat["step"]) if beat["time"] >= since else None
    return None


@dataclass(frozen=True)
class Prepared:
    """Represent a point whose config has been checked and written."""

    point: Point
    # CONFIG and overrides for its training, from the first call that had this point
    argv: tuple[str, ...]
    steps: int  # of the whole run
    checkpoints: str  # name of the checkpoint folder in the run folder
    place: int = -1  # index in points.json


def prepare(
    sweep: Sweep, world_size: int, inputs: bool = True, write: bool = True
) -> list[Prepared]:
    """Check every point's config for ``world_size`` ranks, then write the new ones, and
    those that have not started yet.

    Loading a config takes a quarter of a second, so configs that an earlier call
    checked are not loaded again. With ``inputs``, the tokenizer and data of unfinished
    points are checked as well, for a start on this machine. If a config cannot work, or
    differs from the one in the folder, ConfigError is raised and nothing is written.
    """
    preparation = _Preparation(world_size, inputs)
    problems = []
    for point in progress("checking configs", "point", items=points(sweep)):
        try:
            preparation.check(point)
        except ConfigError as error:
            problems.append(f"the point {point.name}: {error}")
    if problems:
        more = f"\n… and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        raise ConfigError("\n".join(problems[:NAMED]) + more)
    places = preparation.write(sweep.folder) if write else {}
    return [
        Prepared(
            one,
            tuple(r["argv"]),
            r["steps"],
            r["resolved"]["checkpoint.folder"],
            places.get(one.name, i),
        )
        for i, (one, r) in enumerate(preparation.checked)
    ]


def preview(sweep: Sweep, world_size: int) -> list[str]:
    """Return a line for each point with its steps and its state.

    Everything is checked as for a start on this machine, and nothing is written.
    """
    return [
        f"{one.point.name}: {one.steps} steps, {state(one.point.folder)[0]}"
        for one in prepare(sweep, world_size, write=False)
    ]


class _Preparation:
    def __init__(self, world_size: int, inputs: bool) -> None:
        self.world_size = world_size
        self.inputs = inputs
        self.known = defaults()
        self.read: set[str] = set()  # inputs that were checked
        # points with their records
        self.checked: list[tuple[Point, dict[str, Any]]] = []
        # those of them whose record must be written
        self.new: list[tuple[Point, dict[str, Any]]] = []

    def check(self, point: Point) -> None:
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
        if not (point.folder / OWNER).exists():  # it has not started, and may change
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
        record = {
            "name": point.name,
            "config": point.config,
            "overrides": list(point.overrides),
            "argv": point.argv(point.folder / CONFIG)
            if before is None
            else before["argv"],
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
        """Hash everything that determines the resolved config and its checks."""
        with reported(f"cannot read the config {point.config!r}", OSError):
            text = Path(point.config).read_text(errors="replace")
        return hashlib.sha256(
            json.dumps([text, point.overrides, self.known, self.world_size]).encode()
        ).hexdigest()

    def _inputs_to_check(self, point: Point, resolved: Mapping[str, Any]) -> str | None:
        """Return a key of what these checks read, or None if they need not run, as
        after another point with this key.
        """
        if not self.inputs or state(point.folder)[0] == "finished":
            return None
        parts = (
            *(
                "model.",
                "training.dataset",
                "training.seq_len",
                "validation.",
                "stream.",
                "checkpoint.",
            ),
            # check_device
            *(
                "training.enable_cpu_offload",
                "parallelism.",
                "compile.",
                "activation_checkpoint.mode",
            ),
            *("profiling.", "metrics.enable_wandb"),
        )
        key = json.dumps(
            {
                k: v
                for k, v in resolved.items()
                if k.startswith(parts) and k != "stream.seed"
            }
        )
        return None if key in self.read else key

    def write(self, folder: Path) -> dict[str, int]:
        """Write the new points and the list of points, one call at a time, and return
        their places in it.
        """
        with reported(f"sweep.folder {str(folder)!r} is not writable", OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / ".sweep.lock", "a") as lock:
                with contextlib.suppress(OSError):  # some file systems have no locks
                    fcntl.flock(lock, fcntl.LOCK_EX)
                for point, record in self.new:
                    point.folder.mkdir(exist_ok=True)
                    if not (point.folder / OWNER).exists():
                        with atomic_write(point.folder / CONFIG) as partial:
                            partial.write_bytes(Path(point.config).read_bytes())
                    write_json(point.folder / RECORD, record)
                return _places(folder, [record for _, record in self.checked])


def _load(point: Point) -> JobConfig:
    return load_config(["--job.config_file", *point.argv()])


def _record(point: Point) -> dict[str, Any] | None:
    path = point.folder / RECORD
    if not path.exists():
        # A killed call may have left the copy of the config and hidden files.
        if point.folder.is_dir() and any(
            f.name != CONFIG and f.name[0] != "." for f in point.folder.iterdir()
        ):
            raise ConfigError(
                f"{str(point.folder)!r} already exists and is not a point of this "
                f"sweep (it has no {RECORD}): give the sweep another folder, or move "
                "that one away"
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


def _compare(point: Point, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a config of a point that has changed.

    Output folders and run names may differ. Only known keys count.
    """
    # The entries of a table are not keys of the config, so one that is no longer named
    # is a change.
    gone = [
        key for key in before if key.rpartition(".")[0] in TABLES and key not in now
    ]
    keys = [key for key in (*now, *gone) if not key.startswith("job.")]
    changed = {
        k: (before.get(k), now.get(k)) for k in keys if before.get(k) != now.get(k)
    }
    if changed:
        what = ", ".join(
            f"{key} {old!r} → {new!r}" for key, (old, new) in changed.items()
        )
        raise ConfigError(
            f"its config has changed since {str(point.folder)!r} was created: {what}. "
            "Its results would mix both configs: give the changed sweep another "
            "folder, undo the change, or move that folder away to run the point again"
        )


def _places(folder: Path, records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return each point's index in points.json.

    An index is never reused, because a waiting array may refer to it.
    """
    path = folder / LIST
    before = json.loads(path.read_text())["points"] if path.exists() else []
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
    """Check all points, print the plan of the first one, submit, and return sbatch's
    exit status.

    It is safe to submit again while an array waits or runs: the second of two tasks
    with the same point ends at once.
    """
    prepared = prepare(
        sweep,
        options.nodes * max(1, options.gpus_per_node),
        inputs=False,
        write=not options.dry_run,
    )
    todo = [one for one in prepared if state(one.point.folder)[0] != "finished"]
    every = counted(len(prepared), "point")
    finished = len(prepared) - len(todo)
    print(f"{every} in {sweep.folder}: {finished} finished, {len(todo)} to submit")
    if not todo:
        return 0
    first = _load(todo[0].point)
    print(
        f"{todo[0].point.name}:\n{render(make_plan(first, options.machine))}",
        flush=True,
    )
    array = f"array={ranges([one.place for one in todo])}%{options.jobs}"
    line = command(options, [str(sweep.folder)], SCRIPT, [array])
    if not options.dry_run:
        for one in todo:
            # Left by a start on this machine
            (one.point.folder / FAILED).unlink(missing_ok=True)
    return send(line, options.dry_run)


def ranges(numbers: Sequence[int]) -> str:
    """Format numbers for sbatch --array, such as 0-3,7."""
    groups = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs
    )
