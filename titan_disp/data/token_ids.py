"""This module reads token ids as other projects store them for memory maps:
little-endian uint16 or uint32.

The documents follow one another:

    nanoGPT   .bin   uint16, no header; the id of <|endoftext|> after every document    data/openwebtext/prepare.py
    llm.c     .bin   256 int32 (magic 20240520, version 1: uint16; magic 20240801, version 7: uint32; then the number of
                     ids), then the ids; <|endoftext|> *before* every document       dev/data/data_common.py, fineweb.py
    OLMo      .npy   no header in spite of the name, as numpy.memmap writes it; EOS after every document
                                                       dolma: python/dolma/tokenizer/memmap_writer.py, tokenizer.py
    numpy     .npy   numpy.save's header, which says the type

A document is a run of ids up to and including the tokenizer's EOS. An EOS at the
beginning of the file or after another EOS is dropped, so that EOS before and EOS after
every document give the same documents. A run of more than ``LONGEST`` ids is cut after
every ``LONGEST`` ids. A document that ends without EOS, at a cut or at the end of the
file, gets an EOS when it is packed.

Megatron-LM has a file NAME.idx beside NAME.bin. NAME.idx says where documents begin, so
that no index has to be made. NAME.idx is little-endian, and holds
(megatron/core/datasets/indexed_dataset.py): the magic number; the version, int64; a
code of the ids' type, uint8; S, the number of sequences, int64; D + 1, for D documents,
int64; the sequences' lengths in ids, int32 [S]; the sequences' places in NAME.bin in
bytes, int64 [S]; and each document's first sequence, then S, int64 [D + 1].
"""

import io
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO

import numpy as np

from titan_disp.data.blocks import Blocks
from titan_disp.data.formats import (
    HEAD,
    BadDocument,
    DamagedFile,
    Empty,
    OtherContent,
    mistaken,
)
from titan_disp.data.listing import DataFile
from titan_disp.data.options import Format
from titan_disp.errors import ConfigError, DataError

LONGEST = 1 << 16  # most ids of a document
_BLOCK = 1 << 15  # ids read at a time
_ZEROS = (
    f"{LONGEST:,} ids 0 in a row, as a disk that was full or failed leaves them: copy "
    "the file again, or, if they are padding, write it without them"
)
_DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

Ids = np.ndarray | BadDocument  # of a document, [n] uint16 or uint32


@dataclass(frozen=True)
class _Header:
    """The header of a file of ids."""

    dtype: np.dtype  # of the ids
    count: int | None = None  # ids of the file; None if there is no header
    size: int = 0  # bytes of the header


@dataclass(frozen=True)
class Layout:
    """How a file stores ids. Places are in bytes."""

    name: str
    how: Format
    dtype: np.dtype
    begin: int  # place of the first id
    end: int  # place after the last whole id that the header, if any, announces
    damage: str  # what is wrong at the end of the file, if anything
    has_header: bool  # whether a header says the type, instead of stream.token_dtype


def layout_of(stored: BinaryIO, file: DataFile, how: Format) -> Layout:
    """Return the layout of a file, from its header if it has one.

    Raises OtherContent if the file is not a file of ids, and DataError if the tokenizer
    or stream.token_dtype does not fit the ids.
    """
    if how.eos_id is None:
        raise DataError(
            f"{file.url} holds token ids, expected text: name a file of text"
        )
    head = stored.read(_LLM_C_HEADER)
    mistake = mistaken(head[:HEAD], file.name)
    if mistake is not None:
        raise OtherContent(mistake)
    if head.startswith(_NUMPY_MAGIC):
        header = _numpy_header(head, file.url)
    else:
        no_header = _Header(_DTYPES[how.token_dtype])
        header = _llm_c_header(head, file.url) or no_header
    dtype = header.dtype
    count, odd_bytes = divmod(file.size - header.size, dtype.itemsize)
    damage = ""
    if header.count is not None and (header.count != count or odd_bytes):
        ids = f"{(file.size - header.size) / dtype.itemsize:,}"
        damage = f"its header says {header.count:,} ids of {dtype.name}, but the file holds {ids}"
        count = min(header.count, count)
    elif odd_bytes:
        multiple = f"a multiple of {dtype.itemsize}, the size of a {dtype.name} id"
        damage = f"its {file.size:,} bytes are not {multiple}: it is cut off, or the ids have another type"
    layout = Layout(
        name=file.url,
        how=how,
        dtype=dtype,
        begin=header.size,
        end=header.size + count * dtype.itemsize,
        damage=damage,
        has_header=header.count is not None,
    )
    if how.eos_id > np.iinfo(dtype).max:
        raise DataError(
            f"{file.url} is read as {dtype.name}, but the id of the tokenizer's EOS, "
            f"{how.eos_id}, does not fit in this type: {_advice(layout)}"
        )
    return layout


