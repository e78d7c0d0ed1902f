"""Compare the names that titan-disp imports from TorchTitan with another version, and
write the names that have moved or are gone into the last section of docs/port.md.

    pip download --no-deps "torchtitan==0.3.*" --dest build
    python benchmarks/torchtitan_port.py build/torchtitan-0.3.0-py3-none-any.whl

The sources are read with ast and symtable; nothing is imported or installed. A name that
still exists may have other arguments. benchmarks/torchtitan_port.toml has the successors of
names.
"""

import ast
import shutil
import symtable
import sys
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
    """Return what the from-imports of a package import from TorchTitan."""
    names = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                names |= {
                    Imported(str(node.module), alias.name) for alias in node.names
                }
    return {name for name in names if name.module.split(".")[0] == "torchtitan"}


def available(modules: dict[str, str]) -> set[Imported]:
    """Return the names that a version has: what the top level of each module assigns, defines
    or imports, and the modules themselves.
    """
    names = {Imported(*module.rpartition(".")[::2]) for module in modules}
    for module, source in modules.items():
        for symbol in symtable.symtable(source, module, "exec").get_symbols():
            if symbol.is_assigned() or symbol.is_imported():
                names.add(Imported(module, symbol.get_name()))
    return names


def section(wheel: Path) -> str:
    """Return the text of the page's last section, in Markdown, without its heading."""
    version = wheel.name.split("-")[1]
    with TemporaryDirectory() as folder:
        shutil.unpack_archive(wheel, folder, "zip")
        names = available(modules_of(Path(folder)))
    imports = imported_by(PACKAGE)
    missing = sorted(imports - names)
    successors = tomli.loads(SUCCESSORS.read_text())
    lines = [
        f"\nRead from the wheel of TorchTitan {version} on {date.today()}. Of "
        f"titan-disp's imports from 0.2.2, {len(imports & names)} names are in their "
        f"place, and {len(missing)} have moved or are gone.\n",
        f"| name in 0.2.2 | in {version} |",
        "|---|---|",
    ]
    for name in map(".".join, missing):
        lines.append(f"| `{name}` | {successors.get(name, 'gone')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    text, heading, _ = PAGE.read_text().partition(HEADING)
    PAGE.write_text(text + heading + section(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
