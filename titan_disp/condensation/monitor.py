"""The monitor measures condensation and cross-entropy on held-out text while a model trains.

It does not affect training: it takes no gradients, draws no random numbers, and has its own data. The sequences are the
same in every run and are divided among the data-parallel ranks. If there are more ranks than sequences, several ranks
take the same sequence and divide its layers. If a sequence is sharded (TP, CP), its activations are gathered before
they are measured. The numbers therefore do not depend on the mesh.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from titan_disp.condensation.measure import Accumulator
from titan_disp.condensation.record import Condensation


def gather_sequence(z: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return [B, N, F] on every rank, from the [B, N/p, F] shards of the sequence in rank order."""
    if group is None:
        return z
    shards = [torch.empty_like(z) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, z.contiguous(), group=group)
    return torch.cat(shards, dim=1)


@dataclass
class Forward:
    """A forward pass gives these results for a batch of B sequences.

    Attributes:
        activations: [B, N/p, F] for every layer, the last one after the final norm.
        cross_entropies: [B] float64, sums over this rank's labels: all N of them, or N/cp under CP.
        positions: [N/cp] of these labels in the sequence; None: in order.
    """

    activations: Sequence[Tensor]
    cross_entropies: Tensor
    positions: Tensor | None = None


class Monitor:
    """Measure a model on fixed sequences.

    Args:
        sequences: [n, N + 1] token ids, int64, the same on all ranks, on the device.
        batch_size: sequences per forward. It is always the same, so that a compiled model sees one shape.
        max_tokens: positions per sequence whose activations are measured, evenly spaced; all N if it is larger.
        ranks: (rank, number of ranks) of this data-parallel rank.
        data_group: ranks whose sums are added up; None: one rank.
        sequence_group: ranks over which the activations of a sequence are sharded (TP, CP, or both); None: not sharded.
        label_group: ranks over which its labels are sharded (CP), a part of sequence_group; None: not sharded.
    """

    def __init__(
        self,
        sequences: Tensor,
        batch_size: int,
        max_tokens: int,
        ranks: tuple[int, int] = (0, 1),
        data_group: dist.ProcessGroup | None = None,
        sequence_group: dist.ProcessGroup | None = None,
        label_group: dist.ProcessGroup | None = None,
    ) -> None:
        rank, number = ranks
        count, n = sequences.shape[0], sequences.shape[1] - 1
        forwards = -(-count // (number * batch_size))  # the same on all ranks, as a forward is a collective call
        places = number * batch_size * forwards  # in all ranks' batches, filled with the sequences over and over
        own = torch.arange(rank, places, number).view(forwards, batch_size)
        self.copies = places // count
        self.copy = own // count  # copy c measures layers c, c + copies, …; an incomplete copy measures none
        self.batches = sequences[(own % count).to(sequences.device)]
        self.labels = count * n
        self.tokens = min(max_tokens, n)
        self.positions = torch.linspace(0, n - 1, self.tokens, dtype=torch.float64).round().long()
        self.data_group, self.sequence_group, self.label_group = data_group, sequence_group, label_group

    @torch.no_grad()
    def measure(self, forward: Callable[[Tensor, Tensor], Forward]) -> Condensation:
        """Measure and return the same result on every rank. This is a collective call.

        Args:
            forward: takes token ids [B, N] and their labels, the tokens that follow them; returns the model's results.
        """
        sums: Accumulator | None = None
        ce = torch.zeros((), dtype=torch.float64, device=self.batches.device)
        for batch, copy in zip(self.batches, self.copy, strict=True):
            found = forward(batch[:, :-1], batch[:, 1:])
            ce += found.cross_entropies[copy == 0].sum()
            if sums is None:
                sums = Accumulator(len(found.activations), batch.device)
            chosen = self._chosen(found.positions)
            for layer, z in enumerate(found.activations):
                own = copy == layer % self.copies
                if own.any():  # the same on all ranks that share a sequence
                    sums.add(layer, gather_sequence(z, self.sequence_group)[own][:, chosen])
        assert sums is not None
        if self.label_group is not None:
            dist.all_reduce(ce, group=self.label_group)
        if self.data_group is not None:
            dist.all_reduce(sums.sums, group=self.data_group)
            dist.all_reduce(ce, group=self.data_group)
        return replace(sums.result(self.tokens, final_norm=True), cross_entropy=ce.item() / self.labels)

    def _chosen(self, positions: Tensor | None) -> Tensor:
        """Return where the measured positions are in a gathered sequence, which load balancing under CP permutes."""
        if positions is None:
            return self.positions
        order = gather_sequence(positions[None, :, None], self.label_group).flatten()
        return order.argsort()[self.positions.to(order.device)]


# The cross-entropy of held-out sequences is computed sequence by sequence, a few tokens at a time.


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
