"""Does it help? The experiment's numbers on a model by hand, its analysis on made-up rows with known answers, its page."""

import copy
import dataclasses
import itertools
import json
import re
import shutil
from collections import Counter

import numpy as np
import pytest
import tomli
import torch
from scipy import stats

from benchmarks import evidence_analysis, evidence_page, evidence_parts
from benchmarks.evidence import current
from benchmarks.evidence_analysis import (
    FAMILIES,
    against_second_runs,
    by_learning_rate,
    condensation_and_difference,
    curve_differences,
    interval,
    lasting,
    noise,
    outcomes,
    paired,
    plateau_and_loss,
    restored,
    token_shares,
)
from benchmarks.evidence_page import attempts, extremes, missing, numbers, page, seconds, signed
from benchmarks.evidence_parts import LRS, PARTS, SEEDS, STATES, WARMUPS, Job, Recipe, jobs, tuned
from benchmarks.evidence_score import cosines, history, last_words, passage, token_losses, window
from benchmarks.templates import FOLDER, Refused
from tests.command_line import ROOT

PRIMARY = ("main", "on", "test")
RECORDED = [json.loads(line) for line in (ROOT / "docs" / "evidence.jsonl").read_text().splitlines()]
TEMPLATE = (FOLDER / "evidence.md.j2").read_text()
STEPS = [0, 20, 40]


def row(part, condition, seed, loss, text="test", **more):
    numbers = {"cross_entropy": loss, "accuracy": 0.2 - loss / 100, "last_word": 0.1}
    numbers |= {"by_source": {"a": loss - 1, "b": loss + 1}, "mean_cosine": [0.1, 0.2, 0.3, 0.4]}
    own = {"steps": STEPS, "cross_entropy": [8.0, 6.5, loss], "mean_cosine": [[0.1, 0.2, 0.3, 0.4]] * 3, "tokens": 4000}
    own |= {"plateau_end": 20, "block_cosine": 0.5, "seconds": {"steps": 1800.0}}
    common = {
        "part": part,
        "condition": condition,
        "seed": seed,
        "status": "finished",
        "recipe": "r",
        "commit": "c",
        "corpus": "d",
    }
    return {**common, "numbers": {text: numbers}, "history": {**own, **more}}


def made_up(d, part="main", condition="on", seeds=SEEDS, text="test"):
    """Off is 5 + seed/100; the condition is that and the difference."""
    off = [row(part, "off", s, 5 + s / 100, text) for s in seeds]
    return [*off, *(row(part, condition, s, 5 + s / 100 + x, text) for s, x in zip(seeds, d, strict=False))]


def tuning_rows(best):
    """Development cross-entropy 5 at each state's best (lr, warm-up), and 6 elsewhere."""
    return [
        row("tuning", f"{state}_{Recipe(lr, warmup)}", seed, 5 if (lr, warmup) == best[state] else 6, "development")
        for state in STATES
        for lr in (*LRS, LRS[0] / 2, LRS[-1] * 2)
        for warmup in WARMUPS
        for seed in (101, 102)
    ]


INSIDE = {"off": (2e-3, 0.05), "on": (4e-3, 0.2)}


def flip_p(d):
    signs = np.array(list(itertools.product((1, -1), repeat=len(d))))
    return np.mean(np.abs(signs @ d) >= abs(d.sum()) - 1e-12)


def test_a_difference_is_what_scipy_and_all_sign_patterns_make_of_the_pairs():
    d = np.array([-0.11, -0.2, -0.05, -0.13, -0.31, -0.02, -0.08, -0.17])
    found = outcomes(made_up(d))[PRIMARY]
    half = stats.t.ppf(0.975, 7) * d.std(ddof=1) / np.sqrt(8)
    assert (found.mean, found.low, found.high) == pytest.approx((d.mean(), d.mean() - half, d.mean() + half))
    assert (found.p, found.lower, found.higher, found.sign) == (2 / 256, 8, 0, -1)  # all of one sign
    d[5] = 0.02
    mixed = outcomes(made_up(d))[PRIMARY]
    assert mixed.p == pytest.approx(flip_p(d))
    assert (mixed.lower, mixed.higher) == (7, 1)


def test_holm_counts_a_family_that_is_not_run_yet_too():
    """Six contrasts: 2/256 × 6 = 0.047 for one that all seeds agree on."""
    assert Counter(FAMILIES.values()) == {"main": 6, "": 2, "midtraining": 4}
    found = outcomes(made_up([-0.2, -0.1] * 4))
    assert found[PRIMARY].holm == pytest.approx(6 * 2 / 256)
    assert found[PRIMARY].verdict() == "better"
    assert found["main", "on-0.03", "test"].verdict() == "not run"
    rows = made_up([-0.2, -0.1] * 4, "midtraining", "on-0.1", text="new_test")
    assert outcomes(rows)["midtraining", "on-0.1", "new_test"].holm == pytest.approx(4 * 2 / 256)


