"""This module lists the file formats that are read, and checks that a file's content fits its name.

The suffix of a file's name selects its format:

format       suffixes                                               module
JSON lines   .json .jsonl, uncompressed, gzip (.gz) or zstd (.zst)  json_lines
Parquet      .parquet                                               parquet
plain text   .txt, uncompressed, gzip or zstd                       text_files
token ids    .npy .bin                                              pretokenized
"""

import os
from dataclasses import dataclass

JSON_LINES = (".json.gz", ".jsonl.gz", ".json", ".jsonl", ".json.zst", ".jsonl.zst")
PARQUET = (".parquet",)
PLAIN_TEXT = (".txt", ".txt.gz", ".txt.zst")
TOKEN_IDS = (".npy", ".bin")
SUFFIXES = (*JSON_LINES, *PARQUET, *PLAIN_TEXT, *TOKEN_IDS)
COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class Format:
    """Describe how documents are found in files.

    Attributes:
        text_field: the field of JSON documents, or the column of Parquet, that holds the text. Dots lead into nested
            objects: ``meta.text``.
        text_split: "file" or "blank_lines": what a document of a .txt file is.
        token_dtype: "uint16" or "uint32", the type of token ids in files without a header.
        eos_id: the tokenizer's EOS, which ends a document of token ids; None if no tokenizer is known.
        vocab_size: the number of the tokenizer's ids; None if no tokenizer is known.
    """

    text_field: str = "text"
    text_split: str = "file"
    token_dtype: str = "uint16"
    eos_id: int | None = None
    vocab_size: int | None = None


HEAD = 512  # first bytes of a file, which are enough to recognize its format
_POINTER = b"version https://git-lfs.github.com/spec/"
_ARCHIVE = b"PK\x03\x04"
_HTML = (b"<!doctype html", b"<html")
_GZIP = b"\x1f\x8b"
# pzstd begins with a skippable frame that holds the length of the next one.
_ZSTD = (b"\x28\xb5\x2f\xfd", *(bytes([i]) + b"\x2a\x4d\x18" for i in range(0x50, 0x60)))
_SIGNATURES: tuple[tuple[bytes | tuple[bytes, ...], str, str], ...] = (
    (_GZIP, "gzip-compressed", "name it *.gz"),
    (_ZSTD, "zstd-compressed", "name it *.zst"),
    # Longer than the magic number "BZh", because a text may begin with these letters.
    (tuple(b"BZh%d1AY&SY" % i for i in range(1, 10)), "bzip2-compressed", "unpack it, or pack it with gzip or zstd"),
    (b"\xfd7zXZ\x00", "xz-compressed", "unpack it, or pack it with gzip or zstd"),
    (b"PAR1\x15", "Parquet", "name it *.parquet"),
    (b"\xff\xfe", "UTF-16 text", "convert it, for example with iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "convert it, for example with iconv -f UTF-16 -t UTF-8"),
)
_PROMISED: dict[str, bytes | tuple[bytes, ...]] = {".gz": _GZIP, ".zst": _ZSTD, ".parquet": b"PAR1"}


def mistaken(head: bytes, name: str) -> str | None:
    """Say what a file is, and what to do, if its content is not what its name says; else return None.

    Args:
        head: the file's first ``HEAD`` bytes, as stored.
        name: the file's name.
    """
    begin = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if begin.startswith(_HTML) and not name.endswith(".txt"):
        return "it is an HTML page, as servers send it instead of a file: download the file again"
    if head.startswith(_POINTER):
        return "it is a Git LFS pointer instead of the data: git lfs pull fetches the data"
    if head.startswith(_ARCHIVE):
        return "it is a zip archive (such as numpy.savez or torch.save write): unpack or convert it"
    if name.endswith(TOKEN_IDS):  # these may begin with any bytes
        return None
    promised = next((signature for suffix, signature in _PROMISED.items() if name.endswith(suffix)), None)
    if not head or (promised is not None and head.startswith(promised)):
        return None
    for signature, what, advice in _SIGNATURES:
        if head.startswith(signature):
            return f"it is {what}, which its name does not say: {advice}"
    if promised is not None:
        kind = os.path.splitext(name)[1][1:]
        return f"it is not {kind}, though its name says so: rename it to what it is, or download it again"
    return None
