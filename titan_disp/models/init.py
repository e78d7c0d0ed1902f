"""Initial weights that depend on the seed and the parameter's name only: not on the mesh, nor on the device.

DTensor's random initialisation gives that on GPUs but not on a CPU mesh, and a CPU and a GPU draw different numbers.
Every rank draws the whole parameter on the CPU (once: for 0.6B a few seconds, for 32B some minutes) and keeps its shard.
"""

import math

import torch
from torch import Tensor, nn

from titan_disp.draws import fill_, generator_of
from titan_disp.models.arguments import DispModelArgs

# Wrappers of activation checkpointing and torch.compile show up in parameter names.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def canonical_name(name: str) -> str:
    """A parameter's name without the wrappers of activation checkpointing and torch.compile."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def draw(name: str, shape: torch.Size, args: DispModelArgs, seed: int) -> Tensor:
    """The whole initial parameter, float32 on the CPU.

    Args:
        name: canonical.
    """
    initial = args.initial(name, shape)
    if initial.std == 0:
        return torch.full(shape, initial.mean)
    generator = generator_of(seed, name)
    mean, std, cut = initial.mean, initial.std, initial.cut
    if math.isinf(cut):  # some versions of trunc_normal_ invert the distribution function, which gives infinities here
        return torch.empty(shape).normal_(mean, std, generator=generator)
    return nn.init.trunc_normal_(torch.empty(shape), mean, std, mean - cut, mean + cut, generator=generator)


def init_parameters(model: nn.Module, args: DispModelArgs, seed: int) -> None:
    """Fill all parameters of a materialised, possibly sharded model in place."""
    for name, param in model.named_parameters():
        fill_(param, draw(canonical_name(name), param.shape, args, seed))
