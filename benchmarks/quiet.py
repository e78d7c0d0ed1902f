"""Count the operations of a quiet step, in TorchTitan's trainer and in ours, with
dispersion off and on.

    python benchmarks/quiet.py                                          # two ranks on a CPU, 28 narrow blocks of Qwen3
    python benchmarks/quiet.py --overrides=--optimizer.implementation=foreach --json

A quiet step neither logs nor saves. The table has medians over the steps of rank 0:

all_reduces, others     collective calls
host_reads              reads by the host, which waits until the device has done all work
late_reads              reads of the message of the previous step, which has arrived
aten_operations         ATen operations
files, files_aside      operations on files, in the main thread and in other threads
ms                      milliseconds of a step
cpu_ms                  CPU milliseconds of the main thread in a step
optimizer_cpu_ms        … and in the optimizer

Counting makes a step slower, so other steps are timed.
"""

import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro

from measuring import Printed, show, timed
from titan_disp.lab.sample import write_sample

# A flavor of TorchTitan's Qwen3 and of ours, here with small sizes: what remains is
# mostly overhead.
FLAVOR = "debugmodel"
SIZES = {
    "dim": 64,
    "hidden_dim": 128,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "enable_weight_tying": False,
}
CASES = ("stock", "off", "exact")
# The names of operations on files in sys.audit
FILE_EVENTS = {
    "open",
    "os.rename",
    "os.remove",
    "os.listdir",
    "os.scandir",
    "os.mkdir",
    "os.utime",
    "os.stat",
}
COUNTS = (
    "all_reduces",
    "others",
    "host_reads",
    "late_reads",
    "aten_operations",
    "files",
    "files_aside",
)


@dataclass
class Options(Printed):
    cases: list[str] = field(default_factory=lambda: list(CASES))
    """The trainers: "stock" is TorchTitan's, with its Qwen3. "off" and the estimators are
    titan-disp's.
    """
    layers: int = 28
    ranks: int = 2
    steps: int = 20
    """Steps to time. Five more are counted."""
    warmup: int = 3
    overrides: Annotated[list[str], tyro.conf.UseAppendAction] = field(
        default_factory=list
    )
    """Options of the config, each as --overrides=--section.key=value."""


class Counted:
    """Counts the operations of steps.

    The profiler does not see files, nor lists made of tensors. Hooks count these while
    ``on``.
    """

    def __init__(self) -> None:
        self.on = False
        self.calls = Counter[str]()
        sys.addaudithook(self._audit)
        stat = os.stat
        to_list = torch.Tensor.tolist

        def counted_stat(*args: Any, **kwargs: Any) -> os.stat_result:
            self._audit("os.stat")  # which the interpreter does not audit
            return stat(*args, **kwargs)

        def counted_list(tensor: torch.Tensor) -> Any:
            name = "host_reads"
            if sys._getframe(1).f_code.co_name == "settle":  # a method of the guard
                name = "late_reads"
            self.calls[name] += self.on
            return to_list(tensor)

        # type: ignore[assignment,method-assign]
        os.stat = counted_stat
        torch.Tensor.tolist = counted_list

    def _audit(self, event: str, args: object = None) -> None:
        if event in FILE_EVENTS:
            name = "files_aside"
            if threading.current_thread() is threading.main_thread():
                name = "files"
            self.calls[name] += self.on

    def step(self, step: Callable[[], None]) -> dict[str, int]:
        """Return the counts of one step, by name (``COUNTS``)."""
        self.calls.clear()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU]
        ) as profile:
            self.on = True
            step()
            self.on = False
        for event in profile.events():
            namespace, _, name = event.name.partition("::")
            if namespace == "aten":
                self.calls["aten_operations"] += 1
                self.calls["host_reads"] += name == "_local_scalar_dense"
            elif namespace in ("c10d", "_c10d_functional") and name != "wait_tensor":
                is_all_reduce = "reduce" in name and "scatter" not in name
                self.calls["all_reduces"] += is_all_reduce
                self.calls["others"] += not is_all_reduce
        return {name: self.calls[name] for name in COUNTS}