@pytest.mark.parametrize(
    ("d", "says"),
    [
        ([0.1, 0.2] * 4, "worse"),
        ([-0.1, 0.2] * 4, "undecided"),
        ([-0.01, 0.01] * 4, "no difference of 0.02 or more"),
        ([-0.011, -0.012] * 4, "no difference of 0.02 or more; the direction is significant after Holm's adjustment"),
        ([-0.2, -0.1] * 3, "undecided (6 of 8 pairs)"),  # 2/64 × 6
        ([], "not run"),
        ([-0.1], "too few pairs (1 of 8)"),  # no interval of one pair
    ],
)
def test_verdicts(d, says):
    assert outcomes(made_up(d))[PRIMARY].verdict() == says


def test_verdicts_of_four_seeds():
    def verdict(d):
        return outcomes(made_up(d, "long", seeds=SEEDS[:4]))["long", "on", "test"].verdict()

    assert verdict([-0.1, -0.2, -0.1, -0.2]) == "better in all 4 seeds, too few for a test"
    assert verdict([-0.1, -0.2, -0.1, 0.2]) == "better in 3 of 4 seeds, undecided"
    assert verdict([-0.001, 0.002, -0.001, 0.0]) == "no difference of 0.02 or more"
    assert verdict([-0.001, -0.002] * 2) == "no difference of 0.02 or more (lower in 4 of 4 seeds)"


def test_failures_are_counted_and_do_not_help():
    rows = [r for r in made_up([-0.2, -0.1] * 4) if (r["condition"], r["seed"]) != ("on", 8)]
    failed = {
        "part": "main",
        "condition": "on",
        "seed": 8,
        "status": "failed",
        "error": "not finite",
        "recipe": "r",
        "commit": "c",
    }
    found = outcomes([*rows, failed])[PRIMARY]
    assert found.failed == ("on seed 8",)
    assert found.holm > 0.05
    assert found.verdict() == "undecided (7 of 8 pairs)"
    assert found.fails_more
    assert not outcomes([*rows, {**failed, "condition": "off"}])[PRIMARY].fails_more
    assert attempts([*rows, failed])["main comparison"] == {"number": 16, "failed": 1, "hours": 7.5}
    again = outcomes([*rows, failed, row("main", "on", 8, 4.9)])[PRIMARY]  # tried again: its last row counts
    assert again.n == 8
    assert again.failed == ()
    worse = outcomes([*made_up([-0.2, -0.1] * 4), {**failed, "seed": 9}])[PRIMARY]
    assert worse.verdict() == "undecided: lower, but more of its runs failed"
    width = [{**failed, "part": "width", "condition": c, "seed": s} for c in STATES for s in SEEDS]
    assert outcomes(width)["width", "on", "test"].verdict() == "no pair has finished (16 runs failed)"


def test_noise_and_plateau():
    rows = [*made_up([0.0] * 8), row("noise", "2-ranks", 3, 5.05), row("noise", "2-ranks", 9, 5.05)]
    assert noise(rows)["2-ranks"] == {3: pytest.approx(0.02)}
    ends = {1: 90, 2: 60, 3: 70, 4: 30}
    rows = [row("main", "off", s, 5 + end / 1000, plateau_end=end) for s, end in ends.items()]
    assert plateau_and_loss(rows, "main", "off") == (pytest.approx(1.0), 4)
    assert plateau_and_loss(rows[:3], "main", "off") is None


def trained_again(seeds_and_losses):
    return [
        {"part": "restored", "of": ["main", "off", s], "numbers": row("main", "off", s, loss)["numbers"]}
        | {"history": {"seconds": {"steps": 2000.0}}}
        for s, loss in seeds_and_losses
    ]


