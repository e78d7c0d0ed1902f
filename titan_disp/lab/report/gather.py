"""This module reads a run's folder once. The run may be training or interrupted, and files may be missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_disp.condensation.record import Condensation, load_steps, most_condensed
from titan_disp.errors import ConfigError
from titan_disp.lab.inspection.targets import parse_group
from titan_disp.models.arguments import named
from titan_disp.models.registry import MODELS, model_args
from titan_disp.run.history import Attempt, Goodput, attempts, goodputs
from titan_disp.run.reader import (
    by_step,
    flatten,
    is_run,
    read_config,
    read_environment,
    read_events,
    read_failures,
    read_rows,
    read_validation,
)


@dataclass(frozen=True)
class Run:
    """Hold the contents of a run's folder. All times are seconds since the epoch.

    Attributes:
        path: the run's folder.
        name: unique name in the report.
        group: name that the user gave to several runs, as in off=RUN,RUN; None for a run alone.
        config: contents of config.json.
        environment: contents of environment.json, or empty.
        written: training rows of metrics.jsonl in the order of writing. Steps repeated after a resume come twice.
        rows: the rows that count: one per step, ascending, none after ``step``.
        events: contents of events.jsonl.
        condensation: measurements by step.
        validation: validation loss by step.
        failures: contents of requeue.json about failures in a row without a new checkpoint, or empty.
        problems: messages about files that could not be read.
    """

    path: Path
    name: str
    group: str | None
    config: dict[str, Any]
    environment: dict[str, Any]
    written: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    condensation: dict[int, Condensation]
    validation: dict[int, float]
    failures: dict[str, Any]
    problems: list[str]

    @cached_property
    def step(self) -> int:
        """Return the number of steps done. A resume may lower it."""
        return _newest_step(self.written, self.events)

    @cached_property
    def most_condensed(self) -> int:
        """Return the step of the most condensed measurement, of a run that has one."""
        return most_condensed(self.condensation)

    @cached_property
    def attempts(self) -> list[Attempt]:
        return attempts(self.written, self.events)

    @cached_property
    def goodputs(self) -> list[Goodput]:
        """Return the goodput of every start; empty for a run that did not record how it spent its time."""
        return goodputs(self.written, self.events)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return the config by dotted key."""
        return flatten(self.config)

    @property
    def steps(self) -> int | None:
        """Return the number of steps of the whole run, from its config."""
        return self.settings.get("training.steps")

    @property
    def disperses(self) -> bool:
        return bool(self.settings.get("dispersion.enabled"))

    @property
    def tokens_per_step(self) -> float:
        """Return the tokens per step; NaN before the first row."""
        return self.series("tokens")[-1] / self.rows[-1]["step"] if self.rows else float("nan")

    def series(self, key: str) -> np.ndarray:
        """Return a column of ``rows`` as [rows] float64, with NaN for missing numbers."""
        return np.array([row.get(key) for row in self.rows], dtype=np.float64)

    @property
    def _overrides(self) -> dict[str, Any]:
        return self.config.get("model", {}).get("overrides", {})  # older runs have none

    @property
    def model(self) -> str:
        """Return the name of the model, its flavor and its overrides."""
        return f"{self.settings.get('model.name')} {named(str(self.settings.get('model.flavor')), self._overrides)}"

    @cached_property
    def parameters(self) -> int | None:
        """Return the number of parameters, with a tied embedding once; None if the model or flavor is unknown."""
        entry, flavor = MODELS.get(self.settings.get("model.name", "")), self.settings.get("model.flavor", "")
        if entry is None or flavor not in list(entry.flavors):
            return None
        args = model_args(entry.name, flavor, self._overrides)
        with torch.device("meta"):
            return args.get_nparams_and_flops(entry.model_cls(args), args.max_seq_len)[0]


def _newest_step(written: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]) -> int:
    ends = [record for records in (written, events) for record in records[-1:]]
    return max(ends, key=lambda record: record["time"])["step"] if ends else 0


def _read(path: Path, name: str, group: str | None) -> Run:
    problems = []
    try:
        config = read_config(path)
        written = read_rows(path)
        metrics = by_step(written)
        events = read_events(path)
        environment = read_environment(path)
        failures = read_failures(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the run {str(path)!r} cannot be read: {type(error).__name__}: {error}") from error
    try:
        condensation = load_steps(path / "condensation")
    except Exception as error:  # a damaged archive can raise any exception
        condensation = {}
        problems.append(f"the measurements in {path / 'condensation'} cannot be read: {error}")
    validation = read_validation(path)
    step = _newest_step(written, events)
    return Run(
        path=path,
        name=name,
        group=group,
        config=config,
        environment=environment,
        written=written,
        rows=[row for at, row in metrics.items() if at <= step],
        events=events,
        condensation={at: found for at, found in condensation.items() if at <= step},
        validation={at: loss for at, loss in validation.items() if at <= step},
        failures=failures,
        problems=problems,
    )


def gather(paths: Sequence[str | Path]) -> list[Run]:
    """Read the runs in the given order.

    Args:
        paths: run folders, or ``NAME=RUN,RUN,…``: seeds of one condition.

    Raises:
        ConfigError: No run is given, a path is not a run's folder or cannot be read, or a run is given twice.
    """
    given = [parse_group(str(path)) or (None, [str(path)]) for path in paths]
    folders, groups = [Path(m) for _, members in given for m in members], [g for g, members in given for _ in members]
    if not folders:
        raise ConfigError("no run to report on: give one or several run folders (job.dump_folder)")
    for folder in folders:
        if not is_run(folder):
            what = (
                "lacks config.json or metrics.jsonl: it is not a run's folder, the run has not logged anything yet, or "
                "TorchTitan's own trainer wrote it, without a config.json"
            )
            raise ConfigError(
                f"{str(folder)!r} {what if folder.exists() else 'does not exist'}; expected a job.dump_folder"
            )
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        raise ConfigError(f"a run is given twice: {', '.join(map(str, folders))}")
    short = [folder.name for folder in resolved]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    return [_read(folder, name, group) for folder, name, group in zip(folders, names, groups, strict=True)]
