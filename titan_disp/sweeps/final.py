"""One number of a run that is finished, by name."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import json

from titan_disp.condensation.record import Condensation
from titan_disp.errors import ConfigError
from titan_disp.run.folder import by_step, read_condensation, read_rows
from titan_disp.run.validation_loss import read_validation

TRAINING = ("loss", "ce", "dispersion", "grad_norm")  # of the last logged step
OVER_DEPTH = ("spearman", "kendall")
BY_PART = ("mean_cosine", "std_cosine", "mean_angle", "effective_rank")
DEFAULTS = ("validation", "cross_entropy", "ce")  # the first of them that a finished run has
LABELS = {
    "validation": "validation loss",
    "cross_entropy": "held-out cross-entropy",
    "ce": "training cross-entropy of the last logged step",
    "loss": "training loss of the last logged step",
    "dispersion": "dispersion loss of the last logged step",
    "grad_norm": "gradient norm of the last logged step",
    "spearman": "Spearman's ρ of the mean cosine with depth",
    "kendall": "Kendall's τ of the mean cosine with depth",
}


def check_metric(name: str) -> None:
    """Raises: ConfigError: there is none of this name."""
    if name not in LABELS and name.partition(".")[0] not in BY_PART:
        raise ConfigError(
            f"--metric is {name!r}, expected {', '.join(LABELS)}, or {', '.join(BY_PART)}, each with a part of the model such as "
            "mean_cosine.middle_blocks (default: .blocks, all of them)"
        )


def label(name: str) -> str:
    """In words."""
    return LABELS.get(name) or " of the ".join(part.replace("_", " ") for part in _parts(name))


def final(run: Path, name: str) -> float | None:
    """A number at the end of a run; None where the run has not measured it, or it is not finite.

    ``validation`` is TorchTitan's validation loss. ``cross_entropy``, and everything about cosines, is what the run measured on held-out
    text after its last step (``[condensation]``).
    """
    check_metric(name)
    if name == "validation":
        value = _last(read_validation(run, json.loads((run / "config.json").read_text())))
    elif name in TRAINING:
        rows = by_step(read_rows(run))
        value = rows[max(rows)].get(name) if rows else None
    else:
        value = _measured(run, name)
    return value if value is not None and math.isfinite(value) else None


def _parts(name: str) -> tuple[str, str]:
    kind, _, part = name.partition(".")
    return kind, part or "blocks"


def _measured(run: Path, name: str) -> float | None:
    found = read_condensation(run)
    rows = by_step(read_rows(run))
    if not found or (rows and max(found) < max(rows)):  # it was measured last before the end
        return None
    last = max(found)
    if name == "cross_entropy":
        return found[last].get("cross_entropy")
    if name in OVER_DEPTH:
        return (found[last].get("after_norm") or {}).get(name)
    kind, part = _parts(name)
    file = run / "condensation" / f"step-{last}.npz"
    if not file.is_file():
        return None
    parts = Condensation.load(file).by_part()[kind]
    if part not in parts:
        raise ConfigError(f"--metric {name}: {kind} has no part {part!r}; it has {', '.join(parts)}")
    return parts[part]


def _last(by_step: Mapping[int, float]) -> float | None:
    return by_step[max(by_step)] if by_step else None
