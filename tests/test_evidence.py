"""Does it help?

The experiment's numbers on a model by hand, its analysis on made-up rows with known
answers, its page.
"""

import copy
import dataclasses
import functools
import json
import math
import re
import shutil
from collections import Counter
from unittest import mock

import numpy as np
import pytest
import tomli
import torch
from scipy import stats

from benchmarks import (
    corpus,
    evidence,
    evidence_analysis,
    evidence_page,
    evidence_parts,
)
from benchmarks.evidence_analysis import FAMILIES, outcomes, width_verdict
from benchmarks.evidence_page import FILTERS, PAGES, attempts, context, missing, pages
from benchmarks.evidence_parts import (
    PARTS,
    SECOND,
    SECOND_SEEDS,
    SEEDS,
    STATES,
    WIDTHS,
    Job,
    Recipe,
    jobs,
    tuned,
)
from benchmarks.evidence_score import (
    cosines,
    history,
    last_words,
    passage,
    token_losses,
    window,
)
from benchmarks.templates import FOLDER, Refused, render
from tests.command_line import ROOT
from tests.pages import can_start

PRIMARY = ("main", "on", "test")
RECORDED = [
    json.loads(line)
    for line in (ROOT / "docs" / "evidence.jsonl").read_text().splitlines()
]
TEMPLATE = "\n".join((FOLDER / f"{name}.j2").read_text() for name in PAGES)
FAILED = {"status": "failed", "error": "not finite"}
NO_DIFFERENCE = "no difference of 0.02 or more"


@pytest.fixture(autouse=True, scope="module")
def _pairs_are_compared_once():
    """Most pairs are the same on every page, and scipy's permutation test takes a
    while.
    """
    once = functools.cache(
        lambda own, other, paired=evidence_analysis.paired: paired(
            dict(own), dict(other)
        )
    )
    with mock.patch.object(
        evidence_analysis,
        "paired",
        lambda *both: once(*(tuple(one.items()) for one in both)),
    ):
        yield


def row(part, condition, seed, loss, text="test"):
    """A row like those of main, with another cross-entropy, which is also that of each
    source. It took half an hour.
    """
    like = next(one for one in RECORDED if one["part"] == "main")
    numbers = like["numbers"]["test"]
    numbers = {
        **numbers,
        "cross_entropy": loss,
        "by_source": dict.fromkeys(numbers["by_source"], loss),
    }
    run = {
        "part": part,
        "condition": condition,
        "seed": seed,
        "numbers": {text: numbers},
    }
    return {**like, **run, "history": {**like["history"], "seconds": {"steps": 1800.0}}}


def failed(part, condition, seed):
    return {
        k: v for k, v in row(part, condition, seed, 0).items() if k != "numbers"
    } | FAILED


def made_up(d, part="main", condition="on", seeds=SEEDS, text="test", off="off"):
    of_off = [row(part, off, s, 5 + s / 100, text) for s in seeds]
    return [
        *of_off,
        *(
            row(part, condition, s, 5 + s / 100 + x, text)
            for s, x in zip(seeds, d, strict=False)
        ),
    ]


def tuning_rows(best):
    """Development cross-entropy 5 at each state's best (lr, warm-up), and 6
    elsewhere.
    """
    return [
        row(
            "tuning",
            f"{state}_{Recipe(lr, warmup)}",
            seed,
            5 if (lr, warmup) == best[state] else 6,
            "development",
        )
        for state in STATES
        for lr in evidence_parts.ALL_LRS
        for warmup in evidence_parts.WARMUPS
        for seed in (101, 102)
    ]


INSIDE = {"off": (2e-3, 0.05), "on": (4e-3, 0.2)}


def width_rows(best, beyond=False, missing=""):
    """Development cross-entropy 5 at the best learning rate of each width and state,
    0.032 by default, and 6 elsewhere.
    """
    return [
        row(
            part,
            f"{name}_lr-{lr:g}",
            seed,
            5 if lr == best.get(name, 0.032) else 6,
            "development",
        )
        for part, widths in (("widths-tuning", (16, 192, 768)), ("long-tuning", (192,)))
        for name in (f"{state}-{width}" for state in STATES for width in widths)
        for lr in (0.016, 0.032, 0.064, *((0.008, 0.128) if beyond else ()))
        for seed in (101, 102)
        if f"{name}_lr-{lr:g}" != missing
    ]


