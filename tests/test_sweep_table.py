"""These tests compute the statistics of titan-disp sweep table in other ways, and tabulate runs written by hand."""

import csv
import itertools
import json

import numpy as np
import pytest
from scipy import stats

from tests.command_line import DEMO
from titan_disp.condensation.record import BINS, Condensation
from titan_disp.errors import ConfigError
from titan_disp.lab import statistics
from titan_disp.lab.statistics import sign_flip_p
from titan_disp.lab.sweeps.comparison import Condition, Member, differences, final_metric, write_table
from titan_disp.lab.sweeps.definition import points, read_sweep
from titan_disp.text import markdown_table


class TestSignFlip:
    @pytest.mark.parametrize(
        ("differences", "p"),
        [
            ([1, 2, 3], 2 / 8),
            ([-1, -2, -3], 2 / 8),
            ([1, 2, -3], 1.0),  # the sum is 0
            ([3, 3, -1], 4 / 8),  # +++ and ++− reach 5, and so do their mirror images
            ([0, 0, 2], 1.0),
            ([0, 1, 1], 4 / 8),
            ([0.1, 0.2, 0.3], 2 / 8),
            ([5], 1.0),
            ([1] * 6, 2 / 64),
        ],
    )
    def test_by_hand(self, differences, p):
        assert sign_flip_p(differences) == p
        assert sign_flip_p([*differences, float("nan")]) is None

    @pytest.mark.parametrize("n", [2, 5, 9])
    def test_all_patterns_one_by_one(self, n):
        """Many sums of whole numbers are equal, so a missed tie would show."""
        d = np.random.default_rng(n).integers(-4, 6, n)
        sums = [abs(np.dot(signs, d)) for signs in itertools.product((-1, 1), repeat=n)]
        assert sign_flip_p(d) == np.mean([s >= abs(d.sum()) for s in sums])

    def test_scipy(self):
        d = np.random.default_rng(3).normal(0.3, 1.0, 11)
        exact = stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=np.inf)
        assert sign_flip_p(d) == pytest.approx(exact.pvalue, rel=1e-12)

    def test_the_order_of_sums_does_not_matter(self):
        """0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1 in floating point, but both are as far from 0 as the observed sum."""
        d = [0.1, 0.2, 0.3, 0.4, 0.7]
        assert {sign_flip_p(order) for order in itertools.permutations(d)} == {2 / 32}

    def test_many_pairs(self, monkeypatch):
        """Of 40 equal pairs, two of 10¹² patterns count: those with all signs equal. A random sample has neither.

        scipy then counts the observed pattern itself, on either side.
        """
        monkeypatch.setattr(statistics, "EXACT", 12)
        assert sign_flip_p([0.5] * 40) == pytest.approx(2 / (2**12 + 1), rel=1e-12)
        d = np.random.default_rng(4).normal(0.3, 1.0, 13)
        monkeypatch.setattr(statistics, "EXACT", 13)
        exact = sign_flip_p(d)
        monkeypatch.setattr(statistics, "EXACT", 12)
        assert exact != sign_flip_p(d) == sign_flip_p(d) == pytest.approx(exact, abs=0.03)

    def test_nothing_to_flip(self):
        assert sign_flip_p([]) is None


def condition(name, values):
    return Condition(name, tuple(Member(f"{name}_{seed}", (("debug.seed", seed),), v) for seed, v in values.items()))


