"""This module draws and describes the pictures of the page, renders them with the
tables into page.html.j2, and writes it.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from titan_disp.condensation.heatmap import heatmaps
from titan_disp.condensation.record import (
    LEAST_RANGE,
    OF_PAPER,
    PLACES,
    Measurement,
    blocks_mean,
    telling_steps,
)
from titan_disp.errors import ConfigError, reported
from titan_disp.files import atomic_write
from titan_disp.lab import plots
from titan_disp.lab.published import HEADINGS, NOTE, beside, costs
from titan_disp.lab.report import charts, tables
from titan_disp.lab.report.charts import (
    BEGINNING,
    MANY,
    Line,
    Scale,
    by_condition,
    drawing,
    to_uri,
)
from titan_disp.lab.report.gather import RunRecord, conditions, gather
from titan_disp.lab.report.tables import state
from titan_disp.lab.templates import templates
from titan_disp.text import number

SHARED_STEPS = 4  # runs with so many common steps are shown at the same steps
# a function that reads steps and values
Points = Callable[[RunRecord], tuple[Iterable[float], Iterable[float]]]


@dataclass(frozen=True)
class Picture:
    """Represent a picture of the page, with a description for people who do not see
    it.
    """

    uri: str
    alt: str
    wide: bool = False  # whether it needs the whole width of the page


def _ends(y: np.ndarray) -> str:
    finite = y[np.isfinite(y)]
    return (
        f"{number(finite[0], 4)} → {number(finite[-1], 4)}"
        if len(finite)
        else "no number"
    )


def logged(key: str) -> Points:
    return lambda run: (run.series("step"), run.series(key))


def measured(read: Callable[[Measurement], float]) -> Points:
    return lambda run: (run.condensation.keys(), map(read, run.condensation.values()))


def lines_of(runs: Sequence[RunRecord], xlabel: str, points: Points) -> list[Line]:
    """Return lines against steps or tokens, with the resumes, for runs that have at
    least two points.
    """
    lines = []
    for place, run in enumerate(runs):
        steps, values = (np.array(list(one), dtype=np.float64) for one in points(run))
        per_step = run.tokens_per_step if xlabel == "tokens" else 1.0
        if np.isfinite(steps * per_step + values).sum() > 1:
            resumes = [
                e["step"] * per_step
                for e in run.events
                if e["event"] == "resume" and e["step"] <= run.step
            ]
            lines.append(Line(run.name, steps * per_step, values, place, resumes))
    return lines


def _curves(
    runs: Sequence[RunRecord], xlabel: str, charted: Iterable[tuple[str, Points, Scale]]
) -> list[Picture]:
    """Draw a chart for each (label of axis y, points, scale) that has lines."""
    names = [name for name, _ in conditions(runs)]
    every = [
        (ylabel, lines_of(runs, xlabel, points), scale)
        for ylabel, points, scale in charted
    ]
    found = [
        (ylabel, by_condition(runs, lines), scale)
        for ylabel, lines, scale in every
        if lines
    ]
    crowded = charts.crowded(names) or any(len(drawn) > MANY for _, drawn, _ in found)
    pictures = []
    if found and crowded:
        pictures.append(
            Picture(
                to_uri(charts.legend(names)), "legend of the charts below", wide=True
            )
        )
    for ylabel, drawn, scale in found:
        ends = "; ".join(f"{line.name}: {_ends(line.y)}" for line in drawn)
        uri = to_uri(
            charts.curves(drawn, xlabel, ylabel, scale, with_legend=not crowded)
        )
        pictures.append(Picture(uri, f"{ylabel} against {xlabel}. {ends}"))
    return pictures


def losses(runs: Sequence[RunRecord]) -> list[Picture]:
    """Draw cross-entropy and dispersion separately against tokens, and cross-entropy on
    other text if there is any.
    """

    def dispersion(run: RunRecord) -> tuple[Iterable[float], Iterable[float]]:
        return logged("dispersion")(run) if run.disperses else ((), ())

    charted: tuple[tuple[str, Points, Scale], ...] = (
        ("cross-entropy (training)", logged("ce"), charts.without_the_beginning),
        ("dispersion loss, without λ", dispersion, charts.as_it_is),
        (
            "cross-entropy (validation)",
            lambda run: (run.validation.keys(), run.validation.values()),
            charts.as_it_is,
        ),
        (
            "cross-entropy (held-out text)",
            measured(lambda found: found.cross_entropy),
            charts.as_it_is,
        ),
    )
    return _curves(runs, "tokens", charted)


def optimization(runs: Sequence[RunRecord]) -> list[Picture]:
    charted = (
        ("learning rate", logged("lr"), charts.as_it_is),
        ("gradient norm, before clipping", logged("grad_norm"), charts.by_factors),
        ("tokens/s of one rank", logged("tps"), charts.from_zero),
    )
    return _curves(runs, "step", charted)


MEASURES = (
    (
        "mean cosine, last block",
        measured(lambda found: found.mean_cosine[found.last_block]),
        charts.as_it_is,
    ),
    (
        "mean cosine, after the final norm",
        measured(lambda found: found.mean_cosine[-1]),
        charts.as_it_is,
    ),
    ("mean cosine, average of all blocks", measured(blocks_mean), charts.as_it_is),
    *(
        (f"{name}, {PLACES[OF_PAPER]}", measured(read), charts.correlation)
        for name, read in plots.MEASURES.items()
    ),
    (
        "effective rank, last block",
        measured(lambda found: found.effective_rank[found.last_block]),
        charts.from_zero,
    ),
)


def condensation_by_step(runs: Sequence[RunRecord]) -> list[Picture]:
    """Draw condensation against steps, for runs with at least two measurements."""
    return _curves(runs, "step", MEASURES)


def condensation_maps(runs: Sequence[RunRecord]) -> list[Picture]:
    return [
        Picture(
            to_uri(charts.layer_map(run.condensation, run.name, run.step)),
            f"mean cosine by layer and step, {run.name}: {len(run.condensation)} measurements",
        )
        for run in runs
        if len(run.condensation) > 1
    ]


def _some_steps(runs: Sequence[RunRecord]) -> dict[str, dict[int, Measurement]]:
    """Choose some measurements of every run, at the same steps if the runs share enough
    of them.

    These are the first, the last and the most condensed one, and some between them. The
    steps between grow by equal ratios, because a collapse comes early.
    """
    shared = set.intersection(*(set(run.condensation) for run in runs))
    together = len(shared) >= SHARED_STEPS
    some = {}
    for run in runs:
        highest = {one.most_condensed for one in (runs if together else [run])}
        steps = sorted(shared if together else run.condensation)
        chosen = {
            *telling_steps(steps, highest & set(steps)),
            run.most_condensed,
            max(run.condensation),
        }
        some[run.name] = {step: run.condensation[step] for step in sorted(chosen)}
    return some


def condensation_by_layer(runs: Sequence[RunRecord]) -> list[Picture]:
    """Draw mean cosines by layer at some steps, and the cosines of all pairs at the
    first, most condensed and last one.
    """
    with_any = [run for run in runs if run.condensation]
    if not with_any:
        return []
    rows = []
    for run in with_any:
        steps = sorted(
            {min(run.condensation), run.most_condensed, max(run.condensation)}
        )
        before = run.condensation[0].mean_cosine if 0 in steps else None
        shown = {
            step: replace(run.condensation[step], untrained_mean_cosine=before)
            for step in steps
        }
        rows.append({f"{run.name}, step {step:,}": one for step, one in shown.items()})
    names = ", ".join(run.name for run in with_any)
    by_layer = f"mean cosine by layer, a line for each of some steps: {names}"
    pairs = f"cosines of all pairs of tokens by layer, first, most condensed and last measurement: {names}"
    lines = plots.over_training(_some_steps(with_any))
    return [
        Picture(to_uri(lines), by_layer, wide=True),
        Picture(to_uri(heatmaps(rows)), pairs, wide=True),
    ]


def history(run: RunRecord) -> Picture | None:
    """Draw steps and events against time. Returns None if nothing was logged."""
    if not run.attempts:
        return None
    alt = f"steps and events of {run.name} against time, up to step {run.step}; number of starts: {len(run.attempts)}"
    return Picture(to_uri(charts.timeline(run.attempts, run.events)), alt, wide=True)


def render(
    runs: Sequence[RunRecord],
    now: float,
    left_out: Sequence[str] = (),
    scores: Sequence[Sequence[str]] = (),
) -> str:
    """Render the HTML page.

    It needs no other file, and texts from a run's files are never markup in it.

    ``now``, in seconds since the epoch, decides whether a run is alive. ``left_out``
    says which runs could not be read or shown. ``scores`` are lines of an evaluation,
    as ``beside`` returns them.
    """
    differ, shared = tables.config_differences(runs)
    names = [name for name, _ in conditions(runs)]
    firsts = [runs[members[0]] for _, members in conditions(runs)]
    # Those with pictures of their own
    some = runs if len(runs) <= MANY else firsts[: MANY // 2]
    pictured = [run.name for run in some]
    with drawing():
        return (
            templates(__file__)
            .get_template("page.html.j2")
            .render(
                runs=runs,
                left_out=left_out,
                states=[state(run, now)[0] for run in runs],
                written=tables.when(now),
                bins=charts.bins(len(names)),
                several_seeds=len(names) < len(runs),
                pictured=pictured,
                beginning=f"{BEGINNING:.0%}",
                least_range=LEAST_RANGE,
                overview=tables.overview(runs, now),
                final_numbers=tables.final_numbers(runs),
                published=[
                    HEADINGS,
                    [*beside(costs(runs), "this report"), *scores],
                    NOTE,
                ],
                losses=losses(runs),
                optimization=optimization(runs),
                condensation=[
                    condensation_by_step(runs),
                    condensation_maps(some),
                    condensation_by_layer(some),
                ],
                histories=[
                    (
                        run,
                        history(run) if run.name in pictured else None,
                        tables.starts(run, now),
                        tables.events(run),
                    )
                    for run in runs
                ],
                seen=tables.seen(runs),
                seen_headings=[
                    *tables.SEEN,
                    f"cross-entropy, mean of the last {tables.LAST_ROWS} rows",
                ],
                data_counters=tables.data_counters(runs),
                differ=differ,
                shared=shared,
                configs=[
                    (run.name, json.dumps(run.config, indent=2, ensure_ascii=False))
                    for run in some
                ],
                environments=tables.environments(runs),
            )
        )


def _that_can_be_shown(
    runs: Sequence[RunRecord], now: float, left_out: list[str]
) -> list[RunRecord]:
    """Return the runs of which a page can be made.

    ``left_out`` receives the others; ConfigError is raised if none can.
    """
    shown = []
    for run in runs:
        try:
            render([run], now)
            shown.append(run)
        except Exception as error:
            left_out.append(
                f"the run {str(run.path)!r} cannot be shown: {type(error).__name__}: "
                f"{error}"
            )
    if not shown:
        raise ConfigError("; ".join(left_out))
    return shown


def write_report(
    paths: Sequence[str | Path], out: str | Path, evaluation: Path | None = None
) -> Path:
    """Write the page about the runs in these folders (see ``gather``) and their
    evaluation, and return its path.
    """
    out = Path(out)
    if out.is_dir() or not out.parent.is_dir():
        what = "is a folder" if out.is_dir() else "is in a folder that does not exist"
        raise ConfigError(
            f"--out {str(out)!r} {what}, expected a file such as report.html in an "
            "existing folder"
        )
    left_out: list[str] = []
    wrong = f"--evaluation {str(evaluation)!r} cannot be read, expected the --out folder of titan-disp evaluate"
    with reported(wrong, OSError, ValueError, KeyError, TypeError):
        lines = (
            []
            if evaluation is None
            else json.loads((evaluation / "results.json").read_text())["published"]
        )
        scores = [list(map(str, line)) for line in lines]
    runs = gather(paths, left_out)
    now = time.time()
    try:
        html = render(runs, now, left_out, scores)
    except Exception:  # numbers of a run that can be read, but not shown
        shown = _that_can_be_shown(runs, now, left_out)
        if len(shown) == len(runs):
            raise
        html = render(shown, now, left_out, scores)
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    with (
        reported(f"the report cannot be written to {str(out)!r}", OSError),
        atomic_write(out) as partial,
    ):
        partial.write_text(html, encoding="utf-8")
    return out