def test_a_difference_is_what_scipy_makes_of_the_pairs():
    d = np.array([-0.11, -0.2, -0.05, -0.13, -0.31, -0.02, -0.08, -0.17])
    found = outcomes(made_up(d))[PRIMARY]
    theirs = stats.ttest_1samp(d, 0).confidence_interval()
    assert (found.mean, found.low, found.high) == pytest.approx(
        (d.mean(), theirs.low, theirs.high)
    )
    # all of one sign
    assert (found.p, found.lower, found.higher, found.sign) == (2 / 256, 8, 0, -1)
    d[5] = 0.02
    mixed = outcomes(made_up(d))[PRIMARY]
    assert (mixed.lower, mixed.higher) == (7, 1)


def test_holm_counts_a_family_that_is_not_run_yet_too():
    assert Counter(FAMILIES.values()) == {"main": 6, "": 2, "midtraining": 4}
    assert outcomes(made_up([-0.2, -0.1] * 4))[PRIMARY].holm == pytest.approx(
        6 * 2 / 256
    )
    rows = made_up([-0.2, -0.1] * 4, "midtraining", "on-0.1", text="new_test")
    assert outcomes(rows)["midtraining", "on-0.1", "new_test"].holm == pytest.approx(
        4 * 2 / 256
    )


def test_verdicts():
    for part, d, says in (
        ("main", [-0.2, -0.1] * 4, "better"),
        ("main", [0.1, 0.2] * 4, "worse"),
        ("main", [-0.1, 0.2] * 4, "undecided"),
        ("main", [-0.01, 0.01] * 4, NO_DIFFERENCE),
        ("main", [-0.011, -0.012] * 4, "better, by less than 0.02"),
        ("main", [-0.2, -0.1] * 3, "undecided (6 of 8 pairs)"),  # 2/64 × 6
        ("main", [], "not run"),
        ("main", [-0.1], "too few pairs (1 of 8)"),  # no interval of one pair
        ("long", [-0.1, -0.2, -0.1, -0.2], "better in all 4 seeds, too few for a test"),
        ("long", [-0.1, -0.2, -0.1, 0.2], "better in 3 of 4 seeds, undecided"),
        ("long", [-0.001, -0.002] * 2, f"{NO_DIFFERENCE} (lower in 4 of 4 seeds)"),
    ):
        rows = made_up(d, part, seeds=SEEDS if part == "main" else SEEDS[:4])
        assert outcomes(rows)[part, "on", "test"].verdict() == says


def widths(change, rates=(1, 1, 1), spread=0.01, seeds=SECOND_SEEDS):
    """On − off is 0.02 at the middle width (on the log scale) and ``change`` from end
    to end, ± ``spread`` by seed.
    """
    rows = []
    part = "widths-tuning"
    tuning = evidence_parts.TUNING_SEEDS
    for w in WIDTHS:
        place = math.log(w / WIDTHS[0]) / math.log(WIDTHS[-1] / WIDTHS[0]) - 0.5
        d = [0.02 + place * (change + spread * (-1) ** seed) for seed in seeds]
        rows += made_up(d, "widths", f"on-{w}", seeds, off=f"off-{w}")
        for lr, sign in zip(evidence_parts.WIDTH_LRS, rates, strict=True):
            rows += made_up(
                [sign * place] * 2,
                part,
                f"on-{w}_lr-{lr:g}",
                tuning,
                "development",
                f"off-{w}_lr-{lr:g}",
            )
    return rows


