"""Reads the file of a sweep (docs/sweeps.md) and lists its points. A point is one run."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path
from typing import Any

from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

from titan_disp.config.load import expanded, read_toml
from titan_disp.errors import ConfigError, did_you_mean
from titan_disp.lab.report.gather import SEEDS
from titan_disp.tables import TABLES, shown, written_out

KNOWN = {
    "": ("sweep", "grid", "points"),
    "[sweep]": ("config", "folder", "overrides", "against", "metric"),
    "[[points]]": ("name", "overrides", "grid"),
}
# Names of points are valid file names on all systems, and do not look like an option.
SAFE = r"[A-Za-z0-9][A-Za-z0-9._+-]*"
# the types of values that TorchTitan's command line accepts
VALUE = str | float | list[float] | list[str] | list[list[str]]
LONGEST = 200  # most characters in a point's name; file systems allow 255
OURS = ("job.dump_folder", "job.config_file")  # the sweep sets these


@dataclass(frozen=True)
class Axis:
    """A line of a grid: one or more keys of the config, and the values that all these
    keys take together.
    """

    keys: tuple[str, ...]
    values: tuple[Any, ...]

    @property
    def is_seed(self) -> bool:
        return all(key in SEEDS for key in self.keys)


@dataclass(frozen=True)
class Listed:
    """One of ``[[points]]``. The name is empty if the sweep has only a grid."""

    name: str = ""
    overrides: tuple[str, ...] = ()
    axes: tuple[Axis, ...] = ()


@dataclass(frozen=True)
class Sweep:
    """The content of a sweep's file.

    Paths are relative to the current folder.
    """

    config: str
    folder: Path
    overrides: tuple[str, ...] = ()  # of all points
    listed: tuple[Listed, ...] = (Listed(),)  # [[points]], or one without a name
    axes: tuple[Axis, ...] = ()  # [grid]
    against: str | None = None
    metric: str | None = None


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    The points of a condition differ only in their seeds. Two points of different
    conditions with the same seeds are a pair.
    """

    name: str  # name of the folder; unique in the sweep
    condition: str  # the name without the seeds
    folder: Path  # the folder of the run (job.dump_folder)
    config: str
    overrides: tuple[str, ...]  # options for keys of the config, without the folder
    seeds: Mapping[str, Any] = field(default_factory=dict)  # by key

    def argv(self, config: str | Path | None = None) -> list[str]:
        """Return CONFIG and overrides, the arguments of ``titan-disp train``.

        ``config`` replaces the config that the sweep names.
        """
        return [
            str(config or self.config),
            *self.overrides,
            "--job.dump_folder",
            str(self.folder),
        ]


def read_sweep(path: str | Path) -> Sweep:
    """Return the sweep that a file describes, or raise ConfigError if the file is wrong.

    The configs of the points are checked later, by ``preparation.prepare``.
    """
    toml = read_toml(str(path))
    _check_keys(toml, "", path)
    sweep = toml.get("sweep")
    if not isinstance(sweep, dict):
        raise ConfigError(
            f"{str(path)!r} has no [sweep] section with config and folder"
        )
    _check_keys(sweep, "[sweep]", path)
    for key in ("config", "folder"):
        if key not in sweep:
            raise ConfigError(f"[sweep] of {str(path)!r} has no {key}")
    for key in ("config", "folder", "against", "metric"):
        if key in sweep and (not isinstance(sweep[key], str) or not sweep[key]):
            raise ConfigError(f"sweep.{key} is {sweep[key]!r}, expected a string")
    listed = _listed(toml.get("points", []), path)
    axes = _axes(toml.get("grid", {}), "[grid]")
    if not listed and not axes:
        raise ConfigError(
            f"nothing varies in {str(path)!r}: add a [grid] or [[points]]"
        )
    for entry in listed:
        repeated = set(_keys(entry.axes)) & set(_keys(axes))
        if repeated:
            raise ConfigError(
                f"{', '.join(sorted(repeated))} is in the grid of {entry.name!r} and "
                "in [grid]: name it once"
            )
    overrides = _overrides(sweep.get("overrides", []), "sweep.overrides")
    parsed = {
        "config": expanded("sweep.config", sweep["config"]),
        "folder": Path(expanded("sweep.folder", sweep["folder"])),
        "overrides": overrides,
        "listed": listed or (Listed(),),
        "axes": axes,
    }
    return Sweep(**(sweep | parsed))


