"""The TOML sections that titan-disp adds to TorchTitan's JobConfig (``[job] custom_config_module``).

No ``from __future__ import annotations`` here: TorchTitan merges the classes by their real types.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

# TorchTitan imports this module before it builds anything. Configs that were written when the package registered the model
# itself say custom_import = "titan_disp", which imports nothing any more: they keep working, under TorchTitan's own trainer too.
import titan_disp.plugin  # noqa: F401
from titan_disp.errors import ConfigError
from titan_disp.overrides import Overrides


@dataclass
class Model:
    overrides: Overrides = field(default_factory=dict)
    """
    Sizes other than the flavor's, by their names in the model's arguments: a table [model.overrides] with hidden_dim = 16, …, or
    --model.overrides hidden_dim=16,n_layers=2, which replaces the table. Fixed for the life of a run.
    """


@dataclass
class Dispersion:
    """Whose number each default is, with its source: docs/loss.md."""

    enabled: bool = False
    """
    Whether to add λ · dispersion to the cross-entropy. Off is TorchTitan's Qwen3, with tied embeddings under FSDP too, or plain
    GPT-2. Our choice.
    """

    coeff: float = 0.1
    """λ, weight of the dispersion loss. 0.1: the paper's text."""

    tau: float = 1.0
    """τ, temperature. 1.0: the paper's text."""

    layers: list[int] | Literal["all", "last", "early_half", "late_half"] = "all"
    """
    Blocks whose outputs are dispersed: all, last, early_half, late_half, or a list of block indices from 0. all: the authors'
    released code.
    """

    final_norm: bool = False
    """
    Take the last block's activations after the final norm, as the mid-training of the authors' released code does (all of Hugging
    Face's hidden_states[1:], whose last entry is after it). Its pre-training takes block outputs, before it, as false does.
    """

    clamp: float = 0.25
    """
    κ: cosines are clamped to [−1+κ, 1−κ], straight-through. 0.25: the authors' released code, where it is the class's default;
    its mid-training of GPT-2 passes 0.1.
    """

    norm_eps: float = 1e-2
    """ε added to token norms. 1e-2: the authors' released code."""

    variant: Literal["angular", "decorrelation", "l2_repel", "orthogonalization"] = "angular"
    """
    Of the paper's Table 1; angular is the loss of the paper's text. tau is an option of angular and l2_repel; clamp and norm_eps
    of angular and orthogonalization; norm_coeff and include_diagonal of l2_repel. An option that the variant does not use must
    keep its default.
    """

    estimator: Literal["exact", "moments", "sampled"] = "exact"
    """
    exact: all pairs of tokens. moments: all pairs, in time linear in the sequence (angular only). sampled: the pairs of
    max_tokens positions per sequence, as in the authors' released code. exact is our choice.
    """

    max_tokens: int = 256
    """
    Positions per sequence of the sampled estimator, drawn anew for every step and layer, the same ones for all sequences of the
    step. 256: the authors' released code, which draws anew for every layer and microbatch.
    """

    norm_coeff: float = 0.1
    """λ_norm of l2_repel, on the mean square of the activations. 0.1: the authors' released code."""

    include_diagonal: bool = True
    """
    Whether the mean of l2_repel is over all pairs, each token with itself among them, as in the authors' released code. Without
    these, the gradients of wide models are thousands of times as large, and almost all on the tokens that are closest.
    """

    warmup_steps: int = 0
    """coeff grows linearly from 0 over so many steps. 0: the authors' released code keeps λ constant."""

    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How coeff goes to final_coeff after warm-up. constant: the authors' released code."""

    decay_steps: int = 0
    """After so many steps of decay, coeff is final_coeff and stays so. 0: at the last step. Our choice."""

    final_coeff: float = 0.0
    """λ at the end of the decay, unless decay is constant. Our choice."""