def test_the_change_over_widths_and_its_verdict():
    found, says = width_verdict(widths(0.04))
    assert (found.n, found.mean, found.p) == (8, pytest.approx(0.04), 2 / 2**8)
    assert says == "the difference depends on the width"
    assert width_verdict(widths(0.004, spread=0.004))[1] == "no change of 0.01 or more"
    assert (
        width_verdict(widths(0.04, rates=(1, 1, -1)))[1]
        == "undecided: depends on the learning rates chosen"
    )
    assert (
        width_verdict(widths(-0.01, spread=0.03))[1]
        == "undecided: a change of 0.037 is not excluded"
    )
    assert (
        width_verdict(widths(0.04, seeds=SECOND_SEEDS[:5]))[1] == "undecided: failures"
    )
    untuned = [one for one in widths(0.04) if "lr-0.064" not in one["condition"]]
    assert width_verdict(untuned)[1] == "undecided: failures"
    rows = [
        one for one in widths(0.04) if (one["condition"], one["seed"]) != ("on-768", 11)
    ]
    assert (
        width_verdict([*rows, failed("widths", "on-768", 11)])[1]
        == "undecided: failures"
    )
    assert (
        width_verdict(
            [*rows, failed("widths", "on-768", 11), failed("widths", "off-768", 12)]
        )[0].n
        == 6
    )


def test_failures_are_counted_and_do_not_help():
    rows = [
        r for r in made_up([-0.2, -0.1] * 4) if (r["condition"], r["seed"]) != ("on", 8)
    ]
    one = [*rows, failed("main", "on", 8)]
    found = outcomes(one)[PRIMARY]
    assert (found.failed, found.fails_more) == (("on seed 8",), True)
    assert (found.holm > 0.05, found.verdict()) == (True, "undecided (7 of 8 pairs)")
    assert not outcomes([*rows, failed("main", "off", 8)])[PRIMARY].fails_more
    assert attempts(one)["main comparison"] == {"number": 16, "failed": 1, "hours": 8.0}
    # Tried again: its last row counts
    again = outcomes([*one, row("main", "on", 8, 4.9)])[PRIMARY]
    assert (again.n, again.failed) == (8, ())
    worse = outcomes([*made_up([-0.2, -0.1] * 4), failed("main", "on", 9)])[PRIMARY]
    assert worse.verdict() == "undecided: lower, but more of its runs failed"
    width = [failed("width", condition, seed) for condition in STATES for seed in SEEDS]
    assert (
        outcomes(width)["width", "on", "test"].verdict()
        == "no pair has finished (16 runs failed)"
    )


def test_tuning_takes_each_state_s_best_and_looks_beyond_an_edge():
    assert tuned([]) == {}
    assert tuned(tuning_rows(INSIDE)) == {
        state: Recipe(*best) for state, best in INSIDE.items()
    }
    assert len(jobs("tuning", tuning_rows(INSIDE))) == len(jobs("tuning", [])) == 32
    edge = tuning_rows({"off": (8e-3, 0.2), "on": (4e-3, 0.05)})
    inside = [
        r
        for r in edge
        if "lr-0.016" not in r["condition"] and "lr-0.0005" not in r["condition"]
    ]
    assert tuned(inside) == {}
    beyond = {job.condition for job in jobs("tuning", inside)} - {
        job.condition for job in jobs("tuning", [])
    }
    assert beyond == {"off_lr-0.016_warmup-0.05", "off_lr-0.016_warmup-0.2"}
    assert tuned(edge)["off"] == Recipe(8e-3, 0.2)
    best = "on_lr-0.004_warmup-0.2"
    lost = [
        r | {"status": "failed"} if r["condition"] == best else r
        for r in tuning_rows(INSIDE)
    ]
    assert tuned(lost)["on"] != Recipe(4e-3, 0.2)


def test_the_parts_are_the_design_s():
    rows = [*tuning_rows(INSIDE), *width_rows({})]
    every = {part: jobs(part, rows) for part in PARTS}
    design = (ROOT / "docs" / "evidence_design.md").read_text()
    for part, found in every.items():
        number = sum(job.trained for job in found)
        assert re.search(rf"^\| {part} \|.*\| {number} \|$", design, re.MULTILINE), part
        assert all(
            ("development" in job.texts) == part.endswith("tuning") for job in found
        )
    keys = [job.key for found in every.values() for job in found]
    # 8 models on new text are of midtraining
    assert len(set(keys)) == len(keys) == 145 + 8 + 36 + 48 + 16 + 27 + 12 + 8
    recipes = Counter(
        job.recipe(ROOT / evidence_parts.CONFIG)
        for found in every.values()
        for job in found
    )
    # Noise's again is main's off
    assert Counter(recipes.values()) == {1: len(keys) - 2, 2: 1}
    assert jobs("main", []) == jobs("widths", []) == []


