"""DCP checkpoints read without running what somebody may have put into them.

``.metadata`` is a pickle, and DCP unpickles it, and every entry that is no tensor, without restriction: either can run any
command as the user who reads it. Here both may only hold what checkpoints hold. All of titan_disp reads them through this file.
"""

import collections
import dataclasses
import functools
import io
import os
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

METADATA = ".metadata"

# All that checkpoints of one process, FSDP2, HSDP and TP name, saved synchronously or not. By exact name, so that a dotted one
# ("metadata.os.system") is none of them.
_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("pathlib", "PosixPath"): pathlib.PosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PosixPath,  # Python 3.13
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # type: ignore[attr-defined]
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


_CLASSES = {value for value in _ALLOWED.values() if dataclasses.is_dataclass(value)}
# Of protocols 4 and 5, which Python ≥ 3.8 writes.
_OPCODES = (
    "PROTO FRAME STOP MARK MEMOIZE BINGET LONG_BINGET STACK_GLOBAL NEWOBJ REDUCE BUILD "
    "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS"
)


def _refused(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(
        f"it {what}, which no checkpoint needs: PyTorch did not write this file, or it is damaged. Nothing in it was run"
    )


class _Dispatch(dict[int, Any]):
    def __missing__(self, opcode: int) -> Any:
        raise _refused(f"has the pickle opcode {opcode:#04x}")


class _Unpickler(pickle._Unpickler):
    """Python's, not C's: there six bytes (LONG_BINPUT) take 64 GB of memory, and BUILD may change classes."""

    dispatch = _Dispatch(
        {code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in _OPCODES.split())}
    )

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise _refused(f"names {module}.{name}") from None

    def load_build(self) -> None:
        """Set the attributes of an object. Of a class or a function they are everybody's, for as long as this process lives."""
        kind = type(self.stack[-2])  # type: ignore[attr-defined]
        if kind not in _CLASSES:
            raise _refused(f"sets attributes of a {kind.__name__}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


@functools.lru_cache(maxsize=1)  # a resume asks for the same file again and again, and Python's unpickler is slow
def parse_metadata(content: bytes) -> Metadata:
    """What the bytes of a ``.metadata`` file say: texts → what they hold, and where in which file it is. Not to be changed.

    Raises:
        Exception: of any kind, where they are damaged; UnpicklingError where they name what no checkpoint needs.
    """
    found = _Unpickler(io.BytesIO(content)).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"it holds {type(found).__name__}, expected Metadata")
    for key in found.state_dict_metadata:
        if not isinstance(key, str):
            raise pickle.UnpicklingError(f"it has a key that is a {type(key).__name__}, expected a text")
    for info in (found.storage_data or {}).values():
        kinds = type(info.relative_path), type(info.offset), type(info.length)
        if kinds != (str, int, int) or not 0 <= info.offset <= info.offset + info.length < 2**63:
            raise pickle.UnpicklingError("it says of a piece of a file neither its name nor where it is")
    return found


def read_metadata(folder: str | os.PathLike[str]) -> Metadata:
    """What a checkpoint's ``.metadata`` says; raises as ``parse_metadata``, and OSError."""
    return parse_metadata((Path(folder) / METADATA).read_bytes())


class Reader(dcp.FileSystemReader):
    """DCP's reader, without its unpickling. (DCP reads tensors with ``weights_only=True`` itself.)"""

    def read_metadata(self) -> Metadata:  # type: ignore[override]  # those with a rank are of saves without collectives
        found = read_metadata(self.path)
        own = dataclasses.replace(found.storage_meta or StorageMeta(), load_id=self.load_id)
        return dataclasses.replace(found, storage_meta=own)


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, whose entries that are no tensors may be numbers, texts, lists, … only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)  # what DCP unpickles next are bytes of our own
        plain.seek(0)
        super().load_bytes(read_item, plain)


def load(state_dict: dict[str, Any], folder: str | os.PathLike[str], no_dist: bool = False) -> None:
    """``torch.distributed.checkpoint.load`` from a folder; raises as that does."""
    dcp.load(state_dict, storage_reader=Reader(folder), planner=LoadPlanner(), no_dist=no_dist)
