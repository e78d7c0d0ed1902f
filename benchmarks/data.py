"""Measure the tokens per second of one rank's data stream, beside TorchTitan's own loader on the same files.

    python benchmarks/data.py            # tables
    python benchmarks/data.py --json     # only an object with "rows", "bounds" and "deep_resume"

One process runs rank 0 of 64 and of 40 ranks, on 64 files. Every rank of a real job does the same at the same time, so
this is the speed of one rank with its own cores and files in the page cache. Texts have C4's mean length (2.2 kB) and
spread. The rows "reading" use a tokenizer that takes no time, so they measure only the loaders.
"""

import gzip
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from torchtitan.components.tokenizer import BaseTokenizer

from titan_disp.config.load import load_config
from titan_disp.cpu import high_water_mark, resident_bytes
from titan_disp.data.documents import Documents
from titan_disp.data.files import list_files
from titan_disp.data.loader import StreamLoader, open_stream
from titan_disp.data.options import StreamOptions, default_threads
from titan_disp.data.position import Field
from titan_disp.data.sample import CARD, documents, train_tokenizer, write_sample
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.errors import counted

ROOT = Path(__file__).parent.parent


@dataclass
class Options:
    files: int = 64
    """Number of files of the corpus."""
    documents: int = 1500
    """Documents per file, which have about 3.3 MB of text."""
    seq_len: int = 2048
    seconds: float = 4.0
    """Seconds for which each loader is measured in each round, after the first batch."""
    rounds: int = 3
    """How many times the loaders take turns. The median counts."""
    many_files: int = 1024
    """Number of files in the rows with many slots; they are names for the same 64 files."""
    seed: int = 0
    """Seed of the texts."""
    json: bool = False
    """Print only one JSON object."""


def write_corpus(folder: Path, options: Options) -> None:
    """Write the sample corpus's text with C4's layout and document lengths, and tokenizers of both kinds."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [d["text"] for d in documents()]
    words = " ".join(texts).split(" ")
    rng = np.random.default_rng(options.seed)
    # A lognormal with a mean of 2.2 kB, most of it below 1.2 kB: about 370 words of 6 characters.
    lengths = rng.lognormal(math.log(370) - 0.6, 1.1, (options.files, options.documents)).astype(int) + 10
    starts = rng.integers(0, len(words), lengths.shape)
    (folder / "en").mkdir()
    for f in range(options.files):
        name = f"c4-train.{f:05d}-of-{options.files:05d}.json.gz"
        with gzip.open(folder / "en" / name, "wt", compresslevel=6) as file:
            for i, (start, length) in enumerate(zip(starts[f], lengths[f], strict=True)):
                text = " ".join((words[start : start + length] * (1 + length // len(words)))[:length])
                url = f"https://www.example.org/{f}/{i}"
                file.write(json.dumps({"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": url}) + "\n")
    (folder / "README.md").write_text(CARD.replace("  - split: validation\n    path: en/c4-validation.*.json.gz\n", ""))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    (folder / "spm").mkdir()
    # There are no user-defined symbols, which gigatoken and SentencePiece treat differently.
    (folder / "spm" / "spm.model").write_bytes(train_tokenizer(texts, 2048, user_defined_symbols=()))
    (folder / "hf").mkdir()
    tokenizer.save(str(folder / "hf" / "tokenizer.json"))
    (folder / "hf" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')


class Free(BaseTokenizer):
    """A tokenizer that takes no time: every four characters are a token."""

    def __init__(self) -> None:
        super().__init__()
        self.bos_id, self.eos_id, self._ids = None, 0, [1] * (1 << 20)

    def encode(self, text: str, **_: bool) -> list[int]:  # type: ignore[override]
        return self._ids[: 1 + len(text) // 4]

    def decode(self, token_ids: list[int]) -> str:  # type: ignore[override]
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2


def job_config(folder: Path, tokenizer: str, seq_len: int, prefetch: int, *overrides: str):
    return load_config(
        [
            *("--training.dataset", "c4", "--training.dataset_path", str(folder), "--training.local_batch_size", "1"),
            *("--training.seq_len", str(seq_len), "--model.hf_assets_path", tokenizer),
            *("--stream.prefetch", str(prefetch), "--model.name", "qwen3_disp", "--model.flavor", "nano"),
            *overrides,
        ]
    )


def tokenizer_of(job, free: bool) -> BaseTokenizer:
    return Free() if free else load_tokenizer(job.model.hf_assets_path)


def ours(job, ranks: int, slots: int, free: bool = False) -> StreamLoader:
    job.stream.slots = slots
    return open_stream(job, list_files("c4", job.training.dataset_path), tokenizer_of(job, free), ranks, 0)


def stock(job, ranks: int, free: bool):
    from torchtitan.hf_datasets.text_datasets import build_text_dataloader

    return build_text_dataloader(ranks, 0, tokenizer_of(job, free), job)


def read_by_this_process() -> int:
    """Return the bytes that this process has read by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def measure(loader, options: Options) -> dict[str, float | None]:
    """Measure tokens/s after the first batch, seconds to it, and (without a worker) stored bytes read per token."""
    start = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - start
    start, count, read = time.perf_counter(), 0, read_by_this_process()
    while time.perf_counter() - start < options.seconds:
        count += next(batches)[1].numel()
    seconds = time.perf_counter() - start
    read = read_by_this_process() - read
    if isinstance(loader, StreamLoader):
        loader.close()
    worker = isinstance(loader, StreamLoader) and loader.options.prefetch > 0
    return {
        "tokens_per_second": count / seconds,
        "seconds_to_first_batch": first,
        "bytes_read_per_token": None if worker else read / count,
    }


