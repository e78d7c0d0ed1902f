"""allenai/c4 on the Hugging Face hub: which files there are, and a mirror of them on disk."""

import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from titan_disp.errors import ConfigError

DATASET = "allenai/c4"
FOLDER = "en"


@dataclass(frozen=True)
class HubFile:
    """A file of the data set at one commit.

    Attributes:
        path: in the repository, such as en/c4-train.00000-of-01024.json.gz.
        index: its number among the files of the split.
        sha256: of the content, or None where the hub does not say.
    """

    path: str
    index: int
    size: int
    sha256: str | None


def hub_files(split: str) -> tuple[str, list[HubFile]]:
    """(commit, files of the split), resolved once so that all ranks and all restarts of a job read the same.

    Raises:
        ConfigError: the hub cannot be reached, or has no such files.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    try:
        api = HfApi()
        commit = api.dataset_info(DATASET).sha
        entries = list(api.list_repo_tree(DATASET, FOLDER, revision=commit, repo_type="dataset"))
    except Exception as error:  # huggingface_hub, httpx and OSError each raise their own
        raise ConfigError(
            f"cannot list {DATASET} on the Hugging Face hub ({type(error).__name__}: {error}). Without internet, use a local "
            "copy: dataset_path (titan-disp data fetch DIR makes one where there is internet)"
        ) from error
    pattern = re.compile(rf"{FOLDER}/c4-{split}\.(\d+)-of-\d+\.json\.gz")
    files = [
        HubFile(entry.path, int(match[1]), entry.size, entry.lfs.sha256 if entry.lfs else None)
        for entry in entries
        if isinstance(entry, RepoFile) and (match := pattern.fullmatch(entry.path))
    ]
    if not files or commit is None:
        raise ConfigError(f"{DATASET} on the hub holds no {FOLDER}/c4-{split}.*.json.gz")
    return commit, sorted(files, key=lambda file: file.index)


def parse_shards(text: str | None) -> list[range] | None:
    """ "0-63,100" → ranges; None for all.

    Raises:
        ConfigError: not of this form.
    """
    if text is None:
        return None
    found = [re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip()) for part in text.split(",")]
    if not all(found):
        raise ConfigError(f"--shards is {text!r}, expected numbers and ranges such as 0-63,100")
    return [range(int(m[1]), int(m[2] or m[1]) + 1) for m in found if m]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _problem(file: HubFile, path: Path) -> str | None:
    """What is wrong with a local copy, or None."""
    if not path.is_file():
        return "missing"
    if path.stat().st_size != file.size:
        return f"{path.stat().st_size} bytes, expected {file.size}"
    if file.sha256 is not None and _sha256(path) != file.sha256:
        return "its sha256 differs from the hub's"
    return None


def fetch(
    folder: Path, split: str, shards: Sequence[range] | None = None, workers: int = 4, attempts: int = 3
) -> list[str]:
    """Mirror C4 files into ``folder/en``. Sound copies are kept, broken downloads are resumed, damaged files are replaced.

    Args:
        folder: root of the mirror, to be used as training.dataset_path.
        split: train or validation.
        shards: which of the split's files; None for all.
        workers: downloads at a time. attempts: per file.

    Returns:
        What is still missing or damaged, one line a file; empty when the mirror is complete.

    Raises:
        ConfigError: the hub cannot be listed, or no file is among ``shards``.
    """
    from huggingface_hub import hf_hub_download
    from tqdm import tqdm

    commit, files = hub_files(split)
    wanted = [f for f in files if shards is None or any(f.index in r for r in shards)]
    if not wanted:
        raise ConfigError(f"--shards names none of the {len(files)} {split} files, 0 to {files[-1].index}")

    def mirror(file: HubFile) -> str | None:
        path = folder / file.path
        problem: str | None = None
        for attempt in range(attempts + 1):
            try:
                if (problem := _problem(file, path)) is None:
                    return None
                if attempt < attempts:
                    hf_hub_download(
                        DATASET,
                        file.path,
                        repo_type="dataset",
                        revision=commit,
                        local_dir=folder,
                        force_download=path.exists(),  # what is there is damaged
                    )
            except Exception as error:  # as above
                problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return f"{file.path}: {problem}"

    left = []
    total = sum(file.size for file in wanted)
    with ThreadPoolExecutor(workers) as pool, tqdm(total=total, unit="B", unit_scale=True, desc=f"C4 {split}") as bar:
        running = {pool.submit(mirror, file): file for file in wanted}
        for done in as_completed(running):
            if (problem := done.result()) is not None:
                left.append(problem)
            bar.update(running[done].size)
    return sorted(left)
