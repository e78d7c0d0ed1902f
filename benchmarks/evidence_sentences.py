"""Put the experiment's results into sentences. Every number and every word of comparison is computed from the rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from benchmarks.evidence_analysis import (
    ALPHA,
    CONTRASTS,
    MARGIN,
    PRIMARY,
    Contrast,
    Outcome,
    by_seed,
    curve_differences,
    interval,
    metric,
    noise,
    of_history,
    outcome,
    plateau_and_loss,
)
from benchmarks.evidence_parts import LRS, PARTS, STATES, WARMUPS, Recipe, Row, tuned, tuning_losses

NAMES = {
    "on": "on, λ 0.1",
    "on-0.03": "on, λ 0.03",
    "on-first-quarter": "on in the first quarter",
    "on-moments": "on, moments",
    "noisy-embedding": "noisy embedding",
    "on-0.1": "on, λ 0.1",
    "on-0.5": "on, λ 0.5",
}
TEXTS = {"test": "old text", "new_test": "new text"}
PART_NAMES = {
    "tuning": "learning rate and warm-up, on development text",
    "main": "main comparison",
    "noise": "noise floor",
    "width": "MLP width 16",
    "depth": "12 layers",
    "long": "2,400 steps",
    "midtraining": "mid-training",
}


def answer(found: Outcome) -> str:
    """Return the first sentence of the page, about the primary contrast."""
    d = found.difference
    if d is None:
        return "The main comparison has not been run."
    if d.low is None or d.high is None or d.p_value is None:
        return f"Only {len(found.pairs)} of the {len(found.contrast.seeds)} pairs of the main comparison have been run."
    verdict = found.verdict()
    if verdict.startswith("no difference"):
        word = "changes" if not is_clear(found) else "lowers" if d.mean < 0 else "raises"
        says = f"Dispersion (λ 0.1) {word} test cross-entropy by less than {MARGIN:g} here"
    elif verdict.startswith("better"):
        says = "Dispersion (λ 0.1) lowers test cross-entropy here"
    elif verdict.startswith("worse"):
        says = "Dispersion (λ 0.1) raises test cross-entropy here"
    else:
        says = "Whether dispersion (λ 0.1) helps is not decided here"
    holm = "–" if d.holm is None else f"{d.holm:.4f}"
    numbers = f"95 % interval {d.low:+.3f} … {d.high:+.3f}, {len(found.pairs)} seeds, sign-flip p {d.p_value:.4f}, Holm {holm}"
    return f"**{says}: {d.mean:+.3f} nats ({numbers}).**"


def is_clear(found: Outcome) -> bool:
    """Return whether the sign of the difference is significant, which "no difference of 0.02 or more" does not say."""
    return found.difference is not None and found.difference.holm is not None and found.difference.holm < ALPHA


def verdict(found: Outcome) -> str:
    """Return the verdict by the design's rules, and how many seeds agree where only the size says "no difference"."""
    says = found.verdict()
    if found.difference is None or not says.startswith("no difference") or not is_clear(found):
        return says
    word, count = ("lower", found.lower) if found.difference.mean < 0 else ("higher", len(found.pairs) - found.lower)
    return f"{says}, though {word} in {count} of {len(found.pairs)} seeds"


def change(found: Outcome) -> str:
    """Return "0.012 higher (95 % interval +0.005 … +0.020; higher in 8 of 8 seeds)"; "not known" without a pair."""
    d = found.difference
    if d is None:
        return "not known"
    n, lower = len(found.pairs), found.lower
    word, count = ("lower", lower) if d.mean < 0 else ("higher", n - lower)
    interval = f"95 % interval {d.low:+.3f} … {d.high:+.3f}; " if d.low is not None and d.high is not None else ""
    return f"{abs(d.mean):.3f} {word} ({interval}{word} in {count} of {n} seeds)"


def sentences(rows: Sequence[Row], found: Mapping[Contrast, Outcome]) -> list[str]:
    """Return one bullet for each result that there is, and one that names the parts that have not been run."""
    if found[PRIMARY].difference is None:
        return []
    return [f"- {text}" for text in _sentences(rows, found)]


