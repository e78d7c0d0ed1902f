"""This module locks a run's folder, and writes and reads its files of JSON. Only rank 0 writes them.

These are config.json, environment.json, events.jsonl and metrics.jsonl. Reports, exports and tests read them instead of
console text.
"""

import contextlib
import fcntl
import json
import os
import platform
import socket
import uuid
from collections.abc import Mapping, MutableMapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from titan_disp.errors import ConfigError, InUseError
from titan_disp.files import atomic_write

PACKAGES = ("titan-disp", "torch", "torchtitan", "datasets", "tokenizers", "sentencepiece", "triton")


def environment(world_size: int) -> dict[str, Any]:
    """Return what a run runs on: versions, machine, accelerators, number of ranks, and SLURM's job."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "packages": versions,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "accelerators": gpus,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "world_size": world_size,
        "slurm": {k: v for k, v in os.environ.items() if k.startswith("SLURM_JOB_") or k == "SLURM_NNODES"},
    }


def job_id() -> str:
    """Return JOB.RESTARTS, which also names this start in the batch script's files, or "" without SLURM."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}" if job else ""


def append_json(path: Path, record: dict[str, Any]) -> None:
    """Append one line of JSON. If a killed process has left an unfinished line, that line is ended first."""
    with open(path, "ab+") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")
        file.write(json.dumps(record).encode() + b"\n")


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """Read the records of a .jsonl file, except lines left unfinished or garbled by killed processes or dead nodes."""
    records = []
    for line in Path(path).read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def read_rows(run: str | Path) -> list[dict[str, Any]]:
    """Read all training rows of metrics.jsonl in the order of writing, including steps repeated after a resume."""
    return [record for record in read_json_lines(Path(run) / "metrics.jsonl") if "condensation" not in record]


def read_events(run: str | Path) -> list[dict[str, Any]]:
    """Read events.jsonl, if there is one, with times in seconds since the epoch as in metrics.jsonl."""
    path = Path(run) / "events.jsonl"
    events = read_json_lines(path) if path.exists() else []
    return [{**event, "time": datetime.fromisoformat(event["time"]).timestamp()} for event in events]


def read_condensation(run: str | Path) -> dict[int, dict[str, Any]]:
    """Read the measurements on held-out text in metrics.jsonl, by step, as ``Condensation.to_json`` wrote them."""
    path = Path(run) / "metrics.jsonl"
    records = read_json_lines(path) if path.exists() else []
    found = by_step([record for record in records if "condensation" in record])
    return {step: row["condensation"] for step, row in found.items()}


