"""The comparison of models by documents' scores, with numbers by hand and scipy's
formulas.
"""

import csv
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from tests.markdown import table
from titan_disp.lab.evaluate.compare import (
    Row,
    Scores,
    compare,
    explanation,
    pooled,
    scaled_values,
    to_csv,
)
from titan_disp.lab.evaluate.compare import table as cells_of
from titan_disp.lab.statistics import (
    holm,
    paired_difference,
    standard_error,
    unpaired_difference,
)
from titan_disp.lab.sweeps.comparison import Condition, Member, with_differences
from titan_disp.text import markdown_table


def rows_of(names):
    return [Row(name, "acc", (name,)) for name in names]


def scores_of(values):
    return Scores(values.mean(), None, 5, values)


def of_seeds(values, seeds):
    """Scores of one condition."""
    return pooled(dict(zip(seeds, map(scores_of, values), strict=True)))


def to_markdown(comparison):
    """The table and the explanation."""
    paragraphs = [markdown_table(cells_of(comparison)), *explanation(comparison)]
    return "\n\n".join(paragraphs)


def test_paired_difference_is_the_paired_t_test():
    rng = np.random.default_rng(0)
    baseline = rng.integers(0, 2, 300).astype(float)
    # Mostly equal answers, far smaller error than unpaired
    values = np.where(rng.random(300) < 0.8, baseline, 1.0)
    found = paired_difference(values, baseline)
    theirs = stats.ttest_rel(values, baseline)
    expected = (
        np.mean(values - baseline),
        stats.sem(values - baseline),
        theirs.pvalue,
        *theirs.confidence_interval(),
    )
    assert (
        found.mean,
        found.standard_error,
        found.p_value,
        found.low,
        found.high,
    ) == pytest.approx(expected)
    assert paired_difference(baseline, baseline).p_value is None
    assert paired_difference(np.ones(1), np.zeros(1)).standard_error is None
    # Equal differences have no standard error, and so no t-test, also if they are equal
    # up to rounding only.
    for shift in (1.0, 0.1):
        found = paired_difference(baseline + shift, baseline)
        assert found.mean == pytest.approx(shift)
        assert (found.standard_error, found.low, found.p_value) == (None, None, None)


def test_ranks_and_means():
    rng = np.random.default_rng(1)
    answers = {
        name: rng.integers(0, 2, (3, 40)).astype(float)
        for name in ("off", "on", "other")
    }
    # the same score from other documents is a tie
    answers["other"][0] = answers["on"][0][::-1]
    models = {
        model: dict(zip("xyz", map(scores_of, values), strict=True))
        for model, values in answers.items()
    }
    found = compare(rows_of("xyz"), models)
    means = np.array([v.mean(1) for v in answers.values()])
    ranks = stats.rankdata(-means, axis=0)
    assert [*found.mean.ranks.values()] == pytest.approx(ranks.mean(1))
    assert [*found.mean.scores.values()] == pytest.approx(means.mean(1))
    d = answers["on"] - answers["off"]
    on = found.mean.differences["on"]
    expected = (
        d.mean(),
        np.sqrt((d.var(1, ddof=1) / 40).sum()) / 3,
        stats.sem(d.mean(1)),
    )
    assert (
        on.mean,
        on.standard_error_documents,
        on.standard_error_tasks,
    ) == pytest.approx(expected)
    mean, of_documents, of_tasks = expected
    assert (
        f" {mean:+.4f} ± {of_documents:.4f} (documents) ± {of_tasks:.4f} (tasks) "
        in to_markdown(found)
    )


