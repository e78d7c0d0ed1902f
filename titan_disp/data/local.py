"""Documents on disk: which files of a folder, a glob or a name belong to a split. What is left out is said, with the reason."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from glob import escape as glob_escape
from glob import glob
from pathlib import Path

from torchtitan.tools.logging import logger

from titan_disp.data.formats import PLAIN_TEXT, SUFFIXES, TOKEN_IDS
from titan_disp.data.hub import FOLDER
from titan_disp.errors import ConfigError

_NO_DATA = (".md", ".py", ".lock", ".metadata")  # that lie beside documents: said, but no reason to worry
_MARKS = {"train": ("train",), "validation": ("validation", "valid", "val"), "test": ("test",)}


def list_local(dataset_path: str, split: str, key: str, c4: bool) -> list[str]:
    """Paths of a split's files.

    Args:
        dataset_path: a folder (searched recursively, through links), a glob, or one file. A path that exists is no glob.
        split: train or validation. key: config section, for messages.
        c4: whether the files are laid out and named as C4's.

    Raises:
        ConfigError: nothing there, or something that cannot be read.
    """
    where = f"{key}.dataset_path is {dataset_path!r}"
    if os.path.isdir(dataset_path):
        paths = _of_folder(dataset_path, split, where, c4)
    elif os.path.lexists(dataset_path):
        if not dataset_path.endswith(SUFFIXES):
            raise ConfigError(f"{where}; expected a name that ends in {', '.join(SUFFIXES)}: convert or rename it")
        paths = [dataset_path]
    elif _is_pattern(dataset_path):
        paths = _of_pattern(dataset_path, where)
    else:
        raise ConfigError(
            f"{where}, which does not exist; expected a folder, file or glob of {', '.join(SUFFIXES)}. "
            "For a sample corpus: titan-disp sample-data DIR"
        )
    for path in paths:
        _check_file(path, where)
    _check_kinds(paths, where)
    suffixes = Counter(_suffix(path) for path in paths)
    if len(suffixes) > 1:
        _warn(f"{where}: files of several formats are read together: {_counts(suffixes)}")
    return paths


def _is_pattern(path: str) -> bool:
    return any(c in path for c in "*?[")


def _of_pattern(pattern: str, where: str) -> list[str]:
    """What a glob matches. Python's says nothing of folders that cannot be read, and follows links round and round."""
    for folder in _searched(pattern):
        try:
            os.scandir(folder).close()
        except OSError as error:
            raise _cannot_be_read(folder, error, where) from error
    matched = sorted(glob(pattern, recursive=True), key=lambda path: (path.count(os.sep), path))
    resolved = cache(os.path.realpath)  # of folders: a call of the file system for each part of a path
    folders, found, again = [], dict[str, str](), []
    for path in matched:
        # As in a folder, a link to a file is a file of its own; but one to a folder is not.
        real = os.path.join(resolved(os.path.dirname(path)), os.path.basename(path))
        if os.path.isdir(real):  # also where links go round too often for the system
            folders.append(path)
            continue
        if found.setdefault(real, path) is not path:
            again.append(path)
    if again:
        _warn(
            f"{where}: {len(again)} files are left out, as links lead to their folders a second time, such as {again[0]}"
        )
    if folders and found and "**" not in pattern:
        _warn(
            f"{where}: {len(folders)} folders are left out, such as {folders[0]}. (A glob takes folders' files by /**)"
        )
    paths = _readable_formats(list(found.values()), where)
    if not paths:
        there = [_counts(Counter(map(_suffix, found)))] * bool(found) + [f"{len(folders)} folders"] * bool(folders)
        others = f", but {' and '.join(there)}" if there else ""
        raise ConfigError(
            f"{where}, which matches no file{others}; expected files named {', '.join('*' + s for s in SUFFIXES)}: "
            "name others, or convert them"
        )
    return paths


def _searched(pattern: str) -> Iterator[str]:
    """The folders whose entries decide what a glob matches."""
    parts = Path(pattern).parts
    for i, part in enumerate(parts):
        if _is_pattern(part):
            above = os.path.join(*parts[:i]) if i else os.curdir
            for folder in filter(os.path.isdir, glob(above, recursive=True) if _is_pattern(above) else [above]):
                yield folder
                if part == "**":
                    yield from glob(os.path.join(glob_escape(folder), "**", ""), recursive=True)


def _of_folder(folder: str, split: str, where: str, c4: bool) -> list[str]:
    found = _walk(folder, where)
    if any(path.endswith(SUFFIXES) and not path.endswith(PLAIN_TEXT) for path in found):
        found = _without_plain_text(found, where)
    paths = _readable_formats(found, where)
    of_split = _of_split(paths, split, narrow=c4)
    if c4:  # a clone of the data set holds other variants beside the one that the hub's stream reads
        of_split = [path for path in of_split if Path(path).is_relative_to(Path(folder) / FOLDER)] or of_split
    if not of_split:
        there = _counts(Counter(_suffix(path) for path in paths or found)) or "no files"
        raise ConfigError(
            f"{where}, which holds no {split} data, but {there}; expected files such as en/c4-{split}.00000-of-01024.json.gz, or "
            f"{', '.join('*' + s for s in SUFFIXES)}{'' if split == 'train' else f' with {split} in their names'}. "
            "For a sample corpus: titan-disp sample-data DIR"
        )
    if left_out := sorted(set(paths) - set(of_split)):
        text = f"{where}: {len(left_out)} of {len(paths)} files are left out, as their names do not say {split}"
        text += f" or they are not in {FOLDER}" if c4 else ""
        (_say if c4 or split != "train" else _warn)(
            f"{text}: {_some(left_out, folder)}. (A glob in the place of the folder takes all that it names)"
        )
    return of_split


