"""Analyse rows of docs/evidence.jsonl as docs/evidence_design.md says: differences,
intervals and verdicts.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy import stats

from benchmarks import evidence_parts as design
from benchmarks.evidence_parts import WIDTHS, Row, newest
from titan_disp.lab.statistics import holm, paired_by_seed

MARGIN = 0.02  # nats; a smaller difference does not matter (docs/evidence_design.md)
# nats; the same for the change over the MLP's width, in the second experiment
NO_CHANGE = 0.01
ALPHA = 0.05

Value = Callable[[Row], float | None]


@dataclass(frozen=True)
class Paired:
    """Values by seed of a condition and of a baseline, over the seeds that both have.

    Attributes:
        n, lower, higher: the number of pairs, and of those in which the condition has
            the lower or the higher value.
        mean, low, high: mean of condition − baseline, and its 95 % interval by
            Student's t. NaN where it is undefined.
        p: two-sided p of the exact sign-flip test.
    """

    own: Mapping[int, float] = field(default_factory=dict)
    other: Mapping[int, float] = field(default_factory=dict)
    n: int = 0
    lower: int = 0
    higher: int = 0
    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan

    @property
    def sign(self) -> int:
        """-1 or 1 if the interval is below or above 0, and 0 if it includes 0 or is
        undefined.
        """
        return int(self.low > 0) - int(self.high < 0)

    @property
    def differences(self) -> dict[int, float]:
        """Condition − baseline by seed."""
        return {seed: own - self.other[seed] for seed, own in self.own.items()}

    def agreement(self) -> str:
        word, count = (
            ("lower", self.lower) if self.mean < 0 else ("higher", self.higher)
        )
        return f"{word} in {count} of {self.n} seeds"


def paired(own: Mapping[int, float], other: Mapping[int, float]) -> Paired:
    seeds, found = paired_by_seed(own, other)
    if found is None:
        return Paired()
    own, other = ({seed: one[seed] for seed in seeds} for one in (own, other))
    counts = (
        len(seeds),
        *(
            sum(sign * (own[seed] - other[seed]) > 0 for seed in seeds)
            for sign in (-1, 1)
        ),
    )
    low, high = (math.nan if end is None else end for end in (found.low, found.high))
    return Paired(
        own,
        other,
        *counts,
        found.mean,
        low,
        high,
        1.0 if found.p_value is None else found.p_value,
    )


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 95 % interval of the mean over the first axis, by Student's t; NaN for
    a single value.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single value, and of equal values
        found = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return found.low, found.high


# The contrasts with off: part, condition and text, and the family in which Holm's
# method adjusts it. Contrasts without a family have too few seeds for a test.
FAMILIES = {
    **{
        ("main", name, "test"): "main"
        for name in design.NAMES
        if name not in ("off", *design.COEFFS)
    },
    **{
        ("width", "on", "test"): "main",
        ("depth", "on", "test"): "",
        ("long", "on", "test"): "",
    },
    **{
        ("midtraining", name, text): "midtraining"
        for text in design.TEXTS
        for name in design.COEFFS
    },
}


@dataclass(frozen=True)
class Outcome(Paired):
    """The result of a contrast in cross-entropy, and the failed runs of its two
    conditions, such as "off seed 3".
    """

    family: str = ""
    failed: tuple[str, ...] = ()
    holm: float | None = None

    @property
    def seeds(self) -> int:
        return len(design.SEEDS if self.family else design.FEW_SEEDS)

    @property
    def clear(self) -> bool:
        """Whether the sign is significant, which "no difference of 0.02 or more" does
        not say.
        """
        return self.holm is not None and self.holm < ALPHA

    def verdict(self) -> str:
        """Return the verdict in words, by the rules of the design."""
        if not self.n:
            return (
                f"no pair has finished ({len(self.failed)} runs failed)"
                if self.failed
                else "not run"
            )
        if self.n == 1:
            return f"too few pairs (1 of {self.seeds})"
        return self._says() + (
            "" if self.n == self.seeds else f" ({self.n} of {self.seeds} pairs)"
        )

    def _says(self) -> str:
        word = "better" if self.mean < 0 else "worse"
        family = self.family
        if self.low > -MARGIN and self.high < MARGIN:
            says = f"no difference of {MARGIN:g} or more"
            if self.clear:
                return f"{word}, by less than {MARGIN:g}"
            return (
                f"{says} ({self.agreement()})"
                if not family and self.n in (self.lower, self.higher)
                else says
            )
        if not family and self.lower in (0, self.n):
            return f"{word} in all {self.n} seeds, too few for a test"
        if not family:
            return f"better in {self.lower} of {self.n} seeds, undecided"
        if self.clear and word == "better" and self.fails_more:
            return "undecided: lower, but more of its runs failed"
        return word if self.clear else "undecided"

    @property
    def fails_more(self) -> bool:
        own = sum(not name.startswith("off ") for name in self.failed)
        return own > len(self.failed) - own


def finished(rows: Iterable[Row], part: str, condition: str) -> dict[int, Row]:
    """Return the last row by seed, ascending, of a condition's finished runs."""
    own = {
        key[2]: row for key, row in newest(rows).items() if key[:2] == (part, condition)
    }
    return {
        seed: row for seed, row in sorted(own.items()) if row["status"] == "finished"
    }


