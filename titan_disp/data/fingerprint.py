"""The fingerprint describes a run's data.

A checkpoint holds the fingerprint, so that a resume with other data can be refused.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_disp import safe_dcp
from titan_disp.data.assignment import VERSION, Share
from titan_disp.data.formats import suffix_of
from titan_disp.data.listing import DataFile
from titan_disp.data.options import StreamOptions
from titan_disp.data.position import Field
from titan_disp.data.tokenizer import find_tokenizer
from titan_disp.errors import CheckpointError, RefusedError, counted
from titan_disp.files import sha256_of
from titan_disp.job_config import fixed
from titan_disp.tables import changes


def tokenizer_hash(folder: str) -> str:
    """Return the sha256 of the tokenizer's files, in hexadecimal."""
    files = [find_tokenizer(folder)]
    if files[0].suffix != ".model":
        optional = [
            Path(folder) / name for name in ("tokenizer_config.json", "merges.txt")
        ]
        files += [file for file in optional if file.is_file()]
    return sha256_of(*files)


def _eos_of_model(folder: str) -> int | None:
    """Return the id of EOS in config.json if the tokenizer's own files name neither BOS
    nor EOS, else None.

    ``tokenizer_hash`` covers the tokenizer's own files, but not config.json, which may
    change for other reasons.
    """
    model = Path(folder) / "config.json"
    if find_tokenizer(folder).suffix == ".model" or not model.is_file():
        return None
    tokenizer = Path(folder) / "tokenizer_config.json"
    if tokenizer.is_file():
        names = json.loads(tokenizer.read_text())
        if names.get("eos_token") or names.get("bos_token"):
            return None
    eos = json.loads(model.read_text()).get("eos_token_id")
    return eos if isinstance(eos, int) else None


def fingerprint(
    files: list[DataFile],
    tokenizer_folder: str,
    options: StreamOptions,
    slots: int,
    shares: Sequence[Share] = (),
) -> dict[str, Any]:
    """Return everything that decides which tokens each slot gets. Values of config keys
    are stored under the names of these keys.
    """
    values = {
        **vars(options),
        **vars(options.format),
        "sources": [[share.name, share.slots] for share in shares],
        "slots": slots,
        # a window of 1 shuffles nothing
        "shuffle_window": options.shuffle_window if options.shuffle_window > 1 else 0,
        "max_document_mb": options.max_document_bytes / 2**20,
    }
    densities = {
        suffix_of(file.name): file.density
        for file in files
        if file.density and file.documents is None
    }
    return {
        "files": [[file.name, file.size] for file in files],
        "contents": {file.name: file.sample for file in files if file.sample},
        "etags": {file.name: file.etag for file in files if file.etag},
        # If all densities are equal, they have no effect.
        "text per stored byte": densities if len(set(densities.values())) > 1 else {},
        INDEX: _index_hash(files),
        "assignment": VERSION,
        "tokenizer": tokenizer_hash(tokenizer_folder),
        "eos_token_id": _eos_of_model(tokenizer_folder),
        "training.seq_len": options.seq_len,
        **{key: values[key.removeprefix("stream.")] for key in fixed("data")},
    }


def _index_hash(files: Sequence[DataFile]) -> str:
    """Return a hash of what the index says about the files, or "none" without an index."""
    if all(file.documents is None for file in files):
        return "none"
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.density}\n".encode(errors="surrogateescape"))
        if file.blocks is not None:
            digest.update(file.blocks.first.tobytes() + file.blocks.places.tobytes())
    return digest.hexdigest()


INDEX = "index of the data"
# The epoch with which the streams began after stream.on_mismatch = "restart". It
# describes no data.
FIRST_EPOCH = "first epoch"


