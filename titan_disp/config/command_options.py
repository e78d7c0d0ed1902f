"""The options of every subcommand of ``titan-disp``.

Help shows a class's docstring as the subcommand's description, and a field's docstring
as the option's description. Help must appear within a second, so this module must not
import torch. ``titan_disp.cli`` says which function takes which class.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from titan_disp.errors import ConfigError


def optional(metavar: str) -> Any:
    return arg(metavar=metavar, help_behavior_hint="(optional)")


# Without a metavar, help would name an argument by its type, {None}|INT. Without a
# hint, it ends in "(default: None)".
Words = Annotated[tuple[str, ...], optional("NAME=VALUE ...")]
Ints = Annotated[tuple[int, ...], optional("INT ...")]
OptionalInt = Annotated[int | None, optional("INT")]
OptionalFloat = Annotated[float | None, optional("FLOAT")]
OptionalStr = Annotated[str | None, optional("STR")]
OptionalPath = Annotated[Path | None, optional("PATH")]
Folder = Annotated[Path, Positional, arg(metavar="FOLDER")]
Target = Annotated[str, Positional, arg(metavar="TARGET")]
SweepFile = Annotated[Path, Positional, arg(metavar="FILE")]
PictureFormats = Annotated[tuple[str, ...], arg(metavar="png|svg|pdf ...")]


def check_least(options: object, **least: int) -> None:
    """Raise ConfigError if an option of a command is less than its minimum. None, the
    default of some options, passes.
    """
    for name, minimum in least.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value}, expected at least {minimum}"
            )


@dataclass(frozen=True)
class ConfigOptions:
    config: Annotated[str, Positional, arg(metavar="CONFIG")]
    """TOML file of the run."""
    overrides: Annotated[
        tuple[str, ...],
        Positional,
        optional("[--SECTION.KEY VALUE ...]"),
    ] = ()
    """keys of the config to replace, such as --training.steps 20
    --dispersion.no-enabled --dispersion.layers 1 2.
    """

    @property
    def argv(self) -> list[str]:
        return ["--job.config_file", self.config, *self.overrides]


@dataclass(frozen=True)
class Nodes:
    nodes: int = 1
    """number of nodes of a run."""
    gpus_per_node: int = 8
    """number of GPUs per node, with one rank each. Each of the two dies (GCDs) of an
    MI250X counts as a GPU.
    """
    gpu: str = ""
    """kind of GPU for the plan: A100, H100, H200, MI250X-GCD, MI300X, RTX3090, RTX4090
    or RTX5090, or any other with --gpu-memory and --gpu-flops, which then needs no name.
    The default is this computer's, or H100 if it has none.
    """


@dataclass(frozen=True)
class Machine(Nodes):
    gpu_memory: OptionalFloat = None
    """memory of a GPU in GB, such as 40 for the smaller A100. The default is that of the
    kind of GPU (A100: 80), or the measured memory if the GPU is this computer's.
    """
    gpu_flops: OptionalFloat = None
    """peak of a GPU in dense bf16 TFLOP/s. The default is that of its kind."""
    mfu: float = 0.4
    """fraction of the GPU's peak bf16 FLOP/s that training is assumed to reach (model
    FLOPs utilization).
    """
    node_bandwidth: OptionalFloat = None
    """GB/s from a GPU to the other GPUs of its node. The default is the vendor's peak
    (titan_disp/cluster/cost.py).
    """
    network_bandwidth: OptionalFloat = None
    """GB/s from a GPU to other nodes. The default is 50 per H100, H200 or MI300X, 25
    per A100, and 12.5 per MI250X-GCD. slurm/first_run.sbatch measures the GB/s of a
    whole node. Divide them by the number of GPUs per node.
    """
    storage_bandwidth: float = 2.0
    """GB/s that all ranks together write to the run folder. The default is a guess."""


@dataclass(frozen=True)
class SlurmOptions(Nodes):
    gpus_per_node: int = 8
    """number of GPUs to request per node. 0 requests none, for nodes without GPUs."""
    site: str = "generic"
    """file with the settings of your cluster: its name in slurm/sites without .sh, or
    its path.
    """
    sbatch: Words = ()
    """further options for sbatch without dashes, such as --sbatch time=24:00:00
    account=abc partition=gpu.
    """
    dry_run: bool = False
    """print the sbatch command instead of running it. On a machine with sbatch, the run
    folder must be writable, and data and tokenizer must exist.
    """
    inputs_on_nodes: bool = False
    """submit although data, tokenizer or weights are missing on this machine, because
    the compute nodes have them.
    """

    @property
    def machine(self) -> Machine:
        return Machine(self.nodes, max(1, self.gpus_per_node), self.gpu)


@dataclass(frozen=True)
class TrainOptions(ConfigOptions):
    """Train on this machine, on all of its GPUs, or on the CPU if there is none.

    titan-disp config and docs/configuration.md list all keys of the config.
    """

    nproc: OptionalInt = None
    """number of ranks. The default is one per GPU, or 1 without a GPU."""


@dataclass(frozen=True)
class PlanOptions(Machine, ConfigOptions):
    """Predict a run's mesh, batches, steps, memory, communication and duration. This
    needs no data, tokenizer or GPU.
    """

    strict: bool = False
    """fail, rather than warn, if the data or the tokenizer is missing, and report all
    problems, not only the first.
    """
    suggest: bool = False
    """list other local batches, meshes and activation checkpointing that fit the
    memory, with the least step time.
    """
    json: bool = False
    """print one JSON object."""


@dataclass(frozen=True)
class PreflightOptions(ConfigOptions):
    """Run one training step as rank 0 of the whole job, simulating the other ranks in
    one process, on random tokens.

    Without a GPU, the model and the sequences are small. The report lists all changes
    to the config. To check the nodes of a cluster, submit slurm/first_run.sbatch.
    """

    ranks: int = 1
    """number of ranks of the whole job."""
    flavor: OptionalStr = None
    """size of the model (model.flavor). The default is the config's on a GPU, and a
    small one without a GPU.
    """
    seq_len: OptionalInt = None
    """tokens per sequence. The default is the config's on a GPU, and about 128 without
    a GPU.
    """


@dataclass(frozen=True)
class SelftestOptions:
    """Check the loss, its kernels and a resume on the device at hand, and measure them.
    The exit status is 1 if a check fails.

    Under torchrun (torchrun --nproc-per-node 8 -m titan_disp.cli selftest), the ranks
    also check sequences that they share.
    """

    json: OptionalPath = None
    """file to write the results to, as JSON."""


@dataclass(frozen=True)
class SubmitOptions(SlurmOptions, ConfigOptions):
    """Print the plan of a run, then submit it to SLURM (slurm/pretrain.sbatch)."""


@dataclass(frozen=True)
class ReferenceOptions:
    """Print the keys of the config with their types, defaults and descriptions."""

    name: Annotated[str | None, Positional, optional("[NAME]")] = None
    """a section or key of titan-disp or TorchTitan, such as dispersion,
    dispersion.coeff or seq_len. The default is all keys of titan-disp and the most
    common ones of TorchTitan.
    """
    markdown: bool = False
    """print the page docs/configuration.md."""


@dataclass(frozen=True)
class CheckpointOptions:
    """List a run's checkpoints, and verify all of their bytes.

    This needs no GPU, and the run may be training. The exit status is 1 if a checkpoint
    is damaged. Checkpoints that the run has already set aside as damaged (damaged-N) do
    not count.
    """

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """the run's folder (job.dump_folder)."""
    step: OptionalInt = None
    """step of the only checkpoint to verify. The default is all checkpoints."""