def test_models_that_were_trained_again_are_compared_with_the_first_ones():
    d = np.array([0.016, 0.006, 0.004, 0.005, 0.021, 0.024, 0.020, 0.002])
    moved = np.array([0.03, 0.0, 0.01, 0.0, 0.0, -0.01, 0.0, 0.0])
    rows = made_up(d)
    again = [*rows, *trained_again((s, 5 + s / 100 + x) for s, x in zip(SEEDS, moved, strict=True))]
    assert restored(again) == pytest.approx(moved)
    assert outcomes(again) == outcomes(rows)
    found = against_second_runs(again)
    assert found.mean == pytest.approx(np.mean(d - moved))
    assert (found.low, found.high) == pytest.approx(tuple(stats.ttest_1samp(d - moved, 0).confidence_interval()))
    assert (found.higher, found.p) == (6, pytest.approx(flip_p(d - moved)))
    assert (seconds(again, "restored"), seconds(again, "main", "off")) == (2000, 1800)
    assert attempts(again)["main comparison's off, trained again for mid-training"]["number"] == 8
    assert (restored(rows), against_second_runs(rows).n) == ([], 0)


def test_curves_are_paired_by_seed():
    rows = made_up([-0.2, -0.1, 0.3], seeds=SEEDS[:3])
    steps, tokens, d = curve_differences(rows, "main")
    assert (steps, tokens) == (STEPS, [0, 2000, 4000])
    np.testing.assert_allclose(d, [[0, 0, -0.2], [0, 0, -0.1], [0, 0, 0.3]], atol=1e-12)
    low, high = interval(d)
    expected = stats.t.interval(0.95, 2, loc=0, scale=stats.sem(d[:, 2]))
    assert (low[2], high[2]) == pytest.approx(expected)
    rows[-1]["history"]["cross_entropy"][1] += 0.3
    found = extremes(rows, "main")
    assert found["highest"].startswith("+0.100 at step 20 (95 % interval ")
    assert found["lowest"] == found["end"] == f"+0.000 at step 40 (95 % interval {low[2]:+.3f} … {high[2]:+.3f})"


def test_tuning_takes_each_state_s_best_and_looks_beyond_an_edge():
    assert tuned([]) is None
    assert tuned(tuning_rows(INSIDE)) == {"off": Recipe(2e-3, 0.05), "on": Recipe(4e-3, 0.2)}
    assert len(jobs("tuning", tuning_rows(INSIDE))) == len(jobs("tuning", [])) == 32
    edge = tuning_rows({"off": (8e-3, 0.2), "on": (4e-3, 0.05)})
    inside = [r for r in edge if "lr-0.016" not in r["condition"] and "lr-0.0005" not in r["condition"]]
    assert tuned(inside) is None
    beyond = [job for job in jobs("tuning", inside) if "lr-0.016" in job.condition]
    assert {job.condition for job in beyond} == {"off_lr-0.016_warmup-0.05", "off_lr-0.016_warmup-0.2"}
    assert len(jobs("tuning", inside)) == 36
    assert tuned(edge)["off"] == Recipe(8e-3, 0.2)
    failed = [
        {**r, "status": "failed"} if r["condition"] == "on_lr-0.004_warmup-0.2" else r for r in tuning_rows(INSIDE)
    ]
    assert tuned(failed)["on"] != Recipe(4e-3, 0.2)


def test_the_parts_are_the_design_s():
    rows = tuning_rows(INSIDE)
    every = {part: jobs(part, rows) for part in PARTS}
    assert {part: len(found) for part, found in every.items()} == {
        **{"tuning": 32, "main": 48, "noise": 9, "width": 16, "depth": 8, "long": 8},
        **{"midtraining": 24 + 8},  # and the models that it begins from, on new text
    }
    design = (ROOT / "docs" / "evidence_design.md").read_text()
    for part, found in every.items():
        number = sum(job.trained for job in found)
        assert f"| {number} |\n" in next(line + "\n" for line in design.splitlines() if line.startswith(f"| {part} |"))
    keys = [job.key for found in every.values() for job in found]
    assert len(set(keys)) == len(keys)
    recipes = Counter(job.recipe(ROOT / evidence_parts.CONFIG) for found in every.values() for job in found)
    assert Counter(recipes.values()) == {1: len(keys) - 2, 2: 1}  # noise's again is main's off
    for job in every["main"]:
        state = "on" if job.condition.startswith("on") else "off"
        lr, warmup = INSIDE[state]
        assert f"--optimizer.lr={lr:g}" in job.options
        assert f"--lr_scheduler.warmup_steps={warmup * 600:.0f}" in job.options
        assert {f"--debug.seed={job.seed}", f"--stream.seed={job.seed}"} <= set(job.options)
        assert ("--dispersion.enabled" in job.options) == (state == "on")
    assert "--lr_scheduler.warmup_steps=120" in next(j for j in every["long"] if j.condition == "off").options
    assert all("development" not in job.texts for part in PARTS if part != "tuning" for job in every[part])
    assert all(job.texts == ("development",) for job in every["tuning"])
    assert jobs("main", []) == []