def test_two_tasks_by_hand():
    x = {
        "off": Scores(0.501, 0.02, 5, np.zeros(5)),
        "on": Scores(0.502, 0.03, 5, np.array([0, 0, 0, 1, 1.0])),
    }
    y = {
        "off": Scores(0.9, None, 0, np.zeros(1)),
        "on": Scores(0.1, None, 0, np.ones(1)),
    }
    rows = [Row("x", "acc", ("x",)), Row("y", "f1", ("y",))]
    found = compare(
        rows, {model: {"x": x[model], "y": y[model]} for model in ("off", "on")}
    )
    assert [t.standard_errors for t in found.tasks] == [
        {"off": 0.02, "on": 0.03},
        {"off": None, "on": None},
    ]
    assert [task.ranks for task in found.tasks] == [
        {"off": 2, "on": 1},
        {"off": 1, "on": 2},
    ]
    # The variance of 0, 0, 0, 1, 1 is (3 · 0.16 + 2 · 0.36) / 4 = 0.3, and 0.3 / 5 =
    # 0.06.
    assert [task.differences["on"].standard_error for task in found.tasks] == [
        pytest.approx(0.06**0.5),
        None,
    ]
    both = found.mean.differences["on"]
    assert (both.mean, both.standard_error_documents) == (pytest.approx(0.7), None)
    # for two numbers, half of their distance
    assert both.standard_error_tasks == pytest.approx(0.3)
    alone = compare(rows[:1], {model: {"x": x[model]} for model in x})
    assert alone.mean.differences["on"].standard_error_documents == pytest.approx(
        0.06**0.5
    )
    assert alone.mean.differences["on"].standard_error_tasks is None

    d = found.tasks[0].differences["on"]
    text = to_markdown(found)
    assert "seeds" not in text  # of one seed each
    assert table(text) == [
        ["task", "metric", "shots", "documents", "off", "on", "on − off"],
        [
            "x",
            "acc",
            "5",
            "5",
            "0.5010",
            "0.5020",
            f"+0.4000 ± 0.2449 (p {d.p_value:.2g}, Holm {2 * d.p_value:.2g})",
        ],
        ["y", "f1", "0", "1", "0.9000", "0.1000", "+1.0000"],
        ["mean", "", "", "", "0.7005", "0.3010", "+0.7000 ± 0.3000 (tasks)"],
        ["mean rank", "", "", "", "1.50", "1.50", ""],
    ]
    # one task needs no adjustment
    assert table(to_markdown(alone))[1][-1] == f"+0.4000 ± 0.2449 (p {d.p_value:.2g})"
    first, _, mean = csv.DictReader(to_csv(found).splitlines())
    assert list(first)[:5] == ["task", "metric", "num_fewshot", "documents", "off"]
    cells = [
        first[name]
        for name in (
            "off",
            "on standard error",
            "off seed error",
            "on rank",
            "on - off seed p",
        )
    ]
    assert (cells, mean["task"]) == (["0.501", "0.03", "", "1.0", ""], "mean")
    numbers = ("", " standard error", " low", " high", " p", " holm")
    expected = [d.mean, d.standard_error, d.low, d.high, d.p_value, d.holm]
    assert [float(first[f"on - off{name}"]) for name in numbers] == expected
    assert found.seeds == {"off": 1, "on": 1}
    assert (
        found.mean.seed_errors
        == found.tasks[0].seed_errors
        == {"off": None, "on": None}
    )
    assert found.mean.over_seeds == {}


@pytest.mark.parametrize(
    ("weight_by_size", "mean"), [(True, 4 / 6), (False, (3 / 4 + 1 / 2) / 2)]
)
def test_documents_of_a_group_are_pooled_as_it_averages(weight_by_size, mean):
    values = [np.array([1.0, 0, 1, 1]), np.array([0.0, 1])]
    assert scaled_values(values, weight_by_size).mean() == pytest.approx(mean)
    alike = scaled_values([np.full(10, 0.25), np.full(1000, 0.25)], weight_by_size)
    # Whatever the sizes, there is no error
    assert alike == pytest.approx(np.full(1010, 0.25))
    # Tasks are strata: the error is that of the mean of two independent means.
    tasks = [np.random.default_rng(n).normal(n, 1, n) for n in (50, 2000)]
    expected = np.sqrt(sum(task.var() / len(task) for task in tasks)) / 2
    if not weight_by_size:
        assert standard_error(scaled_values(tasks, False)) == pytest.approx(
            expected, rel=1e-2
        )


def test_holm():
    for p, adjusted in (
        # Wikipedia's example: 0.005 · 4, 0.01 · 3, 0.03 · 2, and 0.04 · 1, raised to
        # the one before it
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.5, 0.4], [0.8, 0.8]),
        ([0.9, 0.8, 0.7], [1, 1, 1]),  # no probability is above 1
        ([None, 0.02, 0.01], [None, 0.04, 0.03]),  # one of three tests has no result
    ):
        assert holm(p) == [
            None if one is None else pytest.approx(one) for one in adjusted
        ]


