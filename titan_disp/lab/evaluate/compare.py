"""This module compares models with the first one, paired by document, and over seeds if there are several."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from titan_disp.lab.evaluate.tasks import Row
from titan_disp.text import csv_text, markdown_table


@dataclass(frozen=True)
class OverSeeds:
    """Uncertainty over seeds of the difference between two conditions' mean scores, by Welch's t-test.

    Attributes:
        standard_error: standard error of the difference, √(s²/n + s₀²/n₀).
        p_value: two-sided p value; None if it is undefined.
        holm: the p value, adjusted for the number of tasks.
    """

    standard_error: float
    p_value: float | None
    holm: float | None = None


@dataclass(frozen=True)
class Difference:
    """Difference of a model to the first one on a task.

    Fields are None if they are undefined, with a single document or if all differences are equal.

    Attributes:
        mean: mean of the documents' differences.
        standard_error: standard error of the mean.
        low, high: 95 % interval of the mean, by Student's t.
        p_value: two-sided p value of a paired t-test.
        holm: the p value, adjusted for the number of tasks (Holm 1979).
        over_seeds: uncertainty over seeds, if both models have at least two seeds.
    """

    mean: float
    standard_error: float | None
    low: float | None
    high: float | None
    p_value: float | None
    holm: float | None = None
    over_seeds: OverSeeds | None = None


@dataclass(frozen=True)
class MeanDifference:
    """Difference of a model to the first one, averaged over tasks with equal weights.

    Attributes:
        mean: mean of the tasks' differences.
        standard_error_documents: standard error over the documents of these tasks.
        standard_error_tasks: standard error over tasks, from the scatter of the tasks' differences.
        over_seeds: uncertainty over seeds, from each seed's mean over tasks, if both models have at least two seeds.
    """

    mean: float
    standard_error_documents: float | None
    standard_error_tasks: float | None
    over_seeds: OverSeeds | None = None


@dataclass(frozen=True)
class TaskComparison:
    """The comparison on one task. Dictionaries are by model; ``differences`` does not have the first model.

    Attributes:
        ranks: rank of each model. Rank 1 is the best, and ties share their mean rank.
        seed_errors: standard error of the score over seeds; None with a single seed.
    """

    task: str
    metric: str
    num_fewshot: int | str
    documents: int
    scores: dict[str, float]
    standard_errors: dict[str, float | None]
    seed_errors: dict[str, float | None]
    ranks: dict[str, float]
    differences: dict[str, Difference]


@dataclass(frozen=True)
class Comparison:
    """The comparison on all tasks, and means over them.

    Attributes:
        seeds: number of seeds of each model.
        mean_seed_error: standard error over seeds of the mean over tasks; None with a single seed.
    """

    tasks: list[TaskComparison]
    seeds: dict[str, int]
    mean: dict[str, float]
    mean_seed_error: dict[str, float | None]
    mean_rank: dict[str, float]
    mean_difference: dict[str, MeanDifference]


@dataclass(frozen=True)
class Scores:
    """A model's scores on a task.

    Attributes:
        score: the harness's score; for several seeds, their mean.
        standard_error: the harness's standard error; for several seeds, that of their mean over documents.
        values: [documents] float64, with the score as mean. A group's documents are scaled by their weights.
        by_seed: score of each seed, or empty for a single model.
    """

    score: float
    standard_error: float | None
    num_fewshot: int | str
    values: np.ndarray
    by_seed: tuple[float, ...] = ()


def pooled(seeds: Sequence[Scores]) -> Scores:
    """Average several seeds of one condition into one model. Each document's value is its mean over all seeds."""
    if len(seeds) == 1:
        return seeds[0]
    scores = tuple(one.score for one in seeds)
    values = np.mean([one.values for one in seeds], axis=0)
    return Scores(float(np.mean(scores)), standard_error(values), seeds[0].num_fewshot, values, scores)


def scaled_values(values: Sequence[np.ndarray], weight_by_size: bool) -> np.ndarray:
    """Scale the documents of a group's tasks into one array, [all documents], whose mean is the group's average.

    Args:
        values: [documents] for each task.
        weight_by_size: whether all documents have the same weight. Otherwise all tasks do.
    """
    total = sum(map(len, values))
    return np.concatenate([v if weight_by_size else v * (total / (len(values) * len(v))) for v in values])


def paired_difference(values: np.ndarray, baseline: np.ndarray) -> Difference:
    """Run a paired t-test of two models' values, each [documents]."""
    differences = values - baseline
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a single document or equal differences give NaN, which becomes None
        test = stats.ttest_1samp(differences, 0.0)
        low, high = test.confidence_interval(0.95)
        error = stats.sem(differences)
    standard_error, lower, upper, p_value = map(_defined, (error, low, high, test.pvalue))
    return Difference(float(differences.mean()), standard_error, lower, upper, p_value)


