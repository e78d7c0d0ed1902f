"""This module finds options written as in TOML, and keys by other names.

tyro would reject them without a hint, or read them as something else.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, get_args

from titan_disp.errors import ConfigError

_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

# Names that are too far from the keys' own for difflib.
OTHER_NAMES = {
    **dict.fromkeys(("dispersion.lambda", "dispersion.lamda", "dispersion.weight"), "dispersion.coeff"),
    "dispersion.temperature": "dispersion.tau",
}


def check_spelling(argv: Sequence[str], default: Any) -> None:
    """Refuse options that are written as in TOML, and those that have another name.

    Booleans take no value. ``[1, 2]`` is written ``1 2``. A list of strings is written ``a,b``, which TorchTitan splits
    at the commas without further parsing: ``["a","b"]`` would become two strings that contain brackets and quotes.

    Args:
        argv: options such as --dispersion.enabled.
        default: the config's dataclass, whose fields have the types.

    Raises:
        ConfigError: an option is written as in TOML, or has another name. The message has the spelling that works.
    """
    for i, arg in enumerate(argv):
        option, equals, value = arg.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or "." not in key:
            continue
        if key in OTHER_NAMES:
            raise ConfigError(f"unknown key {option} (did you mean --{OTHER_NAMES[key]}?)")
        values = [value] if equals else _up_to_next_option(argv[i + 1 :])
        if right := _boolean(key, values, default) or _list(key, values, default):
            raise ConfigError(f"{' '.join([option, *values])} is not the command-line spelling: expected {right}")


def _up_to_next_option(argv: Sequence[str]) -> list[str]:
    end = next((i for i, arg in enumerate(argv) if arg.startswith("--")), len(argv))
    return list(argv[:end])


def _boolean(key: str, values: list[str], default: Any) -> str | None:
    section, _, name = key.rpartition(".")
    asked = _BOOLEANS.get(values[0].lower()) if len(values) == 1 else None
    if asked is None:
        return None
    if _type(key, default) is bool:
        return f"--{section}.{'' if asked else 'no-'}{name}"
    if name.startswith("no_") and _type(f"{section}.{name.removeprefix('no_')}", default) is bool:
        return f"--{section}.{'no-' if asked else ''}{name.removeprefix('no_')}"
    return None


def _list(key: str, values: list[str], default: Any) -> str | None:
    type_, text = _type(key, default), " ".join(values)
    items = re.findall(r"[^\s,\[\]\"']+", text)
    if not items:
        return None
    if type_ == list[str] and ("[" in text or len(values) > 1):
        return f"--{key} {','.join(items)}"
    if list[int] in (type_, *get_args(type_)) and ("[" in text or "," in text):
        return f"--{key} {' '.join(items)}"
    return None


def _type(key: str, default: Any) -> Any:
    """Return the type of a key, or None if there is no such key."""
    *sections, name = key.split(".")
    for section in sections:
        default = getattr(default, section, None)
    fields = dataclasses.fields(default) if dataclasses.is_dataclass(default) else ()
    return next((field.type for field in fields if field.name == name), None)
