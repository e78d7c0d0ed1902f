"""A model's activations one layer at a time: what a block is given is measured before the block runs, and then forgotten.

transformers' ``output_hidden_states=True`` keeps the activations of all layers until the forward ends: for a 32B model with 64
blocks of width 5120, 8 sequences of 512 tokens in float32 are 5.5 GB, one layer of them 84 MB.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titan_disp.errors import ConfigError

Consume = Callable[[int, Tensor], None]
"""(layer, z): takes a layer's activations [B, N, F], on the device where the model has them. It must not keep them."""


class Layers:
    """A loaded model, in eval mode, that hands on the activations of its layers in order.

    Layer 0 is what the first block is given (the embedding), layer i + 1 what block i gives, and the last layer what the final
    norm makes of the last block's output. The last two are what transformers' ``hidden_states`` leave out and what they end with.

    Attributes:
        count: of layers: blocks + 2.
        parameters: numbers in the model; a tied embedding counts once.
        device: where token ids go.
    """

    def __init__(self, model: nn.Module, forward: Callable[[Tensor], Tensor], blocks: Sequence[nn.Module]) -> None:
        """
        Args:
            model: for its size and device.
            forward: [B, N] token ids → what the final norm gives.
            blocks: in the order in which ``forward`` runs them; each is called with its input as the first argument.
        """
        self.forward, self.blocks = forward, blocks
        self.count = len(blocks) + 2
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        first = next(model.parameters()).device
        self.device = (
            torch.device("cpu") if first.type == "meta" else first
        )  # accelerate moves ids to offloaded weights

    def __call__(self, tokens: Tensor, consume: Consume) -> None:
        """Run [B, N] token ids through the model."""
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
    """The blocks of a transformers model: of its lists of ``count`` modules, the outermost one, as experts may be as many; of
    several, the one with the most weights.

    Raises:
        ConfigError: there is no such list.
    """
    lists = {name: module for name, module in body.named_modules() if isinstance(module, nn.ModuleList)}
    fitting = [name for name, module in lists.items() if len(module) == count]
    outermost = [lists[name] for name in fitting if not any(name.startswith(f"{other}.") for other in fitting)]
    if not outermost:
        raise ConfigError(
            f"{type(body).__name__} has no list of its {count} layers among its modules, so that their outputs cannot be found"
        )
    return list(max(outermost, key=lambda blocks: sum(p.numel() for b in blocks for p in b.parameters())))


def hugging_face_layers(model: Any) -> Layers:
    """Of a loaded ``AutoModelForCausalLM``, without its output layer: N × V logits that nobody needs."""
    body = model.base_model
    blocks = find_blocks(body, model.config.get_text_config().num_hidden_layers)
    return Layers(model, lambda tokens: body(tokens, use_cache=False)[0], blocks)
