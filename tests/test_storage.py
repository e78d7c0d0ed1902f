"""What a run does when a file of its folder cannot be read or written for a while."""

import builtins
import errno
import json
import os
from concurrent.futures import wait
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from tests.test_checkpoint import flip
from titan_disp import retry
from titan_disp.errors import CheckpointError, UnreadableError
from titan_disp.run import integrity, storage
from titan_disp.run.reader import read_json_lines
from titan_disp.run.storage import JsonLines, append_line, may_pass


def error_of(number):
    return OSError(number, os.strerror(number))


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between two tries, which take no time."""
    seconds = []
    monkeypatch.setattr(retry, "sleep", seconds.append)
    monkeypatch.setattr(storage, "sleep", seconds.append)
    return seconds


class Failing:
    """A function that raises OSError at its first calls."""

    def __init__(self, function, number=errno.EIO, calls=1):
        self.function = function
        self.number = number
        self.calls = calls

    def __call__(self, *args, **kwargs):
        if self.calls:
            self.calls -= 1
            raise error_of(self.number)
        return self.function(*args, **kwargs)


def test_lines_wait_in_order_while_the_disk_fails(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.append({"step": 1})
    for number in (errno.EROFS, errno.EIO, errno.EDQUOT, errno.ENOSPC):
        failing = Failing(open, number, calls=3)
        with monkeypatch.context() as patch:
            patch.setattr(builtins, "open", failing)
            lines.append({"error": number})
            lines.append({"error": number, "again": True})
            lines.flush()
        lines.flush()
    numbers = [line.get("error") for line in read_json_lines(lines.path)]
    expected = [errno.EROFS, errno.EIO, errno.EDQUOT, errno.ENOSPC]
    assert numbers == [None, *(number for number in expected for _ in range(2))]
    assert caplog.text.count("cannot be written") == 4  # one for each outage
    assert caplog.text.count("can be written again") == 4


def test_the_oldest_lines_are_lost_and_counted(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(storage, "MOST_LINES", 3)
    lines = JsonLines(tmp_path / "no folder yet" / "metrics.jsonl")
    for step in range(5):
        lines.append({"step": step})
    lines.path.parent.mkdir()
    lines.flush()
    assert [line["step"] for line in read_json_lines(lines.path)] == [2, 3, 4]
    assert "can be written again, but 2 lines were lost" in caplog.text
    lines.path.unlink()
    lines.path.mkdir()
    lines.append({"step": 5})
    lines.path.rmdir()
    lines.flush()
    assert caplog.messages[-1] == f"{lines.path} can be written again"


def test_an_end_waits_for_the_disk(tmp_path, monkeypatch, caplog, pauses):
    monkeypatch.setattr(storage, "append_line", Failing(append_line, calls=3))
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.append({"step": 1})
    lines.close()
    assert (len(pauses), read_json_lines(lines.path)) == (2, [{"step": 1}])
    monkeypatch.setattr(storage, "append_line", Failing(append_line, calls=-1))
    monkeypatch.setattr(storage, "PATIENCE", 0.0)
    lines.append({"step": 2})
    lines.append({"step": 3})
    lines.close()
    assert "2 lines of" in caplog.text
    assert "could not be written: [Errno 5]" in caplog.text


def test_a_line_that_was_cut_is_written_again(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    lines = JsonLines(file)
    lines.append({"step": 1})
    file.write_bytes(file.read_bytes() + b'{"step": 2, "lo')  # and the disk was full
    lines.append({"step": 2, "loss": float("nan")})
    text = file.read_text()
    assert text == '{"step": 1}\n{"step": 2, "lo\n{"step": 2, "loss": null}\n'
    assert len(read_json_lines(file)) == 2


def test_a_line_that_was_written_twice_is_read_once(tmp_path, monkeypatch):
    """A network file system may say only when it closes a file that writing failed."""
    lines = JsonLines(tmp_path / "metrics.jsonl")

    def fails_at_the_end(path, line):
        append_line(path, line)
        raise error_of(errno.EIO)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "append_line", fails_at_the_end)
        lines.append({"step": 1})
    lines.flush()
    assert len(lines.path.read_text().splitlines()) == 2
    assert read_json_lines(lines.path) == [{"step": 1}]


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (error_of(errno.ESTALE), True),
        (error_of(errno.ENOSPC), False),
        (error_of(errno.EACCES), False),
        (error_of(errno.EAGAIN), True),
        (UnreadableError("…"), True),
        (CheckpointException("", {1: (error_of(errno.EIO), None)}), True),
        (CheckpointException("", {1: (ValueError("…"), None)}), False),
    ],
)
def test_which_errors_may_pass(error, passes):
    assert may_pass(error) == passes
    wrapped = RuntimeError("wrapped")
    wrapped.__cause__ = error
    if isinstance(error, OSError):
        assert may_pass(wrapped) == passes


@pytest.mark.parametrize("function", ["problem", "damage", "is_model_only"])
def test_a_read_that_fails_once_is_no_damage(start, monkeypatch, pauses, function):
    run = start()
    run.save(1, 2)
    failing = Failing(getattr(integrity, function))
    monkeypatch.setattr(integrity, function, failing)
    again = start()
    assert again.manager.load()
    assert (again.loaded, again.names) == ((2, 2), ["step-1", "step-2"])
    assert (again.events, pauses) == ([], [1.0])


def test_a_load_that_fails_once_is_no_damage(start, monkeypatch, pauses):
    run = start()
    run.save(1, 2)
    again = start()
    read = FileSystem.create_stream
    failing = Failing(read, errno.ESTALE)
    monkeypatch.setattr(FileSystem, "create_stream", lambda *args: failing(*args))
    assert again.manager.load()
    assert (again.loaded, again.names) == ((2, 2), ["step-1", "step-2"])
    assert pauses == [1.0]


def test_what_cannot_be_read_for_long_ends_the_start(start, monkeypatch, pauses):
    run = start()
    run.save(1, 2)
    monkeypatch.setattr(integrity, "damage", Failing(integrity.damage, calls=-1))
    again = start()
    with pytest.raises(UnreadableError, match=r"step-2 cannot be read now: .*Errno 5"):
        again.manager.load()
    assert (again.names, again.events) == (["step-1", "step-2"], [])
    assert pauses == [*storage.PAUSES]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EISDIR, errno.ENOSPC])
@pytest.mark.parametrize("function", ["problem", "damage", "is_model_only"])
def test_what_waiting_does_not_mend_ends_the_start_at_once(
    start, monkeypatch, pauses, function, number
):
    """It proves no damage, either."""
    run = start()
    run.save(1, 2)
    failing = Failing(getattr(integrity, function), number, calls=-1)
    monkeypatch.setattr(integrity, function, failing)
    again = start()
    with pytest.raises(CheckpointError, match=r"step-2 cannot be read: .*Errno"):
        again.manager.load()
    assert (again.names, again.events, pauses) == (["step-1", "step-2"], [], [])


def test_a_sound_checkpoint_is_taken_back(start, caplog):
    """Version 0.1 called a checkpoint damaged after one error of the file system."""
    run = start()
    run.save(1, 2, 3)
    for step in (2, 3):
        (run.folder / f"step-{step}").rename(run.folder / f"damaged-{step}")
    again = start()
    assert again.manager.load()
    assert again.loaded == (1, 1)  # a start that does not own the folder leaves it
    again.hooks.owns_folder = lambda: True
    assert again.manager.load()
    assert (again.loaded, again.names) == ((3, 3), ["damaged-2", "step-1", "step-3"])
    assert "damaged-3 is sound, and was renamed to step-3" in caplog.text


def test_a_damaged_checkpoint_is_not_taken_back(start):
    run = start()
    run.save(1, 2)
    flip(run.folder / "step-2" / "__0_0.distcp", 1234)
    for _ in range(2):
        again = start()
        again.hooks.owns_folder = lambda: True
        assert again.manager.load()
        assert (again.loaded, again.names) == ((1, 1), ["damaged-2", "step-1"])


def test_a_save_is_tried_again(start, monkeypatch, pauses):
    run = start()
    run.save(1)
    failing = Failing(FileSystem.create_stream, errno.EROFS, calls=2)
    monkeypatch.setattr(FileSystem, "create_stream", lambda *args: failing(*args))
    run.save(2)
    assert run.events == [("checkpoint", 1), ("checkpoint", 2)]
    assert pauses == [1.0, 4.0]
    failing.calls = -1
    with pytest.raises(CheckpointError, match=r"step 3 could not be saved.*Read-only"):
        run.save(3)
    assert run.events[-1] == ("save_failed", 3)


def test_an_asynchronous_save_is_tried_again(start, monkeypatch, pauses):
    run = start(async_mode="async", interval=10)
    failing = Failing(FileSystem.create_stream)
    monkeypatch.setattr(FileSystem, "create_stream", lambda *args: failing(*args))
    run.save(10)
    wait([run.manager.save_future], 200)
    assert run.manager.save_has_failed()
    run.manager.wait()  # as the trainer does on all ranks
    assert (run.manager.saves_again, pauses) == (True, [1.0])
    run.save(11)  # the next step, which is not due
    run.manager.finish(11)
    assert (run.events, run.manager.saves_again) == ([("checkpoint", 11)], False)
    failing.calls = 1
    run.manager.force()
    run.save(12)
    run.manager.finish(12)  # the run ends: the same step is saved again
    assert run.events == [("checkpoint", 11), ("checkpoint", 12)]
    failing.calls = -1
    run.manager.force()
    run.save(13)
    with pytest.raises(CheckpointError, match="step 13 could not be saved"):
        run.manager.finish(13)
    assert pauses[2:] == [*storage.PAUSES]


def test_lines_are_json_for_every_reader(tmp_path):
    file = Path(tmp_path, "a.jsonl")
    storage.append_json(file, {"a": float("inf"), "ä": 1})
    assert json.loads(file.read_text()) == {"a": None, "ä": 1}
