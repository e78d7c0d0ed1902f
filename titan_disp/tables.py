"""Parse and format the keys whose values are tables, and compare tables.

A TOML file writes such a value as a table, and the command line as one word::

    [model.overrides]                      --model.overrides hidden_dim=16,n_layers=2
    hidden_dim = 16
    n_layers = 2
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec

from titan_disp.errors import ConfigError

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


def _as_one_word(key: str) -> PrimitiveConstructorSpec:
    # By default, tyro makes one option for each entry of the table in the TOML file,
    # and rejects all others. Here, one word on the command line replaces the whole
    # table.
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="KEY=VALUE,...",
        instance_from_str=lambda words: parse_overrides(words[0], key),
        is_instance=lambda value: isinstance(value, (dict, list, str)),
        str_from_instance=lambda value: [written_out(value, key)],
    )


Overrides = Annotated[dict[str, Any] | list[str] | str, _as_one_word(OVERRIDES)]
Options = Annotated[dict[str, Any] | list[str] | str, _as_one_word(OPTIONS)]
Losses = Annotated[
    list[dict[str, Any]],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda words: _parse_losses(words[0]),
        is_instance=lambda value: isinstance(value, list),
        str_from_instance=lambda value: [json.dumps(value)],
    ),
]


def _parse_losses(word: str) -> list[dict[str, Any]]:
    try:
        losses = json.loads(word)
    except ValueError as error:
        raise ConfigError(
            f"{LOSSES} is {word!r}, which is not JSON ({error}): "
            'write \'[{"variant": "cosine"}]\''
        ) from error
    return losses if isinstance(losses, list) else [losses]


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
        if not isinstance(pair, str) or (pair.strip() and "=" not in pair):
            raise ConfigError(
                f"{key} has {pair!r}, expected key=value, "
                f"as in --{key} {TABLES[key]}, or a table"
            )
        name, _, value = (part.strip() for part in pair.partition("="))
        if name in table:
            raise ConfigError(
                f"{key}.{name} is given twice: {table[name]!r} and {value}. "
                "Remove one of them"
            )
        if name or value:  # else a comma at the end
            table[name] = literal(value)
    return table


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
