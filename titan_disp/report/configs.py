"""This module compares the configs of several runs key by key."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan.config import ConfigManager

from titan_disp.config import MODULE
from titan_disp.run.folder import flatten

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
