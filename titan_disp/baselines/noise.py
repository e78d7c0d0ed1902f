"""Noisy embeddings: NEFTune (arXiv 2310.05914), the same noise on every mesh and after a resume.

In training, U(−1, 1) · α/√(N·F) is added to the output of the token embedding: N positions in a whole sequence, F features. No
generator has a state: every number is a hash of (seed, step, sequence in the global batch, position, feature), so that a rank can
tell those of its own part, and integer arithmetic gives the same ones on every device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_WORD = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, each bit of which depends on every bit, in place. int64 of [0, 2³²).

    Chris Wellons' "lowbias32" with better constants (hash-prospector), both below 2³¹: products stay below 2⁶³.
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
    """Numbers of U(−1, 1), multiples of 2⁻²³.

    Args:
        step: optimizer steps completed. sequences: [B], in the global batch, from 0. positions: [B, n], in the whole sequence.

    Returns:
        [B, n, features] float32 on the device of ``positions``.
    """
    device = positions.device
    key = mix(torch.tensor([seed & _WORD], device=device))
    key = _absorb(key, (seed >> 32) & _WORD)
    key = _absorb(key, step)
    tokens = _absorb(_absorb(key, sequences.to(device))[:, None], positions.long())
    # Hashed too: two tokens whose keys differ in few bits would otherwise have the same numbers, in another order.
    columns = mix(torch.arange(1, features + 1, device=device))
    words = mix(tokens[..., None] ^ columns)
    return (words >> 8).float().mul_(2.0**-23).sub_(1.0)


@dataclass
class NoisyEmbedding:
    """Adds the noise by hooks on a model that has ``tok_embeddings``, wherever its forward takes part in training.

    Attributes:
        alpha: α. seq_len: N, of the whole sequence. seed: of the run. step: → optimizer steps completed.
        slots: document streams of the run. own_slots: those of this data-parallel rank. first_slot: the first of them.
        per_step: sequences of a step that are this rank's.
        tp_rank: of this rank among those over which TP shards the sequence.
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
    _seen: int = 0  # sequences of the step that this rank has begun
    _positions: Tensor | None = None  # of the forward under way

    def install(self, model: nn.Module) -> None:
        """Hooks on the model and on its embedding; after it has been parallelized, so that these run last."""
        model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        model.get_submodule("tok_embeddings").register_forward_hook(self._after_embedding)

    def _before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs["tokens"]
        positions = kwargs.get("positions")  # under context parallelism a rank's part is not contiguous
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        self._positions = positions.expand(tokens.shape)

    def _after_embedding(self, embedding: nn.Module, args: Any, h: Tensor) -> Tensor | None:
        if not (embedding.training and torch.is_grad_enabled()):
            return None
        assert self._positions is not None
        step, n = self.step(), h.shape[1]
        if step != self._step or self._seen >= self.per_step:  # the latter where a checkpoint was loaded again
            self._step, self._seen = step, 0
        positions = self._positions
        if n < positions.shape[1]:  # TP shards what comes out along the sequence, in equal parts
            positions = positions[:, self.tp_rank * n : (self.tp_rank + 1) * n]
        noise = uniform(self.seed, step, self.sequences(h.shape[0]), positions, h.shape[2])
        self._seen += h.shape[0]
        return h + noise.mul_(self.alpha / math.sqrt(self.seq_len * h.shape[2])).to(h.dtype)

    def sequences(self, count: int) -> Tensor:
        """Numbers in the global batch of this rank's next ``count`` sequences: its slots come round by round."""
        turn = torch.arange(self._seen, self._seen + count)
        return turn // self.own_slots * self.slots + self.first_slot + turn % self.own_slots