def data_changes(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return a sentence about each difference between two fingerprints."""
    differing = changes(_comparable(saved, current), _comparable(current, saved))
    return [_sentence(key, *values) for key, values in differing.items()]


def _comparable(fingerprint: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a fingerprint that are comparable with those of ``other``."""
    files = dict(fingerprint.get("files", []))  # the order of files may differ
    # Runs of older versions have no such key, and used the tokenizer's EOS.
    comparable = {"stream.separator": "", **fingerprint, "files": files}
    comparable.pop(FIRST_EPOCH, None)
    # Files on the hub have neither a hash nor an etag, and copies of them elsewhere
    # have only one of the two. Files of different sizes need no further comparison.
    other_files = dict(other.get("files", []))
    for key in ("contents", "etags"):
        comparable[key] = {
            file: value
            for file, value in fingerprint.get(key, {}).items()
            if file in other.get(key, {}) and files.get(file) == other_files.get(file)
        }
    # With an index, hashes and densities describe other parts of the files than without
    # one.
    if _has_index(fingerprint) != _has_index(other):
        for key in ("contents", "text per stored byte"):
            comparable.pop(key, None)
    return comparable


def _has_index(fingerprint: dict[str, Any]) -> bool:
    return fingerprint.get(INDEX, "none") != "none"


def _sentence(key: str, former: Any, current: Any) -> str:
    """Return a sentence about a key whose values differ."""
    if key == "files":
        files = sorted(changes(former, current))
        first = files[0]
        return (
            f"data: {counted(len(former), 'file')} then, {len(current)} now, with "
            f"{counted(len(files), 'difference')}; first {first} "
            f"({_size(former.get(first))} then, {_size(current.get(first))} now)"
        )
    if key in ("contents", "etags"):
        files = sorted(changes(former, current))
        return f"content: {counted(len(files), 'file')} of the same size with other documents, first {files[0]}"
    if key == INDEX and former == "none":
        return "stream.index: the data was read without an index then, and is now read with an index"
    if key == INDEX and current == "none":
        return "stream.index: the data was read with an index then, and is now read without an index"
    if key == INDEX:
        return "the index describes other blocks or texts than it did then"
    if key == "stream.sources":
        return f"{key}, with the slots that their weights make: {_slots(former)} then, {_slots(current)} now"
    return f"{key}: {former!r} then, {current!r} now"


def _size(size: int | None) -> str:
    """Return a file's size in words, in bytes. None means that there is no file."""
    if size is None:
        return "absent"
    return f"{size} bytes"


def _slots(sources: list[tuple[str, int]] | None) -> str:
    """Return the names and the slots of sources in words."""
    return ", ".join(f"{name} {slots}" for name, slots in sources or []) or "none"


def check_fingerprint(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise RefusedError if a checkpoint's fingerprint is not this run's."""
    if not saved:
        raise RefusedError(
            "the checkpoint holds no data position of titan-disp: it was written by another loader. Set "
            'stream.on_mismatch = "restart" to continue with streams that begin anew'
        )
    if changed := data_changes(saved, current):
        hint = ""
        if changed[0].startswith(("data:", "content:")):
            hint = (
                " To go on without some files, at the same positions in all other "
                "files, name them in stream.left_out."
            )
        if saved.get("stream.slots") != current["stream.slots"]:
            hint += (
                " The number of slots is training.global_batch_size unless stream.slots"
                " is set. With global_batch_size = -1, it depends on the number of "
                "ranks, so that such a run cannot resume on another number of ranks."
            )
        raise RefusedError(
            f"the checkpoint was written with other data: {'; '.join(changed)}.{hint} Restore the earlier data and "
            'config, or set stream.on_mismatch = "restart" to continue with streams that begin a new epoch'
        )


def read_data_state(checkpoint: str) -> tuple[dict[str, Any], int]:
    """Return the fingerprint in a checkpoint folder, and the last epoch that any slot
    has begun.

    The result is ({}, −1) if another loader wrote the checkpoint. Raises
    CheckpointError if the checkpoint cannot be read.
    """
    try:
        metadata = safe_dcp.read_metadata(checkpoint).state_dict_metadata
        if "dataloader.fingerprint" not in metadata:
            return {}, -1
        stored = cast(TensorStorageMetadata, metadata["dataloader.positions"])
        state: dict[str, Any] = {
            "fingerprint": "",
            "positions": torch.empty(stored.size, dtype=torch.int64),
        }
        safe_dcp.load({"dataloader": state}, checkpoint, no_dist=True)
    except (OSError, UnpicklingError, CheckpointException) as error:
        raise CheckpointError(
            f"cannot read the data position in {checkpoint}: {error}"
        ) from error
    return json.loads(state["fingerprint"]), int(
        state["positions"][:, Field.EPOCH].max()
    )