def test_a_width_takes_the_best_learning_rate_and_one_beyond_the_edge():
    best = {"off-16": 0.016, "on-768": 0.064}
    rows = width_rows(best)
    grid = evidence_parts.WIDTH_LRS
    lrs = {"off-16": (*grid, 0.008), "on-16": grid, "on-768": (*grid, 0.128)}
    assert {
        name: evidence_parts.learning_rates(rows, name, "widths-tuning") for name in lrs
    } == lrs
    # the one beyond is not run yet
    assert not best.keys() & {job.condition for job in jobs("widths", rows)}
    options = {
        job.name: job.options for job in jobs("widths", width_rows(best, beyond=True))
    }
    assert "--optimizer.lr=0.064" in options["on-768_seed-18"]
    assert len(jobs("widths", width_rows({}, missing="on-16_lr-0.032"))) == 40
    # within 0.01 of the best
    near = {"numbers": {"development": {"cross_entropy": 5.009}}}
    rows = [
        one | (near if "lr-0.016" in one["condition"] else {}) for one in width_rows({})
    ]
    assert evidence_parts.best_recipe(rows, "on-16", "widths-tuning", grid) == Recipe(
        0.016, 0.2
    )


@pytest.mark.slow
def test_jobs_are_configs_that_can_run(sample):
    rows = tuning_rows(INSIDE) + width_rows({})
    by_condition = ("main", "losses")
    every = {
        (part, job.condition * (part in by_condition)): job
        for part in PARTS
        for job in jobs(part, rows)
    }
    # main has six conditions, losses nine, and there are eleven other parts
    assert len(every) == 6 + 9 + 11
    for job in every.values():
        options = (*job.options, "--model.hf_assets_path", f"{sample}/tokenizer")
        config = can_start(job.ranks, ROOT / evidence_parts.CONFIG, *options)
        assert config.training.steps == {"midtraining": 200}.get(
            job.part, 2400 if "long" in job.part else 600
        )
        assert config.debug.seed == config.stream.seed == job.seed
        assert config.dispersion.enabled == (
            job.part == "losses" or job.condition.startswith("on")
        )


def test_the_readme_has_the_answer_of_the_rows():
    found = outcomes(RECORDED)
    readme = " ".join((ROOT / "README.md").read_text().split())
    main = found["main", "on", "test"]
    _, both = evidence_analysis.against_second_runs(RECORDED)
    new = evidence_analysis.second_experiment(RECORDED, evidence_analysis.loss("test"))[
        "192, all 16 new seeds"
    ]
    assert (
        f"worse with dispersion by {main.mean:.4f} nats (95 % interval "
        f"{main.low:.4f} to {main.high:.4f}, eight seeds), undecided once the runs "
        f"without it were repeated (p {both.p:.2f}), and with twice the learning rate "
        f"by {new.mean:.4f} ({new.low:.4f} to {new.high:.4f}, 16 seeds: undecided)"
    ) in readme
    assert (main.n, new.n) == (8, 16)
    assert new.low < 0 < new.high
    assert both.p > evidence_analysis.ALPHA


def test_the_demo_has_the_recipe_that_tuning_chose():
    recipes = tuned(RECORDED)
    assert recipes["on"] == recipes["off"]
    demo = tomli.loads((ROOT / "train_configs" / "demo_cpu.toml").read_text())
    assert demo["optimizer"]["lr"] == recipes["on"].lr
    assert (
        demo["lr_scheduler"]["warmup_steps"]
        == recipes["on"].warmup * demo["training"]["steps"]
    )


def test_rows_of_another_recipe_or_corpus_do_not_count():
    rows = RECORDED
    config = ROOT / evidence_parts.CONFIG
    assert evidence.current(rows, config) == rows
    one = next(row for row in rows if "condition" in row)
    again = {
        **one,
        "part": "restored",
        "of": [one["part"], one["condition"], one["seed"]],
    }
    for kept in ([], [again]):
        others = [(kept or [one])[0] | {key: "other"} for key in ("recipe", "corpus")]
        assert evidence.current([*rows, *kept, *others], config) == [*rows, *kept]
    other_corpus = {**rows[0], "sha256": "0" * 64}
    assert rows[0]["part"] == "corpus"
    assert evidence.current([*rows, other_corpus], config) == [rows[0], other_corpus]


