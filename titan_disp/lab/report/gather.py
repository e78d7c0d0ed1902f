"""Reads the folders of runs, compares their configs, and groups runs that differ only in
their seeds.

A run may still be training or have been interrupted, so that files may be missing.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torchtitan.config import ConfigManager

from titan_disp.condensation.record import Measurement, load_steps, most_condensed
from titan_disp.config.load import MODULE
from titan_disp.data.findings import ledger_lines
from titan_disp.errors import ConfigError, counted
from titan_disp.lab.inspection.targets import parse_group
from titan_disp.models.arguments import text_of_flavor
from titan_disp.models.registry import MODELS, model_args
from titan_disp.run import reader
from titan_disp.run.history import Attempt, Goodput, attempts, goodputs, trained_nothing

SEEDS = ("debug.seed", "stream.seed")  # keys in which the runs of one condition differ
# Beginnings of keys that change neither training nor measurements
WITHOUT_EFFECT = (
    "job.",
    "metrics.",
    "comm.",
    "profiling.",
    "condensation.interval",
    "condensation.per_layer",
    "validation.freq",
    "validation.local_batch_size",
    "training.gc_freq",
    "checkpoint.enable",
    "checkpoint.folder",
    "checkpoint.interval",
    "checkpoint.keep_latest_k",
    "checkpoint.keep_every",
    "checkpoint.async_mode",
    "checkpoint.last_save",
)
Seeds = tuple[Any, ...]
ABSENT = object()  # in place of a value, if a column does not have the key


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run's folder. All times are seconds since the epoch."""

    path: Path
    name: str  # unique in the report
    # the name that the user gave to several runs, as in off=RUN,RUN; None otherwise
    group: str | None
    config: dict[str, Any]
    environment: dict[str, Any]
    step: int  # number of steps done; a resume may lower it
    # rows in the order of writing, with two rows for a step repeated after a resume
    written: list[dict[str, Any]]
    # the last row of each step up to ``step``, ascending
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    condensation: dict[int, Measurement]  # by step
    validation: dict[int, float]  # loss by step
    # record of successive failures without a new checkpoint in between, or {}
    failures: dict[str, Any]
    problems: list[str]  # messages about files that could not be read
    ledger: list[str]  # lines that count used, skipped and left-out bytes of the data

    @cached_property
    def most_condensed(self) -> int:
        """The step with the highest mean cosine over all blocks."""
        return most_condensed(self.condensation)

    @cached_property
    def attempts(self) -> list[Attempt]:
        return attempts(self.written, self.events)

    @cached_property
    def goodputs(self) -> list[Goodput]:
        """The goodput of each start; [] if the run did not record how it spent its time."""
        return goodputs(self.written, self.events)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The config by dotted key."""
        return reader.flatten(self.config)

    @property
    def steps(self) -> int | None:
        """The planned number of steps. (``step`` is the number of steps done.)"""
        return self.settings.get("training.steps")

    @property
    def disperses(self) -> bool:
        return bool(self.settings.get("dispersion.enabled"))

    @property
    def tokens_per_step(self) -> float:
        """The tokens per step, or NaN without rows."""
        if not self.rows:
            return float("nan")
        return self.series("tokens")[-1] / self.rows[-1]["step"]

    def series(self, key: str) -> np.ndarray:
        """Return a column of ``rows`` as [rows] float64, with NaN for missing
        numbers.
        """
        return np.array([row.get(key) for row in self.rows], dtype=np.float64)

    @property
    def machine(self) -> str:
        """The ranks and their devices as text, such as "2 ranks on CPU"."""
        ranks = counted(self.environment.get("world_size", 1), "rank")
        names = sorted(set(self.environment.get("accelerators") or ["CPU"]))
        return f"{ranks} on {', '.join(names)}"

    @property
    def _overrides(self) -> dict[str, Any]:
        # A config of TorchTitan's own trainer has no model.overrides
        return self.config.get("model", {}).get("overrides", {})

    @property
    def model(self) -> str:
        """The name of the model and its flavor, as text."""
        flavor = text_of_flavor(str(self.settings.get("model.flavor")), self._overrides)
        return f"{self.settings.get('model.name')} {flavor}"

    @cached_property
    def parameters(self) -> int | None:
        """The number of parameters, or None if the model or flavor is unknown.

        A tied embedding counts once.
        """
        entry = MODELS.get(self.settings.get("model.name", ""))
        flavor = self.settings.get("model.flavor", "")
        if entry is None or flavor not in list(entry.flavors):
            return None
        return _parameters(entry.name, flavor, json.dumps(self._overrides))


@cache  # building a model takes longer than reading a run
def _parameters(name: str, flavor: str, overrides: str) -> int:
    """Return the number of parameters, computed from models with one and two blocks.

    All blocks have the same size. A config from elsewhere may name any number of blocks,
    so that building the whole model could take very long.
    """
    args = model_args(name, flavor, json.loads(overrides))
    blocks = args.n_layers
    sizes = []
    for args.n_layers in (1, 2):
        with torch.device("meta"):
            model = MODELS[name].model_cls(args)
        sizes.append(args.get_nparams_and_flops(model, args.max_seq_len)[0])
    with_one_block, with_two_blocks = sizes
    return with_one_block + (blocks - 1) * (with_two_blocks - with_one_block)


def _read(path: Path, name: str, group: str | None) -> RunRecord:
    """Return the record of a run, or raise ConfigError if it cannot be read."""
    if not reader.is_run(path):
        raise ConfigError(
            f"{str(path)!r} lacks config.json or metrics.jsonl: it is not a run's "
            "folder, the run has not logged anything yet, or TorchTitan's own trainer "
            "wrote the folder; expected a job.dump_folder"
        )
    problems: list[str] = []
    try:
        records = reader.read_written(path)
        events = reader.read_events(path)
        written = [row for row in records if not reader.is_measured(row)]
        trained = [event for event in events if not trained_nothing(event)]
        newest = max(
            (*records[-1:], *trained[-1:]),
            key=lambda record: record["time"],
            default={"step": 0},
        )
        step = newest["step"]

        def done(by_step: Mapping[int, Any]) -> dict[int, Any]:
            return {at: value for at, value in by_step.items() if at <= step}

        run = RunRecord(
            path=path,
            name=name,
            group=group,
            config=reader.read_config(path),
            environment=reader.read_environment(path),
            step=step,
            written=written,
            rows=list(done(reader.by_step(written)).values()),
            events=events,
            condensation=done(load_steps(path / "condensation", problems)),
            validation=done(reader.validation_losses(records)),
            failures=reader.read_failures(path),
            problems=problems,
            ledger=ledger_lines(path),
        )
        # Computed now, so that malformed content raises its error here.
        _ = run.model, run.parameters, run.attempts, run.goodputs, run.tokens_per_step
    except ConfigError:
        raise
    except Exception as error:  # damaged files raise errors of many types
        raise ConfigError(
            f"the run {str(path)!r} cannot be read: {type(error).__name__}: {error}"
        ) from error
    return run


def gather(
    paths: Sequence[str | Path], left_out: list[str] | None = None
) -> list[RunRecord]:
    """Return the records of runs, in the order of ``paths``.

    A path is a folder, or ``NAME=RUN,RUN,…`` for the seeds of one condition. With a list
    ``left_out``, a run that cannot be read is left out, and the reason is appended to
    the list.

    Raises ConfigError if a folder does not exist or is repeated, if a run cannot be read
    and ``left_out`` is None, or if no run can be read.
    """
    folders: dict[Path, str | None] = {}  # the group of each folder
    for path in paths:
        group, members = parse_group(str(path)) or (None, [str(path)])
        for folder in map(Path, members):
            if not folder.exists():
                raise ConfigError(
                    f"{str(folder)!r} does not exist; expected a job.dump_folder"
                )
            if folder.resolve() in map(Path.resolve, folders):
                raise ConfigError(f"a run is given twice: {folder}")
            folders[folder] = group
    if not folders:
        raise ConfigError(
            "no run to report on: give one or several run folders (job.dump_folder)"
        )
    short_names = {folder.resolve().name for folder in folders}
    runs: list[RunRecord] = []
    errors: list[ConfigError] = []
    for folder, group in folders.items():
        name = str(folder)
        if len(short_names) == len(folders):
            name = folder.resolve().name
        try:
            runs.append(_read(folder, name, group))
        except ConfigError as error:
            errors.append(error)
    if errors and (left_out is None or not runs):
        raise errors[0]
    if left_out is not None:
        left_out += map(str, errors)
    return runs


def defaults() -> dict[str, Any]:
    """Return the default values of TorchTitan and titan-disp by dotted key, as they are
    in config.json.
    """
    # ConfigManager warns if the folder of the tokenizer does not exist; "." exists.
    parsed = ConfigManager().parse_args(
        ["--job.custom_config_module", MODULE, "--model.hf_assets_path", "."]
    )
    return reader.flatten(json.loads(json.dumps(type(parsed)().to_dict())))


def side_by_side(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of each key in all columns, with ``ABSENT`` for columns without
    the key.
    """
    keys = dict.fromkeys(chain.from_iterable(columns))
    return {key: [column.get(key, ABSENT) for column in columns] for key in keys}


