"""Lists and verifies the folders of a run's checkpoints without loading a model."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from safetensors import safe_open

from titan_disp.errors import ConfigError, reported
from titan_disp.files import progress
from titan_disp.models.hf import INDEX
from titan_disp.run.integrity import (
    damage,
    has_hashes,
    is_model_only,
    problem,
    read_hashes,
)
from titan_disp.run.reader import read_config, read_events
from titan_disp.safe_dcp import METADATA
from titan_disp.text import byte_size


@dataclass(frozen=True)
class CheckpointFolder:
    """One folder among a run's checkpoints."""

    name: str
    step: int
    modified: float  # time when the save ended, in seconds since the epoch
    size: int  # bytes of all files
    damaged: bool  # whether a complete save no longer has the content that was saved
    state: str  # description for people

    def line(self) -> str:
        date = datetime.fromtimestamp(self.modified).strftime("%Y-%m-%d %H:%M:%S")
        return f"{self.name:14} {date} {byte_size(self.size):>12}  {self.state}"


def inventory(run: str | Path, step: int | None = None) -> Iterator[CheckpointFolder]:
    """Yield the folders of all checkpoints, or of one step, sorted by step.

    Each folder is verified just before it is yielded. Raises ConfigError if ``run`` is
    not a run's folder, or if it has no checkpoint of this step.
    """
    run = Path(run)
    with reported(
        f"{str(run)!r} is not a run's folder: its config.json cannot be read",
        KeyError,
        TypeError,
    ):
        folder = run / read_config(run)["checkpoint"]["folder"]
    reasons = {
        e["step"]: e["reason"]
        for e in read_events(run)
        if e["event"] == "checkpoint_damaged"
    }
    steps: dict[str, int] = {}  # by the name of the folder
    if folder.is_dir():
        for name in os.listdir(folder):
            if matched := re.fullmatch(r"(step|damaged|purging)-(\d+)x*", name):
                steps[name] = int(matched[2])
    names = sorted(steps, key=lambda name: (steps[name], name[:4] != "step", name))
    if step is not None and step not in steps.values():
        there = ", ".join(str(steps[name]) for name in names) or "nothing"
        raise ConfigError(
            f"{str(folder)!r} has no checkpoint of step {step}; it has {there}"
        )
    for name in names:
        if step not in (None, steps[name]):
            continue
        damaged = False
        state = "being deleted"
        try:
            modified, size = _size(folder / name)
            if name.startswith("step"):
                damaged, state = _state(folder / name)
            elif name.startswith("damaged"):
                state = "moved aside: the run's log says why"
                if reason := reasons.get(steps[name]):
                    state = f"moved aside as damaged: {reason}"
        except FileNotFoundError:
            continue  # the run has deleted it in the meantime
        yield CheckpointFolder(
            name=name,
            step=steps[name],
            modified=modified,
            size=size,
            damaged=damaged,
            state=state,
        )


def verify(folder: str | Path) -> str | None:
    """Return what is wrong with a checkpoint, or None. This shows a progress bar.

    ``problem`` is called first, and then ``damage``, which reads all files. Raises
    OSError if a file cannot be read.
    """
    folder = Path(folder)
    if reason := problem(folder):
        return reason
    size = None
    with suppress(OSError, ValueError):  # ``damage`` reports these errors
        size = sum((folder / name).stat().st_size for name in read_hashes(folder) or {})
    with progress(f"verifying {folder.name}", "B", total=size) as bar:
        return damage(folder, read=bar.update)


def _state(path: Path) -> tuple[bool, str]:
    """Return (damaged, description) of a folder step-N.

    Raises FileNotFoundError if the run deletes the folder in the meantime.
    """
    if (path / METADATA).exists():
        try:
            reason = verify(path)
        except OSError as error:
            return True, f"it cannot be read: {error}"
        if not (path / METADATA).exists():
            raise FileNotFoundError(path)
        if reason is not None:
            return True, f"damaged: {reason}"
        state = "complete"
        if is_model_only(path):
            state = "complete, the model only"
        if has_hashes(path):
            return False, f"{state}, verified"
        return False, f"{state}, without hashes: not verified"
    if (path / INDEX).exists():
        if reason := _hugging_face_problem(path):
            return True, f"damaged: {reason}"
        return False, "Hugging Face format, without hashes: not verified"
    return False, "unfinished: its save is under way, or did not end"


def _hugging_face_problem(path: Path) -> str | None:
    """Return what is wrong with the safetensors files of a checkpoint, or None."""
    try:
        weight_map = json.loads((path / INDEX).read_text())["weight_map"]
        for name in sorted(set(weight_map.values())):
            # Opening a file reads its header and checks its length.
            with safe_open(path / name, "numpy"):
                pass
    except Exception as error:  # safetensors has its own type of error
        return f"{type(error).__name__}: {error}"
    return None


def _size(path: Path) -> tuple[float, int]:
    """Return the time when the save ended, in seconds since the epoch, and the bytes of
    all files.
    """
    files = [file for file in path.rglob("*") if file.is_file()]
    ends = [file for file in (path / METADATA, path / INDEX) if file.exists()] or [path]
    return ends[0].stat().st_mtime, sum(file.stat().st_size for file in files)
