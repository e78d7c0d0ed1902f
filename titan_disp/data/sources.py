"""This module finds the names, slots and files of the data sets that a run reads. It
compares the data sets, and estimates how much each rank reads.
"""

import math
import os
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import PurePath

from torchtitan.tools.logging import logger

from titan_disp.config.batch import slot_count, tokens_per_step
from titan_disp.config.types import JobConfig
from titan_disp.data import findings, ledger
from titan_disp.data.assignment import (
    KEYS,
    Assignment,
    Share,
    one_share,
    prefixed,
    shares,
)
from titan_disp.data.findings import after_left_out, check_content, measured
from titan_disp.data.index import content_sample
from titan_disp.data.ledger import Entry
from titan_disp.data.listing import (
    DataFile,
    Listing,
    held_out,
    listing_of,
    split_of,
)
from titan_disp.data.options import StreamOptions
from titan_disp.data.stores import is_folder, is_pattern
from titan_disp.errors import ConfigError, RefusedError, counted, did_you_mean
from titan_disp.job_config import Source
from titan_disp.text import byte_size


@dataclass(frozen=True)
class DataSet:
    """A data set as a config names it, see ``listing_of``."""

    dataset: str
    path: str | None
    key: str
    source: str = ""  # the name of the source if this is one of [[stream.sources]]

    @property
    def path_key(self) -> str:
        return f"{self.key}.path" if self.source else f"{self.key}.dataset_path"

    @property
    def on_hub(self) -> bool:
        return self.path is None and not self.dataset.startswith("text")

    @property
    def prefix(self) -> str:
        """The beginning of the names that its files have in the run."""
        return f"{self.source}/" if self.source else ""

    @property
    def is_validation(self) -> bool:
        return self.key == "validation"

    def check_name(self) -> None:
        """Raise ConfigError if there is no such data set."""
        split_of(self.dataset, self.key)

    def check(self) -> list[DataFile]:
        """Return the data set's files. If they are on the hub, return an empty list,
        because the hub is asked only when training starts.
        """
        self.check_name()
        return [] if self.on_hub else self.files()

    def listing(self) -> Listing:
        """Return the data set's files, with the names that they have in the run."""
        listing = listing_of(self.dataset, self.path, self.key, self.path_key)
        if self.source:
            listing = replace(listing, files=prefixed(self.source, listing.files))
        return listing

    def files(self) -> list[DataFile]:
        return self.listing().files


def source_name(source: Source) -> str:
    """Return the source's ``name``, or else the last part of its path that has no
    wildcards, or else the last part of the data set's name.
    """
    if source.name:
        return source.name
    if source.path is None:  # "c4", or "hf:OWNER/NAME:CONFIG:SPLIT"
        return source.dataset.removeprefix("hf:").split(":")[0].split("/")[-1]
    parts = reversed(PurePath(source.path).parts)
    return next((part for part in parts if not is_pattern(part) and part != "/"), "")


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
    for i, source in enumerate(sources):
        name = source_name(source)
        where = f"stream.sources[{i}]"
        if not (math.isfinite(source.weight) and source.weight > 0):
            raise ConfigError(
                f"{where} ({name}): weight is {source.weight}, expected a number > 0"
            )
        if not name or "/" in name:
            raise ConfigError(
                f"{where}: name is {name!r}, expected one without a slash (name = …)"
            )
        if source.path is None and source.dataset.startswith("text"):
            raise ConfigError(
                f"{where} ({name}) has no path: set it to the folder, file or glob of "
                "the documents"
            )
    for name, count in Counter(map(source_name, sources)).items():
        if count > 1:
            raise ConfigError(
                f"stream.sources: {count} sources are called {name!r}: give each a "
                "different name (name = …; by default the last part of its path)"
            )


def source_shares(job_config: JobConfig, slots: int) -> list[Share]:
    """Return the shares of [[stream.sources]] in a run's ``slots``, or an empty list if
    there are no sources.
    """
    check_sources(job_config)
    sources = job_config.stream.sources
    weights = {source_name(source): source.weight for source in sources}
    return shares(weights, slots) if weights else []


def training_sets(job_config: JobConfig) -> list[DataSet]:
    """Return the data sets that a run trains on: all sources in the order of the config,
    or the data set of [training].
    """
    training = job_config.training
    data = []
    for source in job_config.stream.sources:
        name = source_name(source)
        key = f"stream.sources.{name}"
        data.append(DataSet(source.dataset, source.path, key, name))
    return data or [DataSet(training.dataset, training.dataset_path, "training")]


def data_sets(job_config: JobConfig) -> list[DataSet]:
    """Return all data sets that a run reads: for training, and for [validation] if it
    is enabled.
    """
    v = job_config.validation
    validation = [DataSet(v.dataset, v.dataset_path, "validation")] if v.enable else []
    return [*training_sets(job_config), *validation]


