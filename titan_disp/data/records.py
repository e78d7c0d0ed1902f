"""The readers of files yield these records: documents that are not parsed yet, or a reason why one cannot be used."""

import json
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
