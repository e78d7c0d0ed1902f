"""Whether a SLURM job comes back: decided from what the run left behind. (The whole of it runs in tests/slurm.)"""

import json
import subprocess
import sys

import pytest

from tests.cluster_of_one import ROOT

SCRIPT = ROOT / "slurm" / "requeue.py"


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoint").mkdir(parents=True)
    return folder


def save(run, *steps):
    for step in steps:
        folder = run / "checkpoint" / f"step-{step}"
        folder.mkdir()
        (folder / ".metadata").touch()


def write(run, job, *events):
    with open(run / "events.jsonl", "a") as file:
        for name, step, reason in events:
            file.write(json.dumps({"event": name, "step": step, "job": job, "reason": reason}) + "\n")


def ask(what, run, *options, start="7.1"):
    argv = [sys.executable, str(SCRIPT), what, "--run", str(run), "--start", start, *map(str, options)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, done.stdout


def fail(run, start, message, time):
    folder = run / "logs" / start / f"node-{time}" / "x" / "attempt_0" / "0"
    folder.mkdir(parents=True)
    content = {"message": {"message": message, "extraInfo": {"timestamp": str(time)}}}
    (folder / "error.json").write_text(json.dumps(content))


def test_complete(run):
    write(run, "7.1", ("resume", 4, ""), ("complete", 9, ""))
    assert ask("end", run, "--signalled", "USR1") == (0, "titan-disp: the run is complete: step 9\n")


@pytest.mark.parametrize(
    ("signalled", "reason", "code"),
    [
        ("USR1", "the file RUN/stop", 10),  # SLURM asked, through the stop file
        ("TERM", "the file RUN/stop", 10),
        ("no", "SIGTERM", 10),  # SLURM asked the ranks themselves
        ("no", "the file RUN/stop", 0),  # the user did
        ("no", "budget.stop_at_tokens", 0),
    ],
)
def test_stopped(run, signalled, reason, code):
    write(run, "7.1", ("start", 0, ""), ("stop", 5, reason))
    assert ask("end", run, "--signalled", signalled)[0] == code


def test_cancelled(run):
    write(run, "7.1", ("start", 0, ""), ("stop", 5, "SIGTERM"))
    assert ask("end", run, "--signalled", "TERM", "--state", "COMPLETING") == (0, "titan-disp: the job was cancelled\n")


def test_events_of_another_start_do_not_count(run):
    write(run, "7.0", ("start", 0, ""), ("complete", 9, ""))
    assert ask("end", run, "--status", 1)[0] == 10


def test_failures_are_counted_until_there_is_progress(run, tmp_path):
    """Two retries without a new checkpoint, and two more after one; then the first error is on top of the log."""
    log = tmp_path / "log"
    log.write_text("the job's\nown lines\n")
    options = ("--status", "1", "--max-retries", "2", "--log", log)
    assert [ask("end", run, *options)[0] for _ in range(2)] == [10, 10]
    save(run, 4)
    (run / "checkpoint" / "step-8").mkdir()  # unfinished: no progress
    assert [ask("end", run, *options)[0] for _ in range(2)] == [10, 10]
    fail(run, "7.1", "RuntimeError: connection closed by peer\nmore", time=20)
    fail(run, "7.1", "ValueError: the cause", time=10)
    code, text = ask("end", run, *options)
    assert code == 1
    assert text.startswith(
        "titan-disp: GIVEN UP after 3 failures in a row without a new checkpoint (newest checkpoint: step 4)"
    )
    assert "ValueError: the cause" in text
    assert log.read_text() == text + "\nthe job's\nown lines\n"


def test_a_good_end_forgets_failures(run):
    ask("end", run, "--status", 1)
    assert (run / "requeue.json").exists()
    write(run, "7.1", ("stop", 5, "SIGUSR1"))
    assert ask("end", run)[0] == 10
    assert not (run / "requeue.json").exists()


def test_bad_nodes(run):
    """A node that fails its check twice is written into the list to exclude; one that says nothing has failed."""

    def report(start, **problems):
        folder = run / "nodes" / start
        folder.mkdir(parents=True)
        for node, found in problems.items():
            (folder / f"{node}.json").write_text(json.dumps({"node": node, "problems": found}))

    report("7.0", n1=[], n2=["GPU 3 multiplies wrongly"])
    code, text = ask("nodes", run, "--expected", "n1 n2", start="7.0")
    assert code == 10
    assert "node n2: GPU 3 multiplies wrongly" in text
    assert (run / "exclude").read_text() == ""
    report("7.1", n1=[])
    code, text = ask("nodes", run, "--expected", "n1 n2", start="7.1")
    assert code == 10
    assert "node n2: it did not answer" in text
    assert (run / "exclude").read_text() == "n2"
    report("7.2", n1=[], n3=[])
    assert ask("nodes", run, "--expected", "n1 n3", start="7.2") == (0, "")


def test_submit_prints_the_plan_and_the_command(tmp_path):
    config = ROOT / "train_configs" / "qwen3_0.6b_c4.toml"
    argv = [
        sys.executable,
        "-m",
        "titan_disp.cli",
        "submit",
        str(config),
        "--nodes",
        "80",
        "--site",
        "frontier",
        "--dry-run",
    ]
    argv += ["--gpu", "MI250X-GCD", "--sbatch", "time=24:00:00", "account=abc", "--training.dataset_path", "/data/c4"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "39,673 of 3,932,160 tokens" in done.stdout
    line = done.stdout.splitlines()[-1]
    assert line.startswith(
        "sbatch --nodes=80 --gpus-per-node=8 --time=24:00:00 --account=abc --export=ALL,TITAN_DISP_SITE=frontier"
    )
    assert line.endswith(f"slurm/pretrain.sbatch {config} --training.dataset_path /data/c4")
    argv[argv.index("80")] = "79"
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "titan-disp: error" in done.stderr
