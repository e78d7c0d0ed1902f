"""Names and phrases of docs/evidence.md: how a difference and a verdict are said."""

from benchmarks.evidence_analysis import ALPHA, MARGIN, Outcome
from benchmarks.evidence_details import Paired
from titan_disp.lab.statistics import Difference

NAMES = {
    "on": "on, λ 0.1",
    "on-0.03": "on, λ 0.03",
    "on-first-quarter": "on in the first quarter",
    "on-moments": "on, moments",
    "noisy-embedding": "noisy embedding",
    "on-0.1": "on, λ 0.1",
    "on-0.5": "on, λ 0.5",
}
OFF = "off's"
TEXTS = {"test": "old text", "new_test": "new text"}
SHAPES = {"width": "MLP width 16 instead of 192", "depth": "12 layers instead of 6"}
PART_NAMES = {
    "tuning": "tuning",
    "main": "main comparison",
    "noise": "noise floor",
    "width": "MLP width 16",
    "depth": "12 layers",
    "long": "2,400 steps",
    "midtraining": "mid-training",
}


def answer(found: Outcome, again: Paired, long: Outcome) -> str:
    """Return the first sentences of the page, about the primary contrast.

    Args:
        found: the primary contrast.
        again: the same against second runs of off, or empty.
        long: the contrast of the long runs.
    """
    d, n = found.difference, len(found.pairs)
    if d is None:
        return "The main comparison has not been run."
    if d.low is None or d.high is None or d.p_value is None:
        return f"Only {n} of the {len(found.contrast.seeds)} pairs of the main comparison have finished."
    small = f" That is less than {MARGIN:g} nats, which the design fixed as the smallest difference that matters."
    word = "lower" if d.mean < 0 else "higher"
    states = {"lower": "slightly better", "higher": "slightly worse"}
    verdict = found.verdict()
    if verdict.startswith("no difference"):
        says = (
            f"{'Hardly' if word == 'lower' else 'No'}. At this size, dispersion (λ 0.1) makes test cross-entropy {states[word]}"
            if is_clear(found)
            else "There is no difference that matters. At this size, dispersion (λ 0.1) hardly changes test cross-entropy"
        )
    else:
        small = ""
        says = {
            "better": "Yes, at this size: dispersion (λ 0.1) lowers test cross-entropy",
            "worse": "No. At this size, dispersion (λ 0.1) raises test cross-entropy",
        }.get(verdict.split()[0], "Not decided: whether dispersion (λ 0.1) helps cannot be told from these runs")
    holm = "–" if d.holm is None else f"{d.holm:.4f}"
    p_values = f"sign-flip p {d.p_value:.4f}, {holm} after Holm's adjustment"
    text = f"**{says}: {d.mean:+.4f} nats ({_certainty(paired(found), 4)}; {p_values}).{small}**"
    if not found.complete:
        text += f" {len(found.contrast.seeds) - n} of {len(found.contrast.seeds)} pairs are missing."
    return text + _long_runs(long) + _second_runs(again, is_clear(found))


def _long_runs(long: Outcome) -> str:
    d = long.difference
    if d is None or d.low is None:
        return ""
    return f"\n\nWith four times the steps and the same recipe, the difference is {signed(paired(long))}."


def _second_runs(again: Paired, clear: bool) -> str:
    d = again.difference
    if d is None or d.p_value is None:
        return ""
    text = (
        "\n\nThe runs without dispersion were trained a second time, with the same seeds and options, because a later part of "
        f"the experiment needed their models. Against these second runs, the first difference is {d.mean:+.4f} "
        f"({_certainty(again, 4)}; sign-flip p {d.p_value:.4f}). "
        "This check had not been planned."
    )
    return text + (" The sign is therefore less certain than the first p says." if clear and not again.sign else "")


def is_clear(found: Outcome) -> bool:
    """Return whether the sign of the difference is significant, which "no difference of 0.02 or more" does not say."""
    return found.difference is not None and found.difference.holm is not None and found.difference.holm < ALPHA


def verdict(found: Outcome) -> str:
    """Return the verdict by the design's rules, and the direction where only the size says "no difference"."""
    says, d = found.verdict(), found.difference
    if d is None or not says.startswith("no difference"):
        return says
    both = paired(found)
    if is_clear(found):
        return f"{says}; the direction is significant after Holm's adjustment"
    unanimous = len(found.pairs) in (both.lower, both.higher)
    return f"{says} ({_agreement(both)})" if not found.contrast.family and unanimous else says


def percent(fraction: float, sign: str = "") -> str:
    return f"{100 * fraction:{sign}.0f} %"


def change(found: Paired, name: str, digits: int | None = None) -> str:
    """Return "0.012 higher than off's (95 % interval +0.005 … +0.020; higher in 8 of 8 seeds)".

    Args:
        found: the value by seed, and that with which it is compared. Without a pair, the text is "not known".
        name: what the value is compared with, such as "off's".
        digits: decimals. By default 3, or 4 where 3 would show a number as zero and so hide its sign.
    """
    d = found.difference
    if d is None:
        return "not known"
    digits = digits or _digits(d)
    size = f"{abs(d.mean):.{digits}f}"
    more = f"{size} {'lower' if d.mean < 0 else 'higher'} than {name}"
    return f"{more if float(size) else f'the same as {name} to {digits} digits'} ({_certainty(found, digits)})"


def signed(found: Paired, digits: int | None = None) -> str:
    """Return "+0.012 (95 % interval +0.005 … +0.020; higher in 8 of 8 seeds)". ``digits`` is that of ``change``."""
    d = found.difference
    if d is None:
        return "not known"
    digits = digits or _digits(d)
    return f"{d.mean:+.{digits}f} ({_certainty(found, digits)})"


def _digits(d: Difference) -> int:
    """Return how many decimals show the signs of the mean and of the interval: 3 if that is enough, or else 4."""
    return 4 if any(x and abs(x) < 0.0005 for x in (d.mean, d.low, d.high)) else 3


def _certainty(found: Paired, digits: int) -> str:
    """Return "95 % interval +0.005 … +0.020; higher in 8 of 8 seeds"; one seed has no interval."""
    d = found.difference
    if d is None or d.low is None or d.high is None:
        return _agreement(found)
    return f"95 % interval {d.low:+.{digits}f} … {d.high:+.{digits}f}; {_agreement(found)}"


def _agreement(found: Paired) -> str:
    below = found.difference is not None and found.difference.mean < 0
    word, count = ("lower", found.lower) if below else ("higher", found.higher)
    return f"{word} in {count} of {len(found.values)} seeds" if len(found.values) > 1 else "1 seed"


def paired(found: Outcome) -> Paired:
    return Paired.of(found.condition, found.baseline)
