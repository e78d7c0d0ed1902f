"""These tests take the supervisor of a SLURM job through its states.

Stand-ins for SLURM's commands print what a test wants. tests/slurm runs whole jobs.
"""

import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime, timezone

import pytest
import tomli
from torch.distributed.run import config_from_args, parse_args
from torchtitan.config import JobConfig

from tests.command_line import DEMO, ROOT
from titan_disp.cluster import job_check, node_health
from titan_disp.errors import IN_USE_EXIT_CODE, ConfigError

spec = importlib.util.spec_from_file_location("slurm.supervise", ROOT / "slurm" / "supervise.py")
supervise = importlib.util.module_from_spec(spec)
spec.loader.exec_module(supervise)
Outcome = supervise.Outcome

# Job state codes of squeue(1), SLURM 22.05 to 25.05.
JOB_STATES = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "CONFIGURING", "COMPLETING", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PENDING", "PREEMPTED", "RUNNING", "RESV_DEL_HOLD", "REQUEUE_FED", "REQUEUE_HOLD", "REQUEUED"),
    *("RESIZING", "REVOKED", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "SUSPENDED", "TIMEOUT"),
)


class Cluster:
    """A folder of stand-ins for SLURM's commands.

    Each records its calls and runs the script that a test has written for it.
    """

    SHOW = """case "$1 $2" in
"show job") cat "$0.job"; exit;;
"show hostnames") echo "$3" | sed 's/n.1-4./n1,n2,n3,n4/; s/n.7-9./n7,n8,n9/' | tr , '\\n'; exit;;
esac"""

    def __init__(self, folder):
        self.folder, self.commands, self.run = folder, folder / "bin", folder / "run"
        self.commands.mkdir()
        self.signals = folder / "signals"
        self.signals.touch()
        self.job = {
            "JobState": "RUNNING",
            "TimeLimit": "1-00:00:00",
            "StdOut": str(folder / "job.out"),
            "StdErr": str(folder / "job.out"),
            "WorkDir": "/work",
            "Partition": "gpu",
        }
        self.write("scontrol", f"{self.SHOW}; exit 1")
        self.write("srun", "exit 0")
        self.write("squeue", "echo 7.0; echo 7.batch")
        self.write("scancel", "exit 0")
        self.write("sbatch", "exit 1")
        # The interpreter of the check of the config.
        self.folder_is("python", self.run)
        (self.folder / "job.out").write_text("the job's\nown lines\n")

    def write(self, name, script):
        file = self.commands / name
        file.write_text(f'#!/bin/bash\necho "$*" >> "$0.calls"\n{script}\n')
        file.chmod(0o755)

    def folder_is(self, name, run):
        """Make a command print what the check of the config prints.

        srun's labels and a container's lines are around it.
        """
        text = f"0: a banner\n0: {supervise.RUN_FOLDER}{json.dumps(str(run))}\x1b[0m\n0: the container has ended\n"
        (self.commands / "folder").write_text(text)
        self.write(name, f'cat "{self.commands}/folder"')

    def calls(self, name):
        file = self.commands / f"{name}.calls"
        return file.read_text().splitlines() if file.exists() else []

    def supervisor(self, *overrides, restart=0, of_array=False, **environment):
        (self.commands / "scontrol.job").write_text("   ".join(f"{k}={v}\n" for k, v in self.job.items()))
        environment = {
            "PATH": f"{self.commands}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_RESTART_COUNT": str(restart),
            "SLURM_JOB_NODELIST": "n[1-4]",
            "SLURM_NNODES": "4",
            "TITAN_DISP_NPROC": "1",
            **environment,
        }
        argv = ["config.toml", "--job.dump_folder", str(self.run), *overrides]
        supervisor = supervise.Supervisor(argv, str(self.signals), environment, of_array)
        supervisor.pause, supervisor.requeue_pauses = 0.02, (0, 0, 0)
        supervisor.kill_wait = supervisor.last_wait = 0.5
        supervisor.grace = 0.0
        return supervisor

    def reports(self, **problems):
        """Make srun print what the check of the nodes prints.

        A report for each named node follows a line of a library.
        """
        lines = ["a line of a library"]
        for node, (gpus, found) in problems.items():
            report = {"node": node, "gpus": ["H100"] * gpus, "problems": found}
            lines.append(f"{supervise.NODE_REPORT}{json.dumps(report)}")
        (self.commands / "reports").write_text("\n".join(lines) + "\n")
        self.write("srun", f'cat "{self.commands}/reports"')

    def checkpoint(self, *steps, folder="checkpoint"):
        for step in steps:
            path = self.run / folder / f"step-{step}"
            path.mkdir(parents=True)
            (path / ".metadata").touch()

    def event(self, name, step, reason="", job="7.0"):
        self.run.mkdir(exist_ok=True)
        with open(self.run / "events.jsonl", "a") as file:
            file.write(json.dumps({"event": name, "step": step, "job": job, "reason": reason}) + "\n")

    def error(self, message, time, start="7.0"):
        """Write the file in which torchrun keeps a rank's exception."""
        folder = self.run / "logs" / start / f"node-{time}" / "x" / "attempt_0" / "0"
        folder.mkdir(parents=True)
        content = {"message": {"message": message, "extraInfo": {"timestamp": str(time)}}}
        (folder / "error.json").write_text(json.dumps(content))

    def transitions(self):
        return [json.loads(line) for line in (self.run / "supervisor.jsonl").read_text().splitlines()]


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "run").mkdir()
    return Cluster(tmp_path)


def decided(cluster, status=1, **options):
    supervisor = cluster.supervisor(**options)
    supervisor.status = status
    return supervisor.decide()


FOUR = {"n1": (8, []), "n2": (8, []), "n3": (8, []), "n4": (8, [])}


