"""Measure the time and memory that ``stream.shuffle_window`` costs a rank.

    python benchmarks/shuffle.py            # a table
    python benchmarks/shuffle.py --json     # only an object with "rows"

One rank runs in one process, with a tokenizer that takes no time, so that only the work
of the stream is measured. Texts have C4's lengths (benchmarks/data.py), and there are two
files for every three slots. Each case has a separate process, and the cases take turns.
Times are CPU seconds, which exclude other work on the machine.
"""

import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tyro

import data
from measuring import Printed, in_a_fresh_process, show
from titan_disp.cpu import high_water_mark, resident_bytes


@dataclass
class Options(Printed):
    slots: list[int] = field(default_factory=lambda: [48, 2048])
    windows: list[int] = field(default_factory=lambda: [0, 64, 256, 1024])
    files: int = 8
    """Number of files of the corpus. Hard links give them more names."""
    documents: int = 4500
    """Documents per file."""
    seq_len: int = 2048
    seconds: float = 8.0
    """Seconds for which each case is measured in each round, after a sequence of every
    slot.
    """
    rounds: int = 3
    """Number of rounds. The median counts."""


def cost(folder: Path, slots: int, window: int, options: Options) -> dict[str, float]:
    """Return the speed and the peak memory of all slots on one rank, in this process."""
    job = data.job_config(folder, str(folder.parent / "hf"), options.seq_len)
    job.stream.shuffle_window = window
    loader = data.ours(job, 1, slots, data.Free())
    before = resident_bytes()
    start = time.process_time()
    batches = iter(loader)
    for _ in range(slots):
        next(batches)
    first = time.process_time() - start
    start = time.process_time()
    count = 0
    slowest = 0.0
    while (begin := time.process_time()) - start < options.seconds:
        next(batches)
        count += 1
        slowest = max(slowest, time.process_time() - begin)
    seconds = time.process_time() - start
    loader.close()
    return {
        "slots": slots,
        "window": window,
        "files": len(loader.files),
        "first_seconds": first,
        "sequences_per_second": count / seconds,
        "slowest_seconds": slowest,
        "peak_bytes": high_water_mark() - before,
    }


def costs(folder: Path, options: Options) -> list[dict[str, Any]]:
    """Return a row for each number of slots and each window, with the speed as a ratio
    to that of the first window.
    """
    data.write_corpus(
        folder, data.Options(files=options.files, documents=options.documents)
    )
    stored = sorted((folder / "en").glob("*.gz"))
    rows = []
    for slots in options.slots:
        names = folder / str(slots)
        data.link_many(stored, names, 2 * slots // 3)
        measured: dict[int, list[dict[str, Any]]] = {
            window: [] for window in options.windows
        }
        for window in options.windows * options.rounds:
            measure = partial(cost, names, slots, window=window, options=options)
            measured[window].append(in_a_fresh_process(measure))
        group = [
            data.median(rounds, "sequences_per_second") for rounds in measured.values()
        ]
        first = group[0]["sequences_per_second"]
        rows += [{**row, "ratio": row["sequences_per_second"] / first} for row in group]
    return rows


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as name:
        rows = costs(Path(name), options)
    show(options.json, rows=rows)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
