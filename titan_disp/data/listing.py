"""This module finds the data files.

They are listed once, on rank 0, and the list is broadcast to all ranks.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, TypeVar

import torch.distributed as dist

from titan_disp.data.blocks import Blocks
from titan_disp.data.formats import suffix_of
from titan_disp.data.hub import (
    C4,
    FORM,
    c4_files,
    commit_of,
    is_hub_name,
    parse_name,
    resolve,
)
from titan_disp.data.local_files import list_local, path_is
from titan_disp.data.mirror import mirrored_files
from titan_disp.data.objects import is_url, list_objects
from titan_disp.errors import ConfigError, UserError

T = TypeVar("T")


@dataclass(frozen=True)
class DataFile:
    """Describe one file of documents."""

    # path relative to the folder that holds all files of the split; the same on the hub
    # and in a mirror
    name: str
    url: str  # what to open: a local path, hf://datasets/…, or an object's URL
    size: int  # in bytes, as stored
    density: float = 1.0  # bytes of text per stored byte, see ``findings.measured`` …
    # … and a hash of some of its content; or both of all of it, if it is indexed
    sample: str = ""
    blocks: Blocks | None = field(default=None, compare=False, repr=False)
    damage: str | None = None  # what is wrong behind the last block
    documents: int | None = None  # known of an indexed file
    etag: str = ""  # an object store's checksum of the content
    encoding: str = ""  # of a plain text that is not UTF-8, ``formats.encoding_of``
    left_out: bool = False  # see stream.left_out: it is read as if it were empty

    @property
    def remote(self) -> bool:
        return is_url(self.url)


def split_of(dataset: str, key: str) -> str:
    """Return the split that a data set's name selects; if it names none, validation in
    [validation], else train.
    """
    names = {
        "c4": "train",
        "c4_validation": "validation",
        "text": "train",
        "text_validation": "validation",
    }
    if is_hub_name(dataset):
        return parse_name(dataset, f"{key}.dataset").split or (
            "validation" if key == "validation" else "train"
        )
    if dataset not in names:
        raise ConfigError(
            f"{key}.dataset is {dataset!r}, expected c4 or c4_validation (from the "
            f"hub, or a copy at dataset_path), {FORM} (of the hub, or its mirror at "
            "dataset_path), or text or text_validation (your documents at "
            "dataset_path)"
        )
    return names[dataset]


def held_out(dataset: str) -> str:
    """Return the name of the validation split that belongs to a training set."""
    if is_hub_name(dataset):
        return str(replace(parse_name(dataset, "training.dataset"), split="validation"))
    return f"{dataset.removesuffix('_validation')}_validation"


def streams_from_hub(dataset: str, dataset_path: str | None) -> bool:
    return dataset_path is None and (dataset.startswith("c4") or is_hub_name(dataset))


def list_files(
    dataset: str,
    dataset_path: str | None,
    key: str = "training",
    path_key: str | None = None,
) -> list[DataFile]:
    """List the files of a split, sorted by name.

    ``key`` is the config section, and ``path_key`` a key, for messages.

    ``dataset_path`` is as in ``list_local`` or ``list_objects``, the mirror of an hf:…
    data set, or None for the hub. ConfigError is raised if there is no such data, it
    cannot be read, or the hub cannot be reached.
    """
    split = split_of(dataset, key)
    where = f"{key}.dataset is {dataset!r}"
    path_key = path_key or f"{key}.dataset_path"
    where_path = path_is(path_key, dataset_path)
    if dataset_path is None and not streams_from_hub(dataset, None):
        raise ConfigError(
            f"{where}: set {key}.dataset_path to the folder, file or glob of the "
            "documents"
        )
    name = parse_name(dataset, f"{key}.dataset") if is_hub_name(dataset) else None
    if dataset_path is None:
        listing = resolve(name, where).files(split, where) if name else c4_files(split)
        found = [DataFile(file.path, file.url, file.size) for file in listing]
    elif name:
        mirrored = mirrored_files(dataset_path, replace(name, split=split), where_path)
        found = [DataFile(path, path, size) for path, size in mirrored]
    elif is_url(dataset_path):
        objects = list_objects(
            dataset_path, split, where_path, dataset.startswith("c4")
        )
        found = [DataFile(url, url, size, etag=etag) for url, size, etag in objects]
    else:
        paths = list_local(dataset_path, split, where_path, dataset.startswith("c4"))
        found = [DataFile(path, path, os.path.getsize(path)) for path in paths]
    root = os.path.commonpath([os.path.dirname(file.name) for file in found])
    names = [
        PurePosixPath(os.path.relpath(file.name, root)).as_posix() for file in found
    ]
    # The same name on nodes with other locales, and also for a name that is not UTF-8.
    names = [os.fsencode(name).decode(errors="surrogateescape") for name in names]
    # Readers look for a suffix in lower case.
    names = [name[: -len(suffix_of(name))] + suffix_of(name) for name in names]
    files = [replace(file, name=name) for name, file in zip(names, found, strict=True)]
    return sorted(files, key=lambda file: file.name)


def on_rank_0(
    function: Callable[..., T], *args: Any, group: dist.ProcessGroup | None = None
) -> T:
    """Call ``function`` on rank 0 only and broadcast the result or the error.

    A collective call, of a group of all ranks.

    If hundreds of ranks listed the files, the hub would answer 429 and a shared file
    system would be overloaded.
    """
    if (
        not dist.is_initialized()
        or dist.get_world_size() == 1
        or dist.get_backend() == "fake"
    ):
        return function(*args)
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [function(*args)]
        except UserError as error:
            box = [error]
        except Exception as error:  # not every exception can be pickled
            box = [RuntimeError(f"rank 0: {type(error).__name__}: {error}")]
    dist.broadcast_object_list(box, src=0, group=group)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


def check_hub(dataset: str, key: str = "training") -> None:
    """Raise ConfigError if the hub does not answer, denies access or has no such data
    set, by one or two requests.
    """
    name = parse_name(dataset, f"{key}.dataset") if is_hub_name(dataset) else C4
    commit_of(name, f"{key}.dataset is {dataset!r}")
