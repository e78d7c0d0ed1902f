"""This module adds to TorchTitan's metrics: each loss term apart, a stable TensorBoard
folder, and metrics.jsonl.

Any trainer calls ``should_log`` on every rank in every step, and ``log`` on every rank
when a step is logged.
"""

import contextlib
import copy
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_disp.condensation.record import OF_PAPER, Measurement, blocks_mean
from titan_disp.config.batch import last_step, tokens_per_step
from titan_disp.config.types import JobConfig
from titan_disp.data.listing import on_rank_0
from titan_disp.data.loader import LARGEST, StreamLoader
from titan_disp.dispersion.variants.base import bad_fit
from titan_disp.errors import ConfigError
from titan_disp.metric import Metric
from titan_disp.objective import LossLedger
from titan_disp.run.dry import is_dry
from titan_disp.run.folder import continue_wandb, lasting_id
from titan_disp.run.liveness import Clock, Stragglers
from titan_disp.run.reader import METRICS
from titan_disp.run.storage import JsonLines

# Each heatmap in TensorBoard is at this multiple of the previous heatmap's step, or
# later; our choice.
HEATMAP_RATIO = 1.25
# The console reports the time spent waiting for data if it is at least this fraction of
# all time; our choice
NOTED_WAITING = 0.03


def _notes(data: Mapping[Metric, float]) -> Iterator[str]:
    """Yield the console's notes about the data. The first is the largest number of
    epochs of any source, if this number is more than 1. The second is the fraction of
    time spent waiting for data, if it is at least ``NOTED_WAITING``.
    """
    epochs = max(
        (value for metric, value in data.items() if metric.name == "epochs_read"),
        default=0.0,
    )
    if epochs > 1:
        yield f"epoch {epochs:.2f}"
    waiting = data.get(Metric("wait_fraction"), 0.0)
    if waiting >= NOTED_WAITING:
        yield f"{waiting:.0%} waiting for data"


def _loss_tag(term: Metric) -> str:
    """Return the name of a loss term in TensorBoard and W&B."""
    if term.name == "ce":
        term = Metric("cross_entropy", term.source)
    return f"loss_metrics/{term}"


class TensorBoardFolder(BaseLogger):
    """Log to one TensorBoard folder per run folder, across requeues.

    TorchTitan would name the folder by the date. Values logged while the file system
    fails are lost.
    """

    def __init__(self, folder: str, run: str) -> None:
        self.folder = folder
        self.run = run
        self._writer: SummaryWriter | None = None
        self._losing = False
        self._next_heatmap = 0.0  # the smallest step of the next heatmap
        self._untrained: np.ndarray | None = None  # mean cosines at step 0

    def _open(self, step: int) -> SummaryWriter:
        # purge_step hides rows that a killed job wrote after the checkpoint from which
        # this job resumes
        if self._writer is None:
            self._writer = SummaryWriter(self.folder, max_queue=1000, purge_step=step)
        return self._writer

    @contextlib.contextmanager
    def _losses(self) -> Iterator[None]:
        """Suppress an OSError of this context, with a warning if it is the first in a
        row. The next row then opens a new file, because the error has ended
        TensorBoard's thread.
        """
        try:
            yield
        except OSError as error:
            if not self._losing:
                logger.warning(f"TensorBoard loses rows: {error}")
            self._losing = True
            self._writer = None
        else:
            self._losing = False

    def log(self, metrics: dict[str, Any], step: int) -> None:
        with self._losses():
            writer = self._open(step)
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

    def log_heatmap(self, measured: Measurement, step: int) -> None:
        """Log a heatmap if ``step`` is at least HEATMAP_RATIO times the step of the
        last heatmap.

        The ratio keeps heatmaps rare, because all ranks wait for a fifth of a second
        while rank 0 draws one.
        """
        if step < self._next_heatmap:
            return
        self._next_heatmap = HEATMAP_RATIO * step
        # This imports matplotlib, which only rank 0 needs.
        from titan_disp.condensation.heatmap import heatmaps

        if step == 0:
            self._untrained = measured.mean_cosine
        elif self._untrained is None:  # in the first heatmap of a start
            # If there is no such file, or it is damaged, the heatmap does not show step 0.
            with contextlib.suppress(ConfigError):
                before = Measurement.load(Path(self.run, "condensation", "step-0.npz"))
                self._untrained = before.mean_cosine
        measured = dataclasses.replace(measured, untrained_mean_cosine=self._untrained)
        figure = heatmaps([{f"step {step}": measured}])
        with self._losses():
            self._open(step).add_figure("condensation/heatmap", figure, step)

    def close(self) -> None:
        with self._losses():
            if self._writer is not None:
                self._writer.close()


