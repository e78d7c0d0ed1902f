"""Does it help? docs/evidence.md and the README have the numbers of the recorded runs,
and a wrong number, an uncomputed one and a missing one are noticed. The statistics
agree with scipy.
"""

import re

import numpy as np
import pytest
import tomli
from scipy import stats

from benchmarks import evidence, evidence_pictures
from benchmarks.evidence import PAGE, README, TEXTS, phrases, power, problems
from benchmarks.evidence_runs import (
    ROOT,
    interval,
    order_of,
    read_runs,
    sign_flip,
    tabulated,
)


@pytest.fixture(scope="module")
def runs():
    return read_runs()


@pytest.fixture(scope="module")
def computed(runs):
    return phrases(runs)[PAGE]


def page():
    return (ROOT / PAGE).read_text()


def test_the_pages_have_the_numbers_of_the_rows(capsys):
    evidence.main()
    assert "all numbers agree" in capsys.readouterr().out


def test_each_number_of_the_page_is_needed(computed):
    """Each number is changed alone, and then noticed."""
    text = page()
    places = [match.span() for match in re.finditer(r"\d[\d.,]*\d|\d", text)]
    unnoticed = []
    for begin, end in places:
        changed = text[:begin] + str(int(text[end - 1]) ^ 1).join(
            (text[begin : end - 1], text[end:])
        )
        if not list(problems(PAGE, changed, computed)):
            unnoticed.append(text[begin - 30 : end + 10])
    assert len(places) > 100
    assert unnoticed == []


def test_a_number_that_nothing_computes_and_one_that_is_missing(computed):
    text = page()
    for addition in ("It gained 0.5 nats.", "It gained in seven seeds."):
        (problem,) = problems(PAGE, f"{text}\n{addition}\n", computed)
        assert "a number that nothing computes" in problem
    (problem,) = problems(PAGE, text, [*computed, "a mean of 1.234"])
    assert problem == f"{PAGE} does not have: a mean of 1.234"


def test_a_changed_row_is_noticed(runs):
    """A loss of each part that the page speaks of, moved by half a nat."""
    before = phrases(runs)
    for key in (
        *(("main", "on"), ("restored", "off"), ("width", "off"), ("depth", "on")),
        *(("long", "off"), ("midtraining", "on-0.1"), ("widths-again", "on-192")),
        *(("widths", "off-768"), ("losses", "koleo-192"), ("noise", "2-ranks")),
        ("tuning", "on_lr-0.002_warmup-0.05"),
    ):
        changed = runs.copy()
        losses = [(*key, name) for name in runs[key] if name.endswith("cross_entropy")]
        changed.loc[runs[losses].first_valid_index(), losses] -= 0.5
        assert phrases(changed) != before, key


def test_the_page_is_short():
    prose = [line for line in page().splitlines() if line[:1] not in ("|", "!")]
    assert len(" ".join(prose).split()) <= 700
    assert page().count("![") == 3


def test_the_last_try_of_a_run_counts_and_failed_ones_do_not():
    row = {"part": "main", "condition": "on", "seed": 1, "status": "finished"}
    row["numbers"] = {}
    tries = [row | {"history": history(number)} for number in (1, 2)]
    tries.append(row | {"status": "failed", "history": history(3)})
    again = {"part": "restored", "of": ["main", "off", 4], "numbers": {}}
    runs = tabulated([*tries, again | {"history": history(4)}])
    assert runs["main", "on", "seconds"].dropna().to_dict() == {1: 2}
    assert runs["restored", "off", "seconds"].dropna().to_dict() == {4: 4}


def history(seconds):
    return {"plateau_end": None, "block_cosine": 0, "seconds": {"all": seconds}}


def test_the_statistics_are_scipy_s():
    d = np.array([-0.11, 0.2, -0.05, -0.13, -0.31, 0.02, -0.08, -0.17])
    for level in (0.9, 0.95):
        theirs = stats.ttest_1samp(d, 0).confidence_interval(level)
        assert interval(d, level) == pytest.approx((theirs.low, theirs.high))
    test = stats.permutation_test(
        (d,), np.sum, permutation_type="samples", n_resamples=np.inf
    )
    assert sign_flip(d) == pytest.approx(test.pvalue)
    assert sign_flip(-abs(d)) == 2 / 2**8
    assert order_of([9, 1, 2, 3, 0, 4]) == 1  # 1, 2, 3 and, after the norm, 4


def test_the_power_of_the_first_rule_is_that_of_eight_equal_signs():
    """Holm's p of six is below 0.05 only if all eight seeds agree in sign."""
    agree = stats.norm.cdf(1.25) ** 8
    assert power(1.25, 1, 0.05 / 6) == pytest.approx(100 * agree, abs=1)
    assert power(0, 1, 0.05) == pytest.approx(4, abs=1)


def test_the_table_beside_the_page(runs):
    content = evidence_pictures.table(runs)
    assert (ROOT / "docs" / "evidence.csv").read_text() == content
    line = "main,on,test cross_entropy,8,4.14554,main off,8,0.01224,0.00483,0.01965,0.00781"
    assert line in content.splitlines()


def test_the_demo_has_the_recipe_that_tuning_chose(runs):
    """The lowest mean development loss, which is the same for off and on."""
    for state in ("off", "on"):
        means = {
            condition: losses.mean()
            for (condition, name), losses in runs["tuning"].items()
            if name == "development cross_entropy" and condition.startswith(state)
        }
        assert min(means, key=means.get) == f"{state}_lr-0.016_warmup-0.2"
    demo = tomli.loads((ROOT / "train_configs" / "demo_cpu.toml").read_text())
    assert demo["optimizer"]["lr"] == 0.016
    assert demo["lr_scheduler"]["warmup_steps"] == 0.2 * demo["training"]["steps"]


def test_settings_are_those_of_the_config():
    config = tomli.loads((ROOT / "train_configs" / "evidence.toml").read_text())
    training = config["training"]
    tokens = training["steps"] * training["global_batch_size"] * training["seq_len"]
    settings = TEXTS[PAGE]["settings"]
    assert f"{training['steps']} steps" in settings
    assert f"{tokens / 1e6:.1f} M tokens" in settings
    assert f"λ {config['dispersion']['coeff']}" in settings
    assert "0.4 M parameters" in TEXTS[README]["settings"]
