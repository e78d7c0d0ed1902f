"""The runs in docs/evidence.jsonl as a table, and statistics of the differences between them.

benchmarks/evidence.py checks the page's numbers, and evidence_pictures.py draws them.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from pandas import DataFrame, Series
from scipy import stats

from titan_disp.lab.statistics import Difference, paired_difference
from titan_disp.run.reader import read_json_lines

ROOT = Path(__file__).parent.parent
PREREGISTERED = ROOT / "docs" / "preregistered.csv"
# Numbers of a run, as ``numbers`` names them
LOSS = "test cross_entropy"
NEW_TEXT_LOSS = "new_test cross_entropy"
COSINE = "test mean_cosine of the blocks"

# Learning rates in the first experiment's tuning
LOW_RATES = (0.001, 0.002)
RATES = (*LOW_RATES, 0.004, 0.008, 0.016)
WARMUPS = (0.05, 0.2)
# The (warm-up, index of the seed) of each curve of the tuning
CURVES = tuple(product(WARMUPS, (0, 1)))
TUNED = ("widths", "widths-again")  # the parts of the second experiment

Row = Mapping[str, Any]  # a line of docs/evidence.jsonl


def order_of(mean_cosine: Sequence[float]) -> float:
    """Return the Spearman correlation of mean cosines with depth, as in the paper.

    ``mean_cosine`` has a number per layer. The last block counts after the final norm.
    """
    _, *blocks, _, last = mean_cosine
    return float(stats.spearmanr(range(len(blocks) + 1), [*blocks, last]).statistic)


def numbers(row: Row) -> dict[str, float | None]:
    """Return all numbers of a run, by name.

    Most names begin with the text that was measured: development, test, or new_test, the
    test text of the held-back part. Cross-entropies are in nats per token. Accuracies are
    fractions of the tokens and of the paragraphs' last words. The last three numbers, which
    are about training, have no text; "seconds" is its time.
    """
    content = {}
    for text, scores in row["numbers"].items():
        for name in ("cross_entropy", "accuracy", "last_word"):
            content[f"{text} {name}"] = scores[name]
        for source, cross_entropy in scores["by_source"].items():
            content[f"{text} cross_entropy of {source}"] = cross_entropy
        mean_cosine = scores["mean_cosine"]
        # without embedding and final norm
        content[f"{text} mean_cosine of the blocks"] = np.mean(mean_cosine[1:-1])
        content[f"{text} Spearman's ρ"] = order_of(mean_cosine)
    if history := row.get("history"):
        content["plateau_end"] = history["plateau_end"]
        content["block_cosine over time"] = history["block_cosine"]
        content["seconds"] = sum(history["seconds"].values())
    return content


def tabulated(rows: Iterable[Row]) -> DataFrame:
    """Return the numbers of all finished runs, with a row per seed and a column per (part of
    the experiment, condition, number). Numbers that a run does not have are NaN.

    If a run was tried several times, the last finished try counts. The part "restored" has
    the models of the part "main" that were trained a second time, with the same seeds.
    """
    finished = {}
    for row in rows:
        if row["part"] == "restored":
            _, condition, seed = row["of"]
            finished["restored", condition, seed] = row
        elif row.get("status") == "finished":
            finished[row["part"], row["condition"], row["seed"]] = row
    columns: dict[tuple[str, str, str], dict[int, float | None]] = {}
    for (part, condition, seed), row in sorted(finished.items()):
        for name, number in numbers(row).items():
            columns.setdefault((part, condition, name), {})[seed] = number
    return DataFrame(columns, dtype=float)


def read_runs() -> DataFrame:
    """Return the numbers of the recorded runs, as ``tabulated`` arranges them."""
    return tabulated(read_json_lines(ROOT / "docs" / "evidence.jsonl"))


def paired(values: Series, baseline: Series) -> np.ndarray:
    """Return values − baseline [pairs], for the seeds that both have."""
    return (values - baseline).dropna().to_numpy()


def on_off(runs: DataFrame, part: str, end: str = "", number: str = LOSS) -> np.ndarray:
    """Return on − off [pairs] of the conditions "on…" and "off…" with this end."""
    return paired(runs[part, f"on{end}", number], runs[part, f"off{end}", number])


def interval(differences: ArrayLike, level: float = 0.95) -> tuple[Any, Any]:
    """Return both ends of Student's interval of the mean, [...], given differences [...,
    seeds].
    """
    test = stats.ttest_1samp(differences, 0, axis=-1)
    return test.confidence_interval(level)


def difference_of(pairs: np.ndarray) -> Difference:
    """Return the mean of differences [pairs] and its 95 % interval."""
    return paired_difference(pairs, np.zeros_like(pairs))


def sign_flip(differences: np.ndarray) -> np.ndarray:
    """Return the two-sided p value of the sign-flip test, [...], given differences [...,
    seeds].

    It is the fraction of all sign patterns whose sum is at least as far from 0.
    (``titan_disp.lab.statistics.sign_flip_p`` is too slow for simulated experiments.)
    """
    signs = np.array(list(product((-1, 1), repeat=differences.shape[-1])))
    distance = abs(differences.sum(-1, keepdims=True))
    return (abs(differences @ signs.T) >= distance - 1e-9).mean(-1)


def ends(differences: ArrayLike, level: float = 0.95) -> str:
    """Return the interval as text."""
    return " … ".join(f"{end:+.4f}" for end in interval(differences, level))


def tuning_curves(runs: DataFrame) -> np.ndarray:
    """Return on − off in the development loss of the first experiment's tuning, [curves,
    rates], in the order of ``CURVES`` and ``RATES``.
    """
    recipes = (
        f"_lr-{rate:g}_warmup-{warm:g}" for warm, rate in product(WARMUPS, RATES)
    )
    on_offs = [
        on_off(runs, "tuning", end, "development cross_entropy") for end in recipes
    ]
    by_seed = np.reshape(on_offs, (len(WARMUPS), len(RATES), 2))
    return by_seed.swapaxes(1, 2).reshape(len(CURVES), len(RATES))


def changes_by_loss(runs: DataFrame) -> DataFrame:
    """Return the mean changes of the blocks' cosine and of cross-entropy against no auxiliary
    loss, with a row for each auxiliary loss, over the seeds of the part "losses".
    """
    losses = runs["losses"].dropna(how="all")
    with_and_without = runs["widths"].loc[losses.index]
    by_loss = {"on-192": with_and_without["on-192"]}
    by_loss |= {name: losses[name] for name in losses.columns.unique(0)}
    off = with_and_without["off-192"]
    changes = {name: (numbers - off).mean() for name, numbers in by_loss.items()}
    return DataFrame(changes).T[[COSINE, LOSS]]


def comparisons(runs: DataFrame) -> dict[str, np.ndarray]:
    """Return on − off [seeds] in the cross-entropy of test text, by the names of the rows
    of the page's table.
    """
    on = runs["main", "on", LOSS]
    off = runs["main", "off", LOSS]
    again = runs["restored", "off", LOSS]
    of_parts = [on_off(runs, part, "-192") for part in TUNED]
    return {
        "first experiment, rate 0.016": paired(on, off),
        "the same, off trained again (not planned)": paired(on, again),
        "the mean of both (not planned)": paired(on, (off + again) / 2),
        "second experiment, rate 0.032": np.concatenate(of_parts),
        "MLP width 16, not retuned": on_off(runs, "width"),
        "MLP width 16, tuned": on_off(runs, "widths", "-16"),
        "MLP width 768, tuned": on_off(runs, "widths", "-768"),
        "12 layers, not retuned": on_off(runs, "depth"),
        "2,400 steps, not retuned": on_off(runs, "long"),
    }
