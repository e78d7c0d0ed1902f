"""This module is the command line ``titan-disp …``. Each subcommand calls one function of another module."""

import inspect
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro.conf import Positional, arg

from titan_disp.errors import EXIT_CODE, ConfigError, UserError, counted, did_you_mean

# The subcommands of a command line, and their help texts. tyro parses the words and prints the boxes.


Function = TypeVar("Function", bound=Callable[..., Any])


class Subcommands:
    """Functions that are subcommands, and groups of them.

    tyro reads a function's docstring, but does two things that a reader of ``--help`` does not expect. It keeps the
    line breaks inside an argument's description and then wraps the lines once more, so that lines end early. It does
    not wrap a subcommand's description at all. Both are settled here before tyro sees the text.
    """

    def __init__(self, description: str, others: Sequence[str] = ()) -> None:
        """Create an empty list of subcommands.

        Args:
            description: what they do.
            others: what else may be in the place of a subcommand, for messages. The caller handles it.
        """
        self._description = description
        self._others = others
        self._members: dict[str, Callable[..., Any] | Subcommands] = {}

    def command(self, name: str) -> Callable[[Function], Function]:
        """Return a decorator that adds a function. The first paragraph of its docstring is its line in the list."""

        def add(function: Function) -> Function:
            self._members[name] = function
            doc = inspect.cleandoc(function.__doc__ or "")
            function.__doc__ = re.sub(r"\n {8}", " ", doc)  # joins the lines of each argument's description
            return function

        return add

    def group(self, name: str, description: str, others: Sequence[str] = ()) -> "Subcommands":
        """Add a subcommand that has subcommands, and return it. The arguments are those of the class."""
        group = self._members[name] = Subcommands(description, others)
        return group

    def cli(self, args: Sequence[str], prog: str | None = None) -> Any:
        """Call the function that ``args`` names, and return its result.

        Raises:
            ConfigError: a word in the place of a subcommand is none.
            SystemExit: tyro has printed help or an error.
        """
        self._check_names(args, prog or "")
        app = self._app(listed=self._names_no_function(args))
        # Without pairs, help shows --json, and not "--json, --no-json".
        config = (tyro.conf.FlagCreatePairsOff,)
        return app.cli(prog=prog, description=_wrapped(self._description), args=args, config=config)

    def _check_names(self, args: Sequence[str], prog: str) -> None:
        """Refuse a misspelled subcommand. tyro would list the right ones, or call the word an unrecognized option."""
        if not args or args[0].startswith("-"):
            return
        member = self._members.get(args[0])
        if member is None:
            hint = did_you_mean(args[0], self._members)
            expected = ", ".join([*self._others, *self._members])
            raise ConfigError(f"{args[0]!r} is not a subcommand of {prog}{hint}; expected {expected}")
        if isinstance(member, Subcommands):
            member._check_names(args[1:], f"{prog} {args[0]}")

    def _names_no_function(self, args: Sequence[str]) -> bool:
        """Whether ``--help`` would list subcommands, which takes only the first paragraph of each."""
        member = self._members.get(args[0]) if args else None
        return member is None or (isinstance(member, Subcommands) and member._names_no_function(args[1:]))

    def _app(self, listed: bool) -> Any:
        app = tyro.extras.SubcommandApp()
        for name, member in self._members.items():
            if isinstance(member, Subcommands):
                app.command(member._app(listed), name=name, help=_wrapped(member._description))
            else:
                app.command(name=name, help=_summary(member) if listed else _description(member))(member)
        return app


def _summary(function: Callable[..., Any]) -> str:
    return " ".join((function.__doc__ or "").partition("\n\n")[0].split())


def _description(function: Callable[..., Any]) -> str:
    return _wrapped((function.__doc__ or "").partition("\n\nArgs:")[0])


def _wrapped(text: str) -> str:
    """Wrap paragraphs to the terminal, as one.

    tyro joins lines again unless they begin with a blank. The indentation also aligns the text with that in the boxes.
    """
    width = shutil.get_terminal_size().columns - 2
    return textwrap.fill(
        " ".join(text.split()), width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )


