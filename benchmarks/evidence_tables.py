"""The tables of docs/evidence.md: every number is computed here from the rows."""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np
from scipy import stats

from benchmarks.evidence_analysis import (
    Contrast,
    Outcome,
    by_seed,
    failures,
    finished,
    metric,
    noise,
    of_history,
    outcome,
    plateau_and_loss,
)
from benchmarks.evidence_details import (
    Paired,
    beginnings,
    condensation_and_difference,
    of_source,
    restored,
    token_shares,
)
from benchmarks.evidence_parts import LRS, RESTORED, SEEDS, STATES, WARMUPS, Recipe, Row, newest, tuned, tuning_losses
from benchmarks.evidence_words import NAMES, PART_NAMES, TEXTS, percent, verdict
from titan_disp.lab.statistics import Difference, standard_error

NOTHING = "–"
AFTER = {"after, off": "off", "after, λ 0.1": "on-0.1", "after, λ 0.5": "on-0.5"}
WHERE = {
    "main": "6 layers, MLP width 192, 600 steps",
    "width": "MLP width 16",
    "depth": "12 layers",
    "long": "2,400 steps",
}


HEADER = ["condition", "pairs of seeds", "cross-entropy, off", "with the condition", "difference", "95 % interval"]
HEADER += ["lower in", "p", "p after Holm", "by the design's rules"]
SECONDARY = ["", "condition", "plateau ends at step (median)", "rank correlation of that step with the loss (seeds)"]
SECONDARY += ["block cosine over time", "accuracy", "last word", "block cosine − off's, 95 % interval"]
SECONDARY += ["accuracy − off's, 95 % interval", "last word − off's, 95 % interval"]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


def _mean(values: Iterable[float], sign: str = "", digits: int = 3) -> str:
    """Format a mean with its standard error over seeds."""
    found = list(values)
    if not found:
        return NOTHING
    error = standard_error(found)
    return f"{np.mean(found):{sign}.{digits}f}" + (f" ± {error:.{digits}f}" if error is not None else "")


def _mean_or_failed(values: Sequence[float], sign: str = "") -> str:
    return _mean(values, sign) if np.isfinite(values).all() else "failed"


def _interval(d: Difference | None, digits: int = 4) -> str:
    if d is None or d.low is None or d.high is None:
        return NOTHING
    return f"{d.low:+.{digits}f} … {d.high:+.{digits}f}"


def _p(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def contrast_rows(found: dict[Contrast, Outcome], members: Iterable[Contrast], label: str) -> Iterable[list[str]]:
    for contrast in members:
        one, d = found[contrast], found[contrast].difference
        place = TEXTS[contrast.text] if label == "text" else WHERE[contrast.part]
        cells = [place, NAMES[contrast.condition], f"{len(one.pairs)} of {len(contrast.seeds)}"]
        cells += [_mean(side[s] for s in one.pairs) for side in (one.baseline, one.condition)]
        cells += [f"{d.mean:+.4f}" if d is not None else NOTHING, _interval(d), f"{one.lower} of {len(one.pairs)}"]
        tested = d is not None and contrast.family
        cells += [
            _p(d.p_value) if d is not None and tested else NOTHING,
            _p(d.holm) if d is not None and tested else NOTHING,
        ]
        yield [*cells, verdict(one)]


def tuning_tables(rows: Sequence[Row]) -> list[str]:
    recipes = tuned(rows)
    chosen = "; ".join(f"{state}: lr {r.lr:g}, warm-up {percent(r.warmup)}" for state, r in (recipes or {}).items())
    highest = max(recipe.lr for recipe in recipes.values()) if recipes else 0.0
    edge = " A higher learning rate was not tried, so that a still better one may exist." if highest > LRS[-1] else ""
    lrs = sorted({*LRS, *(r.lr for r in (recipes or {}).values()), LRS[0] / 2, LRS[-1] * 2})
    losses = {state: tuning_losses(rows, state, lrs) for state in STATES}
    lines = [
        "## Tuning",
        "",
        f"Development cross-entropy, mean of two seeds. Chosen: {chosen or 'nothing yet'}.{edge}",
        "",
    ]
    header = ["warm-up", *(f"lr {lr:g}" for lr in lrs)]
    body = [
        [f"{state}, {percent(warmup)}", *(_mean_or_failed(losses[state][Recipe(lr, warmup)]) for lr in lrs)]
        for state in STATES
        for warmup in WARMUPS
    ]
    for warmup in WARMUPS:  # for every recipe: the effect of dispersion at the same recipe
        recipes_of = [Recipe(lr, warmup) for lr in lrs]
        pairs = [zip(losses["on"][recipe], losses["off"][recipe], strict=False) for recipe in recipes_of]
        body.append(
            [f"on − off, {percent(warmup)}", *(_mean_or_failed([a - b for a, b in pair], "+") for pair in pairs)]
        )
    return [*lines, *table(header, body)]


def noise_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "## Noise floor",
        "",
        "These runs repeat off with the same seed and data. With gradient accumulation and on 2 ranks, the sums of a step",
        "have another order; *again* changes nothing. The numbers are their test cross-entropy minus that of the first run.",
        "",
    ]
    body = [
        [
            name,
            *(f"{d[s]:+.4f}" if s in d else NOTHING for s in SEEDS[:4]),
            f"{np.mean(np.abs(list(d.values()))):.4f}" if d else NOTHING,
        ]
        for name, d in noise(rows).items()
    ]
    return [*lines, *table(["", *(f"seed {s}" for s in SEEDS[:4]), "mean size"], body)]


