"""Measure a training step with dispersion off, exact, moments and sampled: tokens per
second, overhead, peak memory.

    python benchmarks/step.py                                              # the demo's model on a CPU, the 0.6B on a GPU
    python benchmarks/step.py --config train_configs/debug.toml --json     # only an object with "rows"

One rank runs TorchTitan's trainer on random tokens. Every estimator and sequence length
has a process of its own. The estimators take turns for --rounds rounds, and the round
with the fastest median step counts. "saved" is the exact one with the gradients of
large layers computed in the forward pass, as under the stock trainer. Memory is the
allocator's peak on a GPU. On a CPU it is that of the tensors of one more step, as
torch's MemTracker counts it. The estimate of ``titan-disp plan`` is beside it. On a CPU
there are three more numbers, in CPU seconds of all threads, which depend less on other
work on the machine, as fractions of the step without dispersion: what dispersion adds,
what the step spends in the loss, and what the loss takes outside of a step.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from timeit import repeat
from typing import Annotated, Any

import torch
import tyro

from measuring import Printed, in_a_fresh_process, show

ROOT = Path(__file__).parent.parent
ESTIMATORS = ("off", "exact", "moments", "sampled")
SAVED = "saved"


@dataclass
class Options(Printed):
    config: str = str(
        ROOT
        / "train_configs"
        / ("debug.toml" if torch.cuda.is_available() else "demo_cpu.toml")
    )
    """The config, a TOML file."""
    flavor: str = "0.6B" if torch.cuda.is_available() else "nano"
    seq_len: list[int] = field(
        default_factory=lambda: (
            [2048, 4096] if torch.cuda.is_available() else [256, 1024]
        )
    )
    estimators: list[str] = field(default_factory=lambda: list(ESTIMATORS))
    steps: int = 10
    """Steps that every process measures."""
    warmup: int = 2
    """Steps before them, which compile and fill caches."""
    rounds: int = 2
    overrides: Annotated[list[str], tyro.conf.UseAppendAction] = field(
        default_factory=list
    )
    """Options of the config, each as --overrides=--section.key=value."""


class LossTime:
    """Counts the CPU seconds that steps spend in the dispersion loss, in the forward
    and backward passes.
    """

    def __init__(self) -> None:
        from titan_disp.dispersion.autograd import LayerValue, SavedRows
        from titan_disp.dispersion.loss import DispersionLoss

        self.seconds = 0.0
        self._call = DispersionLoss.__call__
        self._last: tuple[DispersionLoss, torch.Tensor, int] | None = None

        def call(
            loss: DispersionLoss, zs: Sequence[torch.Tensor], *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            self._last = loss, zs[-1].detach(), len(zs)
            return self._timed(self._call)(loss, zs, *args, **kwargs)

        DispersionLoss.__call__ = call  # type: ignore[method-assign]
        for function in (LayerValue, SavedRows):
            function.backward = staticmethod(self._timed(function.backward))  # type: ignore[method-assign]

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            found = function(*args, **kwargs)
            self.seconds += time.process_time() - start
            return found

        return call

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds = self.seconds
        self.seconds = 0.0
        return seconds

    def alone(self) -> float:
        """Return the seconds of the loss of all layers outside of a step: the least of
        three, on the last activations.
        """
        if self._last is None:
            return 0.0
        loss, z, layers = self._last
        z.requires_grad_()

        def once() -> None:
            z.grad = None
            self._call(loss, [z]).sum().backward()

        return layers * min(repeat(once, timer=time.process_time, number=1, repeat=3))


def tracked_peak(trainer: Any, batches: Iterator[Any]) -> int:
    """Train a step more, and return the most bytes that its tensors took.

    Those of compiled code would not be seen.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    one = trainer.forward_backward_step
    tracker.track_external(*trainer.model_parts, *trainer.optimizers.optimizers)

    def microbatch(**kwargs: Any) -> torch.Tensor:
        # without which the tracker refuses a second microbatch
        tracker.reset_mod_stats()
        return one(**kwargs)

    trainer.forward_backward_step = microbatch
    with tracker:
        trainer.step += 1
        trainer.train_step(batches)
    return max(
        of_device["Total"]
        for of_device in tracker.get_tracker_snapshot("peak").values()
    )


