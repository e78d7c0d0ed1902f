"""``titan-disp init`` prepares a run on the user's text: it writes held-out text, a
tokenizer, and a config for this machine.

The config has a reason beside each value. If a reason names no source, the value is our
choice.
"""

import hashlib
import json
import math
import os
import random
import re
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_disp.checks import check_config, check_inputs
from titan_disp.cluster.cost import find_gpu
from titan_disp.cluster.plan import find_machine, meta_model, predict
from titan_disp.cluster.suggest import FILLED
from titan_disp.config.command_options import InitOptions, Machine
from titan_disp.config.load import load_config
from titan_disp.config.types import JobConfig
from titan_disp.data import ledger
from titan_disp.data.documents import Documents
from titan_disp.data.findings import check_content, measured
from titan_disp.data.formats import (
    PLAIN_TEXT,
    BadDocument,
    DamagedFile,
    Empty,
    OtherContent,
    looks_like_text,
    size_of,
    text_of,
)
from titan_disp.data.ledger import CONVERTED, LEFT_OUT, SKIPPED, USED, Entry
from titan_disp.data.listing import (
    BESIDE,
    UNREAD,
    DataFile,
    Listing,
    files_named,
    list_files,
    listing_of,
)
from titan_disp.data.options import Format, StreamOptions
from titan_disp.data.stores import is_folder, is_url
from titan_disp.data.tokenizer import encoder, load_tokenizer
from titan_disp.errors import ConfigError, counted, of_options
from titan_disp.files import atomic_folder, cores
from titan_disp.lab.sample import train_tokenizer, write_shard
from titan_disp.models.registry import ModelEntry, find_model
from titan_disp.templates import templates
from titan_disp.text import byte_size, estimated_duration, short

LEAST = 200_000  # characters of text that a run needs
READ = 200_000_000  # bytes to read if the text for validation is separate
COPIED = 2_000_000_000  # bytes of text to split and copy at most
LEARNED_FROM = 20_000_000  # characters that the tokenizer is trained on
# Characters of text → size of the tokenizer's vocabulary; on a CPU, at most the second.
VOCABULARIES = ((5e6, 2048), (20e6, 4096), (100e6, 8192), (math.inf, 16384))
LEAST_STEPS = 20
MFU = 0.25  # fraction of a GPU's bf16 peak; assumed, as small models do not fill a GPU
# Speed of a training step per core, with one process per core, relative to forward and
# backward of nano in a single process. Measured on two hyperthreads: 8,080 tokens/s of
# two processes together, and 8,300 of a single process without optimizer, dispersion and
# communication.
SHARE = 0.5
# Least seconds of a step on a GPU; assumed, as small models wait for kernel launches
LAUNCHES = 0.1
# FLOP/s per multiprocessor of a GPU that the plan does not know: those of an RTX 3090,
# the lowest in the plan's table
OTHER_FLOPS = 0.87e12
# (width, blocks, heads) of models between nano and Qwen3's 0.6B, with similar
# proportions. Larger models are the flavors in LARGER, by model.name.
BETWEEN = (
    (96, 6, 4),
    (128, 6, 4),
    (192, 8, 6),
    (256, 8, 4),
    (384, 10, 6),
    (512, 12, 8),
    (768, 16, 12),
)
LARGER = {
    "qwen3_disp": ("0.6B", "1.7B", "4B"),
    "llama_disp": ("SmolLM2-360M", "SmolLM2-1.7B"),
}
# (parameters, learning rate): the first was tuned (docs/evidence.md); the others are
# GPT-3's (Brown et al. 2020, Table 2.1).
RATES = (
    (1e6, 1.6e-2),
    (125e6, 6e-4),
    (350e6, 3e-4),
    (760e6, 2.5e-4),
    (1.3e9, 2e-4),
    (2.7e9, 1.6e-4),
    (6.7e9, 1.2e-4),
)


@dataclass(frozen=True)
class _Hardware:
    """The processors of this machine, and the machine as the plan describes it."""

    gpus: int
    machine: Machine

    @property
    def ranks(self) -> int:
        """The number of ranks: one per GPU, or without GPUs one per core, up to 4.

        On a CPU, a rank takes 1 GB. For nano, ranks are twice as fast as threads
        (measured).
        """
        return self.gpus or 2 ** int(math.log2(min(cores(), 4)))

    def __str__(self) -> str:
        if self.gpus:
            return f"{counted(self.gpus, 'GPU')} ({self.machine.gpu})"
        return counted(self.ranks, "core")


