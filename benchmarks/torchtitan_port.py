"""Compare the names that titan-disp imports from TorchTitan with another version, and
write the names that have moved or are gone into the last section of docs/port.md.

    pip download --no-deps "torchtitan==0.3.*" --dest build
    python benchmarks/torchtitan_port.py build/torchtitan-0.3.0-py3-none-any.whl

The sources are read with ast; nothing is imported or installed. A name that still exists
may have other arguments. benchmarks/torchtitan_port.toml has the successors of names.
"""

import ast
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
        tree = ast.parse(file.read_text())
        aliases = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                if (node.module or "").split(".")[0] == "torchtitan":
                    names |= {Imported(str(node.module), a.name) for a in node.names}
            elif isinstance(node, ast.Import):
                aliases |= {
                    a.asname: a.name
                    for a in node.names
                    if a.asname and a.name.startswith("torchtitan.")
                }
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id=alias)) if alias in aliases:
                    names.add(Imported(aliases[alias], node.attr))
    return names


def names_in(source: str) -> tuple[set[str], set[str]]:
    """Return the names that a module defines at its top level, and the names that it
    imports there.
    """
    symbols = symtable.symtable(source, "module", "exec").get_symbols()
    imported = {symbol.get_name() for symbol in symbols if symbol.is_imported()}
    assigned = {symbol.get_name() for symbol in symbols if symbol.is_assigned()}
    return assigned - imported, imported


def compare(
    imports: set[Imported], modules: dict[str, str]
) -> Iterator[tuple[Imported, str]]:
    """Yield each import with "there", "elsewhere: MODULE, …" or "gone"."""
    names = {module: names_in(source) for module, source in modules.items()}
    for module, name in sorted(imports):
        defined, imported = names.get(module, (set(), set()))
        places = sorted(other for other in names if name in names[other][0])
        place = "gone"
        if name in defined | imported or f"{module}.{name}" in modules:
            place = "there"
        elif places:
            place = f"elsewhere: {', '.join(places)}"
        yield Imported(module, name), place


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
