"""Condensation on held-out text, measured while a model trains.

Nothing of training is touched: no gradients, no random numbers, other data. The sequences are the same in every run, and
divided among the data-parallel ranks; where a sequence is sharded (TP, CP) its activations are gathered before they are
measured, so that the numbers do not depend on the mesh.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titan_disp.condensation.measure import Accumulator
from titan_disp.condensation.record import Condensation


def gather_sequence(z: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[B, N, F] on every rank, from the [B, N/p, F] shards of the sequence in rank order."""
    if group is None:
        return z
    shards = [torch.empty_like(z) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, z.contiguous(), group=group)
    return torch.cat(shards, dim=1)


class Monitor:
    """Measures the layers of a model on fixed sequences.

    Args:
        sequences: [n, N] token ids, int64, the same on all ranks, on the device.
        batch_size: sequences per forward; the last forward is filled up, so that a compiled model sees one shape.
        max_tokens: positions per sequence that are measured, evenly spaced; all where N is not larger.
        ranks: (rank, number) of this data-parallel rank, which takes every number-th sequence.
        data_group: over which the ranks' sums are added up; None: one rank.
        sequence_group: over which a sequence is sharded; None: it is not.
    """

    def __init__(
        self,
        sequences: Tensor,
        batch_size: int,
        max_tokens: int,
        ranks: tuple[int, int] = (0, 1),
        data_group: dist.ProcessGroup | None = None,
        sequence_group: dist.ProcessGroup | None = None,
    ) -> None:
        rank, number = ranks
        count, n = sequences.shape
        forwards = -(-count // (number * batch_size))  # the same on all ranks: a forward is a collective call
        own = [i if i < count else None for i in range(rank, number * batch_size * forwards, number)]
        self.valid = torch.tensor([i is not None for i in own]).view(forwards, batch_size)
        self.batches = sequences[[i or 0 for i in own]].view(forwards, batch_size, n)
        self.tokens = min(max_tokens, n)
        self.positions = torch.linspace(0, n - 1, self.tokens, dtype=torch.float64).round().long()
        self.data_group, self.sequence_group = data_group, sequence_group

    @torch.no_grad()
    def measure(self, forward: Callable[[Tensor], Sequence[Tensor]]) -> Condensation:
        """The same result on every rank. A collective call.

        Args:
            forward: [B, N] token ids → activations of every layer, [B, N/p, F] each.
        """
        sums: Accumulator | None = None
        for batch, valid in zip(self.batches, self.valid, strict=True):
            activations = forward(batch)
            if sums is None:
                sums = Accumulator(len(activations), batch.device)
            for layer, z in enumerate(activations):
                sums.add(layer, gather_sequence(z, self.sequence_group)[valid][:, self.positions])
        assert sums is not None
        if self.data_group is not None:
            dist.all_reduce(sums.sums, group=self.data_group)
        return sums.result(self.tokens)