# Without a metavar, help would name these arguments by their types, such as {None}|INT, and without a hint it would end
# in "(default: None)".
Config = Annotated[str, Positional, arg(metavar="CONFIG")]
Overrides = Annotated[
    tuple[str, ...], Positional, arg(metavar="[--SECTION.KEY VALUE ...]", help_behavior_hint="(optional)")
]
Sbatch = Annotated[tuple[str, ...], arg(metavar="NAME=VALUE ...", help_behavior_hint="(optional)")]
Steps = Annotated[tuple[int, ...], arg(metavar="INT ...", help_behavior_hint="(optional)")]
OptionalInt = Annotated[int | None, arg(metavar="INT", help_behavior_hint="(optional)")]
OptionalFloat = Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(optional)")]
OptionalStr = Annotated[str | None, arg(metavar="STR", help_behavior_hint="(optional)")]
OptionalPath = Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="(optional)")]

app = Subcommands("Pre-train language models with the dispersion loss, and measure their condensation.")


@app.command("sample-data")
def sample_data(folder: Annotated[Path, Positional, arg(metavar="FOLDER")], vocab_size: int = 2048) -> None:
    """Write a small corpus in C4's format, and a SentencePiece tokenizer for it.

    The texts come from this Python installation. Nothing is downloaded.

    Args:
        folder: folder to write to. If it already holds the sample corpus, nothing is changed.
        vocab_size: size of the tokenizer's vocabulary.
    """
    from titan_disp.data.sample import is_complete, write_sample

    if is_complete(folder):
        print(f"{folder} already holds the sample corpus")
        return
    try:
        counts = write_sample(folder, vocab_size)
    except FileExistsError as error:
        raise ConfigError(str(error)) from error
    print(
        f"{folder}: {counts['train']} train and {counts['validation']} validation documents, "
        f"{counts['characters'] / 1e6:.1f} M characters, tokenizer of {vocab_size} pieces in {folder / 'tokenizer'}"
    )


data = app.group("data", "Download a data set, or hash the batches that a run trains on.")


@data.command("digest")
def data_digest(
    config: Config,
    overrides: Overrides = (),
    steps: int = 10,
    ranks: int = 1,
    resume_at: Steps = (),
    resume_ranks: Steps = (),
    json: bool = False,
) -> None:
    """Run the data loaders without a model, and print the SHA-256 of each global batch.

    Two configs that print the same hashes train on the same batches in the same order.

    Args:
        config: TOML file of the run.
        overrides: options that replace keys of the config, such as --training.dataset_path DIR --stream.prefetch 0.
        steps: number of global batches.
        ranks: number of data-parallel ranks.
        resume_at: steps after which all ranks stop and new ranks resume from the saved positions. The default is never.
        resume_ranks: number of new ranks after each step of --resume-at.
        json: print one JSON object with hashes, bytes_read, files_read, read_amplification and counters.
    """
    import dataclasses
    from json import dumps

    from titan_disp.config.load import load_config
    from titan_disp.data.digest import digest

    if (
        len(resume_at) != len(resume_ranks)
        or list(resume_at) != sorted(set(resume_at))
        or any(j > steps for j in resume_at)
    ):
        raise ConfigError(
            f"--resume-at is {list(resume_at)} and --resume-ranks is {list(resume_ranks)}, expected lists of equal "
            f"length, with ascending steps up to --steps {steps}"
        )
    job_config = load_config(["--job.config_file", config, *overrides])
    result = digest(job_config, steps, [(0, ranks), *zip(resume_at, resume_ranks, strict=True)])
    if json:
        print(dumps(dataclasses.asdict(result)))
        return
    for step, sha256 in enumerate(result.hashes, start=1):
        print(f"{step:6}  {sha256}")
    for rank, (files, count) in enumerate(zip(result.files_read, result.bytes_read, strict=True)):
        print(f"rank {rank}: {counted(files, 'file')}, {count:,} bytes")
    print(f"read amplification {result.read_amplification:.3f}")
    print("  ".join(f"{name}: {value:,g}" for name, value in result.counters.items()))