def test_every_line_has_its_time(capsys):
    before = datetime.now(timezone.utc).replace(microsecond=0)
    supervise.say("hello")
    name, said, text = capsys.readouterr().out.split()
    assert (
        before
        <= datetime.strptime(said, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
        <= datetime.now(timezone.utc)
    )
    assert (name, text) == ("titan-disp:", "hello")


class TestDecide:
    def test_complete(self, cluster):
        """A complete run is not started again, even after a signal."""
        cluster.event("resume", 4)
        cluster.event("complete", 9)
        cluster.signals.write_text("USR1\n")
        assert decided(cluster) == Outcome("end", "the run is complete: step 9")

    @pytest.mark.parametrize(
        ("signalled", "reason", "state"),
        [
            ("USR1", "the file RUN/stop", "requeue"),  # SLURM asked, through the stop file
            ("TERM", "the file RUN/stop", "requeue"),
            ("", "SIGTERM", "requeue"),  # SLURM asked the ranks themselves
            ("", "the file RUN/stop", "end"),  # the user did
            ("", "budget.stop_at_tokens", "end"),
        ],
    )
    def test_stopped(self, cluster, signalled, reason, state):
        cluster.event("start", 0)
        cluster.event("stop", 5, reason)
        cluster.signals.write_text(signalled)
        outcome = decided(cluster)
        assert outcome.state == state
        assert outcome.reason.endswith(f"step 5: {reason}" if state == "end" else f"step 5 and stopped: {reason}")

    def test_a_stop_without_a_reason(self, cluster):
        """As in a line of events.jsonl that another version wrote."""
        (cluster.run / "events.jsonl").write_text('{"event": "stop", "step": 5, "job": "7.0"}\n')
        assert decided(cluster) == Outcome("end", "stopped at step 5: ")

    @pytest.mark.parametrize("options", [{"enable": False}, {"enable": True, "load_only": True}])
    def test_a_stop_that_saves_nothing_counts(self, cluster, options):
        """Otherwise a run that is longer than its job's time limit would start over forever."""
        (cluster.run / "config.json").write_text(json.dumps({"checkpoint": options}))
        cluster.event("stop", 5, "SIGUSR1")
        cluster.signals.write_text("USR1\n")
        for state in ("requeue", "requeue", "requeue", "give up"):
            outcome = decided(cluster)
            assert outcome.state == state
            assert "stopped at step 5 (SIGUSR1), and nothing is saved with this [checkpoint] section" in outcome.reason

    @pytest.mark.parametrize("state", JOB_STATES)
    def test_terminated_in_any_state(self, cluster, state):
        """scancel sets CANCELLED, then COMPLETING, and sends TERM. In any other state, TERM means a preemption."""
        cluster.job["JobState"] = state
        cluster.event("stop", 5, "SIGTERM")
        cluster.signals.write_text("TERM\n")
        outcome = decided(cluster)
        if state in ("CANCELLED", "COMPLETING"):
            assert outcome == Outcome("end", "the job was cancelled")
        else:
            assert outcome == Outcome("requeue", "saved at step 5 and stopped: SIGTERM")

    def test_the_time_limit_is_not_scancel(self, cluster):
        """A run that could not save before its time limit is requeued."""
        cluster.job.update(JobState="COMPLETING", Reason="TimeLimit")
        cluster.signals.write_text("USR1\nTERM\n")
        assert decided(cluster).state == "requeue"
        cluster.signals.write_text("TERM\n")
        assert decided(cluster).state == "requeue"

    def test_cancelled_after_the_notice(self, cluster):
        """A job that is cancelled between USR1 and its time limit must not be requeued."""
        cluster.job.update(JobState="COMPLETING", Reason="None", PreemptTime="None")
        cluster.signals.write_text("USR1\nTERM\n")
        assert decided(cluster) == Outcome("end", "the job was cancelled")

    def test_preempted_without_a_save(self, cluster):
        """PreemptMode=CANCEL sets COMPLETING as scancel does, but the run is requeued."""
        cluster.job.update(JobState="COMPLETING", Reason="None", PreemptTime="2026-01-01T00:00:00")
        cluster.signals.write_text("TERM\n")
        assert decided(cluster).state == "requeue"

    @pytest.mark.parametrize(("restart", "ends"), [(2, True), (3, False), (4, False)])
    def test_requeued_by_slurm(self, cluster, restart, ends):
        """SLURM requeues a job if a node dies, or with PreemptMode=REQUEUE.

        SLURM_RESTART_COUNT alone does not show it, because a job that submitted this one may have set it.
        """
        cluster.job["Restarts"] = "3"
        outcome = decided(cluster, restart=restart)
        assert outcome == Outcome("end", "SLURM has requeued the job itself") if ends else outcome.state == "requeue"
        assert (cluster.run / "requeue.json").exists() is not ends

    def test_cancelled_needs_a_signal(self, cluster):
        """A job that has lost its nodes is COMPLETING too."""
        cluster.job["JobState"] = "COMPLETING"
        assert decided(cluster).state == "requeue"

    def test_events_of_another_start_do_not_count(self, cluster):
        cluster.event("complete", 9, job="7.1")
        cluster.event("complete", 9, job="6.0")
        assert decided(cluster).state == "requeue"

    def test_unreadable_lines_of_events(self, cluster):
        (cluster.run / "events.jsonl").write_bytes(b'\xff\xfe\nnull\n7\n{"event": "comp')
        cluster.event("complete", 9)
        assert decided(cluster).state == "requeue"  # its line was joined to the unfinished one
        cluster.event("complete", 9)
        assert decided(cluster).state == "end"

    def test_failures_are_counted_until_there_is_progress(self, cluster):
        """There are two retries without a new checkpoint, and two more after one.

        The reason is the first error of all ranks.
        """
        options = {"TITAN_DISP_MAX_RETRIES": "2"}
        assert [decided(cluster, **options).state for _ in range(2)] == ["requeue", "requeue"]
        cluster.checkpoint(4)
        (cluster.run / "checkpoint" / "step-8").mkdir()  # unfinished: no progress
        (cluster.run / "checkpoint" / "step-x").mkdir()
        (cluster.run / "checkpoint" / "step-x" / ".metadata").touch()
        assert decided(cluster, **options).reason.startswith(
            "failure 1 of at most 2 retries without a new checkpoint (newest checkpoint: step 4): a rank or a node died "
            "without a message (srun's status 1)"
        )
        assert decided(cluster, **options).state == "requeue"
        cluster.error("RuntimeError: connection closed by peer\nmore", time=20)
        cluster.error("ValueError: the cause", time=9)
        outcome = decided(cluster, **options)
        assert outcome.state == "give up"
        assert outcome.reason.startswith(
            "GIVEN UP after 3 failures in a row without a new checkpoint (newest checkpoint: step 4). The last one: "
            "ValueError: the cause ("
        )

    def after(self, cluster, restart, *saved, damaged=()):
        """Return the outcome of a start that sets damaged checkpoints aside, saves others and dies."""
        for step in damaged:
            (cluster.run / "checkpoint" / f"step-{step}").rename(
                cluster.run / "checkpoint" / f"damaged-{step}-{restart}"
            )
        for step in saved:
            cluster.checkpoint(step)
            cluster.event("checkpoint", step, job=f"7.{restart}")
        return decided(cluster, restart=restart, TITAN_DISP_MAX_RETRIES="2")

    def failures(self, cluster):
        return json.loads((cluster.run / "requeue.json").read_text())["failures"]

    def test_progress_below_a_damaged_checkpoint(self, cluster):
        """The run trains the lost steps again.

        Any checkpoint that was not there before is progress, whatever its step.
        """
        self.after(cluster, 0, 4, 8)
        self.after(cluster, 1, 6, damaged=[8])
        assert self.failures(cluster) == 1
        self.after(cluster, 2, 8)
        assert self.failures(cluster) == 1
        self.after(cluster, 3)
        assert self.failures(cluster) == 2

    def test_checkpoints_that_are_damaged_again_and_again(self, cluster):
        """Training the same steps again does not count as progress forever, because no start would get any further."""
        outcomes = [self.after(cluster, 0, 4, 8)]
        while outcomes[-1].state == "requeue":
            assert len(outcomes) < 9
            outcomes.append(self.after(cluster, len(outcomes), 8, damaged=[8]))
        assert len(outcomes) == 5  # twice it counts as progress, and the third one is the first of three failures
        assert outcomes[-1].state == "give up"

    def test_a_step_beyond_them_counts_anew(self, cluster):
        self.after(cluster, 0, 8)
        for restart in range(1, 5):  # each damaged once
            assert self.after(cluster, restart, 8 * restart, damaged=[8 * restart]).state == "requeue"
            assert self.after(cluster, restart + 10, 8 * restart + 8).state == "requeue"
            assert self.failures(cluster) == 1

    def test_progress_in_another_checkpoint_folder(self, cluster):
        (cluster.run / "config.json").write_text('{"checkpoint": {"folder": "weights"}}')
        options = {"TITAN_DISP_MAX_RETRIES": "1"}
        for step in (4, 8, 12, 16):
            cluster.checkpoint(step, folder="weights")
            assert decided(cluster, **options).state == "requeue"
        assert decided(cluster, **options).state == "give up"

    def test_given_up_and_submitted_again(self, cluster):
        """A user who submits the run again has changed something, so the retries are counted from zero."""
        options = {"TITAN_DISP_MAX_RETRIES": "1"}
        states = [decided(cluster, **options).state for _ in range(4)]
        assert states == ["requeue", "give up", "requeue", "give up"]

    def test_an_odd_config_json(self, cluster):
        (cluster.run / "config.json").write_text('{"checkpoint": null}')
        cluster.checkpoint(4)
        assert "newest checkpoint: step 4" in decided(cluster).reason

    @pytest.mark.parametrize(
        "content", ["", "[]", '{"failures": ', '{"other": 1}', "null", '{"failures": null, "step": null}']
    )
    def test_damaged_counters_count_from_one(self, cluster, content):
        (cluster.run / "requeue.json").write_text(content)
        assert decided(cluster).reason.startswith("failure 1 of at most 3")

    def test_a_good_end_forgets_failures(self, cluster):
        decided(cluster)
        assert json.loads((cluster.run / "requeue.json").read_text())["failures"] == 1
        cluster.event("stop", 5, "SIGUSR1")
        assert decided(cluster).state == "requeue"
        assert not (cluster.run / "requeue.json").exists()

    def test_a_signal_before_training_counts(self, cluster):
        """Otherwise a time limit that leaves no time to train would requeue the job forever."""
        cluster.signals.write_text("USR1\n")
        reasons = [decided(cluster, status=None, restart=i).state for i in range(4)]
        assert reasons == ["requeue", "requeue", "requeue", "give up"]

    def test_a_run_folder_that_cannot_be_written(self, cluster):
        """Retries are then counted in the job's log, or by SLURM's restarts if there is no log.

        The 30th start may fail as often as the first.
        """
        cluster.run.rmdir()
        cluster.run.write_text("no folder")
        log = cluster.folder / "job.out"
        log.write_text("titan-disp: NOW requeue: saved at step 4 and stopped: SIGUSR1\n")
        states = []
        for restart in range(30, 34):
            outcome = decided(cluster, restart=restart)
            states.append(outcome.state)
            with open(log, "a") as file:
                file.write(f"a line of rank 0\ntitan-disp: NOW {outcome.state}: {outcome.reason}\n")
        assert states == ["requeue", "requeue", "requeue", "give up"]
        log.write_bytes(b"\xff" * (1 << 20) + log.read_bytes())  # its end alone is read
        assert cluster.supervisor().uncounted() == 3
        line = f"titan-disp: NOW requeue: x {supervise.UNWRITTEN}\n"
        log.write_text(line + "x" * (1 << 20) + "\n" + line)  # of the first one, nothing is left in it
        assert cluster.supervisor().uncounted() == 1
        log.write_text(line * 2)  # and a short one is read from its first byte on
        assert cluster.supervisor().uncounted() == 2
        del cluster.job["StdOut"]
        assert cluster.supervisor(restart=5).uncounted() == 5
        cluster.job["StdOut"] = str(log)
        log.unlink()
        states = [decided(cluster, restart=restart).state for restart in range(4)]
        assert states == ["requeue", "requeue", "requeue", "give up"]


class TestWhatRanksLeave:
    def test_the_first_error(self, cluster):
        """The earliest of torchrun's error files counts, of this start only.

        Unfinished files and other contents do no harm.
        """
        assert supervise.first_error(str(cluster.run), "7.0") is None
        cluster.error("of another start", time=1, start="6.0")
        assert supervise.first_error(str(cluster.run), "7.0") is None
        cluster.error("\n the second\n", time=30)
        cluster.error("the first\nand its traceback", time=20)
        node = cluster.run / "logs" / "7.0" / "node-20"
        text = f"the first ({node}/x/attempt_0/0/error.json)"
        assert supervise.first_error(str(cluster.run), "7.0") == text
        broken = ('{"mess', "[]", '{"message": "text"}', "{}", '{"message": {"message": "m", "extraInfo": {}}}')
        odd = (("\n", "1"), ("m", "soon"), (7, "1"))
        odd = [json.dumps({"message": {"message": m, "extraInfo": {"timestamp": t}}}) for m, t in odd]
        (node / "other.json").write_text(json.dumps({"message": {"message": "m", "extraInfo": {"timestamp": "1"}}}))
        for name, content in enumerate((*broken, *odd)):
            folder = node / f"{name}"
            folder.mkdir()
            (folder / "error.json").write_text(content)
        assert supervise.first_error(str(cluster.run), "7.0") == text

    DUMP = """a line\nTimeout (0:01:00)!\nThread 0x01 (most recent call first):\n  File "/lib/threading.py", line 9 in wait
Thread 0x02 (most recent call first):\n  File "/a/checkpoint.py", line 213 in save\n  File "/a/train.py", line 7 in <module>\n"""

    def test_where_the_ranks_stood(self, cluster):
        """The reason names the newest frame of the main thread, which Python's faulthandler prints last."""
        logs = {
            ("7.0", 0, 1): self.DUMP,
            ("7.0", 1, 0): self.DUMP.replace("213", "5")
            + self.DUMP
            + "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
            ("7.0", 1, 1): "no dump",
            ("7.0", 1, 2): self.DUMP.replace("Timeout (", "Fatal"),
            ("7.0", 1, 3): "Timeout (0:01:00)!",
            ("7.0", 1, 4): self.DUMP + "Timeout (0:02:00)!\n",  # the older dump is not where it stands
            ("6.0", 0, 0): self.DUMP,
        }
        for (start, node, rank), text in logs.items():
            folder = cluster.run / "logs" / start / f"node-{node}" / "x" / "attempt_0" / str(rank)
            folder.mkdir(parents=True)
            (folder / "stderr.log").write_bytes(text.encode("latin-1"))
        logs = cluster.run / "logs" / "7.0"
        (logs / "node-1" / "x" / "attempt_0" / "0" / "stdout.log").write_text(self.DUMP)
        (logs / "node-1" / "stderr.log").symlink_to("nowhere")
        (logs / "other").mkdir()
        (logs / "other" / "stderr.log").write_text(self.DUMP)
        expected = "node 0 rank 1: save in checkpoint.py:213; node 1 rank 0: save in checkpoint.py:213"
        assert supervise.stacks(str(cluster.run), "7.0") == expected
        long = cluster.run / "logs" / "7.0" / "node-0" / "x" / "attempt_0" / "1" / "stderr.log"
        long.write_text(self.DUMP + "x" * (1 << 16))  # its end alone is read
        assert supervise.stacks(str(cluster.run), "7.0").startswith("node 1 rank 0")
        assert supervise.stacks(str(cluster.run), "8.0") == ""

    def test_flight_records_are_the_starts_own(self, cluster):
        folder = cluster.run / "comm_traces"
        folder.mkdir()
        assert supervise.flight_records(str(cluster.run), 0) == ""
        for name, modified in (("rank_12", 100.0), ("rank_3", 99.0), ("rank_x", 100.0)):
            (folder / name).touch()
            os.utime(folder / name, (modified, modified))
        assert supervise.flight_records(str(cluster.run), 100.0) == f"{folder}/rank_12"
        assert supervise.flight_records(str(cluster.run), 99.0) == f"{folder}/rank_3 and 1 more"
        (folder / "rank_0").symlink_to("nowhere")
        assert supervise.flight_records(str(cluster.run), 100.0) == f"{folder}/rank_12"


class TestNodes:
    ENDED = "the check of the nodes has taken 1 s and is ended"

    def test_all_can_train(self, cluster, capsys):
        cluster.reports(**FOUR)
        supervisor = cluster.supervisor(SLURM_GPUS_PER_NODE="h100:8", TITAN_DISP_NPROC="gpu")
        assert supervisor.check_nodes() == Outcome("prepare", "4 nodes can train")
        assert "is ended" not in capsys.readouterr().out
        (call,) = cluster.calls("srun")
        assert call == (
            f"--ntasks-per-node=1 --kill-on-bad-exit=0 --mem=0 --cpu-bind=none bash {ROOT}/slurm/node.sh check"
        )
        assert sorted(p.name for p in (cluster.run / "nodes" / "7.0").iterdir()) == [
            "n1.json",
            "n2.json",
            "n3.json",
            "n4.json",
        ]

    def test_reports_are_kept_for_whoever_looks(self, cluster):
        """The newest reports of a start are kept. If they cannot be written, the check continues."""
        nodes = cluster.run / "nodes" / "7.0"
        for gpus in (8, 7):
            cluster.reports(**dict.fromkeys(FOUR, (gpus, [])))
            assert cluster.supervisor().check_nodes().state == "prepare"
            assert len(json.loads((nodes / "n1.json").read_text())["gpus"]) == gpus
        nodes.rename(cluster.run / "nodes" / "6.0")
        nodes.write_text("no folder")
        assert cluster.supervisor().check_nodes() == Outcome("prepare", "4 nodes can train")

    def test_the_names_of_the_nodes(self, cluster):
        """If SLURM does not expand its list of nodes, the unexpanded list must not be blamed as if it were a node."""
        cluster.reports(**FOUR)
        cluster.write("scontrol", f'[ $(grep -c hostnames "$0.calls") -gt 2 ] || exit 1; {cluster.SHOW}')
        assert cluster.supervisor().check_nodes().state == "prepare"
        cluster.write("scontrol", "exit 1")
        for restart in (0, 1):
            supervisor = cluster.supervisor(restart=restart)
            for state, method in (("check nodes", supervisor.check_nodes), ("train", supervisor.train)):
                outcome = supervisor.enter(state, method)
                assert outcome.state == ("requeue" if (restart, state) != (1, "train") else "give up")
                assert outcome.reason.endswith(": scontrol show hostnames n[1-4] failed 4 times (status 1)")
        assert not (cluster.run / "bad_nodes.json").exists()
        assert len(cluster.calls("srun")) == 1

    def test_gpus_that_the_job_asked_for_and_no_node_has(self, cluster):
        """All nodes have the same number of GPUs, so only the job's request shows that one is missing."""
        cluster.reports(**dict.fromkeys(FOUR, (7, [])))
        supervisor = cluster.supervisor(SLURM_GPUS_PER_NODE="8", TITAN_DISP_NPROC="gpu")
        assert "n1: the number of visible GPUs is 7, expected 8" in supervisor.check_nodes().reason

    def test_switched_off(self, cluster):
        assert cluster.supervisor(TITAN_DISP_CHECK_NODES="0").check_nodes().state == "prepare"
        assert not cluster.calls("srun")

    @pytest.mark.parametrize(
        ("environment", "asked"),
        [
            ({"TITAN_DISP_NPROC": "gpu", "SLURM_GPUS_PER_NODE": "8"}, 8),
            ({"TITAN_DISP_NPROC": "gpu", "SLURM_GPUS_PER_NODE": "a100:4"}, 4),
            ({"TITAN_DISP_NPROC": "gpu", "SLURM_GPUS_PER_NODE": "H100:4"}, 4),
            ({"TITAN_DISP_NPROC": "gpu", "SLURM_GPUS_ON_NODE": "2"}, 2),
            ({"TITAN_DISP_NPROC": "3", "SLURM_GPUS_ON_NODE": "4"}, 3),
            ({"TITAN_DISP_NPROC": "3", "SLURM_GPUS_PER_NODE": "4"}, 3),
            ({"TITAN_DISP_NPROC": "2"}, None),  # ranks on CPUs
            ({"TITAN_DISP_NPROC": "gpu"}, None),
            ({"SLURM_GPUS_PER_NODE": "a100:2,v100:2"}, None),
        ],
    )
    def test_gpus_asked_for(self, environment, asked):
        assert supervise.gpus_asked(environment) == asked

    @pytest.mark.parametrize(
        ("found", "asked", "problem"),
        [
            ((8, []), None, None),
            # Nobody said how many: the majority does.
            ((0, []), None, "the number of visible GPUs is 0, but most nodes have 8"),
            ((9, []), None, "the number of visible GPUs is 9, but most nodes have 8"),
            ((7, []), 8, "the number of visible GPUs is 7, expected 8"),
            ((8, ["GPU 3 is in use", "/tmp is full"]), 8, "GPU 3 is in use, /tmp is full"),
        ],
    )
    def test_a_bad_node(self, cluster, found, asked, problem):
        reports = {
            node: {"gpus": ["H100"] * gpus, "problems": told} for node, (gpus, told) in {**FOUR, "n2": found}.items()
        }
        problems = supervise.judge_nodes(list(FOUR), reports, asked)
        assert {node: ", ".join(told) for node, told in problems.items()} == ({"n2": problem} if problem else {})

    def test_all_nodes_lack_a_gpu(self):
        reports = {node: {"gpus": ["H100"] * 7, "problems": []} for node in ("n1", "n2")}
        problem = "the number of visible GPUs is 7, expected 8"
        assert supervise.judge_nodes(["n1", "n2"], reports, 8) == {"n1": [problem], "n2": [problem]}
        assert supervise.judge_nodes(["n1", "n2"], reports, None) == {}
        silent = ["it did not answer"]
        assert supervise.judge_nodes(["n1", "n2"], {}, None) == {"n1": silent, "n2": silent}
        # The majority decides; of two halves the one with more GPUs, since they do not come from nowhere.
        reports = {node: {"gpus": ["H100"] * gpus} for node, gpus in (("n1", 7), ("n2", 8))}
        problem = "the number of visible GPUs is 7, but most nodes have 8"
        assert supervise.judge_nodes(["n1", "n2"], reports, None) == {"n1": [problem]}
        assert supervise.judge_nodes(["n1"], {"n1": {}}, None) == {}  # a report that says nothing

    def test_a_node_that_fails_twice_is_excluded(self, cluster):
        cluster.reports(**{**FOUR, "n3": (8, ["GPU 3 returns wrong matrix products", "/tmp is full"])})
        supervisor = cluster.supervisor()
        outcome = supervisor.check_nodes()
        assert outcome.state == "requeue"
        assert outcome.reason.endswith(
            "nodes that cannot train: node n3: GPU 3 returns wrong matrix products, /tmp is full"
        )
        assert supervisor.bad_nodes() == []
        kept = cluster.run / "nodes" / "7.0" / "n3.json"
        assert json.loads(kept.read_text())["problems"] == ["GPU 3 returns wrong matrix products", "/tmp is full"]
        cluster.reports(**{node: found for node, found in FOUR.items() if node != "n3"})
        supervisor = cluster.supervisor(restart=1)
        outcome = supervisor.check_nodes()
        assert outcome.reason.endswith("nodes that cannot train: node n3: it did not answer")
        assert supervisor.bad_nodes() == ["n3"]

    def test_failures_of_a_node_expire(self, cluster):
        now = time.time()
        times = {"n3": [now - 86401], "n4": [now - 86000], "old format": 2}
        (cluster.run / "bad_nodes.json").write_text(json.dumps(times))
        supervisor = cluster.supervisor()
        supervisor._remember({"n3": ["it did not answer"]})
        assert supervisor.bad_nodes() == []
        supervisor._remember({"n4": ["it did not answer"]})
        assert supervisor.bad_nodes() == ["n4"]

    def test_one_failed_srun_excludes_nobody(self, cluster):
        """srun itself fails twice, so no node is to blame."""
        cluster.write("srun", "echo srun: error: Unable to create step >&2; exit 1")
        for restart in (0, 1):
            outcome = cluster.supervisor(restart=restart).check_nodes()
            assert "failed as a whole (srun's status 1): no node answered" in outcome.reason
        assert not (cluster.run / "bad_nodes.json").exists()

    def test_more_than_a_quarter_are_the_jobs_failure(self, cluster):
        bad = (8, ["/scratch is not writable"])
        cluster.reports(**{**FOUR, "n1": bad, "n2": bad})
        outcome = cluster.supervisor().check_nodes()
        assert "2 of 4 nodes fail their check, which counts as the job's failure" in outcome.reason
        assert "/scratch is not writable" in outcome.reason
        assert not (cluster.run / "bad_nodes.json").exists()

    def test_a_check_that_hangs(self, cluster, capsys):
        """The message names the node that did not answer, and the step is ended."""
        cluster.reports(**{node: found for node, found in FOUR.items() if node != "n2"})
        cluster.write("srun", f'cat "{cluster.commands}/reports"; exec sleep 60')
        start = time.monotonic()
        outcome = cluster.supervisor(TITAN_DISP_CHECK_SECONDS="0.7").check_nodes()
        assert time.monotonic() - start < 10
        assert outcome.reason.endswith("nodes that cannot train: node n2: it did not answer")
        assert cluster.calls("scancel") == ["--signal=KILL 7.0"]  # not 7.batch
        assert self.ENDED in capsys.readouterr().out

    def test_what_else_srun_prints(self, cluster):
        """The output of srun is not only reports.

        It may have labels, colours, two reports on a line, a line without an end, and bytes that are not text.
        """
        cluster.reports(**FOUR)
        _, n1, n2, n3, n4 = (cluster.commands / "reports").read_bytes().splitlines()
        noise = b"\x1b[32m\xe2\x86 \xff\x00 a broken line\r\n"
        text = (
            noise + b"0: \x1b[1m" + n1 + b"\x1b[0m\n" + n2 + n3 + b"\n" + supervise.NODE_REPORT.encode() + b"7\n" + n4
        )
        (cluster.commands / "reports").write_bytes(text)
        supervisor = cluster.supervisor(TITAN_DISP_CHECK_SECONDS="5")
        assert supervisor.check_nodes() == Outcome("prepare", "4 nodes can train")

    def test_signalled_meanwhile(self, cluster, capsys):
        cluster.write("srun", "exec sleep 60")
        threading.Timer(0.3, lambda: cluster.signals.write_text("USR1\n")).start()
        assert cluster.supervisor().check_nodes() == Outcome("decide", "signalled during the check of the nodes")
        assert "is ended" not in capsys.readouterr().out


class TestPrepare:
    def test_the_run_folder_is_what_titan_disp_says(self, cluster):
        other = cluster.folder / "other λ run"
        cluster.folder_is("python", other)
        supervisor = cluster.supervisor("--training.steps", "9")
        assert supervisor.prepare() == Outcome("train", "the config can start on these nodes")
        assert supervisor.run == str(other)
        assert cluster.calls("python") == [
            "-m titan_disp.cluster.job_check --nodes 4 --nproc 1 --job.config_file config.toml --job.dump_folder "
            f"{cluster.run} --training.steps 9"
        ]

    def test_with_a_prefix_and_nothing_said_of_ranks(self, cluster):
        """The supervisor starts a container, such as apptainer exec. The default is one rank per GPU on one node."""
        cluster.write("apptainer", f'cat "{cluster.commands}/folder"')
        supervisor = cluster.supervisor(TITAN_DISP_PREFIX="apptainer exec 'my image.sif'", TITAN_DISP_PYTHON="python3")
        del supervisor.environment["TITAN_DISP_NPROC"], supervisor.environment["SLURM_NNODES"]
        assert supervisor.prepare().state == "train"
        (call,) = cluster.calls("apptainer")
        assert call.startswith("exec my image.sif python3 -m titan_disp.cluster.job_check --nodes 1 --nproc gpu ")

    @pytest.mark.parametrize(
        ("restart", "checkpoint", "state"),
        [(0, None, "end"), (0, 0, "end"), (1, None, "requeue"), (0, 1, "requeue"), (1, 4, "requeue")],
    )
    def test_a_failing_check_ends_only_what_has_never_trained(self, cluster, restart, checkpoint, state):
        """A missing GPU or an import error is not the config's fault at a restart, or if there is a checkpoint.

        TorchTitan's seed checkpoint, of step 0, holds the initial weights and does not count as training.
        """
        if checkpoint is not None:
            cluster.checkpoint(checkpoint)
        cluster.write("python", "echo ImportError >&2; exit 1")
        outcome = cluster.supervisor(restart=restart).prepare()
        assert outcome.state == state
        assert "the config could not be checked (status 1)" in outcome.reason
        ends = outcome.reason.endswith("Not requeued: fix the config or the environment")
        assert ends is (state == "end")

    def test_signalled_meanwhile(self, cluster):
        cluster.signals.write_text("USR1\n")
        cluster.write("python", "sleep 60 & wait")
        assert cluster.supervisor().prepare() == Outcome("decide", "signalled while the config was checked")

    def test_no_interpreter(self, cluster):
        outcome = cluster.supervisor(restart=1, TITAN_DISP_PYTHON="/nowhere/python").prepare()
        assert outcome.state == "requeue"
        assert "No such file or directory: '/nowhere/python'" in outcome.reason

    def test_a_check_that_hangs(self, cluster):
        cluster.write("python", "sleep 60 & wait")  # killed with its children
        start = time.monotonic()
        outcome = cluster.supervisor(restart=1, TITAN_DISP_CHECK_SECONDS="0.5").prepare()
        assert time.monotonic() - start < 10
        assert "the check of the config took more than 0 s" in outcome.reason

    def test_in_a_container_of_srun(self, cluster):
        cluster.folder_is("srun", cluster.run)
        supervisor = cluster.supervisor(TITAN_DISP_SRUN_ARGS="--container-image='/my images/a.sqsh'")
        assert supervisor.prepare().state == "train"
        assert supervisor.run == str(cluster.run)
        (call,) = cluster.calls("srun")
        assert call.startswith("--nodes=1 --ntasks=1 --nodelist=n1 --mem=0 --cpu-bind=none ")
        assert "--container-image=/my images/a.sqsh python -m titan_disp.cluster.job_check" in call

    def test_no_run_folder_is_said(self, cluster, capsys):
        """An image with an older titan-disp does not print the run folder. What it prints is in the log."""
        cluster.write("python", f"echo {cluster.run}")
        outcome = cluster.supervisor().prepare()
        assert outcome.state == "end"
        assert (
            "did not print the run folder: is titan-disp there of the same version as slurm/supervise.py"
            in outcome.reason
        )
        assert capsys.readouterr().out == f"{cluster.run}\n"

    def test_what_titan_disp_prints_is_understood(self, cluster, sample, monkeypatch, capsys):
        run = cluster.folder / "läufe" / os.fsdecode(b"\xff")
        options = ("--model.hf_assets_path", f"{sample}/tokenizer", "--training.dataset_path", str(sample))
        argv = [
            "job",
            "--nodes",
            "1",
            "--nproc",
            "1",
            "--job.config_file",
            str(DEMO),
            "--job.dump_folder",
            str(run),
            *options,
        ]
        monkeypatch.setattr("sys.argv", argv)
        job_check.main()
        lines = capsys.readouterr().out.splitlines(keepends=True)
        assert supervise.marked(lines, supervise.RUN_FOLDER) == [str(run)]
        with pytest.raises(ConfigError, match="TITAN_DISP_NPROC is '8x', expected gpu or a number of ranks per node"):
            job_check.prepare(argv[5:], 1, "8x")
        assert supervise.NODE_REPORT == node_health.REPORT
        assert supervise.IN_USE == IN_USE_EXIT_CODE

    def test_a_users_stop_file_holds(self, cluster):
        (cluster.run / "stop").touch()
        outcome = cluster.supervisor().prepare()
        assert outcome == Outcome(
            "end", f"{cluster.run}/stop exists, so nothing was trained. Remove the file to continue"
        )
        (cluster.run / "stop").write_bytes(b"\xff")  # nothing that a start of a job writes
        assert cluster.supervisor().prepare().state == "end"
        (cluster.run / "stop").write_text("6.2\n")  # of an earlier start of a job
        assert cluster.supervisor().prepare().state == "train"


@pytest.mark.parametrize(
    ("toml", "overrides", "folder"),
    [
        ('[job]\ndump_folder = "a b"  # comment', [], "a b"),
        ("[job]\ndump_folder='x'", ["--job.dump_folder", "y"], "y"),
        ("[job]\ndump_folder='x'", ["--job.dump_folder=/y", "--job.dump_folder=/z"], "/z"),
        ("[job]\ndump_folder='x'", ["--job.dump-folder=/y"], "/y"),
        ('job.dump_folder = "x"\n[model]\nname = "n"', [], "x"),
        ("job . 'dump_folder' = 'x y'", [], "x y"),
        ('job = { description = "a, }", dump_folder = "x" }', [], "x"),
        ('job = {dump_folder="a = b # c"}  # dump_folder = "no"', [], "a = b # c"),
        ('[ "job" ]\n"dump_folder" = "x"', [], "x"),
        ("[job]\ndescription = \"dump_folder = 'no'\"", [], "./outputs"),
        ('[model]\nname = "job.dump_folder"', [], "./outputs"),
        ('[other]\ndump_folder = "no"\n[ job ]\ndescription = "d"', [], "./outputs"),
        ('[other]\njob.dump_folder = "no"\njob = { dump_folder = "no" }', [], "./outputs"),
        ("", [], "./outputs"),
    ],
)
def test_run_folder_without_titan_disp(tmp_path, monkeypatch, toml, overrides, folder):
    """The folder is the one that TorchTitan reads from the overrides, the TOML file or the default."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(toml)
    assert supervise.run_folder("c.toml", overrides) == os.path.abspath(folder)
    if "[other]" not in toml:  # not a section that TorchTitan knows
        from torchtitan.config import ConfigManager

        config = ConfigManager().parse_args(["--job.config_file", "c.toml", *overrides])
        assert os.path.abspath(config.job.dump_folder) == os.path.abspath(folder)


def test_the_strings_of_a_toml_file():
    """The keys are those of tomli. Only strings have values, and nothing inside an array has a key."""
    text = """first = "a"\n[job]\nsteps = 7\nflag = true\nwords = ["dump_folder = 'no'", "b"]\ndump_folder = 'x'
inner = { number = 1, text = "c" }\n"""
    assert tomli.loads(text)["job"]["inner"]["text"] == "c"
    expected = [("first", "a"), ("job.dump_folder", "x"), ("job.inner.text", "c")]
    assert list(supervise.toml_strings(text.splitlines(keepends=True))) == expected


def test_a_group_that_has_ended_is_not_killed():
    process = subprocess.Popen(["true"], start_new_session=True)
    process.wait()
    supervise.kill_group(process)


def test_any_bytes_in_any_locale(cluster):
    """In the C locale, Python 3.6 reads and writes ASCII.

    Newer versions do so with PYTHONCOERCECLOCALE=0 and without UTF-8 mode.
    """
    config = cluster.folder / "c.toml"
    config.write_bytes("# λ \n[job]\ndump_folder = 'läufe'\n".encode() + b"# \xff\n")
    cluster.job.update(JobName="λ", TimeLimit="00:01:00", StdOut=str(cluster.folder / "job.out"))
    cluster.supervisor()  # writes what `scontrol show job` says
    environment = {
        "PATH": f"{cluster.commands}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-4] \u03bb",
        **{"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    }
    command = [sys.executable, ROOT / "slurm" / "supervise.py", "--signals", cluster.signals, config]
    done = subprocess.run(command, env=environment, cwd=cluster.folder, capture_output=True)
    assert done.returncode == 2, done.stderr
    assert b"the time limit is 60 s" in done.stdout
    assert [p.name for p in cluster.folder.glob("l*ufe/*")] == ["supervisor.jsonl"]


class TestAnotherJobsRun:
    """The counters, the heartbeat and the stop file of a run belong to the job that holds the run folder's lock."""

    @pytest.fixture
    def state(self, cluster):
        """Write the files that this job must not change."""
        cluster.checkpoint(4)
        texts = {"requeue.json": '{"failures": 2, "step": 4}', "heartbeat.json": '{"start": "6.0"}'}
        for name, text in texts.items():
            (cluster.run / name).write_text(text)
        return texts

    @pytest.fixture
    def lock(self, cluster):
        """Take the lock as run/folder.py does, for another job unless a test writes another number."""
        with open(cluster.run / ".lock", "w") as file:
            file.write("host n9, pid 77, SLURM job 6")
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def left(self, cluster, state):
        assert {name: (cluster.run / name).read_text() for name in state} == state
        assert not {"stop", "bad_nodes.json"} & {path.name for path in cluster.run.iterdir()}

    @pytest.mark.parametrize("restart", [0, 1])
    def test_a_second_job_ends(self, cluster, state, lock, restart):
        """The second job is not requeued. Otherwise it would start three more times."""
        cluster.write("python", "exit 3")
        supervisor = cluster.supervisor(restart=restart, TITAN_DISP_CHECK_NODES="0")
        assert supervisor.supervise() == 2
        assert cluster.transitions()[-1]["reason"].startswith("job 6 uses the run folder. Not requeued")
        assert not [call for call in cluster.calls("scontrol") if call.startswith("requeue")]
        self.left(cluster, state)

    def test_bad_nodes_are_no_failure_of_its_run(self, cluster, state, lock):
        cluster.reports(**{**FOUR, "n3": (8, ["GPU 3 returns wrong matrix products"])})
        assert cluster.supervisor(restart=1).check_nodes().state == "end"
        self.left(cluster, state)

    def test_it_began_while_the_nodes_were_checked(self, cluster, state, lock):
        """The ranks find the run folder locked and fail, and the job gets a signal in the meantime."""
        cluster.write("srun", f"echo USR1 > {cluster.signals}; sleep 0.3; exit 1")
        supervisor = cluster.supervisor(restart=1)
        assert supervisor.train().state == "decide"
        cluster.error("InUseError: in use by another job", time=9, start="7.1")
        assert supervisor.decide().state == "end"
        self.left(cluster, state)

    def test_what_this_jobs_own_start_has_left(self, cluster, state, lock):
        """A dead node may hold its locks for a while.

        A lock of this job's own earlier start counts as a failure to retry.
        """
        lock.seek(0)
        lock.write("host n9, pid 77, SLURM job 7")
        lock.flush()
        cluster.write("python", "exit 3")
        assert cluster.supervisor(restart=1).prepare().reason.startswith("failure 3 of at most 3")

    def test_a_lock_that_nobody_holds(self, cluster, state):
        (cluster.run / ".lock").write_text("host n9, pid 77, SLURM job 6")
        assert decided(cluster, restart=1).reason.startswith("failure 3 of at most 3")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("MAX_RETRIES", "abc", "a whole number from 0"),
        ("MAX_RETRIES", "-1", "a whole number from 0"),
        ("MAX_RETRIES", "1.5", "a whole number from 0"),
        ("SIGNAL_SECONDS", "5m", "a whole number from 1"),
        ("SIGNAL_SECONDS", "0", "a whole number from 1"),
        ("PORT", "high", "a whole number from 1 to 65535"),
        ("PORT", "65536", "a whole number from 1 to 65535"),
        ("CHECK_SECONDS", "nan", "a number above 0"),
        ("CHECK_SECONDS", "inf", "a number above 0"),
        ("CHECK_SECONDS", "0", "a number above 0"),
    ],
)
def test_a_setting_that_is_no_number(cluster, name, value, expected):
    """One line says so before anything starts."""
    cluster.supervisor()  # writes what `scontrol show job` says
    environment = {
        "PATH": f"{cluster.commands}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-4]",
    }
    environment[f"TITAN_DISP_{name}"] = value
    command = [sys.executable, ROOT / "slurm" / "supervise.py", "--signals", cluster.signals, "c.toml"]
    done = subprocess.run(command, env=environment, cwd=cluster.folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "")
    (line,) = done.stdout.splitlines()
    assert line.endswith(f"error: TITAN_DISP_{name} is {value!r}, expected {expected}")
    assert not cluster.calls("scontrol")


