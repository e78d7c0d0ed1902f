"""This module names the data sets that a run reads, and looks at the first documents of
a few local files.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import PurePath

import numpy as np
from torchtitan.tools.logging import logger

from titan_disp.config.types import JobConfig
from titan_disp.data import formats, megatron
from titan_disp.data.assignment import Share, prefixed, shares
from titan_disp.data.documents import Documents
from titan_disp.data.index import content_sample, with_index
from titan_disp.data.listing import (
    DataFile,
    held_out,
    list_files,
    split_of,
    streams_from_hub,
)
from titan_disp.data.objects import is_folder
from titan_disp.data.options import StreamOptions
from titan_disp.errors import ConfigError, DataError, RefusedError, counted
from titan_disp.job_config import Source


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

    def check_name(self) -> None:
        split_of(self.dataset, self.key)

    def check(self) -> list[DataFile]:
        """List its files, unless they are on the hub, which is asked only when training
        starts.
        """
        self.check_name()
        return (
            []
            if self.on_hub
            else list_files(self.dataset, self.path, self.key, self.path_key)
        )

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


# read in each of three files (the first, a middle one, the last) until a usable one is
# found
DOCUMENTS = 20


def list_and_check(data: Sequence[DataSet], options: StreamOptions) -> list[DataFile]:
    """List and check the files of the data sets, and return those for training."""
    listed = [(one, one.files()) for one in data]
    check_overlaps(listed)
    every = []
    for one, files in listed:
        if one.key != "validation":
            check_content(files, options, one.key)
            every += measured(files, options)
    return every


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


# stored bytes read of each file that is measured; more than buffers and decoders hold
SAMPLE = 1 << 20


def measured(files: Sequence[DataFile], options: StreamOptions) -> list[DataFile]:
    """Return the files with what the index knows of them, or else measured.

    ``density`` is then that of the beginnings of up to three files with the same
    suffix.
    """
    if options.index:
        return with_index(files, options)
    groups: dict[str, list[DataFile]] = {}
    for file in files:
        groups.setdefault(formats.suffix_of(file.name), []).append(file)
    densities = {}
    for suffix, group in groups.items():
        some = (
            []
            if suffix in formats.TOKEN_IDS
            else [group[i] for i in sorted({0, len(group) // 2, len(group) - 1})]
        )
        text, stored = (
            sum(each)
            for each in zip(
                (0, 0.0), *(_sampled(file, options) for file in some), strict=True
            )
        )
        densities[suffix] = float(f"{text / stored:.3g}") if text else 1.0

    def known(file: DataFile) -> DataFile:
        density = (
            0.0
            if _has_no_rows(file, options)
            else densities[formats.suffix_of(file.name)]
        )
        return replace(
            file,
            density=density,
            sample=content_sample(file),
            blocks=megatron.blocks_of(file),
        )

    # a shared file system takes milliseconds for each file
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(known, files))
    if not any(file.density for file in found):
        raise ConfigError(
            f"{found[0].url} has no "
            f"rows{' (nor have the others)' * (len(found) > 1)}: name files with text"
        )
    return found


def _has_no_rows(file: DataFile, options: StreamOptions) -> bool:
    """Return whether a Parquet file is empty. One of 64 KiB has more than a footer."""
    if not file.name.endswith(formats.PARQUET) or file.size > 1 << 16:
        return False
    with (
        closing(Documents(file, options)) as documents,
        suppress(DataError, formats.DamagedFile),
    ):
        return documents.read() is None
    return False  # damaged, as reading it will tell


def _sampled(file: DataFile, options: StreamOptions) -> tuple[int, float]:
    """Return the bytes of some text of a file, and how many stored bytes it takes."""
    text = begin = 0
    with closing(Documents(file, options)) as documents, suppress(formats.DamagedFile):
        while (record := documents.read()) is not None:
            assert documents.stored is not None
            place = documents.stored.tell()
            if not text:
                begin = place
            if file.name.endswith(formats.PARQUET):
                if text > SAMPLE:
                    return (
                        text,
                        file.size
                        * documents.position
                        / documents.table.metadata.num_rows,
                    )
            elif place - begin >= SAMPLE:
                return text, place - begin
            with suppress(formats.BadDocument):
                text += len(formats.text_of(record, options.format.text_field).encode())
        return text, file.size
    return 0, 0


def check_content(files: Sequence[DataFile], options: StreamOptions, key: str) -> None:
    """Check the first documents of up to three local files.

    Token ids are not read if no tokenizer is known.

    ConfigError is raised if no document of a file can be used, or a whole .txt file is
    one document that is too long. Single bad documents and damaged files are left to
    the run (``stream.on_bad_data``).
    """
    format = options.format
    max_bytes = options.max_document_bytes
    local = [file for file in files if not file.url.startswith("hf://")]
    if format.eos_id is None:
        local = [file for file in local if not file.name.endswith(formats.TOKEN_IDS)]
    if format.text_split == "file":
        for file in local:
            if file.name.endswith(formats.PLAIN_TEXT[0]) and file.size > max_bytes:
                raise ConfigError(
                    f"{key} data: {file.url} is one document of {file.size:,} bytes, "
                    f"{formats.TOO_LONG}"
                )
    for i in sorted({0, len(local) // 2, len(local) - 1}) if local else ():
        if (cause := _cause(local[i], options)) is not None:
            raise ConfigError(f"{key} data: {local[i].url}: {cause}")


def _cause(file: DataFile, options: StreamOptions) -> str | None:
    """Return why none of the first documents of a file can be used, or None.

    An empty or too long one says nothing.
    """
    format = options.format
    cause = None
    documents = Documents(file, options)
    try:
        for _ in range(DOCUMENTS):
            record = documents.read()
            if record is None or isinstance(record, np.ndarray):
                break
            try:
                formats.text_of(record, format.text_field)
                return None
            except (formats.Garbage, formats.OtherShape) as error:
                cause = (
                    cause
                    or f"document {documents.position - 1}: {error}{_expected(str(error), file)}"
                )
            except formats.BadDocument:  # empty, or too long
                return None
    except formats.OtherContent as error:
        return str(error)
    except formats.DamagedFile:
        return None
    finally:
        documents.close()
    return cause


def _expected(error: str, file: DataFile) -> str:
    """Return advice to append if the error says only what is wrong with one document,
    else an empty text.
    """
    # But not "unexpected end of data", the error of truncated UTF-8
    if re.search(r"\bexpected\b|stream\.", error):
        return ""
    if file.name.endswith(formats.PLAIN_TEXT):
        return "; expected UTF-8: convert it (iconv), or leave it out"
    return "; expected one document per line, with a text field: convert the file, or leave it out"
