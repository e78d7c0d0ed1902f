"""This module groups runs that are seeds of one condition, and averages their lines.

A condition is one run, or several that differ only in their seeds. Its line is the mean, in a band from the smallest to
the largest seed.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
from torchtitan.config import ConfigManager

from titan_disp.config.load import MODULE
from titan_disp.lab.report.charts import Line
from titan_disp.lab.report.gather import Run
from titan_disp.run.reader import flatten

# This module compares the configs of several runs key by key.


SEEDS = ("debug.seed", "stream.seed")  # keys in which the runs of one condition differ
ABSENT = object()  # stands for the value of a key that a column does not have


def defaults() -> dict[str, Any]:
    """Return the defaults of TorchTitan and titan-disp by dotted key, with values as in config.json."""
    # The folder exists, because ConfigManager warns if the default tokenizer does not.
    parsed = ConfigManager().parse_args(["--job.custom_config_module", MODULE, "--model.hf_assets_path", "."])
    return flatten(json.loads(json.dumps(type(parsed)().to_dict())))


def side_by_side(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return each key of the flat columns with its value in every column, or ``ABSENT``."""
    keys = dict.fromkeys(key for column in columns for key in column)
    return {key: [column.get(key, ABSENT) for column in columns] for key in keys}


def unlike(values: Sequence[Any]) -> bool:
    """Return whether any of the values differ."""
    return any(value != values[0] for value in values[1:])


# Keys that do not change training.
WITHOUT_EFFECT = ("job.", "metrics.", "comm.", "profiling.", "condensation.", "validation.")


@dataclass(frozen=True)
class Condition:
    """Represent one run, or several that differ only in their seeds.

    Attributes:
        name: name in legends.
        members: indices of the runs in the report.
    """

    name: str
    members: tuple[int, ...]


def conditions(runs: Sequence[Run]) -> list[Condition]:
    """Return the conditions, in the order of their first runs.

    Runs that the user gave under one name are a condition. So are other runs with equal configs and different seeds.
    """
    groups: dict[object, list[int]] = defaultdict(list)
    for place, run in enumerate(runs):
        groups[run.group or _recipe(run)].append(place)
    found = []
    for key, places in groups.items():
        members = [runs[place] for place in places]
        if isinstance(key, str):
            found.append(Condition(_label(key, len(places)), tuple(places)))
        elif len({tuple(run.settings.get(seed) for seed in SEEDS) for run in members}) < len(members):
            found += [Condition(run.name, (place,)) for run, place in zip(members, places, strict=True)]
        else:
            found.append(Condition(_label(_common_name(members), len(places)), tuple(places)))
    return sorted(found, key=lambda condition: condition.members)


def _recipe(run: Run) -> tuple[str, ...]:
    """Return the keys of the config that change training, without the seeds."""
    kept = {k: v for k, v in run.settings.items() if k not in SEEDS and not k.startswith(WITHOUT_EFFECT)}
    return tuple(f"{key}={value!r}" for key, value in sorted(kept.items()))


def _label(name: str, seeds: int) -> str:
    return f"{name} ({seeds} seeds)" if seeds > 1 else name


def _common_name(runs: Sequence[Run]) -> str:
    """Name a condition after its runs: off-seed-1 and off-seed-2 are off."""
    names = [run.name for run in runs]
    if len(names) == 1:
        return names[0]
    common = os.path.commonprefix(names)
    if any(name[len(common) :][:1].isdigit() for name in names):  # off-1 and off-12
        common = common.rstrip("0123456789")
    return re.sub(r"[-_. ]*(seed)?[-_. ]*$", "", common) or common.strip("-_. ") or names[0]


def by_condition(runs: Sequence[Run], lines: Sequence[Line]) -> list[Line]:
    """Turn lines of runs, whose ``place`` is the run's, into lines of conditions.

    Several seeds become their mean with a band, at the values of x that all of them have. If they share fewer than two,
    each seed keeps its own line in the condition's colour.
    """
    found: list[Line] = []
    for place, condition in enumerate(conditions(runs)):
        of_it = [replace(line, place=place) for line in lines if line.place in condition.members]
        found += [_together(condition.name, of_it)] if len(of_it) > 1 and _shared(of_it).size > 1 else of_it
    return found


def _shared(lines: Sequence[Line]) -> np.ndarray:
    """Return the values of x at which all lines have a finite number. There is at least one line."""
    return reduce(np.intersect1d, [line.x[np.isfinite(line.x) & np.isfinite(line.y)] for line in lines])


def _together(name: str, lines: Sequence[Line]) -> Line:
    x = _shared(lines)
    y = np.stack([line.y[np.isin(line.x, x)] for line in lines])
    resumes = sorted(at for line in lines for at in line.resumes)
    return replace(lines[0], name=name, x=x, y=y.mean(0), low=y.min(0), high=y.max(0), resumes=resumes)
