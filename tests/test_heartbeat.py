"""Signs of life in RUN/heartbeat.json, where a rank stands when there is none, and which rank is waited for.

With real ranks: tests/test_run_ends.py and tests/slurm.
"""

import json
import threading
import time
from contextlib import ExitStack, closing
from types import SimpleNamespace as Section
from unittest.mock import Mock

import pytest

from titan_disp.run import liveness
from titan_disp.run.liveness import Aside, Heartbeat, Stragglers, straggler


@pytest.fixture
def clock(monkeypatch):
    clock = Section(now=1000.0, time=lambda: 1.7e9 + clock.now, monotonic=lambda: clock.now)
    clock.perf_counter = clock.monotonic
    monkeypatch.setattr(liveness, "time", clock)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    return clock


@pytest.fixture
def heartbeat(clock):
    comm = Section(init_timeout_seconds=300, train_timeout_seconds=100)
    config = Section(comm=comm, guard=Section(save_seconds=1800, silence_seconds=60))
    with ExitStack() as stack:
        yield lambda run: stack.enter_context(closing(Heartbeat(run, config)))


def read(run, beat):
    beat.write()
    return json.loads((run / "heartbeat.json").read_text())


def test_what_is_allowed(tmp_path, clock, heartbeat):
    """Twice the run's own time-outs, or twice the slowest step, and `silence`; the first step and a save by their own."""
    beat = heartbeat(tmp_path)
    beat.begin("start", 0)
    first = {"start": "7.2", "step": 0, "doing": "start", "allowed_seconds": 660, "time": 1.7e9 + 1000}
    assert read(tmp_path, beat) == first
    for seconds, call, doing, step, allowed in (
        (0, beat.begin, "step", 1, 660),  # the first step compiles
        (500, beat.step, "step", 1, 260),
        (20, beat.step, "step", 2, 260),
        (0, beat.begin, "save", 2, 1860),
        (1000, beat.begin, "step", 3, 260),  # the save does not count as a step's time
        (150, beat.step, "step", 3, 360),
        (0, beat.begin, "condensation", 3, 660),
    ):
        clock.now += seconds
        call(*[doing] * (call == beat.begin), step)
        said = read(tmp_path, beat)
        assert (said["doing"], said["step"], said["allowed_seconds"]) == (doing, step, allowed)
    beat.close()
    assert list(tmp_path.iterdir()) == []


def test_short_steps_write_once_a_second(tmp_path, clock, heartbeat):
    beat = heartbeat(tmp_path)
    written = set()
    for step in range(1, 31):
        clock.now += 0.1
        beat.step(step)
        written.add(read(tmp_path, beat)["step"])
    assert len(written) == 3
    beat.begin("save", 30)  # another kind is always written
    assert read(tmp_path, beat)["doing"] == "save"
    full = heartbeat(tmp_path / "gone")  # a full disk ends neither a step nor the thread
    full.begin("step", 1)
    full.write()


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def aside(monkeypatch):
    monkeypatch.setattr(liveness, "PAUSE", 0.01)
    with ExitStack() as stack:
        yield lambda *errands: stack.enter_context(closing(Aside(*errands)))


def test_the_heartbeat_is_that_of_the_main_thread(tmp_path, clock, heartbeat, aside):
    """The thread alone is no sign of life: it goes on while the main thread hangs, and the file stays as it was."""
    beat, turns = heartbeat(tmp_path), []
    writer = aside(beat.write, lambda: turns.append(threading.current_thread()))
    file = tmp_path / "heartbeat.json"
    beat.begin("step", 1)
    writer.wake()
    until(file.exists)
    before, done = file.stat().st_mtime_ns, len(turns)
    clock.now += 100
    until(lambda: len(turns) > done + 3)
    assert file.stat().st_mtime_ns == before
    beat.begin("step", 2)
    writer.wake()
    until(lambda: json.loads(file.read_text())["step"] == 2)
    assert threading.current_thread() not in turns


def test_a_file_system_that_hangs_delays_no_step(aside):
    release, turns = threading.Event(), []
    writer = aside(lambda: turns.append(release.wait()))
    start = time.monotonic()
    for _ in range(1000):
        writer.wake()
    writer.close()
    assert time.monotonic() - start < 5
    assert writer._thread.is_alive()
    assert writer._thread.daemon  # it does not keep the process
    release.set()
    until(lambda: not writer._thread.is_alive())
    assert len(turns) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_is_noticed_and_replaced(aside, caplog, monkeypatch):
    turns = []

    def errand():
        turns.append(threading.current_thread())
        if len(turns) == 1:
            raise ValueError("no error of the file system")

    writer = aside(errand)
    writer.wake()
    until(lambda: turns and not turns[0].is_alive())
    assert "has died" not in caplog.text
    with monkeypatch.context() as patch:  # without threads left, the run goes on
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        writer.wake()
    for _ in range(2):
        writer.wake()
        until(lambda: len(turns) > 1 and turns[1].is_alive())
    assert caplog.text.count("the thread that writes heartbeat.json and looks for the file stop has died") == 2


def test_other_ranks_write_nothing_but_where_they_stand(capfd):
    comm = Section(init_timeout_seconds=1e9, train_timeout_seconds=0.1)
    beat = Heartbeat(None, Section(comm=comm, guard=Section(save_seconds=1e9, silence_seconds=0.2)))

    def quick():
        beat.step(1)
        time.sleep(0.1)

    def hangs():
        beat.step(2)
        time.sleep(0.8)

    quick()
    hangs()
    beat.close()
    time.sleep(0.6)
    text = capfd.readouterr().err
    assert [text.count(said) for said in ("Timeout (", "in hangs", "in quick")] == [1, 1, 0]


@pytest.mark.parametrize(
    ("own", "slowest"),
    [
        ([1.0, 1.1, 1.2, 1.0], None),  # 1.2 × the median of 1.0 is not more than that
        ([1.0, 1.0, 1.3, 1.1], 2),
        ([0.5, 1.0, 1.0, 1.0], None),  # one that is faster keeps nobody waiting
        ([1.0, 2.0], 1),
        ([0.0, 0.0, 0.0, 0.0], None),  # before there is anything to compare
    ],
)
def test_the_slowest_rank_is_named(own, slowest):
    named = {"rank": slowest, "host": "aabb"[slowest or 0], "seconds": own[slowest or 0], "median": 1.0}
    assert straggler(own, ["a", "a", "b", "b"]) == (named if slowest else None)


def test_waiting_for_others_is_not_a_ranks_own_time(clock):
    """Steps of 10 s wall time with two microbatches; this rank waits 4 s in the first and 6 s in the second."""
    timer = Stragglers()

    def step(loading, waiting, computing):
        for seconds in (loading, loading):
            clock.now += seconds
            timer.arrived()
        for seconds in (waiting, computing / 2):  # the second microbatch's forward; nobody is waited for before it
            clock.now += seconds
            timer.met()
        clock.now += computing / 2

    step(100, 50, 100)
    assert timer.own_seconds() == 0.0  # a start, with its compilation, is compared with nothing
    step(1, 4, 4)
    step(0.5, 6, 3)
    assert timer.own_seconds() == pytest.approx((6 + 4) / 2)
    step(3, 0, 4)
    assert timer.own_seconds() == pytest.approx(10)
