"""The lock of a run's folder is a file that only one start can create. The start deletes
it at its end. docs/run_folder.md lists the fields of the file.

The operating system's file locks are not used. Some network file systems have none,
others apply locks within one node only, and a forked process would keep holding a lock.

A killed start leaves its lock behind. Another start takes the lock over

- if both starts run on the same machine, and the process that held the lock is dead;
- else if the holder was an earlier start of the same SLURM job, which SLURM has ended;
- else if nobody renews the lock while it is watched.
"""

import json
import os
import socket
import tempfile
import time
import uuid
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan.tools.logging import logger

from titan_disp.errors import InUseError
from titan_disp.files import check_regular
from titan_disp.run.reader import HEARTBEAT, LOCK
from titan_disp.run.storage import patiently

RENEWAL = 10.0  # seconds between two renewals of a lock (slurm/supervise.py knows it)
# A living start renews its lock within this many seconds, even if its file system fails
# for ``storage.PATIENCE``.
LIFE = 75.0
# A lock that was last renewed more than this many seconds ago is taken over at once; our
# choice.
LEFT = 600.0
PAUSE = 0.5  # seconds between two looks


def job_id() -> str:
    """Return the name of this start in the supervisor's files, JOB.RESTARTS.ID. Return
    JOB.RESTARTS in a SLURM job without a supervisor, and "" without SLURM.
    """
    job = os.environ.get("SLURM_JOB_ID")
    start = os.environ.get("TITAN_DISP_START", "")
    # a job that was submitted from within another job inherits that job's variable
    if job and start.startswith(f"{job}."):
        return start
    return f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}" if job else ""