def speed(folder: Path, tokenizers: dict[str, str], options: Options) -> list[dict[str, Any]]:
    rows = []
    for kind, path in tokenizers.items():
        free = kind == "reading"
        for ranks in (64, 40):
            cases = {
                "titan-disp": lambda p=path, r=ranks, f=free: ours(
                    job_config(folder, p, options.seq_len, 4), r, 2 * r, f
                ),
                "titan-disp, prefetch = 0": lambda p=path, r=ranks, f=free: ours(
                    job_config(folder, p, options.seq_len, 0), r, 2 * r, f
                ),
                **(
                    {}
                    if free
                    else {
                        f"titan-disp, fast_tokenizer{note}": lambda p=path, r=ranks, n=prefetch: ours(
                            job_config(folder, p, options.seq_len, n, "--stream.fast_tokenizer"), r, 2 * r
                        )
                        for note, prefetch in (("", 4), (", prefetch = 0", 0))
                    }
                ),
                "TorchTitan": lambda p=path, r=ranks, f=free: stock(job_config(folder, p, options.seq_len, 0), r, f),
            }
            measured = [{name: measure(make(), options) for name, make in cases.items()} for _ in range(options.rounds)]
            group = []
            for name in cases:
                middle = sorted((m[name] for m in measured), key=lambda m: m["tokens_per_second"])[options.rounds // 2]
                row = {"loader": name, "tokenizer": kind, "files": options.files, "ranks": ranks}
                group.append({**row, **middle})
            rows += [{**r, "ratio": r["tokens_per_second"] / group[-1]["tokens_per_second"]} for r in group]
    return rows


def bounds(job, slots: int, rounds: int, skip: int) -> dict[str, Any]:
    """Run all slots on one rank, in this process; measure memory, open files, and the time to a sequence of every slot.

    Args:
        rounds: sequences to read from each slot.
        skip: documents of every file to skip first, as at a resume.
    """
    loader = ours(job, 1, slots)
    loader.positions[:, [Field.HEAD, Field.BODY_DOCUMENT, Field.TAIL]] = skip
    before = resident_bytes()
    start, batches = time.perf_counter(), iter(loader)
    next(batches)
    first = time.perf_counter() - start
    for _ in range(slots * rounds - 1):
        next(batches)
    seconds = time.perf_counter() - start
    fds = len(os.listdir("/proc/self/fd"))
    loader.close()
    return {
        "slots": slots,
        "files": len(loader.files),
        "resumed_at_document": skip,
        "seconds_to_first_batch": first,
        "seconds": seconds,
        "sequences": slots * rounds,
        "peak_bytes": high_water_mark() - before,
        "open_files": fds,
    }


def write_many(folder: Path, options: Options) -> None:
    """Link the corpus under more names."""
    (folder / "many").mkdir()
    files = sorted((folder / "en").glob("*.gz"))
    for i in range(options.many_files):
        os.link(files[i % len(files)], folder / "many" / f"c4-train.{i:05d}-of-{options.many_files:05d}.json.gz")


def write_large(folder: Path) -> None:
    """Write sixteen files of 1,000 documents of 2 kB; one of them also has a document of 50 MB near its beginning.

    The text of that document repeats, so that gzip stores it in few bytes. Slots have equal shares of the stored bytes:
    if one file were many times larger than the others, nearly all slots would share it and read it again and again.
    """
    text = " ".join(d["text"] for d in documents())
    (folder / "large").mkdir()
    for i in range(16):
        with gzip.open(folder / "large" / f"{i:02d}.json.gz", "wt", compresslevel=1) as file:
            for k in range(1000):
                at = (1000 * i + k) * 997 % (len(text) - 2000)
                document = text[:1000] * ((50 << 20) // 1000) if i == 3 and k == 40 else text[at : at + 2000]
                file.write(json.dumps({"text": document}) + "\n")


def in_a_fresh_process(case: str, folder: Path, options: Options) -> dict[str, Any]:
    """Run a case in a process of its own, because peak memory is a process's high-water mark."""
    argv = [sys.executable, __file__, "--many-files", str(options.many_files), "--documents", str(options.documents)]
    done = subprocess.run(argv, env={**os.environ, "CASE": case, "FOLDER": str(folder)}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return {"case": case, **json.loads(done.stdout.splitlines()[-1])}


def one_case(case: str, folder: Path, options: Options) -> dict[str, Any]:
    slots, source, rounds, skip, max_mb, seq_len = {
        "2,048 slots": (2048, "many", 1, 0, 16.0, 2048),
        "2,048 slots, resumed": (2048, "many", 1, options.documents // 2, 16.0, 2048),
        "16 slots": (16, "large", 8, 0, 16.0, 2048),
        "16 slots, a document of 50 MB": (16, "large", 24, 0, 64.0, 2048),
    }[case]
    job = job_config(folder / source, str(folder / "sample" / "tokenizer"), seq_len, 0)
    job.stream.max_document_mb = max_mb
    return bounds(job, slots, rounds, skip)


CASES = ("2,048 slots", "2,048 slots, resumed", "16 slots", "16 slots, a document of 50 MB")


def deep_resume(folder: Path) -> dict[str, float]:
    """Return the seconds to the last document of one large gzip file, when all others are skipped unparsed."""
    texts = [d["text"] for d in documents()]
    path = folder / "deep" / "train.json.gz"
    path.parent.mkdir()
    count, size = 0, 0
    with gzip.open(path, "wb", compresslevel=6) as file:
        while size < 300 << 20:
            line = (json.dumps({"text": " ".join(texts[(count + k) % len(texts)] for k in range(3))}) + "\n").encode()
            size += file.write(line)
            count += 1
    (listed,) = list_files("c4", str(path.parent))
    start = time.perf_counter()
    assert Documents(listed, StreamOptions(), count - 1).read() is not None
    seconds = time.perf_counter() - start
    return {"documents": count, "bytes": size, "seconds": seconds, "megabytes_per_second": size / 1e6 / seconds}


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder, options)
        write_many(folder, options)
        write_large(folder)
        write_sample(folder / "sample")
        tokenizers = {
            "SentencePiece": str(folder / "spm"),
            "Hugging Face": str(folder / "hf"),
            "reading": str(folder / "hf"),
        }
        rows = speed(folder, tokenizers, options)
        cases = [in_a_fresh_process(case, folder, options) for case in CASES]
        deep = deep_resume(folder)
    if options.json:
        print(json.dumps({"rows": rows, "bounds": cases, "deep_resume": deep, "threads": default_threads()}))
        return
    print(f"tokenizing with {counted(default_threads(), 'thread')}; {counted(options.files, 'file')}")
    print(f"{'loader':42}{'tokenizer':16}{'ranks':>6}{'tokens/s':>12}{'vs TorchTitan':>15}{'read per token':>16}")
    for r in rows:
        read = "" if r["bytes_read_per_token"] is None else f"{r['bytes_read_per_token']:.1f} B"
        print(
            f"{r['loader']:42}{r['tokenizer']:16}{r['ranks']:6}{r['tokens_per_second']:12,.0f}{r['ratio']:14.1f}×{read:>16}"
        )
    print(
        f"\n{'on one rank':32}{'files':>7}{'peak memory':>13}{'open files':>12}{'first batch':>13}{'sequences/s':>13}"
    )
    for c in cases:
        print(
            f"{c['case']:32}{c['files']:7}{c['peak_bytes'] / 2**20:9.0f} MiB{c['open_files']:12}"
            f"{c['seconds_to_first_batch']:11.2f} s{c['sequences'] / c['seconds']:13.0f}"
        )
    print(
        f"\nresume at document {deep['documents']:,} of a gzip file of {deep['bytes'] / 1e6:.0f} MB of text: "
        f"{deep['seconds']:.1f} s, {deep['megabytes_per_second']:.0f} MB/s"
    )


if __name__ == "__main__":
    chosen = tyro.cli(Options, description=__doc__)
    if "CASE" in os.environ:
        print(json.dumps(one_case(os.environ["CASE"], Path(os.environ["FOLDER"]), chosen)))
    else:
        main(chosen)
