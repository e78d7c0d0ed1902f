"""Analyse rows of docs/evidence.jsonl as docs/evidence_design.md says: differences, intervals and verdicts."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from benchmarks.evidence_parts import FEW_SEEDS, SEEDS, Row, newest
from titan_disp.lab.statistics import Difference, holm, paired_by_seed

MARGIN = 0.02  # nats; a smaller difference does not matter (docs/evidence_design.md)
ALPHA = 0.05


@dataclass(frozen=True)
class Contrast:
    """A comparison of a condition with a baseline of the same part, paired by seed.

    Attributes:
        family: contrasts with the same family are adjusted together (Holm). Empty: there are too few seeds for a test.
        text: the text that is measured.
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
LONG = Contrast("long", "on", "")
CONTRASTS = (
    PRIMARY,
    *(Contrast("main", name, "main") for name in ("on-0.03", "on-first-quarter", "on-moments", "noisy-embedding")),
    Contrast("width", "on", "main"),
    Contrast("depth", "on", ""),
    LONG,
    *(
        Contrast("midtraining", name, "midtraining", text)
        for text in ("test", "new_test")
        for name in ("on-0.1", "on-0.5")
    ),
)


@dataclass(frozen=True)
class Outcome:
    """The result of a contrast.

    Attributes:
        baseline, condition: the metric by seed of the runs that have finished.
        difference: condition minus baseline over the pairs, with p of the sign-flip test. None if there is no pair.
        failed: the failed runs of the two conditions, such as "off seed 3".
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
        """Count the pairs in which the condition has the lower value."""
        return sum(self.condition[seed] < self.baseline[seed] for seed in self.pairs)

    @property
    def complete(self) -> bool:
        return len(self.pairs) == len(self.contrast.seeds)

    def verdict(self) -> str:
        """Return the verdict in words, by the rules of the design."""
        d = self.difference
        if d is None or d.low is None or d.high is None:
            if not self.pairs:
                return f"no pair has finished ({len(self.failed)} runs failed)" if self.failed else "not run"
            return f"too few pairs ({len(self.pairs)} of {len(self.contrast.seeds)})"
        unfinished = "" if self.complete else f" ({len(self.pairs)} of {len(self.contrast.seeds)} pairs)"
        if d.low > -MARGIN and d.high < MARGIN:
            return f"no difference of {MARGIN:g} or more{unfinished}"
        if not self.contrast.family:
            if self.lower in (0, len(self.pairs)):
                word = "better" if self.lower else "worse"
                return f"{word} in all {len(self.pairs)} seeds, too few for a test{unfinished}"
            return f"better in {self.lower} of {len(self.pairs)} seeds, undecided{unfinished}"
        if d.holm is not None and d.holm < ALPHA:
            if d.mean < 0 and self._fails_more():
                return "undecided: lower, but more of its runs failed" + unfinished
            return ("better" if d.mean < 0 else "worse") + unfinished
        return "undecided" + unfinished

    def _fails_more(self) -> bool:
        own = sum(not name.startswith(f"{self.contrast.baseline} ") for name in self.failed)
        return own > len(self.failed) - own


def finished(rows: Iterable[Row], part: str, condition: str) -> dict[int, Row]:
    """Return the last row by seed, ascending, of a condition's finished runs."""
    own = {key[2]: row for key, row in newest(rows).items() if key[:2] == (part, condition)}
    return {seed: row for seed, row in sorted(own.items()) if row["status"] == "finished"}


def by_seed(rows: Iterable[Row], part: str, condition: str, value: Callable[[Row], float | None]) -> dict[int, float]:
    """Return the value by seed, of the runs that have finished and have a finite one."""
    numbers = {seed: value(row) for seed, row in finished(rows, part, condition).items()}
    return {seed: number for seed, number in numbers.items() if number is not None and math.isfinite(number)}


def metric(text: str, name: str) -> Callable[[Row], float | None]:
    """Return a function that reads a number on held-out text, such as cross_entropy."""
    return lambda row: row["numbers"].get(text, {}).get(name)


