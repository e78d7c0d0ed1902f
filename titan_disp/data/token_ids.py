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
every ``LONGEST`` ids. A document without EOS (by a cut or the end of the file) gets one
when packed.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from titan_disp.data.formats import (
    HEAD,
    BadDocument,
    DamagedFile,
    OtherContent,
    mistaken,
)
from titan_disp.data.listing import DataFile
from titan_disp.data.options import Format
from titan_disp.errors import DataError

LONGEST = 1 << 16  # most ids of a document
_BLOCK = 1 << 15  # ids read at a time
_LLM_C_HEADER = 1024  # bytes
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
_LLM_C_EVALUATION = 20240522
_ZEROS = (
    f"{LONGEST:,} ids 0 in a row, as a disk that was full or failed leaves them: copy "
    "the file again, or, if they are padding, write it without them"
)
_NUMPY_MAGIC = b"\x93NUMPY"
_NUMPY_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class Layout:
    """Describe how a file stores ids."""

    name: str
    eos_id: int
    vocab_size: int
    dtype: np.dtype
    begin: int  # bytes of the header
    count: int  # whole ids in the file; no more than its header says
    damage: str | None  # what is wrong at the end of the file
    declared: bool  # whether a header says the type; if not, stream.token_dtype does


Ids = np.ndarray | BadDocument  # of a document, [n] uint16 or uint32