def _keys(axes: Sequence[Axis]) -> list[str]:
    return list(chain.from_iterable(axis.keys for axis in axes))


def _check_keys(table: Mapping[str, Any], section: str, path: str | Path) -> None:
    for key in table:
        if key not in KNOWN[section]:
            hint = did_you_mean(
                key, KNOWN[section], otherwise=f"; expected {', '.join(KNOWN[section])}"
            )
            raise ConfigError(
                "unknown key in "
                f"{' '.join(filter(None, (section, 'of', repr(str(path)))))}: "
                f"{key}{hint}"
            )


def _overrides(value: Any, where: str) -> tuple[str, ...]:
    if not _is(value, list[str]):
        raise ConfigError(
            f"{where} is {value!r}, expected a list of options, such as "
            '["--training.steps=4"]'
        )
    for word in value:
        key = word.partition("=")[0].lstrip("-").replace("-", "_")
        if word.startswith("--") and key in OURS:
            raise ConfigError(
                f"{where} has {word!r}, which the sweep sets itself, from sweep.config "
                "and sweep.folder"
            )
    return tuple(value)


def _axes(grid: Any, where: str) -> tuple[Axis, ...]:
    if not isinstance(grid, dict):
        raise ConfigError(f"{where} is {grid!r}, expected a table of lists")
    axes: list[Axis] = []
    for text, values in grid.items():
        if isinstance(values, dict):
            raise ConfigError(
                f"{where}: {text} is a table; quote keys with dots: "
                f'"{text}.{[*values, "key"][0]}" = […]'
            )
        keys = tuple(key.strip() for key in text.split(","))
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"{where}: {text} is {values!r}, expected a list of values"
            )
        for key in keys:
            if not re.fullmatch(r"\w+(\.\w+)+", key) or key in OURS:
                raise ConfigError(
                    f"{where}: {key!r} cannot vary; expected a key, such as "
                    '"dispersion.coeff"'
                )
        for value in values:
            are_tables = TABLES.keys() >= set(keys)
            has_empty_list = isinstance(value, list) and [] in value
            is_value = _is(value, VALUE) and not has_empty_list
            is_table = isinstance(value, dict) and are_tables
            if not is_value and not is_table:
                raise ConfigError(
                    f"{where}: {text} has {value!r}, expected a string, a number, "
                    "true, false, or a list of numbers, of strings or of lists of "
                    "strings"
                )
            with_comma = [string for string in _strings(value) if "," in string]
            if with_comma and not are_tables:
                raise ConfigError(
                    f"{where}: {text} has {with_comma[0]!r}, which TorchTitan's command "
                    "line splits at the comma. Write the parts as separate strings"
                )
        axes.append(Axis(keys, tuple(values)))
    repeated = [key for key, count in Counter(_keys(axes)).items() if count > 1]
    if repeated:
        raise ConfigError(f"{where} varies {', '.join(repeated)} twice")
    return tuple(axes)


def _is(value: Any, expected: Any) -> bool:
    try:
        check_type(
            value, expected, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS
        )
    except TypeCheckError:
        return False
    return True


def _strings(value: Any) -> list[str]:
    """Return the strings of a list and of the lists in it; [] for other values."""
    strings = []
    if isinstance(value, list):
        for element in value:
            if isinstance(element, str):
                strings.append(element)
            strings += _strings(element)
    return strings


def _listed(tables: Any, path: str | Path) -> tuple[Listed, ...]:
    if not _is(tables, list[dict]):
        raise ConfigError(
            f"points is {tables!r}, expected tables, each written [[points]]"
        )
    listed = []
    for table in tables:
        _check_keys(table, "[[points]]", path)
        name = table.get("name")
        if not isinstance(name, str) or not re.fullmatch(SAFE, name):
            raise ConfigError(
                f"the name of one of [[points]] is {name!r}, expected letters, digits "
                "and . _ + -"
            )
        point = f"the point {name!r}"
        overrides = _overrides(table.get("overrides", []), f"overrides of {point}")
        axes = _axes(table.get("grid", {}), f"the grid of {point}")
        listed.append(Listed(name, overrides, axes))
    return tuple(listed)