@dataclass(frozen=True)
class InitOptions:
    """Make a run of your own text: hold some of it out, train a tokenizer, and write a
    config for this machine.

    The commands to type next are printed. Nothing is overwritten.
    """

    folder: Folder
    """folder to write: config.toml, tokenizer, and data if no file is held out by its
    name. It must be empty or not exist.
    """
    text: Annotated[str, arg(metavar="PATH")]
    """folder, file or glob (in quotes) of .txt, .json, .jsonl, .csv, .parquet and
    others, also .gz or .zst (docs/data.md). In a folder, .txt and .csv files beside
    other formats are left out.
    """
    text_field: str = "text"
    """field of JSON documents, or column of Parquet files, that holds the text
    (stream.text_field).
    """
    tokenizer: OptionalPath = None
    """folder of a tokenizer. The default is to train one on the text."""
    allow_loss: bool = False
    """go on although more than 1 % of the bytes cannot be used, or more than half of the
    text is in files that are not read.
    """
    model: Literal["qwen3_disp", "llama_disp"] = "qwen3_disp"
    """architecture (model.name). Its size follows from the text and the time."""
    minutes: OptionalFloat = None
    """how long training may take, about. The default is 4 minutes on a CPU, and 240 on
    GPUs.
    """


@dataclass(frozen=True)
class SampleOptions:
    """Write a small corpus in C4's format, from texts of this Python installation, and
    a SentencePiece tokenizer.
    """

    folder: Folder
    """folder to write to. If it already holds the sample corpus, nothing is changed."""
    vocab_size: int = 2048
    """size of the tokenizer's vocabulary."""