def test_the_pages_in_docs_are_made_of_the_rows_in_docs():
    found = pages(evidence.current(RECORDED, ROOT / evidence_parts.CONFIG))
    assert {name: (ROOT / "docs" / name).read_text() for name in PAGES} == found
    assert len(found["evidence.md"].split()) <= 900  # a person reads it in five minutes
    assert found["evidence.md"].count("![") <= 4


@pytest.mark.slow
def test_the_second_experiment_is_on_the_pages_once_it_is_complete():
    rows = [one for one in RECORDED if one["part"] not in SECOND]
    rows += width_rows({"on-16": 0.008, "off-768": 0.064}, beyond=True)
    rows += [one for one in widths(0.04) if one["part"] == "widths"]
    again = [
        row("widths-again", f"{state}-192", seed, 5, "test")
        for state in STATES
        for seed in range(21, 29)
    ]
    assert "second" not in pages([*rows, *again[:-1]])["evidence.md"]
    rows += again
    page, tables = pages(rows).values()
    assert len(page.split()) <= 900
    assert "in two controlled experiments" in page
    assert (
        "with 16 other seeds, the difference is +0.0128 (+0.0058 … +0.0199), not within ±0.01.**"
        in page
    )
    assert "changes by +0.0400 (" in page
    assert "| 16 | on | 5.000 ± 0.000 |" in tables
    assert "| 0.008, at an edge | 0.0000 |" in tables
    assert "| 16 | on − off | -1.0000, -1.0000 |" in tables
    assert (
        "| 192, seeds 21 to 28 | 8 | 5.000 ± 0.000 | 5.000 ± 0.000 | +0.0000 |"
        in tables
    )
    assert "Other losses" not in tables
    rows += [
        row("losses", job.condition, job.seed, 5.11 + job.seed / 50)
        for job in jobs("losses", rows)
    ]
    rows += [
        row("long-tuned", f"{state}-192", seed, 5)
        for state in STATES
        for seed in range(11, 15)
    ]
    _, tables = pages(rows).values()
    # off of seed 11 is 5.11
    assert "| decorrelation@1 | +0.2200, +0.2300, +0.2400 | +0.2300 |" in tables
    assert "have a standard deviation of 0.0100 over the seeds" in tables
    assert "the standard errors of the means are 0.0058 and 0.0059." in tables
    assert "on − off is +0.0000 (" in tables
    # A gain at one width would contradict the first line.
    gain = [one for one in widths(-0.2) if one["part"] == "widths"]
    with pytest.raises(Refused, match="No gain was found"):
        pages([one for one in rows if one["part"] != "widths"] + gain)


def test_what_the_tie_rule_costs():
    """On of width 16 takes a rate that is 0.008 worse, so on − off is so much larger
    there, and grows less.
    """
    near = {"numbers": {"development": {"cross_entropy": 5.008}}}
    rows = [
        one | (near if one["condition"] == "on-16_lr-0.016" else {})
        for one in width_rows({})
    ]
    rows += [
        row("widths-tuning", "on-16_lr-0.008", seed, 6, "development")
        for seed in (101, 102)
    ]
    assert evidence_analysis.cost_of_ties(rows)["on-16"] == pytest.approx(0.008)
    x = np.log(WIDTHS)
    slope = np.polyfit(x, [0.008, 0, 0], 1)[0] * (x[-1] - x[0])
    assert evidence_analysis.shift_of_ties(rows) == pytest.approx(slope)


NOT_OF_THE_ROWS = r"evidence\.md\.j2|Qwen3|C4|GPT-2|H100|sha256|95 %|evidence_124m|44 hours|124 M parameters"
NOT_OF_THE_ROWS += r"|0\.6 B on 156 B tokens|-0\.6B after 156 B tokens|§5\.4|one seed, says a review|more than 0\.005"
NOT_OF_THE_ROWS += r"|\+1\.17 points of task accuracy|\+1\.07|34\.95 → 35\.61|three seeds, says the review"
NOT_OF_THE_ROWS += (
    r"|one of four that|-0\.6B|all three intervals|α = 1|has 1\.|#question-1"
)
NUMBER = r"\d|\b(three|four|five|six|seven|eight|nine|ten|twelve|tenth|half|twice as)\b"


