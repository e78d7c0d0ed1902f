"""What a model's folder hands to the rest of titan-disp."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from titan_disp.models.arguments import Flavors
from titan_disp.models.hf import HfAdapter
from titan_disp.models.model import DispModel


@dataclass(frozen=True)
class ModelEntry:
    """A model, as ``registry.MODELS`` lists it.

    Attributes:
        name: ``model.name`` of a config.
        title: for people.
        flavors: its sizes, in ascending order: a preflight without an accelerator takes the first that fits.
        parallelize: (model on the meta device, parallel_dims, job_config) → the model, in place.
        adapter: to and from transformers.
    """

    name: str
    title: str
    flavors: Flavors
    model_cls: type[DispModel]
    parallelize: Callable[..., nn.Module]
    adapter: type[HfAdapter]
