"""This is Qwen3 with a forward that can return intermediate activations."""

import torch
from torch import Tensor, nn
from torchtitan.models.qwen3.model.model import Qwen3Model
from torchtitan.protocols.model import AttentionMasksType

from titan_disp.models.model import DispModel
from titan_disp.qwen3.flavors import Qwen3DispModelArgs


class Qwen3DispModel(DispModel, Qwen3Model):
    """Extend TorchTitan's Qwen3 with ``DispModel``'s forward."""

    model_args: Qwen3DispModelArgs
    rope_cache: Tensor

    def run_block(
        self, block: nn.Module, h: Tensor, attention_masks: AttentionMasksType | None, positions: Tensor | None
    ) -> Tensor:
        return block(h, self.rope_cache, attention_masks, positions)

    def init_buffers(self, device: torch.device | None = None) -> None:
        with torch.device(device or self.rope_cache.device):
            self.rope_cache = self._precompute_rope_cache()