def test_no_number_stands_outside_a_place():
    prose = re.sub(
        r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}|```.*?```", "", TEMPLATE, flags=re.S
    )
    prose += "\n".join(re.findall(r'"([^"]*)" \| holds', TEMPLATE))
    prose = re.sub(NOT_OF_THE_ROWS, "", prose)
    assert [line for line in prose.splitlines() if re.search(NUMBER, line)] == []


def moved(by, text="test"):
    def move(row):
        if own := row["numbers"].get(text):
            own["cross_entropy"] += by
            own["by_source"] = {name: ce + by for name, ce in own["by_source"].items()}

    return move


def late(row):
    row["history"]["plateau_end"] = row["numbers"]["test"]["cross_entropy"]


# Parts, and conditions by their beginnings, whose rows change so that claims of the
# page are no longer true.
TURNED = [
    ("main", "on", moved(-0.05)),
    ("main", "on", moved(0.05)),
    ("main", "on", lambda row: row["numbers"]["test"]["mean_cosine"].reverse()),
    ("main", "noisy-embedding", moved(0.1)),
    ("main", "off", late),
    ("main", "off", lambda row: row["numbers"]["test"].update(last_word=0.5)),
    ("tuning", "on", moved(1, "development")),
    ("tuning", ("off_lr-0.004", "on_lr-0.004"), moved(-1, "development")),
    ("width", "on", moved(0.1)),
    ("depth", "on", moved(-0.1)),
    ("long", "on", moved(-0.2)),
    ("midtraining", "off", moved(-1)),
    ("midtraining", "on", moved(0.1, "new_test")),
    ("widths-tuning", "on-192_lr-0.032", moved(1, "development")),
    ("widths-tuning", "on-16_lr-0.008", moved(1, "development")),
    ("corpus", "", lambda row: row["sizes"]["main"]["train"].update(tokens=10**6)),
    ("restored", "", moved(-0.1)),
    (
        "restored",
        "",
        lambda row: row["numbers"]["test"].update(
            mean_cosine=[0.1 * i for i in range(8)]
        ),
    ),
    ("restored", "", lambda row: row["history"].update(seconds={"steps": 224})),
]


@pytest.mark.slow
def test_the_page_is_refused_when_a_sign_has_turned():
    """Each claim of the template fails for one of the changes."""
    template = re.sub(r"\{#.*?#\}", "", TEMPLATE, flags=re.S)
    claims = re.findall(r'"([^"]*)" \| holds', template)
    assert len(claims) == template.count("holds(") >= 20
    turned = set()
    for part, condition, change in TURNED:
        rows = copy.deepcopy(RECORDED)
        for one in rows:
            if one["part"] == part and one.get("condition", "").startswith(condition):
                change(one)
        known = context(rows)
        for name in PAGES:
            try:
                render(f"{name}.j2", known, **FILTERS)
            except Refused as error:
                turned |= {claim for claim in claims if f'"{claim}"' in str(error)}
    assert turned == set(claims)


def test_a_page_is_refused_while_runs_are_missing_and_has_the_failed_ones():
    lacking = [
        one
        for one in RECORDED
        if (one["part"], one.get("condition"), one.get("seed")) != ("main", "on", 3)
    ]
    assert missing(lacking) == ["main: on_seed-3"]
    with pytest.raises(Refused, match=r"missing(.|\n)*main: on_seed-3"):
        pages(lacking)
    (untuned,) = missing([one for one in RECORDED if one["part"] != "tuning"])
    assert "tuning is not complete" in untuned
    text = pages([*RECORDED, failed("main", "on-moments", 3)])["evidence_tables.md"]
    assert "| main comparison | on, moments | 7 of 8 |" in text
    assert re.search(r"\| main comparison \| 49 \| 1 \| \d", text)
    assert "- failed: main on-moments seed 3: not finite\n" in text


