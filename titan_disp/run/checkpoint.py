"""This module extends TorchTitan's checkpoint manager so that a run survives failing
nodes and damaged checkpoints.

docs/resilience.md says what this promises. A checkpoint is *complete* if it has DCP's
``.metadata``, which is written last. If a load or save fails on any rank, all ranks
learn of it and stop together.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout
from torchtitan.components.checkpoint import MODEL, AsyncMode, CheckpointManager
from torchtitan.config.job_config import Checkpoint
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_disp import safe_dcp
from titan_disp.data.hf_tokenizer import write_tokenizer
from titan_disp.data.listing import on_rank_0
from titan_disp.data.tokenizer import AnyTokenizer
from titan_disp.dispersion.autograd import objects_of_ranks
from titan_disp.errors import (
    CheckpointError,
    ConfigError,
    EndedError,
    InUseError,
    RefusedError,
    UnreadableError,
    UserError,
)
from titan_disp.models.hf import INDEX, HfAdapter, check_hf_folder
from titan_disp.run import identity, integrity, storage
from titan_disp.run.save_plan import SavePlanner
from titan_disp.run.storage import write_json

T = TypeVar("T")
# The states that stepping back does not load: data, schedule and step count go on.
GO_ON = ["dataloader", "lr_scheduler", "train_state"]


def check_initial_load(
    checkpoint: Checkpoint, assets: str | None, adapter: HfAdapter
) -> None:
    """Check the weights that a new run begins with, if [checkpoint] names any.

    ``assets`` is ``model.hf_assets_path``. The hashes of a DCP checkpoint are compared
    only when the weights are loaded.

    Raises:
        ConfigError: the keys contradict each other, or the weights are missing,
            incomplete, or (in Hugging Face's format) another model's.
        RefusedError: a DCP checkpoint has lost its hashes.json.
        CheckpointError, OSError: a file cannot be read.
    """
    path = checkpoint.initial_load_path
    if not checkpoint.enable:
        if path or checkpoint.initial_load_in_hf:
            raise ConfigError(
                "checkpoint.initial_load_path or initial_load_in_hf is set, but "
                "checkpoint.enable is false, so nothing would be loaded: set "
                "checkpoint.enable to true"
            )
    elif checkpoint.initial_load_in_hf:
        if not checkpoint.initial_load_model_only:
            raise ConfigError(
                "checkpoint.initial_load_in_hf needs "
                "checkpoint.initial_load_model_only: safetensors hold no optimizer"
            )
        check_hf_folder(path or assets or "", adapter)
    elif path and (
        reason := integrity.problem(path)
        if os.path.isdir(path)
        else "it is not a folder"
    ):
        raise ConfigError(
            f"checkpoint.initial_load_path {path!r} cannot be loaded: {reason}; "
            "expected RUN/checkpoint/step-N of another run, or a Hugging Face folder "
            "with checkpoint.initial_load_in_hf = true"
        )
    elif path and not checkpoint.allow_unverified:
        identity.check_hashes(path)


def missing_step(step: int, folder: str, steps: list[int]) -> str:
    """Return the error message for a checkpoint.load_step that is not among the
    ``steps`` in ``folder``.
    """
    held = "no checkpoint"
    if steps:
        held = f"the steps {', '.join(map(str, steps))}"
    return f"checkpoint.load_step is {step}, but {folder} holds {held}"


def hf_config(
    adapter: HfAdapter, tokenizer: AnyTokenizer, dtype: str
) -> dict[str, Any]:
    """Return the Hugging Face config of a model, with the ids of the BOS and EOS tokens
    that training puts around documents.
    """
    return {
        **adapter.architecture(),
        **adapter.extras(),
        "architectures": [adapter.transformers_class],
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "torch_dtype": dtype,
    }


def describe(
    dest: Path,
    adapter: HfAdapter,
    folder: Path,
    tokenizer: AnyTokenizer,
    dtype: str,
    documents: Iterable[str] = (),
) -> None:
    """Write what ``from_pretrained`` needs besides the weights into ``dest``: two config
    files and the tokenizer.

    ``tokenizer`` was loaded from ``folder``, ``dtype`` is the dtype of the weights, and
    ``adapter.model_args.max_seq_len`` is the sequence length of training. Raises
    ConfigError if the tokenizer cannot be converted, or if the written tokenizer does
    not give the ids of training for ``documents`` and ``hf_tokenizer.PROBES``. Also
    raises OSError.
    """
    write_json(dest / "config.json", hf_config(adapter, tokenizer, dtype))
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    write_json(
        dest / "generation_config.json", {k: v for k, v in ids.items() if v is not None}
    )
    write_tokenizer(folder, tokenizer, dest, adapter.model_args.max_seq_len, documents)


@dataclass
class Hooks:
    """Functions that a checkpoint manager calls. Comments name what ``train`` passes."""

    check_resume: Callable[[int], None]  # run.identity.check_resume
    healthy: Callable[[], bool]  # run.guard.GuardedOptimizers.healthy
    # Methods of run.liveness.Start. Only a start that owns the run folder may delete
    # unfinished saves of dead processes.
    taken_by: Callable[[], str | None]
    owns_folder: Callable[[], bool]
    event: Callable[..., None]
    busy: Callable[[str, int], AbstractContextManager[None]]
    tokenizer: Callable[[], AnyTokenizer]  # data.tokenizer.tokenizer_of_export


class DispCheckpointManager(CheckpointManager):
    folder: str
    exclude_from_loading: list[str]
    sd_adapter: HfAdapter
    save_future: Any = None  # the Future of an asynchronous save, or None

    def __init__(self, hooks: Hooks, save_seconds: float, **kwargs: Any) -> None:
        """Create the manager. A collective call.

        During a save, no rank waits longer than ``save_seconds`` for another rank.
        """
        self.pg: Any = None
        super().__init__(**kwargs)
        # A rank may write for minutes, and the time-outs of training are shorter, so
        # saves need a group with their own time-out. If TorchTitan has created a group
        # for asynchronous saves, that group is used, because a second one would double
        # the number of sockets. gloo accepts no infinite time-out.
        self._time = timedelta(seconds=min(save_seconds, 1e8))
        if self.enable and dist.get_backend() != "fake":
            self.pg = self.pg or dist.new_group(backend="gloo", timeout=self._time)
            set_timeout(self._time, self.pg)
        self.hooks = hooks
        # TorchTitan sets sd_adapter only if checkpoints are enabled
        self.sd_adapter = kwargs["sd_adapter"]
        self._config = kwargs["checkpoint_config"]
        # The step of the newest checkpoint that this process has completely saved.
        self.saved_step: int | None = None
        self._forced = False
        self._due = False  # whether a save was put off while steps were skipped
        # Whether an asynchronous save has failed, so that the next call of ``save`` saves.
        self.saves_again = False
        self._failures = 0  # asynchronous saves that have failed in a row
        self._saving: int | None = None  # step of a running asynchronous save

    # ---- save

    def force(self) -> None:
        """Save at the next call of ``save``, whatever the interval."""
        self._forced = True

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self.enable or self.load_only:
            return False
        if self.saves_again:
            return True
        wanted = self._forced or self._due or super()._should_save(curr_step, last_step)
        # A skipped step changes no weights, so a save would be sound. The save still
        # waits, because the next good step is not far away.
        if wanted and not self.hooks.healthy() and not (self._forced or last_step):
            self._due = True
            logger.warning(
                f"step {curr_step}: no checkpoint is saved while steps are skipped; the "
                "next good step saves one"
            )
            return False
        return wanted

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save as TorchTitan does, if a save is due.

        Raises CheckpointError on all ranks if this save or the previous one failed, and
        InUseError if another start has taken the run folder.
        """
        if not self._should_save(curr_step, last_step):
            return
        with self.hooks.busy("save", curr_step):
            try:
                self.wait()
                storage.together(self._save, curr_step, last_step)
            except (CheckpointError, InUseError):
                raise
            # DCP's CheckpointException is not an Exception
            except BaseException as error:
                raise self._save_error(curr_step, error) from error
            self._forced = self._due = self.saves_again = False
            if self.save_future is not None and not last_step:
                self._saving = curr_step
            else:
                self._saved(curr_step)

    def _save(self, curr_step: int, last_step: bool) -> None:
        """Save this step as TorchTitan does, without checking whether a save is due."""
        on_rank_0(storage.patiently, self._make_room, curr_step, group=self.pg)
        super().save(curr_step, last_step)

    def _save_last_step(self, curr_step: int) -> None:
        """Save all states as TorchTitan does. With last_save_model_only, save only the
        model, in export_dtype. In Hugging Face's format, add the files that
        ``from_pretrained`` needs.
        """
        super()._save_last_step(curr_step)
        if not self.last_save_in_hf or dist.get_rank() != 0:
            return
        folder = Path(self._create_checkpoint_id(curr_step))
        assets = self.sd_adapter.hf_assets_path
        try:
            describe(
                folder,
                self.sd_adapter,
                Path(assets),
                self.hooks.tokenizer(),
                self._config.export_dtype,
            )
        except (ConfigError, OSError) as error:  # the weights are saved already
            logger.warning(
                f"{folder} holds weights without config and tokenizer ({error}): "
                "titan-disp export writes both"
            )

    def _make_room(self, step: int) -> None:
        """Remove an unfinished save of this step, which another number of ranks may have
        written. Raises InUseError if another start has taken the run folder.
        """
        if other := self.hooks.taken_by():
            raise InUseError(
                f"step {step} is not saved: the run folder of {self.folder!r} was "
                f"taken by another job ({other}) while this job trained, because this "
                "job did not renew its .lock in time and seemed dead. Stop one of the "
                "two jobs, or give one of them another --job.dump_folder"
            )
        folder = Path(self._create_checkpoint_id(step))
        if folder.is_dir() and not integrity.is_complete(folder):
            if integrity.is_unfinished(folder):
                shutil.rmtree(folder, ignore_errors=True)
            # The folder may hold more than an unfinished save, for example a checkpoint
            # without its .metadata. If the folder cannot be renamed, nothing is saved.
            else:
                moved = integrity.rename_step(folder, "damaged")
                logger.error(f"{folder} has no .metadata and was moved to {moved}")

    def _save_error(self, step: int, error: BaseException) -> CheckpointError:
        """Record that a save failed, and return the error to raise."""
        reason = storage.one_line(error)
        kept: list[int] = []
        with suppress(OSError):  # listing may fail for the same reason as the save
            kept = integrity.checkpoints(self.folder)
        self.hooks.event("save_failed", step, error=reason)
        return CheckpointError(
            f"the checkpoint of step {step} could not be saved in {self.folder}: {reason}. "
            + (f"The last good checkpoint is step {kept[-1]}. " if kept else "")
            + "Free space or repair the file system, then start the run again"
        )

    def _saved(self, step: int) -> None:
        self._saving = None
        self._failures = 0
        self.saved_step = step
        logger.info(f"step {step}: checkpoint saved")
        self.hooks.event("checkpoint", step)
        self._purge_stale_checkpoints()

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save as TorchTitan does, and hash the files, except in Hugging Face's format.
        Returns DCP's Future or AsyncSaveResponse if ``async_mode`` is asynchronous.
        """
        if to_hf:
            # TorchTitan saves this format in the default process group. Its time-out
            # can be changed, because no training follows this save.
            set_timeout(self._time, None)
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        dcp_save = torch_dcp.save
        how: dict[str, Any] = {}
        if async_mode != AsyncMode.DISABLED:
            dcp_save = torch_dcp.async_save
        if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            how = {
                "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
                "async_stager": self.stager,
            }
        saved = dcp_save(
            state_dict,
            storage_writer=integrity.HashingWriter(checkpoint_id),
            planner=SavePlanner(),
            process_group=self.pg,
            **how,
        )
        if enable_garbage_collection:
            utils.GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saved

    def save_has_failed(self) -> bool:
        """Return whether an asynchronous save has failed on this rank, without waiting.

        If the save has succeeded, this call records the success.
        """
        future = self.save_future
        if future is None or not future.done():
            return False
        if future.exception() is not None:
            return True
        if self._saving is not None:
            self._saved(self._saving)
        return False

    def wait(self) -> None:
        """Wait for an asynchronous save.

        DCP reports a failed save on all ranks. If the reason may pass, this pauses, and
        the next call of ``save`` saves. Raises CheckpointError if the reason cannot
        pass, or after more failures in a row than ``storage.PAUSES`` has entries.
        """
        if self.save_future is None:
            return
        future = self.save_future
        step = self._saving
        self.save_future = None
        try:
            future.result()
        except BaseException as error:
            if not storage.may_pass(error) or self._failures == len(storage.PAUSES):
                raise self._save_error(
                    step if step is not None else -1, error
                ) from error
            pause = storage.PAUSES[self._failures]
            logger.warning(
                f"the asynchronous save of step {step} failed: "
                f"{storage.one_line(error)}. The model is saved again in {pause:.0f} s"
            )
            storage.sleep(pause)
            self._failures += 1
            self.saves_again = True
            return
        if step is not None:
            self._saved(step)

    def finish(self, step: int) -> None:
        """Wait for an asynchronous save. If that save failed, save this step. Raises as
        ``save`` does. A collective call.
        """
        self.wait()
        while self.saves_again:
            self.save(step)
            self.wait()

    def _purge_stale_checkpoints(self) -> None:
        """Delete old complete checkpoints, except the newest ``keep_latest_k`` and
        those of every ``keep_every`` steps. Unfinished saves are neither counted nor
        deleted.
        """
        if (
            self.keep_latest_k <= 0
            or dist.get_rank() != 0
            or self.load_only
            or self.hooks.taken_by()
        ):
            return
        try:
            stale = integrity.checkpoints(self.folder)[: -self.keep_latest_k]
        except OSError as error:  # only on this rank; the next save deletes them
            logger.warning(f"old checkpoints cannot be deleted: {error}")
            return
        keep_every = self._config.keep_every
        for step in stale:
            if keep_every and step % keep_every == 0:
                continue
            path = Path(self._create_checkpoint_id(step))
            try:
                self.purge_queue.put(str(integrity.rename_step(path, "purging")))
            except FileNotFoundError:
                pass  # somebody else deleted it
            except OSError as error:
                logger.warning(f"cannot delete the old checkpoint {path}: {error}")

    # ---- load

    def newest(self) -> int:
        """Return the step of the newest complete checkpoint, which may be model-only,
        or 0 if there is none. A collective call.
        """
        if not self.enable:
            return 0
        steps = on_rank_0(storage.patiently, integrity.checkpoints, self.folder, True)
        return max(steps, default=0)

    def load(self, step: int = -1) -> bool:
        """Load the checkpoint of ``step``, or the newest that loads if ``step`` is -1.
        Return whether anything was loaded.

        If there is no checkpoint, the weights that [checkpoint] names are loaded. This
        is a collective call.

        Raises (on all ranks):
            ConfigError: the named weights are missing or another model's.
            RefusedError: ``check_resume`` refuses the checkpoint, or there are newer checkpoints than ``step``.
            EndedError: the run has ended with an undamaged checkpoint of the model only.
            CheckpointError: no checkpoint loads; the checkpoint of ``step`` does not load; the named weights are
                damaged; or a checkpoint cannot be read for a reason that does not pass.
            UnreadableError: all tries of ``storage.together`` to read a checkpoint failed, for a reason that may pass.
        """
        try:
            loaded = self._load(step)
        finally:
            # the metadata is large if many ranks have saved
            safe_dcp.parse_metadata.cache_clear()
        if self.enable and not self.load_only and self.hooks.owns_folder():
            try:
                integrity.clean_up(Path(self.folder))
            except OSError as error:  # the next start tries again
                logger.warning(f"unfinished saves cannot be deleted: {error}")
        return loaded

    def _take_back(self) -> None:
        """Rename the newest damaged-N back to step-N if N is newer than all checkpoints
        and the files are not damaged. (A failure of the file system may have looked
        like damage.) A collective call.
        """
        step = on_rank_0(storage.patiently, self._newest_damaged)
        if step is None:
            return
        folder = Path(self.folder, f"damaged-{step}")
        try:
            reason = self._damage(str(folder))
        except CheckpointError as error:
            reason = str(error)
        if reason is not None:
            return
        name = self._create_checkpoint_id(step)
        on_rank_0(storage.patiently, os.rename, folder, name)
        logger.warning(
            f"{folder} is sound, and was renamed to step-{step} again: a failure of "
            "the file system may have looked like damage"
        )

    def _newest_damaged(self) -> int | None:
        """Return the largest N of the folders damaged-N, or None if a complete
        checkpoint is as new or newer, or if this start may not rename the folder.
        """
        if self.load_only or not self.hooks.owns_folder():
            return None
        folder = Path(self.folder)
        newest = max(integrity.checkpoints(folder, hugging_face=True), default=-1)
        damaged = max(integrity.steps_of(folder, "damaged"), default=-1)
        taken = os.path.lexists(self._create_checkpoint_id(damaged))
        return damaged if damaged > newest and not taken else None

    def _finish_saves(self) -> None:
        """Finish the saves that were killed at their very end, if this start owns the
        run folder.
        """
        if not self.load_only and self.hooks.owns_folder():
            integrity.finish_saves(Path(self.folder))

    def _load(self, step: int) -> bool:
        if not self.enable:
            self._check_initial_load()
            return False
        on_rank_0(storage.patiently, self._finish_saves)
        self._take_back()
        steps = on_rank_0(storage.patiently, integrity.checkpoints, self.folder)
        on_rank_0(storage.patiently, _refuse_ended, self.folder)
        self._refuse_to_count_anew(steps)
        if step != -1:
            return self._load_explicit(step, steps)
        failed: dict[int, str] = {}
        if self._load_newest(steps, failed) is not None:
            # Damaged checkpoints are moved only after another one has loaded. If none
            # loads, a wrong config is more likely than damage to all checkpoints.
            for other, why in failed.items():
                self.hooks.event("checkpoint_damaged", other, reason=why)
                # with load_only, another run may be training in the folder
                if dist.get_rank() == 0 and not self.load_only:
                    self._move_aside(other)
            return True
        if failed:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be loaded ({len(failed)} tried); "
                f"the newest: {failed[steps[-1]]}. Nothing was trained. If the config "
                "has changed since the checkpoints were saved, undo the change; if the "
                "checkpoints are damaged, restore a copy. Otherwise start a new run in "
                "another --job.dump_folder"
            )
        # TorchTitan uses initial_load_path only if the folder does not exist. Our
        # folder may exist and hold unfinished saves.
        self._check_initial_load()
        path = self.initial_load_path
        reason = None
        if path and not self.initial_load_in_hf:
            reason = storage.together(self._damage, path)
        if reason:
            raise CheckpointError(
                f"checkpoint.initial_load_path {path!r} cannot be loaded: {reason}"
            )
        folder = self.folder
        # If the folder does not exist, TorchTitan loads the initial weights.
        self.folder = os.path.join(self.folder, ".none")
        try:
            return super().load(-1)
        finally:
            self.folder = folder

    def _check_initial_load(self) -> None:
        on_rank_0(
            check_initial_load,
            self._config,
            self.sd_adapter.hf_assets_path,
            self.sd_adapter,
        )

    def _refuse_to_count_anew(self, steps: list[int]) -> None:
        """Raise RefusedError if a resume would not load the step count. The run would
        then begin at step 1 again, and overwrite its checkpoints.
        """
        trained = [step for step in steps if step > 0]
        if (
            trained
            and "train_state" in self.exclude_from_loading
            and not self.load_only
        ):
            raise RefusedError(
                "checkpoint.exclude_from_loading has 'train_state', but "
                f"{self.folder} holds checkpoints ({', '.join(map(str, trained))}), "
                "which training from step 1 would overwrite: remove 'train_state' from "
                "the list, or start a new run in another --job.dump_folder, with "
                "--checkpoint.initial_load_path for the weights"
            )

    def _load_explicit(self, step: int, steps: list[int]) -> bool:
        if step not in steps:
            raise CheckpointError(missing_step(step, self.folder, steps))
        newer = [s for s in steps if s > step]
        if newer and not self.load_only:
            raise RefusedError(
                f"checkpoint.load_step is {step}, but {self.folder} holds newer "
                f"checkpoints ({', '.join(map(str, newer))}), which training from step "
                f"{step} would overwrite: move the newer ones away, or copy step-{step} "
                "into another --job.dump_folder"
            )
        if reason := storage.together(self._try, step):
            raise CheckpointError(
                f"the checkpoint {self._create_checkpoint_id(step)} cannot be loaded: "
                f"{reason}"
            )
        return True

    def _load_newest(self, steps: list[int], failed: dict[int, str]) -> int | None:
        """Load the newest of these steps that can be loaded, and return its number, or
        None if none can be loaded. A collective call.

        For each newer step, the reason why it cannot be loaded is added to ``failed``.
        """
        for step in reversed(steps):
            reason = storage.together(self._try, step)
            if reason is None:
                return step
            failed[step] = reason
            logger.error(
                f"the checkpoint {self._create_checkpoint_id(step)} cannot be loaded: "
                f"{reason}"
            )
        return None

    def step_back(self) -> int | None:
        """Skip the newest checkpoint, and load weights and optimizer of the newest
        earlier one that loads. Return its step, or None if none loads. A collective
        call.

        Raises UnreadableError on all ranks, as ``load`` does.
        """
        if not self.enable or self.load_only:
            return None
        self.wait()
        steps = on_rank_0(storage.patiently, integrity.checkpoints, self.folder)
        # step 0 holds the model only
        earlier = [step for step in steps if step > 0][:-1]
        excluded = self.exclude_from_loading
        self.exclude_from_loading = GO_ON
        try:
            return self._load_newest(earlier, {})
        finally:
            self.exclude_from_loading = excluded

    def _states_to_load(self, model_only: bool) -> dict[str, Any]:
        """Return the states that TorchTitan loads, without the identity.

        ``check_resume`` has compared the identity already, and checkpoints of
        TorchTitan's own trainer have none.
        """
        return {
            name: state
            for name, state in super()._states_to_load(model_only).items()
            if name != identity.NAME
        }

    def dcp_load(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        from_hf: bool,
        from_quantized: bool,
    ) -> None:
        """Load as TorchTitan does, but unpickle only what checkpoints need."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        safe_dcp.load(state_dict, checkpoint_id)
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _try(self, step: int) -> str | None:
        """Load a step on all ranks, and return None, or the reason why a rank could not
        load it.

        Raises on all ranks EndedError if the checkpoint holds the model only, and
        UnreadableError if it cannot be read for a reason that may pass.
        """
        folder = self._create_checkpoint_id(step)
        if reason := self._damage(folder):
            return reason
        if step > 0 and on_rank_0(_readable, integrity.is_model_only, folder):
            raise EndedError(
                f"{folder} holds the model only (checkpoint.last_save_model_only): "
                "the run ended there and cannot be continued. Start a new run in "
                "another --job.dump_folder, with --checkpoint.initial_load_path for "
                "these weights",
                step,
            )
        outcome: CheckpointError | str | None = None
        try:
            if not self._config.allow_unverified:
                on_rank_0(_readable, identity.check_hashes, folder)
            self.hooks.check_resume(step)
            super().load(step)
        except UnreadableError:
            raise
        except CheckpointError as error:
            outcome = str(error)
        except (KeyboardInterrupt, SystemExit, UserError):
            raise
        except BaseException as error:  # DCP's CheckpointException is not an Exception
            outcome = storage.one_line(error)
            if storage.may_pass(error):
                outcome = _unreadable(folder, error)
        return _agreed(outcome)

    def _damage(self, folder: str) -> str | None:
        """Return what is wrong with a checkpoint's files, or None.

        Each rank checks its share of the files, and all ranks return the same result.
        Raises the error of ``_unreadable`` on all ranks if a file cannot be read.
        """
        if reason := on_rank_0(_readable, integrity.problem, folder):
            return reason
        # .metadata is large if there are many shards. Rank 0 has parsed it safely, so
        # the other ranks may use the fast unpickler.
        safe_dcp.accept(on_rank_0(_readable, safe_dcp.metadata_digest, folder))
        if dist.get_rank() == 0:
            integrity.warn_without_hashes(folder)
        share = (
            ()
            if dist.get_backend() == "fake"
            else (dist.get_rank(), dist.get_world_size())
        )
        outcome: CheckpointError | str | None
        try:
            outcome = _readable(integrity.damage, folder, *share)
        except CheckpointError as error:
            outcome = error
        return _agreed(outcome)

    def _move_aside(self, step: int) -> None:
        """Rename a damaged checkpoint to damaged-N. A failure is only logged."""
        folder = Path(self._create_checkpoint_id(step))
        try:
            moved = integrity.rename_step(folder, "damaged")
        except OSError as error:
            logger.error(
                f"{folder} is damaged, but cannot be moved to damaged-{step}: {error}"
            )
        else:
            logger.error(f"{folder} is damaged and was moved to {moved}")


def _refuse_ended(folder: str) -> None:
    """Raise EndedError if the run ended with ``checkpoint.last_save_in_hf``, because a
    start would train again and overwrite the saved model.
    """
    for step in reversed(integrity.steps_of(Path(folder), "step")):
        path = Path(folder, f"step-{step}")
        if integrity.is_file(path / INDEX):
            raise EndedError(
                f"{path} holds the model only, in Hugging Face's format "
                "(checkpoint.last_save_in_hf): the run ended there. To continue from "
                "an earlier checkpoint, move this one away; to start a new run from "
                "this one, set another --job.dump_folder, "
                "--checkpoint.initial_load_in_hf and --checkpoint.initial_load_path",
                step,
            )


def _readable(read: Callable[..., T], folder: str, *arguments: Any) -> T:
    """Return ``read(folder, *arguments)``, which reads a checkpoint. An OSError is
    raised as the error of ``_unreadable``.
    """
    try:
        return read(folder, *arguments)
    except OSError as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: str, error: BaseException) -> CheckpointError:
    """Return the error for a checkpoint that cannot be read: UnreadableError if the
    reason may pass, else CheckpointError. Such a failure does not prove damage.
    """
    reason = storage.one_line(error)
    if storage.may_pass(error):
        return UnreadableError(f"{folder} cannot be read now: {reason}")
    return CheckpointError(f"{folder} cannot be read: {reason}")


def _agreed(outcome: CheckpointError | str | None) -> str | None:
    """Return why a checkpoint is not loaded: the first reason that a rank gives as its
    ``outcome``, or None if all give None. If ranks give errors, all ranks raise the
    first error. A collective call.
    """
    outcomes: list[Any] = [outcome]
    if dist.is_initialized() and dist.get_backend() != "fake":
        outcomes = objects_of_ranks(outcome)
    for error in outcomes:
        if isinstance(error, CheckpointError):
            raise error
    return next(filter(None, outcomes), None)
