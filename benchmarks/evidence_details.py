"""Numbers of docs/evidence.md that explain its differences: by source, by length, by time and after mid-training."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.evidence_analysis import by_seed, finished, metric, of_history
from benchmarks.evidence_parts import RESTORED, STATES, Row, key_of, newest
from titan_disp.lab.statistics import Difference, paired_by_seed


@dataclass(frozen=True)
class Paired:
    """Values of the same seeds under two conditions, and the difference of the first from the second."""

    values: tuple[tuple[float, float], ...]
    difference: Difference | None

    @classmethod
    def of(cls, own: Mapping[int, float], other: Mapping[int, float]) -> "Paired":
        seeds, found = paired_by_seed(own, other)
        return cls(tuple((own[seed], other[seed]) for seed in seeds), found)

    @property
    def lower(self) -> int:
        return sum(own < other for own, other in self.values)

    @property
    def higher(self) -> int:
        return sum(own > other for own, other in self.values)

    @property
    def sign(self) -> int:
        """-1 or 1 if the 95 % interval is below or above 0, and 0 if it includes 0 or there is none."""
        d = self.difference
        if d is None or d.low is None or d.high is None:
            return 0
        return -1 if d.high < 0 else int(d.low > 0)


def restored(rows: Sequence[Row]) -> list[float]:
    """Return test cross-entropy of models that were trained again for a later part, minus that of their first rows."""
    first, found = newest(rows), []
    for row in rows:
        if row["part"] == RESTORED and (own := first.get(key_of(row))) is not None:
            both = [one["numbers"].get("test", {}).get("cross_entropy") for one in (row, own)]
            if None not in both:
                found.append(both[0] - both[1])
    return found


def _second_runs(rows: Sequence[Row]) -> dict[int, Row]:
    """Return by seed the rows of main's off that were trained again for a later part."""
    return {key_of(row)[2]: row for row in rows if row["part"] == RESTORED and key_of(row)[:2] == ("main", "off")}


def against_second_runs(rows: Sequence[Row]) -> Paired:
    """Return main's on against the models of off that were trained again for a later part; empty if there are none."""
    value = metric("test", "cross_entropy")
    again = {seed: ce for seed, row in _second_runs(rows).items() if (ce := value(row)) is not None}
    return Paired.of(by_seed(rows, "main", "on", value), again)


def beginnings(rows: Sequence[Row]) -> dict[int, Row]:
    """Return by seed the rows of the models that mid-training began from: trained again, or main's off."""
    return finished(rows, "main", "off") | _second_runs(rows)


def token_shares(rows: Iterable[Row]) -> dict[str, float] | None:
    """Return the fraction of the test tokens that each source has.

    The rows have the cross-entropy over all tokens and by source, and the first is the mean of the others with these
    fractions as weights. They are therefore the solution of linear equations, one per row. Returns None if the rows do
    not determine it.
    """
    tests = [row["numbers"]["test"] for row in rows if "test" in row.get("numbers", {})]
    if not tests:
        return None
    names = list(tests[0]["by_source"])
    matrix = np.array([[test["by_source"][name] for name in names] for test in tests])
    weights, _, rank, _ = np.linalg.lstsq(matrix, np.array([test["cross_entropy"] for test in tests]), rcond=None)
    if rank < len(names) or abs(weights.sum() - 1) > 1e-3 or weights.min() < 0:
        return None
    return dict(zip(names, weights.tolist(), strict=True))


def of_source(rows: Sequence[Row], name: str, part: str = "main", condition: str = "on") -> Paired:
    """Return a condition against off on the test text of one source."""
    on, off = (
        {s: row["numbers"]["test"]["by_source"][name] for s, row in finished(rows, part, state).items()}
        for state in (condition, "off")
    )
    return Paired.of(on, off)


def of_other_sources(
    rows: Sequence[Row], name: str, shares: Mapping[str, float], part: str = "main", condition: str = "on"
) -> Paired:
    """Return a condition against off on all test text but that of one source, as a mean over the tokens."""

    def value(row: Row) -> float:
        by_source = row["numbers"]["test"]["by_source"]
        others = [other for other in by_source if other != name]
        return float(np.average([by_source[o] for o in others], weights=[shares[o] for o in others]))

    on, off = ({s: value(row) for s, row in finished(rows, part, state).items()} for state in (condition, "off"))
    return Paired.of(on, off)


def lasting(rows: Sequence[Row]) -> tuple[Paired, Paired, Paired] | None:
    """Return on against off after 600 and after 2,400 steps, and the change between them, over the same seeds.

    None if there is no seed with all four runs.
    """
    value = metric("test", "cross_entropy")
    both = {part: {state: by_seed(rows, part, state, value) for state in STATES} for part in ("main", "long")}
    seeds = set.intersection(*(set(found) for part in both.values() for found in part.values()))
    if not seeds:
        return None
    some = {
        part: {state: {s: found[s] for s in sorted(seeds)} for state, found in own.items()}
        for part, own in both.items()
    }
    d = {part: {s: own["on"][s] - own["off"][s] for s in own["on"]} for part, own in some.items()}
    return (
        Paired.of(some["main"]["on"], some["main"]["off"]),
        Paired.of(some["long"]["on"], some["long"]["off"]),
        Paired.of(d["long"], d["main"]),
    )


def condensation_and_difference(rows: Sequence[Row], part: str) -> list[tuple[float, float]]:
    """Return by seed how condensed off was over training, and the test cross-entropy of on − off."""
    on, off = (by_seed(rows, part, state, metric("test", "cross_entropy")) for state in ("on", "off"))
    cosine = by_seed(rows, part, "off", of_history("block_cosine"))
    return [(cosine[seed], on[seed] - off[seed]) for seed in on if seed in off and seed in cosine]


def seconds(rows: Iterable[Row]) -> list[float]:
    """Return the seconds of each run, from the start to the end of training."""
    return [sum(row["history"]["seconds"].values()) for row in rows if "history" in row]


def block_cosine(row: Row, text: str = "test") -> float:
    """Return the mean cosine over the blocks; a row also has those of the embedding and of the final norm."""
    return float(np.mean(row["numbers"][text]["mean_cosine"][1:-1]))