def of_history(name: str) -> Callable[[Row], float | None]:
    """Return a function that reads a number about training: plateau_end or block_cosine."""
    return lambda row: row["history"].get(name) if "history" in row else None


def failures(rows: Iterable[Row]) -> list[Row]:
    """Return the last rows of the runs whose last try failed."""
    return [row for row in newest(rows).values() if row["status"] == "failed"]


def outcome(rows: Sequence[Row], contrast: Contrast, value: Callable[[Row], float | None]) -> Outcome:
    """Return the result of a contrast without Holm's adjustment."""
    both = {name: by_seed(rows, contrast.part, name, value) for name in (contrast.baseline, contrast.condition)}
    own, other = both[contrast.condition], both[contrast.baseline]
    _, found = paired_by_seed(own, other)
    failed = tuple(
        f"{row['condition']} seed {row['seed']}"
        for row in failures(rows)
        if row["part"] == contrast.part and row["condition"] in both
    )
    return Outcome(contrast, other, own, found, failed)


def outcomes(rows: Sequence[Row]) -> dict[Contrast, Outcome]:
    """Return all contrasts in held-out cross-entropy. Holm's adjustment also counts contrasts that are not run yet."""
    found = {c: outcome(rows, c, metric(c.text, "cross_entropy")) for c in CONTRASTS}
    for family in {contrast.family for contrast in CONTRASTS}:
        members = [contrast for contrast in CONTRASTS if contrast.family == family]
        p_values = [d.p_value if (d := found[contrast].difference) is not None else None for contrast in members]
        for contrast, adjusted in zip(members, holm(p_values) if family else [None] * len(members), strict=True):
            if (d := found[contrast].difference) is not None:
                found[contrast] = replace(found[contrast], difference=replace(d, holm=adjusted))
    return found


def noise(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Return test cross-entropy minus that of main's off with the same seed and data, by arrangement and seed."""
    value = metric("test", "cross_entropy")
    first = by_seed(rows, "main", "off", value)
    found = {}
    for name in ("accumulation-4", "2-ranks", "again"):
        own = by_seed(rows, "noise", name, value)
        found[name] = {seed: own[seed] - first[seed] for seed in own if seed in first}
    return found


def plateau_and_loss(rows: Sequence[Row], part: str, condition: str) -> tuple[float, int] | None:
    """Return Spearman's ρ over seeds of the plateau's end and the final loss, and the seeds; None for fewer than four."""
    ends = by_seed(rows, part, condition, of_history("plateau_end"))
    losses = by_seed(rows, part, condition, metric("test", "cross_entropy"))
    seeds = [seed for seed in ends if seed in losses]
    if len(seeds) < 4 or min(len({own[seed] for seed in seeds}) for own in (ends, losses)) < 2:
        return None
    return float(stats.spearmanr([ends[s] for s in seeds], [losses[s] for s in seeds]).statistic), len(seeds)


def curve_differences(rows: Sequence[Row], part: str) -> tuple[list[int], np.ndarray] | None:
    """Return tokens, and [seeds, steps] of on − off in development cross-entropy during training; None without a pair."""
    on, off = (finished(rows, part, state) for state in ("on", "off"))
    pairs = [(on[seed]["history"], off[seed]["history"]) for seed in on if seed in off]
    steps = pairs[0][0]["steps"] if pairs else []
    every = [
        np.subtract(own["cross_entropy"], other["cross_entropy"])
        for own, other in pairs
        if own["steps"] == other["steps"] == steps
    ]
    if not every:
        return None
    per_step = pairs[0][0]["tokens"] / steps[-1]
    return [round(step * per_step) for step in steps], np.stack(every)


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 95 % interval of the mean over the first axis, by Student's t."""
    n = len(values)
    half = (
        stats.t.ppf(0.975, n - 1) * values.std(axis=0, ddof=1) / np.sqrt(n)
        if n > 1
        else np.full(values.shape[1:], np.nan)
    )
    return values.mean(axis=0) - half, values.mean(axis=0) + half
