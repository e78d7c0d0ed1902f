"""This module looks at the files of a run before the run reads them.

``look_at_all`` opens the files in parallel. It reads the footer and the first rows of
Parquet files, and the first documents of other files. It finds files in other
encodings, files without rows, and files without any usable document. A process looks at
a file once. When training starts, it writes the results to ``data.json`` in the run's
folder. The next start then opens only the files that have changed, and knows which
files the run began with.

A look at a file on the hub takes a request or two. If many files are on the hub, only
some of them are opened. Parquet files on the hub are opened only for their footers. If
the hub does not answer, training starts anyway, and the run will meet any fault of the
files.
"""

import io
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from torchtitan.tools.logging import logger

from titan_disp.data import formats, token_ids
from titan_disp.data.documents import Documents
from titan_disp.data.index import content_sample, with_index
from titan_disp.data.ledger import (
    CONVERTED,
    EMPTY,
    LEFT_OUT,
    SKIPPED,
    USED,
    Entry,
    lines,
)
from titan_disp.data.listing import DataFile, sample_of, warn_once
from titan_disp.data.options import StreamOptions
from titan_disp.data.storage import opened
from titan_disp.errors import ConfigError, counted, first_line, reported
from titan_disp.files import atomic_write

VERSION = 1
DATA = "data.json"  # in a run's folder
# A look at a file ends at its first usable document, or after this many documents.
DOCUMENTS = 20
# A shared file system takes milliseconds for each file.
THREADS = 16
# Stored bytes that are read to measure a file's density. They must be more than buffers
# and decoders hold.
SAMPLE = 1 << 20
SMALL = 1 << 16  # bytes; a larger Parquet file has more than a footer
MOST_ON_HUB = 256  # most files of a data set that are opened on the hub
HUB_SECONDS = 30.0  # after this time, no more files are opened on the hub
HUB_RETRY_SECONDS = 5.0  # how long a look at a file on the hub is tried again


@dataclass(frozen=True)
class Look:
    """What the beginning of a file, or its footer, shows."""

    encoding: str = ""  # see ``DataFile.encoding``
    problem: str | None = None  # why none of the first documents can be used
    has_rows: bool = True
    unseen: str = ""  # why the file could not be looked at


@dataclass(frozen=True)
class RunData:
    """What a run's folder says about the run's data."""

    # the files that are divided among the slots, even if some no longer exist
    files: list[DataFile] = field(default_factory=list)
    looks: dict[str, Look] = field(default_factory=dict)  # by ``_key``
    ledger: list[Entry] = field(default_factory=list)


def of_run(folder: str | Path) -> RunData:
    """Return what the latest start of a run has written to its folder.

    The result is empty if the file does not exist or has another version. Raises OSError
    if the file cannot be read.
    """
    path = Path(folder) / DATA
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return RunData()
    return _parsed(path, (status.st_mtime_ns, status.st_ino))


@lru_cache(maxsize=1)
def _parsed(path: Path, version: tuple[int, int]) -> RunData:
    """Return the content of a file. ``version`` changes with the content, which makes
    the cache read the file again.
    """
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        content = json.loads(path.read_text())
        if content["version"] == VERSION:
            return RunData(
                files=[DataFile(**file) for file in content["files"]],
                looks={key: Look(**look) for key, look in content["looks"].items()},
                ledger=[Entry(*entry) for entry in content.get("ledger", ())],
            )
    return RunData()


def ledger_lines(run: str | Path) -> list[str]:
    """Return lines about what became of a run's data, or an empty list if that is
    unknown.
    """
    with suppress(OSError):
        return [*lines(of_run(run).ledger)]
    return []


