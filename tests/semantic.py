"""Wrong edits that a tired developer could make, and whether the fast tests notice: ``make mutants ROOM=semantic``.

The edits are in ``wrong_edits/*.toml``, drawn from what single-function mutants cannot show: the wiring between parts,
degenerate inputs, forgiving comparisons, and lists that miss an entry. Each is made in a copy of the checkout, and the
test files that it names run there. First, all of these files run without an edit. An edit that they do not notice is
tried against all other test files that run its lines, if ``make mutants ROOM=reach`` has measured which these are.
``--processes`` edits are tried at a time, on all cores by default.
"""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import tomli

from tests.quotes import places
from tests.reach import that_run

EDITS = Path(__file__).parent / "wrong_edits"
PYTEST = (
    *("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
    *("-m", "not slow and not night"),
)
NOTHING_RAN = (4, 5)  # pytest's exit codes for a wrong name and for no tests
SECONDS = 300  # for the tests of one edit
SURVIVED = "SURVIVED"


class Edit(NamedTuple):
    """One wrong edit: ``old`` becomes ``new`` in ``file``; ``tests`` are files below tests/ that should notice."""

    file: str
    old: str
    new: str
    why: str
    tests: list[str]


def edit_text(text: str, edit: Edit) -> str:
    """Return the text of a file with the edit made.

    Raises ValueError if there is not exactly one place where it can be made.
    """
    found = places(text, edit.old) if edit.file.endswith(".py") else []
    is_verbatim = edit.old in text
    count = max(len(found), text.count(edit.old))
    if count != 1:
        raise ValueError(f"{edit.file}: found {count} times, expected 1: {edit.old}")
    if is_verbatim:
        return text.replace(edit.old, edit.new)
    (place,) = found
    new = edit.new.strip("\n")
    if edit.old.startswith(
        " "
    ):  # whole lines, which may be indented by less or more now
        line = text[text.rfind("\n", 0, place.start) + 1 :]
        indent = line[: len(line) - len(line.lstrip(" "))]
        new = textwrap.indent(textwrap.dedent(new), indent).lstrip(" ")
    return text[: place.start] + new + text[place.stop :]


def edits() -> list[Edit]:
    return [
        Edit(**entry)
        for file in sorted(EDITS.glob("*.toml"))
        for entry in tomli.loads(file.read_text())["edit"]
    ]


def verdict(folder: Path, tests: Iterable[str], environment: dict[str, str]) -> str:
    """Run tests in a copy of the checkout, and say if they noticed its edit, which they also do if they hang or break."""
    command = [sys.executable, *PYTEST, *(f"tests/{name}" for name in tests)]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "hung"
    if done.returncode in NOTHING_RAN:
        raise SystemExit(
            f"{' '.join(command)} ended with "
            f"{done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return {0: SURVIVED, 1: "noticed"}.get(done.returncode, f"status {done.returncode}")


@contextmanager
def edited(folder: Path, edit: Edit) -> Iterator[None]:
    path = folder / edit.file
    former = path.read_text()
    path.write_text(edit_text(former, edit))
    try:
        yield
    finally:
        path.write_text(former)


def edited_lines(text: str, edit: Edit) -> range:
    """Return the numbers of the lines of a file's text that an edit changes."""
    if edit.old in text:
        start = text.index(edit.old)
        place = slice(start, start + len(edit.old.rstrip("\n")))
    else:
        (place,) = places(text, edit.old)
    return range(
        1 + text.count("\n", 0, place.start), 2 + text.count("\n", 0, place.stop)
    )


def noticed_elsewhere(
    folder: Path, edit: Edit, table: Path, environment: dict[str, str]
) -> str:
    """Return the first test file that the edit does not name, runs its lines and notices it; "" if there is none."""
    lines = edited_lines((folder / edit.file).read_text(), edit)
    for name in that_run(table, edit.file, lines):
        if name in edit.tests:
            continue
        with edited(folder, edit):
            result = verdict(folder, [name], environment)
        if result != SURVIVED and verdict(folder, [name], environment) == SURVIVED:
            return name
    return ""


def edits_about(only: str) -> list[Edit]:
    """Return the edits whose file or reason contains ``only``."""
    chosen = [edit for edit in edits() if only in edit.file or only in edit.why]
    if not chosen:
        raise SystemExit(f"no wrong edit has {only!r} in its file or reason")
    return chosen


def run(
    folders: Sequence[Path], sample: Path, table: Path, chosen: Sequence[Edit]
) -> None:
    """Try the edits, each in one of ``folders``, which are copies of the checkout. ``table`` is that of ``tests.reach``."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SAMPLE": str(sample)}
    free: SimpleQueue[Path] = SimpleQueue()
    for folder in folders:
        free.put(folder)

    def tried(tests: Iterable[str], edit: Edit | None = None) -> str:
        folder = free.get()
        there = environment | {"PYTHONPATH": str(folder)}
        result = SURVIVED
        try:
            if tests:
                with edited(folder, edit) if edit else nullcontext():
                    result = verdict(folder, tests, there)
            if edit and result == SURVIVED and table.is_file():
                name = noticed_elsewhere(folder, edit, table, there)
                result = f"noticed by {name}" if name else SURVIVED
            return result
        finally:
            free.put(folder)

    with ThreadPoolExecutor(len(folders)) as pool:
        control = sorted({name for edit in chosen for name in edit.tests})
        unedited = pool.map(lambda name: tried([name]), control)
        if failed := [
            name
            for name, result in zip(control, unedited, strict=True)
            if result != SURVIVED
        ]:
            raise SystemExit(f"these tests fail without an edit: {' '.join(failed)}")
        found = []
        results = pool.map(lambda edit: tried(edit.tests, edit), chosen)
        for edit, result in zip(chosen, results, strict=True):
            found.append(result)
            print(f"{result:8}  {edit.file}: {edit.why}", flush=True)
    noticed = len(found) - found.count(SURVIVED)
    print(
        f"{noticed} of {len(chosen)} wrong edits noticed ({noticed / len(chosen):.1%})"
    )


def copy(checkout: Path, folder: Path) -> None:
    """Copy the files that git knows or would add."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(
        listed, cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in names:
        if (checkout / name).is_file() or (checkout / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).unlink(missing_ok=True)  # a link cannot be replaced
            shutil.copy(checkout / name, folder / name, follow_symlinks=False)
