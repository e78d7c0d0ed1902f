"""This module finds a split's files in a mirror: a local copy of a data set on the hub.

The names of C4's files say what they are. For other data sets, ``titan-disp data
fetch`` writes a record into the mirror for every split of which all chosen files are
there, so that it can be read without the hub and the README.
"""

import json
import os
import re
from pathlib import Path
from shlex import quote

from titan_disp.data.hub import HubName, fetch_arguments, files_of_split, splits_in
from titan_disp.errors import ConfigError

RECORDS = ".titan-disp"  # hidden, so that it is not listed as data


def record_path(folder: Path, name: HubName) -> Path:
    return folder / RECORDS / (re.sub(r"[^\w.@-]+", "--", str(name)) + ".json")


def mirrored_files(folder: str, name: HubName, where: str) -> list[tuple[str, int]]:
    """List (path, size) of a split's files in a mirror, or in a full copy of its
    repository. None may be missing.
    """
    root = Path(folder)
    fetch = f"titan-disp data fetch {quote(folder)} --dataset '{name}'"
    if not root.is_dir():
        raise ConfigError(
            f"{where}, which is not a folder. Expected a mirror, as titan-disp data fetch {fetch_arguments(name)} makes "
            'one; for other files, set dataset = "text"'
        )
    path = record_path(root, name)
    if path.exists():
        files = [
            (str(root / file), size)
            for file, size in json.loads(path.read_text())["files"]
        ]
    elif records := sorted((root / RECORDS).glob("*.json")):
        held = ", ".join(
            json.loads(record.read_text())["dataset"] for record in records
        )
        raise ConfigError(f"{where}, which holds {held}, but not {name}: {fetch}")
    else:
        splits = splits_in(str(root.absolute()), name, None, where)
        files = [
            (file, os.path.getsize(file))
            for file in files_of_split(splits, name.split or "", name, where)
        ]
    wrong = [
        file
        for file, size in files
        if not os.path.isfile(file) or os.path.getsize(file) != size
    ]
    if wrong:
        found = f"{len(wrong)} of {len(files)}, such as {wrong[0]}"
        raise ConfigError(
            f"{where}, where files are missing or have another size than on the hub "
            f"({found}): {fetch}"
        )
    return files
