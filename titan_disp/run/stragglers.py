"""This module finds the rank for which the others wait.

In every step, ranks first meet where TorchTitan sums the valid tokens of all ranks and reads the sum on the host. The
time from the arrival of a rank's last microbatch to its first forward is time spent waiting for the slowest rank. The
rest of a step's wall time is the rank's *own* time. Measuring it waits for no GPU.

This finds hosts that are slow at loading data, in Python or at writing logs, or that stop for a while. It does not find
a GPU that computes slowly: in forward and backward, all ranks wait for it inside collective operations, where the host
cannot tell waiting from computing. (slurm/preflight.sbatch checks GPUs and measures links.) Nor does it find a
difference between ranks of one tensor- or context-parallel group.
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

NOTICED = 1.2  # times the median of all ranks' own time


def straggler(own: Sequence[float], hosts: Sequence[str]) -> dict[str, Any] | None:
    """Find the slowest rank, if it takes more than ``NOTICED`` times the median.

    Args:
        own: own seconds per step of every rank. With two ranks in the middle, the faster one is the median, so that one
            of two ranks can be found slow.
        hosts: host name of every rank.

    Returns:
        ``rank``, ``host``, ``seconds`` and ``median`` of all ranks; or None.
    """
    median = median_low(own)
    slowest = max(range(len(own)), key=own.__getitem__)
    if own[slowest] <= NOTICED * median:
        return None
    return {"rank": slowest, "host": hosts[slowest], "seconds": own[slowest], "median": median}


class Stragglers:
    """Measure this rank's own time, and compare all ranks on request."""

    def __init__(self) -> None:
        # When the current interval began; None until the first comparison, because a run's first step compiles.
        self._since: float | None = None
        self._waited = 0.0
        self._steps = 0
        self._arrived: float | None = None
        self._hosts: list[str] = []

    def arrived(self) -> None:
        """Note that a microbatch has arrived. With the last one of a step, this rank is ready to meet the others."""
        self._arrived = time.perf_counter()

    def met(self) -> None:
        """Note that a forward begins. At the first one of a step, all ranks have met."""
        if self._arrived is not None:
            self._waited += time.perf_counter() - self._arrived
            self._steps += 1
            self._arrived = None

    def own_seconds(self) -> float:
        """Return the rank's own seconds per step since the last call; 0 at the first call."""
        now = time.perf_counter()
        own = (now - self._since - self._waited) / max(1, self._steps) if self._since is not None else 0.0
        self._since, self._waited, self._steps = now, 0.0, 0
        return own

    def find(self) -> dict[str, Any] | None:
        """Find the slowest rank as ``straggler`` does.

        This is a collective call: it gathers a number, and once host names.
        """
        if not self._hosts:
            self._hosts = [""] * dist.get_world_size()
            dist.all_gather_object(self._hosts, socket.gethostname())
        own = torch.tensor([self.own_seconds()], device=utils.device_type)
        every = torch.empty(dist.get_world_size(), device=utils.device_type)
        all_gather(every, own)
        return straggler(every.tolist(), self._hosts)
