"""titan-disp adds these TOML sections and keys to TorchTitan's JobConfig (``[job]
custom_config_module``).

One field declares a key. The docstring below the field is the key's help text, and
``config.keys.Facts`` lists the other metadata that a field can have. This module has no
``from __future__ import annotations``, because TorchTitan merges the classes by their
real types.
"""

import functools
import itertools
import math
import os
from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

from titan_disp.config.keys import Facts, facts_of, key, torchtitan_facts
from titan_disp.errors import ConfigError, did_you_mean
from titan_disp.tables import Losses, Options, Overrides, check_table


@dataclass
class Model:
    overrides: Overrides = key(dict, fixes="model")
    """Sizes that replace the flavor's, by their names in the model's arguments. Write a
    table [model.overrides] with hidden_dim = 16, …, or --model.overrides
    hidden_dim=16,n_layers=2, which replaces the table.
    """


@dataclass
class Dispersion:
    """docs/loss.md has the formulas, and says more about the sources of the
    defaults.
    """

    enabled: bool = key(False)
    """Whether to add λ · dispersion to the cross-entropy. When it is off, the model is
    TorchTitan's Qwen3 (its embeddings stay tied under FSDP, too), plain Llama or GPT-2.
    """

    coeff: float = key(
        0.1,
        "paper",
        least=-1_000_000,
        most=1_000_000,
        also=("lambda", "lamda", "weight"),
    )
    """λ, the weight of the dispersion loss. A negative λ condenses the embeddings, as a
    control in an experiment; plan, submit and every start warn of it.
    """

    tau: float = key(
        1.0,
        "paper",
        least=0.0125,
        because="exp(-1/tau) must be representable in float32",
        also=("temperature",),
    )
    """τ, the temperature."""

    layers: list[int] | Literal["all", "last", "early_half", "late_half"] = key(
        "all", "authors"
    )
    """Blocks whose outputs are dispersed: all, last, early_half, late_half, or a list
    of block indices from 0.
    """

    final_norm: bool = key(False, "authors")
    """Whether to take the last block's activations after the final norm. The
    mid-training of the authors' released code does so, because it takes Hugging Face's
    hidden_states[1:], whose last entry is after the norm. The authors' pre-training
    takes the blocks' outputs before the norm, as false does.
    """

    within_documents: bool = key(
        False,
        needs={"parallelism.context_parallel_degree": 1},
        because="TorchTitan 0.2.2 would divide the tokens, but not the numbers of "
        "their documents",
    )
    """Whether the loss takes only pairs of tokens of the same document. By default, as
    in the paper, it takes all pairs of a sequence, which holds several documents.
    """

    clamp: float = key(0.25, "authors", least=0, below=1)
    """κ. Cosines are clamped to [−1+κ, 1−κ], straight-through."""

    norm_eps: float = key(
        1e-2, "authors", above=0, because="an all-zero token is divided by it"
    )
    """ε, which is added to the norms of tokens."""

    variant: str = key("angular", "paper", modules="dispersion/variants")
    """The loss to use: the name of a loss in docs/losses.md, which also lists the
    options, or the path of your own class, "package.module:Class". An option that the
    variant does not use must keep its default.
    """

    options: Options = key(dict)
    """Options of the variant that have no key of their own. Write a table
    [dispersion.options] with margin = 0.5, …, or --dispersion.options margin=0.5,…,
    which replaces the table.
    """

    losses: Losses = key(list)
    """Further losses, each a table [[dispersion.losses]] with a variant, its weight (1
    by default), and the options that differ from their defaults: estimator, tau,
    options and so on. coeff · weight · loss is added to the objective, and each loss is
    logged. On the command line: --dispersion.losses '[{"variant": "vicreg", "weight":
    0.01}]'.
    """

    estimator: Literal["exact", "moments", "sampled"] = key("exact")
    """exact takes all pairs of tokens. moments also takes all pairs, in time linear in
    the sequence length, but does not support every variant. sampled takes the pairs of
    max_tokens positions per sequence, as the authors' released code does.
    """

    max_tokens: int = key(256, "authors", least=2, noun="positions")
    """Positions per sequence that the sampled estimator draws. They differ for every
    step and layer, and are the same for all sequences of a step.
    """

    norm_coeff: float = key(0.1, "authors", least=0)
    """λ_norm of l2_repel, the weight of the mean square of the activations."""

    include_diagonal: bool = key(True, "authors")
    """Whether the mean of l2_repel includes the pair of each token with itself, as in
    the authors' released code. Without these pairs, the gradients of wide models are
    thousands of times as large, and almost entirely on the closest tokens.
    """

    warmup_steps: int = key(0, "authors", least=0, noun="steps")
    """Steps over which coeff grows linearly from 0."""

    decay: Literal["constant", "linear", "cosine"] = key("constant", "authors")
    """How coeff goes to final_coeff after warm-up."""

    decay_steps: int = key(0, least=0, noun="steps")
    """Steps of the decay, after which coeff stays at final_coeff. 0: the decay ends at
    the last step.
    """

    final_coeff: float = key(
        0.0,
        choices=(0.0,),
        when={"dispersion.decay": "constant"},
        because='it is the end of a decay: set dispersion.decay to "linear" or "cosine"',
    )
    """λ at the end of the decay. It must be left out if decay is constant."""


