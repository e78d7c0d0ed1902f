"""Measure the tokens per second of one rank's data stream, beside TorchTitan's own
loader on the same files.

    python benchmarks/data.py            # tables
    python benchmarks/data.py --json     # only an object with "rows", "bounds" and "deep_resume"

One process runs rank 0 of 64 and of 40 ranks, on 64 files: this is the speed of one
rank with its own cores and files in the page cache. Texts have C4's mean length (2.2
kB) and spread. The rows "reading" use a tokenizer that takes no time.
"""

import gzip
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from tokenizers import ByteLevelBPETokenizer
from torchtitan.components.tokenizer import BaseTokenizer

from measuring import Printed, in_a_fresh_process, show
from titan_disp.config.load import load_config
from titan_disp.cpu import high_water_mark, resident_bytes
from titan_disp.data.documents import Documents
from titan_disp.data.listing import list_files
from titan_disp.data.loader import StreamLoader, open_stream
from titan_disp.data.options import StreamOptions, default_threads
from titan_disp.data.position import Field
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.lab.sample import CARD, documents, train_tokenizer, write_sample


@dataclass
class Options(Printed):
    files: int = 64
    """Number of files of the corpus."""
    documents: int = 1500
    """Documents per file, which have about 3.3 MB of text."""
    seq_len: int = 2048
    seconds: float = 4.0
    """Seconds for which each loader is measured in each round, after the first
    batch.
    """
    rounds: int = 3
    """How many times the loaders take turns. The median counts."""
    many_files: int = 1024
    """Number of files in the rows with many slots; they are names for the same 64
    files.
    """


