"""``titan-disp init`` makes a run of a stranger's text: held-out text, a tokenizer, and
a config for this machine.

The config gives the reason beside each value. Where it names no source, the value is
our choice.
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
from collections.abc import Sequence
from contextlib import closing, suppress
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
from titan_disp.data import sources
from titan_disp.data.documents import Documents
from titan_disp.data.formats import (
    PLAIN_TEXT,
    TOKEN_IDS,
    BadDocument,
    DamagedFile,
    text_of,
)
from titan_disp.data.listing import DataFile, list_files
from titan_disp.data.local_files import files_named
from titan_disp.data.objects import is_folder, is_url
from titan_disp.data.options import Format, StreamOptions
from titan_disp.data.tokenizer import encoder, load_tokenizer
from titan_disp.errors import ConfigError, counted, of_options
from titan_disp.files import atomic_folder, cores
from titan_disp.lab.sample import train_tokenizer, write_shard
from titan_disp.models.qwen3 import Qwen3DispModel, flavors
from titan_disp.text import byte_size, estimated_duration, short

# bytes or characters of text
LEAST = 200_000
READ = 200_000_000
COPIED = 2_000_000_000
LEARNED_FROM = 20_000_000
# Characters of text → size of the tokenizer's vocabulary; on a CPU, at most the second.
VOCABULARIES = ((5e6, 2048), (20e6, 4096), (100e6, 8192), (math.inf, 16384))
MFU = 0.25  # of a GPU's bf16 peak; assumed, as small models do not fill a GPU
# Of the FLOP/s of nano in one process on one core, a step's share in as many processes
# as cores: measured, 8,080 tokens/s of two on two hyperthreads, where one process
# without optimizer, dispersion and exchange had 8,300.
SHARE = 0.5
# seconds of a GPU's step, at least; assumed, as small models wait for their kernels to
# be launched
LAUNCHES = 0.1
# per multiprocessor of a GPU that the plan does not know: an RTX 3090's, the least of
# its table
OTHER_FLOPS = 0.87e12
# Flavor, and width, blocks and heads where they are not the flavor's, in the shape of
# nano and 0.6B, which they lie between.
BETWEEN = (
    (96, 6, 4),
    (128, 6, 4),
    (192, 8, 6),
    (256, 8, 4),
    (384, 10, 6),
    (512, 12, 8),
    (768, 16, 12),
)
SIZES = (
    ("nano", ()),
    *(("nano", size) for size in BETWEEN),
    ("0.6B", ()),
    ("1.7B", ()),
    ("4B", ()),
)
# Parameters → learning rate: what docs/evidence.md tuned, then GPT-3's (Brown et al.
# 2020, Table 2.1).
RATES = (
    (1e6, 1.6e-2),
    (125e6, 6e-4),
    (350e6, 3e-4),
    (760e6, 2.5e-4),
    (1.3e9, 2e-4),
    (2.7e9, 1.6e-4),
    (6.7e9, 1.2e-4),
)
# "section.key" of the config → value, and the comment that gives the reason
Rows = dict[str, tuple[Any, str]]
ALWAYS: Rows = {
    "job.custom_config_module": ("titan_disp.job_config", ""),
    "experimental.custom_import": ("titan_disp.plugin", ""),
    "model.name": ("qwen3_disp", ""),
    "training.dataset": ("text", ""),
    "validation.enable": (True, ""),
    "validation.dataset": ("text_validation", ""),
    "lr_scheduler.decay_type": ("cosine", ""),
    "lr_scheduler.min_lr_factor": (0.1, ""),
    "activation_checkpoint.mode": ("none", ""),
    "checkpoint.enable": (True, ""),
    "checkpoint.keep_latest_k": (2, ""),
    "debug.seed": (42, ""),
}


@dataclass(frozen=True)
class _Text:
    """The documents of --text."""

    path: str
    training: list[str]  # if ``named``, only the first READ bytes or so
    held_out: list[str]
    # files held out by name; if there are none, ``held_out`` was chosen here
    named: list[DataFile]
    size: float  # estimated bytes of text in all files
    split: str  # stream.text_split
    seq_len: int

    @cached_property
    def scale(self) -> float:
        """How many times as much text there is as in ``training``."""
        if not self.named or self.size <= READ:
            return 1.0
        return self.size / sum(len(document.encode()) for document in self.training)

    @cached_property
    def characters(self) -> float:
        return self.scale * sum(map(len, self.training))


@dataclass(frozen=True)
class _Tokens:
    vocab_size: int
    per_token: float  # characters
    training: float  # estimated tokens of text for training
    held_out: int

    def __str__(self) -> str:
        return f"{self.vocab_size:,} tokens of {self.per_token:.1f} characters"


def init(options: InitOptions) -> str:
    """Write a run's folder.

    Return what was found and the commands to type. Raises ConfigError.
    """
    folder = options.folder.absolute()
    path = options.text if is_url(options.text) else os.path.abspath(options.text)
    _check(options, folder, path)
    gpus, machine = _machine()
    ranks = _ranks(gpus)
    text = _find_text(options, path, gpus)
    with atomic_folder(folder) as partial:
        if not text.named:
            _write_documents(text, partial / "data")
        if not options.tokenizer:
            (partial / "tokenizer").mkdir()
            model = _tokenizer(text.training, text.characters, bool(gpus))
            (partial / "tokenizer/tokenizer.model").write_bytes(model)
        tokens = _count_tokens(text, options.tokenizer or partial / "tokenizer")
        size = _sized(
            tokens.training,
            tokens.vocab_size,
            text.seq_len,
            gpus,
            machine,
            options.minutes,
        )
        config = partial / "config.toml"
        config.write_text(
            _toml(size | _data_rows(partial, options, text, tokens, ranks))
        )
        job_config = load_config(["--job.config_file", str(config)])
        check_config(job_config, ranks)
        check_inputs(job_config)
        if gpus:
            size |= _fitted(job_config, machine)
        # ``partial`` gets this name
        config.write_text(
            _toml(size | _data_rows(folder, options, text, tokens, ranks))
        )
    return _summary(options, text, tokens, size, "" if gpus else f" --nproc {ranks}")


def _find_text(options: InitOptions, path: str, gpus: int) -> _Text:
    """Read --text, check it, and hold some of it out."""
    files = list_files("text", path, path_key="--text")
    if files[0].name.endswith(TOKEN_IDS):
        raise ConfigError(
            f"--text is {path!r}, which holds token ids; expected text. To train on ids, write a config with their tokenizer "
            "(model.hf_assets_path) and stream.token_dtype: docs/data.md#token-ids"
        )
    # A few .txt files, or long ones, are not documents but hold some.
    is_plain = all(file.name.endswith(PLAIN_TEXT) for file in files)
    is_long = (
        len(files) < 100
        or max(file.size for file in files) > StreamOptions.max_document_bytes
    )
    split = "blank_lines" if is_plain and is_long else "file"
    stream = StreamOptions(format=Format(options.text_field, split))
    try:
        sources.check_content(files, stream, "training")
        size = sum(file.size * file.density for file in sources.measured(files, stream))
        # Of little text, little can be held out: sequences are then short.
        if not gpus or size < 1e7:
            seq_len = 256
        elif size < 1e9:
            seq_len = 1024
        else:
            seq_len = 2048
        training, held_out, named = _split(
            path, files, stream, size, wanted=64 * seq_len * 5
        )
    except ConfigError as error:
        raise ConfigError(of_options(error)) from error
    return _Text(
        path, training, held_out, named, size=size, split=split, seq_len=seq_len
    )


def _write_documents(text: _Text, folder: Path) -> None:
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


def _data_rows(
    root: Path, options: InitOptions, text: _Text, tokens: _Tokens, ranks: int
) -> Rows:
    """Return the rows of text and tokenizer, if the run's folder is ``root``."""
    train = validation = text.path
    if not text.named:
        # not a glob: the folder's name may contain a [
        train = str(root / "data/train")
        validation = str(root / "data/validation.jsonl.gz")
    assets = options.tokenizer.absolute() if options.tokenizer else root / "tokenizer"
    batch = max(1, 8 // ranks)  # sequences of a rank in one validation step
    step = batch * ranks
    sequences = min(64, tokens.held_out // (text.seq_len + 1)) // step * step
    if not sequences:
        needed = f"{counted(step, 'sequence')} of {text.seq_len} tokens"
        raise ConfigError(
            f"the held-out text has fewer than {needed}: hold out more, or name more text"
        )
    return {
        "job.dump_folder": (str(root / "run"), ""),
        "model.hf_assets_path": (str(assets), str(tokens)),
        "training.dataset_path": (train, ""),
        "validation.dataset_path": (validation, ""),
        "validation.local_batch_size": (batch, ""),
        "stream.validation_sequences": (sequences, ""),
        "condensation.sequences": (min(8, sequences), ""),
        "stream.text_field": (options.text_field if text.named else "text", ""),
        "stream.text_split": (text.split, "what a document of a .txt file is"),
    }


def _summary(
    options: InitOptions, text: _Text, tokens: _Tokens, size: Rows, nproc: str
) -> str:
    folder = shlex.quote(str(options.folder))
    documents = (
        "blocks between blank lines" if text.split == "blank_lines" else "documents"
    )
    held_out = f"{len(text.held_out):,} {documents}, by a hash, copied with the others to {folder}/data"
    if text.named:
        by_name = files_named([file.name for file in text.named], "validation", True)
        held_out = f"{counted(len(text.named), 'file')}, by {'their names' if by_name else 'a hash of their names'}"
    count = len(text.training) * text.scale
    _, model = size["model.flavor"]
    steps, limit = size["training.steps"]
    lines = [
        f"text       {count:,.0f} {documents}, {short(text.characters, 3)} characters for training",
        f"held out   {held_out}",
        f"tokenizer  {tokens}: {short(tokens.training, 3)} tokens of text",
        f"model      {model}",
        f"run        {steps:,} steps: {limit}",
        "",
        f"titan-disp train {folder}/config.toml{nproc}",
        f"titan-disp report {folder}/run --out {folder}/report.html",
        f"titan-disp train {folder}/config.toml{nproc} --dispersion.enabled false --job.dump_folder {folder}/off",
    ]
    return "\n".join(lines)


def _check(options: InitOptions, folder: Path, text: str) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{str(folder)!r} exists and is not an empty folder: name a new one"
        )
    if os.path.isdir(text) and folder.resolve().is_relative_to(Path(text).resolve()):
        raise ConfigError(
            f"{str(folder)!r} is in the folder of --text, {text!r}, and would be read: name another"
        )
    if options.tokenizer is not None:
        load_tokenizer(options.tokenizer)
    if options.minutes is not None and not options.minutes > 0:
        raise ConfigError(f"--minutes is {options.minutes}, expected a number > 0")


def _machine() -> tuple[int, Machine]:
    """Return the number of GPUs, and the machine as the plan describes it."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    machine = Machine(1, max(gpus, 1), mfu=MFU)
    try:
        return gpus, find_machine(machine)
    except ConfigError:  # a GPU that the plan does not know
        device = torch.cuda.get_device_properties(0)
        flops = OTHER_FLOPS * device.multi_processor_count / 1e12
        known = replace(
            machine,
            gpu=device.name,
            gpu_memory=device.total_memory / 1e9,
            gpu_flops=flops,
        )
        return gpus, find_machine(known)


def _read(
    files: Sequence[DataFile], options: StreamOptions, most: float
) -> dict[bytes, str]:
    """Read documents of up to about ``most`` bytes, each text once, by their hashes.

    A run will log what is bad.
    """
    found = dict[bytes, str]()
    read = 0
    for file in files:
        with closing(Documents(file, options)) as documents, suppress(DamagedFile):
            while read <= most and (record := documents.read()) is not None:
                with suppress(BadDocument):
                    text = text_of(record, options.format.text_field)
                    content = text.encode()
                    found[hashlib.sha256(content).digest()] = text
                    read += len(content)
    return found


def _split(
    path: str,
    files: Sequence[DataFile],
    options: StreamOptions,
    size: float,
    wanted: int,
) -> tuple[list[str], list[str], list[DataFile]]:
    """Return texts for training, held-out texts, and the files that training leaves out
    by itself.

    If there are none, all are returned, and of at least ``wanted`` characters, if these
    are at most 5 %, are held out.
    """
    named: list[DataFile] = []
    with suppress(ConfigError):
        named = (
            list_files("text_validation", path, "validation") if is_folder(path) else []
        )
    if not named and size > COPIED:
        raise ConfigError(
            f"--text holds about {byte_size(size, 2)} of text, more than is split here ({byte_size(COPIED)}), and no name says "
            "what is held out: put validation into the name of a file in a folder, or put some documents into such a file"
        )
    some = random.Random(0).sample(files, len(files))  # files may be sorted
    found = _read(some, options, READ if named else math.inf)
    total = sum(map(len, found.values()))
    if total < LEAST:
        raise ConfigError(
            f"--text is {path!r}, which holds {total:,} characters; expected at least {LEAST:,}"
        )
    if named:
        return list(found.values()), list(_read(named, options, wanted).values()), named
    held_out = list[str]()
    held = 0
    most = total // 20
    target = min(max(total // 100, wanted), most)
    for key in sorted(found):  # a random order, which is always the same
        if held < target and held + len(found[key]) <= most:
            held_out.append(found.pop(key))
            held += len(held_out[-1])
    if held < target / 2:
        raise ConfigError(
            f"--text holds {counted(len(found), 'document')} so long that at most 5 % of the text cannot be held out; expected "
            "shorter ones. In a .txt file, blank lines divide them. If each line is one: jq -R '{text: .}' FILE > FILE.jsonl"
        )
    return list(found.values()), held_out, []


def _tokenizer(texts: Sequence[str], characters: float, gpu: bool) -> bytes:
    """Train a SentencePiece model, of the size of the table, or as the text and its
    alphabet allow.
    """
    size = next(size for most, size in VOCABULARIES if characters < most)
    # Larger embeddings would be most of a small model
    size = size if gpu else min(size, VOCABULARIES[1][1])
    every = math.ceil(sum(map(len, texts)) / LEARNED_FROM)
    why = ""
    for _ in range(8):
        try:
            return train_tokenizer(
                texts[::every],
                size,
                character_coverage=0.9995,
                max_sentence_length=1 << 20,
            )
        except RuntimeError as error:
            why = str(error)
            too_large = re.search(r"value <= (\d+)", why)
            # Too small for an alphabet of thousands
            size = int(too_large[1]) if too_large else 2 * size
    raise ConfigError(
        f"no tokenizer can be trained on this text ({why}): name one with --tokenizer"
    )


def _ranks(gpus: int) -> int:
    """One per GPU, or else one per core, up to 4 of 1 GB each.

    On nano, ranks are twice as fast as threads (measured).
    """
    return gpus or 2 ** int(math.log2(min(cores(), 4)))


def _cpu_flops(vocab_size: int, seq_len: int) -> float:
    """Measure FLOP/s of nano, forward and backward, on one core."""
    own: dict[str, Any] = {"vocab_size": vocab_size, "max_seq_len": seq_len}
    args = replace(flavors["nano"], **own)
    model = Qwen3DispModel(args)
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
    """A model of SIZES, and how many tokens it can be trained on."""

    flavor: str
    overrides: dict[str, Any]
    parameters: int
    flops: int  # per token, forward and backward
    limits: dict[str, float]  # reason → tokens

    @property
    def tokens(self) -> float:
        return min(self.limits.values())


def _largest_model(
    text_tokens: float,
    vocab_size: int,
    seq_len: int,
    minutes: float,
    speed: float,
    memory: float,
) -> _Model:
    """Return the largest model that can have 20 tokens per parameter and fits, or else
    the smallest.

    ``speed`` is in FLOP/s, and ``memory`` is that of all GPUs in bytes.
    """
    chosen: _Model | None = None
    for flavor, shape in SIZES:
        overrides: dict[str, Any] = {"vocab_size": vocab_size}
        if shape:
            dim, layers, heads = shape
            overrides |= {"dim": dim, "hidden_dim": 3 * dim, "n_layers": layers}
            overrides |= {
                "n_heads": heads,
                "n_kv_heads": heads // 2,
                "head_dim": dim // heads,
            }
        args = replace(flavors[flavor], **(overrides | {"max_seq_len": seq_len}))
        with torch.device("meta"):
            parameters, flops = args.get_nparams_and_flops(
                Qwen3DispModel(args), seq_len
            )
        limits = {
            "20 tokens per parameter (Hoffmann et al. 2022)": 20 * parameters,
            "4 epochs of the text (Muennighoff et al. 2023)": 4 * text_tokens,
            f"{minutes:g} minute{'s' * (minutes != 1)}": minutes * 60 * speed / flops,
        }
        model = _Model(flavor, overrides, parameters, flops, limits)
        adamw = 16 * parameters  # bytes, in fp32
        if chosen is not None and (
            model.tokens < 20 * parameters or adamw > memory / 2
        ):
            break
        chosen = model
    assert chosen is not None
    return chosen


def _sized(
    text_tokens: float,
    vocab_size: int,
    seq_len: int,
    gpus: int,
    machine: Machine,
    minutes: float | None,
) -> Rows:
    """Choose the model, the batch and the number of steps.

    Return rows of the config.
    """
    minutes = minutes or (240 if gpus else 4)
    ranks = _ranks(gpus)
    gpu = find_gpu(machine)
    speed = (
        gpus * MFU * gpu.bf16_flops
        if gpus
        else ranks * SHARE * _cpu_flops(vocab_size, seq_len)
    )
    model = _largest_model(
        text_tokens, vocab_size, seq_len, minutes, speed, max(gpus, 1) * gpu.memory
    )
    sequences = min(max(model.tokens / 2000 / seq_len, 16), 2**19 / seq_len)
    # a rank's share can be halved until it fits
    batch = ranks * 2 ** int(math.log2(max(sequences / ranks, 1)))
    if batch < 16:
        batch *= 2
    # A multiple of 4, so that the last step is validated and saved.
    steps = 4 * max(5, round(model.tokens / (4 * batch * seq_len)))
    tokens = steps * batch * seq_len
    seconds = max(tokens * model.flops / speed, steps * LAUNCHES if gpus else 0)
    speed_is = "an assumed" if gpus else "the measured"
    length = (
        f"{short(tokens, 3)} tokens, {tokens / model.parameters:.1f} per parameter, {tokens / text_tokens:.1f} epochs, "
        f"{estimated_duration(seconds)} of steps by {speed_is} speed"
    )
    limit = min(model.limits, key=model.limits.__getitem__)
    why = f"The limit is {limit}" if steps > 20 else "No run is shorter"
    hardware = (
        f"{counted(ranks, 'GPU')} ({machine.gpu})" if gpus else counted(ranks, "core")
    )
    lr = math.exp(np.interp(math.log(model.parameters), *np.log(RATES).T))
    return {
        "model.flavor": (
            model.flavor,
            f"{short(model.parameters, 3)} parameters, for {hardware}",
        ),
        "model.overrides": (model.overrides, ""),
        "dispersion.enabled": (True, "false: cross-entropy alone"),
        "training.seq_len": (seq_len, ""),
        "training.local_batch_size": (
            batch // ranks if gpus else min(batch // ranks, 16),
            "of a rank at a time",
        ),
        "training.global_batch_size": (
            batch,
            "for 2,000 steps, but at least 16, at most GPT-3's 0.5 M tokens",
        ),
        "training.steps": (steps, f"{length}. {why}"),
        "training.mixed_precision_param": (
            "bfloat16" if gpus else "float32",
            "bf16 is slow on most CPUs",
        ),
        "optimizer.lr": (
            float(f"{lr:.2g}"),
            "docs/evidence.md up to 1 M parameters; then towards GPT-3's",
        ),
        "optimizer.implementation": ("fused" if gpus else "foreach", ""),
        "lr_scheduler.warmup_steps": (
            steps // (5 if model.parameters < 1e7 else 20),
            "20 %, as in docs/evidence.md; 5 % above 10 M parameters",
        ),
        "validation.freq": (max(1, steps // 4), ""),
        "condensation.interval": (max(5, steps // 20), "about 20 measurements"),
        "checkpoint.interval": (max(1, steps // 4), ""),
        "metrics.log_freq": (max(1, steps // 200), ""),
    }


def _fitted(job_config: JobConfig, machine: Machine) -> Rows:
    """Halve the local batch until the plan fits into a GPU's memory."""
    training = job_config.training
    memory = FILLED * find_gpu(machine).memory
    while predict(job_config, meta_model(job_config), machine).memory.total > memory:
        if training.local_batch_size % 2:
            raise ConfigError(
                f"one sequence does not fit into {memory / 1e9:.0f} GB: set fewer --minutes"
            )
        training.local_batch_size //= 2
    return {
        "training.local_batch_size": (
            training.local_batch_size,
            "of a rank at a time: the largest that fits",
        )
    }


def _quoted(value: Any) -> str:
    """Write a value as in TOML."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {one}' for key, one in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)


def _toml(rows: Rows) -> str:
    """Write rows, section.key → value and reason, with those that every run has."""
    sections: dict[str, list[str]] = {}
    for name, (value, why) in (ALWAYS | rows).items():
        section, _, key = name.partition(".")
        line = f"{key} = {_quoted(value)}"
        sections.setdefault(section, []).append(f"{line:<40} # {why}" if why else line)
    parts = [
        "# Written by titan-disp init. Change what you like: titan-disp config KEY explains a key.\n"
    ]
    return "\n".join(
        [
            *parts,
            *("\n".join([f"[{name}]", *lines, ""]) for name, lines in sections.items()),
        ]
    )
