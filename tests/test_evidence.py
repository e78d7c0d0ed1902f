"""Does it help? The experiment's numbers on a model by hand, its analysis on made-up rows with known answers, its page."""

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

from benchmarks import evidence_parts
from benchmarks.evidence import current
from benchmarks.evidence_analysis import (
    CONTRASTS,
    PRIMARY,
    Contrast,
    curve_differences,
    interval,
    metric,
    noise,
    outcome,
    outcomes,
    plateau_and_loss,
)
from benchmarks.evidence_details import Paired, token_shares
from benchmarks.evidence_page import page, write_page
from benchmarks.evidence_parts import LRS, PARTS, SEEDS, STATES, WARMUPS, Job, Recipe, jobs, tuned
from benchmarks.evidence_score import cosines, history, last_words, passage, token_losses, window
from benchmarks.evidence_words import change
from tests.command_line import ROOT

ROWS = ROOT / "docs" / "evidence.jsonl"
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


def test_a_difference_is_what_scipy_makes_of_the_pairs():
    d = np.array([-0.11, -0.2, -0.05, -0.13, -0.31, -0.02, -0.08, -0.17])
    found = outcome(made_up(d), PRIMARY, metric("test", "cross_entropy"))
    test = stats.ttest_1samp(d, 0)
    assert found.difference.mean == pytest.approx(d.mean())
    assert (found.difference.low, found.difference.high) == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert found.difference.p_value == 2 / 256  # all of one sign
    assert found.lower == 8
    d[5] = 0.02
    mixed = outcome(made_up(d), PRIMARY, metric("test", "cross_entropy"))
    plain = stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert mixed.difference.p_value == pytest.approx(plain.pvalue)
    assert mixed.lower == 7


def test_holm_counts_a_family_that_is_not_run_yet_too():
    """Six contrasts: 2/256 × 6 = 0.047 for one that all seeds agree on."""
    assert Counter(c.family for c in CONTRASTS) == {"main": 6, "": 2, "midtraining": 4}
    found = outcomes(made_up([-0.2, -0.1] * 4))
    assert found[PRIMARY].difference.holm == pytest.approx(6 * 2 / 256)
    assert found[PRIMARY].verdict() == "better"
    assert found[Contrast("main", "on-0.03", "main")].verdict() == "not run"
    rows = made_up([-0.2, -0.1] * 4, "midtraining", "on-0.1", text="new_test")
    assert outcomes(rows)[
        Contrast("midtraining", "on-0.1", "midtraining", "new_test")
    ].difference.holm == pytest.approx(4 * 2 / 256)


@pytest.mark.parametrize(
    ("d", "says"),
    [
        ([0.1, 0.2] * 4, "worse"),
        ([-0.1, 0.2] * 4, "undecided"),
        ([-0.01, 0.01] * 4, "no difference of 0.02 or more"),
        ([-0.011, -0.012] * 4, "no difference of 0.02 or more"),  # significant, and of no matter
        ([-0.2, -0.1] * 3, "undecided (6 of 8 pairs)"),  # 2/64 × 6
        ([], "not run"),
        ([-0.1], "too few pairs (1 of 8)"),  # no interval of one pair
    ],
)
def test_verdicts(d, says):
    assert outcomes(made_up(d))[PRIMARY].verdict() == says


def test_verdicts_of_four_seeds():
    def verdict(d):
        return outcomes(made_up(d, "long", seeds=SEEDS[:4]))[Contrast("long", "on", "")].verdict()

    assert verdict([-0.1, -0.2, -0.1, -0.2]) == "better in all 4 seeds, too few for a test"
    assert verdict([-0.1, -0.2, -0.1, 0.2]) == "better in 3 of 4 seeds, undecided"
    assert verdict([-0.001, 0.002, -0.001, 0.0]) == "no difference of 0.02 or more"


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
    assert found.difference.holm > 0.05
    assert found.verdict() == "undecided (7 of 8 pairs)"
    assert found._fails_more()
    assert not outcomes([*rows, {**failed, "condition": "off"}])[PRIMARY]._fails_more()
    text = page([*rows, failed])
    assert "- failed: main on seed 8: not finite" in text
    assert "| main comparison | 16 | 1 | 7.50 |" in text
    again = outcomes([*rows, failed, row("main", "on", 8, 4.9)])[PRIMARY]  # tried again: its last row counts
    assert again.complete
    assert again.failed == ()


