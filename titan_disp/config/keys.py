"""Say what the type and the help text of a key do not: whose its default is, its range,
and what it fixes.

``job_config`` declares every key with ``key``. Checks, pages, the fingerprint of the
data and the identity of the model loop over these fields. This module imports nothing
heavy: ``titan-disp config`` answers while one types.
"""

import math
from dataclasses import Field, dataclass, field
from typing import Any, Literal

from titan_disp.errors import ConfigError

SOURCES = {
    "paper": "the paper's text",
    "authors": "the authors' released code",
    "ours": "our choice",
    "measured": "our measurement",
}


@dataclass(frozen=True)
class Facts:
    """Describe a key.

    Attributes:
        source: whose the default is: a key of ``SOURCES``.
        least, above, most, below: bounds of a number; ``above`` and ``below`` are not
            allowed themselves.
        finite: whether a number with bounds may not be infinite.
        noun: what a whole number counts, for the message; because: the reason for a
            bound, or what the bound means.
        fixes: what another value would change, so that a resume refuses it.
        modules: a folder of the package. The values are the names of the classes in it,
            each written as ``name: ClassVar[str] = "…"``.
        also: names that users may try and that are not similar to the key's.
    """

    source: str = "ours"
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    finite: bool = True
    noun: str = ""
    because: str = ""
    fixes: Literal["data", "model"] | None = None
    modules: str = ""
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.source not in SOURCES or self.fixes not in (None, "data", "model"):
            raise ValueError(f"unknown source {self.source!r} or fixes {self.fixes!r}")

    @property
    def range(self) -> str:
        """Such as "≥ 0" or "in [0, 1)", or an empty text."""
        low = self.least if self.above is None else self.above
        high = self.most if self.below is None else self.below
        if low is not None and high is not None:
            return f"in {'[' if self.above is None else '('}{low}, {high}{']' if self.below is None else ')'}"
        if high is not None:
            return f"{'≤' if self.below is None else '<'} {high}"
        return "" if low is None else f"{'≥' if self.above is None else '>'} {low}"

    def check(self, name: str, value: Any, kind: Any) -> None:
        """Raise ConfigError if a value of the key's type, ``kind``, is out of range."""
        low = (self.least is None or value >= self.least) and (
            self.above is None or value > self.above
        )
        high = (self.most is None or value <= self.most) and (
            self.below is None or value < self.below
        )
        if not (low and high) or (self.range and self.finite and not value < math.inf):
            counted = kind is int and self.range == f"≥ {self.least}"
            number = "a finite number" if value in (math.inf, -math.inf) else "a number"
            expected = (
                f"{self.least} or more {self.noun}"
                if counted
                else f"{number} {self.range}"
            )
            raise ConfigError(
                f"{name} is {value}, expected "
                f"{expected}{self.because and ': '}{self.because}"
            )


def key(default: Any, source: str = "ours", **facts: Any) -> Any:
    """Return a dataclass field with ``Facts``.

    A default of ``list`` or ``dict`` stands for a new empty one.
    """
    made: dict[str, Any] = {
        "default_factory" if callable(default) else "default": default
    }
    return field(**made, metadata={"facts": Facts(source, **facts)})


def facts_of(field: Field[Any]) -> Facts:
    """Return what a field says, which is nothing if it is TorchTitan's."""
    return field.metadata.get("facts", Facts())
