"""While a run trains, this module reports what the run does, which rank is slow and how
time is spent, and listens for requests to stop.
"""

import faulthandler
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median_low
from types import FrameType
from typing import Any

import torch
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_disp.config.types import JobConfig
from titan_disp.dispersion.autograd import objects_of_ranks, of_ranks
from titan_disp.run.folder import RunFolder
from titan_disp.run.lock import job_id, process_fields
from titan_disp.run.reader import HEARTBEAT, STOP
from titan_disp.run.storage import may_pass, patiently

# what the time of a run is spent on
ACTIVITIES = ("start_up", "steps", "checkpoints", "condensation", "validation")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
NOTICED = 1.2  # a rank is slow if its own time is more than this times the median
# Seconds between two writes of the same file. Steps may be shorter, and the file system
# may be shared.
PAUSE = 1.0


class Aside:
    """Call short functions that use files. They run in a thread, so that a slow file
    system can neither delay a step nor end it.

    Each of ``errands`` is called after a ``wake``, and at least once per ``PAUSE``
    seconds.
    """

    def __init__(self, *errands: Callable[[], object]) -> None:
        self.errands = [*errands]
        self._woken = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Make the thread call the errands now. If there is no thread, or an error has
        ended it, start one.
        """
        self._woken.set()
        if self._thread is not None and self._thread.is_alive():
            return
        if self._thread is not None:
            logger.warning(
                "the thread that writes heartbeat.json and looks for the file stop "
                "has died: a new thread starts"
            )
        self._thread = threading.Thread(
            target=self._run, name="titan-disp aside", daemon=True
        )
        # If the machine can start no more threads, the supervisor notices the silence.
        with suppress(RuntimeError):
            self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            self._woken.wait(PAUSE)
            self._woken.clear()
            for errand in self.errands:
                errand()

    def close(self) -> None:
        """End the thread, but do not wait long for it, because its file system may
        hang.
        """
        self._closing = True
        if self._thread is not None and self._thread.is_alive():
            self._woken.set()
            self._thread.join(5 * PAUSE)


class Heartbeat:
    """Report what the run is doing and how long this may take, and arm the faulthandler.

    The run calls ``begin`` where it makes progress. A thread calls ``write``, which
    writes only what ``begin`` has announced since the last write. The run is therefore
    silent if it hangs, and also if the thread hangs.

    A stall in which no rank waits for another, as when a file system hangs, has no
    time-out. slurm/supervise.py therefore ends a run that is silent for longer than
    RUN/heartbeat.json allows. At that moment, the faulthandler writes the stack traces
    of every rank's threads into the rank's log, to show which rank hangs.
    """

    def __init__(self, run: Path | None, job_config: JobConfig) -> None:
        self.file = run / HEARTBEAT if run is not None else None
        self.comm = job_config.comm
        self.guard = job_config.guard
        # seconds of the slowest step so far, without the first one, which compiles
        self.slowest = 0.0
        self._steps = 0
        self._doing = ""
        self._said = -PAUSE
        self._began = time.monotonic()
        self.waits_for = ""  # which rank the others wait for, set by ``Peers``
        self._note: dict[str, Any] = {}
        self._noted = self._began
        self._content: dict[str, Any] = {}
        self._written = self._content

    def allowed(self, doing: str) -> float:
        """Return the seconds allowed until the next heartbeat."""
        if doing == "save":
            return self.guard.save_seconds + self.guard.silence_seconds
        # TorchTitan's first time-out holds until the first step has ended.
        stepped = doing == "step" and self._steps
        timeout = (
            self.comm.train_timeout_seconds
            if stepped
            else self.comm.init_timeout_seconds
        )
        # Twice the time-out, because another rank may run into its time-out before the
        # time-out of this rank begins.
        return 2 * max(timeout, self.slowest) + self.guard.silence_seconds

    def step(self, step: int) -> None:
        """Note that the announced step has ended, and announce the next one."""
        if self._steps:
            self.slowest = max(self.slowest, time.monotonic() - self._began)
        self._steps += 1
        self.begin("step", step)

    def begin(self, doing: str, step: int) -> None:
        """Announce something that may take long: start, step, save, validation or
        condensation.
        """
        self._began = time.monotonic()
        self.go_on(doing, step)
        if doing == self._doing and self._began - self._said < PAUSE:
            return
        self._doing = doing
        self._said = self._began
        allowed = min(self.allowed(doing), 1e8)  # faulthandler takes no infinite time
        # file 2 is stderr, which is this rank's log
        faulthandler.dump_traceback_later(allowed, file=2)
        self._content = {
            "start": job_id(),
            "step": step,
            "doing": doing,
            "allowed_seconds": allowed,
            "time": time.time(),
        }

    def go_on(self, doing: str, step: int) -> None:
        """Note what this rank does now, for other ranks."""
        self._noted = time.monotonic()
        turn = self._note.get("turn", 0) + 1
        self._note = {"turn": turn, "step": step, "doing": doing}

    def note(self) -> dict[str, Any]:
        """Return what this rank does: how many things it has noted so far (``turn``),
        the last one (``doing``), its ``step``, and the ``seconds`` since then.
        """
        return {**self._note, "seconds": time.monotonic() - self._noted}

    def write(self) -> None:
        """Write what ``begin`` has announced since the last call."""
        content = self._content
        file = self.file
        if file is None or not content:
            return
        if self.waits_for:
            content = {**content, "waits_for": self.waits_for}
        if content == self._written:
            return
        # A full disk must not end the thread. The next call tries again. If all calls
        # fail, the supervisor will notice the silence.
        with suppress(OSError):
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(content))
            os.replace(partial, file)
            self._written = content

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self.file is not None:
            with suppress(OSError):
                self.file.unlink(missing_ok=True)


def straggler(seconds: Sequence[float], hosts: Sequence[str]) -> dict[str, Any] | None:
    """Return the slowest rank, its host, its seconds and the median of all ranks. Return
    None if no rank takes more than ``NOTICED`` times the median.

    ``seconds``: the own time of each rank, per step.
    """
    # the smaller of two middle values, so that of two ranks, one can be slow
    median = median_low(seconds)
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    if seconds[slowest] <= NOTICED * median:
        return None
    return {
        "rank": slowest,
        "host": hosts[slowest],
        "seconds": seconds[slowest],
        "median": median,
    }


class Stragglers:
    """Find the rank for which the others wait.

    In every step, ranks first meet where TorchTitan sums the valid tokens of all ranks
    and reads the sum on the host. From the arrival of its last microbatch to its first
    forward, a rank waits for the slowest rank. The rest of a step's wall time is the
    rank's *own* time. The measurement does not wait for the GPU.

    This class finds slow hosts. It finds neither a slow GPU (docs/resilience.md), nor a
    difference between ranks of one tensor- or context-parallel group.
    """

    def __init__(self) -> None:
        # None until the first comparison, because a run's first step compiles
        self._since: float | None = None
        self._waited = 0.0
        self._steps = 0
        self._arrived: float | None = None
        self._hosts: list[str] = []

    def arrived(self) -> None:
        """Note that a microbatch has arrived.

        With a step's last one, this rank is ready to meet the others.
        """
        self._arrived = time.perf_counter()

    def met(self) -> None:
        """Note that a forward begins.

        At the first one of a step, all ranks have met.
        """
        if self._arrived is not None:
            self._waited += time.perf_counter() - self._arrived
            self._steps += 1
            self._arrived = None

    def own_seconds(self) -> float:
        """Return the rank's own seconds per step since the last call; 0 at the first
        call.
        """
        end = time.perf_counter()
        seconds = 0.0
        if self._since is not None:
            seconds = (end - self._since - self._waited) / max(1, self._steps)
        self._since = end
        self._waited = 0.0
        self._steps = 0
        return seconds

    def find(self) -> dict[str, Any] | None:
        """Return the ``straggler`` of all ranks since the last call, or None. A
        collective call.
        """
        if not self._hosts:
            self._hosts = objects_of_ranks(socket.gethostname())
        seconds = torch.tensor([self.own_seconds()], device=utils.device_type)
        seconds = of_ranks(seconds).flatten()
        return straggler(seconds.tolist(), self._hosts)


def process_began() -> float:
    """Return when this process started, in seconds since the epoch. Outside of Linux,
    return the present time.
    """
    with suppress(OSError, ValueError, StopIteration, IndexError):
        ticks = int(process_fields("self")[19])
        boot = next(
            int(line.split()[1])
            for line in Path("/proc/stat").read_text().splitlines()
            if "btime" in line
        )
        return min(time.time(), boot + ticks / os.sysconf("SC_CLK_TCK"))
    return time.time()


def allocation_began(environment: Mapping[str, str] = os.environ) -> float:
    """Return when SLURM started or requeued the job, in seconds since the epoch.
    Without SLURM, return when this process started.
    """
    with suppress(KeyError, ValueError):
        return min(time.time(), float(environment["SLURM_JOB_START_TIME"]))
    return process_began()


class Clock:
    """Count the seconds since the allocation began, by activity, for ``spent`` in
    metrics.jsonl and events.jsonl.

    The first step, most of which is compilation, counts as start-up. Time outside of
    ``during`` counts as start-up before the first step, and is not counted after it.
    Setting the machine's clock has no effect.
    """

    def __init__(self, began: float) -> None:
        self.began = began
        self._offset = time.time() - time.monotonic()
        self._seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self._running: tuple[str, float] | None = None
        self._stepped = False
        self._step_seconds = 0.0

    def _now(self) -> float:
        return self._offset + time.monotonic()

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Count the time in this context as ``activity``. Contexts cannot be nested."""
        self._running = (activity, self._now())
        try:
            yield
        finally:
            self._seconds = self.spent()
            self._step_seconds = self.step_seconds()
            self._running = None
            self._stepped = self._stepped or activity == "steps"

    def spent(self) -> dict[str, float]:
        """Return {activity: seconds} up to now, including the context that is
        running.
        """
        seconds = dict(self._seconds)
        end = self._now()
        activity, since = self._running or ("", end)
        if activity and (self._stepped or activity != "steps"):
            seconds[activity] += end - since
        # all time up to now that no other activity has
        if not self._stepped and activity in ("", "steps"):
            seconds["start_up"] = (
                end - self.began - sum(s for k, s in seconds.items() if k != "start_up")
            )
        return seconds

    def step_seconds(self) -> float:
        """Return the seconds of all steps up to now, including the first step, and the
        step that is running.
        """
        activity, since = self._running or ("", 0.0)
        if activity != "steps":
            return self._step_seconds
        return self._step_seconds + self._now() - since

    def rounded(self) -> dict[str, float]:
        """Return ``spent`` rounded to milliseconds, for a line of JSON."""
        spent = self.spent()
        return {activity: round(seconds, 3) for activity, seconds in spent.items()}