@data.command("fetch")
def data_fetch(
    folder: Annotated[Path, Positional, arg(metavar="FOLDER")],
    dataset: str = "c4",
    shards: OptionalStr = None,
    split: Literal["both", "train", "validation"] = "both",
    workers: int = 4,
) -> None:
    """Download C4 or another data set from the Hugging Face hub.

    The size and the SHA-256 of each file are checked. Run the same command again to resume an interrupted download.

    Args:
        folder: folder to download to. Set training.dataset_path to it in later runs.
        dataset: c4, hf:OWNER/NAME, hf:OWNER/NAME:CONFIGURATION or hf:OWNER/NAME:CONFIGURATION:SPLIT. Set
            training.dataset to the same name in later runs.
        shards: numbers of the training files to download, such as 0-63 or 0-3,17. If the data set has a single split,
            the numbers count its files. The default is all files (C4 has 1024, about 327 GB).
        split: split to download, unless the data set's name includes it. "both" also downloads the validation split, if
            there is one.
        workers: number of parallel downloads.
    """
    from titan_disp.data.mirror import fetch, parse_shards

    left = fetch(folder, dataset, split, parse_shards(shards), workers)
    if left:
        print("\n".join(left), file=sys.stderr)
        raise ConfigError(f"{counted(len(left), 'file')} could not be fetched; run the same command again")
    print(f"{folder} is complete: training.dataset = {dataset!r}, training.dataset_path = {str(folder)!r}")


@app.command("train")
def train(
    config: Config,
    overrides: Overrides = (),
    nproc: OptionalInt = None,
) -> None:
    """Train on this machine, on all of its GPUs, or on the CPU if there is none.

    This runs titan_disp.train under torchrun. titan-disp config and docs/configuration.md list all keys of the config.

    Args:
        config: TOML file of the run.
        overrides: options that replace keys of the config, such as --training.steps 20 --dispersion.no-enabled
            --dispersion.layers 1 2.
        nproc: number of ranks. The default is one per GPU, or 1 without a GPU.
    """
    from titan_disp.cluster.launch import launch

    raise SystemExit(launch(config, list(overrides), nproc))


@app.command("config")
def config(
    name: Annotated[str | None, Positional, arg(metavar="[NAME]", help_behavior_hint="(optional)")] = None,
    markdown: bool = False,
) -> None:
    """Print the keys of the config with their types, defaults and descriptions.

    Args:
        name: a section such as dispersion, or a key such as dispersion.coeff or seq_len, of titan-disp or TorchTitan.
            The default is all keys of titan-disp and the most common ones of TorchTitan.
        markdown: print the page docs/configuration.md.
    """
    from titan_disp.config import reference

    if markdown and name is not None:
        raise ConfigError("--markdown prints the whole page: leave out the name")
    print(reference.markdown() if markdown else reference.reference(name) + "\n", end="", flush=True)


@app.command("plan")
def plan(
    config: Config,
    overrides: Overrides = (),
    nodes: int = 1,
    gpus_per_node: int = 8,
    gpu: str = "H100",
    mfu: float = 0.4,
    node_bandwidth: OptionalFloat = None,
    network_bandwidth: OptionalFloat = None,
    storage_bandwidth: float = 2.0,
    strict: bool = False,
    json: bool = False,
) -> None:
    """Predict a run's mesh, batches, steps, memory, communication and days before it is queued.

    This needs no data, no tokenizer and no GPU.

    Args:
        config: TOML file of the run.
        overrides: options that replace keys of the config, such as --training.local_batch_size 3.
        nodes: number of nodes.
        gpus_per_node: number of GPUs per node, with one rank each. Each of the two dies (GCDs) of an MI250X counts as a
            GPU.
        gpu: kind of GPU: A100, H100, H200, MI250X-GCD or MI300X.
        mfu: fraction of the GPU's peak bf16 FLOP/s that training is assumed to reach (model FLOPs utilization).
        node_bandwidth: GB/s from a GPU to the others of its node. The default is the vendor's peak
            (titan_disp/cluster/cost.py).
        network_bandwidth: GB/s from a GPU to other nodes. The default is 50 per H100, H200 or MI300X, 25 per A100, and
            12.5 per MI250X-GCD. slurm/preflight.sbatch measures the bandwidth of a whole node. Divide it by the number
            of GPUs per node.
        storage_bandwidth: GB/s that all ranks together write to the run folder. The default is a guess.
        strict: fail, rather than warn, if the data or the tokenizer is missing.
        json: print one JSON object.
    """
    import dataclasses
    from json import dumps

    from titan_disp.cluster.plan import make_plan, render
    from titan_disp.config.load import load_config

    job_config = load_config(["--job.config_file", config, *overrides])
    made = make_plan(
        job_config,
        nodes,
        gpus_per_node,
        gpu,
        mfu,
        strict=strict,
        node_bandwidth=None if node_bandwidth is None else node_bandwidth * 1e9,
        network_bandwidth=None if network_bandwidth is None else network_bandwidth * 1e9,
        storage_bandwidth=storage_bandwidth * 1e9,
    )
    print(dumps(dataclasses.asdict(made)) if json else render(made))


