"""These are the models that a config can name. A new model is a folder and a line here (CONTRIBUTING.md)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.config import JobConfig

from titan_disp.errors import ConfigError, did_you_mean
from titan_disp.models import gpt2, qwen3
from titan_disp.models.arguments import DispModelArgs, Flavors, apply_overrides
from titan_disp.models.decoder import DispModel
from titan_disp.models.hf import HfAdapter

# Each model's folder provides an entry to the rest of titan-disp.


@dataclass(frozen=True)
class ModelEntry:
    """An entry describes a model; ``registry.MODELS`` lists them.

    Attributes:
        name: ``model.name`` in a config.
        title: the name for people.
        flavors: its sizes, in ascending order. A preflight without an accelerator takes the first that fits.
        model_cls: the model's class.
        parallelize: parallelizes a model on the meta device in place, given (model, parallel_dims, job_config).
        adapter: converts weights to and from transformers.
    """

    name: str
    title: str
    flavors: Flavors
    model_cls: type[DispModel]
    parallelize: Callable[..., nn.Module]
    adapter: type[HfAdapter]


MODELS: dict[str, ModelEntry] = {
    entry.name: entry
    for entry in (
        ModelEntry(
            name="qwen3_disp",
            title="Qwen3",
            flavors=qwen3.flavors,
            model_cls=qwen3.Qwen3DispModel,
            parallelize=qwen3.parallelize,
            adapter=qwen3.Qwen3HfAdapter,
        ),
        ModelEntry(
            name="gpt2_disp",
            title="GPT-2",
            flavors=gpt2.flavors,
            model_cls=gpt2.GPT2DispModel,
            parallelize=gpt2.parallelize,
            adapter=gpt2.GPT2HfAdapter,
        ),
    )
}


def find_model(name: str) -> ModelEntry:
    """Return the model that ``model.name`` names.

    Raises:
        ConfigError: there is no model of this name.
    """
    if name not in MODELS:
        known = " or ".join(f'"{known}"' for known in MODELS)
        raise ConfigError(f"model.name is {name!r}, expected {known}{did_you_mean(name, MODELS)}")
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
