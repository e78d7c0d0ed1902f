"""Measurements over training are shown in a few rows of text."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

ROWS = 8  # of one run, at most


def over_training(measured: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return held-out cross-entropy and mean cosines (all blocks, and the last) at some steps, as lines of a table.

    The table shows a collapse of the embeddings and its release. It has headings first, and no lines if fewer than two
    steps were measured.

    Args:
        measured: by step, what ``Condensation.to_json`` returns. Older versions wrote no cross-entropy and end with the
            last block.
    """
    if len(measured) < 2:
        return []
    blocks = {step: _blocks(one) for step, one in measured.items()}
    highest = max(blocks, key=lambda step: np.nan_to_num(blocks[step].mean(), nan=-1))
    lines = [
        "On held-out text. Mean cosine: 1 if all tokens of a sequence point the same way, near 0 if they share no "
        "direction.",
        f"{'step':>9}  cross-entropy  mean cosine of all blocks  of the last block",
    ]
    for step in telling_steps(sorted(blocks), {highest}):
        ce = measured[step].get("cross_entropy")
        shown = f"{ce:.3f}" if ce is not None else "–"
        mark = "  (highest)" if step == highest else ""
        lines.append(f"{step:9,}  {shown:>13}  {blocks[step].mean():25.2f}  {blocks[step][-1]:17.2f}{mark}")
    return lines


def _blocks(one: Mapping[str, Any]) -> np.ndarray:
    """Return the mean cosines after every block."""
    names, mean = one.get("layers"), np.array(one["mean_cosine"], dtype=float)  # None becomes NaN
    return mean[1:-1] if names and names[-1] == "final norm" else mean[1:]


def telling_steps(steps: Sequence[int], highest: Collection[int]) -> list[int]:
    """Return the first, the last and the highest of ascending steps, and some between them.

    Those between grow by equal ratios, because a collapse comes early.
    """
    after = [step for step in steps if step > 0]
    wanted: Sequence[float] = np.geomspace(after[0], after[-1], ROWS - 2).tolist() if after else []
    return sorted({steps[0], *highest, *(min(after, key=lambda step: abs(step - w)) for w in wanted)})