class Bigrams(torch.nn.Module):
    n_layers = 1

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, tokens, return_activations=None):
        from titan_disp.models.decoder import Predictions

        logits = self.logits[tokens]
        if return_activations is None:
            return logits
        return Predictions(logits, [logits for _ in return_activations])


def test_numbers_of_a_model_against_plain_sums():
    torch.manual_seed(0)
    model = Bigrams(torch.randn(10, 10))
    windows = [
        torch.randint(0, 10, (n,)).tolist()
        for n in (2, 9, 5, 3, *(4 + i % 6 for i in range(30)))
    ]
    sums, right, number = token_losses(model, windows)
    p = np.exp(model.logits.double().numpy())
    p /= p.sum(1, keepdims=True)
    for i, ids in enumerate(windows):
        assert number[i] == len(ids) - 1
        assert sums[i] == pytest.approx(
            -sum(np.log(p[a, b]) for a, b in zip(ids, ids[1:], strict=False)), rel=1e-5
        )
        assert right[i] == sum(
            p[a].argmax() == b for a, b in zip(ids, ids[1:], strict=False)
        )
    best = p.argmax(1)
    chain = [3, int(best[3]), int(best[best[3]])]
    wrong = [int(best[3]), (chain[2] + 1) % 10]
    assert (
        last_words(model, [([1, 2, 3], chain[1:]), ([3], chain[1:2]), ([1, 3], wrong)])
        == 2
    )
    unit = model.logits.double().numpy()
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    long = [ids for ids in windows if len(ids) > 5]
    expected = np.mean([(unit[ids[:5]] @ unit[ids[:5]].T).mean() for ids in long])
    assert cosines(model, windows, 5) == pytest.approx([expected] * 3, abs=2e-5)


def test_windows_and_last_words():
    def encode(text):
        return [len(word) for word in text.split()]

    assert window("one two three", encode, 0, 8) == [3, 3, 5, 0]
    long = " ".join("x" * (i % 50 + 1) for i in range(300))
    found = window(long, encode, 0, 16)
    every = [*encode(long), 0]
    assert any(every[i : i + 17] == found for i in range(len(every) - 16))
    others = {tuple(window(f"{long} {'y' * i}", encode, 0, 16)) for i in range(1, 20)}
    assert len(others) > 10  # the text decides the place
    words = " ".join(["word"] * 25)
    assert passage(
        f"Short one.\n\n{words}\n\n{words} at the end.\n\nother", encode, 256
    ) == ([4] * 25 + [2, 3], [3])
    assert passage(f"{words} at the end.", encode, 8) == ([4, 4, 4, 4, 4, 2, 3], [3])
    assert (
        passage(f"{words} in 1999.", encode, 256)
        is passage(f"{words} at\nthe.", encode, 256)
        is None
    )


def test_history_of_a_run(tmp_path):
    losses = {5: 7.0, 10: 6.0, 15: 5.9, 20: 6.1}
    lines = [
        {"step": step, "time": 1, "ce": ce, "tokens": step * 10}
        for step, ce in losses.items()
    ]
    for step, cosine in ((0, 0.0), (10, 0.8), (30, 0.4)):
        # the embedding and the final norm are no blocks
        layers = [0.5, cosine - 0.05, cosine + 0.05, 0.9]
        lines.append(
            {
                "step": step,
                "time": 1,
                "condensation": {"mean_cosine": layers, "cross_entropy": 6.12341},
            }
        )
    events = [
        {"step": 9, "spent": {"steps": 2.0}},
        {"step": 20, "spent": {"steps": 3.5, "start_up": 1}},
    ]
    stop = {"event": "stop", "time": "2026-01-01T00:00:00+00:00"}
    for file, rows in (
        ("metrics", lines),
        ("events", [stop | event for event in events]),
    ):
        (tmp_path / f"{file}.jsonl").write_text(
            "".join(json.dumps(one) + "\n" for one in rows)
        )
    found = history(tmp_path)
    assert found["plateau_end"] == 15
    # (0 + 0.8)/2 · 10 + (0.8 + 0.4)/2 · 20 = 16, over 30 steps
    assert found["block_cosine"] == pytest.approx(16 / 30, abs=1e-5)
    assert found["seconds"] == {"steps": 5.5, "start_up": 1}
    assert (found["steps"], found["cross_entropy"], found["tokens"]) == (
        [0, 10, 30],
        [6.1234, 6.1234, 6.1234],
        200,
    )


