"""The suffix of a file's name selects its format, in lower or upper case:

- JSON lines: .json .jsonl .ndjson, uncompressed, gzip (.gz) or zstd (.zst).
- Parquet (.parquet) and Arrow (.arrow): each row of one string column is a document.
- Tables: .csv .tsv, with the names of the columns in the first row; also .gz or .zst.
- Plain text: .txt, also .gz or .zst. The whole file is one document, or each block of
  lines between blank lines is one. The text is in UTF-8, or in the encoding that a look
  at the file has found (``encoding_of``).
- Token ids: .npy .bin, see ``token_ids``.

This module recognizes the formats, and reads all but the token ids. Its readers yield
records: unparsed documents, or the reason why a document cannot be used.
"""

import codecs
import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from titan_disp.data.options import Format, StreamOptions


def _and_compressed(*suffixes: str) -> tuple[str, ...]:
    """Return suffixes of uncompressed files, and the compressed files' suffixes."""
    packed = []
    for ending in COMPRESSED:
        packed += [suffix + ending for suffix in suffixes]
    return (*suffixes, *packed)


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
# ``datasets`` writes these descriptions beside its Arrow files.
_ABOUT_ARROW = ("dataset_info.json", "dataset_dict.json", "state.json")


def suffix_of(name: str) -> str:
    """Return the part of a name that selects the format, in lower case, such as
    ".json.gz". If the name selects no format, this is its last suffix.
    """
    lower = name.lower()
    for suffix in SUFFIXES:
        if lower.endswith(suffix):
            return suffix
    return os.path.splitext(lower)[1]


def is_readable(path: str) -> bool:
    """Return whether a file holds documents, by its name."""
    is_about_data = os.path.basename(path) in _ABOUT_ARROW
    return suffix_of(path) in SUFFIXES and not is_about_data


HEAD = 512  # first bytes of a file, which are enough to recognize its format
_HTML = (b"<!doctype html", b"<html")
_GZIP = b"\x1f\x8b"
# pzstd begins with a skippable frame that holds the length of the next frame.
_ZSTD = (
    b"\x28\xb5\x2f\xfd",
    *(bytes([i]) + b"\x2a\x4d\x18" for i in range(0x50, 0x60)),
)
# what the first bytes of a file must be, by the end of its name
_REQUIRED: dict[str, bytes | tuple[bytes, ...]] = {
    ".gz": _GZIP,
    ".zst": _ZSTD,
    ".parquet": b"PAR1",
}
# No file of documents begins with these bytes.
_NO_DOCUMENTS = {
    b"version https://git-lfs.github.com/spec/": (
        "a Git LFS pointer instead of the data: git lfs pull fetches the data"
    ),
    b"PK\x03\x04": (
        "a zip archive (such as numpy.savez or torch.save write): unpack or convert it"
    ),
}
_UTF_16 = (
    "UTF-16 text, which its name does not say: convert it, for example with iconv -f "
    "UTF-16 -t UTF-8"
)
_UTF_32_MARKS = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
# First bytes of other formats. A file of documents begins with them only if its name
# says so, or if it holds token ids.
_OTHER_FORMATS: dict[bytes | tuple[bytes, ...], str] = {
    _GZIP: "gzip-compressed, which its name does not say: name it *.gz",
    _ZSTD: "zstd-compressed, which its name does not say: name it *.zst",
    # This is longer than the magic number "BZh", because a text may begin with "BZh".
    tuple(b"BZh%d1AY&SY" % i for i in range(1, 10)): (
        "bzip2-compressed, which its name does not say: unpack it, or pack it with "
        "gzip or zstd"
    ),
    b"\xfd7zXZ\x00": (
        "xz-compressed, which its name does not say: unpack it, or pack it with gzip "
        "or zstd"
    ),
    b"PAR1\x15": "Parquet, which its name does not say: name it *.parquet",
    b"%PDF-": (
        "PDF, which its name does not say: extract its text, for example with pdftotext"
    ),
    # before UTF-16, because a mark of UTF-32 begins with one of UTF-16
    _UTF_32_MARKS: _UTF_16.replace("16", "32"),
    codecs.BOM_UTF16_LE: _UTF_16,
    codecs.BOM_UTF16_BE: _UTF_16,
}