def by_seed(
    rows: Iterable[Row], part: str, condition: str, value: Value
) -> dict[int, float]:
    """Return the value by seed, of the runs that have finished and have a finite
    one.
    """
    numbers = {
        seed: value(row) for seed, row in finished(rows, part, condition).items()
    }
    return {
        seed: number
        for seed, number in numbers.items()
        if number is not None and math.isfinite(number)
    }


def compare(
    rows: Sequence[Row], part: str, condition: str, value: Value, baseline: str = "off"
) -> Paired:
    return paired(
        by_seed(rows, part, condition, value), by_seed(rows, part, baseline, value)
    )


def read(*keys: str | int) -> Value:
    """Return a function that reads a number of a row by its keys, or None if the row
    does not have it.
    """

    def value(row: Any) -> float | None:
        for key in keys:
            if isinstance(row, dict) and key not in row:
                return None
            row = row[key]
        return row

    return value


def loss(text: str) -> Value:
    return read("numbers", text, "cross_entropy")


def of_other_sources(name: str, shares: Mapping[str, float]) -> Value:
    """Return a function that reads the cross-entropy of all test text but one source's,
    as a mean over the tokens.
    """
    others = [one for one in shares if one != name]
    weights = [shares[one] for one in others]
    return lambda row: float(
        np.average(
            [row["numbers"]["test"]["by_source"][one] for one in others],
            weights=weights,
        )
    )


def block_cosine(row: Row) -> float:
    """Read the mean cosine over the blocks, without the embedding and the final
    norm.
    """
    return float(np.mean(row["numbers"]["test"]["mean_cosine"][1:-1]))


def order_of_depth(row: Row) -> float:
    """Read the paper's measure: Spearman's ρ over depth, the last block after the final
    norm.
    """
    _, *blocks, _, last = row["numbers"]["test"]["mean_cosine"]
    cosines = [*blocks, last]
    return float(stats.spearmanr(range(len(cosines)), cosines).statistic)


def failures(rows: Iterable[Row]) -> list[Row]:
    """Return the last rows of the runs whose last try failed."""
    return [row for row in newest(rows).values() if row["status"] == "failed"]


def outcomes(rows: Sequence[Row]) -> dict[tuple[str, str, str], Outcome]:
    """Return all contrasts in held-out cross-entropy.

    Holm's adjustment also counts contrasts that are not run yet.
    """
    found = {}
    for (part, condition, text), family in FAMILIES.items():
        lost = [
            row
            for row in failures(rows)
            if row["part"] == part and row["condition"] in ("off", condition)
        ]
        failed = tuple(f"{row['condition']} seed {row['seed']}" for row in lost)
        own = compare(rows, part, condition, loss(text))
        found[part, condition, text] = Outcome(
            **vars(own), family=family, failed=failed
        )
    for family in {*FAMILIES.values()} - {""}:
        members = {key: one for key, one in found.items() if one.family == family}
        adjusted = holm([one.p if one.n else None for one in members.values()])
        found |= {
            key: replace(one, holm=p)
            for (key, one), p in zip(members.items(), adjusted, strict=True)
        }
    return found


