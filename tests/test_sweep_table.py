"""The statistics of titan-disp sweep table computed in other ways, and tables of runs
written by hand.
"""

import csv
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.markdown import table
from tests.test_pictures import condensed
from tests.test_report import write_run
from tests.test_sweeps import COMPLETE, START, write, write_events
from titan_disp.config.command_options import SweepTableOptions
from titan_disp.errors import ConfigError
from titan_disp.lab import statistics
from titan_disp.lab.statistics import sign_flip_p
from titan_disp.lab.sweeps.comparison import (
    Condition,
    Member,
    final_metric,
    with_differences,
    write_table,
)
from titan_disp.lab.sweeps.definition import points, read_sweep


def test_sign_flips(monkeypatch):
    """Sums of whole numbers are often equal.

    Of 40 equal pairs, 2 of 10¹² patterns count, and no random sample has them.
    """
    for signed, p in (
        ([1, 2, 3], 2 / 8),
        ([-1, -2, -3], 2 / 8),
        ([1, 2, -3], 1.0),  # the sum is 0
        ([3, 3, -1], 4 / 8),  # +++ and ++− reach 5, and so do their mirror images
        ([0, 0, 2], 1.0),
    ):
        assert sign_flip_p(signed) == p
        assert (
            sign_flip_p([*signed, float("nan")])
            is sign_flip_p([5])
            is sign_flip_p([])
            is None
        )
    d = np.random.default_rng(9).integers(-4, 6, 9)
    sums = [abs(np.dot(signs, d)) for signs in itertools.product((-1, 1), repeat=9)]
    assert sign_flip_p(d) == np.mean([s >= abs(d.sum()) for s in sums])
    assert {
        sign_flip_p(order)
        for order in itertools.permutations([0.1, 0.2, 0.3, 0.4, 0.7])
    } == {2 / 32}
    d = np.random.default_rng(4).normal(0.3, 1.0, 13)
    exact = sign_flip_p(d)
    monkeypatch.setattr(statistics, "EXACT", 12)
    assert sign_flip_p([0.5] * 40) == pytest.approx(2 / (2**12 + 1), rel=1e-12)
    assert exact != sign_flip_p(d) == sign_flip_p(d) == pytest.approx(exact, abs=0.03)


def written(sweep, out=None, **options):
    return write_table(sweep, SweepTableOptions(Path("sweep.toml"), out=out, **options))


def condition(name, values):
    return Condition(
        name,
        tuple(
            Member(f"{name}_{seed}", (("debug.seed", seed),), v)
            for seed, v in values.items()
        ),
    )


class TestDifferences:
    def test_only_shared_seeds_are_pairs(self):
        off = condition("off", {1: 1.0, 2: 2.0, 3: None})
        on = condition("on", {2: 2.5, 3: 9.0, 4: 7.0})
        _, found = with_differences([off, on], "off")
        assert found.difference.pairs == 1
        assert found.difference.mean == 0.5
        assert (
            found.difference.standard_error,
            found.difference.low,
            found.difference.p_value,
        ) == (None, None, None)
        assert found.mean == pytest.approx((2.5 + 9 + 7) / 3)

    def test_holm_over_the_points(self):
        values = {
            "clear": (1, 2, 3, 4),
            "none": (1, -1, 1, -1),
            "some": (4, 3, 2, -0.5),
            "off": (0, 0, 0, 0),
        }
        every = [condition(name, dict(enumerate(v))) for name, v in values.items()]
        every += [condition("missing", {9: 1.0}), condition("one pair", {0: 1.0})]
        found = {c.name: c.difference for c in with_differences(every, "off")}
        assert found.pop("missing") is found.pop("off") is None
        # is not tested, and not counted
        assert (found["one pair"].mean, found.pop("one pair").holm) == (1.0, None)
        assert {n: d.p_value for n, d in found.items()} == {
            "clear": 0.125,
            "none": 1.0,
            "some": 0.25,
        }
        assert {n: d.holm for n, d in found.items()} == {
            "clear": 0.375,
            "none": 1.0,
            "some": 0.5,
        }