@app.command("preflight")
def preflight(
    config: Config,
    overrides: Overrides = (),
    ranks: int = 1,
    flavor: OptionalStr = None,
    seq_len: OptionalInt = None,
) -> None:
    """Run one training step as rank 0 of the whole job, with fake communication and random tokens.

    Without a GPU, the model and the sequences are small. The report lists all changes to the config. To check the nodes
    of a cluster, submit slurm/preflight.sbatch.

    Args:
        config: TOML file of the run.
        overrides: options that replace keys of the config, such as --training.local_batch_size 3.
        ranks: number of ranks of the whole job.
        flavor: size of the model (model.flavor). The default is the config's on a GPU, and a small one without a GPU.
        seq_len: tokens per sequence. The default is the config's on a GPU, and about 128 without a GPU.
    """
    from titan_disp.cluster.preflight import preflight as run

    print("\n".join(run(["--job.config_file", config, *overrides], ranks, flavor, seq_len).lines()))


@app.command("submit")
def submit(
    config: Config,
    overrides: Overrides = (),
    nodes: int = 1,
    gpus_per_node: int = 8,
    gpu: str = "H100",
    site: str = "generic",
    sbatch: Sbatch = (),
    dry_run: bool = False,
) -> None:
    """Print the plan of a run, then submit it to SLURM (slurm/pretrain.sbatch).

    Args:
        config: TOML file of the run.
        overrides: options that replace keys of the config, such as --training.steps 20.
        nodes: number of nodes.
        gpus_per_node: number of GPUs to request per node. 0 requests none, for nodes without GPUs.
        gpu: kind of GPU for the plan: A100, H100, H200, MI250X-GCD or MI300X.
        site: settings of your cluster: the name of a file in slurm/sites without .sh, or a path.
        sbatch: further options for sbatch without dashes, such as --sbatch time=24:00:00 account=abc partition=gpu.
        dry_run: print the sbatch command instead of running it.
    """
    from titan_disp.cluster.submit import submit as run

    raise SystemExit(run(config, list(overrides), nodes, gpus_per_node, gpu, site, list(sbatch), dry_run))