@dataclass
class Baseline:
    """These other methods may also counteract condensation. docs/training.md describes
    them.
    """

    method: Literal["none", "noisy_embedding", "active_forgetting"] = key(
        "none", fixes="model"
    )
    """noisy_embedding adds uniform noise to the token embeddings in training (NEFTune).
    active_forgetting draws the token embeddings anew every forget_every steps.
    """

    with_dispersion: bool = key(False, "authors")
    """Whether the method may be combined with dispersion.enabled. By default, the
    combination is an error.
    """

    noise_alpha: float = key(1.0, "authors", above=0)
    """α of noisy_embedding. The noise is at most α/√(N·F), with N positions in a
    sequence and F features.
    """

    forget_every: int = key(1000, "authors", least=2, noun="steps")
    """K of active_forgetting: the embeddings are drawn anew every K steps."""

    forget_lr: float = key(0.0, least=0)
    """Highest learning rate of the embeddings under active_forgetting. 0:
    optimizer.lr.
    """

    forget_warmup: float = key(0.08, "authors", least=0, below=1)
    """Fraction of every forget_every steps in which the embeddings' learning rate grows
    linearly. It falls to 0 in the rest.
    """


@dataclass
class Source:
    """Each source is a table [[stream.sources]].

    On the command line, the path of the first source is --stream.sources.0.path.
    """

    weight: float
    """The source's share of the training tokens, relative to the weights of the other
    sources. It must be > 0.
    """

    path: str | None = None
    """The source's documents, as in training.dataset_path."""

    dataset: str = "text"
    """Kind of the documents, as in training.dataset."""

    name: str = ""
    """The source's name in metrics, logs and checkpoints. By default, this is the last
    part of the path.
    """