def write_corpus(folder: Path, options: Options) -> None:
    """Write the sample corpus's text with C4's layout and document lengths, and
    tokenizers of both kinds.
    """
    texts = [d["text"] for d in documents()]
    words = " ".join(texts).split(" ")
    rng = np.random.default_rng(0)
    # A lognormal with a mean of 2.2 kB, most of it below 1.2 kB: about 370 words of 6
    # characters.
    lengths = (
        rng.lognormal(
            math.log(370) - 0.6, 1.1, (options.files, options.documents)
        ).astype(int)
        + 10
    )
    starts = rng.integers(0, len(words), lengths.shape)
    (folder / "en").mkdir()
    for f in range(options.files):
        name = f"c4-train.{f:05d}-of-{options.files:05d}.json.gz"
        with gzip.open(folder / "en" / name, "wt", compresslevel=6) as file:
            for i, (start, length) in enumerate(
                zip(starts[f], lengths[f], strict=True)
            ):
                text = " ".join(
                    (words[start : start + length] * (1 + length // len(words)))[
                        :length
                    ]
                )
                url = f"https://www.example.org/{f}/{i}"
                file.write(
                    json.dumps(
                        {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": url}
                    )
                    + "\n"
                )
    (folder / "README.md").write_text(
        CARD.replace(
            "  - split: validation\n    path: en/c4-validation.*.json.gz\n", ""
        )
    )
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts, vocab_size=2048, special_tokens=["<|endoftext|>"], show_progress=False
    )
    (folder / "spm").mkdir()
    # There are no user-defined symbols, which gigatoken and SentencePiece treat
    # differently.
    (folder / "spm" / "spm.model").write_bytes(
        train_tokenizer(texts, 2048, user_defined_symbols=())
    )
    (folder / "hf").mkdir()
    tokenizer.save(str(folder / "hf" / "tokenizer.json"))
    (folder / "hf" / "tokenizer_config.json").write_text(
        '{"eos_token": "<|endoftext|>"}'
    )


class Free(BaseTokenizer):
    """A tokenizer that takes no time: every four characters are a token."""

    def __init__(self) -> None:
        super().__init__()
        self.bos_id = None
        self.eos_id = 0
        self._ids = [1] * (1 << 20)

    def encode(self, text: str, **_: bool) -> list[int]:  # type: ignore[override]
        return self._ids[: 1 + len(text) // 4]

    def decode(self, token_ids: list[int]) -> str:  # type: ignore[override]
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2


def job_config(
    folder: Path, tokenizer: str, seq_len: int, prefetch: int, *overrides: str
):
    return load_config(
        [
            *(
                "--training.dataset",
                "c4",
                "--training.dataset_path",
                str(folder),
                "--training.local_batch_size",
                "1",
            ),
            *("--training.seq_len", str(seq_len), "--model.hf_assets_path", tokenizer),
            *(
                "--stream.prefetch",
                str(prefetch),
                "--model.name",
                "qwen3_disp",
                "--model.flavor",
                "nano",
            ),
            *overrides,
        ]
    )


def ours(job, ranks: int, slots: int, tokenizer: BaseTokenizer) -> StreamLoader:
    job.stream.slots = slots
    return open_stream(
        job, list_files("c4", job.training.dataset_path), tokenizer, ranks, 0
    )


def read_by_this_process() -> int:
    """Return the bytes that this process has read by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def measure(loader, options: Options) -> dict[str, float | None]:
    """Measure tokens/s after the first batch, seconds to it, and (without a worker)
    stored bytes read per token.
    """
    start = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - start
    start = time.perf_counter()
    count = 0
    read = read_by_this_process()
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


def median(found: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    return sorted(found, key=lambda one: one[key])[len(found) // 2]


def speed(
    folder: Path, tokenizers: dict[str, str], options: Options
) -> list[dict[str, Any]]:
    from torchtitan.hf_datasets.text_datasets import build_text_dataloader as stock

    rows = []
    for kind, path in tokenizers.items():
        free = kind == "reading"
        cases = {"titan-disp": (4, ()), "titan-disp, prefetch = 0": (0, ())}
        if not free:
            fast = ("--stream.fast_tokenizer",)
            cases |= {
                "titan-disp, fast_tokenizer": (4, fast),
                "titan-disp, fast_tokenizer, prefetch = 0": (0, fast),
            }
        cases["TorchTitan"] = (0, ())
        for ranks in (64, 40, 1):
            measured: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
            for name, (prefetch, overrides) in [*cases.items()] * options.rounds:
                job = job_config(folder, path, options.seq_len, prefetch, *overrides)
                tokenizer = Free() if free else load_tokenizer(path)
                stocks = name == "TorchTitan"
                loader = (
                    stock(ranks, 0, tokenizer, job)
                    if stocks
                    else ours(job, ranks, 2 * ranks, tokenizer)
                )
                measured[name].append(measure(loader, options))
            medians = {
                name: median(found, "tokens_per_second")
                for name, found in measured.items()
            }
            for name, found in medians.items():
                ratio = (
                    found["tokens_per_second"]
                    / medians["TorchTitan"]["tokens_per_second"]
                )
                row = {
                    "loader": name,
                    "tokenizer": kind,
                    "files": options.files,
                    "ranks": ranks,
                }
                rows.append(
                    {**row, "threads": default_threads(), **found, "ratio": ratio}
                )
    return rows


# slots, corpus, sequences of each slot, part of each file to skip first, limit of a
# document in MB
CASES = {
    "2,048 slots": (2048, "many", 1, 0, 16.0),
    "2,048 slots, resumed": (2048, "many", 1, 0.5, 16.0),
    "16 slots": (16, "large", 8, 0, 16.0),
    "16 slots, a document of 50 MB": (16, "large", 24, 0, 64.0),
}


def bounds(case: str, folder: Path, options: Options) -> dict[str, Any]:
    """Run all slots on one rank, in this process; measure memory, open files, and the
    time to a sequence of every slot.
    """
    slots, source, rounds, part, max_mb = CASES[case]
    job = job_config(folder / source, str(folder / "sample" / "tokenizer"), 2048, 0)
    job.stream.max_document_mb = max_mb
    loader = ours(job, 1, slots, load_tokenizer(job.model.hf_assets_path))
    skip = int(part * options.documents)
    # as at a resume
    loader.positions[:, [Field.HEAD, Field.BODY_DOCUMENT, Field.TAIL]] = skip
    before = resident_bytes()
    start = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - start
    for _ in range(slots * rounds - 1):
        next(batches)
    seconds = time.perf_counter() - start
    fds = len(os.listdir("/proc/self/fd"))
    loader.close()
    found = {
        "case": case,
        "slots": slots,
        "files": len(loader.files),
        "resumed_at_document": skip,
    }
    found |= {
        "seconds_to_first_batch": first,
        "seconds": seconds,
        "sequences": slots * rounds,
    }
    return {**found, "peak_bytes": high_water_mark() - before, "open_files": fds}


def link_many(files: Sequence[Path], folder: Path, count: int) -> None:
    """Link a corpus under more names."""
    folder.mkdir()
    for i in range(count):
        os.link(
            files[i % len(files)], folder / f"c4-train.{i:05d}-of-{count:05d}.json.gz"
        )


def write_large(folder: Path) -> None:
    """Write sixteen files of 1,000 documents of 2 kB; one of them also has a document
    of 50 MB near its beginning.

    The text of that document repeats, so that gzip stores it in few bytes. Slots have
    equal shares of the stored bytes: if one file were many times larger than the
    others, nearly all slots would share it and read it again and again.
    """
    text = " ".join(d["text"] for d in documents())
    (folder / "large").mkdir()
    for i in range(16):
        with gzip.open(
            folder / "large" / f"{i:02d}.json.gz", "wt", compresslevel=1
        ) as file:
            for k in range(1000):
                at = (1000 * i + k) * 997 % (len(text) - 2000)
                document = (
                    text[:1000] * ((50 << 20) // 1000)
                    if i == 3 and k == 40
                    else text[at : at + 2000]
                )
                file.write(json.dumps({"text": document}) + "\n")


def deep_resume(folder: Path) -> dict[str, float]:
    """Return the seconds to the last document of one large gzip file, when all others
    are skipped unparsed.
    """
    texts = [d["text"] for d in documents()]
    path = folder / "deep" / "train.json.gz"
    path.parent.mkdir()
    count = 0
    size = 0
    with gzip.open(path, "wb", compresslevel=6) as file:
        while size < 300 << 20:
            line = (
                json.dumps(
                    {
                        "text": " ".join(
                            texts[(count + k) % len(texts)] for k in range(3)
                        )
                    }
                )
                + "\n"
            ).encode()
            size += file.write(line)
            count += 1
    (listed,) = list_files("c4", str(path.parent))
    start = time.perf_counter()
    assert Documents(listed, StreamOptions(), count - 1).read() is not None
    seconds = time.perf_counter() - start
    return {
        "documents": count,
        "bytes": size,
        "seconds": seconds,
        "megabytes_per_second": size / 1e6 / seconds,
    }


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder, options)
        link_many(
            sorted((folder / "en").glob("*.gz")), folder / "many", options.many_files
        )
        write_large(folder)
        write_sample(folder / "sample")
        names = {"SentencePiece": "spm", "Hugging Face": "hf", "reading": "hf"}
        tokenizers = {kind: str(folder / name) for kind, name in names.items()}
        rows = speed(folder, tokenizers, options)
        cases = [in_a_fresh_process(bounds, case, folder, options) for case in CASES]
        deep = deep_resume(folder)
    show(options.json, rows=rows, bounds=cases, deep_resume=deep)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
