"""This module lists the files of data sets on the Hugging Face hub: of allenai/c4, and
of any other.

Of other data sets, the files of one configuration and one split are listed. As in
``load_dataset``, the ``datasets`` library decides which these are: by the
configurations in the README, else by the names of files and folders. It is asked at one
commit, so that all ranks read the same data.
"""

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from titan_disp.data.formats import NAMES, is_readable
from titan_disp.data.retry import chain, may_recover, response_of, retried
from titan_disp.errors import ConfigError

DATASET = "allenai/c4"
FOLDER = "en"
ANSWER_SECONDS = 30.0  # time-out of the request for the commit
LISTING_SECONDS = 60.0  # for which a hub that is busy or fails is asked again
T = TypeVar("T")


@dataclass(frozen=True)
class HubFile:
    """Describe a file of a data set at one commit, so that all ranks read the same
    data.
    """

    repository: str
    commit: str
    path: str  # in the repository, such as en/c4-train.00000-of-01024.json.gz
    size: int
    sha256: str | None  # of the content; None if the hub does not say
    index: int = 0  # the file's number among the files of the split

    @property
    def url(self) -> str:
        return f"hf://datasets/{self.repository}@{self.commit}/{self.path}"


def cannot_list(name: "HubName", error: Exception) -> ConfigError:
    """Make a ConfigError from any error: huggingface_hub, datasets, httpx and the
    system each raise their own.
    """
    return ConfigError(
        f"cannot list {name} on the Hugging Face hub ({type(error).__name__}: "
        f"{error}). Without internet, use a local copy: dataset_path (titan-disp data "
        f"fetch {fetch_arguments(name)} makes one on a machine with internet)"
    )


def patiently(ask: Callable[[], T]) -> T:
    """Return the hub's answer.

    If it is busy or fails, ask again for up to a minute; not without internet.
    """
    from huggingface_hub.utils import httpx

    def may_pass(error: Exception) -> bool:
        if response_of(error) is not None:
            return may_recover(error)
        broken = (httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError)
        return any(isinstance(one, broken) for one in chain(error))

    return retried(ask, LISTING_SECONDS, "data: the list of files", may_pass)


def files_in(
    name: "HubName", repository: str, commit: str, folder: str, recursive: bool
) -> dict[str, HubFile]:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    options: dict[str, Any] = {
        "recursive": recursive,
        "revision": commit,
        "repo_type": "dataset",
    }
    try:
        entries = patiently(
            lambda: list(HfApi().list_repo_tree(repository, folder or None, **options))
        )
    except Exception as error:  # see cannot_list
        raise cannot_list(name, error) from error
    return {
        entry.path: HubFile(
            repository,
            commit,
            entry.path,
            entry.size,
            entry.lfs.sha256 if entry.lfs else None,
        )
        for entry in entries
        if isinstance(entry, RepoFile)
    }


def c4_files(split: str) -> list[HubFile]:
    _, commit = commit_of(C4, "the data set c4")
    found = files_in(C4, DATASET, commit, FOLDER, recursive=False)
    pattern = re.compile(rf"{FOLDER}/c4-{split}\.(\d+)-of-\d+\.json\.gz")
    files = [
        replace(file, index=int(m[1]))
        for path, file in found.items()
        if (m := pattern.fullmatch(path))
    ]
    if not files or not commit:
        raise ConfigError(
            f"{DATASET} on the hub holds no {FOLDER}/c4-{split}.*.json.gz"
        )
    return sorted(files, key=lambda file: file.index)


PREFIX = "hf:"
FORM = "hf:OWNER/NAME, hf:OWNER/NAME:CONFIGURATION or hf:OWNER/NAME:CONFIGURATION:SPLIT"


@dataclass(frozen=True)
class HubName:
    """Name a data set on the hub, written
    hf:OWNER/NAME[@REVISION][:CONFIGURATION[:SPLIT]].

    Without a revision (a branch, tag or commit) it is main; without a configuration,
    the data set's default one.
    """

    repository: str
    revision: str | None = None
    config: str | None = None
    split: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        config = f":{self.config or ''}" if self.config or self.split else ""
        split = f":{self.split}" if self.split else ""
        return f"{PREFIX}{self.repository}{revision}{config}{split}"


C4 = HubName(DATASET)


def is_hub_name(dataset: str) -> bool:
    return dataset.startswith(PREFIX)


def parse_name(dataset: str, where: str) -> HubName:
    """Parse a name such as hf:OWNER/NAME:CONFIGURATION.

    A message begins with ``where``, such as "training.dataset".
    """
    head, *rest = dataset.removeprefix(PREFIX).split(":")
    repository, at, revision = head.partition("@")
    # hf:OWNER/NAME::SPLIT is a split of the default configuration.
    named = is_hub_name(dataset) and (not rest or rest[-1] != "")
    if (
        len(rest) > 2
        or not named
        or bool(at) != bool(revision)
        or not re.fullmatch(r"[\w.-]+/[\w.-]+", repository)
    ):
        raise ConfigError(
            f"{where} is {dataset!r}, expected {FORM} (OWNER/NAME@REVISION for a "
            "branch, tag or commit)"
        )
    config, split = (*rest, "", "")[:2]
    return HubName(repository, revision or None, config or None, split or None)


