"""Signs of life in RUN/heartbeat.json, and where a rank stands when there is none."""

import json
import subprocess
import sys

import pytest

from titan_disp.config.load import load_config
from titan_disp.run import liveness
from titan_disp.run.liveness import Heartbeat


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def time(self):
        return 1.7e9 + self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(liveness, "time", clock)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    return clock


def heartbeat(run):
    job_config = load_config([])
    job_config.comm.init_timeout_seconds, job_config.comm.train_timeout_seconds = 300, 100
    job_config.guard.save_seconds, job_config.guard.silence_seconds = 1800, 60
    return Heartbeat(run, job_config)


def read(run):
    return json.loads((run / "heartbeat.json").read_text())


def test_what_is_allowed(tmp_path, clock):
    """Twice the run's own time-outs, or twice the slowest step, and `silence`; the first step and a save by their own."""
    beat = heartbeat(tmp_path)
    try:
        beat.begin("start", 0)
        assert read(tmp_path) == {
            "start": "7.2", "step": 0, "doing": "start", "allowed_seconds": 660, "time": 1.7e9 + 1000
        }  # fmt: skip
        beat.begin("step", 1)  # the first step compiles
        assert (read(tmp_path)["doing"], read(tmp_path)["allowed_seconds"]) == ("step", 660)
        clock.now += 500
        beat.step(1)
        assert (read(tmp_path)["step"], read(tmp_path)["allowed_seconds"]) == (1, 260)
        clock.now += 20
        beat.step(2)
        assert read(tmp_path)["allowed_seconds"] == 260
        beat.begin("save", 2)
        assert read(tmp_path)["allowed_seconds"] == 1860
        clock.now += 1000  # the save does not count as a step's time
        beat.begin("step", 3)
        clock.now += 150
        beat.step(3)
        assert beat.slowest == 150
        assert read(tmp_path)["allowed_seconds"] == 360
        beat.begin("condensation", 3)
        assert read(tmp_path)["allowed_seconds"] == 660
    finally:
        beat.close()
    assert list(tmp_path.iterdir()) == []


def test_short_steps_write_once_a_second(tmp_path, clock):
    beat = heartbeat(tmp_path)
    try:
        written = []
        for step in range(1, 31):
            clock.now += 0.1
            beat.step(step)
            written.append(read(tmp_path)["step"])
        assert len(set(written)) == 3
        beat.begin("save", 30)  # another kind is always written
        assert read(tmp_path)["doing"] == "save"
    finally:
        beat.close()


def test_a_full_disk_ends_no_step(tmp_path, clock):
    beat = heartbeat(tmp_path / "gone")
    beat.begin("step", 1)
    beat.step(1)
    beat.close()


def test_other_ranks_write_nothing_but_where_they_stand():
    """Every rank's own log tells where its threads are, once it has been silent for too long, and not before."""
    code = """if True:
        import time
        from titan_disp.run.liveness import Heartbeat
        from types import SimpleNamespace as Section
        comm = Section(init_timeout_seconds=1e9, train_timeout_seconds=0.05)
        beat = Heartbeat(None, Section(comm=comm, guard=Section(save_seconds=1e9, silence_seconds=0.1)))
        def quick():
            beat.step(1)
            time.sleep(0.05)
        def hangs():
            beat.step(2)
            time.sleep(0.6)
        quick()
        hangs()
        beat.close()
        time.sleep(0.4)
    """
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stderr
    assert text.count("Timeout (") == 1
    assert "in hangs" in text
    assert "in quick" not in text
