"""This module lists the files of one split of a data set: in a local folder or glob, in
an object store, or on the hub.

Files that are left out are logged, and returned with the reasons. The files are listed
once, on rank 0, and the list is broadcast to all ranks.
"""

import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from glob import escape as glob_escape
from glob import glob
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch.distributed as dist
from torchtitan.tools.logging import logger

from titan_disp.data import stores
from titan_disp.data.blocks import Blocks
from titan_disp.data.formats import (
    NAMES,
    PLAIN_TEXT,
    TABLES,
    TOKEN_IDS,
    is_readable,
    suffix_of,
)
from titan_disp.data.stores import (
    FORM,
    etag_of,
    is_hub_name,
    is_pattern,
    is_url,
    parse_name,
)
from titan_disp.errors import ConfigError, UserError, counted

T = TypeVar("T")

# Such files are usual beside documents, so leaving them out is not worth a warning.
# (.model is SentencePiece's, and .idx is Megatron-LM's.)
_NO_DATA = ("README.md", ".py", ".lock", ".metadata", ".model", ".idx")
UNREAD = "files with such suffixes are not read"
BESIDE = "there are documents in other formats (a glob reads both)"
_GLOB = ". (A glob instead of the folder reads every such file that it matches)"
_SAMPLE = "For a sample corpus: titan-disp sample-data DIR"
_SPLITS = {
    "c4": "train",
    "c4_validation": "validation",
    "text": "train",
    "text_validation": "validation",
}
_MARKS = {
    "train": ("train",),
    "validation": ("validation", "valid", "val"),
    "test": ("test",),
}

# Checks, training and validation list the same folder, but each message is logged once.
warn_once = cache(logger.warning)
_say = cache(logger.info)
_note = cache(logging.getLogger(__name__).info)  # not for the console


@dataclass(frozen=True)
class DataFile:
    """One file of documents."""

    # path relative to the folder that holds all files of the split; the same on the hub
    # and in a mirror
    name: str
    url: str  # what to open: a local path, hf://datasets/…, or an object's URL
    size: int  # in bytes, as stored
    # bytes of text per stored byte, measured (``findings.measured``) or from the index
    density: float = 1.0
    # hash of a sample of the content, or of the whole content if there is an index
    sample: str = ""
    blocks: Blocks | None = field(default=None, compare=False, repr=False)
    damage: str | None = None  # what is wrong after the last block
    documents: int | None = None  # number of documents, from the index
    etag: str = ""  # an object store's checksum of the content
    encoding: str = ""  # of a plain text that is not UTF-8, see ``formats.encoding_of``
    left_out: bool = False  # by stream.left_out: the file is read as if it were empty

    @property
    def remote(self) -> bool:
        return is_url(self.url)

    @property
    def on_hub(self) -> bool:
        return self.url.startswith("hf://")

    @property
    def holds_ids(self) -> bool:
        return self.name.endswith(TOKEN_IDS)


