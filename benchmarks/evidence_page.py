"""Write docs/evidence.md from docs/evidence.jsonl."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.evidence_analysis import (
    CONTRASTS,
    LONG,
    PRIMARY,
    Contrast,
    Outcome,
    outcomes,
)
from benchmarks.evidence_details import against_second_runs
from benchmarks.evidence_parts import SEEDS, Row
from benchmarks.evidence_plots import draw
from benchmarks.evidence_sentences import sentences
from benchmarks.evidence_tables import (
    HEADER,
    SECONDARY,
    WHERE,
    attempts,
    by_source,
    contrast_rows,
    corpus_table,
    cosines,
    noise_table,
    related_to_condensation,
    restored_models,
    secondary_rows,
    table,
    tuning_tables,
)
from benchmarks.evidence_words import answer
from titan_disp.files import atomic_write

SHORT = """The model is the nano Qwen3 (0.4 M parameters, 6 layers, width 64), trained from scratch on 2.5 M tokens of Debian's
documentation, of which none is seen twice (9.8 M tokens in the part of 2,400 steps). Then its cross-entropy is measured
on other documents of the same packages. Off and on have the learning rate and warm-up that were best for each of them
on a third text. Two runs with the same seed begin with the same weights and read the same data, so that differences
are taken seed by seed.

| condition | what it is |
|---|---|
| off | cross-entropy alone |
| on, λ 0.1 | with the dispersion loss over all pairs of tokens, in all layers; this λ is the paper's |
| on, λ 0.03 | the same with a smaller weight |
| on in the first quarter | λ goes from 0.1 to 0 in the first 150 steps |
| on, moments | λ 0.1 with the cheaper *moments* estimator ([loss.md](loss.md)) |
| noisy embedding | no dispersion, but noise on the embeddings (NEFTune, α = 5), one of the paper's baselines |
"""


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
        "This page asks whether the dispersion loss lowers the cross-entropy of text that a small model has not seen.",
        "",
        answer(found[PRIMARY], against_second_runs(rows), found[LONG]),
        "",
        "`make evidence` writes this page from [evidence.jsonl](evidence.jsonl), which has one row per run. Question, outcomes",
        "and rules were fixed before the main runs: [evidence_design.md](evidence_design.md), which marks what was added later.",
        "Numbers are cross-entropy on held-out text in nats, mean ± standard error over seeds. Differences are condition − off,",
        "paired by seed; below zero is better.",
        "",
        "## The experiment in short",
        "",
        SHORT,
        *_says(rows, found),
        "## Main comparison",
        "",
        *table(["", *HEADER], contrast_rows(found, main, "where")),
        "*Lower in* counts the seeds in which the condition has the lower cross-entropy. p is from the exact sign-flip test, and "
        f"Holm's method adjusts it for the {len(main)} contrasts. With {len(SEEDS)} seeds p is at least "
        f"{2 / 2 ** len(SEEDS):.4f}. A contrast that has not been run counts as p = 1.",
        "",
        *_pictures(
            rows,
            "![Difference of cross-entropy over tokens](evidence_loss.png)",
            "The curves are the difference during training, in the 95 % interval over seeds. Their text is only 4,112 tokens of "
            "one page of the dictionary, so they may differ from the table, whose text is the whole test split. Each run has a "
            "learning rate that falls to a tenth at its own end, so the long runs cannot be compared with the others midway.",
        ),
        *by_source(rows),
        "## Depth and length",
        "",
        *table(["", *HEADER], contrast_rows(found, few, "where")),
        "Four seeds cannot reach p < 0.05 in the sign-flip test.",
        "",
        "## Condensation, plateau and accuracy",
        "",
        "The *mean cosine* is over all pairs of tokens in a sequence: 1 means that all tokens point in the same direction. The",
        "*block cosine over time* is its mean over the blocks and over training. The *plateau* ends at the first logged step at",
        "which the training loss is below 6.0. *Accuracy* is the fraction of test tokens that the model ranks first.",
        "",
        *table(SECONDARY, [cells for part in WHERE for cells in secondary_rows(rows, part)]),
        *_pictures(
            rows,
            "The maps, and the cosine over time in the table and below, are measured on the same page as the curves. The last "
            "word is right in a few of 600 paragraphs, which tells nothing at this size.",
            "![Cosines by layer over the steps](evidence_cosine.png)",
            "![Difference against condensation without dispersion](evidence_baseline.png)",
            related_to_condensation(rows),
        ),
        "## Mid-training",
        "",
        "The models of off are trained further on a package that was held back, dict-foldoc, with dispersion off and on. *Old",
        "text* is the test text of the main comparison, and *new text* is that of the held-back package. Training lasts 200",
        "steps (0.8 M tokens), with a tenth of off's learning rate, 20 % warm-up and a cosine to 0. No recipe was tuned for",
        "it, for either λ.",
        "",
        *table(["text", *HEADER], contrast_rows(found, mid, "text")),
        *restored_models(rows),
        *cosines(rows),
        *tuning_tables(rows),
        *noise_table(rows),
        *attempts(rows),
        *corpus_table(rows),
        "## What this cannot say",
        "",
        "The model has 0.4 M parameters and a vocabulary of 2,048, and trains on 2.5 to 10 M tokens of technical",
        "documentation. The paper trains 0.6 B parameters on 156 B tokens of C4. In larger models the cosine grows with depth",
        "(paper), which the model here hardly shows. The intervals are over seeds, and hold only for this text, tokenizer,",
        "optimizer and schedule.",
        "",
        "To ask the question at 124 M parameters, one GPU is enough:",
        "[`train_configs/sweeps/evidence_124m.toml`](../train_configs/sweeps/evidence_124m.toml) trains GPT-2 on 2.5 B tokens of",
        "C4, off and on with eight seeds each, after `evidence_124m_tuning.toml` has been used to choose a learning rate for",
        "each side. The plan predicts 42 hours on an H100 for both sweeps together. Nobody has run them yet.",
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
