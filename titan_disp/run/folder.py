"""This module writes a run's folder (docs/run_folder.md).

Only rank 0 writes, while it holds the lock.
"""

import contextlib
import json
import os
import platform
import re
import socket
import uuid
from collections.abc import Iterator, MutableMapping
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from titan_disp.config.types import JobConfig
from titan_disp.errors import ConfigError, InUseError
from titan_disp.files import atomic_write, check_regular
from titan_disp.run import reader
from titan_disp.run.lock import Lock, described, job_id
from titan_disp.run.storage import JsonLines, patiently, write_json
from titan_disp.tables import changes

_RECORDED = re.compile(
    r"SLURM_(JOB_(ID|NAME|NODELIST|NUM_NODES|PARTITION|ACCOUNT|QOS|START_TIME|END_TIME)|NNODES|RESTART_COUNT|ARRAY_\w+)$"
    r"|(TITAN_DISP|NCCL|RCCL|TORCH|TORCHINDUCTOR|PYTORCH|CUDA|HIP|ROCR|GLOO|FI|OMP)_"
)
# Some URLs are secrets
_SECRET = re.compile(
    r"KEY|TOKEN|SECRET|PASS|JWT|CREDENTIAL|NOTIFY|WEBHOOK", re.IGNORECASE
)
# Secrets within a value: a text that follows NAME=, a container's --env NAME= or
# -e NAME=, or the user of a URL. Keys of Hugging Face, OpenAI, GitHub, AWS and W&B are
# secrets anywhere.
_SECRET_PART = re.compile(
    rf"(?P<name>\w*({_SECRET.pattern})\w*=|(--env|-e)[ =]\w+=)\S+"
    r"|(?P<user>://[^/\s:@]*:)[^\s@/]+(?=@)"
    r"|\b(hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{20,}|AKIA\w{12,}|[0-9a-f]{40})\b",
    re.IGNORECASE,
)
PACKAGES = (
    "titan-disp",
    "torch",
    "torchtitan",
    "datasets",
    "tokenizers",
    "sentencepiece",
    "triton",
)


@contextlib.contextmanager
def writing(run: Path) -> Iterator[None]:
    """Raise an OSError of this context as a ConfigError that names the run folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"job.dump_folder {os.fspath(run)!r} is not writable: {error}"
        ) from error


def versions() -> dict[str, str]:
    """Return {name: version} of those ``PACKAGES`` that are installed."""
    installed = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def _environment(world_size: int) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "packages": versions(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "accelerators": [
            torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
        ],
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "world_size": world_size,
        "variables": {
            name: without_secrets(value)
            for name, value in sorted(os.environ.items())
            if _RECORDED.match(name) and not _SECRET.search(name)
        },
    }


def without_secrets(value: str) -> str:
    """Return the value of a variable, with "…" for each part that is a secret."""
    return _SECRET_PART.sub(
        lambda part: f"{part['name'] or part['user'] or ''}…", value
    )


class RunFolder:
    """Represent an open run folder, which is locked until ``close``."""

    def __init__(self, job_config: JobConfig, world_size: int) -> None:
        """Create the folder if there is none, and lock it.

        Raises InUseError if another job uses the folder, and ConfigError if its files
        cannot be written or read.
        """
        self.path = Path(job_config.job.dump_folder)
        self._config = json.loads(json.dumps(job_config.to_dict()))
        self._world_size = world_size
        with writing(self.path):
            patiently(partial(self.path.mkdir, parents=True, exist_ok=True))
            self.config_changes = patiently(self._changes)
            self.lock = Lock(self.path)
            self.events = JsonLines(self.path / reader.EVENTS)

    def taken_by(self) -> str | None:
        """Return a description of the start that has taken the folder over from this
        one, or None.
        """
        owner = self.lock.owner()
        return described(owner) if owner and owner != self.lock.holder else None

    def _changes(self) -> dict[str, tuple[Any, Any]]:
        """Return {key: (former value, present value)} of the keys whose value differs
        from config.json, the config of the last start that trained.
        """
        file = self.path / reader.CONFIG
        if not file.exists():
            return {}
        try:
            old = reader.flatten(reader.read_config(self.path))
            new = reader.flatten(self._config)
        except ValueError as error:
            raise ConfigError(
                f"{error}. The file records the config that this run was started with. "
                "To continue, check that your config is still the same, and move the "
                "file away"
            ) from error
        return dict(sorted(changes(old, new).items()))

    def record_start(self) -> None:
        """Write config.json and environment.json.

        Only a start that trains may do this, because reports and the next start read
        these files. Raises InUseError, and writes nothing, if another start has taken
        the folder over.
        """
        if other := self.taken_by():
            raise InUseError(
                f"the run folder {str(self.path)!r} was taken by another job ({other}) "
                "while this one started"
            )
        with writing(self.path):
            patiently(write_json, self.path / reader.CONFIG, self._config)
            environment = _environment(self._world_size)
            patiently(write_json, self.path / reader.ENVIRONMENT, environment)

    def record_path(self, path: dict[str, Any]) -> None:
        """Add to environment.json how dispersion is computed, which is known after the
        first step.
        """
        with contextlib.suppress(OSError):  # a full disk must not end a run
            write_json(
                self.path / reader.ENVIRONMENT,
                _environment(self._world_size) | {"dispersion": path},
            )

    def event(self, name: str, step: int, **details: Any) -> None:
        time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        job = {"job": job_id()} if job_id() else {}
        self.events.append(
            {"time": time, "event": name, "step": step, **job, **details}
        )

    @property
    def owned(self) -> bool:
        """Return whether the folder certainly belongs to this start."""
        return self.lock.owner() == self.lock.holder

    def close(self) -> None:
        self.events.close()
        self.lock.close()


RUN_ID = "run_id"  # in the run folder


def read_id(file: Path) -> str:
    """Return the id in a file, or "" if there is no such file. Raises OSError, or
    ConfigError if the path is not a regular file.
    """
    check_regular(file)
    with contextlib.suppress(FileNotFoundError):
        return file.read_text(errors="replace").strip()
    return ""


def lasting_id(file: Path, new: str = "") -> str:
    """Return the id in a file. If there is no id, write and return ``new``, or a random
    id if ``new`` is empty.
    """
    # The id is not a hash of the path, because a run in an emptied folder is a new run.
    name = read_id(file) or new or uuid.uuid4().hex
    if name != read_id(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as partial:
            partial.write_text(name + "\n")
    return name


def continue_wandb(
    run_id: str, rank: int | None, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Set variables so that wandb continues the run ``run_id``, or begins it.

    Variables that the user has set are kept. TorchTitan's logger reads WANDB_RUN_ID, and
    wandb reads WANDB_RESUME. ``rank`` is None if only rank 0 logs a run.
    """
    environment.setdefault(
        "WANDB_RUN_ID", run_id if rank is None else f"{run_id}-rank{rank}"
    )
    # wandb refuses WANDB_RESUME together with one of these
    if not environment.keys() & {"WANDB_RESUME_FROM", "WANDB_FORK_FROM"}:
        environment.setdefault("WANDB_RESUME", "allow")
