"""Draws the pictures of the report, renders them with the headline and the tables into
page.html.j2, and writes the page.
"""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from titan_disp.condensation.heatmap import heatmaps, new_figure
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
    per_step,
    tokens_per_step,
    xlabel_of,
)
from titan_disp.templates import templates
from titan_disp.text import duration, number

MAPS = 2  # the first screen has at most this many layer maps


@dataclass(frozen=True)
class Picture:
    """A picture of the page."""

    svg: Markup
    alt: str  # description for people who cannot see the picture
    wide: bool = False  # whether it needs the whole width of the page


def _picture(figure: Figure, alt: str, wide: bool = False) -> Picture:
    return Picture(Markup(to_svg(figure, salt=alt)), alt, wide)


def lines_of(runs: Sequence[RunRecord], xlabel: str, points: Points) -> list[Line]:
    """Return a line against steps or tokens for each run with at least two points.

    Lines also have the places of the run's resumes.
    """
    lines = []
    for place, run in enumerate(runs):
        steps, values = (np.array(list(column), np.float64) for column in points(run))
        x = steps * per_step(run, xlabel)
        if np.isfinite(x + values).sum() < 2:
            continue
        resumes = [
            event["step"] * per_step(run, xlabel)
            for event in run.events
            if event["event"] == "resume" and event["step"] <= run.step
        ]
        lines.append(Line(run.name, x, values, place, resumes))
    return lines


