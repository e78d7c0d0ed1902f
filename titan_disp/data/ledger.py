"""The ledger of a data set says what became of its stored bytes, file by file.

Bytes are used, converted from another encoding (and used), skipped because they cannot
be used, or left out before anything is read.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from titan_disp.data.formats import BadDocument
from titan_disp.errors import counted
from titan_disp.text import byte_size

FATES = ("used", "converted", "skipped", "left out")
USED, CONVERTED, SKIPPED, LEFT_OUT = FATES
EMPTY = "the file is empty"
NAME = ".titan-disp/ledger.json"  # in a folder that init has written


@dataclass(frozen=True)
class Entry:
    """What became of a part of a file."""

    file: str
    fate: str
    reason: str  # empty if the part is used
    size: int  # stored bytes


def divided(
    file: str, size: int, parts: Mapping[tuple[str, str], int]
) -> Iterator[Entry]:
    """Yield entries that divide the ``size`` bytes of a file in proportion to its
    ``parts``, which are sizes by (fate, reason).
    """
    if not size:
        yield Entry(file, SKIPPED, EMPTY, size)
    total = sum(parts.values())
    before = 0
    begin = 0
    for (fate, reason), part in parts.items():
        before += part
        end = size * before // total
        yield Entry(file, fate, reason, end - begin)
        begin = end
    if begin < size:
        yield Entry(file, USED, "", size - begin)


def reason_of(error: BadDocument) -> str:
    """Return why a document cannot be used, without details such as line numbers."""
    text = str(error)
    if "stream.max_document_mb" in text:
        return "longer than stream.max_document_mb"
    return text.partition(":")[0].partition(";")[0]


def lost(entries: Iterable[Entry]) -> float:
    """Return the skipped fraction of the bytes that are not left out."""
    sizes = dict.fromkeys(FATES, 0)
    for entry in entries:
        sizes[entry.fate] += entry.size
    return sizes[SKIPPED] / max(1, sum(sizes.values()) - sizes[LEFT_OUT])


def lines(entries: Iterable[Entry]) -> Iterator[str]:
    """Yield a line for each fate and reason."""
    groups: dict[tuple[int, str], list[Entry]] = {}
    for entry in entries:
        key = (FATES.index(entry.fate), entry.reason)
        groups.setdefault(key, []).append(entry)
    for (fate, reason), group in sorted(groups.items()):
        files = counted(len(group), "file")
        line = f"{FATES[fate]:<10} {byte_size(sum(e.size for e in group))} of {files}"
        if reason:
            line += f", such as {group[0].file}: {reason}"
        yield line


def of_left_out(reasons: Mapping[str, str]) -> Iterator[Entry]:
    """Yield entries for the local files that a listing has left out.

    The keys of ``reasons`` are the files' paths.
    """
    for path, reason in reasons.items():
        if os.path.isfile(path):
            size = os.path.getsize(path)
            yield Entry(os.path.basename(path), LEFT_OUT, reason, size)


def write(folder: Path, entries: Iterable[Entry]) -> None:
    path = folder / NAME
    path.parent.mkdir()
    path.write_text(json.dumps([astuple(entry) for entry in entries], indent=1))


def read(folder: str | None) -> list[Entry]:
    """Return the ledger in a folder that titan-disp init has written, or an empty list."""
    if folder is None or not (path := Path(folder) / NAME).is_file():
        return []
    return [Entry(*entry) for entry in json.loads(path.read_text())]