def test_jobs_are_configs_that_can_run(sample):
    """TorchTitan's own reading of the options of one job of each kind."""
    from titan_disp.config.checks import check_config
    from titan_disp.config.load import load_config

    rows = tuning_rows(INSIDE)
    every = {(job.part, job.condition): job for part in PARTS for job in jobs(part, rows) if job.seed in (1, 101)}
    chosen = [("main", name) for _, name in every if _ == "main"]
    chosen += [
        ("noise", "2-ranks"),
        ("width", "on"),
        ("depth", "off"),
        ("midtraining", "on-0.5"),
        ("tuning", "on_lr-0.008_warmup-0.2"),
    ]
    assert len(chosen) == 11
    for part, condition in chosen:
        job = every[part, condition]
        argv = ["--job.config_file", str(ROOT / evidence_parts.CONFIG), *job.options]
        config = load_config([*argv, "--model.hf_assets_path", f"{sample}/tokenizer"])
        check_config(config, job.ranks)
        assert config.training.steps == (200 if part == "midtraining" else 600)
        assert config.debug.seed == config.stream.seed == job.seed
        assert config.dispersion.enabled == condition.startswith("on")


@pytest.mark.parametrize(
    ("d", "says"),
    [
        ([0.012, 0.013, 0.011, 0.012], "+0.012 (95 % interval +0.011 … +0.013; higher in 4 of 4 seeds)"),
        ([0.0003, 0.0004, 0.0003, 0.0002], "+0.0003 (95 % interval +0.0002 … +0.0004; higher in 4 of 4 seeds)"),
        ([-0.01533, -0.00467] * 2, "-0.0100 (95 % interval -0.0198 … -0.0002; lower in 4 of 4 seeds)"),
        ([0.0, 0.0, 0.0, 0.0], "+0.000 (95 % interval +0.000 … +0.000; higher in 0 of 4 seeds)"),
    ],
)
def test_a_fourth_digit_where_three_hide_the_sign(d, says):
    own = {s: 5 + x for s, x in enumerate(d)}
    assert signed(paired(own, dict.fromkeys(own, 5.0))) == says


def test_whether_a_difference_lasts_is_asked_of_the_same_seeds():
    main, long = [0.01, 0.02, 0.03, 0.02, 0.02, 0.01, 0.03, 0.02], [0.09, 0.08, 0.12, 0.11]
    rows = [*made_up(main), *made_up(long, "long", seeds=SEEDS[:4])]
    for found, d in zip(lasting(rows), (main[:4], long, np.subtract(long, main[:4])), strict=True):
        assert found.n == 4
        assert (found.mean, found.sign) == (pytest.approx(np.mean(d)), 1)
        assert (found.low, found.high) == pytest.approx(tuple(stats.ttest_1samp(d, 0).confidence_interval()))
    assert [found.n for found in lasting(rows[:-1])] == [3, 3, 3]


def test_on_minus_off_by_learning_rate():
    """Off is best at 0.002 and on at 0.004, each at one of two warm-ups; of the rest, both are equal."""
    found = by_learning_rate(tuning_rows(INSIDE))
    assert {lr: round(of["difference"], 6) for lr, of in found.items()} == {
        **{5e-4: 0, 1e-3: 0, 2e-3: 0.5, 4e-3: -0.5, 8e-3: 0, 1.6e-2: 0},
    }
    assert (found[2e-3]["off"], found[2e-3]["on"]) == (5.5, 6)
    lacking = [r for r in tuning_rows(INSIDE) if not r["condition"].startswith("on_lr-0.004")]
    failed = [r | {"status": "failed"} if "lr-0.008" in r["condition"] else r for r in lacking]
    assert list(by_learning_rate(failed)) == [5e-4, 1e-3, 2e-3, 1.6e-2]


def test_condensation_without_dispersion_is_paired_with_the_difference():
    rows = made_up([0.01, 0.02, 0.03, 0.04], "depth", seeds=SEEDS[:4])
    for one, cosine in zip(rows, (0.1, 0.2, 0.3, 0.4), strict=False):  # off's
        one["history"]["block_cosine"] = cosine
    expected = [(0.1, 0.01), (0.2, 0.02), (0.3, 0.03), (0.4, 0.04)]
    assert np.array(condensation_and_difference(rows, "depth")) == pytest.approx(np.array(expected))