def a_run(folder, ce, held_out=None, steps=4, complete=True, cosines=None):
    rows = [
        {"step": s, "time": s, "loss": ce + 10, "ce": ce + (steps - s)}
        for s in range(1, steps + 1)
    ]
    if held_out is not None:
        for step, value in ((0, 9.0), (steps, held_out)):
            rows.append(
                {"step": step, "time": 9, "condensation": {"cross_entropy": value}}
            )
    write_run(folder, rows)
    if cosines is not None:
        condensed(*cosines).save(folder / "condensation" / f"step-{steps}.npz")
    write_events(folder, [START, COMPLETE if complete else ("stop", 2, "SIGTERM")])


def test_final_metrics(tmp_path):
    run = tmp_path / "run"
    a_run(run, 3.0, 3.5, cosines=[1.0, 0.2, 0.4, 0.6, 0.9])
    expected = {
        "ce": 3.0,
        "loss": 13.0,
        "cross_entropy": 3.5,
        "spearman": 1.0,
        "validation": None,
    }
    assert {name: final_metric(run, name) for name in expected} == expected
    assert final_metric(run, "mean_cosine") == pytest.approx(0.4)
    assert final_metric(run, "mean_cosine.late_blocks") == pytest.approx(0.6)
    for wrong in ("mean_cosine.middle", "accuracy"):
        with pytest.raises(
            ConfigError,
            match=f"is '{wrong}' .*expected validation, .*Parts of the model are blocks",
        ):
            final_metric(run, wrong)
    # A measurement before the last row is not from the end. NaN counts as no number.
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "time": 10, "ce": NaN}\n')
    assert final_metric(run, "cross_entropy") is final_metric(run, "ce") is None
    # Of a run of 4 steps that has logged 2, and that its budget may have ended.
    for step, expected in ((3, None), (4, 7.0)):
        a_run(tmp_path / str(step), 3.0, steps=2)
        if step == 3:
            write_events(tmp_path / "3", [START, ("stop", 4, "budget.stop_at_tokens")])
        with open(tmp_path / str(step) / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "time": 10, "validation": 7.0}) + "\n")
        assert final_metric(tmp_path / str(step), "validation") == expected


@pytest.fixture
def sweep(tmp_path):
    on = '[[points]]\nname = "on"\n[points.grid]\n"dispersion.coeff" = [0.1, 1.0]\n'
    text = f'[[points]]\nname = "off"\n{on}[grid]\n"debug.seed" = [1, 2]\n'
    made = read_sweep(write(tmp_path / "sweep.toml", text))
    for point, held_out in zip(
        points(made), (5.0, 5.2, 4.9, 5.0, 4.0, float("nan")), strict=True
    ):
        a_run(point.folder, 3.0, held_out, complete=point.name != "on_coeff-1.0_seed-1")
    return made


def read_csv(path):
    with open(path, newline="") as file:
        return {next(iter(row.values())): row for row in csv.DictReader(file)}


