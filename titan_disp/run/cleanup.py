"""This module deletes, at the start of a run, what unfinished saves and deletions left in its checkpoint folder.

These folders are deleted:

- ``purging-N``. Only the retention (``checkpoint.keep_latest_k``) and this module make such names: they rename a folder
  before deleting it.
- ``step-N`` that is empty, or in which titan-disp began a save (``.saving``) that did not end: there is no
  ``.metadata``, no hashes.json (which is written once all ranks have written everything), and no file that is not
  DCP's.

Everything else is kept. Any other ``step-N`` without ``.metadata`` may be a checkpoint whose ``.metadata`` was moved
away, or an unfinished save of an older version. Only its owner can tell.
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
    """Rename a checkpoint so that it no longer counts as one; deleting its files may then take minutes.

    Returns:
        The new path.

    Raises:
        OSError: the folder cannot be renamed.
    """
    gone = path.with_name(path.name.replace("step-", "purging-"))
    while gone.exists():
        gone = gone.with_name(gone.name + "x")
    path.rename(gone)
    return gone


def clean_up(folder: Path) -> None:
    """Delete in the background what saves and deletions have left in a checkpoint folder, and log it.

    Only the process that owns the run folder may call this, and only while it is not saving.
    """
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    doomed = [folder / name for name in names if re.fullmatch(r"purging-\d+x*", name) and _is_folder(folder / name)]
    for path in (folder / name for name in names if re.fullmatch(r"step-\d+", name)):
        if not _is_folder(path) or (path / ".metadata").exists() or (path / INDEX).exists():
            continue
        if not is_unfinished(path):
            logger.warning(
                f"{path} has no .metadata, so that no run resumes from it. It may be more than an unfinished save and "
                "is therefore kept: delete it if you do not need it"
            )
            continue
        with contextlib.suppress(OSError):  # a folder that cannot be renamed does no harm
            doomed.append(rename_for_deletion(path))
    if doomed:
        logger.info(
            f"deleting what unfinished saves and deletions have left: {', '.join(path.name for path in doomed)}"
        )
        threading.Thread(target=_delete, args=(doomed,), daemon=True).start()


def is_unfinished(path: Path) -> bool:
    """Return whether a folder step-N is empty or holds nothing but a save that began and did not end."""
    names = os.listdir(path)
    return not names or (SAVING in names and all(re.fullmatch(_OF_A_SAVE, name) for name in names))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _delete(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
