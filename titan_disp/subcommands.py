"""The subcommands of a command line, and their help texts. tyro parses the words and prints the boxes."""

import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tyro

from titan_disp.errors import ConfigError, did_you_mean

Function = TypeVar("Function", bound=Callable[..., Any])


class Subcommands:
    """Functions that are subcommands, and groups of them.

    tyro reads a function's docstring, but does two things that a reader of ``--help`` does not expect. It keeps the
    line breaks inside an argument's description and then wraps the lines once more, so that lines end early. It does
    not wrap a subcommand's description at all. Both are settled here before tyro sees the text.
    """

    def __init__(self, description: str, others: Sequence[str] = ()) -> None:
        """Create an empty list of subcommands.

        Args:
            description: what they do.
            others: what else may be in the place of a subcommand, for messages. The caller handles it.
        """
        self._description = description
        self._others = others
        self._members: dict[str, Callable[..., Any] | Subcommands] = {}

    def command(self, name: str) -> Callable[[Function], Function]:
        """Return a decorator that adds a function. The first paragraph of its docstring is its line in the list."""

        def add(function: Function) -> Function:
            self._members[name] = function
            doc = inspect.cleandoc(function.__doc__ or "")
            function.__doc__ = re.sub(r"\n {8}", " ", doc)  # joins the lines of each argument's description
            return function

        return add

    def group(self, name: str, description: str, others: Sequence[str] = ()) -> "Subcommands":
        """Add a subcommand that has subcommands, and return it. The arguments are those of the class."""
        group = self._members[name] = Subcommands(description, others)
        return group

    def cli(self, args: Sequence[str], prog: str | None = None) -> Any:
        """Call the function that ``args`` names, and return its result.

        Raises:
            ConfigError: a word in the place of a subcommand is none.
            SystemExit: tyro has printed help or an error.
        """
        self._check_names(args, prog or "")
        app = self._app(listed=self._names_no_function(args))
        # Without pairs, help shows --json, and not "--json, --no-json".
        config = (tyro.conf.FlagCreatePairsOff,)
        return app.cli(prog=prog, description=_wrapped(self._description), args=args, config=config)

    def _check_names(self, args: Sequence[str], prog: str) -> None:
        """Refuse a misspelled subcommand. tyro would list the right ones, or call the word an unrecognized option."""
        if not args or args[0].startswith("-"):
            return
        member = self._members.get(args[0])
        if member is None:
            hint = did_you_mean(args[0], self._members)
            expected = ", ".join([*self._others, *self._members])
            raise ConfigError(f"{args[0]!r} is not a subcommand of {prog}{hint}; expected {expected}")
        if isinstance(member, Subcommands):
            member._check_names(args[1:], f"{prog} {args[0]}")

    def _names_no_function(self, args: Sequence[str]) -> bool:
        """Whether ``--help`` would list subcommands, which takes only the first paragraph of each."""
        member = self._members.get(args[0]) if args else None
        return member is None or (isinstance(member, Subcommands) and member._names_no_function(args[1:]))

    def _app(self, listed: bool) -> Any:
        app = tyro.extras.SubcommandApp()
        for name, member in self._members.items():
            if isinstance(member, Subcommands):
                app.command(member._app(listed), name=name, help=_wrapped(member._description))
            else:
                app.command(name=name, help=_summary(member) if listed else _description(member))(member)
        return app


def _summary(function: Callable[..., Any]) -> str:
    return " ".join((function.__doc__ or "").partition("\n\n")[0].split())


def _description(function: Callable[..., Any]) -> str:
    return _wrapped((function.__doc__ or "").partition("\n\nArgs:")[0])


def _wrapped(text: str) -> str:
    """Wrap paragraphs to the terminal, as one.

    tyro joins lines again unless they begin with a blank. The indentation also aligns the text with that in the boxes.
    """
    width = shutil.get_terminal_size().columns - 2
    return textwrap.fill(
        " ".join(text.split()), width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
