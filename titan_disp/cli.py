"""``titan-disp …``: thin; each subcommand calls one function of a room."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from titan_disp.errors import EXIT_CODE, ConfigError

app = tyro.extras.SubcommandApp()


@app.command(name="sample-data")
def sample_data(folder: Annotated[Path, tyro.conf.Positional], vocab_size: int = 2048) -> None:
    """Write a C4-shaped sample corpus and a SentencePiece tokenizer from the texts of this Python installation.

    Args:
        folder: where to write; an earlier sample there is kept as it is.
        vocab_size: pieces of the tokenizer.
    """
    from titan_disp.data.sample import is_complete, write_sample

    if is_complete(folder):
        print(f"{folder} holds the sample corpus already")
        return
    try:
        counts = write_sample(folder, vocab_size)
    except FileExistsError as error:
        raise ConfigError(str(error)) from error
    print(
        f"{folder}: {counts['train']} train and {counts['validation']} validation documents, "
        f"{counts['characters'] / 1e6:.1f} M characters, tokenizer of {vocab_size} pieces in {folder / 'tokenizer'}"
    )


data = tyro.extras.SubcommandApp()
app.command(data, name="data", help="Look into the data stream; fetch data.")


@data.command(name="digest")
def data_digest(
    config: Annotated[str, tyro.conf.Positional],
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    steps: int = 10,
    ranks: int = 1,
    resume_at: tuple[int, ...] = (),
    resume_ranks: tuple[int, ...] = (),
    json: bool = False,
) -> None:
    """Drive the real loaders of N ranks without a model and print one sha256 per global batch.

    Args:
        config: TOML file.
        overrides: TorchTitan's options, such as --training.dataset_path DIR --stream.prefetch 0.
        steps: global batches.
        ranks: data-parallel ranks.
        resume_at: steps at which all ranks stop and others resume from their positions.
        resume_ranks: how many, at each of them.
        json: print one JSON object (hashes, bytes_read, files_read, read_amplification, counters) and nothing else.
    """
    import dataclasses
    from json import dumps

    from titan_disp.config import load_config
    from titan_disp.data.digest import digest

    if (
        len(resume_at) != len(resume_ranks)
        or list(resume_at) != sorted(set(resume_at))
        or any(j > steps for j in resume_at)
    ):
        raise ConfigError(
            "--resume-at and --resume-ranks need as many numbers, the steps ascending and at most --steps"
        )
    job_config = load_config(["--job.config_file", config, *overrides])
    result = digest(job_config, steps, [(0, ranks), *zip(resume_at, resume_ranks, strict=True)])
    if json:
        print(dumps(dataclasses.asdict(result)))
        return
    for step, sha256 in enumerate(result.hashes, start=1):
        print(f"{step:6}  {sha256}")
    for rank, (files, count) in enumerate(zip(result.files_read, result.bytes_read, strict=True)):
        print(f"rank {rank}: {files} files, {count:,} bytes")
    print(f"read amplification {result.read_amplification:.3f}")
    print("  ".join(f"{name}: {value:,g}" for name, value in result.counters.items()))


@data.command(name="fetch")
def data_fetch(
    folder: Annotated[Path, tyro.conf.Positional],
    dataset: str = "c4",
    shards: str | None = None,
    split: Literal["both", "train", "validation"] = "both",
    workers: int = 4,
) -> None:
    """Mirror C4 or another data set from the Hugging Face hub, with resume and a check of every file's size and sha256.

    Args:
        folder: root of the mirror: training.dataset_path of later runs.
        dataset: training.dataset of later runs: c4, or hf:OWNER/NAME, hf:OWNER/NAME:CONFIGURATION,
            hf:OWNER/NAME:CONFIGURATION:SPLIT.
        shards: of the train files, or of the only split's, such as 0-63 or 0-3,17; default: all (of C4 1024, about 327 GB).
        split: which files, unless the data set's name says it; both: the validation split too, if there is one.
        workers: downloads at a time.
    """
    from titan_disp.data.mirror import fetch, parse_shards

    left = fetch(folder, dataset, split, parse_shards(shards), workers)
    if left:
        print("\n".join(left), file=sys.stderr)
        raise ConfigError(f"{len(left)} files are missing or damaged; the same command goes on where this one stopped")
    print(f"{folder} is complete: training.dataset = {dataset!r}, training.dataset_path = {str(folder)!r}")


@app.command
def train(
    config: Annotated[str, tyro.conf.Positional],
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    nproc: int | None = None,
) -> None:
    """Train on this machine: torchrun around ``-m titan_disp.train``.

    titan-disp config lists the keys that the file and the options can set; so does docs/configuration.md.

    Args:
        config: TOML file.
        overrides: any keys of the config, such as --training.steps 20 --dispersion.no-enabled --dispersion.layers 1 2.
        nproc: ranks; default: one per GPU, or 1 without.
    """
    from titan_disp.launch import launch

    raise SystemExit(launch(config, list(overrides), nproc))


@app.command
def config(name: Annotated[str | None, tyro.conf.Positional] = None, markdown: bool = False) -> None:
    """Print the keys of the config with their types, defaults and descriptions. Imports no PyTorch.

    Args:
        name: a section such as dispersion, or a key such as dispersion.coeff or seq_len, of titan-disp or TorchTitan; default:
            all of titan-disp's keys and the most used ones of TorchTitan.
        markdown: print the page docs/configuration.md.
    """
    from titan_disp import config_reference

    if markdown and name is not None:
        raise ConfigError("--markdown prints the whole page: leave the name out")
    print(config_reference.markdown() if markdown else config_reference.reference(name) + "\n", end="", flush=True)


@app.command
def plan(
    config: Annotated[str, tyro.conf.Positional],
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    nodes: int = 1,
    gpus_per_node: int = 8,
    gpu: str = "H100",
    mfu: float = 0.4,
    node_bandwidth: float | None = None,
    network_bandwidth: float | None = None,
    storage_bandwidth: float = 2.0,
    strict: bool = False,
    json: bool = False,
) -> None:
    """What a run will be, before it is queued: mesh, batches, steps, bytes, FLOPs, days. Needs no data, tokenizer or GPU.

    Args:
        config: TOML file.
        overrides: TorchTitan's options, such as --training.local_batch_size 3.
        nodes: of the cluster.
        gpus_per_node: ranks per node; on MI250X, one per GCD.
        gpu: A100, H100, H200, MI250X-GCD or MI300X.
        mfu: fraction of the GPU's bf16 peak that training reaches.
        node_bandwidth: GB/s that a GPU sends to others of its node; default: the vendor's peak (titan_disp/cluster/hardware.py).
        network_bandwidth: GB/s that a GPU sends to other nodes; default: one 400 Gb/s card per H100, H200 or MI300X, 200 Gb/s per
            A100, 100 Gb/s per MI250X-GCD. slurm/preflight.sbatch measures a whole node's: divide it by the node's GPUs.
        storage_bandwidth: GB/s that all ranks together write to the run folder; the default is a guess.
        strict: missing data or tokenizer is an error, not a warning.
        json: print one JSON object and nothing else.
    """
    import dataclasses
    from json import dumps

    from titan_disp.cluster.plan import make_plan
    from titan_disp.cluster.plan_text import render
    from titan_disp.config import load_config

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


@app.command
def preflight(
    config: Annotated[str, tyro.conf.Positional],
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    ranks: int = 1,
    flavor: str | None = None,
    seq_len: int | None = None,
) -> None:
    """One real step of rank 0 of the config's mesh, here, with fake communication and synthetic tokens.

    Without a GPU the model and the sequence are small; what was reduced is said. For nodes: slurm/preflight.sbatch.

    Args:
        config: TOML file.
        overrides: TorchTitan's options.
        ranks: of the whole job.
        flavor: of the model; default: the config's on a GPU, a small one without.
        seq_len: tokens per sequence; default: the config's on a GPU, 128 without.
    """
    from titan_disp.cluster.preflight import preflight as run

    print("\n".join(run(["--job.config_file", config, *overrides], ranks, flavor, seq_len).lines()))


@app.command
def submit(
    config: Annotated[str, tyro.conf.Positional],
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    nodes: int = 1,
    gpus_per_node: int = 8,
    gpu: str = "H100",
    site: str = "generic",
    sbatch: tuple[str, ...] = (),
    dry_run: bool = False,
) -> None:
    """Print the plan, then submit slurm/pretrain.sbatch (or print the command).

    Args:
        config: TOML file.
        overrides: TorchTitan's options.
        nodes: of the job.
        gpus_per_node: GPUs of each, asked of SLURM; 0: ask for none (nodes without GPUs).
        gpu: for the plan's days and memory, see titan-disp plan.
        site: file of slurm/sites, without .sh, or a path.
        sbatch: further options for sbatch without their dashes, such as --sbatch time=24:00:00 account=abc partition=gpu.
        dry_run: print the command instead of running it.
    """
    from titan_disp.cluster.submit import submit as run

    raise SystemExit(run(config, list(overrides), nodes, gpus_per_node, gpu, site, list(sbatch), dry_run))


@app.command
def condensation(
    targets: Annotated[tuple[str, ...], tyro.conf.Positional],
    out: Path,
    text: Path | None = None,
    dataset: str | None = None,
    sequences: int = 32,
    max_length: int = 512,
    seed: int = 0,
    contiguous: bool = False,
    special_tokens: bool = False,
    all_steps: bool = False,
    family: tuple[str, ...] = (),
    pair: tuple[str, ...] = (),
    tokenizer: Path | None = None,
    batch_size: int = 8,
    device: str = "cpu",
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32",
    trust_remote_code: bool = False,
) -> None:
    """How condensed the embeddings of trained models are, by layer and on the same text: numbers and pictures.

    As the paper measures: --sequences 100 --contiguous --special-tokens.

    Args:
        targets: RUN (its newest checkpoint), RUN/STEP, a folder of a Hugging Face causal language model, or MODEL or
            MODEL@REVISION of the Hugging Face hub, such as gpt2: where the hub does not answer, from the local cache. Several
            revisions of a model are drawn over training.
        out: folder for NAME.npz, metrics.json, metrics.csv and the pictures; files of the same names are overwritten.
        text: plain UTF-8 text, or documents in .json.gz, .jsonl, .parquet, …
        dataset: instead of text: a folder as of training.dataset_path, whose validation split is taken, or a glob, or hf:….
        sequences: how many, a random sample.
        max_length: tokens of a sequence; fewer where a model has fewer positions.
        seed: of the sample.
        contiguous: each sequence is the text from a random place on, rather than cut from shuffled pieces that are joined.
        special_tokens: keep those that a tokenizer puts before or after a text, in every sequence.
        all_steps: all checkpoints of each RUN.
        family: NAME=MODEL,MODEL,… of several sizes: ρ and τ are drawn against the number of parameters. Measured like targets.
        pair: BASE,MODEL such as a base model and a distilled one: ρ and τ are drawn beside each other. Measured like targets.
        tokenizer: folder of a tokenizer to use instead of each model's own.
        batch_size: sequences at a time.
        device: cpu, cuda, cuda:1, or auto: spread a Hugging Face model over all GPUs (needs accelerate).
        dtype: of weights and activations; auto: as they were saved. Cosines are float64 in any case.
        trust_remote_code: run Python code that comes with a model which transformers does not know by itself.
    """
    from titan_disp.inspection.condensation import Sampling
    from titan_disp.inspection.condensation import condensation as run

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
    )


@app.command
def report(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional],
    out: Path = Path("report.html"),
) -> None:
    """One HTML page about one run, or several to compare: losses, condensation, restarts, configs. Also while they train.

    Args:
        runs: run folders (job.dump_folder), or NAME=RUN,RUN,… for seeds of one condition, which curves show as a mean in a band.
            Runs whose configs differ in their seeds only are such seeds without being told.
        out: the page; it needs no other file and no network.
    """
    from titan_disp.report.page import write_report

    written = write_report(runs, out)
    print(f"{written}: {written.stat().st_size / 1e6:.1f} MB")


@app.command
def export(
    target: Annotated[str, tyro.conf.Positional],
    dest: Annotated[Path, tyro.conf.Positional],
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    max_shard_size: str = "5GB",
    tokenizer: Path | None = None,
) -> None:
    """Write a run's model as a Hugging Face folder: safetensors, config, tokenizer, model card. Needs no GPU.

    Args:
        target: RUN (its newest checkpoint) or RUN/STEP.
        dest: the folder to write; must not exist, or be empty.
        dtype: of the weights.
        max_shard_size: of one safetensors file.
        tokenizer: the tokenizer's folder, where the run's config does not lead to it from here.
    """
    from titan_disp.results.export import export as run

    saved = run(target, dest, dtype, max_shard_size, tokenizer)
    print(f"{saved.name} is in {dest}: AutoModelForCausalLM.from_pretrained({str(dest)!r})")


@app.command
def checkpoint(run: Annotated[Path, tyro.conf.Positional], step: int | None = None) -> None:
    """List a run's checkpoints and read them whole to verify them. Needs no GPU; the run may be training.

    The exit status is 1 where a checkpoint is damaged; one that a run has moved aside (damaged-N) is none any more.

    Args:
        run: the run's folder (job.dump_folder).
        step: only this one; default: all.
    """
    from titan_disp.run.inventory import inventory

    damaged = False
    for found in inventory(run, step):
        print(found.line(), flush=True)
        damaged |= found.damaged
    raise SystemExit(1 if damaged else 0)


@app.command
def generate(
    target: Annotated[str, tyro.conf.Positional],
    prompt: Annotated[str, tyro.conf.Positional],
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    tokenizer: Path | None = None,
) -> None:
    """Continue a text with a run's model, or an exported one, on the CPU.

    Args:
        target: RUN (its newest checkpoint), RUN/STEP, or a Hugging Face folder.
        prompt: the beginning; "" for a new document.
        max_new_tokens: at most; the sequence length of training ends the text too.
        temperature: 0 takes the most probable token every time.
        top_k: sample among so many most probable tokens; 0: all.
        seed: of the sampling.
        tokenizer: the tokenizer's folder, where the run's config does not lead to it from here.
    """
    from titan_disp.results.generate import generate as run

    print(run(target, prompt, max_new_tokens, temperature, top_k, seed, tokenizer))


@app.command
def evaluate(
    models: Annotated[tuple[str, ...], tyro.conf.Positional],
    tasks: tuple[str, ...] = ("paper",),
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int | Literal["auto"] = "auto",
    device: str | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    seed: int = 0,
    include_path: Path | None = None,
    out: Path = Path("evaluation"),
    protocol: Literal["paper", "authors-qwen3", "authors-gpt2"] = "paper",
) -> None:
    """Run lm-evaluation-harness on models and compare all with the first one, document by document, and over seeds.

    Args:
        models: folders of Hugging Face models, as titan-disp export writes them, models of the hub, RUN or RUN/STEP; or
            NAME=MODEL,MODEL,… for several seeds of one condition. The first is what others are compared with.
        tasks: names of the harness's tasks, groups or tags; paper: the ten of arXiv 2602.00217.
        limit: documents per task (of MMLU: per subject), the first ones; default: the protocol's.
        num_fewshot: examples in the prompt; default: the protocol's in the paper's ten, or the task's own.
        batch_size: auto: the largest that fits on a GPU, 8 on a CPU.
        device: such as cpu or cuda:1; default: the GPU where there is one.
        dtype: of the weights; auto: as they were saved.
        seed: of the choice of examples.
        include_path: folder with task files of your own.
        out: folder for results.json, samples.jsonl, table.md and table.csv; must not hold an earlier evaluation.
        protocol: documents and examples of the paper's ten tasks. paper: all documents, five examples or none. As the authors'
            scripts: authors-qwen3: 200 documents, five examples or none; authors-gpt2: 500 documents, one example or none.
    """
    from titan_disp.evaluate.evaluation import evaluate as run

    run(models, tasks, limit, num_fewshot, batch_size, device, dtype, seed, include_path, out, protocol)


sweep = tyro.extras.SubcommandApp()
app.command(
    sweep,
    name="sweep",
    help="Many runs from one file: train or submit them (sweep FILE), and compare them (sweep table FILE).",
)


@sweep.command(name="run")
def sweep_run(
    file: Annotated[Path, tyro.conf.Positional],
    jobs: int = 1,
    nproc: int = 1,
    submit: bool = False,
    nodes: int = 1,
    gpus_per_node: int = 8,
    gpu: str = "H100",
    site: str = "generic",
    sbatch: tuple[str, ...] = (),
    dry_run: bool = False,
) -> None:
    """Train all points of a sweep that are not finished, here or as an array of SLURM jobs. Also written titan-disp sweep FILE.

    The same command goes on where an earlier one stopped. The exit status is 0 once all points are finished, or submitted.

    Args:
        file: the sweep's TOML file (docs/sweeps.md).
        jobs: points at a time; with --submit, tasks of the array at a time.
        nproc: ranks of each point, on this machine.
        submit: submit an array of jobs (slurm/sweep.sbatch) instead of training here. The options below are for it.
        nodes: of each point.
        gpus_per_node: GPUs of each, asked of SLURM; 0: ask for none (nodes without GPUs).
        gpu: for the plan's days and memory, see titan-disp plan.
        site: file of slurm/sites, without .sh, or a path.
        sbatch: further options for sbatch without their dashes, such as --sbatch time=24:00:00 account=abc cpus-per-task=8.
        dry_run: print the command instead of running it.
    """
    from titan_disp.sweeps.definition import read_sweep

    found = read_sweep(file)
    if submit:
        from titan_disp.sweeps.submit import submit as run_submit

        raise SystemExit(run_submit(found, jobs, nodes, gpus_per_node, gpu, site, sbatch, dry_run))
    from titan_disp.sweeps.local import run, summary

    results = run(found, jobs, nproc)
    print("\n".join(summary(results)))
    raise SystemExit(int(any(result.outcome != "finished" for result in results)))


@sweep.command(name="table")
def sweep_table(
    file: Annotated[Path, tyro.conf.Positional],
    against: str | None = None,
    metric: str | None = None,
    out: Path | None = None,
) -> None:
    """Compare a sweep's points: means over seeds, and differences to one of them, paired by seed. Also while they train.

    Args:
        file: the sweep's TOML file.
        against: the point (without its seed) that the others are compared with; default: the file's sweep.against, if it has one.
        metric: of each run after its last step: validation, cross_entropy, ce, loss, dispersion, grad_norm, spearman, kendall, or
            mean_cosine, std_cosine, mean_angle, effective_rank, each with a part such as mean_cosine.middle_blocks. Default:
            the first of validation, cross_entropy and ce that a run has.
        out: folder for table.md, table.csv, values.csv and table.png; default: the sweep's.
    """
    from titan_disp.sweeps.definition import read_sweep
    from titan_disp.sweeps.table import write_table

    print(write_table(read_sweep(file), out, metric, against), end="")


def _split_overrides(argv: Sequence[str]) -> list[str]:
    """Everything dotted is TorchTitan's: moved behind ``--`` so that tyro takes it as it stands.

    A word that is no option (``0.5``, ``-1``) belongs to the option before it.
    """
    own: list[str] = []
    theirs: list[str] = []
    current = own
    for arg in argv:
        if arg.startswith("--"):
            current = theirs if "." in arg.partition("=")[0] else own
        current.append(arg)
    return [*own, *(["--", *theirs] if theirs else [])]


def main() -> None:
    argv = sys.argv[1:]
    if argv[:1] in (["train"], ["plan"], ["submit"], ["preflight"]) or argv[:2] == ["data", "digest"]:
        argv = _split_overrides(argv)
    if argv[:1] == ["sweep"] and argv[1:2] and argv[1] not in ("run", "table", "-h", "--help"):
        argv = ["sweep", "run", *argv[1:]]
    try:
        app.cli(prog="titan-disp", args=argv)
    except ConfigError as error:
        print(f"titan-disp: error: {error}", file=sys.stderr)
        sys.exit(EXIT_CODE)
    except (
        BrokenPipeError
    ):  # titan-disp config | head: nobody reads on. Python would complain once more when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
