"""Which rank do the others wait for?

Ranks first meet in a step where TorchTitan sums the valid tokens of all ranks, which it reads on the host. How long a rank
stands there, from its last microbatch's arrival to its first forward, is time spent waiting for the slowest. What is left of
the wall time of a step is the rank's own. No GPU is waited for to know this.

Seen: hosts that are slow in loading data, in Python, in writing logs, or stopped for a while. Not seen: a GPU that computes
slowly. In forward and backward all ranks wait for it inside the collectives, where the host cannot tell waiting from
computing; slurm/preflight.sbatch checks GPUs and measures links. Nor are ranks seen that differ in tensor or context
parallelism only.
"""

import socket
import time
from collections.abc import Sequence
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.tools import utils

from titan_disp.dispersion.collectives import all_gather

NOTICED = 1.2  # times the median of the ranks' own time


def straggler(own: Sequence[float], hosts: Sequence[str]) -> dict[str, Any] | None:
    """The slowest rank, where it takes more than ``NOTICED`` times the median.

    Args:
        own: seconds per step of every rank. Of two ranks in the middle the faster counts, so that two can be told apart.
        hosts: of every rank.
    """
    median = median_low(own)
    slowest = max(range(len(own)), key=own.__getitem__)
    if own[slowest] <= NOTICED * median:
        return None
    return {"rank": slowest, "host": hosts[slowest], "seconds": own[slowest], "median": median}


class Stragglers:
    """Times this rank, and compares all ranks when asked."""

    def __init__(self) -> None:
        # Of the wall time; None until the first comparison, as a run's first step compiles.
        self._since: float | None = None
        self._waited = 0.0
        self._steps = 0
        self._arrived: float | None = None
        self._hosts: list[str] = []

    def arrived(self) -> None:
        """A microbatch is here; with the last one of a step the rank is ready to meet the others."""
        self._arrived = time.perf_counter()

    def met(self) -> None:
        """A forward begins; with the first one of a step all ranks have met."""
        if self._arrived is not None:
            self._waited += time.perf_counter() - self._arrived
            self._steps += 1
            self._arrived = None

    def own_seconds(self) -> float:
        """Per step since the last call; 0 at the first."""
        now = time.perf_counter()
        own = (now - self._since - self._waited) / max(1, self._steps) if self._since is not None else 0.0
        self._since, self._waited, self._steps = now, 0.0, 0
        return own

    def find(self) -> dict[str, Any] | None:
        """See ``straggler``. A collective call: one all-gather of a number, and at the first call of the hosts' names."""
        if not self._hosts:
            self._hosts = [""] * dist.get_world_size()
            dist.all_gather_object(self._hosts, socket.gethostname())
        own = torch.tensor([self.own_seconds()], device=utils.device_type)
        every = torch.empty(dist.get_world_size(), device=utils.device_type)
        all_gather(every, own)
        return straggler(every.tolist(), self._hosts)