def points(sweep: Sweep) -> list[Point]:
    """Return all points of a sweep, in the order of its file.

    The last line of a grid varies fastest. Raises ConfigError if names are repeated or
    too long.
    """
    all_points: list[Point] = []
    for listed in sweep.listed:
        all_points += _combinations(sweep, listed)
    for name, count in Counter(point.name for point in all_points).items():
        if count > 1:
            raise ConfigError(
                f"{count} points of the sweep have the name {name!r}: remove the "
                "repeated value or name"
            )
        if len(name) > LONGEST:
            raise ConfigError(
                f"the name {name!r} is too long for a folder: list the points as "
                "[[points]] with names"
            )
    return all_points


def _combinations(sweep: Sweep, listed: Listed) -> Iterator[Point]:
    """Yield a point for each combination of values of the grids."""
    axes = (*listed.axes, *sweep.axes)
    choices = [
        [
            (axis, value, f"{label}-{text}")
            for value, text in zip(axis.values, _texts(axis.values), strict=True)
        ]
        for axis, label in zip(axes, _labels(axes), strict=True)
    ]
    for parts in product(*choices):
        words = list(filter(None, [listed.name]))
        words_of_condition = words.copy()
        overrides = [*sweep.overrides, *listed.overrides]
        seeds: dict[str, Any] = {}
        for axis, value, text in parts:
            words.append(text)
            for key in axis.keys:
                overrides += option(key, value)
            if axis.is_seed:
                seeds |= dict.fromkeys(axis.keys, value)
            else:
                words_of_condition.append(text)
        name = "_".join(words)
        yield Point(
            name=name,
            condition="_".join(words_of_condition) or Path(sweep.config).stem,
            folder=sweep.folder / name,
            config=sweep.config,
            overrides=tuple(overrides),
            seeds=seeds,
        )


def _labels(axes: Sequence[Axis]) -> list[str]:
    """Return a label for each axis: the last part of its first key, or all of the key
    if labels would be equal.
    """
    first_keys = [axis.keys[0] for axis in axes]
    labels = [key.rpartition(".")[2] for key in first_keys]
    counts = Counter(labels)
    for i, key in enumerate(first_keys):
        if counts[labels[i]] > 1:
            labels[i] = key
    return labels


def _texts(values: Sequence[Any]) -> list[str]:
    """Return a part of a file name for each value.

    A hash is added to parts that would be equal.
    """
    texts = [_text(value) for value in values]
    counts = Counter(texts)
    for i, value in enumerate(values):
        if counts[texts[i]] > 1:
            texts[i] += "-" + hashlib.sha256(repr(value).encode()).hexdigest()[:6]
    return texts


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return _text(written_out(value))
    if isinstance(value, list):
        return "+".join(map(_text, value)) or "none"
    text = re.sub(r"[^A-Za-z0-9._+-]+", "-", shown(value))[:60]
    if isinstance(value, str):  # the dash of a negative number stays
        text = text.strip("-")
    return text or "empty"


def option(key: str, value: Any) -> list[str]:
    """Return the words that set a key to a value on TorchTitan's command line."""
    if key in TABLES and isinstance(value, (list, dict)):
        return [f"--{key}={written_out(value)}"]
    if isinstance(value, bool) and key not in TABLES:
        section, _, name = key.rpartition(".")
        if value:
            return [f"--{key}"]
        return [f"--{section}.no-{name}"]
    if isinstance(value, list):
        # TorchTitan splits a word at its commas into the strings of a list
        if value and _is(value, list[str]):
            return [f"--{key}={','.join(value)}"]
        words = [f"--{key}"]
        for element in value:
            if isinstance(element, list):
                words.append(",".join(element))
            else:
                words.append(str(element))
        return words
    return [f"--{key}={value}"]
