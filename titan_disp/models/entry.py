"""Each model's folder provides an entry to the rest of titan-disp."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from titan_disp.models.arguments import Flavors
from titan_disp.models.hf import HfAdapter
from titan_disp.models.model import DispModel


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
