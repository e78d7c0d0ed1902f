"""The suffix of a file's name selects its format:

JSON lines   .json .jsonl, uncompressed, gzip (.gz) or zstd (.zst) Parquet
.parquet: each row of one string column is a document plain text   .txt, uncompressed,
gzip or zstd, in UTF-8: the whole file is a document, or every block of lines between
             blank lines is one
token ids    .npy .bin, see ``token_ids``

This module tells files apart. Its readers yield records: unparsed documents, or a
reason why one cannot be used.
"""

import codecs
import io
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from titan_disp.data.options import StreamOptions
from titan_disp.errors import DataError

JSON_LINES = (".json.gz", ".jsonl.gz", ".json", ".jsonl", ".json.zst", ".jsonl.zst")
PARQUET = (".parquet",)
PLAIN_TEXT = (".txt", ".txt.gz", ".txt.zst")
TOKEN_IDS = (".npy", ".bin")
SUFFIXES = (*JSON_LINES, *PARQUET, *PLAIN_TEXT, *TOKEN_IDS)
COMPRESSED = (".gz", ".zst")


def suffix_of(name: str) -> str:
    return next(
        (suffix for suffix in SUFFIXES if name.endswith(suffix)),
        os.path.splitext(name)[1],
    )


HEAD = 512  # first bytes of a file, which are enough to recognize its format
_POINTER = b"version https://git-lfs.github.com/spec/"
_ARCHIVE = b"PK\x03\x04"
_HTML = (b"<!doctype html", b"<html")
_GZIP = b"\x1f\x8b"
# pzstd begins with a skippable frame that holds the length of the next one.
_ZSTD = (
    b"\x28\xb5\x2f\xfd",
    *(bytes([i]) + b"\x2a\x4d\x18" for i in range(0x50, 0x60)),
)
_SIGNATURES: tuple[tuple[bytes | tuple[bytes, ...], str, str], ...] = (
    (_GZIP, "gzip-compressed", "name it *.gz"),
    (_ZSTD, "zstd-compressed", "name it *.zst"),
    # Longer than the magic number "BZh", because a text may begin with these letters.
    (
        tuple(b"BZh%d1AY&SY" % i for i in range(1, 10)),
        "bzip2-compressed",
        "unpack it, or pack it with gzip or zstd",
    ),
    (b"\xfd7zXZ\x00", "xz-compressed", "unpack it, or pack it with gzip or zstd"),
    (b"PAR1\x15", "Parquet", "name it *.parquet"),
    (
        b"\xff\xfe",
        "UTF-16 text",
        "convert it, for example with iconv -f UTF-16 -t UTF-8",
    ),
    (
        b"\xfe\xff",
        "UTF-16 text",
        "convert it, for example with iconv -f UTF-16 -t UTF-8",
    ),
)
_PROMISED: dict[str, bytes | tuple[bytes, ...]] = {
    ".gz": _GZIP,
    ".zst": _ZSTD,
    ".parquet": b"PAR1",
}


def mistaken(head: bytes, name: str) -> str | None:
    """Say what a file is, and what to do, if its first ``HEAD`` bytes are not what its
    name says; else return None.
    """
    begin = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if begin.startswith(_HTML) and not name.endswith(".txt"):
        return "it is an HTML page, as servers send it instead of a file: download the file again"
    if head.startswith(_POINTER):
        return (
            "it is a Git LFS pointer instead of the data: git lfs pull fetches the data"
        )
    if head.startswith(_ARCHIVE):
        return "it is a zip archive (such as numpy.savez or torch.save write): unpack or convert it"
    if name.endswith(TOKEN_IDS):  # these may begin with any bytes
        return None
    promised = next(
        (signature for suffix, signature in _PROMISED.items() if name.endswith(suffix)),
        None,
    )
    if not head or (promised is not None and head.startswith(promised)):
        return None
    for signature, what, advice in _SIGNATURES:
        if head.startswith(signature):
            return f"it is {what}, which its name does not say: {advice}"
    if promised is not None:
        kind = os.path.splitext(name)[1][1:]
        return f"it is not {kind}, though its name says so: rename it to what it is, or download it again"
    return None


class BadDocument(Exception):
    """One document cannot be used; the message says why."""

    def __init__(self, reason: str, size: int = 0) -> None:
        """``size`` is that of the document in bytes, if it is no longer in memory."""
        super().__init__(reason)
        self.size = size


class OtherShape(BadDocument):
    """The document is JSON without a text in the text field.

    If all are so, the config names the wrong field.
    """


class Empty(BadDocument):
    """The document has no text, which is no fault."""


class Garbage(BadDocument):
    """The document is not JSON or not UTF-8.

    Flipped bytes in a compressed file make many such documents in a row.
    """


