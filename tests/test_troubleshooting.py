"""docs/troubleshooting.md against the messages in the source code, both ways."""

import ast
import re

import pytest

from tests.command_line import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCES = [*sorted((ROOT / "titan_disp").rglob("*.py")), ROOT / "slurm" / "supervise.py"]
ERRORS = {"ConfigError", "DataError", "InUseError", "NonFiniteError", "CheckpointError"}


def text(node):
    """A message as the page writes it: literals joined, and … for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text(node.left) + text(node.right)
    return "…"


def literals(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            yield text(node)


def raised(path):
    """(line, message) of every error for the user that has words of its own."""
    for node in ast.walk(ast.parse(path.read_text())):
        call = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ERRORS and call.args:
            message = text(call.args[0])
            if len(re.findall(r"\w\w+", message)) > 2:
                yield node.lineno, message


def fragments():
    """Of the first column, except under the symptoms without a message."""
    rows = [line for line in PAGE.partition("## Symptoms without")[0].splitlines() if line.startswith("| ")]
    return [fragment for row in rows for fragment in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def test_every_fragment_is_in_the_source():
    known = "\n".join(literal for path in SOURCES for literal in literals(path))
    assert [fragment for fragment in fragments() if fragment not in known] == []


def test_fragments_can_be_searched_for():
    """A fragment of placeholders and colons would be found in every message."""
    assert [fragment for fragment in fragments() if len(re.findall("[A-Za-z]", fragment)) < 8] == []
    assert len(fragments()) == len(set(fragments()))


@pytest.mark.parametrize("path", SOURCES[:-1], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_message_is_found_by_a_fragment(path):
    """Where this fails, add a piece of the message to the row of its subject."""
    found = fragments()
    assert [(line, message) for line, message in raised(path) if not any(f in message for f in found)] == []
