"""Signals and the stop file ask a run to stop. tests/test_run_ends.py and tests/slurm test what the run does then."""

import errno
import os
import signal
from contextlib import ExitStack, closing
from unittest import mock

import pytest

from titan_disp.run.liveness import StopRequest

ASKS_TO_STOP = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def heard(monkeypatch):
    """Make this the third start of job 7. Record signals, whose default handlers would end these tests."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    numbers = []
    original = {n: signal.signal(n, lambda number, frame: numbers.append(number)) for n in ASKS_TO_STOP}
    yield numbers
    for number, handler in original.items():
        signal.signal(number, handler)


@pytest.fixture
def start(tmp_path):
    with ExitStack() as stack:
        yield lambda run=tmp_path: stack.enter_context(closing(StopRequest(run)))


@pytest.mark.parametrize("number", ASKS_TO_STOP)
def test_a_signal_asks_to_stop(start, heard, number):
    handlers = [signal.getsignal(n) for n in ASKS_TO_STOP]
    request = start(None)  # a rank without the folder hears signals only
    assert not request()
    os.kill(os.getpid(), number)
    assert request.asked()  # at once, while a thread looks for the file
    assert (request(), request.reason, request.signalled()) == (True, number.name, True)
    request.done()
    request.close()
    assert not heard
    assert [signal.getsignal(n) for n in ASKS_TO_STOP] == handlers


@pytest.mark.parametrize("text", ["7.1", "6.2\n", "17.2"])
def test_the_stop_file_of_an_earlier_start_is_removed(tmp_path, start, text):
    (tmp_path / "stop").write_text(text)
    request = start()
    assert not (tmp_path / "stop").exists()
    assert (request(), request.held()) == (False, False)


def test_the_stop_file_of_this_start_stops_it(tmp_path, start):
    """The batch script may write the file before the ranks start. It is removed after the run has stopped."""
    file = tmp_path / "stop"
    file.write_text("7.2\n")
    request = start()
    assert not request.held()  # a step is trained and saved first, so that the run makes progress
    assert not request.asked()  # which only tells what the thread has found
    assert (request(), request.asked(), request.reason) == (True, True, f"the file {file}")
    assert request.signalled()  # the supervisor passes a signal on by this file
    for _ in range(2):  # a user may have removed the file
        request.done()
    assert not file.exists()


@pytest.mark.parametrize("text", [b"", b"7", b"please", b"7.2.1", b"\xff\xfe"])
@pytest.mark.parametrize("job", ["7", None])
def test_a_users_stop_file_holds(tmp_path, start, monkeypatch, text, job):
    if job is None:
        monkeypatch.delenv("SLURM_JOB_ID")
    file, request = tmp_path / "stop", start()
    assert not request()
    file.write_bytes(text)
    assert (request(), request.signalled()) == (True, False)
    request.done()
    assert file.read_bytes() == text
    request = start()
    assert (request.held(), request()) == (True, True)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES])
def test_a_file_system_that_fails_for_a_moment_ends_no_step(tmp_path, start, monkeypatch, number):
    """``Path.exists`` raises errors other than "not found" and a few more."""
    (tmp_path / "stop").touch()
    request = start()
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", mock.Mock(side_effect=OSError(number, os.strerror(number))))
        asked = request()
    assert (asked, request()) == (False, True)
