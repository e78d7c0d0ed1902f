"""The demo model in two-node jobs on a real local SLURM. In each, one thing goes wrong.

Unless a test says otherwise, mesh and batches are those of an uninterrupted run, which
metrics.jsonl must equal exactly.
"""

import json
import os
import re
import shutil
import signal
import time
from datetime import datetime

import pytest

from tests.command_line import DEMO, ROOT, train
from tests.run_invariants import check_run
from tests.slurm.local import ENDED, LocalSlurm, job_environment, processes_with
from titan_disp.run.integrity import checkpoints
from titan_disp.run.reader import read_json_lines, read_metrics

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]
SCRIPT = ROOT / "slurm" / "pretrain.sbatch"
STEPS = 16
INTERVAL = 4
OPTIONS = (
    *(
        "--training.seq_len",
        "32",
        "--training.steps",
        str(STEPS),
        "--lr_scheduler.warmup_steps",
        "2",
    ),
    *(
        "--metrics.log_freq",
        "1",
        "--checkpoint.interval",
        str(INTERVAL),
        "--checkpoint.keep_latest_k",
        "0",
    ),
    *("--condensation.interval", "0"),  # seconds of every start, and tested elsewhere
    # with the demo's, Adam's first steps amplify the order of sums beyond the
    # tolerances
    *("--optimizer.lr", "4e-3"),
)
KEYS = ("loss", "ce", "dispersion", "grad_norm", "lr", "tokens")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with LocalSlurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def whole(sample, tmp_path_factory):
    """Return an uninterrupted run of two ranks, without SLURM."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(DEMO, sample, run, *OPTIONS, nproc=2)
    check_run(run)
    return run


class Jobs:
    def __init__(self, slurm, sample, folder):
        self.slurm = slurm
        self.sample = sample
        self.folder = folder
        self.submitted = []

    def submit(
        self,
        run,
        *options,
        sbatch=(),
        faults="",
        once=False,
        config=DEMO,
        script=SCRIPT,
        **env,
    ):
        given = {
            "HOME": str(self.folder),
            "FAULTS": faults,
            "FAULTS_ONCE": str(self.folder / "once") if once else "",
        }
        job = self.slurm.sbatch(
            *(
                "--nodes=2",
                "--time=15",
                f"--output={self.folder}/%j.out",
                *sbatch,
                script,
            ),
            *(
                config,
                *OPTIONS,
                "--job.dump_folder",
                run,
                "--model.hf_assets_path",
                f"{self.sample}/tokenizer",
            ),
            *("--training.dataset_path", self.sample, *options),
            env=job_environment(self.folder) | given | env,
            cwd=ROOT,
        )
        self.submitted.append(job)
        return job

    def until_step(self, job, run, step, timeout=500):
        """Wait until a job has logged a step."""
        deadline = time.monotonic() + timeout
        while (
            not (run / "metrics.jsonl").exists()
            or max(read_metrics(run), default=0) < step
        ):
            state = self.slurm.job(job)["JobState"]
            assert state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), (
                self.slurm.log(job)[-5000:]
            )
            assert time.monotonic() < deadline, self.slurm.log(job)[-5000:]
            time.sleep(0.1)

    def completed(self, job, restarts):
        fields = self.slurm.wait(job, "COMPLETED", timeout=1000, restarts=restarts)
        assert int(fields["Restarts"]) == restarts, self.slurm.log(job)
        return self.slurm.log(job)


@pytest.fixture
def jobs(slurm, sample, tmp_path):
    jobs = Jobs(slurm, sample, tmp_path)
    yield jobs
    # what a failed test leaves would slow the next ones down
    for job in jobs.submitted:
        if slurm.job(job)["JobState"] not in ENDED:
            slurm.cancel(job)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def values(run):
    return {
        step: tuple(record[key] for key in KEYS)
        for step, record in read_metrics(run).items()
    }


def events(run, *names):
    return [
        (e["event"], e["step"])
        for e in read_json_lines(run / "events.jsonl")
        if not names or e["event"] in names
    ]


def test_completes_and_refuses_a_second_job(jobs, whole, run):
    """The job checks the nodes and has a budget in tokens.

    A second job on the same run folder leaves it unharmed.
    """
    tokens = ("--training.steps", "-1", "--budget.tokens", str(STEPS * 16 * 32))
    first = jobs.submit(
        run,
        *tokens,
        faults=f"slow:1-{STEPS}@0",
        SLOW="4",
        TITAN_DISP_CHECK_SECONDS="600",
    )
    jobs.until_step(first, run, 2)
    second = jobs.submit(run, *tokens)
    refused = jobs.slurm.wait(second, "FAILED", timeout=300)
    assert refused["Restarts"] == "0"
    log = jobs.slurm.log(second)
    assert re.search(
        r"titan-disp: error: the run folder .* is in use by another job \(host .*SLURM job \d+\.0\.\w+\)",
        log,
    )
    log = jobs.completed(first, restarts=0)
    assert f"the run is complete: step {STEPS}" in log
    assert f"  step {STEPS}/{STEPS}  loss " in log
    assert values(run) == values(whole)
    (reports,) = run.glob(f"nodes/{first}.0.*.json")
    assert json.loads(reports.read_text()).keys() == {"n1", "n2"}
    assert (
        len(list(run.glob(f"logs/{first}.0.*/node-[01]/*/attempt_0/0/std*.log"))) == 4
    )
    # Rank 0 is on the first node, whose log is the job's.
    (rank_0,) = run.glob(f"logs/{first}.0.*/node-0/*/attempt_0/0/stdout.log")
    assert f"  step {STEPS}/{STEPS}  loss " in rank_0.read_text()

    again = jobs.submit(run, *tokens)  # such as the next of a chain of jobs
    log = jobs.completed(again, restarts=0)
    assert "This run was already complete" in log
    assert f"the run is complete: step {STEPS}" in log
    assert values(run) == values(whole)


def test_preempted(jobs, whole, run):
    """After USR1 to the batch script, which --signal=B:USR1@300 sends, the job saves,
    requeues itself and completes.
    """
    job = jobs.submit(run, faults=f"slow:1-{STEPS}@0")
    jobs.slurm.wait(job, "RUNNING")
    time.sleep(3)  # it checks the config
    jobs.slurm.signal(job, "USR1")
    jobs.slurm.wait(job, "RUNNING", timeout=300, restarts=1)
    jobs.until_step(job, run, 6)
    jobs.slurm.signal(job, "USR1")
    log = jobs.completed(job, restarts=2)
    (stop,) = events(run, "stop")
    assert 6 <= stop[1] < STEPS
    assert events(run, "resume") == [("resume", stop[1])]  # nothing was repeated
    assert "USR1 received: asking all ranks to save and stop" in log
    assert "asked to stop (USR1) before training began" in log
    assert values(run) == values(whole)


def test_a_spare_node(jobs, whole, tmp_path, run):
    """After kill -9 of a rank, the job starts again without being requeued.

    Of three nodes two train. The third takes over from one that fails its check then.
    """
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(
        f"""case "$*" in
