"""Noisy embeddings (NEFTune, arXiv 2310.05914) add noise that is the same on every mesh and after a resume.

In training, U(−1, 1) · α/√(N·F) is added to the output of the token embedding (N positions in a whole sequence, F
features). No generator keeps a state: every number is a hash of (seed, step, sequence in the global batch, position,
feature). Each rank can therefore compute the noise of its own part, and integer arithmetic gives the same numbers on
every device.

A *slot* is one of the run's document streams. Sequence i of a global batch comes from slot i modulo the number of
slots.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_WORD = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """Apply a bijection to 32-bit words in place; every bit depends on every bit.

    Args:
        x: int64 in [0, 2³²).

    It is Chris Wellons' "lowbias32" with better constants (hash-prospector). Both are below 2³¹, so that products stay
    below 2⁶³.
    """
    x ^= x >> 16
    x *= 0x21F0AAAD
    x &= _WORD
    x ^= x >> 15
    x *= 0x735A2D97
    x &= _WORD
    x ^= x >> 15
    return x


def _absorb(key: Tensor, value: Tensor | int) -> Tensor:
    return mix((key + value) & _WORD)


def uniform(seed: int, step: int, sequences: Tensor, positions: Tensor, features: int) -> Tensor:
    """Return numbers from U(−1, 1), multiples of 2⁻²³.

    Args:
        seed: seed of the run.
        step: optimizer steps completed.
        sequences: [B], indices in the global batch, from 0.
        positions: [B, n], in the whole sequence.
        features: F.

    Returns:
        [B, n, F] float32 on the device of ``positions``.
    """
    device = positions.device
    # Filled on the device: torch.tensor would copy the number from the host, and a GPU would wait for it.
    key = mix(torch.full((1,), seed & _WORD, device=device))
    key = _absorb(key, (seed >> 32) & _WORD)
    key = _absorb(key, step)
    tokens = _absorb(_absorb(key, sequences.to(device))[:, None], positions.long())
    # The features are hashed too: otherwise two tokens whose keys differ in few bits would get the same numbers in
    # another order.
    columns = mix(torch.arange(1, features + 1, device=device))
    words = mix(tokens[..., None] ^ columns)
    return (words >> 8).float().mul_(2.0**-23).sub_(1.0)


@dataclass
class NoisyEmbedding:
    """Add the noise by hooks on a model that has ``tok_embeddings``, in every training forward.

    Attributes:
        alpha: α.
        seq_len: N, of the whole sequence.
        seed: seed of the run.
        step: returns the number of completed optimizer steps.
        slots: slots of the run.
        own_slots: slots of this data-parallel rank.
        first_slot: the first of them.
        per_step: sequences per step on this rank.
        tp_rank: this rank's index among those over which TP shards the sequence.
    """

    alpha: float
    seq_len: int
    seed: int
    step: Callable[[], int]
    slots: int
    own_slots: int
    first_slot: int
    per_step: int
    tp_rank: int = 0
    _step: int = -1
    _seen: int = 0  # sequences of this step that have had their noise
    _positions: Tensor | None = None  # of the current forward

    def install(self, model: nn.Module) -> None:
        """Register hooks on the model and its embedding.

        The model must be parallelized already, so that these run last.
        """
        model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        model.get_submodule("tok_embeddings").register_forward_hook(self._after_embedding)

    def _before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs["tokens"]
        positions = kwargs.get("positions")  # under context parallelism, a rank's part is not contiguous
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        self._positions = positions.expand(tokens.shape)

    def _after_embedding(self, embedding: nn.Module, args: Any, h: Tensor) -> Tensor | None:
        if not (embedding.training and torch.is_grad_enabled()):
            return None
        assert self._positions is not None
        step, n = self.step(), h.shape[1]
        if step != self._step or self._seen >= self.per_step:  # the latter if a checkpoint was loaded again
            self._step, self._seen = step, 0
        positions = self._positions
        if n < positions.shape[1]:  # TP shards the output along the sequence, in equal parts
            positions = positions[:, self.tp_rank * n : (self.tp_rank + 1) * n]
        noise = uniform(self.seed, step, self.sequences(h.shape[0], h.device), positions, h.shape[2])
        self._seen += h.shape[0]
        return h + noise.mul_(self.alpha / math.sqrt(self.seq_len * h.shape[2])).to(h.dtype)

    def sequences(self, count: int, device: torch.device | None = None) -> Tensor:
        """Return the indices in the global batch of this rank's next ``count`` sequences: its slots take turns."""
        turn = torch.arange(self._seen, self._seen + count, device=device)
        return turn // self.own_slots * self.slots + self.first_slot + turn % self.own_slots
