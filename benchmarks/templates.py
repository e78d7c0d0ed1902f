"""Render a page from a template beside this file.

Prose is written there by hand, and numbers are computed.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titan_disp.templates import templates

FOLDER = Path(__file__).parent


class Refused(Exception):
    """The results are not complete, or contradict the template's prose."""


def render(name: str, context: Mapping[str, Any], **filters: Callable[..., str]) -> str:
    """Return the text of a template.

    Its places can name what is in ``context``, and use filters.

    ``value | number("+.3f")`` formats a number. ``words | holds(condition, …)`` marks
    words that are only true under these conditions.

    Raises:
        Refused: Such a condition is false.
    """
    wrong = []

    def holds(words: str, *conditions: object) -> str:
        if not all(conditions):
            wrong.append(f'"{words}"')
        return words

    pages = templates(__file__, **filters, holds=holds, number=format)
    text = pages.get_template(name).render(context)
    if wrong:
        said = f"the results do not say what benchmarks/{name} says; rewrite these sentences there:"
        raise Refused("\n  ".join([said, *wrong]))
    return text
