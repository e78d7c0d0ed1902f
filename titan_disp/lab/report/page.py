"""This module draws and describes the pictures of the page, renders them with the
headline and the tables into page.html.j2, and writes it.
"""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from titan_disp.condensation.heatmap import heatmaps, new_figure
from titan_disp.condensation.record import LEAST_RANGE, Measurement, telling_steps
from titan_disp.dispersion.formula import AngularFormula
from titan_disp.errors import ConfigError, reported
from titan_disp.files import atomic_write
from titan_disp.lab import plots
from titan_disp.lab.published import HEADINGS, NOTE, beside, costs
from titan_disp.lab.report import charts, tables
from titan_disp.lab.report import series as declared
from titan_disp.lab.report.charts import (
    MANY,
    SIZE,
    TALL,
    Line,
    by_condition,
    drawing,
    to_svg,
)
from titan_disp.lab.report.gather import Condition, RunRecord, conditions, gather
from titan_disp.lab.report.headline import Headline
from titan_disp.lab.report.series import (
    CROSS_ENTROPY,
    DISPERSION,
    HELD_OUT,
    Points,
    Series,
)
from titan_disp.lab.templates import templates
from titan_disp.text import duration, number

MAPS = 2  # layer maps of the first screen, at most


@dataclass(frozen=True)
class Picture:
    """Represent a picture of the page, with a description for people who do not see
    it.
    """

    svg: Markup
    alt: str
    wide: bool = False  # whether it needs the whole width of the page


def _picture(figure: Figure, alt: str, wide: bool = False) -> Picture:
    return Picture(Markup(to_svg(figure, salt=alt)), alt, wide)


def _per_step(run: RunRecord, xlabel: str) -> float:
    """Return by how much x grows in a step of the run."""
    return run.tokens_per_step if xlabel == "tokens" else 1.0


def lines_of(runs: Sequence[RunRecord], xlabel: str, points: Points) -> list[Line]:
    """Return lines against steps or tokens, with the resumes, for runs that have at
    least two points.
    """
    lines = []
    for place, run in enumerate(runs):
        steps, values = (np.array(list(column), np.float64) for column in points(run))
        per_step = _per_step(run, xlabel)
        if np.isfinite(steps * per_step + values).sum() < 2:
            continue
        resumes = [
            event["step"] * per_step
            for event in run.events
            if event["event"] == "resume" and event["step"] <= run.step
        ]
        lines.append(Line(run.name, steps * per_step, values, place, resumes))
    return lines