def test_noise_and_plateau():
    rows = [*made_up([0.0] * 8), row("noise", "2-ranks", 3, 5.05), row("noise", "2-ranks", 9, 5.05)]
    assert noise(rows)["2-ranks"] == {3: pytest.approx(0.02)}
    ends = {1: 90, 2: 60, 3: 70, 4: 30}
    rows = [row("main", "off", s, 5 + end / 1000, plateau_end=end) for s, end in ends.items()]
    assert plateau_and_loss(rows, "main", "off") == (pytest.approx(1.0), 4)
    assert plateau_and_loss(rows[:3], "main", "off") is None


def test_restored_models_are_compared_with_the_rows_of_the_first_ones():
    rows = made_up([0.0] * 8)
    again = [
        {"part": "restored", "of": ["main", "off", s], "numbers": row("main", "off", s, 5 + s / 100 + d)["numbers"]}
        for s, d in ((1, 0.01), (2, 0.0), (3, -0.03))
    ]
    text = page([*rows, *again])
    assert "3 models were trained again" in text
    assert "is 0.013 away from the first one's on average, and 0.030 at most" in text
    assert outcomes([*rows, *again]) == outcomes(rows)
    exact = page([*rows, again[1]])
    assert "1 model was trained again" in exact
    assert "is exactly the first one's" in exact
    assert "trained again" not in page(rows)


def test_curves_are_paired_by_seed():
    tokens, d = curve_differences(made_up([-0.2, -0.1, 0.3], seeds=SEEDS[:3]), "main")
    assert tokens == [0, 2000, 4000]
    np.testing.assert_allclose(d, [[0, 0, -0.2], [0, 0, -0.1], [0, 0, 0.3]], atol=1e-12)
    low, high = interval(d)
    expected = stats.t.interval(0.95, 2, loc=0, scale=stats.sem(d[:, 2]))
    assert (low[2], high[2]) == pytest.approx(expected)
    assert curve_differences([], "main") is None


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
    assert all("development" not in job.texts for part in PARTS[1:] for job in every[part])
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


def test_the_page_has_the_rows_numbers(tmp_path):
    d = [-0.11, -0.2, -0.05, -0.13, -0.31, -0.02, -0.08, -0.17]
    rows = [*tuning_rows(INSIDE), *made_up(d), *made_up([0.1, 0.3] * 4, "width")]
    rows += [
        *made_up([-0.2] * 4, "long", seeds=SEEDS[:4]),
        *made_up([0.1] * 8, "midtraining", "on-0.5", text="new_test"),
    ]
    rows += [row("noise", "accumulation-4", 2, 5.05)]
    rows += [
        {
            "part": "corpus",
            "sources": {"x=1": "0"},
            "sha256": "ab" * 32,
            "sizes": {"main": {"train": {"documents": 7000, "tokens": 8}}},
        }
    ]
    write_page(rows, tmp_path)
    text = (tmp_path / "evidence.md").read_text()
    low, high = stats.ttest_1samp(d, 0).confidence_interval(0.95)
    off, on = (5 + np.arange(1, 9) / 100, 5 + np.arange(1, 9) / 100 + d)
    # Main's and width's p are 2/256 both. Holm takes 6 times the first, and 5 times the second but no less than the first.
    assert (
        "| 6 layers, MLP width 192, 600 steps | on, λ 0.1 | 8 of 8 "
        f"| {off.mean():.3f} ± {stats.sem(off):.3f} | {on.mean():.3f} ± "
        f"{stats.sem(on):.3f} | -0.1337 | {low:+.4f} … {high:+.4f} | 8 of 8 | 0.0078 | 0.0469 | better |"
    ) in text
    assert "**Yes, at this size: dispersion (λ 0.1) lowers test cross-entropy: -0.1337 nats (95 % interval" in text
    assert "| MLP width 16 | on, λ 0.1 | 8 of 8 |" in text
    assert "| 0 of 8 | 0.0078 | 0.0469 | worse |" in text
    assert "| 2,400 steps | on, λ 0.1 | 4 of 4 |" in text
    assert "| new text | on, λ 0.5 | 8 of 8 |" in text
    assert "Chosen: off: lr 0.002, warm-up 5 %; on: lr 0.004, warm-up 20 %." in text
    assert "| accumulation-4 | – | +0.0300 | – | – | 0.0300 |" in text
    assert "| main comparison | 16 | 0 | 8.00 |" in text
    assert "| main | train | 7,000 | 8 |" in text
    assert "| a | 50 % | 4.045 ±" in text  # of the made-up sources, a is 1 below the mean and b 1 above
    assert {p.name for p in tmp_path.glob("*.png")} == {
        "evidence_loss.png",
        "evidence_cosine.png",
        "evidence_baseline.png",
    }
    assert page([]).splitlines()[0] == "# Does it help?"
    assert page([]).splitlines()[4] == "The main comparison has not been run."
    assert "png" not in page([row for row in rows if row["part"] == "tuning"])  # there is nothing to draw yet


