"""Numbers, sizes, durations and tables for people."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NOTHING = "–"

# Units from the largest to the smallest. A value is shown in the first unit that it
# reaches.
_LETTERS = {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3}
_BYTES = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}
_SECONDS = {"d": 86400, "h": 3600, "min": 60, "s": 1}
_LONG_SECONDS = {"days": 86400, "hours": 3600, "minutes": 60}


def _scaled(value: float, digits: int, units: Mapping[str, float]) -> str | None:
    """Return a value with its unit, such as "1.5 GB", or None if the value is smaller
    than every unit.

    ``digits`` is the number of significant digits.
    """
    for unit, size in units.items():
        # A value that rounds to 1 of a unit is shown in this unit. For example, with
        # three digits, 999,950 is 1 M.
        least = size * (1 - 0.5 * 10**-digits)
        if abs(value) >= least:
            return f"{value / size:.{digits}g} {unit}"
    return None


def short(value: float, digits: int = 6) -> str:
    """Return a number such as ``1.5 B``, ``20 M``, ``11.23 k`` or ``0.5``.

    B means 1e9, as for tokens.
    """
    return _scaled(value, digits, _LETTERS) or f"{value:.{digits}g}"


def number(value: Any, digits: int = 5) -> str:
    """Return a whole number in full, and any other number with ``digits`` significant
    digits.

    None, NaN and infinities give ``NOTHING``.
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    if float(value).is_integer():
        return f"{value:,.0f}"
    text = f"{value:,.{digits}g}"
    has_exponent = "e+" in text
    if has_exponent:
        return short(value, digits)
    return text


def byte_size(count: float, digits: int = 4) -> str:
    """Return a number of bytes such as ``327.1 GB`` or ``16 bytes``.

    1 GB is 1e9 bytes. ``digits`` is the number of significant digits.
    """
    if count == 1:
        return "1 byte"
    return _scaled(count, digits, _BYTES) or f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units, such as ``2 d 3 h`` or ``12 s``.

    The duration is rounded to whole seconds. Smaller units are left out.
    """
    remaining = round(seconds)
    parts: list[str] = []
    for unit, size in _SECONDS.items():
        count, remaining = divmod(remaining, size)
        is_leading_zero = not count and not parts
        if unit == "s" or not is_leading_zero:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def estimated_duration(seconds: float) -> str:
    """Return an estimated duration in one unit, such as ``3.1 days``, ``22.8 hours``,
    ``34.5 minutes``, ``2.1 s`` or ``0.5 ms``.
    """
    for unit, size in _LONG_SECONDS.items():
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms"


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV. The first row is the header, and None is an empty cell."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def markdown_table(rows: Sequence[Sequence[str]], text_columns: int = 2) -> str:
    """Return rows as a Markdown table that is also readable as plain text.

    The first row is the header. The first ``text_columns`` columns are aligned to the
    left. The others have numbers and are aligned to the right.
    """
    columns = []
    for i, (heading, *cells) in enumerate(zip(*rows, strict=True)):
        width = max(2, len(heading), *map(len, cells))
        if i < text_columns:
            align = str.ljust
            ruler = "-" * width
        else:
            align = str.rjust
            # A ruler needs a dash before its colon
            ruler = "-" * (width - 1) + ":"
        columns.append([align(cell, width) for cell in (heading, ruler, *cells)])
    lines = [" | ".join(row) for row in zip(*columns, strict=True)]
    return "\n".join(f"| {line} |" for line in lines)


_LATEX: dict[str, str | int | None] = {
    **{mark: rf"\{mark}" for mark in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": "$-$",
    "…": r"\ldots{}",
    NOTHING: "--",
    "ρ": r"$\rho$",
    "τ": r"$\tau$",
}


def latex_table(rows: Sequence[Sequence[str]], text_columns: int = 2) -> str:
    """Return rows as a LaTeX tabular, which needs no package. Rows are as for
    ``markdown_table``.
    """
    align = "l" * text_columns + "r" * (len(rows[0]) - text_columns)
    escaped = [
        " & ".join(cell.translate(str.maketrans(_LATEX)) for cell in row)
        for row in rows
    ]
    header, *body = [rf"{line} \\" for line in escaped]
    lines = [r"\hline", header, r"\hline", *body, r"\hline"]
    return "\n".join([rf"\begin{{tabular}}{{{align}}}", *lines, r"\end{tabular}", ""])