class TestTrain:
    def test_how_it_is_started(self, cluster):
        cluster.write("srun", f'env > "{cluster.folder}/environment"')
        # 128 would fail on the last node.
        unequal = {"SLURM_CPUS_ON_NODE": "128", "SLURM_JOB_CPUS_PER_NODE": "128(x3),64"}
        supervisor = cluster.supervisor(TITAN_DISP_SRUN_ARGS="--mpi=none --cpus-per-task=32", **unequal)
        assert supervisor.train() == Outcome("decide", "training ended with status 0")
        (call,) = cluster.calls("srun")
        assert call == (
            "--ntasks-per-node=1 --kill-on-bad-exit=1 --mem=0 --cpu-bind=none --mpi=none --cpus-per-task=32 bash "
            f"{ROOT}/slurm/node.sh train --job.config_file config.toml --job.dump_folder {cluster.run}"
        )
        seen = (cluster.folder / "environment").read_text().splitlines()
        assert "TITAN_DISP_ENDPOINT=n1:20007" in seen
        assert f"TITAN_DISP_RUN={cluster.run}" in seen
        assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300" in seen

    def test_signalled_before(self, cluster):
        """No ranks are started if the job has got a signal already."""
        cluster.signals.write_text("USR1\n")
        assert cluster.supervisor().train() == Outcome("decide", "signalled before training")
        assert not cluster.calls("srun")

    def test_the_site_knows_better(self, cluster):
        cluster.write("srun", f'env > "{cluster.folder}/environment"')
        site = {"TITAN_DISP_HEAD": "10.0.0.1", "TITAN_DISP_PORT": "33000", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
        cluster.supervisor(**site).train()
        seen = (cluster.folder / "environment").read_text().splitlines()
        assert "TITAN_DISP_ENDPOINT=10.0.0.1:33000" in seen
        assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=5" in seen

    @pytest.mark.parametrize("users", [False, True])
    def test_a_signal_becomes_the_stop_file(self, cluster, users):
        """The ranks look for the stop file. A user's own stop file is not changed."""
        stop = cluster.run / "stop"
        if users:
            stop.touch()
        cluster.write(
            "srun", f'while [ ! -e "{stop}" ] || [ ! -s "{cluster.signals}" ]; do sleep 0.05; done; sleep 0.2; exit 3'
        )
        threading.Timer(0.2, lambda: cluster.signals.write_text("USR1\n")).start()
        assert cluster.supervisor().train() == Outcome("decide", "training ended with status 3")
        assert stop.read_text() == ("" if users else "7.0\n")

    def test_a_stop_file_that_cannot_be_written(self, cluster, capsys):
        """An empty stop file would look like a user's, and the run would never train again."""
        (cluster.run / "stop.partial").symlink_to("/dev/full")
        cluster.write("srun", f"echo USR1 > {cluster.signals}; sleep 0.3; exit 3")
        assert cluster.supervisor().train() == Outcome("decide", "training ended with status 3")
        assert not (cluster.run / "stop").exists()
        assert "so the ranks are not asked to stop: No space left on device" in capsys.readouterr().out

    PIPES = ("heartbeat.json", "events.jsonl", "stop", "bad_nodes.json", "requeue.json", "supervisor.jsonl")

    def beat(self, cluster, allowed, start="7.0"):
        content = {"start": start, "step": 5, "doing": "save", "allowed_seconds": allowed}
        return f"echo '{json.dumps(content)}' > {cluster.run}/heartbeat.json"

    def test_a_silent_run_is_ended(self, cluster):
        """Rank 0 is frozen and no collective is pending, so nothing else would notice before the time limit."""
        cluster.write("srun", f"{self.beat(cluster, 0.3)}; exec sleep 60")
        log = cluster.run / "logs" / "7.0" / "node-0" / "x" / "attempt_0" / "1" / "stderr.log"
        log.parent.mkdir(parents=True)
        dump = "import faulthandler, sys, time; faulthandler.dump_traceback_later(0.1); "
        dump += "\ndef write():\n  time.sleep(0.5)\nwrite()"
        log.write_text(subprocess.run([sys.executable, "-c", dump], capture_output=True, text=True).stderr)
        cluster.write("scancel", "pkill -f 'sleep 60'")
        supervisor = cluster.supervisor()
        start = time.monotonic()
        assert supervisor.train().state == "decide"
        assert time.monotonic() - start < 20
        outcome = supervisor.decide()
        assert outcome.state == "requeue"
        assert "at step 5 (save), and 0 s are allowed (node 0 rank 1: write in <string>:3)" in outcome.reason

    @pytest.mark.parametrize("comm", [{}, {"save_traces_folder": "traces", "save_traces_file_prefix": "gpu"}])
    def test_the_flight_recorders_files_are_named(self, cluster, comm):
        """The reason names the files that NCCL's watchdog has written in this start.

        TorchTitan's [comm] sets their names, <folder>/<prefix><rank>.
        """
        default = JobConfig().comm
        folder = cluster.run / comm.get("save_traces_folder", default.save_traces_folder)
        prefix = comm.get("save_traces_file_prefix", default.save_traces_file_prefix)
        folder.mkdir()
        (cluster.run / "config.json").write_text(json.dumps({"comm": comm}))
        for name in (f"{prefix}0", f"{prefix}1"):  # of an earlier start
            (folder / name).write_text("old")
            os.utime(folder / name, (time.time() - 100, time.time() - 100))
        supervisor = cluster.supervisor()
        supervisor.note(Outcome("train"))
        cluster.write("srun", "exit 1")
        supervisor.train()
        assert "flight recorder" not in supervisor.decide().reason
        dumps = " ".join(f"{folder}/{prefix}{rank}" for rank in (10, 9, 2))
        cluster.write("srun", f"for file in {dumps} {folder}/other; do echo dump > $file; done; exit 1")
        supervisor.train()
        assert supervisor.decide().reason.endswith(f"; NCCL's flight recorder: {folder}/{prefix}2 and 2 more")
        cluster.error("RuntimeError: NCCL timed out", time=9)
        supervisor.stalled = "rank 0 has been silent for 9 s"
        assert supervisor.decide().reason.endswith(f"9 s; NCCL's flight recorder: {folder}/{prefix}2 and 2 more")

    def test_a_run_folder_that_hangs(self, cluster, capsys):
        """Any process that opens a file there hangs, the supervisor too.

        Pipes that nobody writes to stand for the files.
        """
        pipes = " ".join(self.PIPES)
        # Renamed: a file that is missing for a moment would be a run that has said its last word.
        hang = f"mkdir pipes; cd pipes; mkfifo {pipes}; sleep 0.4; mv -f {pipes} {cluster.run}"
        cluster.write("srun", f"{self.beat(cluster, 0.6)}; cd {cluster.folder}; {hang}; exec sleep 60")
        supervisor = cluster.supervisor(TITAN_DISP_CHECK_NODES="0", TITAN_DISP_CHECK_SECONDS="2")
        supervisor.patience = 0.3
        start = time.monotonic()
        assert supervisor.supervise() == 1
        assert time.monotonic() - start < 30
        assert "requeue 7" in cluster.calls("scontrol")
        assert cluster.calls("scancel") == ["--signal=KILL 7.0"]
        assert "at step 5 (save), and 1 s are allowed" in supervisor.stalled
        assert (
            f"requeue: decide: no answer within 2 s; does the file system of {cluster.run} hang? (not counted)"
        ) in capsys.readouterr().out
        for name in self.PIPES:  # let the threads go
            os.close(os.open(cluster.run / name, os.O_RDWR | os.O_NONBLOCK))

    @pytest.mark.parametrize(("beat", "text"), [(True, "at its end"), (False, "at its start")])
    def test_a_run_without_a_heartbeat(self, cluster, beat, text):
        """Python hangs before rank 0 has written a heartbeat, or after rank 0 has removed it at the end."""
        said = f"{self.beat(cluster, 60)}; sleep 0.3; rm {cluster.run}/heartbeat.json; " if beat else ""
        cluster.write("srun", f"{said}exec sleep 60")
        supervisor = cluster.supervisor()
        supervisor.quiet = 0.6
        start = time.monotonic()
        supervisor.train()
        assert time.monotonic() - start < 20
        assert supervisor.stalled.endswith(f"s {text}, and 1 s are allowed")
        cluster.write("srun", "sleep 1")
        supervisor = cluster.supervisor(TITAN_DISP_MODULE="torchtitan.train")  # which has none
        supervisor.quiet = 0.2
        supervisor.train()
        assert supervisor.stalled == ""

    @pytest.mark.parametrize("start", ["7.0", "6.0"])
    def test_a_run_that_beats_is_left_alone(self, cluster, start):
        """This also holds if the heartbeat is from another start or unreadable."""
        beat = self.beat(cluster, 60 if start == "7.0" else 0, start)
        cluster.write("srun", f"{beat}; sleep 0.3; echo '{{' > {cluster.run}/heartbeat.json; sleep 0.2")
        assert cluster.supervisor().train() == Outcome("decide", "training ended with status 0")
        assert not cluster.calls("scancel")


class TestEnds:
    def updates(self, cluster):
        return [call for call in cluster.calls("scontrol") if call.startswith("update")]

    def excluded(self, cluster, own, **hours):
        """Return the excluded nodes of a requeued job whose nodes have failed twice, ``hours`` ago.

        None means unchanged.
        """
        # The update is what `scontrol show job` says from now on.
        cluster.write(
            "scontrol",
            f'{cluster.SHOW}; case "$1" in update) sed -i "/ExcNodeList/d" "$0.job"; echo "$3" >> "$0.job";; esac',
        )
        if own is not None:
            cluster.job["ExcNodeList"] = own
            supervisor = cluster.supervisor()
        else:  # as the start before has left it
            job = (cluster.commands / "scontrol.job").read_text()
            supervisor = cluster.supervisor()
            (cluster.commands / "scontrol.job").write_text(job)
        times = {node: 2 * [time.time() - 3600 * ago] for node, ago in hours.items()}
        (cluster.run / "bad_nodes.json").write_text(json.dumps(times))
        before = len(self.updates(cluster))
        supervisor.last_wait = 0
        assert supervisor.requeue() == 1
        assert "requeue 7" in cluster.calls("scontrol")
        calls = self.updates(cluster)[before:]
        return calls[-1][len("update JobId=7 ExcNodeList=") :] if calls else None

    def test_bad_nodes_are_excluded_for_a_day(self, cluster):
        """The user's own excluded nodes stay excluded, even those that were bad too.

        SLURM's update replaces the whole list.
        """
        assert self.excluded(cluster, "n[7-9]", n2=1, n5=2, n6=25, n8=1) == "n7,n8,n9,n2,n5"
        assert self.excluded(cluster, None, n2=2, n5=3, n8=2) is None  # it is so already
        assert self.excluded(cluster, None, n2=25, n5=3, n8=26) == "n7,n8,n9,n5"
        assert self.excluded(cluster, None, n2=26, n5=26, n8=27) == "n7,n8,n9"
        assert self.excluded(cluster, None) is None

    def test_nobody_to_exclude(self, cluster):
        assert self.excluded(cluster, "(null)") is None
        assert self.excluded(cluster, "(null)", n2=1) == "n2"
        assert self.excluded(cluster, None) == ""  # "": nobody

    def test_a_list_of_another_job(self, cluster):
        """If a user submits the run again, the nodes excluded there are the user's."""
        (cluster.run / "excluded.json").write_text('{"job": "6", "nodes": ["n2"]}')
        assert self.excluded(cluster, "n2") is None
        assert self.excluded(cluster, "n2", n3=1) == "n2,n3"
        (cluster.run / "excluded.json").write_text('{"job": "7"}')  # and one that names nobody
        assert self.excluded(cluster, "n2") is None

    def test_a_list_that_cannot_be_changed(self, cluster, capsys):
        """slurmctld may be busy, so it is asked eight times."""
        cluster.write("scontrol", 'case "$1" in show) cat "$0.job";; update) exit 1;; esac')
        (cluster.run / "bad_nodes.json").write_text(json.dumps({"n2": [time.time(), time.time()]}))
        assert cluster.supervisor().requeue() == 1
        assert self.updates(cluster) == 8 * ["update JobId=7 ExcNodeList=n2"]
        assert "submit it again with --exclude=n2" in capsys.readouterr().out
        assert not (cluster.run / "excluded.json").exists()

    def test_a_list_that_cannot_be_written_down(self, cluster):
        """A file system that refuses or hangs does no harm, because the job has been requeued already."""
        supervisor = cluster.supervisor()
        supervisor.patience = 0.1
        partial = cluster.run / "excluded.json.partial"
        partial.mkdir()
        supervisor._remember_excluded("7", ["n2"])
        partial.rmdir()
        os.mkfifo(partial)
        supervisor._remember_excluded("7", ["n2"])
        os.close(os.open(partial, os.O_RDWR | os.O_NONBLOCK))  # let the thread go

    def test_names_that_slurm_does_not_say(self, cluster):
        """If the list cannot be expanded, no node is removed from it."""
        cluster.write("scontrol", 'case "$1 $2" in "show job") cat "$0.job";; "show hostnames") exit 1;; esac')
        cluster.job["ExcNodeList"] = "n[7-9]"
        (cluster.run / "excluded.json").write_text('{"job": "7", "nodes": ["n7"]}')
        assert cluster.supervisor().requeue() == 1
        assert not self.updates(cluster)

    def test_requeue_succeeds_at_the_third_try(self, cluster, capsys):
        cluster.write(
            "scontrol", 'case "$1" in show) cat "$0.job";; *) [ $(grep -c ^requeue "$0.calls") -eq 3 ];; esac'
        )
        assert cluster.supervisor().requeue() == 1
        assert cluster.calls("scontrol").count("requeue 7") == 3
        text = capsys.readouterr().out
        assert text.count("scontrol requeue failed (status 1)") == 2
        assert text.rstrip().endswith("requeued")

    def test_requeued_by_slurm(self, cluster):
        """SLURM has requeued the job, for example because a node died during the check.

        The next start is left alone.
        """
        cluster.job["Restarts"] = "1"
        assert cluster.supervisor(TITAN_DISP_RESUBMIT="1").requeue() == 1
        assert "requeue 7" not in cluster.calls("scontrol")
        assert not cluster.calls("sbatch")

    def test_an_answer_that_is_lost(self, cluster):
        """slurmctld has requeued the job, but scontrol timed out.

        A second job would use the same run folder, so none is submitted.
        """
        cluster.write(
            "scontrol",
            'case "$1 $2" in "show job") cat "$0.job";; requeue*) sed -i s/Restarts=0/Restarts=1/ "$0.job"; exit 1;; esac',
        )
        cluster.write("sbatch", "echo Submitted batch job 8")
        cluster.job["Restarts"] = "0"
        (cluster.run / "bad_nodes.json").write_text(json.dumps({"n2": [time.time(), time.time()]}))
        assert cluster.supervisor(TITAN_DISP_RESUBMIT="1").requeue() == 1
        assert not cluster.calls("sbatch")
        assert cluster.calls("scontrol").count("requeue 7") == 1
        assert cluster.calls("scontrol")[-1] == "update JobId=7 ExcNodeList=n2"

    def test_refused_and_not_resubmitted(self, cluster, capsys):
        """The log does not say that the job is requeued. It says which command submits the job again."""
        cluster.job.update(Account="abc", QOS="normal", JobName="my run", Features="(null)", ExcNodeList="n9")
        given = {
            "TITAN_DISP_SITE": "perlmutter",
            "TITAN_DISP_SRUN_ARGS": "--cpus-per-task=8 -v",
            "TITAN_DISP_ENV_ARCHIVE": "e.tar",
        }
        supervisor = cluster.supervisor("--training.steps", "9", SLURM_GPUS_PER_NODE="8", **given)
        supervisor.environment["TITAN_DISP_PYTHON"] = "/tmp/unpacked/bin/python"  # as after unpacking, on this node
        assert supervisor.requeue() == 1
        assert not cluster.calls("sbatch")
        top = (cluster.folder / "job.out").read_text().splitlines()[0]
        assert top == (
            "titan-disp: NOT REQUEUED: SLURM refused it. Submit the job again: TITAN_DISP_SITE=perlmutter "
            "TITAN_DISP_SRUN_ARGS='--cpus-per-task=8 -v' TITAN_DISP_ENV_ARCHIVE=e.tar TITAN_DISP_NPROC=1 "
            "sbatch '--job-name=my run' --account=abc "
            "--partition=gpu --qos=normal --nodes=4 --time=1-00:00:00 --gpus-per-node=8 --exclude=n9 "
            f"--chdir=/work --output={cluster.folder}/%x-%j.out --export=ALL "
            f"{ROOT}/slurm/pretrain.sbatch config.toml --job.dump_folder {cluster.run} --training.steps 9"
        )
        assert "requeued" not in capsys.readouterr().out

    def test_refused_and_resubmitted(self, cluster, capfd):
        cluster.write("sbatch", 'echo "Submitted batch job 8${SLURM_RESTART_COUNT:+, with the restarts of this one}"')
        (cluster.run / "bad_nodes.json").write_text(json.dumps({"n3": [time.time(), time.time()]}))
        assert cluster.supervisor(TITAN_DISP_RESUBMIT="1", restart=2).requeue() == 0
        assert len(cluster.calls("sbatch")) == 1
        assert "submitted again as Submitted batch job 8\n" in capfd.readouterr().out
        assert json.loads((cluster.run / "excluded.json").read_text()) == {"job": "8", "nodes": ["n3"]}
        cluster.write("sbatch", "echo sbatch: error: no such partition >&2; exit 1")
        assert cluster.supervisor(TITAN_DISP_RESUBMIT="1").requeue() == 1
        assert "sbatch: error: no such partition" in capfd.readouterr().err

    # What SLURM 22.05.8 says of a job of --gpus-per-task=1 --exclude=n[3-4] --licenses=fast:1 --comment='a TimeLimit=b'
    # --mail-type=END,FAIL --mail-user=x@y.z --nice=5 --switches=2@00:05:00 --contiguous --job-name='my run' --error=/e
    # --time-min=1.
    SHOWN = """JobId=7 JobName=my run
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901754 Nice=5 Account=(null) QOS=(null)
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:00 TimeLimit=00:10:00 TimeMin=00:01:00
   SubmitTime=2026-11-22T05:24:54 EligibleTime=2026-11-22T05:24:54
   AccrueTime=2026-11-22T05:24:54
   StartTime=2026-11-22T05:24:54 EndTime=2026-11-22T05:25:54 Deadline=N/A
   SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-22T05:24:54 Scheduler=Backfill
   Partition=debug AllocNode:Sid=localhost:4197
   ReqNodeList=(null) ExcNodeList=n[3-4]
   NodeList=n[1-2]
   BatchHost=n1
   NumNodes=2 NumCPUs=3 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   TRES=cpu=3,node=2,billing=3
   Socks/Node=* NtasksPerN:B:S:C=1:0:*:* CoreSpec=*
   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0
   Features=(null) DelayBoot=00:00:00
   OverSubscribe=NO Contiguous=1 Licenses=fast:1 Network=(null)
   Command=/a checkout/slurm/pretrain.sbatch c.toml --job.description Partition=b
   WorkDir=/my work
   Comment=a TimeLimit=b\x20
   StdErr=/e
   StdIn=/dev/null
   StdOut=/tmp/1.out
   Switches=2@00:05:00
   Power=
   TresPerTask=gres:gpu:1
   MailUser=x@y.z MailType=END,FAIL

"""

    def test_what_slurm_says_of_the_job_is_asked_for_again(self, cluster):
        supervisor = cluster.supervisor()
        (cluster.commands / "scontrol.job").write_text(self.SHOWN)
        supervisor.show_job()
        command = supervisor.resubmission(["n3", "n4"])
        assert command[:-2] == [
            *(
                "sbatch",
                "--job-name=my run",
                "--partition=debug",
                "--nodes=4",
                "--time=00:10:00",
                "--time-min=00:01:00",
            ),
            *(
                "--gpus-per-task=1",
                "--exclude=n3,n4",
                "--licenses=fast:1",
                "--switches=2@00:05:00",
                "--contiguous",
                "--nice=5",
            ),
            *(
                "--comment=a TimeLimit=b",
                "--mail-type=END,FAIL",
                "--mail-user=x@y.z",
                "--chdir=/my work",
                "--output=/tmp/%x-%j.out",
            ),
            *("--error=/e", "--export=ALL", f"{ROOT}/slurm/pretrain.sbatch", "config.toml"),
        ]

    # A field of `scontrol show job` and the option of sbatch(1) that asks for the same.
    OPTIONS = (
        ("JobName", "my run", "--job-name=my run"),
        ("Account", "abc", "--account=abc"),
        ("Partition", "gpu", "--partition=gpu"),
        ("QOS", "high", "--qos=high"),
        ("WCKey", "*X1", "--wckey=X1"),  # the star marks a default key
        ("TimeLimit", "1-00:00:00", "--time=1-00:00:00"),
        ("TimeMin", "00:30:00", "--time-min=00:30:00"),
        ("Features", "h100&ib", "--constraint=h100&ib"),
        ("Prefer", "rack1", "--prefer=rack1"),
        ("Reservation", "maint", "--reservation=maint"),
        ("ReqNodeList", "n[1-2]", "--nodelist=n[1-2]"),
        ("Licenses", "fast:1", "--licenses=fast:1"),
        ("Network", "sn_all", "--network=sn_all"),
        ("Switches", "2@00:05:00", "--switches=2@00:05:00"),
        ("Contiguous", "1", "--contiguous"),
        ("Nice", "-5", "--nice=-5"),
        ("Comment", "c", "--comment=c"),
        ("MailType", "END", "--mail-type=END"),
        ("MailUser", "x@y.z", "--mail-user=x@y.z"),
        ("WorkDir", "/w", "--chdir=/w"),
        ("StdOut", "/a/1.out", "--output=/a/%x-%j.out"),
        ("StdErr", "/a/1.err", "--error=/a/1.err"),
    )

    def test_every_option_that_scontrol_tells(self, cluster):
        supervisor = cluster.supervisor()
        supervisor.fields = {field: value for field, value, _ in self.OPTIONS}
        command = supervisor.resubmission([])
        assert sorted(command[1:-5]) == sorted([*(option for *_, option in self.OPTIONS), "--nodes=4"])
        supervisor.fields = dict.fromkeys((field for field, *_ in self.OPTIONS), "(null)") | {
            "Nice": "0",
            "Contiguous": "0",
        }
        assert supervisor.resubmission([])[1:-5] == ["--nodes=4", "--output=%x-%j.out"]

    @pytest.mark.parametrize("kind", ["Job", "Socket", "Task"])
    def test_gpus_that_were_asked_for_in_other_ways(self, cluster, kind):
        """The texts are those of SLURM 22.05 and later versions."""
        option = {"Job": "--gpus", "Socket": "--gpus-per-socket", "Task": "--gpus-per-task"}[kind]
        for text, number in (
            ("gres:gpu:h100:2", "h100:2"),
            ("gres/gpu:8", "8"),
            ("cpu:8,gres/gpu:8", "8"),
            ("cpu=8,gres/gpu=8", "8"),
        ):
            cluster.job[f"TresPer{kind}"] = text
            supervisor = cluster.supervisor()
            supervisor.show_job()
            assert [word for word in supervisor.resubmission([]) if word.startswith("--g")] == [f"{option}={number}"]

    @pytest.mark.parametrize(
        ("tres", "gres"),
        [
            ("gres:gpu:8", ["--gres=gpu:8"]),
            ("gres/gpu:h100:8,gres/nvme:1", ["--gres=gpu:h100:8"]),
            ("gpu:2,gres:gpu_mem:80", ["--gres=gpu:2"]),
            ("(null)", []),
        ],
    )
    def test_the_same_gpus_and_signal_again(self, cluster, tres, gres):
        """A job that requested its GPUs by --gres must be submitted again with them."""
        cluster.job["TresPerNode"] = tres
        supervisor = cluster.supervisor(TITAN_DISP_SIGNAL_SECONDS="600")
        supervisor.show_job()
        options = [word for word in supervisor.resubmission([]) if word.startswith(("--g", "--signal"))]
        assert options == [*gres, "--signal=B:USR1@600"]
        supervisor = cluster.supervisor(SLURM_GPUS_PER_NODE="8")
        supervisor.show_job()
        assert [word for word in supervisor.resubmission([]) if word.startswith(("--g", "--signal"))] == [
            "--gpus-per-node=8"
        ]

    def test_the_reason_is_on_top_of_the_log(self, cluster):
        cluster.supervisor().on_top("GIVEN UP")
        assert (cluster.folder / "job.out").read_text() == "titan-disp: GIVEN UP\n\nthe job's\nown lines\n"

    def test_on_top_of_any_bytes(self, cluster, monkeypatch):
        (cluster.folder / "job.out").write_bytes(b"\xff 1%\r 2%\r\nend")
        cluster.supervisor().on_top("λ")
        assert (cluster.folder / "job.out").read_bytes() == "titan-disp: λ\n\n".encode() + b"\xff 1%\r 2%\r\nend"
        monkeypatch.setattr(supervise, "TOP", 10)  # a log of many GB is not read into memory
        cluster.supervisor().on_top("again")
        assert (cluster.folder / "job.out").read_bytes().startswith("titan-disp: λ".encode())

    def test_the_longest_log_that_is_changed(self, cluster, monkeypatch):
        """This also works if scontrol was not asked before."""
        log = cluster.folder / "job.out"
        monkeypatch.setattr(supervise, "TOP", log.stat().st_size)
        cluster.supervisor().on_top("a file's name: \udcff")
        assert log.read_bytes().startswith(b"titan-disp: a file's name: \xff\n\nthe job's")
        supervisor = cluster.supervisor()
        supervisor.show_job()
        (cluster.commands / "scontrol.job").write_text("")  # it knows the job no more
        monkeypatch.setattr(supervise, "TOP", 1 << 20)
        supervisor.on_top("again")
        assert log.read_bytes().startswith(b"titan-disp: again")
        log.unlink()
        cluster.supervisor().on_top("there is no log")
        del cluster.job["StdOut"]
        cluster.supervisor().on_top("nobody knows where it is")


def test_the_program(cluster, monkeypatch):
    """The program passes on its arguments and signals, and returns the status. Other tests run it as a process."""
    met = []

    def supervised(self):
        met.append((self.argv, self.signals, self.address))
        for name in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), name)
            met.append(self.heard)
        return 5

    monkeypatch.setattr(supervise.Supervisor, "supervise", supervised)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    handlers = [(name, signal.getsignal(name)) for name in (signal.SIGUSR1, signal.SIGTERM)]
    try:
        monkeypatch.setattr(sys, "argv", ["supervise.py", "--signals", "s", "c.toml", "--sig", "x"])
        with pytest.raises(SystemExit, match="5"):
            supervise.main()
        assert met == [(["c.toml", "--sig", "x"], "s", "7"), "USR1", "TERM"]
        points = cluster.folder / "points.json"
        points.write_text(json.dumps({"points": [{"argv": ["first.toml"]}, {"argv": ["second.toml", "--a=b"]}]}))
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
        monkeypatch.setattr(sys, "argv", ["supervise.py", "--signals", "s", "--of-array", str(points)])
        with pytest.raises(SystemExit, match="5"):
            supervise.main()
        assert met[3:] == [(["second.toml", "--a=b"], "s", "7_1"), "USR1", "TERM"]
    finally:
        for name, handler in handlers:
            signal.signal(name, handler)
    monkeypatch.setenv("TITAN_DISP_MAX_RETRIES", "many")
    with pytest.raises(SystemExit, match="2"):
        supervise.main()
    monkeypatch.delenv("TITAN_DISP_MAX_RETRIES")
    for argv in (["c.toml"], ["--signals", "s"]):
        monkeypatch.setattr(sys, "argv", ["supervise.py", *argv])
        with pytest.raises(SystemExit, match="2"):
            supervise.main()


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("00:05:00", 300), ("2-01:00:01", 176401), ("10:00:00", 36000), ("UNLIMITED", None), ("Partition_Limit", None)],
)
def test_time_limits(limit, seconds):
    assert supervise.seconds_of(limit) == seconds


