"""This module reads a finished run's final number by the name of a metric."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_disp.condensation.record import Condensation
from titan_disp.errors import ConfigError
from titan_disp.run.folder import read_condensation, read_metrics
from titan_disp.run.validation_loss import read_validation

TRAINING = ("loss", "ce", "dispersion", "grad_norm")  # of the last logged step
OVER_DEPTH = ("spearman", "kendall")
BY_PART = ("mean_cosine", "std_cosine", "mean_angle", "effective_rank")
FALLBACK = "ce"
DEFAULTS = ("validation", "cross_entropy", FALLBACK)  # the first one that any finished run has is the default
LABELS = {
    "validation": "held-out cross-entropy (validation)",
    "cross_entropy": "held-out cross-entropy",
    "ce": "training cross-entropy of the last logged step",
    "loss": "training loss of the last logged step",
    "dispersion": "dispersion loss of the last logged step",
    "grad_norm": "gradient norm of the last logged step",
    "spearman": "Spearman's ρ of the mean cosine with depth",
    "kendall": "Kendall's τ of the mean cosine with depth",
}


def check_metric(name: str) -> None:
    """Check the name of a metric.

    Raises:
        ConfigError: There is no metric of this name.
    """
    if name not in LABELS and name.partition(".")[0] not in BY_PART:
        raise ConfigError(
            f"the metric is {name!r} (--metric, or sweep.metric in the file), expected {', '.join(LABELS)}, or "
            f"{', '.join(BY_PART)}, each with a part of the model such as mean_cosine.middle_blocks (the default is .blocks, "
            "which means all blocks)"
        )


def label(name: str) -> str:
    """Describe a metric in words."""
    return LABELS.get(name) or " of the ".join(part.replace("_", " ") for part in _parts(name))


def final_metric(run: Path, name: str) -> float | None:
    """Return a number at the end of a run, or None if the run has not measured it or it is not finite.

    ``validation`` is TorchTitan's validation loss. The run measures ``cross_entropy`` and everything about cosines on
    held-out text after its last step (``[condensation]``).
    """
    check_metric(name)
    rows = read_metrics(run)
    last = max(rows, default=0)
    if name in TRAINING:
        value = rows[last].get(name) if rows else None
    elif name == "validation":
        value = _at_the_end(read_validation(run, json.loads((run / "config.json").read_text())), last)
    else:
        value = _measured(run, name, last)
    return value if value is not None and math.isfinite(value) else None


def _parts(name: str) -> tuple[str, str]:
    kind, _, part = name.partition(".")
    return kind, part or "blocks"


def _measured(run: Path, name: str, last: int) -> float | None:
    by_step = read_condensation(run)
    found = _at_the_end(by_step, last)
    if found is None:
        return None
    if name == "cross_entropy":
        return found.get("cross_entropy")
    if name in OVER_DEPTH:
        return (found.get("after_norm") or {}).get(name)
    kind, part = _parts(name)
    file = run / "condensation" / f"step-{max(by_step)}.npz"
    if not file.is_file():
        return None
    parts = Condensation.load(file).by_part()[kind]
    if part not in parts:
        raise ConfigError(
            f"the metric {name!r} (--metric, or sweep.metric in the file): {kind} has no part {part!r}; it has {', '.join(parts)}"
        )
    return parts[part]


def _at_the_end(by_step: Mapping[int, Any], last: int) -> Any:
    """Return the newest entry, or None if the run logged later steps, because it is then not from the end."""
    newest = max(by_step, default=-1)
    return by_step[newest] if newest >= last else None
