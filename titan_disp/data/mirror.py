"""This module makes local copies (mirrors) of data sets on the hub.

The names of C4's files say what they are. For other data sets, ``fetch`` writes a record into the mirror for every
split of which all chosen files are there, so that it can be read without the hub and the README.
"""

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from titan_disp.config.options import FetchOptions
from titan_disp.data.hub import (
    FORM,
    HubFile,
    HubName,
    Listing,
    c4_files,
    fetch_arguments,
    files_of_split,
    is_hub_name,
    parse_name,
    resolve,
    splits_in,
)
from titan_disp.errors import ConfigError
from titan_disp.files import atomic_write, progress

RECORDS = ".titan-disp"  # hidden, so that it is not listed as data


def parse_shards(text: str | None) -> list[range] | None:
    """Parse numbers and ranges such as 0-63,100; None stands for all shards."""
    if text is None:
        return None
    found = [re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip()) for part in text.split(",")]
    if not all(found):
        raise ConfigError(f"--shards is {text!r}, expected numbers and ranges such as 0-63,100")
    ranges = [range(int(m[1]), int(m[2] or m[1]) + 1) for m in found if m]
    for part, one in zip(text.split(","), ranges, strict=True):
        if not one:
            raise ConfigError(f"--shards has the range {part.strip()}, expected the smaller number first")
    return ranges


def fetch(options: FetchOptions) -> list[str]:
    """Mirror a data set, or what is left of it. Return a line for each file that is still missing or damaged.

    ConfigError is raised if the data set cannot be listed, or ``shards`` is malformed or selects no file.
    """
    shards = parse_shards(options.shards)
    wanted: list[str] = ["validation", "train"] if options.split == "both" else [options.split]
    if options.dataset == "c4":
        listings: list[tuple[HubName | None, Listing]] = [(None, c4_files(one)) for one in wanted]
    else:
        listings = _listings(options.dataset, options.split, wanted)
    left = []
    for record, listing in listings:
        some = shards if listing is listings[-1][1] else None
        chosen = [file for file in listing.files if some is None or any(file.index in part for part in some)]
        if not chosen:
            numbers = f"0 to {listing.files[-1].index}, such as {listing.files[0].path}"
            raise ConfigError(f"--shards names none of the files, which have the numbers {numbers}")
        missing = _mirror(options.folder, listing, chosen, options.workers)
        if record is not None and not missing:
            _write_record(options.folder, record, listing, chosen)
        left += missing
    return left


def _listings(dataset: str, split: str, wanted: list[str]) -> list[tuple[HubName | None, Listing]]:
    if not is_hub_name(dataset):
        raise ConfigError(f"--dataset is {dataset!r}, expected c4, {FORM}")
    name, where = parse_name(dataset, "--dataset"), f"--dataset is {dataset!r}"
    if name.split is not None and split not in ("both", name.split):
        raise ConfigError(f"{where}, but --split is {split!r}: name the split in one of them")
    found = resolve(name, where)
    if name.split is not None:
        wanted = [name.split]
    elif split == "both" and "validation" not in found.splits:
        wanted = ["train"]
    return [(name.of_split(one), found.files(one, where)) for one in wanted]


def _problem(file: HubFile, path: Path) -> str | None:
    if not path.is_file():
        return "missing"
    if path.stat().st_size != file.size:
        return f"{path.stat().st_size} bytes, expected {file.size}"
    if file.sha256 is None:
        return None
    digest = hashlib.sha256()
    with open(path, "rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return None if digest.hexdigest() == file.sha256 else "its sha256 differs from the hub's"


def _mirror(folder: Path, listing: Listing, files: list[HubFile], workers: int, attempts: int = 3) -> list[str]:
    """Keep sound copies, resume broken downloads and replace damaged files. Return the problems that are left."""
    from huggingface_hub import hf_hub_download

    def mirror(file: HubFile) -> str | None:
        path = folder / file.path
        problem: str | None = None
        for attempt in range(attempts + 1):
            try:
                if (problem := _problem(file, path)) is None:
                    return None
                if attempt < attempts:
                    hf_hub_download(
                        listing.repository,
                        file.path,
                        repo_type="dataset",
                        revision=listing.commit,
                        local_dir=folder,
                        force_download=path.exists(),  # the existing file is damaged
                    )
            except Exception as error:  # huggingface_hub, httpx and the system each raise their own types
                problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return f"{file.path}: {problem}"

    left, total = [], sum(file.size for file in files)
    with ThreadPoolExecutor(workers) as pool, progress(listing.repository, "B", total=total) as bar:
        running = {pool.submit(mirror, file): file for file in files}
        for done in as_completed(running):
            if (problem := done.result()) is not None:
                left.append(problem)
            bar.update(running[done].size)
    return sorted(left)


def _record(folder: Path, name: HubName) -> Path:
    return folder / RECORDS / (re.sub(r"[^\w.@-]+", "--", str(name)) + ".json")


def _write_record(folder: Path, name: HubName, listing: Listing, files: list[HubFile]) -> None:
    """Record the files of a split, with those that earlier commands fetched with other ``shards``."""
    path = _record(folder, name)
    before = set(map(tuple, json.loads(path.read_text())["files"])) if path.exists() else set()
    now = {(file.path, file.size) for file in files}
    known = {(file.path, file.size) for file in listing.files}
    content = {"dataset": str(name), "commit": listing.commit, "files": sorted(now | before & known)}
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n")


def mirrored_files(folder: str, name: HubName, where: str) -> list[tuple[str, int]]:
    """List (path, size) of a split's files in a mirror, or in a full copy of its repository. None may be missing."""
    root, fetch = Path(folder), f"titan-disp data fetch {folder} --dataset '{name}'"
    if not root.is_dir():
        raise ConfigError(
            f"{where}, which is not a folder. Expected a mirror, as titan-disp data fetch {fetch_arguments(name)} makes "
            'one; for other files, set dataset = "text"'
        )
    path = _record(root, name)
    if path.exists():
        files = [(str(root / file), size) for file, size in json.loads(path.read_text())["files"]]
    elif records := sorted((root / RECORDS).glob("*.json")):
        held = ", ".join(json.loads(record.read_text())["dataset"] for record in records)
        raise ConfigError(f"{where}, which holds {held}, but not {name}: {fetch}")
    else:
        splits = splits_in(str(root.absolute()), name, None, where)
        files = [(file, os.path.getsize(file)) for file in files_of_split(splits, name.split or "", name, where)]
    wrong = [file for file, size in files if not os.path.isfile(file) or os.path.getsize(file) != size]
    if wrong:
        found = f"{len(wrong)} of {len(files)}, such as {wrong[0]}"
        raise ConfigError(f"{where}, where files are missing or have another size than on the hub ({found}): {fetch}")
    return files