def test_a_job_is_known_by_what_decides_it(tmp_path):
    config = tmp_path / "a.toml"
    config.write_text("# one\n[training]\nsteps = 3\n")
    job = Job("main", "on", 1, ("--a=1",))
    before = job.recipe(config)
    config.write_text("[training]\nsteps = 3   # the same\n")
    assert job.recipe(config) == before
    for change in (
        {"options": ("--a=2",)},
        {"ranks": 2},
        {"begins": "x"},
        {"texts": ("new_test",)},
    ):
        assert dataclasses.replace(job, **change).recipe(config) != before
    config.write_text("[training]\nsteps = 4\n")
    assert job.recipe(config) != before


@pytest.mark.night
def test_an_experiment_from_its_runs_to_its_page(tmp_path, sample, monkeypatch):
    from titan_disp.run.reader import read_condensation

    corpus.main(corpus.Options(tmp_path / "data", folder=sample / "en", held_out=80))
    (tmp_path / "data" / "held_back").mkdir()
    for part in ("en", "test"):
        (tmp_path / "data" / "held_back" / part).symlink_to(tmp_path / "data" / part)
    smaller = {
        "SEEDS": (1,),
        "TUNING_SEEDS": (101,),
        "LRS": (2e-3,),
        "WARMUPS": (0.2,),
        "STEPS": 5,
        "MIDTRAINING": 3,
    }
    for name, value in smaller.items():
        for module in (evidence_parts, evidence, evidence_analysis, evidence_page):
            monkeypatch.setattr(module, name, value, raising=module is evidence_parts)
    every = evidence_parts.jobs
    few = ("off", "on", "on-0.5", "before", "on-moments")

    def chosen(part, rows):
        # which makes it infinite
        broken = ("--optimizer.lr=1e30", "--guard.max_skipped_steps=1")
        found = [
            job for job in every(part, rows) if job.condition.partition("_")[0] in few
        ]
        return [
            dataclasses.replace(j, options=j.options + broken)
            if j.condition == "on-moments"
            else j
            for j in found
        ]

    monkeypatch.setattr(evidence, "jobs", chosen)
    file = tmp_path / "rows.jsonl"
    runs = tmp_path / "runs"
    options = evidence.Options(
        part="tuning,main", data=tmp_path / "data", runs=runs, rows=file, docs=tmp_path
    )
    evidence.main(options)
    # as after a fresh clone, which has rows without models
    shutil.rmtree(runs / "main" / "off_seed-1")
    evidence.main(dataclasses.replace(options, part="midtraining"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert Counter(r["part"] for r in rows) == {
        "corpus": 1,
        "tuning": 4,
        "main": 3,
        "restored": 1,
        "midtraining": 3,
    }
    by_job = {(r["part"], r.get("condition")): r for r in rows}
    again = by_job["restored", None]
    on = by_job["main", "on"]
    run = runs / "main" / "on_seed-1"
    assert again["of"] == ["main", "off", 1]
    # one machine, one core: the same sums
    assert again["numbers"] == by_job["main", "off"]["numbers"]
    # Most runs of the design are missing
    assert not (tmp_path / "evidence.md").exists()
    measured = read_condensation(run)
    test = on["numbers"]["test"]
    assert on["history"]["steps"] == list(measured) == [0, 5]
    assert on["history"]["cross_entropy"][-1] == pytest.approx(
        measured[5]["cross_entropy"], abs=1e-4
    )
    # other text, the same model
    assert test["cross_entropy"] == pytest.approx(measured[5]["cross_entropy"], abs=0.5)
    assert set(by_job["midtraining", "on-0.5"]["numbers"]) == {"test", "new_test"}
    assert [r["condition"] for r in evidence_analysis.failures(rows)] == ["on-moments"]
    evidence.main(dataclasses.replace(options, part="tuning,midtraining"))
    assert len(file.read_text().splitlines()) == len(rows)
