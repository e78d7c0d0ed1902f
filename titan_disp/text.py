"""Tables in Markdown that are also readable as plain text."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Format rows, of which the first is the header, as CSV. None is an empty cell."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def markdown_table(rows: Sequence[Sequence[str]], left: int = 2) -> str:
    """The lines of a table, without a line break at the end. All cells of a column have the same width.

    Args:
        rows: all of the same length; the first is the header.
        left: how many columns, from the first on, are aligned to the left. The others are aligned to the right, for numbers.
    """
    columns = []
    for i, cells in enumerate(zip(*rows, strict=True)):
        width = max(2, *map(len, cells))  # a ruler needs a dash before its colon
        if i < left:
            columns.append([cells[0].ljust(width), "-" * width, *(cell.ljust(width) for cell in cells[1:])])
        else:
            columns.append([cells[0].rjust(width), "-" * (width - 1) + ":", *(cell.rjust(width) for cell in cells[1:])])
    return "\n".join("| " + " | ".join(row) + " |" for row in zip(*columns, strict=True))


# This module formats numbers for people.


NOTHING = "–"


def short(value: float, digits: int = 6) -> str:
    """Format a number such as ``1.5 B``, ``20 M``, ``11.23 k`` or ``0.5``. B means 1e9, as for tokens."""
    for size, letter in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def number(value: Any, digits: int = 5) -> str:
    """Format whole numbers in full and others with ``digits`` digits. None, NaN and infinities give ``NOTHING``."""
    if value is None or not np.isfinite(value):
        return NOTHING
    if float(value).is_integer():
        return f"{value:,.0f}"
    text = f"{value:,.{digits}g}"
    return short(value, digits) if "e+" in text else text
