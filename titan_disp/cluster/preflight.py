"""A preflight runs one real step of rank 0 of the whole mesh in one process, before a
user requests hundreds of GPUs.

A preflight finds errors that ``titan_disp.checks`` cannot find: the model cannot be
built or sharded, or a step fails. Features that one step on this machine cannot run or
does not need are switched off first.

TorchTitan's trainer builds the mesh of all ranks, and shards, computes, clips and steps
as rank 0 would. Only the communication is fake: with ``comm.mode = "fake_backend"``,
collectives return at once with this rank's values. Losses and norms are therefore
meaningless and are not checked. A preflight needs neither data nor a tokenizer, and
uses neither the checkpoints nor the run folder of ``titan_disp.train``.

The step runs as ``python -m titan_disp.cluster.preflight``, because a process group
would stay in the caller's process.
"""

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

# This registers the models and sets the device type, whatever the config imports.
import titan_disp.plugin  # noqa: F401
from titan_disp import cpu
from titan_disp.checks import check_config, check_mesh, check_ranks, config_warnings
from titan_disp.cluster.job_check import hub_warnings
from titan_disp.config.command_options import PreflightOptions
from titan_disp.config.keys import set_value, value_of
from titan_disp.config.load import load_config
from titan_disp.config.types import JobConfig
from titan_disp.data.options import stream_options
from titan_disp.data.stream import Batch, as_batch
from titan_disp.errors import ConfigError, counted
from titan_disp.models.arguments import activation_indices, text_of_flavor
from titan_disp.models.registry import args_of, find_model
from titan_disp.run.dry import WRITERS
from titan_disp.tables import shown
from titan_disp.templates import templates

SEQ_LEN = 128  # tokens per sequence without an accelerator
TIMEOUT = 1800  # seconds; compiling the full model takes minutes
LAST_LINES = 15  # lines of a failed step's stderr in the message


class Reduced:
    """Hold a changed copy of a config, and the changes that make the step smaller than
    the run's steps or different from them.
    """

    def __init__(self, job_config: JobConfig) -> None:
        self.job_config = copy.deepcopy(job_config)
        self.changes: list[str] = []

    def set(self, key: str, new: Any, reason: str = "", *, listed: bool = True) -> None:
        """Set a key of the copy. ``listed``: whether ``changes`` lists the change."""
        old = value_of(self.job_config, key)
        set_value(self.job_config, key, new)
        if listed and old != new:
            self.changes.append(
                f"{key} {shown(old)} → {shown(new)}" + (f": {reason}" if reason else "")
            )


def small_flavor(job_config: JobConfig, ranks: int) -> str:
    """Return the smallest flavor that fits the mesh, with a tied embedding if the
    config's flavor has one, and with an untied one otherwise.
    """
    # tied embeddings change FSDP's groups
    tied = args_of(job_config).enable_weight_tying
    # The flavors are in ascending order of size.
    for name, args in find_model(job_config.model.name).flavors.items():
        if name == job_config.model.flavor:
            break
        other = copy.deepcopy(job_config)
        other.model.flavor = name
        other.model.overrides = {}
        with suppress(ConfigError):
            if args.enable_weight_tying == tied:
                check_mesh(other, ranks)
                return name
    return job_config.model.flavor


