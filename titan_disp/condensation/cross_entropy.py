"""The cross-entropy of held-out sequences is computed sequence by sequence, a few tokens at a time."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

# Tokens whose logits are in float32 at a time: 0.3 GB with Qwen's vocabulary, and as much again for their logarithms.
_TOKENS = 512


@torch.no_grad()
def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each sequence, summed over its tokens, in nats.

    Args:
        logits: [B, N, V], or a DTensor of this shape that is sharded over the vocabulary, within ``loss_parallel()``.
        labels: [B, N] token ids.

    Returns:
        [B] float64, the same on all ranks over which the vocabulary is sharded.
    """
    sums = torch.zeros(len(labels), dtype=torch.float64, device=labels.device)
    for i, sequence in enumerate(labels):
        for start in range(0, len(sequence), _TOKENS):
            some = slice(start, start + _TOKENS)
            of_some = cross_entropy(logits[i, some].float(), sequence[some], reduction="sum")
            sums[i] += of_some.to_local() if isinstance(of_some, DTensor) else of_some
    return sums
