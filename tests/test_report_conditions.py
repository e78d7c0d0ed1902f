"""Which runs the report treats as seeds of one condition, and how it draws them."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from tests.test_report import T0, cells, row, whole, write_run
from titan_disp.errors import ConfigError
from titan_disp.lab.report import charts
from titan_disp.lab.report import page as picture_makers
from titan_disp.lab.report.charts import BINS, Line, by_condition
from titan_disp.lab.report.gather import conditions, gather
from titan_disp.lab.report.page import render


def seeded(folder, seed, rows=(), **sections):
    changes = {"debug": {"seed": seed}, "stream": {"seed": seed}, "job": {"dump_folder": str(folder)}}
    return write_run(folder, rows, **(changes | sections))


def one(name, seed, group=None, **settings):
    seeds = {"debug.seed": seed, "stream.seed": seed, "job.dump_folder": name, "metrics.log_freq": seed}
    return SimpleNamespace(name=name, group=group, settings={"dispersion.enabled": False, **seeds, **settings})


ON = {"dispersion.enabled": True}
OTHER = {"optimizer.lr": 1.0}


def test_conditions():
    for runs, found in (
        # Different seeds are one condition. A different λ, or the same seed again, is another condition.
        (
            [
                *(one(f"off-seed-{i}", i) for i in (1, 2)),
                *(one(f"on-seed-{i}", i, **ON) for i in (1, 2, 3)),
                one("small-lambda", 1, **ON, **{"dispersion.coeff": 0.01}),
                *(one(f"again-{i}", 7, **OTHER) for i in "ab"),
            ],
            [("off (2 seeds)", [0, 1]), ("on (3 seeds)", [2, 3, 4])]
            + [("small-lambda", [5]), ("again-a", [6]), ("again-b", [7])],
        ),
        # Of runs that were named together, configs, seeds and the runs between them do not matter.
        (
            [one("a", 1), one("b", 1, "x", **OTHER), one("c", 2), one("d", 1, "x"), one("e", 3, "y")],
            [("a (2 seeds)", [0, 2]), ("x (2 seeds)", [1, 3]), ("y", [4])],
        ),
        *(
            ([one(name, i) for i, name in enumerate(names)], [(f"{common} (2 seeds)", [0, 1])])
            for names, common in (
                (("off-1", "off-12"), "off"),
                (("on_seed_1_long", "on_seed_2_long"), "on"),
                (("seed-1", "seed-2"), "seed"),
                (("lr0.1-a", "lr0.1-b"), "lr0.1"),
                (("a", "b"), "a"),
            )
        ),
    ):
        assert conditions(runs) == found


def test_the_page(tmp_path):
    a, b, c = (seeded(tmp_path / name, 1, whole(30)[0]) for name in "abc")
    runs = gather([str(a), f"both={c},{b}"])
    assert [(run.name, run.group) for run in runs] == [("a", None), ("c", "both"), ("b", "both")]
    page = render(runs, T0)
    assert cells(page, "condition") == ["–", "both (2 seeds)", "both (2 seeds)"]
    alts = re.findall(r'alt="(cross-entropy \(training\)[^"]*)"', page)
    assert alts == ["cross-entropy (training) against tokens. a: 8.99 → 8.7; both (2 seeds): 8.99 → 8.7"]
    with pytest.raises(ConfigError, match="given twice"):
        gather([str(a), f"x={a},{b}"])


@pytest.fixture
def three(tmp_path):
    off = [
        seeded(tmp_path / f"off-{i}", i, [row(s, T0 + s, ce=ce + s) for s in range(2, 2 + last, 2)])
        for i, ce, last in ((1, 10.0, 6), (2, 13.0, 10))
    ]
    on = seeded(tmp_path / "on", 1, [row(s, T0 + s, ce=4.0) for s in (1, 2, 3)], dispersion={"enabled": True})
    return gather([*off, on])


def test_a_band_by_hand(three):
    """10 + s and 13 + s have steps 2, 4 and 6 in common."""
    lines = picture_makers.lines_of(three, "step", picture_makers.logged("ce"))
    off, on = by_condition(three, lines)
    assert (off.name, off.place, on.name, on.place) == ("off (2 seeds)", 0, "on", 1)
    assert off.x.tolist() == [2, 4, 6]
    assert [y.tolist() for y in (off.low, off.y, off.high)] == [[12, 14, 16], [13.5, 15.5, 17.5], [15, 17, 19]]
    assert (on.low, on.high, on.x.tolist(), on.y.tolist()) == (None, None, [1, 2, 3], [4, 4, 4])
    (axes,) = charts.curves([off, on], "step", "loss", charts.as_it_is).axes
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices
    assert {tuple(corner) for corner in corners} == {(2, 12), (4, 14), (6, 16), (2, 15), (4, 17), (6, 19)}
    assert [line.get_label() for line in axes.lines[::2]] == ["off (2 seeds)", "on"]
    assert band.get_facecolor()[0][:3] == pytest.approx(charts.matplotlib.colors.to_rgb(off.style["color"]))


def test_seeds_without_a_shared_step(three):
    """Seeds that were logged at different steps keep their own lines, in one colour."""
    a, b = Line("a", np.array([1.0, 3]), np.ones(2), 0), Line("b", np.array([2.0, 4]), np.ones(2), 1)
    assert [(line.name, line.place, line.low) for line in by_condition(three, [a, b])] == [
        ("a", 0, None),
        ("b", 0, None),
    ]
    a_hole = Line("a", np.array([1.0, 2, 3]), np.array([5.0, np.nan, 7]), 0)
    (line,) = by_condition(three, [a_hole, Line("b", np.arange(1.0, 4), np.ones(3), 1)])
    assert (line.x.tolist(), line.high.tolist()) == ([1, 3], [5, 7])


def test_many_points_of_seeds_keep_their_extremes():
    x = np.arange(1500.0)
    line = Line("a", x, x % 3, 0, low=x % 3 - 10, high=x % 3 + 10)
    (axes,) = charts.curves([line], "step", "loss", charts.as_it_is).axes
    vertices = axes.collections[0].get_paths()[0].vertices
    assert (vertices[:, 1].min(), vertices[:, 1].max()) == (-10, 12)
    assert axes.lines[0].get_ydata() == pytest.approx(np.ones(BINS))
    (axes,) = charts.curves([line], "step", "loss", charts.without_the_beginning).axes
    assert axes.get_ylim()[0] < -10
