"""Measure a training step with dispersion off, exact, moments and sampled: tokens per
second, overhead, peak memory.

    python benchmarks/step.py                                              # the demo's model on a CPU, the 0.6B on a GPU
    python benchmarks/step.py --config train_configs/debug.toml --json     # only an object with "rows"

One rank runs TorchTitan's trainer on random tokens. Each estimator, sequence length and
round has a separate process. The estimators take turns for --rounds rounds, and the round with
the fastest median step counts. "cpu seconds" are those of all threads, which depend less
on other work on the machine. On a GPU, memory is the allocator's peak. On a CPU, it is the
peak of the tensors of one more step, which torch's MemTracker counts. "planned" is the
estimate of ``titan-disp plan``. (benchmarks/dispersion.py measures the loss outside of a
step.)
"""

import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import tyro

from measuring import DEVICE, Printed, in_a_fresh_process, show, timed

ROOT = Path(__file__).parent.parent
ON_GPU = DEVICE == "cuda"
DEFAULTS: dict[str, Any] = {
    "config": "demo_cpu.toml",
    "flavor": "nano",
    "seq_len": (256, 1024),
}
if ON_GPU:
    DEFAULTS = {"config": "debug.toml", "flavor": "0.6B", "seq_len": (2048, 4096)}


@dataclass
class Options(Printed):
    config: str = str(ROOT / "train_configs" / DEFAULTS["config"])
    """The config, a TOML file."""
    flavor: str = DEFAULTS["flavor"]
    seq_len: tuple[int, ...] = DEFAULTS["seq_len"]
    estimators: tuple[str, ...] = ("off", "exact", "moments", "sampled")
    steps: int = 10
    """Measured steps of each process."""
    warmup: int = 2
    """Steps before the measured ones, which compile and fill caches."""
    rounds: int = 2
    overrides: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Options of the config, each as --overrides=--section.key=value."""


def tracked_peak(trainer: Any, batches: Iterator[Any]) -> int:
    """Return the peak bytes of the tensors in one more training step.

    Tensors of compiled code are not counted.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    forward_backward_step = trainer.forward_backward_step
    tracker.track_external(*trainer.model_parts, *trainer.optimizers.optimizers)

    def microbatch(**kwargs: Any) -> torch.Tensor:
        # Otherwise, the tracker refuses a second microbatch.
        tracker.reset_mod_stats()
        return forward_backward_step(**kwargs)

    trainer.forward_backward_step = microbatch
    with tracker:
        trainer.step += 1
        trainer.train_step(batches)
    return max(
        of_device["Total"]
        for of_device in tracker.get_tracker_snapshot("peak").values()
    )


def measure(argv: list[str], warmup: int, steps: int) -> dict[str, Any]:
    """Return the medians over steps and the peak memory, in this process, whose environment
    becomes that of a single rank.

    ``argv`` are the options of the config.
    """
    from torchtitan.train import Trainer

    import titan_disp.plugin  # noqa: F401 — device type
    from titan_disp.checks import resolve_replicas
    from titan_disp.cluster.cost import estimate
    from titan_disp.cluster.plan import meta_model
    from titan_disp.cluster.preflight import synthetic_inputs
    from titan_disp.config.batch import tokens_per_step
    from titan_disp.config.load import load_config
    from titan_disp.lab.selftest import ONE_RANK

    os.environ |= ONE_RANK
    job_config = load_config(argv)
    resolve_replicas(job_config, 1)  # TorchTitan's trainer does not accept -1
    with synthetic_inputs(job_config):
        trainer = Trainer(job_config)
    trainer.loss_fn.defer = True  # type: ignore[attr-defined]  # as titan-disp's trainer
    batches = trainer.batch_generator(trainer.dataloader)

    def step() -> None:
        trainer.step += 1
        trainer.train_step(batches)

    for _ in range(warmup):
        step()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    seconds, cpu_seconds = zip(*(timed(step) for _ in range(steps)), strict=True)
    peak = (
        torch.cuda.max_memory_allocated() if ON_GPU else tracked_peak(trainer, batches)
    )
    accumulates = trainer.gradient_accumulation_steps > 1
    planned = estimate(job_config, meta_model(job_config), 1, accumulates)
    median = statistics.median(seconds)
    return {
        "seconds": median,
        "cpu_seconds": statistics.median(cpu_seconds),
        "tokens_per_second": tokens_per_step(job_config, 1) / median,
        "peak_bytes": peak,
        "planned_bytes": planned.total,
    }


def run(options: Options, seq_len: int, estimator: str) -> dict[str, Any]:
    """Return the numbers of an estimator, measured in a fresh process."""
    dispersion = f"--dispersion.enabled --dispersion.estimator {estimator}"
    if estimator == "off":
        dispersion = "--dispersion.no-enabled"
    with tempfile.TemporaryDirectory() as folder:
        words = (
            f"--job.config_file {options.config} --job.dump_folder {folder} "
            f"--model.flavor {options.flavor} --training.seq_len {seq_len} "
            "--training.steps 10000 --checkpoint.no-enable "
            f"--metrics.no-enable_tensorboard --metrics.log_freq 1000000 {dispersion}"
        )
        argv = [*words.split(), *options.overrides]
        return in_a_fresh_process(measure, argv, options.warmup, options.steps)


def main(options: Options) -> None:
    rows = []
    for seq_len in options.seq_len:
        best: dict[str, dict[str, Any]] = {}
        for estimator in options.estimators * options.rounds:
            numbers = run(options, seq_len, estimator)
            earlier = best.get(estimator, numbers)
            best[estimator] = min(earlier, numbers, key=itemgetter("seconds"))
        for estimator, numbers in best.items():
            row = {"estimator": estimator, "flavor": options.flavor, "seq_len": seq_len}
            row |= numbers
            if "off" in best:
                row["overhead"] = row["seconds"] / best["off"]["seconds"] - 1
            rows.append(row)
    show(options.json, rows=rows)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