class Start:
    """What a start of a run reports: events, heartbeats, and how its time is spent. Only
    rank 0 has the run folder.
    """

    run_folder: RunFolder | None = None
    clock: Clock
    heartbeat: Heartbeat
    aside: Aside

    def event(self, name: str, step: int, **details: Any) -> None:
        """Add a line to events.jsonl."""
        if self.run_folder is not None:
            self.run_folder.event(name, step, **details)

    def taken_by(self) -> str | None:
        """Return a description of the start that has taken the run folder from this
        one, or None.
        """
        if self.run_folder is None:
            return None
        other = self.run_folder.taken_by()
        if other:
            self.heartbeat.file = None  # the file is the other start's now
        return other

    def owns_folder(self) -> bool:
        """Return whether the run folder is certainly this start's."""
        return self.run_folder is not None and self.run_folder.owned

    def announce(self, doing: str, step: int) -> None:
        """Report in heartbeat.json what begins now."""
        self.heartbeat.begin(doing, step)
        if self.run_folder is not None:
            self.aside.wake()

    @contextmanager
    def busy(self, doing: str, step: int) -> Iterator[None]:
        """Announce a save, validation or condensation, and count its time."""
        self.announce(doing, step)
        with self.clock.during("checkpoints" if doing == "save" else doing):
            yield


