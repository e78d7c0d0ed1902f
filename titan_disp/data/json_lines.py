"""JSON lines hold one document per line. Blank lines are not documents, as for pandas, pyarrow and datasets."""

import codecs
from collections.abc import Iterator
from typing import Any

from titan_disp.data.records import BadDocument, too_long

_DRAIN = 1 << 20


def records(lines: Any, max_bytes: int) -> Iterator[bytes | BadDocument]:
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
