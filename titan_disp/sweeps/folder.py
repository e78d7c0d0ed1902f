"""A sweep's folder: every point's config, checked and written down before the point runs.

FOLDER/points.json       the points in the order in which they were first seen: an array's tasks are numbers in this list
FOLDER/NAME/             the point's run folder, and beside what a run writes:
    point.toml           a copy of the sweep's config: editing the original later does not change what runs
    point.json           what the point was made with: arguments and resolved config, with which later calls compare
    sweep.log            output of all starts
    failed.json          why the last start on this machine failed
"""

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.config import JobConfig

from titan_disp.batch import data_parallel_degree
from titan_disp.budget import last_step
from titan_disp.checks import check_config, check_device, check_inputs
from titan_disp.config import load_config
from titan_disp.errors import ConfigError
from titan_disp.files import whole
from titan_disp.overrides import KEY as OVERRIDES
from titan_disp.overrides import parse_overrides
from titan_disp.report.configs import defaults
from titan_disp.run.folder import flatten, write_json
from titan_disp.sweeps.definition import Point, Sweep, points
from titan_disp.sweeps.state import state

RECORD, CONFIG, LIST = "point.json", "point.toml", "points.json"
NAMED = 5  # problems that one message has


@dataclass(frozen=True)
class Prepared:
    """A point whose config has been checked and written down.

    Attributes:
        argv: CONFIG and overrides that it is trained with: those of the first call that had it.
        steps: after which it is finished.
        checkpoints: their folder's name in the run folder.
        place: in points.json.
    """

    point: Point
    argv: tuple[str, ...]
    steps: int
    checkpoints: str
    place: int = -1


def prepare(sweep: Sweep, world_size: int, inputs: bool = True) -> list[Prepared]:
    """Check every point's config with ``world_size`` ranks, then write down those that are new.

    A config takes a quarter of a second, so that those that an earlier call has checked are not loaded again.

    Args:
        inputs: whether tokenizer and data are checked too, of points that are not finished, as for a start on this machine.

    Raises:
        ConfigError: points whose config cannot work, or that the folder has with another config. Nothing was written then.
    """
    preparation = _Preparation(world_size, inputs)
    problems = []
    for point in points(sweep):
        try:
            preparation.check(point)
        except ConfigError as error:
            problems.append(f"the point {point.name}: {error}")
    if problems:
        more = f"\n… and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        raise ConfigError("\n".join(problems[:NAMED]) + more)
    return preparation.write(sweep.folder)


