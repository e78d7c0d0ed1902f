"""Put the experiment's results into sentences. Every number and every word of comparison is computed from the rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
from scipy import stats

from benchmarks.evidence_analysis import (
    CONTRASTS,
    LONG,
    MARGIN,
    PRIMARY,
    Contrast,
    Outcome,
    by_seed,
    curve_differences,
    finished,
    interval,
    metric,
    noise,
    of_history,
    outcome,
    plateau_and_loss,
)
from benchmarks.evidence_details import (
    Paired,
    beginnings,
    block_cosine,
    lasting,
    of_other_sources,
    of_source,
    restored,
    seconds,
    token_shares,
)
from benchmarks.evidence_parts import LRS, RESTORED, STATES, WARMUPS, Recipe, Row, tuned, tuning_losses
from benchmarks.evidence_score import MEASURED
from benchmarks.evidence_tables import WHERE
from benchmarks.evidence_words import (
    NAMES,
    OFF,
    PART_NAMES,
    SHAPES,
    TEXTS,
    change,
    is_clear,
    paired,
    percent,
    signed,
    verdict,
)


def sentences(rows: Sequence[Row], found: Mapping[Contrast, Outcome]) -> list[str]:
    """Return one bullet for each result that there is, and one that names the parts that are not complete."""
    if found[PRIMARY].difference is None:
        return []
    return [f"- {text}" for text in _sentences(rows, found)]


def _sentences(rows: Sequence[Row], found: Mapping[Contrast, Outcome]) -> Iterator[str]:
    primary = found[PRIMARY]
    yield (
        f"**Loss.** With dispersion, test cross-entropy is {change(paired(primary), OFF, 4)}. "
        f"By the design's rules: {verdict(primary)}."
    )
    yield from _sources(rows)
    yield from _condensation(rows, primary)
    yield from _curves(rows)
    yield from _learning_rates(rows)
    yield from _variants(rows, found)
    yield from _shapes(found)
    yield from _length(rows, found)
    yield from _midtraining(rows, found)
    yield from _plateau(rows)
    yield from _noise(rows, primary)
    yield from _time(rows)
    yield from _missing(found)


def _sources(rows: Sequence[Row]) -> Iterator[str]:
    shares = token_shares(rows)
    if shares is None or len(shares) < 2:
        return
    name = max(shares, key=lambda source: shares[source])
    own, others = of_source(rows, name), of_other_sources(rows, name, shares)
    unclear = " The second interval includes 0." if own.sign and not others.sign else ""
    yield (
        f"**By source.** {name} has {percent(shares[name])} of the test tokens. There the difference, on − off, is "
        f"{signed(own)}. On the other packages together, it is {signed(others)}.{unclear}"
    )


def _condensation(rows: Sequence[Row], primary: Outcome) -> Iterator[str]:
    own = {state: finished(rows, "main", state) for state in STATES}
    at_end = {state: {s: block_cosine(row) for s, row in found.items()} for state, found in own.items()}
    final = {s: np.mean([row["numbers"]["test"]["mean_cosine"][-1] for row in own[s].values()]) for s in STATES}
    less = Paired.of(at_end["on"], at_end["off"])
    off, on = (np.mean(list(at_end[state].values())) for state in STATES)
    built_for = less.lower == len(less.values)
    helps = primary.difference is not None and primary.difference.mean < 0
    follows = (
        f" So the loss does what it is built for{'' if helps else ', and the model does not predict better for it'}."
        if built_for
        else ""
    )
    yield (
        f"**Condensation.** After training, the mean cosine of the blocks on the first {MEASURED} full windows of the test "
        f"text is {off:.2f} without dispersion and {on:.2f} with it (lower in {less.lower} of {len(less.values)} seeds). "
        f"After the final norm, which the output layer reads, it is {final['off']:.2f} and {final['on']:.2f}.{follows}"
    )


def _curves(rows: Sequence[Row]) -> Iterator[str]:
    curves = curve_differences(rows, "main")
    if curves is None or len(curves[1]) < 2:
        return
    d = curves[1]
    steps = next(iter(finished(rows, "main", "on").values()))["history"]["steps"]
    mean = d.mean(axis=0)

    def at(i: int) -> str:
        return _at(i, steps, d)

    later = range(1, len(steps))
    best, worst = min(later, key=lambda i: mean[i]), max(later, key=lambda i: mean[i])
    yield (
        f"**During training.** On the text of the curves below, on − off is at its lowest {at(best)}, at its highest "
        f"{at(worst)}, and ends {at(len(steps) - 1)}. The first two steps were picked because they are extreme. This text is "
        "a single page of a dictionary, so the tables count and not the curves."
    )


def _at(i: int, steps: Sequence[int], d: np.ndarray) -> str:
    """Return the mean over seeds of ``d``, [seeds, steps], at the i-th step, with its interval."""
    low, high = interval(d[:, i])
    return f"{d[:, i].mean():+.3f} at step {steps[i]} (95 % interval {low:+.3f} … {high:+.3f})"


def _by_learning_rate(rows: Sequence[Row], lrs: Sequence[float]) -> tuple[dict[float, float], dict[float, float]]:
    """Return on − off and off in tuning, by learning rate, averaged over warm-ups and seeds."""
    losses = {state: tuning_losses(rows, state, lrs) for state in STATES}
    means, off = {}, {}
    for lr in lrs:
        pairs = [zip(*(losses[s][Recipe(lr, warmup)] for s in ("on", "off")), strict=False) for warmup in WARMUPS]
        both = [pair for one in pairs for pair in one]
        if both and np.isfinite(both).all():  # a failed run counts as infinite
            means[lr], off[lr] = float(np.mean([a - b for a, b in both])), float(np.mean([b for _, b in both]))
    return means, off


def _tried(rows: Sequence[Row]) -> list[float]:
    """Return the learning rates that were tried, ascending."""
    return sorted({*LRS, *(recipe.lr for recipe in (tuned(rows) or {}).values())})


def _learning_rates(rows: Sequence[Row]) -> Iterator[str]:
    recipes, lrs = tuned(rows) or {}, _tried(rows)
    means, off = _by_learning_rate(rows, lrs)
    if not means:
        return
    each = ", ".join(f"{mean:+.3f} at {lr:g}" for lr, mean in means.items())
    text = (
        "**Learning rate.** In the tuning runs, on − off at the same learning rate, averaged over both warm-ups and two "
        f"seeds, is {each}."
    )
    if left := [f"{lr:g}" for lr in lrs if lr not in means]:
        text += f" A run is missing or failed at {', '.join(left)}."
    if min(means.values()) < 0 < max(means.values()):
        behind = min(off[lr] for lr in means if means[lr] < 0) - min(off.values())
        text += " So the sign depends on the learning rate that is compared."
        if behind > MARGIN:
            text += (
                f" Where dispersion is ahead, off is {behind:.1f} nats or more worse than at its best learning rate."
            )
    if recipes and all(recipe.lr == max(lrs) for recipe in recipes.values()) and max(lrs) > LRS[-1]:
        text += f" Both sides chose the highest learning rate that was tried, {max(lrs):g}."
    yield text


def _variants(rows: Sequence[Row], found: Mapping[Contrast, Outcome]) -> Iterator[str]:
    better = found[PRIMARY].verdict().startswith("better")
    for contrast in CONTRASTS[1:]:
        if contrast.part != "main" or found[contrast].difference is None:
            continue
        name = NAMES[contrast.condition]
        against_on = paired(outcome(rows, replace(contrast, baseline="on"), metric("test", "cross_entropy")))
        text = f"**{name[0].upper()}{name[1:]}.** Test cross-entropy is {change(paired(found[contrast]), OFF)}."
        if against_on.difference is not None:
            text += f" It is {change(against_on, 'that of on, λ 0.1')}."
        if contrast.condition == "on-first-quarter" and not better:
            text += " As on is not better than off, there is no gain at the end that a better start could explain."
        if contrast.condition == "on-moments":
            text += (
                " These runs compared the tokens with evenly spaced ones. The estimator now chooses them differently "
                "(CHANGELOG.md), so this says little about the present one."
            )
        if contrast.condition == "noisy-embedding" and against_on.sign:
            word = "better" if against_on.sign < 0 else "worse"
            text += f" So noise does {word} than dispersion here; no test of this was planned."
        yield text


def _shapes(found: Mapping[Contrast, Outcome]) -> Iterator[str]:
    main = found[PRIMARY].difference
    for contrast in CONTRASTS:
        d = found[contrast].difference
        if contrast.part not in SHAPES or d is None or main is None:
            continue
        own, same = paired(found[contrast]), d.mean * main.mean > 0
        decided = is_clear(found[contrast]) if contrast.family else bool(own.sign)
        which = "that of the main comparison" if same else "the opposite of the main comparison's"
        if not decided:
            sign = f"In the mean the sign is {which}, but by these rules and seeds it is not decided."
        elif same:
            sign = f"The sign is {which}."
        else:
            sign = (
                f"The sign is {which}: the effect depends on the shape of the model, and nothing can be said about larger "
                "models."
            )
        name = SHAPES[contrast.part]
        yield (
            f"**{name[0].upper()}{name[1:]}.** With dispersion, test cross-entropy is {change(own, OFF)}. "
            f"By the design's rules: {verdict(found[contrast])}. {sign} The learning rate was not tuned again."
        )


def _length(rows: Sequence[Row], found: Mapping[Contrast, Outcome]) -> Iterator[str]:
    parts = lasting(rows)
    if parts is None:
        return
    short, long, between = parts
    margins = long.difference
    inside = margins is not None and None not in (margins.low, margins.high)
    inside = inside and margins.low > -MARGIN and margins.high < MARGIN  # type: ignore[union-attr,operator]
    grows = long.sign and between.sign == long.sign
    if short.sign and long.sign == short.sign:
        follows = "So the difference lasts" + (", and is larger in longer training." if grows else ".")
    elif short.sign and long.sign == -short.sign:
        follows = "So the sign changes with the length of training."
    elif inside and short.sign and between.sign == -short.sign:
        follows = f"So the difference fades: it was a {'head' if short.sign < 0 else 'late'} start."
    elif grows:
        follows = "So with this recipe, the difference is larger in longer training."
    else:
        follows = f"So {len(long.values)} seeds do not tell whether a difference lasts."
    text = (
        f"**2,400 steps.** On − off is {signed(long)}. By the design's rules: {verdict(found[LONG])}. In the main "
        f"comparison, whose runs have a schedule of 600 steps, it is {signed(short)} with the same seeds. The change is "
        f"{signed(between)}. {follows}"
    )
    curves = curve_differences(rows, "long")
    if curves is not None and len(curves[1]) > 1:
        steps = next(iter(finished(rows, "long", "on").values()))["history"]["steps"]
        lowest = 1 + int(curves[1].mean(axis=0)[1:].argmin())
        text += (
            f" On the text of the curves below, on − off is at its lowest {_at(lowest, steps, curves[1])}, and ends "
            f"{_at(len(steps) - 1, steps, curves[1])}."
        )
    text += " The learning rate was tuned for 600 steps, and not again."
    means, _ = _by_learning_rate(rows, _tried(rows))
    if long.sign > 0 and len(means) > 1 and means[max(means)] > means[min(means)]:
        text += (
            " In tuning, dispersion did worse at high learning rates, so a part of this difference may come from the "
            "learning rate and not from the length."
        )
    yield text


def _midtraining(rows: Sequence[Row], found: Mapping[Contrast, Outcome]) -> Iterator[str]:
    explained = {
        "new_test": "the package that was held back until then, dict-foldoc",
        "test": "the test text of the main comparison",
    }
    for text, what in explained.items():
        own = [c for c in CONTRASTS if c.part == "midtraining" and c.text == text and found[c].difference is not None]
        if not own:
            continue
        first = beginnings(rows) if text == "test" else finished(rows, "midtraining", "before")
        value = metric(text, "cross_entropy")
        before = [value(row) for row in first.values()]
        after = list(by_seed(rows, "midtraining", "off", value).values())
        goes = f"from {np.mean([b for b in before if b is not None]):.3f} to" if before else "to"
        each = " ".join(
            f"With {NAMES[c.condition].removeprefix('on, ')}, it ends {change(paired(found[c]), 'without', 4)}: "
            f"{verdict(found[c])}."
            for c in own
        )
        yield (
            f"**Mid-training, {TEXTS[text]}** ({what}). Without dispersion, cross-entropy goes {goes} {np.mean(after):.3f}. "
            f"{each}{_forgetting(rows, own, before, after) if text == 'test' else ''}"
        )
    conditions = {"before mid-training": "before", "without dispersion": "off", "with λ 0.1": "on-0.1"}
    conditions["with λ 0.5"] = "on-0.5"
    cosines = {
        label: [block_cosine(row, "new_test") for row in finished(rows, "midtraining", name).values()]
        for label, name in conditions.items()
    }
    if cosines["before mid-training"] and cosines["without dispersion"]:
        each = ", ".join(f"{np.mean(values):.3f} {label}" for label, values in cosines.items() if values)
        yield f"**Mid-training, condensation.** The mean cosine of the blocks on the new text is {each}."


def _forgetting(
    rows: Sequence[Row], own: Sequence[Contrast], before: Sequence[float | None], after: Sequence[float]
) -> str:
    """Say how much worse the old text gets in mid-training, and on which sources conditions differ."""
    text, worse = "", np.mean(after) - np.mean([b for b in before if b is not None])
    if worse > MARGIN:
        text += f" So further training makes the old text {worse:.2f} nats worse (forgetting), also without dispersion."
    shares = token_shares(rows)
    if shares is None or len(shares) < 2:
        return text
    name = max(shares, key=lambda source: shares[source])
    for contrast in own:
        at = (contrast.part, contrast.condition)
        one, others = of_source(rows, name, *at), of_other_sources(rows, name, shares, *at)
        text += (
            f" With {NAMES[contrast.condition].removeprefix('on, ')}, the difference is {signed(one, 4)} on {name} and "
            f"{signed(others, 4)} on the other packages together."
        )
    return text


def _plateau(rows: Sequence[Row]) -> Iterator[str]:
    own = {state: finished(rows, "main", state) for state in STATES}
    ends = {state: by_seed(rows, "main", state, of_history("plateau_end")) for state in STATES}
    if not all(ends.values()):
        return
    both = Paired.of(ends["on"], ends["off"])
    medians = {state: f"{median(ends[state].values()):g}" for state in STATES}
    d = both.difference
    mean = (
        ""
        if d is None or d.low is None
        else f", on average {d.mean:+.1f} steps, 95 % interval {d.low:+.1f} … {d.high:+.1f}"
    )
    text = (
        "**Plateau.** Training begins with a plateau, which ends where the training loss first falls below 6.0 nats. With "
        f"dispersion it ends earlier in {both.lower} of {len(both.values)} seeds and later in {both.higher} (median step "
        f"{medians['off']} without and {medians['on']} with it, logged every 5 steps{mean})."
    )
    if stuck := [f"{len(own[s]) - len(ends[s])} with {s}" for s in STATES if len(own[s]) > len(ends[s])]:
        text += f" Runs that never left it: {', '.join(stuck)}."
    related = {state: plateau_and_loss(rows, "main", state) for state in STATES}
    if all(related.values()):
        each = " and ".join(f"{r[0]:+.2f} ({state})" for state, r in related.items() if r)
        n = min(r[1] for r in related.values() if r)
        t = stats.t.ppf(0.975, n - 2)
        least = t / np.sqrt(n - 2 + t**2)
        text += (
            f" Its rank correlation with the final loss over the seeds is {each}. With {n} seeds, only about "
            f"±{least:.1f} or more would be significant."
        )
        if all(abs(r[0]) < least for r in related.values() if r):
            text += " So these runs do not show that the plateau explains the final loss, and cannot exclude it."
    yield text


def _noise(rows: Sequence[Row], primary: Outcome) -> Iterator[str]:
    sizes = [abs(d) for name, differences in noise(rows).items() if name != "again" for d in differences.values()]
    if not sizes:
        return
    text = (
        "**Noise.** With the same seed and data, and the sums of a step in another order (gradient accumulation or two "
        f"ranks), off ends {np.mean(sizes):.3f} away on average, and {max(sizes):.3f} at most ({len(sizes)} runs)."
    )
    if again := [abs(d) for d in restored(rows)]:
        text += (
            f" The {len(again)} models of off that were trained again for mid-training end {np.mean(again):.3f} away on "
            f"average, and {max(again):.3f} at most. Nothing was changed on purpose; it was probably another machine, and the "
            "rows do not show the cause."
        )
    if primary.difference is not None and max([*sizes, *again]) > abs(primary.difference.mean):
        text += (
            " So in a single pair of runs, noise can be larger than the difference of the main comparison, "
            f"{primary.difference.mean:+.3f}."
        )
    yield text


def _time(rows: Sequence[Row]) -> Iterator[str]:
    times = {part: [seconds(finished(rows, part, state).values()) for state in STATES] for part in WHERE}
    (off, on), again = times["main"], seconds(row for row in rows if row["part"] == RESTORED)
    if not off or not on:
        return
    more = {part: percent(np.mean(own[1]) / np.mean(own[0]) - 1, "+") for part, own in times.items() if all(own)}
    others = ", ".join(f"{PART_NAMES[part]}: {part_more}" for part, part_more in more.items() if part != "main")
    text = (
        f"**Time.** A run of the main comparison takes {np.mean(off):.0f} s without dispersion and {np.mean(on):.0f} s with it "
        f"({more['main']}) on one core"
    )
    text += f" ({others})." if others else "."
    if again:
        text += f" These times are rough: when off was trained again, it took {np.mean(again):.0f} s."
    yield text + (
        " All comparisons are at equal tokens, not at equal time. `titan-disp plan` predicts a smaller share for larger models."
    )


def _missing(found: Mapping[Contrast, Outcome]) -> Iterator[str]:
    """Say which parts are not complete. Tuning and noise have no contrast and are not mentioned."""
    left = []
    for part, name in PART_NAMES.items():
        own = [one for contrast, one in found.items() if contrast.part == part]
        if all(one.complete for one in own):
            continue
        if not any(one.pairs or one.failed for one in own):
            left.append(name)
            continue
        pairs, wanted = (
            sum(len(x) for x in xs) for xs in zip(*((o.pairs, o.contrast.seeds) for o in own), strict=True)
        )
        failed = len({run for one in own for run in one.failed})
        left.append(f"{name} ({pairs} of {wanted} pairs" + (f", {failed} runs failed)" if failed else ")"))
    if left:
        yield f"**Not run or not complete:** {', '.join(left)}."