def write(
    files: Sequence[DataFile], entries: Sequence[Entry], options: StreamOptions
) -> None:
    """Write to the run's folder: the ``files`` as they are read now, the files that
    only an earlier start had, the looks, and the ledger (``entries``).
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
        "looks": {key: asdict(look) for key, look in _looks.items() if not look.unseen},
        "ledger": [astuple(entry) for entry in entries],
    }
    try:
        with atomic_write(Path(options.run_folder) / DATA) as unfinished:
            unfinished.write_text(json.dumps(content, indent=1))
    except OSError as error:  # the next start looks at the files again
        logger.warning(f"what is known about the data cannot be written: {error}")


_looks: dict[str, Look] = {}  # the looks of this process, by ``_key``


def _key(file: DataFile, options: StreamOptions) -> str:
    """Return a text that changes if a new look at the file may have another result."""
    times = []
    if not file.remote:
        with reported(f"cannot look at {file.url!r}", OSError):
            for path in token_ids.paths_of(file):
                status = os.stat(path)
                times.append((status.st_mtime_ns, status.st_ctime_ns))
    identity = (file.name, file.url, file.size, file.etag, times)
    return repr((identity, options.format, options.max_document_bytes))


def look_at_all(
    files: Sequence[DataFile], options: StreamOptions
) -> dict[DataFile, Look]:
    """Return a look at each file of a data set that is opened.

    Three kinds of files are not opened: files that are left out, files of token ids if
    there is no tokenizer, and most of the files on the hub if these are many.
    """
    for key, look in of_run(options.run_folder).looks.items():
        _looks.setdefault(key, look)
    skips_ids = options.format.eos_id is None
    readable = [
        file for file in files if not (file.left_out or (file.holds_ids and skips_ids))
    ]
    may_fail = [file for file in readable if _may_stay_unseen(file)]
    step = -(-len(may_fail) // MOST_ON_HUB) or 1
    skipped = {*may_fail} - {*may_fail[::step]}
    files_to_open = [file for file in readable if file not in skipped]
    deadline = time.monotonic() + HUB_SECONDS
    one_look = partial(look_at, options=options, deadline=deadline)
    with ThreadPoolExecutor(THREADS) as pool:
        results = pool.map(one_look, files_to_open)
        looks = dict(zip(files_to_open, results, strict=True))
    if unseen := [file for file, look in looks.items() if look.unseen]:
        warn_once(
            f"data: {counted(len(unseen), 'file')} of {len(files)} could not be looked "
            f"at, such as {unseen[0].url} ({looks[unseen[0]].unseen}). What is wrong "
            "with them will be seen when the run reads them"
        )
    return looks


def _may_have_no_rows(file: DataFile) -> bool:
    return file.name.endswith(formats.PARQUET) and file.size <= SMALL


def _may_stay_unseen(file: DataFile) -> bool:
    """Return whether a file is on the hub and need not be opened. A file that may have
    no rows must be opened, because a file without rows changes the run's positions.
    """
    return file.on_hub and not _may_have_no_rows(file)


def look_at(file: DataFile, options: StreamOptions, deadline: float) -> Look:
    """Return the look at a file. The file is opened only if neither this process nor the
    run has looked at it.

    After the ``deadline``, a time of ``time.monotonic``, files on the hub are not
    opened.
    """
    key = _key(file, options)
    if key not in _looks:
        if not _may_stay_unseen(file):
            look = Look(encoding_of(file, options))
            look = _beginning(replace(file, encoding=look.encoding), look, options)
        elif time.monotonic() > deadline:
            look = Look(unseen=f"not within {HUB_SECONDS:.0f} s")
        else:
            look = _look_at_hub(file, options)
        _looks[key] = look
    return _looks[key]


def _look_at_hub(file: DataFile, options: StreamOptions) -> Look:
    """Return the look at a file on the hub, from a request or two: for the footer of a
    Parquet file, or for the beginning of any other file.
    """
    retry_seconds = min(options.retry_seconds, HUB_RETRY_SECONDS)
    options = replace(options, retry_seconds=retry_seconds)
    try:
        if not file.name.endswith(formats.PARQUET):
            if encoding := encoding_of(file, options):
                return Look(
                    problem=f"it is {encoding}, which is converted only in local files: "
                    "copy the data set (titan-disp data fetch)"
                )
            return _beginning(file, Look(), options)
        with closing(opened(file, options)) as stored:
            table = formats.parquet_table(io.BufferedReader(stored), file.name)
            # reads no row group, but checks that the column exists
            list(formats.parquet_records(table, options, 1, 0, 0))
    except formats.OtherContent as error:
        return Look(problem=str(error))
    except Exception as error:
        # httpx, huggingface_hub and pyarrow raise errors of their own types.
        return Look(unseen=first_line(error))
    return Look()


def encoding_of(file: DataFile, options: StreamOptions) -> str:
    """Return a file's encoding, for ``DataFile.encoding``.

    As long as a text is ASCII, its encoding is open: the next bytes are looked at, up to
    ``stream.max_document_mb``, or in a store only the first ones, which one request
    fetches.
    """
    if not file.name.endswith(".txt"):
        return ""
    limit = options.max_document_bytes
    if file.remote:
        limit = formats.LOOKED_AT
    with closing(opened(file, options)) as stored:
        for _ in range(0, limit, formats.LOOKED_AT):
            part = stored.read(formats.LOOKED_AT)
            encoding = formats.encoding_of(part)
            if encoding or not part.isascii():
                return encoding
            if not part:
                break
    return ""


def entries_of(files: Sequence[DataFile], options: StreamOptions) -> Iterator[Entry]:
    """Yield an entry for each whole file of a data set. Single documents are not
    examined.
    """
    looks = look_at_all(files, options)
    for file in files:
        look = looks.get(file, Look())
        fate = USED
        reason = ""
        if file.left_out:
            fate = LEFT_OUT
            reason = "stream.left_out"
        elif look.problem or not file.size:
            fate = SKIPPED
            reason = look.problem or EMPTY
        elif look.encoding:
            fate = CONVERTED
            reason = f"from {look.encoding}"
        yield Entry(file.name, fate, reason, file.size)


def check_content(
    files: Sequence[DataFile], options: StreamOptions, key: str
) -> list[DataFile]:
    """Return the files of a data set with their encodings, after a look at each.

    Raises ConfigError if files without any usable document hold more than
    ``stream.max_skipped_fraction`` of the bytes. If on_bad_data is "fail", one such
    file is enough. Also raises ConfigError if a .txt file is one document that is too
    long. All other bad documents and damaged files are left to the run. ``key`` is the
    config section, for messages.
    """
    looks = look_at_all(files, options)
    for file in looks:
        is_document = options.format.text_split == "file" and file.name.endswith(".txt")
        if is_document and file.size > options.max_document_bytes:
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
    by_size = sorted(looks.items(), key=lambda item: item[0].size, reverse=True)
    problems = {file: look.problem for file, look in by_size if look.problem}
    if problems:
        lost = sum(file.size for file in problems) / sum(file.size for file in files)
        message = f"{key} data: {_summary(problems, len(files), lost)}"
        if options.on_bad_data == "fail" or lost > options.max_skipped_fraction:
            if len(files) > 1:
                names = ", ".join(repr(file.name) for file in [*problems][:3])
                more = ", …" * (len(problems) > 3)
                message += f". To go on without, set stream.left_out = [{names}{more}]"
            raise ConfigError(message)
        warn_once(f"{message}. They are skipped")
    return [
        replace(file, encoding=looks.get(file, Look()).encoding or file.encoding)
        for file in files
    ]


def _summary(problems: dict[DataFile, str], files: int, lost: float) -> str:
    """Return a sentence about the files with ``problems``, the largest first. They hold
    the fraction ``lost`` of the bytes. ``files`` is the number of all files.
    """
    file, problem = next(iter(problems.items()))
    summary = f"{file.url}: {problem}"
    if files > 1:
        summary += (
            f". No document of {counted(len(problems), 'file')} of {files}, "
            f"{lost:.1%} of the bytes, can be used"
        )
    return summary


def _beginning(file: DataFile, look: Look, options: StreamOptions) -> Look:
    """Return ``look``, with a problem if none of the file's first documents can be
    used. Empty documents, documents that are too long, and damage are no problem.
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
    """Return advice to append to an error about one document, or an empty text if the
    error already gives advice.
    """
    # \b: "unexpected end of data", the error of truncated UTF-8, gives no advice
    if re.search(r"\bexpected\b|stream\.", error):
        return ""
    if file.name.endswith(formats.JSON_LINES):
        return "; expected one document per line, with a text field: convert the file, or leave it out"
    return "; expected UTF-8: convert it (iconv), or leave it out"