def test_sentences_say_what_scipy_and_the_pairs_say():
    d = np.array([0.016, 0.006, 0.004, 0.005, 0.021, 0.024, 0.020, 0.002])
    noisy = d * [1, -1, 1, -1, 1, -1, 1, -1]
    rows = [*tuning_rows(INSIDE), *made_up(d), *made_up(noisy - 0.005, condition="on-first-quarter")[8:]]
    rows += [
        row("noise", name, 1, 5.01 + x) for name, x in (("accumulation-4", -0.02), ("2-ranks", 0.04), ("again", 0))
    ]
    text = page(rows)
    low, high = stats.ttest_1samp(d, 0).confidence_interval()
    assert (
        "**No. At this size, dispersion (λ 0.1) makes test cross-entropy slightly worse: +0.0122 nats (95 % interval "
        f"{low:+.4f} … {high:+.4f}; higher in 8 of 8 seeds; sign-flip p 0.0078, 0.0469 after Holm's adjustment). That is less "
        "than 0.02 nats, which the design fixed as the smallest difference that matters.**\n"
    ) in text
    own = f"0.0122 higher than off's (95 % interval {low:+.4f} … {high:+.4f}; higher in 8 of 8 seeds)"
    assert (
        f"With dispersion, test cross-entropy is {own}. By the design's rules: no difference of 0.02 or more; the"
        in text
    )
    low, high = stats.ttest_1samp(noisy - 0.005, 0).confidence_interval()
    quarter = f"is 0.002 lower than off's (95 % interval {low:+.3f} … {high:+.3f}; lower in 5 of 8 seeds)."
    assert f"**On in the first quarter.** Test cross-entropy {quarter} It is" in text
    low, high = stats.ttest_1samp(noisy - 0.005 - d, 0).confidence_interval()
    assert f"It is 0.014 lower than that of on, λ 0.1 (95 % interval {low:+.3f} … {high:+.3f}" in text
    assert "there is no gain at the end that a better start could explain" in text
    assert "off ends 0.030 away on average, and 0.040 at most (2 runs)" in text
    # Off is best at 0.002 and on at 0.004, each at one of two warm-ups.
    assert "is +0.000 at 0.001, +0.500 at 0.002, -0.500 at 0.004, +0.000 at 0.008. So the sign depends" in text
    assert "Where dispersion is ahead, off is 0.5 nats or more worse than at its best learning rate." in text
    assert "highest learning rate that was tried" not in text  # neither side chose it
    assert "**Not run or not complete:** main comparison (16 of 40 pairs), MLP width 16, 12 layers, 2,400" in text
    assert "| no difference of 0.02 or more; the direction is significant after Holm's adjustment |" in text
    # Both sources have half of the tokens, and the same difference.
    low, high = stats.ttest_1samp(d, 0).confidence_interval()
    assert f" has 50 % of the test tokens. There the difference, on − off, is +0.012 (95 % interval {low:+.3f}" in text
    assert "takes 1800 s without dispersion and 1800 s with it (+0 %) on one core. All" in text
    assert "What it says" not in page(tuning_rows(INSIDE))
    assert "Only 1 of the 8 pairs of the main comparison" in page([*tuning_rows(INSIDE), *made_up(d[:1], seeds=(1,))])


ONE = [0.01, 0.02, 0.03, 0.02, 0.02, 0.01, 0.03, 0.02]  # positive in every seed


