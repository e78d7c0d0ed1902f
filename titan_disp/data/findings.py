"""One look at the files of a run, before the run reads them.

``look_at_all`` opens every local file, in parallel: the footer and the first rows of a
Parquet file, and the first documents of others. It finds files in other encodings,
files without rows, and files of which no document can be used. A process looks at a
file once. A start of training writes what it found to ``data.json`` in the run's
folder, so that the next start opens only the files that have changed, and knows which
files the run began with.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from torchtitan.tools.logging import logger

from titan_disp.data import formats, token_ids
from titan_disp.data.assignment import KEYS, Assignment, Share, one_share
from titan_disp.data.documents import Documents
from titan_disp.data.index import content_sample, with_index
from titan_disp.data.ledger import CONVERTED, DATA, LEFT_OUT, SKIPPED, USED, Entry
from titan_disp.data.listing import DataFile
from titan_disp.data.local_files import warn_once
from titan_disp.data.options import StreamOptions
from titan_disp.data.storage import opened
from titan_disp.errors import ConfigError, counted
from titan_disp.files import atomic_write
from titan_disp.text import byte_size

VERSION = 1
DOCUMENTS = 20  # of each file, until a usable one comes
# A shared file system takes milliseconds for each file.
THREADS = 16
# stored bytes read of each file that is measured; more than buffers and decoders hold
SAMPLE = 1 << 20


@dataclass(frozen=True)
class Look:
    """What the beginning of a file, or its footer, shows."""

    encoding: str = ""  # see ``DataFile.encoding``
    problem: str | None = None  # why none of the first documents can be used
    has_rows: bool = True


@dataclass
class Findings:
    """What a run's folder says about its files."""

    # those that its slots are cut from, also if some are gone
    files: list[DataFile] = field(default_factory=list)
    looks: dict[str, Look] = field(default_factory=dict)  # by ``_key``


def of_run(folder: str) -> Findings:
    """Return what a run has written to its folder; nothing if there is no such file, or
    one of another version. Raises OSError if the file cannot be read.
    """
    missing = (FileNotFoundError, NotADirectoryError)
    with suppress(*missing, ValueError, KeyError, TypeError):
        content = json.loads((Path(folder) / DATA).read_text())
        if content["version"] == VERSION:
            files = [DataFile(**file) for file in content["files"]]
            looks = content["looks"].items()
            return Findings(files, {key: Look(**look) for key, look in looks})
    return Findings()


def write(
    files: Sequence[DataFile], entries: Sequence[Entry], options: StreamOptions
) -> None:
    """Write to the run's folder what is known of its files, as they are read now, what
    it said of files that are gone, and the ledger.
    """
    names = {file.name for file in files}
    former = [
        file for file in of_run(options.run_folder).files if file.name not in names
    ]
    content = {
        "version": VERSION,
        "files": [
            asdict(replace(file, blocks=None, left_out=False))
            for file in [*files, *former]
        ],
        "looks": {key: asdict(look) for key, look in _looks.items()},
        "ledger": [astuple(entry) for entry in entries],
    }
    try:
        with atomic_write(Path(options.run_folder) / DATA) as unfinished:
            unfinished.write_text(json.dumps(content, indent=1))
    except OSError as error:  # the next start looks at the files again
        logger.warning(f"what is known of the data cannot be written: {error}")


# of this process
_looks: dict[str, Look] = {}


def _key(file: DataFile, options: StreamOptions) -> str:
    """Return a text that changes when another look may find something else."""
    times = None
    if not file.remote:
        status = os.stat(file.url)
        times = (status.st_mtime_ns, status.st_ctime_ns)
    identity = (file.name, file.url, file.size, file.etag, times)
    return repr((identity, options.format, options.max_document_bytes))


