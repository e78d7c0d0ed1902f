"""``titan-disp data fetch`` makes a local copy (mirror) of a data set on the hub, or of
some of its files.

Each file is downloaded by ``hf_hub_download`` and then checked. ``snapshot_download``
of huggingface_hub 1.31 to 2.4 keeps any file that an earlier call wrote at the same
commit, even if the file is truncated or damaged. ``snapshot_download`` also stops all
downloads if one download fails, and compares every path of the repository with every
pattern, which takes minutes for 25,000 files. ``verify_repo_checksums`` is slow,
because it hashes all files in the folder one after another, including files of other
splits.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from huggingface_hub import hf_hub_download

from titan_disp.config.command_options import FetchOptions, check_least
from titan_disp.data.stores import (
    C4,
    FORM,
    HubFile,
    HubName,
    c4_files,
    is_hub_name,
    parse_name,
    record_path,
    resolve,
)
from titan_disp.errors import ConfigError, first_line
from titan_disp.files import in_parallel, progress, sha256_of
from titan_disp.run.storage import write_json

DOWNLOADS = 3  # attempts for each file


def parse_shards(text: str | None) -> list[range] | None:
    """Return the ranges in a text such as 0-63,100; None stands for all shards.

    Raises ConfigError if the text has anything else.
    """
    if text is None:
        return None
    ranges = []
    for part in text.split(","):
        numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        shards = range(0)
        if numbers:
            first = int(numbers[1])
            last = int(numbers[2] or first)
            shards = range(first, last + 1)
        if not shards:
            raise ConfigError(
                f"--shards is {text!r}, expected numbers and ascending ranges such as "
                "0-63,100"
            )
        ranges.append(shards)
    return ranges


@dataclass(frozen=True)
class Listing:
    """The files of one split of a data set."""

    name: HubName
    files: list[HubFile]

    def of_shards(self, shards: list[range] | None) -> list[HubFile]:
        """Return the files whose numbers are in ``shards``; None stands for all files.

        Raises ConfigError if there is no such file.
        """
        if shards is None:
            return self.files
        files = [
            file for file in self.files if any(file.index in part for part in shards)
        ]
        if not files:
            numbers = f"0 to {self.files[-1].index} (0 is {self.files[0].path})"
            raise ConfigError(f"--shards names no file; expected numbers {numbers}")
        return files


def fetch(options: FetchOptions) -> list[str]:
    """Download a data set, and return a line for each file that is still missing or
    damaged.

    Raises ConfigError if the data set cannot be listed, or ``shards`` is malformed or
    selects no file.
    """
    check_least(options, workers=1)
    shards = parse_shards(options.shards)
    listings = _listings(options)
    problems = []
    for listing in listings:
        # --shards numbers the files of the last split, usually the training split.
        files = listing.of_shards(shards if listing is listings[-1] else None)
        of_split = _mirror(options.folder, files, options.workers)
        # C4 needs no record: the names of its files contain the split and the count.
        if listing.name != C4 and not of_split:
            _write_record(options.folder, listing, files)
        problems += of_split
    return problems


def _listings(options: FetchOptions) -> list[Listing]:
    """Return the listings of the splits to fetch, the training split last.

    Raises ConfigError if the data set or the split does not exist.
    """
    dataset = options.dataset
    splits: list[str] = [options.split]
    if options.split == "both":
        splits = ["validation", "train"]
    if dataset == "c4":
        return [Listing(C4, c4_files(split)) for split in splits]
    if not is_hub_name(dataset):
        raise ConfigError(f"--dataset is {dataset!r}, expected c4, {FORM}")
    name = parse_name(dataset, "--dataset")
    where = f"--dataset is {dataset!r}"
    if name.split is not None:
        if options.split not in ("both", name.split):
            raise ConfigError(
                f"{where}, but --split is {options.split!r}: name the split in one of "
                "them"
            )
        splits = [name.split]
    configuration = resolve(name, where)
    if len(splits) > 1 and "validation" not in configuration.splits:
        splits = ["train"]
    return [
        Listing(replace(name, split=split), configuration.files(split, where))
        for split in splits
    ]


def _mirror(folder: Path, files: list[HubFile], workers: int) -> list[str]:
    """Download ``files``, and return a line for each file that is still missing or
    damaged.
    """
    total = sum(file.size for file in files)
    lines = []
    with (
        ThreadPoolExecutor(workers) as pool,
        progress(files[0].repository, "B", total=total) as bar,
    ):
        for file, problem in in_parallel(pool, partial(_mirror_file, folder), files):
            if problem is not None:
                lines.append(f"{file.path}: {problem}")
            bar.update(file.size)
    return sorted(lines)


def _mirror_file(folder: Path, file: HubFile) -> str | None:
    """Download a file, and return what is still wrong with the file after ``DOWNLOADS``
    attempts, or None.

    A sound copy is kept. A damaged copy is replaced.
    """
    path = folder / file.path
    cause = ""
    for _ in range(DOWNLOADS):
        if _problem(file, path) is None:
            return None
        try:
            hf_hub_download(
                file.repository,
                file.path,
                repo_type="dataset",
                revision=file.commit,
                local_dir=folder,
                force_download=path.exists(),  # the existing file is damaged
            )
        # huggingface_hub, httpx and the system raise errors of many types
        except Exception as error:
            cause = f" ({first_line(error)})"
    if problem := _problem(file, path):
        return f"{problem}{cause}"
    return None


def _problem(file: HubFile, path: Path) -> str | None:
    """Return what is wrong with the copy of ``file`` at ``path``, or None."""
    try:
        if not path.is_file():
            return "missing"
        size = path.stat().st_size
        if size != file.size:
            return f"{size} bytes, expected {file.size}"
        if file.sha256 is not None and file.sha256 != sha256_of(path):
            return "its sha256 differs from the hub's"
    except OSError as error:
        return first_line(error)
    return None


def _write_record(folder: Path, listing: Listing, files: list[HubFile]) -> None:
    """Write the record of a split: ``files``, and the files that earlier commands
    fetched with other ``shards``.
    """
    path = record_path(folder, listing.name)
    recorded: set[tuple[str, int]] = set()
    if path.exists():
        recorded = set(map(tuple, json.loads(path.read_text())["files"]))
    # Files that only an earlier commit had are dropped.
    recorded &= {(file.path, file.size) for file in listing.files}
    recorded |= {(file.path, file.size) for file in files}
    content = {
        "dataset": str(listing.name),
        "commit": files[0].commit,
        "files": sorted(recorded),
    }
    path.parent.mkdir(exist_ok=True)
    write_json(path, content)
