"""docs/troubleshooting.md against the messages in the source code, both ways."""

import ast
import re

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
    for node in ast.walk(ast.parse(path.read_text())):
        call = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ERRORS and call.args:
            message = text(call.args[0])
            if len(re.findall(r"\w\w+", message)) > 2:
                yield node.lineno, message


def fragments():
    rows = [line for line in PAGE.partition("## Config")[2].splitlines() if line.startswith("| ")]
    return [fragment for row in rows for fragment in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def test_fragments_are_of_messages():
    """A fragment of placeholders and colons would be found in every message."""
    known, found = "\n".join(literal for path in SOURCES for literal in literals(path)), fragments()
    assert [fragment for fragment in found if fragment not in known] == []
    assert [fragment for fragment in found if len(re.findall("[A-Za-z]", fragment)) < 8] == []
    assert len(found) == len(set(found))


def test_every_message_is_found_by_a_fragment():
    """Where this fails, add a piece of the message to the row of its subject."""
    found, messages = fragments(), [(path.name, *one) for path in SOURCES[:-1] for one in raised(path)]
    assert len(messages) > 150
    assert [one for one in messages if not any(fragment in one[2] for fragment in found)] == []
