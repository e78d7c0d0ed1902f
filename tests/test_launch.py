"""Ctrl-C on ``titan-disp train``: the ranks save and end. A second one kills them."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from tests.command_line import DEMO, ROOT, children, environment
from titan_disp.cluster import launch
from titan_disp.cluster.launch import StopRanks, stop_signals
from titan_disp.config.options import TrainOptions
from titan_disp.run.reader import read_events, read_metrics

pytestmark = pytest.mark.usefixtures("heard")

RANK = """
import signal, sys, time

def heard(number, frame):
    print(signal.Signals(number).name, flush=True)
    if sys.argv[1] == "obeys":
        sys.exit(0)

signal.signal(signal.SIGTERM, heard)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def rank():
    """Start a process as torchrun starts a rank, and wait until it listens."""
    started = []

    def start(kind):
        command = [sys.executable, "-c", RANK, kind]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ranks_get_sigterm_from_the_first_signal(rank, capsys, number):
    ranks, stop = [rank("obeys"), rank("obeys")], StopRanks()
    before = signal.getsignal(number)
    with stop_signals(stop.heard):
        signal.raise_signal(number)
        assert [process.wait(10) for process in ranks] == [0, 0]
    assert [process.stdout.read() for process in ranks] == ["SIGTERM\n"] * 2
    assert (stop.number, stop.name) == (number, number.name)
    assert "A second signal kills them" in capsys.readouterr().err
    assert signal.getsignal(number) == before


def test_a_later_signal_kills_the_ranks(rank, monkeypatch):
    """Not one within a second: timeout(1) signals a process and its group."""
    now = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    one, stop = rank("does not end"), StopRanks()
    with stop_signals(stop.heard):
        signal.raise_signal(signal.SIGTERM)
        assert one.stdout.readline() == "SIGTERM\n"
        now[0] += 0.9
        signal.raise_signal(signal.SIGTERM)
        assert one.poll() is None
        now[0] += 0.2
        signal.raise_signal(signal.SIGINT)
        assert one.wait(10) == -signal.SIGKILL
    assert stop.number == signal.SIGTERM  # the exit status is that of the first


def test_a_closed_stderr_does_not_keep_the_signal_from_the_ranks(rank, monkeypatch):
    """Ctrl-C may end tee before titan-disp prints."""

    class Closed:
        def write(self, text):
            raise BrokenPipeError

    one, stop = rank("obeys"), StopRanks()
    monkeypatch.setattr(sys, "stderr", Closed())
    with stop_signals(stop.heard):
        signal.raise_signal(signal.SIGINT)
    assert one.wait(10) == 0
    assert stop.number == signal.SIGINT


def test_an_ignored_signal_stays_ignored():
    """As under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals(StopRanks().heard):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize(
    ("exitcode", "status", "line"), [(-15, 130, "not every rank ended by itself"), (1, 1, "rank 1 failed")]
)
def test_a_failure_is_told_from_the_signal(sample, tmp_path, monkeypatch, capsys, exitcode, status, line):
    """A rank that fails by itself, before or after Ctrl-C, is reported as ever."""

    def start(settings, program):
        def run(*argv):
            signal.raise_signal(signal.SIGINT)
            failure = SimpleNamespace(exitcode=exitcode, local_rank=1, timestamp=0)
            error = ChildFailedError("titan_disp.train", {1: failure})
            monkeypatch.setattr(error, "get_first_failure", lambda: (1, failure))
            raise error

        return run

    monkeypatch.setattr(launch, "elastic_launch", start)
    monkeypatch.setattr(launch, "_ranks", lambda: [0x7FFFFFFF])  # no process has this number
    monkeypatch.setattr(ChildFailedError, "format_msg", lambda *_: "", raising=False)
    overrides = ["--job.dump_folder", str(tmp_path), "--training.dataset_path", str(sample)]
    overrides += ["--model.hf_assets_path", f"{sample}/tokenizer"]
    assert launch.launch(TrainOptions(str(DEMO), tuple(overrides), 2)) == status
    assert line in capsys.readouterr().err


def test_without_ranks_a_signal_ends_the_command():
    with pytest.raises(SystemExit) as error, stop_signals(StopRanks().heard):
        signal.raise_signal(signal.SIGINT)
    assert error.value.code == 130


@pytest.mark.night
def test_ctrl_c_saves_and_the_same_command_resumes(sample, tmp_path):
    """SIGINT to the whole process group, as a terminal sends it."""
    run = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "titan_disp.cli", "train", str(DEMO), "--nproc", "2"),
        *("--job.dump_folder", str(run), "--training.dataset_path", str(sample)),
        *("--model.hf_assets_path", f"{sample}/tokenizer", "--training.seq_len", "32", "--metrics.log_freq", "1"),
        *("--condensation.interval", "0", "--checkpoint.interval", "1000", "--training.steps"),
    ]
    first = subprocess.Popen(
        [*command, "1000"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or not read_metrics(run):
        assert time.monotonic() < deadline
        assert first.poll() is None
        time.sleep(0.1)
    ranks = children(first.pid)
    os.killpg(first.pid, signal.SIGINT)
    output, _ = first.communicate(timeout=120)
    assert first.returncode == 130, output[-4000:]
    assert "Traceback" not in output
    assert output.splitlines()[-1] == (
        "titan-disp: SIGINT ended the run. The same command resumes from the newest checkpoint, "
        "or begins anew if there is none."
    )
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks)
    stop = read_events(run)[-1]
    assert (stop["event"], stop["reason"]) == ("stop", "SIGTERM")
    assert (run / "checkpoint" / f"step-{stop['step']}").is_dir()
    last = str(stop["step"] + 1)
    again = subprocess.run([*command, last], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr[-4000:]
    assert [e["step"] for e in read_events(run) if e["event"] == "resume"] == [stop["step"]]
