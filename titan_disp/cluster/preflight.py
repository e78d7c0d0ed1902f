"""A preflight runs one real step of rank 0 of the whole mesh in one process, before a user requests hundreds of GPUs.

It finds what ``titan_disp.config_checks`` cannot find: the model cannot be built or sharded, or a step fails.
``slurm/preflight.sbatch`` is another thing: it checks the nodes, by ``node_health``.

TorchTitan's trainer builds the mesh of all ranks, and shards, computes, clips and steps as rank 0 would. Only the
communication is fake: with ``comm.mode = "fake_backend"``, collectives return at once with this rank's values. Losses
and norms are therefore meaningless and are not checked. A preflight needs neither data nor a tokenizer, and uses
neither the checkpoints nor the run folder of ``titan_disp.train``.

The step runs as ``python -m titan_disp.cluster.preflight``, because a process group would stay in the caller's process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

import titan_disp.plugin  # noqa: F401 — the model's spec and the device type, whatever the config imports
from titan_disp import cpu
from titan_disp.cluster.hub_requests import hub_warnings
from titan_disp.cluster.preflight_config import Reduced, reduce
from titan_disp.config import load_config
from titan_disp.config_checks import check_config
from titan_disp.errors import ConfigError
from titan_disp.model_overrides import named
from titan_disp.registry import args_of
from titan_disp.wording import counted

TIMEOUT = 1800  # seconds; compiling the full model takes minutes
LAST_LINES = 15  # lines of a failed step's stderr in the message


@dataclass(frozen=True)
class Report:
    """Hold the result of one step of rank 0.

    Attributes:
        config: path of the TOML file.
        ranks: number of ranks of the whole job.
        reduced: changes to the config for this step, as "key old → new".
        device: name of the device, or CPU.
        flavor: flavor of the model in this step.
        local_batch_size, seq_len: sequences per microbatch and tokens per sequence in this step.
        mesh: size of every dimension of the mesh with more than one rank.
        accumulation: number of microbatches in the step.
        parameters: number of the model's parameters; a tied embedding counts once.
        own_parameters: elements of them that rank 0 holds.
        seconds: duration of the step, with compilation if it is on.
        peak_bytes: peak of allocated GPU memory up to the end of the step; on a CPU, the process's high-water mark.
        warnings: warnings about things that a step does not show.
    """

    config: str
    ranks: int
    reduced: list[str]
    device: str
    flavor: str
    local_batch_size: int
    seq_len: int
    mesh: dict[str, int]
    accumulation: int
    parameters: int
    own_parameters: int
    seconds: float
    peak_bytes: int
    warnings: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Render the report for people."""
        on_cpu = self.device == "CPU"
        memory = (
            "high-water mark of the whole process, Python and PyTorch included"
            if on_cpu
            else "allocated, without the GPU's context and communication buffers"
        )
        microbatches = counted(self.accumulation, "microbatch", "microbatches")
        tokens = f"{self.local_batch_size} × {self.seq_len:,} tokens"
        rows = [
            ("preflight", f"{self.config}, one step of rank 0 of {self.ranks:,} on {self.device}"),
            ("mesh", ", ".join(f"{name} {size}" for name, size in self.mesh.items()) or "one rank"),
            ("step", f"{microbatches} of {tokens}, {self.flavor}, in {self.seconds:.1f} s"),
            ("parameters", f"{self.parameters:,}, of which rank 0 holds {self.own_parameters:,}"),
            ("memory", f"{self.peak_bytes / 1e9:.2f} GB: {memory}"),
            *(("reduced" if i == 0 else "", change) for i, change in enumerate(self.reduced)),
            *(("warning", warning) for warning in self.warnings),
            ("passed", "the step ran; its numbers are not checked, because collectives are fake"),
        ]
        return [f"{name:<11} {text}" for name, text in rows]


def preflight(argv: Sequence[str], ranks: int, flavor: str | None = None, seq_len: int | None = None) -> Report:
    """Check a config for ``ranks`` ranks, then run one step of rank 0 in its own process.

    Args:
        argv: TorchTitan's arguments.
        ranks: number of ranks of the whole job.
        flavor: flavor for the step. The default is the config's on an accelerator, and otherwise the smallest one that
            fits the mesh.
        seq_len: tokens per sequence. The default is the config's on an accelerator, and otherwise about 128.

    Raises:
        ConfigError: The unreduced config cannot work on so many ranks, or the step fails. The message then has the last
            lines of its output.
    """
    whole, reduced = prepare(argv, ranks, flavor, seq_len)
    with tempfile.TemporaryDirectory(prefix="titan-disp-preflight-") as folder:
        measured = _run(list(argv), ranks, flavor, seq_len, Path(folder))
    job = reduced.job_config
    return Report(
        config=job.job.config_file or "the config",
        ranks=ranks,
        reduced=reduced.changes,
        flavor=named(job.model.flavor, job.model.overrides),  # type: ignore[attr-defined]
        local_batch_size=job.training.local_batch_size,
        seq_len=job.training.seq_len,
        warnings=hub_warnings(whole, ranks),
        **measured,
    )


