"""``titan-disp data index`` reads a corpus once and writes what a run would otherwise
have to guess.

Of each file, the index holds the documents, the bytes of their text, a hash of every
text and of the whole file, and the places where reading can begin (``blocks``). These
are lines of JSON and paragraphs of text that are not compressed, row groups of Parquet
and documents of token ids. In a gzip or zstd file, a document can only be found by
unpacking all before it.
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

from titan_disp.data import formats, token_ids
from titan_disp.data.blocks import Blocks
from titan_disp.data.documents import Documents
from titan_disp.data.listing import DataFile
from titan_disp.data.options import StreamOptions
from titan_disp.errors import ConfigError, counted
from titan_disp.files import atomic_write, sha256_of

VERSION = 1
FOLDER = ".titan-disp/index"  # hidden, so that it is not listed as data
IN_MEMORY = "memory"
_SAMPLED = 4096  # bytes
_SMALL = 1 << 28  # bytes that the start of a run may index
_MOST = 1 << 14  # blocks of a file …
_LEAST = 2048  # … and bytes of a block
_TOGETHER = 1 << 20  # blocks of all files: 16 MB, which every rank holds


@dataclass(frozen=True)
class FileIndex:
    """Describe the sound part of one file."""

    about: dict[str, Any]  # what the index is of (``_about``), and "sha256" of the file
    text: int  # bytes of text in UTF-8, or of token ids as stored …
    stored: int  # … and the stored bytes that hold them
    damage: str | None  # what is wrong behind them
    documents: int
    # [documents] uint64; 0 for one that has no text or cannot be used. A run loads
    # none.
    hashes: np.ndarray
    # [2, B + 1] int64, ``Blocks.first`` and ``places``; [2, 0] if reading cannot begin
    # elsewhere
    blocks: np.ndarray


def content_sample(file: DataFile) -> str:
    """Hash the beginning, middle and end of a local file.

    (The hub's commit or ``etag`` say it of another.)
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
    return (
        int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") or 1
    )


def _records(documents: Documents) -> Iterator[tuple[int, int, formats.Record]]:
    """Yield where a block that begins with a document would begin, where it would end
    with it, and the document.
    """
    begin = 0
    while (record := documents.read()) is not None:
        assert documents.stored is not None
        end = documents.stored.tell()
        if documents.place is not None:  # ids are read ahead
            begin = documents.place
            end = begin + (
                record.size
                if isinstance(record, formats.BadDocument)
                else formats.size_of(record)
            )
        yield begin, end, record
        begin = end


def read_index(file: DataFile, options: StreamOptions) -> FileIndex:
    """Read a whole file."""
    # before the content, so that a change in the meantime is noticed
    about = _about(file)
    file = replace(file, blocks=token_ids.blocks_of(file))
    documents = Documents(file, options)
    least = max(_LEAST, file.size // _MOST)
    text_of = partial(formats.text_of, field=options.format.text_field)
    hashes: list[int] = []
    blocks: list[tuple[int, int]] = []  # the documents before each, and its place
    text = 0
    end = 0
    damage = None
    try:
        for begin, place, record in _records(documents):
            if not blocks or begin >= blocks[-1][1] + least:
                blocks.append((len(hashes), begin))
            end = place
            try:
                content = (
                    record.tobytes()
                    if isinstance(record, np.ndarray)
                    else text_of(record).encode()
                )
            except formats.BadDocument:
                content = b""
            hashes.append(_hash(content) if content else 0)
            text += len(content)
    except formats.DamagedFile as error:
        damage = str(error)
    finally:
        table = documents.table
        documents.close()
    count = len(hashes)
    if file.blocks is not None:
        blocks = list(
            zip(file.blocks.first.tolist(), file.blocks.places.tolist(), strict=True)
        )
    elif table is not None:
        last = table.metadata.num_row_groups
        rows = np.cumsum(
            [0, *(table.metadata.row_group(i).num_rows for i in range(last))]
        ).tolist()
        step = max(1, least * last // file.size)  # row groups of a block
        blocks = [
            (min(n, count), i)
            for i, n in enumerate(rows)
            if (i % step == 0 and n < count) or i == last
        ]
        end = file.size * count // max(rows[-1], 1)
    elif _is_one_block(file, options):
        blocks = []
    else:
        blocks.append((count, end))
    stored = end if damage else file.size
    about["sha256"] = sha256_of(*token_ids.paths_of(file))
    found = np.array(blocks, np.int64).reshape(-1, 2).T
    return FileIndex(
        about, text, stored, damage, count, np.array(hashes, np.uint64), found
    )


def _is_one_block(file: DataFile, options: StreamOptions) -> bool:
    """Return whether reading can begin nowhere but at the beginning of a file."""
    is_text = file.name.endswith(formats.PLAIN_TEXT)
    return (
        bool(file.encoding)
        or file.name.endswith((*formats.COMPRESSED, *formats.TABLES, *formats.ARROW))
        or (options.format.text_split == "file" and is_text)
    )


def _path(folder: Path, options: StreamOptions, file: DataFile) -> Path:
    """Return where the index of a file is, as these options read it.

    The folder may be moved together with the data.
    """
    relative = os.path.relpath(os.path.realpath(file.url), os.path.realpath(folder))
    how = options.format
    ids = file.name.endswith(formats.TOKEN_IDS)
    kind = (how.token_dtype, how.eos_id) if ids else (how.text_field, how.text_split)
    # Links of several names may lead to one file
    named = f"{relative}/{formats.suffix_of(file.name)}/{kind}"
    return folder / f"{hashlib.sha256(os.fsencode(named)).hexdigest()[:24]}.npz"


def _load(path: Path, hashes: bool) -> FileIndex | None:
    try:
        with np.load(path) as stored:
            some = stored["hashes"] if hashes else np.zeros(0, np.uint64)
            return FileIndex(
                **json.loads(str(stored["facts"])), hashes=some, blocks=stored["blocks"]
            )
    # missing, of another version, or damaged, which numpy and zipfile tell by errors of
    # all kinds
    except Exception:
        return None


def _reasons_to_reindex(
    index: FileIndex | None, about: Mapping[str, Any]
) -> dict[str, str]:
    """Return why an index is not that of a file as it is now, by facts that differ."""
    if index is None:
        return {
            "": "is not in it, or not with these options of the format and this tokenizer"
        }
    reasons = {
        **dict.fromkeys(("size", "sample"), "has changed since it was indexed"),
        "version": "was indexed by another version",
        "changed": "has another time of change than when it was indexed",
    }
    return {key: reasons[key] for key in about if index.about.get(key) != about[key]}


def current(folder: Path, options: StreamOptions, file: DataFile) -> FileIndex | str:
    """Return what an index knows of a file, without hashes, or why it does not know
    it.
    """
    found = _load(_path(folder, options, file), hashes=False)
    if found and file.left_out:
        return replace(found, damage=None)
    why = _reasons_to_reindex(found, _about(file))
    return next(iter(why.values()), None) or found  # type: ignore[return-value]


def index_file(folder: Path, options: StreamOptions, file: DataFile) -> FileIndex:
    """Index a file unless that has been done.

    Other processes and nodes may do the same at the same time.
    """
    path = _path(folder, options, file)
    about = _about(file)
    found = _load(path, hashes=True)
    why = _reasons_to_reindex(found, about)
    if found and not why:
        return found
    # a copy
    if (
        found
        and why.keys() == {"changed"}
        and found.about["sha256"] == sha256_of(*token_ids.paths_of(file))
    ):
        found = replace(found, about=found.about | about)
    else:
        found = read_index(file, options)
    facts = {
        key: getattr(found, key)
        for key in ("about", "text", "stored", "damage", "documents")
    }
    with (
        atomic_write(path, by_many=True) as unfinished,
        open(unfinished, "wb") as content,
    ):
        np.savez(
            content, facts=json.dumps(facts), hashes=found.hashes, blocks=found.blocks
        )
    return found


def with_index(files: Sequence[DataFile], options: StreamOptions) -> list[DataFile]:
    """Return the files with what the index knows of them.

    ConfigError is raised if it does not know a file as it is now.
    """
    folder = options.index
    if remote := next((file for file in files if file.remote), None):
        raise ConfigError(
            f"stream.index is {folder!r}, but {remote.url} is in a store, or is on "
            "the hub: fetch the data, or unset it"
        )
    if folder == IN_MEMORY:
        if (size := sum(file.size for file in files)) > _SMALL:
            raise ConfigError(
                f'stream.index is "memory", but the data has {size:,} bytes, expected at most {_SMALL:,}: write an index '
                "with titan-disp data index CONFIG, and set stream.index to its folder"
            )
        found: list[FileIndex | str] = [read_index(file, options) for file in files]
    else:
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(partial(current, Path(folder), options), files))
    known = {
        file: one
        for file, one in zip(files, found, strict=True)
        if isinstance(one, FileIndex)
    }
    if missing := [
        (file.url, why)
        for file, why in zip(files, found, strict=True)
        if isinstance(why, str)
    ]:
        number = counted(len(missing), "file")
        (url, why) = missing[0]
        there = "" if os.path.isdir(folder) else ", which does not exist"
        raise ConfigError(
            f"stream.index is {folder!r}{there}: {number} of the data cannot be read "
            f"by it, such as {url!r}, which {why}. Run titan-disp data index CONFIG, "
            "which reads what is new or has changed"
        )
    text, stored = (
        sum(getattr(one, part) for one in known.values() if one.text)
        for part in ("text", "stored")
    )
    usual = text / stored if stored else 1.0
    step = max(1, -(-sum(one.blocks.shape[1] for one in known.values()) // _TOGETHER))
    return [_indexed(file, one, usual, step) for file, one in known.items()]


def _indexed(file: DataFile, index: FileIndex, usual: float, step: int) -> DataFile:
    """Attach an index, with ``step`` blocks in one.

    A file without a usable document has the ``usual`` density, so that it is seen what
    is lost.
    """
    first, places = np.append(index.blocks[:, :-1:step], index.blocks[:, -1:], axis=1)
    lost = index.damage is not None or index.documents
    return replace(
        file,
        density=index.text / index.stored if index.text else usual if lost else 0.0,
        sample=index.about["sha256"],
        blocks=Blocks(first, places) if len(first) > 1 else None,
        damage=index.damage,
        documents=index.documents,
    )
