"""Trains the points of a sweep on this machine, several at a time, in separate processes
with one core per rank.

Finished points are skipped. An interrupted point continues from its newest checkpoint,
or starts again in the same run folder if there is no checkpoint, as with ``titan-disp
train``. No checkpoint is ever deleted here.
"""

import contextlib
import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import torch

from titan_disp.cluster.launch import stop_signals
from titan_disp.errors import ConfigError, InUseError, counted
from titan_disp.lab.sweeps.definition import Sweep
from titan_disp.lab.sweeps.preparation import FAILED, Prepared, prepare, state, step_of
from titan_disp.run.integrity import checkpoints
from titan_disp.run.lock import Lock, abandoned
from titan_disp.run.reader import LOCK as RUN_LOCK
from titan_disp.run.storage import write_json
from titan_disp.text import duration

LOG = "sweep.log"
LOCK = ".point.lock"  # the run itself takes another lock
PAUSE = 0.2  # seconds between checks of the processes
REPORT = 60.0  # seconds between progress lines
# seconds to wait at the end for points that other processes use, which may be ending
IN_USE = 60.0
GRACE = 300.0  # seconds for the current step and its save, before processes are killed
ERROR_PREFIX = "titan-disp: error: "
# the line of an exception, with the rank that torchrun puts before it
RAISED = r"(?:\[rank\d+\]:? ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Loaded here, because the child must not load a library between fork and exec
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Result:
    """The outcome of a point in this call."""

    name: str
    # "finished" in this call or before; "stopped" early without an error
    outcome: Literal["finished", "failed", "stopped", "in use"]
    detail: str  # explanation; for a failed point, its first error


def run(
    sweep: Sweep, jobs: int = 1, nproc: int = 1, module: str = "titan_disp.train"
) -> list[Result]:
    """Train all unfinished points, and return a result per point, in the sweep's order.

    ``jobs`` points run at a time, each as ``module`` on ``nproc`` ranks. Progress and
    the remaining time are printed. SIGINT, SIGTERM or SIGHUP stops the sweep: the
    points in training save and end. A second signal kills these points.

    Raises ConfigError before any point runs if a config cannot work.
    """
    for name, value in (("jobs", jobs), ("nproc", nproc)):
        if value < 1:
            raise ConfigError(f"--{name} is {value}, expected at least 1")
    prepared = prepare(sweep, nproc)
    results = {}
    todo = []
    for entry in prepared:
        name = entry.point.name
        word, detail = state(entry.point.folder)
        if word == "finished":
            results[name] = Result(name, "finished", detail)
        else:
            todo.append(entry)
    total = counted(len(prepared), "point")
    _say(
        f"{total} in {sweep.folder}: {len(results)} finished, {len(todo)} to train, "
        f"{jobs} at a time"
    )
    runner = _Runner(todo, jobs, nproc, module)
    with stop_signals(runner.heard), contextlib.closing(runner):
        results |= runner.run()
    return [results[entry.point.name] for entry in prepared]


def dry_run(sweep: Sweep, nproc: int = 1) -> int:
    """Check all points like ``run``, print the state of each point and the command that
    would train it, and return the exit status.

    Nothing is written.
    """
    if nproc < 1:
        raise ConfigError(f"--nproc is {nproc}, expected at least 1")
    for point in (prepared.point for prepared in prepare(sweep, nproc, write=False)):
        word, detail = state(point.folder)
        print(f"{point.name}: {word}: {detail}")
        if word != "finished":
            argv = [*point.argv(), "--nproc", str(nproc)]
            print(f"  titan-disp train {shlex.join(argv)}")
    return 0


def summary(results: Sequence[Result]) -> list[str]:
    """Return lines for people: the number of points by outcome, and then each point
    that has not finished.
    """
    unfinished = [
        f"  {result.name}: {result.outcome}: {result.detail}"
        for result in results
        if result.outcome != "finished"
    ]
    return [", ".join(_counts(results)), *unfinished]


def _counts(results: Iterable[Result]) -> list[str]:
    return [
        f"{count} {word}"
        for word, count in Counter(result.outcome for result in results).items()
    ]


@dataclass
class _Training:
    """A point whose process runs."""

    prepared: Prepared
    process: subprocess.Popen[bytes]
    lock: Lock
    slot: int  # 0 to jobs − 1; determines the GPUs
    began: float  # seconds since the epoch
    first_step: int  # step of the checkpoint that the point started from, or 0
    log_begin: int  # bytes of the log before this start


