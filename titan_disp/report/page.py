"""This module renders tables and pictures into page.html.j2, and writes the page atomically."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from titan_disp.condensation.record import LEAST_RANGE
from titan_disp.errors import ConfigError
from titan_disp.files import atomic_write
from titan_disp.report import pictures, tables
from titan_disp.report.charts import BEGINNING, BINS, drawing
from titan_disp.report.conditions import conditions
from titan_disp.report.gather import Run, gather
from titan_disp.report.state import state


def render(runs: Sequence[Run], now: float) -> str:
    """Render the HTML page. It needs no other file, and texts from a run's files are never markup in it.

    Args:
        runs: the runs.
        now: seconds since the epoch, to decide whether a run is alive.
    """
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    differ, shared = tables.config_differences(runs)
    with drawing():
        return templates.get_template("page.html.j2").render(
            runs=runs,
            states=[state(run, now)[0] for run in runs],
            written=tables.when(now),
            bins=BINS,
            several_seeds=len(conditions(runs)) < len(runs),
            beginning=f"{BEGINNING:.0%}",
            least_range=LEAST_RANGE,
            overview=tables.overview(runs, now),
            final_numbers=tables.final_numbers(runs),
            losses=pictures.losses(runs),
            optimization=pictures.optimization(runs),
            condensation=[
                pictures.condensation_by_step(runs),
                pictures.condensation_maps(runs),
                pictures.condensation_by_layer(runs),
            ],
            histories=[(run, pictures.history(run), tables.starts(run, now), tables.events(run)) for run in runs],
            data_counters=tables.data_counters(runs),
            differ=differ,
            shared=shared,
            configs=[(run.name, json.dumps(run.config, indent=2, ensure_ascii=False)) for run in runs],
            environments=tables.environments(runs),
        )


def write_report(paths: Sequence[str | Path], out: str | Path) -> Path:
    """Write the page about the runs in these folders, and return its path.

    Args:
        paths: arguments of ``gather``.
        out: file of the page.

    Raises:
        ConfigError: A path is not a run's folder (see ``gather``), or ``out`` cannot be written.
    """
    out = Path(out)
    if out.is_dir() or not out.parent.is_dir():
        what = "is a folder" if out.is_dir() else "is in a folder that does not exist"
        raise ConfigError(f"--out {str(out)!r} {what}, expected a file such as report.html in an existing folder")
    html = render(gather(paths), time.time())
    try:
        with atomic_write(out) as partial:
            partial.write_text(html, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {str(out)!r}: {error.strerror}") from error
    return out
