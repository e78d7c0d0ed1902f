"""This module trains a sweep's points on this machine, some at a time, in separate
processes with one core per rank.

Finished points are skipped. An interrupted point continues from its newest checkpoint.
A point without a checkpoint starts again in the same run folder. ``titan-disp train``
would do the same, so no checkpoint is ever deleted here.
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
# seconds to wait at the end for points that other processes use, because they may be
# ending
IN_USE = 60.0
GRACE = 300.0  # seconds for the current step and its save, before processes are killed
TOLD = "titan-disp: error: "
# An exception's line, of a rank
RAISED = r"(?:\[rank\d+\]:? ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Loaded here, because a child must not load anything before it calls exec
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Result:
    """Hold the result of this call for a point."""

    name: str
    # Finished now or before; stopped early without an error.
    outcome: Literal["finished", "failed", "stopped", "in use"]
    detail: str  # an explanation; for a failed point, its first error


def run(
    sweep: Sweep, jobs: int = 1, nproc: int = 1, module: str = "titan_disp.train"
) -> list[Result]:
    """Train all unfinished points, ``jobs`` at a time, and print progress and the time
    left.

    SIGINT, SIGTERM or SIGHUP stops the sweep: the points in training save and end. A
    second signal kills them.

    Returns one result per point, in the sweep's order. Each point runs ``module`` on
    ``nproc`` ranks. If one config cannot work, ConfigError is raised, and nothing has
    run.
    """
    for name, value in (("jobs", jobs), ("nproc", nproc)):
        if value < 1:
            raise ConfigError(f"--{name} is {value}, expected at least 1")
    prepared = prepare(sweep, nproc)
    states = {one.point.name: state(one.point.folder) for one in prepared}
    results = {
        name: Result(name, "finished", detail)
        for name, (word, detail) in states.items()
        if word == "finished"
    }
    todo = [one for one in prepared if one.point.name not in results]
    every = counted(len(prepared), "point")
    _say(
        f"{every} in {sweep.folder}: {len(results)} finished, {len(todo)} to train, "
        f"{jobs} at a time"
    )
    runner = _Runner(todo, jobs, nproc, module)
    with stop_signals(runner.heard), contextlib.closing(runner):
        results |= runner.run()
    return [results[one.point.name] for one in prepared]


def dry_run(sweep: Sweep, nproc: int = 1) -> int:
    """Check all points as ``run`` does, and print the state of each and the command
    that would train it. Nothing is written. Return the exit status.
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
    """Return lines with the number of points by outcome, and each point that is not
    finished.
    """
    open_ones = [
        f"  {one.name}: {one.outcome}: {one.detail}"
        for one in results
        if one.outcome != "finished"
    ]
    return [", ".join(_counts(results)), *open_ones]


def _counts(results: Iterable[Result]) -> list[str]:
    return [
        f"{count} {word}"
        for word, count in Counter(result.outcome for result in results).items()
    ]