def noise(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Return test cross-entropy minus that of main's off with the same seed and data,
    by arrangement and seed.
    """
    first = by_seed(rows, "main", "off", loss("test"))
    own = {
        name: by_seed(rows, "noise", name, loss("test"))
        for name in ("accumulation-4", "2-ranks", "again")
    }
    return {
        name: {seed: ce - first[seed] for seed, ce in of.items() if seed in first}
        for name, of in own.items()
    }


def plateau_and_loss(
    rows: Sequence[Row], part: str, condition: str
) -> tuple[float, int] | None:
    """Return Spearman's ρ over seeds of the plateau's end and the final loss, and the
    seeds; None for fewer than four.
    """
    ends = by_seed(rows, part, condition, read("history", "plateau_end"))
    losses = by_seed(rows, part, condition, loss("test"))
    points = [(ends[seed], losses[seed]) for seed in ends if seed in losses]
    if len(points) < 4 or min(len(set(side)) for side in zip(*points, strict=True)) < 2:
        return None  # too few, or one side is constant
    return float(stats.spearmanr(*zip(*points, strict=True)).statistic), len(points)


def least_correlation(n: int) -> float:
    """Return the correlation of n points from which on it is significant (p < 0.05), by
    Student's t.
    """
    t = stats.t.ppf(1 - ALPHA / 2, n - 2)
    return float(t / np.sqrt(n - 2 + t**2))


def curve_differences(
    rows: Sequence[Row], part: str
) -> tuple[list[int], list[int], np.ndarray]:
    """Return steps, tokens, and [seeds, steps] of on − off in development cross-entropy
    during training.
    """
    on, off = (finished(rows, part, state) for state in ("on", "off"))
    pairs = [(on[seed]["history"], off[seed]["history"]) for seed in on if seed in off]
    steps = pairs[0][0]["steps"]
    every = [
        np.subtract(own["cross_entropy"], other["cross_entropy"])
        for own, other in pairs
        if own["steps"] == other["steps"] == steps
    ]
    per_step = pairs[0][0]["tokens"] / steps[-1]
    return steps, [round(step * per_step) for step in steps], np.stack(every)


def restored(rows: Sequence[Row]) -> list[float]:
    """Return test cross-entropy of models that were trained again for a later part,
    minus that of their first rows.
    """
    first = by_seed(rows, "main", "off", loss("test"))
    both = [
        (loss("test")(row), first.get(seed)) for seed, row in second_runs(rows).items()
    ]
    return [own - other for own, other in both if own is not None and other is not None]


def second_runs(rows: Sequence[Row]) -> dict[int, Row]:
    """Return by seed the rows of main's off that were trained again for a later
    part.
    """
    return {
        row["of"][2]: row
        for row in rows
        if row["part"] == design.RESTORED and row["of"][:2] == ["main", "off"]
    }


def against_second_runs(rows: Sequence[Row]) -> tuple[Paired, Paired]:
    """Return main's on against the second runs of off, and against the mean of each
    seed's two runs.
    """
    on, first = (by_seed(rows, "main", state, loss("test")) for state in ("on", "off"))
    again = {
        seed: ce
        for seed, row in second_runs(rows).items()
        if (ce := loss("test")(row)) is not None
    }
    return paired(on, again), paired(
        on,
        {seed: (ce + first[seed]) / 2 for seed, ce in again.items() if seed in first},
    )


def token_shares(rows: Iterable[Row]) -> dict[str, float] | None:
    """Return the fraction of the test tokens that each source has.

    The rows have the cross-entropy over all tokens and by source, and the first is the
    mean of the others with these fractions as weights. They are therefore the solution
    of linear equations, one per row. Returns None if the rows do not determine it.
    """
    tests = [row["numbers"]["test"] for row in rows if "test" in row.get("numbers", {})]
    if not tests:
        return None
    names = list(tests[0]["by_source"])
    matrix = np.array([[test["by_source"][name] for name in names] for test in tests])
    weights, _, rank, _ = np.linalg.lstsq(
        matrix, np.array([test["cross_entropy"] for test in tests]), rcond=None
    )
    if rank < len(names) or abs(weights.sum() - 1) > 1e-3 or weights.min() < 0:
        return None
    return dict(zip(names, weights.tolist(), strict=True))


def lasting(rows: Sequence[Row]) -> tuple[Paired, Paired, Paired]:
    """Return on against off after 600 and after 2,400 steps, and the change between
    them, over the same seeds.
    """
    both = {part: compare(rows, part, "on", loss("test")) for part in ("main", "long")}
    seeds = [seed for seed in both["long"].own if seed in both["main"].own]
    short, long = (
        paired({seed: one.own[seed] for seed in seeds}, one.other)
        for one in both.values()
    )
    return short, long, paired(long.differences, short.differences)


def by_learning_rate(rows: Sequence[Row]) -> dict[float, dict[str, Any]]:
    """Return tuning's losses by learning rate and state, over warm-ups and seeds, where
    no run is missing or failed.
    """
    found = {}
    for lr in design.ALL_LRS:
        values = {
            state: np.concatenate([*design.tuning_losses(rows, state, [lr]).values()])
            for state in design.STATES
        }
        if (
            len(values["on"]) == len(values["off"]) > 0
            and np.isfinite([*values["on"], *values["off"]]).all()
        ):
            means = {state: float(of.mean()) for state, of in values.items()}
            found[lr] = {**means, "difference": means["on"] - means["off"]}
    return found


def by_width(
    rows: Sequence[Row], part: str, value: Value, recipe: str = ""
) -> dict[int, Paired]:
    """Return on against off at each MLP width, of the runs whose conditions end in
    ``recipe``.
    """
    return {
        w: compare(rows, part, f"on-{w}{recipe}", value, f"off-{w}{recipe}")
        for w in WIDTHS
    }


# Weights of the differences at the three widths: their slope over the log of the width,
# from the narrowest to the widest, and their curvature.
_LOG = np.log(WIDTHS) - np.log(WIDTHS).mean()
CHANGE = _LOG * math.log(WIDTHS[-1] / WIDTHS[0]) / (_LOG**2).sum()
CURVATURE = np.array([-0.5, 1, -0.5])


def over_widths(found: Mapping[int, Paired], weights: np.ndarray = CHANGE) -> Paired:
    """Return the weighted sum of on − off over the widths, against 0.

    Seeds that lack a width are left out.
    """
    differences = [one.differences for one in found.values()]
    seeds = [seed for seed in differences[0] if all(seed in one for one in differences)]
    return paired(
        {seed: weights @ [one[seed] for one in differences] for seed in seeds},
        dict.fromkeys(seeds, 0.0),
    )


def shift_of_ties(rows: Sequence[Row]) -> float:
    """Return by how much the tie rule moves the change over the widths, in the losses
    of tuning.
    """
    costs = cost_of_ties(rows)
    return float(
        CHANGE @ [costs[f"on-{width}"] - costs[f"off-{width}"] for width in WIDTHS]
    )


def at_equal_rates(rows: Sequence[Row]) -> dict[float, Paired]:
    """Return by learning rate the change of on − off over the width, of the tuning
    runs.
    """
    tuned = {
        lr: by_width(rows, "widths-tuning", loss("development"), f"_lr-{lr:g}")
        for lr in design.WIDTH_LRS
    }
    return {lr: over_widths(found) for lr, found in tuned.items()}


def beyond_the_first_rates(rows: Sequence[Row]) -> dict[str, float]:
    """Return by state the development loss at twice the first experiment's highest
    rate, minus that at this rate.
    """
    low, high = design.WIDTH_LRS[:2]
    found = {}
    for state in design.STATES:
        losses = design.tuning_losses(
            rows, f"{state}-{WIDTHS[1]}", (low, high), "widths-tuning"
        )
        found[state] = float(np.subtract(*map(np.mean, reversed(losses.values()))))
    return found


def changes_of_blocks(rows: Sequence[Row]) -> list[float]:
    """Return on − off in the mean cosine of each block in the main comparison, as a
    mean over seeds.
    """
    cosine = read("numbers", "test", "mean_cosine")
    on, off = (
        np.mean([cosine(row) for row in finished(rows, "main", state).values()], axis=0)
        for state in ("on", "off")
    )
    return (on - off)[1:-1].tolist()


def cost_of_ties(rows: Sequence[Row]) -> dict[str, float]:
    """Return by state and width by how much the chosen rate's mean development loss is
    above the lowest one.
    """
    found = {}
    for name, best in design.tuned(rows, "widths-tuning").items():
        lrs = design.learning_rates(rows, name, "widths-tuning")
        means = {
            one: np.mean(of)
            for one, of in design.tuning_losses(
                rows, name, lrs, "widths-tuning"
            ).items()
        }
        found[name] = float(means[best] - min(means.values()))
    return found


def together(
    rows: Sequence[Row], parts: Iterable[str], width: int, value: Value
) -> Paired:
    """Return on against off at a width, over the seeds of several parts."""
    found = [
        [by_seed(rows, part, f"{state}-{width}", value) for state in ("on", "off")]
        for part in parts
    ]
    own, other = (
        {seed: x for side in sides for seed, x in side.items()}
        for sides in zip(*found, strict=True)
    )
    return paired(own, other)


def complete(rows: Sequence[Row], *parts: str) -> bool:
    """Return whether all runs of these parts of the second experiment have a row."""
    known = newest(rows)
    wanted = [design.jobs(part, rows) for part in parts]
    every = design.tuned(rows, "widths-tuning") and all(wanted)
    return bool(every) and all(job.key in known for jobs in wanted for job in jobs)


def second_experiment(rows: Sequence[Row], value: Value) -> dict[str, Paired]:
    """Return on − off by MLP width, and at the middle one with other seeds, or nothing
    while runs are missing.
    """
    parts = ("widths", "widths-again")
    middle = WIDTHS[1]
    seeds = design.AGAIN_SEEDS
    if not complete(rows, *parts):
        return {}
    found = {str(width): together(rows, parts[:1], width, value) for width in WIDTHS}
    found[f"{middle}, seeds {seeds[0]} to {seeds[-1]}"] = together(
        rows, parts[1:], middle, value
    )
    found[f"{middle}, all {len(design.SECOND_SEEDS + seeds)} new seeds"] = together(
        rows, parts, middle, value
    )
    return found


def gains(rows: Sequence[Row]) -> list[str]:
    """Return where the second experiment's interval of on − off is below zero."""
    return [
        name
        for name, one in second_experiment(rows, loss("test")).items()
        if one.sign < 0
    ]


def other_losses(rows: Sequence[Row], value: Value) -> dict[str, tuple[Paired, Paired]]:
    """Return the other losses against off and against on, with the same seeds, or
    nothing while runs are missing.
    """
    if not complete(rows, "losses"):
        return {}
    ours = [
        by_seed(rows, "widths", f"{state}-{WIDTHS[1]}", value)
        for state in design.STATES
    ]
    names = dict.fromkeys(job.condition for job in design.jobs("losses", rows))
    found = {name: by_seed(rows, "losses", name, value) for name in names}
    return {
        name: (paired(own, ours[0]), paired(own, ours[1]))
        for name, own in found.items()
    }


def width_verdict(rows: Sequence[Row]) -> tuple[Paired, str]:
    """Return the second experiment's primary outcome, and what its rules say: the first
    that holds.
    """
    change = over_widths(by_width(rows, "widths", loss("test")))
    tuned = at_equal_rates(rows).values()
    lost = Counter(
        row["condition"] for row in failures(rows) if row["part"] == "widths"
    )
    more = any(lost[f"on-{width}"] > lost[f"off-{width}"] for width in WIDTHS)
    if more or change.n < 6 or not all(one.n for one in tuned):
        return change, "undecided: failures"
    if change.low > -NO_CHANGE and change.high < NO_CHANGE:
        return change, f"no change of {NO_CHANGE:g} or more"
    if len({np.sign(one.mean) for one in tuned}) > 1:
        return change, "undecided: depends on the learning rates chosen"
    if change.p < ALPHA and change.sign:
        return change, "the difference depends on the width"
    return (
        change,
        f"undecided: a change of {max(-change.low, change.high):.3f} is not excluded",
    )
