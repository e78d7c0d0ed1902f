"""Numbers, sizes, durations and tables for people."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

NOTHING = "–"


def short(value: float, digits: int = 6) -> str:
    """Format a number such as ``1.5 B``, ``20 M``, ``11.23 k`` or ``0.5``.

    B means 1e9, as for tokens.
    """
    for size, letter in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        # Three digits round 999,950 to 1 M
        if abs(value) >= size * (1 - 0.5 * 10**-digits):
            return f"{value / size:.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def number(value: Any, digits: int = 5) -> str:
    """Format whole numbers in full and others with ``digits`` digits.

    None, NaN and infinities give ``NOTHING``.
    """
    if value is None or not np.isfinite(value):
        return NOTHING
    if float(value).is_integer():
        return f"{value:,.0f}"
    text = f"{value:,.{digits}g}"
    return short(value, digits) if "e+" in text else text


def byte_size(count: float, digits: int = 4) -> str:
    """Format a number of bytes such as ``327.1 GB`` or ``16 bytes``, with 1 GB = 1e9
    bytes.
    """
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size * (1 - 0.5 * 10**-digits):
            return f"{count / size:.{digits}g} {unit}"
    return "1 byte" if count == 1 else f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    """Format whole seconds in at most two units, such as ``2 d 3 h``, ``3 h 12 min``,
    ``4 min 5 s`` or ``12 s``.
    """
    left = round(seconds)
    parts = list[str]()
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if parts or count or unit == "s":
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def estimated_duration(seconds: float) -> str:
    """Format an estimate in one unit, such as ``3.1 days``, ``22.8 hours``, ``34.5
    minutes``, ``2.1 s`` or ``0.5 ms``.
    """
    for least, size, unit in (
        (2, 86400, "days"),
        (2, 3600, "hours"),
        (2, 60, "minutes"),
        (1, 1, "s"),
    ):
        if seconds >= least * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e3:.1f} ms"


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Format rows, of which the first is the header, as CSV. None is an empty cell."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def markdown_table(rows: Sequence[Sequence[str]], left: int = 2) -> str:
    """Format rows, of which the first is the header, as a table that is also readable
    as plain text.

    The first ``left`` columns are aligned to the left, and the others to the right, for
    numbers.
    """
    columns = []
    for i, cells in enumerate(zip(*rows, strict=True)):
        width = max(2, *map(len, cells))  # a ruler needs a dash before its colon
        if i < left:
            columns.append(
                [
                    cells[0].ljust(width),
                    "-" * width,
                    *(cell.ljust(width) for cell in cells[1:]),
                ]
            )
        else:
            columns.append(
                [
                    cells[0].rjust(width),
                    "-" * (width - 1) + ":",
                    *(cell.rjust(width) for cell in cells[1:]),
                ]
            )
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in zip(*columns, strict=True)
    )
