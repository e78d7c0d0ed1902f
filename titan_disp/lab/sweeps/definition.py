"""This module reads a sweep's file, which docs/sweeps.md describes, and lists its
points. A point is one run.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
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
# a name is a valid file name everywhere, and does not look like an option
SAFE = r"[A-Za-z0-9][A-Za-z0-9._+-]*"
# What TorchTitan's command line can take
VALUE = str | float | list[float] | list[str] | list[list[str]]
LONGEST = 200  # most characters in a point's name; file systems allow 255
OURS = ("job.dump_folder", "job.config_file")  # the sweep sets these


@dataclass(frozen=True)
class Axis:
    """Represent a line of a grid: keys of the config, which take the same value, and
    their values.
    """

    keys: tuple[str, ...]
    values: tuple[Any, ...]

    @property
    def is_seed(self) -> bool:
        return all(key in SEEDS for key in self.keys)


@dataclass(frozen=True)
class Listed:
    """Represent one of ``[[points]]``. The name is empty if a sweep has only a grid."""

    name: str = ""
    overrides: tuple[str, ...] = ()
    axes: tuple[Axis, ...] = ()


@dataclass(frozen=True)
class Sweep:
    """Hold the content of a sweep's file.

    The paths are relative to where titan-disp runs.
    """

    config: str
    folder: Path
    overrides: tuple[str, ...] = ()  # for every point
    listed: tuple[Listed, ...] = (Listed(),)  # [[points]], or one without a name
    axes: tuple[Axis, ...] = ()  # [grid]
    against: str | None = None
    metric: str | None = None


@dataclass(frozen=True)
class Point:
    """Represent one run of a sweep.

    Points of two conditions with the same seeds are a pair.
    """

    name: str  # of its folder; unique in the sweep
    # the name without the seeds; points of one condition differ only in their seeds
    condition: str
    folder: Path  # the run's (job.dump_folder)
    config: str
    overrides: tuple[str, ...]  # options for keys of the config, without the folder
    seeds: Mapping[str, Any] = field(default_factory=dict)  # by key

    def argv(self, config: str | Path | None = None) -> list[str]:
        """Return CONFIG and its overrides, as for ``titan-disp train``.

        ``config`` replaces the sweep's file.
        """
        return [
            str(config or self.config),
            *self.overrides,
            "--job.dump_folder",
            str(self.folder),
        ]


def read_sweep(path: str | Path) -> Sweep:
    """Read and check a sweep's file.

    ``folder.prepare`` checks the configs of its points.
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
    for one in listed:
        both = {key for axis in one.axes for key in axis.keys} & {
            key for axis in axes for key in axis.keys
        }
        if both:
            raise ConfigError(
                f"{', '.join(sorted(both))} is in the grid of {one.name!r} and in "
                "[grid]: name it once"
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
                f"{where} has {word!r}, which the sweep sets itself: sweep.config and "
                "sweep.folder"
            )
    return tuple(value)


def _axes(grid: Any, where: str) -> tuple[Axis, ...]:
    if not isinstance(grid, dict):
        raise ConfigError(f"{where} is {grid!r}, expected a table of lists")
    found: list[Axis] = []
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
            is_value = _is(value, VALUE) and not (
                isinstance(value, list) and [] in value
            )
            if not is_value and not (
                isinstance(value, dict) and TABLES.keys() >= set(keys)
            ):
                raise ConfigError(
                    f"{where}: {text} has {value!r}, expected a string, a number, "
                    "true, false, or a list of numbers, of strings or of lists of "
                    "strings"
                )
            if not TABLES.keys() >= set(keys) and (
                joined := [one for one in _strings(value) if "," in one]
            ):
                raise ConfigError(
                    f"{where}: {text} has {joined[0]!r}, which has a comma: "
                    "TorchTitan's command line splits it there. Write the parts as "
                    "strings of their own"
                )
        found.append(Axis(keys, tuple(values)))
    twice = [
        key
        for key, count in Counter(key for axis in found for key in axis.keys).items()
        if count > 1
    ]
    if twice:
        raise ConfigError(f"{where} varies {', '.join(twice)} twice")
    return tuple(found)


def _is(value: Any, expected: Any) -> bool:
    try:
        check_type(
            value, expected, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS
        )
    except TypeCheckError:
        return False
    return True