def test_mid_training_is_told_before_and_after_on_both_texts():
    rows = made_up([0.0] * 8)
    rows += [row("midtraining", "before", s, 6 + s / 100, "new_test") for s in SEEDS]
    for s in SEEDS:
        one = row("midtraining", "off", s, 5.2 + s / 100)
        one["numbers"] |= row("midtraining", "off", s, 4 + s / 100, "new_test")["numbers"]
        one["numbers"]["new_test"]["mean_cosine"] = [0.1, 0.4, 0.5, 0.4]
        rows.append(one)
    assert [numbers(rows, "test", name)["cross_entropy"] for name in ("before", "off")] == pytest.approx([5.045, 5.245])
    assert [numbers(rows, "new_test", name)["cross_entropy"] for name in ("before", "off")] == pytest.approx(
        [6.045, 4.045]
    )
    assert numbers(rows, "new_test", "off")["blocks"] == pytest.approx(0.45)  # without the embedding and the final norm
    rows += trained_again([(1, 5.81)])  # mid-training began from this model
    assert numbers(rows, "test", "before")["cross_entropy"] == pytest.approx(5.145)


def test_the_shares_of_the_sources_are_those_of_the_tokens():
    """Of rows with known shares; and the recorded rows' shares give each row's cross-entropy back."""
    rng = np.random.default_rng(0)
    shares = np.array([0.5, 0.3, 0.2])
    made = []
    for seed in range(8):
        own = rng.normal(4, 0.1, 3)
        one = row("main", "on", seed, float(own @ shares))
        one["numbers"]["test"]["by_source"] = dict(zip("abc", own.tolist(), strict=True))
        made.append(one)
    assert token_shares(made) == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2})
    assert token_shares(made[:2]) is None
    assert token_shares([]) is None
    found = token_shares(RECORDED)
    for one in RECORDED:
        if "test" in one.get("numbers", {}):
            test = one["numbers"]["test"]
            assert sum(found[name] * ce for name, ce in test["by_source"].items()) == pytest.approx(
                test["cross_entropy"], abs=2e-5
            )


def test_the_readme_has_the_answer_of_the_rows():
    found, readme = outcomes(RECORDED), (ROOT / "README.md").read_text()
    d = found[PRIMARY]
    word = "higher" if d.mean > 0 else "lower"
    assert f"is {abs(d.mean):.3f} nats {word} with dispersion (95 % interval {d.low:.4f} to {d.high:.4f}" in readme
    d = found["long", "on", "test"]
    assert d.n == 4
    assert d.mean > 0
    said = f"With four times the steps, four seeds and no new tuning, it is {d.mean:.3f} higher ({d.low:.3f} to {d.high:.3f})"
    assert said in readme
    width = found["width", "on", "test"]
    assert width.verdict() == "undecided"
    assert f"In a narrower model, it is {-width.mean:.3f} lower, which is\nundecided after" in readme


def test_the_demo_has_the_recipe_that_tuning_chose():
    """Both sides chose the same one, so it serves the demo with dispersion on and off."""
    recipes = tuned(RECORDED)
    assert recipes["on"] == recipes["off"]
    demo = tomli.loads((ROOT / "train_configs" / "demo_cpu.toml").read_text())
    assert demo["optimizer"]["lr"] == recipes["on"].lr
    assert demo["lr_scheduler"]["warmup_steps"] == recipes["on"].warmup * demo["training"]["steps"]


def test_rows_of_another_recipe_or_corpus_do_not_count():
    """The rows in docs are all of the present ones. Of rows that are changed by hand, none is left."""
    rows, config = RECORDED, ROOT / evidence_parts.CONFIG
    assert current(rows, config) == rows
    one = next(row for row in rows if "condition" in row)
    assert current([*rows, one | {"recipe": "other"}, one | {"corpus": "other"}], config) == rows
    again = {**one, "part": "restored", "of": [one["part"], one["condition"], one["seed"]]}
    assert current([*rows, again, again | {"recipe": "other"}, again | {"corpus": "other"}], config) == [*rows, again]
    other_corpus = {**rows[0], "sha256": "0" * 64}
    assert rows[0]["part"] == "corpus"
    assert current([*rows, other_corpus], config) == [rows[0], other_corpus]


def test_the_page_in_docs_is_made_of_the_rows_in_docs():
    assert (ROOT / "docs" / "evidence.md").read_text() == page(current(RECORDED, ROOT / evidence_parts.CONFIG))


# Numbers that the rows cannot tell: names, the level of the intervals, the paper's sizes, and a sweep that was only planned.
NOT_OF_THE_ROWS = (
    "evidence.md.j2",
    "Qwen3",
    "C4",
    "GPT-2",
    "H100",
    "sha256",
    "95 %",
    "0.6 B parameters on 156 B tokens",
)
NOT_OF_THE_ROWS += ("124 M parameters", "2.5 B tokens", "evidence_124m", "42 hours")
NUMBER = r"\d|\b(three|four|five|six|seven|eight|nine|ten|twelve|tenth|half|twice as)\b"


