"""``titan-disp data fetch`` makes a local copy (mirror) of a data set on the hub, or of
some of its files.

Each file is downloaded by ``hf_hub_download`` and then checked. ``snapshot_download``
of huggingface_hub 1.31 to 2.4 does not check: it takes any file of the right name if an
earlier call wrote it at the same commit, even if it is cut off or damaged. It also
stops all downloads if one fails, and compares every path of the repository with every
pattern, which takes minutes for 25,000 files. ``verify_repo_checksums`` hashes all
files in the folder, also those of other splits, one after another.
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

DOWNLOADS = 3  # of a file that stays missing or damaged


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
    """The files of a split."""

    name: HubName
    files: list[HubFile]

    def of_shards(self, shards: list[range] | None) -> list[HubFile]:
        """Return the files with these numbers, or raise ConfigError if there is none."""
        if shards is None:
            return self.files
        files = [
            file for file in self.files if any(file.index in part for part in shards)
        ]
        if not files:
            numbers = f"0 to {self.files[-1].index}, such as {self.files[0].path}"
            raise ConfigError(
                f"--shards names none of the files, which have the numbers {numbers}"
            )
        return files


def fetch(options: FetchOptions) -> list[str]:
    """Return a line for each file that is still missing or damaged after mirroring.

    ConfigError is raised if the data set cannot be listed, or ``shards`` is malformed
    or selects no file.
    """
    check_least(options, workers=1)
    shards = parse_shards(options.shards)
    listings = _listings(options)
    problems = []
    for listing in listings:
        # They number the training files, which come last, or those of a single split.
        files = listing.of_shards(shards if listing is listings[-1] else None)
        of_split = _mirror(options.folder, files, options.workers)
        if listing.name != C4 and not of_split:  # the names of C4's files say enough
            _write_record(options.folder, listing, files)
        problems += of_split
    return problems


def _listings(options: FetchOptions) -> list[Listing]:
    """Return the listings of the splits to fetch, with the training files last."""
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
    """Return a line for each file that is still missing or damaged after mirroring."""
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
    """Return what is wrong with a file after up to three downloads, or None.

    A sound copy is kept, and a damaged one is replaced.
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
        # huggingface_hub, httpx and the system each raise their own types
        except Exception as error:
            cause = f" ({first_line(error)})"
    problem = _problem(file, path)
    return None if problem is None else f"{problem}{cause}"


def _problem(file: HubFile, path: Path) -> str | None:
    """Return what is wrong with a copy of a file, or None."""
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
    """Record the files of a split, with those that earlier commands fetched with other
    ``shards``.
    """
    path = record_path(folder, listing.name)
    recorded: set[tuple[str, int]] = set()
    if path.exists():
        recorded = set(map(tuple, json.loads(path.read_text())["files"]))
    # without those that a former commit had
    recorded &= {(file.path, file.size) for file in listing.files}
    recorded |= {(file.path, file.size) for file in files}
    content = {
        "dataset": str(listing.name),
        "commit": files[0].commit,
        "files": sorted(recorded),
    }
    path.parent.mkdir(exist_ok=True)
    write_json(path, content)
