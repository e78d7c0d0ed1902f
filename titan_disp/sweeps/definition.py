"""A sweep's file, and the points that it stands for.

    [sweep]
    config = "train_configs/demo_cpu.toml"
    folder = "outputs/sweep"                    # one run folder per point below it, named by what varies
    overrides = ["--training.steps=4"]          # for every point
    against = "coeff-0.0"                       # titan-disp sweep table compares the others with it

    [grid]                                      # every combination
    "dispersion.coeff" = [0.0, 0.1]
    "debug.seed, stream.seed" = [1, 2]          # both keys take the same value

Instead of ``[grid]``, or beside it, ``[[points]]`` lists points by ``name`` and ``overrides``, each with a ``grid`` of its own if
it has one. Each of them is then combined with ``[grid]``.
"""

import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from titan_disp.config import read_toml
from titan_disp.errors import ConfigError
from titan_disp.overrides import KEY as OVERRIDES
from titan_disp.overrides import shown, written_out
from titan_disp.report.configs import SEEDS

KNOWN = {
    "": ("sweep", "grid", "points"),
    "[sweep]": ("config", "folder", "overrides", "against", "metric"),
    "[[points]]": ("name", "overrides", "grid"),
}
SAFE = r"[A-Za-z0-9][A-Za-z0-9._+-]*"  # of names: a file name everywhere, and no option
LONGEST = 200  # characters of a point's name; file systems take 255
OURS = ("job.dump_folder", "job.config_file")  # the sweep sets these


@dataclass(frozen=True)
class Axis:
    """What a line of a grid varies.

    Attributes:
        keys: of the config; several take the same value.
        values: as in the TOML file; only those of model.overrides may be tables.
    """

    keys: tuple[str, ...]
    values: tuple[Any, ...]

    @property
    def is_seed(self) -> bool:
        return all(key in SEEDS for key in self.keys)


@dataclass(frozen=True)
class Listed:
    """One of ``[[points]]``. The name is empty where a sweep has a grid only."""

    name: str = ""
    overrides: tuple[str, ...] = ()
    axes: tuple[Axis, ...] = ()


