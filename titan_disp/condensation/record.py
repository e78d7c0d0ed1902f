"""A measurement of condensation has numbers for each layer.

They are summed up over depth, and in a table over training.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from titan_disp.errors import ConfigError
from titan_disp.files import atomic_write

BINS = 128
EDGES = np.linspace(-1, 1, BINS + 1)  # of the histogram's bins
RANKS = {"spearman": "Spearman's ρ", "kendall": "Kendall's τ"}
OF_COVARIANCE = ("iso_score_star", "covariance_rank", "first_component")
# the range of mean cosines below which ρ and τ are not given: our choice
LEAST_RANGE = 0.01
ROWS = 8  # of a run's table, at most
# The sets of layers that ρ and τ rank. Those up to the final norm leave out the last
# block, as Hugging Face's hidden states do. The paper's are l = 1 … L, without the
# embedding (l = 0).
PLACES = {
    "before_norm": "up to the last block, with the embedding",
    "after_norm": "up to the final norm, with the embedding",
    "blocks_before_norm": "up to the last block, without the embedding",
    "blocks_after_norm": "up to the final norm, without the embedding",
}
OF_PAPER = "blocks_after_norm"


@dataclass(frozen=True)
class OverDepth:
    """Spearman's ρ and Kendall's τ of the mean cosine with depth, and the range of the
    mean cosines.

    Both depend on the order alone, so differences of 0.002, as at initialization, would
    count as much as those of 0.5. They are NaN if the range is less than
    ``LEAST_RANGE``.
    """

    spearman: float
    kendall: float
    range: float

    @classmethod
    def of(cls, mean_cosine: np.ndarray) -> "OverDepth":
        # Imported here because it takes a second, and only rank 0 needs it
        from scipy import stats

        spread = float(np.ptp(mean_cosine))
        if not spread >= LEAST_RANGE:
            return cls(math.nan, math.nan, spread)
        depth = np.arange(len(mean_cosine))
        spearman = stats.spearmanr(depth, mean_cosine)
        kendall = stats.kendalltau(depth, mean_cosine)
        return cls(float(spearman.statistic), float(kendall.statistic), spread)

    def to_json(self) -> dict[str, float | None]:
        return {name: _number(value) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        if not math.isfinite(self.range):
            return "ρ – τ – (not all cosines are finite)"
        if math.isnan(self.spearman):
            return f"ρ – τ – (the mean cosines differ by only {self.range:.3f})"
        return f"ρ {self.spearman:.2f} τ {self.kendall:.2f}"


@dataclass(frozen=True)
class Condensation:
    """A measurement holds averages over sequences, by layer.

    Index 0 of every array is the embedding's output, i + 1 the output of block i before
    the final norm, and the next index the last block's output after it. The logits may
    follow.

    Attributes:
        mean_cosine: [layers] mean of all N² pairwise cosines of a sequence.
        std_cosine: [layers] their standard deviation, over the pairs of all sequences.
        mean_angle: [layers] mean of arccos(c)/π over pairs of different tokens, the
            paper's D: ½ for directions spread uniformly over the sphere, 0 for one
            common direction.
        effective_rank: [layers] exp of the entropy of the normalized singular values of
            the N unit vectors (Roy & Vetterli 2007): from 1 to min(N, F).
        histogram: [layers, 128] fraction of the pairs of all sequences by cosine, in
            bins of equal width on [−1, 1].
        tokens: N, per sequence.
        cross_entropy: of the next token, in nats, mean over all tokens of the same
            sequences; NaN if not measured.
        averaged_histogram: [layers, 128] the paper's histogram, of the N×N cosines
            averaged over the sequences first (``AveragedCosines``). None if it was not
            taken, as while a run trains.
        features: F, of all layers but the logits; 0 in files of earlier versions.
        logits: whether the last index of every array is that of the logits.
        untrained_mean_cosine: [layers] of the same model before training. None if it
            was not measured.
        covariance: [3, layers] the numbers ``OF_COVARIANCE`` of all tokens. None if
            they were not taken, as in training.
    """

    mean_cosine: np.ndarray
    std_cosine: np.ndarray
    mean_angle: np.ndarray
    effective_rank: np.ndarray
    histogram: np.ndarray
    tokens: int
    sequences: int
    cross_entropy: float = math.nan
    averaged_histogram: np.ndarray | None = None
    features: int = 0
    logits: bool = False
    untrained_mean_cosine: np.ndarray | None = None
    covariance: np.ndarray | None = None

    @property
    def last_block(self) -> int:
        """Return the index of the last block's output, before the final norm."""
        return len(self.mean_cosine) - 2 - self.logits

    @cached_property
    def over_depth(self) -> dict[str, OverDepth]:
        """Return ρ and τ over each set of layers in ``PLACES``."""
        before = self.mean_cosine[: self.last_block + 1]
        after = self._hidden_states
        sets = (before, after, before[1:], after[1:])
        return {
            place: OverDepth.of(cosines)
            for place, cosines in zip(PLACES, sets, strict=True)
        }

    @property
    def _hidden_states(self) -> np.ndarray:
        """Mean cosines of Hugging Face's hidden states, without the last block before
        the final norm.
        """
        return np.append(
            self.mean_cosine[: self.last_block], self.mean_cosine[self.last_block + 1]
        )

    def of_last_layers(self) -> list[float]:
        """Return the mean cosine over the last N layers up to the final norm, for N
        from 1 to all, as the authors' code.
        """
        cosines = self._hidden_states[::-1]
        return (cosines.cumsum() / np.arange(1, len(cosines) + 1)).tolist()

    def by_layer(self) -> dict[str, list[float]]:
        """Return the numbers by layer that were taken, without the histograms."""
        numbers = (
            "mean_cosine",
            "std_cosine",
            "mean_angle",
            "effective_rank",
            "untrained_mean_cosine",
        )
        taken = {name: getattr(self, name) for name in numbers}
        taken |= (
            {}
            if self.covariance is None
            else dict(zip(OF_COVARIANCE, self.covariance, strict=True))
        )
        return {
            name: values.tolist()
            for name, values in taken.items()
            if values is not None
        }

    def by_part(self) -> dict[str, dict[str, float]]:
        """Return means of the numbers over parts of the model.

        Block i of L is early if 3i < L, late if 3i ≥ 2L.
        """
        first, second = (1 + math.ceil(third * self.last_block / 3) for third in (1, 2))
        parts = {
            "blocks": slice(1, -1),
            "early_blocks": slice(1, first),
            "middle_blocks": slice(first, second),
            "late_blocks": slice(second, -1),
            "last_block": slice(-2, -1),
            "final_norm": slice(-1, None),
        }
        return {
            name: {
                part: float(np.mean(values[rows]))
                for part, rows in parts.items()
                if values[rows]
            }
            for name, of_layers in self.by_layer().items()
            for values in [of_layers[: self.last_block + 2]]
        }

    def to_json(self) -> dict[str, Any]:
        """Return everything but the histograms, with None for numbers that are
        undefined or were not measured.
        """
        return {
            "layers": [
                "embedding",
                *map("block {}".format, range(self.last_block)),
                "final norm",
                *["logits"] * self.logits,
            ],
            **{
                name: [_number(value) for value in values]
                for name, values in self.by_layer().items()
            },
            **{
                place: over_depth.to_json()
                for place, over_depth in self.over_depth.items()
            },
            "cross_entropy": _number(self.cross_entropy),
            "tokens": self.tokens,
            "sequences": self.sequences,
            "features": self.features,
        }

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        values = {
            name: value for name, value in asdict(self).items() if value is not None
        }
        with atomic_write(path) as partial, open(partial, "wb") as file:
            # final_norm names the last layer
            np.savez_compressed(file, edges=EDGES, final_norm=True, **values)

    @classmethod
    def load(cls, path: Path) -> "Condensation":
        """Read what ``save`` wrote. Raises ConfigError if the file cannot be read."""
        try:
            with np.load(path) as arrays:
                content: dict[str, Any] = {
                    name: arrays[name]
                    for name in {*arrays.files} - {"edges", "final_norm"}
                }
            found = cls(
                **{
                    name: values if values.ndim else values.item()
                    for name, values in content.items()
                }
            )
            layers = len(found.mean_cosine)
            histograms = [
                one.shape
                for one in (found.histogram, found.averaged_histogram)
                if one is not None
            ]
            by_layer = {len(values) for values in found.by_layer().values()}
            if (
                layers < 3 + found.logits
                or by_layer != {layers}
                or {*histograms} != {(layers, BINS)}
            ):
                raise ValueError("its arrays have too few layers, or differ in shape")
            return found
        except Exception as error:  # a damaged archive can raise any exception
            raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error


