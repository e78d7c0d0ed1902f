"""This module reads a TOML config and command-line options into TorchTitan's JobConfig,
with helpful errors.
"""

import contextlib
import dataclasses
import functools
import importlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli
import typeguard
from torchtitan.config import ConfigManager, job_config

from titan_disp.config import reference
from titan_disp.config.keys import Facts, set_value, value_of, written
from titan_disp.config.types import JobConfig
from titan_disp.errors import ConfigError, did_you_mean, reported
from titan_disp.job_config import (
    all_facts,
    check_dashes,
    check_expansion,
    key_hint,
    unknown_option,
)
from titan_disp.tables import literal

ALL_ITEMS = typeguard.CollectionCheckStrategy.ALL_ITEMS
MODULE = "titan_disp.job_config"
# The types that values have before their section converts them.
RAW_TYPES = {"stream.sources": list[dict[str, Any]]}
_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
    "none": None,
}


@functools.cache  # a sweep loads many configs
def _config_class(module: str) -> type[JobConfig]:
    """Return TorchTitan's class with the keys of titan-disp and of a module."""
    merged = job_config.JobConfig
    for name in dict.fromkeys([MODULE, module]):
        with reported(f"job.custom_config_module {name!r} cannot be read", Exception):
            added = importlib.import_module(name).JobConfig
            merged = ConfigManager._merge_configs(merged, added)
    return merged


def _types(section: Any) -> dict[str, Any]:
    """Return the types of a section's keys by their names."""
    return {f.name: f.type for f in dataclasses.fields(section)}


# The most frequent cause of an error of tomli, by the beginning of the error's text.
TOML_HINTS = {
    "Invalid value": "a text needs straight quotes, and a number has no leading zero",
    "Cannot overwrite a value": "a key or a section is defined twice",
    "Cannot declare": "a section is defined twice",
    "Illegal character '\\n'": "a quote is not closed",
    "'utf-8' codec": "the file is no UTF-8 text",
}


def read_toml(path: str) -> dict[str, Any]:
    """Return the content of a TOML file, or raise ConfigError."""
    try:
        # "utf-8-sig" drops the byte-order mark that Windows editors write.
        return tomli.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the config {path!r}: {error.strerror}{_near(path)}"
        ) from error
    except ValueError as error:  # UnicodeDecodeError is one, too
        python = re.search(r"[=\[,]\s*(True|False)\b", getattr(error, "doc", ""))
        hints = [
            hint for text, hint in TOML_HINTS.items() if str(error).startswith(text)
        ]
        if python:
            hints = [f"write {python[1].lower()} in lower case"]
        message = ": ".join([str(error), *hints])
        raise ConfigError(
            f"the config {path!r} is not valid TOML: {message}"
        ) from error


def _near(path: str) -> str:
    """Return a hint at a file whose name is similar to that of a missing file, or an
    empty text.
    """
    if os.path.lexists(path):
        return ""
    files = {file.name: str(file) for file in Path(path).parent.glob("*.toml")}
    return did_you_mean(os.path.basename(path), (), instead=files)


def _fill(section: Any, toml: Mapping[str, Any], prefix: str = "") -> None:
    """Set the keys of a section and of its subsections from a TOML table.

    ``prefix`` is the section's name with a dot, or empty for the whole config.
    """
    types = _types(section)
    for name, value in toml.items():
        key = prefix + name
        if name not in types:
            raise ConfigError(f"unknown key {key}{key_hint(key, names=types)}")
        inner = getattr(section, name)
        if not dataclasses.is_dataclass(inner):
            check_type(key, value, RAW_TYPES.get(key, types[name]))
            if value == [] and key in RAW_TYPES:
                raise ConfigError(f"{key} is empty: write [[{key}]], or leave it out")
            setattr(section, name, _of_type(value, types[name]))
        elif isinstance(value, dict):
            _fill(inner, value, f"{key}.")
        elif isinstance(value, list):
            raise ConfigError(
                f"{key} is a list of tables, expected [{key}], a section in single "
                "brackets"
            )
        else:
            raise ConfigError(f"{key} is {written(value)}, expected [{key}], a section")


def _is_a(value: Any, type_: Any) -> bool:
    """Return whether a value has this type. True and false are not numbers, and whole
    numbers have at most 64 bits.
    """
    if isinstance(value, bool) and "bool" not in str(type_):
        return False
    if isinstance(value, int) and value.bit_length() > 64:
        return False
    with contextlib.suppress(typeguard.TypeCheckError):
        typeguard.check_type(value, type_, collection_check_strategy=ALL_ITEMS)
        return True
    return False


def _of_type(value: Any, type_: Any) -> Any:
    """Return a value, converted to float if that is the type of its key."""
    if type_ is float:
        return float(value)
    return value


def _meanings(words: Sequence[str], type_: Any) -> list[Any]:
    """Return the values of a type that the words of an option can mean, the likeliest
    first. An option without words means true, as in TorchTitan.

    A list is written as in TOML, with commas, or as several words. The items of a list
    may be lists (``a,b c``). A list of one item can also mean the item itself.
    """
    # The items are separated by blanks, commas, brackets and quotes.
    items = re.findall(r"""[^\s,\[\]"']+""", " ".join(words))
    values: list[Any] = [] if words else [True]
    for texts in (words, items):
        if len(texts) == 1:
            (text,) = texts
            values += [_WORDS.get(text.lower(), text), text, literal(text)]
    numbers = list(map(literal, items))
    lists_of_lists = [word.split(",") for word in words]
    values += [items, numbers, lists_of_lists]
    return [value for value in values if _is_a(value, type_)]


