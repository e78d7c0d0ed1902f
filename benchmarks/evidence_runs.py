"""Read the runs of docs/evidence.jsonl, and numbers of them.

benchmarks/evidence.py checks the page with these, and evidence_pictures.py draws them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

ROOT = Path(__file__).parent.parent

Row = Mapping[str, Any]  # a line of docs/evidence.jsonl
Key = tuple[str, str]  # a part of the experiment, and a condition in it
Value = Callable[[Row], float | None]


def loss(row: Row, text: str = "test") -> float | None:
    """Return the cross-entropy of a text in nats per token."""
    return row["numbers"].get(text, {}).get("cross_entropy")


def development_loss(row: Row) -> float | None:
    return loss(row, "development")


def new_text_loss(row: Row) -> float | None:
    """Return the cross-entropy of the text that was held back for mid-training."""
    return loss(row, "new_test")


def last_word(row: Row) -> float:
    """Return the fraction of test paragraphs whose last word greedy decoding gets."""
    return row["numbers"]["test"]["last_word"]


def blocks_cosine(row: Row, text: str = "test") -> float:
    """Return the mean cosine over the blocks, without embedding and final norm."""
    return float(np.mean(row["numbers"][text]["mean_cosine"][1:-1]))


def depth_order(row: Row) -> float:
    return order_of(row["numbers"]["test"]["mean_cosine"])


def order_of(mean_cosine: Sequence[float]) -> float:
    """Return the paper's Spearman's ρ with depth of the mean cosines by layer.

    The last block counts after the final norm.
    """
    _, *blocks, _, last = mean_cosine
    return float(stats.spearmanr(range(len(blocks) + 1), [*blocks, last]).statistic)


def seconds(row: Row) -> float:
    """Return the time by the clock from the start to the end of training."""
    return sum(row["history"]["seconds"].values())


class Runs:
    """The runs that have finished, by part, condition and seed.

    Of several tries of a run, the last one counts. Main's off models that were trained
    again are the condition "off" of the part "restored".
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows: dict[Key, dict[int, Row]] = {}
        for row in rows:
            if row["part"] == "restored":
                self.rows.setdefault(("restored", "off"), {})[row["of"][-1]] = row
            elif row.get("status") == "finished":
                key = (row["part"], row["condition"])
                self.rows.setdefault(key, {})[row["seed"]] = row

    def values(self, part: str, condition: str, value: Value = loss) -> dict[int, Any]:
        """Return a number by seed, of the runs that have it."""
        rows = sorted(self.rows[part, condition].items())
        numbers = {seed: value(row) for seed, row in rows}
        return {seed: one for seed, one in numbers.items() if one is not None}

    def mean(self, part: str, condition: str, value: Value = loss) -> float:
        return float(np.mean([*self.values(part, condition, value).values()]))

    def on_off(self, part: str, end: str = "", value: Value = loss) -> np.ndarray:
        """Return on − off by seed, [pairs], of conditions with this end."""
        states = (f"on{end}", f"off{end}")
        return paired(*(self.values(part, state, value) for state in states))


def read_runs() -> Runs:
    text = (ROOT / "docs" / "evidence.jsonl").read_text()
    return Runs([json.loads(line) for line in text.splitlines()])


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> np.ndarray:
    """Return the differences of the seeds that both have, [pairs]."""
    return np.array(
        [values[seed] - baseline[seed] for seed in values if seed in baseline]
    )


def interval(differences: np.ndarray, level: float = 0.95) -> tuple[Any, Any]:
    """Return the ends of Student's interval of the mean of differences, [..., seeds]."""
    n = differences.shape[-1]
    mean = differences.mean(-1)
    half = stats.sem(differences, axis=-1) * stats.t.ppf((1 + level) / 2, n - 1)
    return mean - half, mean + half


def sign_flip(differences: np.ndarray) -> np.ndarray:
    """Return the two-sided p of the sign-flip test of differences, [..., seeds].

    It is the fraction of all patterns of signs whose sum is at least as far from 0.
    """
    signs = np.array(list(product((-1, 1), repeat=differences.shape[-1])))
    distance = abs(differences.sum(-1, keepdims=True))
    return (abs(differences @ signs.T) >= distance - 1e-9).mean(-1)


def ends(differences: np.ndarray, level: float = 0.95) -> str:
    return " … ".join(f"{end:+.4f}" for end in interval(differences, level))