@dataclass(frozen=True)
class Report:
    """The runs of a page, and its pictures.

    If all runs have the same number of tokens per step, the reader of the page can
    choose steps or tokens for the x axes. Otherwise, x axes show tokens.
    """

    runs: Sequence[RunRecord]

    @cached_property
    def conditions(self) -> list[Condition]:
        return conditions(self.runs)

    @cached_property
    def xlabel(self) -> str:
        return xlabel_of(self.runs)

    @cached_property
    def pictured(self) -> Sequence[RunRecord]:
        """The runs with pictures of their own.

        These are all runs, or for more than ``MANY`` runs, the first run of each of the
        first conditions.
        """
        if len(self.runs) <= MANY:
            return self.runs
        return self.first_runs[: MANY // 2]

    @property
    def first_runs(self) -> list[RunRecord]:
        """The first run of each condition."""
        return [self.runs[condition.places[0]] for condition in self.conditions]

    @cached_property
    def formulas(self) -> list[AngularFormula | None]:
        """The different formulas of the runs with dispersion.

        None stands for a loss that is not angular.
        """
        disperse = [run.config["dispersion"] for run in self.runs if run.disperses]
        return list(dict.fromkeys(map(AngularFormula.of_run, disperse)))

    @property
    def ceiling(self) -> float | None:
        """The highest possible dispersion loss, or None if it differs between runs."""
        if len(self.formulas) == 1 and self.formulas[0] is not None:
            return self.formulas[0].ceiling
        return None

    def lines(self, series: Series) -> list[Line]:
        """Return the lines of a chart, one for each condition. The list is empty if no
        run has two points.
        """
        lines = lines_of(self.runs, self.xlabel, series.points)
        return by_condition(self.conditions, lines)

    def draw(
        self, column: Sequence[Series], size: tuple[float, float]
    ) -> Picture | None:
        """Return charts above one another, or None if no series has lines.

        Series without lines are left out. ``size`` is in inches.
        """
        lines = {series: self.lines(series) for series in column}
        drawn = [series for series in column if lines[series]]
        if not drawn:
            return None
        figure = new_figure(*size)
        panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
        for axes, series in zip(panels, drawn, strict=True):
            charts.draw_lines(axes, lines[series], series.label, series.scale)
            if series is DISPERSION and self.ceiling is not None:
                axes.axhline(self.ceiling, color="0.4", linestyle=(0, (4, 4)))
        axes.set_xlabel(self.xlabel)
        charts.add_tokens(axes, tokens_per_step(self.runs))
        texts = [f"{series.label}: {_ends(lines[series])}" for series in drawn]
        return _picture(figure, f"{'. '.join(texts)}, against {self.xlabel}s")

    def gallery(self, table: Iterable[Series]) -> list[Picture]:
        """Return a chart for each series that has lines."""
        return list(filter(None, [self.draw([series], SIZE) for series in table]))

    def layer_maps(self, runs: Sequence[RunRecord]) -> Picture | None:
        """Return maps of the mean cosine by layer and step, one above another, for runs
        with at least two measurements; None if there is no such run.
        """
        runs = [
            run
            for run in runs
            if len(run.condensation) > 1 and np.isfinite(per_step(run, self.xlabel))
        ]
        if not runs:
            return None
        figure = new_figure(*TALL)
        panels = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
        for axes, run in zip(panels, runs, strict=True):
            scale = per_step(run, self.xlabel)
            by_x = {step * scale: m for step, m in run.condensation.items()}
            mesh = plots.draw_layer_map(axes, by_x, run.name, run.step * scale)
            axes.set_xlabel(self.xlabel)
            charts.add_tokens(axes, tokens_per_step(self.runs))
        plots.add_cosine_scale(figure, mesh, runs[0].condensation)
        names = ", ".join(run.name for run in runs)
        return _picture(figure, f"mean cosine by layer and {self.xlabel}: {names}")

    def first_screen(self) -> list[Picture]:
        """Return pictures of the layer maps and of the losses, if they can be drawn.

        The losses are the dispersion loss and the cross-entropy, on held-out text if it
        was measured.
        """
        cross_entropy = CROSS_ENTROPY
        if self.lines(HELD_OUT):
            cross_entropy = HELD_OUT
        losses = self.draw([cross_entropy, DISPERSION], TALL)
        return list(filter(None, [self.layer_maps(self.first_runs[:MAPS]), losses]))

    def condensation_by_layer(self) -> list[Picture]:
        """Return pictures of mean cosines by layer at some steps, and of the cosines of
        all pairs at the first, the most condensed and the last step.
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
        by_run = {run.name: run.condensation for run in runs}
        lines = plots.over_training(plots.some_steps(by_run))
        panels = [plots.heatmap_panels(*run) for run in by_run.items()]
        maps = filter(None, (self.layer_maps([run]) for run in runs))
        return [
            *maps,
            _picture(lines, by_layer, wide=True),
            _picture(heatmaps(panels), pairs, wide=True),
        ]


def _ends(lines: Sequence[Line]) -> str:
    """Return the first and the last finite number of each line, as text."""
    texts = []
    for line in lines:
        finite = line.y[np.isfinite(line.y)]
        texts.append(f"{line.name}: {number(finite[0], 4)} → {number(finite[-1], 4)}")
    return "; ".join(texts)


def history(run: RunRecord) -> Picture | None:
    """Return a picture of steps and events against time, or None if nothing was logged."""
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
    """Return the HTML page, which needs no other file. Texts from runs are escaped.

    Args:
        written: time of the page in seconds since the epoch; decides whether a run
            counts as running.
        left_out: reasons why runs could not be read or drawn.
        scores: lines of an evaluation, as ``beside`` returns them.
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
            published=[HEADINGS, [*beside(costs(runs), "this report"), *scores], NOTE],
        )


def _drawable(
    runs: Sequence[RunRecord], written: float, left_out: list[str]
) -> list[RunRecord]:
    """Return the runs that can be drawn, and append to ``left_out`` why other runs
    cannot.

    Raises ConfigError if no run can be drawn.
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
    """Return the lines of an evaluation, as ``beside`` returns them; [] without an
    evaluation.

    Raises ConfigError if the results cannot be read.
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
    """Write the page about runs (``paths`` as for ``gather``) and their evaluation, and
    return the page's path.

    Raises ConfigError if no run can be read or drawn, or the page cannot be written.
    """
    out = Path(out)
    if out.is_dir() or not out.parent.is_dir():
        problem = "is in a folder that does not exist"
        if out.is_dir():
            problem = "is a folder"
        raise ConfigError(
            f"--out {str(out)!r} {problem}, expected a file such as report.html in an "
            "existing folder"
        )
    left_out: list[str] = []
    scores = _scores(evaluation)
    runs = gather(paths, left_out)
    written = time.time()
    try:
        html = render(runs, written, left_out, scores)
    except Exception:  # a run may have numbers that can be read but not drawn
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
