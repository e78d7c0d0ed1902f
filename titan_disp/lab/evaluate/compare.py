"""This module compares models with the first one, paired by document and over seeds,
and writes the tables of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from scipy import stats

from titan_disp.lab import statistics
from titan_disp.lab.statistics import Difference, OverSeeds
from titan_disp.text import csv_text, markdown_table


@dataclass(frozen=True)
class Row:
    """A row of the table: one task, or a group of averaged tasks such as MMLU."""

    name: str  # the harness's
    metric: str  # a mean over documents; higher is better
    tasks: tuple[str, ...]  # the averaged tasks; a single one unless the row is a group
    # Whether all documents of a group have the same weight; otherwise all tasks do
    weight_by_size: bool = True


@dataclass(frozen=True)
class Scores:
    """A model's scores on a task."""

    score: float  # the harness's; for several seeds, their mean
    # the harness's; for several seeds, that of their mean over documents
    standard_error: float | None
    num_fewshot: int | str
    # [documents] float64, with the score as mean; a group's documents are scaled by
    # their weights
    values: np.ndarray
    by_seed: tuple[float, ...] = ()  # empty for a single model


@dataclass(frozen=True)
class MeanDifference:
    """Difference of a model to the first one, averaged over tasks with equal
    weights.
    """

    mean: float
    standard_error_documents: float | None  # over the documents of these tasks
    # over tasks, from the scatter of the tasks' differences
    standard_error_tasks: float | None
    # from each seed's mean over tasks, if both models have at least two seeds
    over_seeds: OverSeeds | None


@dataclass(frozen=True)
class TaskComparison:
    """The comparison on one task.

    Dictionaries are by model; ``differences`` does not have the first model.
    """

    task: str
    metric: str
    num_fewshot: int | str
    documents: int
    scores: dict[str, float]
    standard_errors: dict[str, float | None]
    # standard error of the score over seeds; None with a single seed
    seed_errors: dict[str, float | None]
    ranks: dict[str, float]  # 1 is the best, and ties share their mean rank
    differences: dict[str, Difference]


@dataclass(frozen=True)
class ModelComparison:
    """The comparison on all tasks, and means over them. Dictionaries are by model."""

    tasks: list[TaskComparison]
    seeds: dict[str, int]
    mean: dict[str, float]
    # over seeds, of the mean over tasks; None with a single seed
    mean_seed_error: dict[str, float | None]
    mean_rank: dict[str, float]
    mean_difference: dict[str, MeanDifference]


def pooled(seeds: Sequence[Scores]) -> Scores:
    """Average several seeds of one condition into one model.

    Each document's value is its mean over all seeds.
    """
    if len(seeds) == 1:
        return seeds[0]
    scores = tuple(one.score for one in seeds)
    values = np.mean([one.values for one in seeds], axis=0)
    return Scores(
        float(np.mean(scores)),
        statistics.standard_error(values),
        seeds[0].num_fewshot,
        values,
        scores,
    )


def scaled_values(values: Sequence[np.ndarray], weight_by_size: bool) -> np.ndarray:
    """Scale the documents of a group's tasks into one array, [all documents].

    Its mean is the group's average, and its standard error that of the average, in
    which tasks are strata.
    """
    if weight_by_size:
        return np.concatenate(values)
    average = np.mean([v.mean() for v in values])
    share = sum(map(len, values)) / len(values)
    return np.concatenate([average + (v - v.mean()) * share / len(v) for v in values])


