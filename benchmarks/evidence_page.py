"""Write docs/evidence.md from docs/evidence.jsonl: every number of the page is computed here from the rows."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.evidence_analysis import (
    CONTRASTS,
    PRIMARY,
    Contrast,
    Outcome,
    by_seed,
    failures,
    finished,
    metric,
    noise,
    of_history,
    outcome,
    outcomes,
    plateau_and_loss,
    restored,
)
from benchmarks.evidence_parts import LRS, PARTS, SEEDS, STATES, WARMUPS, Recipe, Row, newest, tuned, tuning_losses
from benchmarks.evidence_plots import draw
from benchmarks.evidence_sentences import NAMES, PART_NAMES, TEXTS, answer, sentences, verdict
from titan_disp.evaluate.compare import standard_error
from titan_disp.files import atomic_write

NOTHING = "–"
WHERE = {
    "main": "6 layers, MLP width 192, 600 steps",
    "width": "MLP width 16",
    "depth": "12 layers",
    "long": "2,400 steps",
}


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


def _interval(found: Outcome, digits: int = 3) -> str:
    d = found.difference
    if d is None or d.low is None or d.high is None:
        return NOTHING
    return f"{d.low:+.{digits}f} … {d.high:+.{digits}f}"


def _p(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def _contrast_rows(found: dict[Contrast, Outcome], members: Iterable[Contrast], label: str) -> Iterable[list[str]]:
    for contrast in members:
        one, d = found[contrast], found[contrast].difference
        place = TEXTS[contrast.text] if label == "text" else WHERE[contrast.part]
        cells = [place, NAMES[contrast.condition], f"{len(one.pairs)} of {len(contrast.seeds)}"]
        cells += [_mean(one.baseline.values()), _mean(one.condition.values())]
        cells += [f"{d.mean:+.3f}" if d is not None else NOTHING, _interval(one), f"{one.lower} of {len(one.pairs)}"]
        tested = d is not None and contrast.family
        cells += [
            _p(d.p_value) if d is not None and tested else NOTHING,
            _p(d.holm) if d is not None and tested else NOTHING,
        ]
        yield [*cells, verdict(one)]


HEADER = ["off", "condition", "difference", "95 % interval", "lower in", "p", "Holm", "by the design's rules"]
SECONDARY = ["", "", "plateau ends at step (median)", "its ρ with the loss (seeds)", "block cosine over time"]
SECONDARY += ["accuracy", "last word", "accuracy − off's", "last word − off's"]


def _tuning(rows: Sequence[Row]) -> list[str]:
    recipes = tuned(rows)
    chosen = "; ".join(f"{state}: lr {r.lr:g}, warm-up {r.warmup:.0%}" for state, r in (recipes or {}).items())
    highest = max(recipe.lr for recipe in recipes.values()) if recipes else 0.0
    edge = " A higher learning rate was not tried." if highest > LRS[-1] else ""
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
        [f"{state}, {warmup:.0%}", *(_mean(losses[state][Recipe(lr, warmup)]) for lr in lrs)]
        for state in STATES
        for warmup in WARMUPS
    ]
    for warmup in WARMUPS:  # for every recipe: the effect of dispersion at the same recipe
        recipes_of = [Recipe(lr, warmup) for lr in lrs]
        pairs = [zip(losses["on"][recipe], losses["off"][recipe], strict=False) for recipe in recipes_of]
        body.append([f"on − off, {warmup:.0%}", *(_mean((a - b for a, b in pair), "+") for pair in pairs)])
    return [*lines, *table(header, body)]


def _noise(rows: Sequence[Row]) -> list[str]:
    lines = [
        "## Noise floor",
        "",
        "These runs repeat off with the same seed, data and configuration. With accumulation and on 2 ranks, the sums of a",
        "step have another order; *again* changes nothing. The numbers are their test cross-entropy minus that of the",
        "first run.",
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


def _secondary(rows: Sequence[Row], part: str) -> list[list[str]]:
    """Rows of the table below ``SECONDARY``."""
    names = [c for p, c in dict.fromkeys((p, c) for p, c, _ in newest(rows)) if p == part]
    body = []
    for name in names:
        ends = by_seed(rows, part, name, of_history("plateau_end"))
        related = plateau_and_loss(rows, part, name)
        cells = [WHERE[part], NAMES.get(name, name), f"{median(ends.values()):g}" if ends else NOTHING]
        cells += [f"{related[0]:+.2f} ({related[1]})" if related else NOTHING]
        cells += [_mean(by_seed(rows, part, name, of_history("block_cosine")).values())]
        cells += [
            _mean(by_seed(rows, part, name, metric("test", key)).values(), digits=4)
            for key in ("accuracy", "last_word")
        ]
        for key in ("accuracy", "last_word"):
            one = outcome(rows, Contrast(part, name, "main"), metric("test", key))
            cells.append(_interval(one, digits=4) if name != "off" else NOTHING)
        body.append(cells)
    return body


def _by_source(rows: Sequence[Row]) -> list[str]:
    off, on = (finished(rows, "main", state) for state in STATES)
    seeds = [seed for seed in on if seed in off]
    if not seeds:
        return []
    names = off[seeds[0]]["numbers"]["test"]["by_source"]
    body = []
    for name in names:
        values = [[side[s]["numbers"]["test"]["by_source"][name] for s in seeds] for side in (off, on)]
        body.append([name, _mean(values[0]), _mean(values[1]), _mean(np.subtract(values[1], values[0]), "+")])
    return [
        "Test cross-entropy by source (main comparison):",
        "",
        *table(["source", "off", "on, λ 0.1", "difference"], body),
    ]


def _cosines(rows: Sequence[Row]) -> list[str]:
    """Return cross-entropy and mean cosines by layer of models before and after mid-training."""
    cells = []
    where = [("before", "main", "off", "test"), ("before", "midtraining", "before", "new_test")]
    where += [
        (NAMES.get(name, name), "midtraining", name, text) for text in TEXTS for name in ("off", "on-0.1", "on-0.5")
    ]
    for label, part, name, text in where:
        found = [
            [row["numbers"][text]["cross_entropy"], *row["numbers"][text]["mean_cosine"]]
            for row in finished(rows, part, name).values()
            if text in row["numbers"]
        ]
        if found:
            cells.append([TEXTS[text], label, *(f"{value:.3f}" for value in np.mean(found, axis=0))])
    if not cells:
        return []
    layers = len(cells[0]) - 5
    header = ["text", "", "cross-entropy", "embedding", *(f"block {i}" for i in range(layers)), "final norm"]
    return [
        "Cross-entropy, and mean cosine by layer, means over seeds:",
        "",
        *table(header, sorted(cells, key=lambda c: list(TEXTS.values()).index(c[0]))),
    ]


def _restored(rows: Sequence[Row]) -> list[str]:
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


def _time(rows: Sequence[Row]) -> list[str]:
    seconds, number, failed = Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        if "condition" in row:
            number[row["part"]] += 1
            failed[row["part"]] += row["status"] == "failed"
            seconds[row["part"]] += sum(row.get("history", {}).get("seconds", {}).values())
    body = [[PART_NAMES[p], str(number[p]), str(failed[p]), f"{seconds[p] / 3600:.2f}"] for p in PARTS if number[p]]
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


def _corpus(rows: Sequence[Row]) -> list[str]:
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


def _has_pictures(rows: Sequence[Row]) -> bool:
    """Return whether there is anything to draw: all pictures need runs of the main part."""
    return any(row["part"] == "main" for row in rows)


def _pictures(rows: Sequence[Row], *links: str) -> list[str]:
    return [line for link in links for line in (link, "")] if _has_pictures(rows) else []


def _says(rows: Sequence[Row], found: Mapping[Contrast, Outcome]) -> list[str]:
    lines = sentences(rows, found)
    return ["## What it says", "", *lines, ""] if lines else []


def page(rows: Sequence[Row]) -> str:
    """Return the page as Markdown."""
    found = outcomes(rows)
    main = [c for c in CONTRASTS if c.family == "main"]
    few = [c for c in CONTRASTS if not c.family]
    mid = [c for c in CONTRASTS if c.family == "midtraining"]
    parts = [
        "# Does it help?",
        "",
        answer(found[PRIMARY]),
        "",
        "`make evidence` writes this page from [evidence.jsonl](evidence.jsonl), which has one row per run. Question,",
        "outcomes and rules were fixed before the main runs: [evidence_design.md](evidence_design.md). Numbers are",
        "cross-entropy on held-out text in nats, mean ± standard error over seeds. Differences are condition − off, paired",
        "by seed; below zero is better.",
        "",
        *_says(rows, found),
        *_corpus(rows),
        "## Main comparison",
        "",
        *table(["", "condition", "pairs", *HEADER], _contrast_rows(found, main, "where")),
        f"p is from the exact sign-flip test, and Holm's method adjusts it for the {len(main)} contrasts. "
        f"With {len(SEEDS)} seeds p is at least {2 / 2 ** len(SEEDS):.4f}. A contrast that is "
        "not run counts as p = 1.",
        "",
        *_pictures(
            rows,
            "![Difference of cross-entropy over tokens](evidence_loss.png)",
            "The curve is the difference during training, in the 95 % interval over seeds. Its text is only 4,112 tokens of "
            "one page of the dictionary, so it may differ from the table, whose text is the whole test split.",
        ),
        *_by_source(rows),
        "## Depth and length",
        "",
        *table(["", "condition", "pairs", *HEADER], _contrast_rows(found, few, "where")),
        "Four seeds cannot reach p < 0.05.",
        "",
        "## Condensation, plateau and accuracy",
        "",
        *table(SECONDARY, [cells for part in WHERE for cells in _secondary(rows, part)]),
        *_pictures(
            rows,
            "The maps, and the cosine over time in the table and below, are measured on the same page as the curve. The last "
            "word is right in a few of 600 paragraphs, which tells nothing at this size.",
            "![Cosines by layer over the steps](evidence_cosine.png)",
            "![Difference against condensation without dispersion](evidence_baseline.png)",
        ),
        "## Mid-training",
        "",
        *table(["", "condition", "pairs", *HEADER], _contrast_rows(found, mid, "text")),
        *_restored(rows),
        *_cosines(rows),
        *_tuning(rows),
        *_noise(rows),
        *_time(rows),
        "## What this cannot say",
        "",
        "The model has 0.4 M parameters and a vocabulary of 2,048, and trains on 2.5 to 10 M tokens of technical",
        "documentation. The paper trains 0.6 B parameters on 156 B tokens of C4. The intervals are over seeds, and hold",
        "only for this text, tokenizer, optimizer and schedule.",
        "",
        "To ask the question at 124 M parameters, one GPU is enough:",
        "[`train_configs/sweeps/evidence_124m.toml`](../train_configs/sweeps/evidence_124m.toml) trains GPT-2 on 2.5 B tokens of",
        "C4, off and on with eight seeds each, after `evidence_124m_tuning.toml` has chosen a learning rate for each side. The",
        "plan predicts 42 hours on an H100 for both. Nobody has run it yet.",
        "",
        "## How to run it again",
        "",
        "```bash",
        "python -m benchmarks.corpus data/evidence",
        "make evidence JOBS=2         # all that is missing; PART=main trains one part",
        "```",
        "",
    ]
    return "\n".join(parts)


def write_page(rows: Sequence[Row], docs: Path) -> None:
    if _has_pictures(rows):
        draw(rows, docs)
    with atomic_write(docs / "evidence.md") as partial:
        partial.write_text(page(rows))
