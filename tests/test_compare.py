"""The comparison of models by their documents' scores, by hand and by scipy's formulas."""

import numpy as np
import pytest
from scipy import stats

from titan_disp.evaluate.compare import Scores, compare, paired_difference, scaled_values
from titan_disp.evaluate.tasks import Row


def test_paired_difference_against_the_plain_formula():
    rng = np.random.default_rng(0)
    baseline = rng.integers(0, 2, 300).astype(float)
    values = np.where(rng.random(300) < 0.8, baseline, 1.0)  # mostly the same answers: far smaller than unpaired
    found, d = paired_difference(values, baseline), values - baseline
    error = d.std(ddof=1) / np.sqrt(len(d))
    assert found.mean == pytest.approx(d.mean())
    assert found.standard_error == pytest.approx(error)
    assert found.p_value == pytest.approx(stats.ttest_rel(values, baseline).pvalue)
    t = stats.t.ppf(0.975, len(d) - 1)
    assert (found.low, found.high) == pytest.approx((d.mean() - t * error, d.mean() + t * error))
    assert error < 0.7 * np.hypot(stats.sem(values), stats.sem(baseline))
    same = paired_difference(baseline, baseline)
    assert (same.mean, same.p_value) == (0, None)
    assert paired_difference(np.ones(1), np.zeros(1)).standard_error is None


def test_ranks_and_means():
    rng = np.random.default_rng(1)
    answers = {name: rng.integers(0, 2, (3, 40)).astype(float) for name in ("off", "on", "other")}
    answers["other"][0] = answers["on"][0][::-1]  # the same score by other documents: a tie
    rows = [Row(name, "acc", (name,)) for name in ("x", "y", "z")]
    scores = {
        model: {row.name: Scores(v.mean(), None, 0, v) for row, v in zip(rows, values, strict=True)}
        for model, values in answers.items()
    }
    found = compare(rows, scores)
    means = np.array([v.mean(1) for v in answers.values()])
    ranks = stats.rankdata(-means, axis=0)
    assert ranks[1, 0] == ranks[2, 0]
    np.testing.assert_allclose(list(found.mean_rank.values()), ranks.mean(1))
    np.testing.assert_allclose(list(found.mean.values()), means.mean(1))
    d = answers["on"] - answers["off"]
    on = found.mean_difference["on"]
    assert on.mean == pytest.approx(d.mean())
    assert on.standard_error_documents == pytest.approx(np.sqrt((d.var(1, ddof=1) / 40).sum()) / 3)
    assert on.standard_error_tasks == pytest.approx(stats.sem(d.mean(1)))


def test_means_of_two_tasks_by_hand():
    """The differences 1 and 0.4; close scores are no tie; what one document leaves undefined is not taken for 0."""
    x = {"off": Scores(0.501, 0.02, 5, np.zeros(5)), "on": Scores(0.502, 0.03, 5, np.array([0, 0, 0, 1, 1.0]))}
    y = {"off": Scores(0.9, None, 0, np.zeros(1)), "on": Scores(0.1, None, 0, np.ones(1))}
    rows = [Row("x", "acc", ("x",)), Row("y", "f1", ("y",))]
    found = compare(rows, {model: {"x": x[model], "y": y[model]} for model in ("off", "on")})
    assert [(t.task, t.metric, t.num_fewshot, t.documents) for t in found.tasks] == [
        ("x", "acc", 5, 5),
        ("y", "f1", 0, 1),
    ]
    assert [t.standard_errors for t in found.tasks] == [{"off": 0.02, "on": 0.03}, {"off": None, "on": None}]
    assert [task.ranks for task in found.tasks] == [{"off": 2, "on": 1}, {"off": 1, "on": 2}]
    # Of 0, 0, 0, 1, 1: variance (3 · 0.16 + 2 · 0.36) / 4 = 0.3, and 0.3 / 5 = 0.06.
    assert [task.differences["on"].standard_error for task in found.tasks] == [pytest.approx(0.06**0.5), None]
    both = found.mean_difference["on"]
    assert both.mean == pytest.approx(0.7)
    assert both.standard_error_documents is None
    assert both.standard_error_tasks == pytest.approx(0.3)  # of two numbers, half of how far they are apart
    alone = compare(rows[:1], {model: {"x": x[model]} for model in x}).mean_difference["on"]
    assert alone.standard_error_documents == pytest.approx(0.06**0.5)
    assert alone.standard_error_tasks is None


def test_documents_of_a_group_are_pooled_as_it_averages():
    values = [np.array([1.0, 0, 1, 1]), np.array([0.0, 1])]
    assert scaled_values(values, weight_by_size=True).mean() == pytest.approx(4 / 6)
    assert scaled_values(values, weight_by_size=False).mean() == pytest.approx((3 / 4 + 1 / 2) / 2)