def _strings(value: Any) -> list[str]:
    """Return the strings in a list, or in the lists of a list."""
    if not isinstance(value, list):
        return []
    return [
        text
        for one in value
        for text in ([one] if isinstance(one, str) else _strings(one))
    ]


def _listed(tables: Any, path: str | Path) -> tuple[Listed, ...]:
    if not _is(tables, list[dict]):
        raise ConfigError(
            f"points is {tables!r}, expected tables, each written [[points]]"
        )
    found = []
    for table in tables:
        _check_keys(table, "[[points]]", path)
        name = table.get("name")
        if not isinstance(name, str) or not re.fullmatch(SAFE, name):
            raise ConfigError(
                f"the name of one of [[points]] is {name!r}, expected letters, digits "
                "and . _ + -"
            )
        where = f"the point {name!r}"
        overrides = _overrides(table.get("overrides", []), f"overrides of {where}")
        found.append(
            Listed(
                name, overrides, _axes(table.get("grid", {}), f"the grid of {where}")
            )
        )
    return tuple(found)


def points(sweep: Sweep) -> list[Point]:
    """Return all points of a sweep, in the order of its file.

    The last line of a grid varies fastest.
    """
    found = [point for listed in sweep.listed for point in _combinations(sweep, listed)]
    for name, count in Counter(point.name for point in found).items():
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
    return found


def _combinations(sweep: Sweep, listed: Listed) -> Iterator[Point]:
    axes = (*listed.axes, *sweep.axes)
    named = [
        [
            (axis, value, f"{label}-{text}")
            for value, text in zip(axis.values, _texts(axis.values), strict=True)
        ]
        for axis, label in zip(axes, _labels(axes), strict=True)
    ]
    for parts in product(*named):
        words = list(filter(None, [listed.name]))
        of_condition = words.copy()
        overrides = [*sweep.overrides, *listed.overrides]
        seeds: dict[str, Any] = {}
        for axis, value, text in parts:
            words.append(text)
            for key in axis.keys:
                overrides += option(key, value)
            if axis.is_seed:
                seeds |= dict.fromkeys(axis.keys, value)
            else:
                of_condition.append(text)
        name = "_".join(words)
        yield Point(
            name=name,
            condition="_".join(of_condition) or Path(sweep.config).stem,
            folder=sweep.folder / name,
            config=sweep.config,
            overrides=tuple(overrides),
            seeds=seeds,
        )


def _labels(axes: Sequence[Axis]) -> list[str]:
    """Label each axis with the last part of its first key, or with the whole key if two
    labels would be equal.
    """
    short = [axis.keys[0].rpartition(".")[2] for axis in axes]
    return [
        label if short.count(label) == 1 else axis.keys[0]
        for label, axis in zip(short, axes, strict=True)
    ]


def _texts(values: Sequence[Any]) -> list[str]:
    """Turn values into parts of a file name.

    A hash is added to those that would be equal.
    """
    texts = [_text(value) for value in values]
    hashes = [hashlib.sha256(repr(value).encode()).hexdigest()[:6] for value in values]
    return [
        text if texts.count(text) == 1 else f"{text}-{end}"
        for text, end in zip(texts, hashes, strict=True)
    ]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return _text(written_out(value))
    if isinstance(value, list):
        return "+".join(map(_text, value)) or "none"
    return (
        re.sub(r"[^A-Za-z0-9._+-]+", "-", shown(value))[:60].strip(
            "-" if isinstance(value, str) else ""
        )
        or "empty"
    )


def option(key: str, value: Any) -> list[str]:
    """Write a key and its value as options of TorchTitan's command line."""
    if key in TABLES:
        return [
            f"--{key}={written_out(value) if isinstance(value, (list, dict)) else value}"
        ]
    if isinstance(value, bool):
        section, _, name = key.rpartition(".")
        return [f"--{key}" if value else f"--{section}.no-{name}"]
    if isinstance(value, list):
        # one word, which TorchTitan splits at the commas
        if value and _is(value, list[str]):
            return [f"--{key}={','.join(value)}"]
        return [
            f"--{key}",
            *(",".join(one) if isinstance(one, list) else str(one) for one in value),
        ]
    return [f"--{key}={value}"]
