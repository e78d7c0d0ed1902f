"""Parse and format the keys whose values are tables, and compare tables.

Such a value is a table in a TOML file, and one word on the command line::

    [model.overrides]                      --model.overrides hidden_dim=16,n_layers=2
    hidden_dim = 16
    n_layers = 2
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec

from titan_disp.errors import TYPE_NAMES, ConfigError, did_you_mean, fits, reported

OVERRIDES = "model.overrides"
OPTIONS = "dispersion.options"
LOSSES = "dispersion.losses"
# The keys that are tables, each with an example of its word on the command line.
TABLES = {
    OVERRIDES: "hidden_dim=16,n_layers=2",
    OPTIONS: "variance_coeff=1,gamma=2",
}
# A table, a list of "key=value", or "key=value,key=value".
Written = Mapping[str, Any] | Sequence[str] | str


def parse_overrides(written: Written, key: str = OVERRIDES) -> dict[str, Any]:
    """Return the value of a key of ``TABLES`` as a dict.

    Raises:
        ConfigError: an entry cannot be read or is given twice.
    """
    if isinstance(written, Mapping):
        return dict(written)
    pairs = written.split(",") if isinstance(written, str) else written
    table: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = map(str.strip, str(pair).partition("="))
        if name and not equals:
            raise ConfigError(
                f"{key} has {pair!r}, expected key=value, "
                f"as in --{key} {TABLES[key]}, or a table"
            )
        if name in table:
            raise ConfigError(
                f"{key}.{name} is given twice: {table[name]!r} and {value}. "
                "Remove one of them"
            )
        if equals:  # else the pair is empty, after a comma at the end
            table[name] = literal(value)
    return table


def check_table(
    where: str, table: Any, types: Mapping[str, Any], required: str
) -> None:
    """Raise ConfigError unless a table of an array has only known keys, values of their
    types, and the required key.

    Args:
        where: the place of the table in the config, such as "stream.sources[0]".
        table: the table.
        types: the type of each known key.
        required: a key that the table must have.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} is {table!r}, expected a table")
    for name, value in table.items():
        if name not in types:
            raise ConfigError(f"{where}.{name} is not known{did_you_mean(name, types)}")
        if not fits(value, types[name]):
            expected = TYPE_NAMES.get(types[name], "a table")
            raise ConfigError(f"{where}.{name} is {value!r}, expected {expected}")
    if required not in table:
        raise ConfigError(f"{where} has no {required}")


def changes(
    former: Mapping[str, Any], current: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the former and the current value of each key whose values differ.

    The value of a missing key is None.
    """
    return {
        key: (former.get(key), current.get(key))
        for key in {**former, **current}
        if former.get(key) != current.get(key)
    }


def literal(text: str) -> bool | int | float | str:
    """Return the value of a word of the command line: a number, true, false or text."""
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text


def shown(value: Any) -> str:
    """Return a config value as text, as the command line takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def written_out(overrides: Written, key: str = OVERRIDES) -> str:
    """Return the value of a key of ``TABLES`` as one word for the command line."""
    table = parse_overrides(overrides, key)
    return ",".join(f"{name}={shown(value)}" for name, value in table.items())


def _as_one_word(
    parse: Callable[[str], Any],
    metavar: str = "KEY=VALUE,...",
    write: Callable[[Any], str] = written_out,
) -> PrimitiveConstructorSpec:
    # By default, tyro makes one option for each entry of the table in the TOML file,
    # and rejects all other entries. Here, one word on the command line replaces the
    # whole table.
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: isinstance(value, (dict, list, str)),
        str_from_instance=lambda value: [write(value)],
    )


def parse_losses(word: str) -> list[dict[str, Any]]:
    with reported(f"{LOSSES} is {word!r}, which is not JSON", ValueError):
        losses = json.loads(word)
    return losses if isinstance(losses, list) else [losses]


Table = dict[str, Any] | list[str] | str
Overrides = Annotated[Table, _as_one_word(parse_overrides)]
Options = Annotated[Table, _as_one_word(partial(parse_overrides, key=OPTIONS))]
Losses = Annotated[list[dict[str, Any]], _as_one_word(parse_losses, "JSON", json.dumps)]