@dataclass(frozen=True)
class DigestOptions(ConfigOptions):
    """Run the data loaders without a model, and print the SHA-256 of each global batch.

    Two configs that print the same hashes train on the same batches in the same order.
    """

    steps: int = 10
    """number of global batches."""
    ranks: int = 1
    """number of data-parallel ranks."""
    resume_at: Ints = ()
    """steps after which all ranks stop and new ranks resume from the saved positions.
    The default is never.
    """
    resume_ranks: Ints = ()
    """number of new ranks after each step of --resume-at."""
    json: bool = False
    """print one JSON object with hashes, bytes_read, files_read, read_amplification and
    counters.
    """

    @property
    def phases(self) -> list[tuple[int, int]]:
        """The (first step, number of ranks) of each phase.

        Raises ConfigError if --resume-at and --resume-ranks do not fit together.
        """
        steps = list(self.resume_at)
        ranks = list(self.resume_ranks)
        ascending = sorted({*steps}.intersection(range(self.steps + 1)))
        if len(steps) != len(ranks) or steps != ascending:
            raise ConfigError(
                f"--resume-at is {steps} and --resume-ranks is {ranks}, expected "
                "lists of equal length, with ascending steps up to --steps "
                f"{self.steps}"
            )
        return [(0, self.ranks), *zip(steps, ranks, strict=True)]


@dataclass(frozen=True)
class CheckOptions(ConfigOptions):
    """Look at all files of a run's data, and print what the run will use, convert, skip
    and leave out, how often it reads the text, and how much of it each rank reads.

    The exit status is 1 if a start would refuse the data.
    """

    ranks: int = 1
    """number of data-parallel ranks."""
    json: bool = False
    """print one JSON object."""


@dataclass(frozen=True)
class IndexOptions(ConfigOptions):
    """Index local training data: its documents, their text, and where reading can
    begin. Set stream.index to the result.

    Only new and changed files are read, so the command can be run again, and on several
    nodes at once. It also counts duplicate documents, and held-out documents that are
    in the training data.
    """

    config: Annotated[str, Positional, arg(metavar="CONFIG|FOLDER")]
    """TOML file of the run, or a folder of documents."""
    out: OptionalPath = None
    """folder of the index. The default is stream.index, or .titan-disp/index in the
    folder of the data.
    """
    workers: int = 4
    """number of processes."""

    @property
    def argv(self) -> list[str]:
        if self.config.endswith(".toml"):
            return super().argv
        return [
            "--training.dataset",
            "text",
            "--training.dataset_path",
            self.config,
            *self.overrides,
        ]