class TestSupervise:
    def states(self, cluster):
        return [record["state"] for record in cluster.transitions()]

    def test_a_run_from_its_start_to_its_end(self, cluster, capsys):
        began = time.time()
        cluster.reports(**FOUR)
        event = json.dumps({"event": "complete", "step": 9, "job": "7.0"})
        cluster.write("srun", f"cat {cluster.commands}/reports; echo '{event}' >> {cluster.run}/events.jsonl")
        assert cluster.supervisor().supervise() == 0
        assert self.states(cluster) == ["unpack", "check nodes", "prepare", "train", "decide", "end"]
        first, *_, last = cluster.transitions()
        assert first["reason"] == "start 7.0 on n[1-4]"
        assert (last["job"], last["restart"], last["reason"]) == ("7", 0, "the run is complete: step 9")
        assert 0 <= datetime.fromisoformat(last["time"]).timestamp() - began < 60
        assert "end: the run is complete: step 9" in capsys.readouterr().out

    def test_a_wrong_config_ends_the_job(self, cluster):
        cluster.reports(**FOUR)
        cluster.write("python", "exit 2")
        assert cluster.supervisor().supervise() == 2
        assert self.states(cluster)[-2:] == ["prepare", "end"]

    def test_a_stop_file_ends_the_job_well(self, cluster):
        cluster.reports(**FOUR)
        (cluster.run / "stop").touch()
        assert cluster.supervisor().supervise() == 0

    @pytest.mark.parametrize(("limit", "ends"), [("00:05:00", True), ("00:05:01", False)])
    def test_a_time_limit_within_the_signals_lead(self, cluster, limit, ends):
        cluster.job["TimeLimit"] = limit
        cluster.write("python", "exit 2")
        assert cluster.supervisor(TITAN_DISP_CHECK_NODES="0").supervise() == 2
        assert (self.states(cluster) == ["end"]) is ends
        if ends:
            assert (
                "the time limit is 300 s, and SLURM signals the job 300 s before it"
                in cluster.transitions()[0]["reason"]
            )

    def test_giving_up(self, cluster):
        cluster.reports(n1=(8, []))
        assert cluster.supervisor(TITAN_DISP_MAX_RETRIES="0").supervise() == 1
        assert (cluster.folder / "job.out").read_text().startswith("titan-disp: GIVEN UP after 1 failure in a row")

    def test_an_error_of_its_own_is_a_failure_like_any_other(self, cluster, monkeypatch):
        def gone(self):
            raise OSError("stale file handle")

        monkeypatch.setattr(supervise.Supervisor, "check_nodes", gone)
        assert cluster.supervisor().supervise() == 1
        assert self.states(cluster) == ["unpack", "check nodes", "requeue"]
        assert cluster.transitions()[-1]["reason"].endswith("check nodes: OSError: stale file handle")

    @pytest.mark.parametrize(
        ("state", "signal", "seconds"),
        [
            ("check nodes", "", 32),  # three checks of 10 s and four waits of 0.5 s for what is ended
            ("check nodes", "USR1", 32),
            ("decide", "", 10),
            ("decide", "USR1", 4),  # half of the time until SLURM ends the job
        ],
    )
    def test_how_long_a_state_may_take(self, cluster, monkeypatch, state, signal, seconds):
        cluster.signals.write_text(signal)
        supervisor = cluster.supervisor(TITAN_DISP_CHECK_SECONDS="10", TITAN_DISP_SIGNAL_SECONDS="8")
        allowed = []
        monkeypatch.setattr(supervise, "within", lambda limit, method: allowed.append(limit) or method())
        assert supervisor.enter(state, lambda: Outcome("end")).state == "end"
        assert allowed == [seconds]

    def test_signalled_before_training(self, cluster):
        cluster.signals.write_text("TERM\n")
        cluster.job["JobState"] = "COMPLETING"
        cluster.write("srun", "exec sleep 60")
        assert cluster.supervisor().supervise() == 0
        assert cluster.transitions()[-1]["reason"] == "the job was cancelled"


