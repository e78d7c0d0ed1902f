"""Initial weights depend on the seed and the parameter's name only, not on the mesh or the device.

DTensor's random initialization has this property on GPUs but not on a CPU mesh, and a CPU and a GPU draw different
numbers. Here every rank draws the whole parameter on the CPU and keeps its shard. This happens once, and takes a few
seconds for 0.6B and some minutes for 32B.
"""

import math

import torch
from torch import Tensor, nn

from titan_disp.models.arguments import DispModelArgs
from titan_disp.random_parameters import fill_, generator_of

# Activation checkpointing and torch.compile add these wrappers to parameter names.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def canonical_name(name: str) -> str:
    """Return a parameter's name without the wrappers of activation checkpointing and torch.compile."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def draw(name: str, shape: torch.Size, args: DispModelArgs, seed: int) -> Tensor:
    """Return the whole initial parameter, float32 on the CPU.

    Args:
        name: canonical name.
        shape: shape of the whole parameter.
        args: the model's arguments.
        seed: seed of the run.
    """
    initial = args.initial(name, shape)
    if initial.std == 0:
        return torch.full(shape, initial.mean)
    generator = generator_of(seed, name)
    mean, std, cut = initial.mean, initial.std, initial.cut
    if math.isinf(cut):  # some versions of trunc_normal_ invert the distribution function, which would give infinities
        return torch.empty(shape).normal_(mean, std, generator=generator)
    return nn.init.trunc_normal_(torch.empty(shape), mean, std, mean - cut, mean + cut, generator=generator)


def init_parameters(model: nn.Module, args: DispModelArgs, seed: int) -> None:
    """Fill all parameters of a materialized model in place. They may be sharded."""
    for name, param in model.named_parameters():
        fill_(param, draw(canonical_name(name), param.shape, args, seed))