def prepare(argv: Sequence[str], ranks: int, flavor: str | None, seq_len: int | None) -> tuple[JobConfig, Reduced]:
    """Check the config and its reduced form for one step, and return both.

    Raises:
        ConfigError: One of the two cannot work.
    """
    job_config = load_config(argv)
    check_config(job_config, ranks)
    reduced = reduce(job_config, ranks, flavor, seq_len)
    check_config(reduced.job_config, ranks)
    return job_config, reduced


def _run(argv: list[str], ranks: int, flavor: str | None, seq_len: int | None, folder: Path) -> dict[str, Any]:
    """Run ``one_step`` in a process and return its measurements."""
    command = [sys.executable, "-m", "titan_disp.cluster.preflight", "--ranks", str(ranks), "--folder", str(folder)]
    command += ["--flavor", flavor] if flavor is not None else []
    command += ["--seq-len", str(seq_len)] if seq_len is not None else []
    # Inside torchrun or a SLURM step, the process is rank 0 of the fake ranks all the same.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    # This is torchrun's default. On busy cores, threads would wait for each other in every small operation of the step.
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment |= {"NGPU": str(ranks), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
    try:
        done = subprocess.run(command + argv, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"preflight: the step did not end within {TIMEOUT} s") from error
    if done.returncode:
        end = "\n".join(f"  {line}" for line in done.stderr.strip().splitlines()[-LAST_LINES:])
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        raise ConfigError(f"preflight: the step of rank 0 of {ranks:,} failed ({how}):\n{end}")
    return json.loads((folder / "measured.json").read_text())


class RandomTokens(BaseDataLoader):
    """Repeat one microbatch forever, in the real loader's form: ({"input": [local_batch, seq_len]}, labels), int64."""

    def __init__(self, vocab_size: int, local_batch_size: int, seq_len: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocab_size, (local_batch_size, seq_len + 1), generator=generator)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            yield {"input": self.tokens[:, :-1]}, self.tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


@contextmanager
def synthetic_inputs(job_config: JobConfig) -> Iterator[None]:
    """Give the registered spec random tokens as data, and no tokenizer, within this context."""
    spec = get_train_spec(job_config.model.name)
    before = spec.build_tokenizer_fn, spec.build_dataloader_fn
    training, vocab_size = job_config.training, args_of(job_config).vocab_size

    def build_data(**kwargs: Any) -> RandomTokens:
        return RandomTokens(vocab_size, training.local_batch_size, training.seq_len)

    spec.build_tokenizer_fn, spec.build_dataloader_fn = None, build_data
    try:
        yield
    finally:
        spec.build_tokenizer_fn, spec.build_dataloader_fn = before


def one_step(job_config: JobConfig) -> dict[str, Any]:
    """Build the trainer in this process and take one step. Returns the measured fields of ``Report``."""
    with synthetic_inputs(job_config):
        trainer = Trainer(job_config)
    monitor = trainer.metrics_processor.device_memory_monitor
    monitor.reset_peak_stats = lambda: None  # type: ignore[method-assign] # at the end of every step's log
    trainer.step = 1
    start = time.perf_counter()
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    optimizers: Any = trainer.optimizers
    if optimizers.bad_terms:  # fake communication gave an infinite value: step anyway, to measure Adam's memory
        optimizers.inner.step()
    if not cpu.active():
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - start
    (model,) = trainer.model_parts
    weights = list(model.parameters())
    local = [getattr(w, "to_local", lambda w=w: w)() for w in weights]
    meshes = trainer.parallel_dims.get_all_one_dimensional_meshes()
    measured = {
        "device": monitor.device_name,
        "mesh": {name: mesh.size() for name, mesh in meshes.items() if name != "efsdp"},  # efsdp is for experts
        "accumulation": trainer.gradient_accumulation_steps,
        "parameters": sum(w.numel() for w in weights),
        "own_parameters": sum(w.numel() for w in local),
        "seconds": seconds,
        "peak_bytes": cpu.high_water_mark() if cpu.active() else torch.accelerator.max_memory_allocated(),
    }
    trainer.close()
    dist.destroy_process_group()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for measured.json and what the step writes")
    parser.add_argument("--flavor")
    parser.add_argument("--seq-len", type=int)
    args, rest = parser.parse_known_args()
    init_logger()
    _, reduced = prepare(rest, args.ranks, args.flavor, args.seq_len)
    reduced.job_config.job.dump_folder = str(args.folder / "run")
    measured = one_step(reduced.job_config)
    (args.folder / "measured.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
