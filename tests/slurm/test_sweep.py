"""This test runs a sweep as an array of jobs on a real local SLURM."""

import os

import pytest

from tests.command_line import ROOT, typed
from tests.slurm.local import LocalSlurm, job_environment
from tests.test_sweeps import GRID, NAMES, nano, write
from titan_disp.lab.sweeps.preparation import state
from titan_disp.run.reader import read_events, read_json_lines

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]


@pytest.fixture
def slurm(tmp_path_factory):
    with LocalSlurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def test_a_killed_rank_a_cancelled_task_and_a_second_call(
    slurm, sample, tmp_path, monkeypatch, capfd
):
    """Two of four points train at a time.

    Only the killed task is requeued, and only the cancelled one submitted again.
    """
    file = write(
        tmp_path / "sweep.toml",
        GRID,
        overrides=(*nano(sample), "--checkpoint.interval=1"),
    )
    given = {
        **slurm.environment,
        "FAULTS": "kill:3@0",
        "FAULTS_ONCE": str(tmp_path / "once"),
    }
    for name, value in (given | job_environment(tmp_path)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)

    def submit():
        """Return the array's id and the tasks that were requested."""
        sbatch = ("--sbatch", "time=15", f"output={tmp_path}/%A_%a.out")
        words = (
            "sweep",
            file,
            "--submit",
            "--jobs",
            "2",
            "--gpus-per-node",
            "0",
            "--site",
            "local_cpu",
            *sbatch,
        )
        assert typed(monkeypatch, *words) == 0
        told = capfd.readouterr().out
        (line,) = (line for line in told.splitlines() if line.startswith("sbatch "))
        return told.split()[-1], next(
            word for word in line.split() if word.startswith("--array")
        )

    array, tasks = submit()
    assert tasks == "--array=0-3%2"
    slurm.wait(f"{array}_3", "RUNNING", timeout=600)  # two of the others have ended
    slurm.cancel(f"{array}_3")
    slurm.wait(f"{array}_3", "CANCELLED", timeout=60)
    fields = [
        slurm.wait(f"{array}_{task}", "COMPLETED", timeout=600) for task in range(3)
    ]
    assert sorted(int(one["Restarts"]) for one in fields) == [0, 0, 1]
    runs = tmp_path / "runs"
    assert [state(runs / name)[0] for name in NAMES[:3]] == ["finished"] * 3
    assert state(runs / NAMES[3])[0] in ("not started", "unfinished")
    (killed,) = (
        name for name, one in zip(NAMES, fields, strict=False) if one["Restarts"] == "1"
    )
    assert [
        e["step"] for e in read_events(runs / killed) if e["event"] == "resume"
    ] == [2]
    states = [r["state"] for r in read_json_lines(runs / killed / "supervisor.jsonl")]
    assert states.count("requeue") == 1

    before = {
        name: os.path.getmtime(runs / name / "events.jsonl") for name in NAMES[:3]
    }
    array, tasks = submit()
    assert tasks == "--array=3%2"
    slurm.wait(f"{array}_3", "COMPLETED", timeout=600)
    assert [state(runs / name)[0] for name in NAMES] == ["finished"] * 4
    assert {
        name: os.path.getmtime(runs / name / "events.jsonl") for name in NAMES[:3]
    } == before
