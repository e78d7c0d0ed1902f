"""This module reads a TOML config and command-line options through TorchTitan's
ConfigManager, with helpful errors.
"""

import contextlib
import dataclasses
import functools
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile, zip_longest
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import tomli
import typeguard
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import logger

from titan_disp.config.keys import facts_of, set_value
from titan_disp.config.types import JobConfig
from titan_disp.errors import TYPE_NAMES, ConfigError, did_you_mean, fits, reported
from titan_disp.job_config import all_facts
from titan_disp.tables import TABLES, parse_overrides, written_out

_TYPE_NAMES = TYPE_NAMES | {type(None): "nothing"}
MODULE = "titan_disp.job_config"
_BOOLEANS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def respelled(
    argv: Sequence[str], default: Any, tables: Mapping[str, Any]
) -> list[str]:
    """Return the options as tyro takes them, where they are written as in TOML.

    Booleans take no value there. ``[1, 2]`` is written ``1 2``. A list of strings is
    written ``a,b``, which TorchTitan splits at the commas without further parsing. An
    entry of a table (``--model.overrides.n_layers 2``) is added to those of ``tables``,
    by key. ``default`` is a config, which has the types.

    Raises:
        ConfigError: A key has another name.
    """
    known = {name: field for name, field, _ in _keys(default)}
    types = {name: field.type for name, field in known.items()}
    others = {
        f"{name.rpartition('.')[0]}.{other}": name
        for name, f in known.items()
        for other in facts_of(f).also
    }
    found: list[str] = []
    entries: dict[str, dict[str, Any]] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or "." not in key:
            found.append(word)
            continue
        if key in others:
            raise ConfigError(f"unknown key {option} (did you mean --{others[key]}?)")
        values = (
            [value]
            if equals
            else list(takewhile(lambda word: not word.startswith("--"), words))
        )
        table, _, entry = key.rpartition(".")
        if key in TABLES and len(values) == 1:
            entries[key] = parse_overrides(values[0], key)
        elif table in TABLES and len(values) == 1:
            own = entries.setdefault(
                table, parse_overrides(tables.get(table, {}), table)
            )
            own |= parse_overrides(f"{entry}={values[0]}", table)
        elif (
            right := _boolean(key, values, types) or _list(key, values, types)
        ) is None:
            found.append(word)
            continue
        else:
            found += right.split(" ")
        if not equals:
            words = words[len(values) :]
    return found + [
        part
        for key, own in entries.items()
        for part in (f"--{key}", written_out(own, key))
    ]


def _boolean(key: str, values: list[str], types: Mapping[str, Any]) -> str | None:
    section, _, name = key.rpartition(".")
    asked = _BOOLEANS.get(values[0].lower()) if len(values) == 1 else None
    if asked is None:
        return None
    if types.get(key) is bool:
        return f"--{section}.{'' if asked else 'no-'}{name}"
    if (
        name.startswith("no_")
        and types.get(f"{section}.{name.removeprefix('no_')}") is bool
    ):
        return f"--{section}.{'no-' if asked else ''}{name.removeprefix('no_')}"
    return None


def _list(key: str, values: list[str], types: Mapping[str, Any]) -> str | None:
    type_ = types.get(key)
    text = " ".join(values)
    items = re.findall(r"[^\s,\[\]\"']+", text)
    if not items:
        return None
    if type_ == list[str] and ("[" in text or len(values) > 1):
        return f"--{key} {','.join(items)}"
    if list[int] in (type_, *get_args(type_)) and ("[" in text or "," in text):
        return f"--{key} {' '.join(items)}"
    return None


def _keys(
    config: Any, prefix: str = ""
) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Yield the full name, the field and the value of every key."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from _keys(value, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", f, value


def _option(argv: Sequence[str], name: str) -> str | None:
    """Return the value of ``--name value`` or ``--name=value``.

    Hyphens and underscores are the same, as in tyro.
    """
    for word, after in zip_longest(argv, argv[1:]):
        key, equals, value = word.partition("=")
        if key.replace("-", "_") == f"__{name}":
            return value if equals else after
    return None


def read_toml(path: str) -> dict[str, Any]:
    """Return the content of a TOML file, or raise ConfigError."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the config {path!r}: {error.strerror}{_near(path)}"
        ) from error
    try:
        return tomli.loads(content.decode())
    except ValueError as error:  # UnicodeDecodeError is one, too
        raise ConfigError(
            f"the config {path!r} is not valid TOML: {error}{_lower_case(content, error)}"
        ) from error


def _lower_case(content: bytes, error: ValueError) -> str:
    """Return a hint if the error of TOML is at Python's True or False, or ""."""
    place = re.search(r"at line (\d+), column (\d+)", str(error))
    if place is None:
        return ""
    line = content.decode().split("\n")[int(place[1]) - 1]
    word = re.match(r"(True|False)\b", line[int(place[2]) - 1 :])
    return f": write {word[0].lower()} in lower case" if word else ""


def _near(path: str) -> str:
    folder, name = os.path.split(path)
    with contextlib.suppress(OSError):
        if not os.path.lexists(path):
            files = [
                other for other in os.listdir(folder or ".") if other.endswith(".toml")
            ]
            return did_you_mean(name, files, prefix=os.path.join(folder, ""))
    return ""


