"""A sweep's folder: what each point is, written down before it runs, and what became of it.

FOLDER/points.json       the points in the order in which they were first seen: an array's tasks are numbers in this list
FOLDER/NAME/             the point's run folder, and beside what a run writes:
    point.toml           a copy of the sweep's config: editing the original later does not change what runs
    point.json           the overrides and the resolved config, with which later calls compare
    sweep.log            output of all starts
    failed.json          why the last start on this machine failed
"""

import contextlib
import fcntl
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torchtitan.config import JobConfig

from titan_disp.batch import data_parallel_degree
from titan_disp.budget import last_step
from titan_disp.checks import check_config, check_device, check_inputs
from titan_disp.config import load_config
from titan_disp.errors import ConfigError
from titan_disp.files import whole
from titan_disp.report.attempts import BEGIN, END
from titan_disp.report.configs import defaults
from titan_disp.run.folder import flatten, read_events, read_json_lines, write_json
from titan_disp.run.heartbeat import FILE as HEARTBEAT
from titan_disp.sweeps.definition import Point, Sweep, points

RECORD, CONFIG, LOG, FAILED, LIST = "point.json", "point.toml", "sweep.log", "failed.json", "points.json"
NAMED = 5  # problems that one message has


@dataclass(frozen=True)
class Prepared:
    """A point whose config has been checked and written down.

    Attributes:
        steps: after which it is finished.
        checkpoints: their folder.
        place: in points.json.
    """

    point: Point
    steps: int
    checkpoints: Path
    place: int = -1

    @property
    def argv(self) -> list[str]:
        """CONFIG and overrides, for ``titan-disp train`` and slurm/supervise.py."""
        return self.point.argv(self.point.folder / CONFIG)


def prepare(sweep: Sweep, world_size: int, inputs: bool = True) -> list[Prepared]:
    """Check every point's config with ``world_size`` ranks, then write down those that are new.

    Args:
        inputs: whether tokenizer and data are checked too, as for a start on this machine.

    Raises:
        ConfigError: points whose config cannot work, or that the folder has with another config. Nothing was written then.
    """
    found, problems, checked = [], [], set()
    known = defaults()
    for point in points(sweep):
        try:
            job_config = _load(point)
            resolved = flatten(json.loads(json.dumps(job_config.to_dict())))
            _compare(point, resolved, known)
            check_config(job_config, world_size)
            if inputs and (reads := _inputs(resolved)) not in checked:
                check_device(job_config)
                check_inputs(job_config)
                checked.add(reads)
        except ConfigError as error:
            problems.append(f"the point {point.name}: {error}")
            continue
        steps = last_step(job_config, data_parallel_degree(job_config, world_size))
        folder = point.folder / job_config.checkpoint.folder
        found.append((Prepared(point, steps, folder), resolved))
    if problems:
        more = f"\n… and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        raise ConfigError("\n".join(problems[:NAMED]) + more)
    return _write(sweep, found)


def _load(point: Point) -> JobConfig:
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            return load_config(["--job.config_file", *point.argv()])
    except SystemExit as error:  # tyro has printed what it expected, in a box
        text = " ".join(re.sub(r"\x1b\[[0-9;]*m|[╭╮╰╯─│]", " ", told.getvalue()).split())
        raise ConfigError(text or f"its overrides are refused (status {error.code})") from error


