"""These tests check the local cluster itself, on which the tests of our jobs rely."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.local import LocalSlurm, processes_with

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]

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


@pytest.fixture
def submit(slurm, tmp_path):
    """Submits a script. Jobs that still run at the end are cancelled."""
    jobs = []

    def submit(script, *options):
        (tmp_path / "job.sh").write_text(script)
        jobs.append(slurm.sbatch(*options, tmp_path / "job.sh", cwd=tmp_path))
        return jobs[-1]

    yield submit
    for job in jobs:
        slurm.cancel(job)


def processes(folder):
    """The commands of the processes that have the environment of the cluster in ``folder``."""
    return list(processes_with(f"SLURM_CONF={folder}/").values())


def until_runs(folder, command, timeout=30):
    deadline = time.monotonic() + timeout
    while command not in str(processes(folder)):
        assert time.monotonic() < deadline, f"{command!r} is not among {processes(folder)}"
        time.sleep(0.1)


def test_a_step_has_all_cpus_of_unequal_nodes(slurm, submit):
    """If nobody asks for CPUs. The first node has more than the second. Of an option that is given twice, the last counts."""
    step = "srun --ntasks-per-node=1 --mem=0 --cpu-bind=none"
    show = "bash -c 'echo $SLURMD_NODENAME $SLURM_CPUS_ON_NODE'"
    lines = [f"{step} {show}", f"echo; {step} --cpus-per-task=2 --cpus-per-task=1 {show}"]
    job = submit(
        "\n".join(["#!/bin/bash", *lines, f"echo; {step} --cpus-per-task=2 {show}; exit 0"]), "--nodes=2", "--exclusive"
    )
    slurm.wait(job, "COMPLETED")
    alone, last, first = (sorted(part.split("\n")) for part in slurm.log(job).split("\n\n"))
    assert {"n1 2", "n2 1"} <= set(alone)
    assert {"n1 1", "n2 1"} <= set(last)
    assert any("More processors requested than permitted" in line for line in first)


def test_wait_says_what_is_wrong(slurm, submit):
    job = submit("#!/bin/bash\necho the reason; exit 3\n")
    with pytest.raises(RuntimeError, match=r"is FAILED(.|\n)*ExitCode=3:0(.|\n)*the reason"):
        slurm.wait(job, "COMPLETED", timeout=250)
    with pytest.raises(TimeoutError, match=r"is PENDING(.|\n)*Reason="):
        slurm.wait(submit("#!/bin/bash\n", "--hold"), {"RUNNING", "COMPLETED"}, timeout=0.1)


def stop_in_the_middle(folder):
    (folder / "job.sh").write_text(STUBBORN)
    with LocalSlurm(folder, nodes=1) as slurm:
        slurm.sbatch("--export=NONE", folder / "job.sh", cwd=folder)
        until_runs(folder, "sleep 250")
        raise ZeroDivisionError


def test_another_cluster_leaves_nothing(slurm, tmp_path):
    """Not even of a job that ignores SIGTERM, and not after an exception. The first cluster runs on."""
    with pytest.raises(ZeroDivisionError):
        stop_in_the_middle(tmp_path)
    assert processes(tmp_path) == []
    assert "slurmctld" in str(processes(slurm.folder))


def test_after_a_killed_cluster(tmp_path):
    """The daemons end with their Python process. The jobs end when the next cluster starts, here in the same folder."""
    command = [sys.executable, "-m", "tests.slurm.local"]
    killed = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    )
    conf = Path(killed.stdout.readline().strip().removeprefix("export SLURM_CONF="))
    (tmp_path / "job.sh").write_text(STUBBORN)
    subprocess.run(["sbatch", "job.sh"], cwd=tmp_path, env={**os.environ, "SLURM_CONF": str(conf)}, check=True)
    until_runs(conf.parent, "sleep 250")
    killed.kill()
    killed.communicate()
    with LocalSlurm(conf.parent, nodes=2) as slurm:
        assert "sleep 250" not in str(processes(conf.parent))
        slurm.wait(slurm.sbatch("--nodes=2", "--wrap=true", cwd=tmp_path), "COMPLETED")
    assert processes(conf.parent) == []
