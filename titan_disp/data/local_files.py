"""This module finds a split's files in a local folder or glob.

Files that are left out are logged with the reason.
"""

import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from glob import escape as glob_escape
from glob import glob
from pathlib import Path

from torchtitan.tools.logging import logger

from titan_disp.data.formats import (
    NAMES,
    PLAIN_TEXT,
    TABLES,
    TOKEN_IDS,
    is_readable,
    suffix_of,
)
from titan_disp.data.hub import FOLDER
from titan_disp.errors import ConfigError, counted

# Usual beside documents: leaving them out is not worth a warning. (The .model is
# SentencePiece's, the .idx Megatron-LM's.)
_NO_DATA = (".md", ".py", ".lock", ".metadata", ".model", ".idx")
_UNREAD = "files with such suffixes are not read"
_SAMPLE = "For a sample corpus: titan-disp sample-data DIR"
_MARKS = {
    "train": ("train",),
    "validation": ("validation", "valid", "val"),
    "test": ("test",),
}


# Why files were left out, by the ``where`` of the listing and their paths.
left_out: dict[str, dict[str, str]] = {}


def path_is(key: str, path: str | None) -> str:
    """Return how messages about the listing of a path begin; ``left_out`` is by it."""
    return f"{key} is {path!r}"


def left_out_of(key: str, path: str | None) -> dict[str, str]:
    """Return why the listing of a path has left out files, by their paths."""
    return left_out.get(path_is(key, path), {})


def leave_out(
    paths: Sequence[str], where: str, why: str, log: Callable[[str], None] | None
) -> None:
    """Remember why files are left out, and log it."""
    left_out.setdefault(where, {}).update(dict.fromkeys(paths, why))
    if paths and log is not None:
        log(
            f"{where}: left out, because {why}: {_counts(paths)}, such as {paths[0]}. "
            "(A glob instead of the folder reads every file that it matches)"
        )


def list_local(dataset_path: str, split: str, where: str, c4: bool) -> list[str]:
    """List the paths of a split's files in a folder (searched recursively, through
    links), a glob, or one file.

    A path that exists is never a glob. ``c4`` says whether the files are laid out and
    named as C4's. Messages begin with ``where``, such as "training.dataset_path is
    '…'".
    """
    if os.path.isdir(dataset_path):
        paths = select(_walk(dataset_path, where), dataset_path, split, where, c4)
    elif os.path.lexists(dataset_path):
        if not is_readable(dataset_path):
            raise ConfigError(
                f"{where}; expected a name such as {NAMES}: convert or rename it"
            )
        paths = [dataset_path]
    elif is_pattern(dataset_path):
        paths = _of_pattern(dataset_path, where)
    else:
        raise ConfigError(
            f"{where}, which does not exist; expected a folder, file or glob of "
            f"{NAMES}. {_SAMPLE}"
        )
    for path in paths:
        _refuse_dangling(path, where)
        if not os.path.isfile(path):
            raise ConfigError(
                f"{where}, but {path!r} is not a regular file: expected files of "
                "documents. Name the files, or remove it"
            )
        if not os.access(path, os.R_OK):
            raise ConfigError(
                f"{where}, but {path!r} is not readable: expected read permission "
                "(chmod +r)"
            )
    check_kinds(paths, where)
    if len({suffix_of(path) for path in paths}) > 1:
        warn_once(
            f"{where}: files of several formats are read together: {_counts(paths)}"
        )
    return paths


def is_pattern(path: str) -> bool:
    return any(c in path for c in "*?[")


