"""Condensation against size, against a distilled model and against steps, read back from matplotlib's own objects."""

import numpy as np
import pytest

from tests.test_pictures import condensed
from titan_disp.lab import plots

# ρ and τ by hand, without the last block as the paper measures: ranks 3, 1, 2, 4 are 1 − 6·6/60 and (4 − 2)/6.
RISING, FALLING = condensed(0.1, 0.2, 0.05, 0.3), condensed(0.9, 0.5, 0.6, 0.1)
SOME = condensed(0.5, 0.1, 0.25, 0.8, 0.75)


def points(line):
    return np.round(line.get_xydata(), 6).tolist()


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (7, "7"),
        (999, "999"),
        (427_456, "427k"),
        (999_499, "999k"),
        (999_950, "1M"),
        (124_439_808, "124M"),
        (1_720_574_976, "1.72B"),
    ],
)
def test_sizes_in_three_digits(parameters, text):
    assert plots.size(parameters) == text


def test_a_family_by_size():
    """From the smallest to the largest, whatever the order given; the legend has every model with its size."""
    families = {
        "a": {"a-large": (2_000_000_000, SOME), "a-small": (124_439_808, FALLING)},
        "_b$": {"b": (427_008, RISING)},
    }
    figure = plots.by_size(families)
    spearman, kendall = figure.axes
    assert [points(line) for line in spearman.lines if len(line.get_xdata()) != 2 or line.get_xdata()[0] > 1] == [
        [[124_439_808, -1], [2_000_000_000, 0.4]],
        [[427_008, 1]],
    ]
    assert points(kendall.lines[1])[1] == [2_000_000_000, pytest.approx(1 / 3, abs=1e-6)]
    assert spearman.get_xscale() == "log"
    assert (spearman.get_xlabel(), spearman.get_ylim()) == ("parameters", (-1.08, 1.08))
    assert [axes.get_title() for axes in figure.axes] == [
        "Spearman's ρ of the mean cosine with depth",
        "Kendall's τ of the mean cosine with depth",
    ]
    told = [text.get_text() for text in figure.legends[0].texts]
    assert told == ["a: a-small 124M, a-large 2B", r" _b\$: b 427k"]
    assert {2e8, 5e8, 1e9, 2e9} <= set(spearman.xaxis.get_major_locator().tick_values(124e6, 2e9).round())
    ticks = spearman.xaxis.get_major_formatter()
    assert [ticks(x, None) for x in (1e6, 1e9, 1.5e10)] == ["1M", "1B", "15B"]


def test_pairs():
    """The first on top, base and distilled in one row, joined."""
    figure = plots.pairs([(("base", RISING), ("small$", FALLING)), (("other", SOME), ("made", RISING))])
    for axes, some in zip(figure.axes, (0.4, 1 / 3), strict=True):
        base, made = axes.lines[:2]
        assert [points(base), points(made)] == [[[1, 0], [round(some, 6), 1]], [[-1, 0], [1, 1]]]
        joined = [segment.tolist() for segment in axes.collections[0].get_segments()]
        assert joined == [[[1, 0], [-1, 0]], [[pytest.approx(some), 1], [1, 1]]]
        assert axes.yaxis_inverted()
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["base\n→ small\\$", "other\n→ made"]
    assert [text.get_text() for text in figure.legends[0].texts] == [
        "first of the pair (base model)",
        "second of the pair (made from it)",
    ]


def test_over_steps():
    runs = {"on": {0: RISING, 50: FALLING, 100: SOME}, "_off": {0: RISING, 100: RISING}}
    figure = plots.over_steps(runs)
    drawn = {axes.get_title(): [points(line) for line in axes.lines[:2]] for axes in figure.axes}
    assert drawn == {
        "mean pairwise cosine, mean over all blocks": [
            [[0, 0.125], [50, 0.55], [100, round(1.15 / 3, 6)]],
            [[0, 0.125], [100, 0.125]],
        ],
        "mean pairwise cosine, last block": [[[0, 0.05], [50, 0.6], [100, 0.8]], [[0, 0.05], [100, 0.05]]],
        "Spearman's ρ of the mean cosine with depth": [[[0, 1], [50, -1], [100, 0.4]], [[0, 1], [100, 1]]],
        "Kendall's τ of the mean cosine with depth": [[[0, 1], [50, -1], [100, 0.333333]], [[0, 1], [100, 1]]],
    }
    assert {axes.get_xscale() for axes in figure.axes} == {"linear"}
    assert [text.get_text() for text in figure.legends[0].texts] == ["on", " _off"]
    published = plots.over_steps({"pythia": dict.fromkeys((0, 1, 512, 143000), SOME)})
    assert {axes.get_xscale() for axes in published.axes} == {"symlog"}