def load_steps(
    folder: str | Path, problems: list[str] | None = None
) -> dict[int, Condensation]:
    """Return what a run measured while it trained, by step: its files
    RUN/condensation/step-N.npz, if any.

    A message about each file that cannot be read is put into ``problems``; without it,
    the error is raised.
    """
    steps = {
        path.stem.removeprefix("step-"): path
        for path in Path(folder).glob("step-*.npz")
    }
    found: dict[int, Condensation] = {}
    layers = 0  # of the first file
    for step in sorted(filter(str.isdecimal, steps), key=int):
        try:
            one = Condensation.load(steps[step])
            layers = layers or len(one.mean_cosine)
            if len(one.mean_cosine) != layers:
                raise ConfigError(
                    f"{str(steps[step])!r} cannot be read: other files have {layers} layers"
                )
            found[int(step)] = one
        except ConfigError as error:
            if problems is None:
                raise
            problems.append(str(error))
    return found


def over_depth(place: str, rank: str) -> Callable[[Condensation], float]:
    """Return a function that reads ρ or τ, of ``RANKS``, over the set of layers of
    ``PLACES``.
    """
    return lambda found: getattr(found.over_depth[place], rank)


def blocks_mean(found: Condensation) -> float:
    """Return the mean cosine, averaged over all blocks."""
    return found.by_part()["mean_cosine"]["blocks"]


