"""``titan-disp data index`` reads a corpus once and writes what a run would otherwise have to guess.

Of each file, the index holds the documents, the bytes of their text, a hash of every text and of the whole file, and the
places where reading can begin (``blocks``). These are lines of JSON and paragraphs of text that are not compressed, row
groups of Parquet and documents of token ids. In a gzip or zstd file, a document can only be found by unpacking all
before it.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from titan_disp.data import formats, megatron, token_ids
from titan_disp.data.blocks import Blocks
from titan_disp.data.documents import Documents
from titan_disp.data.files import DataFile
from titan_disp.data.options import StreamOptions
from titan_disp.data.storage import LocalFile
from titan_disp.errors import ConfigError, counted

VERSION = 1
FOLDER = ".titan-disp/index"  # hidden, so that it is not listed as data
IN_MEMORY = "memory"
_SMALL = 1 << 28  # bytes that the start of a run may index
_MOST = 4096  # blocks of a file …
_LEAST = 2048  # … and bytes of a block


@dataclass(frozen=True)
class FileIndex:
    """Describe the sound part of one file.

    Attributes:
        about: what the index is of (``_about``), and "sha256" of the file.
        text: bytes of text in UTF-8, or of token ids as stored …
        stored: … and the stored bytes that hold them.
        damage: what is wrong behind them.
        hashes: [documents] uint64, of every document; 0 for one that has no text or cannot be used.
        blocks: [2, B + 1] int64, ``Blocks.first`` and ``Blocks.places``; [2, 0] if reading cannot begin anywhere else.
    """

    about: dict[str, Any]
    text: int
    stored: int
    damage: str | None
    hashes: np.ndarray
    blocks: np.ndarray


def _about(file: DataFile, options: StreamOptions) -> dict[str, Any]:
    how = options.format
    keys = ("token_dtype", "eos_id") if file.name.endswith(formats.TOKEN_IDS) else ("text_field", "text_split")
    changed = [os.stat(path).st_mtime_ns for path in megatron.paths_of(file)]
    own = {"version": VERSION, "size": file.size, "changed": changed}
    return own | {key: getattr(how, key) for key in keys}


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") or 1


def _records(file: DataFile, documents: Documents, options: StreamOptions) -> Iterator[tuple[int, int, formats.Record]]:
    """Yield where a block that begins with a document would begin, where it would end with it, and the document."""
    if file.name.endswith(formats.TOKEN_IDS) and len(megatron.paths_of(file)) == 1:
        stored: Any = BufferedReader(LocalFile(file, options))
        for place, ids in token_ids.located(stored, token_ids.layout_of(stored, file, options.format)):
            yield place, place + (ids.nbytes if isinstance(ids, np.ndarray) else ids.size), ids
        return
    begin = 0
    while (record := documents.read()) is not None:
        assert documents.stored is not None
        end = documents.stored.tell()
        yield begin, end, record
        begin = end


def read_index(file: DataFile, options: StreamOptions) -> FileIndex:
    """Read a whole file."""
    documents, least = Documents(file, options), max(_LEAST, file.size // _MOST)
    hashes: list[int] = []
    first: list[int] = []
    places: list[int] = []
    text, end, damage = 0, 0, None
    try:
        for begin, place, record in _records(file, documents, options):
            if not places or begin >= places[-1] + least:
                first.append(len(hashes))
                places.append(begin)
            end = place
            try:
                content = record.tobytes() if isinstance(record, np.ndarray) else _text(record, options)
            except formats.BadDocument:
                content = b""
            hashes.append(_hash(content) if content else 0)
            text += len(content)
    except (formats.DamagedFile, EOFError) as error:
        damage = str(error)
    finally:
        table = documents.table
        documents.close()
    if (known := megatron.blocks_of(file)) is not None:
        first, places = known.first.tolist(), known.places.tolist()
    elif table is not None:
        rows = [table.metadata.row_group(i).num_rows for i in range(table.metadata.num_row_groups)]
        first = [n for n in np.cumsum([0, *rows]).tolist() if n <= len(hashes)]
        places = list(range(len(first)))
    elif file.name.endswith(formats.COMPRESSED) or (options.format.text_split == "file" and "txt" in file.name):
        first, places = [], []
    else:
        first, places = [*first, len(hashes)], [*places, end]
    sha256 = hashlib.sha256()
    with open(file.url, "rb") as stored:
        while piece := stored.read(1 << 20):
            sha256.update(piece)
    about = _about(file, options) | {"sha256": sha256.hexdigest()}
    return FileIndex(
        about,
        text,
        end if damage else file.size,
        damage,
        np.array(hashes, np.uint64),
        np.array([first, places], np.int64),
    )


def _text(record: formats.Record, options: StreamOptions) -> bytes:
    return formats.text_of(record, options.format.text_field).encode()


def _path(folder: Path, file: DataFile) -> Path:
    """Return where the index of a file is. The folder may be moved together with the data."""
    relative = os.path.relpath(os.path.realpath(file.url), os.path.realpath(folder))
    return folder / f"{hashlib.sha256(os.fsencode(relative)).hexdigest()[:24]}.npz"


def _load(path: Path) -> FileIndex | None:
    try:
        with np.load(path) as stored:
            return FileIndex(**json.loads(str(stored["facts"])), hashes=stored["hashes"], blocks=stored["blocks"])
    except (OSError, ValueError, KeyError, BadZipFile, EOFError):  # missing, or damaged
        return None


def _current(folder: Path, options: StreamOptions, file: DataFile) -> FileIndex | None:
    found = _load(_path(folder, file))
    return found if found is not None and _about(file, options).items() <= found.about.items() else None


def index_file(folder: Path, options: StreamOptions, file: DataFile) -> FileIndex:
    """Index a file unless that has been done. Other processes and nodes may do the same at the same time."""
    if (found := _current(folder, options, file)) is not None:
        return found
    found, path = read_index(file, options), _path(folder, file)
    facts = {key: getattr(found, key) for key in ("about", "text", "stored", "damage")}
    partial = path.with_name(f".{path.stem}.{platform.node()}.{os.getpid()}.npz")
    try:
        np.savez(partial, facts=json.dumps(facts), hashes=found.hashes, blocks=found.blocks)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return found


def with_index(files: Sequence[DataFile], options: StreamOptions) -> list[DataFile]:
    """Return the files with what the index knows of them. ConfigError is raised if it does not know a file as it is now."""
    folder = options.index
    if remote := next((file for file in files if file.url.startswith("hf://")), None):
        raise ConfigError(f"stream.index is {folder!r}, but {remote.url} is on the hub: fetch the data, or unset it")
    if folder == IN_MEMORY:
        if (size := sum(file.size for file in files)) > _SMALL:
            raise ConfigError(
                f'stream.index is "memory", but the data has {size:,} bytes, expected at most {_SMALL:,}: write an index '
                "with titan-disp data index CONFIG, and set stream.index to its folder"
            )
        found: list[FileIndex | None] = [read_index(file, options) for file in files]
    else:
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(partial(_current, Path(folder), options), files))
    if missing := [file.url for file, one in zip(files, found, strict=True) if one is None]:
        raise ConfigError(
            f"stream.index is {folder!r}, which does not describe {counted(len(missing), 'file')} of the data as they are "
            f"now, such as {missing[0]!r}: run titan-disp data index CONFIG, which reads what is new or has changed"
        )
    text, stored = (sum(getattr(one, part) for one in found if one and one.text) for part in ("text", "stored"))
    usual = text / stored if stored else 1.0
    return [_indexed(file, one, usual) for file, one in zip(files, found, strict=True) if one is not None]


def _indexed(file: DataFile, index: FileIndex, usual: float) -> DataFile:
    """Attach an index. A file without a usable document has the ``usual`` density, so that it is seen what is lost."""
    first, places = index.blocks
    lost = index.damage is not None or len(index.hashes)
    return replace(
        file,
        density=index.text / index.stored if index.text else usual if lost else 0.0,
        sample=index.about["sha256"],
        blocks=Blocks(first, places) if len(first) > 1 else None,
        damage=index.damage,
        documents=len(index.hashes),
    )
