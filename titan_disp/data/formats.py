"""The suffix of a file's name selects its format, in lower or upper case:

- JSON lines: .json .jsonl .ndjson, uncompressed, gzip (.gz) or zstd (.zst).
- Parquet (.parquet) and Arrow (.arrow): each row of one string column is a document.
- Tables: .csv .tsv, with the names of the columns in the first row; also .gz or .zst.
- Plain text: .txt, also .gz or .zst. The whole file is a document, or every block of
  lines between blank lines is one. It is UTF-8, or has the encoding that a look at the
  file has found (``encoding_of``).
- Token ids: .npy .bin, see ``token_ids``.

This module tells files apart. Its readers yield records: unparsed documents, or a
reason why one cannot be used.
"""

import codecs
import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from titan_disp.data.options import Format, StreamOptions


def _and_compressed(*suffixes: str) -> tuple[str, ...]:
    return tuple(end + packed for packed in (*COMPRESSED, "") for end in suffixes)


COMPRESSED = (".gz", ".zst")
JSON_LINES = _and_compressed(".json", ".jsonl", ".ndjson")
PARQUET = (".parquet",)
ARROW = (".arrow",)
TABLES = _and_compressed(".csv", ".tsv")
PLAIN_TEXT = _and_compressed(".txt")
TOKEN_IDS = (".npy", ".bin")
SUFFIXES = (*JSON_LINES, *PARQUET, *ARROW, *TABLES, *PLAIN_TEXT, *TOKEN_IDS)
# for messages
NAMES = (
    "*.json, *.jsonl, *.ndjson, *.csv, *.tsv, *.txt (each also .gz or .zst), "
    "*.parquet, *.arrow, *.npy, *.bin"
)
# These are written by datasets beside its Arrow files, about them.
_ABOUT_ARROW = ("dataset_info.json", "dataset_dict.json", "state.json")


def suffix_of(name: str) -> str:
    """Return the part of a name that selects the format, in lower case."""
    lower = name.lower()
    suffixes = (suffix for suffix in SUFFIXES if lower.endswith(suffix))
    return next(suffixes, os.path.splitext(lower)[1])


def is_readable(path: str) -> bool:
    """Return whether a file holds documents, by its name."""
    is_about_data = os.path.basename(path) in _ABOUT_ARROW
    return suffix_of(path) in SUFFIXES and not is_about_data


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
    (b"%PDF-", "PDF", "extract its text, for example with pdftotext"),
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


# what Windows-1252 has inside words
_LETTERS = bytes({*range(0xC0, 256)} - {0xD7, 0xF7}) + "ƒŠŒŽšœžŸ’·\xad".encode("cp1252")
_INSIDE = re.compile(rb"(?<=[A-Za-z])[\x80-\xff](?=[A-Za-z])")
_HIGH = bytes(range(0x80, 256))
# what no text has
_CONTROLS = bytes({*range(32)} - {*b"\t\n\f\r\x1a\x1b"})
LOOKED_AT = 1 << 18  # bytes at the beginning of a plain text


def encoding_of(head: bytes) -> str:
    """Return Python's name of the encoding of a plain text, from its first bytes:
    UTF-16, or Windows-1252, which includes ISO 8859-1. Return "" for UTF-8, and for what
    cannot be told, such as other encodings.

    Without a byte-order mark, a text is taken for UTF-16 if most of its characters are
    Western ones, whose high bytes are zero. These bytes are valid UTF-8, too.
    A text is taken for Windows-1252 if it has none of the control characters of binary
    files, few bytes outside ASCII, and between two ASCII letters only bytes that are
    letters there. Polish and Czech words have others, and Cyrillic has many.
    """
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    for encoding, first in (("utf-16-le", 1), ("utf-16-be", 0)):
        high_bytes = head[first::2]
        low_bytes = head[1 - first :: 2]
        if 0 not in low_bytes and high_bytes.count(0) > 0.8 * len(high_bytes):
            return encoding
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
        return ""
    except UnicodeDecodeError:
        ascii_size = len(head.translate(None, _HIGH))
        is_western = not b"".join(_INSIDE.findall(head)).translate(None, _LETTERS)
        is_binary = len(head.translate(None, _CONTROLS)) < len(head)
        if is_western and not is_binary and ascii_size > 0.8 * len(head):
            return "cp1252"
        return ""


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
    if value is None and field in record:
        raise Empty("text is null")
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
    advice = "set stream.text_field to the field of the text"
    if isinstance(value, list) or not {*CHATS}.isdisjoint(record):
        advice = JOIN
    raise OtherShape(f"{what}; {advice}")


CHATS = ("messages", "conversations", "conversation")
JOIN = (
    "only single texts are read: join lists, and the messages of a chat (as "
    "apply_chat_template of transformers does), and write the result as a field of text"
)


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