class _Runner:
    def __init__(
        self, todo: Sequence[Prepared], jobs: int, nproc: int, module: str
    ) -> None:
        self.todo = deque(todo)
        self.jobs = jobs
        self.nproc = nproc
        self.module = module
        self.free = list(range(jobs))
        self.training: list[_Training] = []
        self.in_use: dict[str, str] = {}  # the user of each point in use, as text
        self.results: dict[str, Result] = {}
        self.steps_done = 0  # steps of points that have ended
        self.signals = 0

    def close(self) -> None:
        """Kill the processes that still run. Without an exception, there are none."""
        for training in self.training:
            _kill(training)

    def heard(self, number: int, frame: object) -> None:
        """Count a signal. ``run`` acts on the count."""
        self.signals += 1

    def run(self) -> dict[str, Result]:
        """Return the result of each point of ``todo``, by name, after training."""
        began = reported = time.monotonic()
        stopped_at = waiting_since = None
        while self.training or (self.todo and not self.signals):
            if self.signals and stopped_at is None:
                stopped_at = time.monotonic()
                _say(
                    f"stopping: {counted(len(self.training), 'point')} will save and "
                    "end; a second signal kills them"
                )
                for training in self.training:
                    training.process.terminate()
            if stopped_at is not None:
                grace_is_over = time.monotonic() - stopped_at > GRACE
                if self.signals > 1 or grace_is_over:
                    for training in self.training:
                        _kill(training)
            ended = [
                training
                for training in self.training
                if training.process.poll() is not None
            ]
            for training in ended:
                self._end(training)
            for training in self.training:
                training.lock.renew()
            begun = not self.signals and self._fill()
            seconds = time.monotonic()
            if ended or seconds - reported > REPORT:
                reported = seconds
                _say(self._progress(seconds - began))
            if self.training or begun:
                waiting_since = None
            elif self.todo:
                waiting_since = waiting_since or seconds
                if seconds - waiting_since > IN_USE:
                    break
            time.sleep(PAUSE)
        for waiting in self.todo:
            name = waiting.point.name
            self.results[name] = Result(name, "stopped", "not begun")
            if holder := self.in_use.get(name):
                self.results[name] = Result(name, "in use", holder)
        return self.results

    def _fill(self) -> bool:
        """Start points while slots are free, and return whether a point started.

        Points that another process uses move to the end of the queue.
        """
        begun = False
        for _ in range(len(self.todo)):
            if not self.free:
                break
            prepared = self.todo.popleft()
            try:
                self._begin(prepared)
                begun = True
            except InUseError as error:
                if prepared.point.name not in self.in_use:
                    _say(f"{prepared.point.name} is in use; it is tried again later")
                self.in_use[prepared.point.name] = str(error)
                self.todo.append(prepared)
        return begun

    def _begin(self, prepared: Prepared) -> None:
        """Start a point, or raise InUseError if another sweep or job uses it."""
        name = prepared.point.name
        folder = prepared.point.folder
        lock = Lock(folder, LOCK)
        try:
            # A SLURM job, or processes of a sweep that was killed, may hold the run's lock.
            abandoned(folder / RUN_LOCK)
        except InUseError:
            lock.close()
            raise
        self.in_use.pop(name, None)
        word, detail = state(folder)
        if word == "finished":  # another call has finished the point in the meantime
            lock.close()
            self.results[name] = Result(name, "finished", detail)
            return
        (folder / FAILED).unlink(missing_ok=True)
        slot = self.free.pop(0)
        began = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with open(folder / LOG, "ab") as log:
            log.write(f"titan-disp sweep: {began}: {name}\n".encode())
            log.flush()
            begin = log.tell()
            process = subprocess.Popen(
                [sys.executable, "-u", *self._command(prepared)],
                env=self._environment(slot),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches only this process, which then asks the points to save.
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        first = max(checkpoints(folder / prepared.checkpoints), default=0)
        start = "the start"
        if first:
            start = f"step {first}"
        _say(f"{name}: from {start}; log: {folder / LOG}")
        self.training.append(
            _Training(
                prepared=prepared,
                process=process,
                lock=lock,
                slot=slot,
                began=time.time(),
                first_step=first,
                log_begin=begin,
            )
        )

    def _command(self, prepared: Prepared) -> list[str]:
        config, *overrides = prepared.argv
        arguments = ["-m", self.module, "--job.config_file", config, *overrides]
        if self.nproc == 1:  # torchrun would be a second process, and start slowly
            return arguments
        torchrun = [
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={self.nproc}",
            "--max-restarts=0",
        ]
        return ["-m", *torchrun, *arguments]

    def _environment(self, slot: int) -> dict[str, str]:
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            **_devices(slot, self.nproc),
        }
        environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(int(GRACE))
        if self.nproc == 1:  # torchrun would set these; port 0 means any free port
            environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
            # The loader divides the machine's cores by this number to choose its
            # threads.
            environment["LOCAL_WORLD_SIZE"] = str(self.jobs)
        return environment

    def _end(self, training: _Training) -> None:
        self.training.remove(training)
        self.free.append(training.slot)
        name = training.prepared.point.name
        folder = training.prepared.point.folder
        status = training.process.returncode
        self.steps_done += _steps_done(training)
        word, detail = state(folder)
        if word == "finished":
            self.results[name] = Result(name, "finished", detail)
        # stopped by a signal to the sweep, or by RUN/stop
        elif self.signals or status == 0:
            self.results[name] = Result(name, "stopped", detail)
        else:
            error = first_error(folder / LOG, training.log_begin)
            reason = f"{error} ({_status(status)}; {folder / LOG})"
            write_json(folder / FAILED, {"status": status, "error": reason})
            self.results[name] = Result(name, "failed", reason)
        training.lock.close()
        result = self.results[name]
        _say(f"{name}: {result.outcome}: {result.detail}")

    def _progress(self, elapsed: float) -> str:
        """Return a line with the number of points in each state and the remaining time.

        ``elapsed`` are the seconds since the start. The remaining time assumes the
        speed so far, in steps of all points.
        """
        steps_in_progress = sum(map(_steps_done, self.training))
        remaining = sum(prepared.steps for prepared in self.todo) - steps_in_progress
        for training in self.training:
            remaining += training.prepared.steps - training.first_step
        done = self.steps_done + steps_in_progress
        counts = [
            *_counts(self.results.values()),
            f"{len(self.training)} training",
            f"{len(self.todo)} waiting",
        ]
        line = ", ".join(counts)
        if done and remaining:
            line += f"; about {duration(elapsed * remaining / done)} left"
        return line


