"""This module renders a comparison as Markdown for people and as CSV for spreadsheets."""

import csv
import io
from collections.abc import Sequence
from typing import Any

from titan_disp.evaluate.compare import Comparison, Difference, MeanDifference, OverSeeds
from titan_disp.markdown import markdown_table


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
    rows.append(["mean", "", "", "", *means, *map(_mean_difference, differences.values()), *seeds])
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


def _mean_difference(difference: MeanDifference) -> str:
    documents, tasks = _error(difference.standard_error_documents), _error(difference.standard_error_tasks)
    return f"{difference.mean:+.4f}" + (documents and f"{documents} (documents)") + (tasks and f"{tasks} (tasks)")


def to_csv(comparison: Comparison) -> str:
    """Render the table at full precision, with standard errors, ranks and 95 % intervals. Undefined cells are empty."""
    models, others = list(comparison.mean), list(comparison.mean_difference)
    header = ["task", "metric", "num_fewshot", "documents"]
    header += [f"{model}{what}" for model in models for what in ("", " standard error", " seed error", " rank")]
    over_seeds = (" seed error", " seed p", " seed holm")
    of_difference = ("", " standard error", " low", " high", " p", " holm", *over_seeds)
    header += [f"{other} - {models[0]}{what}" for other in others for what in of_difference]
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(header)
    for task in comparison.tasks:
        row: list[Any] = [task.task, task.metric, task.num_fewshot, task.documents]
        by_model = (task.scores, task.standard_errors, task.seed_errors, task.ranks)
        row += [one[model] for model in models for one in by_model]
        for d in task.differences.values():
            row += [d.mean, d.standard_error, d.low, d.high, d.p_value, d.holm, *_cells(d.over_seeds)]
        rows.writerow(row)
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
    rows.writerow(["mean", None, None, None, *means, *mean_differences])
    return text.getvalue()


def _cells(found: OverSeeds | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if found is None else (found.standard_error, found.p_value, found.holm)
