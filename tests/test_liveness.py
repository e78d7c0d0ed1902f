"""Signs of life in RUN/heartbeat.json, where a rank stands when there is none, which
rank is waited for, and what asks a run to stop. With real ranks: tests/test_run_ends.py
and tests/slurm.
"""

import errno
import json
import math
import os
import re
import signal
import socket
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace as Section
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from tests.distributed import spawn
from tests.mesh import build
from titan_disp import retry
from titan_disp.run import liveness, peers
from titan_disp.run.liveness import Aside, Heartbeat, StopRequest, Stragglers, straggler
from titan_disp.run.peers import Peers

ASKS_TO_STOP = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def heard(monkeypatch):
    """Make this the third start of job 7.

    Record signals, whose default handlers would end these tests.
    """
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    numbers = []
    original = {
        n: signal.signal(n, lambda number, frame: numbers.append(number))
        for n in ASKS_TO_STOP
    }
    yield numbers
    for number, handler in original.items():
        signal.signal(number, handler)


@pytest.fixture
def opened():
    with ExitStack() as stack:
        yield lambda one: stack.enter_context(closing(one))


@pytest.fixture
def clock(monkeypatch):
    clock = Section(
        now=1000.0, time=lambda: 1.7e9 + clock.now, monotonic=lambda: clock.now
    )
    clock.perf_counter = clock.monotonic
    monkeypatch.setattr(liveness, "time", clock)
    return clock


@pytest.fixture
def heartbeat(clock, opened):
    comm = Section(init_timeout_seconds=300, train_timeout_seconds=100)
    usual = {"save_seconds": 1800, "silence_seconds": 60}
    return lambda run, **limits: opened(
        Heartbeat(run, Section(comm=comm, guard=Section(**usual | limits)))
    )


def read(run, beat):
    beat.write()
    return json.loads((run / "heartbeat.json").read_text())


@pytest.mark.parametrize("limit", ["silence_seconds", "save_seconds"])
def test_no_limit(tmp_path, heartbeat, limit):
    beat = heartbeat(tmp_path, **{limit: math.inf})
    beat.begin("save", 1)
    assert read(tmp_path, beat)["allowed_seconds"] == 1e8


def test_what_is_allowed(tmp_path, clock, heartbeat):
    """Twice the run's own time-outs, or twice the slowest step, and `silence`; the
    first step and a save by their own.
    """
    beat = heartbeat(tmp_path)
    beat.begin("start", 0)
    first = {
        "start": "7.2",
        "step": 0,
        "doing": "start",
        "allowed_seconds": 660,
        "time": 1.7e9 + 1000,
    }
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
        assert (said["doing"], said["step"], said["allowed_seconds"]) == (
            doing,
            step,
            allowed,
        )
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
    # a full disk ends neither a step nor the thread
    full = heartbeat(tmp_path / "gone")
    full.begin("step", 1)
    full.write()


def until(condition):
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def aside(monkeypatch, opened):
    monkeypatch.setattr(liveness, "PAUSE", 0.01)
    return lambda *errands: opened(Aside(*errands))


def test_the_heartbeat_is_that_of_the_main_thread(tmp_path, clock, heartbeat, aside):
    beat = heartbeat(tmp_path)
    turns = []
    writer = aside(beat.write, lambda: turns.append(threading.current_thread()))
    file = tmp_path / "heartbeat.json"
    beat.begin("step", 1)
    writer.wake()
    until(file.exists)
    before = file.stat().st_mtime_ns
    done = len(turns)
    clock.now += 100
    until(lambda: len(turns) > done + 3)
    assert file.stat().st_mtime_ns == before
    beat.begin("step", 2)
    writer.wake()
    until(lambda: json.loads(file.read_text())["step"] == 2)
    assert threading.current_thread() not in turns


