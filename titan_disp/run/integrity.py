"""This module saves DCP checkpoints with hashes, finds out which checkpoints are
complete or damaged, and deletes unfinished ones.

DCP alone would not notice a flipped bit in a weight. Each rank hashes its files while
it writes them, and sends the hashes to the coordinator among the results of its writes.
The coordinator writes hashes.json before it renames ``.metadata``, the last file of a
save, to its final name.
"""

import json
import os
import re
import shutil
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, _FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torchtitan.tools.logging import logger

from titan_disp.files import atomic_write
from titan_disp.models.hf import INDEX
from titan_disp.safe_dcp import METADATA, parse_metadata, read_metadata

HASHES = "hashes.json"
_UNNAMED = f"{METADATA}.tmp"  # DCP writes this file, and renames it to .metadata
# exists in a checkpoint's folder from the beginning of its save to the end
SAVING = ".saving"
ALGORITHM = "xxh3_128"
_PREFIX = "titan_disp.hash/"  # marks the hashes among the results of the writes
_PIECE = 2**18  # bytes hashed and written at a time
_CHUNK = 2**24  # bytes read at a time
_DIFFERS = "{} differs from its hash: its content is not what was saved"
# names of the files that an unfinished save may have left
_OF_A_SAVE = rf"__\d+_\d+\.distcp|\.metadata\.tmp|\.{re.escape(HASHES)}\.partial|{re.escape(SAVING)}"


class _HashedStream:
    """Hash what is written to a file.

    The file must be written from beginning to end, as DCP does.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self.hash = xxhash.xxh3_128()
        self.tell = file.tell
        self.flush = file.flush
        self.fileno = file.fileno
        self.close = file.close

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        # a small piece is still in the CPU's cache when it is written
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            self.hash.update(piece)
            self._file.write(piece)
        return len(view)


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        # Hashes of the files that this rank has written, by name.
        self.hashes: dict[str, str] = {}
        # Hashes of the files of all ranks, on the coordinator, once they are known.
        self.of_ranks: dict[str, str] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[Any, None, None]:
        with super().create_stream(path, mode) as file:
            stream = _HashedStream(file)
            yield stream
        self.hashes[os.path.basename(path)] = stream.hash.hexdigest()

    def rename(
        self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]
    ) -> None:
        """Write hashes.json, then give ``.metadata`` its final name, which makes the
        checkpoint complete.
        """
        files = self.of_ranks | {METADATA: self.hashes[os.path.basename(path)]}
        with atomic_write(Path(new_path).with_name(HASHES)) as partial:
            partial.write_text(
                json.dumps(
                    {"algorithm": ALGORITHM, "files": dict(sorted(files.items()))},
                    indent=1,
                )
            )
        super().rename(path, new_path)


# not a FileSystemWriter, which ``async_save`` would also use as the stager
class HashingWriter(_FileSystemWriter):
    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.fs: _HashingFileSystem = _HashingFileSystem()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Mark the folder as that of a running save.

        DCP calls this on the coordinator only, before any rank writes.
        """
        (Path(self.path) / SAVING).touch()
        return super().prepare_global_plan(plans)

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner).wait()
        hashes = [
            WriteResult(MetadataIndex(_PREFIX + name), 0, digest)
            for name, digest in self.fs.hashes.items()
        ]
        results: Future[list[WriteResult]] = Future()
        results.set_result([*written, *hashes])
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = []
        for result in chain.from_iterable(results):
            if result.index.fqn.startswith(_PREFIX):
                name = result.index.fqn.removeprefix(_PREFIX)
                self.fs.of_ranks[name] = result.storage_data
            else:
                written.append(result)
        super().finish(metadata, [written])
        with suppress(OSError):
            (Path(self.path) / SAVING).unlink()


def read_hashes(folder: str | os.PathLike[str]) -> dict[str, str] | None:
    """Return {file name: hash} from hashes.json, or None if there is no such file.

    Raises OSError, or ValueError if the content is not that of a hashes.json.
    """
    try:
        content = json.loads((Path(folder) / HASHES).read_bytes())
    except FileNotFoundError:
        return None
    if not isinstance(content, dict) or content.get("algorithm") != ALGORITHM:
        raise ValueError(f'expected {{"algorithm": "{ALGORITHM}", …}}')
    files = content.get("files")
    if not isinstance(files, dict) or not all(
        os.path.basename(name) == name for name in files
    ):
        raise ValueError('expected "files": {name: hash, …} of files in this folder')
    return files