def compare(
    rows: Sequence[Row], models: Mapping[str, Mapping[str, Scores]]
) -> ModelComparison:
    """Compare models, whose scores are by model and task, with the first one, on every
    task and on average.
    """
    tasks = [
        _compare_task(
            row, {model: scores[row.name] for model, scores in models.items()}
        )
        for row in rows
    ]
    first, *others = models
    for other in others:
        found = statistics.with_holm([task.differences[other] for task in tasks])
        over_seeds = statistics.with_holm(
            [task.differences[other].over_seeds for task in tasks]
        )
        for task, difference, seeds in zip(tasks, found, over_seeds, strict=True):
            task.differences[other] = replace(difference, over_seeds=seeds)
    by_seed = {
        model: np.mean([scores[row.name].by_seed for row in rows], axis=0)
        for model, scores in models.items()
    }
    return ModelComparison(
        tasks=tasks,
        seeds={model: max(1, len(by_seed[model])) for model in models},
        mean={
            model: float(np.mean([task.scores[model] for task in tasks]))
            for model in models
        },
        mean_seed_error={
            model: statistics.standard_error(by_seed[model]) for model in models
        },
        mean_rank={
            model: float(np.mean([task.ranks[model] for task in tasks]))
            for model in models
        },
        mean_difference={
            other: _mean_difference(
                tasks,
                other,
                statistics.difference_over_seeds(by_seed[other], by_seed[first]),
            )
            for other in others
        },
    )


def _compare_task(row: Row, models: Mapping[str, Scores]) -> TaskComparison:
    (_, first), *others = models.items()
    ranks = stats.rankdata(
        [-scores.score for scores in models.values()], method="average"
    )
    return TaskComparison(
        task=row.name,
        metric=row.metric,
        num_fewshot=first.num_fewshot,
        documents=len(first.values),
        scores={model: scores.score for model, scores in models.items()},
        standard_errors={
            model: scores.standard_error for model, scores in models.items()
        },
        seed_errors={
            model: statistics.standard_error(scores.by_seed)
            for model, scores in models.items()
        },
        ranks=dict(zip(models, ranks.tolist(), strict=True)),
        differences={
            model: replace(
                statistics.paired_difference(scores.values, first.values),
                over_seeds=statistics.difference_over_seeds(
                    scores.by_seed, first.by_seed
                ),
            )
            for model, scores in others
        },
    )


def _mean_difference(
    tasks: Sequence[TaskComparison], model: str, over_seeds: OverSeeds | None
) -> MeanDifference:
    means = [task.differences[model].mean for task in tasks]
    errors = [task.differences[model].standard_error for task in tasks]
    over_documents = None
    if None not in errors:
        over_documents = float(np.linalg.norm(errors) / len(errors))  # type: ignore[arg-type]
    return MeanDifference(
        float(np.mean(means)),
        over_documents,
        statistics.standard_error(means),
        over_seeds,
    )


def lines(
    comparison: ModelComparison,
) -> Iterator[tuple[tuple[Any, ...], tuple[dict[str, Any], ...], dict[str, Any]]]:
    """Yield the first cells, the numbers by model and the differences of each task, and
    of the mean over tasks.
    """
    for task in comparison.tasks:
        begin = (task.task, task.metric, task.num_fewshot, task.documents)
        yield (
            begin,
            (task.scores, task.standard_errors, task.seed_errors, task.ranks),
            task.differences,
        )
    means = (
        comparison.mean,
        dict.fromkeys(comparison.mean),
        comparison.mean_seed_error,
        comparison.mean_rank,
    )
    yield ("mean", None, None, None), means, comparison.mean_difference