def look_at_all(
    files: Sequence[DataFile], options: StreamOptions
) -> dict[DataFile, Look]:
    """Return what a look at each file finds.

    Files that are left out are not opened, and neither are token ids if no tokenizer is
    known. Of files on the hub, where each is a request, only those are opened that may
    be empty.
    """
    for key, look in of_run(options.run_folder).looks.items():
        _looks.setdefault(key, look)
    opened_files = [file for file in files if _is_looked_at(file, options)]
    with ThreadPoolExecutor(THREADS) as pool:
        looks = list(pool.map(partial(look_at, options=options), opened_files))
    return dict(zip(opened_files, looks, strict=True))


def _is_looked_at(file: DataFile, options: StreamOptions) -> bool:
    if file.left_out or (options.format.eos_id is None and _holds_ids(file)):
        return False
    return not file.url.startswith("hf://") or _may_have_no_rows(file)


def _may_have_no_rows(file: DataFile) -> bool:
    # One of 64 KiB has more than a footer.
    return file.name.endswith(formats.PARQUET) and file.size <= 1 << 16


def look_at(file: DataFile, options: StreamOptions) -> Look:
    """Return what is seen of a file that this process, or the run, has not seen yet."""
    key = _key(file, options)
    if key not in _looks:
        look = Look(encoding_of(file, options))
        _looks[key] = _beginning(replace(file, encoding=look.encoding), look, options)
    return _looks[key]


def encoding_of(file: DataFile, options: StreamOptions) -> str:
    """Return a file's encoding, for ``DataFile.encoding``."""
    if not file.name.endswith(".txt"):
        return ""
    with closing(opened(file, options)) as stored:
        return formats.encoding_of(stored.read(formats.LOOKED_AT))


def entries_of(files: Sequence[DataFile], options: StreamOptions) -> Iterator[Entry]:
    """Yield what becomes of each file as a whole; single documents are not looked at
    here.
    """
    looks = look_at_all(files, options)
    for file in files:
        look = looks.get(file, Look())
        fate = USED
        reason = ""
        if file.left_out:
            fate = LEFT_OUT
            reason = "stream.left_out"
        elif look.problem:
            fate = SKIPPED
            reason = look.problem
        elif look.encoding:
            fate = CONVERTED
            reason = f"from {look.encoding}"
        yield Entry(file.name, fate, reason, file.size)


def _holds_ids(file: DataFile) -> bool:
    return file.name.endswith(formats.TOKEN_IDS)


def check_content(
    files: Sequence[DataFile], options: StreamOptions, key: str
) -> list[DataFile]:
    """Return the files of a data set with their encodings, after a look at each.

    ConfigError is raised if no document can be used of files that hold more than
    ``stream.max_skipped_fraction`` of the bytes (of any file, if on_bad_data is
    "fail"), or a whole .txt file is one document that is too long. Otherwise, such
    files, single bad documents and damaged files are left to the run.
    """
    max_bytes = options.max_document_bytes
    looks = look_at_all(files, options)
    for file in looks:
        is_document = file.name.endswith(".txt")
        if options.format.text_split != "file" or not is_document:
            continue
        if file.size > max_bytes:
            raise ConfigError(
                f"{key} data: {file.url} is one document of {file.size:,} bytes, "
                f"{formats.TOO_LONG}"
            )
    converted = [file for file, look in looks.items() if look.encoding]
    if converted:
        encoding = looks[converted[0]].encoding
        warn_once(
            f"{key} data: {counted(len(converted), 'file')} of {len(files)} are not "
            f"UTF-8 and are converted, such as {converted[0].url!r} ({encoding})"
        )
    unusable = [file for file, look in looks.items() if look.problem]
    if unusable:
        message = f"{key} data: {unusable[0].url}: {looks[unusable[0]].problem}"
        lost = sum(file.size for file in unusable) / sum(file.size for file in files)
        without = ""
        if len(files) > 1:
            names = ", ".join(repr(file.name) for file in unusable[:3])
            more = ", …" * (len(unusable) > 3)
            without = f". To go on without, set stream.left_out = [{names}{more}]"
            message += (
                f". No document of {counted(len(unusable), 'file')} of {len(files)}, "
                f"{lost:.1%} of the bytes, can be used"
            )
        if options.on_bad_data == "fail" or lost > options.max_skipped_fraction:
            raise ConfigError(message + without)
        warn_once(f"{message}. They are skipped")
    return [
        replace(file, encoding=looks[file].encoding) if file in looks else file
        for file in files
    ]