@pytest.mark.parametrize(
    ("main", "long", "says"),
    [
        ([-x for x in ONE], [-0.01, -0.02, -0.03, -0.025], "So the difference lasts."),
        ([-x for x in ONE], [-0.09, -0.08, -0.12, -0.11], "So the difference lasts, and is larger in longer training."),
        (
            [-0.01, 0.01] * 4,
            [0.08, 0.07, 0.09, 0.10],
            "So with this recipe, the difference is larger in longer training.",
        ),
        ([-3 * x for x in ONE], [0.001, -0.001, 0.002, -0.002], "So the difference fades: it was a head start."),
        ([3 * x for x in ONE], [0.001, -0.001, 0.002, -0.002], "So the difference fades: it was a late start."),
        ([-x for x in ONE], [0.05, 0.04, 0.05, 0.06], "So the sign changes with the length of training."),
        ([-x for x in ONE], [-0.1, 0.1, 0.2, -0.2], "So 4 seeds do not tell whether a difference lasts."),
        ([-0.1, 0.1] * 4, [0.001, -0.001, 0.002, -0.002], "So 4 seeds do not tell whether a difference lasts."),
    ],
)
def test_whether_a_difference_lasts_is_said_of_the_same_seeds(main, long, says):
    text = page([*made_up(main), *made_up(long, "long", seeds=SEEDS[:4])])
    (line,) = (line for line in text.splitlines() if line.startswith("- **2,400 steps.**"))
    assert f"). {says} On the text of the curves" in line
    assert line.endswith("and not again.")
    means = [float(x) for x in re.findall(r"([+-][\d.]+) \(95 %", line)]
    assert means == pytest.approx([np.mean(long), np.mean(main[:4]), np.mean(long) - np.mean(main[:4])], abs=5.1e-4)
    change = stats.ttest_1samp(np.subtract(long, main[:4]), 0).confidence_interval()
    assert f"The change is {np.mean(long) - np.mean(main[:4]):+.3f} (95 % interval {change.low:+.3f}" in line


@pytest.mark.parametrize(
    ("d", "says"),
    [
        ([0.012, 0.013, 0.011, 0.012], "0.012 higher than off's (95 % interval +0.011 … +0.013"),
        ([0.0003, 0.0004, 0.0003, 0.0002], "0.0003 higher than off's (95 % interval +0.0002 … +0.0004"),
        ([-0.01533, -0.00467] * 2, "0.0100 lower than off's (95 % interval -0.0198 … -0.0002"),
        ([0.0, 0.0, 0.0, 0.0], "the same as off's to 3 digits (95 % interval +0.000 … +0.000"),
    ],
)
def test_a_fourth_digit_where_three_hide_the_sign(d, says):
    own = {s: 5 + x for s, x in enumerate(d)}
    found = Paired.of(own, dict.fromkeys(own, 5.0))
    assert change(found, "off's").startswith(says)


def test_what_another_shape_says():
    def line(d, part="width", seeds=SEEDS):
        text = page([*made_up(ONE), *made_up(d, part, seeds=seeds)])
        return next(line for line in text.splitlines() if line.startswith(("- **MLP width 16 ", "- **12 layers ")))

    assert "The sign is that of the main comparison." in line(ONE)
    opposite = line([-x for x in ONE])
    assert "0.020 lower than off's" in opposite
    assert (
        "By the design's rules: better. The sign is the opposite of the main comparison's: the effect depends"
        in opposite
    )
    unclear = line([-0.05, 0.01] * 4)
    assert "In the mean the sign is the opposite of the main comparison's, but by these rules and seeds" in unclear
    deep = line([-0.05, -0.04, -0.05, -0.06], "depth", SEEDS[:4])
    assert "By the design's rules: better in all 4 seeds, too few for a test. The sign is the opposite" in deep


def test_the_part_that_condenses_most_is_named_if_dispersion_does_best_there():
    def rows(part, d, cosine):
        return [one | {"history": one["history"] | {"block_cosine": cosine}} for one in made_up(d, part)]

    both = [*rows("main", ONE, 0.3), *rows("depth", ONE, 0.2)]
    says = "dispersion does best where the models condense most without it (MLP width 16). These are only 3 parts"
    assert says in page([*both, *rows("width", [-x for x in ONE], 0.5)])
    assert "condense most" not in page([*both, *rows("width", [2 * x for x in ONE], 0.5)])
    assert "condense most" not in page(both)


