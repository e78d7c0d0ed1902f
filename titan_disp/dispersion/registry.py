"""A variant is found by its name: one of ours, one that another package offers, or
"package.module:Class".

A package offers a variant as an entry point of the group ``titan_disp.losses``, whose
value is "package.module:Class".
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from titan_disp.dispersion.variants import VARIANTS, Variant
from titan_disp.errors import did_you_mean, fits

GROUP = "titan_disp.losses"
# The types of options that are checked, by their names, because a module may have its
# annotations as text.
KINDS: dict[str, tuple[type, str]] = {
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "a text"),
}


def options_of(variant: type[Variant]) -> list[str]:
    """Return the names of the options that a variant uses."""
    return [field.name for field in fields(variant)]


def find_variant(name: str) -> type[Variant]:
    """Return the class of a variant, or raise ValueError."""
    if name in VARIANTS:
        return VARIANTS[name]
    offered: dict[str, set[str]] = {}
    for point in entry_points(group=GROUP):
        offered.setdefault(point.name, set()).add(point.value)
    paths = sorted(offered.get(name, {name}))
    if len(paths) > 1:
        raise ValueError(
            f"variant is {name!r}, which several packages offer: write one of {', '.join(paths)}"
        )
    module, colon, attribute = paths[0].partition(":")
    if not colon:
        known = [*VARIANTS, *sorted(offered)]
        dotted = (
            f": write a colon before the class, {':'.join(name.rsplit('.', 1))}"
            if "." in name
            else ""
        )
        raise ValueError(
            f"variant is {name!r}, expected one of {', '.join(known)}, or package.module:Class"
            f"{dotted or did_you_mean(name, known)}"
        )
    try:
        imported = import_module(module)
    except Exception as error:  # whatever the module raises
        raise ValueError(
            f"variant is {name!r}, but {module} cannot be imported ({type(error).__name__}: {error}): install its package, "
            "or name its folder in the environment, as in PYTHONPATH=FOLDER titan-disp train CONFIG"
        ) from error
    kind = getattr(imported, attribute, None)
    if kind is None:
        raise ValueError(
            f"variant is {name!r}, but {module} has no {attribute}{did_you_mean(attribute, vars(imported))}"
        )
    if not (
        isinstance(kind, type)
        and issubclass(kind, Variant)
        and "__dataclass_fields__" in vars(kind)
    ):
        raise ValueError(
            f"variant is {name!r}, which is {kind!r}, expected a class that extends CosineVariant, MomentsVariant or "
            "AutogradVariant and is decorated with @dataclass(frozen=True)"
        )
    return kind


def build(
    name: str, keys: Mapping[str, tuple[Any, Any]], options: Mapping[str, Any]
) -> Variant:
    """Return the variant of this name, or raise ValueError.

    ``keys`` are options that are attributes of ``DispersionLoss``, each with its value
    and default. A variant that has a field of this name takes the value. The other
    fields are set by ``options``.
    """
    kind = find_variant(name)
    values = {option: keys[option][0] for option in options_of(kind) if option in keys}
    own = {field.name: field for field in fields(kind) if field.name not in keys}
    for field in fields(kind):
        if field.name in values and field.default not in (
            MISSING,
            default := keys[field.name][1],
        ):
            raise ValueError(
                f"variant {name!r} has the default {field.name} = {field.default}, but that of the key is {default}: "
                "leave the default out, or give the field another name"
            )
    for option, value in options.items():
        if option not in own:
            hint = (
                f": it has a key of its own, {option}"
                if option in keys
                else did_you_mean(option, own)
            )
            raise ValueError(
                f"options.{option} is not known{hint}; expected {', '.join(own) or 'no option'}"
            )
        values[option] = checked(f"options.{option}", value, own[option])
    for field in own.values():
        if (
            field.name not in values
            and field.default is field.default_factory is MISSING
        ):
            raise ValueError(
                f"options.{field.name} is not set, and variant {name!r} has no default of it: set it"
            )
    try:
        return kind(**values)
    except TypeError as error:  # a method is missing
        raise ValueError(f"variant {name!r} cannot be built: {error}") from error
    except ValueError as error:
        first = str(error).split(" ")[0]
        prefix = (
            "options."
            if first in own
            else ""
            if first in keys
            else f"variant {name!r}: "
        )
        raise ValueError(f"{prefix}{error}") from error


def checked(name: str, value: Any, field: Field[Any]) -> Any:
    """Return a value in the type of its field, if this is one of ``KINDS``, or raise
    ValueError.
    """
    kind = KINDS.get(
        field.type
        if isinstance(field.type, str)
        else getattr(field.type, "__name__", "")
    )
    if kind is None:
        return value
    if not fits(value, kind[0]):
        raise ValueError(f"{name} is {value!r}, expected {kind[1]}")
    return kind[0](value)