@dataclass
class Stream:
    """A slot is one of the run's document streams. An epoch of a slot is one time
    through the slot's share of the documents.
    """

    sources: list[Source] = key(list, fixes="data")
    """Several sources of training data, each with a weight, in place of
    training.dataset and dataset_path. Each is a table [[stream.sources]]. A slot
    belongs to one source, so that the sources' shares of the tokens are shares of the
    slots. The log and titan-disp plan show them.
    """

    slots: int = key(0, least=0, noun="slots", fixes="data")
    """Slots of the run. 0: training.global_batch_size. The global batch must be a
    multiple of the slots, and the slots a multiple of the data-parallel ranks.
    """

    document_mask: bool = key(
        False,
        needs={"parallelism.context_parallel_degree": 1},
        because="TorchTitan 0.2.2 passes no mask to the context parallelism of Qwen3",
        fixes="model",
    )
    """Whether attention stays within a document. A sequence holds several documents,
    one after another. By default, as in the paper, a token also attends to the
    documents before its own. docs/training.md says more.
    """

    restart_positions: bool = key(
        False,
        needs={"stream.document_mask": True},
        because="attention across documents needs positions in the sequence",
        fixes="model",
    )
    """Whether positions begin at 0 in every document of a sequence. Needs
    document_mask. This changes GPT-2. Except for rounding, it does not change Qwen3 and
    Llama, whose rotary embeddings depend on distances only.
    """

    seed: int = key(0, fixes="data")
    """Seed of the order of files in every epoch, and of documents in every window of
    shuffle_window documents.
    """

    shuffle_window: int = key(256, least=0, noun="documents", fixes="data")
    """Documents of a slot that are shuffled at a time. 0 or 1: documents come in the
    order of their files. A window does not mix the parts of a sorted file; an index
    does. A rank holds up to 2 × its slots × shuffle_window × the mean length of a
    document in memory (docs/data.md).
    """

    index: str = key("", path=True)
    """Folder of an index of local training data, which titan-disp data index CONFIG
    writes, or "memory": the run makes an index at its start (at most 256 MiB of data).
    With an index, all slots get equal shares of the text, a resume reads only what it
    needs, and the blocks of a file are read in another order in every epoch, which
    mixes sorted files. The order of the documents is not the same as without an index
    (docs/data.md).
    """

    prefetch: int = key(4, least=0, noun="microbatches")
    """Least number of microbatches that a worker process prepares ahead. The worker
    hands them over in groups of up to 32. 0: the training process prepares each
    microbatch when it is needed.
    """

    tokenizer_threads: int = key(0, least=0, most=1024, noun="threads")
    """Threads per rank that tokenize ahead. 0: the cores of the node divided among its
    ranks, at most 4.
    """

    fast_tokenizer: bool = key(False)
    """Whether to tokenize with gigatoken (pip install gigatoken) in place of
    the tokenizer's own library. gigatoken is many times as fast and gives the same ids.
    The ids are compared at the start and for one document in a thousand, and the run
    stops if they differ.
    """

    on_bad_data: Literal["skip", "fail"] = key("skip")
    """What to do about documents that are malformed or too long, and about the rest of
    damaged files. skip: log and count them, and go on. fail: stop the run.
    """

    max_skipped_fraction: float = key(0.01, least=0, most=1)
    """Largest fraction of the data that may be skipped, counted over all ranks. After
    the first 1000 documents, the run stops at the next logged step if it has skipped
    more than this fraction of the documents or of the bytes of text. It also stops at a
    logged step if more than this fraction of the files, and at least 10 files per
    epoch, ended early. After 1000 bad documents in a row, the rest of a file is
    skipped, and the file counts as one that ended early. The rest is not skipped if the
    file is itself more than this fraction of the data (or of its source).
    """

    left_out: list[str] = key(list)
    """Names of files that are not read, as the log and the messages write the names.
    With this key, a run can go on after a file was removed or has turned out to be bad.
    The run keeps its positions in all other files.
    """

    max_document_mb: float = key(16.0, above=0, fixes="data")
    """Documents of more than this many MiB count as bad. For JSON, this is the size of
    the decompressed line; for Parquet and plain text, that of the UTF-8 text. Token ids
    have no limit.
    """

    text_field: str = key(
        "text",
        pattern=".+",
        form="the name of a field",
        because='most corpora call it "text"',
        fixes="data",
    )
    """Field of JSON documents, or column of Parquet files, that holds the text. Dots
    lead into nested fields (meta.text).
    """

    text_split: Literal["file", "blank_lines"] = key("file", fixes="data")
    """Documents of a .txt file. file: the whole file is one document. blank_lines: every
    block of lines between blank lines is one.
    """

    token_dtype: Literal["uint16", "uint32"] = key("uint16", fixes="data")
    """Type of token ids in .bin and .npy files that have no header with the type
    (docs/data.md).
    """

    separator: str = key("", free="the tokenizer decides", fixes="data")
    """Text of the token that ends every document, such as <|endoftext|>. In files of
    token ids, documents end at this token. By default, it is the tokenizer's EOS, which
    may be the end of a turn in a chat (docs/data.md). "none": nothing is put between
    documents, and each file of token ids is one document.
    """

    validation_sequences: int = key(0, least=0, noun="sequences")
    """Number of sequences of every validation, over all ranks. If it is set, all meshes
    use the same sequences. 0: validation.steps × validation.local_batch_size ×
    data-parallel ranks.
    """

    retry_seconds: float = key(60.0, least=0, most=2592000, because="that is 30 days")
    """How long a read is tried again, with growing pauses, after the hub or a file
    system has failed (EIO, ESTALE). At most 60 % of comm.train_timeout_seconds is used,
    because the other ranks wait in the meantime.
    """

    on_mismatch: Literal["fail", "restart"] = key("fail")
    """What to do if a checkpoint was written with other data, tokenizer, seq_len, seed
    or slots. fail: stop and name the difference. restart: go on at the same step, with
    streams that begin a new epoch. With [budget], seq_len and the batch size must not
    change, even with restart.
    """

    def __post_init__(self) -> None:
        """Turn the tables of [[stream.sources]] into ``Source`` objects. TorchTitan
        does this for sections only.
        """
        types = dict.fromkeys((f.name for f in fields(Source)), str) | {"weight": float}
        for i, table in enumerate(self.sources):
            if not isinstance(table, Source):
                check_table(f"stream.sources[{i}]", table, types, required="weight")
                self.sources[i] = Source(**table)


