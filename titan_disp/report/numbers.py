"""Numbers as people read them."""

from typing import Any

import numpy as np

NOTHING = "–"


def short(value: float, digits: int = 6) -> str:
    """``1.5 B``, ``20 M``, ``11.23 k``, ``0.5``. B: a thousand millions, in which tokens are counted."""
    for size, letter in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def number(value: Any, digits: int = 5) -> str:
    """Whole numbers in full, others to ``digits``; ``NOTHING`` for None, NaN and infinities."""
    if value is None or not np.isfinite(value):
        return NOTHING
    if float(value).is_integer():
        return f"{value:,.0f}"
    text = f"{value:,.{digits}g}"
    return short(value, digits) if "e+" in text else text