def _walk(folder: str, where: str) -> list[str]:
    """All files below a folder but hidden ones, through links; a folder that two paths lead to counts once."""

    def refuse(error: OSError) -> None:
        raise _cannot_be_read(error.filename, error, where) from error

    found, seen = [], {os.path.realpath(folder)}
    for at, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        into = []
        for name in sorted(folders):
            path = os.path.join(at, name)
            if name.startswith("."):
                continue
            if (real := os.path.realpath(path)) in seen:
                _warn(f"{where}: {path} is left out, as it is a link to a folder that is read already, {real}")
                continue
            seen.add(real)
            into.append(name)
        folders[:] = into
        found += [os.path.join(at, name) for name in sorted(names) if not name.startswith(".")]
    for path in found:
        _refuse_dangling(path, where)
    return found


def _without_plain_text(paths: list[str], where: str) -> list[str]:
    """Beside documents in other formats, texts are about these (README.txt, LICENSE.txt)."""
    texts = [path for path in paths if path.endswith(PLAIN_TEXT)]
    if texts:
        _say(
            f"{where}: left out, as there are documents in other formats: {_counts(Counter(map(_suffix, texts)))}, such as "
            f"{texts[0]}. (A glob in the place of the folder takes them)"
        )
    return [path for path in paths if not path.endswith(PLAIN_TEXT)]


def _check_kinds(paths: list[str], where: str) -> None:
    """Refuse what would be read wrongly: token ids beside texts, which are often no data at all; ids that need an index."""
    ids = [path for path in paths if path.endswith(TOKEN_IDS)]
    for path in ids:
        if path.endswith(".bin") and os.path.exists(index := path.removesuffix(".bin") + ".idx"):
            raise ConfigError(
                f"{where}, but {path!r} is Megatron-LM's, as its index {os.path.basename(index)!r} lies beside it; expected ids "
                "in which EOS ends the documents (docs/data.md): write them so, or take the texts that they were made of"
            )
    if ids and len(ids) < len(paths):
        other = next(path for path in paths if not path.endswith(TOKEN_IDS))
        others = f"{os.path.dirname(other)}/*{_suffix(other)}"
        raise ConfigError(
            f"{where}, which holds {len(ids)} files of token ids, such as {ids[0]!r}, and {len(paths) - len(ids)} of text, "
            f"such as {other!r}; expected one of the kinds: name it by a glob, such as {others!r}"
        )


def _readable_formats(paths: list[str], where: str) -> list[str]:
    """Those of a known format; what else there is is said."""
    known = [path for path in paths if path.endswith(SUFFIXES)]
    other = [path for path in paths if not path.endswith(SUFFIXES)]
    for say, part in (
        (_warn, [path for path in other if not path.endswith(_NO_DATA)]),
        (_say, [path for path in other if path.endswith(_NO_DATA)]),
    ):
        if part:
            counts = _counts(Counter(_suffix(path) for path in part))
            say(f"{where}: left out, as they end in none of {', '.join(SUFFIXES)}: {counts}, such as {part[0]}")
    return known


def _cannot_be_read(path: str, error: OSError, where: str) -> ConfigError:
    return ConfigError(
        f"{where}, but {path!r} cannot be read: {error.strerror}. Permit it, or name the files by a glob"
    )


def _refuse_dangling(path: str, where: str) -> None:
    """Also what cannot be looked at, as in a folder that may be listed and not entered."""
    try:
        os.stat(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{where}, but {path!r} is a link to {os.readlink(path)!r}, which does not exist: restore it, or remove the link"
        ) from error
    except OSError as error:
        raise _cannot_be_read(path, error, where) from error


def _check_file(path: str, where: str) -> None:
    _refuse_dangling(path, where)
    if not os.path.isfile(path):
        raise ConfigError(
            f"{where}, but {path!r} is not a regular file: expected files of documents, name them or remove it"
        )
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{where}, but {path!r} is not readable: expected read permission, as chmod +r gives it")


def _of_split(paths: list[str], split: str, narrow: bool) -> list[str]:
    """Files of a split by their own names, in which its mark is a word.

    Args:
        narrow: where a name says "train", that those that say nothing are not training data. C4's are named so; in other folders
            a file called train_schedules would make all others disappear.
    """

    def says(path: str, words: Iterable[str]) -> bool:
        name = os.path.basename(path).lower()
        return bool(re.search(rf"(?<![a-z])({'|'.join(words)})(?![a-z])", name))

    named = [path for path in paths if says(path, _MARKS[split])]
    if split != "train" or (named and narrow):
        return named
    held_out = (*_MARKS["validation"], *_MARKS["test"])
    return [path for path in paths if path in named or not says(path, held_out)]


def _suffix(path: str) -> str:
    """The known suffix, else what follows the last dot."""
    return next((suffix for suffix in SUFFIXES if path.endswith(suffix)), os.path.splitext(path)[1])


def _counts(suffixes: Counter[str]) -> str:
    return ", ".join(f"{count} *{suffix}" for suffix, count in sorted(suffixes.items()))


def _some(paths: list[str], folder: str) -> str:
    names = [os.path.relpath(path, folder) for path in paths[:3]]
    return ", ".join(names) + (", …" if len(paths) > 3 else "")


@cache  # the same folder is listed by checks, by training and by validation
def _warn(text: str) -> None:
    logger.warning(text)


@cache
def _say(text: str) -> None:
    logger.info(text)