def difference_over_seeds(seeds: Sequence[float], baseline: Sequence[float]) -> OverSeeds | None:
    """Run Welch's t-test of the seeds' scores. Returns None if either side has a single seed.

    The test is not paired, because seeds need not correspond. If they do, it is conservative.
    """
    if min(len(seeds), len(baseline)) < 2:
        return None
    error = np.hypot(stats.sem(seeds), stats.sem(baseline))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # equal scores give NaN, which becomes None
        return OverSeeds(float(error), _defined(stats.ttest_ind(seeds, baseline, equal_var=False).pvalue))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjust p values for their number (Holm 1979).

    If all adjusted values below α are called significant, the probability of any false one among them is below α. The
    i-th smallest of m values is multiplied by m − i + 1, and is at least as large as the one before it. An undefined
    value stays undefined, and counts as 1.
    """
    p = np.array([1.0 if value is None else value for value in p_values])
    order = np.argsort(p)
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order]).clip(max=1)
    return [None if value is None else float(a) for value, a in zip(p_values, adjusted, strict=True)]


def _defined(number: float) -> float | None:
    return float(number) if np.isfinite(number) else None


def compare(rows: Sequence[Row], models: Mapping[str, Mapping[str, Scores]]) -> Comparison:
    """Compare the models on every task and on average.

    Args:
        rows: the tasks.
        models: scores by model and task. The others are compared with the first model.
    """
    tasks = [_compare_task(row, {model: scores[row.name] for model, scores in models.items()}) for row in rows]
    others = list(models)[1:]
    for other in others:
        _adjust(tasks, other)
    by_seed = {model: np.mean([scores[row.name].by_seed for row in rows], axis=0) for model, scores in models.items()}
    return Comparison(
        tasks=tasks,
        seeds={model: max(1, len(by_seed[model])) for model in models},
        mean={model: float(np.mean([task.scores[model] for task in tasks])) for model in models},
        mean_seed_error={model: standard_error(by_seed[model]) for model in models},
        mean_rank={model: float(np.mean([task.ranks[model] for task in tasks])) for model in models},
        mean_difference={
            model: replace(
                _mean_difference([task.differences[model] for task in tasks]),
                over_seeds=difference_over_seeds(by_seed[model], by_seed[next(iter(models))]),
            )
            for model in others
        },
    )


def _compare_task(row: Row, models: Mapping[str, Scores]) -> TaskComparison:
    (_, first), *others = models.items()
    ranks = stats.rankdata([-scores.score for scores in models.values()], method="average")
    return TaskComparison(
        task=row.name,
        metric=row.metric,
        num_fewshot=first.num_fewshot,
        documents=len(first.values),
        scores={model: scores.score for model, scores in models.items()},
        standard_errors={model: scores.standard_error for model, scores in models.items()},
        seed_errors={model: standard_error(scores.by_seed) for model, scores in models.items()},
        ranks=dict(zip(models, ranks.tolist(), strict=True)),
        differences={
            model: replace(
                paired_difference(scores.values, first.values),
                over_seeds=difference_over_seeds(scores.by_seed, first.by_seed),
            )
            for model, scores in others
        },
    )


def standard_error(values: Sequence[float] | np.ndarray) -> float | None:
    """Return the standard error of the mean, or None for fewer than two numbers."""
    return float(stats.sem(values)) if len(values) > 1 else None


def _adjust(tasks: Sequence[TaskComparison], model: str) -> None:
    """Add Holm's p values over all tasks to a model's differences."""
    found = [task.differences[model] for task in tasks]
    over_documents = holm([difference.p_value for difference in found])
    over_seeds = holm([d.over_seeds.p_value if d.over_seeds is not None else None for d in found])
    for task, difference, p, p_seeds in zip(tasks, found, over_documents, over_seeds, strict=True):
        seeds = difference.over_seeds
        task.differences[model] = replace(
            difference, holm=p, over_seeds=None if seeds is None else replace(seeds, holm=p_seeds)
        )


def _mean_difference(differences: Sequence[Difference]) -> MeanDifference:
    means = [difference.mean for difference in differences]
    errors = [difference.standard_error for difference in differences]
    return MeanDifference(
        mean=float(np.mean(means)),
        standard_error_documents=None if None in errors else float(np.linalg.norm(errors) / len(errors)),  # type: ignore
        standard_error_tasks=float(stats.sem(means)) if len(means) > 1 else None,
    )


# This module renders a comparison as Markdown for people and as CSV for spreadsheets.


def to_markdown(comparison: Comparison, notes: Sequence[str] = ()) -> str:
    """Render tasks × models, differences, standard errors and p values, with an explanation and ``notes`` below."""
    models, others = list(comparison.mean), list(comparison.mean_difference)
    by_seed = [other for other in others if comparison.mean_difference[other].over_seeds is not None]
    header = ["task", "metric", "shots", "documents", *(_with_seeds(model, comparison) for model in models)]
    header += [f"{other} − {models[0]}" for other in others] + [
        f"{other} − {models[0]}, over seeds" for other in by_seed
    ]
    rows: list[list[str]] = []
    several = len(comparison.tasks) > 1
    for task in comparison.tasks:
        first = [task.task, task.metric, str(task.num_fewshot), str(task.documents)]
        scores = [f"{score:.4f}{_error(task.seed_errors[model])}" for model, score in task.scores.items()]
        seeds = [_over_seeds(task.differences[o].mean, task.differences[o].over_seeds, several) for o in by_seed]
        documents = [_difference(difference, several) for difference in task.differences.values()]
        rows.append([*first, *scores, *documents, *seeds])
    means = [f"{mean:.4f}{_error(comparison.mean_seed_error[model])}" for model, mean in comparison.mean.items()]
    differences = comparison.mean_difference
    seeds = [_over_seeds(differences[other].mean, differences[other].over_seeds, several) for other in by_seed]
    rows.append(["mean", "", "", "", *means, *map(_mean_difference_cell, differences.values()), *seeds])
    if others:
        ranks = [f"{rank:.2f}" for rank in comparison.mean_rank.values()]
        rows.append(["mean rank", "", "", "", *ranks, *("" for _ in [*others, *by_seed])])
    text = markdown_table([header, *rows]) + "\n"
    paragraphs = [*([_explanation(comparison, bool(by_seed))] if others else []), *notes]
    return text + "".join(f"\n{paragraph}\n" for paragraph in paragraphs)


def _explanation(comparison: Comparison, over_seeds: bool) -> str:
    lines = [
        "Differences are means ± standard errors over the same documents, with p values of a paired t-test. Holm",
        "adjusts these for the number of tasks. The mean has two standard errors: over the documents of these tasks,",
        "and over tasks. Neither covers another seed of the training.",
    ]
    if any(count > 1 for count in comparison.seeds.values()):
        lines[-1] += (
            " Scores of several seeds are means ± standard errors over seeds. A document's score is their mean."
        )
    if over_seeds:
        lines.append(
            "Over seeds: the same difference ± its standard error over seeds, with the p value of Welch's t-test."
        )
    return "\n".join(lines)


def _with_seeds(model: str, comparison: Comparison) -> str:
    count = comparison.seeds[model]
    return f"{model} ({count} seeds)" if count > 1 else model


def _error(error: float | None) -> str:
    return "" if error is None else f" ± {error:.4f}"


def _p(p_value: float | None, holm: float | None) -> str:
    if p_value is None:
        return ""
    return f" (p {p_value:.2g})" if holm is None else f" (p {p_value:.2g}, Holm {holm:.2g})"


def _difference(found: Difference, several: bool) -> str:
    p = _p(found.p_value, found.holm if several else None)
    return f"{found.mean:+.4f}{_error(found.standard_error)}{p}"


def _over_seeds(mean: float, found: OverSeeds | None, several: bool) -> str:
    """Render a difference over seeds. With ``several`` tasks, it includes the adjusted p value."""
    if found is None:
        return ""
    return f"{mean:+.4f}{_error(found.standard_error)}{_p(found.p_value, found.holm if several else None)}"


def _mean_difference_cell(difference: MeanDifference) -> str:
    documents, tasks = _error(difference.standard_error_documents), _error(difference.standard_error_tasks)
    return f"{difference.mean:+.4f}" + (documents and f"{documents} (documents)") + (tasks and f"{tasks} (tasks)")


def to_csv(comparison: Comparison) -> str:
    """Render the table at full precision, with standard errors, ranks and 95 % intervals. Undefined cells are empty."""
    models, others = list(comparison.mean), list(comparison.mean_difference)
    header: list[Any] = ["task", "metric", "num_fewshot", "documents"]
    header += [f"{model}{what}" for model in models for what in ("", " standard error", " seed error", " rank")]
    over_seeds = (" seed error", " seed p", " seed holm")
    of_difference = ("", " standard error", " low", " high", " p", " holm", *over_seeds)
    header += [f"{other} - {models[0]}{what}" for other in others for what in of_difference]
    rows = [header]
    for task in comparison.tasks:
        row: list[Any] = [task.task, task.metric, task.num_fewshot, task.documents]
        by_model = (task.scores, task.standard_errors, task.seed_errors, task.ranks)
        row += [one[model] for model in models for one in by_model]
        for d in task.differences.values():
            row += [d.mean, d.standard_error, d.low, d.high, d.p_value, d.holm, *_cells(d.over_seeds)]
        rows.append(row)
    means = [
        one
        for model in models
        for one in (comparison.mean[model], None, comparison.mean_seed_error[model], comparison.mean_rank[model])
    ]
    mean_differences = [
        one
        for d in comparison.mean_difference.values()
        for one in (d.mean, d.standard_error_documents, None, None, None, None, *_cells(d.over_seeds))
    ]
    return csv_text([*rows, ["mean", None, None, None, *means, *mean_differences]])


def _cells(found: OverSeeds | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if found is None else (found.standard_error, found.p_value, found.holm)
