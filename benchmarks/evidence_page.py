"""Write docs/evidence.md and its appendix from docs/evidence.jsonl and two templates,
which have the prose.

The numbers are computed here, and the words are written there by hand. The words that
rely on a sign or a size are marked with it (``holds``). If the rows say otherwise, the
page is not written, and the error names what to rewrite.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tomli
import torch
from scipy import stats

from benchmarks import evidence_analysis as analysis
from benchmarks import evidence_parts as design
from benchmarks import evidence_score
from benchmarks.evidence_analysis import Paired
from benchmarks.evidence_parts import (
    RESTORED,
    TRAINED,
    Recipe,
    Row,
    jobs,
    newest,
    tuned,
    tuning_losses,
)
from benchmarks.evidence_plots import draw
from benchmarks.templates import Refused, render
from titan_disp.files import atomic_write
from titan_disp.models.qwen3 import Qwen3DispModel
from titan_disp.models.registry import model_args

NOTHING = "–"
PAGES = ("evidence.md", "evidence_tables.md")


def mean(values: Iterable[float], digits: int = 3, sign: str = "") -> str:
    """Format a mean with its standard error over seeds."""
    found = list(values)
    if not found:
        return NOTHING
    error = f" ± {stats.sem(found):.{digits}f}" if len(found) > 1 else ""
    return f"{np.mean(found):{sign}.{digits}f}{error}"


def interval(found: Paired, digits: int) -> str:
    return (
        NOTHING
        if np.isnan(found.low)
        else f"{found.low:+.{digits}f} … {found.high:+.{digits}f}"
    )


def signed(
    found: Paired, digits: int | None = None, what: str = "95 % interval "
) -> str:
    """Return "+0.012 (95 % interval +0.005 … +0.020; higher in 8 of 8 seeds)".

    By default it has 3 decimals, or 4 where 3 would show a number as zero and so hide
    its sign.
    """
    tiny = any(x and abs(x) < 0.0005 for x in (found.mean, found.low, found.high))
    digits = digits or (4 if tiny else 3)
    return f"{found.mean:+.{digits}f} ({what}{interval(found, digits)}; {found.agreement()})"


FILTERS = {
    "percent": lambda fraction, sign="": f"{100 * fraction:{sign}.0f} %",
    "mean": mean,
    "mean_only": lambda values, digits: f"{np.mean(list(values)):.{digits}f}",
    "median": lambda values: f"{median(values):g}",
    "interval": interval,
    "signed": signed,
    "short": partial(signed, what=""),
}


def extremes(rows: Sequence[Row], part: str) -> dict[str, str]:
    """Return on − off on the curves' text, where its mean over seeds is lowest and
    highest after step 0, and at the end.
    """
    steps, _, d = analysis.curve_differences(rows, part)
    low, high = analysis.interval(d)
    over_seeds = d.mean(axis=0)

    def at(i: int) -> str:
        return f"{over_seeds[i]:+.3f} at step {steps[i]} (95 % interval {low[i]:+.3f} … {high[i]:+.3f})"

    return {
        "lowest": at(1 + over_seeds[1:].argmin()),
        "highest": at(1 + over_seeds[1:].argmax()),
        "end": at(-1),
    }


def numbers(rows: Sequence[Row], text: str, condition: str) -> dict[str, Any]:
    """Return means over seeds of a condition of mid-training, or of the models before
    it.
    """
    own = analysis.finished(rows, "midtraining", condition)
    # Measured in main, or when they were trained again
    if (text, condition) == ("test", "before"):
        own = analysis.finished(rows, "main", "off") | analysis.second_runs(rows)
    found = [row["numbers"][text] for row in own.values()]
    cosine = np.mean([one["mean_cosine"] for one in found], axis=0).tolist()
    means = {
        name: float(np.mean([one[name] for one in found]))
        for name in ("cross_entropy", "accuracy")
    }
    return {**means, "mean_cosine": cosine, "blocks": float(np.mean(cosine[1:-1]))}


def tuning_cell(
    rows: Sequence[Row],
    state: str,
    lr: float,
    warmup: float,
    part: str = "tuning",
    width: str = "",
) -> str:
    """Return the mean loss of a state, or of on − off, with one recipe.

    ``width`` is "-16" in the second experiment.
    """
    losses = {
        one: tuning_losses(rows, one + width, [lr], part)[Recipe(lr, warmup)]
        for one in design.STATES
    }
    losses["on − off"] = [
        on - off for on, off in zip(losses["on"], losses["off"], strict=False)
    ]
    if not np.isfinite(losses[state]).all():
        return "failed"
    if width and state not in design.STATES:
        return ", ".join(f"{one:+.4f}" for one in losses[state]) or NOTHING
    return mean(losses[state], sign="" if state in design.STATES else "+")


def attempts(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return number, failures and hours of all attempts by part.

    Other rows only measure a model again.
    """
    tried = [row for row in rows if "history" in row or row.get("status") == "failed"]
    found = {}
    for part, name in {
        **design.PARTS,
        RESTORED: "main comparison's off, trained again for mid-training",
    }.items():
        if own := [row for row in tried if row["part"] == part]:
            hours = sum(_seconds(row) for row in own if "history" in row) / 3600
            failed = sum(row.get("status") == "failed" for row in own)
            found[name] = {"number": len(own), "failed": failed, "hours": hours}
    return found


