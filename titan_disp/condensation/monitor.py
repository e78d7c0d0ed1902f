"""Condensation and cross-entropy on held-out text, measured while a model trains.

Nothing of training is touched: no gradients, no random numbers, other data. The sequences are the same in every run, and
divided among the data-parallel ranks; where these are more than the sequences, several ranks take the same one and divide its
layers. Where a sequence is sharded (TP, CP) its activations are gathered before they are measured. So the numbers do not depend
on the mesh.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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


@dataclass
class Forward:
    """What a model makes of a batch of B sequences.

    Attributes:
        activations: [B, N/p, F] of every layer, the last one after the final norm.
        cross_entropies: [B] float64, sums over the labels of this rank, which are those of all N tokens, or under CP of N/cp.
        positions: [N/cp] of these labels in the sequence; None: in order.
    """

    activations: Sequence[Tensor]
    cross_entropies: Tensor
    positions: Tensor | None = None


class Monitor:
    """Measures a model on fixed sequences.

    Args:
        sequences: [n, N + 1] token ids, int64, the same on all ranks, on the device.
        batch_size: sequences per forward, always as many, so that a compiled model sees one shape.
        max_tokens: positions per sequence whose activations are measured, evenly spaced; all where N is not larger.
        ranks: (rank, number) of this data-parallel rank.
        data_group: over which the ranks' sums are added up; None: one rank.
        sequence_group: over which the activations of a sequence are sharded (TP, CP, or both); None: they are not.
        label_group: over which its labels are sharded (CP), which is a part of the sequence_group; None: they are not.
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
        forwards = -(-count // (number * batch_size))  # the same on all ranks: a forward is a collective call
        places = number * batch_size * forwards  # in the batches of all ranks together: the sequences, again and again
        own = torch.arange(rank, places, number).view(forwards, batch_size)
        self.copies = places // count
        self.copy = own // count  # takes every copies-th layer; what begins one copy more takes none
        self.batches = sequences[(own % count).to(sequences.device)]
        self.labels = count * n
        self.tokens = min(max_tokens, n)
        self.positions = torch.linspace(0, n - 1, self.tokens, dtype=torch.float64).round().long()
        self.data_group, self.sequence_group, self.label_group = data_group, sequence_group, label_group

    @torch.no_grad()
    def measure(self, forward: Callable[[Tensor, Tensor], Forward]) -> Condensation:
        """The same result on every rank. A collective call.

        Args:
            forward: [B, N] token ids and their labels, the tokens that follow them → what the model makes of them.
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
                if own.any():  # on all ranks of the sequence's group, or on none
                    sums.add(layer, gather_sequence(z, self.sequence_group)[own][:, chosen])
        assert sums is not None
        if self.label_group is not None:
            dist.all_reduce(ce, group=self.label_group)
        if self.data_group is not None:
            dist.all_reduce(sums.sums, group=self.data_group)
            dist.all_reduce(ce, group=self.data_group)
        return replace(sums.result(self.tokens, final_norm=True), cross_entropy=ce.item() / self.labels)

    def _chosen(self, positions: Tensor | None) -> Tensor:
        """Where the measured positions are in a gathered sequence: load balancing under CP permutes it."""
        if positions is None:
            return self.positions
        order = gather_sequence(positions[None, :, None], self.label_group).flatten()
        return order.argsort()[self.positions.to(order.device)]
