"""Of several starts of one run folder, one trains: whatever the file system can lock,
and whatever a start that was killed has left.
"""

import errno
import json
import multiprocessing
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from torchtitan.config import JobConfig

from titan_disp import retry
from titan_disp.errors import ConfigError, InUseError
from titan_disp.run import lock
from titan_disp.run.folder import RunFolder
from titan_disp.run.lock import LEFT, LIFE, RENEWAL, Lock, machine
from titan_disp.run.storage import PATIENCE, write_json

DEAD = {"id": "x", "host": socket.gethostname(), "pid": 1 << 22, "began": "1"}


def job_config(folder):
    config = JobConfig()
    config.job.dump_folder = str(folder)
    return config


def begin_to_train(folder, moment, result):
    """Open the run folder at a moment, and write a row if this start may, after all
    other starts have opened the folder. No file system locks here.
    """
    import fcntl

    def flock(*_):
        raise OSError(38, "Function not implemented")

    fcntl.flock = flock
    time.sleep(max(0, moment - time.time()))
    try:
        run = RunFolder(job_config(folder), 1)
        time.sleep(2)
        run.record_start()
        run.event("start", 0)
        result.send("trains")
        time.sleep(1000)
    except InUseError as error:
        result.send(str(error))


@pytest.mark.parametrize("left", [False, True])
def test_of_starts_in_the_same_second_one_writes_rows(tmp_path, left):
    if left:
        write_json(tmp_path / ".lock", {**DEAD, "machine": machine()})
    moment = time.time() + 1
    fork = multiprocessing.get_context("fork")
    starts = []
    results = []
    for _ in range(4):
        receiver, sender = fork.Pipe(duplex=False)
        start = fork.Process(target=begin_to_train, args=(tmp_path, moment, sender))
        start.start()
        starts.append(start)
        results.append(receiver)
    try:
        said = [result.recv() for result in results if result.poll(60)]
    finally:
        for start in starts:
            start.kill()
            start.join()
    assert said.count("trains") == 1
    assert sum(" is in use by another job (host " in line for line in said) == 3
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 1
    # the winner was killed: its lock is left, and the next start takes it over at once
    began = time.monotonic()
    RunFolder(job_config(tmp_path), 1).close()
    assert time.monotonic() - began < LIFE / 3
    assert not (tmp_path / ".lock").exists()
    assert not list(tmp_path.glob(".lock.*"))


def test_a_slow_start_puts_the_lock_of_a_faster_one_back(tmp_path):
    """Both have seen the same lock that was left."""
    left = json.dumps(DEAD).encode()
    faster = Lock(tmp_path)
    lock._take_away(tmp_path / ".lock", left)
    assert faster.owner() == faster.holder
    faster.close()
    lock._take_away(tmp_path / ".lock", left)
    assert list(tmp_path.iterdir()) == []


class Watch:
    """Seconds, on a clock of its own, for which a start has watched a lock.

    ``half_way`` is called after half of the usual ones.
    """

    def __init__(self, monkeypatch):
        self.seconds = 0.0
        self.half_way = lambda: None
        clock = SimpleNamespace(
            time=time.time, monotonic=lambda: self.seconds, sleep=self._sleep
        )
        monkeypatch.setattr(lock, "time", clock)

    def _sleep(self, seconds):
        self.seconds += seconds
        if self.seconds == LIFE / 2:
            self.half_way()


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return Watch(monkeypatch)


def leave(folder, **holder):
    """Write the lock of a start on another machine."""
    far = {**DEAD, "host": "far", "machine": "another", "job": "6.0"}
    write_json(folder / ".lock", {**far, **holder})


@pytest.mark.parametrize("sign", [".lock", "heartbeat.json"])
@pytest.mark.parametrize("job", ["6.0", "", "7.0"])
def test_a_start_that_lives_on_another_machine_is_left_alone(
    tmp_path, watch, job, sign
):
    """Two starts of one name are not a start and an earlier one."""
    leave(tmp_path, job=job)
    watch.half_way = (tmp_path / sign).touch  # of an earlier version, the heartbeat
    before = (tmp_path / ".lock").read_bytes()
    os.utime(tmp_path / ".lock", (time.time() - LIFE,) * 2)
    message = (
        rf"in use by another job \(host far, pid 4194304, SLURM job {job or 'none'}\)"
        ".* if this is a copy of the other job's folder, delete .lock in the copy$"
    )
    with pytest.raises(InUseError, match=message):
        RunFolder(job_config(tmp_path), 1)
    assert (tmp_path / ".lock").read_bytes() == before
    assert watch.seconds == LIFE / 2