@dataclass
class _Training:
    prepared: Prepared
    process: subprocess.Popen[bytes]
    lock: Lock
    slot: int
    began: float
    first_step: int
    log_begin: int


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
        self.in_use: dict[str, str] = {}  # who uses which point of todo
        self.results: dict[str, Result] = {}
        self.steps_done = 0  # steps of points that have ended
        self.signals = 0

    def close(self) -> None:
        for one in self.training:  # only after an exception
            _kill(one)

    def heard(self, number: int, frame: object) -> None:
        self.signals += 1

    def run(self) -> dict[str, Result]:
        began = reported = time.monotonic()
        stopped_at = waiting_since = None
        while self.training or (self.todo and not self.signals):
            if self.signals and stopped_at is None:
                stopped_at = time.monotonic()
                _say(
                    f"stopping: {counted(len(self.training), 'point')} will save and "
                    "end; a second signal kills them"
                )
                for one in self.training:
                    one.process.terminate()
            if (
                self.training
                and stopped_at is not None
                and (self.signals > 1 or time.monotonic() - stopped_at > GRACE)
            ):
                for one in self.training:
                    _kill(one)
            ended = [one for one in self.training if one.process.poll() is not None]
            for one in ended:
                self._end(one)
            for one in self.training:
                one.lock.renew()
            begun = not self.signals and self._fill()
            now = time.monotonic()
            if ended or now - reported > REPORT:
                reported = now
                _say(self._progress(now - began))
            if self.training or begun:
                waiting_since = None
            elif self.todo:
                waiting_since = waiting_since or now
                if now - waiting_since > IN_USE:
                    break
            time.sleep(PAUSE)
        for waiting in self.todo:
            name = waiting.point.name
            self.results[name] = Result(name, "stopped", "not begun")
            if holder := self.in_use.get(name):
                self.results[name] = Result(name, "in use", holder)
        return self.results

    def _fill(self) -> bool:
        """Start points while there is room, and return whether any started.

        Points in use move to the queue's end.
        """
        begun = False
        for _ in range(len(self.todo)):
            if not self.free:
                break
            one = self.todo.popleft()
            try:
                self._begin(one)
                begun = True
            except InUseError as error:
                if one.point.name not in self.in_use:
                    _say(f"{one.point.name} is in use; it is tried again later")
                self.in_use[one.point.name] = str(error)
                self.todo.append(one)
        return begun

    def _begin(self, one: Prepared) -> None:
        """Start a point, or raise InUseError if another sweep or job uses it."""
        name = one.point.name
        folder = one.point.folder
        lock = Lock(folder, LOCK)
        try:
            # the run's own lock: a SLURM job, or processes of a killed sweep, may hold
            # it
            abandoned(folder / RUN_LOCK)
        except InUseError:
            lock.close()
            raise
        self.in_use.pop(name, None)
        word, detail = state(folder)
        if word == "finished":  # another call finished it meanwhile
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
                [sys.executable, "-u", *self._command(one)],
                env=self._environment(slot),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # so that Ctrl-C reaches only this process, which asks the others to
                # save
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        first = max(checkpoints(folder / one.checkpoints), default=0)
        where = f"step {first}" if first else "the start"
        _say(f"{name}: from {where}; log: {folder / LOG}")
        self.training.append(
            _Training(
                prepared=one,
                process=process,
                lock=lock,
                slot=slot,
                began=time.time(),
                first_step=first,
                log_begin=begin,
            )
        )

    def _command(self, one: Prepared) -> list[str]:
        config, *overrides = one.argv
        arguments = ["-m", self.module, "--job.config_file", config, *overrides]
        if self.nproc == 1:  # torchrun would cost a second process and time
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

    def _end(self, one: _Training) -> None:
        self.training.remove(one)
        self.free.append(one.slot)
        name = one.prepared.point.name
        folder = one.prepared.point.folder
        status = one.process.returncode
        self.steps_done += _steps_done(one)
        word, detail = state(folder)
        if word == "finished":
            self.results[name] = Result(name, "finished", detail)
        # stopped by a signal to the sweep, or by RUN/stop
        elif self.signals or status == 0:
            self.results[name] = Result(name, "stopped", detail)
        else:
            reason = f"{first_error(folder / LOG, one.log_begin)} ({_status(status)}; {folder / LOG})"
            write_json(folder / FAILED, {"status": status, "error": reason})
            self.results[name] = Result(name, "failed", reason)
        one.lock.close()
        result = self.results[name]
        _say(f"{name}: {result.outcome}: {result.detail}")

    def _progress(self, elapsed: float) -> str:
        under_way = sum(map(_steps_done, self.training))
        left = (
            sum(one.prepared.steps - one.first_step for one in self.training)
            - under_way
        )
        left += sum(one.steps for one in self.todo)
        done = self.steps_done + under_way
        # at the speed so far, in steps of all points
        seconds = elapsed * left / done if done else 0.0
        counts = [
            *_counts(self.results.values()),
            f"{len(self.training)} training",
            f"{len(self.todo)} waiting",
        ]
        return ", ".join(counts) + (
            f"; about {duration(seconds)} left" if seconds else ""
        )


def _steps_done(one: _Training) -> int:
    """Return the number of steps that a point has done in this call."""
    if state(one.prepared.point.folder)[0] == "finished":
        return one.prepared.steps - one.first_step
    return max(0, (step_of(one.prepared.point.folder, one.began) or 0) - one.first_step)


def first_error(log: Path, begin: int) -> str:
    """Return the error in a log from byte ``begin`` on: titan-disp's error line, the
    last exception, or the last lines.
    """
    with open(log, "rb") as file:
        file.seek(begin)
        lines = [
            line.strip()
            for line in file.read().decode(errors="replace").splitlines()
            if line.strip()
        ]
    told = [line.removeprefix(TOLD) for line in lines if line.startswith(TOLD)]
    raised = [
        found.group(1)
        for line in lines
        if "ChildFailedError" not in line and (found := re.match(RAISED, line))
    ]
    return next(iter([*told, *raised[::-1]]), " / ".join(lines[-3:]) or "no output")


def _status(status: int) -> str:
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"status {status}"


def _devices(slot: int, nproc: int) -> Mapping[str, str]:
    """Assign GPUs to the points in turn. The result is empty without GPUs."""
    count = torch.accelerator.device_count()
    if not count:
        return {}
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = names if len(names) == count else [str(i) for i in range(count)]
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(
            dict.fromkeys(names[(slot * nproc + i) % count] for i in range(nproc))
        )
    }


def _end_with_parent() -> None:
    """Ask Linux, in the child before exec, for SIGTERM when the sweep is killed: the
    child then saves and ends.
    """
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from _descendants(int(child))
            yield int(child)


def _kill(one: _Training) -> None:
    """Kill a point's processes. torchrun's ranks have their own sessions and would
    outlive it.
    """
    for pid in [*_descendants(one.process.pid), one.process.pid]:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    one.process.wait()


def _say(text: str) -> None:
    print(f"titan-disp sweep: {datetime.now().strftime('%H:%M:%S')} {text}", flush=True)