def _unknown_keys(
    toml: dict[str, Any], default: Any, prefix: str = ""
) -> Iterator[str]:
    known = dataclasses.fields(default)
    names = [f.name for f in known]
    others = {other: f.name for f in known for other in facts_of(f).also}
    for key, value in toml.items():
        if key not in names:
            yield f"{prefix}{key}{did_you_mean(key, names, prefix=prefix, instead=others)}"
        elif dataclasses.is_dataclass(getattr(default, key)):
            if isinstance(value, dict):
                yield from _unknown_keys(
                    value, getattr(default, key), f"{prefix}{key}."
                )
            else:
                yield f"{prefix}{key} (this is a section: write [{prefix}{key}])"


def _fits(word: Any, kind: Any) -> bool:
    """Return whether the word, without quotes in TOML, would be a value of this
    type.
    """
    with contextlib.suppress(tomli.TOMLDecodeError, typeguard.TypeCheckError):
        typeguard.check_type(tomli.loads(f"value = {word}")["value"], kind)
        return isinstance(word, str)
    return False


def _check_types(config: Any) -> None:
    for name, f, value in _keys(config):
        try:
            typeguard.check_type(value, f.type)
        except typeguard.TypeCheckError as error:
            either = (
                get_args(f.type)
                if get_origin(f.type) in (Union, UnionType)
                else (f.type,)
            )
            wanted = " or ".join(_TYPE_NAMES.get(kind, str(kind)) for kind in either)
            cure = (
                f" (without quotes: {name.rpartition('.')[2]} = {value})"
                if _fits(value, f.type)
                else ""
            )
            raise ConfigError(
                f"{name} is {value!r}, expected {wanted}{cure}"
            ) from error
        # typeguard takes true and false for numbers
        if f.type in TYPE_NAMES and not fits(value, f.type):
            raise ConfigError(f"{name} is {value!r}, expected {TYPE_NAMES[f.type]}")


def expanded(key: str, path: str) -> str:
    """Return the path of a key in which ~, ~USER, $NAME and ${NAME} are replaced.

    Raises:
        ConfigError: there is no such user or variable.
    """
    whole = os.path.expanduser(os.path.expandvars(path))
    unset = re.search(r"\$(\w+|\{\w+\})", whole)
    if unset:
        raise ConfigError(
            f"{key} is {path!r}, but the environment has no variable "
            f"{unset[1].strip('{}')}: set it, or write the path without it"
        )
    if whole.startswith("~"):
        raise ConfigError(
            f"{key} is {path!r}, but there is no such user: a name that begins with ~ "
            f"is written ./{whole}"
        )
    return whole


def expand_paths(config: Any) -> None:
    """Replace ~ and variables in the paths of a config."""
    facts = all_facts()
    for key, _, value in _keys(config):
        if key in facts and facts[key].path and value:
            set_value(config, key, expanded(key, value))
    stream = getattr(config, "stream", None)
    for i, source in enumerate(stream.sources if stream is not None else ()):
        if source.path:
            source.path = expanded(f"stream.sources[{i}].path", source.path)


def _is_wanted(record: logging.LogRecord) -> bool:
    # TorchTitan warns of a tokenizer's folder, mostly its own default. Commands that
    # need one say what to do.
    return not record.getMessage().startswith("HF assets path ")


def _in_one_line(box: str) -> str:
    """Return tyro's message without its title, its frame, and the hint at --help."""
    _, _, lines = box.partition("\n")
    return " ".join(re.sub(r"[╰╯│─]|For full helptext.*", " ", lines).split())


def _parse(argv: list[str]) -> JobConfig:
    logger.addFilter(_is_wanted)
    box = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(box):
            # tyro warns about types that _check_types refuses
            warnings.simplefilter("ignore", UserWarning)
            config = ConfigManager().parse_args(argv)
    except SystemExit as exit:
        if exit.code == 0:  # --help
            raise
        raise ConfigError(f"bad option: {_in_one_line(box.getvalue())}") from exit
    finally:
        logger.removeFilter(_is_wanted)
    sys.stderr.write(box.getvalue())  # warnings
    return config


@functools.cache  # a sweep loads many configs
def _known(module: str) -> JobConfig:
    """Return a config of which only the keys and their types are used."""
    return _parse(["--job.custom_config_module", module])


def load_config(argv: Sequence[str]) -> JobConfig:
    """Return the config of TorchTitan's arguments: the command line takes precedence
    over the TOML file.

    titan-disp's sections are known whether or not the TOML file sets
    ``job.custom_config_module``.

    Raises:
        ConfigError: no such file, invalid TOML, unknown keys, bad options, or values of
            the wrong type.
    """
    argv = list(argv)
    path = _option(argv, "job.config_file")
    toml: dict[str, Any] = {}
    if path:
        path = expanded("job.config_file", path)
        toml = read_toml(path)
        # TorchTitan reads the file that is named first.
        argv = ["--job.config_file", path, *argv]
    if not _option(
        argv, "job.custom_config_module"
    ) and "custom_config_module" not in toml.get("job", {}):
        argv += ["--job.custom_config_module", MODULE]
    module = (
        _option(argv, "job.custom_config_module") or toml["job"]["custom_config_module"]
    )
    with reported(f"job.custom_config_module {module!r} cannot be read", Exception):
        known = _known(module)
    if unknown := list(_unknown_keys(toml, known)):
        raise ConfigError(f"unknown key in {path!r}: {', '.join(unknown)}")
    if toml.get("stream", {}).get("sources") == []:
        raise ConfigError(
            "stream.sources is empty: name at least one source, [[stream.sources]], "
            "or leave it out"
        )
    tables = {
        key: toml.get(section, {}).get(name, {})
        for key in TABLES
        for section, name in [key.split(".")]
    }
    with reported("bad value in the config", ValueError, AssertionError):
        config = _parse(respelled(argv, known, tables))
    _check_types(config)
    expand_paths(config)
    return config
