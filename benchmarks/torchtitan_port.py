"""Write which of the names that titan_disp imports from TorchTitan have moved or are
gone in another version, into the last section of docs/port.md.

    pip download --no-deps "torchtitan==0.3.*" --dest build
    python benchmarks/torchtitan_port.py build/torchtitan-0.3.0-py3-none-any.whl

Both sides are read with ast; nothing is imported or installed. A name that is still
there may take other arguments. What takes the place of a name is in
benchmarks/torchtitan_port.toml.
"""

import ast
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

import tomli

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "titan_disp"
PAGE = ROOT / "docs" / "port.md"
SUCCESSORS = Path(__file__).with_suffix(".toml")
HEADING = "## The names\n"


class Imported(NamedTuple):
    module: str  # torchtitan.components.loss
    name: str


def modules_of(wheel: Path) -> dict[str, str]:
    """Return module → source of a wheel, or of a folder with the package, without the
    experiments.
    """
    if wheel.is_dir():
        files = {
            str(file.relative_to(wheel)): file.read_text()
            for file in wheel.glob("torchtitan/**/*.py")
        }
    else:
        with zipfile.ZipFile(wheel) as archive:
            names = [
                n
                for n in archive.namelist()
                if n.startswith("torchtitan/") and n.endswith(".py")
            ]
            files = {name: archive.read(name).decode() for name in names}
    found = {
        name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): text
        for name, text in files.items()
    }
    return {
        name: text
        for name, text in found.items()
        if not name.startswith("torchtitan.experiments.")
    }


def imported_by(package: Path) -> set[Imported]:
    """Return the names in from-imports, and the attributes of modules that are imported
    under a name.
    """
    found = set()
    for file in package.rglob("*.py"):
        tree = ast.parse(file.read_text())
        aliases = {}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] == "torchtitan"
            ):
                found |= {
                    Imported(str(node.module), alias.name) for alias in node.names
                }
            elif isinstance(node, ast.Import):
                aliases |= {
                    a.asname: a.name
                    for a in node.names
                    if a.asname and a.name.startswith("torchtitan.")
                }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in aliases
            ):
                found.add(Imported(aliases[node.value.id], node.attr))
    return found


def names_in(source: str) -> tuple[set[str], set[str]]:
    """Return the names that a module's top level defines, and those that it imports."""
    defined = set()
    taken = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            taken |= {alias.asname or alias.name for alias in node.names}
    return defined, taken


def compare(
    imports: set[Imported], modules: dict[str, str]
) -> Iterator[tuple[Imported, str]]:
    """Yield each import with "there", "elsewhere: MODULE, …" or "gone"."""
    names = {module: names_in(source) for module, source in modules.items()}
    for wanted in sorted(imports):
        defined, taken = names.get(wanted.module, (set(), set()))
        places = sorted(
            module for module, (own, _) in names.items() if wanted.name in own
        )
        if (
            wanted.name in defined | taken
            or f"{wanted.module}.{wanted.name}" in modules
        ):
            yield wanted, "there"
        elif places:
            yield wanted, f"elsewhere: {', '.join(places)}"
        else:
            yield wanted, "gone"


def section(wheel: Path) -> str:
    """Return the text below the heading of the page's last section, in Markdown."""
    version = wheel.name.split("-")[1]
    places = list(compare(imported_by(PACKAGE), modules_of(wheel)))
    counts = Counter(place.partition(":")[0] for _, place in places)
    successors = tomli.loads(SUCCESSORS.read_text())
    lines = [
        f"\nRead from the wheel of TorchTitan {version} on {date.today()}. Of "
        f"titan-disp's imports from 0.2.2, {counts['there']} names are in their place, "
        f"{counts['elsewhere']} are in another module, and {counts['gone']} are gone.\n",
        f"| name in 0.2.2 | in {version} |",
        "|---|---|",
    ]
    for wanted, place in places:
        if place != "there":
            name = f"{wanted.module}.{wanted.name}"
            successor = successors.get(name, place)
            lines.append(f"| `{name}` | {successor} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    text, heading, _ = PAGE.read_text().partition(HEADING)
    PAGE.write_text(text + heading + section(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
