"""The models that a config can name.

To add a model, write a file and add an entry to ``MODELS``.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from titan_disp.config.types import JobConfig
from titan_disp.errors import ConfigError, did_you_mean
from titan_disp.models import gpt2, llama, qwen3
from titan_disp.models.arguments import DispModelArgs, Flavors, apply_overrides
from titan_disp.models.decoder import DispModel
from titan_disp.models.hf import HfAdapter
from titan_disp.models.parallelize import ApplyTP
from titan_disp.tables import Written


@dataclass(frozen=True)
class ModelEntry:
    """A model, as the rest of titan-disp uses it."""

    name: str  # model.name in a config
    title: str  # the name in texts
    # In ascending order of size, because a preflight without an accelerator takes the
    # first flavor that fits.
    flavors: Flavors
    adapter: type[HfAdapter]  # converts weights to and from transformers
    apply_tp: ApplyTP  # applies the tensor-parallel plan in place
    # The operations whose outputs selective activation checkpointing stores
    saved_ops: Collection[torch._ops.OpOverload]

    @property
    def model_cls(self) -> type[DispModel]:
        return self.adapter.model_cls


MODELS: dict[str, ModelEntry] = {
    entry.name: entry
    for entry in (
        ModelEntry(
            name="qwen3_disp",
            title="Qwen3",
            flavors=qwen3.flavors,
            adapter=qwen3.Qwen3HfAdapter,
            apply_tp=qwen3.apply_tp,
            saved_ops=qwen3.SAVED_OPS,
        ),
        ModelEntry(
            name="llama_disp",
            title="Llama",
            flavors=llama.flavors,
            adapter=llama.LlamaHfAdapter,
            apply_tp=qwen3.apply_tp,
            saved_ops=qwen3.SAVED_OPS,
        ),
        ModelEntry(
            name="gpt2_disp",
            title="GPT-2",
            flavors=gpt2.flavors,
            adapter=gpt2.GPT2HfAdapter,
            apply_tp=gpt2.apply_tp,
            saved_ops=gpt2.SAVED_OPS,
        ),
    )
}


def find_model(name: str) -> ModelEntry:
    """Return the model with this ``model.name``, or raise ConfigError."""
    if name not in MODELS:
        names = " or ".join(f'"{model}"' for model in MODELS)
        raise ConfigError(
            f"model.name is {name!r}, expected {names}{did_you_mean(name, MODELS)}"
        )
    return MODELS[name]


def model_args(name: str, flavor: str, overrides: Written = ()) -> DispModelArgs:
    """Return new arguments, given the keys of [model], or raise ConfigError."""
    args: DispModelArgs = find_model(name).flavors[flavor]
    apply_overrides(args, overrides)
    return args


def args_of(job_config: JobConfig) -> DispModelArgs:
    """Return the ``model_args`` of a config, to which ``update_from_config`` was not yet
    applied.
    """
    model = job_config.model
    return model_args(model.name, model.flavor, model.overrides)
