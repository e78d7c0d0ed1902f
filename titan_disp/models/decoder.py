"""All models share this forward, which can return activations, and the initialization
of weights.

Initial weights depend on the seed and the parameter's name only. DTensor's own
initialization would depend on the device and, on CPUs, on the mesh. Here every rank
draws the whole parameter on the CPU and keeps its shard. This takes a few seconds for
0.6B and some minutes for 32B.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.attention import create_attention_mask
from torchtitan.protocols.model import AttentionMasksType, ModelProtocol

from titan_disp import cpu
from titan_disp.models.arguments import DispModelArgs
from titan_disp.models.head import ChunkedHead, HiddenStates

# Activation checkpointing and torch.compile add these wrappers to parameter names.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


class Predictions(NamedTuple):
    """What a model returns for token ids [B, N] if activations are requested."""

    logits: Tensor | HiddenStates  # [B, N, V]
    # For each requested layer, in ascending order, [B, N, F]. Under TP and CP, this is
    # the rank's [B, N/p, F] shard of the sequence, as a plain local tensor.
    activations: Sequence[Tensor] = ()
    # The number of each token's document, [B, N] int, whole on every rank.
    segments: Tensor | None = None


class DispModel(ModelProtocol):
    """A decoder *returns* activations and never stores them in the module.

    FSDP2 hooks module outputs only, and hooks on blocks would run again when activation
    checkpointing recomputes them.
    """

    model_args: DispModelArgs
    n_layers: int
    tok_embeddings: nn.Embedding
    layers: nn.ModuleDict
    norm: nn.Module
    output: nn.Module

    @property
    def embeddings(self) -> list[nn.Module]:
        """Return all embedding tables, the tokens' first."""
        return [self.tok_embeddings]

    def embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        return self.tok_embeddings(tokens)

    def run_block(
        self,
        block: nn.Module,
        h: Tensor,
        attention_masks: AttentionMasksType | None,
        positions: Tensor | None,
    ) -> Tensor:
        raise NotImplementedError

    def get_attention_masks(
        self,
        input_batch: Tensor,
        tokenizer: BaseTokenizer | None = None,
        extra_inputs: dict[str, Tensor] | None = None,
    ) -> BlockMask | None:
        """Return the mask of ``extra_inputs["segments"]``, or None unless attention is
        "flex", as ``stream.document_mask`` sets it.
        """
        if self.model_args.attn_type != "flex":
            return None
        return document_mask((extra_inputs or {})["segments"])

    def init_buffers(self, device: torch.device | None = None) -> None:
        """Compute buffers, on ``device`` or where they are."""

    def forward(
        self,
        tokens: Tensor,
        attention_masks: AttentionMasksType | None = None,
        positions: Tensor | None = None,
        return_activations: Sequence[int] | None = None,
        segments: Tensor | None = None,
    ) -> Tensor | HiddenStates | Predictions:
        """Return logits [B, N, V] for token ids [B, N].

        If activations are requested, return ``Predictions``.

        ``return_activations`` has their indices: 0 is the output of the embedding, i +
        1 the output of block i (before the final norm), n_layers + 1 the output of the
        final norm; others raise ValueError. None stands for ``activations`` of the
        model's arguments in training, and for none in eval. In training with a chunked
        head, there are ``HiddenStates`` in place of logits.

        ``segments`` [B, N] numbers each token's document (``data.stream.Slot.fill``),
        from which positions can begin at 0 in every document. ValueError is raised if
        the model attends within documents and gets no mask (``get_attention_masks``).
        """
        if self.model_args.attn_type == "flex" and attention_masks is None:
            raise ValueError(
                "attention_masks is None, expected what get_attention_masks makes of "
                "the segments"
            )
        if self.model_args.restart_positions and segments is not None:
            positions = restarted(segments)
        if return_activations is None:
            return_activations = self.model_args.activations if self.training else ()
        wanted = frozenset(return_activations)
        after_norm = self.n_layers + 1
        if not wanted <= set(range(after_norm + 1)):
            raise ValueError(
                f"return_activations is {sorted(wanted)}, expected indices from 0 to "
                f"{after_norm}"
            )
        activations = []
        h = self.embed(tokens, positions)
        if isinstance(h, AsyncCollectiveTensor):
            # TP's reduce-scatter is still in flight. A compiled block drops the
            # gradient of such an input (torch 2.13).
            h = h.clone()
        if 0 in wanted:
            activations.append(h)
        for i, block in enumerate(self.layers.values(), start=1):
            h = self.run_block(block, h, attention_masks, positions)
            if i in wanted:
                activations.append(h)
        h = self.norm(h)
        if after_norm in wanted:
            h, activation = _plain(h)
            activations.append(activation)
        logits = self.output(h)
        if isinstance(self.output, ChunkedHead) and self.training:
            logits = HiddenStates(logits, self.output.weight)
        if not wanted:
            return logits
        return Predictions(logits, tuple(activations), segments)

    def tie_weights(self) -> None:
        if self.model_args.enable_weight_tying:
            self.output.weight = self.tok_embeddings.weight

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Fill parameters from the process's seed: ``debug.seed``, or the seed on which
        all ranks agree.
        """
        self.tie_weights()  # to_empty gave every module its own storage
        self.init_buffers(buffer_device)
        for name, param in self.named_parameters():
            fill_(
                param,
                draw(
                    canonical_name(name),
                    param.shape,
                    self.model_args,
                    torch.initial_seed(),
                ),
            )


def document_mask(segments: Tensor) -> BlockMask:
    """Return the mask by which a token attends to itself and to earlier tokens with its
    number in ``segments`` [B, N].
    """

    def earlier_in_document(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (segments[b, query] == segments[b, key])

    batch, n = segments.shape
    # TorchTitan compiles create_attention_mask.
    create = create_block_mask if cpu.active() else create_attention_mask
    return create(earlier_in_document, batch, None, n, n, device=segments.device)


def restarted(segments: Tensor) -> Tensor:
    """Return each token's position in its document, [B, N] int64.

    A document's tokens follow one another.
    """
    place = torch.arange(segments.shape[1], device=segments.device)
    begins = segments.diff(dim=1, prepend=segments[:, :1] - 1) != 0
    return place - torch.where(begins, place, 0).cummax(1).values


def generator_of(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(
        int.from_bytes(digest[:8], "little", signed=True)
    )


def _plain(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states for the output layer, and as a plain tensor: under TP, of
    this rank's tokens.

    Under TP they are a DTensor. The output layer gets one that is made of the plain
    tensor, so that the gradient of the first passes through the second. This is a copy,
    because FSDP2 warns of views, such as a DTensor's local tensor.
    """
    if not isinstance(h, DTensor):
        return h, h
    local = h.to_local().clone()
    again = DTensor.from_local(local, h.device_mesh, h.placements)
    return again, local


