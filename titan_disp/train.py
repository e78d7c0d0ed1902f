"""``torchrun … -m titan_disp.train --job.config_file X`` trains.

Each *start* continues from the run's newest checkpoint.

TorchTitan's trainer runs the steps; what titan-disp adds to each is, in their order:

    batch_generator         data.loader hands out the next batch of this rank's slots
    forward_backward_step   models.decoder returns (logits, activations), objective takes both as predictions
    optimizers.step         run.guard lets all ranks agree whether the step is finite, and whether to stop
    metrics_processor.log   run.metrics writes metrics.jsonl and TensorBoard
    checkpointer.save       run.checkpoint saves at its interval, or when ``train_step`` has asked for it
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed.utils import set_pg_timeouts
from torchtitan.tools.logging import init_logger, logger
from torchtitan.train import Trainer

# The model's spec and the device type, whatever the config imports.
import titan_disp.plugin  # noqa: F401
from titan_disp.checks import check_config, check_device, check_launched
from titan_disp.condensation.measure import (
    Forward,
    MeshPosition,
    Monitor,
    cross_entropies,
)
from titan_disp.condensation.record import over_training
from titan_disp.config.batch import data_parallel_degree, last_step
from titan_disp.config.load import load_config
from titan_disp.config.types import JobConfig
from titan_disp.data.fingerprint import check_fingerprint, read_data_state
from titan_disp.data.listing import on_rank_0
from titan_disp.data.loader import StreamLoader
from titan_disp.data.validation import StreamValidator, held_out_sequences
from titan_disp.dispersion import kernels
from titan_disp.dispersion.autograd import process_group
from titan_disp.errors import (
    EXIT_CODE,
    CheckpointError,
    ConfigError,
    DataError,
    RefusedError,
    UserError,
)
from titan_disp.objective import DispersionObjective
from titan_disp.run import console, dry, identity, integrity
from titan_disp.run.checkpoint import DispCheckpointManager
from titan_disp.run.folder import RunFolder
from titan_disp.run.guard import GuardedOptimizers
from titan_disp.run.history import Goodput, goodputs, together
from titan_disp.run.liveness import (
    Aside,
    Clock,
    Heartbeat,
    StopRequest,
    Stragglers,
    allocation_began,
)
from titan_disp.run.metrics import DispersionMetrics
from titan_disp.run.reader import read_condensation, read_events, read_rows

# What a checkpoint's groups of parameters have of the config. (Whether Adam is fused
# belongs to its state.)
OPTIONS = ("initial_lr", "betas", "eps", "weight_decay", "decoupled_weight_decay")
# Sections and keys that say nothing about training: their changes are in the event
# ``resume`` only.
SILENT = ("job.", "metrics.", "profiling.", "comm.")
SHORT = 600  # seconds of a start, which are mostly start-up


class DispTrainer(Trainer):
    """Extend TorchTitan's Trainer by overriding its hooks, and answer the checkpoint
    manager's (``run.checkpoint.Hooks``).
    """

    run_folder: RunFolder | None = None
    stragglers: Stragglers | None = None
    checkpointer: DispCheckpointManager
    dataloader: StreamLoader
    metrics_processor: DispersionMetrics
    optimizers: GuardedOptimizers
    _start_step = 0
    _stopping = False
    _stepped = False  # whether this start has done a step
    _microbatch = 0  # the current one of the step, from 1

    def __init__(self, job_config: JobConfig) -> None:
        """Build everything.

        Every rank raises ConfigError before anything is allocated if the config cannot
        work.
        """
        self.clock = Clock(allocation_began())
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if dry.is_dry(job_config):
            world_size = dry.simulated_ranks()
        check_config(job_config, world_size)
        check_device(job_config)
        check_launched(job_config)
        if dry.is_dry(job_config):
            dry.write_nothing(job_config)
        elif int(os.environ.get("RANK", "0")) == 0:
            self.run_folder = RunFolder(job_config, world_size)
        if int(os.environ.get("RANK", "0")) == 0:
            logger.info(console.title(job_config))
        if os.environ.get("NO_COLOR"):
            job_config.metrics.disable_color_printing = True
        path = self.run_folder.path if self.run_folder is not None else None
        self.heartbeat = Heartbeat(path, job_config)
        self.aside = Aside(self.heartbeat.write)
        self._announce("start", 0)
        self.last_step = last_step(
            job_config, data_parallel_degree(job_config, world_size)
        )
        # TorchTitan's checkpoint manager is not part of the spec: it is disabled here,
        # and ours is built afterwards.
        enable = job_config.checkpoint.enable
        job_config.checkpoint.enable = False
        try:
            with self._refusals(job_config):
                super().__init__(job_config)
        finally:
            job_config.checkpoint.enable = enable
        cast(DispersionObjective, self.loss_fn).defer = True
        self.checkpointer = self._build_checkpointer()
        if job_config.validation.enable:
            cast(StreamValidator, self.validator).around = partial(
                self.busy, "validation"
            )
        self.metrics_processor.clock = self.clock
        if world_size > 1 and not dry.is_dry(job_config):
            self.stragglers = self.metrics_processor.stragglers = Stragglers()
        self.stop_request = StopRequest(path)
        self.aside.errands.append(self.stop_request)
        self._own_options = [
            [{key: group[key] for key in OPTIONS} for group in o.param_groups]
            for o in self.optimizers
        ]
        self.optimizers.flags["stop"] = self.stop_request.asked
        self.optimizers.flags["signal"] = self.stop_request.signalled
        self.optimizers.flags["save_failed"] = self.checkpointer.save_has_failed
        self.optimizers.on_skip = self._skipped

    def _build_checkpointer(self) -> DispCheckpointManager:
        adapter = self.train_spec.state_dict_adapter
        job = self.job_config
        self.identity = identity.of_model(job, self.model_args) | {
            identity.STEP: self.metrics_processor.tokens_seen(1)
        }
        return DispCheckpointManager(
            hooks=self,
            save_seconds=self.job_config.guard.save_seconds,
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={
                "train_state": self,
                identity.NAME: identity.to_state(self.identity),
            },
            checkpoint_config=self.job_config.checkpoint,
            sd_adapter=adapter(self.model_args, self.job_config.model.hf_assets_path)
            if adapter
            else None,
            base_folder=self.job_config.job.dump_folder,
        )

    @contextmanager
    def _refusals(self, job: JobConfig) -> Iterator[None]:
        """Record why the run cannot continue: from this, a SLURM job knows that every
        start would fail alike.
        """
        try:
            yield
        except RefusedError as error:  # on every rank
            # on rank 0, the only one that has to list the checkpoints
            if self.run_folder is not None:
                saved = integrity.checkpoints(
                    self.run_folder.path / job.checkpoint.folder, True
                )
                self.event(
                    "refused",
                    max(saved, default=0),
                    allocated=self.clock.began,
                    reason=str(error),
                )
            raise

    def event(self, name: str, step: int, **details: Any) -> None:
        if self.run_folder is not None:
            self.run_folder.event(name, step, **details)

    def healthy(self) -> bool:
        self.optimizers.settle()
        return self.optimizers.in_a_row == 0

    def _skipped(self, late: bool) -> None:
        step = self.step - late  # the guard reads the message of a step in the next one
        self.event(
            "skip",
            step,
            terms=self.optimizers.bad_terms,
            in_a_row=self.optimizers.in_a_row,
        )

    def taken_by(self) -> str | None:
        other = self.run_folder.taken_by() if self.run_folder is not None else None
        if other:
            self.heartbeat.file = None  # the file is the other start's now
        return other

    def owns_folder(self) -> bool:
        return (
            self.run_folder is not None
            and self.run_folder.locked
            and not self.taken_by()
        )

    def _announce(self, doing: str, step: int) -> None:
        self.heartbeat.begin(doing, step)
        if self.run_folder is not None:  # on rank 0
            self.aside.wake()

    @contextmanager
    def busy(self, doing: str, step: int) -> Iterator[None]:
        """Announce a save, validation or condensation, and count its time."""
        self._announce(doing, step)
        with self.clock.during("checkpoints" if doing == "save" else doing):
            yield

    def batch_generator(self, data_iterable: Iterable[Any]) -> Iterator[Any]:
        """Yield batches.

        TorchTitan calls this once, after it has loaded a checkpoint: the step is known
        from here on.
        """
        for scheduler in cast(Any, self.lr_schedulers).schedulers:
            # a save without identity
            if (saved := len(scheduler.base_lrs)) != (own := len(scheduler.lr_lambdas)):
                raise RefusedError(
                    f"the checkpoint's schedule has {saved} groups of parameters, "
                    f"expected {own}: it was trained with another baseline.method. "
                    "Set the former method, or start a new run in another "
                    "--job.dump_folder"
                )
        self._start_step = self.step
        if 0 < self.step < self.last_step:
            self._use_own_options()
        _ = self.monitor  # refuses a text that is too short
        if self.run_folder is not None:
            # Otherwise the config is not what the run was trained with
            if trains := self.step < self.last_step:
                self.run_folder.record_start()
            details = (
                {"config_changes": self.run_folder.config_changes}
                if self.step and trains
                else {}
            )
            logger.info(console.overview(self))
            if self.step:
                self._say_changes()
            self.event(
                "resume" if self.step else "start",
                self.step,
                allocated=self.clock.began,
                **details,
            )
        # A stop where a measurement is due does not take it.
        if self.step == 0 or (
            self._due() and self.step < self.last_step and not on_rank_0(self._measured)
        ):
            self.measure_condensation()
        return self._timed(super().batch_generator(data_iterable))

    def _say_changes(self) -> None:
        changes = self.run_folder.config_changes if self.run_folder is not None else {}
        if shown := {
            key: both for key, both in changes.items() if not key.startswith(SILENT)
        }:
            said = ", ".join(
                f"{key}: {old!r} → {new!r}" for key, (old, new) in shown.items()
            )
            logger.warning(f"The config differs from that of the last start: {said}")

    def _use_own_options(self) -> None:
        """Replace the options of the optimizer that the checkpoint has brought back by
        those of the config.
        """
        for optimizer, scheduler, groups in zip(
            self.optimizers, self.lr_schedulers, self._own_options, strict=True
        ):
            scheduler.base_lrs = [own["initial_lr"] for own in groups]
            for group, own, factor in zip(
                optimizer.param_groups,
                groups,
                cast(Any, scheduler).lr_lambdas,
                strict=True,
            ):
                group.update(own, lr=own["initial_lr"] * factor(scheduler.last_epoch))
            scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if self.stragglers is not None:
                self.stragglers.arrived()
            yield batch

    def check_resume(self, step: int) -> None:
        """Compare model and data of the checkpoint with this run's, before DCP meets
        tensors of another size.

        Every rank raises ConfigError if one differs, unless stream.on_mismatch is
        "restart" and only the data does: then the data streams begin a new epoch.
        CheckpointError means that the checkpoint cannot be read.
        """
        folder = self.checkpointer._create_checkpoint_id(step)
        checkpoint = self.job_config.checkpoint
        other_loss = self.job_config.checkpoint.allow_other_loss
        counts = step > 0 and any(vars(self.job_config.budget).values())
        now = {
            key: value
            for key, value in self.identity.items()
            if counts or key != identity.STEP
        }
        identity.check_identity(
            on_rank_0(identity.read_identity, folder), now, other_loss
        )
        if step < 1 or "dataloader" in checkpoint.exclude_from_loading:
            return
        saved, epoch = on_rank_0(read_data_state, folder)
        try:
            check_fingerprint(saved, self.dataloader.fingerprint)
        except ConfigError as error:
            if self.job_config.stream.on_mismatch != "restart":
                raise
            logger.warning(f"the data streams restart with epoch {epoch + 1}: {error}")
            self.checkpointer.exclude_from_loading = [
                *checkpoint.exclude_from_loading,
                "dataloader",
            ]
            self.dataloader.restart(epoch + 1)
            self.event("streams_restarted", step, epoch=epoch + 1, reason=str(error))

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Run TorchTitan's step and act on what all ranks agreed on: during it if it
        logs or ends, else one step before.
        """
        self._announce("step", self.step)
        self._microbatch = 0
        with self.clock.during("steps"):
            super().train_step(data_iterator)
        self.heartbeat.step(self.step)
        if not self._stepped:
            self._stepped = True
            self._record_path()
            # TorchTitan shortens time-outs after step 1 only, and so never after a
            # resume.
            if self.step != 1 and not dry.is_dry(self.job_config):
                seconds = self.job_config.comm.train_timeout_seconds
                set_pg_timeouts(
                    timeout=timedelta(seconds=seconds), parallel_dims=self.parallel_dims
                )
        ends = self.step >= self.last_step or self.optimizers.agreed["stop"]
        # a log has waited for the device as well
        if ends or self.metrics_processor.should_log(self.step):
            self.optimizers.settle()
        if self.optimizers.agreed["save_failed"]:
            self.checkpointer.wait()
            raise CheckpointError(
                f"step {self.step}: an asynchronous save failed on another rank; its "
                "log says why"
            )
        if ends or self.optimizers.agreed["stop"]:
            self._stopping = True
            self.checkpointer.force()
        if self._due() and not self._stopping:
            self.measure_condensation()

    def _record_path(self) -> None:
        path = kernels.path()
        # not if dispersion is off, or its variant uses neither
        if any(path.values()) and self.run_folder is not None:
            self.run_folder.record_path(path)

    def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        """Run one microbatch.

        Under HSDP, only the last one sends gradients between replicas, across nodes.

        Before that, FSDP2 adds up what it has reduce-scattered, in the dtype of the
        reduction.
        """
        if self.stragglers is not None:
            self.stragglers.met()
        self._microbatch += 1
        last = self._microbatch == self.gradient_accumulation_steps
        if self.parallel_dims.dp_replicate_enabled and (last or self._microbatch == 1):
            cast(FSDPModule, self.model_parts[0]).set_requires_all_reduce(last)
        loss = super().forward_backward_step(**kwargs)
        late = cast(DispersionObjective, self.loss_fn).take_late()
        return loss if late is None else loss + late / kwargs["global_valid_tokens"]

    def should_continue_training(self) -> bool:
        return self.step < self.last_step and not self._stopping

    def train(self) -> None:
        steps = self.job_config.training.steps
        if on_rank_0(self.stop_request.held):
            if self.stop_request.file is not None:  # on rank 0
                logger.info(
                    f"{self.stop_request.file} exists, so nothing was trained. Remove "
                    "the file to continue"
                )
            reason = f"the file {self.stop_request.file} was there before the start"
            self.event(
                "stop",
                self.checkpointer.newest(),
                allocated=self.clock.began,
                kind="file",
                reason=reason,
            )
            return
        ended = self.checkpointer.ended_at()
        if ended is not None and ended >= steps:
            self._say_changes()
            logger.info(
                f"This run was already complete: step {ended} of {steps}. Nothing was "
                "trained"
            )
            self.event("complete", ended, allocated=self.clock.began)
            return
        with self._refusals(self.job_config):
            super().train()
        with self.busy("save", self.step):
            self.checkpointer.wait()
        trained = self.step > self._start_step
        complete = self.step >= steps
        if trained and not complete:
            # a stopped job has to end soon
            measure = not self.optimizers.agreed["stop"]
        # no later start trains, and the one that did may have been killed before it
        # measured
        else:
            measure = complete and (trained or not on_rank_0(self._measured))
        if measure:
            self.measure_condensation()
        if trained:
            self._end()
        elif complete:
            logger.info(
                f"This run was already complete: step {self.step} of {steps}. Nothing "
                "was trained"
            )
            # for what started the run again, such as a chain of jobs
            self.event("complete", self.step)
        else:
            logger.info(
                f"budget.stop_at_tokens was already reached: step {self.step} of "
                f"{steps}. Nothing was trained"
            )
            self.event("stop", self.step, kind="budget", reason="budget.stop_at_tokens")
        self.report()

    def save_seed(self) -> None:
        """Save the initial weights as step 0, from which starts of this run begin:
        checkpoint.create_seed_checkpoint.
        """
        with self._refusals(self.job_config):
            if saved := self.checkpointer.newest():
                raise RefusedError(
                    "checkpoint.create_seed_checkpoint is true, but the run has a "
                    f"checkpoint of step {saved}: set it to false"
                )
        if self.run_folder is not None:
            self.run_folder.record_start()
        self.event("start", 0, allocated=self.clock.began)
        self.checkpointer.save(curr_step=0, last_step=True)
        self.event("stop", 0, kind="seed", reason="checkpoint.create_seed_checkpoint")

    def _due(self) -> bool:
        interval = self.job_config.condensation.interval
        return interval > 0 and self.step % interval == 0

    def _measured(self) -> bool:
        return self.run_folder is not None and self.step in read_condensation(
            self.run_folder.path
        )

    def _end(self) -> None:
        spent = self.clock.rounded()
        if self.step >= self.job_config.training.steps:
            self.event("complete", self.step, spent=spent)
        elif self.optimizers.agreed["stop"]:
            reason = self.stop_request.reason or "another rank was asked to stop"
            saved = (
                ", saved"
                if self.checkpointer.saved_step == self.step
                else ", not saved"
            )
            logger.info(f"Stopped after step {self.step}{saved}: {reason}")
            kind = "signal" if self.optimizers.agreed["signal"] else "file"
            self.event("stop", self.step, kind=kind, reason=reason, spent=spent)
        else:
            logger.info(
                f"Stopped by budget.stop_at_tokens after step {self.step} of "
                f"{self.job_config.training.steps}"
            )
            self.event(
                "stop",
                self.step,
                kind="budget",
                reason="budget.stop_at_tokens",
                spent=spent,
            )
        self.stop_request.done()

    def report(self) -> None:
        """Log how condensation went, as a table."""
        if self.run_folder is not None:
            measured = read_condensation(self.run_folder.path)
            lines = over_training(
                {step: row for step, row in measured.items() if step <= self.step}
            )
            if lines:
                logger.info("\n".join(lines))

    def report_goodput(self) -> None:
        if self.run_folder is None:
            return
        try:
            starts = goodputs(
                read_rows(self.run_folder.path), read_events(self.run_folder.path)
            )
        # this error must not hide why a run ends
        except (OSError, ValueError, KeyError) as error:
            logger.warning(
                f"goodput cannot be computed: {type(error).__name__}: {error}"
            )
            return
        if starts:
            logger.info(
                "Time spent training (goodput) of this start: "
                f"{_said(starts[-1].in_its_allocation())}"
            )
        if len(starts) > 1:
            logger.info(
                f"Time spent training (goodput) of all {len(starts)} starts: "
                f"{_said(together(starts))}"
            )

    @cached_property
    def monitor(self) -> Monitor | None:
        """What measures condensation, or None.

        The first access is a collective call.
        """
        job = self.job_config
        section = self.job_config.condensation
        if not section.interval or dry.is_dry(job):
            return None
        assert self.tokenizer is not None
        found = held_out_sequences(job, self.tokenizer, section.sequences)
        if found is None:
            logger.warning(
                "condensation is not measured: no validation split was found (one is "
                "looked for only on the hub or in a folder). Set validation.enable = "
                "true with validation.dataset_path, or condensation.interval = 0"
            )
            return None
        mesh = self.parallel_dims.get_optional_mesh("batch")
        sequences, *segments = (rows.to(self.device) for rows in found)
        position = MeshPosition(
            sequence_group=process_group(self.loss_fn.group),
            label_group=process_group(self.loss_fn.cp_group),
        )
        if mesh is not None:
            position = replace(
                position,
                dp_rank=mesh.get_local_rank(),
                dp_degree=mesh.size(),
                dp_group=mesh.get_group(),
            )
        return Monitor(
            sequences,
            job.training.local_batch_size,
            section.max_tokens,
            position,
            *segments,
        )

    def measure_condensation(self) -> None:
        """Measure condensation and cross-entropy on held-out text, and log them.

        A collective call that changes nothing.
        """
        with self.busy("condensation", self.step):
            start = time.perf_counter()
            if self.monitor is None:
                return
            model = self.model_parts[0]
            layers = range(self.model_args.n_layers + 2)

            def forward(
                tokens: torch.Tensor,
                labels: torch.Tensor,
                segments: torch.Tensor | None = None,
            ) -> Forward:
                given = (
                    {"input": tokens}
                    if segments is None
                    else {"input": tokens, "segments": segments}
                )
                inputs, labels, extra, kwargs = self.post_dataloading_process(
                    given, labels
                )
                with self.train_context():
                    with self.maybe_enable_amp:
                        predictions = model(
                            inputs, **extra, **kwargs, return_activations=layers
                        )
                    ce = cross_entropies(predictions.logits, labels)
                positions = kwargs.get("positions")
                return Forward(
                    predictions.activations,
                    ce,
                    None if positions is None else positions[0],
                )

            model.eval()
            found = self.monitor.measure(forward)
            model.train()
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    # as backward would; a save would not find the optimizer's
                    # parameters of a gathered head
                    module.reshard()
            self.metrics_processor.log_condensation(
                self.step, found, time.perf_counter() - start
            )

    def close(self) -> None:
        self.taken_by()
        self.aside.close()
        self.heartbeat.close()
        self.stop_request.close()
        try:
            super().close()
        # TensorBoard's error on a full disk must not hide why the run ends.
        except OSError as error:
            logger.warning(f"The logs could not be closed: {error}")
        self.dataloader.close()
        if self.run_folder is not None:
            if self.step > self._start_step:
                self.report_goodput()
            self.run_folder.close()