@dataclass(frozen=True)
class Sweep:
    """A sweep's file.

    Attributes:
        config: the TOML file that all points begin with; relative to where titan-disp runs, as all paths of configs are.
        folder: holds the run folders.
        overrides: TorchTitan's options for every point.
        listed: ``[[points]]``, or one without a name.
        axes: ``[grid]``.
        against, metric: defaults of ``titan-disp sweep table``.
    """

    config: str
    folder: Path
    overrides: tuple[str, ...] = ()
    listed: tuple[Listed, ...] = (Listed(),)
    axes: tuple[Axis, ...] = ()
    against: str | None = None
    metric: str | None = None


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        name: of its folder; unique in the sweep.
        condition: the name without the seeds. Points of one condition differ in their seeds only.
        seeds: by key. Points of two conditions with the same seeds are a pair.
        folder: the run's (``job.dump_folder``).
        config: the TOML file.
        overrides: TorchTitan's options beyond it, without the folder.
    """

    name: str
    condition: str
    folder: Path
    config: str
    overrides: tuple[str, ...]
    seeds: Mapping[str, Any] = field(default_factory=dict)

    def argv(self, config: str | Path | None = None) -> list[str]:
        """CONFIG and its overrides, as ``titan-disp train`` takes them. ``config``: another file than the sweep names."""
        return [str(config or self.config), *self.overrides, "--job.dump_folder", str(self.folder)]


def read_sweep(path: str | Path) -> Sweep:
    """Read a sweep's file. The configs of its points are not looked at here: see ``folder.prepare``.

    Raises:
        ConfigError: no such file, invalid TOML, an unknown key, a value of another type, or nothing that varies.
    """
    toml = read_toml(str(path))
    _check_keys(toml, "", path)
    sweep = toml.get("sweep")
    if not isinstance(sweep, dict):
        raise ConfigError(f"{str(path)!r} has no [sweep] section with config and folder")
    _check_keys(sweep, "[sweep]", path)
    for key in ("config", "folder"):
        if key not in sweep:
            raise ConfigError(f"[sweep] of {str(path)!r} has no {key}")
    for key in ("config", "folder", "against", "metric"):
        if key in sweep and (not isinstance(sweep[key], str) or not sweep[key]):
            raise ConfigError(f"sweep.{key} is {sweep[key]!r}, expected a string")
    listed, axes = _listed(toml.get("points", []), path), _axes(toml.get("grid", {}), "[grid]")
    if not listed and not axes:
        raise ConfigError(f"nothing varies in {str(path)!r}: it needs a [grid] or [[points]]")
    for one in listed:
        both = {key for axis in one.axes for key in axis.keys} & {key for axis in axes for key in axis.keys}
        if both:
            raise ConfigError(
                f"{', '.join(sorted(both))} is in the grid of the point {one.name!r} and in [grid]: name it once"
            )
    return Sweep(
        config=sweep["config"],
        folder=Path(sweep["folder"]),
        overrides=_overrides(sweep.get("overrides", []), "sweep.overrides"),
        listed=listed or (Listed(),),
        axes=axes,
        against=sweep.get("against"),
        metric=sweep.get("metric"),
    )


def _check_keys(table: Mapping[str, Any], section: str, path: str | Path) -> None:
    for key in table:
        if key not in KNOWN[section]:
            close = difflib.get_close_matches(key, KNOWN[section], n=1)
            hint = f" (did you mean {close[0]}?)" if close else f"; expected {', '.join(KNOWN[section])}"
            raise ConfigError(f"unknown key in {' '.join(filter(None, (section, 'of', repr(str(path)))))}: {key}{hint}")


def _overrides(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ConfigError(f'{where} is {value!r}, expected a list of options, such as ["--training.steps=4"]')
    for word in value:
        key = word.partition("=")[0].lstrip("-").replace("-", "_")
        if word.startswith("--") and key in OURS:
            raise ConfigError(f"{where} has {word!r}, which the sweep sets itself: sweep.config and sweep.folder")
    return tuple(value)


def _axes(grid: Any, where: str) -> tuple[Axis, ...]:
    if not isinstance(grid, dict):
        raise ConfigError(f"{where} is {grid!r}, expected a table of lists")
    found: list[Axis] = []
    for text, values in grid.items():
        if isinstance(values, dict):
            raise ConfigError(
                f'{where}: {text} is a table; write keys with a dot in quotes: "{text}.{next(iter(values), "key")}" = […]'
            )
        keys = tuple(key.strip() for key in text.split(","))
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}: {text} is {values!r}, expected a list of values")
        for key in keys:
            if not re.fullmatch(r"\w+(\.\w+)+", key) or key in OURS:
                raise ConfigError(
                    f'{where}: {key!r} cannot vary; expected a key of the config, such as "dispersion.coeff"'
                )
        for value in values:
            if not (_is_value(value) or (isinstance(value, dict) and keys == (OVERRIDES,))):
                raise ConfigError(
                    f"{where}: {text} has {value!r}, expected a string, a number, true, false, or a list of these"
                )
        found.append(Axis(keys, tuple(values)))
    twice = [key for key, count in Counter(key for axis in found for key in axis.keys).items() if count > 1]
    if twice:
        raise ConfigError(f"{where} varies {', '.join(twice)} twice")
    return tuple(found)


def _is_value(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(one, (str, int, float)) for one in value)
    return isinstance(value, (str, int, float))


def _listed(tables: Any, path: str | Path) -> tuple[Listed, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"points is {tables!r}, expected tables, each written [[points]]")
    found = []
    for table in tables:
        _check_keys(table, "[[points]]", path)
        name = table.get("name")
        if not isinstance(name, str) or not re.fullmatch(SAFE, name):
            raise ConfigError(f"the name of one of [[points]] is {name!r}, expected letters, digits and . _ + -")
        where = f"the point {name!r}"
        overrides = _overrides(table.get("overrides", []), f"overrides of {where}")
        found.append(Listed(name, overrides, _axes(table.get("grid", {}), f"the grid of {where}")))
    return tuple(found)


def points(sweep: Sweep) -> list[Point]:
    """All points of a sweep, in the order of its file; the last line of a grid varies fastest.

    Raises:
        ConfigError: two points with one name, or a name that is too long.
    """
    found = [point for listed in sweep.listed for point in _combinations(sweep, listed)]
    for name, count in Counter(point.name for point in found).items():
        if count > 1:
            raise ConfigError(f"{count} points of the sweep have the name {name!r}: is a value or a name there twice?")
        if len(name) > LONGEST:
            raise ConfigError(f"the name {name!r} is too long for a folder: list the points as [[points]] with names")
    return found


def _combinations(sweep: Sweep, listed: Listed) -> Iterator[Point]:
    axes = (*listed.axes, *sweep.axes)
    labels = _labels(axes)
    named = [
        [(value, f"{label}-{text}") for value, text in zip(axis.values, _texts(axis.values), strict=True)]
        for axis, label in zip(axes, labels, strict=True)
    ]
    for chosen in product(*named):
        parts = [(axis, value, text) for axis, (value, text) in zip(axes, chosen, strict=True)]
        first = [listed.name] if listed.name else []
        condition = "_".join([*first, *(text for axis, _, text in parts if not axis.is_seed)])
        name = "_".join([*first, *(text for _, _, text in parts)])
        varied = [word for axis, value, _ in parts for key in axis.keys for word in option(key, value)]
        yield Point(
            name=name,
            condition=condition or Path(sweep.config).stem,
            folder=sweep.folder / name,
            config=sweep.config,
            overrides=(*sweep.overrides, *listed.overrides, *varied),
            seeds={key: value for axis, value, _ in parts if axis.is_seed for key in axis.keys},
        )


def _labels(axes: Sequence[Axis]) -> list[str]:
    """The last part of each axis' first key; all of the key where two axes would have the same."""
    short = [axis.keys[0].rpartition(".")[2] for axis in axes]
    return [label if short.count(label) == 1 else axis.keys[0] for label, axis in zip(short, axes, strict=True)]


def _texts(values: Sequence[Any]) -> list[str]:
    """Values as parts of a file name; with a hash where two of them would be the same."""
    texts = [_text(value) for value in values]
    return [
        text if texts.count(text) == 1 else f"{text}-{hashlib.sha256(repr(value).encode()).hexdigest()[:6]}"
        for text, value in zip(texts, values, strict=True)
    ]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return _text(written_out(value))
    if isinstance(value, list):
        return "+".join(map(_text, value)) or "none"
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", shown(value))[:60].strip("-" if isinstance(value, str) else "") or "empty"


def option(key: str, value: Any) -> list[str]:
    """A key's value as TorchTitan's command line takes it."""
    if key == OVERRIDES:
        return [f"--{key}={written_out(value) if isinstance(value, (list, dict)) else value}"]
    if isinstance(value, bool):
        section, _, name = key.rpartition(".")
        return [f"--{key}" if value else f"--{section}.no-{name}"]
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)]
    return [f"--{key}={value}"]
