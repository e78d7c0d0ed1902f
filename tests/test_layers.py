"""Imports run one way: CONTRIBUTING.md's picture of the packages, held against every import."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from tests.command_line import ROOT

PACKAGE = ROOT / "titan_disp"


ABOVE_BOTH = "cli"  # the table of commands


def layers() -> dict[str, int]:
    """Package or module → its line in the picture, from the top."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    picture = re.search(r"## Code layout\n.*?\n\n((?:    .*\n)+)", text, flags=re.DOTALL)
    assert picture is not None
    lines = [line.split("  ") for line in picture.group(1).splitlines() if "│" not in line]
    return {name: at for at, line in enumerate(lines) for name in [word.strip() for word in line if word.strip()][1:]}


LAYERS = layers()


def place(module: str) -> str:
    """Return the longest name in the picture that a module without ``titan_disp.`` has or is inside of, or its own name."""
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in LAYERS), module)


def modules() -> dict[str, Path]:
    """Every module but the empty packages, without ``titan_disp.``."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: path for name, path in found.items() if name not in ("", "lab")}


def imported(path: Path) -> Iterator[str]:
    """Yield what a module imports of titan_disp, anywhere in it, without ``titan_disp.``."""
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: a relative import"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "titan_disp":
            base = str(node.module).removeprefix("titan_disp").lstrip(".")
            packages = (PACKAGE / base.replace(".", "/")).is_dir()
            yield from (f"{base}.{a.name}".lstrip(".") for a in node.names) if packages else (base,)
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("titan_disp.") for a in node.names if a.name.startswith("titan_disp."))


def test_every_module_is_in_the_picture():
    assert {place(module) for module in modules()} == LAYERS.keys()


def test_imports_run_one_way():
    wrong = {
        f"{module} imports {other}"
        for module, path in modules().items()
        for other in imported(path)
        if LAYERS[place(other)] > LAYERS[place(module)]
    }
    assert not wrong


def test_the_core_never_imports_the_lab():
    wrong = {
        f"{module} imports {other}"
        for module, path in modules().items()
        for other in imported(path)
        if other.split(".")[0] == "lab" and module.split(".")[0] not in ("lab", ABOVE_BOTH)
    }
    assert not wrong


def test_nothing_imports_in_a_circle():
    """Neither packages of the picture, even on one line of it, nor modules of one package."""
    by_place: dict[str, set[str]] = {}
    by_module: dict[str, set[str]] = {}
    own = modules()
    for module, path in own.items():
        others = {other if other in own else other.rpartition(".")[0] for other in imported(path)}
        by_place.setdefault(place(module), set()).update({place(other) for other in others} - {place(module)})
        by_module[module] = others - {module}
    TopologicalSorter(by_place).prepare()  # raises CycleError
    TopologicalSorter(by_module).prepare()


def test_the_core_works_without_the_lab():
    """The lab is blocked, as if it were not installed."""
    code = "import sys; sys.modules['titan_disp.lab'] = None; import titan_disp.train, titan_disp.cluster.launch, titan_disp.cli"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
