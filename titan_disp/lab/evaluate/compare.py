"""This module compares models with the first one, paired by document and over seeds,
and writes the tables of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import stats

from titan_disp.errors import counted
from titan_disp.lab import statistics
from titan_disp.lab.statistics import Difference, csv_cells
from titan_disp.text import csv_text

# Ends of the columns of table.csv
DESCRIPTION = ("task", "metric", "shots", "documents")
OF_MODEL = ("", " standard error", " seed error", " rank")
OF_DIFFERENCE = (
    *("", " standard error", " low", " high", " p", " holm"),
    *(" seed pairs", " seed difference"),
    *(" seed error", " seed low", " seed high", " seed p", " seed holm"),
)


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
    by_seed: Mapping[Any, float] = field(default_factory=dict)  # of several seeds


@dataclass(frozen=True)
class MeanDifference:
    """Difference of a model to the first one, averaged over tasks with equal
    weights.
    """

    mean: float
    standard_error_documents: float | None  # over the documents of these tasks
    # over tasks, from the scatter of the tasks' differences
    standard_error_tasks: float | None

    def __str__(self) -> str:
        text = f"{self.mean:+.4f}"
        if self.standard_error_documents is not None:
            text += f" ± {self.standard_error_documents:.4f} (documents)"
        if self.standard_error_tasks is not None:
            text += f" ± {self.standard_error_tasks:.4f} (tasks)"
        return text


@dataclass(frozen=True)
class TaskComparison:
    """A line of the table: the comparison on one task, or on the mean over tasks, which
    has no metric and no documents.

    Dictionaries are by model. Those of differences do not have the first model, and
    ``over_seeds`` has those whose seeds can be compared.
    """

    task: str
    metric: str | None
    num_fewshot: int | str | None
    documents: int | None
    scores: Mapping[str, float]
    standard_errors: Mapping[str, float | None]
    # standard error of the score over seeds; None with a single seed
    seed_errors: Mapping[str, float | None]
    ranks: Mapping[str, float]  # 1 is the best, and ties share their mean rank
    differences: Mapping[str, Difference | MeanDifference]  # over documents
    over_seeds: Mapping[str, Difference]

    def to_csv(self) -> list[Any]:
        cells: list[Any] = [self.task, self.metric, self.num_fewshot, self.documents]
        columns = (self.scores, self.standard_errors, self.seed_errors, self.ranks)
        for model in self.scores:
            cells += [column.get(model) for column in columns]
        for other, difference in self.differences.items():
            if isinstance(difference, Difference):
                cells += csv_cells(difference)
            else:
                cells += [difference.mean, difference.standard_error_documents]
                cells += [None] * 4
            over_seeds = self.over_seeds.get(other)
            cells += [over_seeds and over_seeds.pairs, *csv_cells(over_seeds)]
        return cells


@dataclass(frozen=True)
class ModelComparison:
    """The comparison on all tasks, and on their mean, over tasks of equal weights."""

    tasks: list[TaskComparison]
    seeds: dict[str, int]  # by model
    mean: TaskComparison

    @property
    def lines(self) -> list[TaskComparison]:
        return [*self.tasks, self.mean]


def pooled(seeds: Mapping[Any, Scores]) -> Scores:
    """Average several seeds of one condition into one model.

    Each document's value is its mean over all seeds.

    Args:
        seeds: scores by seed. Scores of two conditions are paired if the seed is equal.
    """
    first, *others = seeds.values()
    if not others:
        return first
    values = np.mean([scores.values for scores in seeds.values()], axis=0)
    by_seed = {seed: scores.score for seed, scores in seeds.items()}
    return Scores(
        score=float(np.mean(list(by_seed.values()))),
        standard_error=statistics.standard_error(values),
        num_fewshot=first.num_fewshot,
        values=values,
        by_seed=by_seed,
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
    first, *others = models
    differences = [_over_documents(row, models) for row in rows]
    over_seeds = [
        statistics.differences_over_seeds(
            {model: scores[row.name].by_seed for model, scores in models.items()}, first
        )
        for row in rows
    ]
    for other in others:
        _adjust(differences, other)
        _adjust(over_seeds, other)
    tasks = [
        _task_comparison(row, models, *compared)
        for row, *compared in zip(rows, differences, over_seeds, strict=True)
    ]
    by_seed = {
        model: _mean_by_seed([scores[row.name] for row in rows])
        for model, scores in models.items()
    }
    mean = TaskComparison(
        task="mean",
        metric=None,
        num_fewshot=None,
        documents=None,
        scores=_mean_by_model([task.scores for task in tasks]),
        standard_errors={},
        seed_errors={
            model: statistics.standard_error(list(scores.values()))
            for model, scores in by_seed.items()
        },
        ranks=_mean_by_model([task.ranks for task in tasks]),
        differences={
            other: _mean_difference([task[other] for task in differences])
            for other in others
        },
        over_seeds=statistics.differences_over_seeds(by_seed, first),
    )
    seeds = {model: max(1, len(scores)) for model, scores in by_seed.items()}
    return ModelComparison(tasks, seeds, mean)


def _mean_by_model(tasks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {
        model: float(np.mean([of_task[model] for of_task in tasks]))
        for model in tasks[0]
    }


def _mean_by_seed(tasks: Sequence[Scores]) -> dict[Any, float]:
    return {
        seed: float(np.mean([task.by_seed[seed] for task in tasks]))
        for seed in tasks[0].by_seed
    }


def _adjust(by_task: Sequence[dict[str, Difference]], model: str) -> None:
    """Replace the differences of one model, in place, by ones with Holm's p over the
    tasks.
    """
    with_model = [of_task for of_task in by_task if model in of_task]
    adjusted = statistics.with_holm([of_task[model] for of_task in with_model])
    for of_task, difference in zip(with_model, adjusted, strict=True):
        of_task[model] = difference


def _over_documents(
    row: Row, models: Mapping[str, Mapping[str, Scores]]
) -> dict[str, Difference]:
    (_, first), *others = models.items()
    baseline = first[row.name].values
    return {
        model: statistics.paired_difference(scores[row.name].values, baseline)
        for model, scores in others
    }


def _task_comparison(
    row: Row,
    models: Mapping[str, Mapping[str, Scores]],
    differences: Mapping[str, Difference],
    over_seeds: Mapping[str, Difference],
) -> TaskComparison:
    of_task = {model: scores[row.name] for model, scores in models.items()}
    first = next(iter(of_task.values()))
    ranks = stats.rankdata([-scores.score for scores in of_task.values()])
    return TaskComparison(
        task=row.name,
        metric=row.metric,
        num_fewshot=first.num_fewshot,
        documents=len(first.values),
        scores={model: scores.score for model, scores in of_task.items()},
        standard_errors={
            model: scores.standard_error for model, scores in of_task.items()
        },
        seed_errors={
            model: statistics.standard_error(list(scores.by_seed.values()))
            for model, scores in of_task.items()
        },
        ranks=dict(zip(models, ranks.tolist(), strict=True)),
        differences=differences,
        over_seeds=over_seeds,
    )


def _mean_difference(tasks: Sequence[Difference]) -> MeanDifference:
    means = [task.mean for task in tasks]
    errors = [task.standard_error for task in tasks]
    over_documents = None
    if None not in errors:
        over_documents = float(np.linalg.norm(errors) / len(errors))  # type: ignore[arg-type]
    return MeanDifference(
        mean=float(np.mean(means)),
        standard_error_documents=over_documents,
        standard_error_tasks=statistics.standard_error(means),
    )


def table(comparison: ModelComparison) -> list[list[str]]:
    """Return the cells of tasks × models: scores ± standard errors over seeds,
    differences ± standard errors, and p values. The first row is the header.
    """
    first, *others = comparison.seeds
    over_seeds = comparison.mean.over_seeds
    header = [*DESCRIPTION]
    for model, count in comparison.seeds.items():
        header.append(f"{model} ({count} seeds)" if count > 1 else model)
    header += [f"{other} − {first}" for other in others]
    header += [
        f"{other} − {first}, {_pairs(difference)}"
        for other, difference in over_seeds.items()
    ]
    rows = [header]
    several = len(comparison.tasks) > 1  # then p values are adjusted
    for line in comparison.lines:
        begin = (line.task, line.metric, line.num_fewshot, line.documents)
        row = ["" if cell is None else str(cell) for cell in begin]
        row += [
            statistics.with_error(score, line.seed_errors[model])
            for model, score in line.scores.items()
        ]
        row += [_with_p(cell, several) for cell in line.differences.values()]
        row += [_with_p(line.over_seeds[other], several) for other in over_seeds]
        rows.append(row)
    if others:
        ranks = [f"{rank:.2f}" for rank in comparison.mean.ranks.values()]
        rest = len(header) - len(ranks) - len(DESCRIPTION)
        rows.append(["mean rank", "", "", "", *ranks, *[""] * rest])
    return rows


def explanation(comparison: ModelComparison) -> list[str]:
    """Return the paragraph below the table, if it compares models."""
    if len(comparison.seeds) < 2:
        return []
    text = (
        "Differences are means ± standard errors over the same documents, with p "
        "values of a paired t-test. Holm\nadjusts these for the number of tasks. The "
        "mean has two standard errors: over the documents of these tasks,\nand over "
        "tasks. Neither covers another seed of the training."
    )
    if any(count > 1 for count in comparison.seeds.values()):
        text += " Scores of several seeds are means ± standard errors over seeds. A document's score is their mean."
    paired = [bool(test.pairs) for test in comparison.mean.over_seeds.values()]
    if any(paired):
        text += (
            "\nOver pairs of runs with equal seeds: mean difference ± standard error, "
            "with p of the sign-flip test, as in titan-disp sweep table."
        )
    if not all(paired):
        text += (
            "\nOver seeds that are not paired: the difference ± its standard error, "
            "with p of Welch's t-test. Runs with equal seeds would be paired."
        )
    return [text]


def _pairs(difference: Difference) -> str:
    if not difference.pairs:
        return "over seeds, not paired"
    return f"over {counted(difference.pairs, 'pair')} of seeds"


def _with_p(difference: Difference | MeanDifference, several: bool) -> str:
    """Render a difference. With ``several`` tasks, it includes the adjusted p value."""
    if isinstance(difference, MeanDifference) or difference.p_value is None:
        return str(difference)
    adjusted = ""
    if several and difference.holm is not None:
        adjusted = f", Holm {difference.holm:.2g}"
    return f"{difference} (p {difference.p_value:.2g}{adjusted})"


def to_csv(comparison: ModelComparison) -> str:
    """Render the table at full precision, with standard errors, ranks and 95 %
    intervals. Undefined cells are empty.
    """
    first, *others = comparison.seeds
    header = ["task", "metric", "num_fewshot", "documents"]
    for model in comparison.seeds:
        header += [f"{model}{what}" for what in OF_MODEL]
    for other in others:
        header += [f"{other} - {first}{what}" for what in OF_DIFFERENCE]
    return csv_text([header, *(line.to_csv() for line in comparison.lines)])