def hash_file(path: Path, read: Callable[[int], object] | None = None) -> str:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
            if read is not None:
                read(size)
    return digest.hexdigest()


def problem(folder: str | Path) -> str | None:
    """Return what is wrong with a DCP checkpoint, or None.

    No weights are read, but the lengths of all files are compared. If there is a
    hashes.json, it must have the hash of ``.metadata`` and of every needed file, and it
    must name only existing files. Raises OSError if a file that exists cannot be read,
    which does not prove damage.
    """
    folder = Path(folder)
    try:
        content = (folder / METADATA).read_bytes()
    except FileNotFoundError:
        return f"it is incomplete: the save did not end (no {METADATA})"
    try:
        hashes = read_hashes(folder)
    except ValueError as error:
        return f"{HASHES} cannot be read: {error}"
    # The hash is compared before anything is unpickled.
    if (
        hashes is not None
        and hashes.get(METADATA) != xxhash.xxh3_128(content).hexdigest()
    ):
        return _DIFFERS.format(METADATA)
    lengths: dict[str, int] = defaultdict(int)  # smallest size of each file in bytes
    try:
        for info in (parse_metadata(content).storage_data or {}).values():
            lengths[info.relative_path] = max(
                lengths[info.relative_path], info.offset + info.length
            )
    except Exception as error:  # a damaged pickle can raise anything
        return f"{METADATA} cannot be read: {type(error).__name__}: {error}"
    for name, needed in sorted(lengths.items()):
        if os.path.basename(name) != name:
            return f"{METADATA} names a file of another folder: {name!r}"
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError as error:
            return f"{name}: {error.strerror}"
        except ValueError:  # no file can have this name
            return f"{METADATA} names a file {name!r}"
        if size < needed:
            return f"{name} has {size:,} bytes, expected {needed:,}"
    for name in sorted(hashes or ()):
        if not (folder / name).is_file():
            return f"{name}: No such file, although {HASHES} has its hash"
    if hashes is not None and (unknown := sorted(lengths.keys() - hashes.keys())):
        return f"{unknown[0]} has no hash in {HASHES}"
    return None


def damage(
    folder: str | Path,
    rank: int = 0,
    world_size: int = 1,
    read: Callable[[int], object] | None = None,
) -> str | None:
    """Return a message about the first file in this rank's share that differs from its
    hash, or None.

    After each read of a file, ``read`` is called with the number of bytes. Raises
    OSError if a file that exists cannot be read, which does not prove damage.
    """
    folder = Path(folder)
    try:
        hashes = read_hashes(folder) or {}
    except ValueError as error:
        return f"{HASHES} cannot be read: {error}"
    for name in sorted(hashes)[rank::world_size]:
        try:
            if hash_file(folder / name, read) != hashes[name]:
                return _DIFFERS.format(name)
        except FileNotFoundError as error:
            return f"{name}: {error.strerror}"
    return None


def has_hashes(folder: str | Path) -> bool:
    """Return whether a checkpoint can be verified.

    TorchTitan's own trainer saves no hashes.
    """
    return is_file(Path(folder) / HASHES)


def warn_without_hashes(folder: str | Path) -> None:
    if not has_hashes(folder):
        logger.warning(
            f"{folder} has no {HASHES}, as if TorchTitan's own trainer had saved it: it "
            "is loaded without verification"
        )


def is_model_only(folder: str | Path) -> bool:
    """Return whether a complete DCP checkpoint holds the model without the
    optimizer.
    """
    return not any(
        key.startswith("optimizer.")
        for key in read_metadata(folder).state_dict_metadata
    )


def checkpoints(folder: str | Path, hugging_face: bool = False) -> list[int]:
    """Return the steps of the complete checkpoints, ascending. With ``hugging_face``,
    include those in Hugging Face's format, from which no run can resume. Raises OSError.
    """
    folder = Path(folder)
    return [
        step
        for step in steps_of(folder, "step")
        if is_complete(folder / f"step-{step}", hugging_face)
    ]