@dataclass
class Training:
    steps: int = key(-1, least=1, besides=(-1,), noun="steps")
    """Optimizer steps of the whole run, which the learning-rate schedule follows. −1:
    computed from budget.tokens.
    """

    head_chunk_tokens: int = key(
        0, least=0, noun="tokens", because="0 means all at once"
    )
    """Tokens per chunk in which the output layer and the cross-entropy are computed
    together in training, so that only the logits of one chunk exist at a time. 0: all
    logits exist at once, as in TorchTitan. docs/training.md says when chunks save
    memory.
    """


@dataclass
class Validation:
    seq_len: int = key(
        -1, least=1, besides=(-1,), noun="tokens", when={"validation.enable": True}
    )
    """Tokens of a validation sequence, at most training.seq_len, because the rotary
    embeddings have no more positions. −1: training.seq_len. TorchTitan's default is
    2048.
    """


@dataclass
class Budget:
    tokens: int = key(0, least=0, noun="tokens")
    """Tokens to train on: training.steps becomes ceil(tokens / (global batch ×
    seq_len)). 0: training.steps decides.
    """

    stop_at_tokens: int = key(0, least=0, noun="tokens")
    """Stop, with a checkpoint, after this many tokens. The schedule stays that of the
    whole budget. 0: never.
    """


@dataclass
class Guard:
    max_skipped_steps: int = key(10, least=1, noun="steps")
    """A step whose loss or gradient norm is not finite changes no weights, on any rank.
    After this many such steps in a row, the run goes back to the weights of the
    checkpoint before the newest one, and goes on with the next sequences and the next
    step. The second time, the run stops.
    """

    silence_seconds: float = key(60.0, above=0, besides=(math.inf,))
    """Rank 0 writes to RUN/heartbeat.json what it is doing. slurm/pretrain.sbatch ends a
    silent run and starts it again. A run counts as silent if it writes nothing for this
    many seconds plus the longer of two times: twice the time-out in [comm], and twice
    its slowest step. During a save, save_seconds take the place of the longer time.
    """

    save_seconds: float = key(1800.0, above=0, besides=(math.inf,))
    """How long training may wait for a save before the run counts as silent. Also how
    long a rank waits for the other ranks in a save.
    """


@dataclass
class Condensation:
    interval: int = key(500, least=0, noun="steps", because="0 means never")
    """Steps between measurements of condensation and cross-entropy on the validation
    split, which titan_disp.train also takes at the start and at the end. 0: never.
    docs/measurements.md says what is measured and what it costs.
    """

    sequences: int = key(8, least=1, most=1048576)
    """Sequences to measure, the same every time and in every run. They are divided
    among the data-parallel ranks.
    """

    max_tokens: int = key(512, least=2, noun="positions")
    """Positions of each sequence whose pairs are measured. They are evenly spaced."""

    per_layer: bool = key(False)
    """Whether TensorBoard and W&B also get every measurement of every layer as a curve:
    4 × 29 curves for the 0.6B. They always get the means over all blocks and over each
    third of the blocks, the last block and the final norm. metrics.jsonl always has
    every layer.
    """


