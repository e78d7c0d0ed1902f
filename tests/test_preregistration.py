"""docs/preregistration.md before its runs: its rules on made-up numbers, the power that
it states, and the sweeps that it describes.
"""

import csv
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.evidence_runs import on_off, read_runs
from benchmarks.preregistered import (
    DOSES,
    PREDICTIONS,
    SAME,
    outcomes,
    read_values,
)
from tests.command_line import ROOT
from titan_disp.lab.sweeps.definition import points, read_sweep

SWEEPS = ("rate", "rate_or_dispersion", "condensing_tuning", "condensing")
SWEEPS += ("condensing_dose",)
PAGE = (ROOT / "docs" / "preregistration.md").read_text()
DEVIATION = 0.0158  # over the seeds, as on the page
SPREAD = np.array([-1, 1, -2, 2, -1, 1, 0, 0]) / 1000


def runs_of(*sweeps):
    return [
        (point.condition, point.seeds["debug.seed"])
        for name in sweeps
        for point in points(read_sweep(ROOT / f"train_configs/sweeps/{name}.toml"))
    ]


def values(file, metric, by_condition):
    """A file as titan-disp sweep table writes it, of conditions with their values."""
    rows = [
        (f"{name}_{seed}", name, f"debug.seed={seed}", metric, value, "")
        for name, of_seeds in by_condition.items()
        for seed, value in enumerate(of_seeds)
    ]
    with file.open("w", newline="") as lines:
        header = ("run", "point", "seeds", "metric", "value", "missing")
        csv.writer(lines).writerows([header, *rows])
    return str(file)


def test_the_rate_s_rules(tmp_path):
    """On − off is -0.03 at the lowest rate and grows by 0.016 per doubling."""
    at_rates = {"0.001": -0.03, "0.004": 0.002, "0.016": 0.034}
    made_up = {f"off_lr-{rate}": [5.0] * 8 for rate in at_rates}
    for rate, difference in at_rates.items():
        made_up[f"on_lr-{rate}"] = 5 + difference + SPREAD
    made_up["off_lr-0.0015"] = [4.972] * 8
    file = values(tmp_path / "a", "validation", made_up)
    found = outcomes(read_values([file, file]))
    assert found["A1"] == pytest.approx([0.016] * 8)
    assert found["A2"] == pytest.approx(-0.03 + SPREAD)
    assert found["A3"] == pytest.approx(0.002 - SPREAD)
    verdicts = {
        name: PREDICTIONS[name].verdict(found[name]) for name in found if name[0] == "A"
    }
    assert verdicts["A1"].endswith("8 seeds): holds")
    assert verdicts["A2"].startswith("-0.0300 (95 % interval -0.0311 … -0.0289")
    assert verdicts["A3"].endswith("8 seeds): seeds are missing")
    assert len(found["B1"]) == len(found["B2"]) == 0
    other = values(tmp_path / "b", "validation", {"off_lr-0.0015": [4.97]})
    with pytest.raises(ValueError, match="duplicate"):
        read_values([file, other])


def test_the_doses_rules(tmp_path):
    """A nat per unit of cosine: 0.1 less cosine is 0.1 nats less."""
    cosines = dict(zip(DOSES, (0.5, 0.45, 0.4, 0.3, 0.6), strict=True))
    losses = {name: 5 + cosine + SPREAD for name, cosine in cosines.items()}
    cosines = {name: [cosine] * 8 for name, cosine in cosines.items()}
    files = [
        values(tmp_path / "loss", "validation", losses),
        values(tmp_path / "cosine", "mean_cosine", cosines),
    ]
    found = outcomes(read_values(files))
    assert found["B1"] == pytest.approx([-0.1] * 8)
    assert found["B2"] == pytest.approx([1.0] * 8)


@pytest.mark.parametrize(
    ("name", "mean", "words"),
    [
        ("A1", 0.016, "holds"),
        ("A1", 0.0, "falsified"),
        ("A2", -0.03, "holds"),
        ("A2", 0.03, "falsified"),
        ("A2", 0.0, "undecided"),
        ("A3", 0.0, "holds"),
        ("A3", 0.02, "falsified"),
        ("A3", 0.01, "undecided"),
        ("B1", -0.03, "holds"),
        ("B1", -0.01, "falsified (as to its size)"),
        ("B1", 0.01, "falsified"),
        ("B1, no difference of 0.01 or more", 0.0, "holds"),
        ("B2", -0.03, "falsified"),
    ],
)
def test_verdicts(name, mean, words):
    spread = np.tile(SPREAD, 3)[: max(PREDICTIONS[name].seeds, 8)]
    assert PREDICTIONS[name].verdict(mean + spread).endswith(f"seeds): {words}")


def test_the_power_that_the_page_states():
    """Each cell of its table is simulated again with the rule's own code."""
    eight = replace(SAME, seeds=8)
    tests = {
        "A1, 8 seeds | +0.016 per doubling": (PREDICTIONS["A1"], 0.016),
        "A2, 8 seeds | -0.03": (PREDICTIONS["A2"], -0.03),
        "A3, 8 seeds | 0": (eight, 0),
        "A3, 24 seeds | 0": (PREDICTIONS["A3"], 0),
        "B1, 16 seeds | -0.02": (PREDICTIONS["B1"], -0.02),
        "B1, 16 seeds | -0.01": (PREDICTIONS["B1"], -0.01),
        "B1, no difference of 0.01 or more, 16 seeds | 0": (SAME, 0),
    }
    slope = np.sqrt(2) / 4  # of three points two doublings apart, per unit of deviation
    for name, (prediction, effect) in tests.items():
        factor = slope if name.startswith("A1") else 1
        powers = [
            100 * prediction.power(effect, size * DEVIATION * factor)
            for size in (1, 1.5)
        ]
        cells = ["> 99 %" if power > 99 else f"{power:.0f} %" for power in powers]
        assert f"| {name} | {' | '.join(cells)} |" in PAGE


def test_the_deviation_is_the_measured_one():
    runs = read_runs()
    parts = [on_off(runs, part, "-192") for part in ("widths", "widths-again")]
    assert np.concatenate(parts).std(ddof=1) == pytest.approx(DEVIATION, abs=5e-5)


def test_the_sweeps_are_those_of_the_page():
    a = runs_of("rate", "rate_or_dispersion")
    b = runs_of("condensing", "condensing_dose")
    assert (len(a), len(runs_of("condensing_tuning"))) == (88, 16)
    assert "is 88 runs" in PAGE
    assert len(b) == 32 + 24
    assert len(set(a + b)) == 88 + 56  # no run is in two sweeps
    assert {condition for condition, _ in b} == set(DOSES)
    seeds = {seed for _, seed in a + b}
    assert seeds == set(range(41, 65))
    assert seeds.isdisjoint(read_runs().index)
    for name in ("A3", "B1"):
        of_rule = {"A3": (a, "off_lr-0.0015"), "B1": (b, "on")}[name]
        number = sum(condition == of_rule[1] for condition, _ in of_rule[0])
        assert number == PREDICTIONS[name].seeds
