"""These tests train the demo model in two-node jobs on a real local SLURM. In each, one thing goes wrong.

Unless a test says otherwise, mesh and batches are those of an uninterrupted run, and metrics.jsonl must equal that
run's exactly. Jobs that nobody has to act on are submitted together, so that two run at a time and wait at once.
"""

import json
import os
import re
import shutil
import sys
import time

import pytest

from tests.command_line import DEMO, ROOT, train
from tests.slurm.local import ENDED
from titan_disp.run.integrity import checkpoints
from titan_disp.run.reader import read_json_lines, read_metrics

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]
STEPS, INTERVAL = 16, 4
OPTIONS = (
    *("--training.seq_len", "32", "--training.steps", str(STEPS), "--lr_scheduler.warmup_steps", "2"),
    *("--metrics.log_freq", "1", "--checkpoint.interval", str(INTERVAL), "--checkpoint.keep_latest_k", "0"),
    *("--condensation.interval", "0"),  # seconds of every start, and tested elsewhere
    *("--optimizer.lr", "4e-3"),  # with the demo's, Adam's first steps amplify the order of sums beyond the tolerances
)
SHORT = ("--training.steps", "2", "--lr_scheduler.warmup_steps", "1")
SLOW = f"slow:1-{STEPS}@0"
KEYS = ("loss", "ce", "dispersion", "grad_norm", "lr", "tokens")
FIRST = "--nice=-1000"  # before the jobs that are submitted together