def located(stored: BinaryIO, layout: Layout, *span: int) -> Iterator[tuple[int, Ids]]:
    """Yield the place of each document, in bytes, and its ids: of all the file, or
    between two places.

    DataError is raised if the ids have another type or tokenizer than the config names,
    and DamagedFile at the file's end.
    """
    size = layout.dtype.itemsize
    begin_of_file = layout.begin
    end_of_file = layout.begin + layout.count * size
    begin, end = span or (begin_of_file, end_of_file)
    vocab_size = layout.vocab_size
    stored.seek(begin)
    # the beginning of a document that continues in the next block
    rest = np.empty(0, layout.dtype)
    zeros = 0  # ids 0 in a row, in whole blocks
    for place in range(begin, end, _BLOCK * size):
        wanted = min(_BLOCK * size, end - place)
        data = stored.read(wanted)
        block = np.frombuffer(data, layout.dtype, len(data) // size)
        if place == begin_of_file and len(block):
            _check_first(block, layout)
        zeros = 0 if block.any() else zeros + len(block)
        if zeros >= LONGEST:
            raise DamagedFile(_ZEROS)
        ids = np.concatenate([rest, block])
        fits = int(ids.max(initial=0)) < vocab_size
        at = place - len(rest) * size
        documents, rest_begin = _runs(ids, layout.eos_id)
        for first, last in documents:
            # Copied, so that a document does not keep the whole block in memory.
            yield (
                at + first * size,
                ids[first:last].copy()
                if fits
                else checked(ids[first:last], vocab_size),
            )
        if len(data) < wanted:
            raise EOFError(f"the file ends {wanted - len(data):,} bytes early")
        rest = ids[rest_begin:]
    if len(rest):
        yield end - len(rest) * size, checked(rest, vocab_size)
    if end == end_of_file and layout.damage is not None:
        raise DamagedFile(layout.damage)


def _runs(ids: np.ndarray, eos_id: int) -> tuple[list[tuple[int, int]], int]:
    """Return where each document begins and ends, and where the first unfinished one
    begins.

    EOS alone is no document.
    """
    ends = np.flatnonzero(ids == eos_id) + 1
    begins = [0, *ends.tolist()]
    documents = []
    for begin, end in zip(begins, begins[1:], strict=False):
        for piece in range(begin, end - 1, LONGEST):
            documents.append((piece, min(piece + LONGEST, end)))
    unfinished = begins[-1]
    while len(ids) - unfinished > LONGEST:
        documents.append((unfinished, unfinished + LONGEST))
        unfinished += LONGEST
    return documents, unfinished


def checked(ids: np.ndarray, vocab_size: int) -> np.ndarray | BadDocument:
    if (largest := int(ids.max())) < vocab_size:
        return ids.copy()
    return BadDocument(
        f"id {largest:,}, but the tokenizer has {vocab_size:,} ids", ids.nbytes
    )


def check_known(found: str, ids: np.ndarray, vocab_size: int, fix: str = "") -> None:
    if (largest := int(ids.max(initial=0))) >= vocab_size:
        raise DataError(
            f"{found} holds the id {largest:,}, but the tokenizer has {vocab_size:,} "
            f"ids: {fix}use the tokenizer that wrote them"
        )


def layout_of(stored: BinaryIO, file: DataFile, how: Format) -> Layout:
    """Return the layout, from the header if the file has one."""
    name = file.url
    size = file.size
    eos_id = how.eos_id
    if eos_id is None:
        raise DataError(f"{name} holds token ids, expected text: name a file of text")
    head = stored.read(_LLM_C_HEADER)
    if (found := mistaken(head[:HEAD], file.name)) is not None:
        raise OtherContent(found)
    header = (
        _numpy_header(head, name)
        if head.startswith(_NUMPY_MAGIC)
        else _llm_c_header(head, name)
    )
    dtype, declared, begin = header or (_DTYPES[how.token_dtype], None, 0)
    count, odd = divmod(size - begin, dtype.itemsize)
    damage = None
    if declared is not None:
        if declared != count or odd:
            held = f"{(size - begin) / dtype.itemsize:,}"
            damage = f"its header says {declared:,} ids of {dtype.name}, but the file holds {held}"
        count = min(declared, count)
    elif odd:
        multiple = f"a multiple of {dtype.itemsize}, the size of a {dtype.name} id"
        damage = f"its {size:,} bytes are not {multiple}: it is cut off, or the ids have another type"
    if eos_id > np.iinfo(dtype).max:
        fix = (
            ""
            if declared is not None
            else 'set stream.token_dtype = "uint32" if the ids are of that type, or '
        )
        raise DataError(
            f"{name} is read as {dtype.name}, but the id of the tokenizer's EOS, "
            f"{eos_id}, does not fit in this type: {fix}use the tokenizer that wrote "
            "them"
        )
    return Layout(
        name, eos_id, how.vocab_size, dtype, begin, count, damage, declared is not None
    )


# type of an id, number of ids, bytes before them
_Header = tuple[np.dtype, int | None, int]


def _numpy_header(head: bytes, name: str) -> _Header:
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        if version not in _NUMPY_HEADERS:
            found = f"{version[0]}.{version[1]}"
            raise OtherContent(
                f"its .npy header has version {found}, expected 1.0 or 2.0: write it "
                "again with numpy.save"
            )
        shape, _, dtype = _NUMPY_HEADERS[version](file)
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
    return dtype, int(shape[0]), file.tell()


def _llm_c_header(head: bytes, name: str) -> _Header | None:
    if len(head) < _LLM_C_HEADER:
        return None
    magic, version, count = np.frombuffer(head, "<i4", 3).tolist()
    if (magic, version) in _LLM_C:
        return np.dtype(_LLM_C[magic, version]), count, _LLM_C_HEADER
    if magic in (*(known for known, _ in _LLM_C), _LLM_C_EVALUATION):
        expected = ", ".join(f"magic {m} and version {v}" for m, v in _LLM_C)
        raise DataError(
            f"{name} has a header of llm.c with magic {magic} and version {version}; "
            f"expected a file of training data: {expected}. Leave it out of the "
            "dataset_path, or write it as such"
        )
    return None


def _check_first(ids: np.ndarray, layout: Layout) -> None:
    """Refuse a file whose first block holds ids of another type, or ids that the
    tokenizer does not have.
    """
    name = layout.name
    vocab_size = layout.vocab_size
    other = "uint32" if layout.dtype.itemsize == 2 else "uint16"
    found = f"{name} is read as {layout.dtype.name}"
    fix = (
        ""
        if layout.declared
        else f'set stream.token_dtype = "{other}" if they are of that type, or '
    )
    check_known(f"{found} and", ids, vocab_size, fix)
    if layout.dtype.itemsize == 2 and not layout.declared and len(ids) >= 64:
        # the halves of uint32 ids, if they are uint32
        low = ids[0 : len(ids) & ~1 : 2]
        high = ids[1::2]
        if int(high.max()) <= (vocab_size - 1) >> 16 < int(low.max()):
            second = f"every second id is at most {int(high.max())}, as in uint32"
            raise DataError(f'{found}, but {second}: set stream.token_dtype = "uint32"')
