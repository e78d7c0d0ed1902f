"""This module lists files on the Hugging Face hub, in mirrors of its data sets, and in
object stores.

For a data set on the hub, the files of one configuration and one split are listed. As in
``load_dataset``, the ``datasets`` library decides which files these are: by the
configurations in the README, or else by the names of files and folders. All requests are
about one commit, so that all ranks read the same data.

A *mirror* is a local copy of a data set's files, or of some of them. The names of C4's
files say which split they belong to. For other data sets, ``titan-disp data fetch``
writes a record into the mirror for each split whose chosen files are complete. The
mirror can then be read without the hub and the README.

Object stores (S3, stores like S3, and Google Cloud Storage) are read through fsspec.
Files on the hub that a URL names are also read through fsspec.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from titan_disp.data.formats import NAMES, is_readable
from titan_disp.errors import ConfigError, first_line
from titan_disp.retry import chain, may_recover, response_of, retried

DATASET = "allenai/c4"
FOLDER = "en"
# time-out of a request, including the tries that a store's own library makes
REQUEST_SECONDS = 30.0
LISTING_SECONDS = 60.0  # how long a store that is busy or fails is asked again
FIND_SECONDS = 600.0  # time-out of a whole listing: a request for each 1,000 objects
PREFIX = "hf:"
FORM = "hf:OWNER/NAME, hf:OWNER/NAME:CONFIGURATION or hf:OWNER/NAME:CONFIGURATION:SPLIT"
RECORDS = ".titan-disp"  # folder in a mirror; hidden, so that it is not listed as data
TOKEN = "a token of an account that has it (hf auth login, or HF_TOKEN)"
ACCESS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws (AWS_ENDPOINT_URL if it is not Amazon's, FSSPEC_S3_ANON=1 "
    "if it is public)",
    "gs": "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS (FSSPEC_GS_TOKEN=anon if it is public)",
    "hf": "a token (hf auth login, or HF_TOKEN)",
}
T = TypeVar("T")


@dataclass(frozen=True)
class HubName:
    """The name of a data set on the hub, written
    hf:OWNER/NAME[@REVISION][:CONFIGURATION[:SPLIT]].

    The default revision (branch, tag or commit) is main. The default configuration is
    the data set's own.
    """

    repository: str
    revision: str | None = None
    config: str | None = None
    split: str | None = None

    def __str__(self) -> str:
        text = PREFIX + self.repository
        if self.revision:
            text += f"@{self.revision}"
        if self.config or self.split:
            text += f":{self.config or ''}"
        if self.split:
            text += f":{self.split}"
        return text

    @property
    def fetch_arguments(self) -> str:
        """What to type after ``titan-disp data fetch``."""
        return "DIR" if self == C4 else f"DIR --dataset '{self}'"


C4 = HubName(DATASET)


def is_hub_name(dataset: str) -> bool:
    return dataset.startswith(PREFIX)


def parse_name(dataset: str, where: str) -> HubName:
    """Return the parts of a name such as hf:OWNER/NAME:CONFIGURATION.

    Raises ConfigError if it is not such a name. The message begins with ``where``, such
    as "training.dataset".
    """
    # hf:OWNER/NAME::SPLIT is a split of the default configuration.
    matched = re.fullmatch(
        rf"{PREFIX}(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[^:]+))?"
        r"(:(?P<config>[^:]+)|:(?P<other>[^:]*):(?P<split>[^:]+))?",
        dataset,
    )
    if matched is None:
        raise ConfigError(
            f"{where} is {dataset!r}, expected {FORM} (OWNER/NAME@REVISION for a "
            "branch, tag or commit)"
        )
    return HubName(
        matched["repository"],
        revision=matched["revision"],
        config=matched["config"] or matched["other"] or None,
        split=matched["split"],
    )


@dataclass(frozen=True)
class HubFile:
    """A file of a data set at one commit, so that all ranks read the same data."""

    repository: str
    commit: str
    path: str  # in the repository, such as en/c4-train.00000-of-01024.json.gz
    size: int
    sha256: str | None  # of the content; None if the hub does not say
    index: int = 0  # the file's number among the files of the split

    @property
    def url(self) -> str:
        return f"hf://datasets/{self.repository}@{self.commit}/{self.path}"


@dataclass(frozen=True)
class HubDataset:
    """One configuration of a data set at one commit."""

    name: HubName
    repository: str  # the repository's present name
    commit: str
    splits: dict[str, list[str]]  # the paths of each split's files

    def files(self, split: str, where: str) -> list[HubFile]:
        paths = files_of_split(self.splits, split, self.name, where)
        folder = os.path.commonpath([os.path.dirname(path) for path in paths])
        files = files_in(self.name, self.repository, self.commit, folder)
        return [replace(files[path], index=index) for index, path in enumerate(paths)]


def resolve(name: HubName, where: str) -> HubDataset:
    """Return the files of a data set on the hub.

    Raises ConfigError if there is no such data, if access is denied, or if the hub cannot
    be reached.
    """
    repository, commit = commit_of(name, where)
    url = f"hf://datasets/{repository}"
    # A name would be taken for a local folder of that name. (datasets takes an hf://
    # URL only since version 4.8.)
    source = url if os.path.isdir(repository) else repository
    splits = splits_in(source, name, commit, where)
    inside = f"{url}@{commit}/"
    paths = {
        split: [url.removeprefix(inside) for url in urls]
        for split, urls in splits.items()
    }
    return HubDataset(name, repository, commit, paths)


def c4_files(split: str) -> list[HubFile]:
    """Return the files of a split of C4, sorted by the numbers in their names."""
    _, commit = commit_of(C4, "the data set c4")
    pattern = re.compile(rf"{FOLDER}/c4-{split}\.(\d+)-of-\d+\.json\.gz")
    files = [
        replace(file, index=int(matched[1]))
        for path, file in files_in(C4, DATASET, commit, FOLDER).items()
        if (matched := pattern.fullmatch(path))
    ]
    if not files:
        raise ConfigError(
            f"{DATASET} on the hub holds no {FOLDER}/c4-{split}.*.json.gz"
        )
    return sorted(files, key=lambda file: file.index)


def _cannot_list(name: HubName, error: Exception) -> ConfigError:
    """Return a ConfigError for any error: huggingface_hub, datasets, httpx and the
    system each raise their own types.
    """
    return ConfigError(
        f"cannot list {name} on the Hugging Face hub ({type(error).__name__}: "
        f"{error}). Without internet, use a local copy: dataset_path (titan-disp data "
        f"fetch {name.fetch_arguments} makes one on a machine with internet)"
    )


def _patiently(ask: Callable[[], T]) -> T:
    """Return what ``ask`` returns, which is the hub's answer.

    If the hub is busy or fails, it is asked again for up to a minute. Without internet,
    the error is raised at once.
    """
    from huggingface_hub.utils import httpx

    def may_pass(error: Exception) -> bool:
        if response_of(error) is not None:
            return may_recover(error)
        broken = (httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError)
        return any(isinstance(cause, broken) for cause in chain(error))

    return retried(ask, LISTING_SECONDS, "data: the list of files", may_pass)


def files_in(
    name: HubName, repository: str, commit: str, folder: str
) -> dict[str, HubFile]:
    """Return the files in a folder of a repository and below it, by path."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    def tree() -> list[Any]:
        entries = HfApi().list_repo_tree(
            repository,
            folder or None,
            recursive=True,
            revision=commit,
            repo_type="dataset",
        )
        return list(entries)

    try:
        entries = _patiently(tree)
    except Exception as error:  # see _cannot_list
        raise _cannot_list(name, error) from error
    return {
        entry.path: HubFile(
            repository,
            commit,
            path=entry.path,
            size=entry.size,
            sha256=entry.lfs.sha256 if entry.lfs else None,
        )
        for entry in entries
        if isinstance(entry, RepoFile)
    }