def trainer_of(case: str, argv: list[str], layers: int) -> Any:
    """Return TorchTitan's trainer if the case is "stock", otherwise ours. Both read the
    same data.
    """
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
    from torchtitan.train import Trainer

    from titan_disp import cpu
    from titan_disp.config.load import load_config
    from titan_disp.data.loader import build_dataloader
    from titan_disp.data.tokenizer import load_tokenizer
    from titan_disp.train import DispTrainer

    if case == "stock":
        spec = get_train_spec("qwen3")
        args = replace(spec.model_args[FLAVOR], n_layers=layers, **SIZES)  # type: ignore[type-var]
        spec = replace(
            spec,
            model_args={FLAVOR: args},
            build_dataloader_fn=build_dataloader,
            build_tokenizer_fn=lambda job: load_tokenizer(job.model.hf_assets_path),
        )
        register_train_spec("qwen3", spec)
        words = "--model.name qwen3 --dispersion.no-enabled"
        stock = Trainer(load_config([*argv, *words.split()]))
        # gloo lacks a reduction that FSDP2 uses by default.
        cpu.adapt(stock.model_parts[0])
        return stock
    sizes = {"n_layers": layers, **SIZES}.items()
    overrides = ",".join(f"{name}={value}".lower() for name, value in sizes)
    words = f"--model.name qwen3_disp --model.overrides {overrides}"
    if case == "off":
        words += " --dispersion.no-enabled"
    else:
        words += f" --dispersion.enabled --dispersion.estimator {case}"
    return DispTrainer(load_config([*argv, *words.split()]))


def count(
    case: str, argv: list[str], layers: int, warmup: int, steps: int
) -> dict[str, Any]:
    """Return the medians over the steps of this rank, in this process. This is a
    collective call.
    """
    trainer = trainer_of(case, argv, layers)
    batches = trainer.batch_generator(trainer.dataloader)
    optimizer_step = trainer.optimizers.step
    in_optimizer = []

    def step() -> None:
        trainer.step += 1
        trainer.train_step(batches)

    trainer.optimizers.step = lambda: in_optimizer.append(
        timed(optimizer_step, clock=time.thread_time)[1]
    )
    try:
        for _ in range(warmup):
            step()
        seconds, cpu_seconds = zip(
            *(timed(step, clock=time.thread_time) for _ in range(steps)), strict=True
        )
        counted = Counted()
        counts = [counted.step(step) for _ in range(5)]
    finally:
        trainer.close()
    times = {
        "ms": seconds,
        "cpu_ms": cpu_seconds,
        "optimizer_cpu_ms": in_optimizer[warmup : warmup + steps],
    }
    row: dict[str, Any] = {"case": case}
    for name in COUNTS:
        row[name] = statistics.median_low(of_step[name] for of_step in counts)
    for name, of_steps in times.items():
        row[name] = 1e3 * statistics.median(of_steps)
    return row


def rank(number: int, ranks: int, store: str, *args: Any) -> dict[str, Any]:
    """Return the row of this rank, in a new process."""
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(number)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=number, world_size=ranks
    )
    row = count(*args)
    dist.barrier()
    dist.destroy_process_group()
    return row


def options_of(sample: Path, run: Path) -> list[str]:
    """Return the options of the config, for a sample corpus and a run's folder."""
    return (
        f"--model.flavor {FLAVOR} --model.hf_assets_path {sample}/tokenizer "
        f"--job.dump_folder {run} --debug.seed 1 --training.dataset c4 "
        f"--training.dataset_path {sample} --training.seq_len 32 "
        "--training.local_batch_size 1 --training.steps 10000 "
        "--training.mixed_precision_param float32 --metrics.log_freq 1000000 "
        "--checkpoint.no-enable --condensation.interval 0 "
        "--activation_checkpoint.mode none"
    ).split()


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_sample(Path(folder) / "sample")
        for case in options.cases:
            argv = options_of(Path(folder) / "sample", Path(folder) / case)
            arguments = (
                options.ranks,
                f"{folder}/{case}.store",
                case,
                argv + options.overrides,
                options.layers,
                options.warmup,
                options.steps,
            )
            context = get_context("spawn")
            with ProcessPoolExecutor(options.ranks, mp_context=context) as pool:
                constants = map(repeat, arguments)
                row_of_rank_0, *_ = pool.map(rank, range(options.ranks), *constants)
            rows.append(row_of_rank_0)
    show(options.json, rows=rows)


if __name__ == "__main__":
    main()
