"""Models against the first of them: paired over the documents that all of them saw."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from titan_disp.evaluate.tasks import Row


@dataclass(frozen=True)
class Difference:
    """Of a model to the first one on a task. None where it is undefined: one document, or all differences alike.

    Attributes:
        mean: of the documents' differences.
        standard_error: of that mean.
        low, high: its 95 % interval, by Student's t.
        p_value: two-sided, of a paired t-test.
    """

    mean: float
    standard_error: float | None
    low: float | None
    high: float | None
    p_value: float | None


@dataclass(frozen=True)
class MeanDifference:
    """Of a model to the first one, averaged over tasks, which count alike.

    Attributes:
        mean: of the tasks' differences.
        standard_error_documents: had these tasks other documents.
        standard_error_tasks: had there been other tasks: what the differences of the tasks scatter by.
    """

    mean: float
    standard_error_documents: float | None
    standard_error_tasks: float | None


@dataclass(frozen=True)
class TaskComparison:
    """One task. ``ranks``: 1 is the best, ties share their mean. Dictionaries are by model; ``differences`` lacks the first."""

    task: str
    metric: str
    num_fewshot: int | str
    documents: int
    scores: dict[str, float]
    standard_errors: dict[str, float | None]
    ranks: dict[str, float]
    differences: dict[str, Difference]


@dataclass(frozen=True)
class Comparison:
    """All tasks, and means over them."""

    tasks: list[TaskComparison]
    mean: dict[str, float]
    mean_rank: dict[str, float]
    mean_difference: dict[str, MeanDifference]


@dataclass(frozen=True)
class Scores:
    """A model's on a task.

    Attributes:
        score, standard_error: the harness's.
        values: [documents] float64, whose mean is the score: a group's documents are scaled by what its average gives them.
    """

    score: float
    standard_error: float | None
    num_fewshot: int | str
    values: np.ndarray


def scaled_values(values: Sequence[np.ndarray], weight_by_size: bool) -> np.ndarray:
    """The documents of a group's tasks in one array, [all documents], such that its mean is the group's average.

    Args:
        values: [documents] for each task.
        weight_by_size: all documents count alike; otherwise all tasks do.
    """
    total = sum(map(len, values))
    return np.concatenate([v if weight_by_size else v * (total / (len(values) * len(v))) for v in values])


def paired_difference(values: np.ndarray, baseline: np.ndarray) -> Difference:
    """A paired t-test of two models' [documents]."""
    differences = values - baseline
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one document, or differences all alike: NaN, which becomes None
        test = stats.ttest_1samp(differences, 0.0)
        low, high = test.confidence_interval(0.95)
        error = stats.sem(differences)
    return Difference(float(differences.mean()), *map(_defined, (error, low, high, test.pvalue)))


def _defined(number: float) -> float | None:
    return float(number) if np.isfinite(number) else None


def compare(rows: Sequence[Row], models: Mapping[str, Mapping[str, Scores]]) -> Comparison:
    """Every task and the means.

    Args:
        rows: the tasks.
        models: scores by model and task; the first model is what the others are compared with.
    """
    tasks = [_compare_task(row, {model: scores[row.name] for model, scores in models.items()}) for row in rows]
    others = list(models)[1:]
    return Comparison(
        tasks=tasks,
        mean={model: float(np.mean([task.scores[model] for task in tasks])) for model in models},
        mean_rank={model: float(np.mean([task.ranks[model] for task in tasks])) for model in models},
        mean_difference={model: _mean_difference([task.differences[model] for task in tasks]) for model in others},
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
        ranks=dict(zip(models, ranks.tolist(), strict=True)),
        differences={model: paired_difference(scores.values, first.values) for model, scores in others},
    )


def _mean_difference(differences: Sequence[Difference]) -> MeanDifference:
    means = [difference.mean for difference in differences]
    errors = [difference.standard_error for difference in differences]
    return MeanDifference(
        mean=float(np.mean(means)),
        standard_error_documents=None if None in errors else float(np.linalg.norm(errors) / len(errors)),  # type: ignore
        standard_error_tasks=float(stats.sem(means)) if len(means) > 1 else None,
    )
