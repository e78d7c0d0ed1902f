"""The analysis of docs/evidence_design.md: rows of docs/evidence.jsonl to differences, intervals and words."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from benchmarks.evidence_parts import FEW_SEEDS, SEEDS, Row, newest
from titan_disp.evaluate.compare import Difference, holm, paired_difference
from titan_disp.sweeps.sign_flip import sign_flip_p

MARGIN = 0.02  # nats; a smaller difference does not matter (docs/evidence_design.md)
ALPHA = 0.05


@dataclass(frozen=True)
class Contrast:
    """A condition against one of the same part, paired by seed.

    Attributes:
        family: contrasts that Holm's adjustment counts together; empty: too few seeds for a test.
        text: that the numbers are of.
    """

    part: str
    condition: str
    family: str
    text: str = "test"
    baseline: str = "off"

    @property
    def seeds(self) -> tuple[int, ...]:
        return SEEDS if self.family else FEW_SEEDS


PRIMARY = Contrast("main", "on", "main")
CONTRASTS = (
    PRIMARY,
    *(Contrast("main", name, "main") for name in ("on-0.03", "on-first-quarter", "on-moments", "noisy-embedding")),
    Contrast("width", "on", "main"),
    Contrast("depth", "on", ""),
    Contrast("long", "on", ""),
    *(
        Contrast("midtraining", name, "midtraining", text)
        for text in ("test", "new_test")
        for name in ("on-0.1", "on-0.5")
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a contrast.

    Attributes:
        baseline, condition: the metric by seed of the runs that have finished.
        difference: condition less baseline over the pairs; p of the sign-flip test. None where there is no pair.
        failed: "off seed 3" and so on, of the two conditions.
    """

    contrast: Contrast
    baseline: Mapping[int, float]
    condition: Mapping[int, float]
    difference: Difference | None
    failed: tuple[str, ...]

    @property
    def pairs(self) -> list[int]:
        return [seed for seed in self.condition if seed in self.baseline]

    @property
    def lower(self) -> int:
        """In how many pairs the condition has the lower value."""
        return sum(self.condition[seed] < self.baseline[seed] for seed in self.pairs)

    @property
    def complete(self) -> bool:
        return len(self.pairs) == len(self.contrast.seeds)

    def verdict(self) -> str:
        """In words, by the rules of the design."""
        d = self.difference
        if d is None or d.low is None or d.high is None:
            return "not run" if not self.pairs else f"too few pairs ({len(self.pairs)} of {len(self.contrast.seeds)})"
        unfinished = "" if self.complete else f" ({len(self.pairs)} of {len(self.contrast.seeds)} pairs)"
        if d.low > -MARGIN and d.high < MARGIN:
            return f"no difference of {MARGIN:g} or more{unfinished}"
        if not self.contrast.family:
            if self.lower in (0, len(self.pairs)):
                word = "better" if self.lower else "worse"
                return f"{word} in all {len(self.pairs)} seeds, too few for a test{unfinished}"
            return f"better in {self.lower} of {len(self.pairs)} seeds, undecided{unfinished}"
        if d.holm is not None and d.holm < ALPHA and not (d.mean < 0 and self._fails_more()):
            return ("better" if d.mean < 0 else "worse") + unfinished
        return "undecided" + unfinished

    def _fails_more(self) -> bool:
        own = sum(not name.startswith(f"{self.contrast.baseline} ") for name in self.failed)
        return own > len(self.failed) - own


def by_seed(rows: Iterable[Row], part: str, condition: str, value: Callable[[Row], float | None]) -> dict[int, float]:
    """Of the runs that have finished and have the value."""
    found = {}
    for (of_part, of_condition, seed), row in newest(rows).items():
        if (of_part, of_condition) == (part, condition) and row["status"] == "finished":
            number = value(row)
            if number is not None:
                found[seed] = number
    return dict(sorted(found.items()))


def metric(text: str, name: str) -> Callable[[Row], float | None]:
    """A number on held-out text, such as cross_entropy."""
    return lambda row: row["numbers"].get(text, {}).get(name)


def of_history(name: str) -> Callable[[Row], float | None]:
    """A number of the way there: plateau_end or block_cosine."""
    return lambda row: row["history"].get(name) if "history" in row else None