def unlike(values: Sequence[Any]) -> bool:
    """Return whether the values are not all equal."""
    return any(value != values[0] for value in values[1:])


def seeds_of(run: RunRecord) -> Seeds:
    """Return the run's values of the keys in ``SEEDS``."""
    return tuple(map(run.settings.get, SEEDS))


class Condition(NamedTuple):
    """Runs of a report that differ only in their seeds."""

    name: str  # such as "off (3 seeds)"
    places: list[int]  # indices of the runs, ascending


def conditions(runs: Sequence[RunRecord]) -> list[Condition]:
    """Return the conditions in the order of their first runs.

    Runs that the user grouped under a name are a condition, whatever their seeds are.
    Other runs are a condition if their configs are equal and their seeds differ. A
    second run with the same seeds is a condition of its own.
    """
    groups: dict[object, list[int]] = defaultdict(list)
    for place, run in enumerate(runs):
        groups[run.group or _recipe(run)].append(place)
    result: list[Condition] = []
    for key, places in groups.items():
        if isinstance(key, str):
            result.append(_named_condition(key, places, runs))
            continue
        by_seeds: dict[Seeds, int] = {}
        for place in places:
            seeds = seeds_of(runs[place])
            if seeds in by_seeds:
                result.append(Condition(runs[place].name, [place]))
            else:
                by_seeds[seeds] = place
        places = list(by_seeds.values())
        name = _common_name([runs[place].name for place in places])
        result.append(_named_condition(name, places, runs))
    return sorted(result, key=lambda condition: condition.places)