@dataclass(frozen=True)
class _Text:
    """The documents of --text."""

    path: str
    training: list[str]  # with ``held_out_files``, only about the first READ bytes
    held_out: list[str]
    # files that are held out by their names; without any, ``held_out`` was chosen here
    held_out_files: list[DataFile]
    size: float  # estimated bytes of text in all files
    split: str  # stream.text_split
    seq_len: int
    ledger: list[Entry]

    @cached_property
    def scale(self) -> float:
        """The size of all text, as a multiple of ``training``."""
        if not self.held_out_files or self.size <= READ:
            return 1.0
        return self.size / sum(len(document.encode()) for document in self.training)

    @cached_property
    def characters(self) -> float:
        """The estimated number of characters of all text for training."""
        return self.scale * sum(map(len, self.training))


@dataclass(frozen=True)
class _Tokens:
    """The tokenizer's vocabulary, and the text in tokens."""

    vocab_size: int
    per_token: float  # characters per token
    training: float  # estimated number of tokens for training
    held_out: int  # number of held-out tokens

    def __str__(self) -> str:
        return f"{self.vocab_size:,} tokens of {self.per_token:.1f} characters"


def init(options: InitOptions) -> str:
    """Write the folder of a run, and return a summary with the commands to type.

    Raises ConfigError if the text or the options cannot be used.
    """
    folder = options.folder.absolute()
    path = options.text
    if not is_url(path):
        path = os.path.abspath(path)
    _check(options, folder, path)
    hardware = _find_hardware()
    text = _find_text(options, path, hardware.gpus)
    with atomic_folder(folder) as partial:
        if not text.held_out_files:
            _write_documents(text, partial / "data")
            ledger.write(partial / "data/train", text.ledger)
        if not options.tokenizer:
            (partial / "tokenizer").mkdir()
            model = _tokenizer(text.training, text.characters, hardware.gpus > 0)
            (partial / "tokenizer/tokenizer.model").write_bytes(model)
        tokens = _count_tokens(text, options.tokenizer or partial / "tokenizer")
        entry = find_model(options.model)
        size = _sized(
            entry=entry,
            tokens=tokens,
            seq_len=text.seq_len,
            hardware=hardware,
            minutes=options.minutes,
        )
        run = _Run(
            options=options, text=text, tokens=tokens, hardware=hardware, size=size
        )
        config = partial / "config.toml"
        config.write_text(run.config(partial))
        job_config = load_config(["--job.config_file", str(config)])
        check_config(job_config, hardware.ranks)
        check_inputs(job_config)
        if hardware.gpus:
            fitting = _fitting_batch(job_config, hardware.machine)
            run = replace(run, size=replace(size, local_batch_size=fitting))
        config.write_text(run.config(folder))  # ``partial`` is renamed to ``folder``
    return run.summary()


def _find_text(options: InitOptions, path: str, gpus: int) -> _Text:
    """Return the text of --text, split into text for training and held-out text.

    Raises ConfigError if the text cannot be used.
    """
    listing = listing_of("text", path, path_key="--text")
    files = listing.files
    if files[0].holds_ids:
        raise ConfigError(
            f"--text is {path!r}, which holds token ids; expected text. To train on "
            "ids, write a config with their tokenizer (model.hf_assets_path) and "
            "stream.token_dtype: docs/data.md#token-ids"
        )
    if not options.allow_loss:
        _check_left_out(path, listing)
    # A .txt file is a document, unless there are few or long ones, which hold several.
    is_plain = all(file.name.endswith(PLAIN_TEXT) for file in files)
    is_long = (
        len(files) < 100
        or max(file.size for file in files) > StreamOptions.max_document_bytes
    )
    split = "file"
    if is_plain and is_long:
        split = "blank_lines"
    allowed = StreamOptions.max_skipped_fraction
    if options.allow_loss:
        allowed = 1.0
    stream = StreamOptions(
        format=Format(options.text_field, split), max_skipped_fraction=allowed
    )
    entries: list[Entry] = []
    try:
        files = measured(check_content(files, stream, "training"), stream)
        size = sum(file.size * file.density for file in files)
        # Sequences are short for little text, because only little can be held out.
        if not gpus or size < 1e7:
            seq_len = 256
        elif size < 1e9:
            seq_len = 1024
        else:
            seq_len = 2048
        training, held_out, held_out_files = _split(
            path, files, stream, size, wanted=64 * seq_len * 5, entries=entries
        )
    except ConfigError as error:
        message = re.sub(
            r"set stream\.left_out = .*", "--allow-loss", of_options(error)
        )
        raise ConfigError(message) from error
    entries += ledger.of_left_out(listing.left_out)
    return _Text(
        path,
        training,
        held_out,
        held_out_files,
        size=size,
        split=split,
        seq_len=seq_len,
        ledger=entries,
    )