def failures(rows: Iterable[Row]) -> list[Row]:
    """Runs whose last row is a failed one."""
    return [row for row in newest(rows).values() if row["status"] == "failed"]


def outcome(rows: Sequence[Row], contrast: Contrast, value: Callable[[Row], float | None]) -> Outcome:
    """A contrast without Holm's adjustment."""
    both = {name: by_seed(rows, contrast.part, name, value) for name in (contrast.baseline, contrast.condition)}
    own, other = both[contrast.condition], both[contrast.baseline]
    pairs = [seed for seed in own if seed in other]
    found = None
    if pairs:
        found = paired_difference(np.array([own[s] for s in pairs]), np.array([other[s] for s in pairs]))
        found = replace(found, p_value=sign_flip_p([own[s] - other[s] for s in pairs]))
    failed = tuple(
        f"{row['condition']} seed {row['seed']}"
        for row in failures(rows)
        if row["part"] == contrast.part and row["condition"] in both
    )
    return Outcome(contrast, other, own, found, failed)


def outcomes(rows: Sequence[Row]) -> dict[Contrast, Outcome]:
    """All contrasts in held-out cross-entropy. Holm's adjustment counts a family's contrasts that are not run yet, too."""
    found = {c: outcome(rows, c, metric(c.text, "cross_entropy")) for c in CONTRASTS}
    for family in {contrast.family for contrast in CONTRASTS}:
        members = [contrast for contrast in CONTRASTS if contrast.family == family]
        p_values = [d.p_value if (d := found[contrast].difference) is not None else None for contrast in members]
        for contrast, adjusted in zip(members, holm(p_values) if family else [None] * len(members), strict=True):
            if (d := found[contrast].difference) is not None:
                found[contrast] = replace(found[contrast], difference=replace(d, holm=adjusted))
    return found


def noise(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """By arrangement and seed: test cross-entropy less that of main's off, which has the same seed and data."""
    value = metric("test", "cross_entropy")
    first = by_seed(rows, "main", "off", value)
    found = {}
    for name in ("accumulation-4", "2-ranks", "again"):
        own = by_seed(rows, "noise", name, value)
        found[name] = {seed: own[seed] - first[seed] for seed in own if seed in first}
    return found


def plateau_and_loss(rows: Sequence[Row], part: str, condition: str) -> tuple[float, int] | None:
    """Spearman's ρ over seeds of the plateau's last step and the final loss, and how many seeds. None of fewer than four."""
    ends = by_seed(rows, part, condition, of_history("plateau_end"))
    losses = by_seed(rows, part, condition, metric("test", "cross_entropy"))
    seeds = [seed for seed in ends if seed in losses]
    if len(seeds) < 4 or len({ends[seed] for seed in seeds}) < 2:
        return None
    return float(stats.spearmanr([ends[s] for s in seeds], [losses[s] for s in seeds]).statistic), len(seeds)


def curve_differences(rows: Sequence[Row], part: str) -> tuple[list[int], np.ndarray] | None:
    """Tokens, and [seeds, steps] development cross-entropy of on less off while they trained. None without a pair."""
    known = newest(rows)
    pairs = []
    for (of_part, condition, seed), row in known.items():
        off = known.get((part, "off", seed))
        if of_part == part and condition == "on" and off is not None and row["status"] == off["status"] == "finished":
            pairs.append((row["history"], off["history"]))
    if not pairs:
        return None
    steps = pairs[0][0]["steps"]
    per_step = pairs[0][0]["tokens"] / steps[-1]
    every = [
        np.subtract(on["cross_entropy"], off["cross_entropy"])
        for on, off in pairs
        if on["steps"] == off["steps"] == steps
    ]
    return [round(step * per_step) for step in steps], np.stack(every)


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95 % interval of the mean over the first axis, by Student's t."""
    n = len(values)
    half = (
        stats.t.ppf(0.975, n - 1) * values.std(axis=0, ddof=1) / np.sqrt(n)
        if n > 1
        else np.full(values.shape[1:], np.nan)
    )
    return values.mean(axis=0) - half, values.mean(axis=0) + half