def test_seeds_of_one_condition():
    """By seed, off has 0.5, 0.75, 0.25 and on 0.75, 0.75; by document, 1/3, 1, 2/3, 0
    and 1, 1, 1/2, 1/2.
    """
    single = scores_of(np.array([0.0, 1]))
    assert pooled({1: single}) is single
    off = of_seeds(np.array([[0.0, 1, 1, 0], [1, 1, 1, 0], [0, 1, 0, 0]]), "abc")
    on = of_seeds(np.array([[1.0, 1, 1, 0], [1, 1, 0, 1]]), "de")
    assert (off.score, off.num_fewshot) == (0.5, 5)
    assert list(off.by_seed.values()) == [0.5, 0.75, 0.25]
    np.testing.assert_allclose(off.values, [1 / 3, 1, 2 / 3, 0])
    assert off.standard_error == pytest.approx(stats.sem([1 / 3, 1, 2 / 3, 0]))
    found = compare(rows_of("x"), {"off": {"x": off}, "on": {"x": on}})
    (task,) = found.tasks
    mean = found.mean.differences["on"]
    difference = task.differences["on"]
    d = np.array([2 / 3, 0, -1 / 6, 1 / 2])
    assert difference.mean == mean.mean == 0.25
    assert difference.standard_error == pytest.approx(stats.sem(d))
    assert difference.p_value == pytest.approx(stats.ttest_1samp(d, 0).pvalue)
    # Off has the variance 1/16 over three seeds, and on has none: the standard error is
    # √(1/48).
    over_seeds = task.over_seeds["on"]
    assert over_seeds == replace(found.mean.over_seeds["on"], holm=over_seeds.p_value)
    assert over_seeds.standard_error == pytest.approx(48**-0.5)
    # on has no spread
    half = stats.t.ppf(0.975, df=2) * 48**-0.5
    assert (over_seeds.low, over_seeds.high) == pytest.approx(
        (0.25 - half, 0.25 + half)
    )
    assert over_seeds.p_value == pytest.approx(2 * stats.t.sf(0.25 * 48**0.5, df=2))
    assert over_seeds.pairs == 0
    assert unpaired_difference([0.1, 0.2], [0.4]) is None
    assert unpaired_difference([0.4], [0.1, 0.2]) is None
    assert unpaired_difference([0.4, 0.4], [0.4, 0.4]).p_value is None
    assert task.seed_errors == {"off": pytest.approx(48**-0.5), "on": 0}
    assert (found.seeds, found.mean.seed_errors["off"]) == (
        {"off": 3, "on": 2},
        pytest.approx(48**-0.5),
    )
    header, line, *_ = table(to_markdown(found))
    last = "on − off, over seeds, not paired"
    assert [header[4], header[-1]] == ["off (3 seeds)", last]
    assert (line[4], line[-1][:22]) == ("0.5000 ± 0.1443", "+0.2500 ± 0.1443 (p 0.")
    row = next(csv.DictReader(to_csv(found).splitlines()))
    assert float(row["on - off seed p"]) == over_seeds.p_value
    assert "Welch" in to_markdown(found)
    assert "sign-flip" not in to_markdown(found)


def test_equal_seeds_are_pairs_as_in_a_sweep():
    """Runs of one seed share weights and data, so that their scores are correlated."""
    rng = np.random.default_rng(5)
    seeds = range(6)
    shared = rng.normal(0.5, 0.1, (6, 1)) + rng.normal(0, 0.02, (2, 6, 50))
    values = {"off": shared[0], "on": shared[1] + 0.02}
    by_seed = {name: v.mean(1) for name, v in values.items()}
    # The other order, and a seed that off lacks
    on = dict(zip([*seeds, 9], [*values["on"], np.ones(50)], strict=True))
    on = dict(reversed(on.items()))
    found = compare(
        rows_of("x"),
        {
            "off": {"x": of_seeds(values["off"], seeds)},
            "on": {"x": of_seeds(on.values(), list(on))},
        },
    )
    paired = found.mean.over_seeds["on"]
    theirs = stats.ttest_rel(by_seed["on"], by_seed["off"])
    flips = stats.permutation_test(
        (by_seed["on"] - by_seed["off"],), np.mean, permutation_type="samples"
    )
    assert (paired.low, paired.high) == pytest.approx([*theirs.confidence_interval()])
    assert (paired.pairs, paired.p_value) == (6, pytest.approx(flips.pvalue))
    # Welch's test would see nothing.
    welch = stats.ttest_ind(by_seed["on"], by_seed["off"], equal_var=False)
    assert paired.p_value < 0.05 < welch.pvalue
    conditions = [
        Condition(
            name, tuple(Member("", seed, score) for seed, score in scores.items())
        )
        for name, scores in (
            ("off", dict(zip(seeds, by_seed["off"], strict=True))),
            ("on", {seed: score.mean() for seed, score in on.items()}),
        )
    ]
    _, in_a_sweep = with_differences(conditions, "off")
    for name, number in vars(replace(in_a_sweep.difference, holm=None)).items():
        assert getattr(paired, name) == pytest.approx(number), name
    header, line, *_ = table(to_markdown(found))
    assert header[-1] == "on − off, over 6 pairs of seeds"
    assert line[-1].endswith(f" (p {flips.pvalue:.2g})")
    assert "Welch" not in to_markdown(found)
    row = next(csv.DictReader(to_csv(found).splitlines()))
    assert row["on - off seed pairs"] == "6"
    assert float(row["on - off seed difference"]) == pytest.approx(paired.mean)


def test_several_tasks_over_seeds():
    """Errors are of each seed's mean over the tasks.

    Holm adjusts for the number of tasks.
    """
    rng = np.random.default_rng(3)
    # [tasks, seeds, documents]
    values = {"off": rng.random((2, 3, 20)), "on": rng.random((2, 3, 20)) + 0.1}
    seeds = {"off": "abc", "on": "def"}
    found = compare(
        rows_of("xy"),
        {
            name: {task: of_seeds(v[i], seeds[name]) for i, task in enumerate("xy")}
            for name, v in values.items()
        },
    )
    errors = {name: stats.sem(v.mean((0, 2))) for name, v in values.items()}
    assert found.mean.seed_errors == pytest.approx(errors)
    assert found.mean.over_seeds["on"].standard_error == pytest.approx(
        np.hypot(*errors.values())
    )
    over_seeds = [task.over_seeds["on"] for task in found.tasks]
    p_values = [one.p_value for one in over_seeds]
    assert [one.holm for one in over_seeds] == holm(p_values) != p_values