def mistaken(head: bytes, name: str) -> str | None:
    """If a file's first bytes contradict its name, return a sentence that says what the
    file is and what to do, else None.

    ``head`` is the first ``HEAD`` bytes. ``name`` has its suffix in lower case.
    """
    text = head.removeprefix(codecs.BOM_UTF8).lstrip().lower()
    if text.startswith(_HTML) and not name.endswith(".txt"):
        return "it is an HTML page, as servers send it instead of a file: download the file again"
    for signature, sentence in _NO_DOCUMENTS.items():
        if head.startswith(signature):
            return f"it is {sentence}"
    suffix = os.path.splitext(name)[1]
    required = _REQUIRED.get(suffix, ())
    if not head or name.endswith(TOKEN_IDS) or head.startswith(required):
        return None
    for signatures, sentence in _OTHER_FORMATS.items():
        if head.startswith(signatures):
            return f"it is {sentence}"
    if required:
        return (
            f"it is not {suffix[1:]}, though its name says so: rename it to what it "
            "is, or download it again"
        )
    return None


# bytes outside ASCII that stand between two ASCII letters in Windows-1252: letters, and
# no-break spaces between words
_LETTERS = bytes({*range(0xC0, 256)} - {0xD7, 0xF7}) + "ƒŠŒŽšœžŸ’·\xad\xa0".encode(
    "cp1252"
)
_INSIDE = re.compile(rb"(?<=[A-Za-z])[\x80-\xff](?=[A-Za-z])")
_HIGH = bytes(range(0x80, 256))
# control characters that no text has
_CONTROLS = bytes({*range(32)} - {*b"\t\n\f\r\x1a\x1b"})
LOOKED_AT = 1 << 18  # bytes at the beginning of a plain text


def encoding_of(head: bytes) -> str:
    """Return Python's name for a plain text's encoding, found from its first bytes:
    UTF-16, UTF-32, or Windows-1252, which includes ISO 8859-1. Return "" for UTF-8 and
    for encodings that are not recognized.

    Without a byte-order mark, a text is taken for UTF-16 if most of its characters are
    Western ones, whose high bytes are zero. (Zero bytes are valid UTF-8, too.) A text
    is taken for Windows-1252 under three conditions: it has no control characters of
    binary files, it has few bytes outside ASCII, and nearly all such bytes between two
    ASCII letters are letters or no-break spaces. Polish and Czech words have other
    bytes between two ASCII letters. Cyrillic texts have many bytes outside ASCII.
    """
    # before UTF-16, because a mark of UTF-32 begins with one of UTF-16
    if head.startswith(_UTF_32_MARKS):
        return "utf-32"
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
        inside = b"".join(_INSIDE.findall(head))
        is_western = len(inside.translate(None, _LETTERS)) <= 0.01 * len(inside)
        is_binary = len(head.translate(None, _CONTROLS)) < len(head)
        if is_western and not is_binary and ascii_size > 0.8 * len(head):
            return "cp1252"
        return ""


# files that may hold text, which their first bytes do not show
_PACKED_TEXT = (".doc", ".docx", ".epub", ".odt", ".pdf", ".7z", ".bz2", ".xz", ".zip")


def looks_like_text(path: str) -> bool:
    """Return whether a file may hold text, by its name and its first bytes."""
    if is_readable(path) or path.lower().endswith(_PACKED_TEXT):
        return True
    with open(path, "rb") as file:
        head = file.read(HEAD)
    return bool(encoding_of(head)) or head == head.translate(None, _CONTROLS)


class BadDocument(Exception):
    """One document cannot be used; the message says why."""

    def __init__(self, reason: str, size: int = 0) -> None:
        """``size`` is the document's size in bytes, if it is no longer in memory."""
        super().__init__(reason)
        self.size = size


class OtherShape(BadDocument):
    """The document is JSON without a text in the text field.

    If all documents are like this, the config names the wrong field.
    """


class Empty(BadDocument):
    """The document has no text. It is passed over, and not counted as bad."""


class Garbage(BadDocument):
    """The document is not JSON, not UTF-8, or not a row of its table.

    Flipped bytes in a compressed file make many such documents in a row.
    """


class DamagedFile(Exception):
    """The rest of a file cannot be read; the message says why."""


class OtherContent(DamagedFile):
    """The whole file is not what its name says."""


# A JSON line, a text, token ids as stored, or the reason why there is none of these.
Record = bytes | str | np.ndarray | BadDocument


def size_of(record: Record) -> int:
    """Return the approximate size of a record in memory, in bytes."""
    if isinstance(record, BadDocument):
        return 0
    if isinstance(record, np.ndarray):
        return record.nbytes
    return len(record)


def too_long(size: int) -> BadDocument:
    """Return the reason why a document of ``size`` bytes is not used."""
    return BadDocument(f"{size:,} bytes, more than stream.max_document_mb allows", size)


