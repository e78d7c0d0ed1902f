"""The operations of a quiet step, in TorchTitan's trainer and in ours. A quiet step
neither logs nor saves.

``count`` returns medians over the steps of a rank:

all_reduces, others     collective calls
host_reads              reads by the host, which waits until the device has done all work
late_reads              reads of the guard's message of the previous step, which has arrived
aten_operations         ATen operations
files                   operations on files in the main thread
"""

import os
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.train import Trainer

from titan_disp import cpu
from titan_disp.config.load import load_config
from titan_disp.data.loader import build_dataloader
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.train import DispTrainer

# A flavor of TorchTitan's Qwen3 and of ours, here with small sizes
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
# The interpreter's audit events of operations on files. It has none for os.stat.
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
)


class Counted:
    """Counts the operations of steps.

    The profiler sees neither operations on files nor ``Tensor.tolist``. Hooks count these
    while ``on``. They stay for the life of the process.
    """

    def __init__(self) -> None:
        self.on = False
        self.calls = Counter[str]()
        sys.addaudithook(self._audit)
        stat = os.stat
        to_list = torch.Tensor.tolist

        def counted_stat(*args: Any, **kwargs: Any) -> os.stat_result:
            self._audit("os.stat")
            return stat(*args, **kwargs)

        def counted_list(tensor: torch.Tensor) -> Any:
            # ``settle`` is a method of the guard.
            is_late = sys._getframe(1).f_code.co_name == "settle"
            if self.on:
                self.calls["late_reads" if is_late else "host_reads"] += 1
            return to_list(tensor)

        os.stat = counted_stat
        torch.Tensor.tolist = counted_list

    def _audit(self, event: str, args: object = None) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self.on and in_main_thread and event in FILE_EVENTS:
            self.calls["files"] += 1

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
    same data. "stock" replaces TorchTitan's Qwen3 in this process, which is possible once.
    """
    if case == "stock":
        spec = get_train_spec("qwen3")
        args = replace(spec.model_args[FLAVOR], n_layers=layers, **SIZES)
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
) -> dict[str, int]:
    """Return the median counts over the quiet steps of this rank, by name (``COUNTS``).
    This is a collective call.
    """
    trainer = trainer_of(case, argv, layers)
    batches = trainer.batch_generator(trainer.dataloader)

    def step() -> None:
        trainer.step += 1
        trainer.train_step(batches)

    try:
        for _ in range(warmup):
            step()
        counted = Counted()
        counts = [counted.step(step) for _ in range(steps)]
    finally:
        trainer.close()
    return {
        name: statistics.median_low(of_step[name] for of_step in counts)
        for name in COUNTS
    }


def options_of(sample: Path, run: Path) -> list[str]:
    """Return config options for a sample corpus and a run folder."""
    return (
        f"--model.flavor {FLAVOR} --model.hf_assets_path {sample}/tokenizer "
        f"--job.dump_folder {run} --debug.seed 1 --training.dataset c4 "
        f"--training.dataset_path {sample} --training.seq_len 32 "
        "--training.local_batch_size 1 --training.steps 10000 "
        "--training.mixed_precision_param float32 --metrics.log_freq 1000000 "
        "--checkpoint.no-enable --condensation.interval 0 "
        "--activation_checkpoint.mode none"
    ).split()