def secondary_rows(rows: Sequence[Row], part: str) -> list[list[str]]:
    """Rows of the table below ``SECONDARY``."""
    names = [c for p, c in dict.fromkeys((p, c) for p, c, _ in newest(rows)) if p == part]
    body = []
    for name in names:
        ends = by_seed(rows, part, name, of_history("plateau_end"))
        related = plateau_and_loss(rows, part, name)
        left = f" ({len(ends)} of {number} left it)" if len(ends) < (number := len(finished(rows, part, name))) else ""
        cells = [WHERE[part], NAMES.get(name, name), f"{median(ends.values()):g}{left}" if ends else NOTHING]
        cells += [f"{related[0]:+.2f} ({related[1]})" if related else NOTHING]
        cells += [_mean(by_seed(rows, part, name, of_history("block_cosine")).values())]
        cells += [
            _mean(by_seed(rows, part, name, metric("test", key)).values(), digits=4)
            for key in ("accuracy", "last_word")
        ]
        for value in (of_history("block_cosine"), metric("test", "accuracy"), metric("test", "last_word")):
            one = outcome(rows, Contrast(part, name, "main"), value)
            cells.append(_interval(one.difference) if name != "off" else NOTHING)
        body.append(cells)
    return body


def by_source(rows: Sequence[Row]) -> list[str]:
    off, on = (finished(rows, "main", state) for state in STATES)
    seeds = [seed for seed in on if seed in off]
    if not seeds:
        return []
    shares = token_shares(rows) or {}
    body = []
    for name in off[seeds[0]]["numbers"]["test"]["by_source"]:
        values = [[side[s]["numbers"]["test"]["by_source"][name] for s in seeds] for side in (off, on)]
        own: Paired = of_source(rows, name)
        cells = [name, percent(shares[name]) if name in shares else NOTHING, _mean(values[0]), _mean(values[1])]
        mean = f"{own.difference.mean:+.4f}" if own.difference is not None else NOTHING
        body.append([*cells, mean, _interval(own.difference), f"{own.lower} of {len(own.values)}"])
    header = ["source", "part of the tokens", "off", "on, λ 0.1", "difference", "95 % interval", "lower in"]
    return ["Test cross-entropy by source (main comparison):", "", *table(header, body)]


