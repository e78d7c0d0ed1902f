"""Tokens per second and rank of the data stream, beside TorchTitan's stock loader on the same files, in one run.

    python benchmarks/data.py            # a table
    python benchmarks/data.py --json     # an object with "rows" and nothing else

One rank is driven in one process: rank 0 of 64 and of 40, on 64 files. Every rank of a real job does the same at the same
time, so this is what one rank gets from its own core(s), with files in the page cache.
"""

import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

import titan_disp  # noqa: F401 — device type
from titan_disp.config import load_config
from titan_disp.data.documents import Documents
from titan_disp.data.loader import StreamLoader, stream_options
from titan_disp.data.sample import CARD, documents
from titan_disp.data.shards import list_files
from titan_disp.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parent.parent


@dataclass
class Options:
    files: int = 64
    """Files of the corpus."""
    documents: int = 1500
    """Documents per file."""
    seq_len: int = 2048
    seconds: float = 8.0
    """Measured time of each row, after the first batch."""
    slots: int = 2048
    """Slots of the row that measures memory and open files on one rank."""
    json: bool = False
    """Print one JSON object and nothing else."""


def write_corpus(folder: Path, options: Options) -> None:
    """C4's layout, texts of the sample corpus in rotation with a number in front, and a Hugging Face tokenizer beside it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [d["text"] for d in documents()]
    (folder / "en").mkdir()
    for f in range(options.files):
        name = f"c4-train.{f:05d}-of-{options.files:05d}.json.gz"
        with gzip.open(folder / "en" / name, "wt", compresslevel=1) as file:
            for i in range(options.documents):
                text = f"{f} {i} {texts[(f * 37 + i) % len(texts)]}"
                file.write(json.dumps({"text": text, "timestamp": "", "url": ""}) + "\n")
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
    (folder / "hf").mkdir()
    tokenizer.save(str(folder / "hf" / "tokenizer.json"))
    (folder / "hf" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')


def job_config(folder: Path, tokenizer: str, options: Options, prefetch: int):
    return load_config(
        [
            *("--training.dataset", "c4", "--training.dataset_path", str(folder), "--training.local_batch_size", "1"),
            *("--training.seq_len", str(options.seq_len), "--model.hf_assets_path", tokenizer),
            *("--stream.prefetch", str(prefetch), "--model.name", "qwen3_disp", "--model.flavor", "nano"),
        ]
    )


def ours(job, ranks: int, slots: int) -> StreamLoader:
    return StreamLoader(
        list_files("c4", job.training.dataset_path),
        load_tokenizer(job.model.hf_assets_path),
        job.model.hf_assets_path,
        stream_options(job),
        slots=slots,
        local_batch_size=1,
        dp_rank=0,
        dp_world_size=ranks,
        prefetch=job.stream.prefetch,
    )


def stock(job, ranks: int):
    from torchtitan.hf_datasets.text_datasets import build_text_dataloader

    return build_text_dataloader(ranks, 0, load_tokenizer(job.model.hf_assets_path), job)


def tokens_per_second(loader, options: Options) -> tuple[float, float]:
    """(tokens/s after the first batch, seconds to the first batch)."""
    start = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - start
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < options.seconds:
        count += next(batches)[1].numel()
    return count / (time.perf_counter() - start), first


def resident() -> int:
    """Bytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def many_slots(folder: Path, options: Options) -> None:
    """In a process of its own: all slots on one rank; prints memory held, open files and seconds to a batch of each slot."""
    loader = ours(job_config(folder, str(folder / "hf"), options, 0), ranks=1, slots=options.slots)
    before = resident()
    start, batches = time.perf_counter(), iter(loader)
    for _ in range(options.slots):
        next(batches)
    seconds = time.perf_counter() - start
    used = resident() - before
    print(json.dumps({"seconds": seconds, "resident_bytes": used, "open_files": len(os.listdir("/proc/self/fd"))}))


