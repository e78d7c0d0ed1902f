"""Imports run one way: CONTRIBUTING.md's picture of the packages, held against every import."""

import ast
import re
from graphlib import TopologicalSorter

from tests.command_line import ROOT

PACKAGE = ROOT / "titan_disp"
ABOVE_BOTH = "cli"  # the table of commands
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PICTURE = re.search(r"## Code layout\n.*?\n\n((?:    .*\n)+)", TEXT, flags=re.DOTALL)[1].splitlines()
# Package or module → its line in the picture, from the top.
LAYERS = {
    name.strip(): at
    for at, line in enumerate(line.split("  ") for line in PICTURE if "│" not in line)
    for name in [word for word in line if word.strip()][1:]
}


def place(module):
    """Return the longest name in the picture that a module without ``titan_disp.`` has or is inside of, or its own name."""
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in LAYERS), module)


def modules():
    """Every module but the empty packages, without ``titan_disp.``."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: path for name, path in found.items() if name not in ("", "lab")}


def imported(path):
    """Yield what a module imports of titan_disp, anywhere in it, without ``titan_disp.``."""
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: a relative import"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "titan_disp":
            base = str(node.module).removeprefix("titan_disp").lstrip(".")
            packages = (PACKAGE / base.replace(".", "/")).is_dir()
            yield from (f"{base}.{a.name}".lstrip(".") for a in node.names) if packages else (base,)
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("titan_disp.") for a in node.names if a.name.startswith("titan_disp."))


def test_imports_run_one_way():
    """Downwards in the picture, which has every module; and nothing but the commands imports the lab."""
    assert {place(module) for module in modules()} == LAYERS.keys()
    pairs = [(module, other) for module, path in modules().items() for other in imported(path)]
    assert len(pairs) > 300
    assert [pair for pair in pairs if LAYERS[place(pair[1])] > LAYERS[place(pair[0])]] == []
    lab = [module for module, other in pairs if other.split(".")[0] == "lab"]
    assert {module.split(".")[0] for module in lab} == {"lab", ABOVE_BOTH}


def test_nothing_imports_in_a_circle():
    """Neither packages of the picture, even on one line of it, nor modules of one package."""
    by_place, by_module, own = {}, {}, modules()
    for module, path in own.items():
        others = {other if other in own else other.rpartition(".")[0] for other in imported(path)}
        by_place.setdefault(place(module), set()).update({place(other) for other in others} - {place(module)})
        by_module[module] = others - {module}
    TopologicalSorter(by_place).prepare()  # raises CycleError
    TopologicalSorter(by_module).prepare()