def most_condensed(by_step: Mapping[int, Condensation]) -> int:
    """Return the step with the highest mean cosine of all blocks, the first of
    several.
    """
    return _highest({step: blocks_mean(one) for step, one in by_step.items()})


def _highest(by_step: Mapping[int, float]) -> int:
    return max(by_step, key=lambda step: np.nan_to_num(by_step[step], nan=-1))


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def over_training(measured: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return held-out cross-entropy and mean cosines at some steps, as lines of a table
    under its headings.

    ``measured`` is by step what ``Condensation.to_json`` returns. The table is empty
    for fewer than two steps.
    """
    if len(measured) < 2:
        return []
    # None becomes NaN
    last = {
        step: np.array(one["mean_cosine"], dtype=float)[-2]
        for step, one in measured.items()
    }
    blocks = {
        step: np.array(one["mean_cosine"], dtype=float)[1:-1].mean()
        for step, one in measured.items()
    }
    highest = _highest(blocks)
    lines = [
        "On held-out text. Mean cosine: 1 if all tokens of a sequence point the same way, near 0 if they share no "
        "direction.",
        f"{'step':>9}  cross-entropy  mean cosine of all blocks  of the last block",
    ]
    for step in telling_steps(sorted(blocks), {highest}):
        ce = measured[step]["cross_entropy"]
        shown = f"{ce:.3f}" if ce is not None else "–"
        mark = "  (highest)" if step == highest else ""
        lines.append(
            f"{step:9,}  {shown:>13}  {blocks[step]:25.2f}  {last[step]:17.2f}{mark}"
        )
    return lines


def telling_steps(steps: Sequence[int], highest: Collection[int]) -> list[int]:
    """Return the first, the last, the highest and others of ascending steps, by equal
    ratios: a collapse comes early.
    """
    after = [step for step in steps if step > 0]
    wanted: Sequence[float] = (
        np.geomspace(after[0], after[-1], ROWS - 2).tolist() if after else []
    )
    return sorted(
        {
            steps[0],
            *highest,
            *(min(after, key=lambda step: abs(step - w)) for w in wanted),
        }
    )
