"""``NAME=A,B,C`` on a command line names a group of models or runs."""

from pathlib import Path

from titan_disp.errors import ConfigError


def parse_group(text: str) -> tuple[str, list[str]] | None:
    """Parse ``NAME=A,B,C`` into (NAME, [A, B, C]). Returns None for a text without =, or an existing path.

    Raises:
        ConfigError: The name or a member is empty, or a member comes twice.
    """
    if "=" not in text or Path(text).exists():
        return None
    name, _, rest = text.partition("=")
    members = rest.split(",")
    if not name or not all(members) or len(set(members)) < len(members):
        raise ConfigError(f"{text!r} is not a group; expected NAME=A,B,C with a name, and each member once")
    return name, members
