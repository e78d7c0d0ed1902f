"""The runs in docs/evidence.jsonl, and functions that compute numbers from them.

benchmarks/evidence.py checks the page's numbers, and evidence_pictures.py draws them.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from titan_disp.run.reader import read_json_lines

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
    """Return the cross-entropy of the held-back text, for models after mid-training."""
    return loss(row, "new_test")


def last_word(row: Row) -> float:
    """Return the fraction of test paragraphs whose last word is right, by greedy
    decoding.
    """
    return row["numbers"]["test"]["last_word"]


def blocks_cosine(row: Row, text: str = "test") -> float:
    """Return the mean cosine over the blocks, without embedding and final norm."""
    return float(np.mean(row["numbers"][text]["mean_cosine"][1:-1]))


def depth_order(row: Row, text: str = "test") -> float:
    """Return the Spearman correlation of a text's mean cosines with depth."""
    return order_of(row["numbers"][text]["mean_cosine"])


def order_of(mean_cosine: Sequence[float]) -> float:
    """Return the Spearman correlation of mean cosines with depth, as in the paper.

    ``mean_cosine`` has a number per layer. The last block counts after the final norm.
    """
    _, *blocks, _, last = mean_cosine
    return float(stats.spearmanr(range(len(blocks) + 1), [*blocks, last]).statistic)


def seconds(row: Row) -> float:
    """Return the wall-clock time of training."""
    return sum(row["history"]["seconds"].values())


class Runs:
    """The finished runs, by part, condition and seed.

    If a run was tried several times, the last finished try counts. The models of ("main",
    "off") that were trained again are the condition ("restored", "off").
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
        """Return a number of a condition's runs, by seed. Runs without it are left out."""
        rows = sorted(self.rows[part, condition].items())
        numbers = {seed: value(row) for seed, row in rows}
        return {seed: x for seed, x in numbers.items() if x is not None}

    def mean(self, part: str, condition: str, value: Value = loss) -> float:
        """Return the mean of a number over the seeds."""
        return float(np.mean([*self.values(part, condition, value).values()]))

    def on_off(self, part: str, end: str = "", value: Value = loss) -> np.ndarray:
        """Return on − off [pairs] of the conditions "on…" and "off…" with this end."""
        states = (f"on{end}", f"off{end}")
        return paired(*(self.values(part, state, value) for state in states))


def read_runs() -> Runs:
    """Return the recorded runs."""
    return Runs(read_json_lines(ROOT / "docs" / "evidence.jsonl"))


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> np.ndarray:
    """Return values − baseline [pairs], for the seeds that both have."""
    return np.array(
        [values[seed] - baseline[seed] for seed in values if seed in baseline]
    )


def interval(differences: np.ndarray, level: float = 0.95) -> tuple[Any, Any]:
    """Return both ends of Student's interval of the mean, [...], given differences [...,
    seeds].
    """
    test = stats.ttest_1samp(differences, 0, axis=-1)
    return test.confidence_interval(level)


def sign_flip(differences: np.ndarray) -> np.ndarray:
    """Return the two-sided p value of the sign-flip test, [...], given differences [...,
    seeds].

    It is the fraction of all sign patterns whose sum is at least as far from 0.
    (``titan_disp.lab.statistics.sign_flip_p`` is too slow for simulated experiments.)
    """
    signs = np.array(list(product((-1, 1), repeat=differences.shape[-1])))
    distance = abs(differences.sum(-1, keepdims=True))
    return (abs(differences @ signs.T) >= distance - 1e-9).mean(-1)


def ends(differences: np.ndarray, level: float = 0.95) -> str:
    """Return the interval as text."""
    return " … ".join(f"{end:+.4f}" for end in interval(differences, level))