def _seconds(row: Row) -> float:
    return sum(row["history"]["seconds"].values())


def seconds(rows: Sequence[Row], part: str, condition: str = "") -> float:
    """Return the mean seconds of a condition's runs, or of those of ``RESTORED``, from
    the start to the end of training.
    """
    own = (
        analysis.second_runs(rows)
        if part == RESTORED
        else analysis.finished(rows, part, condition)
    )
    return float(np.mean([_seconds(row) for row in own.values()]))


def _scatter(found: Paired) -> float:
    return float(np.std([*found.differences.values()], ddof=1))


def pooled(found: Iterable[Paired]) -> float:
    """Return the standard deviation of the differences over the seeds, pooled over the
    pairs.
    """
    return float(np.sqrt(np.mean([_scatter(one) ** 2 for one in found])))


def missing(rows: Sequence[Row]) -> list[str]:
    """Return the runs of the design that have no row, by part; a failed run has one."""
    known = newest(rows)
    wanted = {
        part: [job.name for job in jobs(part, rows) if job.key not in known]
        for part in design.FIRST
    }
    if not tuned(rows):
        return ["tuning is not complete, and decides the recipes of all other runs"]
    return [f"{part}: {', '.join(names)}" for part, names in wanted.items() if names]


def context(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what the template can name: the analysis and the design, and what is said
    of these rows.
    """
    config = tomli.loads((Path(__file__).parent.parent / design.CONFIG).read_text())
    model = model_args(config["model"]["name"], config["model"]["flavor"])
    with torch.device("meta"):
        parameters = sum(one.numel() for one in Qwen3DispModel(model).parameters())
    shares = analysis.token_shares(rows) or {}
    rates = analysis.by_learning_rate(rows)
    noise = analysis.noise(rows)
    known = dict.fromkeys(key[:2] for key in newest(rows))
    second = [abs(d) for d in analysis.restored(rows)]

    return {
        **vars(analysis),
        "outcomes": analysis.outcomes(rows),
        **{
            one.__name__: one
            for one in (attempts, extremes, numbers, pooled, seconds, tuning_cell)
        },
        **{
            "design": design,
            "score": evidence_score,
            "config": config,
            "model": model,
            "rows": rows,
        },
        **{
            "coeff": config["dispersion"]["coeff"],
            "parameters": parameters / 1e6,
            "second": second,
        },
        **{
            "rates": rates,
            "recipes": tuned(rows),
            "shares": shares,
            "differences": noise,
        },
        **{"names": design.NAMES, "texts": design.TEXTS, "coeffs": design.COEFFS},
        "largest": max(shares, key=lambda name: shares[name]),
        "conditions": [key for part in TRAINED for key in known if key[0] == part],
        "corpus": next(row for row in reversed(rows) if row["part"] == "corpus"),
    }


def pages(rows: Sequence[Row]) -> dict[str, str]:
    """Return the page and its appendix as Markdown, by file name.

    Raises:
        Refused: Runs are missing, or words of a template are not true of the rows.
    """
    if left := missing(rows):
        raise Refused(
            "\n  ".join(
                ["runs are missing that the text of docs/evidence.md is about:", *left]
            )
        )
    known = context(rows)
    return {name: render(f"{name}.j2", known, **FILTERS) for name in PAGES}


def write_pages(rows: Sequence[Row], docs: Path) -> None:
    found = pages(rows)
    draw(rows, docs)
    for name, text in found.items():
        with atomic_write(docs / name) as partial:
            partial.write_text(text)
