"""A comparison as Markdown, for people, and as CSV, for spreadsheets."""

import csv
import io
from collections.abc import Sequence
from typing import Any

from titan_disp.evaluate.compare import Comparison, Difference, MeanDifference


def to_markdown(comparison: Comparison) -> str:
    """Tasks × models, differences with their standard errors, and p values."""
    models, others = list(comparison.mean), list(comparison.mean_difference)
    header = ["task", "metric", "shots", "documents", *models, *(f"{other} − {models[0]}" for other in others)]
    rows: list[list[str]] = []
    for task in comparison.tasks:
        first = [task.task, task.metric, str(task.num_fewshot), str(task.documents)]
        scores = [f"{score:.4f}" for score in task.scores.values()]
        rows.append([*first, *scores, *map(_difference, task.differences.values())])
    means = [f"{mean:.4f}" for mean in comparison.mean.values()]
    rows.append(["mean", "", "", "", *means, *map(_mean_difference, comparison.mean_difference.values())])
    if others:
        ranks = [f"{rank:.2f}" for rank in comparison.mean_rank.values()]
        rows.append(["mean rank", "", "", "", *ranks, *("" for _ in others)])
    text = "\n".join("| " + " | ".join(row) + " |" for row in _aligned([header, *rows]))
    if not others:
        return text + "\n"
    return text + (
        "\n\nDifferences: mean ± standard error over the same documents, p of a paired t-test. The mean's two standard errors: "
        "had these\ntasks other documents; had there been other tasks. Neither covers another seed of the training.\n"
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """With a ruler after the first; columns of one width, numbers to the right."""
    columns = []
    for i, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(len, cells))
        if i < 2:  # task, metric
            columns.append([cells[0].ljust(width), "-" * width, *(cell.ljust(width) for cell in cells[1:])])
        else:
            columns.append([cells[0].rjust(width), "-" * (width - 1) + ":", *(cell.rjust(width) for cell in cells[1:])])
    return [list(row) for row in zip(*columns, strict=True)]


def _error(error: float | None) -> str:
    return "" if error is None else f" ± {error:.4f}"


def _difference(difference: Difference) -> str:
    p = "" if difference.p_value is None else f" (p {difference.p_value:.2g})"
    return f"{difference.mean:+.4f}{_error(difference.standard_error)}{p}"


def _mean_difference(difference: MeanDifference) -> str:
    documents, tasks = _error(difference.standard_error_documents), _error(difference.standard_error_tasks)
    return f"{difference.mean:+.4f}" + (documents and f"{documents} (documents)") + (tasks and f"{tasks} (tasks)")


def to_csv(comparison: Comparison) -> str:
    """The same and more (standard errors, ranks, 95 % intervals) at full precision; empty where undefined."""
    models, others = list(comparison.mean), list(comparison.mean_difference)
    header = ["task", "metric", "num_fewshot", "documents"]
    header += [f"{model}{what}" for model in models for what in ("", " standard error", " rank")]
    of_difference = ("", " standard error", " low", " high", " p")
    header += [f"{other} - {models[0]}{what}" for other in others for what in of_difference]
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(header)
    for task in comparison.tasks:
        row: list[Any] = [task.task, task.metric, task.num_fewshot, task.documents]
        row += [one[model] for model in models for one in (task.scores, task.standard_errors, task.ranks)]
        for d in task.differences.values():
            row += [d.mean, d.standard_error, d.low, d.high, d.p_value]
        rows.writerow(row)
    means = [one for model in models for one in (comparison.mean[model], None, comparison.mean_rank[model])]
    mean_differences = [
        one
        for d in comparison.mean_difference.values()
        for one in (d.mean, d.standard_error_documents, None, None, None)
    ]
    rows.writerow(["mean", None, None, None, *means, *mean_differences])
    return text.getvalue()
