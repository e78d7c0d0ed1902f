"""Megatron-LM stores token ids in NAME.bin, and in NAME.idx where its documents begin,
so that no index has to be made.

NAME.idx holds, little-endian (megatron/core/datasets/indexed_dataset.py): the magic
number, int64 version, uint8 code of the ids' type, int64 number of sequences S and of
documents D + 1, int32 [S] lengths of the sequences in ids, int64 [S] their places in
NAME.bin in bytes, and int64 [D + 1] the first sequence of each document.
"""

import os
import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np

from titan_disp.data.blocks import Blocks
from titan_disp.data.formats import BadDocument, Empty, OtherContent
from titan_disp.data.listing import DataFile
from titan_disp.data.options import Format
from titan_disp.data.token_ids import check_known, checked
from titan_disp.errors import ConfigError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# 4 is int32, of which no id is negative
_DTYPES: dict[int, np.dtype] = {8: np.dtype("<u2"), 4: np.dtype("<u4")}
_BLOCKS = 1 << 14  # of a file, at most
_FIRST = 1 << 16  # bytes of ids that must be the tokenizer's


def paths_of(file: DataFile) -> list[str]:
    """Return the paths of a file's content: with that of its .idx, if it is
    Megatron-LM's.
    """
    beside = file.url.removesuffix(".bin") + ".idx"
    if not file.url.endswith(".bin") or not os.path.isfile(beside):
        return [file.url]
    with open(beside, "rb") as index:
        return [file.url, beside] if index.read(len(_MAGIC)) == _MAGIC else [file.url]


class _Index:
    """Read NAME.idx through memory maps: [S] places of sequences, and [D + 1] first
    sequences of documents.
    """

    def __init__(self, file: DataFile, path: str) -> None:
        with open(path, "rb") as index:
            head = index.read(_HEADER.size)
        _, version, code, sequences, bounds = (
            _HEADER.unpack(head) if len(head) == _HEADER.size else (b"", 0, 0, 0, 0)
        )
        # More if it has the modes of multimodal data
        expected = _HEADER.size + 12 * sequences + 8 * bounds
        if (
            version != 1
            or code not in _DTYPES
            or not bounds
            or os.path.getsize(path) < expected
        ):
            raise OtherContent(
                f"{path} has version {version}, ids of type {code} and "
                f"{os.path.getsize(path):,} bytes; expected version 1, type 8 "
                f"(uint16) or 4 (int32), and at least {expected:,} bytes: write it "
                "again"
            )
        self.dtype = _DTYPES[code]
        self.documents = bounds - 1
        content = np.memmap(path, np.uint8, "r")[_HEADER.size : expected]
        lengths, places, firsts = np.split(content, [4 * sequences, 12 * sequences])
        self.lengths = lengths.view("<i4")
        self.places = places.view("<i8")
        self.bounds = firsts.view("<i8")
        self.end = (
            int(self.places[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
            if sequences
            else 0
        )
        if self.end != file.size or self.bounds[-1] != sequences:
            raise OtherContent(
                f"its {file.size:,} bytes are not the {self.end:,} that {path} "
                "describes: copy both again"
            )

    def is_in_order(self) -> bool:
        """Return whether one sequence follows another, and one document another.

        This reads the whole index.
        """
        ends = self.places + self.lengths.astype(np.int64) * self.dtype.itemsize
        whole = (
            (self.places[1:] == ends[:-1]).all()
            and self.bounds[0] == 0
            and (np.diff(self.bounds) >= 0).all()
        )
        return bool(whole and (len(self.places) == 0 or self.places[0] == 0))

    def begins(self, first: int, last: int) -> list[int]:
        """Return where the documents from ``first`` on begin, and where the one before
        ``last`` ends, in bytes.
        """
        return [
            int(self.places[s]) if s < len(self.places) else self.end
            for s in self.bounds[first : last + 1].tolist()
        ]


def blocks_of(file: DataFile) -> Blocks | None:
    """Return the blocks of a file of Megatron-LM, of equal numbers of documents; None
    for any other or a damaged file.

    ConfigError is raised if its .idx is not one that Megatron-LM writes.
    """
    if len(paths := paths_of(file)) == 1:
        return None
    try:
        index = _Index(file, paths[1])
    except OtherContent:  # reading the file will tell
        return None
    if not index.is_in_order():
        raise ConfigError(
            f"{paths[1]}: its sequences or documents do not follow one another: write "
            "it again"
        )
    documents = index.documents
    places = np.append(
        np.arange(0, documents, -(-documents // _BLOCKS) or 1), documents
    )
    return Blocks(places, places)


def reader(
    stored: BinaryIO, file: DataFile, how: Format
) -> Callable[..., Iterator[np.ndarray | BadDocument]] | None:
    """Return a function that reads the documents between two numbers, or None if the
    file is not Megatron-LM's.
    """
    if len(paths := paths_of(file)) == 1:
        return None
    index = _Index(file, paths[1])

    def records(
        first: int = 0, last: int = index.documents
    ) -> Iterator[np.ndarray | BadDocument]:
        begins = index.begins(first, last)
        stored.seek(begins[0])
        for begin, end in zip(begins, begins[1:], strict=False):
            data = stored.read(end - begin)
            if len(data) < end - begin:
                raise EOFError(f"the file ends {end - begin - len(data):,} bytes early")
            ids = np.frombuffer(data, index.dtype)
            if begin < _FIRST:
                check_known(file.url, ids, how.vocab_size)
            usable = len(ids) > (ids[-1:] == how.eos_id).sum()
            yield checked(ids, how.vocab_size) if usable else Empty("no ids but EOS")

    return records