@pytest.fixture(scope="module")
def whole(sample, tmp_path_factory):
    """Return an uninterrupted run of two ranks, without SLURM."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(DEMO, sample, run, *OPTIONS, nproc=2)
    return run


class Jobs:
    def __init__(self, slurm, sample, folder):
        self.slurm, self.sample, self.folder, self.submitted = slurm, sample, folder, []

    def submit(self, run, *options, sbatch=(FIRST,), faults="", once=False, **env):
        environment = {
            **{"TITAN_DISP_SITE": "local_cpu", "TITAN_DISP_PYTHON": sys.executable, "TITAN_DISP_CHECK_NODES": "0"},
            **{"TITAN_DISP_MODULE": "tests.faulty_train", "TITAN_DISP_LOCAL": str(self.folder), "FAULTS": faults},
            **{"FAULTS_ONCE": f"{run}.once" if once else "", **env},
        }
        job = self.slurm.sbatch(
            *("--nodes=2", "--time=15", f"--output={self.folder}/%j.out", *sbatch, ROOT / "slurm" / "pretrain.sbatch"),
            *(DEMO, *OPTIONS, "--job.dump_folder", run, "--model.hf_assets_path", f"{self.sample}/tokenizer"),
            *("--training.dataset_path", self.sample, *options),
            env=environment,
            cwd=ROOT,
        )
        self.submitted.append(job)
        return job

    def until_step(self, job, run, step):
        """Wait until a job has logged a step."""
        deadline = time.monotonic() + 400
        while not (run / "metrics.jsonl").exists() or max(read_metrics(run), default=0) < step:
            state = self.slurm.job(job)["JobState"]
            assert state in ("PENDING", "CONFIGURING", "RUNNING"), self.slurm.log(job)[-5000:]
            assert time.monotonic() < deadline, self.slurm.log(job)[-5000:]
            time.sleep(0.1)

    def completed(self, job, restarts, more=False):
        fields = self.slurm.wait(job, "COMPLETED", timeout=900, restarts=restarts)
        assert more or int(fields["Restarts"]) == restarts, self.slurm.log(job)
        return self.slurm.log(job)

    def gave_up(self, job):
        """Wait until a job has failed, and return the first line of its log."""
        self.slurm.wait(job, "FAILED", timeout=900)
        return self.slurm.log(job).splitlines()[0]

    def cancel(self):
        for job in self.submitted:  # what a failed test leaves would slow the next ones down
            if self.slurm.job(job)["JobState"] not in ENDED:
                self.slurm.cancel(job)


@pytest.fixture
def jobs(slurm, sample, tmp_path):
    jobs = Jobs(slurm, sample, tmp_path)
    yield jobs
    jobs.cancel()


@pytest.fixture(scope="module")
def queued(slurm, sample, request, tmp_path_factory):
    """Submit the jobs that nobody has to act on. Returns them by the names of their run folders, and that folder."""
    folder = tmp_path_factory.mktemp("queued")
    jobs = Jobs(slurm, sample, folder)

    def submit(name, *options, sbatch=(), **more):
        numbers[name] = jobs.submit(folder / name, *options, sbatch=sbatch, **more)

    numbers = {}
    # SLURM sends the signal 60 s before the limit of three minutes, or up to a minute earlier: while the slow steps are
    # trained, if the start takes less than a minute. Signals before training count as failures.
    limit = {"sbatch": ("--time=3", "--signal=B:USR1@60"), "TITAN_DISP_SIGNAL_SECONDS": "60", "SLOW": "12"}
    submit("limit", faults="slow:1-10@0", **limit, TITAN_DISP_MAX_RETRIES="6")
    frozen = ("--comm.train_timeout_seconds", "5", "--guard.silence_seconds", "2")
    submit("killed", *frozen, faults="kill:7@1,freeze:11@0,freeze:11@1", once=True, TITAN_DISP_MAX_RETRIES="1")
    submit("hang", "--comm.train_timeout_seconds", "10", faults="hang:7@1", once=True)
    save = ("--checkpoint.async_mode", "async", "--checkpoint.keep_latest_k", "2")
    submit("save", *save, faults="kill_in_save:8@1", once=True)
    nan = "nan_loss:3@1,inf_gradient:5@0,nan_loss:9-16@0"
    submit("nan", "--guard.max_skipped_steps", "3", faults=nan, TITAN_DISP_MAX_RETRIES="0")
    submit("crash", faults="crash:0@1", TITAN_DISP_MAX_RETRIES="1")
    submit("wrong", "--training.global_batch_size", "3")
    whole = request.getfixturevalue("whole")
    part_of(whole, folder / "damaged", [4, 8])
    file = next((folder / "damaged" / "checkpoint" / "step-8").glob("__1_*.distcp"))
    os.truncate(file, file.stat().st_size - 100)
    submit("damaged")
    part_of(whole, folder / "one", [4, 8])
    submit("one", sbatch=("--nodes=1",))
    yield jobs, numbers, folder
    jobs.cancel()


def values(run):
    return {step: tuple(record[key] for key in KEYS) for step, record in read_metrics(run).items()}


def events(run, *names):
    return [(e["event"], e["step"]) for e in read_json_lines(run / "events.jsonl") if not names or e["event"] in names]


def part_of(whole, run, steps):
    """Make a run folder as it was after these checkpoints."""
    shutil.copytree(whole, run, ignore=lambda folder, names: [n for n in names if n in ("logs", "tb")])
    for step in set(checkpoints(run / "checkpoint")) - set(steps):
        shutil.rmtree(run / "checkpoint" / f"step-{step}")
    lines = [json.dumps(r) for s, r in read_metrics(run).items() if s <= max(steps)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run / "events.jsonl").unlink()


def test_completes_and_refuses_a_second_job(jobs, tmp_path, request):
    """The job checks the nodes and has a budget in tokens.

    A second job on the same run folder leaves the first one unharmed.
    """
    run = tmp_path / "run"
    tokens = ("--training.steps", "-1", "--budget.tokens", str(STEPS * 16 * 32))
    first = jobs.submit(run, *tokens, faults=SLOW, SLOW="1", TITAN_DISP_CHECK_NODES="1")
    jobs.until_step(first, run, 1)
    second = jobs.submit(run, *tokens)
    refused = jobs.slurm.wait(second, "FAILED", timeout=120)
    assert refused["Restarts"] == "0"
    log = jobs.slurm.log(second)
    assert re.search(r"titan-disp: error: the run folder .* is in use by another job \(host .*SLURM job \d+\)", log)
    log = jobs.completed(first, restarts=0)
    assert f"the run is complete: step {STEPS}" in log
    assert f"tokens: {STEPS * 512:,} of {STEPS * 512:,} (100.0%" in log
    again = jobs.submit(run, *tokens)  # such as the next of a chain of jobs
    whole = request.getfixturevalue("whole")  # while it waits
    assert values(run) == values(whole)
    assert {p.name for p in (run / "nodes" / f"{first}.0").iterdir()} == {"n1.json", "n2.json"}
    assert len(list((run / "logs" / f"{first}.0").glob("node-[01]/*/attempt_0/0/std*.log"))) == 4
    # Rank 0 is on the first node, whose log is the job's.
    (rank_0,) = (run / "logs" / f"{first}.0").glob("node-0/*/attempt_0/0/stdout.log")
    assert f"tokens: {STEPS * 512:,} of" in rank_0.read_text()
    states = [(r["restart"], r["state"]) for r in read_json_lines(run / "supervisor.jsonl") if r["job"] == str(first)]
    assert states == [(0, s) for s in ("unpack", "check nodes", "prepare", "train", "decide", "end")]
    log = jobs.completed(again, restarts=0)
    assert "This run was already complete" in log
    assert f"the run is complete: step {STEPS}" in log
    assert values(run) == values(whole)


SICK = r"""case "${SLURM_RESTART_COUNT:-0} $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) $*" in
"0 ${SLURMD_NODENAME:-} "*node_health*) exit 1 ;;
"1 ${SLURMD_NODENAME:-} "*node_health*) sleep 600 ;;
"2 ${SLURMD_NODENAME:-} "*node_health*) "$@" | sed 's/"gpus": \[\]/"gpus": ["A", "B"]/'; exit ;;
esac
exec "$@"
"""
SILENT = '[[ ${SLURMD_NODENAME:-} != n2 || "$*" != *node_health* ]] || exit 1\nexec "$@"\n'


def test_bad_nodes(jobs, tmp_path):
    """Of one job, the same node fails its check twice, and is not asked again.

    Of another one, first a node does not start the check, then one hangs in it, then one lacks a GPU. No start ends the
    run.
    """
    submitted = {}
    for name, wrapper, nodes in (("silent", SILENT, ()), ("sick", SICK, ("--nodelist=n[3-4]",))):
        (tmp_path / f"{name}.sh").write_text(wrapper)
        checks = {"TITAN_DISP_CHECK_NODES": "1", "TITAN_DISP_CHECK_SECONDS": "40"}
        prefix = {"TITAN_DISP_PREFIX": f"bash {tmp_path}/{name}.sh"}
        submitted[name] = jobs.submit(tmp_path / name, *SHORT, sbatch=nodes, **checks, **prefix)
    # The list of nodes keeps the jobs apart until the sick one excludes a node of it.
    jobs.slurm.wait(submitted["sick"], "RUNNING", timeout=300, restarts=1)
    jobs.slurm.free_nodes(submitted["sick"])
    log = jobs.completed(submitted["sick"], restarts=3)
    records = read_json_lines(tmp_path / "sick" / "supervisor.jsonl")
    reasons = [r["reason"].partition("nodes that cannot train: node n")[2] for r in records if r["state"] == "requeue"]
    expected = ("it did not answer", "it did not answer", "but most nodes have 2")
    assert [text in reason for text, reason in zip(expected, reasons, strict=True)] == [True, True, True]
    assert "the check of the nodes has taken 40 s and is ended" in log
    log = jobs.completed(submitted["silent"], restarts=2)
    assert log.count("nodes that cannot train: node n2: it did not answer") == 2
    fields = jobs.slurm.job(submitted["silent"])
    assert fields["ExcNodeList"] == "n2"
    assert fields["NodeList"] in ("n[1,3]", "n[1,4]", "n[3-4]")
    assert [events(tmp_path / name, "complete") for name in submitted] == [[("complete", 2)]] * 2


def test_preempted(jobs, queued, whole, tmp_path):
    """After USR1 to the batch script, which --signal=B:USR1@300 sends, the job saves, requeues itself and completes.

    A signal before training counts as a failure. Otherwise a short time limit would requeue the job forever.
    """
    run = tmp_path / "run"
    job = jobs.submit(run, faults=SLOW)
    jobs.slurm.wait(job, "RUNNING", timeout=400)
    jobs.slurm.signal(job, "USR1")
    jobs.slurm.wait(job, "RUNNING", timeout=400, restarts=1)
    jobs.until_step(job, run, 6)
    jobs.slurm.signal(job, "USR1")
    log = jobs.completed(job, restarts=2)
    (stop,) = events(run, "stop")
    assert 6 <= stop[1] < STEPS
    assert events(run, "resume") == [("resume", stop[1])]  # nothing was repeated
    assert "USR1 received: asking all ranks to save and stop" in log
    assert "failure 1 of at most 3 retries without a new checkpoint (no checkpoint yet): asked to stop (USR1)" in log
    assert values(run) == values(whole)


def test_node_down(jobs, queued, whole, tmp_path):
    """SLURM requeues the job itself, and it restarts on other nodes."""
    run = tmp_path / "run"
    job = jobs.submit(run, faults=SLOW, sbatch=(FIRST, "--nodelist=n[1-2]"))
    jobs.until_step(job, run, 6)
    jobs.slurm.set_node("n2", "DOWN")
    try:
        jobs.slurm.free_nodes(job)  # the list was for the first start only, to know which node to take down
        jobs.completed(job, restarts=1)
    finally:
        jobs.slurm.set_node("n2", "RESUME")
    ((_, step),) = events(run, "resume")
    assert step >= 4
    assert values(run) == values(whole)


def test_requeue_refused(jobs, queued, whole, tmp_path):
    """If jobs may not requeue themselves, the log says so, and the job is submitted again if the user wants that."""
    run, commands = tmp_path / "run", tmp_path / "bin"
    commands.mkdir()
    real = shutil.which("scontrol", path=jobs.slurm.environment["PATH"])
    (commands / "scontrol").write_text(f'#!/bin/bash\n[ "$1" != requeue ] || exit 1\nexec {real} "$@"\n')
    (commands / "scontrol").chmod(0o755)
    path = {"PATH": f"{commands}:{jobs.slurm.environment['PATH']}", "TITAN_DISP_RESUBMIT": "1"}
    job = jobs.submit(run, faults=SLOW, **path)
    jobs.until_step(job, run, 5)
    jobs.slurm.signal(job, "USR1")
    log = jobs.completed(job, restarts=0)
    second = int(re.search(r"submitted again as Submitted batch job (\d+)", log)[1])
    jobs.submitted.append(second)
    jobs.completed(second, restarts=0)
    assert values(run) == values(whole)


def test_cancelled(jobs, queued, tmp_path):
    """A cancelled job is not requeued."""
    run = tmp_path / "run"
    job = jobs.submit(run, faults="slow:1-200@0")
    jobs.until_step(job, run, 2)
    jobs.slurm.cancel(job)
    jobs.slurm.wait(job, "CANCELLED", timeout=60)
    time.sleep(5)
    fields = jobs.slurm.job(job)
    assert (fields["JobState"], fields["Restarts"]) == ("CANCELLED", "0")


@pytest.mark.parametrize(
    ("name", "restarts", "resumed", "told"),
    [
        # Each fault is followed by a requeue, and repeats at most one checkpoint interval. In the second of "killed",
        # all ranks stand still and no collective is pending, so that only the heartbeat shows it.
        (
            "killed",
            2,
            [4, 8],
            r"failure 1 of at most 1 .*rank 0 has been silent for \d+ s at step \d+ \(step\), and \d+ s are allowed .*"
            r"node 0 rank 0: \w+ in faulty_train.py:\d+; node 1 rank 0: \w+ in faulty",
        ),
        ("hang", 1, [4], r"failure 1 of at most 3"),  # a rank stops answering, and the others time out
        ("save", 1, [4], r"failure 1 of at most 3 .*\(newest checkpoint: step 4\)"),  # not the unfinished step 8
        ("damaged", 0, [4], r"step-8 cannot be loaded: __1_0.distcp has [\d,]+ bytes, expected [\d,]+"),
    ],
)
def test_resumes(queued, whole, name, restarts, resumed, told):
    jobs, numbers, folder = queued
    log = jobs.completed(numbers[name], restarts)
    assert re.search(told, log)
    assert events(folder / name, "resume") == [("resume", step) for step in resumed]
    assert values(folder / name) == values(whole)
    if name == "save":
        assert checkpoints(folder / name / "checkpoint") == [12, 16]
    assert (folder / name / "checkpoint" / "damaged-8").is_dir() is (name == "damaged")


def test_time_limit(queued, whole):
    """SLURM sends the signal before the limit. The requeued job has the full time limit again."""
    jobs, numbers, folder = queued
    assert "USR1 received" in jobs.completed(numbers["limit"], restarts=1, more=True)
    run = folder / "limit"
    stops = [step for _, step in events(run, "stop")]
    assert stops
    assert [step for _, step in events(run, "resume")] == stops
    assert values(run) == values(whole)


def test_one_node_instead_of_two(queued, whole):
    """The batches are the same. The losses agree up to fp32 rounding, because sums are in another order."""
    jobs, numbers, folder = queued
    jobs.completed(numbers["one"], restarts=0)
    run = folder / "one"
    assert events(run, "resume") == [("resume", 8)]
    expected, got = read_metrics(whole), read_metrics(run)
    assert list(got) == list(expected)
    for step, record in got.items():
        for counter in ("documents", "text_bytes", "epoch"):
            assert record["data"][counter] == expected[step]["data"][counter]
        assert record["ce"] == pytest.approx(expected[step]["ce"], rel=1e-4)
    assert json.loads((run / "environment.json").read_text())["world_size"] == 1


def test_crash_at_once(queued):
    """The job stops after the largest number of retries, with the reason at the top of the log."""
    jobs, numbers, _ = queued
    top = jobs.gave_up(numbers["crash"])
    assert jobs.slurm.job(numbers["crash"])["Restarts"] == "1"
    assert top.startswith("titan-disp: GIVEN UP after 2 failures in a row without a new checkpoint (no checkpoint yet)")
    assert "RuntimeError: crashed on purpose at the start" in top
    jobs.gave_up(numbers["wrong"])  # not even started: one message
    log = jobs.slurm.log(numbers["wrong"])
    assert "titan-disp: error: training.global_batch_size 3 is not a positive multiple" in log
    assert "fix the config" in log
    assert "Traceback" not in log


def test_not_finite(queued):
    """All ranks skip the step. After too many in a row, all ranks stop, with step and term at the top of the log."""
    jobs, numbers, folder = queued
    top = jobs.gave_up(numbers["nan"])
    run = folder / "nan"
    assert events(run, "skip") == [("skip", 3), ("skip", 5), ("skip", 9), ("skip", 10)]
    assert "NonFiniteError: step 11: cross-entropy and gradient norm not finite, 3 steps in a row" in top
    for node in (0, 1):
        (log,) = (run / "logs" / f"{numbers['nan']}.0").glob(f"node-{node}/*/attempt_0/0/stdout.log")
        assert [s for s in range(1, 17) if f"step {s} is skipped on all ranks" in log.read_text()] == [3, 5, 9, 10, 11]
    assert checkpoints(run / "checkpoint") == [4, 8]