class LastMetrics(BaseLogger):
    """Keep TorchTitan's metrics of the last logged step, for the console."""

    metrics: dict[str, Any]

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.metrics = metrics


class DispersionMetrics(MetricsProcessor):
    """Log cross-entropy, dispersion and the exact number of tokens seen.

    These numbers go to the console, to TensorBoard or W&B, and to metrics.jsonl.
    """

    logger: BaseLogger
    # titan_disp.train sets the clock and, with several ranks, the stragglers.
    stragglers: Stragglers | None = None
    clock: Clock | None = None

    def __init__(
        self,
        job_config: JobConfig,
        parallel_dims: ParallelDims,
        ledger: LossLedger,
        loader: StreamLoader | None = None,
    ) -> None:
        rank = dist.get_rank()
        run = job_config.job.dump_folder
        for_all_ranks = job_config.metrics.save_for_all_ranks
        if job_config.metrics.enable_wandb:
            wandb_id = on_rank_0(lasting_id, Path(run, "wandb_run_id"))
            continue_wandb(wandb_id, rank if for_all_ranks else None)
        stock = copy.copy(job_config)
        stock.metrics = dataclasses.replace(
            job_config.metrics, enable_tensorboard=False
        )
        super().__init__(stock, parallel_dims)
        self.job_config = job_config
        self._dp_degree = parallel_dims.dp_replicate * parallel_dims.dp_shard
        self.ledger = ledger
        self._loader = loader
        self._first_log: tuple[float, int] | None = None  # (time, step)
        self._step_seconds = 0.0  # ``clock.step_seconds`` at the last log
        self._bad_fit = False  # whether a warning about a bad fit was logged
        # This rank's counters at the last log.
        self._last_counters: dict[Metric, float] = {}
        self.rows: JsonLines | None = None  # of metrics.jsonl, on rank 0
        if rank == 0 and not is_dry(job_config):
            Path(run).mkdir(parents=True, exist_ok=True)
            self.rows = JsonLines(Path(run) / METRICS)
        self._tensorboard: TensorBoardFolder | None = None
        folder = Path(run) / job_config.metrics.save_tb_folder
        if for_all_ranks:
            folder /= f"rank_{rank}"
        self.tensorboard_folder = str(folder)
        self._last = LastMetrics()
        loggers = LoggerContainer()
        loggers.add_logger(self._last)
        loggers.add_logger(self.logger)
        if job_config.metrics.enable_tensorboard and (rank == 0 or for_all_ranks):
            self._tensorboard = TensorBoardFolder(self.tensorboard_folder, run)
            loggers.add_logger(self._tensorboard)
        self.logger = loggers

    def tokens_seen(self, step: int) -> int:
        """Return the tokens trained on after ``step`` steps.

        TorchTitan's own number counts each token once per CP rank.
        """
        return step * tokens_per_step(self.job_config, self._dp_degree)

    @cached_property
    def _last_step(self) -> int:
        return last_step(self.job_config, self._dp_degree)

    def of_steps(self, step: int) -> str:
        """Return the beginning of a line on the console, such as "step  10/300"."""
        width = len(str(self._last_step))
        color = self.color
        return f"{color.green}step {step:{width}}/{self._last_step}{color.reset}"

    def _time_left(self, step: int) -> Iterator[str]:
        """Yield the time until the last step, such as "3:10:00 left", unless this is
        the first log of the start, from which the pace is measured.
        """
        log_time = time.monotonic()
        if self._first_log is None:
            self._first_log = (log_time, step)
            return
        first_time, first_step = self._first_log
        seconds_per_step = (log_time - first_time) / (step - first_step)
        seconds = (self._last_step - step) * seconds_per_step
        yield f"{timedelta(seconds=round(seconds))} left"

    def line(self, row: Mapping[str, Any]) -> str:
        """Return the console's line for a row of metrics.jsonl. Values that the config
        or the device makes meaningless are left out.
        """
        titan = self._last.metrics
        parts = [self.of_steps(row["step"]), f"loss {row['loss']:.3f}"]
        if self.job_config.dispersion.enabled:
            parts.append(f"ce {row['ce']:.3f}  dispersion {row['dispersion']:.3f}")
        parts += [
            f"grad {row['grad_norm']:#.3g}",
            f"lr {titan.get('lr', math.nan):#.2g}",
            f"{self.parallel_dims.world_size} × {row['tps']:,.0f} tokens/s",
            f"{titan['memory/max_reserved(GiB)']:.2f} GiB",
        ]
        if not math.isnan(titan["mfu(%)"]):  # a CPU's peak is unknown
            parts.append(f"mfu {titan['mfu(%)']:.1f}%")
        return "  ".join([*parts, *_notes(row["data"]), *self._time_left(row["step"])])

    def data_metrics(self, seconds: float) -> dict[Metric, float]:
        """Return the loader's counters, and their rates over the last ``seconds``, of
        all ranks together; {} without a loader. A collective call.
        """
        if self._loader is None:
            return {}
        counters = self._loader.counters()
        last = self._last_counters
        self._last_counters = counters

        def rate(counter: Metric) -> float:
            return (counters[counter] - last.get(counter, 0)) / seconds

        metrics = {
            **counters,
            Metric("stored_bytes_per_second"): rate(Metric("stored_bytes")),
            Metric("wait_fraction"): rate(Metric("seconds_waited")),
        }
        mesh = self.parallel_dims.get_optional_mesh("batch")
        if mesh is None:
            return metrics
        sums = torch.tensor(
            list(metrics.values()), dtype=torch.float64, device=utils.device_type
        )
        maxima = sums.clone()
        dist.all_reduce(sums, group=mesh.get_group())
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=mesh.get_group())
        is_largest = [metric.name in LARGEST for metric in metrics]
        of_all_ranks = torch.where(torch.tensor(is_largest), maxima.cpu(), sums.cpu())
        return dict(zip(metrics, of_all_ranks.tolist(), strict=True))

    def should_log(self, step: int) -> bool:
        if super().should_log(step):
            return True
        self.ledger.reset()  # so that the next logged step reports only its own terms
        return False

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: Any = None,
    ) -> None:
        """Log a step to the console, to TensorBoard or W&B, and to metrics.jsonl.

        With a ``clock``, throughput and fractions of time refer only to the time of the
        steps since the last log, not to loading, saves, validation and measurements. A
        collective call.

        Raises DataError on all ranks if too much of the data is damaged. The step is
        then on disk already.
        """
        terms = self._loss_terms(step, global_avg_loss)
        if self.clock is not None:
            # TorchTitan divides the tokens by the time since ``time_last_log``
            since_last_log = self.clock.step_seconds() - self._step_seconds
            self.time_last_log = time.perf_counter() - since_last_log
        seconds = time.perf_counter() - self.time_last_log
        tokens = self.tokens_seen(step)
        data = self.data_metrics(seconds) | self._source_tokens(tokens)
        straggler = self.stragglers.find() if self.stragglers is not None else None
        extra = dict(extra_metrics or {}, n_tokens_seen=tokens)
        for name, value in terms.items():
            extra[_loss_tag(name)] = value
        for name, value in data.items():
            extra[f"data/{name}"] = value
        tps = self.ntokens_since_last_log / (
            seconds * self.parallel_dims.non_data_parallel_size
        )
        # This sets the tokens back to 0.
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)
        if self.clock is not None:
            self._step_seconds = self.clock.step_seconds()
        row: Any = {
            "step": step,
            "time": time.time(),
            "loss": global_avg_loss,
            **terms,
            "grad_norm": grad_norm,
            "lr": extra.get("lr"),
            "tokens": tokens,
            "tps": tps,
            "data": data,
        }
        logger.info(self.line(row))
        if straggler is not None:
            logger.warning(
                f"step {step}: rank {straggler['rank']} on {straggler['host']} is "
                f"slow: its own work takes {straggler['seconds']:.3f} s per step, and "
                f"that of half of the ranks at most {straggler['median']:.3f} s"
            )
        if self.rows is not None:
            if straggler is not None:
                row["straggler"] = straggler
            if self.clock is not None:
                row["spent"] = self.clock.rounded()
            self.rows.append(row)
        if self._loader is not None:
            # These are the counters of all ranks, so either all raise or none.
            self._loader.check_counters(data)

    def _loss_terms(self, step: int, global_avg_loss: float) -> dict[Metric, float]:
        """Return the mean of each loss term since the last log (``LossLedger.mean``),
        and reset the ledger. A collective call.

        If the moments estimator is used, there is a term "dispersion_fit_error"; the
        first bad fit is logged as a warning.
        """
        mesh = self.parallel_dims.get_optional_mesh("loss")
        terms = self.ledger.mean(mesh) or {
            Metric("ce"): global_avg_loss,
            Metric("dispersion"): 0.0,
        }
        fit_error = self.ledger.worst_fit(mesh)
        self.ledger.reset()
        if fit_error is not None:
            terms[Metric("dispersion_fit_error")] = fit_error
            warning = bad_fit(fit_error)
            if warning and not self._bad_fit:
                self._bad_fit = True
                logger.warning(f"step {step}: {warning}")
        return terms

    def _source_tokens(self, tokens: int) -> dict[Metric, float]:
        """Return how many of ``tokens`` came from each of several sources."""
        shares = self._loader.groups if self._loader is not None else []
        if len(shares) < 2:
            return {}
        # Every slot supplies the same number of tokens to a step.
        return {
            Metric("tokens", share.name): tokens * share.slots // share.total
            for share in shares
        }

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        super().log_validation(loss, step, extra_metrics)
        logger.info(f"{self.of_steps(step)}  validation loss {loss:.3f}")
        if self.rows is not None:
            self.rows.append({"step": step, "time": time.time(), "validation": loss})

    def close(self) -> None:
        if self.rows is not None:
            self.rows.close()
        super().close()

    def log_condensation(
        self, step: int, measured: Measurement, seconds: float
    ) -> None:
        """Log a measurement of condensation on rank 0.

        The measurement goes to the console, to TensorBoard or W&B, to metrics.jsonl,
        and to RUN/condensation/step-N.npz. ``seconds`` is how long the measurement
        took. The row has these seconds plus the time to write the files.
        """
        began = time.perf_counter()
        if self.rows is None:
            return
        self.logger.log(self._condensation_scalars(measured), step)
        try:
            if self._tensorboard is not None:
                self._tensorboard.log_heatmap(measured, step)
            measured.save(self.rows.path.with_name("condensation") / f"step-{step}.npz")
        # An error of matplotlib, or a full disk: neither may end a run.
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            logger.warning(
                f"step {step}: the histograms of condensation could not be saved: {why}"
            )
        seconds += time.perf_counter() - began
        row = {
            "step": step,
            "time": time.time(),
            "condensation": measured.to_json(),
            "seconds": seconds,
        }
        self.rows.append(row)
        logger.info(
            f"{self.of_steps(step)}  held-out text: "
            f"ce {measured.cross_entropy:.3f}  mean cosine {blocks_mean(measured):.2f}, "
            f"last block {measured.mean_cosine[measured.last_block]:.2f}  "
            f"{measured.over_depth[OF_PAPER]}"
        )

    def _condensation_scalars(self, measured: Measurement) -> dict[str, float]:
        scalars = {"held_out/cross_entropy": measured.cross_entropy}
        for name, parts in measured.by_part().items():
            scalars |= {
                f"condensation_{name}/{part}": value for part, value in parts.items()
            }
        if self.job_config.condensation.per_layer:  # 4 × 29 scalars for 0.6B
            for name, values in measured.by_layer().items():
                scalars |= {
                    f"condensation_{name}/layer_{i:02}": values[i]
                    for i in range(measured.last_block + 1)
                }
        for where, over_depth in measured.over_depth.items():
            scalars[f"condensation/spearman_{where}"] = over_depth.spearman
            scalars[f"condensation/kendall_{where}"] = over_depth.kendall
        return {tag: value for tag, value in scalars.items() if not math.isnan(value)}
