"""Check every number of docs/evidence.md, and of the paragraph about it in README.md,
against the recorded runs.

    python -m benchmarks.evidence    # lists differences; the exit status is then 1

docs/evidence.jsonl has a row for each run of the experiments of docs/evidence_design.md,
docs/preregistered.csv has the values of docs/preregistration.md's experiments, and
docs/condensing_tuning.csv those of experiment B's tuning.

The pages are written by hand. This program computes phrases: numbers with the words
around them, as they must be on the pages. The check fails if a phrase is not on its page,
or if the page or paragraph has a number that is in no phrase and not in ``SETTINGS``.
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, product

import numpy as np
from numpy.polynomial.polynomial import polyfit
from scipy import stats

from benchmarks.evidence_runs import (
    ROOT,
    Key,
    Runs,
    Value,
    blocks_cosine,
    depth_order,
    development_loss,
    ends,
    interval,
    last_word,
    loss,
    new_text_loss,
    paired,
    read_runs,
    seconds,
    sign_flip,
)
from benchmarks.preregistered import (
    PREDICTIONS,
    described,
    difference,
    on_minus_off,
    outcomes,
    read_values,
)
from titan_disp.lab.statistics import holm

PAGE = "docs/evidence.md"
PREREGISTERED = ROOT / "docs" / "preregistered.csv"
TUNING_OF_B = ROOT / "docs" / "condensing_tuning.csv"
README = "README.md"
# Learning rates in the first experiment's tuning
LOW_RATES = (0.001, 0.002)
RATES = (*LOW_RATES, 0.004, 0.008, 0.016)
WARMUPS = (0.05, 0.2)
# The (warm-up, index of the seed) of each curve of the tuning
CURVES = tuple(product(WARMUPS, (0, 1)))
TUNED = ("widths", "widths-again")  # the parts of the second experiment
WIDTHS = (16, 192, 768)
# The first experiment's six comparisons, whose p values Holm's method adjusts
OTHERS = ("on-0.03", "on-first-quarter", "on-moments", "noisy-embedding")
FAMILY = (("main", "on"), ("width", "on"), *(("main", name) for name in OTHERS))
# Numbers that are not computed: settings of the experiments, other people's results, and
# numbers in names
SETTINGS = {
    PAGE: """
        With Qwen3; model of 0.4 M parameters; 2.5 M tokens; 600 steps; 2,400 steps; 12 layers
        rates 0.001, 0.004 and 0.016; rate 0.016; rate 0.032; the tuned rate, 0.032
        at 1.5 times the lowest rate; At 1.5 times the lowest rate; λ 0.1
        helped at rate 0.001, and less; At 0.016, it was worse; the next two rows
        (2 seeds); two-seed tuning; GPT-2
        MLP width 16; MLP width 768; from width 16 to 768
        95 %; 97.5 %; 90 %; ±0.01; by less than 0.02; a gain of 0.02; a change of 0.03
        60 to 90 %; +1.17 points; 0.6 B parameters and 156 B tokens
        evidence_124m.toml; 44 hours on an H100
    """,
    README: "0.4 M parameters; 95 %; +1.17 points; 0.6 B parameters; 156 B tokens",
}
NUMBER = (
    r"\d[\d.,]*|\b(two|three|four|five|six|seven|eight|nine|ten|twelve|half|twice)\b"
)


def power(effect: float, deviation: float, level: float, seeds: int = 8) -> float:
    """Return the fraction of 20,000 simulated experiments in which the p value of the
    sign-flip test is below the level and Student's 95 % interval excludes 0.

    ``effect`` is the true mean of the differences, and ``deviation`` their standard
    deviation over the seeds.
    """
    draws = np.random.default_rng(0).normal(effect, deviation, (20_000, seeds))
    excluded = stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05
    return float((excluded & (sign_flip(draws) < level)).mean())


def tuning_curves(runs: Runs) -> np.ndarray:
    """Return on − off in the development loss of the first experiment's tuning, [curves,
    rates]. A curve is of one warm-up and seed.
    """

    def cell(rate: float, warmup: float, seed_index: int) -> float:
        end = f"_lr-{rate:g}_warmup-{warmup:g}"
        pairs = runs.on_off("tuning", end, development_loss)
        return float(pairs[seed_index])

    return np.array([[cell(rate, *curve) for rate in RATES] for curve in CURVES])


def numbers_of(runs: Runs, keys: Sequence[Key], value: Value) -> list[float]:
    """Return a number of all runs of several conditions."""
    by_seed = [runs.values(*key, value) for key in keys]
    return [*chain.from_iterable(numbers.values() for numbers in by_seed)]


def tuning_orders(runs: Runs, rates: Sequence[float]) -> list[float]:
    """Return ρ of off's runs at these rates in the first experiment's tuning."""
    keys = [
        ("tuning", f"off_lr-{rate:g}_warmup-{warmup:g}")
        for rate, warmup in product(rates, WARMUPS)
    ]
    return numbers_of(runs, keys, partial(depth_order, text="development"))


def tuned_mean(runs: Runs, state: str, value: Value) -> float:
    """Return the mean of a number over the runs of "off" or "on" of width 192 in the second
    experiment.
    """
    keys = [(part, f"{state}-192") for part in TUNED]
    return float(np.mean(numbers_of(runs, keys, value)))


def changes_by_loss(runs: Runs) -> dict[str, tuple[float, float]]:
    """Return the changes of the blocks' cosine and of cross-entropy against no auxiliary
    loss, by the name of the auxiliary loss: means over the seeds of the part "losses".
    """
    keys = [("widths", "on-192"), *(key for key in runs.rows if key[0] == "losses")]
    seeds = runs.rows[keys[-1]].keys()  # the same for all losses but the first

    def change(key: Key, value: Value) -> float:
        off = runs.values("widths", "off-192", value)
        of_seeds = {seed: off[seed] for seed in seeds}
        return float(paired(runs.values(*key, value), of_seeds).mean())

    return {key[1]: (change(key, blocks_cosine), change(key, loss)) for key in keys}


def comparisons(runs: Runs) -> dict[str, np.ndarray]:
    """Return on − off [seeds] in the cross-entropy of test text, by the names of the rows
    of the page's table.
    """
    off, again = (runs.values(part, "off") for part in ("main", "restored"))
    on = runs.values("main", "on")
    new = [runs.on_off(part, "-192") for part in TUNED]
    mean_off = {seed: (off[seed] + again[seed]) / 2 for seed in again}
    return {
        "first experiment, rate 0.016": paired(on, off),
        "the same, off trained again (not planned)": paired(on, again),
        "the mean of both (not planned)": paired(on, mean_off),
        "second experiment, rate 0.032": np.concatenate(new),
        "MLP width 16, not retuned": runs.on_off("width"),
        "MLP width 16, tuned": runs.on_off("widths", "-16"),
        "MLP width 768, tuned": runs.on_off("widths", "-768"),
        "12 layers, not retuned": runs.on_off("depth"),
        "2,400 steps, not retuned": runs.on_off("long"),
    }


def change_over_widths(runs: Runs) -> np.ndarray:
    """Return the second experiment's outcome [seeds]: the change of on − off from the
    narrowest to the widest MLP, on a straight line fitted over the logarithm of the width.
    """
    pairs = np.array([runs.on_off("widths", f"-{width}") for width in WIDTHS])
    return polyfit(np.log(WIDTHS), pairs, 1)[1] * np.log(WIDTHS[-1] / WIDTHS[0])


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def phrases(runs: Runs) -> Iterator[tuple[str, str]]:
    """Yield each computed phrase, after the name of its page."""
    table = comparisons(runs)
    _, again, mean_of_two, new, *_ = table.values()
    low, high = interval(new)
    yield README, f"{new.mean():.4f} nats higher"
    yield README, f"interval {low:.4f} to {high:.4f}, {len(new)} seeds"
    yield README, f"more than {-low:.4f} nats"
    for name, row in table.items():
        yield PAGE, f"| {name} | {len(row)} | {row.mean():+.4f} | {ends(row)} |"
    yield PAGE, f"Over {len(new)} seeds"
    yield PAGE, f"is {new.mean():+.4f} nats (95 % interval {ends(new)}"
    yield PAGE, f"a gain of more than {-low:.4f} nats"
    yield PAGE, f"which is {ends(new, 0.9)} and lies"
    yield PAGE, f"p is {sign_flip(again):.2f} and {sign_flip(mean_of_two):.2f}"
    yield from of_the_rules(runs, float(new.std(ddof=1)))
    yield from of_the_predictions()
    yield from of_post_hoc(runs)
    yield from of_the_models(runs)


def of_the_rules(runs: Runs, deviation: float) -> Iterator[tuple[str, str]]:
    """Yield phrases about the results of both designs' rules, and about their power.

    ``deviation`` is the standard deviation of on − off over the seeds, for the power of the
    first experiment. The second experiment's outcome has a standard deviation of its own.
    """
    main_p, width_p, *_ = holm(
        [
            float(sign_flip(paired(runs.values(*key), runs.values(key[0], "off"))))
            for key in FAMILY
        ]
    )
    yield PAGE, f"(p {main_p:.3f} after Holm)"
    yield PAGE, f"(p {width_p:.2f} after Holm)"
    widths = change_over_widths(runs)
    yield PAGE, f"changes by {widths.mean():+.4f} ({ends(widths)})"
    # Holm's smallest adjusted p value is below 0.05 if the test's p value is below 0.05 / 6.
    gain = power(0.02, deviation, 0.05 / len(FAMILY))
    yield PAGE, f"a gain of 0.02 in {percent(gain)} of simulations"
    change = power(0.03, float(widths.std(ddof=1)), 0.05)
    yield PAGE, f"a change of 0.03 over widths in {percent(change)},"


def of_the_predictions() -> Iterator[tuple[str, str]]:
    """Yield the verdict of each prediction in docs/preregistration.md whose runs have all
    finished, on − off at the other rates and in B's tuning, and how much the learning rate
    alone matters.
    """
    values = read_values([str(PREREGISTERED)])
    for name, outcome in outcomes(values).items():
        if len(outcome) == PREDICTIONS[name].seeds:
            yield PAGE, PREDICTIONS[name].verdict(outcome)
    _, *others = on_minus_off(values).items()
    for rate, on_off in others:
        row = f"not planned: *on* − *off* at rate {rate} | {described(on_off, 0.95)}"
        yield PAGE, row
    of_b = read_values([str(TUNING_OF_B)])["validation"]
    states = [of_b.filter(like=state).to_numpy() for state in ("on_", "off_")]
    better = states[0] < states[1]
    yield PAGE, f"better in {better.sum()} of {better.size} tuning pairs"
    by_rate = difference(values, "validation", "off_lr-0.001", "off_lr-0.004")
    yield PAGE, f"*off* is {by_rate.mean():.2f} nats better at 0.004 than at 0.001"


def of_post_hoc(runs: Runs) -> Iterator[tuple[str, str]]:
    """Yield phrases about findings that were not planned before the runs."""
    curves = tuning_curves(runs)
    at_low_rates = curves[:, : len(LOW_RATES)]
    slopes = polyfit(np.log2(RATES), curves.T, 1)[1]
    yield PAGE, f"at most {LOW_RATES[-1]:g}"
    below_zero = (at_low_rates < 0).sum()
    yield PAGE, f"below zero in {below_zero} of {at_low_rates.size} pairs"
    yield PAGE, f"mean {at_low_rates.mean():.3f})"
    yield PAGE, f"all {len(curves)} curves"
    yield PAGE, f"by {slopes.min():.3f} to {slopes.max():.3f} per doubling"
    yield PAGE, f"at least {min(tuning_orders(runs, RATES[:1])):.2f} at rate 0.001"
    yield PAGE, f"at most {max(tuning_orders(runs, RATES[3:])):.2f} from rate 0.008"
    changes = changes_by_loss(runs)
    rank = stats.spearmanr([*changes.values()])  # of the two columns
    yield PAGE, f"Over {len(changes)} losses"
    yield PAGE, f"correlation of {rank.statistic:.2f} (p {rank.pvalue:.3f})"
    yield PAGE, f"share {len(runs.rows['losses', 'koleo-192'])} seeds"
    weights = sum("@" in name for name in changes)  # as in "uniformity@1-192"
    yield PAGE, f"{weights} of them are second weights"


def of_the_models(runs: Runs) -> Iterator[tuple[str, str]]:
    """Yield phrases about condensation, repeated runs and other outcomes."""
    cosine, order = (
        {state: tuned_mean(runs, state, value) for state in ("off", "on")}
        for value in (blocks_cosine, depth_order)
    )
    yield PAGE, f"blocks is {cosine['off']:.2f}"
    yield PAGE, f"ρ is {order['off']:.2f})"
    yield PAGE, f"the cosine to {cosine['on']:.2f}, but raises ρ to {order['on']:.2f}"
    off = runs.values("main", "off")
    reruns = abs(paired(runs.values("restored", "off"), off))
    yield PAGE, f"by up to {reruns.max():.3f} (on average {reruns.mean():.3f})"
    sums, ranks = (
        abs(paired(runs.values("noise", name), off)).mean()
        for name in ("accumulation-4", "2-ranks")
    )
    yield PAGE, f"changed it by {sums:.4f} on average, and several ranks by {ranks:.4f}"
    words = runs.mean("main", "off", last_word)
    yield PAGE, f"last words is {100 * words:.1f} %"
    states = ("on-0.1", "off")
    for value, words in (
        (new_text_loss, "is {} on the new"),
        (loss, "and {} on the old"),
    ):
        further = paired(*(runs.values("midtraining", s, value) for s in states))
        yield PAGE, words.format(f"{further.mean():+.4f} ({ends(further)})")
    longer = runs.mean("main", "on", seconds) / runs.mean("main", "off", seconds) - 1
    yield PAGE, f"took {percent(longer)} longer"


def problems(page: str, text: str, expected: Sequence[str]) -> Iterator[str]:
    """Yield a message for each phrase that a page lacks, and for each number on the page
    outside of all phrases and settings.
    """
    rest = " ".join(text.split())
    for phrase in expected:
        if phrase not in rest:
            yield f"{page} does not have: {phrase}"
    settings = re.split(r"\s*[;\n]\s*", SETTINGS[page].strip())
    # The longest first, because a phrase may contain another one
    for phrase in sorted((*expected, *settings), key=len, reverse=True):
        rest = rest.replace(phrase, " ")
    for match in re.finditer(NUMBER, rest):
        around = rest[max(0, match.start() - 40) : match.end() + 40]
        yield f"{page} has a number that nothing computes: {around}"


def main() -> None:
    texts = {page: (ROOT / page).read_text() for page in SETTINGS}
    (texts[README],) = re.findall(
        r"^\*\*Does it help\?.*?\n\n", texts[README], re.M | re.S
    )
    computed = list(phrases(read_runs()))
    messages: list[str] = []
    for page, text in texts.items():
        expected = [phrase for name, phrase in computed if name == page]
        messages += problems(page, text, expected)
    if messages:
        raise SystemExit("\n".join(messages))
    print(f"all numbers agree ({len(computed)} phrases)")


if __name__ == "__main__":
    main()
