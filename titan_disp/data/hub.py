"""This module lists the files of allenai/c4 on the Hugging Face hub. hub_dataset uses its helpers for others."""

import re
from dataclasses import dataclass
from typing import Any

from titan_disp.errors import ConfigError

DATASET = "allenai/c4"
FOLDER = "en"
ANSWER_SECONDS = 30.0  # time-out of the request for the commit


@dataclass(frozen=True)
class HubFile:
    """Describe a file of a data set at one commit.

    Attributes:
        path: path in the repository, such as en/c4-train.00000-of-01024.json.gz.
        index: the file's number among the files of the split.
        size: in bytes.
        sha256: of the content; None if the hub does not say.
    """

    path: str
    index: int
    size: int
    sha256: str | None


@dataclass(frozen=True)
class Listing:
    """Hold the files of a split at one commit, so that all ranks read the same data."""

    repository: str
    commit: str
    files: list[HubFile]

    def url(self, file: HubFile) -> str:
        return f"hf://datasets/{self.repository}@{self.commit}/{file.path}"


def cannot_list(name: str, error: Exception, fetch: str) -> ConfigError:
    """Make a ConfigError from what huggingface_hub, httpx or the operating system raised.

    Args:
        name: the data set.
        error: what was raised.
        fetch: the arguments of ``titan-disp data fetch`` that mirror the data set.
    """
    return ConfigError(
        f"cannot list {name} on the Hugging Face hub ({type(error).__name__}: {error}). Without internet, use a local "
        f"copy: dataset_path (titan-disp data fetch {fetch} makes one on a machine with internet)"
    )


def entries_in(repository: str, commit: str, folder: str, recursive: bool) -> dict[str, Any]:
    """Return the hub's entries of all files in a folder, by path. It raises what huggingface_hub raises."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    entries = HfApi().list_repo_tree(
        repository, folder or None, recursive=recursive, revision=commit, repo_type="dataset"
    )
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def hub_file(entry: Any, index: int) -> HubFile:
    return HubFile(entry.path, index, entry.size, entry.lfs.sha256 if entry.lfs else None)


def c4_files(split: str) -> Listing:
    """List C4's files of a split.

    Raises:
        ConfigError: the hub cannot be reached, or has no such files.
    """
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(DATASET, timeout=ANSWER_SECONDS).sha or ""
        entries = entries_in(DATASET, commit, FOLDER, recursive=False)
    except Exception as error:  # see cannot_list
        raise cannot_list(DATASET, error, "DIR") from error
    pattern = re.compile(rf"{FOLDER}/c4-{split}\.(\d+)-of-\d+\.json\.gz")
    files = [hub_file(entry, int(match[1])) for path, entry in entries.items() if (match := pattern.fullmatch(path))]
    if not files or not commit:
        raise ConfigError(f"{DATASET} on the hub holds no {FOLDER}/c4-{split}.*.json.gz")
    return Listing(DATASET, commit, sorted(files, key=lambda file: file.index))