class TestDifferences:
    def test_by_hand(self):
        """−0.1, −0.2, −0.3 have the mean −0.2 and s.e. 0.1/√3. t with 2 degrees of freedom is 4.302653 at 97.5 %."""
        off, on = condition("off", {1: 4.0, 2: 4.2, 3: 4.4}), condition("on", {1: 3.9, 2: 4.0, 3: 4.1})
        first, second = differences([off, on], "off")
        assert first.difference is None
        found = second.difference
        assert found.mean == pytest.approx(-0.2)
        assert found.standard_error == pytest.approx(0.0577350, rel=1e-5)
        assert (found.low, found.high) == (pytest.approx(-0.2 - 0.2484138), pytest.approx(-0.2 + 0.2484138))
        assert (found.p_value, found.holm) == (0.25, 0.25)
        assert second.mean == pytest.approx(4.0)
        assert second.standard_error == pytest.approx(0.0577350, rel=1e-5)

    def test_only_shared_seeds_are_pairs(self):
        """A seed that only one of the two has gives no difference, but counts in the mean."""
        off, on = condition("off", {1: 1.0, 2: 2.0, 3: None}), condition("on", {2: 2.5, 3: 9.0, 4: 7.0})
        _, found = differences([off, on], "off")
        assert found.pairs == ((("debug.seed", 2),),)
        assert found.difference.mean == 0.5
        assert (found.difference.standard_error, found.difference.low, found.difference.p_value) == (None, None, 1.0)
        assert found.mean == pytest.approx((2.5 + 9 + 7) / 3)

    def test_holm_over_the_points(self):
        """Holm multiplies 2/16, the smallest of three, by 3, and 4/16 by 2. A point without pairs is not a test."""
        seeds = range(4)
        off = condition("off", dict.fromkeys(seeds, 0.0))
        clear = condition("clear", dict(zip(seeds, (1.0, 2.0, 3.0, 4.0), strict=True)))
        none = condition("none", dict(zip(seeds, (1.0, -1.0, 1.0, -1.0), strict=True)))
        some = condition("some", dict(zip(seeds, (4.0, 3.0, 2.0, -0.5), strict=True)))
        missing = condition("missing", {9: 1.0})
        found = {c.name: c.difference for c in differences([clear, none, off, missing, some], "off")}
        assert {n: d.p_value for n, d in found.items() if d} == {"clear": 0.125, "none": 1.0, "some": 0.25}
        assert {n: d.holm for n, d in found.items() if d} == {"clear": 0.375, "none": 1.0, "some": 0.5}
        assert found["missing"] is None


def a_run(folder, ce, held_out=None, steps=4, complete=True, cosines=None):
    """Write the files of a run that the table reads."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"validation": {"enable": False}}))
    rows = [
        {"step": s, "time": s, "loss": ce + 10, "ce": ce + (steps - s), "dispersion": -0.5} for s in range(1, steps + 1)
    ]
    if held_out is not None:
        over_depth = {"spearman": 0.5, "kendall": 0.25}
        for step, value in ((0, 9.0), (steps, held_out)):
            rows.append({"step": step, "time": 9, "condensation": {"cross_entropy": value, "after_norm": over_depth}})
    if cosines is not None:
        layers = np.array(cosines)
        histogram = np.zeros((len(layers), BINS))
        Condensation(layers, layers, layers, layers, histogram, 8, 2).save(
            folder / "condensation" / f"step-{steps}.npz"
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [("start", 0), *([("complete", steps)] if complete else [("stop", 2)])]
    lines = [{"time": "2026-01-01T00:00:00+00:00", "event": e, "step": s, "reason": "SIGTERM"} for e, s in events]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class TestFinal:
    def test_numbers(self, tmp_path):
        """Numbers come from the last row and the last measurement on held-out text. Blocks have 0.2, 0.4 and 0.6."""
        a_run(tmp_path / "run", 3.0, 3.5, cosines=[0.0, 0.2, 0.4, 0.6, 0.9])
        found = {
            name: final_metric(tmp_path / "run", name)
            for name in ("ce", "loss", "cross_entropy", "spearman", "validation")
        }
        assert found == {"ce": 3.0, "loss": 13.0, "cross_entropy": 3.5, "spearman": 0.5, "validation": None}
        assert final_metric(tmp_path / "run", "mean_cosine") == pytest.approx(0.4)
        assert final_metric(tmp_path / "run", "mean_cosine.late_blocks") == pytest.approx(0.6)
        with pytest.raises(ConfigError, match="has no part 'middle'; it has blocks"):
            final_metric(tmp_path / "run", "mean_cosine.middle")
        with pytest.raises(ConfigError, match="the metric is 'accuracy' .*, expected validation, cross_entropy"):
            final_metric(tmp_path / "run", "accuracy")

    def test_what_is_not_the_end_or_no_number(self, tmp_path):
        """A measurement before the last row is not from the end. NaN counts as no number."""
        a_run(tmp_path / "early", 3.0, 3.5)
        with open(tmp_path / "early" / "metrics.jsonl", "a") as file:
            file.write('{"step": 5, "time": 10, "ce": NaN}\n')
        assert final_metric(tmp_path / "early", "cross_entropy") is None
        assert final_metric(tmp_path / "early", "ce") is None


@pytest.fixture
def sweep(tmp_path):
    """The sweep has off and two λ with two seeds each. One run of the second λ has stopped, and one has no number."""
    text = f"""[sweep]