def test_no_number_stands_outside_a_place():
    prose = re.sub(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}|```.*?```", "", TEMPLATE, flags=re.S)
    prose += "\n".join(re.findall(r'"([^"]*)" \| holds', TEMPLATE))
    for known in NOT_OF_THE_ROWS:
        assert known in prose
        prose = prose.replace(known, "")
    assert [line for line in prose.splitlines() if re.search(NUMBER, line)] == []


def moved(part, condition, by, text="test"):
    """Move a condition's cross-entropy, over all tokens and by source."""

    def change(rows):
        for one in rows:
            if one["part"] == part and one.get("condition", "").startswith(condition) and text in one["numbers"]:
                own = one["numbers"][text]
                own["cross_entropy"] += by
                own["by_source"] = {name: ce + by for name, ce in own["by_source"].items()}

    return change


def each(part, condition, set_values):
    def change(rows):
        for one in rows:
            if (one["part"], one.get("condition", condition)) == (part, condition):
                set_values(one)

    return change


TURNED = {
    "dispersion is better": (moved("main", "on", -0.05), ["No.", "makes test", "So the loss does", "As on is not"]),
    "dispersion is much worse": (
        moved("main", "on", 0.05),
        ["makes test", "That is less than", "The second interval", "So in a single pair"],
    ),
    "the second runs agree": (moved("restored", "", -0.1), ["The sign is therefore"]),
    "the text is short": (
        each("corpus", None, lambda one: one["sizes"]["main"]["train"].update(tokens=10**6)),
        ["of which none is seen twice"],
    ),
    "dispersion is worse at every learning rate": (
        moved("tuning", "on", 1, "development"),
        ["So the sign depends", "Where dispersion is ahead"],
    ),
    "a middle learning rate is best": (
        lambda rows: [moved("tuning", f"{state}_lr-0.004", -1, "development")(rows) for state in STATES],
        ["Both sides chose", "A higher learning rate"],
    ),
    "noise is worse": (moved("main", "noisy-embedding", 0.1), ["So noise does better"]),
    "dispersion is worse in a narrow model": (moved("width", "on", 0.1), ["In the mean the sign", "Between the parts"]),
    "dispersion is better in a deep model": (moved("depth", "on", -0.1), ["The sign is that of"]),
    "dispersion is better in long training": (
        moved("long", "on", -0.2),
        ["So with this recipe", "In tuning, dispersion did worse"],
    ),
    "nothing is forgotten": (moved("midtraining", "off", -1), ["So further training"]),
    "the plateau explains the loss": (
        each("main", "off", lambda one: one["history"].update(plateau_end=one["numbers"]["test"]["cross_entropy"])),
        ["So these runs do not show"],
    ),
    "a last word is often right": (
        each("main", "off", lambda one: one["numbers"]["test"].update(last_word=0.5)),
        ["The last word is right"],
    ),
    "the cosine grows with depth": (
        each("restored", None, lambda one: one["numbers"]["test"].update(mean_cosine=[0.1 * i for i in range(8)])),
        ["The model here hardly"],
    ),
    "the second runs take as long": (
        each("restored", None, lambda one: one["history"].update(seconds={"steps": 224})),
        ["These times are rough"],
    ),
}


@pytest.mark.parametrize("case", TURNED)
def test_the_page_is_refused_when_a_sign_has_turned(case):
    change, sentences = TURNED[case]
    rows = copy.deepcopy(RECORDED)
    change(rows)
    with pytest.raises(Refused) as error:
        page(rows)
    for words in sentences:
        assert f'"{words}' in str(error.value)


def test_every_claim_can_turn():
    template = re.sub(r"\{#.*?#\}", "", TEMPLATE, flags=re.S)
    claims = re.findall(r'"([^"]*)" \| holds', template)
    assert len(claims) == template.count("holds(") > 20
    known = [words for _, sentences in TURNED.values() for words in sentences]
    assert [claim for claim in claims if not claim.startswith(tuple(known))] == []


