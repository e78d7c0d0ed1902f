"""This module reads a run's validation losses, which TorchTitan writes only to TensorBoard's files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

VALIDATION_LOSS = "validation_metrics/loss"  # TorchTitan's tag


def read_validation(run: Path, config: Mapping[str, Any]) -> dict[int, float]:
    """Read the validation losses by step, ascending. The result is empty if there are none.

    If a step was repeated after a resume, its last loss counts.

    Args:
        run: the run's folder.
        config: content of its config.json.
    """
    if not config.get("validation", {}).get("enable"):
        return {}
    folder = run / config["metrics"]["save_tb_folder"]
    if (folder / "rank_0").is_dir():  # with metrics.save_for_all_ranks
        folder = folder / "rank_0"
    if not folder.is_dir():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # takes a second to import

    keep = {"scalars": 0, "images": 1}  # 0 keeps all of them
    board = EventAccumulator(str(folder), size_guidance=keep, purge_orphaned_data=False).Reload()
    if VALIDATION_LOSS not in board.Tags()["scalars"]:
        return {}
    losses = {event.step: event.value for event in board.Scalars(VALIDATION_LOSS)}
    return dict(sorted(losses.items()))
