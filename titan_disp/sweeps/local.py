"""Train a sweep's points on this machine, some at a time, each in processes of its own with one core a rank.

A point that is finished is skipped, one that was cut off goes on from its newest checkpoint, and one without a checkpoint begins
anew in the same run folder: exactly what the same ``titan-disp train`` would do, so that no checkpoint is ever deleted here.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Literal

import torch

from titan_disp.errors import ConfigError, InUseError
from titan_disp.report.state import duration
from titan_disp.run.folder import lock_folder, write_json
from titan_disp.run.integrity import checkpoints
from titan_disp.sweeps.definition import Sweep
from titan_disp.sweeps.folder import Prepared, prepare
from titan_disp.sweeps.state import FAILED, state, step_of

LOG = "sweep.log"
LOCK = ".point.lock"  # beside the run's own, which the run takes
PAUSE = 0.2  # seconds between looks at the processes
REPORT = 60.0  # seconds between lines that say how far the sweep is
IN_USE = 60.0  # seconds that points which other processes use are waited for, once nothing else is left to do: they may be ending
GRACE = 300.0  # seconds for the step under way and its save, after which processes are killed
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)  # loaded here: a child that has not called exec yet may load nothing


@dataclass(frozen=True)
class Result:
    """What this call has made of a point.

    Attributes:
        outcome: finished (now or before); failed; stopped before its end, without an error; in use by another process.
        detail: a few words; of a failed one its first error.
    """

    name: str
    outcome: Literal["finished", "failed", "stopped", "in use"]
    detail: str


def run(sweep: Sweep, jobs: int = 1, nproc: int = 1, module: str = "titan_disp.train") -> list[Result]:
    """Train all points that are not finished, ``jobs`` at a time. Says on the console what it does and how long it will take.

    SIGINT, SIGTERM and SIGHUP stop it: the points that are training save and end, and a second signal kills them.

    Args:
        nproc: ranks of each point.
        module: run by Python with the point's config and overrides.

    Returns:
        One result a point, in the sweep's order.

    Raises:
        ConfigError: a config that cannot work, before anything runs.
    """
    for name, value in (("jobs", jobs), ("nproc", nproc)):
        if value < 1:
            raise ConfigError(f"--{name} is {value}, expected at least 1")
    prepared = prepare(sweep, nproc)
    results: dict[str, Result] = {}
    todo = []
    for one in prepared:
        word, detail = state(one.point.folder)
        if word == "finished":
            results[one.point.name] = Result(one.point.name, "finished", detail)
        else:
            todo.append(one)
    _say(
        f"{len(prepared)} points in {sweep.folder}: {len(results)} are finished, {len(todo)} to train, {jobs} at a time"
    )
    with _Runner(todo, jobs, nproc, module) as runner:
        results |= runner.run()
    return [results[one.point.name] for one in prepared]


def summary(results: Sequence[Result]) -> list[str]:
    """How many points ended how, and each one that is not finished."""
    outcomes = [result.outcome for result in results]
    counts = ", ".join(f"{outcomes.count(word)} {word}" for word in dict.fromkeys(outcomes))
    return [counts, *(f"  {one.name}: {one.outcome}: {one.detail}" for one in results if one.outcome != "finished")]


def time_left(elapsed: float, done: float, left: float) -> float | None:
    """Seconds, at the pace so far. None before there is one.

    Args:
        elapsed: seconds since the sweep began. done, left: steps of all points.
    """
    return elapsed * left / done if done > 0 else None


@dataclass
class _Training:
    """A point whose processes run."""

    prepared: Prepared
    process: subprocess.Popen[bytes]
    lock: IO[str]
    slot: int
    began: float
    first_step: int
    log_begin: int


class _Runner:
    def __init__(self, todo: Sequence[Prepared], jobs: int, nproc: int, module: str) -> None:
        self.todo, self.jobs, self.nproc, self.module = deque(todo), jobs, nproc, module
        self.free = list(range(jobs))
        self.training: list[_Training] = []
        self.in_use: dict[str, str] = {}  # by whom, of points that are in todo still
        self.results: dict[str, Result] = {}
        self.steps_done = 0  # by points that have ended
        self.signals = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "_Runner":
        with contextlib.suppress(ValueError):  # not in the main thread: whoever has started it hears signals
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                    self._previous[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *exception: object) -> None:
        for one in self.training:  # only after an exception
            _kill(one)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _heard(self, number: int, frame: object) -> None:
        self.signals += 1

    def run(self) -> dict[str, Result]:
        began = reported = time.monotonic()
        stopped_at = waiting_since = None
        while self.training or (self.todo and not self.signals):
            if self.signals and stopped_at is None:
                stopped_at = time.monotonic()
                _say(f"asked to stop: {len(self.training)} points save and end; once more to kill them")
                for one in self.training:
                    one.process.terminate()
            if self.training and stopped_at is not None and (self.signals > 1 or time.monotonic() - stopped_at > GRACE):
                for one in self.training:
                    _kill(one)
            ended = [one for one in self.training if one.process.poll() is not None]
            for one in ended:
                self._end(one)
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
        for left in self.todo:
            name = left.point.name
            holder = self.in_use.get(name)
            self.results[name] = Result(name, "in use", holder) if holder else Result(name, "stopped", "not begun")
        return self.results

    def _fill(self) -> bool:
        """Begin points while there is room; whether any was. Those that are in use go to the end of the line."""
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
        """Raises: InUseError: another sweep, or another job, has the point."""
        name, folder = one.point.name, one.point.folder
        lock = lock_folder(folder, LOCK)
        try:
            lock_folder(folder).close()  # the run's own: a job of a cluster, or what is left of a sweep that was killed
        except InUseError:
            lock.close()
            raise
        self.in_use.pop(name, None)
        word, detail = state(folder)
        if word == "finished":  # by another call, since this one looked
            lock.close()
            self.results[name] = Result(name, "finished", detail)
            return
        lock.truncate(0)
        lock.write(f"titan-disp sweep, pid {os.getpid()}")
        lock.flush()
        (folder / FAILED).unlink(missing_ok=True)
        slot = self.free.pop(0)
        with open(folder / LOG, "ab") as log:
            log.write(
                f"titan-disp sweep: {datetime.now(timezone.utc).isoformat(timespec='seconds')}: {name}\n".encode()
            )
            log.flush()
            begin = log.tell()
            process = subprocess.Popen(
                [sys.executable, "-u", *self._command(one)],
                env=self._environment(slot),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which asks the others to save
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        steps = checkpoints(folder / one.checkpoints)
        first = steps[-1] if steps else 0
        _say(f"{name}: {'from step ' + str(first) if first else 'from the start'}; log: {folder / LOG}")
        self.training.append(_Training(one, process, lock, slot, time.time(), first, begin))

    def _command(self, one: Prepared) -> list[str]:
        config, *overrides = one.argv
        arguments = ["-m", self.module, "--job.config_file", config, *overrides]
        if self.nproc == 1:  # torchrun would take a second process and its time
            return arguments
        return [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={self.nproc}",
            "--max-restarts=0",
            *arguments,
        ]

    def _environment(self, slot: int) -> dict[str, str]:
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **_devices(slot, self.nproc)}
        environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(int(GRACE))
        if self.nproc == 1:  # as torchrun would set it. Port 0: any that is free
            environment |= {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "0",
            }
            environment["LOCAL_WORLD_SIZE"] = str(
                self.jobs
            )  # the loader divides the machine's cores by it, for its threads
        return environment

    def _end(self, one: _Training) -> None:
        self.training.remove(one)
        self.free.append(one.slot)
        name, folder, status = one.prepared.point.name, one.prepared.point.folder, one.process.returncode
        self.steps_done += self._steps_since(one)
        word, detail = state(folder)
        if word == "finished":
            self.results[name] = Result(name, "finished", detail)
        elif self.signals or status == 0:  # asked to stop here, or by RUN/stop
            self.results[name] = Result(name, "stopped", detail)
        else:
            reason = f"{first_error(folder / LOG, one.log_begin)} ({_status(status)}; {folder / LOG})"
            write_json(folder / FAILED, {"status": status, "error": reason})
            self.results[name] = Result(name, "failed", reason)
        one.lock.close()
        result = self.results[name]
        _say(f"{name}: {result.outcome}: {result.detail}")

    def _steps_since(self, one: _Training) -> int:
        """Steps that a point has done in this call."""
        if state(one.prepared.point.folder)[0] == "finished":
            return one.prepared.steps - one.first_step
        return max(0, (step_of(one.prepared.point.folder, one.began) or 0) - one.first_step)

    def _progress(self, elapsed: float) -> str:
        under_way = {one.prepared.point.name: self._steps_since(one) for one in self.training}
        left = sum(one.prepared.steps - one.first_step - under_way[one.prepared.point.name] for one in self.training)
        left += sum(one.steps for one in self.todo)
        seconds = time_left(elapsed, self.steps_done + sum(under_way.values()), left)
        outcomes = [result.outcome for result in self.results.values()]
        counts = [f"{outcomes.count(word)} {word}" for word in dict.fromkeys(outcomes)]
        counts += [f"{len(self.training)} training", f"{len(self.todo)} waiting"]
        return ", ".join(counts) + (f"; about {duration(seconds)} left" if seconds else "")


def first_error(log: Path, begin: int) -> str:
    """What a start of a point said went wrong: our own error line, else the last exception, else its last lines.

    Args:
        begin: where its output begins in the log.
    """
    with open(log, "rb") as file:
        file.seek(begin)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    for pattern in (
        r"titan-disp: error: (.*)",
        r"(?:\[rank\d+\]:? ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)",
    ):
        found = [
            matched.group(1)
            for line in lines
            if "ChildFailedError" not in line and (matched := re.match(pattern, line))
        ]
        if found:
            return found[0] if pattern.startswith("titan-disp") else found[-1]
    return " / ".join(lines[-3:]) or "it said nothing"


def _status(status: int) -> str:
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return f"status {status}"


def _devices(slot: int, nproc: int) -> Mapping[str, str]:
    """GPUs are dealt to the points in turn. Empty where there are none."""
    count = torch.accelerator.device_count()
    if not count:
        return {}
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = names if len(names) == count else [str(i) for i in range(count)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(names[(slot * nproc + i) % count] for i in range(nproc)))}


def _end_with_parent() -> None:
    """In the child before it runs: SIGTERM when the sweep is killed, after which it saves and ends."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from _descendants(int(child))
            yield int(child)


def _kill(one: _Training) -> None:
    """torchrun's ranks are in sessions of their own, and would outlive it."""
    for pid in [*_descendants(one.process.pid), one.process.pid]:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    one.process.wait()


def _say(text: str) -> None:
    print(f"titan-disp sweep: {datetime.now().strftime('%H:%M:%S')} {text}", flush=True)