@dataclass
class Baseline:
    """What else is said to counteract condensation: docs/baselines.md."""

    method: Literal["none", "noisy_embedding", "active_forgetting"] = "none"
    """
    noisy_embedding: uniform noise on the token embeddings in training (NEFTune). active_forgetting: the token embeddings are
    drawn anew every forget_every steps. Fixed for the life of a run.
    """

    with_dispersion: bool = False
    """Whether the method may go with dispersion.enabled, which is an error otherwise."""

    noise_alpha: float = 1.0
    """
    α of noisy_embedding: the bound of the noise is α/√(N·F), of N positions in a sequence and F features. 1.0: the authors'
    released code. NEFTune's paper has 5, 10 and 15.
    """

    forget_every: int = 1000
    """K of active_forgetting, in steps. 1000: its paper, and the authors' released code."""

    forget_lr: float = 0.0
    """
    Highest learning rate of the embeddings under active_forgetting. 0: optimizer.lr, as in that paper. The authors' released code
    has 5e-5.
    """

    forget_warmup: float = 0.08
    """
    Part of every forget_every steps over which the embeddings' learning rate grows linearly; over the rest it falls to 0. 0.08:
    the authors' released code, and the 10,000 of 125,000 steps in that paper's code.
    """


@dataclass
class Source:
    """A table of [[stream.sources]]. On the command line, the first one's path is --stream.sources.0.path."""

    weight: float
    """Its part of the training tokens, relative to the other sources' weights; > 0."""

    path: str | None = None
    """Its documents: as training.dataset_path."""

    dataset: str = "text"
    """As training.dataset."""

    name: str = ""
    """In metrics, logs and checkpoints. By default the last part of the path."""


