"""``titan-disp data index`` reads a corpus once and writes what a run would otherwise
have to guess.

For each file, the index holds the number of documents, the bytes of their text, a hash
of every text and of the whole file, and the places where reading can begin
(``blocks``). Reading can begin at row groups of Parquet, at documents of token ids,
and, if a file is not compressed, at lines of JSON and paragraphs of text. In a gzip or
zstd file, a document can only be found by unpacking everything before it.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torchtitan.tools.logging import logger

from titan_disp.data import formats, token_ids
from titan_disp.data.blocks import Blocks
from titan_disp.data.documents import Documents
from titan_disp.data.listing import DataFile
from titan_disp.data.options import StreamOptions
from titan_disp.errors import ConfigError, counted, first_line
from titan_disp.files import atomic_write, sha256_of

VERSION = 1
FOLDER = ".titan-disp/index"  # hidden, so that it is not listed as data
IN_MEMORY = "memory"
_SAMPLED = 4096  # bytes of each piece that ``content_sample`` reads
_SMALL = 1 << 28  # most bytes of data that a run indexes when it starts
_MOST = 1 << 14  # most blocks of a file
_LEAST = 2048  # fewest bytes of a block
_TOGETHER = 1 << 20  # most blocks of all files: 16 MB, which every rank holds


@dataclass(frozen=True)
class FileIndex:
    """The index of the sound part of one file."""

    about: dict[str, Any]  # what ``_about`` returned for the file, and its "sha256"
    text: int  # bytes of text in UTF-8, or of token ids as stored
    stored: int  # stored bytes that hold the text
    damage: str | None  # what is wrong after the sound part
    documents: int
    # [documents] uint64; 0 for a document that has no text or cannot be used. A run does
    # not load the hashes.
    hashes: np.ndarray
    # [2, B + 1] int64, ``Blocks.first`` and ``places``; [2, 0] if reading can begin only
    # at the beginning of the file
    blocks: np.ndarray


def content_sample(file: DataFile) -> str:
    """Return a hash of the beginning, middle and end of a local file, or an empty text
    for a remote file, whose commit or ``etag`` identifies its content.
    """
    if file.remote:
        return ""
    digest = hashlib.sha256()
    for path in token_ids.paths_of(file):
        size = os.path.getsize(path)
        with open(path, "rb") as content:
            for place in (0, size // 2, max(0, size - _SAMPLED)):
                content.seek(place)
                digest.update(content.read(_SAMPLED))
    return digest.hexdigest()[:16]


def _about(file: DataFile) -> dict[str, Any]:
    changed = [os.stat(path).st_mtime_ns for path in token_ids.paths_of(file)]
    return {
        "version": VERSION,
        "size": file.size,
        "sample": content_sample(file),
        "changed": changed,
    }


def _hash(content: bytes) -> int:
    """Return a hash of 64 bits, which is 0 only if there is no content."""
    if not content:
        return 0
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def _records(documents: Documents) -> Iterator[tuple[int, int, formats.Record]]:
    """Yield (begin, end, document). A block with this document as its first would begin
    at ``begin``. A block with this document as its last would end at ``end``.
    """
    begin = 0
    while (record := documents.read()) is not None:
        assert documents.stored is not None
        end = documents.stored.tell()
        if documents.place is not None:  # ids are read ahead
            begin = documents.place
            if isinstance(record, formats.BadDocument):
                end = begin + record.size
            else:
                end = begin + formats.size_of(record)
        yield begin, end, record
        begin = end


def _content(record: formats.Record, field: str) -> bytes:
    """Return the text of a document in UTF-8, or its ids as stored. The result is empty
    if the document cannot be used.
    """
    if isinstance(record, np.ndarray):
        return record.tobytes()
    try:
        return formats.text_of(record, field).encode()
    except formats.BadDocument:
        return b""


def read_index(file: DataFile, options: StreamOptions) -> FileIndex:
    """Return the index of a file, which is read completely."""
    # Before the content is read, so that a change in the meantime is noticed.
    about = _about(file)
    file = replace(file, blocks=token_ids.blocks_of(file))
    documents = Documents(file, options)
    least = max(_LEAST, file.size // _MOST)
    hashes: list[int] = []
    blocks: list[tuple[int, int]] = []  # (documents before the block, its place)
    text = 0
    end = 0
    damage = None
    try:
        for begin, place, record in _records(documents):
            if not blocks or begin >= blocks[-1][1] + least:
                blocks.append((len(hashes), begin))
            end = place
            content = _content(record, options.format.text_field)
            hashes.append(_hash(content))
            text += len(content)
    except formats.DamagedFile as error:
        damage = str(error)
    finally:
        table = documents.table
        documents.close()
    count = len(hashes)
    table_of_blocks = np.array([*blocks, (count, end)], np.int64).T
    if file.blocks is not None:
        table_of_blocks = np.array([file.blocks.first, file.blocks.places])
    elif table is not None:
        groups = range(table.metadata.num_row_groups)
        rows = np.cumsum([0, *(table.metadata.row_group(i).num_rows for i in groups)])
        step = max(1, least * len(groups) // file.size)  # row groups of a block
        places = [i for i in groups[::step] if rows[i] < count] + [len(groups)]
        table_of_blocks = np.array([np.minimum(rows[places], count), places])
        end = file.size * count // max(int(rows[-1]), 1)
    elif _is_one_block(file, options):
        table_of_blocks = np.zeros((2, 0), np.int64)
    about["sha256"] = sha256_of(*token_ids.paths_of(file))
    return FileIndex(
        about=about,
        text=text,
        stored=end if damage else file.size,
        damage=damage,
        documents=count,
        hashes=np.array(hashes, np.uint64),
        blocks=table_of_blocks,
    )


def _is_one_block(file: DataFile, options: StreamOptions) -> bool:
    """Return whether reading can begin only at the beginning of a file."""
    is_text = file.name.endswith(formats.PLAIN_TEXT)
    return (
        bool(file.encoding)
        or file.name.endswith((*formats.COMPRESSED, *formats.TABLES, *formats.ARROW))
        or (options.format.text_split == "file" and is_text)
    )


def _path(folder: Path, options: StreamOptions, file: DataFile) -> Path:
    """Return the path of the index of a file that is read with these options.

    The path stays valid if the folder is moved together with the data.
    """
    relative = os.path.relpath(os.path.realpath(file.url), os.path.realpath(folder))
    how = options.format
    key: tuple[object, ...] = (how.text_field, how.text_split)
    if file.encoding:
        key = (*key, file.encoding)
    elif file.holds_ids:
        key = (how.token_dtype, how.eos_id)
    # Several links, whose suffixes differ, may lead to one file.
    name = f"{relative}/{formats.suffix_of(file.name)}/{key}"
    return folder / f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:24]}.npz"


def _load(path: Path, with_hashes: bool) -> FileIndex | None:
    """Return the index that was written to a path, or None if it is missing, damaged or
    of another version.
    """
    try:
        with np.load(path) as stored:
            hashes = np.zeros(0, np.uint64)
            if with_hashes:
                hashes = stored["hashes"]
            facts = json.loads(str(stored["facts"]))
            return FileIndex(**facts, hashes=hashes, blocks=stored["blocks"])
    except FileNotFoundError:
        return None
    except Exception as error:  # numpy and zipfile raise errors of all types
        logger.warning(f"the index {path} cannot be read: {first_line(error)}")
        return None


def _reasons_to_reindex(
    index: FileIndex | None, about: Mapping[str, Any]
) -> dict[str, str]:
    """Return {a fact that differs: the reason why an index does not describe the
    present file}.
    """
    if index is None:
        return {
            "": "is not in the index, or was indexed with other options or another tokenizer"
        }
    reasons = {
        "version": "was indexed by another version",
        "size": "has changed since it was indexed",
        "sample": "has changed since it was indexed",
        "changed": "has another time of change than when it was indexed",
    }
    return {key: reasons[key] for key in about if index.about.get(key) != about[key]}


def current(folder: Path, options: StreamOptions, file: DataFile) -> FileIndex | str:
    """Return a file's index, without the hashes, or the reason why no index describes
    the present file.
    """
    index = _load(_path(folder, options, file), with_hashes=False)
    if index and file.left_out:
        return replace(index, damage=None)
    reasons = _reasons_to_reindex(index, _about(file))
    return next(iter(reasons.values()), "") or index  # type: ignore[return-value]


def index_file(folder: Path, options: StreamOptions, file: DataFile) -> FileIndex:
    """Return the index of a file, and write it unless it is up to date.

    Other processes and nodes may do the same at the same time.
    """
    path = _path(folder, options, file)
    about = _about(file)
    index = _load(path, with_hashes=True)
    reasons = _reasons_to_reindex(index, about)
    if index and not reasons:
        return index
    if (  # a copy of the indexed file
        index
        and reasons.keys() == {"changed"}
        and index.about["sha256"] == sha256_of(*token_ids.paths_of(file))
    ):
        index = replace(index, about=index.about | about)
    else:
        index = read_index(file, options)
    facts = vars(index).copy()
    arrays = {name: facts.pop(name) for name in ("hashes", "blocks")}
    with (
        atomic_write(path, by_many=True) as unfinished,
        open(unfinished, "wb") as content,
    ):
        np.savez(content, facts=json.dumps(facts), **arrays)
    return index


def with_index(files: Sequence[DataFile], options: StreamOptions) -> list[DataFile]:
    """Return the files with densities, samples and blocks from the index.

    Raises ConfigError if the index does not describe a file as it is now.
    """
    folder = options.index
    if remote := next((file for file in files if file.remote), None):
        raise ConfigError(
            f"stream.index is {folder!r}, but {remote.url} is in a store, or is on "
            "the hub: fetch the data, or leave stream.index out"
        )
    if folder == IN_MEMORY:
        if (size := sum(file.size for file in files)) > _SMALL:
            raise ConfigError(
                f'stream.index is "memory", but the data has {size:,} bytes, expected at most {_SMALL:,}: write an index '
                "with titan-disp data index CONFIG, and set stream.index to its folder"
            )
        answers: list[FileIndex | str] = [read_index(file, options) for file in files]
    else:
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(partial(current, Path(folder), options), files))
    indices: dict[DataFile, FileIndex] = {}
    missing: dict[str, str] = {}  # reasons by path
    for file, answer in zip(files, answers, strict=True):
        if isinstance(answer, str):
            missing[file.url] = answer
        else:
            indices[file] = answer
    for url, why in missing.items():
        number = counted(len(missing), "file")
        there = "" if os.path.isdir(folder) else ", which does not exist"
        raise ConfigError(
            f"stream.index is {folder!r}{there}: it does not cover {number} of the "
            f"data, such as {url!r}, which {why}. Run titan-disp data index CONFIG, "
            "which reads only new and changed files"
        )
    filled = [index for index in indices.values() if index.text]
    text = sum(index.text for index in filled)
    usual = text / sum(index.stored for index in filled) if text else 1.0
    blocks = sum(index.blocks.shape[1] for index in indices.values())
    step = max(1, -(-blocks // _TOGETHER))
    return [_indexed(file, index, usual, step) for file, index in indices.items()]


def _indexed(file: DataFile, index: FileIndex, usual: float, step: int) -> DataFile:
    """Return a file with the data of its index. Every ``step`` blocks are merged.

    A file without any usable document gets the ``usual`` density, so that its text
    counts as lost.
    """
    first, places = np.append(index.blocks[:, :-1:step], index.blocks[:, -1:], axis=1)
    density = 0.0
    if index.text:
        density = index.text / index.stored
    elif index.damage is not None or index.documents:
        density = usual
    return replace(
        file,
        density=density,
        sample=index.about["sha256"],
        blocks=Blocks(first, places) if len(first) > 1 else None,
        damage=index.damage,
        documents=index.documents,
    )