def test_a_file_system_that_hangs_delays_no_step(aside):
    release = threading.Event()
    turns = []
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
        patch.setattr(
            threading.Thread,
            "start",
            Mock(side_effect=RuntimeError("can't start new thread")),
        )
        writer.wake()
    for _ in range(2):
        writer.wake()
        until(lambda: len(turns) > 1 and turns[1].is_alive())
    assert (
        caplog.text.count(
            "the thread that writes heartbeat.json and looks for the file stop has died"
        )
        == 2
    )


def test_other_ranks_write_nothing_but_where_they_stand(capfd):
    comm = Section(init_timeout_seconds=1e9, train_timeout_seconds=0.1)
    beat = Heartbeat(
        None, Section(comm=comm, guard=Section(save_seconds=1e9, silence_seconds=0.6))
    )
    text = ""

    def quick():
        beat.step(1)

    def is_written():
        nonlocal text
        text += capfd.readouterr().err
        return "in hangs" in text

    def hangs():
        beat.step(2)
        until(is_written)
        time.sleep(1)  # longer than the limit: the traces are written once

    quick()
    hangs()
    beat.close()
    text += capfd.readouterr().err
    assert [text.count(said) for said in ("Timeout (", "in hangs", "in quick")] == [
        1,
        1,
        0,
    ]


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
    named = {
        "rank": slowest,
        "host": "aabb"[slowest or 0],
        "seconds": own[slowest or 0],
        "median": 1.0,
    }
    assert straggler(own, ["a", "a", "b", "b"]) == (named if slowest else None)


def test_waiting_for_others_is_not_a_ranks_own_time(clock):
    """Steps of 10 s wall time with two microbatches; this rank waits 4 s in the first
    and 6 s in the second.
    """
    timer = Stragglers()

    def step(loading, waiting, computing):
        for seconds in (loading, loading):
            clock.now += seconds
            timer.arrived()
        # the second microbatch's forward; nobody is waited for before it
        for seconds in (waiting, computing / 2):
            clock.now += seconds
            timer.met()
        clock.now += computing / 2

    step(100, 50, 100)
    # a start, with its compilation, is compared with nothing
    assert timer.own_seconds() == 0.0
    step(1, 4, 4)
    step(0.5, 6, 3)
    assert timer.own_seconds() == pytest.approx((6 + 4) / 2)
    step(3, 0, 4)
    assert timer.own_seconds() == pytest.approx(10)


@pytest.fixture
def start(tmp_path, opened):
    return lambda run=tmp_path: opened(StopRequest(run))


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


