"""This module writes the heartbeat of a run: what it is doing, and how long that may take.

Collective operations have time-outs. A hanging file system, or any other stall in which no rank waits for another, has
none and would hold all GPUs until the job's time limit. Rank 0 therefore writes RUN/heartbeat.json whenever it begins
something, and slurm/supervise.py ends a run that has been silent for longer than this file allows. At that moment,
Python's faulthandler writes the stack traces of every rank's threads into the rank's log, so that the hanging rank can
be found.
"""

import contextlib
import faulthandler
import json
import os
import time
from pathlib import Path

from titan_disp.run.folder import job_id

FILE = "heartbeat.json"
PAUSE = 1.0  # seconds between two writes of the same kind: steps may be shorter, and the file system may be shared


class Heartbeat:
    """Write the heartbeat file, and arm the faulthandler.

    Attributes:
        slowest: seconds of the slowest step so far, without the first one, which compiles.
    """

    def __init__(
        self, run: Path | None, init_timeout: float, train_timeout: float, save: float, silence: float
    ) -> None:
        """Set the time limits, in seconds. Nothing is written before ``begin``.

        Args:
            run: the run folder on rank 0, None on other ranks.
            init_timeout: ``comm.init_timeout_seconds``, which holds until the first step has ended.
            train_timeout: ``comm.train_timeout_seconds``, which holds for later steps.
            save: ``guard.save_seconds``.
            silence: ``guard.silence_seconds``.
        """
        self.file = run / FILE if run is not None else None
        self.init_timeout, self.train_timeout = init_timeout, train_timeout
        self.save, self.silence = save, silence
        self.slowest = 0.0
        self._steps = 0
        self._doing, self._written, self._began = "", -PAUSE, time.monotonic()

    def allowed(self, doing: str) -> float:
        """Return the seconds allowed until the next heartbeat.

        A time-out counts twice, because that of another rank may have to pass before this rank's begins.
        """
        if doing == "save":
            return self.save + self.silence
        timeout = self.train_timeout if doing == "step" and self._steps else self.init_timeout
        return 2 * max(timeout, self.slowest) + self.silence

    def step(self, step: int) -> None:
        """Note that the step which ``begin("step", …)`` announced has ended, and announce the next one."""
        if self._steps:
            self.slowest = max(self.slowest, time.monotonic() - self._began)
        self._steps += 1
        self.begin("step", step)

    def begin(self, doing: str, step: int) -> None:
        """Announce something that may take long: start, step, save, validation or condensation.

        The faulthandler is armed on every rank. The file is written on rank 0, for the same thing at most once per
        ``PAUSE``.
        """
        now, allowed = time.monotonic(), self.allowed(doing)
        faulthandler.dump_traceback_later(allowed, file=2)  # stderr, which is this rank's log
        self._began = now
        if self.file is None or (doing == self._doing and now - self._written < PAUSE):
            return
        self._doing, self._written = doing, now
        content = {"start": job_id(), "step": step, "doing": doing, "allowed_seconds": allowed, "time": time.time()}
        with contextlib.suppress(OSError):  # a full disk must not end a step; the supervisor will notice the silence
            partial = self.file.with_suffix(".partial")
            partial.write_text(json.dumps(content))
            os.replace(partial, self.file)

    def close(self) -> None:
        """Disarm the faulthandler and remove the heartbeat file: nothing is expected any more."""
        faulthandler.cancel_dump_traceback_later()
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.unlink(missing_ok=True)