def measure(argv: list[str], warmup: int, steps: int, defer: bool) -> dict[str, Any]:
    """Return medians over steps and the peak memory, in this process."""
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    from torchtitan.train import Trainer

    import titan_disp.plugin  # noqa: F401 — device type
    from titan_disp.checks import resolve_replicas
    from titan_disp.cluster.cost import estimate
    from titan_disp.cluster.plan import meta_model
    from titan_disp.cluster.preflight import synthetic_inputs
    from titan_disp.config.batch import tokens_per_step
    from titan_disp.config.load import load_config

    job_config = load_config(argv)
    resolve_replicas(job_config, 1)  # TorchTitan's trainer does not accept -1
    with synthetic_inputs(job_config):
        trainer = Trainer(job_config)
    trainer.loss_fn.defer = defer  # type: ignore[attr-defined]
    batches = trainer.batch_generator(trainer.dataloader)
    on_gpu = torch.cuda.is_available()
    loss_time = None if on_gpu else LossTime()
    seconds = []
    cpu_seconds = []
    loss_seconds = []
    for step in range(warmup + steps):
        if step == warmup and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        cpu_start = time.process_time()
        trainer.step += 1
        trainer.train_step(batches)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
        if loss_time is not None:
            loss_seconds.append(loss_time.take())
    peak = (
        torch.cuda.max_memory_allocated() if on_gpu else tracked_peak(trainer, batches)
    )
    planned = estimate(
        job_config, meta_model(job_config), 1, trainer.gradient_accumulation_steps > 1
    )
    return {
        "seconds": statistics.median(seconds[warmup:]),
        "cpu_seconds": statistics.median(cpu_seconds[warmup:]),
        "loss_cpu_seconds": None
        if loss_time is None
        else statistics.median(loss_seconds[warmup:]),
        "loss_alone_cpu_seconds": None if loss_time is None else loss_time.alone(),
        "tokens": tokens_per_step(job_config, 1),
        "peak_bytes": peak,
        "planned_bytes": planned.total,
    }


def run(options: Options, seq_len: int, estimator: str) -> dict[str, Any]:
    on = (
        "--dispersion.enabled",
        "--dispersion.estimator",
        "exact" if estimator == SAVED else estimator,
    )
    dispersion = on if estimator != "off" else ("--dispersion.no-enabled",)
    with tempfile.TemporaryDirectory() as folder:
        argv = [
            *(
                "--job.config_file",
                options.config,
                "--job.dump_folder",
                folder,
                "--model.flavor",
                options.flavor,
            ),
            *(
                "--training.seq_len",
                str(seq_len),
                "--training.steps",
                "10000",
                "--checkpoint.no-enable",
            ),
            *(
                "--metrics.no-enable_tensorboard",
                "--metrics.log_freq",
                "1000000",
                *dispersion,
            ),
            *options.overrides,
        ]
        return in_a_fresh_process(
            measure, argv, options.warmup, options.steps, estimator != SAVED
        )


def main(options: Options) -> None:
    rows = []
    for seq_len in options.seq_len:
        best: dict[str, dict[str, Any]] = {}
        for _ in range(options.rounds):
            for estimator in options.estimators:
                found = run(options, seq_len, estimator)
                if (
                    estimator not in best
                    or found["seconds"] < best[estimator]["seconds"]
                ):
                    best[estimator] = found
        off = best.get("off")
        for estimator, found in best.items():
            row = {
                "estimator": estimator,
                "flavor": options.flavor,
                "seq_len": seq_len,
                **found,
            }
            row["tokens_per_second"] = found["tokens"] / found["seconds"]
            row["overhead"] = (
                None if off is None else found["seconds"] / off["seconds"] - 1
            )
            if off is not None and found["loss_cpu_seconds"] is not None:
                step = off["cpu_seconds"]
                row["cpu_overhead"] = found["cpu_seconds"] / step - 1
                row["loss_cpu_overhead"] = found["loss_cpu_seconds"] / step
                row["loss_alone_cpu_overhead"] = found["loss_alone_cpu_seconds"] / step
            rows.append(row)
    show(options.json, rows=rows)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