def test_the_table(sweep):
    """−0.1 and −0.2 have the mean −0.15 and s.e. 0.05. t with 1 degree of freedom is
    12.7062 at 97.5 %.
    """
    text = written(sweep, against="off")
    begin = [
        "condition",
        "seeds",
        "held-out cross-entropy",
        "difference to off",
        "pairs",
        "95 % interval",
        "p",
        "Holm",
    ]
    assert table(text) == [
        begin,
        ["off", "2 of 2", "5.1000 ± 0.1000", "–", "–", "–", "–", "–"],
        [
            "on_coeff-0.1",
            "2 of 2",
            "4.9500 ± 0.0500",
            "-0.1500 ± 0.0500",
            "2",
            "-0.7853 … +0.4853",
            "0.5",
            "0.5",
        ],
        ["on_coeff-1.0", "0 of 2", "–", "–", "–", "–", "–", "–"],
    ]
    assert "lacks 2 of 6 points" in text
    assert "- on_coeff-1.0_seed-1: unfinished: stop at step 2: SIGTERM" in text
    assert "- on_coeff-1.0_seed-2: finished without a finite cross_entropy" in text
    rows = read_csv(sweep.folder / "table.csv")
    half = 0.05 * 12.70620474
    on = rows["on_coeff-0.1"]
    assert [on.pop(name) for name in ("points", "finished", "against", "pairs")] == [
        "2",
        "2",
        "off",
        "2",
    ]
    numbers = {
        "mean": 4.95,
        "standard_error": 0.05,
        "difference": -0.15,
        "difference_standard_error": 0.05,
    }
    numbers |= {"low": -0.15 - half, "high": -0.15 + half, "p": 0.5, "holm": 0.5}
    assert {
        name: float(cell) for name, cell in on.items() if name != "point"
    } == pytest.approx(numbers)
    assert (rows["on_coeff-1.0"]["finished"], rows["on_coeff-1.0"]["difference"]) == (
        "0",
        "",
    )
    values = read_csv(sweep.folder / "values.csv")
    expected = {
        "run": "off_seed-2",
        "point": "off",
        "seeds": "debug.seed=2",
        "metric": "cross_entropy",
    }
    assert values["off_seed-2"] == expected | {"value": "5.2", "missing": ""}
    assert values["on_coeff-1.0_seed-1"]["missing"].startswith("unfinished")
    assert (sweep.folder / "table.png").read_bytes()[1:4] == b"PNG"


def test_tables_and_pictures_for_papers(sweep, tmp_path):
    written(sweep, tmp_path, latex=True, format=("svg,pdf",))
    names = {path.name for path in tmp_path.glob("table.*")}
    assert names >= {"table.tex", "table.svg", "table.pdf"}
    assert "table.png" not in names
    assert (tmp_path / "table.pdf").read_bytes()[:4] == b"%PDF"
    *_, row, last, end = (tmp_path / "table.tex").read_text().splitlines()
    assert row.startswith(r"on\_coeff-1.0 & 0 of 2")
    assert (row.endswith(r"\\"), last, end) == (True, r"\hline", r"\end{tabular}")
    with pytest.raises(ConfigError, match="--format is 'gif'"):
        written(sweep, tmp_path, format=("gif",))


def test_runs_that_cannot_be_read(sweep):
    metrics, events = (
        sweep.folder / "off_seed-1" / name for name in ("metrics.jsonl", "events.jsonl")
    )
    metrics.write_text('{"time": 3, "ce": 1.0}\n' + metrics.read_text())
    text = written(sweep)
    assert re.search("- off_seed-1: unreadable: .*'step'", text)
    assert table(text)[1][:2] == ["off", "1 of 2"]
    events.write_text('{"event": "complete", "step": 4}\n')
    assert "- off_seed-1: unreadable: " in written(sweep)
    for folder in sweep.folder.glob("on_*"):
        (folder / "condensation").mkdir()
        (folder / "condensation" / "step-4.npz").write_bytes(b"PK\3\4")
    assert "step-4.npz' cannot be read" in written(sweep, metric="mean_cosine")


def test_without_held_out_text(sweep, tmp_path):
    for file in sweep.folder.glob("*/metrics.jsonl"):
        file.write_text(
            "".join(line for line in file.open() if "condensation" not in line)
        )
    text = written(sweep, tmp_path / "out")
    assert table(text)[0] == [
        "condition",
        "seeds",
        "training cross-entropy of the last logged step",
    ]
    assert "No finished run has measured held-out text" in text
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "table.md",
        "table.csv",
        "values.csv",
        "table.png",
    }
    assert "No finished run" not in written(sweep, tmp_path / "out", metric="ce")
    with pytest.raises(
        ConfigError, match="is 'of', expected one of off, on_coeff-0.1,"
    ):
        written(sweep, against="of")
    with pytest.raises(ConfigError, match="is 'x'"):
        written(sweep, metric="x")
