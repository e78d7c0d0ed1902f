"""These exceptions report problems that the user can fix; their messages share
``did_you_mean`` and ``counted``.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class UserError(Exception):
    """The user can fix this error.

    The launchers print it once, without a traceback, and exit with ``EXIT_CODE``.

    The message says what was found, what was expected and what to change.
    """


class ConfigError(UserError, ValueError):
    """The configuration or the input is wrong.

    Most of these errors are found before training starts.
    """


class DataError(ConfigError):
    """One rank met bad data during a run.

    That rank prints the message, whichever it is.
    """


class RefusedError(ConfigError):
    """The run cannot continue with this config: every start fails alike, until the user
    changes one or the other.
    """


class InUseError(ConfigError):
    """Another job uses the run folder."""


class CheckpointError(UserError):
    """A checkpoint cannot be saved, or no checkpoint can be loaded: the disk may be
    full, or the checkpoint damaged.
    """


class NonFiniteError(UserError):
    """Too many steps in a row had a loss or gradient that is not finite: the training
    may be unstable.
    """


EXIT_CODE = 2
IN_USE_EXIT_CODE = 3

# What messages call a value of a plain type, after "expected".
TYPE_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
}


def fits(value: Any, type_: type) -> bool:
    """Return whether a value has this type, which is one of ``TYPE_NAMES``.

    Whole numbers are numbers, too. True and false are not numbers, although Python
    counts them as whole numbers.
    """
    if isinstance(value, bool):
        return type_ is bool
    if type_ is float:
        return isinstance(value, (int, float))
    return isinstance(value, type_)


@contextmanager
def reported(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise an error of these kinds as a ConfigError that says what is wrong, and then
    why. A UserError says it already.
    """
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise ConfigError(f"{what}: {error}") from error


def did_you_mean(
    name: str,
    known: Iterable[str],
    otherwise: str = "",
    prefix: str = "",
    most: int = 1,
    instead: Mapping[str, str] = {},
) -> str:
    """A question with at most ``most`` of the known names that are close to ``name``,
    for the end of a message.

    It is ``otherwise`` if none is close. ``prefix`` stands before every name, as the
    section does before a key. ``instead`` has other names that users may try, each with
    the one to show.
    """
    names = {one: one for one in known} | dict(instead)
    close = dict.fromkeys(
        f"{prefix}{names[one]}"
        for one in difflib.get_close_matches(name, list(names), n=most)
    )
    return f" (did you mean {' or '.join(close)}?)" if close else otherwise


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun in the singular or plural, such as "1 file" or
    "1,234 files".
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def of_options(error: Exception) -> str:
    """Return a message about a key of the config with the name of a command's own
    option.
    """
    return str(error).replace("stream.text_field", "--text-field")
