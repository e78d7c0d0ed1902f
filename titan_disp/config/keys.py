"""Metadata of config keys: the range of the value, where the default comes from, and
what the key fixes for the life of a run.

``job_config`` declares titan-disp's keys with ``key``. The metadata of TorchTitan's keys
is in ``torchtitan_keys.toml``. The checks, the pages, the fingerprint of the data and
the identity of the model are computed from this metadata. This module imports nothing
heavy, so that ``titan-disp config`` answers at once.
"""

import functools
import json
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli

from titan_disp.errors import ConfigError, did_you_mean

SOURCES = {
    "paper": "the paper's text",
    "authors": "the authors' released code",
    "ours": "our choice",
    "measured": "our measurement",
    "torchtitan": "TorchTitan",
}
TORCHTITAN = "torchtitan"
INFINITE = (math.inf, -math.inf)
# The attributes of ``Facts`` that are bounds of a number.
BOUNDS = {
    "least": ("≥", operator.ge),
    "above": (">", operator.gt),
    "most": ("≤", operator.le),
    "below": ("<", operator.lt),
}


@dataclass(frozen=True)
class Facts:
    """Metadata of a key. Without limits, all values of the key's type are allowed.

    Attributes:
        source: where the default comes from: a key of ``SOURCES``.
        means: a description for pages, in one line, in place of TorchTitan's.
        least, above, most, below: bounds of a number. The bounds ``above`` and ``below``
            themselves are not allowed.
        noun: what a whole number counts, for the message.
        choices: the allowed values, or the allowed elements of a list.
        pattern: a regular expression that an allowed text matches.
        form: the allowed texts in words, for messages.
        besides: values that are allowed in addition, such as -1. If a number has bounds,
            infinity is allowed only if it is listed here.
        when, unless: values of other keys. The limits apply only if all keys of ``when``
            have these values, and not all keys of ``unless`` do. A key that is a list
            has a value if the list contains it.
        needs: values that other keys must have if this key is set and not false.
        because: the reason for a limit, or what the limit means. Messages about values
            of the wrong type end with this reason, too.
        free: the reason why all values are allowed.
        unused: the reason why no value has an effect, under the conditions of ``when``
            and ``unless``.
        path: whether the value is a path, in which ~ and $VARIABLES are replaced.
        fixes: what another value would change. A resume refuses another value.
        modules: a folder of the package. The allowed values are the names of its
            classes, each written as ``name: ClassVar[str] = "…"``.
        also: the key's names in other programs or versions.
    """

    source: str = "ours"
    means: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    noun: str = ""
    choices: Sequence[Any] = ()
    pattern: str = ""
    form: str = ""
    besides: Sequence[Any] = ()
    when: Mapping[str, Any] = field(default_factory=dict)
    unless: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, Any] = field(default_factory=dict)
    because: str = ""
    free: str = ""
    unused: str = ""
    path: bool = False
    fixes: Literal["data", "model"] | None = None
    modules: str = ""
    also: Sequence[str] = ()

    @functools.cached_property
    def bounds(self) -> dict[str, float]:
        """The bounds that are set, by their names in ``BOUNDS``."""
        return {
            name: bound for name in BOUNDS if (bound := getattr(self, name)) is not None
        }

    @property
    def range(self) -> str:
        """The bounds in words, such as "≥ 0 and < 1", or an empty text."""
        return " and ".join(
            f"{BOUNDS[name][0]} {bound}" for name, bound in self.bounds.items()
        )

    @property
    def limited(self) -> bool:
        """Whether there is a value that ``check`` refuses."""
        return bool(self.bounds or self.choices or self.pattern)

    def allows(self, value: Any) -> bool:
        """Return whether a value, or an element of a list, is allowed by itself."""
        if value is None or value in self.besides:
            return True
        if self.choices:
            return value in self.choices
        if self.pattern:
            return re.fullmatch(self.pattern, value) is not None
        if self.bounds and value in INFINITE:
            return False
        return all(BOUNDS[name][1](value, bound) for name, bound in self.bounds.items())

    @property
    def allowed(self) -> str:
        """The allowed values in words, for messages and pages."""
        form = self.form
        if self.range:
            form = f"a number {self.range}"
        if self.noun and self.range == f"≥ {self.least}":
            form = f"{self.least} or more {self.noun}"
        values = (*map(json.dumps, self.choices), *map(written, self.besides))
        return " or ".join(filter(None, [form, *values]))

    @property
    def reason(self) -> str:
        """Why the values are limited or not, for pages."""
        if self.unused:
            return f"No effect: {self.unused}."
        return self.because or self.free

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError if the value of the key, or an element of a list, is not
        allowed.
        """
        for element in elements(value):
            if not self.allows(element):
                raise ConfigError(
                    f"{name} is {written(value)}, expected {self.allowed}"
                    f"{' that is finite' * (element == math.inf)}"
                    f"{did_you_mean(element, self.choices)}{self.ending}"
                )

    @property
    def ending(self) -> str:
        """The reason at the end of a message, or an empty text."""
        return f": {self.because}" if self.because else ""


def elements(value: Any) -> list[Any]:
    """Return the elements of a list, or [value] for any other value."""
    if isinstance(value, list):
        return value
    return [value]


def has(value: Any, part: Any) -> bool:
    """Return whether a value is ``part``, or a list that contains ``part``."""
    return part in elements(value)


def value_of(config: Any, key: str) -> Any:
    """Return the value of a key by its full name, such as "optimizer.lr" or
    "stream.sources.0.path".
    """
    value = config
    for name in key.split("."):
        if isinstance(value, list):
            value = value[int(name)]
        else:
            value = getattr(value, name)
    return value


def set_value(config: Any, key: str, value: Any) -> None:
    """Set a key by its full name."""
    section, _, name = key.rpartition(".")
    setattr(value_of(config, section), name, value)


def written(value: Any) -> str:
    """Return a value as messages show it."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def key(default: Any, source: str = "ours", **facts: Any) -> Any:
    """Return a dataclass field with ``Facts``.

    A default of ``list`` or ``dict`` stands for a new empty one.
    """
    name = "default_factory" if callable(default) else "default"
    parameters: dict[str, Any] = {name: default}
    return field(**parameters, metadata={"facts": Facts(source, **facts)})


def facts_of(field: Field[Any]) -> Facts:
    """Return the metadata of a field, which is empty if the field is TorchTitan's."""
    return field.metadata.get("facts", Facts())


@functools.cache
def torchtitan_facts() -> dict[str, Facts]:
    """Return the metadata of TorchTitan's keys by their full names, such as
    "optimizer.lr", without the keys that titan-disp declares itself.
    """
    file = Path(__file__).with_name("torchtitan_keys.toml")
    facts: dict[str, Facts] = {}
    for section, keys in tomli.loads(file.read_text(encoding="utf-8")).items():
        for name, stated in keys.items():
            facts[f"{section}.{name}"] = Facts(TORCHTITAN, **stated)
    return facts