def held_out_sets(job_config: JobConfig) -> list[DataSet]:
    """Return the data set of [validation] if it is enabled, or else the validation
    splits that may lie beside the training data.
    """
    if job_config.validation.enable:
        return data_sets(job_config)[-1:]
    return [
        DataSet(held_out(data.dataset), data.path, "validation")
        for data in training_sets(job_config)
        if data.on_hub or (data.path and is_folder(data.path))
    ]


@dataclass
class CheckedData:
    """The files of a run's data sets, after a look at each.

    Attributes:
        of_sources: the training files, by the name of their source ("" if there is only
            one source).
        ledger: what becomes of each training file.
        copies: pairs of files with the same content, which may be held-out files.
    """

    of_sources: dict[str, list[DataFile]] = field(default_factory=dict)
    ledger: list[Entry] = field(default_factory=list)
    copies: list[tuple[DataFile, DataFile]] = field(default_factory=list)

    @property
    def files(self) -> list[DataFile]:
        """The training files of all sources."""
        return [*chain.from_iterable(self.of_sources.values())]


def checked_data(data: Sequence[DataSet], options: StreamOptions) -> CheckedData:
    """Return the files of the data sets after all checks.

    Raises ConfigError if there is no such data, or if a run cannot use it.
    """
    listings = [(data_set, data_set.listing()) for data_set in data]
    listed = [(data_set, listing.files) for data_set, listing in listings]
    check_overlaps(listed)
    checked = CheckedData()
    for data_set, listing in listings:
        if data_set.is_validation:
            continue
        present = after_left_out(listing.files, options, data_set.prefix)
        converted = check_content(present, options, data_set.key)
        files = measured(converted, options)
        checked.of_sources[data_set.source] = files
        # The ledger that init has written is about the files from which init copied.
        checked.ledger += ledger.read(data_set.path) or [
            *findings.entries_of(files, options),
            *ledger.of_left_out(listing.left_out),
        ]
    keys: dict[DataFile, str] = {}
    for data_set, files in listed:
        keys.update(dict.fromkeys(files, data_set.key))
    check_left_out([*keys, *checked.files], options)
    # Without an index, ``measured`` has read the same samples.
    samples = {}
    if not options.index:
        samples = {file.url: file.sample for file in checked.files}
    checked.copies = copies([*keys], samples)
    warn_of_copies(checked.copies, keys)
    return checked


def list_and_check(data: Sequence[DataSet], options: StreamOptions) -> list[DataFile]:
    """Return the training files of the data sets after all checks."""
    return checked_data(data, options).files


def list_for_run(data: Sequence[DataSet], options: StreamOptions) -> list[DataFile]:
    """Return what ``list_and_check`` returns, and write what is known about the data to
    the run's folder.
    """
    checked = checked_data(data, options)
    if os.path.isdir(options.run_folder):
        findings.write(checked.files, checked.ledger, options)
    return checked.files


def check_left_out(files: Sequence[DataFile], options: StreamOptions) -> None:
    """Raise ConfigError if a name in ``stream.left_out`` is not that of a file, and log
    what is left out.
    """
    sizes = {file.name: file.size for file in files}
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


def copies(
    files: Sequence[DataFile], samples: Mapping[str, str]
) -> list[tuple[DataFile, DataFile]]:
    """Return pairs (original, copy) of local files whose sizes and ``content_sample``
    are equal. ``samples`` holds the known samples by URL.
    """
    counts = Counter(file.size for file in files if file.size and not file.remote)
    originals: dict[tuple[int, str], DataFile] = {}
    pairs = []
    for file in files:
        if counts[file.size] > 1 and not file.remote:
            sample = samples.get(file.url) or content_sample(file)
            original = originals.setdefault((file.size, sample), file)
            if original.url != file.url:
                pairs.append((original, file))
    return pairs


def warn_of_copies(
    pairs: Sequence[tuple[DataFile, DataFile]], keys: Mapping[DataFile, str]
) -> None:
    """Log a warning about files with the same content. ``keys`` has the config section
    of each file.
    """
    if not pairs:
        return
    original, copy = pairs[0]
    logger.warning(
        f"data: {counted(len(pairs), 'copy', 'copies')} of files, such as "
        f"{copy.url!r} ({keys[copy]}), whose original is {original.url!r} "
        f"({keys[original]}). Documents of copied files come more often than others, "
        "and a held-out file with a copy is not held out: remove the copies"
    )


def _identity(file: DataFile) -> object:
    """Return a value that is the same for all names and links of a file."""
    try:
        status = os.stat(file.url)
    except OSError:  # The file is in a store, or was removed: reading it reports this.
        return file.url
    return status.st_dev, status.st_ino