def text_of(raw: Record, field: str = "text") -> str:
    """Return the text of a document: the text in the ``field`` of a JSON line (bytes),
    or the document itself if it is a text.

    Raises BadDocument if the document cannot be used: ``raw`` itself if it is a
    BadDocument, or else a new BadDocument that says why.
    """
    assert not isinstance(raw, np.ndarray)
    if isinstance(raw, BadDocument):
        raise raw
    if isinstance(raw, bytes):
        text = _field_of(_parsed(raw), field)
    else:
        text = raw
    if not text.strip():
        raise Empty("empty text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if isinstance(raw, str):  # from a table
            raise Garbage(
                f"invalid UTF-8: a byte at character {error.start}"
            ) from error
        # JSON can escape half of a surrogate pair, which no tokenizer accepts
        raise BadDocument(
            f"invalid Unicode: {error.reason} at character {error.start}"
        ) from error
    return text


def _not_utf_8(error: UnicodeDecodeError) -> Garbage:
    """Return the reason why a document that is not UTF-8 is not used."""
    return Garbage(
        f"invalid UTF-8: {error.reason} at byte {error.start}", len(error.object)
    )


def _parsed(line: bytes) -> Any:
    """Return the value of a JSON line.

    Raises Garbage if the line is not JSON, or not UTF-8.
    """
    try:
        # Decoded here, because json would take some bytes for UTF-16 or UTF-32.
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_utf_8(error) from error
    except (ValueError, RecursionError) as error:
        advice = ""
        beginning = line.strip()
        if beginning.startswith(b"["):
            advice = f". It looks like the beginning of {_ARRAY}"
        elif beginning == b"{":
            advice = f". It looks like JSON over several lines; {_ONE_A_LINE}, as `jq -c . FILE > FILE.jsonl` writes it"
        raise Garbage(f"malformed JSON: {error}{advice}") from error


_ONE_A_LINE = "expected one document per line"
_ARRAY = f"a JSON array; {_ONE_A_LINE}, as `jq -c '.[]' FILE > FILE.jsonl` writes it"


def _field_of(record: Any, field: str) -> str:
    """Return the text in a field of a JSON object. ``x.y`` is the field of this name,
    or else the field ``y`` of the object ``x``.

    Raises Empty if the field is null, and OtherShape if it is not a text.
    """
    if isinstance(record, list):
        raise OtherShape(f"it is {_ARRAY}")
    if not isinstance(record, dict):
        raise OtherShape(
            f'no field "{field}", because the document is {_type_name(record)}; '
            "expected a JSON object"
        )
    path = [field] if field in record else field.split(".")
    value: Any = record
    for name in path:
        value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
    if isinstance(value, str):
        return value
    if value is None:
        raise Empty("text is null")
    raise _no_text(record, field, value)


def _no_text(record: dict[str, Any], field: str, value: Any) -> OtherShape:
    """Return the error about a JSON object without a text in ``field``. ``value`` is the
    field's value, or ``_MISSING``.
    """
    names = []
    for name, inside in record.items():
        if isinstance(inside, dict) and inside:
            names += [f"{name}.{inner}" for inner in inside]
        else:
            names.append(name)
    fields = _listed(names) or "an empty object"
    if value is _MISSING:
        problem = f'no field "{field}", only {fields}'
    else:
        problem = f'field "{field}" is {_type_name(value)}, expected a text; the fields are {fields}'
    advice = "set stream.text_field to the field of the text"
    if isinstance(value, list) or not _CHATS.isdisjoint(record):
        advice = _JOIN
    return OtherShape(f"{problem}; {advice}")


_MISSING = object()  # the value of a field that is not there
_CHATS = {"messages", "conversations", "conversation"}
_JOIN = (
    "only single texts are read: join lists, and the messages of a chat (as "
    "apply_chat_template of transformers does), and write the result as a field of text"
)
_TYPE_NAMES: dict[type, str] = {
    dict: "an object",
    list: "an array",
    str: "a text",
    bool: "true or false",
    type(None): "null",
}


def _type_name(value: Any) -> str:
    """Return the type of a JSON value in words, for messages."""
    return _TYPE_NAMES.get(type(value), "a number")


def _listed(names: Sequence[str]) -> str:
    """Return the first 12 names of fields or columns, for a message."""
    beginning = ", ".join(names[:12])
    if len(names) > 12:
        return f"{beginning}, …"
    return beginning


_DRAIN = 1 << 20  # bytes of a too long line that are read at a time


def _lines(stream: Any, max_bytes: int) -> Iterator[bytes | BadDocument]:
    """Yield the lines of a binary stream. Lines keep their line breaks, but a
    byte-order mark is removed.

    A BadDocument stands for a line of more than ``max_bytes``, which is never in memory
    as a whole.
    """
    mark = codecs.BOM_UTF8
    while line := stream.readline(max_bytes + 1):
        if len(line) <= max_bytes or line.endswith(b"\n"):
            yield line.removeprefix(mark)
        else:
            size = len(line)
            while not line.endswith(b"\n") and (line := stream.readline(_DRAIN)):
                size += len(line)
            yield too_long(size)
        mark = b""


def json_lines(stream: Any, max_bytes: int) -> Iterator[bytes | BadDocument]:
    """Yield the unparsed lines of a binary stream, without blank lines."""
    for line in _lines(stream, max_bytes):
        if isinstance(line, BadDocument) or line.strip():
            yield line


def reader_of(
    name: str, how: Format
) -> Callable[[Any, int], Iterator[bytes | str | BadDocument]]:
    """Return the function that reads a file of text with this name.

    The function takes the decompressed stream and the largest size of a document in
    bytes, and yields the documents.
    """
    suffix = suffix_of(name)
    if suffix in TABLES:
        delimiter = "\t" if ".tsv" in suffix else ","
        return partial(table_rows, field=how.text_field, delimiter=delimiter)
    if suffix in ARROW:
        return partial(arrow_rows, field=how.text_field)
    if suffix not in PLAIN_TEXT:
        return json_lines
    return text_blocks if how.text_split == "blank_lines" else whole_text


# The longest row of a table that is read, in multiples of the longest document, because a
# row has other columns, too. Longer rows are never in memory as a whole.
_LONGEST_ROW = 8


def table_rows(
    stream: Any, max_bytes: int, field: str, delimiter: str
) -> Iterator[str | BadDocument]:
    """Yield the texts in one column of a CSV or TSV table.

    Raises OtherContent if there is no such column, and DamagedFile where the rest of
    the file is not a table.
    """
    most = _LONGEST_ROW * max_bytes
    csv.field_size_limit(max(most, csv.field_size_limit()))
    long_lines: list[BadDocument] = []  # of the current row

    def lines() -> Iterator[str]:
        for line in _lines(stream, most):
            if isinstance(line, BadDocument):
                long_lines.append(line)
                yield "a row that is not used\n"
            else:
                # Invalid bytes are left to ``text_of``.
                yield line.decode(errors="surrogateescape")

    rows = csv.DictReader(lines(), delimiter=delimiter)
    columns: list[str] = []
    try:
        columns += rows.fieldnames or ()
        if field not in columns:
            advice = _COLUMN
            if len(columns) == 1 and re.search(r"[,;|\t]", columns[0]):
                advice = f"separate the columns by {_SEPARATORS[delimiter]}"
            raise OtherContent(
                f'it has no column "{field}", only {_listed(columns)}: {advice}'
            )
        for row in rows:
            text = row[field]
            if long_lines:
                yield long_lines.pop()
                long_lines.clear()
            elif text is None:
                size = 1 + sum(len(value) for value in row.values() if value)
                yield Garbage(
                    "the row has too few columns; expected one for every column that "
                    "the first row names",
                    size,
                )
            else:
                yield _bounded(text, max_bytes)
    except csv.Error as error:
        damage = DamagedFile if columns else OtherContent
        raise damage(
            f"no row of a table can be read from line {rows.line_num} on ({error}): a "
            "quotation mark is not closed, or lines do not end in \\n"
        ) from error


def arrow_rows(stream: Any, max_bytes: int, field: str) -> Iterator[str | BadDocument]:
    """Yield the texts in one column of an Arrow file. The file is in Arrow's file
    format or in its stream format, which ``datasets`` writes.

    Raises OtherContent if there is no such column.
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
    """Yield the text of a binary stream, or a BadDocument if the text has more than
    ``max_bytes``.
    """
    text = stream.read(max_bytes + 1)
    if len(text) > max_bytes:
        yield BadDocument(
            f"the file has more than {max_bytes:,} bytes, {TOO_LONG}", len(text)
        )
    else:
        yield _decoded(text.removeprefix(codecs.BOM_UTF8))


def text_blocks(stream: Any, max_bytes: int) -> Iterator[str | BadDocument]:
    """Yield the blocks of lines between blank lines, without the line break at a
    block's end (\\n or \\r\\n). A line of only white space is blank.
    """
    block: list[bytes] = []
    size = 0  # bytes of the block; a block that is too long is not kept in memory
    for line in chain(_lines(stream, max_bytes), [b""]):
        if isinstance(line, BadDocument):
            size += line.size
        elif line.strip():
            size += len(line)
            block.append(line)
        elif size:
            if size <= max_bytes:
                yield _decoded(b"".join(block).rstrip(b"\r\n"))
            else:
                yield too_long(size)
            block = []
            size = 0
        if size > max_bytes:
            block.clear()


def _decoded(text: bytes) -> str | BadDocument:
    """Return the decoded text, or a BadDocument if the text is not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return _not_utf_8(error)


_READ = 1 << 20  # bytes of a column that are read at a time
_ROWS = 256  # rows that are decoded at a time, but …
_BATCH = 4 << 20  # … no more bytes than these


def parquet_table(stored: io.BufferedReader, name: str) -> Any:
    """Return an open Parquet file for ``parquet_records``.

    Raises OtherContent if the file has another format, and pyarrow's own exception if
    it is damaged.
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
        sentence = mistaken(stored.read(HEAD), name)
        if sentence is not None:
            raise OtherContent(sentence) from error
        raise


def parquet_records(
    table: Any, options: StreamOptions, rows: int, *groups: int
) -> Iterator[str | BadDocument]:
    """Yield the texts of the column stream.text_field, from all row groups or only from
    those in ``range(*groups)``. ``rows`` rows are decoded at a time.

    Raises OtherContent if there is no such column.
    """
    field = options.format.text_field
    _check_column(table.schema_arrow, field)
    for batch in table.iter_batches(
        batch_size=rows,
        columns=[field],
        row_groups=list(range(*groups)) if groups else None,
    ):
        yield from _texts(batch, field, options.max_document_bytes)


def _texts(batch: Any, field: str, max_bytes: int) -> Iterator[str | BadDocument]:
    """Yield the texts in one column of a batch of rows.

    Raises pyarrow.ArrowInvalid if the batch is damaged.
    """
    import pyarrow

    # Reading column ``x.y`` may also load the field ``y`` of a struct ``x``.
    table = _flattened(pyarrow.Table.from_batches([batch]), field)
    (texts,) = table.column(field).chunks
    try:
        # A text with a wrong length would crash the process.
        texts.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
    for value in texts:
        try:
            text = value.as_py()
        except UnicodeDecodeError as error:  # other writers do not validate UTF-8
            yield _not_utf_8(error)
            continue
        if text is None:
            yield Empty("text is null")
        else:
            yield _bounded(text, max_bytes)


def _bounded(text: str, max_bytes: int) -> str | BadDocument:
    """Return a text, or a BadDocument if it has more than ``max_bytes`` in UTF-8."""
    if 4 * len(text) > max_bytes:
        size = len(text.encode(errors="replace"))
        if size > max_bytes:
            return too_long(size)
    return text


def rows_at_a_time(metadata: Any) -> int:
    """Return how many rows of a Parquet file are decoded at a time."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    size = sum(group.total_byte_size for group in groups)
    return max(1, min(_ROWS, _BATCH * metadata.num_rows // max(1, size)))


_COLUMN = "set stream.text_field to the column of the text"
_SEPARATORS = {",": "commas", "\t": "tabs"}


def _check_column(schema: Any, field: str) -> None:
    """Raise OtherContent unless ``field`` is a column of texts in a schema of Arrow."""
    import pyarrow

    columns = _flattened(schema.empty_table(), field).schema
    if field not in columns.names:
        described = [f"{column.name} ({column.type})" for column in columns]
        advice = _COLUMN if _CHATS.isdisjoint(columns.names) else _JOIN
        raise OtherContent(
            f'it has no column "{field}", only {_listed(described)}: {advice}'
        )
    type_ = columns.field(field).type
    value = type_
    if pyarrow.types.is_dictionary(type_):
        value = type_.value_type
    if value in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        return
    if pyarrow.types.is_list(value) or pyarrow.types.is_large_list(value):
        advice = _JOIN
    else:
        advice = f"{_COLUMN}, or write it as a string"
    raise OtherContent(f'column "{field}" is {type_}, expected string: {advice}')


def _flattened(table: Any, field: str) -> Any:
    """Return a table of Arrow with only the column ``field``, or with all columns if
    there is no such column.

    ``x.y`` is the column of this name, or else the field ``y`` of the struct ``x``.
    """
    import pyarrow

    schema = table.schema
    if field in schema.names:
        return table.select([schema.names.index(field)])
    if not any(map(pyarrow.types.is_struct, schema.types)):
        return table
    return _flattened(table.flatten(), field)
