"""``titan-disp data fetch`` makes a local copy (mirror) of a data set on the hub, or of
some of its files.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from titan_disp.config.command_options import FetchOptions, check_least
from titan_disp.data.hub import (
    FORM,
    HubFile,
    HubName,
    c4_files,
    is_hub_name,
    parse_name,
    resolve,
)
from titan_disp.data.mirror import record_path
from titan_disp.errors import ConfigError
from titan_disp.files import in_parallel, progress, sha256_of
from titan_disp.run.folder import write_json


def parse_shards(text: str | None) -> list[range] | None:
    """Parse numbers and ranges such as 0-63,100; None stands for all shards."""
    if text is None:
        return None
    found = [
        re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip()) for part in text.split(",")
    ]
    ranges = [range(int(m[1]), int(m[2] or m[1]) + 1) for m in found if m]
    if not all(found) or not all(ranges):
        raise ConfigError(
            f"--shards is {text!r}, expected numbers and ascending ranges such as 0-63,100"
        )
    return ranges


def fetch(options: FetchOptions) -> list[str]:
    """Mirror a data set, or what is left of it.

    Return a line for each file that is still missing or damaged.

    ConfigError is raised if the data set cannot be listed, or ``shards`` is malformed
    or selects no file.
    """
    check_least(options, workers=1)
    shards = parse_shards(options.shards)
    wanted: list[str] = (
        ["validation", "train"] if options.split == "both" else [options.split]
    )
    if options.dataset == "c4":
        listings: list[tuple[HubName | None, list[HubFile]]] = [
            (None, c4_files(one)) for one in wanted
        ]
    else:
        listings = _listings(options.dataset, options.split, wanted)
    left = []
    for record, listing in listings:
        some = shards if listing is listings[-1][1] else None
        chosen = [
            file
            for file in listing
            if some is None or any(file.index in part for part in some)
        ]
        if not chosen:
            numbers = f"0 to {listing[-1].index}, such as {listing[0].path}"
            raise ConfigError(
                f"--shards names none of the files, which have the numbers {numbers}"
            )
        missing = _mirror(options.folder, chosen, options.workers)
        if record is not None and not missing:
            _write_record(options.folder, record, listing, chosen)
        left += missing
    return left


def _listings(
    dataset: str, split: str, wanted: list[str]
) -> list[tuple[HubName | None, list[HubFile]]]:
    if not is_hub_name(dataset):
        raise ConfigError(f"--dataset is {dataset!r}, expected c4, {FORM}")
    name = parse_name(dataset, "--dataset")
    where = f"--dataset is {dataset!r}"
    if name.split is not None and split not in ("both", name.split):
        raise ConfigError(
            f"{where}, but --split is {split!r}: name the split in one of them"
        )
    found = resolve(name, where)
    if name.split is not None:
        wanted = [name.split]
    elif split == "both" and "validation" not in found.splits:
        wanted = ["train"]
    return [(replace(name, split=one), found.files(one, where)) for one in wanted]


def _problem(file: HubFile, path: Path) -> str | None:
    if not path.is_file():
        return "missing"
    if path.stat().st_size != file.size:
        return f"{path.stat().st_size} bytes, expected {file.size}"
    sound = file.sha256 is None or file.sha256 == sha256_of(path)
    return None if sound else "its sha256 differs from the hub's"


def _mirror(
    folder: Path, files: list[HubFile], workers: int, attempts: int = 3
) -> list[str]:
    """Keep sound copies, resume broken downloads and replace damaged files.

    Return the problems that are left.
    """
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
                        file.repository,
                        file.path,
                        repo_type="dataset",
                        revision=file.commit,
                        local_dir=folder,
                        force_download=path.exists(),  # the existing file is damaged
                    )
            # huggingface_hub, httpx and the system each raise their own types
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return f"{file.path}: {problem}"

    left = []
    total = sum(file.size for file in files)
    with (
        ThreadPoolExecutor(workers) as pool,
        progress(files[0].repository, "B", total=total) as bar,
    ):
        for file, problem in in_parallel(pool, mirror, files):
            if problem is not None:
                left.append(problem)
            bar.update(file.size)
    return sorted(left)


def _write_record(
    folder: Path, name: HubName, listing: list[HubFile], files: list[HubFile]
) -> None:
    """Record the files of a split, with those that earlier commands fetched with other
    ``shards``.
    """
    path = record_path(folder, name)
    before = (
        set(map(tuple, json.loads(path.read_text())["files"]))
        if path.exists()
        else set()
    )
    now = {(file.path, file.size) for file in files}
    known = {(file.path, file.size) for file in listing}
    content = {
        "dataset": str(name),
        "commit": files[0].commit,
        "files": sorted(now | before & known),
    }
    path.parent.mkdir(exist_ok=True)
    write_json(path, content)