_USE_TOKENIZER = "use the tokenizer that wrote them"


def _advice(layout: Layout) -> str:
    """Return what to do about ids that do not fit, for a message."""
    if layout.has_header:
        return _USE_TOKENIZER
    other = "uint32" if layout.dtype.itemsize == 2 else "uint16"
    return f'set stream.token_dtype = "{other}" if the ids are of that type, or {_USE_TOKENIZER}'


_NUMPY_MAGIC = b"\x93NUMPY"
_NUMPY_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def _numpy_header(head: bytes, name: str) -> _Header:
    """Return numpy.save's header of a file, from the file's first bytes.

    Raises OtherContent if the header cannot be read, and DataError if the array has
    another type or shape than ids have.
    """
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read_header = _NUMPY_HEADERS.get(version)
        if read_header is None:
            number = ".".join(map(str, version))
            raise ValueError(f"the header has version {number}, expected 1.0 or 2.0")
        shape, _, dtype = read_header(file)
    except ValueError as error:
        raise OtherContent(
            f"its .npy header cannot be read ({error}): write it again with numpy.save"
        ) from error
    if dtype not in _DTYPES.values() or len(shape) != 1:
        raise DataError(
            f"{name} holds {dtype.name} (byte order {dtype.byteorder!r}) of shape "
            f"{shape}; expected one dimension of little-endian uint16 or uint32: "
            "write it again with numpy.save(FILE, ids.reshape(-1).astype('<u2'))"
        )
    return _Header(dtype, int(shape[0]), file.tell())


_LLM_C_HEADER = 1024  # bytes
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # by magic number and version
_LLM_C_MAGIC = (20240520, 20240801, 20240522)  # the last: files for evaluations


def _llm_c_header(head: bytes, name: str) -> _Header | None:
    """Return llm.c's header of a file, from the file's first bytes, or None if there is
    no such header.

    Raises DataError if the header is not that of a file of training data.
    """
    if len(head) < _LLM_C_HEADER:
        return None
    magic, version, count = np.frombuffer(head, "<i4", 3).tolist()
    if (magic, version) in _LLM_C:
        return _Header(np.dtype(_LLM_C[magic, version]), count, _LLM_C_HEADER)
    if magic in _LLM_C_MAGIC:
        expected = ", ".join(f"magic {m} and version {v}" for m, v in _LLM_C)
        raise DataError(
            f"{name} has a header of llm.c with magic {magic} and version {version}; "
            f"expected a file of training data: {expected}. Leave it out of the "
            "dataset_path, or write it as such"
        )
    return None


