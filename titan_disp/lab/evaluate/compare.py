"""This module compares models with the first one, paired by document and over seeds, and writes the tables of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from scipy import stats

from titan_disp.lab.statistics import (
    Difference,
    OverSeeds,
    difference_over_seeds,
    holm,
    paired_difference,
    standard_error,
)
from titan_disp.text import csv_text, markdown_table


@dataclass(frozen=True)
class Row:
    """A row of the table: one task, or a group of averaged tasks such as MMLU.

    Attributes:
        name: the harness's name.
        metric: a metric that is a mean over documents. Higher is better.
        tasks: names of the averaged tasks; a single one unless the row is a group.
        weight_by_size: whether all documents of a group have the same weight. Otherwise all tasks do.
    """

    name: str
    metric: str
    tasks: tuple[str, ...]
    weight_by_size: bool = True


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


@dataclass(frozen=True)
class MeanDifference:
    """Difference of a model to the first one, averaged over tasks with equal weights.

    Attributes:
        standard_error_documents: standard error over the documents of these tasks.
        standard_error_tasks: standard error over tasks, from the scatter of the tasks' differences.
        over_seeds: uncertainty over seeds, from each seed's mean over tasks, if both models have at least two seeds.
    """

    mean: float
    standard_error_documents: float | None
    standard_error_tasks: float | None
    over_seeds: OverSeeds | None


@dataclass(frozen=True)
class TaskComparison:
    """The comparison on one task. Dictionaries are by model; ``differences`` does not have the first model.

    Attributes:
        seed_errors: standard error of the score over seeds; None with a single seed.
        ranks: rank of each model. Rank 1 is the best, and ties share their mean rank.
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
    """The comparison on all tasks, and means over them. Dictionaries are by model.

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


def compare(rows: Sequence[Row], models: Mapping[str, Mapping[str, Scores]]) -> Comparison:
    """Compare the models on every task and on average.

    Args:
        rows: the tasks.
        models: scores by model and task. The others are compared with the first model.
    """
    tasks = [_compare_task(row, {model: scores[row.name] for model, scores in models.items()}) for row in rows]
    first, *others = models
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
            other: _mean_difference(
                [task.differences[other] for task in tasks], difference_over_seeds(by_seed[other], by_seed[first])
            )
            for other in others
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


def _adjust(tasks: Sequence[TaskComparison], model: str) -> None:
    """Add Holm's p values over all tasks to a model's differences."""
    found = [task.differences[model] for task in tasks]
    over_documents = holm([difference.p_value for difference in found])
    over_seeds = holm([d.over_seeds.p_value if d.over_seeds is not None else None for d in found])
    for task, difference, p, p_seeds in zip(tasks, found, over_documents, over_seeds, strict=True):
        seeds = None if difference.over_seeds is None else replace(difference.over_seeds, holm=p_seeds)
        task.differences[model] = replace(difference, holm=p, over_seeds=seeds)


def _mean_difference(differences: Sequence[Difference], over_seeds: OverSeeds | None) -> MeanDifference:
    means = [difference.mean for difference in differences]
    errors = [difference.standard_error for difference in differences]
    over_documents = None if None in errors else float(np.linalg.norm(errors) / len(errors))  # type: ignore[arg-type]
    return MeanDifference(float(np.mean(means)), over_documents, standard_error(means), over_seeds)


def to_markdown(comparison: Comparison, notes: Sequence[str] = ()) -> str:
    """Render tasks × models, differences, standard errors and p values, with an explanation and ``notes`` below."""
    first, *others = comparison.mean
    means = comparison.mean_difference
    by_seed = [other for other in others if means[other].over_seeds is not None]
    several = len(comparison.tasks) > 1  # then p values are adjusted
    named = [f"{model} ({count} seeds)" if count > 1 else model for model, count in comparison.seeds.items()]
    columns = [f"{other} − {first}" for other in others] + [f"{other} − {first}, over seeds" for other in by_seed]
    rows = [["task", "metric", "shots", "documents", *named, *columns]]
    for task in comparison.tasks:
        found = task.differences
        rows.append(
            [
                *(task.task, task.metric, str(task.num_fewshot), str(task.documents)),
                *(f"{score:.4f}{_error(task.seed_errors[model])}" for model, score in task.scores.items()),
                *(_difference(d.mean, d, several) for d in found.values()),
                *(_difference(found[other].mean, found[other].over_seeds, several) for other in by_seed),
            ]
        )
    rows.append(
        [
            *("mean", "", "", ""),
            *(f"{mean:.4f}{_error(comparison.mean_seed_error[model])}" for model, mean in comparison.mean.items()),
            *map(_mean_difference_cell, means.values()),
            *(_difference(means[other].mean, means[other].over_seeds, several) for other in by_seed),
        ]
    )
    if others:
        ranks = [f"{rank:.2f}" for rank in comparison.mean_rank.values()]
        rows.append(["mean rank", "", "", "", *ranks, *("" for _ in columns)])
        notes = [_explanation(comparison, bool(by_seed)), *notes]
    return markdown_table(rows) + "\n" + "".join(f"\n{paragraph}\n" for paragraph in notes)


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


def _error(error: float | None) -> str:
    return "" if error is None else f" ± {error:.4f}"


def _difference(mean: float, found: Difference | OverSeeds | None, several: bool) -> str:
    """Render a difference over documents or seeds. With ``several`` tasks, it includes the adjusted p value."""
    if found is None:
        return ""
    adjusted = f", Holm {found.holm:.2g}" if several and found.holm is not None else ""
    p = "" if found.p_value is None else f" (p {found.p_value:.2g}{adjusted})"
    return f"{mean:+.4f}{_error(found.standard_error)}{p}"


def _mean_difference_cell(difference: MeanDifference) -> str:
    documents, tasks = _error(difference.standard_error_documents), _error(difference.standard_error_tasks)
    return f"{difference.mean:+.4f}" + (documents and f"{documents} (documents)") + (tasks and f"{tasks} (tasks)")


def to_csv(comparison: Comparison) -> str:
    """Render the table at full precision, with standard errors, ranks and 95 % intervals. Undefined cells are empty."""
    first, *others = models = list(comparison.mean)
    of_model = ("", " standard error", " seed error", " rank")
    of_difference = ("", " standard error", " low", " high", " p", " holm", " seed error", " seed p", " seed holm")

    def row(
        begin: Sequence[Any], by_model: Sequence[Mapping[str, Any]], differences: Iterable[Sequence[Any]]
    ) -> list[Any]:
        return [*begin, *(column[model] for model in models for column in by_model), *chain(*differences)]

    header = row(
        ("task", "metric", "num_fewshot", "documents"),
        [{model: f"{model}{what}" for model in models} for what in of_model],
        [[f"{other} - {first}{what}" for what in of_difference] for other in others],
    )
    tasks = [
        row(
            (task.task, task.metric, task.num_fewshot, task.documents),
            (task.scores, task.standard_errors, task.seed_errors, task.ranks),
            [
                (d.mean, d.standard_error, d.low, d.high, d.p_value, d.holm, *_cells(d.over_seeds))
                for d in task.differences.values()
            ],
        )
        for task in comparison.tasks
    ]
    mean = row(
        ("mean", None, None, None),
        (comparison.mean, dict.fromkeys(models), comparison.mean_seed_error, comparison.mean_rank),
        [
            (d.mean, d.standard_error_documents, None, None, None, None, *_cells(d.over_seeds))
            for d in comparison.mean_difference.values()
        ],
    )
    return csv_text([header, *tasks, mean])


def _cells(found: OverSeeds | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if found is None else (found.standard_error, found.p_value, found.holm)