def machine() -> str:
    """Return a name that is equal for two processes if they see each other's process
    ids: the machine's boot id and the PID namespace. Return "" outside of Linux.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def process_fields(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on (proc(5)): [0] is the
    state, [1] the parent's id, [3] the session, [19] when the process began, in ticks.

    Raises OSError if there is no such process.
    """
    # The name of the process, in brackets before these fields, may have any characters.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def lives(pid: int, began: str) -> bool:
    """Return whether this machine runs a process with this id that began at this tick.
    If /proc does not show the process, its id alone decides.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the process belongs to another user
    # A system may hide other users' processes.
    with suppress(OSError):
        state, *_ = fields = process_fields(pid)
        return state not in ("Z", "X") and fields[19] == began
    return True


def holder_of(content: bytes) -> dict[str, Any]:
    """Return the fields of a lock, which describe its holder. Return {} if the lock is
    just being written, if an earlier version wrote it, or if it has no process id.
    """
    with suppress(ValueError, TypeError, LookupError, RecursionError):
        holder = json.loads(content)
        if 0 < holder["pid"] < 1 << 31:
            return holder
    return {}


def described(holder: dict[str, Any]) -> str:
    """Return who holds a lock, for a message. slurm/supervise.py reads the job from
    this text.
    """
    return (
        f"host {holder.get('host')}, pid {holder.get('pid')}, "
        f"SLURM job {holder.get('job') or 'none'}"
    )


def _times_written(path: Path) -> list[float]:
    """Return when a lock and the heartbeat beside it were last written, by the clock of
    the file system. A file that does not exist is left out.
    """
    times = []
    for file in (path, path.with_name(HEARTBEAT)):
        # The file is opened, because NFS then asks the server for its time.
        with suppress(OSError), open(file, "rb") as opened:
            times.append(os.fstat(opened.fileno()).st_mtime)
    return times


def _is_renewed(path: Path) -> bool:
    """Return whether the holder of a lock renews it, or writes its heartbeat, within
    ``LIFE`` seconds. A lock older than ``LEFT`` seconds is not watched.
    """
    times = _times_written(path)
    with tempfile.TemporaryFile(dir=path.parent) as file:
        clock = os.fstat(file.fileno()).st_mtime
    if max(times, default=0.0) < clock - LEFT:
        return False
    logger.info(
        f"waiting up to {LIFE:.0f} s to see whether the holder of {path} is alive"
    )
    end = time.monotonic() + LIFE
    while time.monotonic() < end:
        time.sleep(PAUSE)
        if _times_written(path) != times:
            return path.exists()
    return False


def _of_same_job(start: str, other: str) -> bool:
    """Return whether two ``job_id`` name different starts of the same job."""
    job, _, _ = start.partition(".")
    other_job, _, _ = other.partition(".")
    return bool(job) and job == other_job and start != other


def abandoned(path: Path) -> bytes | None:
    """Return the content of a lock that nobody holds any more, or None if there is no
    lock.

    Raises InUseError if another start holds the lock, and ConfigError if the lock is not
    a regular file.
    """
    check_regular(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    holder = holder_of(content)
    if holder.get("machine") and holder["machine"] == machine():
        living = lives(holder["pid"], holder["began"])
    elif _of_same_job(str(holder.get("job")), job_id()):
        living = False  # SLURM has ended the earlier start
    else:
        living = _is_renewed(path)
    if living:
        raise InUseError(
            f"the run folder {str(path.parent)!r} is in use by another job "
            f"({described(holder)}): two jobs in one run folder would corrupt it. Stop "
            "the other job, use another run folder (--job.dump_folder, or "
            "sweep.folder of a sweep), or if this is a copy of the other job's folder, "
            f"delete {path.name} in the copy"
        )
    return content


def _take_away(path: Path, content: bytes) -> None:
    """Delete an abandoned lock that has this content.

    If several starts do so at once, a slow start may move away the new lock of a faster
    start. The slow start then puts that lock back.
    """
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):  # a faster start has deleted it
        os.rename(path, aside)
        if patiently(aside.read_bytes) == content:
            aside.unlink()
        else:
            os.rename(aside, path)


def _release(path: Path, holder: dict[str, Any]) -> None:
    """Delete the lock of this process, unless another start has taken it over. In a
    forked process, do nothing.
    """
    with suppress(OSError):
        if holder["pid"] == os.getpid() and holder_of(path.read_bytes()) == holder:
            path.unlink()


class Lock:
    """Hold the lock of a folder until ``close``, or until this object is deleted or the
    process ends. A process that is killed leaves its lock.
    """

    def __init__(self, folder: Path, name: str = LOCK) -> None:
        """Take the lock. Raises OSError, or InUseError if another start holds it."""
        self.path = folder / name
        self.holder = {
            "id": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "machine": machine(),
            "pid": os.getpid(),
            "began": "",
            "job": job_id(),
            "time": time.time(),
        }
        with suppress(OSError):
            self.holder["began"] = process_fields(os.getpid())[19]
        while not patiently(self._create):
            content = patiently(abandoned, self.path)
            if content is not None:
                patiently(_take_away, self.path, content)
        self._renewed = time.monotonic()
        self.close = weakref.finalize(self, _release, self.path, self.holder)

    def _create(self) -> bool:
        """Create the lock, and return whether this start holds it. If the file exists,
        an earlier try of this start may have created it, although the try got an error.
        """
        try:
            file = open(self.path, "x")  # noqa: SIM115
        except FileExistsError:
            check_regular(self.path)
            return self.owner() == self.holder
        try:
            with file:
                json.dump(self.holder, file)
        except OSError:  # a full disk
            with suppress(OSError):
                self.path.unlink()
            raise
        return True

    def renew(self) -> None:
        """Show other starts that this start lives, at most once per ``RENEWAL``."""
        if time.monotonic() >= self._renewed + RENEWAL:
            with suppress(OSError):
                os.utime(self.path)
                self._renewed = time.monotonic()

    def owner(self) -> dict[str, Any]:
        """Return the fields of the lock's present holder: ``holder``, or the fields of
        another start that has taken the lock over. Return {} if the lock is unreadable.
        """
        with suppress(OSError):
            return holder_of(self.path.read_bytes())
        return {}
