"""Signals and the stop file ask a run to stop. tests/test_run_ends.py and tests/slurm test what the run does then."""

import errno
import os
import signal
from contextlib import closing

import pytest

from titan_disp.run.liveness import StopRequest

ASKS_TO_STOP = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def third_start_of_job_7(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")


@pytest.fixture(autouse=True)
def heard():
    """Record signals in a handler that replaces the default one, which would end these tests."""
    numbers: list[int] = []
    original = {n: signal.signal(n, lambda number, frame: numbers.append(number)) for n in ASKS_TO_STOP}
    yield numbers
    for number, handler in original.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ASKS_TO_STOP)
def test_a_signal_asks_to_stop(tmp_path, heard, number):
    """SIGTERM counts as well, because SLURM sends it by itself. Afterwards the previous handlers are back."""
    handlers = [signal.getsignal(n) for n in ASKS_TO_STOP]
    with closing(StopRequest(tmp_path)) as request:
        assert not request()
        os.kill(os.getpid(), number)
        assert request()
        assert request.reason == number.name
        assert not heard
    assert [signal.getsignal(n) for n in ASKS_TO_STOP] == handlers
    os.kill(os.getpid(), number)
    assert heard == [number]


def test_a_rank_without_the_folder_hears_signals_only(tmp_path):
    (tmp_path / "stop").touch()
    with closing(StopRequest(None)) as request:
        assert not request()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request()
        request.done()
    assert (tmp_path / "stop").exists()


@pytest.mark.parametrize("text", ["7.1", "6.2\n", "17.2"])
def test_the_stop_file_of_an_earlier_start_is_removed(tmp_path, third_start_of_job_7, text):
    (tmp_path / "stop").write_text(text)
    with closing(StopRequest(tmp_path)) as request:
        assert not (tmp_path / "stop").exists()
        assert not request()
        assert not request.held()


def test_the_stop_file_of_this_start_stops_it(tmp_path, third_start_of_job_7):
    """The batch script may write the file before the ranks start. It is removed after the run has stopped."""
    file = tmp_path / "stop"
    file.write_text("7.2\n")
    with closing(StopRequest(tmp_path)) as request:
        assert not request.held()  # a step is trained and saved first, so that the run makes progress
        assert request()
        assert request.reason == f"the file {file}"
        request.done()
        assert not file.exists()
        request.done()  # a user may have removed the file
    with closing(StopRequest(tmp_path)) as request:
        assert not request()


@pytest.mark.parametrize("text", ["", "7", "please", "7.2.1", "\ufffd"])
@pytest.mark.parametrize("job", ["7", None])
def test_a_users_stop_file_holds(tmp_path, monkeypatch, text, job):
    """A user's file from before or during the start holds the run until the user removes it, with or without SLURM."""
    if job is None:
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    else:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    file = tmp_path / "stop"
    with closing(StopRequest(tmp_path)) as request:
        assert not request()
        file.write_text(text)
        assert request()
        request.done()
    assert file.read_text() == text
    with closing(StopRequest(tmp_path)) as request:
        assert request.held()
        assert request()
    file.write_bytes(b"\xff\xfe")
    with closing(StopRequest(tmp_path)) as request:
        assert request.held()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_file_system_that_fails_for_a_moment_ends_no_step(tmp_path, monkeypatch, number):
    """The file is looked for at every step, but ``Path.exists`` raises errors other than "not found" and a few more."""
    stat = os.stat

    def fails(path, *args, **kwargs):
        if os.fspath(path) == str(tmp_path / "stop"):
            raise OSError(number, os.strerror(number))
        return stat(path, *args, **kwargs)

    (tmp_path / "stop").touch()
    with closing(StopRequest(tmp_path)) as request:
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", fails)
            assert not request()
        assert request()