@dataclass(frozen=True)
class Report:
    """The runs of a page, and its pictures.

    If all runs have the same number of tokens per step, the x axes are steps, or tokens
    if the reader chooses so. Otherwise, they are tokens.
    """

    runs: Sequence[RunRecord]

    @cached_property
    def conditions(self) -> list[Condition]:
        return conditions(self.runs)

    @cached_property
    def tokens_per_step(self) -> float | None:
        """Return the tokens per step if all runs have the same, for a second scale.
        None if they differ, or if nothing was logged.
        """
        numbers = {run.tokens_per_step for run in self.runs if run.rows}
        return numbers.pop() if len(numbers) == 1 else None

    @property
    def xlabel(self) -> str:
        """Return "step", or "tokens" if the runs differ in their tokens per step."""
        if self.tokens_per_step is None and any(run.rows for run in self.runs):
            return "tokens"
        return "step"

    @cached_property
    def pictured(self) -> Sequence[RunRecord]:
        """Return the runs with pictures of their own: all, or if there are many, the
        first of each of the first conditions.
        """
        if len(self.runs) <= MANY:
            return self.runs
        return self.first_runs[: MANY // 2]

    @property
    def first_runs(self) -> list[RunRecord]:
        """Return the first run of each condition."""
        return [self.runs[condition.places[0]] for condition in self.conditions]

    @cached_property
    def formulas(self) -> list[AngularFormula]:
        """Return the formulas of the loss, without duplicates."""
        formulas = (
            AngularFormula.of_run(run.config["dispersion"]) for run in self.runs
        )
        return list(dict.fromkeys(filter(None, formulas)))

    def lines(self, series: Series) -> list[Line]:
        """Return a chart's lines, one for each condition, or none if no run has two
        points.
        """
        lines = lines_of(self.runs, self.xlabel, series.points)
        return by_condition(self.conditions, lines)

    def draw(
        self, column: Sequence[Series], size: tuple[float, float]
    ) -> Picture | None:
        """Draw charts above one another, without those that have no lines. ``size`` is
        in inches.
        """
        lines = {series: self.lines(series) for series in column}
        drawn = [series for series in column if lines[series]]
        if not drawn:
            return None
        figure = new_figure(*size)
        panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
        for axes, series in zip(panels, drawn, strict=True):
            charts.draw_lines(axes, lines[series], series.label, series.scale)
            if series is DISPERSION:
                for formula in self.formulas:
                    axes.axhline(formula.ceiling, color="0.4", linestyle=(0, (4, 4)))
        axes.set_xlabel(self.xlabel)
        charts.add_tokens(axes, self.tokens_per_step)
        texts = [f"{series.label}: {_ends(lines[series])}" for series in drawn]
        return _picture(figure, f"{'. '.join(texts)}, against {self.xlabel}s")

    def gallery(self, table: Iterable[Series]) -> list[Picture]:
        """Draw each chart that has lines."""
        return list(filter(None, [self.draw([series], SIZE) for series in table]))

    def layer_maps(self, runs: Sequence[RunRecord]) -> Picture | None:
        """Draw the mean cosine by layer and step above one another, for runs with at
        least two measurements.
        """
        runs = [run for run in runs if len(run.condensation) > 1]
        if not runs:
            return None
        figure = new_figure(*TALL)
        panels = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
        for axes, run in zip(panels, runs, strict=True):
            per_step = _per_step(run, self.xlabel)
            by_x = {step * per_step: m for step, m in run.condensation.items()}
            mesh = charts.draw_layer_map(axes, by_x, run.name, run.step * per_step)
            axes.set_xlabel(self.xlabel)
            charts.add_tokens(axes, self.tokens_per_step)
        charts.add_cosine_scale(figure, mesh, runs[0].condensation)
        names = ", ".join(run.name for run in runs)
        return _picture(figure, f"mean cosine by layer and {self.xlabel}: {names}")

    def first_screen(self) -> list[Picture]:
        """Draw the layer maps and the losses: cross-entropy, of held-out text if there
        is any, and the dispersion loss.
        """
        cross_entropy = HELD_OUT if self.lines(HELD_OUT) else CROSS_ENTROPY
        losses = self.draw([cross_entropy, DISPERSION], TALL)
        return list(filter(None, [self.layer_maps(self.first_runs[:MAPS]), losses]))

    def condensation_by_layer(self) -> list[Picture]:
        """Draw mean cosines by layer at some steps, and the cosines of all pairs at the
        first, most condensed and last one.
        """
        runs = [run for run in self.pictured if run.condensation]
        if not runs:
            return []
        names = ", ".join(run.name for run in runs)
        by_layer = f"mean cosine by layer, a line for each of some steps: {names}"
        pairs = (
            "cosines of all pairs of tokens by layer, first, most condensed and last "
            f"measurement: {names}"
        )
        lines = plots.over_training(_some_steps(runs))
        maps = filter(None, (self.layer_maps([run]) for run in runs))
        return [
            *maps,
            _picture(lines, by_layer, wide=True),
            _picture(heatmaps(list(map(_heatmap_panels, runs))), pairs, wide=True),
        ]


def _ends(lines: Sequence[Line]) -> str:
    """Return the first and the last finite number of each line, for its description."""
    texts = []
    for line in lines:
        finite = line.y[np.isfinite(line.y)]
        texts.append(f"{line.name}: {number(finite[0], 4)} → {number(finite[-1], 4)}")
    return "; ".join(texts)


def _some_steps(runs: Sequence[RunRecord]) -> dict[str, dict[int, Measurement]]:
    """Return some measurements of each run by step, for lines that can be told apart.

    They are those at a few of the steps of all runs, which include the first one, and
    the most condensed and the last one of each run.
    """
    steps = set().union(*(run.condensation for run in runs))
    most_condensed = {run.most_condensed for run in runs}
    chosen = {max(run.condensation) for run in runs}
    chosen.update(telling_steps(sorted(steps), most_condensed))
    return {
        run.name: {
            step: measurement
            for step, measurement in run.condensation.items()
            if step in chosen
        }
        for run in runs
    }


def _heatmap_panels(run: RunRecord) -> dict[str, Measurement]:
    """Return the first, the most condensed and the last measurement by title. They also
    have the mean cosines before training, if they were measured, for a dashed line.
    """
    untrained = None
    if 0 in run.condensation:
        untrained = run.condensation[0].mean_cosine
    steps = {min(run.condensation), run.most_condensed, max(run.condensation)}
    return {
        f"{run.name}, step {step:,}": replace(
            run.condensation[step], untrained_mean_cosine=untrained
        )
        for step in sorted(steps)
    }


def history(run: RunRecord) -> Picture | None:
    """Draw steps and events against time. Returns None if nothing was logged."""
    if not run.attempts:
        return None
    alt = (
        f"steps and events of {run.name} against time, up to step {run.step}; number "
        f"of starts: {len(run.attempts)}"
    )
    return _picture(charts.timeline(run.attempts, run.events), alt, wide=True)


def render(
    runs: Sequence[RunRecord],
    written: float,
    left_out: Sequence[str] = (),
    scores: Sequence[Sequence[str]] = (),
) -> str:
    """Render the HTML page.

    It needs no other file, and texts from a run's files are never markup in it.

    ``written``, in seconds since the epoch, decides whether a run is alive.
    ``left_out`` says which runs could not be read or drawn. ``scores`` are lines of an
    evaluation, as ``beside`` returns them.
    """
    page = templates(
        __file__, number=number, duration=duration, when=tables.when
    ).get_template("page.html.j2")
    with drawing():
        return page.render(
            report=Report(runs),
            headline=Headline(runs, written),
            tables=tables,
            series=declared,
            charts=charts,
            history=history,
            written=written,
            left_out=left_out,
            least_range=LEAST_RANGE,
            published=[HEADINGS, [*beside(costs(runs), "this report"), *scores], NOTE],
        )


def _drawable(
    runs: Sequence[RunRecord], written: float, left_out: list[str]
) -> list[RunRecord]:
    """Return the runs of which a page can be made.

    ``left_out`` receives the reasons for the others. Raises ConfigError if there is no
    such run.
    """
    drawable = []
    for run in runs:
        try:
            render([run], written)
            drawable.append(run)
        except Exception as error:
            left_out.append(
                f"the run {str(run.path)!r} cannot be shown: {type(error).__name__}: "
                f"{error}"
            )
    if not drawable:
        raise ConfigError("; ".join(left_out))
    return drawable


def _scores(evaluation: Path | None) -> list[list[str]]:
    """Return the lines of an evaluation, in the form of ``beside``. Raises
    ConfigError.
    """
    if evaluation is None:
        return []
    wrong = (
        f"--evaluation {str(evaluation)!r} cannot be read, expected the --out folder "
        "of titan-disp evaluate"
    )
    with reported(wrong, OSError, ValueError, KeyError, TypeError):
        results = json.loads((evaluation / "results.json").read_text())
        return [list(map(str, line)) for line in results["published"]]


def write_report(
    paths: Sequence[str | Path], out: str | Path, evaluation: Path | None = None
) -> Path:
    """Write the page about the runs in these folders (see ``gather``) and their
    evaluation, and return its path.
    """
    out = Path(out)
    if out.is_dir() or not out.parent.is_dir():
        what = "is in a folder that does not exist"
        if out.is_dir():
            what = "is a folder"
        raise ConfigError(
            f"--out {str(out)!r} {what}, expected a file such as report.html in an "
            "existing folder"
        )
    left_out: list[str] = []
    scores = _scores(evaluation)
    runs = gather(paths, left_out)
    written = time.time()
    try:
        html = render(runs, written, left_out, scores)
    except Exception:  # numbers of a run that can be read, but not drawn
        drawable = _drawable(runs, written, left_out)
        if len(drawable) == len(runs):
            raise
        html = render(drawable, written, left_out, scores)
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    with (
        reported(f"the report cannot be written to {str(out)!r}", OSError),
        atomic_write(out) as partial,
    ):
        partial.write_text(html, encoding="utf-8")
    return out
