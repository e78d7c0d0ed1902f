"""Measure how much time hashes add when a checkpoint is saved, and how long it takes to
verify them.

    python benchmarks/checkpoint.py --gib 2          # a table
    python benchmarks/checkpoint.py --gib 2 --json   # only an object with "rows"

The rows are: "dcp", the writer of torch.distributed.checkpoint; "hashed", our writer,
which also writes smaller pieces; "pieces", our writer without hashes; and "verify", which
reads everything again from the page cache. One process saves random tensors
synchronously, and flushes files to the disk (fsync) as in training. The writers take
turns in random order.
"""

import random
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pandas
import torch
import torch.distributed.checkpoint as dcp
import tyro
import xxhash

from measuring import Printed, show, timed
from titan_disp.run.integrity import HashingWriter, damage, problem

WRITERS = {
    "dcp": dcp.FileSystemWriter,
    "pieces": HashingWriter,
    "hashed": HashingWriter,
}


TENSORS = 64  # in the checkpoint


def no_hash() -> SimpleNamespace:
    """Return a hash object that computes nothing, for the row "pieces"."""
    return SimpleNamespace(update=lambda data: None, hexdigest=lambda: "")


@dataclass
class Options(Printed):
    gib: float = 1.0
    """Size of the checkpoint."""
    rounds: int = 6
    folder: Path | None = None
    """Where to write. The default is a temporary folder."""


def save(state: dict[str, torch.Tensor], writer: str, folder: Path) -> None:
    """Save a checkpoint with one of the ``WRITERS``."""
    hash_ = no_hash if writer == "pieces" else xxhash.xxh3_128
    with mock.patch("xxhash.xxh3_128", hash_):
        dcp.save(state, storage_writer=WRITERS[writer](folder), no_dist=True)


def verify(folder: Path) -> None:
    assert problem(folder) is None
    assert damage(folder) is None


def measure(options: Options, folder: Path) -> pandas.DataFrame:
    """Return the medians, with a row for each writer and for "verify", by name. The folder
    must not exist.
    """
    size = int(options.gib * 2**30 / 4 / TENSORS)
    state = {f"layers.{i}.weight": torch.randn(size) for i in range(TENSORS)}
    save(state, "dcp", folder)  # the first save is slower
    order = random.Random(0)
    times = []
    for _ in range(options.rounds):
        for name in order.sample(list(WRITERS), len(WRITERS)):
            shutil.rmtree(folder)
            times.append((name, *timed(save, state, name, folder)))
            if name == "hashed":
                times.append(("verify", *timed(verify, folder)))
    frame = pandas.DataFrame(times, columns=["what", "seconds", "cpu_seconds"])
    return frame.groupby("what", as_index=False).median()


def main() -> None:
    options = tyro.cli(Options)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = measure(options, Path(folder) / "step-1")
    show(options.json, rows=rows)


if __name__ == "__main__":
    main()
