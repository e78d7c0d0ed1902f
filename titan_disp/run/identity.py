"""A checkpoint has an identity: the model's architecture, every key that fixes the
model, and the dispersion loss.

A resume with another identity is refused; checkpoint.allow_other_loss permits another
loss. A comparison of tensor shapes is not enough, because a model with fewer blocks, or
with another number of heads of the same total size, loads without an error.
"""

import json
from pickle import UnpicklingError
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.tools.logging import logger

from titan_disp import safe_dcp
from titan_disp.config.keys import value_of
from titan_disp.config.types import JobConfig
from titan_disp.data.fingerprint import check_fingerprint, read_data_state
from titan_disp.data.listing import on_rank_0
from titan_disp.errors import (
    CheckpointError,
    ConfigError,
    RefusedError,
    UnreadableError,
)
from titan_disp.job_config import Checkpoint, Dispersion, all_keys, fixed
from titan_disp.models.arguments import architecture_of
from titan_disp.run.integrity import has_hashes
from titan_disp.run.storage import may_pass, one_line
from titan_disp.tables import changes

# compared only if [budget] is used, which computes tokens as steps × tokens of a step
STEP = "tokens of a step"
RUN = "id of the run"  # from RUN/run_id. Checkpoints of earlier versions have none.
NAME = "identity"  # the name of the identity among the states of a checkpoint


def of_model(job_config: JobConfig, args: BaseModelArgs) -> dict[str, Any]:
    """Return {name: value} of what every resume of a run must keep, ready for JSON.

    ``args`` contains the effects of the flavor and of the overrides.
    """
    return of_keys(job_config) | architecture_of(args)


def of_keys(job_config: JobConfig) -> dict[str, Any]:
    """Return the part of an identity that the config alone determines: the name of the
    model, the keys that fix it, and the loss.
    """
    keys = ["model.name", *(key for key in fixed("model") if key != "model.overrides")]
    model = {key: value_of(job_config, key) for key in keys}
    return model | of_loss(job_config.dispersion)


def of_loss(section: Dispersion) -> dict[str, Any]:
    """Return the keys of [dispersion], or only ``enabled`` if dispersion is off."""
    keys = vars(section) if section.enabled else {"enabled": False}
    return {f"dispersion.{key}": value for key, value in keys.items()}


def to_state(content: dict[str, Any]) -> dict[str, str]:
    """Return an identity as a state that checkpoints save. ``read_identity`` reads the
    identity before a load, and the load itself leaves it out.
    """
    return {"json": json.dumps(content)}


def read_identity(checkpoint: str) -> dict[str, Any]:
    """Return a checkpoint's identity, or {} if TorchTitan's own trainer saved it.

    If the identity cannot be read, this raises UnreadableError if the reason may pass,
    else CheckpointError.
    """
    try:
        if f"{NAME}.json" not in safe_dcp.read_metadata(checkpoint).state_dict_metadata:
            return {}
        state = {"json": ""}
        safe_dcp.load({NAME: state}, checkpoint, no_dist=True)
        return json.loads(state["json"])
    except (OSError, ValueError, UnpicklingError, CheckpointException) as error:
        message = (
            f"cannot read which model the checkpoint {checkpoint} holds: "
            f"{one_line(error)}"
        )
        if may_pass(error):
            raise UnreadableError(message) from error
        raise CheckpointError(message) from error


