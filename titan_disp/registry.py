"""The models that a config can name. A new one is a folder and a line here (CONTRIBUTING.md)."""

from torchtitan.config import JobConfig

from titan_disp import gpt2, qwen3
from titan_disp.errors import ConfigError
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
    """The model of ``model.name``.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in MODELS:
        known = " or ".join(f'"{known}"' for known in MODELS)
        raise ConfigError(f"model.name is {name!r}, expected {known}")
    return MODELS[name]


def args_of(job_config: JobConfig) -> DispModelArgs:
    """The arguments of the config's flavor, as it is registered: TorchTitan's ``update_from_config`` comes later.

    Raises:
        ConfigError: no such model or flavor.
    """
    return find_model(job_config.model.name).flavors[job_config.model.flavor]
