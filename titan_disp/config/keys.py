"""Facts about config keys that their type and help text do not state: what a value must
be, whose the default is, and what it fixes.

``job_config`` declares titan-disp's keys with ``key``. The facts about TorchTitan's keys
are in ``torchtitan_keys.toml``. Checks, pages, the fingerprint of the data and the
identity of the model loop over them. This module imports nothing heavy: ``titan-disp
config`` answers while one types.
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
    """What is known about a key. Without any limit, all values of its type are allowed.

    Attributes:
        source: whose the default is: a key of ``SOURCES``.
        means: one line for pages, in place of TorchTitan's own text.
        least, above, most, below: bounds of a number; ``above`` and ``below`` are not
            allowed themselves.
        noun: what a whole number counts, for the message.
        choices: the allowed values, or the allowed elements of a list.
        pattern: the regular expression of an allowed text; form: what messages call
            such a text.
        besides: values that are allowed in addition, such as -1. A number with bounds is
            infinite only if this is among them.
        when, unless: values of other keys, or elements of lists. The limits hold only
            if all keys of ``when`` and not all of ``unless`` have them.
        needs: values that other keys must have if this key is set and not false. A list
            must contain the value.
        because: the reason for a limit, or what it means. It also follows messages about
            values of another type.
        free: the reason why all values are allowed.
        unused: the reason why no value has an effect, under the conditions of ``when``
            and ``unless``.
        path: whether the value is a path, in which ~ and $VARIABLES are replaced.
        fixes: what another value would change, so that a resume refuses it.
        modules: a folder of the package. The values are the names of the classes in it,
            each written as ``name: ClassVar[str] = "…"``.
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
        """Such as "≥ 0 and < 1", or an empty text."""
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
        """What messages and pages call the allowed values."""
        form = self.form
        if self.range:
            form = f"a number {self.range}"
        if self.noun and self.range == f"≥ {self.least}":
            form = f"{self.least} or more {self.noun}"
        values = (*map(json.dumps, self.choices), *map(written, self.besides))
        return " or ".join(filter(None, [form, *values]))

    @property
    def reason(self) -> str:
        """The sentence for pages why values are limited or not."""
        if self.unused:
            return f"No effect: {self.unused}."
        return self.because or self.free

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError if the value of the key, or an element of it, is not
        allowed.
        """
        for element in value if isinstance(value, list) else [value]:
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


def has(value: Any, part: Any) -> bool:
    """Return whether a value is ``part``, or a list with it."""
    return part in (value if isinstance(value, list) else [value])


def value_of(config: Any, key: str) -> Any:
    """Return the value of a key by its full name, such as "optimizer.lr" or
    "stream.sources.0.path".
    """
    value = config
    for name in key.split("."):
        value = value[int(name)] if isinstance(value, list) else getattr(value, name)
    return value


def set_value(config: Any, key: str, value: Any) -> None:
    """Set a key by its full name."""
    section, _, name = key.rpartition(".")
    setattr(value_of(config, section), name, value)


def written(value: Any) -> str:
    """Return a value as messages show it."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def key(default: Any, source: str = "ours", **facts: Any) -> Any:
    """Return a dataclass field with ``Facts``.

    A default of ``list`` or ``dict`` stands for a new empty one.
    """
    name = "default_factory" if callable(default) else "default"
    parameters: dict[str, Any] = {name: default}
    return field(**parameters, metadata={"facts": Facts(source, **facts)})


def facts_of(field: Field[Any]) -> Facts:
    """Return what a field says, which is nothing if it is TorchTitan's."""
    return field.metadata.get("facts", Facts())


@functools.cache
def torchtitan_facts() -> dict[str, Facts]:
    """Return the facts about TorchTitan's keys by full name, such as "optimizer.lr",
    without the keys that titan-disp declares anew.
    """
    file = Path(__file__).with_name("torchtitan_keys.toml")
    facts: dict[str, Facts] = {}
    for section, keys in tomli.loads(file.read_text(encoding="utf-8")).items():
        for name, stated in keys.items():
            facts[f"{section}.{name}"] = Facts(TORCHTITAN, **stated)
    return facts