def reader_of(
    name: str, how: Format
) -> Callable[[Any, int], Iterator[bytes | str | BadDocument]]:
    """Return the function that reads the documents of a decompressed stream, by the
    file's name. It takes the stream and the most bytes of a document.
    """
    suffix = suffix_of(name)
    if suffix in TABLES:
        return partial(table_rows, name=name, field=how.text_field)
    if suffix in ARROW:
        return partial(arrow_rows, name=name, field=how.text_field)
    if suffix not in PLAIN_TEXT:
        return json_lines
    return text_blocks if how.text_split == "blank_lines" else whole_text


def table_rows(
    stream: Any, max_bytes: int, name: str, field: str
) -> Iterator[str | BadDocument]:
    """Yield the texts of a column of a table in CSV or TSV.

    OtherContent is raised if it has no such column.
    """
    csv.field_size_limit(max(max_bytes, csv.field_size_limit()))
    lines = iter(partial(stream.readline, max_bytes + 1), b"")
    # Invalid bytes are left to ``text_of``.
    decoded = codecs.iterdecode(lines, "utf-8-sig", errors="surrogateescape")
    delimiter = "\t" if ".tsv" in suffix_of(name) else ","
    rows = csv.DictReader(decoded, delimiter=delimiter)
    names = list(rows.fieldnames or ())
    if field not in names:
        raise OtherContent(
            f'it has no column "{field}", only {", ".join(names)[:200]}: {COLUMN}'
        )
    for row in rows:
        text = row[field]
        if text is None:
            yield Garbage("the row has too few columns")
        else:
            yield _bounded(text, max_bytes)


def arrow_rows(
    stream: Any, max_bytes: int, name: str, field: str
) -> Iterator[str | BadDocument]:
    """Yield the texts of a column of an Arrow file, in the format for files or for
    streams (as ``datasets`` writes it).

    OtherContent is raised if it has no such column.
    """
    import pyarrow

    file = pyarrow.PythonFile(stream, "r")
    if stream.peek(6).startswith(b"ARROW1"):
        table = pyarrow.ipc.open_file(file)
        batches = map(table.get_batch, range(table.num_record_batches))
    else:
        table = pyarrow.ipc.open_stream(file)
        batches = iter(table)
    _check_column(table.schema, field)
    for batch in batches:
        yield from _texts(batch, field, max_bytes)


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
    table: Any, options: StreamOptions, rows: int, *groups: int
) -> Iterator[str | BadDocument]:
    """Yield the texts of a column, of all row groups or of ``range(*groups)``, decoding
    so many ``rows`` at a time.

    OtherContent is raised for a file without such a column.
    """
    field = options.format.text_field
    max_bytes = options.max_document_bytes
    _check_column(table.schema_arrow, field)
    chosen = list(range(*groups)) if groups else None
    for batch in table.iter_batches(
        batch_size=rows, columns=[field], row_groups=chosen
    ):
        yield from _texts(batch, field, max_bytes)


def _texts(batch: Any, field: str, max_bytes: int) -> Iterator[str | BadDocument]:
    for value in _column(batch, field):
        try:
            text = value.as_py()
        except UnicodeDecodeError as error:  # other writers do not validate UTF-8
            yield _not_utf_8(error)
            continue
        if not isinstance(text, str):
            yield Empty("text is null")
        else:
            yield _bounded(text, max_bytes)


def _bounded(text: str, max_bytes: int) -> str | BadDocument:
    """Return a text, unless it is too long."""
    if 4 * len(text) > max_bytes:
        size = len(text.encode(errors="replace"))
        if size > max_bytes:
            return too_long(size)
    return text


def rows_at_a_time(metadata: Any) -> int:
    size = sum(
        metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)
    )
    return max(1, min(_ROWS, _BATCH * metadata.num_rows // max(1, size)))


COLUMN = "set stream.text_field to the column of the text"


def _check_column(schema: Any, field: str) -> None:
    import pyarrow.types as types

    columns = dict(_leaves(schema))
    if field not in columns:
        first = list(columns.items())[:12]
        names = ", ".join(f"{column} ({type_})" for column, type_ in first)
        advice = COLUMN
        if not {*CHATS}.isdisjoint(columns):
            advice = JOIN
        raise OtherContent(f'it has no column "{field}", only {names}: {advice}')
    type_ = columns[field]
    value = type_.value_type if types.is_dictionary(type_) else type_
    # only later versions of pyarrow have it
    is_view = getattr(types, "is_string_view", lambda _: False)
    if not (types.is_string(value) or types.is_large_string(value) or is_view(value)):
        advice = f"{COLUMN}, or write it as a string"
        if types.is_list(value) or types.is_large_list(value):
            advice = JOIN
        raise OtherContent(f'column "{field}" is {type_}, expected string: {advice}')


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