def reduce(
    job_config: JobConfig,
    ranks: int,
    flavor: str | None = None,
    seq_len: int | None = None,
) -> Reduced:
    """Return a copy of a checked config, reduced to one step in which other ranks are
    simulated. On a CPU, the model is small, too.
    """
    r = Reduced(job_config)
    _one_step(r)
    if cpu.active():
        for_cpu(r)
        p = r.job_config.parallelism
        unit = p.tensor_parallel_degree * 2 * p.context_parallel_degree
        seq_len = (
            min(job_config.training.seq_len, -(-SEQ_LEN // unit) * unit)
            if seq_len is None
            else seq_len
        )
        flavor = small_flavor(job_config, ranks) if flavor is None else flavor
    if seq_len is not None:
        r.set("training.seq_len", seq_len)
    if flavor is not None:
        r.set("model.flavor", flavor)
        if flavor != job_config.model.flavor:
            r.set("model.overrides", {}, "they are for the config's own flavor")
        try:
            dispersion = r.job_config.dispersion
            activation_indices(
                dispersion.layers, dispersion.final_norm, args_of(r.job_config).n_layers
            )
        except ConfigError:  # the indices are for the config's own model
            r.set("dispersion.layers", "all", f"{flavor} has another number of blocks")
    return r


def _one_step(r: Reduced) -> None:
    """Switch off files and data, and keep the learning rate of the run's first step."""
    job = r.job_config
    for key, value in {
        "lr_scheduler.total_steps": job.lr_scheduler.total_steps or job.training.steps,
        "training.steps": 1,
        "dispersion.warmup_steps": 0,
        "dispersion.decay_steps": 0,
        "budget.tokens": 0,
        "budget.stop_at_tokens": 0,
        "stream.slots": 0,
        "checkpoint.create_seed_checkpoint": False,
        "comm.mode": "fake_backend",
        "metrics.disable_color_printing": True,
    }.items():
        r.set(key, value, listed=False)
    for key in (*WRITERS, "validation.enable"):
        r.set(key, False)
    r.set(
        "parallelism.enable_async_tensor_parallel", False, "it needs real communication"
    )


def for_cpu(r: Reduced) -> None:
    """Switch off what only accelerators support."""
    job = r.job_config
    p = job.parallelism
    t = job.training
    cp = p.context_parallel_degree
    if cp > 1:
        # FSDP shards over data_parallel_shard × context ranks, so the shards keep their
        # size.
        r.set(
            "parallelism.context_parallel_degree",
            1,
            "ring attention needs a GPU; its ranks get other sequences",
        )
        if p.data_parallel_shard_degree != -1:
            r.set(
                "parallelism.data_parallel_shard_degree",
                p.data_parallel_shard_degree * cp,
            )
        if t.global_batch_size != -1:
            r.set(
                "training.global_batch_size",
                t.global_batch_size * cp,
                "the same accumulation",
            )
    if job.activation_checkpoint.mode == "memory_budget" and job.compile.enable:
        r.set(
            "activation_checkpoint.mode", "full", "a memory budget needs the compiler"
        )
    r.set("compile.enable", False)
    if job.optimizer.implementation == "fused":
        r.set("optimizer.implementation", "foreach")
    r.set("model.converters", [], "low precision needs a GPU")
    r.set("training.enable_cpu_offload", False)


@dataclass(frozen=True)
class Report:
    config: str
    ranks: int
    reduced: list[str]  # changes to the config for this step, as "key old → new"
    device: str
    flavor: str
    local_batch_size: int
    seq_len: int
    mesh: dict[str, int]  # dimensions with more than one rank
    accumulation: int
    parameters: int  # a tied embedding counts once
    own_parameters: int  # elements of the parameters that rank 0 holds
    seconds: float  # of the step, including compilation
    # peak of allocated GPU memory up to the end of the step; on a CPU, the process's
    # high-water mark
    peak_bytes: int
    # about problems that a step does not show
    warnings: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        template = templates(__file__).get_template("preflight.txt.j2")
        return template.render(report=self, counted=counted).splitlines()


def preflight(options: PreflightOptions) -> Report:
    """Check a config for all ranks of the job, then run one step of rank 0 in
    another process.

    Raises ConfigError if the unreduced config cannot work on these ranks, or if the step
    fails. In the second case, the message has the last lines of the step's output.
    """
    job_config, reduced = prepare(options)
    with tempfile.TemporaryDirectory(prefix="titan-disp-preflight-") as folder:
        measured = _run(options, Path(folder))
    job = reduced.job_config
    return Report(
        config=job.job.config_file or "the config",
        ranks=options.ranks,
        reduced=reduced.changes,
        flavor=text_of_flavor(job.model.flavor, job.model.overrides),
        local_batch_size=job.training.local_batch_size,
        seq_len=job.training.seq_len,
        warnings=[
            *config_warnings(job_config),
            *hub_warnings(job_config, options.ranks),
        ],
        **measured,
    )


def prepare(options: PreflightOptions) -> tuple[JobConfig, Reduced]:
    """Check the config and its reduced form for one step, and return both."""
    job_config = load_config(options.argv)
    check_ranks(job_config, options.ranks)
    reduced = reduce(job_config, options.ranks, options.flavor, options.seq_len)
    check_config(reduced.job_config, options.ranks)
    return job_config, reduced


def _run(options: PreflightOptions, folder: Path) -> dict[str, Any]:
    ranks = options.ranks
    command = [
        sys.executable,
        "-m",
        "titan_disp.cluster.preflight",
        str(folder),
        json.dumps(asdict(options)),
    ]
    # The process is rank 0 of the fake ranks even if it runs inside torchrun or a SLURM
    # step.
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")
    }
    # This is torchrun's default. On busy cores, threads would wait for each other in
    # every small operation of the step.
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment |= {
        "NGPU": str(ranks),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
    }
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"preflight: the step did not end within {TIMEOUT} s"
        ) from error
    if done.returncode:
        end = "\n".join(
            f"  {line}" for line in done.stderr.strip().splitlines()[-LAST_LINES:]
        )
        how = (
            f"signal {-done.returncode}"
            if done.returncode < 0
            else f"exit status {done.returncode}"
        )
        raise ConfigError(
            f"preflight: the step of rank 0 of {ranks:,} failed ({how}):\n{end}"
        )
    return json.loads((folder / "measured.json").read_text())


