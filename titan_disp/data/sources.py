"""This module names the data sets that a run reads, and looks at the first documents of
a few local files.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from torchtitan.tools.logging import logger

from titan_disp.config.batch import slot_count, tokens_per_step
from titan_disp.config.types import JobConfig
from titan_disp.data import findings, ledger
from titan_disp.data.assignment import Share, one_share, prefixed, shares
from titan_disp.data.findings import (
    Reading,
    after_left_out,
    check_content,
    copies,
    measured,
    reading,
)
from titan_disp.data.ledger import Entry
from titan_disp.data.listing import (
    DataFile,
    held_out,
    list_files,
    split_of,
    streams_from_hub,
)
from titan_disp.data.local_files import left_out_of
from titan_disp.data.objects import is_folder
from titan_disp.data.options import StreamOptions
from titan_disp.errors import ConfigError, RefusedError, counted, did_you_mean
from titan_disp.job_config import Source
from titan_disp.text import byte_size


@dataclass(frozen=True)
class DataSet:
    """Describe one data set as a config names it: see ``list_files``."""

    dataset: str
    path: str | None
    key: str
    source: str = ""  # the name of the source if this is one of [[stream.sources]]

    @property
    def path_key(self) -> str:
        return f"{self.key}.path" if self.source else f"{self.key}.dataset_path"

    @property
    def on_hub(self) -> bool:
        return streams_from_hub(self.dataset, self.path)

    @property
    def prefix(self) -> str:
        """Return what the names of its files begin with in the run."""
        return f"{self.source}/" if self.source else ""

    def check_name(self) -> None:
        split_of(self.dataset, self.key)

    def check(self) -> list[DataFile]:
        """List its files, unless they are on the hub, which is asked only when training
        starts.
        """
        self.check_name()
        return [] if self.on_hub else self.files()

    def files(self) -> list[DataFile]:
        """List its files, with the names that they have in the run."""
        files = list_files(self.dataset, self.path, self.key, self.path_key)
        return prefixed(self.source, files) if self.source else files


def source_name(source: Source) -> str:
    """Return the source's ``name``, else the last part of its path without wildcards,
    else of the data set's name.
    """
    if source.name:
        return source.name
    if source.path is None:  # "c4", or "hf:OWNER/NAME:CONFIG:SPLIT"
        return source.dataset.removeprefix("hf:").split(":")[0].split("/")[-1]
    return next(
        (
            part
            for part in reversed(PurePath(source.path).parts)
            if not re.search(r"[*?[]|^/$", part)
        ),
        "",
    )


def check_sources(job_config: JobConfig) -> None:
    """Check [[stream.sources]] as far as the config alone allows."""
    sources = job_config.stream.sources
    path = job_config.training.dataset_path
    if sources and path is not None:
        raise ConfigError(
            f"training.dataset_path is {path!r}, and there are {len(sources)} "
            "stream.sources: expected one of the two. Leave dataset_path out, or make "
            "it the path of one more source"
        )
    names = [source_name(source) for source in sources]
    for i, (source, name) in enumerate(zip(sources, names, strict=True)):
        if not (math.isfinite(source.weight) and source.weight > 0):
            raise ConfigError(
                f"stream.sources[{i}] ({name}): weight is {source.weight}, expected a "
                "number > 0"
            )
        if not name or "/" in name:
            raise ConfigError(
                f"stream.sources[{i}]: name is {name!r}, expected one without a slash "
                "(name = …)"
            )
        if source.path is None and source.dataset.startswith("text"):
            raise ConfigError(
                f"stream.sources[{i}] ({name}) has no path: set it to the folder, "
                "file or glob of the documents"
            )
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(
            f"stream.sources: {Counter(names)[twice[0]]} of them are called "
            f"{twice[0]!r}: give each a name of its own (name = …; by default the "
            "last part of its path)"
        )


def source_shares(job_config: JobConfig, slots: int) -> list[Share]:
    """Divide S slots among [[stream.sources]]; return an empty list if there are no
    sources.
    """
    check_sources(job_config)
    sources = job_config.stream.sources
    return (
        shares({source_name(source): source.weight for source in sources}, slots)
        if sources
        else []
    )


def training_sets(job_config: JobConfig) -> list[DataSet]:
    """Return the data sets that a run trains on: one, or all sources in the order of
    the config.
    """
    training = job_config.training
    sources = job_config.stream.sources
    if not sources:
        return [DataSet(training.dataset, training.dataset_path, "training")]
    named = [(source_name(source), source) for source in sources]
    return [
        DataSet(source.dataset, source.path, f"stream.sources.{name}", name)
        for name, source in named
    ]


def data_sets(job_config: JobConfig) -> list[DataSet]:
    """Return all data sets that a run reads: for training, and for [validation] if it
    is enabled.
    """
    v = job_config.validation
    validation = [DataSet(v.dataset, v.dataset_path, "validation")] if v.enable else []
    return [*training_sets(job_config), *validation]


def held_out_sets(job_config: JobConfig) -> list[DataSet]:
    """Return that of [validation] if it is enabled, or else those that may lie beside
    the training data.
    """
    if job_config.validation.enable:
        return data_sets(job_config)[-1:]
    return [
        DataSet(held_out(one.dataset), one.path, "validation")
        for one in training_sets(job_config)
        if one.on_hub or (one.path and is_folder(one.path))
    ]


def list_and_check(data: Sequence[DataSet], options: StreamOptions) -> list[DataFile]:
    """List and check the files of the data sets, and return those for training."""
    listed = [(one, one.files()) for one in data]
    check_overlaps(listed)
    training = []
    for one, files in listed:
        if one.key != "validation":
            read = after_left_out(files, options, one.prefix)
            training += measured(check_content(read, options, one.key), options)
    check_left_out(listed, training, options)
    warn_of_copies(listed)
    return training


def list_for_run(data: Sequence[DataSet], options: StreamOptions) -> list[DataFile]:
    """Return what ``list_and_check`` does, and write it to the folder of the run."""
    files = list_and_check(data, options)
    if os.path.isdir(options.run_folder):
        findings.write(files, ledger_of(data, files, options), options)
    return files


def ledger_of(
    data: Sequence[DataSet], training: Sequence[DataFile], options: StreamOptions
) -> list[Entry]:
    """Return what becomes of the files of a run, and of those that init has copied to
    its own, in place of these.
    """
    copied: list[Entry] = []
    entries: list[Entry] = []
    for one in data:
        if one.key != "validation":
            copied += ledger.read(one.path)
            entries += ledger.of_left_out(left_out_of(one.path_key, one.path))
    return copied or [*findings.entries_of(training, options), *entries]


def check_left_out(
    listed: Iterable[tuple[DataSet, Sequence[DataFile]]],
    training: Sequence[DataFile],
    options: StreamOptions,
) -> None:
    """Raise ConfigError if no file has a name in ``stream.left_out``, and log what is
    left out.
    """
    sizes = {file.name: file.size for _, files in listed for file in files}
    sizes |= {file.name: file.size for file in training}
    for name in options.left_out:
        if name not in sizes:
            hint = did_you_mean(name, sizes)
            raise ConfigError(
                f"stream.left_out names {name!r}, which is neither a file of the data "
                f"nor known to the run in {options.run_folder!r}{hint}"
            )
    if options.left_out:
        size = byte_size(sum(sizes[name] for name in options.left_out))
        logger.warning(
            f"data: {counted(len(options.left_out), 'file')} ({size}) are left out, as "
            f"stream.left_out says: {', '.join(options.left_out)}"
        )


def warn_of_copies(listed: Iterable[tuple[DataSet, Sequence[DataFile]]]) -> None:
    """Warn of files with the same content."""
    keys = {file: one.key for one, files in listed for file in files}
    if pairs := copies([*keys]):
        first, second = pairs[0]
        logger.warning(
            f"data: {counted(len(pairs), 'copy', 'copies')} of files, such as "
            f"{second.url!r} ({keys[second]}), whose original is {first.url!r} "
            f"({keys[first]}). Their documents come more often than others, and "
            "held-out ones are not held out: remove the copies"
        )


def shares_of(names: Container[str], job_config: JobConfig, ranks: int) -> list[Share]:
    """Return the shares of the sources with these names ("" if there is only one) in a
    run on so many data-parallel ranks.
    """
    slots = slot_count(job_config, ranks)
    every_share = source_shares(job_config, slots) or one_share(slots)
    return [share for share in every_share if share.name in names]


def readings(
    files: Mapping[str, Sequence[DataFile]],
    job_config: JobConfig,
    ranks: int,
) -> list[Reading]:
    """Return how so many data-parallel ranks read the files of each source, which are
    by its name ("" if there is only one).
    """
    tokens = job_config.training.steps * tokens_per_step(job_config, ranks)
    return [
        reading(files[share.name], share, ranks, tokens, job_config.stream.seed)
        for share in shares_of(files, job_config, ranks)
    ]


def check_overlaps(listed: Iterable[tuple[DataSet, Sequence[DataFile]]]) -> None:
    """Raise RefusedError if two data sets have a file in common, under any name or
    link; warn if one has it twice.
    """
    seen: dict[object, tuple[DataSet, DataFile]] = {}
    for data, files in listed:
        twice: dict[str, list[tuple[str, str]]] = {}
        for file in files:
            # Links have the inode of the file. What was removed since it was listed is
            # reported when it is read.
            status = os.stat(file.url) if os.path.exists(file.url) else None
            identity = (status.st_dev, status.st_ino) if status else file.url
            if identity in seen:
                other, first = seen[identity]
                twice.setdefault(other.key, []).append((first.url, file.url))
            seen.setdefault(identity, (data, file))
        for key, pairs in twice.items():
            number = counted(len(pairs), "file")
            (one, again) = pairs[0]
            if key == data.key:
                logger.warning(
                    f"{key} data: {number}, such as {again!r}, lead to files that are "
                    f"read under another name ({one!r}), so that their documents come "
                    "several times per epoch"
                )
                continue
            why = "a weight decides how often a document comes: leave it out of one source, and raise the weight of the other"
            if data.key == "validation":
                why = "expected held-out documents in [validation]: leave the file out of one of the two"
            raise RefusedError(
                f"{key} and {data.key} read {number} in common, such as {one!r} and "
                f"{again!r}; {why}"
            )