def test_a_page_is_refused_while_runs_are_missing_and_has_the_failed_ones():
    lacking = [one for one in RECORDED if (one["part"], one.get("condition"), one.get("seed")) != ("main", "on", 3)]
    assert missing(lacking) == ["main: on_seed-3"]
    with pytest.raises(Refused, match=r"missing(.|\n)*main: on_seed-3"):
        page(lacking)
    (untuned,) = missing([one for one in RECORDED if one["part"] != "tuning"])
    assert "tuning is not complete" in untuned
    (one,) = (r for r in RECORDED if (r["part"], r.get("condition"), r.get("seed")) == ("main", "on-moments", 3))
    failed = {key: one[key] for key in ("part", "condition", "seed", "recipe", "commit", "corpus")}
    text = page([*RECORDED, failed | {"status": "failed", "error": "not finite"}])
    assert "| main comparison | on, moments | 7 of 8 |" in text
    assert "| main comparison | 49 | 1 | 3.65 |\n" in text
    assert "\n\n- failed: main on-moments seed 3: not finite\n\nCommits: " in text


class Bigrams(torch.nn.Module):
    """Logits of the next token by the last one, and activations that are the token's row."""

    n_layers = 1

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, tokens, return_activations=None):
        logits = self.logits[tokens]
        return (logits, tuple(logits for _ in return_activations)) if return_activations is not None else logits


def test_numbers_of_a_model_against_plain_sums():
    torch.manual_seed(0)
    model = Bigrams(torch.randn(10, 10))
    windows = [torch.randint(0, 10, (n,)).tolist() for n in (2, 9, 5, 3, *(4 + i % 6 for i in range(30)))]
    sums, right, number = token_losses(model, windows)
    p = np.exp(model.logits.double().numpy())
    p /= p.sum(1, keepdims=True)
    for i, ids in enumerate(windows):
        assert number[i] == len(ids) - 1
        assert sums[i] == pytest.approx(-sum(np.log(p[a, b]) for a, b in zip(ids, ids[1:], strict=False)), rel=1e-5)
        assert right[i] == sum(p[a].argmax() == b for a, b in zip(ids, ids[1:], strict=False))
    best = p.argmax(1)
    chain = [3, int(best[3]), int(best[best[3]])]
    wrong = [int(best[3]), (chain[2] + 1) % 10]
    assert last_words(model, [([1, 2, 3], chain[1:]), ([3], chain[1:2]), ([1, 3], wrong)]) == 2
    unit = model.logits.double().numpy()
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    long = [ids for ids in windows if len(ids) > 5]
    expected = np.mean([(unit[ids[:5]] @ unit[ids[:5]].T).mean() for ids in long])
    assert cosines(model, windows, 5) == pytest.approx([expected] * 3, abs=2e-5)


def test_windows_and_last_words():
    def encode(text):
        return [len(word) for word in text.split()]

    short = "one two three"
    assert window(short, encode, 0, 8) == [3, 3, 5, 0]
    long = " ".join("x" * (i % 50 + 1) for i in range(300))
    found, every = window(long, encode, 0, 16), [*encode(long), 0]
    assert len(found) == 17
    assert any(every[i : i + 17] == found for i in range(len(every)))
    assert window(long, encode, 0, 16) == found
    assert (
        len({tuple(window(f"{long} {'y' * i}", encode, 0, 16)) for i in range(1, 20)}) > 10
    )  # the text decides the place
    words = " ".join(["word"] * 25)
    assert passage(f"Short one.\n\n{words}\n\n{words} at the end.\n\nother", encode, 256) == ([4] * 25 + [2, 3], [3])
    assert passage(f"{words} at the end.", encode, 8) == ([4, 4, 4, 4, 4, 2, 3], [3])
    assert passage(f"{words} in 1999.", encode, 256) is None
    assert passage(f"{words} at\nthe.", encode, 256) is None


def test_history_of_a_run(tmp_path):
    lines = [{"step": step, "ce": ce, "tokens": step * 10} for step, ce in ((5, 7.0), (10, 6.0), (15, 5.9), (20, 6.1))]
    for step, cosine in ((0, 0.0), (10, 0.8), (30, 0.4)):
        layers = [0.5, cosine - 0.05, cosine + 0.05, 0.9]  # the embedding and the final norm are no blocks
        lines.append({"step": step, "condensation": {"mean_cosine": layers, "cross_entropy": 6.12341}})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [
        {"event": "stop", "step": 9, "spent": {"steps": 2.0}},
        {"event": "complete", "step": 20, "spent": {"steps": 3.5, "start_up": 1}},
    ]
    stamp = {"time": "2026-01-01T00:00:00+00:00"}
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(stamp | event) + "\n" for event in events))
    found = history(tmp_path)
    assert found["plateau_end"] == 15
    # (0 + 0.8)/2 · 10 + (0.8 + 0.4)/2 · 20 = 16, over 30 steps
    assert found["block_cosine"] == pytest.approx(16 / 30, abs=1e-5)
    assert found["seconds"] == {"steps": 5.5, "start_up": 1}
    assert (found["steps"], found["cross_entropy"], found["tokens"]) == ([0, 10, 30], [6.1234, 6.1234, 6.1234], 200)