def test_mid_training_is_told_before_and_after_on_both_texts():
    rows = made_up([0.0] * 8)
    rows += [row("midtraining", "before", s, 6 + s / 100, "new_test") for s in SEEDS]
    for name, new, old in (("off", 4.0, 5.2), ("on-0.1", 4.1, 5.3), ("on-0.5", 3.9, 5.0)):
        for s in SEEDS:
            one = row("midtraining", name, s, old + s / 100)
            one["numbers"] |= row("midtraining", name, s, new + s / 100, "new_test")["numbers"]
            one["numbers"]["new_test"]["mean_cosine"] = [0.1, new / 10, new / 10, 0.4]
            rows.append(one)
    text = page(rows)
    assert (
        "until then, dict-foldoc). Without dispersion, cross-entropy goes from 6.045 to 4.045. With λ 0.1, it ends 0.1000 higher"
        in text
    )
    assert (
        "comparison). Without dispersion, cross-entropy goes from 5.045 to 5.245. With λ 0.1, it ends 0.1000 higher"
        in text
    )
    up, down = (
        "+0.1000 (95 % interval +0.1000 … +0.1000; higher in 8 of 8 seeds)",
        "-0.2000 (95 % interval -0.2000 … -0.2000; lower",
    )
    assert (
        f"With λ 0.5, it ends 0.2000 lower than without{down.removeprefix('-0.2000')} in 8 of 8 seeds): better. So further "
        "training makes the old text 0.20 nats worse (forgetting), also without dispersion."
    ) in text
    by_source = f"With λ 0.1, the difference is {up} on NAME and {up} on the other packages together. With λ 0.5, the"
    assert any(f"{by_source.replace('NAME', name)} difference is {down}" in text for name in "ab")  # both have half
    assert "is 0.250 before mid-training, 0.400 without dispersion, 0.410 with λ 0.1, 0.390 with λ 0.5." in text
    again = {"part": "restored", "of": ["main", "off", 1], "numbers": row("main", "off", 1, 5.81)["numbers"]}
    assert "goes from 5.145 to 5.245" in page(
        [*rows, again]
    )  # mid-training began from the model that was trained again


def test_second_runs_of_off_are_compared_and_counted_as_noise():
    """A direction that they do not confirm is called less certain."""
    d = np.array([0.016, 0.006, 0.004, 0.005, 0.021, 0.024, 0.020, 0.002])
    rows = [*made_up(d), row("noise", "2-ranks", 1, 5.01 + 0.004)]
    assert "second" not in page(rows)
    moved = np.array([0.03, 0.0, 0.01, 0.0, 0.0, -0.01, 0.0, 0.0])
    again = [
        {"part": "restored", "of": ["main", "off", s], "numbers": row("main", "off", s, 5 + s / 100 + x)["numbers"]}
        | {"history": {"seconds": {"steps": 2000.0}}}
        for s, x in zip(SEEDS, moved, strict=True)
    ]
    text = page([*rows, *again])
    low, high = stats.ttest_1samp(d - moved, 0).confidence_interval()
    signs = np.array(list(itertools.product((1, -1), repeat=8)))
    p = np.mean(np.abs(signs @ (d - moved)) >= abs((d - moved).sum()) - 1e-12)
    assert (
        f"Against these second runs, the first difference is {np.mean(d - moved):+.4f} (95 % interval {low:+.4f} … {high:+.4f}; "
        f"higher in 6 of 8 seeds; sign-flip p {p:.4f}). This check had not been planned. The sign is therefore less certain"
    ) in text
    assert "trained again for mid-training end 0.006 away on average, and 0.030 at most" in text
    assert "noise can be larger than the difference of the main comparison, +0.012." in text
    assert "when off was trained again, it took 2000 s" in text
    certain = page(
        [
            *rows,
            *(
                one | {"numbers": row("main", "off", s, 5 + s / 100)["numbers"]}
                for s, one in zip(SEEDS, again, strict=True)
            ),
        ]
    )
    assert "This check had not been planned.\n" in certain


def test_a_longer_training_may_want_another_learning_rate():
    """If dispersion did worse at high learning rates, the sentence about long training says so."""
    rising = [
        row("tuning", f"{state}_{Recipe(lr, warmup)}", seed, 5 + (state == "on") * lr * 10, "development")
        for state in STATES
        for lr in (*LRS, LRS[0] / 2, LRS[-1] * 2)
        for warmup in WARMUPS
        for seed in (101, 102)
    ]
    both = [*made_up(ONE), *made_up([0.08, 0.07, 0.09, 0.10], "long", seeds=SEEDS[:4])]
    says = "a part of this difference may come from the learning rate and not from the length."
    assert says in page([*rising, *both])
    assert says not in page(both)


