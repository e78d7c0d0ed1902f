"""Wrong edits that a tired developer could make, and whether the fast tests notice: ``make mutants ROOM=semantic``.

The edits are in ``wrong_edits/*.toml``, drawn from what single-function mutants cannot show: the wiring between parts,
degenerate inputs, forgiving comparisons, and lists that miss an entry. Each is made in a copy of the checkout, and the
test files that it names run there. First, all of these files run without an edit. ``--processes`` edits are tried at a
time, on all cores by default.
"""

import keyword
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import tomli

EDITS = Path(__file__).parent / "wrong_edits"
PYTEST = (
    *("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
    *("-m", "not slow and not night"),
)
NOTHING_RAN = (4, 5)  # pytest's exit codes for a wrong name and for no tests
SECONDS = 300  # for the tests of one edit
SURVIVED = "SURVIVED"
# Comments and white space between tokens are skipped. A number such as 1e-6 is three tokens, which does not matter here.
TOKEN = re.compile(
    r"""\#[^\n]*
    |(?P<token>
        [bfru]{0,2}(?:\"{3}(?:\\.|[^\\])*?\"{3}|\"(?:\\.|[^\\"\n])*\"|'(?:\\.|[^\\'\n])*')
        |\w+
        |\S
    )""",
    re.DOTALL | re.IGNORECASE | re.VERBOSE,
)
OPENING = "([{"
CLOSING = ")]}"


class Edit(NamedTuple):
    """One wrong edit: ``old`` becomes ``new`` in ``file``; ``tests`` are files below tests/ that should notice."""

    file: str
    old: str
    new: str
    why: str
    tests: list[str]


class Token(NamedTuple):
    text: str
    begin: int
    end: int


def code_tokens(code: str) -> list[Token]:
    """Return the tokens of Python code, or of a part of it, that do not depend on how the code is formatted.

    Left out are commas before a closing bracket, and parentheses that group one expression. Formatters add and remove
    both. Neighbouring string literals of one kind are one token.
    """
    tokens: list[Token] = []
    for match in TOKEN.finditer(code):
        token = Token(match["token"] or "", match.start(), match.end())
        if not token.text:
            continue
        if tokens and token.text in CLOSING and tokens[-1].text == ",":
            tokens.pop()
        if tokens and (joined := _joined(tokens[-1].text, token.text)):
            token = Token(joined, tokens.pop().begin, token.end)
        tokens.append(token)
    grouping = _grouping(tokens)
    return [token for i, token in enumerate(tokens) if i not in grouping]


def _joined(first: str, second: str) -> str | None:
    """Return two literals of one kind as one, or None if they are not that."""
    prefix = re.match(r"[bfru]*[\"']", first, re.IGNORECASE)
    if prefix is None or len(second) < 2 or not second.startswith(prefix[0]):
        return None
    return first[:-1] + second[len(prefix[0]) :]


def _grouping(tokens: Sequence[Token]) -> set[int]:
    """Return the indices of parentheses that hold one expression and are neither a call nor a definition."""
    grouping: set[int] = set()
    opened: list[int] = []
    with_comma: set[int] = set()
    for i, token in enumerate(tokens):
        if token.text in OPENING:
            opened.append(i)
        elif token.text == "," and opened:
            with_comma.add(opened[-1])
        elif token.text in CLOSING and opened:
            begin = opened.pop()
            before = tokens[begin - 1].text if begin else "="
            called = before[-1] in ")]}\"'" or (
                before.isidentifier() and not keyword.iskeyword(before)
            )
            if (
                token.text == ")"
                and i > begin + 1
                and begin not in with_comma
                and not called
            ):
                grouping |= {begin, i}
    return grouping


def places(code: str, old: str) -> list[slice]:
    """Return where ``old`` stands in Python code, however either of them is formatted."""
    tokens = code_tokens(code)
    wanted = [token.text for token in code_tokens(old)]
    texts = [token.text for token in tokens]
    begins = [
        i
        for i in range(len(texts) - len(wanted) + 1)
        if texts[i : i + len(wanted)] == wanted
    ]
    return [
        _balanced(code, slice(tokens[i].begin, tokens[i + len(wanted) - 1].end), old)
        for i in begins
    ]


def _balanced(code: str, place: slice, old: str) -> slice:
    """Return the place with the parentheses at its ends that were left out and have their other half in it."""
    begin = place.start
    end = place.stop
    surplus = _surplus(code[begin:end]) - _surplus(old)
    while surplus > 0 and (match := re.compile(r",?\s*\)").match(code, end)):
        end = match.end()
        surplus -= 1
    while surplus < 0 and (match := re.search(r"\(\s*\Z", code[:begin])):
        begin = match.start()
        surplus += 1
    return slice(begin, end)


def _surplus(code: str) -> int:
    """Return how many more brackets are opened than closed."""
    texts = [match["token"] or " " for match in TOKEN.finditer(code)]
    return sum(text in OPENING for text in texts) - sum(
        text in CLOSING for text in texts
    )


def edit_text(text: str, edit: "Edit") -> str:
    """Return the text of the file with the edit made, or raise ValueError unless it can be made at one place."""
    if text.count(edit.old) == 1:
        return text.replace(edit.old, edit.new)
    found = places(text, edit.old) if edit.file.endswith(".py") else []
    if len(found) != 1:
        raise ValueError(
            f"{edit.file}: found {len(found)} times, expected once: {edit.old}"
        )
    (place,) = found
    quoted_indent = len(edit.old) - len(edit.old.lstrip(" "))
    lines = edit.new.strip("\n").splitlines() or [""]
    line_begin = text.rfind("\n", 0, place.start) + 1
    shift = (
        place.start - line_begin - quoted_indent
        if quoted_indent and not text[line_begin : place.start].strip()
        else 0
    )
    moved = [
        " " * max(len(line) - len(line.lstrip(" ")) + shift, 0) + line.lstrip(" ")
        for line in lines[1:]
    ]
    return (
        text[: place.start]
        + "\n".join([lines[0].strip(" "), *moved])
        + text[place.stop :]
    )


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
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
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


def run(folders: Sequence[Path], sample: Path, only: str = "") -> None:
    """Try the edits whose file or reason contains ``only``, each in one of ``folders``, which are copies of the checkout."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SAMPLE": str(sample)}
    chosen = [edit for edit in edits() if only in edit.file or only in edit.why]
    if not chosen:
        raise SystemExit(f"no wrong edit has {only!r} in its file or reason")
    free: SimpleQueue[Path] = SimpleQueue()
    for folder in folders:
        free.put(folder)

    def tried(tests: Iterable[str], edit: Edit | None = None) -> str:
        folder = free.get()
        try:
            with edited(folder, edit) if edit else nullcontext():
                return verdict(folder, tests, environment | {"PYTHONPATH": str(folder)})
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
        f"semantic: {noticed} of {len(chosen)} wrong edits noticed ({noticed / len(chosen):.1%})"
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