class DamagedFile(Exception):
    """The rest of a file cannot be read; the message says why."""


class OtherContent(DamagedFile):
    """The whole file is not what its name says."""


# A JSON line, a text, token ids as stored, or the reason why there is none of these.
Record = bytes | str | np.ndarray | BadDocument


def size_of(record: Record) -> int:
    """Return about how many bytes of memory a record takes."""
    if isinstance(record, BadDocument):
        return 0
    return record.nbytes if isinstance(record, np.ndarray) else len(record)


def too_long(size: int) -> BadDocument:
    return BadDocument(f"{size:,} bytes, more than stream.max_document_mb allows", size)


def text_of(raw: Record, field: str = "text") -> str:
    """Return the text of a document: a JSON line, whose ``field`` holds the text, or
    the text itself.

    A BadDocument (or one of its kinds) is raised if there is none. ``raw`` may be one.
    """
    assert not isinstance(raw, np.ndarray)
    if isinstance(raw, BadDocument):
        raise raw
    text = _field_of(_parse(raw), field) if isinstance(raw, bytes) else raw
    if not text.strip():
        raise Empty("empty text")
    try:
        text.encode()
    # JSON can escape half of a surrogate pair, which no tokenizer accepts
    except UnicodeEncodeError as error:
        raise BadDocument(
            f"invalid Unicode: {error.reason} at character {error.start}"
        ) from error
    return text


def _not_utf_8(error: UnicodeDecodeError) -> Garbage:
    return Garbage(
        f"invalid UTF-8: {error.reason} at byte {error.start}", len(error.object)
    )


def _parse(line: bytes) -> Any:
    try:
        # Decoded here, because json takes some bytes for UTF-16 or UTF-32
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_utf_8(error) from error
    except (ValueError, RecursionError) as error:
        reason = f"malformed JSON: {error}"
        if line.strip()[:1] == b"[":
            reason += f". It looks like the beginning of {_ARRAY}"
        elif line.strip() == b"{":
            reason += f". It looks like JSON over several lines; {_ONE_A_LINE}, as `jq -c . FILE > FILE.jsonl` writes it"
        raise Garbage(reason) from error


_ONE_A_LINE = "expected one document per line"
_ARRAY = f"a JSON array; {_ONE_A_LINE}, as `jq -c '.[]' FILE > FILE.jsonl` writes it"


def _field_of(record: Any, field: str) -> str:
    if isinstance(record, list):
        raise OtherShape(f"it is {_ARRAY}")
    if not isinstance(record, dict):
        raise OtherShape(
            f'no field "{field}", because it is {_kind(record)}; expected a JSON object'
        )
    value = record.get(field)
    if value is None and "." in field:
        value = record
        for name in field.split("."):
            value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, str):
        return value
    names = []
    for name, inside in record.items():
        names += (
            [f"{name}.{inner}" for inner in inside]
            if isinstance(inside, dict) and inside
            else [name]
        )
    shown = (
        ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
        if names
        else "an empty object"
    )
    what = f'no field "{field}", only {shown}'
    if value is not None:
        what = f'field "{field}" is {_kind(value)}, expected a text; the fields are {shown}'
    raise OtherShape(f"{what}; set stream.text_field to the field of the text")


def _kind(value: Any) -> str:
    kinds = {
        dict: "an object",
        list: "an array",
        str: "a text",
        bool: "true or false",
        type(None): "null",
    }
    return kinds.get(type(value), "a number")


_DRAIN = 1 << 20


def json_lines(lines: Any, max_bytes: int) -> Iterator[bytes | BadDocument]:
    """Yield the lines of a binary stream, unparsed, but no blank ones.

    Too long ones are never in memory as a whole.
    """
    first = True
    while line := lines.readline(max_bytes + 1):
        if len(line) > max_bytes and not line.endswith(b"\n"):
            size = len(line)
            while (rest := lines.readline(_DRAIN)) and not rest.endswith(b"\n"):
                size += len(rest)
            yield too_long(size + len(rest))
        else:
            document = line.removeprefix(codecs.BOM_UTF8) if first else line
            if not document.isspace():
                yield document
        first = False


TOO_LONG = 'more than stream.max_document_mb allows: set stream.text_split = "blank_lines", or allow more'


def whole_text(stream: Any, max_bytes: int) -> Iterator[str | BadDocument]:
    """Yield the text of a binary stream, unless it is too long.

    Then it is never in memory as a whole.
    """
    parts = []
    size = 0
    while part := stream.read(min(1 << 20, max_bytes + 1 - size)):
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            yield BadDocument(
                f"the file has more than {max_bytes:,} bytes, {TOO_LONG}", size
            )
            return
    yield _decoded(b"".join(parts).removeprefix(codecs.BOM_UTF8))