def deep_resume(folder: Path) -> dict[str, float]:
    """Seconds to the last document of one large gzip file, those before it being passed over unparsed."""
    texts = [d["text"] for d in documents()]
    path = folder / "large" / "train.json.gz"
    path.parent.mkdir()
    count, size = 0, 0
    with gzip.open(path, "wb", compresslevel=6) as file:
        while size < 300 << 20:
            line = (json.dumps({"text": " ".join(texts[(count + k) % len(texts)] for k in range(3))}) + "\n").encode()
            size += file.write(line)
            count += 1
    (listed,) = list_files("c4", str(path.parent))
    start = time.perf_counter()
    assert Documents(listed, 16 << 20, start=count - 1).read() is not None
    seconds = time.perf_counter() - start
    return {"documents": count, "bytes": size, "seconds": seconds, "megabytes_per_second": size / 1e6 / seconds}


def main(options: Options) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder, options)
        from titan_disp.data.sample import write_sample

        write_sample(folder / "sample")
        tokenizers = {"SentencePiece": str(folder / "sample" / "tokenizer"), "Hugging Face": str(folder / "hf")}
        for kind, path in tokenizers.items():
            for ranks in (64, 40):
                cases = {
                    "titan-disp, prefetch": lambda p=path, r=ranks: ours(job_config(folder, p, options, 4), r, 2 * r),
                    "titan-disp": lambda p=path, r=ranks: ours(job_config(folder, p, options, 0), r, 2 * r),
                    "TorchTitan": lambda p=path, r=ranks: stock(job_config(folder, p, options, 0), r),
                }
                for loader_name, make in cases.items():
                    speed, first = tokens_per_second(make(), options)
                    row = {"loader": loader_name, "tokenizer": kind, "files": options.files, "ranks": ranks}
                    rows.append({**row, "tokens_per_second": speed, "seconds_to_first_batch": first})
        argv = [sys.executable, __file__, "--slots", str(options.slots), "--seq-len", "64"]
        done = subprocess.run(argv, env={**os.environ, "MANY_SLOTS": name}, capture_output=True, text=True, check=True)
        deep = deep_resume(folder)
        slots_row = {
            "slots": options.slots,
            "ranks": 1,
            "files": options.files,
            **json.loads(done.stdout.splitlines()[-1]),
        }
    if options.json:
        print(json.dumps({"rows": rows, "many_slots": slots_row, "deep_resume": deep}))
        return
    print(f"{'loader':22}{'tokenizer':16}{'ranks':>6}{'tokens/s':>12}{'vs TorchTitan':>15}{'first batch':>13}")
    base = {(r["tokenizer"], r["ranks"]): r["tokens_per_second"] for r in rows if r["loader"] == "TorchTitan"}
    for r in rows:
        ratio = r["tokens_per_second"] / base[r["tokenizer"], r["ranks"]]
        print(
            f"{r['loader']:22}{r['tokenizer']:16}{r['ranks']:6}{r['tokens_per_second']:12,.0f}{ratio:14.1f}×"
            f"{r['seconds_to_first_batch']:11.2f} s"
        )
    print(
        f"{slots_row['slots']} slots on one rank, {options.files} files: {slots_row['resident_bytes'] / 2**20:.0f} MiB, "
        f"{slots_row['open_files']} open files, {slots_row['seconds']:.1f} s to one sequence of each slot"
    )
    print(
        f"resume at document {deep['documents']:,} of a gzip file of {deep['bytes'] / 1e6:.0f} MB of text: "
        f"{deep['seconds']:.1f} s, {deep['megabytes_per_second']:.0f} MB/s"
    )


if __name__ == "__main__":
    chosen = tyro.cli(Options, description=__doc__)
    if "MANY_SLOTS" in os.environ:
        many_slots(Path(os.environ["MANY_SLOTS"]), chosen)
    else:
        main(chosen)
