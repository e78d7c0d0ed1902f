"""Measure what hashes add to saving a checkpoint and how long verifying takes, beside
DCP's own writer.

    python benchmarks/checkpoint.py --gib 2          # a table
    python benchmarks/checkpoint.py --gib 2 --json   # only an object with "rows"

The rows are: dcp, DCP's own writer; hashed, our writer, which writes in smaller pieces;
pieces, our writer without the hash; and verify, which reads everything again from the
page cache. One process saves random tensors synchronously, and flushes files to the
disk (fsync) as in training. The writers take turns in random order.
"""

import random
import shutil
import statistics
import tempfile
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
import tyro

from measuring import Printed, show, timed
from titan_disp.run.integrity import HashingWriter, damage, problem

WRITERS = {
    "dcp": dcp.FileSystemWriter,
    "pieces": HashingWriter,
    "hashed": HashingWriter,
}


def no_hash() -> SimpleNamespace:
    """Return a hash that computes nothing, for the row "pieces"; its difference to
    "hashed" is the cost of hashing.
    """
    return SimpleNamespace(update=lambda data: None, hexdigest=lambda: "")


@dataclass
class Options(Printed):
    gib: float = 1.0
    """Size of the checkpoint."""
    tensors: int = 64
    rounds: int = 6
    folder: Path | None = None
    """Where to write. The default is a temporary folder."""


def save(state: dict[str, torch.Tensor], writer: str, folder: Path) -> None:
    with (
        mock.patch("xxhash.xxh3_128", no_hash) if writer == "pieces" else nullcontext()
    ):
        dcp.save(state, storage_writer=WRITERS[writer](folder), no_dist=True)


def verify(folder: Path) -> None:
    assert problem(folder) is None
    assert damage(folder) is None


def measure(options: Options, folder: Path) -> list[dict[str, object]]:
    size = max(1, int(options.gib * 2**30 / 4 / options.tensors))
    state = {f"layers.{i}.weight": torch.randn(size) for i in range(options.tensors)}
    taken: dict[str, list[tuple[float, float]]] = {
        name: [] for name in (*WRITERS, "verify")
    }
    save(state, "dcp", folder)  # the first one has a colder disk
    order = random.Random(0)
    for _ in range(options.rounds):
        for name in order.sample(list(WRITERS), len(WRITERS)):
            shutil.rmtree(folder)
            taken[name].append(timed(save, state, name, folder))
            if name == "hashed":
                taken["verify"].append(timed(verify, folder))
    base = statistics.median(seconds for seconds, _ in taken["dcp"])
    rows = []
    for name, found in taken.items():
        seconds, cpu = zip(*found, strict=True)
        middle = statistics.median(seconds)
        row = {
            "what": name,
            "gigabytes": options.tensors * size * 4 / 1e9,
            "seconds": middle,
            "ratio": middle / base,
        }
        rows.append({**row, "least": min(seconds), "least_cpu": min(cpu), "all": found})
    return rows


def main() -> None:
    options = tyro.cli(Options)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = measure(options, Path(folder) / "step-1")
    show(options.json, rows=rows)


if __name__ == "__main__":
    main()