def _sentences(rows: Sequence[Row], found: Mapping[Contrast, Outcome]) -> Iterator[str]:
    primary = found[PRIMARY]
    yield f"**Loss.** With dispersion, test cross-entropy is {change(primary)}. By the design's rules: {verdict(primary)}."
    curves = curve_differences(rows, "main")
    if curves is not None and len(curves[1]) > 1:
        last = curves[1][:, -1]
        low, high = interval(last)
        yield (
            "**Other text.** On the development text of the curves below, which is one page of a dictionary, on − off of the "
            f"same models ends at {last.mean():+.3f} (95 % interval {low:+.3f} … {high:+.3f}). Intervals cover the seeds, "
            "not the choice of text."
        )
    cosine = {state: by_seed(rows, "main", state, of_history("block_cosine")) for state in STATES}
    off, on = (np.mean(list(cosine[state].values())) for state in STATES)
    at_end = {state: by_seed(rows, "main", state, _blocks_at_end) for state in STATES}
    end_off, end_on = (np.mean(list(at_end[state].values())) for state in STATES)
    yield (
        f"**Condensation.** The mean cosine of the blocks is {end_off:.2f} without dispersion and {end_on:.2f} with it, on "
        f"windows of the test text after training. On the text of the curves, it is {off:.2f} and {on:.2f}, averaged over "
        "training."
    )
    yield from _learning_rates(rows)
    yield from _variants(rows, found)
    yield from _plateau(rows)
    for contrast in CONTRASTS:
        if contrast.part in ("width", "depth", "long") and found[contrast].difference is not None:
            name = PART_NAMES[contrast.part]
            yield f"**{name[0].upper()}{name[1:]}.** With dispersion, test cross-entropy is {change(found[contrast])}."
    continued = [c for c in CONTRASTS if c.part == "midtraining" and found[c].difference is not None]
    if continued:
        each = "; ".join(
            f"{TEXTS[c.text]}, {NAMES[c.condition].removeprefix('on, ')}: {change(found[c])}" for c in continued
        )
        yield f"**Mid-training.** Test cross-entropy against mid-training without dispersion: {each}."
    sizes = [abs(d) for name, differences in noise(rows).items() if name != "again" for d in differences.values()]
    if sizes:
        yield (
            f"**Noise.** The same seed, data and configuration with another order of sums ends {np.mean(sizes):.3f} away "
            f"on average, and {max(sizes):.3f} at most ({len(sizes)} runs)."
        )
    missing = [PART_NAMES[part] for part in PARTS if part not in {row["part"] for row in rows}]
    if missing:
        yield f"**Not run yet:** {', '.join(missing)}."


def _blocks_at_end(row: Row) -> float:
    """Return the mean over the blocks, of the embedding, the blocks and the final norm that a row has."""
    return float(np.mean(row["numbers"]["test"]["mean_cosine"][1:-1]))


def _learning_rates(rows: Sequence[Row]) -> Iterator[str]:
    lrs = sorted({*LRS, *(recipe.lr for recipe in (tuned(rows) or {}).values())})
    losses = {state: tuning_losses(rows, state, lrs) for state in STATES}
    means = {}
    for lr in lrs:
        pairs = [zip(*(losses[s][Recipe(lr, warmup)] for s in ("on", "off")), strict=False) for warmup in WARMUPS]
        differences = [on - off for pair in pairs for on, off in pair]
        if differences and np.isfinite(differences).all():  # a failed run counts as infinite
            means[lr] = float(np.mean(differences))
    if not means:
        return
    each = ", ".join(f"{mean:+.3f} at {lr:g}" for lr, mean in means.items())
    both = min(means.values()) < 0 < max(means.values())
    yield (
        "**Learning rate.** In the tuning runs, on − off at the same learning rate, averaged over both warm-ups and two "
        f"seeds, is {each}." + (" So the sign depends on the learning rate that is compared." if both else "")
    )


def _variants(rows: Sequence[Row], found: Mapping[Contrast, Outcome]) -> Iterator[str]:
    for contrast in CONTRASTS[1:]:
        if contrast.part == "main" and found[contrast].difference is not None:
            name = NAMES[contrast.condition]
            text = f"**{name[0].upper()}{name[1:]}.** Test cross-entropy is {change(found[contrast])} than off's."
            against_on = outcome(rows, replace(contrast, baseline="on"), metric("test", "cross_entropy"))
            if contrast.condition != "noisy-embedding" and against_on.difference is not None:
                text += f" Against on, λ 0.1, it is {change(against_on)}."
            yield text


def _plateau(rows: Sequence[Row]) -> Iterator[str]:
    ends = {state: by_seed(rows, "main", state, of_history("plateau_end")) for state in STATES}
    if not all(ends.values()):
        return
    off, on = (f"{median(ends[state].values()):g}" for state in STATES)
    text = f"**Plateau.** The median step at which it ends is {off} without dispersion and {on} with it."
    related = {state: plateau_and_loss(rows, "main", state) for state in STATES}
    if all(related.values()):
        each = " and ".join(f"{r[0]:+.2f} ({state})" for state, r in related.items() if r)
        text += f" Its rank correlation with the final loss over the seeds is {each}."
    yield text
