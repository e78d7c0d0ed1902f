"""Ctrl-C on ``titan-disp train``: the ranks save and end. A second one kills them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from tests.command_line import (
    DEMO,
    ROOT,
    SECONDS,
    children,
    command,
    environment,
    is_running,
)
from tests.pages import changed, loaded
from titan_disp.cluster import launch
from titan_disp.cluster.launch import StopRanks, stop_signals
from titan_disp.config.command_options import TrainOptions
from titan_disp.run.integrity import checkpoints
from titan_disp.run.reader import read_events, read_metrics

pytestmark = pytest.mark.usefixtures("heard")

RANK = "trap 'echo SIGTERM; {}' TERM; echo ready; while :; do sleep 0.01; done"


@pytest.fixture
def rank():
    """Start a process as torchrun starts a rank, and wait until it listens."""
    started = []

    def start(at_sigterm="exit"):
        words = ["bash", "-c", RANK.format(at_sigterm)]
        started.append(
            subprocess.Popen(
                words, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        )
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("number", "closed"),
    [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGHUP, False)],
)
def test_ranks_get_sigterm_from_the_first_signal(
    rank, monkeypatch, capsys, number, closed
):
    """Also if Ctrl-C has ended tee, so that stderr is closed."""
    ranks = [rank(), rank()]
    stop = StopRanks()
    before = signal.getsignal(number)
    if closed:
        monkeypatch.setattr(sys.stderr, "write", mock.Mock(side_effect=BrokenPipeError))
    with stop_signals(stop.heard):
        signal.raise_signal(number)
        assert [process.wait(100) for process in ranks] == [0, 0]
    assert [process.stdout.read() for process in ranks] == ["SIGTERM\n"] * 2
    assert (stop.number, stop.name) == (number, number.name)
    assert ("A second signal kills them" in capsys.readouterr().err) is not closed
    assert signal.getsignal(number) == before


def test_a_later_signal_kills_the_ranks(rank, monkeypatch):
    now = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    one = rank("true")
    stop = StopRanks()
    with stop_signals(stop.heard):
        signal.raise_signal(signal.SIGTERM)
        assert one.stdout.readline() == "SIGTERM\n"
        now[0] += 0.9
        signal.raise_signal(signal.SIGTERM)
        assert one.poll() is None
        now[0] += 0.2
        signal.raise_signal(signal.SIGINT)
        assert one.wait(100) == -signal.SIGKILL
    assert stop.number == signal.SIGTERM  # the exit status is that of the first


def test_without_ranks():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_signals(StopRanks().heard):
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(SystemExit) as error:
            signal.raise_signal(signal.SIGINT)
    assert error.value.code == 130
    assert signal.signal(signal.SIGHUP, previous) is signal.SIG_IGN


@pytest.fixture
def launched(sample, tmp_path, monkeypatch, capsys):
    """Launch a run with this in place of its ranks, and return the exit status and the
    last line.
    """

    def launched(ranks):
        config = changed(
            loaded(DEMO, *command(DEMO, sample, "")[9:]),
            {"job.dump_folder": str(tmp_path)},
        )
        monkeypatch.setattr(launch, "load_config", lambda argv: config)
        monkeypatch.setattr(launch, "elastic_launch", lambda settings, program: ranks)
        return launch.launch(
            TrainOptions(str(DEMO), (), 2)
        ), capsys.readouterr().err.splitlines()[-1]

    return launched


@pytest.mark.parametrize(
    ("exitcode", "status", "line"),
    [
        (-15, 130, "not every rank ended by itself"),
        (1, 1, "titan-disp: error: OSError: [Errno 28] No space left on device"),
    ],
)
def test_a_failure_is_told_from_the_signal(
    launched, monkeypatch, exitcode, status, line
):
    monkeypatch.setattr(ChildFailedError, "format_msg", lambda *_: "", raising=False)
    failure = SimpleNamespace(
        exitcode=exitcode,
        local_rank=1,
        timestamp=0,
        error_file_data={"message": "as below"},
        message="OSError: [Errno 28] No space left on device\nand more",
    )
    error = ChildFailedError("titan_disp.train", {1: failure})
    error.get_first_failure = lambda: (1, failure)

    def ranks(*argv):
        signal.raise_signal(signal.SIGINT)
        raise error

    # No process has this number
    monkeypatch.setattr(launch, "_ranks", lambda: [0x7FFFFFFF])
    found, said = launched(ranks)
    assert found == status
    assert line in said


def test_a_killed_rank_may_have_taken_too_much_memory(launched, monkeypatch):
    monkeypatch.setattr(ChildFailedError, "format_msg", lambda *_: "", raising=False)
    failure = SimpleNamespace(
        exitcode=-9, local_rank=1, timestamp=0, error_file_data={}
    )
    error = ChildFailedError("titan_disp.train", {1: failure})
    error.get_first_failure = lambda: (1, failure)

    def ranks(*argv):
        raise error

    status, said = launched(ranks)
    assert status == 1
    assert "rank 1 was killed (SIGKILL), perhaps because the machine" in said
    assert "too little memory. The same command resumes" in said


@pytest.mark.parametrize(
    ("rank", "of_rank_0", "last"),
    [
        (0, "the data differ", "rank 0 failed"),
        (1, "the data differ", "rank 1 failed"),
        (1, "something else", "error: the data differ"),
        (1, None, "error: the data differ"),
    ],
)
def test_an_error_that_rank_0_has_printed_is_not_printed_again(
    launched, monkeypatch, tmp_path, rank, of_rank_0, last
):
    """The console shows what rank 0 prints, and nothing of the other ranks."""
    monkeypatch.setattr(ChildFailedError, "format_msg", lambda *_: "", raising=False)
    failure = SimpleNamespace(exitcode=2, local_rank=rank, timestamp=0)
    error = ChildFailedError("titan_disp.train", {rank: failure})
    error.get_first_failure = lambda: (rank, failure)

    def ranks(*argv):
        for number, text in enumerate([of_rank_0, "the data differ"]):
            log = tmp_path / f"logs/titan-disp-1/attempt_0/{number}/stderr.log"
            log.parent.mkdir(parents=True)
            log.write_text(f"titan-disp: error: {text}\n" if text else "")
        raise error

    status, line = launched(ranks)
    assert status == 2
    assert line.startswith(f"titan-disp: {last}")


AGAIN = (
    "same command resumes from the newest checkpoint, or begins anew if there is none."
)
LAST_LINES = {
    "complete": "the run is complete: step 4. Next: titan-disp report RUN --out report.html",
    "budget": f"stopped after step 4: a reason. Raise it: the {AGAIN}",
    "seed": f"stopped after step 4: a reason. Without it, the {AGAIN}",
    "file": f"stopped after step 4: a reason. Remove RUN/stop: the {AGAIN}",
    "signal": f"stopped after step 4: a reason. The {AGAIN}",
    None: "all ranks have ended",  # TorchTitan's own trainer writes no events
}


@pytest.mark.parametrize("kind", LAST_LINES)
def test_the_last_line_says_how_the_run_ended_and_what_is_next(
    launched, tmp_path, kind
):
    end = {
        "event": "complete" if kind == "complete" else "stop",
        "step": 4,
        "kind": kind,
        "reason": "a reason",
    }
    rows = [{"event": "start", "step": 0}, *([end] if kind else [])]
    (tmp_path / "events.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    assert launched(lambda *argv: None) == (
        0,
        f"titan-disp: {LAST_LINES[kind].replace('RUN', str(tmp_path))}",
    )


@pytest.mark.night
def test_ctrl_c_saves_and_the_same_command_resumes(sample, tmp_path):
    run = tmp_path / "run"
    options = (
        "--training.seq_len",
        "32",
        "--metrics.log_freq",
        "1",
        "--condensation.interval",
        "0",
    )
    words = command(
        DEMO,
        sample,
        run,
        *options,
        "--checkpoint.interval",
        "1000",
        "--training.steps",
        nproc=2,
    )
    where = {
        "cwd": ROOT,
        "env": environment(),
        "text": True,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }
    first = subprocess.Popen([*words, "1000"], start_new_session=True, **where)
    while not (run / "metrics.jsonl").exists() or not read_metrics(run):
        assert first.poll() is None
        time.sleep(0.1)
    ranks = children(first.pid)
    os.killpg(first.pid, signal.SIGINT)
    output, _ = first.communicate(timeout=SECONDS)
    assert first.returncode == 130, output[-4000:]
    assert "Traceback" not in output
    assert (
        "SIGINT ended the run. The same command resumes from the newest checkpoint"
        in output.splitlines()[-1]
    )
    assert not any(map(is_running, ranks))
    assert re.match(r"\d\d:\d\d:\d\d  titan-disp .* \(torch ", output)
    assert "to stop       Ctrl-C saves and ends" in output
    for rank in (0, 1):
        (log,) = run.glob(f"logs/*/attempt_0/{rank}/full.log")
        assert " - INFO - Starting job: nano Qwen3" in log.read_text()
    assert "Starting job" not in output
    stop = read_events(run)[-1]
    assert (stop["event"], stop["reason"]) == ("stop", "SIGTERM")
    assert (run / "checkpoint" / f"step-{stop['step']}").is_dir()
    again = subprocess.run([*words, str(stop["step"] + 1)], timeout=SECONDS, **where)
    assert again.returncode == 0, again.stdout[-4000:]
    assert [e["step"] for e in read_events(run) if e["event"] == "resume"] == [
        stop["step"]
    ]


@pytest.mark.night
@pytest.mark.parametrize(("save_seconds", "timeout"), [(20, 5), (45, 120)])
def test_torchrun_waits_for_a_save(sample, tmp_path, save_seconds, timeout):
    """A SIGTERM that torchrun passes on: the save is complete, unless it takes longer
    than TORCH_ELASTIC_SHUTDOWN_TIMEOUT.
    """
    run = tmp_path / "run"
    _, _, _, _, config, _, _, *options = command(
        DEMO, sample, run, "--training.seq_len", "32", "--condensation.interval", "0"
    )
    words = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "1", "-m", "tests.faulty_train"),
        *("--job.config_file", config, *options, "--metrics.log_freq", "1"),
        *("--checkpoint.interval", "1000", "--training.steps", "1000"),
    ]
    faults = {
        "FAULTS": "slow_save:1-1000@0",
        "SLOW": str(save_seconds),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(timeout),
    }
    log = tmp_path / "log"
    with log.open("w") as file:
        torchrun = subprocess.Popen(
            words, cwd=ROOT, env=environment() | faults, stdout=file, stderr=file
        )
    while not (run / "metrics.jsonl").exists() or not read_metrics(run):
        assert torchrun.poll() is None, log.read_text()[-4000:]
        time.sleep(0.1)
    began = time.monotonic()
    torchrun.send_signal(signal.SIGTERM)
    torchrun.wait(timeout=SECONDS)
    seconds = time.monotonic() - began
    assert f"takes less than {timeout} s (TORCH_ELASTIC_SHUTDOWN_" in log.read_text()
    last = read_events(run)[-1]
    saved = [*checkpoints(run / "checkpoint")]
    if save_seconds > timeout:
        assert (last["event"], saved) == ("start", [])
        assert timeout <= seconds < save_seconds
    else:
        assert (last["event"], last["reason"]) == ("stop", "SIGTERM")
        assert saved == [last["step"]]
        assert seconds >= save_seconds
