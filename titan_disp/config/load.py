"""This module reads a TOML config and command-line options through TorchTitan's
ConfigManager, with helpful errors.
"""

import contextlib
import dataclasses
import functools
import io
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli
import typeguard
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import logger

from titan_disp.config.keys import Facts, set_value, similar, written
from titan_disp.config.types import JobConfig
from titan_disp.errors import TYPE_NAMES, ConfigError, did_you_mean, reported
from titan_disp.job_config import all_facts, key_hint, unknown_option
from titan_disp.tables import (
    TABLES,
    Losses,
    Overrides,
    literal,
    parse_overrides,
    written_out,
)

_TYPE_NAMES: dict[Any, str] = {
    **TYPE_NAMES,
    list[str]: "a list of strings",
    list[int]: "a list of whole numbers ([1, 2])",
    Overrides: "a table",
    Losses: "tables",
}
UNIONS = (Union, UnionType)
ALL_ITEMS = typeguard.CollectionCheckStrategy.ALL_ITEMS
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
# TorchTitan's own checks of two keys do not name them. The facts about the keys do.
_STOCK = ConfigManager().config
for _section in (_STOCK.parallelism, _STOCK.validation):
    setattr(type(_section), "__post_init__", lambda self: None)  # noqa: B010


def _options(argv: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return the key of each option, such as "training.steps", and the words up to the
    next option.
    """
    options: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            options.append((name.replace("-", "_"), [value] if equals else []))
        elif options:
            _, words = options[-1]
            words.append(word)
        else:
            raise _misplaced(word)
    return options


def _misplaced(word: str) -> ConfigError:
    """Return the error about a word that is neither an option nor the value of one."""
    hint = f"write --{word}" if "=" in word else "put values with blanks in quotes"
    return ConfigError(f"{word!r} is not an option: {hint}")


def respelled(
    argv: Sequence[str], default: Any, tables: Mapping[str, Any]
) -> list[str]:
    """Return the options as tyro takes them, where they are written as in TOML.

    Booleans take no value there. ``[1, 2]`` is written ``1 2``. A list of strings is
    written ``a,b``, which TorchTitan splits at the commas without further parsing. An
    entry of a table (``--model.overrides.n_layers 2``) is added to those of ``tables``,
    by key. ``default`` is a config, which has the types.

    Raises:
        ConfigError: A word is not an option, a key is not known, or a value is missing
            or not of its key's type.
    """
    if not {"-h", "--help"}.isdisjoint(argv):
        return list(argv)
    types = {key: field.type for key, field, _ in _keys(default)}
    respelled_words: list[str] = []
    entries: dict[str, dict[str, Any]] = {}
    for key, words in _options(argv):
        table, _, entry = key.rpartition(".")
        if table in TABLES and words:
            content = entries.setdefault(
                table, parse_overrides(tables.get(table, {}), table)
            )
            content |= parse_overrides(f"{entry}={' '.join(words)}", table)
        elif key in TABLES and words:
            entries[key] = parse_overrides(" ".join(words), key)
        else:
            respelled_words += _respelled(key, words, types)
    for key, content in entries.items():
        respelled_words += [f"--{key}", written_out(content, key)]
    return respelled_words


def _respelled(key: str, words: list[str], types: Mapping[str, Any]) -> list[str]:
    """Return an option for tyro. ``types``: those of all keys."""
    section, _, name = key.rpartition(".")
    positive = f"{section}.{name.removeprefix('no_')}"
    if types.get(positive) is bool:
        is_on = _is_on(positive, words) == (positive == key)
        return [f"--{section}.{'' if is_on else 'no-'}{name.removeprefix('no_')}"]
    if any(key.startswith(f"{known}.") for known in types):
        return [f"--{key}", *words]  # of a list, such as stream.sources.0.path
    if key not in types:
        raise unknown_option(f"--{key}", types)
    if not words:
        raise ConfigError(f"--{key} has no value, expected {_name_of(types[key])}")
    items = re.findall(r"[^\s,\[\]\"']+", " ".join(words)) or words
    if types[key] == list[str]:
        return [f"--{key}", ",".join(items)]
    if list[int] in get_args(types[key]):
        _check_words(key, items, types[key])
        return [f"--{key}", *items]
    for word in words[1:]:
        raise _misplaced(word)
    _check_words(key, words, types[key])
    return [f"--{key}={words[0]}"]


def _is_on(key: str, words: list[str]) -> bool:
    for word in words:
        if word.lower() not in _BOOLEANS:
            raise _misplaced(word) if "=" in word else _wrong_type(key, word, bool)
    return all(_BOOLEANS[word.lower()] for word in words)


def _check_words(key: str, words: list[str], type_: Any) -> None:
    """Check that tyro can read words as a value of a type with a name."""
    if get_origin(type_) not in (None, Literal, *UNIONS):
        return
    word = " ".join(words)
    values: list[Any] = [word, literal(word), [literal(item) for item in words]]
    if word == "None":
        values.append(None)
    if not any(_is_a(value, type_) for value in values):
        raise _wrong_type(key, word, type_)


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
    toml: dict[str, Any], default: Any, keys: Collection[str], prefix: str = ""
) -> Iterator[str]:
    """Yield the keys of a TOML file that do not exist, each with a hint. ``keys``: all
    that exist.
    """
    names = [f.name for f in dataclasses.fields(default)]
    for name, value in toml.items():
        key = prefix + name
        if name not in names and isinstance(value, dict):
            otherwise = " (see titan-disp config)"
            yield key + did_you_mean(name, names, otherwise, prefix=prefix)
        elif name not in names:
            yield key + key_hint(key, keys)
        elif dataclasses.is_dataclass(getattr(default, name)):
            if isinstance(value, dict):
                section = getattr(default, name)
                yield from _unknown_keys(value, section, keys, f"{key}.")
            else:
                yield f"{key} (this is a section: write [{key}])"


def _is_a(value: Any, type_: Any) -> bool:
    """Return whether a value is of this type. True and false are not numbers."""
    members = (type_, *get_args(type_))
    if isinstance(value, bool) and bool not in members:
        return not {int, float}.intersection(members)
    with contextlib.suppress(typeguard.TypeCheckError):
        typeguard.check_type(value, type_, collection_check_strategy=ALL_ITEMS)
        return True
    return False


def _name_of(type_: Any) -> str:
    """Return what messages call the values of a type."""
    members = get_args(type_)
    if get_origin(type_) is Literal:
        return ", ".join(map(json.dumps, members))
    if get_origin(type_) in UNIONS:
        hidden = {NoneType, int} if float in members else {NoneType}
        return " or ".join(_name_of(m) for m in members if m not in hidden)
    return _TYPE_NAMES.get(type_, str(type_))


def _wrong_type(key: str, value: Any, type_: Any) -> ConfigError:
    """Return the error about a value of another type than its key's."""
    facts = all_facts().get(key, Facts())
    reason = f": {facts.because}" if facts.bounds and facts.because else ""
    choices = get_args(type_) if get_origin(type_) is Literal else ()
    return ConfigError(
        f"{key} is {written(value)}, expected {_name_of(type_)}"
        f"{_respelling(key, value, type_)}{similar(value, choices)}{reason}"
    )


def _respelling(key: str, value: Any, type_: Any) -> str:
    """Return a hint at how TOML writes a value so that it has this type, or ""."""
    spellings: dict[str, Any] = {"in brackets": [value]}
    if isinstance(value, str):
        spellings["without quotes"] = literal(value)
    elif isinstance(value, (int, float)) and get_origin(type_) is not Annotated:
        spellings["with quotes"] = str(value)
    _, _, name = key.rpartition(".")
    for how, spelling in spellings.items():
        if _is_a(spelling, type_):
            return f" ({how}: {name} = {json.dumps(spelling)})"
    return ""


def _check_types(config: Any) -> None:
    for key, field, value in _keys(config):
        if not _is_a(value, field.type):
            raise _wrong_type(key, value, field.type)


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
    """Return tyro's message without its title, its frame, and its hints at help."""
    _, _, lines = box.partition("\n")
    message = re.sub(r"[╰╯│─]|-{3,}|(Argument|For full) helptext[\s\S]*", " ", lines)
    return " ".join(message.split())


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
    keys = [key for key, _, _ in _keys(known)]
    if unknown := list(_unknown_keys(toml, known, keys)):
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
    with reported("bad value in the config", ValueError):
        config = _parse(respelled(argv, known, tables))
    _check_types(config)
    expand_paths(config)
    return config