def steps_of(folder: Path, prefix: str) -> list[int]:
    """Return the numbers N of the folders PREFIX-N, ascending. Raises OSError."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = [re.fullmatch(rf"{prefix}-(0|[1-9][0-9]*)", name) for name in names]
    return sorted(int(match.group(1)) for match in matches if match)


def is_complete(folder: str | Path, hugging_face: bool = True) -> bool:
    """Return whether a checkpoint was saved completely, in DCP's format or, if
    ``hugging_face``, in Hugging Face's. Raises OSError if the file system fails.
    """
    files = (METADATA, INDEX) if hugging_face else (METADATA,)
    return any(is_file(Path(folder) / name) for name in files)


def is_file(path: Path) -> bool:
    """Return whether a path is a regular file. Raises OSError if the file system fails.
    (From Python 3.14 on, ``Path.is_file`` would return False instead.)
    """
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def rename_step(path: Path, prefix: str) -> Path:
    """Rename step-N to PREFIX-N, so that it no longer counts as a checkpoint, and return
    the new path. PREFIX is "damaged", or "purging" before a deletion, which may take
    minutes.
    """
    to = path.with_name(path.name.replace("step-", f"{prefix}-"))
    while to.exists():
        to = to.with_name(to.name + "x")
    return path.rename(to)


def clean_up(folder: Path) -> None:
    """Delete each ``purging-N`` and each ``step-N`` that ``is_unfinished``, in a thread,
    and log their names.

    Only the process that owns the run folder may call this, and only while it is not
    saving.
    """
    doomed = [
        path
        for path in sorted(folder.glob("purging-*"))
        if re.fullmatch(r"purging-\d+x*", path.name) and _is_folder(path)
    ]
    for step in steps_of(folder, "step"):
        path = folder / f"step-{step}"
        if not _is_folder(path) or is_complete(path):
            continue
        if not is_unfinished(path):
            logger.warning(
                f"{path} has no .metadata, so no run resumes from it. It may hold more "
                "than an unfinished save: delete it if you do not need it"
            )
            continue
        with suppress(OSError):  # a folder that cannot be renamed does no harm
            doomed.append(rename_step(path, "purging"))
    if doomed:
        names = [path.name for path in doomed]
        logger.info(
            "deleting what unfinished saves and deletions have left: "
            f"{', '.join(names)}"
        )
        threading.Thread(target=_delete, args=(doomed,), daemon=True).start()


def can_be_finished(path: Path) -> bool:
    """Return whether the save of a folder step-N was killed between its last two
    actions, which are to write hashes.json and to rename ``.metadata.tmp`` to
    ``.metadata``. Raises OSError if the file system fails.
    """
    with suppress(FileNotFoundError, IsADirectoryError, ValueError):
        hashes = read_hashes(path) or {}
        if hashes.get(METADATA) == hash_file(path / _UNNAMED):
            return not is_file(path / METADATA)
    return False


def finish_saves(folder: Path) -> None:
    """Finish the saves that ``can_be_finished``.

    Like all checkpoints, these are verified before they are loaded.
    """
    paths = [folder / f"step-{step}" for step in steps_of(folder, "step")]
    for path in filter(can_be_finished, paths):
        (path / _UNNAMED).rename(path / METADATA)
        (path / SAVING).unlink(missing_ok=True)
        logger.info(
            f"{path} was complete except that {METADATA} did not have its final name "
            "yet: it was renamed"
        )


def is_unfinished(path: Path) -> bool:
    """Return whether a folder step-N is empty, or holds only files of a save that
    titan-disp began and did not finish.

    Any other folder without ``.metadata`` may be a checkpoint whose ``.metadata`` was
    moved away, or a save of TorchTitan's own trainer. Only the user can tell.
    """
    names = set(os.listdir(path))
    if _UNNAMED in names and not can_be_finished(path):
        names.discard(HASHES)
    return not names or (
        SAVING in names and all(re.fullmatch(_OF_A_SAVE, name) for name in names)
    )


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _delete(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