class _Preparation:
    def __init__(self, world_size: int, inputs: bool) -> None:
        self.world_size, self.inputs = world_size, inputs
        self.known = defaults()
        self.read: set[str] = set()  # inputs that were checked
        self.checked: list[tuple[Point, dict[str, Any]]] = []  # with the record
        self.new: list[tuple[Point, dict[str, Any]]] = []  # of them, those whose record is to be written

    def check(self, point: Point) -> None:
        """Raises: ConfigError: see ``prepare``."""
        before, fingerprint = _record(point), self._fingerprint(point)
        unchanged = before is not None and before.get("fingerprint") == fingerprint
        if before is not None and unchanged and not self._inputs_to_check(point, before["resolved"]):
            self.checked.append((point, before))
            return
        job_config = _load(point)
        job_config.model.overrides = parse_overrides(job_config.model.overrides)  # type: ignore[attr-defined]
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
            "argv": point.argv(point.folder / CONFIG) if before is None else before["argv"],
            "resolved": resolved,
            "steps": last_step(job_config, data_parallel_degree(job_config, self.world_size)),
            "fingerprint": fingerprint,
        }
        self.checked.append((point, record))
        if not unchanged:
            self.new.append((point, record))

    def _fingerprint(self, point: Point) -> str:
        """Of everything that the resolved config and its checks follow from."""
        try:
            text = Path(point.config).read_text(errors="replace")
        except OSError as error:
            raise ConfigError(f"cannot read the config {point.config!r}: {error.strerror}") from error
        return hashlib.sha256(json.dumps([text, point.overrides, self.known, self.world_size]).encode()).hexdigest()

    def _inputs_to_check(self, point: Point, resolved: Mapping[str, Any]) -> str | None:
        """What ``check_inputs`` looks at, which points have in common; None where that has been checked, or need not be."""
        if not self.inputs or state(point.folder)[0] == "finished":
            return None
        parts = ("model.", "training.dataset", "training.seq_len", "validation.", "stream.", "checkpoint.")
        key = json.dumps({k: v for k, v in resolved.items() if k.startswith(parts) and k != "stream.seed"})
        return None if key in self.read else key

    def write(self, folder: Path) -> list[Prepared]:
        """Raises: ConfigError: the folder is not writable."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(folder):
                for point, record in self.new:
                    point.folder.mkdir(exist_ok=True)
                    if not (point.folder / RECORD).exists():
                        with whole(point.folder / CONFIG) as partial:
                            partial.write_bytes(Path(point.config).read_bytes())
                    write_json(point.folder / RECORD, record)
                places = _places(folder, [record for _, record in self.checked])
        except OSError as error:
            raise ConfigError(f"sweep.folder {str(folder)!r} is not writable: {error}") from error
        return [
            Prepared(
                point,
                tuple(record["argv"]),
                record["steps"],
                record["resolved"]["checkpoint.folder"],
                places[point.name],
            )
            for point, record in self.checked
        ]


def _load(point: Point) -> JobConfig:
    told = io.StringIO()
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # TorchTitan warns twice of every config whose tokenizer is not there
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            return load_config(["--job.config_file", *point.argv()])
    except SystemExit as error:  # tyro has printed what it expected, in a box
        text = " ".join(re.sub(r"\x1b\[[0-9;]*m|[╭╮╰╯─│]", " ", told.getvalue()).split())
        raise ConfigError(text or f"its overrides are refused (status {error.code})") from error
    finally:
        logging.disable(level)


def _record(point: Point) -> dict[str, Any] | None:
    """What an earlier call has written; None where there is none.

    Raises:
        ConfigError: it cannot be read, or the folder is something else.
    """
    path = point.folder / RECORD
    if not path.exists():
        # A call that was killed may have left the copy of the config, and hidden files.
        if point.folder.is_dir() and any(f.name != CONFIG and f.name[0] != "." for f in point.folder.iterdir()):
            raise ConfigError(
                f"{str(point.folder)!r} is there already and is no point of this sweep (it has no {RECORD}): give the sweep "
                "another folder, or move that one away"
            )
        return None
    try:
        record = json.loads(path.read_text())
        if {"argv", "resolved", "steps"} <= record.keys():
            return record
        reason = "keys are missing"
    except (OSError, ValueError, AttributeError) as error:
        reason = str(error)
    raise ConfigError(f"{str(path)!r} cannot be read ({reason}): move {str(point.folder)!r} away")


def _compare(point: Point, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Where things are written and what a run is called may change. Keys that this version does not know any more have no effect.

    Raises:
        ConfigError: the two configs differ.
    """
    # A table whose keys are no keys of the config: those that it does not name any more are gone.
    gone = [key for key in before if key.startswith(f"{OVERRIDES}.") and key not in now]
    keys = [key for key in (*now, *gone) if not key.startswith("job.")]
    changed = {k: (before.get(k), now.get(k)) for k in keys if before.get(k) != now.get(k)}
    if changed:
        what = ", ".join(f"{key} {old!r} → {new!r}" for key, (old, new) in changed.items())
        raise ConfigError(
            f"its config has changed since {str(point.folder)!r} was made: {what}. Its results would be of neither: give the "
            "changed sweep another folder, undo the change, or move that folder away to run the point anew"
        )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One call at a time writes the list of points; without locks on a file system, they are not kept apart."""
    with open(folder / ".sweep.lock", "a") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _places(folder: Path, records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Each point's place in points.json. A place is never given to another point: an array may be waiting that was told it."""
    path = folder / LIST
    listed = json.loads(path.read_text())["points"] if path.exists() else []
    before = [dict(entry) for entry in listed]
    places = {entry["name"]: i for i, entry in enumerate(listed)}
    for record in records:
        entry = {"name": record["name"], "argv": list(record["argv"])}
        if entry["name"] in places:
            listed[places[entry["name"]]] = entry
        else:
            places[entry["name"]] = len(listed)
            listed.append(entry)
    if listed != before:
        write_json(path, {"points": listed})
    return places
