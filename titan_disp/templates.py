"""Jinja templates, which are in the folder of the module that uses them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape


def templates(module: str, **filters: Callable[..., Any]) -> Environment:
    """Return the templates in the folder of a module, given the module's ``__file__``.

    ``get_template(name).render(…)`` returns a text, and raises an error if a variable is
    missing. In HTML, values are escaped.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(module).parent),
        autoescape=select_autoescape(["html.j2"], default=False),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= filters
    return environment
