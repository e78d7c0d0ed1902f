"""Pictures read back from matplotlib's objects, for hand-made numbers that differ in
every direction.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.dates import num2date

from titan_disp.condensation import heatmap
from titan_disp.condensation.measure import Accumulator, AveragedCosines
from titan_disp.condensation.record import EDGES, Measurement
from titan_disp.lab import plots
from titan_disp.lab.report import charts
from titan_disp.run.history import Attempt
from titan_disp.text import number


def condensed(*mean_cosine, pairs=()):
    """A measurement. ``pairs``: for each layer, {cosine: fraction of pairs}."""
    pairs = pairs or [{cosine: 1.0} for cosine in mean_cosine]
    histogram = np.stack(
        [np.histogram(list(p), EDGES, weights=list(p.values()))[0] for p in pairs]
    )
    mean = np.array(mean_cosine)
    return Measurement(mean, mean / 3, mean / 2, 9 - 8 * mean, histogram, 8, 2)


# ρ and τ by hand, without embedding and last block: ranks 3, 1, 2, 4 are 1 − 6·6/60 and
# (4 − 2)/6.
RISING = condensed(0.1, 0.2, 0.05, 0.3)
FALLING = condensed(0.9, 0.5, 0.6, 0.1)
SOME = condensed(0.3, 0.5, 0.1, 0.25, 0.8, 0.75)


def shown_at(artist, x, y):
    """The number of an image or a mesh at a point of its axes, as matplotlib shows it
    at the mouse cursor.
    """
    x, y = artist.axes.transData.transform((x, y))
    return artist.get_cursor_data(
        SimpleNamespace(x=x, y=y, canvas=artist.figure.canvas)
    )


def upright(axes):
    return not axes.xaxis_inverted() and not axes.yaxis_inverted()


def points(line):
    return np.round(line.get_xydata(), 6).tolist()


def texts(artists):
    return [artist.get_text() for artist in artists]


def darkness(artist, value):
    return 3 - sum(artist.cmap(artist.norm(value))[:3])


def test_heatmap():
    layers = [
        {-0.76: 0.25, 0.51: 0.75},
        {0.1: 1.0},
        {0.9: 0.9, -0.2: 0.0999, 0.3: 0.0001},
    ]
    axes, _ = heatmap.heatmaps([{"gpt2": condensed(0.2, 0.1, 0.8, pairs=layers)}]).axes
    (image,) = axes.images
    assert upright(axes)
    assert [shown_at(image, 0, y) for y in (-0.76, 0.51)] == [0.25, 0.75]
    assert shown_at(image, 1, 0.1) == 1
    assert [shown_at(image, 2, y) for y in (0.9, -0.2)] == [0.9, 0.0999]
    assert image.get_array().count() == 5  # fractions below 0.001 are left blank
    assert points(axes.lines[0]) == [[0, 0.2], [1, 0.1], [2, 0.8]]
    assert darkness(image, 0.001) < darkness(image, 0.03) < darkness(image, 1)


def test_baselines_of_a_heatmap():
    """The column of random vectors is that of sampled ones, of averages as well."""
    z = torch.randn(9, 256, 12, generator=torch.Generator().manual_seed(0))
    averages = AveragedCosines()
    sums = Accumulator(2)
    for layer in (0, 1):
        averages.add(layer, z)
        sums.add(layer, z)
    before = {
        "averaged_histogram": averages.histogram(),
        "untrained_mean_cosine": np.array([0.1, 0.2]),
    }
    found = replace(sums.result(256), **before)
    for one in (found, plots.averaged(found)):
        axes, _ = heatmap.heatmaps([{"a": one}]).axes
        *_, sampled, random = np.ma.filled(axes.images[0].get_array(), 0).T
        np.testing.assert_allclose(random, sampled, atol=6e-3)
        assert (texts(axes.texts), points(axes.lines[1])) == (
            ["random vectors"],
            [[0, 0.1], [1, 0.2]],
        )


def test_side_by_side():
    # the first name is not read as mathematics
    levels = {"_a$1$": 0.1, "b": 0.3, "c": 0.5, "d": 0.7}
    *grid, _ = plots.side_by_side(
        {name: condensed(0, level) for name, level in levels.items()}, "all"
    ).axes
    assert [axes.get_title() for axes in grid if axes.axison] == [
        r" _a\$1\$",
        "b",
        "c",
        "d",
    ]
    for axes, level in zip(grid[:4], levels.values(), strict=True):
        assert shown_at(axes.images[0], 1, level) == 1
        assert axes.lines[0].get_ydata().tolist() == [0, level]


def test_mean_cosine_by_layer():
    figure = plots.mean_cosine_by_layer(
        {"_a$1$": condensed(0.1, 0.4, 0.2), "b": condensed(0.3, 0.0, 0.9)}
    )
    (axes,) = figure.axes
    lines = {line.get_label(): points(line) for line in axes.lines}
    assert lines == {
        r" _a\$1\$": [[0, 0.1], [1, 0.4], [2, 0.2]],
        "b": [[0, 0.3], [1, 0.0], [2, 0.9]],
    }
    assert axes.get_xlabel() == "layer (0: embedding, 1: last block, 2: final norm)"
    assert texts(figure.legends[0].texts) == [r" _a\$1\$", "b"]
    small = condensed(0.1, 0.2, 0.6)
    large = condensed(0.1, 0.3, 0.4, 0.5, 0.7)
    (axes,) = plots.mean_cosine_by_layer({"small": small, "large": large}).axes
    assert [line.get_xdata().tolist() for line in axes.lines] == [
        [0, 1, 1.05],
        [0, 1 / 3, 2 / 3, 1, 1.05],
    ]
    assert (
        axes.get_xlabel()
        == "relative depth (0: embedding, 1: last block, beyond: final norm)"
    )
    assert (
        heatmap.layer_label([small, large])
        == "layer (0: embedding, last two: last block, final norm)"
    )


def test_depth_bars():
    (axes,) = plots.depth_bars(
        {"some": SOME, "_falling$1$": FALLING, "flat": condensed(0.7, 0.2, 0.9, 0.2)}
    ).axes
    assert axes.get_yticks().tolist() == [0, 1, 2]
    names = ["some", r" _falling\$1\$", "flat"]
    ranges = [one.over_depth["blocks_after_norm"].range for one in (SOME, FALLING)]
    assert texts(axes.get_yticklabels()) == [
        f"{name}\nrange {number(value, 2)}"
        for name, value in zip(names, [*ranges, 0.0], strict=True)
    ]
    for container, name, value in zip(
        axes.containers, ("Spearman's ρ", "Kendall's τ"), (0.4, 1 / 3), strict=True
    ):
        assert container.get_label() == name
        assert [bar.get_width() for bar in container] == pytest.approx([value, -1, 0])
        assert [round(bar.get_y() + bar.get_height() / 2) for bar in container] == [
            0,
            1,
            2,
        ]
    told = "– (mean cosines are equal)"
    assert texts(axes.texts) == ["+0.40", "-1.00", told, "+0.33", "-1.00", told]
    # the first one is on top
    assert (axes.yaxis_inverted(), axes.xaxis_inverted()) == (True, False)


def test_over_training():
    on = {0: condensed(0.1, 0.2), 50: condensed(0.3, 0.4), 1000: condensed(0.5, 0.6)}
    runs = {"_on$1$": on, "off": {0: condensed(0.1, 0.7), 1000: condensed(0.2, 0.9)}}
    figure = plots.over_training(runs)
    (legend,) = figure.legends
    handles = [tuple(handle.get_color()) for handle in legend.legend_handles]
    colors = dict(zip(texts(legend.texts), handles, strict=True))
    assert (list(colors), len(set(handles))) == (["0", "50", "1,000"], 3)
    for axes, name, by_step in zip(
        figure.axes, (r" _on\$1\$", "off"), runs.values(), strict=True
    ):
        assert (axes.get_title(), axes.get_xlabel()) == (
            name,
            "layer (0: embedding,\n0: last block, 1: final norm)",
        )
        drawn = {
            tuple(line.get_color()): line.get_ydata().tolist() for line in axes.lines
        }
        assert drawn == {
            colors[f"{step:,}"]: found.mean_cosine.tolist()
            for step, found in by_step.items()
        }


def test_layer_map():
    by_step = {
        10: condensed(0.1, 0.2, 0.3, 0.4),
        30: condensed(0.5, 0.6, 0.7, 0.75),
        70: condensed(0.8, 0.85, 0.9, 1),
    }
    axes = heatmap.new_figure(5, 4).subplots()
    plots.draw_layer_map(axes, by_step, "_run$1$", end=80)
    (mesh,) = axes.collections
    assert upright(axes)
    for step, found in by_step.items():
        assert [
            shown_at(mesh, step + 1, layer) for layer in range(4)
        ] == found.mean_cosine.tolist()
    # Ends with the run, although other columns are wider
    assert axes.get_xlim() == (10, 80)
    assert axes.get_ylabel() == "layer (0: embedding,\n2: last block, 3: final norm)"
    assert mesh.get_clim() == (0, 1)
    assert darkness(mesh, 0.1) < darkness(mesh, 0.9)
    assert axes.get_title() == r" _run\$1\$"


def scaled(scale, *y):
    line = charts.Line("a", np.arange(float(len(y))), np.array(y), place=0)
    axes = heatmap.new_figure(5, 4).subplots()
    charts.draw_lines(axes, [line], "y", scale)
    return axes


def test_scales():
    assert scaled(charts.from_zero, 5.0, 9.0).get_ylim() == pytest.approx((0, 9.45))
    # not on the frame
    assert scaled(charts.from_zero, 500.0, 500.1).get_ylim()[1] > 520
    assert scaled(charts.from_zero, 0.0, 0.0).get_ylim()[0] == 0
    assert scaled(charts.correlation, 0.1, 0.2).get_ylim() == (-1.05, 1.05)
    for values, scale in (
        ((1.0, 31.0), "log"),
        ((1.0, 29.0), "linear"),
        ((0.0, 31.0), "linear"),
    ):
        assert scaled(charts.by_factors, *values).get_yscale() == scale
    # In steps 0 to 99, the value 50 in the first 5 % is left out, and nothing after it.
    limits = scaled(
        charts.without_the_beginning, *[50.0] * 5, 6.0, *[4.0, 2.0] * 47
    ).get_ylim()
    assert limits == pytest.approx((2 - 0.05 * 4, 6 + 0.05 * 4))


def test_timeline():
    begin = 1_772_323_200.0  # 2026-03-01 00:00 UTC
    first = Attempt(
        begin, job="7.0", first_step=0, times=[begin + 10, begin + 30], steps=[1, 3]
    )
    second = Attempt(
        begin + 3630,
        job="7.1",
        first_step=2,
        times=[begin + 3630, begin + 3650],
        steps=[2, 3],
    )
    kinds = (("checkpoint", 20), ("save_failed", 25), ("checkpoint", 3660))
    events = [{"event": name, "time": begin + after} for name, after in kinds]
    above, below = charts.timeline([first, second], events).axes

    def seconds(xs):
        return [round(num2date(x).timestamp() - begin) for x in xs]

    drawn = [
        (seconds(line.get_xdata(orig=False)), line.get_ydata().tolist())
        for line in above.lines
    ]
    assert drawn == [([10, 30], [1, 3]), ([3630, 3650], [2, 3])]
    rows = dict(zip(below.get_yticks(), texts(below.get_yticklabels()), strict=True))
    assert list(rows.values()) == ["checkpoint", "save failed"]
    drawn = {
        rows[line.get_ydata()[0]]: seconds(line.get_xdata(orig=False))
        for line in below.lines
    }
    assert drawn == {"checkpoint": [20, 3660], "save failed": [25]}
    # not as mathematics
    charts.timeline(
        [first], [{"event": "$a_$", "time": begin}]
    ).draw_without_rendering()
    assert (below.yaxis_inverted(), upright(above)) == (True, True)
    for axes in (above, below):
        (gap,) = axes.patches
        assert seconds([gap.get_x(), gap.get_x() + gap.get_width()]) == [30, 3630]


def test_a_family_by_size():
    large = {"a-large": (2_000_000_000, SOME), "a-small": (124_439_808, FALLING)}
    figure = plots.by_size({"a": large, "_b$": {"b": (427_008, RISING)}})
    spearman, kendall = figure.axes
    assert [
        points(line)
        for line in spearman.lines
        if len(line.get_xdata()) != 2 or line.get_xdata()[0] > 1
    ] == [
        [[124_439_808, -1], [2_000_000_000, 0.4]],
        [[427_008, 1]],
    ]
    assert points(kendall.lines[1])[1] == [
        2_000_000_000,
        pytest.approx(1 / 3, abs=1e-6),
    ]
    assert (spearman.get_xscale(), spearman.get_ylim()) == ("log", (-1.08, 1.08))
    assert [axes.get_title()[:8] for axes in figure.axes] == ["Spearman", "Kendall'"]
    assert texts(figure.legends[0].texts) == [
        "a: a-small 124M, a-large 2B",
        r" _b\$: b 427k",
    ]
    assert {2e8, 5e8, 1e9, 2e9} <= set(
        spearman.xaxis.get_major_locator().tick_values(124e6, 2e9).round()
    )
    ticks = spearman.xaxis.get_major_formatter()
    assert [ticks(x, None) for x in (1e6, 1e9, 1.5e10)] == ["1M", "1B", "15B"]


def test_an_empty_picture_says_why():
    equal = condensed(0.7, 0.2, 0.9, 0.2)
    figure = plots.by_size({"a": {"b": (427_008, equal)}})
    for axes in figure.axes:
        assert texts(axes.texts)[0].startswith("nothing to draw: the mean cosines")
    figure = plots.by_size({"a": {"b": (427_008, RISING)}})
    assert texts(figure.axes[0].texts) == []


def test_pairs():
    figure = plots.pairs(
        [(("base", RISING), ("small$", FALLING)), (("other", SOME), ("made", RISING))]
    )
    for axes, some in zip(figure.axes, (0.4, 1 / 3), strict=True):
        base, made = axes.lines[:2]
        assert [points(base), points(made)] == [
            [[1, 0], [round(some, 6), 1]],
            [[-1, 0], [1, 1]],
        ]
        joined = [
            np.round(segment, 9).tolist()
            for segment in axes.collections[0].get_segments()
        ]
        assert joined == [[[1, 0], [-1, 0]], [[pytest.approx(some), 1], [1, 1]]]
        assert axes.yaxis_inverted()
    assert texts(figure.axes[0].get_yticklabels()) == [
        "base\n→ small\\$",
        "other\n→ made",
    ]
    assert [label[:18] for label in texts(figure.legends[0].texts)] == [
        "first of the pair ",
        "second of the pair",
    ]


def test_over_steps():
    figure = plots.over_steps(
        {"on": {0: RISING, 50: FALLING, 100: SOME}, "_off": {0: RISING, 100: RISING}}
    )
    expected = {
        "mean over all blocks": [0.125, 0.55, 0.4125],
        "last block": [0.05, 0.6, 0.8],
        "Spearman's ρ": [1, -1, 0.4],
        "Kendall's τ": [1, -1, 0.333333],
    }
    for axes, (title, values) in zip(figure.axes, expected.items(), strict=True):
        assert title in axes.get_title()
        on, off = [points(line) for line in axes.lines[:2]]
        assert on == [list(point) for point in zip((0, 50, 100), values, strict=True)]
        assert off == [[0, values[0]], [100, values[0]]]
        assert axes.get_xscale() == "linear"
    assert texts(figure.legends[0].texts) == ["on", " _off"]
    published = plots.over_steps({"pythia": dict.fromkeys((0, 1, 512, 143000), SOME)})
    assert {axes.get_xscale() for axes in published.axes} == {"symlog"}