@dataclass(frozen=True)
class FetchOptions:
    """Download C4 or another data set from the Hugging Face hub.

    The size and the SHA-256 of each file are checked. Run the same command again to
    resume an interrupted download.
    """

    folder: Folder
    """folder to download to. Set training.dataset_path to it in later runs."""
    dataset: str = "c4"
    """c4, hf:OWNER/NAME, hf:OWNER/NAME:CONFIGURATION or
    hf:OWNER/NAME:CONFIGURATION:SPLIT. Set training.dataset to the same name in later
    runs.
    """
    shards: OptionalStr = None
    """numbers of the training files to download (or of the files of --split), such as
    0-63 or 0-3,17. The default is all (C4 has 1024, about 327 GB).
    """
    split: Literal["both", "train", "validation"] = "both"
    """split to download, unless the data set's name includes it. With "both", the
    validation split may be missing.
    """
    workers: int = 4
    """number of parallel downloads."""


@dataclass(frozen=True)
class CondensationOptions:
    """Measure and draw the embedding condensation of trained models, layer by layer, on
    the same text.

    Condensation is measured by the cosines between the embeddings of a sequence's
    tokens. To measure as in the paper (arXiv 2602.00217), use --sequences 100
    --contiguous --special-tokens.
    """

    targets: Annotated[
        tuple[str, ...],
        Positional,
        optional("[TARGET ...]"),
    ]
    """models to measure. A target is RUN (the newest checkpoint of a run folder),
    RUN/STEP, a folder of a Hugging Face causal language model, or MODEL or
    MODEL@REVISION of the Hugging Face hub, such as gpt2. If the hub does not answer,
    the local cache is used. Several revisions of a model are drawn over training.
    """
    out: Path
    """folder for NAME.npz, metrics.json, metrics.csv and the pictures. Files of the
    same names are overwritten.
    """
    text: Annotated[
        Path | None, arg(metavar="PATH", help_behavior_hint="(required, or --dataset)")
    ] = None
    """file of plain UTF-8 text, or of documents, such as .json.gz, .jsonl or
    .parquet.
    """
    dataset: Annotated[
        str | None, arg(metavar="STR", help_behavior_hint="(required, or --text)")
    ] = None
    """folder as for training.dataset_path, of which the validation split is used, glob,
    or hf:OWNER/NAME of the hub.
    """
    text_field: str = "text"
    """field of JSON documents, or column of Parquet files, that holds the text."""
    sequences: int = 32
    """number of randomly sampled sequences."""
    max_length: int = 512
    """tokens per sequence, or fewer if a model has fewer positions."""
    seed: int = 0
    """seed of the sample, and of a Hugging Face model's weights before training."""
    skip_untrained: bool = False
    """do not measure each model before training, on one batch, for comparison. Without
    this option, a run's untrained weights are those of its checkpoint of step 0, or
    else drawn from its seed.
    """
    last_n: int = 5
    """number of last layers, up to the final norm, over which the table averages the
    cosine (all layers if a model has fewer). metrics.json has the mean for every number
    of last layers, as the authors' option of this name draws it.
    """
    logits: bool = False
    """measure the logits as one more layer."""
    zeta: float = 0.0
    """weight ζ of the shrinkage in IsoScore*, for models with more features than there
    are tokens.
    """
    pad: OptionalInt = None
    """D: also measure tokens whose features are padded to D with random normal entries,
    as in Appendix D of the paper. padded.csv has the measurements, and bounds of the
    expected cosine.
    """
    contiguous: bool = False
    """start each sequence at a random place of the text, instead of shuffling pieces of
    the text and joining them.
    """
    special_tokens: bool = False
    """give each sequence the special tokens that the tokenizer puts around a text."""
    all_steps: bool = False
    """measure all checkpoints of each RUN."""
    family: Annotated[
        tuple[str, ...],
        optional("NAME=TARGET,… ..."),
    ] = ()
    """models of several sizes, as NAME=TARGET,TARGET,…. They are measured too. The rank
    correlations between cosine and depth (Spearman's ρ and Kendall's τ) are drawn
    against the number of parameters.
    """
    format: PictureFormats = ("png",)
    """formats of the pictures, such as svg,pdf."""
    pair: Annotated[tuple[str, ...], optional("BASE,OTHER ...")] = ()
    """two models to compare, such as a base model and a distilled one. They are
    measured too. The same rank correlations are drawn side by side.
    """
    tokenizer: OptionalPath = None
    """folder of a tokenizer that replaces each model's own."""
    batch_size: int = 8
    """sequences per forward pass."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, or auto, which spreads a Hugging Face model over all GPUs
    (needs accelerate).
    """
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """dtype of the weights and activations. auto keeps the saved one. Cosines are
    computed in float64.
    """
    trust_remote_code: bool = False
    """run the Python code that comes with a model if transformers does not know the
    model.
    """