def _named_condition(
    name: str, places: list[int], runs: Sequence[RunRecord]
) -> Condition:
    """Return a condition; if it has several runs, their number is added to its name."""
    seeds = {seeds_of(runs[place]) for place in places}
    if len(places) > 1:
        noun = "runs"
        if len(seeds) == len(places):
            noun = "seeds"
        name = f"{name} ({len(places)} {noun})"
    return Condition(name, places)


def _recipe(run: RunRecord) -> tuple[str, ...]:
    """Return the settings that change training or measurements, without the seeds, as
    "key=value" in alphabetical order.
    """
    kept = {
        k: v
        for k, v in run.settings.items()
        if k not in SEEDS and not k.startswith(WITHOUT_EFFECT)
    }
    return tuple(f"{key}={value!r}" for key, value in sorted(kept.items()))


def _common_name(names: Sequence[str]) -> str:
    """Return the common name of runs: "off" for off-seed-1 and off-seed-2."""
    if len(names) == 1:
        return names[0]
    common = os.path.commonprefix(names)
    if any(name[len(common) :][:1].isdigit() for name in names):  # off-1 and off-12
        common = common.rstrip("0123456789")
    return (
        re.sub(r"[-_. ]*(seed)?[-_. ]*$", "", common)
        or common.strip("-_. ")
        or names[0]
    )
