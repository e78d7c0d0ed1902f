"""This module reads a model's activations one layer at a time: a block's input is measured before the block runs.

transformers' ``output_hidden_states=True`` keeps the activations of all layers until the end of the forward pass. For a
32B model with 64 blocks of width 5120 and 8 sequences of 512 tokens in float32, they take 5.5 GB, and one layer 84 MB.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titan_disp.errors import ConfigError

Consume = Callable[[int, Tensor], None]
"""A function of (layer, z) that gets a layer's activations [B, N, F] on the model's device. It must not keep them."""


class Layers:
    """A loaded model in eval mode that passes on the activations of its layers in order.

    Layer 0 is the input of the first block (the embedding), layer i + 1 is the output of block i, and the last layer is
    the output of the final norm. transformers' ``hidden_states`` end with the final norm, and lack the last block's
    output.

    Attributes:
        count: number of layers: blocks + 2.
        parameters: number of parameters; a tied embedding counts once.
        device: device for token ids.
    """

    def __init__(self, model: nn.Module, forward: Callable[[Tensor], Tensor], blocks: Sequence[nn.Module]) -> None:
        """Wrap a model.

        Args:
            model: the model.
            forward: maps [B, N] token ids to the output of the final norm.
            blocks: the blocks in the order in which ``forward`` runs them. Their input is their first argument.
        """
        self.forward, self.blocks = forward, blocks
        self.count = len(blocks) + 2
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        first = next(model.parameters()).device
        # accelerate keeps offloaded weights on the meta device, and moves token ids to where they are needed.
        self.device = torch.device("cpu") if first.type == "meta" else first

    def __call__(self, tokens: Tensor, consume: Consume) -> None:
        """Run [B, N] token ids through the model, and call ``consume`` for each layer."""
        hooks = [
            block.register_forward_pre_hook(partial(_input, consume, layer), with_kwargs=True)
            for layer, block in enumerate(self.blocks)
        ]
        hooks.append(self.blocks[-1].register_forward_hook(partial(_output, consume, len(self.blocks))))
        try:
            normed = self.forward(tokens.to(self.device))
        finally:
            for hook in hooks:
                hook.remove()
        consume(self.count - 1, normed)


def _input(consume: Consume, layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    consume(layer, args[0] if args else kwargs["hidden_states"])


def _output(consume: Consume, layer: int, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    consume(layer, output if isinstance(output, Tensor) else output[0])


def find_blocks(body: nn.Module, count: int) -> list[nn.Module]:
    """Find the blocks of a transformers model: an outermost list of ``count`` modules, and of several the largest one.

    Inner lists are not candidates, because a block may have as many experts. The largest list has the most weights.

    Raises:
        ConfigError: There is no such list.
    """
    lists = {name: module for name, module in body.named_modules() if isinstance(module, nn.ModuleList)}
    fitting = [name for name, module in lists.items() if len(module) == count]
    outermost = [lists[name] for name in fitting if not any(name.startswith(f"{other}.") for other in fitting)]
    if not outermost:
        raise ConfigError(
            f"{type(body).__name__} has no list of its {count} layers among its modules: their outputs cannot be found"
        )
    return list(max(outermost, key=lambda blocks: sum(p.numel() for b in blocks for p in b.parameters())))


def hugging_face_layers(model: Any) -> Layers:
    """Wrap a loaded ``AutoModelForCausalLM`` without its output layer, whose N × V logits are not needed."""
    body = model.base_model
    blocks = find_blocks(body, model.config.get_text_config().num_hidden_layers)
    return Layers(model, lambda tokens: body(tokens, use_cache=False)[0], blocks)
