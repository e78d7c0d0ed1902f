"""Folders of saves that did not end, and of deletions that did not: at the start of a run they are deleted.

What is deleted, and how sure we are:

- ``purging-N``: the retention renames a checkpoint so before it deletes it, and nobody else does.
- ``step-N`` that is empty, or in which a save of titan_disp began (``.saving``) and did not end: no ``.metadata``, no hashes.json
  (which comes when all ranks have written everything), and nothing but DCP's files.

Everything else stays. A ``step-N`` without ``.metadata`` that does not meet this may be a checkpoint whose ``.metadata`` somebody
moved away, or an older version's unfinished save: only its owner can tell.
"""

import contextlib
import os
import re
import shutil
import threading
from pathlib import Path

from torchtitan.tools.logging import logger

from titan_disp.models.hf import INDEX
from titan_disp.run.hashes import HASHES, SAVING

_OF_A_SAVE = rf"__\d+_\d+\.distcp|\.metadata\.tmp|\.{re.escape(HASHES)}\.partial|{re.escape(SAVING)}"


def rename_for_deletion(path: Path) -> Path:
    """Take a checkpoint's step out of the names that count, at once and for good; deleting its files may take minutes.

    Raises:
        OSError: it cannot be renamed.
    """
    gone = path.with_name(path.name.replace("step-", "purging-"))
    while gone.exists():
        gone = gone.with_name(gone.name + "x")
    path.rename(gone)
    return gone


def sweep(folder: Path) -> None:
    """Delete in the background what saves and deletions left in a folder of checkpoints, and say so.

    Only for the process that owns the run folder, while it saves nothing.
    """
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    doomed = [folder / name for name in names if re.fullmatch(r"purging-\d+x*", name) and _is_folder(folder / name)]
    for path in (folder / name for name in names if re.fullmatch(r"step-\d+", name)):
        if not _is_folder(path) or (path / ".metadata").exists() or (path / INDEX).exists():
            continue
        if not is_unfinished(path):
            logger.warning(
                f"{path} has no .metadata, so that it is not resumed from. It may be more than an unfinished save, and stays: "
                "delete it if you do not need it"
            )
            continue
        with contextlib.suppress(OSError):  # what cannot be renamed harms nobody
            doomed.append(rename_for_deletion(path))
    if doomed:
        logger.info(f"deleting what unfinished saves and deletions left: {', '.join(path.name for path in doomed)}")
        threading.Thread(target=_delete, args=(doomed,), daemon=True).start()


def is_unfinished(path: Path) -> bool:
    """Whether a folder step-N is a save that began and did not end, and nothing else can be in it."""
    names = os.listdir(path)
    return not names or (SAVING in names and all(re.fullmatch(_OF_A_SAVE, name) for name in names))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _delete(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