def commit_of(name: HubName, where: str) -> tuple[str, str]:
    """Return a repository's present name and the commit of a revision. This takes one
    request, or two if the data set is gated.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    api = HfApi()
    page = f"huggingface.co/datasets/{name.repository}"
    problems: dict[type[Exception], str] = {
        GatedRepoError: f"the data set is gated. Accept its terms or ask for access at {page}, and use {TOKEN}",
        RepositoryNotFoundError: f"there is no such data set on the hub, or it is private (its page: {page}): then use {TOKEN}",
        RevisionNotFoundError: f"the data set has no revision {name.revision!r}, see {page}/tree/main",
    }
    try:
        info = _patiently(
            lambda: api.dataset_info(
                name.repository, revision=name.revision, timeout=REQUEST_SECONDS
            )
        )
        if info.gated:
            _patiently(lambda: api.auth_check(info.id, repo_type="dataset"))
    except Exception as error:  # see _cannot_list
        problem = problems.get(type(error))
        if getattr(response_of(error), "status_code", 0) in (401, 403):
            problem = problem or f"the hub refuses access. See {page}, and use {TOKEN}"
        if problem is None:
            raise _cannot_list(name, error) from error
        raise ConfigError(f"{where}: {problem}") from error
    assert info.sha is not None
    return info.id, info.sha


def splits_in(
    root: str, name: HubName, commit: str | None, where: str
) -> dict[str, list[str]]:
    """Return {split: paths or URLs of its files} for each split of a configuration.

    ``root`` is OWNER/NAME, hf://datasets/OWNER/NAME, or a local folder with all files of
    the data set. For a local folder, ``commit`` is None.
    """
    from datasets import get_dataset_config_names, load_dataset_builder
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError

    def ask(function: Any, *args: Any) -> Any:
        # The cache is empty because, if the hub fails, datasets would use what an
        # earlier download has left there.
        with tempfile.TemporaryDirectory() as cache:
            return function(root, *args, revision=commit, cache_dir=cache)

    try:
        builder = _patiently(lambda: ask(load_dataset_builder, name.config))
    except Exception as error:  # see _cannot_list
        problem = f"{type(error).__name__}: {error}"
        expected = f"expected files such as {NAMES}"
        lacks = ""
        if "Config name is missing" in problem:
            lacks = "no default configuration"
        elif f"'{name.config}' not found" in problem:
            lacks = f"no configuration {name.config!r}"
        no_data = (EmptyDatasetError, DataFilesNotFoundError)
        if "scripts are no longer supported" in problem:
            problem = (
                "the data set is made by a script on the hub, which datasets no longer "
                f"runs. Use a copy: {expected}"
            )
        elif isinstance(error, no_data) or "Unable to find" in problem:
            problem = f"datasets finds no data there ({error}); {expected}"
        elif lacks:
            names = ask(get_dataset_config_names)
            example = str(replace(name, config=names[0]))
            problem = (
                f"it has {lacks}, only {', '.join(names)}; name one, such as "
                f"{example!r}"
            )
        elif commit is None:
            problem = (
                f"datasets cannot read this folder ({problem}); expected a mirror, as "
                f"titan-disp data fetch {name.fetch_arguments} makes it, or a full copy "
                "of the repository"
            )
        elif isinstance(error, (ValueError, DatasetNotFoundError)):
            problem = f"datasets cannot tell which files belong to it: {error}"
        else:
            raise _cannot_list(name, error) from error
        raise ConfigError(f"{where}: {problem}") from error
    files = builder.config.data_files or {}
    return {split: list(paths) for split, paths in files.items()}


def files_of_split(
    splits: Mapping[str, list[str]], split: str, name: HubName, where: str
) -> list[str]:
    """Return the sorted paths of a split's files.

    Raises ConfigError if there is no such split, or if a file has a format that is not
    read.
    """
    if split not in splits:
        example = str(replace(name, split=next(iter(splits), "SPLIT")))
        raise ConfigError(
            f"{where}: it has no split {split!r}, only {', '.join(splits)}; name "
            f"one, such as {example!r}"
        )
    paths = sorted(set(splits[split]))
    if unread := [path for path in paths if not is_readable(path)]:
        raise ConfigError(
            f"{where}: the split has files that cannot be read ({len(unread)} of "
            f"{len(paths)}, such as {unread[0]}); expected names such as {NAMES}"
        )
    return paths


def record_path(folder: Path, name: HubName) -> Path:
    """Return the path of the record in which ``titan-disp data fetch`` lists the files
    of a split in a mirror.
    """
    return folder / RECORDS / (re.sub(r"[^\w.@-]+", "--", str(name)) + ".json")


def mirrored_files(folder: str, name: HubName, where: str) -> dict[str, int]:
    """Return the sizes of a split's files in a mirror, or in a full copy of its
    repository, by path.

    Raises ConfigError if files are missing or have another size than on the hub.
    """
    root = Path(folder)
    fetch = f"titan-disp data fetch {quote(folder)} --dataset '{name}'"
    if not root.is_dir():
        raise ConfigError(
            f"{where}, which is not a folder. Expected a mirror, as titan-disp data "
            f"fetch {name.fetch_arguments} makes one; for other files, set dataset = "
            '"text"'
        )
    path = record_path(root, name)
    records = sorted((root / RECORDS).glob("*.json"))
    if path.exists():
        sizes = {
            str(root / file): size
            for file, size in json.loads(path.read_text())["files"]
        }
    elif records:
        held = [json.loads(record.read_text())["dataset"] for record in records]
        raise ConfigError(
            f"{where}, which holds {', '.join(held)}, but not {name}: {fetch}"
        )
    else:
        splits = splits_in(str(root.absolute()), name, None, where)
        paths = files_of_split(splits, name.split or "", name, where)
        return {path: os.path.getsize(path) for path in paths}
    wrong = [
        file
        for file, size in sizes.items()
        if not os.path.isfile(file) or os.path.getsize(file) != size
    ]
    if wrong:
        raise ConfigError(
            f"{where}, where files are missing or have another size than on the hub "
            f"({len(wrong)} of {len(sizes)}, such as {wrong[0]}): {fetch}"
        )
    return sizes


def is_url(path: str) -> bool:
    return re.match(r"\w+://", path) is not None


def is_pattern(path: str) -> bool:
    return any(c in path for c in "*?[")


def is_folder(path: str) -> bool:
    """Return whether a path is a local folder, or a URL that is read as one."""
    return os.path.isdir(path) or (
        is_url(path) and not is_pattern(path) and not is_readable(path)
    )


@cache
def _store(scheme: str) -> Any:
    import fsspec

    try:  # without a cache of listings, so that changes are noticed
        return fsspec.filesystem(
            scheme, skip_instance_cache=True, use_listings_cache=False
        )
    except ImportError as error:
        raise ConfigError(
            f"{scheme}:// needs a package ({error}): pip install {scheme}fs"
        ) from error


# A prefetch worker does not have the threads of its parent.
os.register_at_fork(after_in_child=_store.cache_clear)


def ask(url: str, method: str, **options: Any) -> Any:
    """Return what ``method`` of the URL's store returns. The default of the option
    timeout is ``REQUEST_SECONDS``.
    """
    store = _store(url.split("://")[0])
    if store.async_impl:  # the hub's requests have their own time-out
        options = {"timeout": REQUEST_SECONDS, **options}
    else:
        options.pop("timeout", None)
    return getattr(store, method)(url, **options)


def etag_of(info: Mapping[str, Any]) -> str:
    """Return the store's checksum of an object's content, or "" if it has none."""
    checksums = [info.get(key) for key in ("md5Hash", "ETag", "etag")]
    return next((sum_.strip('"') for sum_ in checksums if sum_), "")


def at_commit(url: str, where: str) -> str:
    """Return a URL of the hub with the commit in place of the revision, or a URL of S3
    or Google Cloud Storage unchanged.

    Raises ConfigError for any other URL.
    """
    if url.startswith(("s3://", "gs://")):
        return url
    on_hub = re.fullmatch(
        r"hf://datasets/([\w.-]+/[\w.-]+)(?:@(refs/\w+/\w+|[^/]+))?(/.*)?", url
    )
    if on_hub is None:
        raise ConfigError(
            f"{where}, expected s3://BUCKET/FOLDER, gs://…, "
            "hf://datasets/OWNER/NAME[@REVISION]/… or a local path"
        )
    repository, commit = commit_of(HubName(on_hub[1], on_hub[2]), where)
    return f"hf://datasets/{repository}@{commit}{on_hub[3] or ''}"


def objects_of(url: str, where: str) -> dict[str, dict[str, Any]]:
    """Return what a store says about each file, by the files' URLs. ``url`` names a
    folder, a glob or a single file. Hidden files are left out.
    """
    scheme = url.split("://")[0]
    method = "glob" if is_pattern(url) else "find"

    def is_file(name: str, info: Mapping[str, Any]) -> bool:
        # A file is hidden if a part of its path that the URL does not name begins with a
        # dot. A folder may be an object, too, with a slash at the end.
        common = os.path.commonprefix((name, url.rstrip("/")))
        is_hidden = "/." in name[len(common) - 1 :]
        return info["type"] == "file" and not is_hidden and not name.endswith("/")

    def find() -> dict[str, dict[str, Any]]:
        infos = {
            # If the URL is that of a file, huggingface_hub 1 returns only the name.
            f"{scheme}://{name}": info or ask(url, "info")
            for name, info in ask(
                url, method, timeout=FIND_SECONDS, detail=True
            ).items()
        }
        files = {name: info for name, info in infos.items() if is_file(name, info)}
        filled = [name for name, info in files.items() if info["size"]]
        if scheme != "hf" and filled:
            # An account may be allowed to list files but not to read them.
            ask(filled[0], "cat_file", start=0, end=1)
        return files

    try:
        return retried(find, LISTING_SECONDS, "data: the list of files", may_recover)
    except ConfigError:
        raise
    except Exception as error:  # each library raises its own types
        raise ConfigError(
            f"{where}, which cannot be read ({first_line(error)}); expected access by "
            f"{ACCESS[scheme]}"
        ) from error


def check_hub(dataset: str, key: str = "training") -> None:
    """Raise ConfigError if the hub does not answer, denies access or has no such data
    set. This takes one or two requests.
    """
    name = parse_name(dataset, f"{key}.dataset") if is_hub_name(dataset) else C4
    commit_of(name, f"{key}.dataset is {dataset!r}")
