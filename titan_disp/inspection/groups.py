"""``NAME=A,B,C`` on a command line: several models or runs under one name."""

from pathlib import Path

from titan_disp.errors import ConfigError


def parse_group(text: str) -> tuple[str, list[str]] | None:
    """(NAME, [A, B, C]); None for what is no group: no =, or a path that exists as it stands.

    Raises:
        ConfigError: no name, no member, or one named twice.
    """
    if "=" not in text or Path(text).exists():
        return None
    name, _, rest = text.partition("=")
    members = rest.split(",")
    if not name or not all(members) or len(set(members)) < len(members):
        raise ConfigError(f"{text!r} is no group; expected NAME=A,B,C with a name, and each member once")
    return name, members