def _check_left_out(path: str, listing: Listing) -> None:
    """Raise ConfigError if more than half of the bytes that look like text are in files
    that are not read. Those of other splits do not count.
    """
    texts = {
        file: reason
        for file, reason in listing.left_out.items()
        if reason in (UNREAD, BESIDE) and os.path.isfile(file) and looks_like_text(file)
    }
    unread = list(ledger.of_left_out(texts))
    size = sum(entry.size for entry in unread)
    total = size + sum(file.size for file in listing.files)
    if size > total / 2:
        raise ConfigError(
            f"--text is {path!r}: {size / total:.0%} of the bytes that look like text "
            f"are in files that are not read: {'; '.join(ledger.lines(unread))}. Convert "
            "them, name the files to read by a glob in quotes, or go on without, "
            "--allow-loss"
        )


def _write_documents(text: _Text, folder: Path) -> None:
    """Write held-out documents, and those for training into eight files."""
    (folder / "train").mkdir(parents=True)
    parts = {f"train/train-{i}": text.training[i::8] for i in range(8)}
    for name, documents in {"validation": text.held_out, **parts}.items():
        write_shard(
            folder / f"{name}.jsonl.gz", ({"text": document} for document in documents)
        )


def _count_tokens(text: _Text, assets: Path) -> _Tokens:
    tokenizer = load_tokenizer(assets)
    encode = encoder(tokenizer)
    sample = text.training[:: max(1, len(text.training) // 500)]
    per_token = sum(map(len, sample)) / sum(
        len(encode(document)) for document in sample
    )
    held_out = sum(len(encode(document)) for document in text.held_out)
    return _Tokens(
        tokenizer.get_vocab_size(), per_token, text.characters / per_token, held_out
    )


def _check(options: InitOptions, folder: Path, text: str) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{str(folder)!r} exists and is not an empty folder: name a new one"
        )
    if os.path.isdir(text) and folder.resolve().is_relative_to(Path(text).resolve()):
        raise ConfigError(
            f"{str(folder)!r} is in the folder of --text ({text!r}), so the run's "
            "files would be read as text: name a folder outside it"
        )
    if options.tokenizer is not None:
        load_tokenizer(options.tokenizer)
    if options.minutes is not None and not options.minutes > 0:
        raise ConfigError(f"--minutes is {options.minutes}, expected a number > 0")


def _find_hardware() -> _Hardware:
    gpus = 0
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
    machine = Machine(1, max(gpus, 1), mfu=MFU)
    try:
        return _Hardware(gpus, find_machine(machine))
    except ConfigError:  # a GPU that the plan does not know
        device = torch.cuda.get_device_properties(0)
        machine = replace(
            machine,
            gpu=device.name,
            gpu_memory=device.total_memory / 1e9,
            gpu_flops=OTHER_FLOPS * device.multi_processor_count / 1e12,
        )
        return _Hardware(gpus, find_machine(machine))


def _read(
    files: Sequence[DataFile],
    options: StreamOptions,
    most: float,
    entries: list[Entry],
) -> dict[bytes, str]:
    """Return different documents of up to about ``most`` bytes in total, by their hashes.

    The used, skipped and left-out bytes of each file are added to ``entries``. Files
    that are not read count as used.
    """
    texts = dict[bytes, str]()
    read = 0
    for file in files:
        parts = Counter[tuple[str, str]]()
        used = (USED, "")
        if file.encoding:
            used = (CONVERTED, f"from {file.encoding}")
        documents = Documents(file, options)
        try:
            while read <= most and (record := documents.read()) is not None:
                try:
                    text = text_of(record, options.format.text_field)
                except Empty:
                    continue
                except BadDocument as error:
                    size = error.size or size_of(record)
                    parts[SKIPPED, ledger.reason_of(error)] += size
                    continue
                content = text.encode()
                read += len(content)
                key = hashlib.sha256(content).digest()
                if key in texts:
                    parts[LEFT_OUT, "the same text again"] += len(content)
                else:
                    parts[used] += len(content)
                texts[key] = text
        except OtherContent as error:
            parts[SKIPPED, str(error)] += file.size
        except DamagedFile as error:
            rest = 0
            if documents.stored:
                rest = file.size - documents.stored.tell()
            parts[SKIPPED, f"damaged: {error}"] += max(1, rest)
        finally:
            documents.close()
        entries += ledger.divided(file.name, file.size, parts)
    return texts


def _split(
    path: str,
    files: Sequence[DataFile],
    options: StreamOptions,
    size: float,
    wanted: int,
    entries: list[Entry],
) -> tuple[list[str], list[str], list[DataFile]]:
    """Return texts for training, held-out texts, and files that are held out by their
    names.

    If there are no such files, all texts are read, and about ``wanted`` characters are
    held out, but at least 1 % and at most 5 % of the text. Raises ConfigError if the text
    is too short, too large or damaged.
    """
    held_out_files: list[DataFile] = []
    if is_folder(path):
        with suppress(ConfigError):
            held_out_files = list_files("text_validation", path, path_key="--text")
    if not held_out_files and size > COPIED:
        raise ConfigError(
            f"--text holds about {byte_size(size, 2)} of text, more than is split "
            f"here ({byte_size(COPIED)}), and no name says what is held out: put "
            "validation into the name of a file in a folder, or put some documents "
            "into such a file"
        )
    most_bytes = math.inf
    if held_out_files:
        most_bytes = READ
    shuffled = random.Random(0).sample(files, len(files))  # files may be sorted
    texts = _read(shuffled, options, most_bytes, entries)
    if ledger.lost(entries) > options.max_skipped_fraction:
        skipped = [entry for entry in entries if entry.fate == SKIPPED]
        raise ConfigError(
            f"--text is {path!r}: {ledger.lost(entries):.1%} of its bytes cannot be "
            f"used: {'; '.join(ledger.lines(skipped))}. To go on without, --allow-loss"
        )
    total = sum(map(len, texts.values()))
    if total < LEAST:
        raise ConfigError(
            f"--text is {path!r}, which holds {total:,} characters; expected at least "
            f"{LEAST:,}"
        )
    if held_out_files:
        held_out = list(_read(held_out_files, options, wanted, entries=[]).values())
        return list(texts.values()), held_out, held_out_files
    held_out = []
    held = 0
    most = total // 20
    target = min(max(total // 100, wanted), most)
    for key in sorted(texts):  # hashes give a random but reproducible order
        if held < target and held + len(texts[key]) <= most:
            held_out.append(texts.pop(key))
            held += len(held_out[-1])
    if held < target / 2:
        raise ConfigError(
            f"--text holds {counted(len(texts), 'document')} so long that at most 5 % of the text cannot be held out; expected "
            "shorter ones. In a .txt file, blank lines divide them. If each line is one: jq -R '{text: .}' FILE > FILE.jsonl"
        )
    return list(texts.values()), held_out, []


def _tokenizer(texts: Sequence[str], characters: float, gpu: bool) -> bytes:
    """Return a SentencePiece model whose size is from ``VOCABULARIES``, or the nearest
    size that the text allows.

    Raises ConfigError if no tokenizer can be trained.
    """
    size = next(size for most, size in VOCABULARIES if characters < most)
    if not gpu:  # larger embeddings would dominate the small models of a CPU
        size = min(size, VOCABULARIES[1][1])
    stride = math.ceil(sum(map(len, texts)) / LEARNED_FROM)
    why = ""
    for _ in range(8):
        try:
            return train_tokenizer(
                texts[::stride],
                size,
                character_coverage=0.9995,
                max_sentence_length=1 << 20,
            )
        except RuntimeError as error:
            why = str(error)
            if too_large := re.search(r"value <= (\d+)", why):
                size = int(too_large[1])
            else:  # too small for an alphabet of thousands of characters
                size *= 2
    raise ConfigError(
        f"no tokenizer can be trained on this text ({why}): name one with --tokenizer"
    )


def _cpu_flops(entry: ModelEntry, vocab_size: int, seq_len: int) -> float:
    """Return the measured FLOP/s of nano's forward and backward on one core."""
    changes: dict[str, Any] = {"vocab_size": vocab_size, "max_seq_len": seq_len}
    args: Any = replace(entry.flavors["nano"], **changes)
    model = entry.model_cls(args)
    tokens = torch.arange(4 * seq_len).view(4, -1) % vocab_size
    model.init_weights()
    threads = torch.get_num_threads()
    seconds = []
    torch.set_num_threads(1)
    for _ in range(5):
        begin = time.perf_counter()
        torch.nn.functional.cross_entropy(
            model(tokens).flatten(0, 1), tokens.flatten()
        ).backward()
        seconds.append(time.perf_counter() - begin)
    torch.set_num_threads(threads)
    return (
        tokens.numel()
        * args.get_nparams_and_flops(model, seq_len)[1]
        / statistics.median(seconds)
    )


@dataclass(frozen=True)
class _Model:
    """The size of a model, and the number of tokens that it can be trained on."""

    flavor: str
    overrides: dict[str, Any]
    parameters: int
    flops: int  # per token, forward and backward
    limits: dict[str, float]  # limits of the number of tokens, by their reasons

    @property
    def tokens(self) -> float:
        return min(self.limits.values())


def _largest_model(
    entry: ModelEntry,
    text_tokens: float,
    vocab_size: int,
    seq_len: int,
    minutes: float,
    speed: float,
    memory: float,
) -> _Model:
    """Return the largest model that fits into memory and can be trained on 20 tokens per
    parameter, or else the smallest model.

    ``speed`` is in FLOP/s. ``memory`` is the total of all GPUs in bytes.
    """
    chosen: _Model | None = None
    sizes: list[tuple[str, tuple[int, ...]]] = [("nano", ())]
    sizes += [("nano", shape) for shape in BETWEEN]
    sizes += [(flavor, ()) for flavor in LARGER[entry.name]]
    for flavor, shape in sizes:
        overrides: dict[str, Any] = {"vocab_size": vocab_size}
        if shape:
            dim, layers, heads = shape
            overrides |= {"dim": dim, "hidden_dim": 3 * dim, "n_layers": layers}
            overrides |= {
                "n_heads": heads,
                "n_kv_heads": heads // 2,
                "head_dim": dim // heads,
            }
        changes = overrides | {"max_seq_len": seq_len}
        args: Any = replace(entry.flavors[flavor], **changes)
        with torch.device("meta"):
            model = entry.model_cls(args)
        parameters, flops = args.get_nparams_and_flops(model, seq_len)
        limits = {
            "20 tokens per parameter (Hoffmann et al. 2022)": 20 * parameters,
            "4 epochs of the text (Muennighoff et al. 2023)": 4 * text_tokens,
            f"{minutes:g} minute{'s' * (minutes != 1)}": minutes * 60 * speed / flops,
        }
        candidate = _Model(flavor, overrides, parameters, flops, limits)
        adamw = 16 * parameters  # bytes, in fp32
        if chosen is not None and (
            candidate.tokens < 20 * parameters or adamw > memory / 2
        ):
            break
        chosen = candidate
    assert chosen is not None
    return chosen


@dataclass(frozen=True)
class _Size:
    """The model, the batch and the length of a run."""

    model: _Model
    lr: float
    local_batch_size: int
    global_batch_size: int
    steps: int  # a multiple of 4, so that the last one is validated and saved
    tokens: int  # of all steps
    epochs: float
    seconds: float  # of all steps, estimated

    @property
    def quarter(self) -> int:
        return max(1, self.steps // 4)

    @property
    def warmup_steps(self) -> int:
        if self.model.parameters < 1e7:
            return self.steps // 5
        return self.steps // 20

    @property
    def limit(self) -> str:
        if self.steps == LEAST_STEPS:
            return "No run is shorter"
        limits = self.model.limits
        return f"The limit is {min(limits, key=limits.__getitem__)}"


def _sized(
    entry: ModelEntry,
    tokens: _Tokens,
    seq_len: int,
    hardware: _Hardware,
    minutes: float | None,
) -> _Size:
    """Return the largest model that text and time allow, and how to train it.

    ``minutes`` of None stands for 240 on GPUs and 4 on CPUs.
    """
    gpus = hardware.gpus
    ranks = hardware.ranks
    gpu = find_gpu(hardware.machine)
    if gpus:
        speed = gpus * MFU * gpu.bf16_flops
        default_minutes = 240
    else:
        speed = ranks * SHARE * _cpu_flops(entry, tokens.vocab_size, seq_len)
        default_minutes = 4
    model = _largest_model(
        entry=entry,
        text_tokens=tokens.training,
        vocab_size=tokens.vocab_size,
        seq_len=seq_len,
        minutes=minutes or default_minutes,
        speed=speed,
        memory=max(gpus, 1) * gpu.memory,
    )
    sequences = min(max(model.tokens / 2000 / seq_len, 16), 2**19 / seq_len)
    # A power of 2 per rank, so that the local batch can be halved until it fits
    batch = ranks * 2 ** int(math.log2(max(sequences / ranks, 1)))
    if batch < 16:
        batch *= 2
    steps = 4 * round(model.tokens / (4 * batch * seq_len))
    steps = max(LEAST_STEPS, steps)
    trained = steps * batch * seq_len
    seconds = trained * model.flops / speed
    local_batch_size = batch // ranks
    if gpus:
        seconds = max(seconds, steps * LAUNCHES)
    else:
        local_batch_size = min(local_batch_size, 16)
    lr = math.exp(np.interp(math.log(model.parameters), *np.log(RATES).T))
    return _Size(
        model=model,
        lr=float(f"{lr:.2g}"),
        local_batch_size=local_batch_size,
        global_batch_size=batch,
        steps=steps,
        tokens=trained,
        epochs=trained / tokens.training,
        seconds=seconds,
    )


def _fitting_batch(job_config: JobConfig, machine: Machine) -> int:
    """Return the local batch size, halved until the run fits into a GPU's memory.

    Raises ConfigError if it cannot be halved further.
    """
    training = job_config.training
    memory = FILLED * find_gpu(machine).memory
    while predict(job_config, meta_model(job_config), machine).memory.total > memory:
        if training.local_batch_size % 2:
            raise ConfigError(
                f"one sequence does not fit into {memory / 1e9:.0f} GB: "
                "set fewer --minutes"
            )
        training.local_batch_size //= 2
    return training.local_batch_size


@dataclass(frozen=True)
class _Run:
    """The text, the machine and the model of a run, and the files that describe it."""

    options: InitOptions
    text: _Text
    tokens: _Tokens
    hardware: _Hardware
    size: _Size

    @property
    def description(self) -> str:
        """The size of the model and its machine, as text."""
        return f"{short(self.size.model.parameters, 3)} parameters, for {self.hardware}"

    @property
    def length(self) -> str:
        """The length of the run, as text."""
        size = self.size
        speed = "the measured"
        if self.hardware.gpus:
            speed = "an assumed"
        return (
            f"{short(size.tokens, 3)} tokens, "
            f"{size.tokens / size.model.parameters:.1f} per parameter, "
            f"{size.epochs:.2g} epochs, {estimated_duration(size.seconds)} of steps by "
            f"{speed} speed. {size.limit}"
        )

    def config(self, root: Path) -> str:
        """Return the text of config.toml for a run in the folder ``root``.

        Raises ConfigError if there is too little held-out text.
        """
        text = self.text
        train = validation = text.path
        if not text.held_out_files:
            # Paths rather than globs, because the folder's name may contain a "["
            train = str(root / "data/train")
            validation = str(root / "data/validation.jsonl.gz")
        assets = root / "tokenizer"
        if self.options.tokenizer:
            assets = self.options.tokenizer.absolute()
        ranks = self.hardware.ranks
        validation_batch = max(1, 8 // ranks)  # sequences of a rank in one step
        step = validation_batch * ranks
        available = self.tokens.held_out // (text.seq_len + 1)
        sequences = min(64, available) // step * step
        if not sequences:
            needed = f"{counted(step, 'sequence')} of {text.seq_len} tokens"
            raise ConfigError(
                f"the held-out text has fewer than {needed}: hold out more, or name "
                "more text"
            )
        template = templates(__file__, toml=_as_toml).get_template("config.toml.j2")
        return template.render(
            run=self,
            root=root,
            assets=str(assets),
            training_path=train,
            validation_path=validation,
            validation_batch=validation_batch,
            validation_sequences=sequences,
        )

    def summary(self) -> str:
        """Return a description of the run, and the commands to type."""
        names = [file.name for file in self.text.held_out_files]
        cards = templates(__file__, counted=counted, short=short)
        return cards.get_template("init.txt.j2").render(
            run=self,
            folder=shlex.quote(str(self.options.folder)),
            ledger=ledger.lines(self.text.ledger),
            held_out_files=names,
            by_name=bool(files_named(names, "validation", True)),
        )


def _as_toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = [f"{key} = {number}" for key, number in value.items()]
        return f"{{{', '.join(pairs)}}}"
    return json.dumps(value, ensure_ascii=False)
