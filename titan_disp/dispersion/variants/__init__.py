"""The variants of the loss. ``build_variant`` builds one from its name and options.

The variants in ``paper`` and ``l2_repel`` are from the paper (arXiv 2602.00217, Table
1). The variants in ``others`` are from other papers, for comparison. The name of a
variant outside of this package is its path, "package.module:Class".
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from importlib import import_module
from typing import Any

from titan_disp.dispersion.variants.base import Variant
from titan_disp.dispersion.variants.l2_repel import L2Repel
from titan_disp.dispersion.variants.others import (
    Cosine,
    FeatureDecorrelation,
    KoLeo,
    SimCTG,
    Uniformity,
    VICReg,
)
from titan_disp.dispersion.variants.paper import (
    Angular,
    Decorrelation,
    Orthogonalization,
)
from titan_disp.errors import TYPE_NAMES, did_you_mean, fits

OF_THE_PAPER: tuple[type[Variant], ...] = (
    Angular,
    Decorrelation,
    L2Repel,
    Orthogonalization,
)
OF_OTHERS: tuple[type[Variant], ...] = (
    Cosine,
    FeatureDecorrelation,
    KoLeo,
    SimCTG,
    Uniformity,
    VICReg,
)
VARIANTS = {variant.name: variant for variant in (*OF_THE_PAPER, *OF_OTHERS)}

__all__ = ["OF_OTHERS", "OF_THE_PAPER", "VARIANTS", "Variant"]


def options_of(variant: type[Variant]) -> list[str]:
    """Return the names of a variant's options."""
    return [option.name for option in fields(variant)]


@cache
def users_of(option: str) -> list[str]:
    """Return the names of the variants in ``VARIANTS`` with this option."""
    return [name for name, variant in VARIANTS.items() if option in options_of(variant)]


def find_variant(name: str) -> type[Variant]:
    """Return the class of a variant, given a name in ``VARIANTS`` or a path.

    Raises ValueError if there is no such class, or it is not a variant.
    """
    if name in VARIANTS:
        return VARIANTS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        hint = did_you_mean(name, VARIANTS)
        if "." in name:
            path = ":".join(name.rsplit(".", 1))
            hint = f": write a colon before the class, {path}"
        raise ValueError(
            f"variant is {name!r}, expected one of {', '.join(VARIANTS)}, "
            f"or package.module:Class{hint}"
        )
    try:
        imported = import_module(module)
    except Exception as error:  # whatever the module raises
        raise ValueError(
            f"variant is {name!r}, but {module} cannot be imported "
            f"({type(error).__name__}: {error}): install its package, "
            "or name its folder in the environment, "
            "as in PYTHONPATH=FOLDER titan-disp train CONFIG"
        ) from error
    variant = getattr(imported, attribute, None)
    if variant is None:
        raise ValueError(
            f"variant is {name!r}, but {module} has no "
            f"{attribute}{did_you_mean(attribute, vars(imported))}"
        )
    is_variant = isinstance(variant, type) and issubclass(variant, Variant)
    # ``is_dataclass`` would be true for an undecorated subclass of a dataclass.
    if not (is_variant and "__dataclass_fields__" in vars(variant)):
        raise ValueError(
            f"variant is {name!r}, which is {variant!r}, expected a class that extends "
            "CosineVariant, MomentsVariant or AutogradVariant "
            "and is decorated with @dataclass(frozen=True)"
        )
    return variant


def build_variant(
    name: str,
    keys: Mapping[str, Any],
    defaults: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Variant:
    """Return the variant of this name with its options.

    Args:
        name: as ``find_variant`` takes it.
        keys: the values of the options that are attributes of ``DispersionLoss``. The
            variant gets the values for which it has a field.
        defaults: the defaults of ``keys``.
        options: the values of the variant's other fields.

    Raises:
        ValueError: there is no such variant, or an option is unknown, missing or wrong.
    """
    variant = find_variant(name)
    values = {option: keys[option] for option in options_of(variant) if option in keys}
    for field in fields(variant):
        is_key = field.name in keys
        if is_key and field.default not in (MISSING, defaults[field.name]):
            raise ValueError(
                f"variant {name!r} has the default {field.name} = {field.default}, "
                f"but the key has the default {defaults[field.name]}: "
                "leave the default out, or give the field another name"
            )
    table = {field.name: field for field in fields(variant) if field.name not in keys}
    for option, value in options.items():
        if option not in table:
            hint = did_you_mean(option, table)
            if option in keys:
                hint = f": it has a key of its own, {option}"
            raise ValueError(
                f"options.{option} is not known{hint}; "
                f"expected {', '.join(table) or 'no option'}"
            )
        values[option] = checked(f"options.{option}", value, table[option])
    for field in table.values():
        has_default = not (field.default is field.default_factory is MISSING)
        if field.name not in values and not has_default:
            raise ValueError(
                f"options.{field.name} is not set, "
                f"and variant {name!r} has no default for it: set it"
            )
    try:
        return variant(**values)
    except TypeError as error:  # a method is missing
        raise ValueError(f"variant {name!r} cannot be built: {error}") from error
    except ValueError as error:
        # By convention, the message of a variant begins with the name of the option.
        subject = str(error).split(" ")[0]
        if subject in keys:
            raise
        prefix = "options." if subject in table else f"variant {name!r}: "
        raise ValueError(f"{prefix}{error}") from error


def checked(name: str, value: Any, field: Field[Any]) -> Any:
    """Return the value, converted to the type of its field.

    A value is checked and converted only if the type is in ``TYPE_NAMES``. Raises
    ValueError if the value does not fit; ``name`` is the option's name in the message.
    """
    for type_, expected in TYPE_NAMES.items():
        # A module may have its annotations as text.
        if field.type in (type_, type_.__name__):
            if not fits(value, type_):
                raise ValueError(f"{name} is {value!r}, expected {expected}")
            return type_(value)
    return value
