"""Where the data is: files on the hub or on disk, listed once on rank 0 and told to all ranks."""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from glob import glob
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch.distributed as dist

from titan_disp.data.hub import DATASET, FOLDER, hub_files
from titan_disp.errors import ConfigError

SUFFIXES = (".json.gz", ".jsonl.gz", ".json", ".jsonl", ".json.zst", ".jsonl.zst", ".parquet")
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
        dataset_path: a folder (searched recursively; laid out as on the hub or not), a glob, one file, or None for the hub.
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
    return _relative([(path, path, os.path.getsize(path)) for path in _list_local(dataset_path, split, key, c4)])


def _relative(found: list[tuple[str, str, int]]) -> list[DataFile]:
    """(path, url, size) → DataFile, named from the deepest folder that holds them all."""
    root = os.path.commonpath([os.path.dirname(path) for path, _, _ in found])
    files = [DataFile(PurePosixPath(os.path.relpath(path, root)).as_posix(), url, size) for path, url, size in found]
    return sorted(files, key=lambda file: file.name)


def _list_local(dataset_path: str, split: str, key: str, c4: bool) -> list[str]:
    where = f"{key}.dataset_path is {dataset_path!r}"
    if any(c in dataset_path for c in "*?["):
        paths = [p for p in glob(dataset_path, recursive=True) if p.endswith(SUFFIXES) and os.path.isfile(p)]
        if not paths:
            raise ConfigError(f"{where}, which matches no file named {', '.join('*' + s for s in SUFFIXES)}")
    elif os.path.isfile(dataset_path):
        if not dataset_path.endswith(SUFFIXES):
            raise ConfigError(f"{where}; expected a name that ends in {', '.join(SUFFIXES)}")
        paths = [dataset_path]
    elif os.path.isdir(dataset_path):
        paths = [str(p) for p in Path(dataset_path).rglob("*") if p.name.endswith(SUFFIXES) and p.is_file()]
        paths = [p for p in paths if not any(part.startswith(".") for part in Path(p).relative_to(dataset_path).parts)]
        paths = _of_split(paths, split)
        if c4:  # a clone of the data set holds other variants beside the one that the hub's stream reads
            paths = [p for p in paths if Path(p).is_relative_to(Path(dataset_path) / FOLDER)] or paths
        if not paths:
            raise ConfigError(
                f"{where}, which holds no {split} data; expected files such as en/c4-{split}.00000-of-01024.json.gz. "
                "For a sample corpus: titan-disp sample-data DIR"
            )
    else:
        raise ConfigError(
            f"{where}, which does not exist; expected a folder, file or glob of {', '.join(SUFFIXES)}. "
            "For a sample corpus: titan-disp sample-data DIR"
        )
    for path in paths:
        if not os.access(path, os.R_OK):
            raise ConfigError(f"{where}, but {path!r} is not readable")
    return paths


def _of_split(paths: list[str], split: str) -> list[str]:
    """Files whose own name says the split, as a word; where no name says any split, all of them are training data."""
    marks = {"train": ("train",), "validation": ("validation", "valid"), "test": ("test",)}
    names = {p: os.path.basename(p) for p in paths}

    def says(path: str, words: Iterable[str]) -> bool:
        return bool(re.search(rf"(?<![a-z])({'|'.join(words)})(?![a-z])", names[path].lower()))

    named = [p for p in paths if says(p, marks[split])]
    if named or split != "train":
        return named
    return [p for p in paths if not says(p, (*marks["validation"], *marks["test"]))]


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
