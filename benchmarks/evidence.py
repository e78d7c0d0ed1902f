"""Check every number of docs/evidence.md, and of the paragraph about it in README.md,
against the recorded runs.

    python -m benchmarks.evidence    # lists differences; the exit status is then 1

docs/evidence.jsonl has a row for each run of the experiments of docs/evidence_design.md,
docs/preregistered.csv has the values of docs/preregistration.md's experiments, and
docs/condensing_tuning.csv those of experiment B's tuning.

The pages are written by hand. evidence.toml has phrases: numbers with the words around them,
as they must be on the pages. The check fails if a phrase is not on its page, or if the page
or paragraph has a number that is in no phrase and not in the file's settings.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli
from pandas import DataFrame
from scipy import stats

from benchmarks.evidence_runs import (
    COSINE,
    LOSS,
    LOW_RATES,
    NEW_TEXT_LOSS,
    PREREGISTERED,
    RATES,
    ROOT,
    TUNED,
    changes_by_loss,
    comparisons,
    difference_of,
    ends,
    on_off,
    paired,
    read_runs,
    sign_flip,
    tuning_curves,
)
from benchmarks.preregistered import (
    PREDICTIONS,
    described,
    difference,
    on_minus_off,
    outcomes,
    read_values,
    slopes,
)
from titan_disp.lab.statistics import holm

PAGE = "docs/evidence.md"
TUNING_OF_B = ROOT / "docs" / "condensing_tuning.csv"
README = "README.md"
WIDTHS = (16, 192, 768)
# The first experiment's six comparisons, whose p values Holm's method adjusts
OTHERS = ("on-0.03", "on-first-quarter", "on-moments", "noisy-embedding")
FAMILY = (("main", "on"), ("width", "on"), *(("main", name) for name in OTHERS))
TEXTS = tomli.loads(Path(__file__).with_suffix(".toml").read_text())
NUMBER = (
    r"\d[\d.,]*|\b(two|three|four|five|six|seven|eight|nine|ten|twelve|half|twice)\b"
)


def power(effect: float, deviation: float, level: float) -> float:
    """Return the percentage of 20,000 simulated experiments with eight seeds in which the p
    value of the sign-flip test is below the level and Student's 95 % interval excludes 0.

    ``effect`` is the true mean of the differences, and ``deviation`` their standard
    deviation over the seeds.
    """
    draws = np.random.default_rng(0).normal(effect, deviation, (20_000, 8))
    excluded = stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05
    return 100 * float((excluded & (sign_flip(draws) < level)).mean())


def tuned_mean(runs: DataFrame, state: str, number: str) -> float:
    """Return the mean of a number over the runs of "off" or "on" of width 192 in the second
    experiment.
    """
    by_part = [runs[part, f"{state}-192", number].dropna() for part in TUNED]
    return float(np.concatenate(by_part).mean())


def change_over_widths(runs: DataFrame) -> np.ndarray:
    """Return the second experiment's outcome [seeds]: the change of on − off from the
    narrowest to the widest MLP, on a straight line fitted over the logarithm of the width.
    """
    pairs = np.array([on_off(runs, "widths", f"-{width}") for width in WIDTHS])
    return slopes(np.log(WIDTHS), pairs.T) * np.log(WIDTHS[-1] / WIDTHS[0])


def of_the_rules(runs: DataFrame, rows: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the results of both designs' rules, and their power, given the rows of
    ``comparisons``.
    """
    new = rows["second experiment, rate 0.032"]
    summary = difference_of(new)
    widths = change_over_widths(runs)
    family = [
        paired(runs[part, name, LOSS], runs[part, "off", LOSS]) for part, name in FAMILY
    ]
    main_p, width_p, *_ = holm([float(p) for p in map(sign_flip, family)])
    # Holm's smallest adjusted p value is below 0.05 if the test's p value is below 0.05 / 6.
    first_level = 0.05 / len(FAMILY)
    return {
        "new": summary,
        "largest_gain": -summary.low,
        "new_90": ends(new, 0.9),
        "again_p": sign_flip(rows["the same, off trained again (not planned)"]),
        "mean_p": sign_flip(rows["the mean of both (not planned)"]),
        "main_p": main_p,
        "width_p": width_p,
        "widths": difference_of(widths),
        "power_of_gain": power(0.02, float(new.std(ddof=1)), first_level),
        "power_of_change": power(0.03, float(widths.std(ddof=1)), 0.05),
    }


def of_the_predictions() -> dict[str, Any]:
    """Return the verdicts of docs/preregistration.md's experiment A, on − off by its rates,
    what B's tuning found, and how much the learning rate alone matters.
    """
    values = read_values([str(PREREGISTERED)])
    of_a = outcomes(values)
    of_b = read_values([str(TUNING_OF_B)])["validation"]
    on, off = (of_b.filter(like=state).to_numpy() for state in ("on_", "off_"))
    by_rate = on_minus_off(values).items()
    return {
        **{name: PREDICTIONS[name].verdict(of_a[name]) for name in ("A1", "A2", "A3")},
        "on_off": {
            rate: described(by_seed.dropna(), 0.95) for rate, by_seed in by_rate
        },
        "better": (on < off).sum(),
        "tuning_pairs": on.size,
        "gain_of_rate": difference(
            values, "validation", "off_lr-0.001", "off_lr-0.004"
        ).mean(),
    }