*node_health*) ! {{ [ "${{SLURMD_NODENAME:-}}" = n2 ] && [ -e {tmp_path}/once ]; }} || exit 1 ;;
esac
exec "$@"
"""
    )
    options = {
        "TITAN_DISP_RETRIES": "now",
        "TITAN_DISP_SPARES": "1",
        "TITAN_DISP_CHECK_SECONDS": "60",
        "TITAN_DISP_PREFIX": f"bash {wrapper}",
    }
    job = jobs.submit(
        run,
        faults="kill:7@1",
        once=True,
        sbatch=("--nodes=3", "--nodelist=n[1-3]"),
        **options,
    )
    log = jobs.completed(job, restarts=0)
    assert ". Starting again in this job" in log
    assert "cannot train: node n2: it did not answer" in log
    assert list(json.loads((run / "nodes.json").read_text())) == ["n2"]
    assert len(list(run.glob("logs/*/node-1"))) == 2
    # it repeats at most one checkpoint interval
    assert events(run, "resume") == [("resume", 4)]
    assert values(run) == values(whole)


@pytest.mark.parametrize("victim", ["supervise.py", "pretrain.sbatch"])
def test_killed_supervisor(jobs, whole, victim, run):
    """The batch script requeues the job after the supervisor's death, and the
    supervisor after that of the script.
    """
    job = jobs.submit(run, faults=f"slow:1-{STEPS}@0")
    jobs.until_step(job, run, 6)
    commands = processes_with(f"SLURM_JOB_ID={job}\0")
    name = "slurm_script" if victim == "pretrain.sbatch" else victim
    [pid] = [
        pid
        for pid, command in commands.items()
        if name in command and "scontrol" not in command
    ]
    os.kill(pid, signal.SIGKILL)
    log = jobs.completed(job, restarts=1)
    if victim == "supervise.py":
        assert "the supervisor ended with status 137" in log
    assert values(run) == values(whole)


def test_a_last_save_that_takes_too_long(jobs, whole, run):
    """The job is requeued before SLURM ends it for good, and the failure is counted.

    Then it has the full time limit again.
    """
    lead = "B:USR1@60"
    job = jobs.submit(run, faults="freeze:7@0", once=True, SBATCH_SIGNAL=lead)
    jobs.until_step(job, run, 6)
    # With a limit from the beginning, a busy machine would need it for the start. At
    # least 60 s are left.
    run_time = datetime.now() - datetime.fromisoformat(jobs.slurm.job(job)["StartTime"])
    lowered = int(run_time.total_seconds() + 60 + 10) // 60 + 1
    jobs.slurm.update(f"JobId={job}", f"TimeLimit={lowered}")
    fields = jobs.slurm.wait(job, "RUNNING", timeout=300, restarts=1)
    begun, end = (
        datetime.fromisoformat(fields[key]) for key in ("StartTime", "EndTime")
    )
    assert (end - begun).total_seconds() == 60 * lowered
    jobs.slurm.update(f"JobId={job}", "TimeLimit=15")
    log = jobs.completed(job, restarts=1)
    late = r"asked to stop \(USR1\) but not saved in time; (\d+) s before the time limit, the last save had not ended"
    # a busy machine is some seconds late
    assert 20 < int(re.search(late, log)[1]) <= 30
    assert values(run) == values(whole)


def test_edits_between_two_starts(jobs, whole, tmp_path, run):
    """A requeued job runs what it was submitted with.

    The start after a failure waits.
    """
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "slurm", checkout / "slurm")
    site = shutil.copy(ROOT / "slurm" / "sites" / "local_cpu.sh", checkout / "my site")
    config = tmp_path / "config.toml"
    config.write_text(DEMO.read_text())
    given = {
        "config": config,
        "script": checkout / "slurm" / "pretrain.sbatch",
        "TITAN_DISP_RETRIES": "1",
    }
    given["TITAN_DISP_SITE"] = str(site)
    job = jobs.submit(run, faults="crash:7@1", once=True, **given)
    while not list(run.glob(f"launch/{job}.*/slurm/site.sh")):
        time.sleep(0.1)
    config.write_text("[optimizer]\nlr = 1.0\n")
    shutil.rmtree(checkout)
    jobs.slurm.wait(job, "PENDING", timeout=300)
    time.sleep(2)
    due = datetime.fromisoformat(jobs.slurm.job(job)["StartTime"]) - datetime.now()
    assert 30 < due.total_seconds() < 61
    jobs.completed(job, restarts=1)
    assert values(run) == values(whole)


def test_node_down(jobs, whole, run):
    """SLURM requeues the job itself, and it restarts on other nodes."""
    job = jobs.submit(run, faults=f"slow:1-{STEPS}@0", sbatch=("--nodelist=n[1-2]",))
    jobs.until_step(job, run, 6)
    jobs.slurm.update("NodeName=n2", "State=DOWN", "Reason=test")
    try:
        # The list of nodes was for the first start only, so that the test knows which
        # node to take down.
        jobs.slurm.update(f"JobId={job}", "ReqNodeList=")
        jobs.completed(job, restarts=1)
    finally:
        jobs.slurm.update("NodeName=n2", "State=RESUME")
    ((_, step),) = events(run, "resume")
    assert step >= 4
    assert values(run) == values(whole)


@pytest.mark.changes_runs  # the copied run has no events of its first start
def test_damaged_checkpoints(jobs, whole, run):
    """One is truncated, and in one a bit has flipped.

    The run falls back to the checkpoint before, and says so.
    """
    shutil.copytree(
        whole,
        run,
        ignore=shutil.ignore_patterns("logs", "tb", "step-16", "events.jsonl"),
    )
    lines = [json.dumps(row) for step, row in read_metrics(run).items() if step <= 12]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    truncated, flipped = (
        next((run / "checkpoint" / f"step-{step}").glob("__1_*.distcp"))
        for step in (12, 8)
    )
    os.truncate(truncated, truncated.stat().st_size - 100)
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 4
    flipped.write_bytes(content)
    log = jobs.completed(jobs.submit(run), restarts=0)
    assert re.search(
        r"step-12 cannot be loaded: __1_0.distcp has [\d,]+ bytes, expected [\d,]+", log
    )
    assert "step-8 cannot be loaded: __1_0.distcp differs from its hash" in log
    damaged = [("checkpoint_damaged", 12), ("checkpoint_damaged", 8)]
    assert events(run, "checkpoint_damaged", "resume") == [*damaged, ("resume", 4)]
    assert {path.name for path in (run / "checkpoint").glob("damaged-*")} == {
        "damaged-8",
        "damaged-12",
    }
    assert values(run) == values(whole)


def test_not_finite(jobs, run):
    """All ranks skip the step.

    After too many in a row, the run goes back to the weights of step 4. After too many
    again, it is refused, with step and term in outcome.txt.
    """
    faults = "nan_loss:3@1,inf_gradient:5@0,nan_loss:9-16@0"
    job = jobs.submit(
        run, "--guard.max_skipped_steps", "3", faults=faults, TITAN_DISP_RETRIES="none"
    )
    jobs.slurm.wait(job, "FAILED", timeout=500)
    assert events(run, "skip") == [("skip", step) for step in (3, 5, 9, 10, 12, 13)]
    assert events(run, "step_back", "refused") == [("step_back", 11), ("refused", 11)]
    outcome = (run / "outcome.txt").read_text()
    reason = "step 14: cross-entropy and gradient norm not finite, 3 steps in a row"
    assert reason in outcome
    assert "The run went back at step 11" in outcome
    assert "Not requeued" in outcome
    for node in (0, 1):
        (log,) = run.glob(f"logs/{job}.0.*/node-{node}/*/attempt_0/0/stdout.log")
        assert [
            s
            for s in range(1, 17)
            if f"step {s} is skipped on all ranks" in log.read_text()
        ] == [3, 5, *range(9, 15)]
    assert checkpoints(run / "checkpoint") == [4, 8, 11]


def test_hang(jobs, whole, run):
    given = {"once": True, "TITAN_DISP_RETRIES": "now"}
    job = jobs.submit(
        run, "--comm.train_timeout_seconds", "10", faults="hang:7@1", **given
    )
    jobs.completed(job, restarts=0)
    assert events(run, "resume") == [("resume", 4)]
    assert values(run) == values(whole)


def test_sick_nodes(jobs, tmp_path, run):
    """A node does not start the check, then hangs in it, and is excluded.

    Then one lacks a GPU. No start ends the run.
    """
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(
        """case "${SLURM_RESTART_COUNT:-0} $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) $*" in