@dataclass(frozen=True)
class ReportOptions:
    """Write an HTML page that shows or compares losses, condensation, restarts and
    configs. Runs may still be training.
    """

    runs: Annotated[
        tuple[str, ...],
        Positional,
        arg(metavar="RUN ...", help_behavior_hint="(required)"),
    ]
    """run folders (job.dump_folder), or NAME=RUN,RUN,… for runs that differ only in
    their seeds. Curves show the mean of such a group and a band around it. Runs whose
    configs differ only in their seeds are grouped automatically.
    """
    out: Path = Path("report.html")
    """file of the page, which needs no other file and no network."""
    evaluation: OptionalPath = None
    """--out folder of titan-disp evaluate. The page shows its scores for tasks with
    published scores.
    """


@dataclass(frozen=True)
class ExportOptions:
    """Export a run's model to a Hugging Face folder, with config, tokenizer and model
    card. This needs no GPU.
    """

    target: Target
    """RUN (the newest checkpoint of a run folder) or RUN/STEP."""
    dest: Folder
    """folder to write. It must be empty or not exist."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of the weights."""
    max_shard_size: str = "5GB"
    """largest size of one safetensors file."""
    tokenizer: OptionalPath = None
    """folder of the tokenizer. The default is the path in the run's config."""


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a text on the CPU with the model of a run or an exported model."""

    target: Target
    """RUN (the newest checkpoint of a run folder), RUN/STEP, or a Hugging Face
    folder.
    """
    prompt: Annotated[str, Positional, arg(metavar="PROMPT")]
    """beginning of the text. "" begins a new document."""
    max_new_tokens: int = 64
    """largest number of tokens to generate. The text also ends at the sequence length
    of training.
    """
    temperature: float = 0.8
    """temperature of the sampling. 0 always takes the most probable token."""
    top_k: int = 50
    """number of most probable tokens to sample from. 0 means all."""
    seed: int = 0
    """seed of the sampling."""
    tokenizer: OptionalPath = None
    """folder of the tokenizer. The default is the path in the run's config."""