def identity_changes(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return a sentence for each key with different values in the two identities."""
    shared = saved.keys() & current.keys()
    return [
        f"{key} is {former!r} in the checkpoint and {current!r} in the config"
        for key, (former, current) in changes(saved, current).items()
        if key in shared
    ]


def check_resume(trainer: Any, step: int) -> None:
    """Compare model, loss and data of the checkpoint of ``step`` with those of
    ``trainer``, a ``titan_disp.train.DispTrainer``, before DCP loads any tensor. A
    collective call.

    Raises, on all ranks, RefusedError if model, loss or data differs, and
    CheckpointError if the checkpoint cannot be read. If only the data differs and
    stream.on_mismatch is "restart", the data streams begin a new epoch instead.
    """
    job = trainer.job_config
    folder = trainer.checkpointer._create_checkpoint_id(step)
    saved = on_rank_0(read_identity, folder)
    run = saved.pop(RUN, "")
    if run and step > 0:  # runs begin from step 0
        current = trainer.identity.setdefault(RUN, run)
        check_run(run, current, folder, job.checkpoint)
    counts_tokens = step > 0 and any(vars(job.budget).values())
    if not counts_tokens:
        saved.pop(STEP, None)
    check_identity(saved, trainer.identity, job.checkpoint.allow_other_loss)
    excluded = trainer.checkpointer.exclude_from_loading
    if step < 1 or "dataloader" in excluded:
        return
    data, epoch = on_rank_0(read_data_state, folder)
    try:
        check_fingerprint(data, trainer.dataloader.fingerprint)
    except ConfigError as error:
        if job.stream.on_mismatch != "restart":
            raise
        logger.warning(f"the data streams restart with epoch {epoch + 1}: {error}")
        trainer.checkpointer.exclude_from_loading = [*excluded, "dataloader"]
        trainer.dataloader.restart(epoch + 1)
        trainer.event("streams_restarted", step, epoch=epoch + 1, reason=str(error))


def check_run(saved: str, current: str, folder: str, checkpoint: Checkpoint) -> None:
    """Raise RefusedError if a checkpoint belongs to another run, unless
    checkpoint.allow_unverified is true.
    """
    if saved != current and not checkpoint.allow_unverified:
        raise RefusedError(
            f"{folder} was saved by another run, whose run_id is {saved} and not "
            f"{current}: move it away. "
            "To begin a run with its weights, set --checkpoint.initial_load_path and "
            "another --job.dump_folder. To continue from it here: "
            "--checkpoint.allow_unverified"
        )


def check_hashes(folder: str) -> None:
    """Raise RefusedError if a checkpoint has no hashes although titan-disp saved it. Only
    titan-disp writes the run's id into the identity.
    """
    if not has_hashes(folder) and RUN in read_identity(folder):
        raise RefusedError(
            f"{folder} has no hashes.json, although titan-disp has saved it: damage "
            "would not be found. Restore the file, or move the checkpoint away. To "
            "load it without hashes: --checkpoint.allow_unverified"
        )


def check_identity(
    saved: dict[str, Any], current: dict[str, Any], other_loss: bool = False
) -> None:
    """Raise RefusedError if the identity of a run differs from that of its checkpoint.

    With ``other_loss``, the loss may differ. If the checkpoint lacks a key, an earlier
    version without this key saved it, and trained as with the key's default value.
    """
    if saved:
        defaults = {key: f.default for key, f in all_keys().items()}
        former = {key: defaults[key] for key in fixed("model")}
        if saved.get("dispersion.enabled"):
            former |= of_loss(Dispersion(enabled=True))
        saved = former | saved
    changed = identity_changes(saved, current)
    loss = [sentence for sentence in changed if sentence.startswith("dispersion.")]
    if loss and not other_loss:
        raise RefusedError(
            f"the checkpoint was trained with another loss: {'; '.join(loss)}. Set the "
            "loss back, start a new run in another --job.dump_folder, or go on with "
            "the new loss: --checkpoint.allow_other_loss"
        )
    if step := [sentence for sentence in changed if sentence.startswith(STEP)]:
        raise RefusedError(
            f"{step[0]}: [budget] needs steps with equal numbers of tokens. Set "
            "training.global_batch_size (−1: the number of ranks) and "
            "training.seq_len back, set training.steps instead of [budget], or start "
            "a new run in another --job.dump_folder"
        )
    if model := [sentence for sentence in changed if sentence not in loss]:
        raise RefusedError(
            f"the checkpoint is not of this config's model: {'; '.join(model)}. Set "
            f"model.name, model.flavor, {', '.join(fixed('model'))} back to their "
            "earlier values, or start a new run in another --job.dump_folder"
        )
