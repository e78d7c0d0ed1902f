"""Which test files run a line of the code: ``make mutants ROOM=reach`` measures it.

Each test file runs with coverage.py, and so do the processes that it starts. The table
is coverage.py's data file: the contexts of a line are the names of test files.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

TABLE = "reach.coverage"
# coverage.py replaces the variables. A forked rank and a process that ends by os._exit
# are measured, too.
SETTINGS = """
[run]
source = ${CHECKOUT}
omit = */tests/*
data_file = ${TABLE}
context = ${TEST_FILE}
relative_files = true
parallel = true
patch = subprocess, _exit, fork
"""
FAST = ("-q", "-p", "no:cacheprovider", "-m", "not slow and not night")


def measure(checkout: Path, table: Path, names: Iterable[str]) -> None:
    """Run test files of a checkout, and write what each runs into ``table``.

    A test that fails is measured like others: coverage.py slows tests down, so that
    some exceed their time.
    """
    settings = table.with_suffix(".ini")
    table.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(SETTINGS)
    environment = os.environ | {
        "CHECKOUT": str(checkout),
        "COVERAGE_RCFILE": str(settings),
        "PYTHONPATH": str(checkout),
        "TABLE": str(table),
    }
    coverage = (sys.executable, "-m", "coverage")
    for name in names:
        subprocess.run(
            [*coverage, "run", "-m", "pytest", *FAST, f"tests/{name}"],
            cwd=checkout,
            env=environment | {"TEST_FILE": name},
        )
        subprocess.run(
            [*coverage, "combine", "--quiet", "--append"],
            cwd=checkout,
            env=environment | {"TEST_FILE": name},
        )


def that_run(table: Path, file: str, lines: Iterable[int]) -> list[str]:
    """Return the names of the test files that run any of the lines of a file, which is
    named from the checkout on. Sorted; none if the table does not exist.
    """
    from coverage import CoverageData

    data = CoverageData(str(table))
    data.read()
    names_of = data.contexts_by_lineno(file)
    names: set[str] = set()
    for line in lines:
        names.update(names_of.get(line, ()))
    return sorted(names)


def lines_of_functions(code: str) -> Iterator[int]:
    """Yield the numbers of the lines in the bodies of functions: whoever imports a
    module runs the others.
    """
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from range(node.body[0].lineno, (node.end_lineno or 0) + 1)


def that_call(checkout: Path, table: Path, files: Sequence[Path]) -> list[str]:
    """Return the names of the test files that run any function of any of the files."""
    names: set[str] = set()
    for file in files:
        lines = lines_of_functions(file.read_text())
        names.update(that_run(table, str(file.relative_to(checkout)), lines))
    return sorted(names)
