"""Count what a quiet step does, in TorchTitan's own trainer and in ours, with
dispersion off and on.

    python benchmarks/quiet.py                                          # two ranks on a CPU, 28 narrow blocks of Qwen3
    python benchmarks/quiet.py --overrides=--optimizer.implementation=foreach --json

A quiet step neither logs nor saves. Of rank 0, the table has the median over steps:
collective calls; reads by the host, for which it waits until the device has done all
work so far; reads of what the step before has sent; ATen operations; operations on
files, in the main thread and in others; a step's milliseconds; and the CPU milliseconds
of the main thread, in the step and in its optimizer. A step that is counted takes
longer than one that is timed.
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
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro

from measuring import Printed, show, timed
from titan_disp.lab.sample import write_sample

# which TorchTitan's Qwen3 and ours have, here with sizes that leave little but the
# overhead
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
# sys.audit's names
FILE_EVENTS = {
    "open",
    "os.rename",
    "os.remove",
    "os.listdir",
    "os.scandir",
    "os.mkdir",
    "os.utime",
}


@dataclass
class Options(Printed):
    cases: list[str] = field(default_factory=lambda: list(CASES))
    """Stock is TorchTitan's trainer and Qwen3; off and the estimators are
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
    """Counts, while ``on``, what neither the profiler nor a dispatch mode sees: files,
    and lists made of tensors.
    """

    def __init__(self) -> None:
        self.on = False
        self.calls = Counter[str]()
        sys.addaudithook(
            lambda event, args: self._file() if event in FILE_EVENTS else None
        )
        stat = os.stat
        to_list = torch.Tensor.tolist

        # the interpreter does not audit it
        def counted_stat(*args: Any, **kwargs: Any) -> os.stat_result:
            self._file()
            return stat(*args, **kwargs)

        def counted_list(tensor: torch.Tensor) -> Any:
            late = sys._getframe(1).f_code.co_name == "settle"  # the guard's
            self.calls["late_reads" if late else "host_reads"] += self.on
            return to_list(tensor)

        # type: ignore[assignment,method-assign]
        os.stat = counted_stat
        torch.Tensor.tolist = counted_list

    def _file(self) -> None:
        main = threading.current_thread() is threading.main_thread()
        self.calls["files" if main else "files_aside"] += self.on

    def step(self, step: Callable[[], None]) -> dict[str, int]:
        """Return the counts of one step."""
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
                self.calls[
                    "all_reduces"
                    if "reduce" in name and "scatter" not in name
                    else "others"
                ] += 1
        keys = (
            "all_reduces",
            "others",
            "host_reads",
            "late_reads",
            "aten_operations",
            "files",
            "files_aside",
        )
        return {key: self.calls[key] for key in keys}


def trainer_of(case: str, argv: list[str], layers: int) -> Any:
    """Return TorchTitan's trainer or ours, on the same data."""
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
        ours: Any = {
            "build_dataloader_fn": build_dataloader,
            "model_args": {FLAVOR: args},
        }
        ours["build_tokenizer_fn"] = lambda job_config: load_tokenizer(
            job_config.model.hf_assets_path
        )
        register_train_spec("qwen3", replace(spec, **ours))
        stock = Trainer(
            load_config([*argv, "--model.name", "qwen3", "--dispersion.no-enabled"])
        )
        # gloo lacks a reduction that FSDP2 uses by default
        cpu.adapt(stock.model_parts[0])
        return stock
    sizes = ",".join(
        f"{name}={str(value).lower()}"
        for name, value in {"n_layers": layers, **SIZES}.items()
    )
    argv = [*argv, "--model.overrides", sizes]
    on = (
        ("--dispersion.enabled", "--dispersion.estimator", case)
        if case != "off"
        else ("--dispersion.no-enabled",)
    )
    return DispTrainer(load_config([*argv, "--model.name", "qwen3_disp", *on]))


def count(
    case: str, argv: list[str], layers: int, warmup: int, steps: int
) -> dict[str, Any]:
    """Return medians over the steps of this rank, in this process.

    A collective call.
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
    medians = {
        key: statistics.median_low(found[key] for found in counts) for key in counts[0]
    }
    return {
        "case": case,
        **medians,
        **{name: 1e3 * statistics.median(of) for name, of in times.items()},
    }


def rank(number: int, ranks: int, store: str, *args: Any) -> dict[str, Any]:
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if torch.cuda.is_available():
        torch.cuda.set_device(number)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=number, world_size=ranks
    )
    found = count(*args)
    dist.barrier()
    dist.destroy_process_group()
    return found


def options_of(sample: Path, run: Path) -> list[str]:
    return [
        *("--model.flavor", FLAVOR, "--debug.seed", "1"),
        *(
            "--model.hf_assets_path",
            f"{sample}/tokenizer",
            "--job.dump_folder",
            str(run),
        ),
        *(
            "--training.dataset",
            "c4",
            "--training.dataset_path",
            str(sample),
            "--training.seq_len",
            "32",
        ),
        *("--training.local_batch_size", "1", "--training.steps", "10000"),
        *("--training.mixed_precision_param", "float32"),
        *(
            "--metrics.log_freq",
            "1000000",
            "--checkpoint.no-enable",
            "--condensation.interval",
            "0",
        ),
        *("--activation_checkpoint.mode", "none"),
    ]


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_sample(Path(folder) / "sample")
        for case in options.cases:
            argv = (
                options_of(Path(folder) / "sample", Path(folder) / case)
                + options.overrides
            )
            what = (
                f"{folder}/{case}.store",
                case,
                argv,
                options.layers,
                options.warmup,
                options.steps,
            )
            with ProcessPoolExecutor(
                options.ranks, mp_context=get_context("spawn")
            ) as pool:
                futures = [
                    pool.submit(rank, number, options.ranks, *what)
                    for number in range(options.ranks)
                ]
                rows.append([future.result() for future in futures][0])
    show(options.json, rows=rows)


if __name__ == "__main__":
    main()
