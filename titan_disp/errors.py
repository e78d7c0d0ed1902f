"""Exceptions for problems that the user can fix, and parts of their messages."""

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class UserError(Exception):
    """The user can fix this error.

    The launchers print the error once, without a traceback, and exit with
    ``EXIT_CODE``.

    The message says what was found, what was expected and what to change.
    """


class ConfigError(UserError, ValueError):
    """The configuration or the input is wrong.

    Most of these errors are found before training starts.
    """


class RanksError(ConfigError):
    """The config does not fit the number of ranks."""


class DataError(ConfigError):
    """One rank met bad data during a run.

    That rank prints the message, even if it is not rank 0.
    """


class RefusedError(ConfigError):
    """The run cannot continue with this config.

    Every start fails in the same way until the user changes the run or the config.
    """


class EndedError(RefusedError):
    """The run has ended: its last checkpoint holds the model only.

    Attributes:
        step: the step of the last checkpoint.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message, step)
        self.step = step

    def __str__(self) -> str:
        return str(self.args[0])


class InUseError(ConfigError):
    """Another job uses the run folder."""


class CheckpointError(UserError):
    """A checkpoint cannot be saved, or no checkpoint can be loaded.

    The disk may be full, or the checkpoint damaged.
    """


class UnreadableError(CheckpointError):
    """A file of a checkpoint cannot be read at the moment.

    The cause may pass, and the file is not necessarily damaged.
    """


class NonFiniteError(UserError):
    """Too many steps in a row had a loss or gradient that is not finite.

    The training may be unstable.
    """


class Problems:
    """The errors of several checks. By default, the first ConfigError is raised.

    Attributes:
        collect: whether errors are collected instead of raised.
        errors: the collected errors, one for each subject, such as a key.
    """

    def __init__(self, collect: bool = False) -> None:
        self.collect = collect
        self.errors: dict[str, ConfigError] = {}

    @property
    def messages(self) -> list[str]:
        return list(map(str, self.errors.values()))

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect a ConfigError of the block, or raise it if ``collect`` is false."""
        try:
            yield
        except ConfigError as error:
            if not self.collect:
                raise
            subject, _, _ = str(error).partition(" is ")
            self.errors.setdefault(subject, error)

    def pass_(self, check: Callable[..., object], *arguments: Any) -> bool:
        """Return whether a check passes."""
        try:
            with self.collected():
                check(*arguments)
                return True
        except Exception:
            # The check may have used a value that an earlier check refused.
            if not self.messages:
                raise
        return False

    def refuse(self, end: str = "") -> None:
        """Raise a ConfigError with all messages and the sentence ``end``, if there are
        any messages.
        """
        messages = self.messages
        if len(messages) < 2:
            for message in messages:
                raise ConfigError(". ".join(filter(None, [message, end])))
            return
        lines = [f"- {message}" for message in messages]
        raise ConfigError(
            "\n".join([f"{len(messages)} problems:", *lines, end]).strip()
        )


EXIT_CODE = 2
IN_USE_EXIT_CODE = 3

# The names of plain types in messages, after "expected".
TYPE_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
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


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    line, *_ = [*str(error).splitlines(), ""]
    return f"{type(error).__name__}: {line}"


@contextmanager
def one_line_at_the_end() -> Iterator[None]:
    """Print a UserError of the block as one line on stderr, without a traceback, and
    end the process.
    """
    try:
        yield
    except UserError as error:
        print(f"titan-disp: error: {error}", file=sys.stderr, flush=True)
        if isinstance(error, InUseError):
            sys.exit(IN_USE_EXIT_CODE)
        sys.exit(EXIT_CODE)


@contextmanager
def reported(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds in the block into a ConfigError. Its message is
    ``what`` + ": " + the error's message.

    A UserError passes unchanged, because its message is complete.
    """
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise ConfigError(f"{what}: {error}") from error


@contextmanager
def prefixed(where: str, cure: str = "") -> Iterator[None]:
    """Turn a ValueError of the block into a ConfigError. Its message is ``where`` + the
    ValueError's message + ``cure``.
    """
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{where}{error}{cure}") from error


def did_you_mean(
    name: Any,
    candidates: Iterable[Any],
    otherwise: str = "",
    prefix: str = "",
    most: int = 1,
    instead: Mapping[str, str] = {},
) -> str:
    """Return " (did you mean …?)" for the end of a message, or ``otherwise``.

    Args:
        name: what the user wrote. If it is not a string, no name is similar to it.
        candidates: the names that exist.
        otherwise: the result if no name is similar.
        prefix: text before every name shown, such as the section before a key.
        most: the largest number of names shown.
        instead: wrong names that users may try, each with the name to show for it.
    """
    names = {str(candidate).lower(): candidate for candidate in candidates}
    names |= {wrong.lower(): right for wrong, right in instead.items()}
    similar = []
    if isinstance(name, str):
        similar = difflib.get_close_matches(name.lower(), list(names), n=most)
    if not similar:
        return otherwise
    suggestions = [f"{prefix}{names[match]}" for match in similar]
    return f" (did you mean {' or '.join(suggestions)}?)"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, such as "1 file" or "1,234 files".

    The plural is the noun with an "s" by default.
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {plural or noun + 's'}"


def of_options(error: Exception) -> str:
    """Return an error's message with --text-field in place of stream.text_field.

    Commands have this option instead of the key.
    """
    return str(error).replace("stream.text_field", "--text-field")