def _beginning(file: DataFile, look: Look, options: StreamOptions) -> Look:
    """Add to a look what the first documents of a file show, up to the first usable
    one. An empty or too long one says nothing, and neither does damage.
    """
    problem = None
    with closing(Documents(file, options)) as documents:
        try:
            for i in range(DOCUMENTS):
                record = documents.read()
                if record is None:
                    has_rows = i > 0 or not _may_have_no_rows(file)
                    return replace(look, problem=problem, has_rows=has_rows)
                try:
                    if not isinstance(record, np.ndarray):
                        formats.text_of(record, options.format.text_field)
                    return look
                except (formats.Garbage, formats.OtherShape) as error:
                    advice = _advice(str(error), file)
                    problem = problem or f"document {i}: {error}{advice}"
        except formats.OtherContent as error:
            return replace(look, problem=str(error))
        except (formats.BadDocument, formats.DamagedFile):
            return look
    return replace(look, problem=problem)


def _advice(error: str, file: DataFile) -> str:
    """Return advice to append if the error says only what is wrong with one document,
    else an empty text.
    """
    # But not "unexpected end of data", the error of truncated UTF-8
    if re.search(r"\bexpected\b|stream\.", error):
        return ""
    if file.name.endswith(formats.JSON_LINES):
        return "; expected one document per line, with a text field: convert the file, or leave it out"
    return "; expected UTF-8: convert it (iconv), or leave it out"


def measured(files: Sequence[DataFile], options: StreamOptions) -> list[DataFile]:
    """Return the files with what the index knows of them, or else measured.

    ``density`` is then that of the beginnings of up to three files with the same
    suffix, or as the run has measured it at its first start.
    """
    if options.index:
        return with_index(files, options)
    groups: dict[str, list[DataFile]] = {}
    for file in files:
        groups.setdefault(formats.suffix_of(file.name), []).append(file)
    former = {
        (file.name, file.size): file.density
        for file in of_run(options.run_folder).files
    }
    densities = {}
    for suffix, group in groups.items():
        density = max(former.get((file.name, file.size), 0.0) for file in group)
        densities[suffix] = density or _density(group, options)
    looks = look_at_all(files, options)

    def with_density(file: DataFile) -> DataFile:
        if file.left_out:
            return file
        density = 0.0
        if looks.get(file, Look()).has_rows:
            density = densities[formats.suffix_of(file.name)]
        return replace(
            file,
            density=density,
            sample=content_sample(file),
            blocks=token_ids.blocks_of(file),
        )

    with ThreadPoolExecutor(THREADS) as pool:
        result = list(pool.map(with_density, files))
    if not any(file.density for file in result):
        raise ConfigError(
            f"{result[0].url} has no "
            f"rows{' (nor have the others)' * (len(result) > 1)}: name files with text"
        )
    return result


