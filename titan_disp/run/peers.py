"""While ranks wait for each other, rank 0 finds out which rank all of them wait for, and
what that rank does. The time-out of a collective operation does not show this.
"""

import json
import socket
import time
from contextlib import suppress
from operator import itemgetter
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger

from titan_disp.run.liveness import Heartbeat

INTERVAL = 5.0  # seconds between two notes of a rank
# After this many seconds without progress, rank 0 looks for the rank it waits for; our
# choice. The time-out of collective operations, 100 s by default, must be longer.
WAITING = 20.0
KEY = "titan-disp rank {}"
SILENT = 4 * INTERVAL  # a rank that writes no note for this long does not answer
GONE = "; it does not answer any more"


class Peers:
    """Exchange what the ranks do through a store of torch.distributed.

    All ranks announce the same things in the same order, so the others wait for the rank
    that has announced the fewest things.
    """

    def __init__(
        self, heartbeat: Heartbeat, store: dist.Store, rank: int, ranks: int
    ) -> None:
        self.heartbeat = heartbeat
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._next = 0.0
        # by key: the newest note, and when rank 0 first read this note
        self._read: dict[str, tuple[bytes, float]] = {}

    def exchange(self) -> None:
        """Write to the store what this rank does, at most once per ``INTERVAL``. On rank
        0, also tell the heartbeat which rank the others wait for.
        """
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + INTERVAL
        note = self.heartbeat.note()
        text = (
            f"rank {self._rank} on {socket.gethostname()}: {note['doing']} at step "
            f"{note['step']}"
        )
        content = {"turn": note["turn"], "seconds": note["seconds"], "text": text}
        # The process that holds the store may have ended.
        with suppress(RuntimeError):
            self._store.set(KEY.format(self._rank), json.dumps(content))
            if self._rank == 0:
                self._keep(self._waited_for())

    def _keep(self, text: str) -> None:
        before = self.heartbeat.waits_for
        if text and (not before or text.endswith(GONE) > before.endswith(GONE)):
            logger.warning(text)
        self.heartbeat.waits_for = text

    def _waited_for(self) -> str:
        """Return which rank the others wait for and what it does, or "" if they do not
        wait, or if no rank is behind the others.
        """
        usual = max(WAITING, 2 * self.heartbeat.slowest)
        keys = [KEY.format(rank) for rank in range(self._ranks)]
        waiting = self.heartbeat.note()["seconds"]
        # A rank's silence is counted from the first reading of its note, so notes are
        # read before the wait is as long as ``usual``.
        if waiting < min(INTERVAL, usual) or not self._store.check(keys):
            return ""
        notes = [self._note_of(key) for key in keys]
        if waiting < usual:
            return ""
        silent = [note for note in notes if note["age"] > SILENT]
        latest = min(silent or notes, key=itemgetter("turn"))
        seconds = latest["seconds"] + latest["age"]
        text = f"all ranks wait for {latest['text']}, for {seconds:.0f} s"
        if silent:
            return text + GONE
        if all(note["turn"] == latest["turn"] for note in notes):
            return ""
        return text

    def _note_of(self, key: str) -> dict[str, Any]:
        """Return the newest note of a rank, with its ``age``: the seconds since rank 0
        first read it.
        """
        text = self._store.get(key)
        read_at = time.monotonic()
        if self._read.get(key, (b"", 0.0))[0] != text:
            self._read[key] = (text, read_at)
        return {**json.loads(text), "age": read_at - self._read[key][1]}