@app.command("condensation")
def condensation(
    targets: Annotated[tuple[str, ...], Positional, arg(metavar="[TARGET ...]", help_behavior_hint="(optional)")],
    out: Path,
    text: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="(required, or --dataset)")] = None,
    dataset: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(required, or --text)")] = None,
    text_field: str = "text",
    sequences: int = 32,
    max_length: int = 512,
    seed: int = 0,
    contiguous: bool = False,
    special_tokens: bool = False,
    all_steps: bool = False,
    family: Annotated[tuple[str, ...], arg(metavar="NAME=TARGET,… ...", help_behavior_hint="(optional)")] = (),
    pair: Annotated[tuple[str, ...], arg(metavar="BASE,OTHER ...", help_behavior_hint="(optional)")] = (),
    tokenizer: OptionalPath = None,
    batch_size: int = 8,
    device: str = "cpu",
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32",
    trust_remote_code: bool = False,
) -> None:
    """Measure and draw the embedding condensation of trained models, layer by layer, on the same text.

    Condensation is measured by the cosines between the embeddings of a sequence's tokens. To measure as in the paper
    (arXiv 2602.00217), use --sequences 100 --contiguous --special-tokens.

    Args:
        targets: models to measure. A target is RUN (the newest checkpoint of a run folder), RUN/STEP, a folder of a
            Hugging Face causal language model, or MODEL or MODEL@REVISION of the Hugging Face hub, such as gpt2. If the
            hub does not answer, the local cache is used. Several revisions of a model are drawn over training.
        out: folder for NAME.npz, metrics.json, metrics.csv and the pictures. Files of the same names are overwritten.
        text: file of plain UTF-8 text, or of documents, such as .json.gz, .jsonl or .parquet.
        dataset: folder as for training.dataset_path, of which the validation split is used, glob, or data set of the hub,
            such as hf:OWNER/NAME.
        text_field: field of JSON documents, or column of Parquet files, that holds the text.
        sequences: number of randomly sampled sequences.
        max_length: tokens per sequence, or fewer if a model has fewer positions.
        seed: seed of the sample.
        contiguous: start each sequence at a random place of the text. By default, sequences are cut from shuffled,
            joined pieces of it.
        special_tokens: give each sequence the special tokens that the tokenizer puts around a text.
        all_steps: measure all checkpoints of each RUN.
        family: models of several sizes, as NAME=TARGET,TARGET,…. They are measured too. The rank correlations between
            cosine and depth (Spearman's ρ and Kendall's τ) are drawn against the number of parameters.
        pair: two models to compare, as BASE,OTHER, such as a base model and a distilled one. They are measured too. The
            same rank correlations are drawn side by side.
        tokenizer: folder of a tokenizer that replaces each model's own.
        batch_size: sequences per forward pass.
        device: cpu, cuda, cuda:1, or auto, which spreads a Hugging Face model over all GPUs (needs accelerate).
        dtype: dtype of the weights and activations. auto keeps the saved one. Cosines are computed in float64.
        trust_remote_code: run the Python code that comes with a model if transformers does not know the model.
    """
    from titan_disp.lab.inspection.command import Sampling
    from titan_disp.lab.inspection.command import condensation as run

    sampling = Sampling(sequences, max_length, seed, contiguous, special_tokens)
    run(
        targets,
        text,
        dataset,
        out,
        sampling,
        all_steps=all_steps,
        families=family,
        pairs=pair,
        tokenizer=tokenizer,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        text_field=text_field,
    )


@app.command("report")
def report(
    runs: Annotated[tuple[str, ...], Positional, arg(metavar="RUN ...", help_behavior_hint="(required)")],
    out: Path = Path("report.html"),
) -> None:
    """Write an HTML page that shows or compares the losses, condensation, restarts and configs of runs.

    The runs may still be training.

    Args:
        runs: run folders (job.dump_folder), or NAME=RUN,RUN,… for runs that differ only in their seeds. Curves show the
            mean of such a group and a band around it. Runs whose configs differ only in their seeds are grouped
            automatically.
        out: file of the page, which needs no other file and no network.
    """
    from titan_disp.lab.report.page import write_report

    written = write_report(runs, out)
    print(f"{written}: {written.stat().st_size / 1e6:.1f} MB")


@app.command("export")
def export(
    target: Annotated[str, Positional, arg(metavar="TARGET")],
    dest: Annotated[Path, Positional, arg(metavar="FOLDER")],
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    max_shard_size: str = "5GB",
    tokenizer: OptionalPath = None,
) -> None:
    """Export a run's model to a Hugging Face folder.

    The folder has safetensors, the config, the tokenizer and a model card. This needs no GPU.

    Args:
        target: RUN (the newest checkpoint of a run folder) or RUN/STEP.
        dest: folder to write. It must be empty or not exist.
        dtype: dtype of the weights.
        max_shard_size: largest size of one safetensors file.
        tokenizer: folder of the tokenizer. The default is the path in the run's config.
    """
    from titan_disp.lab.export.export import export as run

    saved = run(target, dest, dtype, max_shard_size, tokenizer)
    print(f"{saved.name} is in {dest}: load it with AutoModelForCausalLM.from_pretrained({str(dest)!r})")


@app.command("checkpoint")
def checkpoint(run: Annotated[Path, Positional, arg(metavar="RUN")], step: OptionalInt = None) -> None:
    """List a run's checkpoints, and verify all of their bytes.

    This needs no GPU, and the run may be training. The exit status is 1 if a checkpoint is damaged. Checkpoints that
    the run has already set aside as damaged (damaged-N) do not count.

    Args:
        run: the run's folder (job.dump_folder).
        step: step of the only checkpoint to verify. The default is all checkpoints.
    """
    from titan_disp.run.inventory import inventory

    damaged = False
    for found in inventory(run, step):
        print(found.line(), flush=True)
        damaged |= found.damaged
    raise SystemExit(1 if damaged else 0)


