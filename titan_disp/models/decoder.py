"""The base class of all models: a forward that can return activations, and the
initialization of weights.

Initial weights depend only on the seed and the parameter's name. With DTensor's
initialization, they would depend on the device and, on CPUs, on the mesh. Here every rank
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
    """The result of a forward with token ids [B, N] if activations are requested."""

    logits: Tensor | HiddenStates  # [B, N, V]
    # The requested activations, [B, N, F] each, in ascending order. Under TP and CP,
    # they are the rank's shards of the sequence, [B, N/p, F], as plain local tensors.
    activations: Sequence[Tensor] = ()
    # The index of each token's document, int [B, N], whole on every rank
    segments: Tensor | None = None


class DispModel(ModelProtocol):
    """A decoder that can return activations.

    The model *returns* activations instead of collecting them by hooks on blocks,
    because FSDP2 only handles tensors in module outputs, and activation checkpointing
    would run the hooks again in the backward pass.
    """

    model_args: DispModelArgs
    n_layers: int
    tok_embeddings: nn.Embedding
    layers: nn.ModuleDict
    norm: nn.Module
    output: nn.Module

    @property
    def embeddings(self) -> list[nn.Module]:
        """All embedding tables. The first has the token embeddings."""
        return [self.tok_embeddings]

    def embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return the embeddings of the tokens, [B, N, F]."""
        return self.tok_embeddings(tokens)

    def run_block(
        self,
        block: nn.Module,
        h: Tensor,
        attention_masks: AttentionMasksType | None,
        positions: Tensor | None,
    ) -> Tensor:
        """Return the output of a block, [B, N, F]."""
        raise NotImplementedError

    def get_attention_masks(
        self,
        input_batch: Tensor,
        tokenizer: BaseTokenizer | None = None,
        extra_inputs: dict[str, Tensor] | None = None,
    ) -> BlockMask | None:
        """Return the mask within documents, given ``extra_inputs["segments"]``; None if
        attention is not "flex" (``stream.document_mask`` is false).
        """
        if self.model_args.attn_type != "flex":
            return None
        return document_mask((extra_inputs or {})["segments"])

    def init_buffers(self, device: torch.device | None = None) -> None:
        """Compute the buffers on ``device``. None: on their present device."""

    def forward(
        self,
        tokens: Tensor,
        attention_masks: AttentionMasksType | None = None,
        positions: Tensor | None = None,
        return_activations: Sequence[int] | None = None,
        segments: Tensor | None = None,
    ) -> Tensor | HiddenStates | Predictions:
        """Return logits [B, N, V], or ``Predictions`` if activations are requested.

        In training with a chunked head, ``HiddenStates`` replace the logits.

        Args:
            tokens: token ids, int [B, N].
            attention_masks: the result of ``get_attention_masks``.
            positions: the position of each token in its sequence. None: 0 to N − 1.
            return_activations: indices of the requested activations. 0 is the output of
                the embedding, i + 1 the output of block i (before the final norm), and
                n_layers + 1 the output of the final norm. None: in training, the ``activations`` of the
                model's arguments; in eval, no activations.
            segments: the index of each token's document, int [B, N]
                (``data.stream.Slot.fill``). With ``restart_positions``, they determine
                the positions.

        Raises:
            ValueError: an index does not exist, or the model attends within documents
                and ``attention_masks`` is None.
        """
        if self.model_args.attn_type == "flex" and attention_masks is None:
            raise ValueError(
                "attention_masks is None, expected the result of get_attention_masks "
                "for the segments"
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
            # TP's reduce-scatter is still running; clone waits for it. A compiled block
            # would drop the gradient of a running input (torch 2.13).
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
        """Initialize the parameters from torch's seed, which is equal on all ranks:
        ``debug.seed``, or a random seed.
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
    """Return a mask with which a token attends to itself and to earlier tokens of its
    document. ``segments`` [B, N] is the index of each token's document.
    """

    def earlier_in_document(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (segments[b, query] == segments[b, key])

    batch, n = segments.shape
    # TorchTitan's create_attention_mask is compiled.
    create = create_block_mask if cpu.active() else create_attention_mask
    return create(
        earlier_in_document, B=batch, H=None, Q_LEN=n, KV_LEN=n, device=segments.device
    )


def restarted(segments: Tensor) -> Tensor:
    """Return each token's position in its document, int64 [B, N].

    ``segments`` [B, N] is the index of each token's document. The tokens of a document
    are adjacent.
    """
    place = torch.arange(segments.shape[1], device=segments.device)
    begins = segments.diff(dim=1, prepend=segments[:, :1] - 1) != 0
    return place - torch.where(begins, place, 0).cummax(1).values


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return a generator on the CPU that depends only on the seed and the name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(
        int.from_bytes(digest[:8], "little", signed=True)
    )


def _plain(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hidden states for the output layer, and as a plain tensor for the loss.

    Under TP, the hidden states are a DTensor, and the plain tensor has this rank's
    tokens. The output layer gets a DTensor that is built from the plain tensor, so that
    the gradient of the logits passes through the plain tensor. The plain tensor is a
    copy, because FSDP2 warns about views, such as a DTensor's local tensor.
    """
    if not isinstance(h, DTensor):
        return h, h
    local = h.to_local().clone()
    again = DTensor.from_local(local, h.device_mesh, h.placements)
    return again, local


@torch.no_grad()
def fill_(param: nn.Parameter, full: Tensor) -> None:
    """Copy ``full`` into a parameter. Every rank has the whole value ``full``.

    The parameter may be sharded, and may have another dtype and device.
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
    """Return a parameter's name without the wrappers of checkpointing and compile."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def draw(name: str, shape: torch.Size, args: DispModelArgs, seed: int) -> Tensor:
    """Return the whole initial value of a parameter, float32 on the CPU.

    ``name`` is the parameter's canonical name.
    """
    initial = args.initial(name, shape)
    if initial.std == 0:
        return torch.full(shape, initial.mean)
    generator = generator_of(seed, name)
    mean = initial.mean
    std = initial.std
    cut = initial.cut
    # A cut this far from the mean has no effect. But trunc_normal_ of torch 2.11 would
    # set one number in millions to the cut, because it inverts the distribution function
    # at 0 and 1 too.
    if cut > 10 * std:
        return torch.empty(shape).normal_(mean, std, generator=generator)
    return nn.init.trunc_normal_(
        torch.empty(shape),
        mean=mean,
        std=std,
        a=mean - cut,
        b=mean + cut,
        generator=generator,
    )
