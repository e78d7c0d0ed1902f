"""Files and folders are written atomically: a reader finds the whole one, the one before it, or none."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a path to write to. It replaces ``path`` when the block ends, and is removed if the block fails.

    Readers on other nodes never find half a file, and an older file stays if a write fails. The content is on disk
    before the file gets its name, so that a node that dies leaves the older file and not an empty one.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Write a folder atomically: the yielded folder becomes ``path`` when the block ends, and is removed if the block fails.

    Raises:
        OSError: ``path`` holds something when the block ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield partial
        partial.chmod(0o755)  # mkdtemp's folders are private
        os.replace(partial, path)  # in the place of an empty folder, too
    finally:
        shutil.rmtree(partial, ignore_errors=True)