def _said(goodput: Goodput) -> str:
    lost = ", ".join(
        f"{name} {timedelta(seconds=round(seconds))}"
        for name, seconds in goodput.lost().items()
    )
    kept, total = (
        timedelta(seconds=round(seconds)) for seconds in (goodput.kept, goodput.total)
    )
    usual = (
        ". A short run is mostly start-up"
        if goodput.start_up > goodput.kept and goodput.total < SHORT
        else ""
    )
    return (
        f"{goodput.fraction:.1%}, {kept} in steps that count, of {total}"
        + (f"; {lost}" if lost else "")
        + usual
    )


def run(job_config: JobConfig, trainer_class: type[DispTrainer] = DispTrainer) -> None:
    """Train from a checked config in this process, and destroy the process group at the
    end.
    """
    trainer: DispTrainer | None = None
    try:
        trainer = trainer_class(job_config)
        if job_config.checkpoint.create_seed_checkpoint:
            trainer.save_seed()
        else:
            trainer.train()
    finally:
        if trainer is not None:
            trainer.close()
    # If a rank leaves while others still communicate, gloo aborts after correct
    # results.
    dist.barrier()
    dist.destroy_process_group()


def main(
    argv: Sequence[str] | None = None, trainer_class: type[DispTrainer] = DispTrainer
) -> None:
    init_logger()
    console.split_log()
    try:
        # ``record`` writes a file from which torchrun reports the first rank that
        # failed, and why.
        record(run)(load_config(sys.argv[1:] if argv is None else argv), trainer_class)
    except UserError as error:  # without a traceback, and once per job
        if int(os.environ.get("RANK", "0")) == 0 or isinstance(error, DataError):
            print(f"titan-disp: error: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_CODE)


if __name__ == "__main__":
    main()