def located(stored: BinaryIO, layout: Layout, *span: int) -> Iterator[tuple[int, Ids]]:
    """Yield (place, ids) of each document, from the whole file or between two places.
    Places are in bytes.

    Raises DataError if the ids have another type or tokenizer than the config names,
    DamagedFile where the file is damaged, and EOFError if the file ends before the last
    place.
    """
    dtype = layout.dtype
    size = dtype.itemsize
    vocab_size = layout.how.vocab_size
    begin, end = span or (layout.begin, layout.end)
    stored.seek(begin)
    # the beginning of a document that continues in the next block
    rest = np.empty(0, dtype)
    zeros = 0  # ids in the last blocks, if all ids of these blocks are 0
    for place in range(begin, end, _BLOCK * size):
        wanted = min(_BLOCK * size, end - place)
        data = stored.read(wanted)
        block = np.frombuffer(data, dtype, len(data) // size)
        if place == layout.begin:
            _check_first(block, layout)
        zeros = 0 if block.any() else zeros + len(block)
        if zeros >= LONGEST:
            raise DamagedFile(_ZEROS)
        ids = np.concatenate([rest, block])
        first_place = place - len(rest) * size
        documents, unfinished = _runs(ids, layout.how.eos_id)
        for first, last in documents:
            yield first_place + first * size, checked(ids[first:last], vocab_size)
        if len(data) < wanted:
            raise EOFError(f"the file ends {wanted - len(data):,} bytes early")
        rest = ids[unfinished:]
    if len(rest):
        yield end - len(rest) * size, checked(rest, vocab_size)
    if layout.damage and end == layout.end:
        raise DamagedFile(layout.damage)


def _runs(ids: np.ndarray, eos_id: int | None) -> tuple[list[tuple[int, int]], int]:
    """Return where each document in a block begins and ends, and where the unfinished
    document at the end begins.

    An EOS alone is not a document.
    """
    documents = []
    begin = 0
    for end in (np.flatnonzero(ids == eos_id) + 1).tolist():
        for piece in range(begin, end - 1, LONGEST):
            documents.append((piece, min(piece + LONGEST, end)))
        begin = end
    while len(ids) - begin > LONGEST:
        documents.append((begin, begin + LONGEST))
        begin += LONGEST
    return documents, begin


def checked(ids: np.ndarray, vocab_size: int) -> Ids:
    """Return a copy of a document's ids, or a BadDocument if the tokenizer does not have
    one of the ids.

    (Without a copy, a document would keep the whole block in memory.)
    """
    largest = int(ids.max())
    if largest < vocab_size:
        return ids.copy()
    return BadDocument(
        f"id {largest:,}, but the tokenizer has {vocab_size:,} ids", ids.nbytes
    )


def _check_known(
    subject: str, ids: np.ndarray, vocab_size: int, advice: str = _USE_TOKENIZER
) -> None:
    """Raise DataError if the tokenizer does not have one of these ids."""
    largest = int(ids.max(initial=0))
    if largest >= vocab_size:
        raise DataError(
            f"{subject} holds the id {largest:,}, but the tokenizer has "
            f"{vocab_size:,} ids: {advice}"
        )


def _check_first(ids: np.ndarray, layout: Layout) -> None:
    """Raise DataError if the first ids of a file show that they have another type or
    come from another tokenizer.
    """
    vocab_size = layout.how.vocab_size
    subject = f"{layout.name} is read as {layout.dtype.name}"
    _check_known(f"{subject} and", ids, vocab_size, _advice(layout))
    may_be_uint32 = layout.dtype.itemsize == 2 and not layout.has_header
    if may_be_uint32 and len(ids) >= 64:
        # If the ids are uint32, these are their low and high halves.
        pairs = ids[: len(ids) // 2 * 2].reshape(-1, 2)
        low, high = pairs.max(axis=0).tolist()
        if high <= (vocab_size - 1) >> 16 < low:
            raise DataError(
                f"{subject}, but every second id is at most {high}, as in uint32: set "
                'stream.token_dtype = "uint32"'
            )


_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
# by their codes; 4 is int32, but no id is negative
_MEGATRON_DTYPES: dict[int, np.dtype] = {8: np.dtype("<u2"), 4: np.dtype("<u4")}
_MOST_BLOCKS = 1 << 14  # most blocks of a file of Megatron-LM
# The ids in these first bytes of a file of Megatron-LM must be ids of the tokenizer.
_FIRST = 1 << 16


def paths_of(file: DataFile) -> list[str]:
    """Return the paths of a file's content: its own path, and that of its .idx if it is
    Megatron-LM's.
    """
    beside = file.url.removesuffix(".bin") + ".idx"
    if file.url.endswith(".bin") and os.path.isfile(beside):
        with open(beside, "rb") as index:
            if index.read(len(_MEGATRON_MAGIC)) == _MEGATRON_MAGIC:
                return [file.url, beside]
    return [file.url]


class _MegatronIndex:
    """The content of NAME.idx, read through a memory map.

    Attributes:
        dtype: the type of the ids.
        lengths: [S], the lengths of the sequences, in ids.
        places: [S], the places of the sequences in NAME.bin, in bytes.
        bounds: [D + 1], the first sequence of each document, and S.
        end: the bytes of all sequences.
    """

    def __init__(self, file: DataFile, path: str) -> None:
        """Raises OtherContent if the content cannot be the index of ``file``."""
        with open(path, "rb") as index:
            head = index.read(_MEGATRON_HEADER.size).ljust(_MEGATRON_HEADER.size, b"\0")
        _, version, code, sequences, bounds = _MEGATRON_HEADER.unpack(head)
        size = os.path.getsize(path)
        # An index of multimodal data is larger.
        least = len(head) + 12 * sequences + 8 * bounds
        is_known = version == 1 and code in _MEGATRON_DTYPES
        if not is_known or not bounds or size < least:
            raise OtherContent(
                f"{path} has version {version}, ids of type {code} and {size:,} bytes; "
                "expected version 1, type 8 (uint16) or 4 (int32), and at least "
                f"{least:,} bytes: write it again"
            )
        self.dtype = _MEGATRON_DTYPES[code]
        content = np.memmap(path, np.uint8, "r")[len(head) : least]
        lengths, places, firsts = np.split(content, [4 * sequences, 12 * sequences])
        self.lengths = lengths.view("<i4")
        self.places = places.view("<i8")
        self.bounds = firsts.view("<i8")
        self.end = 0
        if sequences:
            last_size = int(self.lengths[-1]) * self.dtype.itemsize
            self.end = int(self.places[-1]) + last_size
        if self.end != file.size or self.bounds[-1] != sequences:
            raise OtherContent(
                f"its {file.size:,} bytes are not the {self.end:,} that {path} "
                "describes: copy both again"
            )

    def is_in_order(self) -> bool:
        """Return whether the sequences follow each other without gaps, and the documents
        are in order. This reads the whole index.
        """
        ends = self.places + self.lengths.astype(np.int64) * self.dtype.itemsize
        begins = np.append(self.places, self.end)
        return (
            begins[0] == 0
            and self.bounds[0] == 0
            and np.array_equal(begins[1:], ends)
            and bool((np.diff(self.bounds) >= 0).all())
        )

    def begins(self, first: int, last: int) -> list[int]:
        """Return where the documents ``first`` to ``last`` − 1 begin, and where the last
        of them ends, in bytes.
        """
        return [
            int(self.places[sequence]) if sequence < len(self.places) else self.end
            for sequence in self.bounds[first : last + 1].tolist()
        ]


def blocks_of(file: DataFile) -> Blocks | None:
    """Return the blocks of a file of Megatron-LM, with equal numbers of documents.
    Return None for a damaged file, and for a file of another kind.

    Raises ConfigError if sequences or documents in the .idx are not in order.
    """
    path, *beside = paths_of(file)
    if not beside:
        return None
    try:
        index = _MegatronIndex(file, beside[0])
    except OtherContent:  # reading the file reports the same error
        return None
    if not index.is_in_order():
        raise ConfigError(
            f"{beside[0]}: its sequences or documents do not follow one another: write "
            "it again"
        )
    count = len(index.bounds) - 1
    documents_a_block = max(-(-count // _MOST_BLOCKS), 1)
    places = np.append(np.arange(0, count, documents_a_block), count)
    return Blocks(places, places)


def megatron_reader(
    stored: BinaryIO, file: DataFile, how: Format
) -> Callable[..., Iterator[Ids]] | None:
    """Return a function that yields the documents ``first`` to ``last`` − 1, or None if
    the file is not Megatron-LM's.

    The function raises DataError if the first ids come from another tokenizer, and
    EOFError if the file is too short.
    """
    path, *beside = paths_of(file)
    if not beside:
        return None
    index = _MegatronIndex(file, beside[0])

    def records(first: int = 0, last: int = len(index.bounds) - 1) -> Iterator[Ids]:
        begins = index.begins(first, last)
        stored.seek(begins[0])
        for begin, end in pairwise(begins):
            data = stored.read(end - begin)
            if len(data) < end - begin:
                raise EOFError(f"the file ends {end - begin - len(data):,} bytes early")
            ids = np.frombuffer(data, index.dtype)
            if begin < _FIRST:
                _check_known(path, ids, how.vocab_size)
            if len(ids) == 0 or ids.tolist() == [how.eos_id]:
                yield Empty("no ids but EOS")
            else:
                yield checked(ids, how.vocab_size)

    return records
