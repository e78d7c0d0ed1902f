"""Compares models with the first model, over documents and over seeds, and renders the
comparison as tables.
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

# Columns of table.csv; OF_MODEL and OF_DIFFERENCE follow the name of the model or pair
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

    name: str  # the name in the harness
    metric: str  # a mean over documents; higher is better
    tasks: tuple[str, ...]  # the averaged tasks; a single task unless this is a group
    # Whether all documents of a group have the same weight. Otherwise, all tasks of the
    # group have the same weight.
    weight_by_size: bool = True


@dataclass(frozen=True)
class Scores:
    """A model's scores on a task."""

    score: float  # from the harness; for several seeds, the mean over the seeds
    # over documents: from the harness, or for several seeds the standard error of
    # ``values``
    standard_error: float | None
    num_fewshot: int | str
    # [documents] float64, whose mean is the score; in a group, values are scaled by the
    # weights of the documents
    values: np.ndarray
    # scores by seed, if there are several seeds
    by_seed: Mapping[Any, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MeanDifference:
    """Difference between a model and the first model, averaged over tasks with equal
    weights.
    """

    mean: float
    standard_error_documents: float | None  # over the documents of the tasks
    standard_error_tasks: float | None  # over tasks, from their differences

    def __str__(self) -> str:
        text = f"{self.mean:+.4f}"
        if self.standard_error_documents is not None:
            text += f" ± {self.standard_error_documents:.4f} (documents)"
        if self.standard_error_tasks is not None:
            text += f" ± {self.standard_error_tasks:.4f} (tasks)"
        return text


@dataclass(frozen=True)
class TaskComparison:
    """A line of the table: the comparison on one task, or on the mean over tasks.

    The line of the mean has no metric and no documents. Mappings have a value for each
    model. ``differences`` leaves out the first model, and ``over_seeds`` also leaves
    out models whose seeds cannot be compared.
    """

    task: str
    metric: str | None
    num_fewshot: int | str | None
    documents: int | None
    scores: Mapping[str, float]
    standard_errors: Mapping[str, float | None]
    # standard error of the score over seeds; None with a single seed
    seed_errors: Mapping[str, float | None]
    ranks: Mapping[str, float]  # 1 is the best rank; ties share their mean rank
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
    """The comparison on each task, and on the mean over tasks of equal weights."""

    tasks: list[TaskComparison]
    seeds: dict[str, int]  # number of seeds by model
    mean: TaskComparison

    @property
    def lines(self) -> list[TaskComparison]:
        return [*self.tasks, self.mean]


def pooled(seeds: Mapping[Any, Scores]) -> Scores:
    """Return the scores of one condition, averaged over its seeds.

    The value of each document is its mean over the seeds.

    Args:
        seeds: scores by seed. Two conditions are paired over equal seeds.
    """
    first = next(iter(seeds.values()))
    if len(seeds) == 1:
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
    """Return the values of all documents of a group's tasks, [all documents], scaled so
    that their mean is the group's average.

    Their standard error is that of the group's average, with the tasks as strata.
    """
    if weight_by_size:
        return np.concatenate(values)
    average = np.mean([v.mean() for v in values])
    share = sum(map(len, values)) / len(values)
    return np.concatenate([average + (v - v.mean()) * share / len(v) for v in values])


def compare(
    rows: Sequence[Row], models: Mapping[str, Mapping[str, Scores]]
) -> ModelComparison:
    """Return the comparison of all models with the first model, on each task and on
    average.

    ``models`` has scores by model and by the name of the row.
    """
    first, *other_models = models
    differences = [_over_documents(row, models) for row in rows]
    over_seeds = [
        statistics.differences_over_seeds(
            {model: scores[row.name].by_seed for model, scores in models.items()}, first
        )
        for row in rows
    ]
    for model in other_models:
        _adjust(differences, model)
        _adjust(over_seeds, model)
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
            model: _mean_difference([task[model] for task in differences])
            for model in other_models
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
    """Add Holm's p values over the tasks to the differences of one model, in place."""
    with_model = [of_task for of_task in by_task if model in of_task]
    adjusted = statistics.with_holm([of_task[model] for of_task in with_model])
    for of_task, difference in zip(with_model, adjusted, strict=True):
        of_task[model] = difference


def _over_documents(
    row: Row, models: Mapping[str, Mapping[str, Scores]]
) -> dict[str, Difference]:
    """Return the difference between each other model and the first model on a row."""
    first, *other_models = models
    baseline = models[first][row.name].values
    return {
        model: statistics.paired_difference(models[model][row.name].values, baseline)
        for model in other_models
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
    """Return the rows of a table, with the header first and a row for each task.

    The cells are scores ± standard errors over seeds, differences ± standard errors,
    and p values.
    """
    first, *other_models = comparison.seeds
    over_seeds = comparison.mean.over_seeds
    header = [*DESCRIPTION]
    for model, count in comparison.seeds.items():
        if count > 1:
            header.append(f"{model} ({count} seeds)")
        else:
            header.append(model)
    header += [f"{other} − {first}" for other in other_models]
    header += [
        f"{other} − {first}, {_pairs(difference)}"
        for other, difference in over_seeds.items()
    ]
    rows = [header]
    several = len(comparison.tasks) > 1  # with one task, p is not adjusted
    for line in comparison.lines:
        description = (line.task, line.metric, line.num_fewshot, line.documents)
        row = ["" if cell is None else str(cell) for cell in description]
        row += [
            statistics.with_error(score, line.seed_errors[model])
            for model, score in line.scores.items()
        ]
        row += [_with_p(cell, several) for cell in line.differences.values()]
        row += [_with_p(line.over_seeds[other], several) for other in over_seeds]
        rows.append(row)
    if other_models:
        ranks = [f"{rank:.2f}" for rank in comparison.mean.ranks.values()]
        rest = len(header) - len(ranks) - len(DESCRIPTION)
        rows.append(["mean rank", "", "", "", *ranks, *[""] * rest])
    return rows


def explanation(comparison: ModelComparison) -> list[str]:
    """Return the paragraph below a table of several models; [] for a single model."""
    if len(comparison.seeds) < 2:
        return []
    text = (
        "Differences are means ± standard errors over the same documents, with p "
        "values of a paired t-test. Holm\nis p adjusted for the number of tasks. The "
        "mean has two standard errors: over the documents of these tasks,\nand over "
        "tasks. Neither error includes the effect of another training seed."
    )
    if any(count > 1 for count in comparison.seeds.values()):
        text += (
            " Scores of several seeds are means ± standard errors over seeds. A "
            "document's score is the mean over seeds."
        )
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
    """Return a difference as text, with p; with ``several`` tasks, also with the
    adjusted p value.
    """
    if isinstance(difference, MeanDifference) or difference.p_value is None:
        return str(difference)
    adjusted = ""
    if several and difference.holm is not None:
        adjusted = f", Holm {difference.holm:.2g}"
    return f"{difference} (p {difference.p_value:.2g}{adjusted})"


def to_csv(comparison: ModelComparison) -> str:
    """Return the table as CSV at full precision, with standard errors, ranks and 95 %
    intervals.

    Undefined cells are empty.
    """
    first, *other_models = comparison.seeds
    header = ["task", "metric", "num_fewshot", "documents"]
    for model in comparison.seeds:
        header += [f"{model}{column}" for column in OF_MODEL]
    for other in other_models:
        header += [f"{other} - {first}{column}" for column in OF_DIFFERENCE]
    return csv_text([header, *(line.to_csv() for line in comparison.lines)])
