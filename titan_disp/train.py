"""``torchrun … -m titan_disp.train --job.config_file X`` trains.

Each *start* continues from the run's newest checkpoint.

TorchTitan's trainer runs the steps. In each step, titan-disp adds, in this order:

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
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from shlex import quote
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor
from torchtitan.distributed.utils import set_pg_timeouts
from torchtitan.tools import utils
from torchtitan.tools.logging import init_logger, logger
from torchtitan.train import Trainer

# This registers the models and sets the device type, whatever the config imports.
import titan_disp.plugin  # noqa: F401
from titan_disp.checks import check_config, check_device, check_launched
from titan_disp.condensation.measure import Monitor
from titan_disp.condensation.record import over_training
from titan_disp.config.batch import data_parallel_degree, last_step
from titan_disp.config.load import load_config
from titan_disp.config.types import JobConfig
from titan_disp.data.listing import on_rank_0
from titan_disp.data.loader import StreamLoader
from titan_disp.data.options import stream_options
from titan_disp.data.passes import Progress
from titan_disp.data.prefetch import Worker
from titan_disp.data.tokenizer import tokenizer_of_export
from titan_disp.data.validation import StreamValidator
from titan_disp.dispersion import kernels
from titan_disp.dispersion.autograd import of_ranks, process_group
from titan_disp.errors import (
    EXIT_CODE,
    CheckpointError,
    DataError,
    EndedError,
    NonFiniteError,
    RefusedError,
    UserError,
    counted,
)
from titan_disp.files import allow_open_files
from titan_disp.objective import DispersionObjective
from titan_disp.run import console, dry, held_out, identity, integrity
from titan_disp.run.checkpoint import DispCheckpointManager, Hooks
from titan_disp.run.folder import RUN_ID, RunFolder, lasting_id, read_id
from titan_disp.run.guard import GuardedOptimizers
from titan_disp.run.history import goodputs, step_back, together
from titan_disp.run.liveness import (
    Aside,
    Clock,
    Heartbeat,
    Start,
    StopRequest,
    Stragglers,
    allocation_began,
)
from titan_disp.run.metrics import DispersionMetrics
from titan_disp.run.peers import Peers
from titan_disp.run.reader import read_condensation, read_events, read_rows
from titan_disp.run.storage import patiently

# The options of parameter groups that the config decides, not the checkpoint. (Whether
# Adam is fused belongs to its state.)
OPTIONS = ("initial_lr", "betas", "eps", "weight_decay", "decoupled_weight_decay")
# Sections of the config that do not affect training. The event ``resume`` has their
# changes, but the log does not.
SILENT = ("job.", "metrics.", "profiling.", "comm.")
BUDGET = "budget.stop_at_tokens"


class DispTrainer(Start, Trainer):
    """TorchTitan's Trainer with some methods overridden. ``Start`` has the methods that
    report what a start does: ``event``, ``announce``, ``busy``.
    """

    stragglers: Stragglers | None = None
    peers: Aside | None = None  # the thread of ``Peers``, if there are other ranks
    worker: Worker | None = None  # the prefetch worker
    checkpointer: DispCheckpointManager
    dataloader: StreamLoader
    metrics_processor: DispersionMetrics
    optimizers: GuardedOptimizers
    loss_fn: DispersionObjective
    validator: StreamValidator
    _start_step = 0  # steps done when this start began
    _stopping = False  # whether the last step of this start is done
    _stepped = False  # whether this start has done a step
    _limit = ""  # why more steps were skipped than guard.max_skipped_steps allows
    _reread = 0  # stored bytes that all ranks have read to reach their positions
    _microbatch = 0  # the current one of the step, from 1

    # ---- the parts

    def __init__(self, job_config: JobConfig) -> None:
        """Check the config, open the run folder, and build all parts.

        Raises ConfigError on every rank if the config cannot work, before anything is
        allocated, and InUseError on rank 0 if another job uses the run folder.
        """
        self.job_config = job_config
        self.clock = Clock(allocation_began())
        is_rank_0 = os.environ.get("RANK", "0") == "0"
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if dry.is_dry(job_config):
            world_size = dry.simulated_ranks()
        check_config(job_config, world_size)
        check_device(job_config)
        check_launched(job_config)
        allow_open_files(1 if dry.is_dry(job_config) else world_size)
        if job_config.stream.prefetch:  # before the process group: see data.prefetch
            batch = job_config.training.local_batch_size
            self.worker = Worker(stream_options(job_config), batch)
        path = None
        if dry.is_dry(job_config):
            dry.write_nothing(job_config)
        elif is_rank_0:
            self.run_folder = RunFolder(job_config, world_size)
            path = self.run_folder.path
        if is_rank_0:
            logger.info(console.title(job_config))
        if os.environ.get("NO_COLOR"):
            job_config.metrics.disable_color_printing = True
        self.heartbeat = Heartbeat(path, job_config)
        self.aside = Aside(self.heartbeat.write)
        if self.run_folder is not None:
            self.aside.errands.append(self.run_folder.lock.renew)
        self.announce("start", 0)
        self.last_step = last_step(
            job_config, data_parallel_degree(job_config, world_size)
        )
        # TorchTitan's checkpoint manager is not part of the spec. It is therefore
        # disabled here, and ours is built afterwards.
        enable = job_config.checkpoint.enable
        job_config.checkpoint.enable = False
        try:
            with self._refusals():
                super().__init__(job_config)
        finally:
            job_config.checkpoint.enable = enable
        self.checkpointer = self._build_checkpointer()
        self.stop_request = StopRequest(path)
        self._connect_parts(world_size)

    def _build_checkpointer(self) -> DispCheckpointManager:
        """Return the checkpoint manager. A collective call."""
        job = self.job_config
        self.identity = identity.of_model(job, self.model_args) | {
            identity.STEP: self.metrics_processor.tokens_seen(1)
        }
        if run := on_rank_0(patiently, read_id, Path(job.job.dump_folder, RUN_ID)):
            self.identity[identity.RUN] = run
        return DispCheckpointManager(
            hooks=Hooks(
                check_resume=partial(identity.check_resume, self),
                healthy=self.optimizers.healthy,
                taken_by=self.taken_by,
                owns_folder=self.owns_folder,
                event=self.event,
                busy=self.busy,
                tokenizer=partial(
                    tokenizer_of_export,
                    job.model.hf_assets_path,
                    job.stream.separator,
                ),
            ),
            save_seconds=job.guard.save_seconds,
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={
                "train_state": self,
                identity.NAME: identity.to_state(self.identity),
            },
            checkpoint_config=job.checkpoint,
            sd_adapter=self.train_spec.state_dict_adapter(
                self.model_args, job.model.hf_assets_path
            ),
            base_folder=job.job.dump_folder,
        )

    def _connect_parts(self, world_size: int) -> None:
        """Connect TorchTitan's parts with each other, after they are built."""
        job = self.job_config
        self.loss_fn.defer = True
        if self.worker is not None:
            self.dataloader.use(self.worker)
        if job.validation.enable:
            self.validator.around = partial(self.busy, "validation")
        self.metrics_processor.clock = self.clock
        if not dry.is_dry(job):
            self.dataloader.on_progress = self._read_to_positions
        if world_size > 1 and not dry.is_dry(job):
            self.stragglers = self.metrics_processor.stragglers = Stragglers()
            self._connect_peers(world_size)
        self.aside.errands.append(self.stop_request)
        if self.run_folder is not None:
            self.aside.errands.append(self.run_folder.events.flush)
        if self.metrics_processor.rows is not None:
            self.aside.errands.append(self.metrics_processor.rows.flush)
        self._configured_options = [
            [{key: group[key] for key in OPTIONS} for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]
        self.optimizers.flags["stop"] = self.stop_request.asked
        self.optimizers.flags["signal"] = self.stop_request.signalled
        self.optimizers.flags["save_failed"] = self.checkpointer.save_has_failed
        self.optimizers.on_skip = self._skipped
        self.optimizers.at_limit = partial(setattr, self, "_limit")

    def _connect_peers(self, world_size: int) -> None:
        """Start a thread, with its own connection to the store, that tells other ranks
        what this rank does.
        """
        store: Any = dist.distributed_c10d._get_default_store()
        store = store.clone()
        store.set_timeout(timedelta(seconds=10))
        peers = Peers(self.heartbeat, store, dist.get_rank(), world_size)
        self.peers = Aside(peers.exchange)
        self.peers.wake()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Write the event ``refused`` if this context raises RefusedError, and raise the
        error again. The event tells a SLURM job that every start would fail alike.
        """
        try:
            yield
        except RefusedError as error:  # raised on every rank
            # Only rank 0 has the run folder, and lists the checkpoints.
            if self.run_folder is not None:
                folder = self.run_folder.path / self.job_config.checkpoint.folder
                saved = patiently(integrity.checkpoints, folder, True)
                trained = {"spent": self.clock.rounded()}
                untrained = {"allocated": self.clock.began}
                self.event(
                    "refused",
                    max(saved, default=0),
                    reason=str(error),
                    **(trained if self._stepped else untrained),
                )
            raise

    def _skipped(self, late: bool) -> None:
        """Write the event ``skip`` for this step, or if ``late``, for the previous one."""
        step = self.step - late  # the guard reads a step's message in the next step
        self.event(
            "skip",
            step,
            terms=self.optimizers.bad_terms,
            in_a_row=self.optimizers.in_a_row,
        )

    # ---- before the first step

    def batch_generator(self, data_iterable: Iterable[Any]) -> Iterator[Any]:
        """Record what this start does, and return an iterator over this rank's batches.

        TorchTitan calls this once, after loading a checkpoint, so the step is known
        from here on. Raises, on all ranks, RefusedError if the checkpoint is
        of another baseline.method, and ConfigError if the held-out text is too short.
        """
        self._check_parameter_groups()
        self._start_step = self.step
        trains = self.step < self.last_step
        if self.step and trains:
            self._use_configured_options()
        _ = self.monitor  # refuses a text that is too short
        self._name_run()
        self._record_beginning(trains)
        # A start that stopped at a step may have ended before the measurement that was
        # due, so the measurement is taken now.
        if self.step == 0 or (trains and self._due() and not on_rank_0(self._measured)):
            self.measure_condensation()
        return self._timed(super().batch_generator(data_iterable))

    def _name_run(self) -> None:
        """Put the run's id into the checkpoints to come. In a new folder, a run takes the
        id of the checkpoint that it has loaded, or creates one. A collective call.
        """
        checkpoint = self.job_config.checkpoint
        if not checkpoint.enable or checkpoint.load_only:
            return
        file = Path(self.job_config.job.dump_folder, RUN_ID)
        run = self.identity.get(identity.RUN, "")
        self.identity[identity.RUN] = on_rank_0(patiently, lasting_id, file, run)
        state = identity.to_state(self.identity)
        self.checkpointer.states[identity.NAME] = state

    def _check_parameter_groups(self) -> None:
        """Raise RefusedError if the loaded schedule has another number of parameter
        groups than this run. This is possible if the checkpoint has no identity.
        """
        for scheduler in self.lr_schedulers:
            saved = len(scheduler.base_lrs)
            expected = len(scheduler.lr_lambdas)
            if saved != expected:
                raise RefusedError(
                    f"the checkpoint's schedule has {saved} groups of parameters, "
                    f"expected {expected}: the checkpoint was trained with another "
                    "baseline.method. Set the former method, or start a new run in "
                    "another --job.dump_folder"
                )

    def _use_configured_options(self) -> None:
        """Let the optimizers use the options of the config instead of those that were
        loaded from the checkpoint.
        """
        for optimizer, scheduler, configured in zip(
            self.optimizers, self.lr_schedulers, self._configured_options, strict=True
        ):
            scheduler.base_lrs = [options["initial_lr"] for options in configured]
            factors = scheduler.lr_lambdas
            for group, options, factor in zip(
                optimizer.param_groups, configured, factors, strict=True
            ):
                rate = options["initial_lr"] * factor(scheduler.last_epoch)
                group.update(options, lr=rate)
            scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]

    def _record_beginning(self, trains: bool) -> None:
        """Log what this start trains, and write its first event. A start that does not
        train does not write its config, because the run was not trained with it.
        """
        if self.run_folder is None:
            return
        if trains:
            self.run_folder.record_start()
        logger.info(console.overview(self))
        details = {}
        if self.step:
            self._warn_of_changes()
            if trains:
                details["config_changes"] = self.run_folder.config_changes
        self.event(
            "resume" if self.step else "start",
            self.step,
            allocated=self.clock.began,
            **details,
        )

    def _warn_of_changes(self) -> None:
        """Log which keys have changed since the last start, on rank 0."""
        if self.run_folder is None:
            return
        changes = [
            f"{key}: {old!r} → {new!r}"
            for key, (old, new) in self.run_folder.config_changes.items()
            if not key.startswith(SILENT)
        ]
        if changes:
            logger.warning(
                "The config differs from that of the last start: " + ", ".join(changes)
            )

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches. Note, for other ranks and for ``stragglers``, when this
        rank reads data and when each batch has arrived.
        """
        self.heartbeat.go_on("reading data", self.step)
        for batch in batches:
            self.heartbeat.go_on("step", self.step)
            if self.stragglers is not None:
                self.stragglers.arrived()
            yield batch
            self.heartbeat.go_on("reading data", self.step)

    def _read_to_positions(self, progress: Progress) -> None:
        """While the ranks read to their data positions, report how far they have read
        in total, if this has changed since the last report. A rank that has finished
        waits here for the others, because its first step would not wait that long.

        A collective call, which each rank repeats until its progress is finished.
        """
        total = _of_all_ranks(progress)
        while not total.finished:
            if total.read > self._reread:
                self._reread = total.read
                self.announce(str(total), self.step)
                if self.run_folder is not None:
                    logger.info(f"data: {total}")
            if not progress.finished:
                return
            total = _of_all_ranks(progress)
        self.announce("step", self.step)

    # ---- a step

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Run TorchTitan's step, and act on what all ranks agreed on: in this step, if
        this step logs or is the last one; otherwise, in the previous step.

        Raises on all ranks what ``_step_back`` raises, CheckpointError if an
        asynchronous save has failed, and DataError if too much of the data is damaged.
        """
        self.announce("step", self.step)
        self._microbatch = 0
        with self.clock.during("steps"):
            super().train_step(data_iterator)
        self.heartbeat.step(self.step)
        if not self._stepped:
            self._stepped = True
            self._record_kernels()
            # TorchTitan shortens time-outs after step 1 only, and so never after a
            # resume.
            seconds = timedelta(seconds=self.job_config.comm.train_timeout_seconds)
            if self.step != 1 and not dry.is_dry(self.job_config):
                set_pg_timeouts(timeout=seconds, parallel_dims=self.parallel_dims)
            # TorchTitan does not know the group of CP×TP, so its time-out is set here.
            if (group := process_group(self.loss_fn.group)) is not None:
                _set_pg_timeout(seconds, group)
        # Here, the host waits for the device anyway, because this step saves or logs.
        if self._ends() or self.metrics_processor.should_log(self.step):
            self.optimizers.settle()
        if self._limit:
            self._step_back()
        if self.optimizers.agreed["save_failed"]:
            self.checkpointer.wait()
            if not self.checkpointer.saves_again:
                raise CheckpointError(
                    f"step {self.step}: an asynchronous save failed on another rank; "
                    "that rank's log says why"
                )
        if self._ends():
            self._stopping = True
            self.checkpointer.force()
        elif self._due():
            self.measure_condensation()

    def _step_back(self) -> None:
        """Go on with the weights of an earlier checkpoint than the newest one, because
        too many steps were skipped in a row. Data, schedule and step count do not go
        back. A checkpoint is saved after this step, so that every later start begins
        there. A collective call.

        Raises on all ranks RefusedError if the run has gone back before, and
        NonFiniteError if it has no earlier checkpoint, or no step left to train.
        """
        if (before := on_rank_0(self._went_back)) is not None:
            run = self.job_config.job.dump_folder
            checkpoint = self.job_config.checkpoint.folder
            raise RefusedError(
                f"{self._limit}. The run went back at step {before}, and does so once. "
                f"To see its checkpoints: titan-disp checkpoint {quote(run)}. To train "
                "from an earlier one, move each newer one away, such as mv "
                f"{quote(run)}/{checkpoint}/step-{self.checkpointer.newest()} "
                f"{quote(run)}, and start the run again with a lower --optimizer.lr"
            )
        restored = None
        if self.step < self.last_step:
            restored = self.optimizers.keeping_counts(self.checkpointer.step_back)
        if restored is None:
            raise NonFiniteError(self._limit)
        self._use_configured_options()
        self.checkpointer.force()
        per_step = self.metrics_processor.tokens_seen(1)
        sequences = (
            (self.step - restored) * per_step // self.job_config.training.seq_len
        )
        logger.warning(
            f"step {self.step}: the run goes back to the weights of step {restored}, "
            f"and does not train again on the {counted(sequences, 'sequence')} since "
            f"then. {self._limit}"
        )
        self.event(
            "step_back",
            self.step,
            checkpoint=restored,
            sequences=sequences,
            reason=self._limit,
        )
        self._limit = ""

    def _went_back(self) -> int | None:
        """Return the step at which the run went back to earlier weights, or None. Only
        rank 0, which has the run folder, knows it.
        """
        if self.run_folder is None:
            return None
        return step_back(patiently(read_events, self.run_folder.path))

    def _ends(self) -> bool:
        """Return whether this start ends with this step, as far as all ranks have agreed
        by now.
        """
        return self.step >= self.last_step or self.optimizers.agreed["stop"]

    def should_continue_training(self) -> bool:
        """Return whether TorchTitan runs another step. All ranks return the same."""
        return self.step < self.last_step and not self._stopping

    def _record_kernels(self) -> None:
        """Write to environment.json which kernels computed the dispersion of the first
        step, on rank 0.
        """
        used = kernels.path()  # kernels and dtypes of products; both may be empty
        if any(used.values()) and self.run_folder is not None:
            self.run_folder.record_path(used)

    def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        """Run one microbatch, and return this rank's part of its loss, a scalar.

        Under HSDP, only the last microbatch of a step sends gradients between replicas,
        across nodes. Until then, FSDP2 adds up the gradients that it has
        reduce-scattered, in the dtype of the reduction.
        """
        if self.stragglers is not None:
            self.stragglers.met()
        self._microbatch += 1
        last = self._microbatch == self.gradient_accumulation_steps
        if self.parallel_dims.dp_replicate_enabled and (last or self._microbatch == 1):
            self.model_parts[0].set_requires_all_reduce(last)
        loss = super().forward_backward_step(**kwargs)
        if last:
            self._reduce_partial_gradients()
        # λ · dispersion, summed over tokens, if the backward pass computed it
        late = self.loss_fn.take_late()
        if late is not None:
            loss = loss + late / kwargs["global_valid_tokens"]
        return loss

    def _reduce_partial_gradients(self) -> None:
        """Sum the gradients of the norms over the TP ranks. Without FSDP, no backward
        pass sums them, and clipping and the optimizer would each repeat the sum.
        """
        for weight in self.model_parts[0].parameters():
            gradient = weight.grad
            if isinstance(gradient, DTensor) and any(
                placement.is_partial() for placement in gradient.placements
            ):
                weight.grad = gradient.redistribute(placements=weight.placements)

    # ---- condensation

    @cached_property
    def monitor(self) -> Monitor | None:
        """The monitor that measures condensation, or None if it is not measured.

        The first access is a collective call, and raises ConfigError if the held-out
        text is too short.
        """
        return held_out.build_monitor(self)

    def measure_condensation(self) -> None:
        """Measure condensation and cross-entropy on held-out text, and log them.

        A collective call that changes nothing.
        """
        with self.busy("condensation", self.step):
            start = time.perf_counter()
            if self.monitor is None:
                return
            measurement = held_out.measure(self, self.monitor)
            self.metrics_processor.log_condensation(
                self.step, measurement, time.perf_counter() - start
            )

    def _due(self) -> bool:
        """Return whether condensation is measured after this step."""
        interval = self.job_config.condensation.interval
        return interval > 0 and self.step % interval == 0

    def _measured(self) -> bool:
        """Return whether the run folder has a measurement of this step. Only rank 0,
        which has the folder, knows it.
        """
        if self.run_folder is None:
            return False
        return self.step in patiently(read_condensation, self.run_folder.path)

    # ---- the end

    def train(self) -> None:
        """Load a checkpoint, and train until the run is complete, its budget is used up,
        or it is asked to stop.

        Raises what ``DispCheckpointManager.load`` and ``save``, ``batch_generator`` and
        ``train_step`` raise.
        """
        if on_rank_0(self.stop_request.held):
            self._hold()
            return
        steps = self.job_config.training.steps
        with self._refusals():
            try:
                super().train()
            except EndedError as error:
                if error.step < steps:
                    raise
                self._warn_of_changes()
                self._complete_already(error.step, allocated=self.clock.began)
                return
        with self.busy("save", self.step):
            self.checkpointer.finish(self.step)
        if self._measures_at_the_end():
            self.measure_condensation()
        if self.step > self._start_step:
            self._end()
        elif self.step >= steps:
            # A program that started the run again, such as a chain of jobs, reads this.
            self._complete_already(self.step)
        else:
            logger.info(
                f"{BUDGET} was already reached: step {self.step} of {steps}. Nothing "
                "was trained"
            )
            self.event("stop", self.step, kind="budget", reason=BUDGET)
        self.report()

    def _hold(self) -> None:
        """Record that a user's stop file was there before this start. A collective
        call.
        """
        file = self.stop_request.file
        if file is not None:  # on rank 0
            logger.info(
                f"{file} exists, so nothing was trained. Remove the file to continue"
            )
        self.event(
            "stop",
            self.checkpointer.newest(),
            allocated=self.clock.began,
            kind="file",
            reason=f"the file {file} was there before the start",
        )

    def _complete_already(self, step: int, **details: Any) -> None:
        """Log and record that this start trained nothing, as the run was complete."""
        logger.info(
            f"This run was already complete: step {step} of "
            f"{self.job_config.training.steps}. Nothing was trained"
        )
        self.event("complete", step, **details)

    def _measures_at_the_end(self) -> bool:
        """Return whether to measure the model now that training has ended. A collective
        call.
        """
        trained = self.step > self._start_step
        if self.step < self.job_config.training.steps:
            # a stopped job has to end soon
            return trained and not self.optimizers.agreed["stop"]
        # No later start will train, and the last start that trained may have been
        # killed before it measured.
        return trained or not on_rank_0(self._measured)

    def _end(self) -> None:
        """Log and record why training has ended at this step: the event ``complete`` or
        ``stop``.
        """
        steps = self.job_config.training.steps
        agreed = self.optimizers.agreed
        spent = self.clock.rounded()
        if self.step >= steps:
            self.event("complete", self.step, spent=spent)
        elif agreed["stop"]:
            reason = self.stop_request.reason or "another rank was asked to stop"
            saved = (
                "saved" if self.checkpointer.saved_step == self.step else "not saved"
            )
            logger.info(f"Stopped after step {self.step}, {saved}: {reason}")
            source = "signal" if agreed["signal"] else "file"
            self.event("stop", self.step, kind=source, reason=reason, spent=spent)
        else:
            logger.info(f"Stopped by {BUDGET} after step {self.step} of {steps}")
            self.event("stop", self.step, kind="budget", reason=BUDGET, spent=spent)
        self.stop_request.done()

    def save_seed(self) -> None:
        """Save the initial weights as step 0, as checkpoint.create_seed_checkpoint
        asks. Starts of this run then begin from these weights.

        Raises, on all ranks, RefusedError if the run has a checkpoint of a later step,
        and CheckpointError if the save fails. Also raises InUseError if another start
        has taken the run folder.
        """
        with self._refusals():
            if newest := self.checkpointer.newest():
                raise RefusedError(
                    "checkpoint.create_seed_checkpoint is true, but the run has a "
                    f"checkpoint of step {newest}: set it to false"
                )
        self._name_run()
        if self.run_folder is not None:
            self.run_folder.record_start()
        self.event("start", 0, allocated=self.clock.began)
        self.checkpointer.save(curr_step=0, last_step=True)
        self.event("stop", 0, kind="seed", reason="checkpoint.create_seed_checkpoint")

    def report(self) -> None:
        """Log a table of condensation over training, on rank 0."""
        if self.run_folder is None:
            return
        measured = patiently(read_condensation, self.run_folder.path)
        lines = over_training(
            {step: row for step, row in measured.items() if step <= self.step}
        )
        if lines:
            logger.info("\n".join(lines))

    def report_goodput(self, run: Path) -> None:
        """Log which part of the time was spent training, from the files of a run. If they
        cannot be read, log a warning.
        """
        try:
            starts = goodputs(read_rows(run), read_events(run))
        # this error must not hide why a run ends
        except (OSError, ValueError, KeyError) as error:
            logger.warning(
                f"goodput cannot be computed: {type(error).__name__}: {error}"
            )
            return
        title = "Time spent training (goodput) of"
        if starts:
            logger.info(f"{title} this start: {starts[-1].in_its_allocation()}")
        if len(starts) > 1:
            logger.info(f"{title} all {len(starts)} starts: {together(starts)}")

    def close(self) -> None:
        """Close all parts, the run folder last. On a full disk, log a warning."""
        self.taken_by()  # keeps heartbeat.json if another start has the run folder
        self.aside.close()
        if self.peers is not None:
            self.peers.close()
        self.heartbeat.close()
        self.stop_request.close()
        try:
            super().close()
        # TensorBoard's error on a full disk must not hide why the run ends.
        except OSError as error:
            logger.warning(f"The logs could not be closed: {error}")
        self.dataloader.close()
        if self.worker is not None:
            self.worker.close()
        if self.run_folder is not None:
            if self.step > self._start_step:
                self.report_goodput(self.run_folder.path)
            self.run_folder.close()


def _of_all_ranks(progress: Progress) -> Progress:
    """Return the progress of all ranks together. A collective call."""
    numbers = torch.tensor(
        [progress.read, progress.expected, progress.seconds_left, progress.finished],
        dtype=torch.float64,
        device=utils.device_type,
    )
    read, expected, seconds_left, finished = of_ranks(numbers).unbind(1)
    return Progress(
        read=int(read.sum()),
        expected=int(expected.sum()),
        seconds_left=seconds_left.max().item(),
        finished=bool(finished.all()),
    )


def run(job_config: JobConfig, trainer_class: type[DispTrainer] = DispTrainer) -> None:
    """Train in this process, and destroy the process group at the end.

    Raises what the trainer raises, after closing the trainer. The process group is then
    left as it is.
    """
    with closing(trainer_class(job_config)) as trainer:
        if job_config.checkpoint.create_seed_checkpoint:
            trainer.save_seed()
        else:
            trainer.train()
    # If a rank leaves while others still communicate, gloo aborts after correct
    # results.
    dist.barrier()
    dist.destroy_process_group()


def main(
    argv: Sequence[str] | None = None, trainer_class: type[DispTrainer] = DispTrainer
) -> None:
    """Train with TorchTitan's arguments, by default those of the command line.

    A UserError becomes one line on stderr and the exit status ``EXIT_CODE``. Other
    errors are raised.
    """
    init_logger()
    console.split_log()
    try:
        # ``record`` writes a file from which torchrun reports the first rank that
        # failed, and why.
        record(run)(load_config(sys.argv[1:] if argv is None else argv), trainer_class)
    except UserError as error:  # without a traceback, and once per job
        if os.environ.get("RANK", "0") == "0" or isinstance(error, DataError):
            print(f"titan-disp: error: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_CODE)


if __name__ == "__main__":
    main()