def cosines(rows: Sequence[Row]) -> list[str]:
    """Return cross-entropy, accuracy and mean cosines by layer of models before and after mid-training."""
    cells = []
    where = [(label, "midtraining", name, text) for text in TEXTS for label, name in AFTER.items()]
    found = {("test", "before mid-training"): beginnings(rows)}
    found[("new_test", "before mid-training")] = finished(rows, "midtraining", "before")
    found |= {(text, label): finished(rows, part, name) for label, part, name, text in where}
    for (text, label), own in found.items():
        numbers = [
            [
                *(row["numbers"][text][name] for name in ("cross_entropy", "accuracy")),
                *row["numbers"][text]["mean_cosine"],
            ]
            for row in own.values()
            if text in row["numbers"]
        ]
        if numbers:
            cells.append([TEXTS[text], label, *(f"{value:.3f}" for value in np.mean(numbers, axis=0))])
    if not cells:
        return []
    layers = len(cells[0]) - 6
    header = [
        "text",
        "",
        "cross-entropy",
        "accuracy",
        "embedding",
        *(f"block {i}" for i in range(layers)),
        "final norm",
    ]
    return [
        "Cross-entropy, accuracy, and mean cosine by layer, before and after mid-training (means over seeds):",
        "",
        *table(header, sorted(cells, key=lambda c: list(TEXTS.values()).index(c[0]))),
    ]


def restored_models(rows: Sequence[Row]) -> list[str]:
    sizes = [abs(d) for d in restored(rows)]
    if not sizes:
        return []
    count = "1 model was" if len(sizes) == 1 else f"{len(sizes)} models were"
    near = f"{np.mean(sizes):.3f} away from the first one's on average, and {max(sizes):.3f} at most"
    away = near if max(sizes) > 0 else "exactly the first one's"
    return [
        f"Mid-training begins from models of the main comparison. {count} trained again for it, as the files "
        f"of the first runs were gone. The test cross-entropy of a model that was trained again is {away}. The main "
        "comparison has the numbers of the first runs.",
        "",
    ]


def attempts(rows: Sequence[Row]) -> list[str]:
    seconds, number, failed = Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        if "history" in row or row.get("status") == "failed":  # other rows only measure a model again
            number[row["part"]] += 1
            failed[row["part"]] += row.get("status") == "failed"
            seconds[row["part"]] += sum(row.get("history", {}).get("seconds", {}).values())
    names = PART_NAMES | {RESTORED: "main comparison's off, trained again for mid-training"}
    body = [[names[p], str(number[p]), str(failed[p]), f"{seconds[p] / 3600:.2f}"] for p in names if number[p]]
    lines = [
        "## What was run",
        "",
        "The table counts every attempt that ended, and the hours of the finished ones by the clock, from the start to the",
        "end of training. A run uses one core, and runs on 2 ranks two. No run is left out.",
        "",
    ]
    lines += table(["part", "attempts", "failed", "hours"], body)
    lines += [
        f"- failed: {row['part']} {row['condition']} seed {row['seed']}: {row['error']}" for row in failures(rows)
    ]
    commits = sorted({row["commit"] for row in rows if "commit" in row})
    return [*lines, *([""] if failures(rows) else []), f"Commits: {', '.join(commits) or NOTHING}.", ""]


def corpus_table(rows: Sequence[Row]) -> list[str]:
    found = [row for row in rows if row["part"] == "corpus"]
    if not found:
        return []
    corpus = found[-1]
    body = [
        [part.replace("_", " "), name, f"{size['documents']:,}", f"{size['tokens']:,}"]
        for part, sizes in corpus["sizes"].items()
        for name, size in sizes.items()
    ]
    sources = ", ".join(corpus["sources"])
    return [f"Text: {sources}; sha256 {corpus['sha256'][:12]}.", "", *table(["", "split", "documents", "tokens"], body)]


def related_to_condensation(rows: Sequence[Row]) -> str:
    """Return the caption of the last picture: rank correlations over the seeds."""
    each, means = [], []
    for part in WHERE:
        points = condensation_and_difference(rows, part)
        if not points:
            continue
        cosine, d = zip(*points, strict=True)
        means.append((float(np.mean(cosine)), float(np.mean(d)), part))
        if len(points) >= 4 and min(len({*cosine}), len({*d})) > 1:
            each.append(f"{stats.spearmanr(cosine, d).statistic:+.2f} ({WHERE[part]}, {len(points)} seeds)")
    text = "Each point of the last picture is a seed."
    if each:
        text += f" The rank correlation of the two numbers is {', '.join(each)}. The design has no test of it."
    if len(means) > 2 and max(means)[2] == min(means, key=lambda one: one[1])[2]:
        text += (
            f" Between the parts, dispersion does best where the models condense most without it ({WHERE[max(means)[2]]}). "
            f"These are only {len(means)} parts, and nobody had planned to compare them."
        )
    return text
