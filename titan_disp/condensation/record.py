"""A measurement of condensation: numbers for each layer, their correlation with depth,
and a table of how these numbers change over training.
"""

import math
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titan_disp.errors import ConfigError
from titan_disp.files import atomic_write, check_regular
from titan_disp.text import NOTHING

BINS = 128
EDGES = np.linspace(-1, 1, BINS + 1)  # of the histogram's bins
RANKS = {"spearman": "Spearman's ρ", "kendall": "Kendall's τ"}
# Largest unpacked size of a file of ``Measurement.save``, in bytes. It is our choice: a
# thousand layers take 2 MB.
MOST_BYTES = 2**26
ROWS = 8  # a run's table has at most about this many rows
# The sets of layers that ρ and τ rank. In the sets up to the final norm, the output of
# the final norm replaces the output of the last block, as in Hugging Face's hidden
# states. The paper's set is l = 1 … L, without the embedding (l = 0).
PLACES = {
    "before_norm": "up to the last block, with the embedding",
    "after_norm": "up to the final norm, with the embedding",
    "blocks_before_norm": "up to the last block, without the embedding",
    "blocks_after_norm": "up to the final norm, without the embedding",
}
OF_PAPER = "blocks_after_norm"


@dataclass(frozen=True)
class DepthCorrelation:
    """Rank correlations of the mean cosine with depth, over one set of layers.

    As in the paper, ρ and τ depend only on the order of the layers' mean cosines:
    differences of 0.002, as at initialization, count as much as differences of 0.5. The
    range tells these cases apart. ρ and τ are NaN if all mean cosines are equal, or if
    a mean cosine is not finite.
    """

    spearman: float  # ρ
    kendall: float  # τ
    range: float  # largest minus smallest mean cosine; NaN if a cosine is not finite

    @classmethod
    def of(cls, mean_cosine: np.ndarray) -> "DepthCorrelation":
        """Return ρ and τ of mean cosines in the order of depth, [layers]."""
        # Imported here because importing scipy takes a second, and only rank 0 needs it.
        from scipy import stats

        value_range = float(np.ptp(mean_cosine))
        if not value_range > 0:
            return cls(math.nan, math.nan, value_range)
        depth = np.arange(len(mean_cosine))
        spearman = stats.spearmanr(depth, mean_cosine)
        kendall = stats.kendalltau(depth, mean_cosine)
        return cls(float(spearman.statistic), float(kendall.statistic), value_range)

    def to_json(self) -> dict[str, float | None]:
        """Return the fields by name. A number that is not finite is None."""
        return {name: _for_json(value) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        """Return a text such as "ρ 0.93 τ 0.81 (range 0.32)", or why ρ and τ are
        undefined.
        """
        if not math.isfinite(self.range):
            return "ρ – τ – (not all cosines are finite)"
        if math.isnan(self.spearman):
            return "ρ – τ – (the mean cosines of all layers are equal)"
        return f"ρ {self.spearman:.2f} τ {self.kendall:.2f} (range {self.range:.2g})"


class Isotropy(NamedTuple):
    """Measures of how evenly one layer's tokens fill its dimensions, computed from the
    covariance of the tokens.

    If all tokens are equal, ``iso_score_star`` and ``first_component`` are NaN.
    """

    iso_score_star: float  # Rudman & Eickhoff 2024: 0 (one direction) to 1 (isotropic)
    covariance_rank: float  # effective rank of the centered tokens, at least 1
    first_component: float  # fraction of the variance along the first component


OF_COVARIANCE = Isotropy._fields


@dataclass(frozen=True)
class Measurement:
    """Averages over sequences, by layer.

    Index 0 of every array is the embedding's output. Index i + 1 is the output of block
    i, before the final norm. The next index is the output of the final norm. The logits
    may follow.

    Attributes:
        mean_cosine: [layers] mean of all N² pairwise cosines of a sequence.
        std_cosine: [layers] standard deviation of the cosines, over the pairs of all
            sequences.
        mean_angle: [layers] mean of arccos(c)/π over pairs of different tokens: ½ for
            directions spread uniformly over the sphere, 0 for one common direction. The
            angle is D of ``dispersion.formula`` without the clamp and without ε.
        effective_rank: [layers] exp of the entropy of the normalized singular values of
            the N unit vectors (Roy & Vetterli 2007): from 1 to min(N, F).
        histogram: [layers, 128] fraction of the pairs of all sequences by cosine, in
            bins of equal width on [−1, 1].
        tokens: N, per sequence.
        sequences: number of sequences.
        cross_entropy: mean cross-entropy of the next token, in nats, over all tokens of
            the same sequences; NaN if not measured.
        averaged_histogram: [layers, 128] the paper's histogram, for which N×N cosines
            are averaged over the sequences and then counted (``AveragedCosines``). None
            if it was not computed, as in training.
        features: F, of all layers except the logits; 0 in files of earlier versions.
        logits: whether the last index of every array stands for the logits.
        untrained_mean_cosine: [layers] mean cosine of the same model before training.
            None if it was not measured.
        covariance: [3, layers] a row for each field of ``Isotropy``. None if they were
            not computed, as in training.
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
    def layer_count(self) -> int:
        """The length of every array: embedding, blocks, final norm and any logits."""
        return len(self.mean_cosine)

    @property
    def last_block(self) -> int:
        """The index of the last block's output before the final norm, which is also the
        number of blocks.
        """
        return self.layer_count - 2 - self.logits

    @property
    def layer_names(self) -> list[str]:
        """The names of all layers, such as "embedding", "block 0" and "final norm"."""
        blocks = [f"block {i}" for i in range(self.last_block)]
        return ["embedding", *blocks, "final norm", *["logits"] * self.logits]

    @cached_property
    def over_depth(self) -> dict[str, DepthCorrelation]:
        """ρ and τ over each set of layers in ``PLACES``."""
        before_norm = self.mean_cosine[: self.last_block + 1]
        after_norm = self._hidden_states
        cosines = {
            "before_norm": before_norm,
            "after_norm": after_norm,
            "blocks_before_norm": before_norm[1:],
            "blocks_after_norm": after_norm[1:],
        }
        return {place: DepthCorrelation.of(cosines[place]) for place in PLACES}

    @property
    def _hidden_states(self) -> np.ndarray:
        """Mean cosines of Hugging Face's hidden states, [blocks + 1].

        The output of the final norm replaces the output of the last block.
        """
        final_norm = self.mean_cosine[self.last_block + 1]
        return np.append(self.mean_cosine[: self.last_block], final_norm)

    def of_last_layers(self) -> list[float]:
        """Return the mean cosine over the last N hidden states, for N from 1 to all.

        The last hidden state is the final norm's output, as in the authors' code.
        """
        cosines = self._hidden_states[::-1]
        counts = np.arange(1, len(cosines) + 1)
        return (cosines.cumsum() / counts).tolist()

    def by_layer(self) -> dict[str, list[float]]:
        """Return the numbers of all layers by name, without the histograms.

        Numbers that were not measured are left out.
        """
        names = (
            "mean_cosine",
            "std_cosine",
            "mean_angle",
            "effective_rank",
            "untrained_mean_cosine",
        )
        arrays = {name: getattr(self, name) for name in names}
        if self.covariance is not None:
            arrays |= dict(zip(OF_COVARIANCE, self.covariance, strict=True))
        return {
            name: array.tolist() for name, array in arrays.items() if array is not None
        }

    def by_part(self) -> dict[str, dict[str, float]]:
        """Return the mean of each number of ``by_layer`` over each part of the model.

        Block i of L is early if 3i < L, late if 3i ≥ 2L. A part without layers is left
        out.
        """
        means = {}
        for name, values in self.by_layer().items():
            final_norm = values[self.last_block + 1]
            blocks = values[1 : self.last_block + 1]
            early, middle, late = np.array_split(blocks, 3)
            parts: dict[str, Any] = {
                "blocks": blocks,
                "early_blocks": early,
                "middle_blocks": middle,
                "late_blocks": late,
                "last_block": blocks[-1],
                "final_norm": final_norm,
            }
            means[name] = {
                part: float(np.mean(numbers))
                for part, numbers in parts.items()
                if np.size(numbers)
            }
        return means

    def to_json(self) -> dict[str, Any]:
        """Return everything but the histograms.

        NaN and infinities become None. Numbers by layer that were not measured are left
        out.
        """
        by_layer = {name: _for_json(values) for name, values in self.by_layer().items()}
        over_depth = {
            place: correlation.to_json()
            for place, correlation in self.over_depth.items()
        }
        return {
            "layers": self.layer_names,
            **by_layer,
            **over_depth,
            "cross_entropy": _for_json(self.cross_entropy),
            "tokens": self.tokens,
            "sequences": self.sequences,
            "features": self.features,
        }

    def save(self, path: Path) -> None:
        """Write all fields that are not None to a .npz file, whose folder need not exist."""
        path.parent.mkdir(parents=True, exist_ok=True)
        values = {
            name: value for name, value in asdict(self).items() if value is not None
        }
        with atomic_write(path) as partial, open(partial, "wb") as file:
            # final_norm names the last layer
            np.savez_compressed(file, edges=EDGES, final_norm=True, **values)

    @classmethod
    def load(cls, path: Path) -> "Measurement":
        """Return the measurement that ``save`` wrote. Raises ConfigError if the file
        cannot be read.
        """
        try:
            check_regular(path)
            _check_size(path)
            with np.load(path) as file:
                names = {*file.files} - {"edges", "final_norm"}
                arrays = {name: file[name] for name in names}
            scalars: dict[str, Any] = {
                name: array.item() for name, array in arrays.items() if array.ndim == 0
            }
            measurement = cls(**(arrays | scalars))
            measurement._check_shapes()
        except Exception as error:  # a damaged archive can raise any exception
            raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
        return measurement

    def _check_shapes(self) -> None:
        """Raise ValueError unless all arrays have the same layers, with at least one
        block.
        """
        layers = self.layer_count
        lengths = {len(values) for values in self.by_layer().values()}
        histograms = (self.histogram, self.averaged_histogram)
        shapes = {array.shape for array in histograms if array is not None}
        has_a_block = self.last_block >= 1
        if not has_a_block or lengths != {layers} or shapes != {(layers, BINS)}:
            raise ValueError("its arrays have too few layers, or differ in shape")


def _check_size(path: Path) -> None:
    """Raise ValueError if the unpacked size that an archive states is more than
    ``MOST_BYTES``. (A reader unpacks no more than the stated size.)
    """
    with zipfile.ZipFile(path) as archive:
        size = sum(part.file_size for part in archive.infolist())
    if size > MOST_BYTES:
        raise ValueError(
            f"it unpacks to {size:,} bytes, expected at most {MOST_BYTES:,}"
        )


def load_steps(
    folder: str | Path, problems: list[str] | None = None
) -> dict[int, Measurement]:
    """Return the measurements that a run made while it trained, by ascending step.

    ``folder`` is RUN/condensation, with files step-N.npz. The result is empty if the
    folder is missing or empty. Raises ConfigError if a file cannot be read, or has
    another number of layers than the first file. With a list of ``problems``, such a
    file is left out, and the message is appended to the list.
    """
    paths = {
        path.stem.removeprefix("step-"): path
        for path in Path(folder).glob("step-*.npz")
    }
    measurements: dict[int, Measurement] = {}
    layers = 0  # of the first file
    for step in sorted(filter(str.isdecimal, paths), key=int):
        path = paths[step]
        try:
            measurement = Measurement.load(path)
            layers = layers or measurement.layer_count
            if measurement.layer_count != layers:
                raise ConfigError(
                    f"{str(path)!r} cannot be read: it has {measurement.layer_count} "
                    f"layers, and other files have {layers}"
                )
        except ConfigError as error:
            if problems is None:
                raise
            problems.append(str(error))
        else:
            measurements[int(step)] = measurement
    return measurements


def over_depth(place: str, rank: str) -> Callable[[Measurement], float]:
    """Return a function that returns ρ or τ of a measurement.

    ``place`` is a key of ``PLACES``, and ``rank`` is a key of ``RANKS``.
    """
    return lambda measurement: getattr(measurement.over_depth[place], rank)


def blocks_mean(measurement: Measurement) -> float:
    """Return the mean cosine, averaged over all blocks."""
    return measurement.by_part()["mean_cosine"]["blocks"]


def most_condensed(by_step: Mapping[int, Measurement]) -> int:
    """Return the step with the highest mean cosine over all blocks, or the first such
    step.
    """
    return _highest({step: blocks_mean(by_step[step]) for step in by_step})


def _highest(by_step: Mapping[int, float]) -> int:
    """Return the first step with the highest mean cosine. NaN counts as −1."""
    return max(by_step, key=lambda step: np.nan_to_num(by_step[step], nan=-1))


def _for_json(numbers: Any) -> Any:
    """Return a number or a list of numbers, with None for each that is not finite.

    JSON has no NaN and no infinities.
    """
    finite: Any = np.where(np.isfinite(numbers), numbers, None)
    return finite.tolist()


def over_training(rows: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table: cross-entropy and mean cosines at some steps.

    ``rows`` maps steps to the output of ``Measurement.to_json`` without logits. With
    fewer than two steps, no line is returned. The first two lines are a caption and the
    headings.
    """
    if len(rows) < 2:
        return []
    # [1:-1] leaves out the embedding and the final norm. None becomes NaN.
    blocks = {
        step: np.array(row["mean_cosine"][1:-1], dtype=float)
        for step, row in rows.items()
    }
    means = {step: cosines.mean() for step, cosines in blocks.items()}
    highest = _highest(means)
    lines = [
        "On held-out text. Mean cosine: 1 if all tokens of a sequence point the same "
        "way, near 0 if they share no direction.",
        f"{'step':>9}  cross-entropy  mean cosine of all blocks  of the last block",
    ]
    for step in telling_steps(sorted(rows), {highest}):
        cross_entropy = rows[step]["cross_entropy"]
        ce = NOTHING if cross_entropy is None else f"{cross_entropy:.3f}"
        mark = "  (highest)" if step == highest else ""
        mean = means[step]
        last_block = blocks[step][-1]
        lines.append(f"{step:9,}  {ce:>13}  {mean:25.2f}  {last_block:17.2f}{mark}")
    return lines


def telling_steps(steps: Sequence[int], highest: Collection[int]) -> list[int]:
    """Return at most about ``ROWS`` of the ascending ``steps``, for a table of a run.

    These are the first step, the last step, all of ``highest``, and steps in between.
    The distances between steps grow by equal ratios, because a collapse comes early.
    """
    chosen = {steps[0], *highest}
    trained = [step for step in steps if step > 0]
    if trained:
        for target in np.geomspace(trained[0], trained[-1], ROWS - 2).tolist():
            chosen.add(min(trained, key=lambda step: abs(step - target)))
    return sorted(chosen)