@torch.no_grad()
def fill_(param: nn.Parameter, full: Tensor) -> None:
    """Copy a whole parameter, which every rank has, into one that may be sharded, in
    its dtype and on its device.
    """
    full = full.to(param.dtype)
    if isinstance(param, DTensor):
        # src_data_rank=None: every rank has the same full tensor, so nothing is sent.
        full = distribute_tensor(
            full.to(param.to_local().device),
            param.device_mesh,
            param.placements,
            src_data_rank=None,
        )
    param.copy_(full)


def canonical_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def draw(name: str, shape: torch.Size, args: DispModelArgs, seed: int) -> Tensor:
    """Return the whole initial parameter of this canonical name, float32 on the CPU."""
    initial = args.initial(name, shape)
    if initial.std == 0:
        return torch.full(shape, initial.mean)
    generator = generator_of(seed, name)
    mean = initial.mean
    std = initial.std
    cut = initial.cut
    # A cut that far from the mean cuts nothing. In torch 2.11, trunc_normal_ would set
    # one number in millions to it, as it inverts the distribution function, also at 0
    # and 1.
    if cut > 10 * std:
        return torch.empty(shape).normal_(mean, std, generator=generator)
    return nn.init.trunc_normal_(
        torch.empty(shape), mean, std, mean - cut, mean + cut, generator=generator
    )
