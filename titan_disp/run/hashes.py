"""This module saves DCP checkpoints with a hash of every file. DCP alone would not notice a flipped bit in a weight.

Each rank hashes its files while it writes them, and sends the hashes to the coordinator among the results of its
writes. The coordinator writes hashes.json before it renames ``.metadata``, the last file of a save, to its final name.
DCP alone reads such a checkpoint as it reads any other.
"""

import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, _FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titan_disp.files import atomic_write
from titan_disp.safe_dcp import METADATA

HASHES = "hashes.json"
SAVING = ".saving"  # exists in a checkpoint's folder from the beginning of its save to the end
ALGORITHM = "xxh3_128"
_PREFIX = "titan_disp.hash/"  # marks the hashes among the results of the writes
_PIECE = 2**18  # bytes hashed and written at a time
_CHUNK = 2**24  # bytes read at a time


class _HashedStream:
    """Hash what is written to a file. The file must be written from beginning to end, as DCP does."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.hash = xxhash.xxh3_128()
        self.tell, self.flush, self.fileno, self.close = file.tell, file.flush, file.fileno, file.close

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):  # a small piece is still in the CPU's cache when it is written
            piece = view[start : start + _PIECE]
            self.hash.update(piece)
            self._file.write(piece)
        return len(view)


class _HashingFileSystem(FileSystem):
    """This is DCP's file system, which also hashes the files that it writes.

    Attributes:
        hashes: hashes of the files that this rank has written, by name.
        of_ranks: hashes of the files of all ranks, on the coordinator, once they are known.
    """

    def __init__(self) -> None:
        self.hashes: dict[str, str] = {}
        self.of_ranks: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        with super().create_stream(path, mode) as file:
            stream = _HashedStream(file)
            yield stream
        self.hashes[os.path.basename(path)] = stream.hash.hexdigest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Write hashes.json, then give ``.metadata`` its final name, which makes the checkpoint complete."""
        files = self.of_ranks | {METADATA: self.hashes[os.path.basename(path)]}
        with atomic_write(Path(new_path).with_name(HASHES)) as partial:
            partial.write_text(json.dumps({"algorithm": ALGORITHM, "files": dict(sorted(files.items()))}, indent=1))
        super().rename(path, new_path)


class HashingWriter(_FileSystemWriter):  # not FileSystemWriter, which ``async_save`` would take for the stager too
    """This is DCP's default writer, which also writes hashes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.fs: _HashingFileSystem = _HashingFileSystem()
        self._is_coordinator = False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        plan = super().prepare_local_plan(plan)
        if self._is_coordinator:
            (Path(self.path) / SAVING).touch()
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner).wait()
        hashes = [WriteResult(MetadataIndex(_PREFIX + name), 0, digest) for name, digest in self.fs.hashes.items()]
        both: Future[list[WriteResult]] = Future()
        both.set_result([*written, *hashes])
        return both

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        every = [result for of_rank in results for result in of_rank]
        hashes = [result for result in every if result.index.fqn.startswith(_PREFIX)]
        self.fs.of_ranks = {result.index.fqn.removeprefix(_PREFIX): result.storage_data for result in hashes}
        super().finish(metadata, [[result for result in every if not result.index.fqn.startswith(_PREFIX)]])
        with suppress(OSError):
            (Path(self.path) / SAVING).unlink()


def read_hashes(folder: str | os.PathLike[str]) -> dict[str, str] | None:
    """Read the hashes of a checkpoint's files, by name. The result is None if it was saved without hashes.

    Raises:
        ValueError: hashes.json is damaged, or names an unknown algorithm.
        OSError: hashes.json cannot be read.
    """
    try:
        content = json.loads((Path(folder) / HASHES).read_bytes())
    except FileNotFoundError:
        return None
    if not isinstance(content, dict) or content.get("algorithm") != ALGORITHM:
        raise ValueError(f'expected {{"algorithm": "{ALGORITHM}", …}}')
    files = content.get("files")
    if not isinstance(files, dict) or not all(os.path.basename(name) == name for name in files):
        raise ValueError('expected "files": {name: hash, …} of files in this folder')
    return files


def hash_bytes(content: bytes) -> str:
    return xxhash.xxh3_128(content).hexdigest()


def hash_file(path: str | os.PathLike[str], read: Callable[[int], object] | None = None) -> str:
    """Return the hash of a file, in hexadecimal digits.

    Args:
        path: the file.
        read: a function that is called with the number of bytes of each read.

    Raises:
        OSError: the file cannot be read.
    """
    found, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            found.update(buffer[:size])
            if read is not None:
                read(size)
    return found.hexdigest()