def _compare(point: Point, resolved: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raises: ConfigError: the folder has the point with another config, or holds something else."""
    record = point.folder / RECORD
    if not record.exists():
        # A call that was killed may have left the copy of the config, and hidden files.
        if point.folder.is_dir() and any(f.name != CONFIG and f.name[0] != "." for f in point.folder.iterdir()):
            raise ConfigError(
                f"{str(point.folder)!r} is there already and is no point of this sweep (it has no {RECORD}): give the sweep "
                "another folder, or move that one away"
            )
        return
    try:
        before = {**known, **json.loads(record.read_text())["resolved"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{str(record)!r} cannot be read ({error}): move {str(point.folder)!r} away") from error
    # Where things are written and what a run is called may change. Keys that this version does not know any more have no effect.
    changed = {k: (before.get(k), v) for k, v in resolved.items() if not k.startswith("job.") and before.get(k) != v}
    if changed:
        what = ", ".join(f"{key} {old!r} → {new!r}" for key, (old, new) in changed.items())
        raise ConfigError(
            f"its config has changed since {str(point.folder)!r} was made: {what}. Its results would be of neither: give the "
            "changed sweep another folder, undo the change, or move that folder away to run the point anew"
        )


def _inputs(resolved: Mapping[str, Any]) -> str:
    """What ``check_inputs`` looks at: points that share it are checked once."""
    parts = ("model.", "training.dataset", "training.seq_len", "validation.", "stream.", "checkpoint.")
    return json.dumps({k: v for k, v in resolved.items() if k.startswith(parts) and k != "stream.seed"})


def _write(sweep: Sweep, found: Sequence[tuple[Prepared, Mapping[str, Any]]]) -> list[Prepared]:
    try:
        sweep.folder.mkdir(parents=True, exist_ok=True)
        with _alone(sweep.folder):
            for point, resolved in ((one.point, resolved) for one, resolved in found):
                if not (point.folder / RECORD).exists():
                    point.folder.mkdir(exist_ok=True)
                    with whole(point.folder / CONFIG) as partial:
                        partial.write_bytes(Path(point.config).read_bytes())
                    content = {"name": point.name, "config": point.config, "overrides": list(point.overrides)}
                    write_json(point.folder / RECORD, {**content, "resolved": resolved})
            places = _places(sweep.folder, [one.point for one, _ in found])
    except OSError as error:
        raise ConfigError(f"sweep.folder {str(sweep.folder)!r} is not writable: {error}") from error
    return [replace(one, place=places[one.point.name]) for one, _ in found]


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One call at a time writes the list of points; without locks on a file system, they are not kept apart."""
    with open(folder / ".sweep.lock", "a") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _places(folder: Path, found: Sequence[Point]) -> dict[str, int]:
    """Each point's place in points.json. A place is never given to another point: an array may be waiting that was told it."""
    path = folder / LIST
    listed = json.loads(path.read_text())["points"] if path.exists() else []
    places = {entry["name"]: i for i, entry in enumerate(listed)}
    new = [point for point in found if point.name not in places]
    for point in new:
        places[point.name] = len(listed)
        listed.append({"name": point.name, "argv": point.argv(point.folder / CONFIG)})
    if new:
        write_json(path, {"points": listed})
    return places


State = Literal["finished", "failed", "unfinished", "not started"]


def state(run: Path) -> tuple[State, str]:
    """What became of a point, and a few words about it. One that is running is unfinished."""
    events = read_events(run)
    marks = [event for event in events if event["event"] in (*BEGIN, *END)]
    if marks and (marks[-1]["event"] == "complete" or marks[-1].get("reason") == "budget.stop_at_tokens"):
        return "finished", f"step {marks[-1]['step']}"
    if failure := _failure(run):
        return "failed", failure
    if not marks:
        return "not started", "it has not begun to train"
    last = marks[-1]
    step = max(event["step"] for event in events)
    how = last.get("reason") or last.get("error")
    return (
        "unfinished",
        f"{last['event'].replace('_', ' ')} at step {last['step']}: {how}" if how else f"begun, step {step} or later",
    )


def _failure(run: Path) -> str:
    """Why its last start failed; empty where it has not."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return json.loads((run / FAILED).read_text())["error"]
    with contextlib.suppress(OSError):
        last = (read_json_lines(run / "supervisor.jsonl") or [{}])[-1]
        if last.get("state") == "give up":
            return str(last.get("reason"))
    return ""


def step_of(run: Path, since: float) -> int | None:
    """Steps done, as the run's heartbeat has it; None where it has none since then (seconds since the epoch)."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        beat = json.loads((run / HEARTBEAT).read_text())
        return int(beat["step"]) if beat["time"] >= since else None
    return None
