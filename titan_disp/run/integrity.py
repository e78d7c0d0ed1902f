"""This module finds out which checkpoints of a run are complete, and whether a checkpoint is damaged."""

import os
import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from titan_disp.models.hf import INDEX
from titan_disp.progress import progress
from titan_disp.run.hashes import HASHES, hash_bytes, hash_file, read_hashes
from titan_disp.safe_dcp import METADATA, parse_metadata, read_metadata

_DIFFERS = "{} differs from its hash: its content is not what was saved"


def problem(folder: str | Path) -> str | None:
    """Return what is wrong with a DCP checkpoint, or None if all files have their full length. No weights are read.

    If there is a hashes.json, it must have the hash of ``.metadata`` and of every file that is needed, and all files
    that it names must exist.
    """
    folder = Path(folder)
    try:
        content = (folder / METADATA).read_bytes()
    except FileNotFoundError:
        return f"it is incomplete: the save did not end (no {METADATA})"
    except OSError as error:
        return f"{METADATA}: {error.strerror}"
    try:
        hashes = read_hashes(folder)
    except (OSError, ValueError) as error:
        return f"{HASHES} cannot be read: {error}"
    if hashes is not None and hashes.get(METADATA) != hash_bytes(content):  # before any of it is unpickled
        return _DIFFERS.format(METADATA)
    try:
        lengths = _lengths(content)
    except Exception as error:  # a damaged pickle can raise anything
        return f"{METADATA} cannot be read: {type(error).__name__}: {error}"
    for name, needed in sorted(lengths.items()):
        if os.path.basename(name) != name:
            return f"{METADATA} names a file of another folder: {name!r}"
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        except ValueError:  # no file can have this name
            return f"{METADATA} names a file {name!r}"
        if found < needed:
            return f"{name} has {found:,} bytes, expected {needed:,}"
    for name in sorted(hashes or ()):
        if not (folder / name).is_file():
            return f"{name}: No such file, although {HASHES} has its hash"
    if hashes is not None and (unknown := sorted(lengths.keys() - hashes.keys())):
        return f"{unknown[0]} has no hash in {HASHES}"
    return None


def damage(
    folder: str | Path, rank: int = 0, world_size: int = 1, read: Callable[[int], object] | None = None
) -> str | None:
    """Read this rank's share of a checkpoint's files completely, and return which one differs from its hash.

    The result is None if none does, or if the checkpoint was saved without hashes. ``read`` is called with the number
    of bytes of each read.
    """
    folder = Path(folder)
    try:
        hashes = read_hashes(folder) or {}
    except (OSError, ValueError) as error:
        return f"{HASHES} cannot be read: {error}"
    for name in sorted(hashes)[rank::world_size]:
        try:
            if hash_file(folder / name, read) != hashes[name]:
                return _DIFFERS.format(name)
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


def verify(folder: str | Path) -> str | None:
    """Return what is wrong with a checkpoint, or None: first ``problem``, then ``damage`` with a progress bar."""
    folder = Path(folder)
    if reason := problem(folder):
        return reason
    size = None
    with suppress(OSError, ValueError):  # ``damage`` says what is wrong
        size = sum((folder / name).stat().st_size for name in read_hashes(folder) or {})
    with progress(f"verifying {folder.name}", "B", total=size) as bar:
        return damage(folder, read=bar.update)


def has_hashes(folder: str | Path) -> bool:
    """Return whether a checkpoint can be verified. Older versions and TorchTitan's own trainer save no hashes."""
    return (Path(folder) / HASHES).is_file()


def _lengths(content: bytes) -> dict[str, int]:
    """Return the number of bytes that each file must have at least, from the content of ``.metadata``."""
    length: dict[str, int] = defaultdict(int)
    for info in (parse_metadata(content).storage_data or {}).values():
        length[info.relative_path] = max(length[info.relative_path], info.offset + info.length)
    return length


def is_model_only(folder: str | Path) -> bool:
    """Return whether a complete DCP checkpoint holds the model without the optimizer."""
    return not any(key.startswith("optimizer.") for key in read_metadata(folder).state_dict_metadata)


def checkpoints(folder: str | Path, hugging_face: bool = False) -> list[int]:
    """List the steps of the complete checkpoints in a folder, ascending.

    Args:
        folder: the checkpoint folder.
        hugging_face: whether to include those in Hugging Face's format (``checkpoint.last_save_in_hf``), from which no
            run can resume.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    steps = [int(m.group(1)) for m in (re.fullmatch(r"step-(0|[1-9][0-9]*)", name) for name in names) if m]
    return sorted(s for s in steps if is_complete(Path(folder) / f"step-{s}", hugging_face))


def is_complete(folder: str | Path, hugging_face: bool = True) -> bool:
    """Return whether a checkpoint was saved completely, in DCP's format or, if ``hugging_face``, in Hugging Face's."""
    files = (METADATA, INDEX) if hugging_face else (METADATA,)
    return any((Path(folder) / name).is_file() for name in files)