def by_step(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Index rows by step, ascending. If a step was repeated after a resume, its last row counts."""
    return dict(sorted({row["step"]: row for row in rows}.items()))


def read_metrics(run: str | Path) -> dict[int, dict[str, Any]]:
    """Read the training rows of metrics.jsonl, by step. If a step was repeated after a resume, its last row counts."""
    return by_step(read_rows(run))


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a config's values by dotted key. A list is one value."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    old, new = flatten(before), flatten(after)
    return {key: [old.get(key), new.get(key)] for key in sorted(old | new) if old.get(key) != new.get(key)}


def _read_config(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
        if isinstance(content, dict):
            return content
        reason = f"it holds a {type(content).__name__}, expected an object"
    except ValueError as error:  # invalid JSON, or bytes that are not UTF-8
        reason = str(error)
    raise ConfigError(
        f"{str(file)!r} cannot be read: {reason}. It records the config that this run was started with. To continue, "
        "move it away, after comparing your config with the one that the run was started with"
    )


def lock_folder(path: Path, name: str = ".lock") -> IO[str]:
    """Lock a folder, and return the open file that holds the lock until it is closed.

    Args:
        path: the folder.
        name: name of the lock's file; the default is that of a run.

    Raises:
        InUseError: another job holds the lock.
    """
    lock = open(path / name, "a+")  # noqa: SIM115 — held for the life of the run
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().strip()
        lock.close()
        raise InUseError(
            f"the run folder {str(path)!r} is in use by another job ({holder}): two jobs in one run folder would "
            "corrupt it. Stop the other job, or use another run folder (--job.dump_folder, or sweep.folder of a sweep)"
        ) from error
    except OSError as error:  # some network file systems have no locks
        logger.warning(f"cannot lock {path}: {error}. Make sure that no second job uses this run folder")
    return lock


def _not_writable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"job.dump_folder {str(path)!r} is not writable: {error}")


class RunFolder:
    """Represent an open run folder, which is locked until ``close``."""

    def __init__(self, job_config: JobConfig, world_size: int) -> None:
        """Create the folder, lock it, and read the config of the run's former starts. Nothing else is written yet.

        Raises:
            InUseError: another job holds the lock.
            ConfigError: the folder is not writable, or its config.json cannot be read.
        """
        self.path = Path(job_config.job.dump_folder)
        self._lock: IO[str] | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self._config = json.loads(json.dumps(job_config.to_dict()))
            self._world_size = world_size
            file = self.path / "config.json"
            previous = _read_config(file) if file.exists() else self._config
            self.config_changes = _differences(previous, self._config)
        except OSError as error:
            raise _not_writable(self.path, error) from error

    def record_start(self) -> None:
        """Write config.json and environment.json of this start, once it is certain that it trains.

        A start that is refused, or that finds a complete run, must leave the config that the run was trained with:
        reports, exports and the next start read it.

        Raises:
            ConfigError: the folder is not writable, or its disk is full.
        """
        try:
            write_json(self.path / "config.json", self._config)
            write_json(self.path / "environment.json", environment(self._world_size))
        except OSError as error:
            raise _not_writable(self.path, error) from error

    @property
    def locked(self) -> bool:
        """Return whether no other job can use the folder: its lock is held, and the file system supports locks."""
        if self._lock is None:
            return False
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # changes nothing, because the lock is already held
        except OSError:
            return False
        return True

    def _take_lock(self) -> None:
        lock = lock_folder(self.path)
        lock.truncate(0)
        lock.write(
            f"host {socket.gethostname()}, pid {os.getpid()}, SLURM job {os.environ.get('SLURM_JOB_ID', 'none')}"
        )
        lock.flush()
        self._lock = lock
        # The data's prefetch worker is a fork, and outlives a killed rank by some seconds. It must not hold the lock.
        os.register_at_fork(after_in_child=lock.close)

    def event(self, name: str, step: int, **details: Any) -> None:
        """Append an event to events.jsonl."""
        time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        job = {"job": job_id()} if job_id() else {}
        append_json(self.path / "events.jsonl", {"time": time, "event": name, "step": step, **job, **details})

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def write_json(path: Path, content: Any) -> None:
    """Write a file of JSON atomically."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


# This module keeps one Weights & Biases run per run folder, across requeues.
#
# TorchTitan's WandBLogger takes the id from WANDB_RUN_ID, and wandb itself reads WANDB_RESUME. Values that the user has
# set are kept.


def run_id(folder: str | Path) -> str:
    """Read the id in ``folder``/wandb_run_id; make one if there is none.

    The id is not a hash of the path, because a new run in an emptied folder is another run.
    """
    file = Path(folder) / "wandb_run_id"
    if not file.exists() or not file.read_text().strip():
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as partial:
            partial.write_text(uuid.uuid4().hex + "\n")
    return file.read_text().strip()


def continue_run(folder_id: str, rank: int | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Make wandb continue the folder's run, or begin it if there is none yet.

    Args:
        folder_id: what ``run_id`` returns.
        rank: this rank, if every rank has a run of its own, else None.
        environment: the variables to set.
    """
    environment.setdefault("WANDB_RUN_ID", folder_id if rank is None else f"{folder_id}-rank{rank}")
    if not environment.keys() & {"WANDB_RESUME_FROM", "WANDB_FORK_FROM"}:  # wandb refuses both at once
        environment.setdefault("WANDB_RESUME", "allow")


# This module reads a run's validation losses, which TorchTitan writes only to TensorBoard's files.


VALIDATION_LOSS = "validation_metrics/loss"  # TorchTitan's tag


def read_validation(run: Path, config: Mapping[str, Any]) -> dict[int, float]:
    """Read the validation losses by step, ascending. The result is empty if there are none.

    If a step was repeated after a resume, its last loss counts.

    Args:
        run: the run's folder.
        config: content of its config.json.
    """
    if not config.get("validation", {}).get("enable"):
        return {}
    folder = run / config["metrics"]["save_tb_folder"]
    if (folder / "rank_0").is_dir():  # with metrics.save_for_all_ranks
        folder = folder / "rank_0"
    if not folder.is_dir():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # takes a second to import

    keep = {"scalars": 0, "images": 1}  # 0 keeps all of them
    board = EventAccumulator(str(folder), size_guidance=keep, purge_orphaned_data=False).Reload()
    if VALIDATION_LOSS not in board.Tags()["scalars"]:
        return {}
    losses = {event.step: event.value for event in board.Scalars(VALIDATION_LOSS)}
    return dict(sorted(losses.items()))