def check_overlaps(listed: Iterable[tuple[DataSet, Sequence[DataFile]]]) -> None:
    """Raise RefusedError if two data sets have a file in common, under any name or link.
    Log a warning if a data set has a file twice.
    """
    seen: dict[object, tuple[DataFile, str]] = {}
    for data_set, files in listed:
        repeated: dict[str, list[tuple[DataFile, DataFile]]] = {}
        for file in files:
            identity = _identity(file)
            if identity in seen:
                first, key = seen[identity]
                repeated.setdefault(key, []).append((first, file))
            else:
                seen[identity] = (file, data_set.key)
        for key, pairs in repeated.items():
            number = counted(len(pairs), "file")
            first, file = pairs[0]
            if key == data_set.key:
                logger.warning(
                    f"{key} data: {number}, such as {file.url!r}, are also read under "
                    f"another name ({first.url!r}), so that their documents come "
                    "several times per epoch"
                )
                continue
            why = "a weight decides how often a document comes: leave it out of one source, and raise the weight of the other"
            if data_set.is_validation:
                why = "expected held-out documents in [validation]: leave the file out of one of the two"
            raise RefusedError(
                f"{key} and {data_set.key} read {number} in common, such as "
                f"{first.url!r} and {file.url!r}; {why}"
            )


# A warning is given above this amplification. With C4's files on 640 ranks, it is 1.6.
MOST_AMPLIFIED = 4.0
MUCH = 1e9  # bytes that a rank reads in an epoch
# After about 16 epochs, more epochs teach a model little (Muennighoff et al. 2023,
# arXiv 2305.16264).
MOST_EPOCHS = 16.0
BYTES_PER_TOKEN = 4  # of text, approximately
BYTES_PER_ID = 2  # of token ids, approximately


@dataclass(frozen=True)
class Reading:
    """How a run reads the files of a source."""

    source: str  # its name; empty if there is only one source
    ranks: int
    files: int
    # stored bytes that all ranks together read in an epoch, divided by the stored bytes
    # of the files
    amplification: float
    largest: float  # most stored bytes that one rank reads in an epoch
    epochs: float  # approximate epochs of the whole run; 0 if its length is not known
    unseen: float  # see ``Assignment.unseen``

    def warnings(self) -> Iterator[str]:
        name = ""
        if self.source:
            name = f"source {self.source}: "
        if self.amplification > MOST_AMPLIFIED and self.largest > MUCH:
            yield (
                f"data: {name}all ranks together read the stored bytes "
                f"{self.amplification:.0f} times in an epoch, and one rank reads up to "
                f"{byte_size(self.largest, 3)}, because "
                f"{counted(self.files, 'file')} cannot be divided better among "
                f"{counted(self.ranks, 'rank')}: split the data into at least as many "
                "files as ranks, or index it (titan-disp data index) if it is not "
                "compressed"
            )
        if self.epochs > MOST_EPOCHS:
            yield (
                f"data: {name}the run reads the text about {self.epochs:.0f} times, and "
                f"gains little after {MOST_EPOCHS:.0f}: add text, lower its weight, or "
                "train on fewer tokens"
            )


def shares_of(names: Container[str], job_config: JobConfig, ranks: int) -> list[Share]:
    """Return the shares of the sources with these names ("" if there is only one) in a
    run on ``ranks`` data-parallel ranks.
    """
    slots = slot_count(job_config, ranks)
    all_shares = source_shares(job_config, slots) or one_share(slots)
    return [share for share in all_shares if share.name in names]


def readings(
    files: Mapping[str, Sequence[DataFile]], job_config: JobConfig, ranks: int
) -> list[Reading]:
    """Return how ``ranks`` data-parallel ranks read each source. The keys of ``files``
    are the sources' names ("" if there is only one source).
    """
    tokens = job_config.training.steps * tokens_per_step(job_config, ranks)
    return [
        reading(files[share.name], share, ranks, tokens, job_config.stream.seed)
        for share in shares_of(files, job_config, ranks)
    ]


def reading(
    files: Sequence[DataFile], share: Share, ranks: int, tokens: float, seed: int
) -> Reading:
    """Return how ``ranks`` data-parallel ranks read the files of a source. ``share``
    has the source's slots. The run has ``tokens`` tokens.
    """
    assignment = Assignment(files, one_share(share.slots), seed)
    of_ranks = [
        stored_bytes(files, assignment, slots)
        for slots in assignment.slots_of_ranks(share.total // ranks)
    ]
    per_token = BYTES_PER_ID if files[0].holds_ids else BYTES_PER_TOKEN
    text = sum(file.size * file.density for file in files)
    return Reading(
        source=share.name,
        ranks=ranks,
        files=len(files),
        amplification=sum(of_ranks) / max(1, sum(file.size for file in files)),
        largest=max(of_ranks),
        epochs=max(0.0, tokens * share.tokens * per_token / max(1.0, text)),
        unseen=assignment.unseen(),
    )


def stored_bytes(
    files: Sequence[DataFile], assignment: Assignment, slots: range
) -> float:
    """Return the approximate number of stored bytes that a rank with these slots reads
    in an epoch. If slots own whole blocks of a file, the rank reads only its own
    blocks of this file. It reads other files as a whole.
    """
    parts: dict[int, float] = {}
    for slot in slots:
        for segment in assignment.run(slot, 0).segments:
            part = 1.0
            if segment.dealt:
                part = (segment.high - segment.low) / KEYS + parts.get(segment.file, 0)
            parts[segment.file] = part
    return sum(files[file].size * part for file, part in parts.items())
