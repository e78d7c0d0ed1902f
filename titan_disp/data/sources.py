"""Where the training data is: [training] dataset and dataset_path, or the tables of [[stream.sources]]."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from torchtitan.config import JobConfig

from titan_disp.data.files import DataFile, check_data, list_files, split_of
from titan_disp.data.mixture import Share, prefixed, shares
from titan_disp.errors import ConfigError

if TYPE_CHECKING:
    from titan_disp.job_config import Source  # which imports the plugin, and with it this


@dataclass(frozen=True)
class DataSet:
    """One data set as a config names it.

    Attributes:
        dataset, path: see ``list_files``. key: config section, for messages.
        source: its name, where it is one of [[stream.sources]].
    """

    dataset: str
    path: str | None
    key: str
    source: str = ""

    @property
    def path_key(self) -> str:
        """The config key of ``path``."""
        return f"{self.key}.path" if self.source else f"{self.key}.dataset_path"

    def check_name(self) -> None:
        """Raise ConfigError where there is no such data set."""
        with self._said():
            split_of(self.dataset, self.key)

    def check(self) -> list[DataFile]:
        """Its files, where they are local.

        Raises:
            ConfigError: local data is missing.
        """
        with self._said():
            return check_data(self.dataset, self.path, self.key)

    def files(self) -> list[DataFile]:
        """Its files, under the names that they have in the run.

        Raises:
            ConfigError: nothing there, not readable, or no hub.
        """
        with self._said():
            files = list_files(self.dataset, self.path, self.key)
        return prefixed(self.source, files) if self.source else files

    @contextmanager
    def _said(self) -> Iterator[None]:
        """A source's key is ``path``."""
        try:
            yield
        except ConfigError as error:
            if not self.source:
                raise
            raise ConfigError(str(error).replace(f"{self.key}.dataset_path", self.path_key)) from error


def source_name(source: "Source") -> str:
    """Its ``name``, or the last part of its path that is no pattern, or its data set's."""
    if source.name:
        return source.name
    if source.path is None:  # "c4", or "hf:OWNER/NAME:CONFIG:SPLIT"
        return source.dataset.removeprefix("hf:").split(":")[0].split("/")[-1]
    return next((part for part in reversed(PurePath(source.path).parts) if not re.search(r"[*?[]|^/$", part)), "")


def check_sources(job_config: JobConfig) -> None:
    """[[stream.sources]], as far as the config alone tells.

    Raises:
        ConfigError: a bad weight or name, two of one name, or ``training.dataset_path`` beside them.
    """
    sources = job_config.stream.sources  # type: ignore[attr-defined]
    path = job_config.training.dataset_path
    if sources and path is not None:
        raise ConfigError(
            f"training.dataset_path is {path!r}, and there are {len(sources)} stream.sources: expected one of the two. Leave "
            "dataset_path out, or make it the path of one more source"
        )
    names = [source_name(source) for source in sources]
    for i, (source, name) in enumerate(zip(sources, names, strict=True)):
        if not (math.isfinite(source.weight) and source.weight > 0):
            raise ConfigError(f"stream.sources[{i}] ({name}): weight is {source.weight}, expected a number > 0")
        if not name or "/" in name:
            raise ConfigError(f"stream.sources[{i}]: name is {name!r}, expected one without a slash (name = …)")
        if source.path is None and source.dataset.startswith("text"):
            raise ConfigError(
                f"stream.sources[{i}] ({name}) has no path: set it to the documents' folder, file or glob"
            )
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(
            f"stream.sources: {Counter(names)[twice[0]]} of them are called {twice[0]!r}: give each a name of its own (name = …; "
            "by default the last part of its path)"
        )


def source_shares(job_config: JobConfig, slots: int) -> list[Share]:
    """What each of [[stream.sources]] has of S slots; none where there are no sources.

    Raises:
        ConfigError: as ``check_sources``, or too few slots.
    """
    check_sources(job_config)
    sources = job_config.stream.sources  # type: ignore[attr-defined]
    return shares({source_name(source): source.weight for source in sources}, slots) if sources else []


def training_sets(job_config: JobConfig) -> list[DataSet]:
    """The data sets that a run trains on: one, or all sources in the order of the config."""
    training = job_config.training
    sources = job_config.stream.sources  # type: ignore[attr-defined]
    if not sources:
        return [DataSet(training.dataset, training.dataset_path, "training")]
    named = [(source_name(source), source) for source in sources]
    return [DataSet(source.dataset, source.path, f"stream.sources.{name}", name) for name, source in named]


def data_sets(job_config: JobConfig) -> list[DataSet]:
    """All that a run reads: to train on, and for [validation] where it is enabled."""
    v = job_config.validation
    validation = [DataSet(v.dataset, v.dataset_path, "validation")] if v.enable else []
    return [*training_sets(job_config), *validation]
