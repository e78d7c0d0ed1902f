"""Signs of life: what a rank is doing, and how long that may take.

Collective operations have time-outs of their own. A file system that hangs, or any other stall in which no rank waits for
another, has none, and would hold all GPUs until the job's time limit. So rank 0 writes RUN/heartbeat.json whenever it begins
something, and slurm/supervise.py ends a run that has been silent for longer than the file allows. Every rank has Python's
faulthandler write where its threads stand into its own log at that moment, so that the one that hangs can be found.
"""

import contextlib
import faulthandler
import json
import os
import time
from pathlib import Path

from titan_disp.run.folder import job_id

FILE = "heartbeat.json"
PAUSE = 1.0  # seconds between two writes of the same kind: a step may take less, and the file system may be shared


class Heartbeat:
    """Attributes:
    slowest: seconds of the slowest step so far; the first one, which compiles, does not count.
    """

    def __init__(
        self, run: Path | None, init_timeout: float, train_timeout: float, save: float, silence: float
    ) -> None:
        """Args:
        run: the run folder, on rank 0; None elsewhere.
        init_timeout, train_timeout: ``comm.*_timeout_seconds``, before and after the first step.
        save, silence: ``guard.save_seconds`` and ``guard.silence_seconds``.
        """
        self.file = run / FILE if run is not None else None
        self.init_timeout, self.train_timeout = init_timeout, train_timeout
        self.save, self.silence = save, silence
        self.slowest = 0.0
        self._steps = 0
        self._doing, self._written, self._began = "", -PAUSE, time.monotonic()

    def allowed(self, doing: str) -> float:
        """Seconds until the next sign of life. Other ranks may use up a time-out before this one's begins: twice."""
        if doing == "save":
            return self.save + self.silence
        timeout = self.train_timeout if doing == "step" and self._steps else self.init_timeout
        return 2 * max(timeout, self.slowest) + self.silence

    def step(self, step: int) -> None:
        """The step that ``begin("step", …)`` announced has ended."""
        if self._steps:
            self.slowest = max(self.slowest, time.monotonic() - self._began)
        self._steps += 1
        self.begin("step", step)

    def begin(self, doing: str, step: int) -> None:
        """Anything begins that may take long: start, step, save, validation, condensation."""
        now, allowed = time.monotonic(), self.allowed(doing)
        faulthandler.dump_traceback_later(allowed, file=2)  # stderr, which is this rank's log
        self._began = now
        if self.file is None or (doing == self._doing and now - self._written < PAUSE):
            return
        self._doing, self._written = doing, now
        content = {"start": job_id(), "step": step, "doing": doing, "allowed_seconds": allowed, "time": time.time()}
        with contextlib.suppress(OSError):  # a full disk must not end a step; who watches sees the silence
            partial = self.file.with_suffix(".partial")
            partial.write_text(json.dumps(content))
            os.replace(partial, self.file)

    def close(self) -> None:
        """Nothing is expected any more."""
        faulthandler.cancel_dump_traceback_later()
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.unlink(missing_ok=True)
