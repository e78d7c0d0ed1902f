"""Measure what ``stream.shuffle_window`` costs one rank, and how it changes the batches of a second epoch.

    python benchmarks/shuffle.py            # tables
    python benchmarks/shuffle.py --json     # only an object with "rows" and "apart"

Cost is measured on one rank in one process, with a tokenizer that takes no time, so only the stream's own work is left.
Texts have C4's lengths (benchmarks/data.py), and there are two files for every three slots. Every case has a process of
its own, and the cases take turns. Times are processor time, so that other work on the machine does not count.

"apart" is how many steps earlier or later documents come in the second epoch than in the first, as a standard deviation
(docs/benchmarks.md).
"""

import math
import tempfile
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tyro

import data
from measuring import Printed, in_a_fresh_process, show
from titan_disp.cpu import high_water_mark, resident_bytes
from titan_disp.data.assignment import Assignment
from titan_disp.data.files import list_files
from titan_disp.data.options import StreamOptions
from titan_disp.data.position import Field
from titan_disp.data.stream import RankStreams
from titan_disp.lab.sample import write_shard

SEQUENCE = 257  # tokens, of the table of batches


@dataclass
class Options(Printed):
    slots: list[int] = field(default_factory=lambda: [48, 2048])
    windows: list[int] = field(default_factory=lambda: [0, 64, 256, 1024])
    files: int = 8
    """Number of files of the corpus. They get as many names as are needed."""
    documents: int = 4500
    """Documents per file."""
    seq_len: int = 2048
    seconds: float = 8.0
    """Seconds for which each case is measured in each round, after a sequence of every slot."""
    rounds: int = 3
    """How many times the cases take turns. The median counts."""


def cost(folder: Path, slots: int, window: int, options: Options) -> dict[str, float]:
    """Run all slots on one rank, in this process, and measure them."""
    job = data.job_config(folder, str(folder.parent / "hf"), options.seq_len, 0)
    job.stream.shuffle_window = window
    loader = data.ours(job, 1, slots, data.Free())
    before = resident_bytes()
    start, batches = time.process_time(), iter(loader)
    for _ in range(slots):
        next(batches)
    first = time.process_time() - start
    start, count, slowest = time.process_time(), 0, 0.0
    while (now := time.process_time()) - start < options.seconds:
        next(batches)
        count += 1
        slowest = max(slowest, time.process_time() - now)
    seconds = time.process_time() - start
    loader.close()
    found = {"slots": slots, "window": window, "files": len(loader.files), "first_seconds": first}
    found |= {"sequences_per_second": count / seconds, "slowest_seconds": slowest}
    return {**found, "peak_bytes": high_water_mark() - before}


def costs(folder: Path, options: Options) -> list[dict[str, Any]]:
    data.write_corpus(folder, data.Options(files=options.files, documents=options.documents))
    stored = sorted((folder / "en").glob("*.gz"))
    rows = []
    for slots in options.slots:
        names = folder / str(slots)
        data.link_many(stored, names, 2 * slots // 3)
        measured: dict[int, list[dict[str, Any]]] = {window: [] for window in options.windows}
        for window in options.windows * options.rounds:
            measured[window].append(in_a_fresh_process(cost, names, slots, window, options))
        group = [data.median(found, "sequences_per_second") for found in measured.values()]
        first = group[0]["sequences_per_second"]
        rows += [{**row, "ratio": row["sequences_per_second"] / first} for row in group]
    return rows


def write_numbered(folder: Path, files: int, documents: int) -> list[int]:
    """Write numbered documents with C4's spread and an eighth of its length; return their token counts."""
    rng = np.random.default_rng(0)
    words = rng.lognormal(math.log(68) - 0.6, 1.1, files * documents).astype(int) + 2
    folder.mkdir()
    numbers = (map(str, [number, *rng.integers(10**4, 10**5, words[number] - 1)]) for number in range(len(words)))
    for f in range(files):
        texts = ({"text": " ".join(text)} for text in islice(numbers, documents))
        write_shard(folder / f"{f:03d}.json.gz", texts)
    return (words + 1).tolist()


def apart(folder: Path, window: int, tokens: list[int], slots: int) -> float:
    """Return the standard deviation of (a document's step in the second epoch − its step in the first)."""
    files = list_files("text", str(folder))
    start = np.zeros((slots, len(Field)), dtype=np.int64)
    options = StreamOptions(seq_len=SEQUENCE - 1, shuffle_window=window)
    streams = RankStreams(files, range(slots), start, Assignment(files, slots, 0), str.split, options)
    step, done = np.zeros((2, len(tokens))), [0] * slots
    going = set(range(slots))
    while going:
        for slot in sorted(going):
            document = streams.slots[slot].source.next()
            epoch, number = int(document.start[Field.EPOCH]), int(document.content.split(maxsplit=1)[0])
            if epoch > 1:
                going.remove(slot)
                continue
            done[slot] += tokens[number]
            step[epoch, number] = done[slot] // SEQUENCE
    streams.close()
    return float((step[1] - step[0]).std())


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = costs(folder, options)
        steps = []
        for slots, files in ((48, 16), (48, 384)):
            tokens = write_numbered(folder / f"numbered {files}", files, slots * 436 // files)
            epoch = {"slots": slots, "files": files, "documents": len(tokens), "steps": sum(tokens) / slots / SEQUENCE}
            for window in options.windows:
                found = apart(folder / f"numbered {files}", window, tokens, slots)
                steps.append({**epoch, "window": window, "apart": found})
    show(options.json, rows=rows, apart=steps)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