def sample_of(files: Sequence[DataFile]) -> list[DataFile]:
    """Return the first, a middle and the last one of the files, each once."""
    last = len(files) - 1
    return [files[i] for i in sorted({0, (last + 1) // 2, last})] if files else []


@dataclass(frozen=True)
class Listing:
    """The files of a data set.

    Attributes:
        files: the files, sorted by name.
        left_out: the reason why each other local file is left out, by the file's path.
    """

    files: list[DataFile]
    left_out: dict[str, str]


def list_files(
    dataset: str, path: str | None, key: str = "training", path_key: str = ""
) -> list[DataFile]:
    """Return the files of a split, see ``listing_of``."""
    return listing_of(dataset, path, key, path_key).files


def _of_hub(files: Iterable[stores.HubFile]) -> list[DataFile]:
    return [DataFile(file.path, file.url, file.size) for file in files]


def listing_of(
    dataset: str, path: str | None, key: str = "training", path_key: str = ""
) -> Listing:
    """Return the files of a split.

    Raises ConfigError if there is no such data, if it cannot be read, or if the hub
    cannot be reached.

    Args:
        dataset: c4, text, hf:OWNER/NAME and the like, see ``split_of``.
        path: a local folder (searched recursively, through links), local file or glob;
            the URL of a folder, file or glob in a store; or the mirror of an hf:… data
            set. None stands for the hub. A path that exists is never a glob.
        key: the config section, for messages.
        path_key: the key or option that names the path, for messages. The default is
            dataset_path of the section.
    """
    where = f"{key}.dataset is {dataset!r}"
    path_key = path_key or f"{key}.dataset_path"
    split = split_of(dataset, key)
    is_c4 = dataset.startswith("c4")
    selection = _Selection(f"{path_key} is {path!r}", split, is_c4)
    if is_hub_name(dataset):
        name = parse_name(dataset, f"{key}.dataset")
        if path is None:
            files = _of_hub(stores.resolve(name, where).files(split, where))
        else:
            name = replace(name, split=split)
            sizes = stores.mirrored_files(path, name, selection.where)
            files = [DataFile(path, path, size) for path, size in sizes.items()]
    elif path is not None and is_url(path):
        files = selection.of_store(path)
    elif path is not None:
        files = selection.of_disk(path)
    elif is_c4:
        files = _of_hub(stores.c4_files(split))
    else:
        raise ConfigError(
            f"{where}: set {key}.dataset_path to the folder, file or glob of the "
            "documents"
        )
    root = os.path.commonpath([os.path.dirname(file.name) for file in files])
    files = [replace(file, name=_name_in(root, file.name)) for file in files]
    files.sort(key=lambda file: file.name)
    for file, next_file in pairwise(files):
        if file.name == next_file.name:
            raise ConfigError(
                f"{selection.where}: {file.url!r} and {next_file.url!r} differ only in "
                "the case of their suffix: rename one"
            )
    return Listing(files, selection.left_out)


def _name_in(root: str, path: str) -> str:
    """Return a path relative to a folder, with its suffix in lower case, as readers
    expect it.
    """
    name = PurePath(os.path.relpath(path, root)).as_posix()
    # The result is the same on nodes with other locales, even if the name is not UTF-8.
    name = os.fsencode(name).decode(errors="surrogateescape")
    suffix = suffix_of(name)
    return name[: -len(suffix)] + suffix


def split_of(dataset: str, key: str) -> str:
    """Return the split that a data set's name selects. If the name selects none, return
    validation for the section [validation], and train for other sections.
    """
    if is_hub_name(dataset):
        default = "validation" if key == "validation" else "train"
        return parse_name(dataset, f"{key}.dataset").split or default
    if dataset not in _SPLITS:
        raise ConfigError(
            f"{key}.dataset is {dataset!r}, expected c4 or c4_validation (from the "
            f"hub, or a copy at dataset_path), {FORM} (of the hub, or its mirror at "
            "dataset_path), or text or text_validation (your documents at "
            "dataset_path)"
        )
    return _SPLITS[dataset]


def held_out(dataset: str) -> str:
    """Return the name of the validation split that belongs to a training set."""
    if is_hub_name(dataset):
        return str(replace(parse_name(dataset, "training.dataset"), split="validation"))
    return f"{dataset.removesuffix('_validation')}_validation"


@dataclass
class _Selection:
    """Selects the files of a split by their names and suffixes.

    Attributes:
        where: the beginning of messages, such as "training.dataset_path is '…'".
        split: train, validation, or another split.
        c4: whether the files have C4's folders and names.
        left_out: the reasons why files are left out, by their paths.
    """

    where: str
    split: str
    c4: bool
    left_out: dict[str, str] = field(default_factory=dict)

    def leave_out(
        self,
        paths: Sequence[str],
        why: str,
        log: Callable[[str], None] | None,
        advice: str = "",
    ) -> None:
        """Remember why files are left out, and log it with advice."""
        self.left_out.update(dict.fromkeys(paths, why))
        if paths and log is not None:
            log(
                f"{self.where}: left out, because {why}: {_counts(paths)}, such as "
                f"{paths[0]}{advice}"
            )

    def of_store(self, url: str) -> list[DataFile]:
        """Return the files of a URL in a store: of a folder, a glob, or a single file."""
        url = stores.at_commit(url, self.where)
        infos = stores.objects_of(url, self.where)
        if is_pattern(url) or [*infos] == [url]:
            paths = self.readable([*infos])
        else:
            paths = self.of_folder([*infos], url)
        if not paths:
            raise ConfigError(
                f"{self.where}, which matches no file; expected names such as {NAMES}"
            )
        self.check_formats(paths)
        indices = [path.removesuffix(".bin") + ".idx" for path in paths]
        for path, index in zip(paths, indices, strict=True):
            if path.endswith(".bin") and stores.ask(index, "exists"):
                raise ConfigError(
                    f"{self.where}, which has {index!r} of Megatron-LM; such data is "
                    "only read from local files: copy it"
                )
        return [
            DataFile(path, path, infos[path]["size"], etag=etag_of(infos[path]))
            for path in paths
        ]

    def of_disk(self, path: str) -> list[DataFile]:
        """Return the files of a local path: of a folder, a glob, or a single file."""
        if os.path.isdir(path):
            paths = self.of_folder(self._walk(path), path)
        elif os.path.lexists(path):
            if not is_readable(path):
                raise ConfigError(
                    f"{self.where}; expected a name such as {NAMES}: convert or rename "
                    "it"
                )
            paths = [path]
        elif is_pattern(path):
            paths = self._of_pattern(path)
        else:
            raise ConfigError(
                f"{self.where}, which does not exist; expected a folder, file or glob "
                f"of {NAMES}. {_SAMPLE}"
            )
        for file in paths:
            self._refuse_dangling(file)
            if not os.path.isfile(file):
                raise ConfigError(
                    f"{self.where}, but {file!r} is not a regular file: expected files "
                    "of documents. Name the files, or remove it"
                )
            if not os.access(file, os.R_OK):
                raise ConfigError(
                    f"{self.where}, but {file!r} is not readable: expected read "
                    "permission (chmod +r)"
                )
        self.check_formats(paths)
        if len(set(map(suffix_of, paths))) > 1:
            warn_once(
                f"{self.where}: files of several formats are read together: "
                f"{_counts(paths)}"
            )
        return [DataFile(file, file, os.path.getsize(file)) for file in paths]

    def _of_pattern(self, pattern: str) -> list[str]:
        """Return the files that a glob matches, each once.

        (Python's own ``glob`` ignores unreadable folders and follows links in circles.)
        """
        for folder in _searched(pattern):
            try:
                os.scandir(folder).close()
            except OSError as error:
                raise self._cannot_be_read(folder, error) from error
        matched = glob(pattern, recursive=True)
        matched.sort(key=lambda path: (path.count(os.sep), path))
        # Cached, because realpath calls the file system for every part of a path.
        resolved = cache(os.path.realpath)
        folders = []
        files = dict[str, str]()
        again = []
        for path in matched:
            # As in a folder, a link to a file counts as another file, but files in
            # linked folders are not counted twice.
            folder, name = os.path.split(path)
            real = os.path.join(resolved(folder), name)
            # not ``path``, because the system refuses a path with too many links
            if os.path.isdir(real):
                folders.append(path)
            elif files.setdefault(real, path) is not path:
                again.append(path)
        self.leave_out(again, "links lead to the same folders again", warn_once)
        folder_count = counted(len(folders), "folder")
        if folders and files and "**" not in pattern:
            warn_once(
                f"{self.where}: the glob leaves out {folder_count}, such as "
                f"{folders[0]}. (A glob with /** includes the files in folders)"
            )
        paths = self.readable([*files.values()])
        if not paths:
            matches = [_counts(files)] * bool(files) + [folder_count] * bool(folders)
            ending = f", but {' and '.join(matches)}" if matches else ""
            raise ConfigError(
                f"{self.where}, which matches no file{ending}; expected files named "
                f"{NAMES}: name others, or convert them"
            )
        return paths

    def of_folder(self, paths: Sequence[str], folder: str) -> list[str]:
        """Return the split's files among ``paths``, all files of a folder."""
        # Beside documents in other formats, tables and plain texts (README.txt,
        # LICENSE.txt) only describe these documents.
        for formats in (TABLES, PLAIN_TEXT):
            descriptions = [path for path in paths if suffix_of(path) in formats]
            documents = [path for path in paths if suffix_of(path) not in formats]
            if any(map(is_readable, documents)):
                self.leave_out(descriptions, BESIDE, _say)
                paths = documents
        counts = _counts(paths)
        paths = self.readable(paths)
        counts = _counts(paths) or counts
        of_split = files_named(paths, self.split, narrow=self.c4)
        kept_back = set[str]()
        if not self.c4:
            kept_back = _kept_back(paths, folder)
        if kept_back and self.split == "validation":
            of_split = sorted(kept_back)
        elif kept_back:
            of_split = [path for path in of_split if path not in kept_back]
            self.leave_out(sorted(kept_back), "held out for validation", None)
        if kept_back:
            _say(
                f"{self.where}: {len(kept_back)} of {len(paths)} *.txt are held out "
                "for validation, chosen by a hash of their names, because no name "
                "contains the word validation. (A glob instead of the folder trains on "
                "all)"
            )
        rule = f"their names do not say {self.split}"
        if self.c4:
            # A clone of the data set also holds C4's other variants. From the hub, only
            # the variant in ``FOLDER`` is read.
            rule += f", or they are not in {stores.FOLDER}"
            of_variant = [
                path
                for path in of_split
                if Path(path).is_relative_to(Path(folder) / stores.FOLDER)
            ]
            of_split = of_variant or of_split
        if not of_split and paths and self.split != "train":
            raise ConfigError(
                f"{self.where}, where no file name contains the word {self.split!r}: "
                f"it holds no {self.split} data, but {counts}"
            )
        if not of_split:
            there = f"but {counts}" if counts else "because it has no files"
            expected = ""
            if self.c4:
                expected = f"en/c4-{self.split}.00000-of-01024.json.gz, or "
            raise ConfigError(
                f"{self.where}, which holds no {self.split} data, {there}; expected "
                f"files such as {expected}{NAMES} (convert or rename others). {_SAMPLE}"
            )
        is_usual = self.c4 or self.split != "train"
        of_other_splits = sorted({*paths} - {*of_split} - kept_back)
        tell = _note if is_usual else warn_once
        self.leave_out(of_other_splits, rule, tell, _GLOB)
        return of_split

    def _walk(self, folder: str) -> list[str]:
        """Return all files below a folder, through links, except hidden files. A folder
        to which two paths lead counts once.
        """

        def refuse(error: OSError) -> None:
            raise self._cannot_be_read(error.filename, error) from error

        def is_new(path: str) -> bool:
            real = os.path.realpath(path)
            if real in seen:
                warn_once(
                    f"{self.where}: {path} is left out, because it is a link to {real}, "
                    "which is read already"
                )
                return False
            seen.add(real)
            return True

        files = []
        seen = {os.path.realpath(folder)}
        for at, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
            folders[:] = [
                name
                for name in sorted(folders)
                if not name.startswith(".") and is_new(os.path.join(at, name))
            ]
            files += [
                os.path.join(at, name)
                for name in sorted(names)
                if not name.startswith(".")
            ]
        for path in files:
            self._refuse_dangling(path)
        return files

    def readable(self, paths: Sequence[str]) -> list[str]:
        """Return the files in formats that are read, and leave out all others."""
        unread = [path for path in paths if not is_readable(path)]
        usual = [path for path in unread if path.endswith(_NO_DATA)]
        unusual = [path for path in unread if not path.endswith(_NO_DATA)]
        self.leave_out(usual, UNREAD, _note)
        self.leave_out(unusual, UNREAD, warn_once)
        return [path for path in paths if is_readable(path)]

    def check_formats(self, paths: Collection[str]) -> None:
        """Raise ConfigError if there are both files of token ids and files of text."""
        ids = [path for path in paths if suffix_of(path) in TOKEN_IDS]
        texts = [path for path in paths if suffix_of(path) not in TOKEN_IDS]
        if ids and texts:
            example = f"{os.path.dirname(texts[0])}/*{suffix_of(texts[0])}"
            raise ConfigError(
                f"{self.where}, which holds {counted(len(ids), 'file')} of token ids, "
                f"such as {ids[0]!r}, and {len(texts)} of text, such as {texts[0]!r}; "
                f"expected only one of the two: select one by a glob, such as "
                f"{example!r}"
            )

    def _cannot_be_read(self, path: str, error: OSError) -> ConfigError:
        return ConfigError(
            f"{self.where}, but {path!r} cannot be read: {error.strerror}. Give read "
            "permission, or name the files by a glob"
        )

    def _refuse_dangling(self, path: str) -> None:
        """Raise ConfigError for a broken link, and for a path that cannot be examined."""
        try:
            os.stat(path)
        except FileNotFoundError as error:
            raise ConfigError(
                f"{self.where}, but {path!r} is a link to {os.readlink(path)!r}, which "
                "does not exist: restore it, or remove the link"
            ) from error
        except OSError as error:
            raise self._cannot_be_read(path, error) from error


def _searched(pattern: str) -> Iterator[str]:
    """Yield the folders whose entries decide what a glob matches."""
    parts = Path(pattern).parts
    for i, part in enumerate(parts):
        if not is_pattern(part):
            continue
        above = os.path.join(os.curdir, *parts[:i])
        for folder in glob(above, recursive=True) if is_pattern(above) else [above]:
            if os.path.isdir(folder):
                yield folder
                if part == "**":
                    below = os.path.join(glob_escape(folder), "**", "")
                    yield from glob(below, recursive=True)


def files_named(paths: Collection[str], split: str, narrow: bool) -> list[str]:
    """Return the files of a split, whose names contain a mark of the split as a word.

    Files without any split's mark are training data, too. There is one exception: if
    names are ``narrow``, as C4's are, and a file's name says "train", then only files
    whose names say so are training data. In other folders, one file called
    train_schedules would exclude all other files. The word "test" marks a split only if
    another file's name marks a split, because a text about tests is training data.
    """

    def says(path: str, words: Iterable[str]) -> bool:
        name = os.path.basename(path).lower()
        return bool(re.search(rf"(?<![a-z])({'|'.join(words)})(?![a-z])", name))

    marked = [path for path in paths if says(path, _MARKS[split])]
    if split != "train" or (marked and narrow):
        return marked
    held_out_marks = _MARKS["validation"]
    if marked or any(says(path, held_out_marks) for path in paths):
        held_out_marks += _MARKS["test"]
    training = {*marked}
    return [
        path for path in paths if path in training or not says(path, held_out_marks)
    ]


def _kept_back(paths: Collection[str], folder: str) -> set[str]:
    """Return the plain texts that are held out for validation, chosen by a hash of their
    names: at least 1 % of them.

    None are held out if there are fewer than 100 files, if there are files in other
    formats, or if a name contains the word validation.
    """
    if (
        len(paths) < 100
        or any(suffix_of(path) not in PLAIN_TEXT for path in paths)
        or files_named(paths, "validation", narrow=True)
    ):
        return set()

    def by_hash(path: str) -> bytes:
        name = os.path.relpath(path, folder).encode(errors="replace")
        return hashlib.sha256(name).digest()

    number = max(len(paths) // 100, min(20, len(paths) // 20))
    return set(sorted(paths, key=by_hash)[:number])


def _counts(paths: Iterable[str]) -> str:
    counts = Counter(map(suffix_of, paths))
    return ", ".join(f"{count} *{suffix}" for suffix, count in sorted(counts.items()))


def on_rank_0(
    function: Callable[..., T], *args: Any, group: dist.ProcessGroup | None = None
) -> T:
    """Return, on all ranks, the result of ``function``, which only rank 0 calls. An
    error of the function is raised on all ranks.

    This is a collective call of ``group``, which must hold all ranks. If hundreds of
    ranks listed the files, the hub would answer 429 and a shared file system would be
    overloaded.
    """
    if (
        not dist.is_initialized()
        or dist.get_world_size() == 1
        or dist.get_backend() == "fake"
    ):
        return function(*args)
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [function(*args)]
        except UserError as error:
            box = [error]
        except Exception as error:  # not every exception can be pickled
            box = [RuntimeError(f"rank 0: {type(error).__name__}: {error}")]
    dist.broadcast_object_list(box, src=0, group=group)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]