@app.command("generate")
def generate(
    target: Annotated[str, Positional, arg(metavar="TARGET")],
    prompt: Annotated[str, Positional, arg(metavar="PROMPT")],
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    tokenizer: OptionalPath = None,
) -> None:
    """Continue a text on the CPU with the model of a run or an exported model.

    Args:
        target: RUN (the newest checkpoint of a run folder), RUN/STEP, or a Hugging Face folder.
        prompt: beginning of the text. "" begins a new document.
        max_new_tokens: largest number of tokens to generate. The text also ends at the sequence length of training.
        temperature: temperature of the sampling. 0 always takes the most probable token.
        top_k: number of most probable tokens to sample from. 0 means all.
        seed: seed of the sampling.
        tokenizer: folder of the tokenizer. The default is the path in the run's config.
    """
    from titan_disp.lab.export.generate import generate as run

    print(run(target, prompt, max_new_tokens, temperature, top_k, seed, tokenizer))


@app.command("evaluate")
def evaluate(
    models: Annotated[tuple[str, ...], Positional, arg(metavar="MODEL ...", help_behavior_hint="(required)")],
    tasks: Annotated[tuple[str, ...], arg(metavar="TASK ...")] = ("paper",),
    limit: OptionalInt = None,
    num_fewshot: OptionalInt = None,
    batch_size: int | Literal["auto"] = "auto",
    device: OptionalStr = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    seed: int = 0,
    include_path: OptionalPath = None,
    out: Path = Path("evaluation"),
    protocol: Literal["paper", "authors-qwen3", "authors-gpt2"] = "paper",
) -> None:
    """Run lm-evaluation-harness on models, and compare each with the first one.

    Models are compared document by document, and over several seeds.

    Args:
        models: folders of Hugging Face models, such as titan-disp export writes, models of the hub, RUN (the newest
            checkpoint of a run folder), RUN/STEP, or NAME=MODEL,MODEL,… for models that differ only in their seeds.
        tasks: names of the harness's tasks, groups or tags. "paper" stands for the ten tasks of arXiv 2602.00217.
        limit: number of documents per task (for MMLU, per subject), from the first on. The default is that of
            --protocol.
        num_fewshot: number of examples in the prompt. The default is that of --protocol for the paper's ten tasks, and
            the task's own for others.
        batch_size: sequences per batch. auto takes the largest batch that fits on a GPU, or 8 on a CPU.
        device: a device such as cpu or cuda:1. The default is the GPU, or the CPU without one.
        dtype: dtype of the weights. auto keeps the saved one.
        seed: seed for the choice of examples.
        include_path: folder with your own task files. The default is none.
        out: folder for results.json, samples.jsonl, table.md and table.csv. It must not hold an earlier evaluation.
        protocol: number of documents and examples for the paper's ten tasks. "paper" takes all documents, and five
            examples or none. The authors' scripts have two protocols: "authors-qwen3" takes 200 documents, and five
            examples or none. "authors-gpt2" takes 500 documents, and one example or none.
    """
    from titan_disp.lab.evaluate.evaluation import evaluate as run

    run(models, tasks, limit, num_fewshot, batch_size, device, dtype, seed, include_path, out, protocol)


sweep = app.group("sweep", "Train or submit the runs of a sweep, or compare them.", others=["a TOML file"])


