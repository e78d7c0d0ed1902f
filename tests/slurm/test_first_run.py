"""These tests run slurm/first_run.sbatch on two nodes of a real local SLURM."""

import json
import sys

import pytest

from tests.command_line import DEMO, ROOT
from tests.slurm.local import LocalSlurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with LocalSlurm(tmp_path_factory.mktemp("slurm"), nodes=3) as cluster:
        yield cluster


@pytest.fixture
def first_run(slurm, sample, tmp_path):
    """Maps options to state, log and report.json of a job on two nodes, by default of the
    stage that checks them.
    """
    run = tmp_path / "run"

    def submit(*options, sbatch=("--nodes=2",), **env):
        job = slurm.sbatch(
            *(
                *sbatch,
                f"--output={tmp_path}/%j.out",
                ROOT / "slurm" / "first_run.sbatch",
                DEMO,
            ),
            *(
                "--job.dump_folder",
                run,
                "--model.hf_assets_path",
                f"{sample}/tokenizer",
            ),
            *("--training.dataset_path", sample, *options),
            env={
                "TITAN_DISP_SITE": "local_cpu",
                "TITAN_DISP_PYTHON": sys.executable,
                "TITAN_DISP_STAGES": "nodes",
                **env,
            },
            cwd=ROOT,
        )
        state = slurm.wait(job, {"COMPLETED", "FAILED"}, timeout=900)["JobState"]
        report = run / "first_run" / f"{job}.0" / "report.json"
        return (
            state,
            slurm.log(job),
            json.loads(report.read_text()) if report.exists() else None,
        )

    return submit


def test_good_nodes(first_run):
    state, log, report = first_run()
    assert state == "COMPLETED", log
    assert report["problems"] == {}
    assert list(report["nodes"]) == ["n1", "n2"]
    ((*nodes, bandwidth),) = report["bandwidth"]["pairs"]
    assert nodes == ["n1", "n2"]
    assert bandwidth > 1e6
    # One host and one clock: what is left is how late a rank reads it on busy cores.
    assert all(abs(skew) < 10 for skew in report["bandwidth"]["clock_skew"].values())
    assert "all-reduce of 4 MiB over 2 ranks of 2 nodes" in log
    assert "(gloo)" in log


def test_stages_on_two_nodes(first_run, tmp_path):
    """The last node dies, its run goes on, and saves are measured."""
    stages = "one fsdp save resume kill-node kill-node-resume saves"
    state, log, _ = first_run(TITAN_DISP_STAGES=stages)
    assert state == "COMPLETED", log
    (folder,) = tmp_path.glob("run/first_run/*")
    summary = (folder / "summary.txt").read_text()
    passed = [line.split()[1] for line in summary.splitlines() if line[:2] == "ok"]
    assert passed == [f"{name}:" for name in ("nodes", *stages.split())]
    assert " found: all ended within " in summary


def test_a_node_that_does_not_answer(first_run, tmp_path):
    """The bandwidth of the other two nodes is measured, and the report says which node
    is missing.
    """
    python = tmp_path / "python"
    sick = '[[ "$SLURMD_NODENAME $*" != "n2 "*node_health* ]] || exit 1'
    python.write_text(f'#!/bin/bash\n{sick}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    mesh = ("--parallelism.data_parallel_replicate_degree", "2")
    state, log, report = first_run(
        *mesh, sbatch=("--nodes=3",), TITAN_DISP_PYTHON=str(python)
    )
    assert state == "FAILED"
    assert "problem: n2: it did not answer" in log
    assert (
        "problem: the config: data_parallel_replicate_degree 2 × data_parallel_shard_degree 1"
        in log
    )
    assert "note: not in the bandwidth test: n2" in log
    assert [pair[:2] for pair in report["bandwidth"]["pairs"]] == [["n1", "n3"]]


def test_a_config_that_cannot_be_read(first_run):
    state, log, report = first_run("--job.dump_folder", "/dev/null/run")
    assert state == "FAILED"
    assert (
        "titan-disp: error: job.dump_folder: /dev/null/run is not writable: Not a directory"
        in log
    )
    assert report is None