def _wrong_type(key: str, value: Any, type_: Any) -> ConfigError:
    """Return the error about a value of the wrong type.

    The error suggests the value that the same word means on the command line, or else a
    choice with a similar name.
    """
    expected = reference.types().get(key, str(type_))
    choices = re.findall(r'"(.+?)"', expected)
    hint = did_you_mean(value, choices)
    word = str(value)
    number = literal(word)
    if type_ is int and isinstance(number, float) and number.is_integer():
        word = str(int(number))
    meanings = _meanings([word], type_)
    # ``_meanings`` would turn a list, or the words of a table, into a list of words.
    if meanings and "table" not in expected and not isinstance(value, list):
        hint = f" (write {written(meanings[0])})"
    ending = "" if hint else all_facts().get(key, Facts()).ending
    return ConfigError(f"{key} is {written(value)}, expected {expected}{hint}{ending}")


def check_type(key: str, value: Any, type_: Any) -> None:
    """Raise ConfigError if the value of a key is not of its type."""
    if not _is_a(value, type_):
        raise _wrong_type(key, value, type_)


def _options(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each option's key, such as "training.steps", and the words that follow the
    option.

    Raises ConfigError for a word before the first option, and for the name of a key
    without dashes.
    """
    options: list[tuple[str, list[str]]] = []
    for word in argv:
        check_dashes(word)
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if word.startswith("--"):
            options.append((name, [value] if equals else []))
        elif name in all_facts() or not options:
            raise ConfigError(
                f"{word!r} is not an option: write --{word}, or put a value with "
                "blanks in quotes"
            )
        else:
            options[-1][1].append(word)
    return options


def _value(key: str, words: list[str], type_: Any) -> Any:
    """Return the value that words of the command line mean for a key.

    The types of tables (tables.py) have parsers of their own.
    """
    text = " ".join(words)
    parsers = getattr(type_, "__metadata__", ())
    if parsers:
        return parsers[0].instance_from_str([text])
    meanings = _meanings(words, type_)
    if not meanings:
        check_expansion(words)
        raise _wrong_type(key, text, type_)
    return _of_type(meanings[0], type_)


def _set(config: JobConfig, option: str, words: list[str]) -> None:
    """Set the key of an option.

    ``--section.no_key`` sets a key to false. An entry of a table
    (``--model.overrides.n_layers 2``) is added to the table.
    """
    path, _, name = option.rpartition(".")
    positive = name.removeprefix("no_")
    section: Any = None
    # An option may name a section or an element of a list that does not exist.
    with contextlib.suppress(AttributeError, IndexError, TypeError, ValueError):
        section = value_of(config, path)
    if isinstance(section, dict):
        section[name] = literal(" ".join(words))
        return
    types = _types(section) if dataclasses.is_dataclass(section) else {}
    if name in types:
        setattr(section, name, _value(option, words, types[name]))
    elif types.get(positive) is bool:
        setattr(section, positive, not _value(option, words, bool))
    else:
        raise unknown_option(option)


def expanded(key: str, path: str) -> str:
    """Return a key's path with ~, ~USER, $NAME and ${NAME} replaced.

    Raises:
        ConfigError: there is no such user or variable.
    """
    full_path = os.path.expanduser(os.path.expandvars(path))
    unknown = re.search(r"^~[^/]*|\$(\w+|\{\w+\})", full_path)
    if unknown:
        raise ConfigError(
            f"{key} is {path!r}, but {unknown[0]} is no user or variable here: set the "
            "variable, or write the path without it (a name that begins with ~: ./~name)"
        )
    return full_path


def expand_paths(config: Any) -> None:
    """Replace ~ and environment variables in the paths of a config."""
    paths = [key for key, facts in all_facts().items() if facts.path]
    paths += [f"stream.sources.{i}.path" for i in range(len(config.stream.sources))]
    for key in paths:
        path = value_of(config, key)
        if path:
            set_value(config, key, expanded(key, path))


def _module_of(toml: Mapping[str, Any]) -> str:
    """Return the job.custom_config_module of a TOML file, or else titan-disp's module."""
    job = toml.get("job")
    key = "job.custom_config_module"
    if not isinstance(job, dict) or not job.get("custom_config_module"):
        return MODULE
    check_type(key, job["custom_config_module"], str)
    return job["custom_config_module"]


def load_config(argv: Sequence[str]) -> JobConfig:
    """Return the config of TorchTitan's command-line arguments, which take precedence
    over the TOML file that they name.

    titan-disp's sections are known even if the TOML file does not set
    ``job.custom_config_module``.

    Raises:
        ConfigError: no such file, invalid TOML, unknown keys, bad options, or values of
            the wrong type.
    """
    options = _options(argv)
    check_expansion(dict(options).get("job.config_file", []))
    texts = {key: " ".join(words) for key, words in options}
    path = expanded("job.config_file", texts.get("job.config_file", ""))
    toml = read_toml(path) if path else {}
    module = texts.get("job.custom_config_module", _module_of(toml))
    config = _config_class(module)()
    _fill(config, toml)
    config.stream.__post_init__()  # turns the tables of RAW_TYPES into sources
    config.job.custom_config_module = module
    for option, words in options:
        _set(config, option, words)
    if config.model.tokenizer_path:
        config.model.hf_assets_path = config.model.tokenizer_path
    expand_paths(config)
    return config