def measured(files: Sequence[DataFile], options: StreamOptions) -> list[DataFile]:
    """Return the files of a data set with density, sample and blocks. If there is an
    index, it has these values; otherwise they are measured.

    Without an index, ``density`` is measured at the first start of the run, from the
    beginnings of up to three files with the same suffix.
    """
    if options.index:
        return with_index(files, options)
    former = {
        (file.name, file.size): file.density
        for file in of_run(options.run_folder).files
    }
    groups: dict[str, list[DataFile]] = {}
    for file in files:
        groups.setdefault(formats.suffix_of(file.name), []).append(file)
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
        all_files = ", and neither have the other files" * (len(result) > 1)
        raise ConfigError(
            f"{result[0].url} has no rows{all_files}: name files with text"
        )
    return result


def _density(group: Sequence[DataFile], options: StreamOptions) -> float:
    """Return the bytes of text per stored byte in a sample of files with the same
    suffix, or 1 for token ids.
    """
    text = 0
    stored = 0.0
    for file in sample_of(group):
        if not file.holds_ids:
            sampled = _sampled(file, options)
            text += sampled[0]
            stored += sampled[1]
    return float(f"{text / stored:.3g}") if text else 1.0


def _sampled(file: DataFile, options: StreamOptions) -> tuple[int, float]:
    """Return (text, stored): the bytes of text at the beginning of a file, and the
    stored bytes that hold it.
    """
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
    """Return the files of a data set after ``stream.left_out`` is applied. The names of
    ``files`` begin with ``prefix``.

    A left-out file with which the run began stays in the list as a file without
    documents, even if it no longer exists. The positions in all other files therefore
    stay valid. Any other left-out file is removed from the list. Raises ConfigError if
    no file remains.
    """
    names = {name for name in options.left_out if name.startswith(prefix)}
    former = {
        file.name: replace(file, left_out=True)
        for file in of_run(options.run_folder).files
        if file.name in names
    }
    present = {file.name: file for file in files if file.name not in names}
    result = sorted((present | former).values(), key=lambda file: file.name)
    if names and all(file.left_out for file in result):
        raise ConfigError(
            f"stream.left_out names all {counted(len(names), 'file')} of a data set: "
            "leave out fewer, or add files"
        )
    return result
