"""A run's validation losses, which TorchTitan writes into TensorBoard's files only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

VALIDATION_LOSS = "validation_metrics/loss"  # TorchTitan's name for it


def read_validation(run: Path, config: Mapping[str, Any]) -> dict[int, float]:
    """By step, ascending. Steps repeated after a resume: the last counts. Empty where the run does not validate.

    Args:
        run: the run's folder.
        config: its config.json.
    """
    if not config.get("validation", {}).get("enable"):
        return {}
    folder = run / config["metrics"]["save_tb_folder"]
    if (folder / "rank_0").is_dir():  # metrics.save_for_all_ranks
        folder = folder / "rank_0"
    if not folder.is_dir():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # a second

    keep = {"scalars": 0, "images": 1}  # 0: all of them
    board = EventAccumulator(str(folder), size_guidance=keep, purge_orphaned_data=False).Reload()
    if VALIDATION_LOSS not in board.Tags()["scalars"]:
        return {}
    return dict(sorted((event.step, event.value) for event in board.Scalars(VALIDATION_LOSS)))
