"""``model.overrides``: a flavor with other sizes. Knows no model: every dataclass of model arguments will do.

Which fields there are follows from the dataclass: those of type int, float or bool. It may name some that cannot be set, with the
reason, in a class attribute ``not_overridable``.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, get_type_hints

from tyro.constructors import PrimitiveConstructorSpec

from titan_disp.errors import ConfigError

KEY = "model.overrides"
NOT_OVERRIDABLE = {"max_seq_len": "it is training.seq_len"}
_KINDS = {bool: "true or false", int: "a whole number ≥ 1", float: "a number > 0"}


def parse_overrides(written: Mapping[str, Any] | Sequence[str] | str) -> dict[str, Any]:
    """Field → value, as written: a TOML table, a list of "key=value", or "key=value,key=value", as on the command line.

    Raises:
        ConfigError: none of these, or a field that comes twice.
    """
    if isinstance(written, Mapping):
        return dict(written)
    pairs = written.split(",") if isinstance(written, str) else written
    found: dict[str, Any] = {}
    for pair in pairs:
        if not isinstance(pair, str) or not (pair.strip() == "" or "=" in pair):
            raise ConfigError(
                f"{KEY} has {pair!r}, expected key=value, as in --model.overrides hidden_dim=16,n_layers=2, or a table: "
                "[model.overrides]"
            )
        key, _, value = (part.strip() for part in pair.partition("="))
        if key in found:
            raise ConfigError(f"{KEY}.{key} comes twice: {found[key]!r} and {value}")
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
    """A value of a config, for people and for the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def written_out(overrides: Mapping[str, Any] | Sequence[str] | str) -> str:
    """As the command line takes them."""
    return ",".join(f"{key}={shown(value)}" for key, value in parse_overrides(overrides).items())


# In TOML a table; on the command line one word, which replaces the table. tyro by itself would make an option of every key that
# the TOML file has, and know no others.
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
    """The type of every field that can be set."""
    hints = get_type_hints(type(args))
    return {f.name: hints[f.name] for f in dataclasses.fields(args) if hints[f.name] in _KINDS}


def apply_overrides(args: Any, overrides: Mapping[str, Any] | Sequence[str] | str) -> None:
    """Set fields of a model's arguments, in place. Twice is as once.

    Args:
        args: a dataclass. overrides: as ``parse_overrides`` takes them.

    Raises:
        ConfigError: a field that is not known or cannot be set, a value of another type or out of range, heads that do not fit.
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
            close = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(
                f"{KEY}.{key} is not known"
                + (f" (did you mean {close[0]}?)" if close else "")
                + f"; expected {', '.join(known)}"
            )
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
            f"{KEY}: n_heads {heads} is no multiple of n_kv_heads {key_value_heads}, each of which serves as many heads: set both"
        )
    if heads and not head_dim and own.get("dim") and own["dim"] % heads:
        raise ConfigError(
            f"{KEY}: dim {own['dim']} is no multiple of n_heads {heads}, among which it is divided: set both"
        )
    if head_dim and head_dim % 2 and "rope_theta" in own:
        raise ConfigError(f"{KEY}.head_dim is {head_dim}, expected an even number: rotary embeddings turn pairs")


def named(flavor: str, overrides: Mapping[str, Any] | Sequence[str] | str) -> str:
    """A flavor and what is other about it, for people: "nano with hidden_dim = 16"."""
    found = parse_overrides(overrides)
    return flavor + (" with " + ", ".join(f"{key} = {shown(value)}" for key, value in found.items()) if found else "")


def architecture_of(args: Any) -> dict[str, Any]:
    """What decides the network: all plain fields but the length of its sequences, which is training's. JSON-able."""
    return dict(_plain(args))


def _plain(args: Any) -> Iterator[tuple[str, Any]]:
    for f in dataclasses.fields(args):
        value = getattr(args, f.name)
        if isinstance(value, (bool, int, float, str)) and f.name != "max_seq_len":
            yield f.name, value
