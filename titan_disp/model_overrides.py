"""``model.overrides`` changes the sizes of a flavor. It works for any dataclass of model arguments.

Fields of type int, float and bool can be overridden. The dataclass may exclude some in a class attribute
``not_overridable``, which gives the reason for each.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, get_type_hints

from tyro.constructors import PrimitiveConstructorSpec

from titan_disp.errors import ConfigError, did_you_mean

KEY = "model.overrides"
NOT_OVERRIDABLE = {"max_seq_len": "it is training.seq_len"}
_KINDS = {bool: "true or false", int: "a whole number ≥ 1", float: "a number > 0"}


def parse_overrides(written: Mapping[str, Any] | Sequence[str] | str) -> dict[str, Any]:
    """Return the overrides as a dict of fields and values.

    Args:
        written: a TOML table, a list of "key=value", or "key=value,key=value" as on the command line.

    Raises:
        ConfigError: ``written`` is none of these, or a field is given twice.
    """
    if isinstance(written, Mapping):
        return dict(written)
    pairs = written.split(",") if isinstance(written, str) else written
    found: dict[str, Any] = {}
    for pair in pairs:
        if not isinstance(pair, str) or not (pair.strip() == "" or "=" in pair):
            raise ConfigError(
                f"{KEY} has {pair!r}, expected key=value, as in --model.overrides hidden_dim=16,n_layers=2, or a table "
                "[model.overrides]"
            )
        key, _, value = (part.strip() for part in pair.partition("="))
        if key in found:
            raise ConfigError(f"{KEY}.{key} is given twice: {found[key]!r} and {value}. Remove one of them")
        if key or value:
            found[key] = _literal(value)
    return found


def _literal(text: str) -> bool | int | float | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def shown(value: Any) -> str:
    """Format a config value for people and for the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def written_out(overrides: Mapping[str, Any] | Sequence[str] | str) -> str:
    """Format overrides as the command line takes them."""
    return ",".join(f"{key}={shown(value)}" for key, value in parse_overrides(overrides).items())


# Overrides are a table in TOML, and one word on the command line, which replaces the table. By itself, tyro would make
# an option of every key in the TOML file, and accept no others.
Overrides = Annotated[
    dict[str, Any] | list[str] | str,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="KEY=VALUE,...",
        instance_from_str=lambda words: parse_overrides(words[0]),
        is_instance=lambda value: isinstance(value, (dict, list, str)),
        str_from_instance=lambda value: [written_out(value)],
    ),
]


def _kinds(args: Any) -> dict[str, type]:
    """Return the type of every field that can be set."""
    hints = get_type_hints(type(args))
    return {f.name: hints[f.name] for f in dataclasses.fields(args) if hints[f.name] in _KINDS}


def apply_overrides(args: Any, overrides: Mapping[str, Any] | Sequence[str] | str) -> None:
    """Set fields of a model's arguments in place. A second call changes nothing.

    Args:
        args: a dataclass of model arguments.
        overrides: as in ``parse_overrides``.

    Raises:
        ConfigError: a field is unknown or cannot be set, a value has the wrong type or is out of range, or numbers of
            heads do not fit together.
    """
    found = parse_overrides(overrides)
    if not found:
        return
    kinds, fixed = _kinds(args), NOT_OVERRIDABLE | getattr(args, "not_overridable", {})
    for key, value in found.items():
        if key in fixed:
            raise ConfigError(f"{KEY}.{key} cannot be set: {fixed[key]}. Leave it out")
        if key not in kinds:
            known = [name for name in kinds if name not in fixed]
            raise ConfigError(f"{KEY}.{key} is not known{did_you_mean(key, known)}; expected {', '.join(known)}")
        kind = kinds[key]
        if not _fits(value, kind):
            raise ConfigError(f"{KEY}.{key} is {value!r}, expected {_KINDS[kind]}")
        setattr(args, key, kind(value))
    _check_heads(args)


def _fits(value: Any, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    numbers = (int,) if kind is int else (int, float)
    return isinstance(value, numbers) and value > 0 and math.isfinite(value)


def _check_heads(args: Any) -> None:
    own = {f.name: getattr(args, f.name) for f in dataclasses.fields(args)}
    heads, key_value_heads, head_dim = (own.get(name) for name in ("n_heads", "n_kv_heads", "head_dim"))
    if heads and key_value_heads and heads % key_value_heads:
        raise ConfigError(
            f"{KEY}: n_heads {heads} is not a multiple of n_kv_heads {key_value_heads}: set both so that it is"
        )
    if heads and not head_dim and own.get("dim") and own["dim"] % heads:
        raise ConfigError(f"{KEY}: dim {own['dim']} is not a multiple of n_heads {heads}: set both so that it is")
    if head_dim and head_dim % 2 and "rope_theta" in own:
        raise ConfigError(
            f"{KEY}.head_dim is {head_dim}, expected an even number: rotary embeddings rotate pairs of features"
        )


def named(flavor: str, overrides: Mapping[str, Any] | Sequence[str] | str) -> str:
    """Return a flavor's name with its overrides, for people: "nano with hidden_dim = 16"."""
    found = parse_overrides(overrides)
    return flavor + (" with " + ", ".join(f"{key} = {shown(value)}" for key, value in found.items()) if found else "")


def architecture_of(args: Any) -> dict[str, Any]:
    """Return the fields that define the network, ready for JSON: all plain fields except max_seq_len."""
    return dict(_plain(args))


def _plain(args: Any) -> Iterator[tuple[str, Any]]:
    for f in dataclasses.fields(args):
        value = getattr(args, f.name)
        if isinstance(value, (bool, int, float, str)) and f.name != "max_seq_len":
            yield f.name, value
