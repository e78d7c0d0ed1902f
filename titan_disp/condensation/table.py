"""Measurements over training, in a few rows of text."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

ROWS = 8  # at most, of one run


def over_training(measured: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Held-out cross-entropy, and mean cosines of all blocks and of the last one, at some steps: where a collapse and its release
    would show. Lines, the headings first; none where fewer than two steps were measured.

    Args:
        measured: by step, as ``Condensation.to_json`` gives it; what older versions wrote has no cross-entropy and ends with the
            last block.
    """
    if len(measured) < 2:
        return []
    blocks = {step: _blocks(one) for step, one in measured.items()}
    highest = max(blocks, key=lambda step: blocks[step].mean())
    lines = [
        "On held-out text. Mean cosine 1: all tokens of a sequence point the same way; near 0: they share no direction.",
        f"{'step':>9}  cross-entropy  mean cosine of all blocks  of the last block",
    ]
    for step in telling_steps(sorted(blocks), {highest}):
        ce = measured[step].get("cross_entropy")
        shown = f"{ce:.3f}" if ce is not None else "–"
        mark = "  (highest)" if step == highest else ""
        lines.append(f"{step:9,}  {shown:>13}  {blocks[step].mean():25.2f}  {blocks[step][-1]:17.2f}{mark}")
    return lines


def _blocks(one: Mapping[str, Any]) -> np.ndarray:
    """Mean cosines after every block."""
    names, mean = one.get("layers"), np.array(one["mean_cosine"])
    return mean[1:-1] if names and names[-1] == "final norm" else mean[1:]


def telling_steps(steps: Sequence[int], highest: Collection[int]) -> list[int]:
    """Of ascending steps the first, the last and the highest, and some between them in equal ratios: a collapse comes early."""
    after = [step for step in steps if step > 0]
    wanted: Sequence[float] = np.geomspace(after[0], after[-1], ROWS - 2).tolist() if after else []
    return sorted({steps[0], *highest, *(min(after, key=lambda step: abs(step - w)) for w in wanted)})