def to_markdown(comparison: ModelComparison, notes: Sequence[str] = ()) -> str:
    """Render tasks × models, differences, standard errors and p values, with an
    explanation and ``notes`` below.
    """
    first, *others = comparison.mean
    by_seed = [
        other
        for other, found in comparison.mean_difference.items()
        if found.over_seeds is not None
    ]
    several = len(comparison.tasks) > 1  # then p values are adjusted
    named = [
        f"{model} ({count} seeds)" if count > 1 else model
        for model, count in comparison.seeds.items()
    ]
    columns = [f"{other} − {first}" for other in others] + [
        f"{other} − {first}, over seeds" for other in by_seed
    ]
    rows = [["task", "metric", "shots", "documents", *named, *columns]]
    for begin, (scores, _, seed_errors, _), differences in lines(comparison):
        rows.append(
            [
                *("" if cell is None else str(cell) for cell in begin),
                *(
                    statistics.with_error(score, seed_errors[model])
                    for model, score in scores.items()
                ),
                *(_over_documents(found, several) for found in differences.values()),
                *(
                    _with_p(
                        differences[other].mean, differences[other].over_seeds, several
                    )
                    for other in by_seed
                ),
            ]
        )
    if others:
        ranks = [f"{rank:.2f}" for rank in comparison.mean_rank.values()]
        rows.append(["mean rank", "", "", "", *ranks, *("" for _ in columns)])
        notes = [_explanation(comparison, bool(by_seed)), *notes]
    return (
        markdown_table(rows) + "\n" + "".join(f"\n{paragraph}\n" for paragraph in notes)
    )


def _explanation(comparison: ModelComparison, over_seeds: bool) -> str:
    text = (
        "Differences are means ± standard errors over the same documents, with p "
        "values of a paired t-test. Holm\nadjusts these for the number of tasks. The "
        "mean has two standard errors: over the documents of these tasks,\nand over "
        "tasks. Neither covers another seed of the training."
    )
    if any(count > 1 for count in comparison.seeds.values()):
        text += " Scores of several seeds are means ± standard errors over seeds. A document's score is their mean."
    if over_seeds:
        text += "\nOver seeds: the same difference ± its standard error over seeds, with the p value of Welch's t-test."
    return text


def _with_p(mean: float, found: Difference | OverSeeds | None, several: bool) -> str:
    """Render a difference over documents or seeds.

    With ``several`` tasks, it includes the adjusted p value.
    """
    if found is None:
        return ""
    adjusted = f", Holm {found.holm:.2g}" if several and found.holm is not None else ""
    p = "" if found.p_value is None else f" (p {found.p_value:.2g}{adjusted})"
    return statistics.with_error(mean, found.standard_error, "+") + p


def _over_documents(found: Difference | MeanDifference, several: bool) -> str:
    if isinstance(found, Difference):
        return _with_p(found.mean, found, several)
    errors = {
        "documents": found.standard_error_documents,
        "tasks": found.standard_error_tasks,
    }
    told = [
        f" ± {error:.4f} ({over})"
        for over, error in errors.items()
        if error is not None
    ]
    return f"{found.mean:+.4f}" + "".join(told)


def to_csv(comparison: ModelComparison) -> str:
    """Render the table at full precision, with standard errors, ranks and 95 %
    intervals. Undefined cells are empty.
    """
    first, *others = comparison.mean
    of_model = ("", " standard error", " seed error", " rank")
    of_difference = (
        "",
        " standard error",
        " low",
        " high",
        " p",
        " holm",
        " seed error",
        " seed p",
        " seed holm",
    )
    header = ["task", "metric", "num_fewshot", "documents"]
    header += [f"{model}{what}" for model in comparison.mean for what in of_model]
    header += [f"{other} - {first}{what}" for other in others for what in of_difference]
    rows: list[list[Any]] = [header]
    for begin, by_model, differences in lines(comparison):
        of_models = [column[model] for model in comparison.mean for column in by_model]
        rows.append(
            [
                *begin,
                *of_models,
                *chain.from_iterable(map(_numbers, differences.values())),
            ]
        )
    return csv_text(rows)


def _numbers(found: Difference | MeanDifference) -> list[float | None]:
    seeds = found.over_seeds
    over_seeds = (
        [None] * 3
        if seeds is None
        else [seeds.standard_error, seeds.p_value, seeds.holm]
    )
    if isinstance(found, Difference):
        return [
            found.mean,
            found.standard_error,
            found.low,
            found.high,
            found.p_value,
            found.holm,
            *over_seeds,
        ]
    return [found.mean, found.standard_error_documents, *[None] * 4, *over_seeds]
