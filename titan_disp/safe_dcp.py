"""This module reads DCP checkpoints without running code that someone may have put into
them.

DCP unpickles ``.metadata``, and every entry that is not a tensor, without restriction.
Such a pickle can run any command as the user who reads it. Here, all pickles may only
contain what checkpoints need. All of titan_disp reads checkpoints through this module.
"""

import collections
import dataclasses
import functools
import hashlib
import io
import os
import pathlib
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

METADATA = ".metadata"
_ENUM: Any = metadata._MEM_FORMAT_ENCODING


def _refused(what: str) -> pickle.UnpicklingError:
    why = "which no checkpoint needs: PyTorch did not write this file, or it is damaged. Nothing in it was executed"
    return pickle.UnpicklingError(f"it {what}, {why}")


def _member(enum: Any, name: str) -> Any:
    # Python 3.11.0 to 3.11.3 pickle the one enum in checkpoints as getattr(enum, name).
    if enum is not _ENUM or name not in _ENUM.__members__:
        raise _refused(f"takes the attribute {name!r}")
    return _ENUM[name]


# All names in the checkpoints of a single process, FSDP2, HSDP and TP, saved
# synchronously or asynchronously. A name must match exactly, so that a dotted name
# ("metadata.os.system") is refused.
_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            *(
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
            ),
            *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("builtins", "getattr"): _member,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("pathlib", "PosixPath"): pathlib.PosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PosixPath,  # Python 3.13
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{
        ("torch", name): value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype)
    },
}
_CLASSES = {value for value in _ALLOWED.values() if dataclasses.is_dataclass(value)}
# These are opcodes of protocols 4 and 5, which Python ≥ 3.8 writes.
_OPCODES = (
    "PROTO FRAME STOP MARK MEMOIZE BINGET LONG_BINGET STACK_GLOBAL NEWOBJ REDUCE "
    "BUILD NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
    "SHORT_BINUNICODE BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
    "APPEND APPENDS EMPTY_DICT SETITEM SETITEMS"
)


class _Dispatch(dict[int, Any]):
    def __missing__(self, opcode: int) -> Any:
        raise _refused(f"has the pickle opcode {opcode:#04x}")


class _Unpickler(pickle._Unpickler):
    """Unpickle only ``_ALLOWED`` names and ``_OPCODES``.

    This class extends the unpickler that is written in Python. In the unpickler that is
    written in C, six bytes (LONG_BINPUT) take 64 GB of memory, and BUILD may change
    classes.
    """

    _codes = [getattr(pickle, name)[0] for name in _OPCODES.split()]
    dispatch = _Dispatch({code: pickle._Unpickler.dispatch[code] for code in _codes})

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise _refused(f"names {module}.{name}") from None

    def load_build(self) -> None:
        """Set the attributes of an instance of ``_CLASSES``.

        Setting attributes of a class or a function would change this class or function
        for the whole process.
        """
        cls = type(self.stack[-2])  # type: ignore[attr-defined]
        if cls not in _CLASSES:
            raise _refused(f"sets attributes of a {cls.__name__}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


class _FastUnpickler(pickle.Unpickler):
    """Unpickle a file that ``_Unpickler`` has accepted. This class is written in C, and
    needs a third of the time.
    """

    find_class = _Unpickler.find_class


_accepted: set[bytes] = set()  # digests of files that ``_Unpickler`` has accepted


def metadata_digest(folder: str | os.PathLike[str]) -> bytes:
    """Return a digest of the ``.metadata`` of a checkpoint. Raises OSError."""
    return hashlib.blake2b((Path(folder) / METADATA).read_bytes()).digest()


def accept(digest: bytes) -> None:
    """Use the fast unpickler from now on for the ``.metadata`` that has this
    ``metadata_digest``, because another rank has parsed it safely.
    """
    _accepted.add(digest)


# cached, because a resume reads the same file several times, and ``_Unpickler`` is slow
@functools.lru_cache(maxsize=1)
def parse_metadata(content: bytes) -> Metadata:
    """Return the content of a ``.metadata`` file, which callers must not change.

    Raises UnpicklingError if the file names something that no checkpoint needs, and any
    Exception if the file is damaged.
    """
    unpickler: type[Any] = _Unpickler
    if hashlib.blake2b(content).digest() in _accepted:
        unpickler = _FastUnpickler
    parsed = unpickler(io.BytesIO(content)).load()
    if not isinstance(parsed, Metadata):
        raise pickle.UnpicklingError(
            f"it holds {type(parsed).__name__}, expected Metadata"
        )
    for key in parsed.state_dict_metadata:
        if not isinstance(key, str):
            raise pickle.UnpicklingError(
                f"it has a key of type {type(key).__name__}, expected str"
            )
    for info in (parsed.storage_data or {}).values():
        types = type(info.relative_path), type(info.offset), type(info.length)
        if (
            types != (str, int, int)
            or not 0 <= info.offset <= info.offset + info.length < 2**63
        ):
            raise pickle.UnpicklingError(
                "it has a storage entry without a valid file name, offset and length"
            )
    return parsed


def read_metadata(folder: str | os.PathLike[str]) -> Metadata:
    """Return the content of a checkpoint's ``.metadata``, which callers must not change.
    Raises what ``parse_metadata`` raises, and OSError.
    """
    return parse_metadata((Path(folder) / METADATA).read_bytes())


class Reader(dcp.FileSystemReader):
    """Extend DCP's reader to avoid its unpickling.

    DCP itself reads tensors with ``weights_only=True``.
    """

    # DCP passes a rank only for checkpoints that were saved without collectives.
    def read_metadata(self) -> Metadata:
        content = read_metadata(self.path)
        storage_meta = dataclasses.replace(
            content.storage_meta or StorageMeta(), load_id=self.load_id
        )
        return dataclasses.replace(content, storage_meta=storage_meta)


class LoadPlanner(DefaultLoadPlanner):
    """Extend DCP's planner so that all entries that are not tensors must be numbers,
    strings, lists and the like.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        # DCP then unpickles only bytes that we wrote
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def load(
    state_dict: dict[str, Any], folder: str | os.PathLike[str], no_dist: bool = False
) -> None:
    """Load as ``torch.distributed.checkpoint.load`` does, and raise what it raises."""
    with warnings.catch_warnings():
        if no_dist:  # the caller asked for a single process
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(
            state_dict,
            storage_reader=Reader(folder),
            planner=LoadPlanner(),
            no_dist=no_dist,
        )