def _of_pattern(pattern: str, where: str) -> list[str]:
    """List what a glob matches.

    Python's own ``glob`` ignores unreadable folders and follows links in circles.
    """
    for folder in _searched(pattern):
        try:
            os.scandir(folder).close()
        except OSError as error:
            raise _cannot_be_read(folder, error, where) from error
    matched = sorted(
        glob(pattern, recursive=True), key=lambda path: (path.count(os.sep), path)
    )
    # once for each folder: it calls the file system for every part of the path
    resolved = cache(os.path.realpath)
    folders = []
    found = dict[str, str]()
    again = []
    for path in matched:
        # As in a folder, a link to a file counts as another file, but files in linked
        # folders are not counted twice.
        real = os.path.join(resolved(os.path.dirname(path)), os.path.basename(path))
        # real, because the system refuses a path with too many links
        if os.path.isdir(real):
            folders.append(path)
            continue
        if found.setdefault(real, path) is not path:
            again.append(path)
    leave_out(again, where, "links lead to the same folders again", warn_once)
    if folders and found and "**" not in pattern:
        left_out = f"{counted(len(folders), 'folder')}, such as {folders[0]}"
        warn_once(
            f"{where}: the glob leaves out {left_out}. (A glob with /** includes the "
            "files in folders)"
        )
    paths = readable_formats(list(found.values()), where)
    if not paths:
        there = [_counts(found)] if found else []
        there += [counted(len(folders), "folder")] if folders else []
        others = f", but {' and '.join(there)}" if there else ""
        raise ConfigError(
            f"{where}, which matches no file{others}; expected files named {NAMES}: "
            "name others, or convert them"
        )
    return paths


def _searched(pattern: str) -> Iterator[str]:
    """Yield the folders whose entries decide what a glob matches."""
    parts = Path(pattern).parts
    for i, part in enumerate(parts):
        if is_pattern(part):
            above = os.path.join(*parts[:i]) if i else os.curdir
            for folder in filter(
                os.path.isdir,
                glob(above, recursive=True) if is_pattern(above) else [above],
            ):
                yield folder
                if part == "**":
                    yield from glob(
                        os.path.join(glob_escape(folder), "**", ""), recursive=True
                    )


def select(
    found: list[str], folder: str, split: str, where: str, c4: bool
) -> list[str]:
    """Select a split's files among all that are in a folder."""
    # Beside documents in other formats, tables are about them, and so is plain text
    # (README.txt, LICENSE.txt).
    for formats in (TABLES, PLAIN_TEXT):
        about = [path for path in found if suffix_of(path) in formats]
        others = [path for path in found if suffix_of(path) not in formats]
        if any(map(is_readable, others)):
            leave_out(about, where, "there are documents in other formats", _say)
            found = others
    paths = readable_formats(found, where)
    of_split = files_named(paths, split, narrow=c4)
    if kept_back := set() if c4 else _kept_back(paths, folder):
        of_split = (
            sorted(kept_back)
            if split == "validation"
            else [path for path in of_split if path not in kept_back]
        )
        leave_out(sorted(kept_back), where, "held out for validation", None)
        _say(
            f"{where}: {len(kept_back)} of {len(paths)} *.txt are held out for "
            "validation, chosen by a hash of their names, because no name contains "
            "the word validation. (A glob instead of the folder trains on all)"
        )
    # a clone of the data set holds other variants too; the hub's stream reads only this
    # one
    if c4:
        of_split = [
            path
            for path in of_split
            if Path(path).is_relative_to(Path(folder) / FOLDER)
        ] or of_split
    if not of_split:
        counts = _counts(paths or found)
        if paths and split != "train":
            raise ConfigError(
                f"{where}, where no file name contains the word {split!r}: it holds "
                f"no {split} data, but {counts}"
            )
        there = f"but {counts}" if counts else "because it has no files"
        expected = f"en/c4-{split}.00000-of-01024.json.gz, or " if c4 else ""
        raise ConfigError(
            f"{where}, which holds no {split} data, {there}; expected files such as "
            f"{expected}{NAMES}. {_SAMPLE}"
        )
    rule = f"their names do not say {split}"
    if c4:
        rule += f", or they are not in {FOLDER}"
    others = sorted({*paths} - {*of_split} - kept_back)
    leave_out(others, where, rule, _note if c4 or split != "train" else warn_once)
    return of_split