def text_blocks(stream: Any, max_bytes: int) -> Iterator[str | BadDocument]:
    """Yield the blocks between blank lines (only white space), without the line break
    at the end (\\n or \\r\\n).
    """
    block: list[bytes] = []
    size = 0
    at_line_start = True
    first = True

    def end() -> str | BadDocument:
        return (
            _decoded(b"".join(block).rstrip(b"\r\n"))
            if size <= max_bytes
            else too_long(size)
        )

    while piece := stream.readline(max_bytes + 1):  # a longer line comes in pieces
        if first:
            piece = piece.removeprefix(codecs.BOM_UTF8)
            first = False
        blank = at_line_start and not piece.strip()
        at_line_start = piece.endswith(b"\n")
        if not blank:
            size += len(piece)
            if size <= max_bytes:
                block.append(piece)
            else:
                block.clear()
        elif size:
            yield end()
            block = []
            size = 0
    if size:
        yield end()


def _decoded(text: bytes) -> str | BadDocument:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return _not_utf_8(error)


_READ = 1 << 20  # bytes of a column that are read at a time
_ROWS = 256  # rows that are decoded at a time, but …
_BATCH = 4 << 20  # … no more bytes than these


def parquet_table(stored: io.BufferedReader, name: str) -> Any:
    """Open a Parquet file.

    Raise OtherContent if it is something else. ``parquet_records`` takes it.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        # pyarrow's default pre_buffer would keep gigabytes of a large file, until it is
        # closed.
        file = pyarrow.PythonFile(stored, "r")
        return pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=_READ)
    except pyarrow.ArrowInvalid as error:
        stored.seek(0)
        if (found := mistaken(stored.read(HEAD), name)) is not None:
            raise OtherContent(found) from error
        raise


def parquet_records(
    table: Any, name: str, options: StreamOptions, rows: int, *groups: int
) -> Iterator[str | BadDocument]:
    """Yield the texts of a column, of all row groups or of ``range(*groups)``, decoding
    so many ``rows`` at a time.

    DataError is raised for a sound file without such a column: the config has to
    change.
    """
    field = options.format.text_field
    max_bytes = options.max_document_bytes
    _check_column(table.schema_arrow, name, field)
    chosen = list(range(*groups)) if groups else None
    for batch in table.iter_batches(
        batch_size=rows, columns=[field], row_groups=chosen
    ):
        for value in _column(batch, field):
            try:
                text = value.as_py()
            except UnicodeDecodeError as error:  # other writers do not validate UTF-8
                yield _not_utf_8(error)
                continue
            if not isinstance(text, str):
                yield BadDocument("text is null")
            elif 4 * len(text) > max_bytes and (size := len(text.encode())) > max_bytes:
                yield too_long(size)
            else:
                yield text


def rows_at_a_time(metadata: Any) -> int:
    size = sum(
        metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)
    )
    return max(1, min(_ROWS, _BATCH * metadata.num_rows // max(1, size)))


def _check_column(schema: Any, name: str, field: str) -> None:
    import pyarrow.types as types

    columns = dict(_leaves(schema))
    advice = "set stream.text_field to the column of the text"
    if field not in columns:
        found = ", ".join(
            f"{column} ({kind})" for column, kind in list(columns.items())[:12]
        )
        raise DataError(f'{name} has no column "{field}", only {found}: {advice}')
    kind = columns[field]
    value = kind.value_type if types.is_dictionary(kind) else kind
    # only later versions of pyarrow have it
    is_view = getattr(types, "is_string_view", lambda _: False)
    if not (types.is_string(value) or types.is_large_string(value) or is_view(value)):
        raise DataError(
            f'{name}: column "{field}" is {kind}, expected string: {advice}, or write '
            "it as a string"
        )


def _leaves(fields: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, type) of all columns; the names of columns in structs have dots."""
    import pyarrow.types as types

    for field in fields:
        if types.is_struct(field.type):
            yield from _leaves(
                [field.type.field(i) for i in range(field.type.num_fields)],
                f"{prefix}{field.name}.",
            )
        else:
            yield prefix + field.name, field.type


def _column(batch: Any, field: str) -> Any:
    """Select one column.

    Reading column ``x.y`` may also load the field ``y`` of a struct ``x``.
    """
    import pyarrow.compute

    names = batch.schema.names
    if field in names:
        return batch.column(names.index(field))
    struct = next(i for i, name in enumerate(names) if field.startswith(f"{name}."))
    path = field.removeprefix(f"{names[struct]}.").split(".")
    return pyarrow.compute.struct_field(batch.column(struct), path)
