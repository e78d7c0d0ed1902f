"""Compare the names that titan-disp imports from TorchTitan with another version, and
write the names that have moved or are gone into the last section of docs/port.md.

    pip download --no-deps "torchtitan==0.3.*" --dest build
    python benchmarks/torchtitan_port.py build/torchtitan-0.3.0-py3-none-any.whl

The sources are read with ast; nothing is imported or installed. A name that still exists
may have other arguments. benchmarks/torchtitan_port.toml has the successors of names.
"""

import ast
import re
import shutil
import symtable
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import tomli

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "titan_disp"
PAGE = ROOT / "docs" / "port.md"
SUCCESSORS = Path(__file__).with_suffix(".toml")
HEADING = "## The names\n"


class Imported(NamedTuple):
    """A name that titan-disp imports."""

    module: str  # such as torchtitan.components.loss
    name: str


def modules_of(folder: Path) -> dict[str, str]:
    """Return the source of each module of the package in a folder, by the module's name.
    Experiments are left out.
    """
    modules = {}
    for file in folder.glob("torchtitan/**/*.py"):
        parts = file.relative_to(folder).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        if not name.startswith("torchtitan.experiments."):
            modules[name] = file.read_text()
    return modules


def imported_by(package: Path) -> set[Imported]:
    """Return the names of from-imports, and the used attributes of modules that are
    imported with "as".
    """
    names = set()
    for file in package.rglob("*.py"):
        source = file.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names |= {Imported(node.module, alias.name) for alias in node.names}
        aliases = re.findall(r"^ *import (torchtitan\S+) as (\w+)$", source, re.M)
        for module, alias in aliases:
            attributes = re.findall(rf"\b{alias}\.(\w+)", source)
            names |= {Imported(module, attribute) for attribute in attributes}
    return {name for name in names if name.module.split(".")[0] == "torchtitan"}


def compare(
    imports: set[Imported], modules: dict[str, str]
) -> Iterator[tuple[Imported, str]]:
    """Yield each import with "there", "elsewhere: MODULE, …" or "gone".

    ``modules`` has the sources of the new version. A module has the names that its top level
    assigns or imports, and its submodules. A name that a module only imports is not a place
    to which another one has moved.
    """
    defined = set()
    available = set(modules)
    for module, source in modules.items():
        for symbol in symtable.symtable(source, module, "exec").get_symbols():
            name = f"{module}.{symbol.get_name()}"
            if symbol.is_assigned() and not symbol.is_imported():
                defined.add(name)
            if symbol.is_assigned() or symbol.is_imported():
                available.add(name)
    for imported in sorted(imports):
        places = sorted(name for name in defined if name.endswith(f".{imported.name}"))
        if ".".join(imported) in available:
            yield imported, "there"
        elif places:
            others = (place.removesuffix(f".{imported.name}") for place in places)
            yield imported, f"elsewhere: {', '.join(others)}"
        else:
            yield imported, "gone"


def section(wheel: Path) -> str:
    """Return the text of the page's last section, in Markdown, without its heading."""
    version = wheel.name.split("-")[1]
    with TemporaryDirectory() as folder:
        shutil.unpack_archive(wheel, folder, "zip")
        modules = modules_of(Path(folder))
    places = list(compare(imported_by(PACKAGE), modules))
    counts = Counter(place.partition(":")[0] for _, place in places)
    successors = tomli.loads(SUCCESSORS.read_text())
    lines = [
        f"\nRead from the wheel of TorchTitan {version} on {date.today()}. Of "
        f"titan-disp's imports from 0.2.2, {counts['there']} names are in their place, "
        f"{counts['elsewhere']} are in another module, and {counts['gone']} are gone.\n",
        f"| name in 0.2.2 | in {version} |",
        "|---|---|",
    ]
    for imported, place in places:
        if place != "there":
            name = ".".join(imported)
            lines.append(f"| `{name}` | {successors.get(name, place)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    text, heading, _ = PAGE.read_text().partition(HEADING)
    PAGE.write_text(text + heading + section(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