class StopRequest:
    """A request to stop, as this rank sees it: a signal, a file in the run folder, or
    the end of the process that launched this rank.

    SLURM signals a job some minutes before its end. The batch script cannot pass the
    signal on through torchrun (USR1 kills torchrun's agent), so it writes the name of
    the start to the file RUN/stop. A user may create this file, too.
    """

    def __init__(self, run: Path | None) -> None:
        """Listen for signals, and remove a stop file that an earlier job left.

        ``run`` is the run folder on rank 0, and None on other ranks.
        """
        self.file = run / STOP if run is not None else None
        self.reason: str | None = None  # why this rank was asked to stop
        self._signalled = False
        self._parent = os.getppid()
        if patiently(self._of_a_job) not in (None, job_id()):
            logger.info(f"removed {self.file}, which an earlier job left")
            self.done()
        self._previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._heard) for number in SIGNALS
            }

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name
        self._signalled = True

    def _is_there(self) -> bool:
        # If the file system fails, this returns False. ``Path.exists`` would raise most
        # errors.
        return self.file is not None and os.path.exists(self.file)

    def _of_a_job(self) -> str | None:
        """Return the id in a stop file that a job's script wrote, or None for a user's
        file or no file. Raises OSError if the reason may pass.
        """
        if self.file is None:
            return None
        try:
            text = self.file.read_text(errors="replace").strip()
        except OSError as error:
            if may_pass(error):
                raise
            return None
        return text if re.fullmatch(r"\d+\.\d+(\.[0-9a-f]{6})?", text) else None

    def held(self) -> bool:
        """Return whether there is a user's stop file."""
        return self._is_there() and patiently(self._of_a_job) is None

    def __call__(self) -> bool:
        """Look for the file and for torchrun, and return whether this rank was asked to
        stop. If torchrun has been killed, nobody else could stop the rank.
        """
        # After an error, the next call looks again.
        with suppress(OSError):
            if self.reason is None and self._is_there():
                # set before the reason, for which another thread waits
                self._signalled = self._of_a_job() is not None
                self.reason = f"the file {self.file}"
        has_launcher = "TORCHELASTIC_RUN_ID" in os.environ
        if self.reason is None and has_launcher and os.getppid() != self._parent:
            self._signalled = True
            self.reason = f"the launcher, process {self._parent}, has been killed"
        return self.asked()

    def asked(self) -> bool:
        """Return whether this rank was asked to stop, without looking for the file: by a
        signal, or by a file that an earlier ``__call__`` has seen.
        """
        return self.reason is not None

    def signalled(self) -> bool:
        """Return whether the request was a signal: to this process, or to a job, whose
        stop file passes the signal on. If so, the job may continue the run.
        """
        return self._signalled

    def done(self) -> None:
        """Remove a job's stop file, so that it does not stop the next start."""
        if self.file is not None and patiently(self._of_a_job) is not None:
            patiently(partial(self.file.unlink, missing_ok=True))

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