@pytest.mark.parametrize(
    ("holder", "seconds"),
    [
        ({}, LIFE),
        ({"job": "7.0.abcdef"}, 0),
        ({"machine": machine()}, 0),
        ({"machine": machine(), "pid": os.getpid()}, 0),
        ("old", 0),
        ("ended", LIFE / 2),
        ("host far, pid 1, SLURM job 6", LIFE),
        ("", LIFE),
    ],
)
def test_a_lock_that_was_left_is_taken_over(tmp_path, watch, holder, seconds):
    """Of another machine and job, a young one is watched. That of a process which had
    this id earlier, and one of an earlier version, are no exceptions.
    """
    leave(tmp_path, **(holder if isinstance(holder, dict) else {}))
    if holder == "old":
        os.utime(tmp_path / ".lock", (time.time() - LEFT - 1,) * 2)
    elif holder == "ended":
        watch.half_way = (tmp_path / ".lock").unlink
    elif isinstance(holder, str):
        (tmp_path / ".lock").write_text(holder)
    folder = RunFolder(job_config(tmp_path), 1)
    assert watch.seconds == seconds
    assert folder.taken_by() is None
    assert folder.owned
    written = json.loads((tmp_path / ".lock").read_text())
    assert (written["host"], written["job"]) == (socket.gethostname(), "7.0")
    assert (written["pid"], written["id"] != "x") == (os.getpid(), True)
    folder.close()


def test_a_lock_is_renewed_and_says_who_has_taken_it(tmp_path, watch):
    run = RunFolder(job_config(tmp_path), 1)
    file = tmp_path / ".lock"
    os.utime(file, (1, 1))
    run.lock.renew()
    assert file.stat().st_mtime == 1
    watch.seconds += RENEWAL
    run.lock.renew()
    assert file.stat().st_mtime > time.time() - 100
    file.unlink()  # by a user: the folder is not certainly this start's
    assert (run.taken_by(), run.owned) == (None, False)
    run.lock.renew()
    leave(tmp_path)
    assert run.taken_by() == "host far, pid 4194304, SLURM job 6.0"
    with pytest.raises(InUseError, match=r"was taken by another job \(host far"):
        run.record_start()
    run.close()
    assert file.exists()
    assert not (tmp_path / "config.json").exists()


def test_a_lock_that_cannot_be_written_or_is_no_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(lock.json, "dump", full)
        with pytest.raises(OSError, match="No space"):
            Lock(tmp_path)
    assert list(tmp_path.iterdir()) == []
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(ConfigError, match="is not a regular file"):
        Lock(tmp_path)


def test_a_forked_process_keeps_no_lock(tmp_path):
    """As the data's prefetch worker, which outlives a killed rank."""
    held = Lock(tmp_path)
    child = os.fork()
    if not child:
        held.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert held.owner() == held.holder
    del held
    assert not (tmp_path / ".lock").exists()


GARBAGE = {
    "of a process without an id": {"machine": machine(), "pid": None},
    "with text for an id": {**DEAD, "machine": machine(), "pid": "x"},
    "with too large an id": {**DEAD, "machine": machine(), "pid": 1 << 70},
    "of a group of processes": {**DEAD, "machine": machine(), "pid": -1},
    "nested": None,
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_lock_with_garbage_is_watched(tmp_path, watch, name):
    content = json.dumps(GARBAGE[name])
    if GARBAGE[name] is None:
        content = "[" * 100_000
    (tmp_path / ".lock").write_text(content)
    RunFolder(job_config(tmp_path), 1).close()
    assert watch.seconds == LIFE


def test_a_lock_that_is_a_dangling_link(tmp_path):
    (tmp_path / ".lock").symlink_to(tmp_path / "missing")
    with pytest.raises(ConfigError, match="is not a regular file"):
        Lock(tmp_path)


def test_a_start_knows_its_own_lock_whose_creation_has_failed(tmp_path, monkeypatch):
    """The server has the whole file, but its answer was an error, and so it was when
    the start deleted the file.
    """
    dump = json.dump
    unlink = Path.unlink
    failures = []

    def fails(*arguments):
        dump(*arguments)
        failures.append("dump")
        raise OSError(errno.EIO, "Input/output error")

    def fails_once(path):
        if failures == ["dump"]:
            failures.append("unlink")
            raise OSError(errno.EIO, "Input/output error")
        unlink(path)

    monkeypatch.setattr(lock.json, "dump", fails)
    monkeypatch.setattr(Path, "unlink", fails_once)
    monkeypatch.setattr(retry, "sleep", lambda _: None)
    run = RunFolder(job_config(tmp_path), 1)
    assert failures == ["dump", "unlink"]
    assert run.owned
    run.close()
    assert list(tmp_path.iterdir()) == []


def test_a_renewal_that_fails_is_tried_again_at_once(tmp_path, watch, monkeypatch):
    """Another start watches a lock for longer than a file system may fail."""
    assert LIFE > PATIENCE + RENEWAL
    held = Lock(tmp_path)
    file = tmp_path / ".lock"
    os.utime(file, (1, 1))
    watch.seconds += RENEWAL
    with monkeypatch.context() as patched:
        failing = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
        patched.setattr(lock.os, "utime", failing)
        held.renew()
    held.renew()
    assert file.stat().st_mtime > 1
    held.close()
