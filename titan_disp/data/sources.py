"""This module names the data sets that a run reads, from [training], [[stream.sources]] and [validation]."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol

from torchtitan.config import JobConfig

from titan_disp.data.files import DataFile, check_data, list_files, split_of
from titan_disp.data.mixture import Share, prefixed, shares
from titan_disp.errors import ConfigError


class Source(Protocol):
    """This is a table [[stream.sources]] of the config. ``job_config.Source`` describes its keys."""

    name: str
    path: str | None
    dataset: str


@dataclass(frozen=True)
class DataSet:
    """Describe one data set as a config names it.

    Attributes:
        dataset: see ``list_files``.
        path: see ``list_files``.
        key: the config section, for messages.
        source: the name of the source if this is one of [[stream.sources]], else empty.
    """

    dataset: str
    path: str | None
    key: str
    source: str = ""

    @property
    def path_key(self) -> str:
        """Return the config key of ``path``."""
        return f"{self.key}.path" if self.source else f"{self.key}.dataset_path"

    def check_name(self) -> None:
        """Raise ConfigError if no data set has this name."""
        with self._said():
            split_of(self.dataset, self.key)

    def check(self) -> list[DataFile]:
        """List its files if they are local.

        Raises:
            ConfigError: no data set has this name, or local data is missing or cannot be read.
        """
        with self._said():
            return check_data(self.dataset, self.path, self.key)

    def files(self) -> list[DataFile]:
        """List its files, with the names that they have in the run.

        Raises:
            ConfigError: there is no such data, it cannot be read, or the hub cannot be reached.
        """
        with self._said():
            files = list_files(self.dataset, self.path, self.key)
        return prefixed(self.source, files) if self.source else files

    @contextmanager
    def _said(self) -> Iterator[None]:
        """Correct the key in messages: a source has ``path`` where [training] has ``dataset_path``."""
        try:
            yield
        except ConfigError as error:
            if not self.source:
                raise
            raise ConfigError(str(error).replace(f"{self.key}.dataset_path", self.path_key)) from error


def source_name(source: Source) -> str:
    """Return the source's ``name``, else the last part of its path that has no wildcards.

    Without a path, return the data set's name without owner, configuration and split.
    """
    if source.name:
        return source.name
    if source.path is None:  # "c4", or "hf:OWNER/NAME:CONFIG:SPLIT"
        return source.dataset.removeprefix("hf:").split(":")[0].split("/")[-1]
    return next((part for part in reversed(PurePath(source.path).parts) if not re.search(r"[*?[]|^/$", part)), "")


def check_sources(job_config: JobConfig) -> None:
    """Check [[stream.sources]] as far as the config alone allows.

    Raises:
        ConfigError: a bad weight or name, two sources of one name, own texts without a path, or
            ``training.dataset_path`` beside the sources.
    """
    sources = job_config.stream.sources  # type: ignore[attr-defined]
    path = job_config.training.dataset_path
    if sources and path is not None:
        raise ConfigError(
            f"training.dataset_path is {path!r}, and there are {len(sources)} stream.sources: expected one of the two. "
            "Leave dataset_path out, or make it the path of one more source"
        )
    names = [source_name(source) for source in sources]
    for i, (source, name) in enumerate(zip(sources, names, strict=True)):
        if not (math.isfinite(source.weight) and source.weight > 0):
            raise ConfigError(f"stream.sources[{i}] ({name}): weight is {source.weight}, expected a number > 0")
        if not name or "/" in name:
            raise ConfigError(f"stream.sources[{i}]: name is {name!r}, expected one without a slash (name = …)")
        if source.path is None and source.dataset.startswith("text"):
            raise ConfigError(
                f"stream.sources[{i}] ({name}) has no path: set it to the folder, file or glob of the documents"
            )
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(
            f"stream.sources: {Counter(names)[twice[0]]} of them are called {twice[0]!r}: give each a name of its own "
            "(name = …; by default the last part of its path)"
        )


def source_shares(job_config: JobConfig, slots: int) -> list[Share]:
    """Divide S slots among [[stream.sources]]; return an empty list if there are no sources.

    Raises:
        ConfigError: as ``check_sources``, or there are too few slots.
    """
    check_sources(job_config)
    sources = job_config.stream.sources  # type: ignore[attr-defined]
    return shares({source_name(source): source.weight for source in sources}, slots) if sources else []


def training_sets(job_config: JobConfig) -> list[DataSet]:
    """Return the data sets that a run trains on: one, or all sources in the order of the config."""
    training = job_config.training
    sources = job_config.stream.sources  # type: ignore[attr-defined]
    if not sources:
        return [DataSet(training.dataset, training.dataset_path, "training")]
    named = [(source_name(source), source) for source in sources]
    return [DataSet(source.dataset, source.path, f"stream.sources.{name}", name) for name, source in named]


def data_sets(job_config: JobConfig) -> list[DataSet]:
    """Return all data sets that a run reads: for training, and for [validation] if it is enabled."""
    v = job_config.validation
    validation = [DataSet(v.dataset, v.dataset_path, "validation")] if v.enable else []
    return [*training_sets(job_config), *validation]
