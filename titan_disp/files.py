"""Atomic files and folders, the limit on open files, hashes, parallel work and progress
bars.

Whoever reads an atomic file or folder finds the complete new one, the complete old one,
or none.
"""

import contextlib
import hashlib
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, as_completed
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from titan_disp.errors import ConfigError, reported

T = TypeVar("T")
R = TypeVar("R")

OTHER_FILES = 512  # open files of a rank, besides its sockets to other ranks


def open_files_problem(ranks: int) -> str | None:
    """Return why the hard limit on open files is too low for a run of ``ranks`` ranks,
    or None.

    A gloo group holds a socket to every other rank. A rank has up to two such groups:
    one for tensors on the CPU, and one for saves.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = 2 * ranks + OTHER_FILES
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return None
    return (
        f"a process may have {hard:,} files and sockets open (ulimit -Hn), but each of "
        f"{ranks:,} ranks needs {needed:,}: raise LimitNOFILE of slurmd, nofile in "
        f"/etc/security/limits.conf, or --ulimit nofile={needed} of the container"
    )


def allow_open_files(ranks: int = 1) -> None:
    """Raise the soft limit on open files, often 1024, to the hard limit.

    Raises ConfigError if the hard limit is too low for a run of ``ranks`` ranks.
    """
    if problem := open_files_problem(ranks):
        raise ConfigError(problem)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def atomic_write(path: Path, by_many: bool = False) -> Iterator[Path]:
    """Yield a path to write to, which gets the name ``path`` when the block ends.

    If the block fails, the new file is removed and an older one stays. Readers on other
    nodes never find half a file. The content is on disk before the file gets its name.
    A crash of the node therefore leaves the older file, never an empty one.

    ``by_many``: processes on several nodes may write the same file at the same time.
    """
    writer = f".{platform.node()}.{os.getpid()}" if by_many else ""
    partial = path.with_name(f".{path.name}{writer}.partial")
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
    """Yield a new folder, which gets the name ``path`` when the block ends.

    If the block fails, the new folder is removed. Raises ConfigError if the parent of
    ``path`` is not writable, and OSError if ``path`` is a file, or a folder that is not
    empty, when the block ends.
    """
    with reported(f"{str(path.parent)!r} is not a writable folder", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield partial
        partial.chmod(0o755)  # mkdtemp's folders are private
        os.replace(partial, path)  # also replaces an empty folder
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of cores that this process may use, at least 1.

    The process's affinity and its container's quota (cgroup v2) limit it.
    """
    if hasattr(os, "sched_getaffinity"):
        available = len(os.sched_getaffinity(0))
    else:
        available = os.cpu_count() or 1
    # Without a quota there is no such file, or it has "max 100000".
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, quota_file.read_text().split())
        return max(1, min(available, quota // period))
    return available


def in_parallel(
    pool: Executor, function: Callable[[T], R], items: Iterable[T]
) -> Iterator[tuple[T, R]]:
    """Yield (item, ``function(item)``) for each item, as soon as it is done.

    An exception of ``function`` is raised here.
    """
    items_by_future = {pool.submit(function, item): item for item in items}
    for future in as_completed(items_by_future):
        yield items_by_future[future], future.result()


def make_writable(folder: Path, what: str) -> None:
    """Make a folder if it is missing.

    Raises ConfigError if it cannot be made or written to.

    ``what`` is the folder's name in the message.
    """
    with reported(f"{what} {str(folder)!r} is not a writable folder", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def check_regular(path: str | Path) -> None:
    """Raise ConfigError if a path exists but is not a regular file.

    A read from a named pipe, for example, may wait forever. A broken link is refused,
    too.
    """
    if os.path.lexists(path) and not os.path.isfile(path):
        raise ConfigError(f"{str(path)!r} is not a regular file")


def sha256_of(*paths: str | Path) -> str:
    """Return the sha256 of the contents of files, one after another, in hexadecimal."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as content:
            while piece := content.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()


def progress(
    what: str, unit: str, items: Iterable[Any] | None = None, total: float | None = None
) -> tqdm:
    """Return a progress bar on stderr, which only a terminal shows.

    The bar disappears when it is closed.

    Iterate over a bar with ``items``, which counts and closes by itself. Without
    ``items``, call ``update`` and ``close``, or use the bar as a context manager. Bytes
    (the unit "B") are shown in kB, MB and so on.
    """
    return tqdm(
        items,
        desc=what,
        total=total,
        unit=unit,
        unit_scale=unit == "B",
        leave=False,
        disable=None,
    )


@contextlib.contextmanager
def no_bars_in_logs() -> Iterator[None]:
    """Disable the bars of all libraries in the block, unless stderr is a terminal.

    lm-evaluation-harness enables each of its bars explicitly, which no setting of tqdm
    overrides.
    """
    if sys.stderr.isatty():
        yield
        return
    enabled = tqdm.__init__

    def disabled(bar: tqdm, *args: Any, **options: Any) -> None:
        """Take the place of ``tqdm.__init__``."""
        enabled(bar, *args, **{**options, "disable": True})

    tqdm.__init__ = disabled
    try:
        yield
    finally:
        tqdm.__init__ = enabled
