"""Measure the tokens per second of one rank's data stream, and of TorchTitan's loader on
the same files.

    python benchmarks/data.py            # tables
    python benchmarks/data.py --json     # only an object with "rows" and "bounds"

One process runs rank 0 of 64 and of 40 ranks, on 64 files. This is the speed of a rank
that has its own cores, with the files in the page cache. Texts have C4's mean length (2.2
kB) and spread. "bounds" has the memory and the time of a rank with many slots or a large
document.
"""

import json
import math
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
import tyro
from tokenizers import ByteLevelBPETokenizer
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig

from measuring import Printed, in_a_fresh_process, show
from titan_disp.config.load import load_config
from titan_disp.cpu import high_water_mark, resident_bytes
from titan_disp.data.listing import list_files
from titan_disp.data.loader import StreamLoader, open_stream
from titan_disp.data.position import Field
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.lab.sample import (
    CARD,
    documents,
    shard_name,
    train_tokenizer,
    write_sample,
    write_split,
)

MANY = 1024  # files of the cases with many slots: hard links to the other files


@dataclass
class Options(Printed):
    files: int = 64
    """Number of files of the corpus."""
    documents: int = 1500
    """Documents per file: about 3.3 MB of text."""
    seq_len: int = 2048
    seconds: float = 4.0
    """Seconds for which each loader is measured in each round, after the first
    batch.
    """
    rounds: int = 3
    """Number of rounds, in which the loaders take turns. The median counts."""


def write_corpus(folder: Path, options: Options) -> None:
    """Write the sample corpus's text with C4's layout and document lengths, and a
    SentencePiece and a Hugging Face tokenizer.
    """
    texts = [d["text"] for d in documents()]
    words = " ".join(texts).split(" ")
    rng = np.random.default_rng(0)
    # A lognormal distribution with a mean of 2.2 kB (about 370 words of 6 characters):
    # 0.6 is half of the variance, 1.1².
    count = options.files * options.documents
    lengths = rng.lognormal(math.log(370) - 0.6, 1.1, count).astype(int) + 10
    starts = rng.integers(0, len(words), count)
    # so that a document may run past the end
    words += words[: lengths.max()]
    records = [
        {"text": " ".join(words[start : start + length])}
        for start, length in zip(starts, lengths, strict=True)
    ]
    write_split(folder / "en", "train", records, options.files)
    write_split(folder / "en", "validation", records[:100])
    (folder / "README.md").write_text(CARD)
    (folder / "spm").mkdir()
    # No user-defined symbols, because gigatoken and SentencePiece treat them differently
    model = train_tokenizer(texts, 2048, user_defined_symbols=())
    (folder / "spm" / "spm.model").write_bytes(model)
    end = "<|endoftext|>"
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts, vocab_size=2048, special_tokens=[end], show_progress=False
    )
    (folder / "hf").mkdir()
    tokenizer.save(str(folder / "hf" / "tokenizer.json"))
    eos = json.dumps({"eos_token": end})
    (folder / "hf" / "tokenizer_config.json").write_text(eos)


def job_config(folder: Path, tokenizer: str, seq_len: int) -> JobConfig:
    """Return a config that reads C4's files in a folder, without a worker process."""
    words = (
        f"--training.dataset c4 --training.dataset_path {folder} "
        f"--training.local_batch_size 1 --training.seq_len {seq_len} "
        f"--stream.prefetch 0 --model.hf_assets_path {tokenizer} "
        "--model.name qwen3_disp --model.flavor nano"
    )
    return load_config(words.split())


def ours(
    job: JobConfig, ranks: int, slots: int, tokenizer: BaseTokenizer
) -> StreamLoader:
    """Return our loader for rank 0. ``slots`` is the number of slots of all ranks."""
    job.stream.slots = slots
    files = list_files("c4", job.training.dataset_path)
    return open_stream(job, files, tokenizer, dp_world_size=ranks, dp_rank=0)