def test_parts_that_are_not_complete_are_named_with_their_failures():
    failed = {"status": "failed", "error": "NaN", "recipe": "r", "commit": "c", "corpus": "d"}
    rows = [*made_up(ONE), *made_up([0.1], "depth", seeds=(1,))]
    rows += [{"part": "width", "condition": c, "seed": s, **failed} for c in STATES for s in SEEDS]
    text = page(rows)
    assert "MLP width 16 (0 of 8 pairs, 16 runs failed), 12 layers (1 of 4 pairs), 2,400 steps, mid-training.\n" in text
    assert "| no pair has finished (16 runs failed) |" in text
    lacking = page([*made_up(ONE[:7], seeds=SEEDS[:7]), {"part": "main", "condition": "on", "seed": 8, **failed}])
    assert "1 of 8 pairs are missing." in lacking.splitlines()[4]
    worse = made_up([-x - 0.1 for x in ONE])
    fails = {"part": "main", "condition": "on", "seed": 9, **failed}
    assert "undecided: lower, but more of its runs failed" in page([*worse, fails])


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
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    found = token_shares(rows)
    for one in rows:
        if "test" in one.get("numbers", {}):
            test = one["numbers"]["test"]
            assert sum(found[name] * ce for name, ce in test["by_source"].items()) == pytest.approx(
                test["cross_entropy"], abs=2e-5
            )


def test_the_readme_has_the_answer_of_the_rows():
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    found, readme = outcomes(rows), (ROOT / "README.md").read_text()
    d = found[PRIMARY].difference
    word = "higher" if d.mean > 0 else "lower"
    assert f"is {abs(d.mean):.3f} nats {word} with dispersion (95 % interval {d.low:.4f} to {d.high:.4f}" in readme
    (long,) = (found[contrast] for contrast in CONTRASTS if contrast.part == "long")
    d = long.difference
    assert len(long.pairs) == 4
    assert d.mean > 0
    said = f"With four times the steps, four seeds and no new tuning, it is {d.mean:.3f} higher ({d.low:.3f} to {d.high:.3f})"
    assert said in readme
    (width,) = (found[contrast] for contrast in CONTRASTS if contrast.part == "width")
    assert width.verdict() == "undecided"
    assert f"In a narrower model, it is {-width.difference.mean:.3f} lower, which is\nundecided after" in readme


def test_the_demo_has_the_recipe_that_tuning_chose():
    """Both sides chose the same one, so it serves the demo with dispersion on and off."""
    recipes = tuned([json.loads(line) for line in ROWS.read_text().splitlines()])
    assert recipes["on"] == recipes["off"]
    demo = tomli.loads((ROOT / "train_configs" / "demo_cpu.toml").read_text())
    assert demo["optimizer"]["lr"] == recipes["on"].lr
    assert demo["lr_scheduler"]["warmup_steps"] == recipes["on"].warmup * demo["training"]["steps"]


def test_rows_of_another_recipe_or_corpus_do_not_count():
    """The rows in docs are all of the present ones. Of rows that are changed by hand, none is left."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    config = ROOT / evidence_parts.CONFIG
    assert current(rows, config) == rows
    one = next(row for row in rows if "condition" in row)
    assert current([*rows, one | {"recipe": "other"}, one | {"corpus": "other"}], config) == rows
    again = {**one, "part": "restored", "of": [one["part"], one["condition"], one["seed"]]}
    assert current([*rows, again, again | {"recipe": "other"}, again | {"corpus": "other"}], config) == [*rows, again]
    other_corpus = {**rows[0], "sha256": "0" * 64}
    assert rows[0]["part"] == "corpus"
    assert current([*rows, other_corpus], config) == [rows[0], other_corpus]


@pytest.mark.skipif(not ROWS.exists(), reason="the experiment has not been run")
def test_the_page_in_docs_is_made_of_the_rows_in_docs():
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    assert (ROOT / "docs" / "evidence.md").read_text() == page(current(rows, ROOT / evidence_parts.CONFIG))


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
    from benchmarks import corpus, evidence, evidence_page, evidence_sentences, evidence_tables
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
        for module in (evidence_parts, evidence, evidence_page, evidence_tables, evidence_sentences):
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
    assert "trained again" in (tmp_path / "evidence.md").read_text()
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
    assert "- failed: main on-moments seed 1" in (tmp_path / "evidence.md").read_text()
    evidence.main(dataclasses.replace(options, part="tuning,midtraining"))
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(rows)
