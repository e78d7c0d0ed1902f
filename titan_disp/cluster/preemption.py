"""Asked to stop: by a signal, or by a file in the run folder.

A SLURM job is told some minutes before its end. The batch script cannot signal the ranks through torchrun (USR1 kills its
agent), so it writes its id, JOB.RESTART, into the file RUN/stop; a rank may be signalled itself. Whichever rank knows, the
training loop makes all ranks agree, save and end.

A user may touch RUN/stop. That file stays until the user removes it: as long as it is there, no start of the run trains.
"""

import contextlib
import os
import re
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from torchtitan.tools.logging import logger

from titan_disp.run.folder import job_id

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STOP_FILE = "stop"


class StopRequest:
    """Attributes:
    reason: why this rank was asked to stop; None while it was not.
    """

    def __init__(self, run: Path | None) -> None:
        """Listen to SIGTERM and SIGUSR1. Args: run: the folder whose stop file this rank looks for; None: it does not."""
        self.file = run / STOP_FILE if run is not None else None
        self.reason: str | None = None
        if self._of_a_job() not in (None, job_id()):
            logger.info(f"{self.file} is from before this job and was removed")
            self._remove()
        self._previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._heard) for number in SIGNALS}

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name

    def _is_there(self) -> bool:
        """Asked at every step: False where the file system fails for a moment, of which ``Path.exists`` raises most errors."""
        return self.file is not None and os.path.exists(self.file)

    def _of_a_job(self) -> str | None:
        """The id in a stop file that a job's script wrote; None where there is no file, or it is a user's."""
        with contextlib.suppress(OSError):
            text = self.file.read_text(errors="replace").strip() if self.file is not None else ""
            return text if re.fullmatch(r"\d+\.\d+", text) else None
        return None

    def _remove(self) -> None:
        if self.file is not None:
            self.file.unlink(missing_ok=True)

    def held(self) -> bool:
        """Whether there is a user's stop file: nothing is to be trained."""
        return self._is_there() and self._of_a_job() is None

    def __call__(self) -> bool:
        if self.reason is None and self._is_there():
            self.reason = f"the file {self.file}"
        return self.reason is not None

    def done(self) -> None:
        """The request was obeyed: a job's file is taken away, so that the next start is not stopped by it."""
        if self._of_a_job() is not None:
            self._remove()

    def close(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
