"""This module formats numbers for people."""

from typing import Any

import numpy as np

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
