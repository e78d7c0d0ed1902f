"""Imports run one way: CONTRIBUTING.md's picture of the rooms, held against every import."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from tests.command_line import ROOT

PACKAGE = ROOT / "titan_disp"


def layers() -> dict[str, int]:
    """Room → its line in the picture, from the top."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    picture = re.search(r"## Code layout\n.*?\n\n((?:    .*\n)+)", text, flags=re.DOTALL)
    assert picture is not None
    lines = [line.split("  ") for line in picture.group(1).splitlines() if "│" not in line]
    return {room: at for at, line in enumerate(lines) for room in [word.strip() for word in line if word.strip()][1:]}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> Iterator[str]:
    """Yield the rooms that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: a relative import"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "titan_disp":
            names = [f"titan_disp.{a.name}" for a in node.names] if node.module == "titan_disp" else [str(node.module)]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.startswith("titan_disp.")]
        else:
            continue
        yield from (name.split(".")[1] for name in names)


def test_every_room_is_in_the_picture():
    rooms = {room_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}
    assert layers().keys() == rooms


def test_imports_run_one_way():
    at = layers()
    wrong = {
        f"{path.relative_to(ROOT)} imports {room}"
        for path in PACKAGE.rglob("*.py")
        for room in imported_rooms(path)
        if room_of(path) != "__init__" and at[room] > at[room_of(path)]
    }
    assert not wrong


def test_no_rooms_import_each_other_in_a_circle():
    """Not even rooms on one line of the picture."""
    imports: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        imports.setdefault(room_of(path), set()).update(imported_rooms(path))
    TopologicalSorter({room: of - {room} for room, of in imports.items()}).prepare()  # raises CycleError
