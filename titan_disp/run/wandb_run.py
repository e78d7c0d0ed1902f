"""This module keeps one Weights & Biases run per run folder, across requeues.

TorchTitan's WandBLogger takes the id from WANDB_RUN_ID, and wandb itself reads WANDB_RESUME. Values that the user has
set are kept.
"""

import os
import uuid
from collections.abc import MutableMapping
from pathlib import Path

from titan_disp.files import atomic_write


def run_id(folder: str | Path) -> str:
    """Read the id in ``folder``/wandb_run_id; make one if there is none.

    The id is not a hash of the path, because a new run in an emptied folder is another run.
    """
    file = Path(folder) / "wandb_run_id"
    if not file.exists() or not file.read_text().strip():
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as partial:
            partial.write_text(uuid.uuid4().hex + "\n")
    return file.read_text().strip()


def continue_run(folder_id: str, rank: int | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Make wandb continue the folder's run, or begin it if there is none yet.

    Args:
        folder_id: what ``run_id`` returns.
        rank: this rank, if every rank has a run of its own, else None.
        environment: the variables to set.
    """
    environment.setdefault("WANDB_RUN_ID", folder_id if rank is None else f"{folder_id}-rank{rank}")
    if not environment.keys() & {"WANDB_RESUME_FROM", "WANDB_FORK_FROM"}:  # wandb refuses both at once
        environment.setdefault("WANDB_RESUME", "allow")
