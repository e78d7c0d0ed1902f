"""These tests run slurm/check_nodes.sbatch on a real local SLURM."""

import json
import sys
from pathlib import Path

import pytest

from tests.command_line import DEMO, ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def submitted(slurm, sample, tmp_path_factory):
    """Submit all jobs at once: good nodes; a node that does not answer, and missing data; an unwritable run folder."""
    folder = tmp_path_factory.mktemp("check")
    python = folder / "python"
    silent = '[[ "$SLURMD_NODENAME $*" != "n2 "*node_health* ]] || exit 1'
    python.write_text(f'#!/bin/bash\n{silent}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)

    def submit(nodes, run, data=sample, python=sys.executable, *options):
        job = slurm.sbatch(
            *(f"--nodelist={nodes}", f"--output={folder}/%j.out", ROOT / "slurm" / "check_nodes.sbatch", DEMO),
            *("--job.dump_folder", run, "--model.hf_assets_path", f"{sample}/tokenizer"),
            *("--training.dataset_path", data, *options),
            env={"TITAN_DISP_SITE": "local_cpu", "TITAN_DISP_PYTHON": str(python)},
            cwd=ROOT,
        )
        return job, Path(run) / "node_check" / f"{job}.0" / "report.json"

    wrong = ("--parallelism.data_parallel_replicate_degree", "2")
    return {
        "good": submit("n[1-2]", folder / "good"),
        "unwritable": submit("n[3-4]", "/dev/null/run"),
        "bad": submit("n[1-3]", folder / "bad", folder / "nowhere", python, *wrong),
    }


def ended(slurm, job, state):
    slurm.wait(job, state, timeout=600)
    return slurm.log(job)


def test_good_nodes(slurm, submitted):
    job, file = submitted["good"]
    log = ended(slurm, job, "COMPLETED")
    report = json.loads(file.read_text())
    assert report["problems"] == {}
    assert list(report["nodes"]) == ["n1", "n2"]
    assert (report["bandwidth"]["ranks"], report["bandwidth"]["backend"]) == (2, "gloo")
    ((a, b, bandwidth),) = report["bandwidth"]["pairs"]
    assert (a, b) == ("n1", "n2")
    assert bandwidth > 1e6
    # One host and one clock: what is left is how late a rank reads it on busy cores.
    assert all(abs(skew) < 1 for skew in report["bandwidth"]["clock_skew"].values())
    assert {line.split()[0] for line in log.splitlines() if line.endswith("  ok")} == {"n1", "n2"}
    assert "all-reduce of 4 MiB over 2 ranks of 2 nodes" in log


def test_bad_nodes(slurm, submitted):
    """The report names the data once for both nodes that answer. Their bandwidth is measured nevertheless."""
    job, file = submitted["bad"]
    log = ended(slurm, job, "FAILED")
    report = json.loads(file.read_text())
    assert "problem: n2: it did not answer" in log
    assert "problem: n1, n3: training.dataset_path is" in log
    assert [len(report["problems"][node]) for node in ("n1", "n3")] == [1, 1]
    assert "problem: the config: data_parallel_replicate_degree 2 × data_parallel_shard_degree 1" in log
    assert "note: not in the bandwidth test: n2" in log
    assert [pair[:2] for pair in report["bandwidth"]["pairs"]] == [["n1", "n3"]]


def test_a_config_that_cannot_be_read(slurm, submitted):
    log = ended(slurm, submitted["unwritable"][0], "FAILED")
    assert "titan-disp: error: job.dump_folder: /dev/null/run is not writable: Not a directory" in log


def test_a_step_has_all_cpus_of_unequal_nodes(slurm, tmp_path):
    """A step has them if nobody asks for CPUs, and supervise.py relies on it.

    The first node's number is more than other nodes have. If an option is given twice, the last one counts.
    """
    step = "srun --ntasks-per-node=1 --mem=0 --cpu-bind=none"
    show = "bash -c 'echo $SLURMD_NODENAME $SLURM_CPUS_ON_NODE'"
    lines = [f"{step} {show}", f"echo; {step} --cpus-per-task=2 --cpus-per-task=1 {show}"]
    file = tmp_path / "job.sh"
    file.write_text("\n".join(["#!/bin/bash", *lines, f"echo; {step} --cpus-per-task=2 {show}; exit 0"]))
    log = ended(slurm, slurm.sbatch("--nodelist=n[1-2]", "--exclusive", file, cwd=tmp_path), "COMPLETED")
    alone, last, first = (sorted(part.split("\n")) for part in log.split("\n\n"))
    assert {"n1 2", "n2 1"} <= set(alone)
    assert {"n1 1", "n2 1"} <= set(last)
    assert any("More processors requested than permitted" in line for line in first)
