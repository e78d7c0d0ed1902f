"""These tests check the local cluster itself, on which the tests of our jobs rely."""

import time

import pytest

from tests.slurm.local import LocalSlurm, processes_with

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

STUBBORN = """\
#!/bin/bash
trap '' TERM
setsid sleep 250 &
while true; do sleep 1; done
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with LocalSlurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def test_a_step_has_all_cpus_of_unequal_nodes(slurm, tmp_path):
    """If nobody asks for CPUs. The first node has more than the second. Of an option that is given twice, the last counts."""
    step = "srun --ntasks-per-node=1 --mem=0 --cpu-bind=none"
    show = "bash -c 'echo $SLURMD_NODENAME $SLURM_CPUS_ON_NODE'"
    lines = [f"{step} {show}", f"echo; {step} --cpus-per-task=2 --cpus-per-task=1 {show}"]
    (tmp_path / "job.sh").write_text(
        "\n".join(["#!/bin/bash", *lines, f"echo; {step} --cpus-per-task=2 {show}; exit 0"])
    )
    job = slurm.sbatch("--nodes=2", "--exclusive", tmp_path / "job.sh", cwd=tmp_path)
    slurm.wait(job, "COMPLETED")
    alone, last, first = (sorted(part.split("\n")) for part in slurm.log(job).split("\n\n"))
    assert {"n1 2", "n2 1"} <= set(alone)
    assert {"n1 1", "n2 1"} <= set(last)
    assert any("More processors requested than permitted" in line for line in first)


def test_another_cluster_leaves_nothing(slurm, tmp_path):
    """Not even of a job that ignores SIGTERM. The first cluster runs on."""
    (tmp_path / "job.sh").write_text(STUBBORN)
    with LocalSlurm(tmp_path, nodes=1) as other:
        other.sbatch("--export=NONE", tmp_path / "job.sh", cwd=tmp_path)
        while "sleep 250" not in str(processes_with(f"SLURM_CONF={tmp_path}/")):
            time.sleep(0.1)
    assert not processes_with(f"SLURM_CONF={tmp_path}/")
    assert "slurmctld" in str(processes_with(f"SLURM_CONF={slurm.folder}/"))