config = "{DEMO}"
folder = "{tmp_path / "runs"}"
[[points]]
name = "off"
[[points]]
name = "on"
[points.grid]
"dispersion.coeff" = [0.1, 1.0]
[grid]
"debug.seed" = [1, 2]
"""
    (tmp_path / "sweep.toml").write_text(text)
    made = read_sweep(tmp_path / "sweep.toml")
    for point, held_out in zip(points(made), (5.0, 5.2, 4.9, 5.0, 4.0, float("nan")), strict=True):
        a_run(point.folder, 3.0, held_out, complete=point.name != "on_coeff-1.0_seed-1")
    return made


class TestTable:
    def test_all_of_it(self, sweep, tmp_path):
        """−0.1 and −0.2 have the mean −0.15 and s.e. 0.05. t with 1 degree of freedom is 12.7062 at 97.5 %."""
        text = write_table(sweep, against="off")
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
        ]
        assert rows[0] == [
            "condition",
            "seeds",
            "held-out cross-entropy",
            "difference to off",
            "pairs",
            "95 % interval",
            "p",
            "Holm",
        ]
        assert rows[2:] == [
            ["off", "2 of 2", "5.1000 ± 0.1000", "–", "–", "–", "–", "–"],
            ["on_coeff-0.1", "2 of 2", "4.9500 ± 0.0500", "-0.1500 ± 0.0500", "2", "-0.7853 … +0.4853", "0.5", "0.5"],
            ["on_coeff-1.0", "0 of 2", "–", "–", "–", "–", "–", "–"],
        ]
        assert "**The table lacks 2 of 6 points**" in text
        assert "- on_coeff-1.0_seed-1: unfinished: stop at step 2: SIGTERM" in text
        assert "- on_coeff-1.0_seed-2: finished without a finite cross_entropy at its end" in text
        with open(sweep.folder / "table.csv") as file:
            table = {row["point"]: row for row in csv.DictReader(file)}
        assert (table["on_coeff-0.1"]["finished"], table["on_coeff-1.0"]["finished"]) == ("2", "0")
        assert float(table["on_coeff-0.1"]["low"]) == pytest.approx(-0.15 - 0.05 * 12.70620474, rel=1e-6)
        assert table["on_coeff-1.0"]["difference"] == ""
        with open(sweep.folder / "values.csv") as file:
            values = {row["run"]: row for row in csv.DictReader(file)}
        assert len(values) == 6
        assert values["off_seed-2"] == {
            **{"run": "off_seed-2", "point": "off", "seeds": "debug.seed=2", "metric": "cross_entropy", "value": "5.2"},
            "missing": "",
        }
        assert values["on_coeff-1.0_seed-1"]["missing"].startswith("unfinished")
        assert (sweep.folder / "table.png").read_bytes()[1:4] == b"PNG"

    def test_without_held_out_text(self, sweep, tmp_path):
        """Training cross-entropy replaces missing measurements, with a note unless the user asked for it."""
        for file in sweep.folder.glob("*/metrics.jsonl"):
            file.write_text("".join(line for line in file.open() if "condensation" not in line))
        text = write_table(sweep, tmp_path / "out")
        assert "training cross-entropy of the last logged step. (No finished run has measured held-out text.)" in text
        assert "difference to" not in text
        assert {p.name for p in (tmp_path / "out").iterdir()} == {"table.md", "table.csv", "values.csv", "table.png"}
        assert "No finished run" not in write_table(sweep, tmp_path / "out", metric="ce")

    def test_a_column_of_one_letter(self):
        """`:` alone is not a ruler in Markdown."""
        assert markdown_table([["a", "p"], ["b", "1"]], left=1) == "| a  |  p |\n| -- | -: |\n| b  |  1 |"

    def test_names_that_are_not_there(self, sweep):
        with pytest.raises(ConfigError, match="is 'of', expected one of off, on_coeff-0.1, on_coeff-1.0"):
            write_table(sweep, against="of")
        with pytest.raises(ConfigError, match="the metric is 'x'"):
            write_table(sweep, metric="x")

    def test_before_anything_has_run(self, tmp_path):
        (tmp_path / "s.toml").write_text(
            f'[sweep]\nconfig = "{DEMO}"\nfolder = "{tmp_path}/none"\n[grid]\n"debug.seed" = [1]\n'
        )
        text = write_table(read_sweep(tmp_path / "s.toml"))
        assert "| demo_cpu  | 0 of 1 |" in text
        assert "seed-1: not started" in text