@dataclass
class Checkpoint:
    last_save_model_only: bool = key(False)
    """Whether the last checkpoint holds the model only. With TorchTitan's default, true,
    a finished run cannot be continued. titan-disp export reads full checkpoints, too.
    """

    keep_every: int = key(0, least=0, noun="steps")
    """Every this many steps, a checkpoint is kept forever, in addition to the last
    keep_latest_k. It must be a multiple of interval. 0: none.
    """

    allow_other_loss: bool = key(False)
    """Whether a run may resume with another [dispersion] than its checkpoint's. By
    default, this is refused. The log and the report name the change.
    """

    allow_unverified: bool = key(False)
    """Whether a run may resume from a checkpoint that another run has saved, or load a
    checkpoint without its hashes.json. By default, both are refused.
    """


@dataclass
class JobConfig:
    model: Model = field(default_factory=Model)
    dispersion: Dispersion = field(default_factory=Dispersion)
    baseline: Baseline = field(default_factory=Baseline)
    stream: Stream = field(default_factory=Stream)
    training: Training = field(default_factory=Training)
    validation: Validation = field(default_factory=Validation)
    budget: Budget = field(default_factory=Budget)
    guard: Guard = field(default_factory=Guard)
    condensation: Condensation = field(default_factory=Condensation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


def all_keys() -> dict[str, Field[Any]]:
    """Return titan-disp's keys by their full names, such as "stream.seed", in the order
    of this file.
    """
    keys = {}
    for section in fields(JobConfig):
        for f in fields(section.type):  # type: ignore[arg-type]
            keys[f"{section.name}.{f.name}"] = f
    return keys


@functools.cache  # a plan calls this about a thousand times
def all_facts() -> dict[str, Facts]:
    """Return the metadata of all keys of a config, also of TorchTitan's keys."""
    ours = {name: facts_of(field) for name, field in all_keys().items()}
    return ours | torchtitan_facts()


def key_hint(name: str, dashes: str = "", names: Iterable[str] = ()) -> str:
    """Return the end of a message about an unknown key: the key that may be meant, or
    where all keys are listed.

    Args:
        name: the unknown key.
        dashes: the text before the suggested key: "--" on the command line.
        names: other names that may be meant.
    """
    section, _, last = name.rpartition(".")
    keys: dict[str, str] = {}
    # If keys have the same last part, the one in the same section is suggested, or else
    # the first one.
    for full in sorted(
        all_facts(), key=lambda full: not full.startswith(f"{section}.")
    ):
        also = all_facts()[full].also
        keys = dict.fromkeys([full.rpartition(".")[2], *also], full) | keys
    hint = " (see titan-disp config)"
    return did_you_mean(last, names, hint, prefix=dashes, instead=keys)


def unknown_option(name: str, names: Iterable[str] = ()) -> ConfigError:
    """Return the error about an option that is neither a key nor one of ``names``."""
    return ConfigError(f"unknown option --{name}{key_hint(name, '--', names)}")


def check_dashes(word: str) -> None:
    """Raise ConfigError if a word is a key's option with wrong dashes instead of two
    hyphens.
    """
    name = word.lstrip("-—–")
    key = name.partition("=")[0].replace("-", "_")
    if name != word and not word.startswith("--") and key in all_facts():
        raise ConfigError(f"{word!r} is not an option: write --{name}")


def check_expansion(words: Iterable[str]) -> None:
    """Raise ConfigError if two words in a row are files, where no option has two values:
    the shell has put the files in the place of a pattern.
    """
    for are_files, group in itertools.groupby(words, os.path.exists):
        files = list(group)
        if are_files and len(files) > 1:
            raise ConfigError(
                f"{len(files)} files in a row, from {files[0]!r} to {files[-1]!r}, "
                "expected one value: the shell expanded a pattern; quote it, such as "
                "'data/*.txt'"
            )


def fixed(what: str) -> list[str]:
    """Return the full names of the keys that fix the data or the model for the life of
    a run. ``what`` is "data" or "model".
    """
    return [name for name, f in all_keys().items() if facts_of(f).fixes == what]