"0 ${SLURMD_NODENAME:-} "*node_health*) exit 1 ;;
"1 ${SLURMD_NODENAME:-} "*node_health*) sleep 600 ;;
"2 ${SLURMD_NODENAME:-} "*node_health*) "$@" | sed 's/"gpus": \\[\\]/"gpus": ["A", "B"]/'; exit ;;
esac
exec "$@"
"""
    )
    given = {
        "TITAN_DISP_PREFIX": f"bash {wrapper}",
        "TITAN_DISP_CHECK_SECONDS": "60",
    }
    job = jobs.submit(
        run, "--training.steps", "2", "--lr_scheduler.warmup_steps", "1", **given
    )
    log = jobs.completed(job, restarts=3)
    reasons = [
        r["reason"]
        for r in read_json_lines(run / "supervisor.jsonl")
        if r["state"] == "requeue"
    ]
    assert len(reasons) == 3
    assert all("nodes that cannot train: node n" in reason for reason in reasons)
    assert re.search("ended, because it took 60 s: srun .* check", log)
    assert "but most nodes have 2" in reasons[2]
    first, second = (
        re.search(r"node (n\d): it did not answer", reason)[1] for reason in reasons[:2]
    )
    excluded = first if first == second else "(null)"  # n1, where the nodes are idle
    assert jobs.slurm.job(job)["ExcNodeList"] == excluded
    assert events(run, "complete") == [("complete", 2)]


def test_frozen(jobs, whole, run):
    """All ranks stand still and no collective is pending, so that only the heartbeat
    shows it.
    """
    options = ("--comm.train_timeout_seconds", "5", "--guard.silence_seconds", "2")
    job = jobs.submit(
        run,
        *options,
        faults="freeze:7@0,freeze:7@1",
        once=True,
        TITAN_DISP_RETRIES="0",
    )
    log = jobs.completed(job, restarts=1)
    assert re.search(
        r"rank 0 has been silent for \d+ s at step \d \(step\), and \d+ s are allowed",
        log,
    )
    stood = r"failure 1 of at most 2 .*node 0 rank 0: \w+ in faulty_train.py:\d+; node 1 rank 0: \w+ in faulty"
    assert re.search(stood, log)
    assert events(run, "resume") == [("resume", 4)]
    assert values(run) == values(whole)


def test_requeue_refused(jobs, whole, tmp_path, run):
    """If jobs may not requeue themselves, the next job of a chain continues the run."""
    commands = tmp_path / "bin"
    commands.mkdir()
    real = shutil.which("scontrol", path=jobs.slurm.environment["PATH"])
    (commands / "scontrol").write_text(
        f'#!/bin/bash\n[ "$1" != requeue ] || exit 1\nexec {real} "$@"\n'
    )
    (commands / "scontrol").chmod(0o755)
    path = {"PATH": f"{commands}:{jobs.slurm.environment['PATH']}"}
    chain = ("--dependency=singleton", "--job-name=chain")
    faults = f"slow:1-{STEPS}@0"
    first = jobs.submit(run, faults=faults, sbatch=chain, **path)
    second = jobs.submit(run, faults=faults, sbatch=chain, **path)
    jobs.until_step(first, run, 5)
    jobs.slurm.signal(first, "USR1")
    jobs.slurm.wait(first, "FAILED", timeout=300)
    assert "NOT REQUEUED: SLURM refused it" in jobs.slurm.log(first)
    jobs.completed(second, restarts=0)
    assert values(run) == values(whole)


def test_cancelled(jobs, run):
    job = jobs.submit(run, faults="slow:1-200@0")
    jobs.until_step(job, run, 2)
    jobs.slurm.cancel(job)
    jobs.slurm.wait(job, "CANCELLED", timeout=300)
    time.sleep(5)
    fields = jobs.slurm.job(job)
    assert (fields["JobState"], fields["Restarts"]) == ("CANCELLED", "0")
