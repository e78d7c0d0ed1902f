"""What a checkpoint is of, kept in it: the model's architecture, and what else a run keeps.

A resume with others is refused. The tensors alone would not tell: fewer blocks load without a word, and so do as many numbers in
other heads.
"""

import json
from pickle import UnpicklingError
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from titan_disp import dcp
from titan_disp.errors import CheckpointError, ConfigError

NAME = "identity"  # among the states of a checkpoint


class Identity:
    """A state of the checkpoint that is only ever saved; ``read_identity`` reads it before anything is loaded.

    Attributes:
        content: name → value, as an error shows both. JSON-able.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        return {"json": json.dumps(self.content)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def read_identity(checkpoint: str) -> dict[str, Any]:
    """What the checkpoint in a folder is of; {} where an older version, or TorchTitan's trainer, saved it.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        if f"{NAME}.json" not in dcp.read_metadata(checkpoint).state_dict_metadata:
            return {}
        state = {"json": ""}
        dcp.load({NAME: state}, checkpoint, no_dist=True)
        return json.loads(state["json"])
    except (OSError, ValueError, UnpicklingError, CheckpointException) as error:
        raise CheckpointError(f"cannot read what the checkpoint {checkpoint} is of: {error}") from error


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In words; of what both know, as versions may know more or fewer arguments of a model."""
    return [f"{key} {saved[key]!r} there, {now[key]!r} here" for key in saved if key in now and saved[key] != now[key]]


def check_identity(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ConfigError where a run would go on as another one than its checkpoint's."""
    if found := differences(saved, now):
        raise ConfigError(
            f"the checkpoint is not of this config's model: {'; '.join(found)}. Make model.flavor, model.overrides and "
            "baseline.method what they were, or start a new run in another --job.dump_folder"
        )
