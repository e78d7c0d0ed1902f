"""Run on the GPUs at hand, or in small on a CPU, what docs/verification.md says is not
verified (make gpu).

    python -m benchmarks.gpu --out outputs/gpu

Each check is a process. Its output goes to OUT/NAME.txt and its messages to
OUT/NAME.log, and OUT/summary.txt lists all of them, with those that this machine cannot
run and why. Send the folder with a report; it holds no secrets but the names of the
machine. The exit status is 1 if a check has failed.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from titan_disp.text import duration, markdown_table

ROOT = Path(__file__).parent.parent
# As titan-disp train starts torchrun: not every container resolves localhost.
TORCHRUN = "torch.distributed.run --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --local-addr=127.0.0.1"
LIMIT = 3600  # seconds of one check


@dataclass
class Options:
    out: Path = Path("outputs/gpu")
    """Folder for everything that is found."""
    data: Path = Path("data/sample")
    """The sample corpus (titan-disp sample-data)."""


@dataclass(frozen=True)
class Check:
    name: str
    subject: str  # in the words of docs/verification.md
    words: tuple[str, ...]  # after the interpreter
    cannot: str = ""  # why it is not run on this machine


def checks(options: Options, gpus: int) -> Iterator[Check]:
    """Yield the checks of a machine with so many GPUs; without any, they are small."""
    out = options.out
    ranks = gpus or 2
    small = gpus == 0
    yield Check(
        "environment", "versions and devices", ("-m", "torch.utils.collect_env")
    )
    selftest = ("-m", "titan_disp.cli", "selftest", "--json")
    yield Check(
        "selftest",
        "the loss, its kernels, a resume, time and memory",
        (*selftest, f"{out}/selftest.json"),
    )
    several = "" if ranks > 1 else "it needs two GPUs"
    torchrun = ("-m", *TORCHRUN.split(), f"--nproc-per-node={ranks}", *selftest)
    yield Check(
        "selftest-ranks",
        "NCCL or RCCL: the loss",
        (*torchrun, f"{out}/selftest-ranks.json"),
        several,
    )
    size = ("--n=256", "--f=32") if small else ("--b=8", "--dtype=bfloat16")
    yield Check(
        "dispersion", "benchmarks of the loss", ("benchmarks/dispersion.py", *size)
    )
    cost = ("--rule", "--measure")
    if small:
        cost = (*cost, "--layers=2", "--shapes=2x64x16:float32", "--host-rounds=1")
    yield Check(
        "gpu-cost",
        "kernels and bytes of the loss, predicted and measured times",
        ("benchmarks/gpu_cost.py", *cost),
    )
    of_step = {"training.local_batch_size": 8, "training.global_batch_size": 8}
    step = (
        "--overrides=--compile.enable",
        *(f"--overrides=--{key}={value}" for key, value in of_step.items()),
    )
    if small:
        step = (
            "--overrides=--model.overrides=n_layers=2",
            "--seq-len=64",
            "--steps=1",
            "--rounds=1",
        )
    yield Check(
        "step", "benchmarks of a step of the 0.6B", ("benchmarks/step.py", *step)
    )
    # ranks that would share a GPU run on the CPU
    marks = ("-m", "not slow and not night") if gpus < 2 else ()
    pytest = ("-m", "pytest", "-p", "no:cacheprovider")
    meshes = (
        *pytest,
        "tests/test_sharded_loss.py",
        "tests/test_meshes.py",
        "tests/test_document_mask.py",
        *marks,
    )
    yield Check(
        "meshes",
        "NCCL or RCCL: gradients on every mesh that fits, with context parallelism",
        meshes,
    )
    yield Check(
        "quiet",
        "a step that waits for nothing",
        (*pytest, "tests/test_quiet_step.py", "tests/test_guard.py"),
    )
    yield from trained(options, gpus)


def trained(options: Options, gpus: int) -> Iterator[Check]:
    """Yield ten steps of the debug model in every way of training that only GPUs
    have.
    """
    one = "" if gpus else "it needs a GPU"
    two = "" if gpus > 1 else "it needs two GPUs"
    around = "--stream.document_mask --stream.restart_positions --dispersion.within_documents --compile.enable"
    torchao = (
        "" if importlib.util.find_spec("torchao") else "it needs the package torchao"
    )
    tensor = "--parallelism.tensor_parallel_degree=2 --parallelism.enable_async_tensor_parallel --compile.enable"
    for name, subject, words, cannot in (
        ("bf16", "bf16 training, fused optimizers", (), ""),
        (
            "documents",
            "flex attention within documents",
            ("--stream.document_mask",),
            one,
        ),
        ("documents-compile", "the same with more around it", around.split(), one),
        ("compile", "Inductor's GPU code", ("--compile.enable",), one),
        (
            "float8",
            "float8",
            ("--compile.enable", "--model.converters=quantize.linear.float8"),
            torchao,
        ),
        ("offload", "CPU offload", ("--training.enable_cpu_offload",), two),
        (
            "context",
            "context parallelism on a GPU's kernels",
            ("--parallelism.context_parallel_degree=2",),
            two,
        ),
        ("async-tensor", "async tensor parallelism", tensor.split(), two),
    ):
        if not gpus:
            words = (
                *words,
                "--model.flavor=nano",
                "--training.seq_len=64",
                "--training.steps=2",
            )
        run = (
            "-m",
            "titan_disp.cli",
            "train",
            "train_configs/debug.toml",
            f"--nproc={gpus or 1}",
        )
        paths = (
            f"--training.dataset_path={options.data}",
            f"--model.hf_assets_path={options.data}/tokenizer",
        )
        keys = (
            "--training.global_batch_size=-1",
            *paths,
            f"--job.dump_folder={options.out}/runs/{name}",
        )
        yield Check(f"train-{name}", subject, (*run, *words, *keys), cannot)


def run(check: Check, out: Path) -> str:
    """Return "ok", or how the check ended."""
    with (
        open(out / f"{check.name}.txt", "w") as output,
        open(out / f"{check.name}.log", "w") as messages,
    ):
        command = [sys.executable, *check.words]
        try:
            env = os.environ | {"TESTS_ON_GPU": "1"}
            status = subprocess.run(
                command,
                cwd=ROOT,
                env=env,
                stdout=output,
                stderr=messages,
                timeout=LIMIT,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"FAILED: no end within {duration(LIMIT)}"
    return f"FAILED with status {status}" if status else "ok"


def main(options: Options) -> int:
    options.out, options.data = options.out.resolve(), options.data.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(options.out / "runs", ignore_errors=True)
    gpus = torch.accelerator.device_count()
    rows = [["check", "of", "result", "time"]]
    for check in checks(options, gpus):
        print(f"{check.name}: {check.subject} …", flush=True)
        began = time.monotonic()
        result = f"not run: {check.cannot}" if check.cannot else run(check, options.out)
        rows.append(
            [check.name, check.subject, result, duration(time.monotonic() - began)]
        )
        where = (
            f"{gpus} GPUs"
            if gpus
            else "a CPU, in small: this verifies nothing about GPUs"
        )
        page = f"make gpu on {where}\n\n{markdown_table(rows, text_columns=3)}\n"
        # After each check, because the next one may end the machine
        (options.out / "summary.txt").write_text(page)
    print(f"\n{page}\n{options.out} holds the output of every check")
    return int(any(row[2].startswith("FAILED") for row in rows))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