@sweep.command("run")
def sweep_run(
    file: Annotated[Path, Positional, arg(metavar="FILE")],
    jobs: int = 1,
    nproc: int = 1,
    submit: bool = False,
    nodes: int = 1,
    gpus_per_node: int = 8,
    gpu: str = "H100",
    site: str = "generic",
    sbatch: Sbatch = (),
    dry_run: bool = False,
) -> None:
    """Train all unfinished runs of a sweep on this machine, or submit them as an array of SLURM jobs.

    Each run is a point of the sweep. titan-disp sweep FILE is short for this command. Run it again to continue after an
    interruption. The exit status is 0 if all points are finished or submitted.

    Args:
        file: TOML file of the sweep (docs/sweeps.md).
        jobs: number of points that train at the same time. With --submit, number of tasks of the array.
        nproc: ranks per point on this machine.
        submit: submit an array of jobs (slurm/sweep.sbatch) instead of training here. The options below apply to it.
        nodes: nodes per point.
        gpus_per_node: number of GPUs to request per node. 0 requests none, for nodes without GPUs.
        gpu: kind of GPU for the plan: A100, H100, H200, MI250X-GCD or MI300X.
        site: settings of your cluster: the name of a file in slurm/sites without .sh, or a path.
        sbatch: further options for sbatch without dashes, such as --sbatch time=24:00:00 account=abc cpus-per-task=8.
        dry_run: print the sbatch command instead of running it.
    """
    from titan_disp.lab.sweeps.definition import read_sweep

    found = read_sweep(file)
    if submit:
        from titan_disp.lab.sweeps.folder import submit as run_submit

        raise SystemExit(run_submit(found, jobs, nodes, gpus_per_node, gpu, site, sbatch, dry_run))
    from titan_disp.lab.sweeps.local import run, summary

    results = run(found, jobs, nproc)
    print("\n".join(summary(results)))
    raise SystemExit(int(any(result.outcome != "finished" for result in results)))


@sweep.command("table")
def sweep_table(
    file: Annotated[Path, Positional, arg(metavar="FILE")],
    against: OptionalStr = None,
    metric: OptionalStr = None,
    out: OptionalPath = None,
) -> None:
    """Compare the conditions of a sweep: means over seeds, and differences to one condition, paired by seed.

    A condition is all points that differ only in their seeds. The runs may still be training.

    Args:
        file: TOML file of the sweep (docs/sweeps.md).
        against: name of the condition that the others are compared with. The default is the file's
            sweep.against. Without either, there is no comparison.
        metric: metric of each run after its last step: validation, cross_entropy, ce, loss, dispersion, grad_norm,
            spearman or kendall; or mean_cosine, std_cosine, mean_angle or effective_rank, each with a part such as
            mean_cosine.middle_blocks. The default is the file's sweep.metric, or else the first of validation,
            cross_entropy and ce that a run has.
        out: folder for table.md, table.csv, values.csv and table.png. The default is the sweep's folder.
    """
    from titan_disp.lab.sweeps.comparison import write_table
    from titan_disp.lab.sweeps.definition import read_sweep

    print(write_table(read_sweep(file), out, metric, against), end="")


def _split_overrides(argv: Sequence[str]) -> list[str]:
    """Move options for keys of the config behind ``--``, so that tyro passes them on unchanged.

    These options have a dot in their name. A word that is not an option (``0.5``, ``-1``) belongs to the previous one.
    """
    own: list[str] = []
    theirs: list[str] = []
    current = own
    for word in argv:
        if word.startswith("--"):
            current = theirs if "." in word.partition("=")[0] else own
        current.append(word)
    return [*own, *(["--", *theirs] if theirs else [])]


def _begins_with_a_file(words: Sequence[str]) -> bool:
    """Return whether the words after ``sweep`` are those of ``sweep run``: a file, or options before it.

    A word with a dot or a slash means a file even if there is none, for the sake of the message.
    """
    if not words or words[0] in ("run", "table", "-h", "--help"):
        return False
    return words[0].startswith("-") or bool(set("./") & set(words[0])) or Path(words[0]).is_file()


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # Help and tables have characters that a terminal may not have.
    argv = sys.argv[1:]
    if argv[:1] in (["train"], ["plan"], ["submit"], ["preflight"]) or argv[:2] == ["data", "digest"]:
        argv = _split_overrides(argv)
    if argv[:1] == ["sweep"] and _begins_with_a_file(argv[1:]):
        argv = ["sweep", "run", *argv[1:]]
    try:
        app.cli(prog="titan-disp", args=argv)
    except UserError as error:
        print(f"titan-disp: error: {error}", file=sys.stderr)
        sys.exit(EXIT_CODE)
    except BrokenPipeError:
        # In `titan-disp config | head`, head stops reading. Python would print an error when it closes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
