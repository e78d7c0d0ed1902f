"""These are the models that a config can name. A new model is a folder and a line here (CONTRIBUTING.md)."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan.config import JobConfig

from titan_disp import gpt2, qwen3
from titan_disp.errors import ConfigError
from titan_disp.model_overrides import apply_overrides
from titan_disp.models.arguments import DispModelArgs
from titan_disp.models.entry import ModelEntry

MODELS: dict[str, ModelEntry] = {
    entry.name: entry
    for entry in (
        qwen3.ENTRY,
        gpt2.ENTRY,
    )
}


def find_model(name: str) -> ModelEntry:
    """Return the model that ``model.name`` names.

    Raises:
        ConfigError: there is no model of this name.
    """
    if name not in MODELS:
        known = " or ".join(f'"{known}"' for known in MODELS)
        raise ConfigError(f"model.name is {name!r}, expected {known}")
    return MODELS[name]


def model_args(name: str, flavor: str, overrides: Mapping[str, Any] | Sequence[str] | str = ()) -> DispModelArgs:
    """Return a copy of the arguments that ``model.name``, ``model.flavor`` and ``model.overrides`` describe.

    Raises:
        ConfigError: there is no such model or flavor, or it cannot take the overrides.
    """
    args: DispModelArgs = find_model(name).flavors[flavor]
    apply_overrides(args, overrides)
    return args


def args_of(job_config: JobConfig) -> DispModelArgs:
    """Return the arguments of the config's model, before TorchTitan's ``update_from_config``.

    Raises:
        ConfigError: as ``model_args``.
    """
    model = job_config.model
    return model_args(model.name, model.flavor, model.overrides)  # type: ignore[attr-defined]
