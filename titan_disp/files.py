"""Files that readers find whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of ``path`` when the block ends, and is removed where it fails.

    Readers on other nodes never meet half a file, and an older one stays where a write fails. The content is on disk before the
    file has its name: a node that dies leaves the older one, not an empty one.
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
