"""Configs of several runs, key by key."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan.config import ConfigManager

from titan_disp.config import MODULE
from titan_disp.run.folder import flatten

SEEDS = ("debug.seed", "stream.seed")  # keys in which the runs of one condition differ
ABSENT = object()  # in the place of a value: the column has no such key


def defaults() -> dict[str, Any]:
    """TorchTitan's and titan-disp's defaults by dotted key, as config.json would have them."""
    # With a folder that is there: ConfigManager warns where the default tokenizer is not.
    parsed = ConfigManager().parse_args(["--job.custom_config_module", MODULE, "--model.hf_assets_path", "."])
    return flatten(json.loads(json.dumps(type(parsed)().to_dict())))


def side_by_side(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Every key of any of the flat columns with its value in each, ``ABSENT`` where a column lacks it."""
    keys = dict.fromkeys(key for column in columns for key in column)
    return {key: [column.get(key, ABSENT) for column in columns] for key in keys}


def unlike(values: Sequence[Any]) -> bool:
    """Whether not all of them are equal."""
    return any(value != values[0] for value in values[1:])
