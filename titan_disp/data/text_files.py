"""In plain text (UTF-8), the whole file is a document, or every block of lines between blank lines is one."""

import codecs
from collections.abc import Iterator
from typing import Any

from titan_disp.data.records import BadDocument, Garbage, too_long

TOO_LONG = 'more than stream.max_document_mb allows: set stream.text_split = "blank_lines", or allow more'


def records(stream: Any, max_bytes: int, split: str) -> Iterator[str | BadDocument]:
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