@dataclass(frozen=True)
class HubDataset:
    """Describe one configuration of a data set at one commit."""

    name: HubName
    repository: str  # its present name
    commit: str
    splits: dict[str, list[str]]  # the paths of each split's files

    def files(self, split: str, where: str) -> list[HubFile]:
        paths = files_of_split(self.splits, split, self.name, where)
        folder = os.path.commonpath([os.path.dirname(path) for path in paths])
        found = files_in(
            self.name, self.repository, self.commit, folder, recursive=True
        )
        return [replace(found[path], index=index) for index, path in enumerate(paths)]


def resolve(name: HubName, where: str) -> HubDataset:
    """Ask the hub for the files of a data set.

    Raise ConfigError if there is no such data, no access or no hub.
    """
    repository, commit = commit_of(name, where)
    url = f"hf://datasets/{repository}"
    # datasets takes an hf:// URL only since 4.8, and a local folder for the name.
    source = url if os.path.isdir(repository) else repository
    splits = splits_in(source, name, commit, where)
    inside = f"{url}@{commit}/"
    paths = {
        split: [url.removeprefix(inside) for url in urls]
        for split, urls in splits.items()
    }
    return HubDataset(name, repository, commit, paths)


def commit_of(name: HubName, where: str) -> tuple[str, str]:
    """Ask the hub for a repository's present name and the commit of a revision, in one
    request, or two if it is gated.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    api = HfApi()
    page = f"huggingface.co/datasets/{name.repository}"
    token = "a token of an account that has it (hf auth login, or HF_TOKEN)"
    try:
        info = patiently(
            lambda: api.dataset_info(
                name.repository, revision=name.revision, timeout=ANSWER_SECONDS
            )
        )
        if info.gated:
            patiently(lambda: api.auth_check(info.id, repo_type="dataset"))
    except Exception as error:  # see cannot_list
        if isinstance(error, GatedRepoError):
            problem = f"the data set is gated. Accept its terms or ask for access at {page}, and use {token}"
        elif isinstance(error, RepositoryNotFoundError):
            problem = f"there is no such data set on the hub, or it is private (its page: {page}): then use {token}"
        elif isinstance(error, RevisionNotFoundError):
            problem = (
                f"the data set has no revision {name.revision!r}, see {page}/tree/main"
            )
        elif isinstance(error, HfHubHTTPError) and error.response.status_code in (
            401,
            403,
        ):
            problem = f"the hub refuses access. See {page}, and use {token}"
        else:
            raise cannot_list(name, error) from error
        raise ConfigError(f"{where}: {problem}") from error
    return info.id, info.sha or ""


def splits_in(
    root: str, name: HubName, commit: str | None, where: str
) -> dict[str, list[str]]:
    """Return the paths or URLs of the files of every split of a configuration.

    ``root`` is OWNER/NAME, hf://datasets/OWNER/NAME, or a folder with all of its
    files: then ``commit`` is None.
    """
    from datasets import get_dataset_config_names, load_dataset_builder
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError

    def ask(function: Any, *args: Any) -> Any:
        # With an empty cache: if the hub fails, datasets would use what an earlier
        # download has left.
        with tempfile.TemporaryDirectory() as cache:
            return function(root, *args, revision=commit, cache_dir=cache)

    try:
        builder = patiently(lambda: ask(load_dataset_builder, name.config))
    except DatasetNotFoundError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # see cannot_list
        problem = str(error)
        expected = f"expected files such as {NAMES}"
        missing = "Config name is missing" in problem
        unknown = f"'{name.config}' not found" in problem
        if "scripts are no longer supported" in problem:
            problem = (
                "the data set is made by a script on the hub, which datasets no longer runs. Use a copy: "
                + expected
            )
        elif (
            isinstance(error, (EmptyDatasetError, DataFilesNotFoundError))
            or "Unable to find" in problem
        ):
            problem = f"datasets finds no data there ({error}); {expected}"
        elif isinstance(error, ValueError) and (missing or unknown):
            names = ask(get_dataset_config_names)
            found = (
                "no default configuration"
                if missing
                else f"no configuration {name.config!r}"
            )
            problem = f"it has {found}, only {', '.join(names)}; such as {str(replace(name, config=names[0]))!r}"
        elif isinstance(error, ValueError):
            problem = f"datasets cannot tell which files belong to it: {error}"
        elif commit is None:  # a folder
            problem = f"datasets cannot read this folder ({type(error).__name__}: {error}); expected a mirror, as "
            problem += f"titan-disp data fetch {fetch_arguments(name)} makes it, or a full copy of the repository"
        else:
            raise cannot_list(name, error) from error
        raise ConfigError(f"{where}: {problem}") from error
    return {
        split: list(files) for split, files in (builder.config.data_files or {}).items()
    }


def files_of_split(
    splits: dict[str, list[str]], split: str, name: HubName, where: str
) -> list[str]:
    """Return the paths of a split's files, sorted, all in formats that are read."""
    if split not in splits:
        example = replace(name, split=next(iter(splits), "SPLIT"))
        raise ConfigError(
            f"{where}: it has no split {split!r}, only {', '.join(splits)}; such as "
            f"{str(example)!r}"
        )
    paths = sorted(set(splits[split]))
    if unread := [path for path in paths if not is_readable(path)]:
        found = f"{len(unread)} of {len(paths)}, such as {unread[0]}"
        raise ConfigError(
            f"{where}: the split has files that cannot be read ({found}); expected "
            f"names such as {NAMES}"
        )
    return paths


def fetch_arguments(name: HubName) -> str:
    return "DIR" if name == C4 else f"DIR --dataset '{name}'"
