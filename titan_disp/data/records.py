"""The readers of files yield these records: documents that are not parsed yet, or a reason why one cannot be used."""

import codecs
import json
from collections.abc import Iterator
from typing import Any

import numpy as np


class BadDocument(Exception):
    """One document cannot be used; the message says why."""


class OtherShape(BadDocument):
    """The document is JSON without a text in the text field. If all are so, the config names the wrong field."""


class Garbage(BadDocument):
    """The document is not JSON or not UTF-8. Flipped bytes in a compressed file make many such documents in a row."""


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
    """Return the record in place of a document of ``size`` bytes, which are too many."""
    return BadDocument(f"{size:,} bytes, more than stream.max_document_mb allows")


def text_of(raw: Record, field: str = "text") -> str:
    """Parse a document and return its text.

    Args:
        raw: a JSON line, or the text itself (Parquet, plain text); not token ids.
        field: the field of a JSON line that holds the text, see ``Format``.

    Raises:
        BadDocument: ``raw`` itself if it is one; or the text is empty or holds half a surrogate pair.
        OtherShape: there is no text in the field.
        Garbage: the line is invalid UTF-8 or malformed JSON.
    """
    assert not isinstance(raw, np.ndarray)
    if isinstance(raw, BadDocument):
        raise raw
    text = _field_of(_parse(raw), field) if isinstance(raw, bytes) else raw
    if not text.strip():
        raise BadDocument("empty text")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair, which no tokenizer accepts
        raise BadDocument(f"invalid Unicode: {error.reason} at character {error.start}") from error
    return text


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))  # decoded here, because json takes some bytes for UTF-16 or UTF-32
    except UnicodeDecodeError as error:
        raise Garbage(f"invalid UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        reason = f"malformed JSON: {error}"
        if line.strip()[:1] == b"[":
            reason += f". It looks like the beginning of {_ARRAY}"
        elif line.strip() == b"{":
            reason += (
                f". It looks like JSON over several lines; {_ONE_A_LINE}, as `jq -c . FILE > FILE.jsonl` writes it"
            )
        raise Garbage(reason) from error


_ONE_A_LINE = "expected one document per line"
_ARRAY = f"a JSON array; {_ONE_A_LINE}, as `jq -c '.[]' FILE > FILE.jsonl` writes it"


def _field_of(record: Any, field: str) -> str:
    if isinstance(record, list):
        raise OtherShape(f"it is {_ARRAY}")
    if not isinstance(record, dict):
        raise OtherShape(f'no field "{field}", because it is {_kind(record)}; expected a JSON object')
    value = record.get(field)
    if value is None and "." in field:
        value = record
        for name in field.split("."):
            value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, str):
        return value
    if value is None:
        raise OtherShape(f'no field "{field}", only {_names(record)}; set stream.text_field to the field of the text')
    raise OtherShape(
        f'field "{field}" is {_kind(value)}, expected a text; the fields are {_names(record)}; set stream.text_field to '
        "the field of the text"
    )


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "an array", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _names(record: dict[str, Any]) -> str:
    """Return the names of a document's fields as a text; those of fields in nested objects have dots."""
    names = []
    for name, value in record.items():
        names += [f"{name}.{inner}" for inner in value] if isinstance(value, dict) and value else [name]
    return ", ".join(names[:12]) + (", …" if len(names) > 12 else "") if names else "an empty object"


# JSON lines hold one document per line. Blank lines are not documents, as for pandas, pyarrow and datasets.


_DRAIN = 1 << 20


def json_line_records(lines: Any, max_bytes: int) -> Iterator[bytes | BadDocument]:
    """Yield the lines that are not blank, unparsed.

    Args:
        lines: a binary stream with ``readline``.
        max_bytes: longer lines are bad documents, and are never in memory as a whole.
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


# In plain text (UTF-8), the whole file is a document, or every block of lines between blank lines is one.


TOO_LONG = 'more than stream.max_document_mb allows: set stream.text_split = "blank_lines", or allow more'


def text_records(stream: Any, max_bytes: int, split: str) -> Iterator[str | BadDocument]:
    """Yield the documents of a text file.

    Args:
        stream: a binary stream.
        max_bytes: longer documents are bad, and are never in memory as a whole.
        split: "file" or "blank_lines", see ``Format``.
    """
    return _blocks(stream, max_bytes) if split == "blank_lines" else _whole(stream, max_bytes)


def _whole(stream: Any, max_bytes: int) -> Iterator[str | BadDocument]:
    parts, size = [], 0
    while part := stream.read(min(1 << 20, max_bytes + 1 - size)):
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            yield BadDocument(f"the file has more than {max_bytes:,} bytes, {TOO_LONG}")
            return
    yield _decoded(b"".join(parts).removeprefix(codecs.BOM_UTF8))


def _blocks(stream: Any, max_bytes: int) -> Iterator[str | BadDocument]:
    """Yield the blocks between blank lines (only white space), without the line break at the end (\\n or \\r\\n)."""
    block: list[bytes] = []
    size, at_line_start = 0, True
    first = True
    while piece := stream.readline(max_bytes + 1):  # a longer line comes in pieces
        if first:
            piece, first = piece.removeprefix(codecs.BOM_UTF8), False
        blank = at_line_start and not piece.strip()
        at_line_start = piece.endswith(b"\n")
        if not blank:
            size += len(piece)
            if size <= max_bytes:
                block.append(piece)
            else:
                block.clear()
        elif size:
            yield _end_block(block, size, max_bytes)
            block, size = [], 0
    if size:
        yield _end_block(block, size, max_bytes)


def _end_block(block: list[bytes], size: int, max_bytes: int) -> str | BadDocument:
    return _decoded(b"".join(block).rstrip(b"\r\n")) if size <= max_bytes else too_long(size)


def _decoded(text: bytes) -> str | BadDocument:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return Garbage(f"invalid UTF-8: {error.reason} at byte {error.start}")