def of_post_hoc(runs: DataFrame) -> dict[str, Any]:
    """Return findings that were not planned before the runs."""
    curves = tuning_curves(runs)
    at_low_rates = curves[:, : len(LOW_RATES)]
    per_doubling = slopes(np.log2(RATES), curves)
    orders = runs["tuning"].xs("development Spearman's ρ", axis=1, level=1)
    changes = changes_by_loss(runs)
    return {
        "low_rate": LOW_RATES[-1],
        "below_zero": (at_low_rates < 0).sum(),
        "low_pairs": at_low_rates.size,
        "low_mean": at_low_rates.mean(),
        "curves": len(curves),
        "least_slope": per_doubling.min(),
        "largest_slope": per_doubling.max(),
        "least_order": orders.filter(like="off_lr-0.001_").min(axis=None),
        "largest_order": orders.filter(regex="off_lr-0.0(08|16)_").max(axis=None),
        "losses": len(changes),
        "rank": stats.spearmanr(changes),  # of the two columns
        "seeds_of_losses": runs["losses", "koleo-192", LOSS].count(),
        # as in "uniformity@1-192"
        "second_weights": changes.index.str.contains("@").sum(),
    }


def of_the_models(runs: DataFrame) -> dict[str, Any]:
    """Return numbers about condensation, repeated runs and other outcomes."""
    on = runs["main", "on"]
    off = runs["main", "off"]
    reruns = abs(runs["restored", "off", LOSS] - off[LOSS])
    noise = runs["noise"]
    further = runs["midtraining"]
    new_text = paired(further["on-0.1", NEW_TEXT_LOSS], further["off", NEW_TEXT_LOSS])
    old_text = paired(further["on-0.1", LOSS], further["off", LOSS])
    return {
        "off_cosine": tuned_mean(runs, "off", COSINE),
        "on_cosine": tuned_mean(runs, "on", COSINE),
        "off_order": tuned_mean(runs, "off", "test Spearman's ρ"),
        "on_order": tuned_mean(runs, "on", "test Spearman's ρ"),
        "reruns_max": reruns.max(),
        "reruns_mean": reruns.mean(),
        "sums": abs(noise["accumulation-4", LOSS] - off[LOSS]).mean(),
        "ranks": abs(noise["2-ranks", LOSS] - off[LOSS]).mean(),
        "last_words": 100 * off["test last_word"].mean(),
        "new_text": difference_of(new_text),
        "old_text": difference_of(old_text),
        "longer": 100 * (on["seconds"].mean() / off["seconds"].mean() - 1),
    }


def phrases(runs: DataFrame) -> dict[str, list[str]]:
    """Return the phrases of each page, with the numbers of these runs."""
    rows = comparisons(runs)
    values = {
        **of_the_rules(runs, rows),
        **of_the_predictions(),
        **of_post_hoc(runs),
        **of_the_models(runs),
    }
    by_page = {
        page: texts["computed"].format(**values).splitlines()
        for page, texts in TEXTS.items()
    }
    for name, pairs in rows.items():
        row = difference_of(pairs)
        cells = f"| {name} | {row.pairs} | {row.mean:+.4f} | {row.interval} |"
        by_page[PAGE].append(cells)
    return by_page


def problems(page: str, text: str, expected: Sequence[str]) -> Iterator[str]:
    """Yield a message for each phrase that a page lacks, and for each number on the page
    outside of all phrases and settings.
    """
    rest = " ".join(text.split())
    for phrase in expected:
        if phrase not in rest:
            yield f"{page} does not have: {phrase}"
    # The longest first, because a phrase may contain another one
    known = [*expected, *TEXTS[page]["settings"].splitlines()]
    for phrase in sorted(known, key=len, reverse=True):
        rest = rest.replace(phrase, " ")
    for match in re.finditer(NUMBER, rest):
        around = rest[max(0, match.start() - 40) : match.end() + 40]
        yield f"{page} has a number that nothing computes: {around}"


def main() -> None:
    texts = {page: (ROOT / page).read_text() for page in TEXTS}
    (texts[README],) = re.findall(
        r"^\*\*Does it help\?.*?\n\n", texts[README], re.M | re.S
    )
    expected = phrases(read_runs())
    messages: list[str] = []
    for page, text in texts.items():
        messages += problems(page, text, expected[page])
    if messages:
        raise SystemExit("\n".join(messages))
    print(f"all numbers agree ({sum(map(len, expected.values()))} phrases)")


if __name__ == "__main__":
    main()