def test_unpack(cluster):
    cluster.write("sbcast", "exit 0")
    supervisor = cluster.supervisor(TITAN_DISP_ENV_ARCHIVE="/a/env.tar", TITAN_DISP_LOCAL="/local")
    assert supervisor.unpack() == Outcome("check nodes", "the environment is on every node")
    assert cluster.calls("sbcast") == ["--force /a/env.tar /local/titan-disp-7.tar"]
    assert cluster.calls("srun") == [
        f"--ntasks-per-node=1 --kill-on-bad-exit=1 --mem=0 --cpu-bind=none bash {ROOT}/slurm/unpack.sh /local/titan-disp-7.tar"
    ]
    assert supervisor.environment["TITAN_DISP_PYTHON"] == "/local/titan-disp-7/bin/python"
    cluster.write("sbcast", "exit 1")
    outcome = cluster.supervisor(TITAN_DISP_ENV_ARCHIVE="/a/env.tar").unpack()
    assert outcome.reason.endswith("the environment /a/env.tar could not be unpacked on every node")
    assert cluster.supervisor().unpack() == Outcome("check nodes", "the environment is used where it is")
    cluster.signals.write_text("USR1\n")
    outcome = cluster.supervisor(TITAN_DISP_ENV_ARCHIVE="/a/env.tar").unpack()
    assert outcome == Outcome("decide", "signalled while the environment was unpacked")