@pytest.mark.parametrize("of_torchrun", [True, False])
def test_a_killed_launcher_asks_to_stop(start, monkeypatch, of_torchrun):
    """A rank that was started by hand, as with nohup, outlives its shell."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if of_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    request = start(None)
    launcher = os.getppid()
    assert not request()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    asked = (request(), request.asked(), request.signalled())
    assert asked == (of_torchrun,) * 3
    if of_torchrun:
        killed = f"the launcher, process {launcher}, has been killed"
        assert request.reason == killed


@pytest.mark.parametrize("text", ["7.1", "6.2\n", "17.2"])
def test_the_stop_file_of_an_earlier_start_is_removed(tmp_path, start, text):
    (tmp_path / "stop").write_text(text)
    request = start()
    assert not (tmp_path / "stop").exists()
    assert (request(), request.held()) == (False, False)


def test_the_stop_file_of_this_start_stops_it(tmp_path, start):
    """The batch script may write the file before the ranks start.

    It is removed after the run has stopped.
    """
    file = tmp_path / "stop"
    file.write_text("7.2\n")
    request = start()
    # a step is trained and saved first, so that the run makes progress
    assert not request.held()
    assert not request.asked()  # which only tells what the thread has found
    assert (request(), request.asked(), request.reason) == (
        True,
        True,
        f"the file {file}",
    )
    assert request.signalled()  # the supervisor passes a signal on by this file
    for _ in range(2):  # a user may have removed the file
        request.done()
    assert not file.exists()


@pytest.mark.parametrize("text", [b"", b"7", b"please", b"7.2.1", b"\xff\xfe"])
@pytest.mark.parametrize("job", ["7", None])
def test_a_users_stop_file_holds(tmp_path, start, monkeypatch, text, job):
    if job is None:
        monkeypatch.delenv("SLURM_JOB_ID")
    file = tmp_path / "stop"
    request = start()
    assert not request()
    file.write_bytes(text)
    assert (request(), request.signalled()) == (True, False)
    request.done()
    assert file.read_bytes() == text
    request = start()
    assert (request.held(), request()) == (True, True)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES])
def test_a_file_system_that_fails_for_a_moment_ends_no_step(
    tmp_path, start, monkeypatch, number
):
    (tmp_path / "stop").touch()
    request = start()
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "stat", Mock(side_effect=OSError(number, os.strerror(number)))
        )
        asked = request()
    assert (asked, request()) == (False, True)


def failing(number=errno.EIO):
    return Mock(side_effect=OSError(number, os.strerror(number)))


def test_a_job_s_stop_file_that_cannot_be_read_for_a_moment_is_no_users(
    tmp_path, start, monkeypatch
):
    """A user's file would hold the run for good."""
    read_text = Path.read_text
    file = tmp_path / "stop"
    outages = [1, 1]

    def sometimes(path, **options):
        if outages:
            outages.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_text(path, **options)

    monkeypatch.setattr(retry, "sleep", lambda _: None)
    monkeypatch.setattr(Path, "read_text", sometimes)
    file.write_text("7.1")
    request = start()  # removes it
    assert not file.exists()
    outages.append(1)
    file.write_text("7.2")
    assert (request(), request.signalled()) == (False, False)
    assert (request(), request.signalled()) == (True, True)
    outages.append(1)
    assert not request.held()
    outages.append(1)
    request.done()
    assert not file.exists()
    file.touch()
    monkeypatch.setattr(Path, "read_text", failing(errno.EACCES))
    assert request.held()  # of another user


def test_a_heartbeat_that_fails_is_written_again(tmp_path, heartbeat, monkeypatch):
    """Otherwise, a long save would end as a step that has taken too long."""
    beat = heartbeat(tmp_path)
    beat.begin("step", 3)
    assert read(tmp_path, beat)["doing"] == "step"
    beat.begin("save", 4)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing())
        beat.write()
    assert read(tmp_path, beat)["doing"] == "save"


@pytest.fixture
def ranks(tmp_path, clock, heartbeat):
    """Three ranks that share a store, at the beginning of step 4."""
    store = dist.HashStore()
    monitored = [
        Peers(heartbeat(tmp_path if rank == 0 else None), store, rank, 3)
        for rank in range(3)
    ]
    for peer in monitored:
        peer.heartbeat.begin("step", 4)
        peer.heartbeat.go_on("reading data", 4)
    return monitored


