"""Qwen3 whose forward can return intermediate activations."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torchtitan.models.qwen3.model.model import Qwen3Model
from torchtitan.protocols.model import AttentionMasksType

from titan_disp.qwen3.flavors import Qwen3DispModelArgs
from titan_disp.qwen3.init import init_parameters


class Qwen3DispModel(Qwen3Model):
    """TorchTitan's Qwen3. Activations are *returned*, never stashed: FSDP2 hooks module outputs only, and forward hooks
    on blocks would fire again when activation checkpointing recomputes them."""

    model_args: Qwen3DispModelArgs
    rope_cache: Tensor

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        attention_masks: AttentionMasksType | None = None,
        positions: Tensor | None = None,
        return_activations: Sequence[int] | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:
        """Logits, and where asked for, activations.

        Args:
            tokens: [B, N] token ids.
            attention_masks, positions: as TorchTitan's Qwen3 takes them.
            return_activations: 0 = output of the embedding, i + 1 = output of block i (before the final norm), n_layers + 1 =
                output of the final norm. None: in training the model arguments' ``activations``, in eval none.

        Returns:
            logits [B, N, V], or (logits, activations) with [B, N, F] tensors in ascending order of index. Under TP and
            CP the activations are this rank's [B, N/p, F] shard of the sequence, plain local tensors.

        Raises:
            ValueError: an index out of range.
        """
        if return_activations is None:
            return_activations = self.model_args.activations if self.training else ()
        wanted = frozenset(return_activations)
        after_norm = self.n_layers + 1
        if not wanted <= set(range(after_norm + 1)):
            raise ValueError(f"return_activations is {sorted(wanted)}, expected indices from 0 to {after_norm}")
        activations = []
        h = self.tok_embeddings(tokens)
        if isinstance(h, AsyncCollectiveTensor):
            # TP's reduce-scatter is still in flight, and a compiled block drops the gradient of such an input (torch 2.13).
            h = h.clone()
        if 0 in wanted:
            activations.append(h)
        for i, layer in enumerate(self.layers.values(), start=1):
            h = layer(h, self.rope_cache, attention_masks, positions)
            if i in wanted:
                activations.append(h)
        h = self.norm(h)
        if after_norm in wanted:
            # Under TP a DTensor, as the output's plan wants it. Its local tensor is a view, and of those FSDP2 warns.
            activations.append(h.to_local().clone() if isinstance(h, DTensor) else h)
        logits = self.output(h)
        return (logits, tuple(activations)) if wanted else logits

    def tie_weights(self) -> None:
        """Make ``output.weight`` the same parameter as ``tok_embeddings.weight`` (again)."""
        if self.enable_weight_tying:
            self.output.weight = self.tok_embeddings.weight

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Fill parameters from the process's seed (``debug.seed``, or the one that TorchTitan agrees on over all ranks)."""
        self.tie_weights()  # to_empty gave every module a storage of its own
        with torch.device(buffer_device or self.rope_cache.device):
            self.rope_cache = self._precompute_rope_cache()
        init_parameters(self, self.model_args, torch.initial_seed())
