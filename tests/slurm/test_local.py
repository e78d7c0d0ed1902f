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

# Ends by itself only when it was requeued. Bash runs a trap when `wait` is interrupted, but not while a command in the
# foreground runs: so the step is in the background.
RETURNS = """\
#!/bin/bash
#SBATCH --nodes=2 --requeue --open-mode=append
say() { echo "$1 $(date +%s.%N)"; }
if [ -n "$SLURM_RESTART_COUNT" ]; then say "restart $SLURM_RESTART_COUNT on $SLURM_JOB_NODELIST"; exit; fi
trap 'say USR1; scontrol requeue $SLURM_JOB_ID' USR1
srun bash -c 'echo "step on $SLURMD_NODENAME"; sleep 250' &
say ready
while kill -0 $! 2>/dev/null; do wait $!; done
"""

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
    """Return a function that submits a script. Jobs that still run at the end are cancelled."""
    jobs = []

    def submit(script, *options, **env):
        (tmp_path / "job.sh").write_text(script)
        jobs.append(slurm.sbatch(*options, tmp_path / "job.sh", env=env, cwd=tmp_path))
        return jobs[-1]

    yield submit
    for job in jobs:
        slurm.cancel(job)


def until_logged(slurm, job, text, timeout=60):
    deadline = time.monotonic() + timeout
    while text not in (log := slurm.log(job)):
        assert time.monotonic() < deadline, f"no {text!r} within {timeout} s in:\n{log}"
        time.sleep(0.1)
    return log


def when(log, word):
    """Return the time in the line that begins with ``word``, in seconds."""
    return next(float(line.split()[-1]) for line in log.splitlines() if line.startswith(word))


def processes(folder):
    """Return pid and command of each process that has the environment of the cluster in ``folder``."""
    return list(processes_with(f"SLURM_CONF={folder}/").items())


def until_runs(folder, command, timeout=30):
    deadline = time.monotonic() + timeout
    while command not in str(processes(folder)):
        assert time.monotonic() < deadline, f"{command!r} is not among {processes(folder)}"
        time.sleep(0.1)


def test_two_nodes(slurm, submit):
    job = submit("#!/bin/bash\nsrun --label bash -c 'echo $SLURMD_NODENAME $GREETING'\n", "--nodes=2", GREETING="hello")
    fields = slurm.wait(job, "COMPLETED")
    assert (fields["NumNodes"], fields["ExitCode"], fields["Restarts"]) == ("2", "0:0", "0")
    names = [line.split() for line in slurm.log(job).splitlines()]
    assert sorted(names) == [["0:", "n1", "hello"], ["1:", "n2", "hello"]]


def test_a_step_has_all_cpus_of_unequal_nodes(slurm, submit):
    """A step has them if nobody asks for CPUs.

    The first node's number is more than other nodes have. If an option is given twice, the last one counts.
    """
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


def test_requeues_itself_on_usr1(slurm, submit):
    job = submit(RETURNS)
    until_logged(slurm, job, "step on n2")
    until_logged(slurm, job, "ready")
    slurm.signal(job, "USR1")
    fields = slurm.wait(job, "COMPLETED", restarts=1)
    assert fields["Restarts"] == "1"
    log = slurm.log(job)
    delay = when(log, "restart 1") - when(log, "USR1")
    print(f"{delay:.1f} s from requeue to restart")
    # cred_expire + 1 and a look at the queue; KillWait more where a process ignores SIGTERM. 120 s by default.
    assert 5 < delay < 30


def test_requeue_from_outside(slurm, submit):
    job = submit(RETURNS)
    until_logged(slurm, job, "ready")
    slurm.requeue(job)
    assert slurm.wait(job, "COMPLETED", restarts=1)["Restarts"] == "1"
    assert "USR1" not in slurm.log(job)


def test_node_down(slurm, submit):
    job = submit(RETURNS)
    until_logged(slurm, job, "step on n2")
    slurm.set_node("n2", "DOWN")
    try:
        assert slurm.wait(job, "COMPLETED", restarts=1)["NodeList"] in ("n[1,3]", "n[1,4]", "n[3-4]")
    finally:
        slurm.set_node("n2", "RESUME")
    all_nodes = submit("#!/bin/bash\ntrue\n", "--nodes=4")
    assert slurm.wait(all_nodes, "COMPLETED")["NodeList"] == "n[1-4]"


def test_signal_before_the_time_limit(slurm, submit):
    """SLURM checks limits every 30 s and signals up to 60 s early.

    With a limit of one minute, USR1 comes within 30 s.
    """
    job = submit(RETURNS, "--time=1", "--signal=B:USR1@50")
    until_logged(slurm, job, "ready")
    until_logged(slurm, job, "USR1", timeout=45)
    log = slurm.log(job)
    print(f"USR1 {when(log, 'USR1') - when(log, 'ready'):.1f} s after the start")
    assert slurm.wait(job, "COMPLETED", restarts=1)["TimeLimit"] == "00:01:00"


def test_wait_says_what_is_wrong(slurm, submit):
    job = submit("#!/bin/bash\necho the reason; exit 3\n")
    with pytest.raises(RuntimeError, match=r"is FAILED(.|\n)*ExitCode=3:0(.|\n)*the reason"):
        slurm.wait(job, "COMPLETED", timeout=250)
    with pytest.raises(TimeoutError, match=r"is PENDING(.|\n)*Reason="):
        slurm.wait(submit(RETURNS, "--hold"), {"RUNNING", "COMPLETED"}, timeout=0.1)


def stop_in_the_middle(folder):
    (folder / "job.sh").write_text(STUBBORN)
    with LocalSlurm(folder, nodes=1) as slurm:
        slurm.sbatch("--export=NONE", folder / "job.sh", cwd=folder)
        until_runs(folder, "sleep 250")
        raise ZeroDivisionError


def test_another_cluster_leaves_nothing(slurm, tmp_path):
    """A second cluster leaves no process, not even of a job that ignores SIGTERM, and not after an exception.

    The first one runs on.
    """
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