def test_a_job_is_known_by_what_decides_it(tmp_path):
    config = tmp_path / "a.toml"
    config.write_text("# one\n[training]\nsteps = 3\n")
    job = Job("main", "on", 1, ("--a=1",))
    before = job.recipe(config)
    config.write_text("[training]\nsteps = 3   # the same\n")
    assert job.recipe(config) == before
    assert Job("main", "on", 1, ("--a=2",)).recipe(config) != before
    assert Job("main", "on", 1, ("--a=1",), ranks=2).recipe(config) != before
    assert Job("main", "on", 1, ("--a=1",), begins="x").recipe(config) != before
    config.write_text("[training]\nsteps = 4\n")
    assert job.recipe(config) != before


@pytest.mark.night
def test_an_experiment_from_its_runs_to_its_page(tmp_path, sample, monkeypatch):
    """A few steps of a few conditions: rows as the runs' files have them; a second call runs nothing; a failure is a row."""
    from benchmarks import corpus, evidence
    from titan_disp.run.reader import read_condensation, read_events

    corpus.main(corpus.Options(tmp_path / "data", folder=sample / "en", held_out=80))
    (tmp_path / "data" / "held_back").mkdir()
    for part in ("en", "test"):
        (tmp_path / "data" / "held_back" / part).symlink_to(tmp_path / "data" / part)
    for name, value in {
        "SEEDS": (1,),
        "TUNING_SEEDS": (101,),
        "LRS": (2e-3,),
        "WARMUPS": (0.2,),
        "STEPS": 5,
        "MIDTRAINING": 3,
    }.items():
        for module in (evidence_parts, evidence, evidence_analysis, evidence_page):
            monkeypatch.setattr(module, name, value, raising=module is evidence_parts)
    every = evidence_parts.jobs

    def few(part, rows):
        """Off and on, and one that cannot run: its learning rate makes it infinite."""
        found = [
            job
            for job in every(part, rows)
            if job.condition.partition("_")[0] in ("off", "on", "on-0.5", "before", "on-moments")
        ]
        broken = ("--optimizer.lr=1e30", "--guard.max_skipped_steps=1")
        return [dataclasses.replace(j, options=j.options + broken) if j.condition == "on-moments" else j for j in found]

    monkeypatch.setattr(evidence, "jobs", few)
    options = evidence.Options(
        part="tuning,main",
        data=tmp_path / "data",
        runs=tmp_path / "runs",
        rows=tmp_path / "rows.jsonl",
        docs=tmp_path,
    )
    evidence.main(options)
    shutil.rmtree(tmp_path / "runs" / "main" / "off_seed-1")  # as after a fresh clone, which has rows without models
    evidence.main(dataclasses.replace(options, part="midtraining"))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert Counter((r["part"], r.get("status")) for r in rows) == {
        **{("corpus", None): 1, ("tuning", "finished"): 4, ("main", "finished"): 2, ("main", "failed"): 1},
        **{("restored", None): 1, ("midtraining", "finished"): 3},
    }
    (again,) = (r for r in rows if r["part"] == "restored")
    (first,) = (r for r in rows if (r["part"], r.get("condition")) == ("main", "off"))
    assert again["of"] == ["main", "off", 1]
    assert again["numbers"] == first["numbers"]  # one machine, one core: the same sums
    assert not (tmp_path / "evidence.md").exists()  # most runs of the design are missing
    (on,) = (r for r in rows if (r["part"], r.get("condition")) == ("main", "on"))
    run = tmp_path / "runs" / "main" / "on_seed-1"
    measured = read_condensation(run)
    assert on["history"]["steps"] == list(measured) == [0, 5]
    assert on["history"]["cross_entropy"][-1] == pytest.approx(measured[5]["cross_entropy"], abs=1e-4)
    assert read_events(run)[-1]["event"] == "complete"
    assert on["numbers"]["test"]["documents"] == 80
    assert (
        abs(on["numbers"]["test"]["cross_entropy"] - measured[5]["cross_entropy"]) < 0.5
    )  # other text, the same model
    assert set(next(r for r in rows if r.get("condition") == "on-0.5")["numbers"]) == {"test", "new_test"}
    assert [r["condition"] for r in evidence_analysis.failures(rows)] == ["on-moments"]
    evidence.main(dataclasses.replace(options, part="tuning,midtraining"))
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(rows)