def _steps_done(training: _Training) -> int:
    """Return the number of steps that a point has done in this call."""
    folder = training.prepared.point.folder
    if state(folder)[0] == "finished":
        return training.prepared.steps - training.first_step
    step = step_of(folder, training.began) or 0
    return max(0, step - training.first_step)


def first_error(log: Path, begin: int) -> str:
    """Return the error in a log after its first ``begin`` bytes: titan-disp's error
    line, or else the last exception, or else the last lines.
    """
    with open(log, "rb") as file:
        file.seek(begin)
        lines = [
            line.strip()
            for line in file.read().decode(errors="replace").splitlines()
            if line.strip()
        ]
    for line in lines:
        if line.startswith(ERROR_PREFIX):
            return line.removeprefix(ERROR_PREFIX)
    for line in reversed(lines):
        exception = re.match(RAISED, line)
        if exception and "ChildFailedError" not in line:
            return exception.group(1)
    return " / ".join(lines[-3:]) or "no output"


def _status(status: int) -> str:
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"status {status}"


def _devices(slot: int, nproc: int) -> Mapping[str, str]:
    """Return the environment that assigns ``nproc`` GPUs to a slot; {} without GPUs."""
    count = torch.accelerator.device_count()
    if not count:
        return {}
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(names) != count:
        names = [str(i) for i in range(count)]
    gpus = dict.fromkeys(names[(slot * nproc + i) % count] for i in range(nproc))
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def _end_with_parent() -> None:
    """Ask Linux to send SIGTERM to this process when the sweep is killed.

    This function runs in the child before exec. On SIGTERM, the training saves and
    ends.
    """
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _descendants(pid: int) -> Iterator[int]:
    """Yield the ids of all descendants of a process, each after its own children."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from _descendants(int(child))
            yield int(child)


def _kill(training: _Training) -> None:
    """Kill all processes of a point.

    The ranks of torchrun have sessions of their own, and would outlive torchrun.
    """
    pid = training.process.pid
    for process_id in [*_descendants(pid), pid]:
        with contextlib.suppress(OSError):
            os.kill(process_id, signal.SIGKILL)
    training.process.wait()


def _say(text: str) -> None:
    print(f"titan-disp sweep: {datetime.now().strftime('%H:%M:%S')} {text}", flush=True)