class RandomTokens(BaseDataLoader):
    """Repeat one microbatch forever, in the real loader's form (``as_batch``), with
    documents of 256 tokens.
    """

    def __init__(self, vocab_size: int, job_config: JobConfig) -> None:
        generator = torch.Generator().manual_seed(0)
        training = job_config.training
        tokens = torch.randint(
            vocab_size,
            (training.local_batch_size, training.seq_len + 1),
            generator=generator,
        )
        self.rows = [tokens]
        if stream_options(job_config).segments:
            self.rows.append(
                (torch.arange(training.seq_len + 1) // 256).int().expand_as(tokens)
            )

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield as_batch(*self.rows)


@contextmanager
def synthetic_inputs(job_config: JobConfig) -> Iterator[None]:
    """Within this context, the registered spec uses random tokens as data, and no real
    tokenizer.
    """
    spec = get_train_spec(job_config.model.name)
    before = spec.build_tokenizer_fn, spec.build_dataloader_fn
    vocab_size = args_of(job_config).vocab_size

    def build_data(**kwargs: Any) -> RandomTokens:
        return RandomTokens(vocab_size, job_config)

    # With masks, the trainer asserts that there is a tokenizer.
    spec.build_tokenizer_fn = lambda job_config: object()
    spec.build_dataloader_fn = build_data
    try:
        yield
    finally:
        spec.build_tokenizer_fn, spec.build_dataloader_fn = before


def one_step(job_config: JobConfig) -> dict[str, Any]:
    """Return the measured fields of ``Report``, after one step of TorchTitan's trainer."""
    with synthetic_inputs(job_config):
        trainer = Trainer(job_config)
    monitor = trainer.metrics_processor.device_memory_monitor
    # TorchTitan would reset the peaks when it logs the step.
    monitor.reset_peak_stats = lambda: None
    trainer.step = 1
    start = time.perf_counter()
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    optimizers: Any = trainer.optimizers
    optimizers.settle()
    # If fake communication has given an infinite value, the optimizer has skipped its
    # step. It steps here, to measure Adam's memory.
    if optimizers.bad_terms:
        optimizers.inner.step()
    if not cpu.active():
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - start
    (model,) = trainer.model_parts
    weights = list(model.parameters())
    meshes = trainer.parallel_dims.get_all_one_dimensional_meshes()
    measured = {
        "device": monitor.device_name,
        # efsdp is for experts
        "mesh": {name: mesh.size() for name, mesh in meshes.items() if name != "efsdp"},
        "accumulation": trainer.gradient_accumulation_steps,
        "parameters": sum(w.numel() for w in weights),
        "own_parameters": sum(
            getattr(w, "to_local", lambda w=w: w)().numel() for w in weights
        ),
        "seconds": seconds,
        "peak_bytes": cpu.high_water_mark()
        if cpu.active()
        else torch.accelerator.max_memory_allocated(),
    }
    trainer.close()
    dist.destroy_process_group()
    return measured


def main(folder: Path, options: PreflightOptions) -> None:
    init_logger()
    _, reduced = prepare(options)
    reduced.job_config.job.dump_folder = str(folder / "run")
    (folder / "measured.json").write_text(json.dumps(one_step(reduced.job_config)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), PreflightOptions(**json.loads(sys.argv[2])))