def pass_time(clock, ranks, seconds):
    """Let time pass, in which these ranks tell what they do; rank 0 last."""
    for _ in range(seconds // 5):
        clock.now += 5
        for peer in reversed(ranks):
            peer.exchange()


@pytest.fixture
def names(monkeypatch):
    monkeypatch.setattr(peers, "time", liveness.time)
    monkeypatch.setattr(peers.socket, "gethostname", lambda: "n2")


def test_rank_0_names_the_rank_that_all_ranks_wait_for(
    tmp_path, clock, ranks, names, caplog
):
    first, second, _ = ranks
    for peer in (first, second):
        peer.heartbeat.go_on("step", 4)
    pass_time(clock, ranks, 15)
    assert "waits_for" not in read(tmp_path, first.heartbeat)
    pass_time(clock, ranks, 15)
    beat = read(tmp_path, first.heartbeat)
    waits = "all ranks wait for rank 2 on n2: reading data at step 4, for 30 s"
    assert beat["waits_for"] == waits
    assert [record.getMessage() for record in caplog.records] == [
        "all ranks wait for rank 2 on n2: reading data at step 4, for 20 s"
    ]
    time_of_beat = beat["time"]  # by which the supervisor measures the silence
    pass_time(clock, ranks, 30)
    assert read(tmp_path, first.heartbeat)["time"] == time_of_beat
    for peer in ranks:
        peer.heartbeat.begin("step", 5)
    pass_time(clock, ranks, 5)
    assert "waits_for" not in read(tmp_path, first.heartbeat)


def test_nobody_is_named_if_all_ranks_do_the_same_or_have_not_begun(
    clock, ranks, names
):
    pass_time(clock, ranks[:2], 100)
    assert ranks[0].heartbeat.waits_for == ""
    pass_time(clock, ranks, 100)
    assert ranks[0].heartbeat.waits_for == ""


def test_a_rank_that_has_stopped_and_rank_0_itself_are_named(clock, ranks, names):
    first, second, third = ranks
    pass_time(clock, ranks, 5)
    pass_time(clock, [first, third], 50)
    said = (
        "all ranks wait for rank 1 on n2: reading data at step 4, for 55 s; it does not"
    )
    assert first.heartbeat.waits_for.startswith(said)
    second.heartbeat.go_on("step", 4)
    third.heartbeat.go_on("step", 4)
    pass_time(clock, ranks, 10)
    said = "all ranks wait for rank 0 on n2: reading data at step 4, for 65 s"
    assert first.heartbeat.waits_for == said


def test_the_log_says_that_a_rank_does_not_answer(clock, ranks, names, caplog):
    """It is known after the first warning."""
    first, _, third = ranks
    for peer in (first, third):
        peer.heartbeat.go_on("step", 4)
    pass_time(clock, ranks, 5)
    pass_time(clock, [first, third], 50)
    assert [record.getMessage() for record in caplog.records] == [
        f"all ranks wait for rank 1 on n2: reading data at step 4, for {text}"
        for text in ("20 s", "30 s; it does not answer any more")
    ]


def test_slow_steps_are_usual_and_a_store_that_has_ended_is_no_error(
    clock, ranks, names, monkeypatch
):
    first, second, _ = ranks
    for peer in (first, second):
        peer.heartbeat.slowest = 60.0
        peer.heartbeat.go_on("step", 4)
    pass_time(clock, ranks, 100)
    assert first.heartbeat.waits_for == ""
    pass_time(clock, ranks, 30)
    assert first.heartbeat.waits_for.startswith("all ranks wait for rank 2 on n2: ")
    monkeypatch.setattr(
        first, "_store", Mock(set=Mock(side_effect=RuntimeError("Connection reset")))
    )
    pass_time(clock, ranks, 5)


def wait_for_data(sample, folder):
    """Rank 1 waits for its data in the third step, until rank 0 has named it."""
    peers.WAITING = 0.5
    peers.INTERVAL = 0.2
    file = folder / "heartbeat.json"

    def slowly(batches):
        for step, batch in enumerate(batches):
            if step == 2 and dist.get_rank() == 1:
                until(lambda: "reading data at" in file.read_text())
                (folder.parent / "seen").write_text(file.read_text())
            yield batch

    trainer = build(
        sample, folder, "--training.steps", "4", "--condensation.interval", "0"
    )
    timed = trainer._timed
    trainer._timed = lambda batches: timed(slowly(batches))
    with closing(trainer):
        trainer.train()


def test_ranks_of_a_run_name_the_one_that_waits_for_its_data(sample, tmp_path):
    spawn(2, wait_for_data, sample, tmp_path / "run")
    beat = json.loads((tmp_path / "seen").read_text())
    name = (
        rf"all ranks wait for rank 1 on {socket.gethostname()}: reading data at step "
    )
    assert re.match(name + r"\d, for \d+ s", beat["waits_for"])
