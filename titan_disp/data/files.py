"""Where the data is: files on the hub or on disk, listed once on rank 0 and told to all ranks."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, TypeVar

import torch.distributed as dist

from titan_disp.data.hub import DATASET, hub_files
from titan_disp.data.local import list_local
from titan_disp.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class DataFile:
    """One file of documents.

    Attributes:
        name: path relative to the folder that holds all files of the split: the same on the hub and in a mirror.
        url: what to open: a local path, or ``hf://datasets/…``.
        size: bytes, as stored.
    """

    name: str
    url: str
    size: int


def split_of(dataset: str, key: str) -> str:
    """The split that a TorchTitan dataset name means."""
    names = {"c4": "train", "c4_validation": "validation", "text": "train", "text_validation": "validation"}
    if dataset not in names:
        raise ConfigError(
            f"{key}.dataset is {dataset!r}, expected c4 or c4_validation (from the hub, or a local copy at dataset_path), or "
            "text or text_validation (any documents at dataset_path)"
        )
    return names[dataset]


def list_files(dataset: str, dataset_path: str | None, key: str = "training") -> list[DataFile]:
    """The files of a split, sorted by name.

    Args:
        dataset: c4 (train split) or c4_validation; text or text_validation where the documents are others.
        dataset_path: see ``list_local``, or None for the hub.
        key: config section, for messages.

    Raises:
        ConfigError: nothing there, not readable, or no hub.
    """
    split = split_of(dataset, key)
    if dataset_path is None and not dataset.startswith("c4"):
        raise ConfigError(
            f"{key}.dataset is {dataset!r}: set {key}.dataset_path to the documents' folder, file or glob"
        )
    if dataset_path is None:
        return _list_hub(split)
    c4 = dataset.startswith("c4")
    return _relative([(path, path, os.path.getsize(path)) for path in list_local(dataset_path, split, key, c4)])


def _relative(found: list[tuple[str, str, int]]) -> list[DataFile]:
    """(path, url, size) → DataFile, named from the deepest folder that holds them all."""
    root = os.path.commonpath([os.path.dirname(path) for path, _, _ in found])
    files = [DataFile(PurePosixPath(os.path.relpath(path, root)).as_posix(), url, size) for path, url, size in found]
    return sorted(files, key=lambda file: file.name)


def _list_hub(split: str) -> list[DataFile]:
    commit, files = hub_files(split)
    return _relative([(f.path, f"hf://datasets/{DATASET}@{commit}/{f.path}", f.size) for f in files])


def on_rank_0(function: Callable[..., T], *args: Any) -> T:
    """Run on rank 0 only and broadcast the result, or the error, which then every rank raises: none is left waiting.

    Hundreds of ranks that each list the files are answered 429 by the hub and hammer a shared file system.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return function(*args)
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [function(*args)]
        except ConfigError as error:
            box = [error]
        except Exception as error:  # not every exception can be pickled
            box = [RuntimeError(f"rank 0: {type(error).__name__}: {error}")]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


def check_data(dataset: str, dataset_path: str | None, key: str = "training") -> None:
    """Raise ConfigError where local data is missing. The hub is reached only when training starts."""
    split_of(dataset, key)
    if dataset_path is not None or not dataset.startswith("c4"):
        list_files(dataset, dataset_path, key)
