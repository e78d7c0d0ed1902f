"""A signal or a file in the run folder asks a run to stop.

SLURM signals a job some minutes before its end. The batch script cannot pass the signal on through torchrun (USR1 kills
torchrun's agent), so it writes its id, JOB.RESTART, to the file RUN/stop. A rank may also be signalled directly. As
soon as one rank knows of the request, the training loop makes all ranks agree, save and end.

A user may also create RUN/stop. That file stays until the user removes it, and until then no start of the run trains.
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
    """Hold this rank's view of the request to stop.

    Attributes:
        reason: why this rank was asked to stop; None if it was not asked.
    """

    def __init__(self, run: Path | None) -> None:
        """Listen for SIGTERM and SIGUSR1, and remove a stop file that an earlier job left.

        Args:
            run: folder where this rank looks for the stop file; None if it does not look.
        """
        self.file = run / STOP_FILE if run is not None else None
        self.reason: str | None = None
        if self._of_a_job() not in (None, job_id()):
            logger.info(f"removed {self.file}, which an earlier job left")
            self._remove()
        self._previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._heard) for number in SIGNALS}

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name

    def _is_there(self) -> bool:
        """Return whether the file exists. This runs at every step, so an error of the file system counts as False.

        ``Path.exists`` would raise most of these errors.
        """
        return self.file is not None and os.path.exists(self.file)

    def _of_a_job(self) -> str | None:
        """Return the id in a stop file that a job's script wrote, or None for a user's file or no file."""
        with contextlib.suppress(OSError):
            text = self.file.read_text(errors="replace").strip() if self.file is not None else ""
            return text if re.fullmatch(r"\d+\.\d+", text) else None
        return None

    def _remove(self) -> None:
        if self.file is not None:
            self.file.unlink(missing_ok=True)

    def held(self) -> bool:
        """Return whether there is a user's stop file. If so, no start of the run trains."""
        return self._is_there() and self._of_a_job() is None

    def __call__(self) -> bool:
        """Return whether this rank was asked to stop."""
        if self.reason is None and self._is_there():
            self.reason = f"the file {self.file}"
        return self.reason is not None

    def done(self) -> None:
        """Remove a job's stop file after the run has stopped, so that it does not stop the next start."""
        if self._of_a_job() is not None:
            self._remove()

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