def _walk(folder: str, where: str) -> list[str]:
    """List all files below a folder except hidden ones, through links; a folder that
    two paths lead to counts once.
    """

    def refuse(error: OSError) -> None:
        raise _cannot_be_read(error.filename, error, where) from error

    found = []
    seen = {os.path.realpath(folder)}
    for at, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        into = []
        for name in sorted(folders):
            path = os.path.join(at, name)
            if name.startswith("."):
                continue
            if (real := os.path.realpath(path)) in seen:
                warn_once(
                    f"{where}: {path} is left out, because it is a link to {real}, "
                    "which is read already"
                )
                continue
            seen.add(real)
            into.append(name)
        folders[:] = into
        found += [
            os.path.join(at, name) for name in sorted(names) if not name.startswith(".")
        ]
    for path in found:
        _refuse_dangling(path, where)
    return found


def check_kinds(paths: list[str], where: str) -> None:
    """Refuse token ids that lie beside texts."""
    ids = [path for path in paths if suffix_of(path) in TOKEN_IDS]
    if ids and len(ids) < len(paths):
        other = next(path for path in paths if suffix_of(path) not in TOKEN_IDS)
        raise ConfigError(
            f"{where}, which holds {counted(len(ids), 'file')} of token ids, such as "
            f"{ids[0]!r}, and {len(paths) - len(ids)} of text, such as {other!r}; "
            "expected only one of the two: select one by a glob, such as "
            f"{f'{os.path.dirname(other)}/*{suffix_of(other)}'!r}"
        )


def readable_formats(paths: list[str], where: str) -> list[str]:
    others = [path for path in paths if not is_readable(path)]
    usual = [path for path in others if path.endswith(_NO_DATA)]
    unusual = [path for path in others if not path.endswith(_NO_DATA)]
    leave_out(usual, where, _UNREAD, _note)
    leave_out(unusual, where, _UNREAD, warn_once)
    return [path for path in paths if is_readable(path)]


def _cannot_be_read(path: str, error: OSError, where: str) -> ConfigError:
    return ConfigError(
        f"{where}, but {path!r} cannot be read: {error.strerror}. Give read "
        "permission, or name the files by a glob"
    )


def _refuse_dangling(path: str, where: str) -> None:
    """Raise ConfigError for a link to nothing, and for a path that cannot be
    examined.
    """
    try:
        os.stat(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{where}, but {path!r} is a link to {os.readlink(path)!r}, which does "
            "not exist: restore it, or remove the link"
        ) from error
    except OSError as error:
        raise _cannot_be_read(path, error, where) from error


def files_named(paths: list[str], split: str, narrow: bool) -> list[str]:
    """Select the files of a split by their own names, which must contain the split's
    mark as a word.

    If a name says "train", others without a mark are training data too unless the names
    are ``narrow``, as C4's are. In other folders, a file called train_schedules would
    make all others disappear. The word "test" marks a split only if the name of another
    file marks one: a text about tests is training data, too.
    """

    def says(path: str, words: Iterable[str]) -> bool:
        name = os.path.basename(path).lower()
        return bool(re.search(rf"(?<![a-z])({'|'.join(words)})(?![a-z])", name))

    named = [path for path in paths if says(path, _MARKS[split])]
    if split != "train" or (named and narrow):
        return named
    held_out = _MARKS["validation"]
    if named or any(says(path, held_out) for path in paths):
        held_out = (*held_out, *_MARKS["test"])
    training = {*named}
    return [path for path in paths if path in training or not says(path, held_out)]


def _kept_back(paths: list[str], folder: str) -> set[str]:
    """Return the plain texts that are held out where at least 100 are all there is, and
    no name says which.
    """
    if (
        len(paths) < 100
        or any(suffix_of(path) not in PLAIN_TEXT for path in paths)
        or files_named(paths, "validation", True)
    ):
        return set()
    number = max(len(paths) // 100, min(20, len(paths) // 20))
    by_hash = sorted(
        paths,
        key=lambda path: hashlib.sha256(
            os.path.relpath(path, folder).encode(errors="replace")
        ).digest(),
    )
    return set(by_hash[:number])


def _counts(paths: Iterable[str]) -> str:
    return ", ".join(
        f"{count} *{suffix}"
        for suffix, count in sorted(Counter(map(suffix_of, paths)).items())
    )


# Checks, training and validation list the same folder, but it is logged once.
warn_once = cache(logger.warning)
_say = cache(logger.info)
_note = cache(logging.getLogger(__name__).info)  # not for the console