def read_by_this_process() -> int:
    """Return the bytes that this process has read by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def measure(loader: Any, options: Options) -> dict[str, float]:
    """Return the tokens per second after the first batch, and the stored bytes that are read
    per token: NaN if a worker process reads them.
    """
    batches = iter(loader)
    next(batches)
    start = time.perf_counter()
    count = 0
    read = read_by_this_process()
    while time.perf_counter() - start < options.seconds:
        count += next(batches)[1].numel()
    seconds = time.perf_counter() - start
    bytes_per_token = (read_by_this_process() - read) / count
    if isinstance(loader, StreamLoader):
        loader.close()
        if loader.options.prefetch > 0:
            bytes_per_token = math.nan
    return {
        "tokens_per_second": count / seconds,
        "bytes_read_per_token": bytes_per_token,
    }


TOKENIZERS = {"SentencePiece": "spm", "Hugging Face": "hf"}  # name: folder
# The keys of [stream] in each case, by the name of the loader. Without prefetch, this
# process reads the files.
LOADERS: dict[str, dict[str, Any]] = {
    "titan-disp": {"prefetch": 4},
    "titan-disp, prefetch = 0": {},
    "titan-disp, fast_tokenizer": {"prefetch": 4, "fast_tokenizer": True},
    "TorchTitan": {},
}


def speed(folder: Path, options: Options) -> pandas.DataFrame:
    """Return the medians over rounds of what ``measure`` returns, and the ratio of the speed
    to TorchTitan's, with a row for each tokenizer, number of ranks and loader.
    """
    from torchtitan.hf_datasets.text_datasets import build_text_dataloader as stock

    rows = []
    rounds = range(options.rounds)
    for _, name, ranks, loader_name in product(rounds, TOKENIZERS, (64, 40), LOADERS):
        path = str(folder / TOKENIZERS[name])
        job = job_config(folder, path, options.seq_len)
        vars(job.stream).update(LOADERS[loader_name])
        tokenizer = load_tokenizer(path)
        loader: Any
        if loader_name == "TorchTitan":
            loader = stock(ranks, 0, tokenizer, job)
        else:
            loader = ours(job, ranks, 2 * ranks, tokenizer)
        case = {"tokenizer": name, "ranks": ranks, "loader": loader_name}
        rows.append({**case, **measure(loader, options)})
    by_case = pandas.DataFrame(rows).groupby(
        ["tokenizer", "ranks", "loader"], sort=False
    )
    medians = by_case.median()
    stock_speed = medians.xs("TorchTitan", level="loader")["tokens_per_second"]
    medians["ratio"] = medians["tokens_per_second"] / stock_speed
    return medians.reset_index()


class Case(NamedTuple):
    """A case of ``bounds``."""

    slots: int
    corpus: str  # the name of its folder
    per_slot: int = 1  # sequences of each slot
    skipped: float = 0.0  # the fraction of each file that is skipped, as at a resume
    stream: Mapping[str, float] = {}  # keys of [stream]


CASES = {
    "2,048 slots, not shuffled": Case(2048, "many", stream={"shuffle_window": 0}),
    "2,048 slots": Case(2048, "many"),
    "2,048 slots, a window of 512": Case(2048, "many", stream={"shuffle_window": 512}),
    "2,048 slots, resumed": Case(2048, "many", skipped=0.5),
    "16 slots": Case(16, "large", per_slot=8),
    "16 slots, a document of 50 MB": Case(
        16, "large", per_slot=24, stream={"max_document_mb": 64.0}
    ),
}


def bounds(name: str, folder: Path, options: Options) -> dict[str, Any]:
    """Return the memory and the open files of all slots on one rank, in this process, and
    the times to the first batch, which is a sequence, and to the last one.
    """
    case = CASES[name]
    tokenizer = folder / "sample" / "tokenizer"
    job = job_config(folder / case.corpus, str(tokenizer), seq_len=2048)
    vars(job.stream).update(case.stream)
    loader = ours(job, 1, case.slots, load_tokenizer(tokenizer))
    skip = int(case.skipped * options.documents)
    loader.positions[:, [Field.HEAD, Field.BODY_DOCUMENT, Field.TAIL]] = skip
    before = resident_bytes()
    start = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - start
    for _ in range(case.slots * case.per_slot - 1):
        next(batches)
    seconds = time.perf_counter() - start
    open_files = len(os.listdir("/proc/self/fd"))
    loader.close()
    return {
        "case": name,
        "seconds_to_first_batch": first,
        "seconds": seconds,
        "peak_bytes": high_water_mark() - before,
        "open_files": open_files,
    }


def link_many(folder: Path, count: int) -> None:
    """Create the folder "many" with hard links to the files of "en", in turn."""
    (folder / "many").mkdir()
    files = cycle(sorted((folder / "en").glob("c4-train*.gz")))
    for i, file in zip(range(count), files, strict=False):
        os.link(file, folder / "many" / shard_name("train", i, count))


def write_large(folder: Path) -> None:
    """Write 16,000 documents of 2 kB into sixteen files. A document of one file, near its
    beginning, is 50 MB long.

    The text of that document repeats, so that gzip stores it in few bytes. Each slot has
    an equal share of the stored bytes: if one file were many times larger than the
    others, nearly all slots would read that file again and again.
    """
    text = " ".join(d["text"] for d in documents())
    places = (997 * i % (len(text) - 2000) for i in range(16_000))
    records = [{"text": text[place : place + 2000]} for place in places]
    records[40 * 16 + 3]["text"] = text[:1000] * ((50 << 20) // 1000)
    write_split(folder / "large", "train", records, 16)


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder, options)
        link_many(folder, MANY)
        write_large(folder)
        write_sample(folder / "sample")
        rows = speed(folder, options)
        cases = [in_a_fresh_process(bounds, case, folder, options) for case in CASES]
    show(options.json, rows=rows, bounds=cases)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
