"""The forward of every model: it can return intermediate activations."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torchtitan.protocols.model import AttentionMasksType, ModelProtocol

from titan_disp.models.arguments import DispModelArgs
from titan_disp.models.init import init_parameters


class DispModel(ModelProtocol):
    """A decoder of blocks with an embedding before and a norm and an output layer after them.

    Activations are *returned*, never stashed: FSDP2 hooks module outputs only, and forward hooks on blocks would fire again when
    activation checkpointing recomputes them.
    """

    model_args: DispModelArgs
    n_layers: int
    tok_embeddings: nn.Embedding
    layers: nn.ModuleDict
    norm: nn.Module
    output: nn.Module

    @property
    def embeddings(self) -> list[nn.Module]:
        """Every table that is looked up, that of the tokens first."""
        return [self.tok_embeddings]

    def embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """What the first block is given."""
        return self.tok_embeddings(tokens)

    def run_block(
        self, block: nn.Module, h: Tensor, attention_masks: AttentionMasksType | None, positions: Tensor | None
    ) -> Tensor:
        raise NotImplementedError

    def init_buffers(self, device: torch.device | None = None) -> None:
        """Compute buffers, on ``device`` or where they are."""

    def forward(
        self,
        tokens: Tensor,
        attention_masks: AttentionMasksType | None = None,
        positions: Tensor | None = None,
        return_activations: Sequence[int] | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:
        """Logits, and where asked for, activations.

        Args:
            tokens: [B, N] token ids.
            attention_masks, positions: as TorchTitan's models take them.
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
        h = self.embed(tokens, positions)
        if isinstance(h, AsyncCollectiveTensor):
            # TP's reduce-scatter is still in flight, and a compiled block drops the gradient of such an input (torch 2.13).
            h = h.clone()
        if 0 in wanted:
            activations.append(h)
        for i, block in enumerate(self.layers.values(), start=1):
            h = self.run_block(block, h, attention_masks, positions)
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
        if self.model_args.enable_weight_tying:
            self.output.weight = self.tok_embeddings.weight

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Fill parameters from the process's seed (``debug.seed``, or the one that TorchTitan agrees on over all ranks)."""
        self.tie_weights()  # to_empty gave every module a storage of its own
        self.init_buffers(buffer_device)
        init_parameters(self, self.model_args, torch.initial_seed())