def _density(group: Sequence[DataFile], options: StreamOptions) -> float:
    """Return the bytes of text per stored byte of the first, a middle and the last file
    with the same suffix, 1 for token ids.
    """
    text = 0
    stored = 0.0
    for i in sorted({0, len(group) // 2, len(group) - 1}):
        if not _holds_ids(group[i]):
            sampled = _sampled(group[i], options)
            text += sampled[0]
            stored += sampled[1]
    return float(f"{text / stored:.3g}") if text else 1.0


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
                    rows = documents.table.metadata.num_rows
                    return text, file.size * documents.position / rows
            elif place - begin >= SAMPLE:
                return text, place - begin
            with suppress(formats.BadDocument):
                text += len(formats.text_of(record, options.format.text_field).encode())
        return text, file.size
    return 0, 0


def after_left_out(
    files: Sequence[DataFile], options: StreamOptions, prefix: str = ""
) -> list[DataFile]:
    """Return the files of a data set, whose names begin with ``prefix``, as
    ``stream.left_out`` changes them.

    A file with which the run began stays, as one without documents, so that the
    positions in all others stay. It need not exist any more. Other files disappear.
    """
    names = {name for name in options.left_out if name.startswith(prefix)}
    former = {
        file.name: replace(file, left_out=True)
        for file in of_run(options.run_folder).files
        if file.name in names
    }
    present = {file.name: file for file in files if file.name not in names}
    return sorted((present | former).values(), key=lambda file: file.name)


MOST_AMPLIFIED = 4.0  # C4's files on 640 ranks: 1.6
MUCH = 1e9  # bytes that a rank reads in an epoch
# After about 16 epochs, more of them teach a model little (Muennighoff et al. 2023,
# arXiv 2305.16264).
MOST_EPOCHS = 16.0
# of text, and of token ids; about
BYTES_PER_TOKEN = 4
BYTES_PER_ID = 2


@dataclass(frozen=True)
class Reading:
    """How a run reads the files of a source."""

    source: str  # empty if there is only one
    ranks: int
    files: int
    # stored bytes that all ranks together read in an epoch, divided by those there are
    amplification: float
    largest: float  # stored bytes that one rank reads in an epoch
    epochs: float  # in the whole run, about; 0 if its length is not known
    unseen: float  # see ``Assignment.unseen``

    def warnings(self) -> Iterator[str]:
        name = ""
        if self.source:
            name = f"source {self.source}: "
        if self.amplification > MOST_AMPLIFIED and self.largest > MUCH:
            yield (
                f"data: {name}all ranks together read the stored bytes "
                f"{self.amplification:.0f} times in an epoch, one rank up to "
                f"{byte_size(self.largest, 3)}, because "
                f"{counted(self.files, 'file')} cannot be divided among "
                f"{counted(self.ranks, 'rank')} otherwise: split the data into at "
                "least as many files as ranks, or, if it is not compressed, index it "
                "(titan-disp data index)"
            )
        if self.epochs > MOST_EPOCHS:
            yield (
                f"data: {name}the run reads the text about {self.epochs:.0f} times, and "
                f"gains little after {MOST_EPOCHS:.0f}: add text, lower its weight, or "
                "train on fewer tokens"
            )


def reading(
    files: Sequence[DataFile], share: Share, ranks: int, tokens: float, seed: int
) -> Reading:
    """Return how data-parallel ranks read the files of a source that has the slots of
    ``share``, in a run of so many ``tokens``.
    """
    assignment = Assignment(files, one_share(share.slots), seed)
    of_ranks = [
        stored_bytes(files, assignment, slots)
        for slots in assignment.slots_of_ranks(share.total // ranks)
    ]
    per_token = BYTES_PER_ID if _holds_ids(files[0]) else BYTES_PER_TOKEN
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
    """Return about how many stored bytes a rank with these slots reads in an epoch: of
    a file that is divided by blocks its own, and of others all.
    """
    parts: dict[int, float] = {}
    for slot in slots:
        for segment in assignment.run(slot, 0).segments:
            part = 1.0
            if segment.dealt:
                part = (segment.high - segment.low) / KEYS + parts.get(segment.file, 0)
            parts[segment.file] = part
    return sum(files[file].size * part for file, part in parts.items())


def copies(files: Sequence[DataFile]) -> list[tuple[DataFile, DataFile]]:
    """Return pairs of local files whose content is the same, as their sizes and some
    of their bytes say.
    """
    by_size: dict[int, list[DataFile]] = {}
    for file in files:
        if file.size and not file.remote and not file.left_out:
            by_size.setdefault(file.size, []).append(file)
    pairs = []
    for group in by_size.values():
        first: dict[str, DataFile] = {}
        for file in group if len(group) > 1 else ():
            same = first.setdefault(content_sample(file), file)
            if same.url != file.url:
                pairs.append((same, file))
    return pairs
