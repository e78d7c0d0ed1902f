"""One measurement of condensation: numbers by layer, and what they do over depth."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titan_disp.files import whole

BINS = 128
EDGES = np.linspace(-1, 1, BINS + 1)  # of the histogram


@dataclass(frozen=True)
class Condensation:
    """Averages over sequences; index 0 of every array is the embedding's output, i + 1 the output of block i.

    Attributes:
        mean_cosine: [layers] mean of all N² pairwise cosines of a sequence.
        std_cosine: [layers] their standard deviation, over the pairs of all sequences.
        angular_distance: [layers] ½ − mean of arccos(c)/π over pairs of different tokens: 0 for directions spread
            uniformly over the sphere, ½ for one common direction.
        effective_rank: [layers] exp of the entropy of the normalised singular values of the N unit vectors
            (Roy & Vetterli 2007): from 1 to min(N, F).
        histogram: [layers, 128] fraction of pairs by cosine, in bins of equal width on [−1, 1].
        tokens: N, per sequence.
        sequences: how many.
    """

    mean_cosine: np.ndarray
    std_cosine: np.ndarray
    angular_distance: np.ndarray
    effective_rank: np.ndarray
    histogram: np.ndarray
    tokens: int
    sequences: int

    @property
    def spearman(self) -> float:
        """Spearman's ρ of the mean cosine against depth; NaN where all layers are alike."""
        return self._over_depth("spearmanr")

    @property
    def kendall(self) -> float:
        """Kendall's τ of the mean cosine against depth; NaN where all layers are alike."""
        return self._over_depth("kendalltau")

    def _over_depth(self, name: str) -> float:
        from scipy import stats  # a second, which of all ranks only the first needs

        if np.ptp(self.mean_cosine) == 0:
            return float("nan")
        return float(getattr(stats, name)(np.arange(len(self.mean_cosine)), self.mean_cosine).statistic)

    def by_layer(self) -> dict[str, list[float]]:
        """The numbers by layer, without the histogram."""
        names = ("mean_cosine", "std_cosine", "angular_distance", "effective_rank")
        return {name: getattr(self, name).tolist() for name in names}

    def to_json(self) -> dict[str, Any]:
        """All but the histogram; ρ and τ are None where undefined, as JSON has no NaN."""
        depth = {"spearman": self.spearman, "kendall": self.kendall}
        return {
            **self.by_layer(),
            **{name: None if np.isnan(value) else value for name, value in depth.items()},
            "tokens": self.tokens,
            "sequences": self.sequences,
        }

    def save(self, path: str | Path) -> None:
        """Write all of it as .npz, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as partial, open(partial, "wb") as file:
            np.savez_compressed(file, edges=EDGES, **asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> "Condensation":
        with np.load(path) as arrays:
            content: dict[str, Any] = {name: arrays[name] for name in arrays.files if name != "edges"}
        content |= {name: int(content[name]) for name in ("tokens", "sequences")}
        return cls(**content)


def load_steps(folder: str | Path) -> dict[int, Condensation]:
    """What a run measured while it trained, by step: the step-N.npz files of RUN/condensation. Empty where there are none."""
    found = {}
    for path in Path(folder).glob("step-*.npz"):
        if matched := re.fullmatch(r"step-(\d+)\.npz", path.name):
            found[int(matched.group(1))] = Condensation.load(path)
    return dict(sorted(found.items()))
