"""Models against the first of them: paired over the documents that all of them saw, and over seeds where there are several."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from titan_disp.evaluate.tasks import Row


@dataclass(frozen=True)
class OverSeeds:
    """A difference of two conditions' mean scores, had there been other seeds: Welch's t-test of the seeds' scores.

    Attributes:
        standard_error: of the difference, √(s²/n + s₀²/n₀).
        p_value: two-sided. holm: the same, adjusted for the number of tasks.
    """

    standard_error: float
    p_value: float | None
    holm: float | None = None


@dataclass(frozen=True)
class Difference:
    """Of a model to the first one on a task. None where it is undefined: one document, or all differences alike.

    Attributes:
        mean: of the documents' differences.
        standard_error: of that mean.
        low, high: its 95 % interval, by Student's t.
        p_value: two-sided, of a paired t-test.
        holm: p_value, adjusted for the number of tasks (Holm 1979).
        over_seeds: where both models are means over two seeds or more.
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
    """Of a model to the first one, averaged over tasks, which count alike.

    Attributes:
        mean: of the tasks' differences.
        standard_error_documents: had these tasks other documents.
        standard_error_tasks: had there been other tasks: what the differences of the tasks scatter by.
        over_seeds: had there been other seeds, where both models are means over two or more: of the seeds' means over tasks.
    """

    mean: float
    standard_error_documents: float | None
    standard_error_tasks: float | None
    over_seeds: OverSeeds | None = None


@dataclass(frozen=True)
class TaskComparison:
    """One task. ``ranks``: 1 is the best, ties share their mean. Dictionaries are by model; ``differences`` lacks the first.

    ``seed_errors``: standard error of the score over seeds, None of a single one.
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
    """All tasks, and means over them.

    Attributes:
        seeds: how many each model is the mean of.
        mean_seed_error: standard error over seeds of the mean over tasks, None of a single one.
    """

    tasks: list[TaskComparison]
    seeds: dict[str, int]
    mean: dict[str, float]
    mean_seed_error: dict[str, float | None]
    mean_rank: dict[str, float]
    mean_difference: dict[str, MeanDifference]


@dataclass(frozen=True)
class Scores:
    """A model's on a task.

    Attributes:
        score, standard_error: the harness's; of several seeds, their mean, and its standard error over documents.
        values: [documents] float64, whose mean is the score: a group's documents are scaled by what its average gives them.
        by_seed: the score of each seed that this is the mean of; empty: this is one.
    """

    score: float
    standard_error: float | None
    num_fewshot: int | str
    values: np.ndarray
    by_seed: tuple[float, ...] = ()


def pooled(seeds: Sequence[Scores]) -> Scores:
    """Several seeds of one condition as one model: every document's value is its mean over the seeds, all of which saw it."""
    if len(seeds) == 1:
        return seeds[0]
    scores = tuple(one.score for one in seeds)
    values = np.mean([one.values for one in seeds], axis=0)
    return Scores(float(np.mean(scores)), standard_error(values), seeds[0].num_fewshot, values, scores)


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
    standard_error, lower, upper, p_value = map(_defined, (error, low, high, test.pvalue))
    return Difference(float(differences.mean()), standard_error, lower, upper, p_value)


def difference_over_seeds(seeds: Sequence[float], baseline: Sequence[float]) -> OverSeeds | None:
    """Not paired: seeds need not correspond, and where they do this is cautious. None of a single seed on either side."""
    if min(len(seeds), len(baseline)) < 2:
        return None
    error = np.hypot(stats.sem(seeds), stats.sem(baseline))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scores all alike: NaN, which becomes None
        return OverSeeds(float(error), _defined(stats.ttest_ind(seeds, baseline, equal_var=False).pvalue))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjusted for their number, so that all below α keep the chance of any false one among them below α (Holm 1979).

    The i-th smallest of m is multiplied by m − i + 1, and is no smaller than the one before it. An undefined one stays so, and
    counts as a test that found nothing.
    """
    p = np.array([1.0 if value is None else value for value in p_values])
    order = np.argsort(p)
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order]).clip(max=1)
    return [None if value is None else float(a) for value, a in zip(p_values, adjusted, strict=True)]


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
    """Of the mean of several numbers; None of one or none."""
    return float(stats.sem(values)) if len(values) > 1 else None


def _adjust(tasks: Sequence[TaskComparison], model: str) -> None:
    """Put Holm's p values over all tasks into a model's differences."""
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
