"""While rank 0 waits, it finds out for which rank all ranks wait, and what that one
does: the time-out of a collective operation names neither.
"""

import json
import socket
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger

from titan_disp.errors import counted
from titan_disp.run.liveness import Heartbeat

INTERVAL = 5.0  # seconds between two notes of a rank
# Seconds in which rank 0 makes no progress until it asks for whom; our choice. The
# collective operations' time-out, 100 s by default, should not be over by then.
WAITING = 20.0
SILENT = 4 * INTERVAL  # seconds without a note after which a rank does not answer


class Peers:
    """Exchange what the ranks do through a store of torch.distributed.

    All ranks announce the same things in the same order. The rank that has announced
    the fewest is the one for which the others wait.
    """

    def __init__(
        self, heartbeat: Heartbeat, store: dist.Store, rank: int, ranks: int
    ) -> None:
        self.heartbeat = heartbeat
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._next = 0.0
        # of each rank, its last note, and when rank 0 has read it for the first time
        self._read: dict[int, tuple[bytes, float]] = {}

    def exchange(self) -> None:
        """Tell what this rank does, at most once per ``INTERVAL``. On rank 0, keep for
        the heartbeat which rank is waited for.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL
        # The process that holds the store may have ended.
        with suppress(RuntimeError):
            note = {**self.heartbeat.note(), "host": socket.gethostname()}
            self._store.set(self._key(self._rank), json.dumps(note))
            if self._rank == 0:
                self._keep(self._waited_for())

    @staticmethod
    def _key(rank: int) -> str:
        return f"titan-disp rank {rank}"

    def _keep(self, text: str) -> None:
        if text and not self.heartbeat.waits_for:
            logger.warning(text)
        self.heartbeat.waits_for = text

    def _waited_for(self) -> str:
        """Return which rank the others wait for, and what it does, or "" if they do not
        wait, or for all ranks alike.
        """
        usual = max(WAITING, 2 * self.heartbeat.slowest)
        if self.heartbeat.note()["seconds"] < usual:
            return ""
        notes = [self._note_of(rank) for rank in range(self._ranks)]
        if not all(notes):  # a rank has not told anything yet
            return ""
        turns = [note["turn"] for note in notes]
        late = [rank for rank, turn in enumerate(turns) if turn < max(turns)]
        silent = [rank for rank in range(self._ranks) if self._is_silent(rank)]
        if not late and not silent:
            return ""
        rank = min(late, key=turns.__getitem__) if late else silent[0]
        note = notes[rank]
        more = len(set(late + silent)) - 1
        text = f"all ranks wait for rank {rank} on {note['host']}"
        if more:
            text += f" and {counted(more, 'other')}"
        if rank in silent:
            return (
                f"{text}, which does not answer: {note['doing']} at step {note['step']}"
            )
        return (
            f"{text}: {note['doing']} at step {note['step']}, for "
            f"{note['seconds']:.0f} s"
        )

    def _note_of(self, rank: int) -> dict[str, Any]:
        """Return the last note of a rank, {} if there is none."""
        key = self._key(rank)
        if not self._store.check([key]):
            return {}
        text = self._store.get(key)
        if self._read.get(rank, (b"", 0.0))[0] != text:
            self._read[rank] = (text, time.monotonic())
        return json.loads(text)

    def _is_silent(self, rank: int) -> bool:
        _, since = self._read[rank]
        return time.monotonic() - since > SILENT