@dataclass
class Stream:
    sources: list[Source] = field(default_factory=list)
    """
    Several sources of training data in the place of training.dataset and dataset_path, each with a weight: a table each,
    [[stream.sources]]. A slot belongs to one source, so that their parts of the tokens are parts of the slots; the log and
    titan-disp plan say which.
    """

    slots: int = 0
    """
    Document streams of the run, fixed for its life; 0: training.global_batch_size. The global batch must be a multiple of
    them, and they of the data-parallel ranks.
    """

    seed: int = 0
    """Decides the order of files in every epoch, and of documents in every window."""

    shuffle_window: int = 256
    """
    So many documents of a slot at a time are shuffled; fixed for the life of a run. 0 or 1: they come in their files' order.
    A rank holds up to 2 × its slots × this × the mean length of a document in memory (docs/shuffling.md).
    """

    prefetch: int = 4
    """Microbatches that a worker process prepares ahead, at least; they come from it in groups of up to 32. 0: in the training
    process, when they are needed."""

    tokenizer_threads: int = 0
    """Threads that tokenize ahead, per rank; 0: the cores of the node divided among its ranks, at most 4."""

    fast_tokenizer: bool = False
    """
    Tokenize with gigatoken (pip install 'titan-disp[fast]') in the place of the tokenizer's own library: many times as fast, the
    same ids. That is checked at the start and for one document in a thousand; where they differ, the run stops.
    """

    on_bad_data: Literal["skip", "fail"] = "skip"
    """
    Documents that are malformed, empty or too long, and the rest of damaged files: pass over them, named in the log and
    counted, or stop.
    """

    max_skipped_fraction: float = 0.01
    """
    A larger part of documents that had to be skipped (after the first 1000), or of files that end early (10 at least in an
    epoch), stops the run when it next logs: the data is broken. Both are counted over all ranks. A file that is not itself a
    larger part of the data (of several sources, of its own) is passed over after 1000 bad documents in a row, and counts as one
    that ends early.
    """

    max_document_mb: float = 16.0
    """Documents of more than this many MiB, as stored, count as bad; fixed for the life of a run, as it decides what comes."""

    text_field: str = "text"
    """
    Field of JSON documents, and column of Parquet, that holds the text; dots lead into nested ones (meta.text). Fixed for the
    life of a run, as are the next two.
    """

    text_split: Literal["file", "blank_lines"] = "file"
    """Of .txt files: each is a document, or every block of lines between blank lines is."""

    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Of token ids in .bin and .npy files without a header that says it (docs/data.md)."""

    validation_sequences: int = 0
    """
    Sequences of every validation, over all ranks: the same ones on any mesh. 0: validation.steps × local_batch_size ×
    data-parallel ranks.
    """

    retry_seconds: float = 60.0
    """
    How long a read that fails, from the hub or from a file system that has lost its server (EIO, ESTALE), is tried again, with
    growing pauses; at most 60 % of comm.train_timeout_seconds, as the other ranks wait meanwhile.
    """

    on_mismatch: Literal["fail", "restart"] = "fail"
    """
    A checkpoint written with other data, tokenizer, seq_len, seed or slots: stop and name the difference, or go on with
    streams that begin a new epoch; steps and tokens seen are kept.
    """

    def __post_init__(self) -> None:
        self.sources = read_sources(self.sources)


def read_sources(tables: Any) -> list[Source]:
    """[[stream.sources]]: TorchTitan makes dataclasses of sections, but leaves the tables of an array as they are.

    Raises:
        ConfigError: no array of tables, a key that is not known, or a value of another type.
    """
    if not isinstance(tables, Sequence) or isinstance(tables, str):
        raise ConfigError(f"stream.sources is {tables!r}, expected tables, each written [[stream.sources]]")
    return [table if isinstance(table, Source) else _source(i, table) for i, table in enumerate(tables)]


def _source(i: int, table: Any) -> Source:
    where, known = f"stream.sources[{i}]", [f.name for f in fields(Source)]
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} is {table!r}, expected a table, written [[stream.sources]]")
    for key, value in table.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(
                f"{where}.{key} is not known"
                + (f" (did you mean {close[0]}?)" if close else f"; expected {', '.join(known)}")
            )
        kinds = (int, float) if key == "weight" else (str,)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ConfigError(f"{where}.{key} is {value!r}, expected a {'number' if key == 'weight' else 'string'}")
    if "weight" not in table:
        raise ConfigError(f"{where} has no weight: set it to its part of the training tokens, relative to the others")
    return Source(**{**table, "weight": float(table["weight"])})


@dataclass
class Training:
    steps: int = -1
    """Optimizer steps of the whole run, which the learning-rate schedule follows. −1: from budget.tokens."""


@dataclass
class Validation:
    seq_len: int = -1
    """
    Tokens of a validation sequence, at most training.seq_len, as the rotary embeddings end there. −1: training.seq_len.
    TorchTitan's default is 2048.
    """


@dataclass
class Budget:
    tokens: int = 0
    """Tokens to train on, of which training.steps follows: ceil(tokens / (global batch × seq_len)). 0: training.steps counts."""

    stop_at_tokens: int = 0
    """End (with a checkpoint) after so many tokens; the schedule stays that of the whole budget. 0: no early end."""


@dataclass
class Guard:
    max_skipped_steps: int = 10
    """
    A step whose loss or gradient norm is not finite changes no weights, on any rank. After so many in a row all ranks stop.
    """

    silence_seconds: float = 60.0
    """
    Rank 0 says in RUN/heartbeat.json what it is doing. Under slurm/pretrain.sbatch, a run that has been silent for so long beyond
    twice the time-outs in [comm] (or beyond twice its slowest step, or save_seconds) is ended and started again.
    """

    save_seconds: float = 1800.0
    """How long a save may take, as far as training waits for it, before the run counts as silent."""


@dataclass
class Condensation:
    interval: int = 500
    """
    Measure condensation and cross-entropy on the validation split every so many steps, at the start and at the end, under
    titan_disp.train. 0: never. What is measured and what it costs: docs/measurements.md.
    """

    sequences: int = 8
    """Sequences to measure, the same ones every time and in every run; divided among the data-parallel ranks."""

    max_tokens: int = 512
    """Positions of each sequence whose pairs are taken, evenly spaced."""

    per_layer: bool = False
    """
    Whether TensorBoard (W&B) also gets every number of every layer, as curves: 4 × 29 of them for the 0.6B. Means over the blocks
    and over thirds of them, the last block and the final norm are always there; metrics.jsonl has every layer.
    """


@dataclass
class Checkpoint:
    last_save_model_only: bool = False
    """
    Whether the last checkpoint holds the model only. TorchTitan's default is true, which makes a finished run
    impossible to continue; export reads full checkpoints as well.
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