@dataclass(frozen=True)
class EvaluateOptions:
    """Run lm-evaluation-harness on models. Compare each model with the first one,
    document by document, and over several seeds.
    """

    models: Annotated[
        tuple[str, ...],
        Positional,
        arg(metavar="MODEL ...", help_behavior_hint="(required)"),
    ]
    """folders of Hugging Face models, such as titan-disp export writes, models of the
    hub, RUN (the newest checkpoint of a run folder), RUN/STEP, or NAME=MODEL,MODEL,…
    for models that differ only in their seeds.
    """
    tasks: Annotated[tuple[str, ...], arg(metavar="TASK ...")] = ("paper",)
    """names of the harness's tasks, groups or tags. "paper" stands for those of
    --protocol, by default the ten tasks of arXiv 2602.00217.
    """
    limit: OptionalInt = None
    """number of documents per task (for MMLU, per subject), from the first on. The
    default is that of --protocol.
    """
    num_fewshot: OptionalInt = None
    """number of examples in the prompt. The default is --protocol's for its tasks, or
    else the task's own.
    """
    batch_size: int | Literal["auto"] = "auto"
    """sequences per batch. auto takes the largest batch that fits on a GPU, or 8 on a
    CPU.
    """
    device: OptionalStr = None
    """a device such as cpu or cuda:1. The default is the GPU, or the CPU without
    one.
    """
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of the weights. auto takes that of --protocol, if it has one, or keeps the
    saved one.
    """
    seed: int = 0
    """seed for the choice of examples."""
    include_path: OptionalPath = None
    """folder with your own task files. The default is none."""
    tokenizer: OptionalPath = None
    """folder of a tokenizer that replaces each model's own."""
    out: Path = Path("evaluation")
    """folder for results.json, samples.jsonl, table.md and table.csv. It must not hold
    an earlier evaluation.
    """
    latex: bool = False
    """also write table.tex, for papers."""
    protocol: Literal["paper", "authors-qwen3", "authors-gpt2", "authors-pretrain"] = (
        "paper"
    )
    """number of documents and examples. "paper" takes all documents of the paper's ten
    tasks, and five examples or none. The authors' scripts take 200 documents, and five
    examples or none ("authors-qwen3"), or 500 documents, and one example or none
    ("authors-gpt2"). "authors-pretrain" takes the tasks with which the authors evaluate
    a run of 156 B tokens: 200 documents, five examples or none, and weights in float16.
    """


@dataclass(frozen=True)
class _Sweep:  # help shows these options before those of SLURM
    file: SweepFile
    """TOML file of the sweep (docs/sweeps.md)."""
    jobs: int = 1
    """number of points that train at the same time. With --submit, number of tasks of
    the array.
    """
    nproc: int = 1
    """ranks per point on this machine."""
    submit: bool = False
    """submit an array of jobs (slurm/sweep.sbatch) instead of training here. The
    options below apply only with --submit, except --dry-run, which otherwise prints
    what would be trained here.
    """


@dataclass(frozen=True)
class SweepOptions(SlurmOptions, _Sweep):
    """Train all unfinished runs of a sweep on this machine, or submit them as an array
    of SLURM jobs.

    Each run is a point of the sweep. titan-disp sweep FILE is short for this command.
    Run it again to continue after an interruption. The exit status is 0 if all points
    are finished or submitted.
    """

    dry_run: bool = False
    """check all points and print them with their states, or, with --submit, print the
    plan and the sbatch command. Nothing is written.
    """


@dataclass(frozen=True)
class SweepTableOptions:
    """Compare the conditions of a sweep: means over seeds, and differences from one
    condition, paired by seed.

    A condition is all points that differ only in their seeds. The runs may still be
    training.
    """

    file: SweepFile
    """TOML file of the sweep (docs/sweeps.md)."""
    against: OptionalStr = None
    """condition that the others are compared with. The default is the file's
    sweep.against, if it has one.
    """
    metric: OptionalStr = None
    """metric of each run after its last step: validation, cross_entropy, ce, loss,
    dispersion, grad_norm, spearman or kendall; or mean_cosine, std_cosine, mean_angle
    or effective_rank, each with a part such as mean_cosine.middle_blocks. The default
    is the file's sweep.metric, or else the first of validation, cross_entropy and ce
    that a run has.
    """
    out: OptionalPath = None
    """folder for table.md, table.csv, values.csv and table.png. The default is the
    sweep's folder.
    """
    latex: bool = False
    """also write table.tex, for papers."""
    format: PictureFormats = ("png",)
    """formats of the picture, such as svg,pdf."""