@pytest.mark.parametrize("command", ["sbcast", "srun"])
def test_unpacking_that_hangs(cluster, command):
    """sbcast, and an srun that gets no step, are not steps of the job, so they are ended without waiting."""
    cluster.write("squeue", "echo 7.batch")
    cluster.write("sbcast", "exit 0")
    cluster.write(command, "exec sleep 60")
    supervisor = cluster.supervisor(TITAN_DISP_ENV_ARCHIVE="/a/env.tar", TITAN_DISP_CHECK_SECONDS="0.3")
    supervisor.kill_wait = 20
    start = time.monotonic()
    assert supervisor.unpack().reason.endswith("the environment /a/env.tar could not be unpacked on every node")
    assert time.monotonic() - start < 10
    assert not cluster.calls("scancel")


def test_what_dead_jobs_left_on_a_node_is_removed(cluster, tmp_path):
    """Only folders of jobs that SLURM does not list are removed. If SLURM does not answer, nothing is removed."""
    local = tmp_path / "local"
    for name in ("titan-disp-5", "titan-disp-6", "titan-disp-7", "titan-disp-x", "titan-disp-cache-0"):
        (local / name).mkdir(parents=True)
    (local / "titan-disp-5.tar").touch()
    (tmp_path / "env" / "bin").mkdir(parents=True)

    def unpack(listed):
        cluster.write("squeue", listed)
        subprocess.run(["tar", "-cf", local / "titan-disp-7.tar", "-C", tmp_path / "env", "."], check=True)
        command = ["bash", ROOT / "slurm" / "unpack.sh", local / "titan-disp-7.tar"]
        environment = {"PATH": f"{cluster.commands}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return {p.name for p in local.iterdir()}

    kept = {"titan-disp-6", "titan-disp-7", "titan-disp-x", "titan-disp-cache-0"}
    assert unpack("exit 1") == kept | {"titan-disp-5", "titan-disp-5.tar"}
    assert unpack("echo 6; echo 7") == kept
    assert (local / "titan-disp-7" / "bin").is_dir()


@pytest.mark.parametrize("what", ["check", "train"])
def test_a_container_that_cleans_the_environment(tmp_path, what):
    """env -i stands for apptainer's --cleanenv. The node's name, the job's id and the site's settings are passed on."""
    python = tmp_path / "a python"
    names = (
        "SLURMD_NODENAME",
        "SLURM_JOB_ID",
        "NCCL_NET",
        "TITAN_DISP_RUN",
        "LD_LIBRARY_PATH",
        "WANDB_API_KEY",
        "SLURM_JWT",
    )
    python.write_text(f"""#!/bin/bash\necho "{"|".join(f"${name}" for name in names)}"; echo "$@" """)
    python.chmod(0o755)
    environment = {
        **{"PATH": os.environ["PATH"], "TITAN_DISP_PREFIX": "env -i", "TITAN_DISP_PYTHON": str(python)},
        **{
            "TITAN_DISP_LOCAL": str(tmp_path),
            "TITAN_DISP_NPROC": "1",
            "TITAN_DISP_START": "7.0",
            "TITAN_DISP_ENDPOINT": "n1:1",
        },
        **{"SLURMD_NODENAME": "n7", "SLURM_JOB_ID": "7", "SLURM_NODEID": "6", "SLURM_NNODES": "8"},
        **{"NCCL_NET": "AWS Libfabric", "TITAN_DISP_RUN": "/a run", "LD_LIBRARY_PATH": "/of/the/host"},
        **{"WANDB_API_KEY": "secret", "SLURM_JWT": "secret"},
    }
    command = ["bash", ROOT / "slurm" / "node.sh", what, "--an", "argument"]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert told.splitlines()[0] == "n7|7|AWS Libfabric|/a run|||"
    assert told.rstrip().endswith("--an argument")


@pytest.mark.parametrize("node", [0, 6])
def test_what_torchrun_is_asked_for(tmp_path, monkeypatch, node):
    """torch parses the arguments.

    Node 6 has rank 6, whatever its address, and waits for the other nodes at least as long as ranks do.
    """
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\0" "$@"')
    python.chmod(0o755)
    environment = {
        **{"PATH": os.environ["PATH"], "TITAN_DISP_PYTHON": str(python), "TITAN_DISP_LOCAL": str(tmp_path)},
        **{"TITAN_DISP_NPROC": "8", "TITAN_DISP_START": "7.1", "TITAN_DISP_RUN": f"{tmp_path}/a run"},
        **{"TITAN_DISP_ENDPOINT": "gpu8:20007", "SLURM_NODEID": str(node), "SLURM_NNODES": "80"},
    }
    command = ["bash", ROOT / "slurm" / "node.sh", "train", "--job.config_file", "a config.toml"]
    words = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    assert words[:2] == ["-m", "torch.distributed.run"]
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    config, _, arguments = config_from_args(parse_args(words[2:]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (80, 80, 8, 0)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("static", "gpu8:20007", "7.1")
    assert config.rdzv_configs["rank"] == node
    assert config.rdzv_configs["timeout"] >= JobConfig().comm.init_timeout_seconds
    assert config.shutdown_timeout == 300
    assert (tmp_path / "a run" / "logs" / "7.1" / f"node-{node}").is_dir()
    assert arguments[-2:] == ["--job.config_file", "a config.toml"]
    assert ("--tee" in words) is (node == 0)  # rank 0 is on the first node, and speaks in the job's log


def test_the_script_forwards_signals_and_the_status(cluster, tmp_path):
    """pretrain.sbatch runs in a checkout whose path has a space, with a site file that reads an unset variable."""
    here = tmp_path / "a checkout" / "slurm"
    here.mkdir(parents=True)
    for name in ("common.sh", "node.sh", "supervise.py"):
        (here / name).write_bytes((ROOT / "slurm" / name).read_bytes())
    (here / "site.sh").write_text("echo $UNSET_BY_THE_SITE; export SITE=1\n")
    cluster.job["Command"] = f"{here}/pretrain.sbatch config.toml"
    cluster.supervisor()  # writes what `scontrol show job` says
    cluster.write(
        "srun",
        f'echo "$SITE $SLURM_EXPORT_ENV" >> {cluster.folder}/site; while [ ! -e {cluster.run}/stop ]; do sleep 0.05; done',
    )
    environment = {
        "PATH": f"{cluster.commands}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-4]",
        "TITAN_DISP_SITE": str(here / "site.sh"),
        "TMPDIR": "/only/on/the/login/node",
        "SLURM_EXPORT_ENV": "NONE",
        "TITAN_DISP_CHECK_NODES": "0",
        "TITAN_DISP_HOST_PYTHON": sys.executable,
        "TITAN_DISP_MAX_RETRIES": "0",
    }
    command = ["bash", ROOT / "slurm" / "pretrain.sbatch", "config.toml", "--job.dump_folder", cluster.run]
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not (cluster.folder / "site").exists():
        assert time.monotonic() < deadline
        assert job.poll() is None, job.stdout.read()
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    text, _ = job.communicate(timeout=30)
    assert job.returncode == 1
    assert "USR1 received: asking all ranks to save and stop" in text
    assert "GIVEN UP after 1 failure in a row" in text
    assert "asked to stop (USR1) but not saved in time" in text
    assert (cluster.run / "stop").read_text() == "7.0\n"
    assert (cluster.folder / "site").read_text() == "1 ALL\n"


class TestArray:
    """A task of sweep.sbatch is asked for by its own id.

    One task has the array's id as its job id, which SLURM's commands take for all tasks.
    """

    TASK = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}

    def test_only_this_task_is_asked_about_requeued_and_ended(self, cluster):
        cluster.write("scontrol", 'case "$1" in show) cat "$0.job";; esac')
        cluster.write("squeue", "echo 7_2.0; echo 7_2.batch")
        (cluster.run / "bad_nodes.json").write_text(json.dumps({"n2": [time.time(), time.time()]}))
        supervisor = cluster.supervisor(of_array=True, **self.TASK)
        assert supervisor.requeue() == 1
        assert set(cluster.calls("scontrol")) == {
            *("show job 7_2", "requeue 7_2", "update JobId=7_2 ExcNodeList=n2"),
        }
        process = subprocess.Popen(["sleep", "60"])
        try:
            cluster.write("scancel", f"kill {process.pid}")
            supervisor.end_step(process)
        finally:
            process.kill()
        assert cluster.calls("squeue") == ["--noheader --steps --job=7_2 --format=%i"]
        assert cluster.calls("scancel") == ["--signal=KILL 7_2.0"]

    def test_a_job_that_a_task_has_submitted_is_no_task(self, cluster):
        """Such a job inherits the variables of the array."""
        cluster.write("scontrol", 'case "$1" in show) cat "$0.job";; esac')
        assert cluster.supervisor(**self.TASK).requeue() == 1
        assert set(cluster.calls("scontrol")) == {"show job 7", "requeue 7"}

    def test_its_point(self, cluster):
        """CONFIG and overrides come from the sweep's list. If the list has no such point, one line says so."""
        file = cluster.folder / "points.json"
        points = [{"name": name, "argv": ["c.toml", "--job.dump_folder", name]} for name in ("a", "b", "c")]
        file.write_text(json.dumps({"points": points}))
        assert supervise.task_of_array(str(file), self.TASK) == ["c.toml", "--job.dump_folder", "c"]
        for text in ('{"points": []}', "{}", ""):
            file.write_text(text)
            with pytest.raises(supervise.Failure, match="task '2' of the array has no point in .*points.json"):
                supervise.task_of_array(str(file), self.TASK)
        with pytest.raises(supervise.Failure, match="task '' of the array has no point in"):
            supervise.task_of_array(str(file), {})

    def test_its_point_in_any_locale(self, cluster, monkeypatch):
        file = cluster.folder / "points.json"
        file.write_bytes('{"points": [{"argv": ["läufe.toml"]}]}'.encode())

        def in_ascii(*args, encoding=None):
            return open(*args, encoding=encoding or "ascii")

        monkeypatch.setattr(supervise, "open", in_ascii, raising=False)  # as where the locale is C
        assert supervise.task_of_array(str(file), {"SLURM_ARRAY_TASK_ID": "0"}) == ["läufe.toml"]
