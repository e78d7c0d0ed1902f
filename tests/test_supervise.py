"""The supervisor of a SLURM job in each of its states, with stand-ins for SLURM's
commands. tests/slurm runs whole jobs.
"""

import ast
import contextlib
import functools
import importlib.util
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from datetime import datetime, timezone
from pathlib import Path
from unittest import mock

import pytest

from tests.command_line import DEMO, ROOT, command
from titan_disp.run.reader import read_failures, read_json_lines

spec = importlib.util.spec_from_file_location(
    "slurm.supervise", ROOT / "slurm" / "supervise.py"
)
supervise = importlib.util.module_from_spec(spec)
spec.loader.exec_module(supervise)
Outcome = supervise.Outcome

FOUR = {f"n{i}": (8, []) for i in (1, 2, 3, 4)}
# Variables of the job that are not titan-disp's own.
OTHERS = re.compile(r"SLURM_|SBATCH_|TORCH_|PATH$|HOME$|TMPDIR$|LC_ALL$|PYTHON\w")
STEP = "--ntasks-per-node=1 --kill-on-bad-exit={} --mem=0 --cpu-bind=none"


def report(node, gpus, problems):
    return {"node": node, "gpus": ["H100"] * gpus, "problems": problems}


RUNS_6 = 'case "$*" in *job=[67]\\ --format=%T) echo RUNNING;;'  # job 5 has ended


class Cluster:
    """Stand-ins for SLURM's commands, which record their calls and run a test's script.

    FOLDER there is this folder.
    """

    SHOW = """case "$1 $2" in
"show job") cat "$0.job"; exit;;
"show hostnames") echo "$3" | sed 's/n.1-4./n1,n2,n3,n4/; s/n.7-9./n7,n8,n9/' | tr , '\\n'; exit;;
esac"""
    PERMITS = f'case "$1" in requeue | update) exit 0;; esac; {SHOW}'
    REPORTS = 'case "$*" in *check) cat FOLDER/bin/reports; exit;; esac; '

    def __init__(self, folder):
        self.folder = folder
        self.commands = folder / "bin"
        self.run = folder / "run"
        self.commands.mkdir()
        self.run.mkdir()
        self.signals = folder / "signals"
        self.log = folder / "job.out"
        self.checkpoints = "checkpoint"
        self.signals.touch()
        self.log.write_text("the job's\nown lines\n")
        self.job = {
            "JobState": "RUNNING",
            "TimeLimit": "1-00:00:00",
            "WorkDir": "/work",
            "Partition": "gpu",
        }
        self.job |= {
            "Command": f"{ROOT}/slurm/pretrain.sbatch config.toml",
            "StdOut": str(self.log),
        }
        scripts = dict.fromkeys(
            ("srun", "scancel", "sinfo", "sacct", "python"), "exit 0"
        )
        scripts |= {
            "scontrol": f"{self.SHOW}; exit 1",
            "squeue": f"{RUNS_6} *) echo 7.0; echo 7.batch;; esac",
            "sbatch": "exit 1",
        }
        for name, script in scripts.items():
            self.write(name, script)

    def write(self, name, script):
        file = self.commands / name
        file.write_text(
            f'#!/bin/bash\necho "$*" >> "$0.calls"\n{script}\n'.replace(
                "FOLDER", str(self.folder)
            )
        )
        file.chmod(0o755)

    def lock(self, job):
        """Write the lock of a start, as run/lock.py does."""
        (self.run / ".lock").write_text(json.dumps({"host": "n9", "job": job}))

    def calls(self, name, begin=""):
        file = self.commands / f"{name}.calls"
        return (
            [line for line in file.read_text().splitlines() if line.startswith(begin)]
            if file.exists()
            else []
        )

    def environment(self, **more):
        """The variables of a job; titan-disp's own are given without TITAN_DISP_."""
        (self.commands / "scontrol.job").write_text(
            "   ".join(f"{k}={v}\n" for k, v in self.job.items())
        )
        given = {
            "PATH": f"{self.commands}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-4]",
            "SLURM_NNODES": "4",
            "SITE": ROOT / "slurm" / "sites" / "local_cpu.sh",
            **more,
        }
        return {
            name if OTHERS.match(name) else f"TITAN_DISP_{name}": str(value)
            for name, value in given.items()
        }

    def supervisor(
        self, *overrides, restart=0, of_array=False, pointer="", **environment
    ):
        given = {
            "SLURM_RESTART_COUNT": restart,
            "NPROC": 1,
            "RETRIES": "now,10,30",
        }
        given |= {"PYTHON": self.commands / "python", "LOCAL": self.folder}
        argv = ["config.toml", "--job.dump_folder", str(self.run), *overrides]
        signals = str(self.signals)
        given = self.environment(**(given | environment))
        supervisor = supervise.Supervisor(
            argv, signals, str(pointer), environment=given, of_array=of_array
        )
        # as ``freeze`` does
        supervisor.run = str(self.run)
        supervisor.launch = {"argv": argv}
        supervisor.start = f"7.{restart}"
        supervisor.pause = 0.02
        supervisor.requeue_pauses = (0, 0, 0)
        supervisor.kill_wait = supervisor.last_wait = 0.5
        supervisor.grace = 0.0
        return supervisor

    def decide(self, **options):
        supervisor = self.supervisor(**options)
        supervisor.status = 1
        return supervisor.decide()

    def reports(self, reports, others="exit 0"):
        """Make srun print a line of a library, and a report of each named node.

        ``others``: what other steps do.
        """
        reports = [
            report(node, *found) if found else {"node": node}
            for node, found in reports.items()
        ]
        said = [supervise.NODE_REPORT + json.dumps(one) for one in reports]
        (self.commands / "reports").write_text(
            "\n".join(["a line of a library", *said]) + "\n"
        )
        self.write("srun", self.REPORTS + others)

    def checkpoint(self, *steps):
        for step in steps:
            path = self.run / self.checkpoints / f"step-{step}"
            path.mkdir(parents=True)
            (path / ".metadata").touch()

    def event(self, name, step, reason="", job="7.0", kind="signal"):
        with open(self.run / "events.jsonl", "a") as file:
            file.write(
                json.dumps(
                    {
                        "event": name,
                        "step": step,
                        "job": job,
                        "reason": reason,
                        "kind": kind,
                    }
                )
                + "\n"
            )

    def of_rank(self, name, content, start="7.0", node=0, rank=0):
        folder = (
            self.run / "logs" / start / f"node-{node}" / "x" / "attempt_0" / str(rank)
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
        return folder / name

    def error(self, message, time, **where):
        content = {
            "message": {"message": message, "extraInfo": {"timestamp": str(time)}}
        }
        return self.of_rank("error.json", json.dumps(content), node=time, **where)

    def keep(self, name, content):
        (self.run / name).write_text(json.dumps(content))

    def kept(self, name):
        return json.loads((self.run / name).read_text())

    def bad(self, **hours):
        """Write that each of these nodes has failed twice, so many hours ago."""
        times = {node: 2 * [time.time() - 3600 * ago] for node, ago in hours.items()}
        self.keep("nodes.json", {"of an old format": 2, **times})

    def blamed(self):
        return list(supervise.read_json(str(self.run / "nodes.json")))

    def transitions(self):
        return read_json_lines(self.run / "supervisor.jsonl")

    def launch(self, *argv, parent=""):
        launch = self.folder / parent / "launch" / "7.0.abcdef"
        shutil.copytree(ROOT / "slurm", launch / "slurm")
        content = json.dumps({"run": str(self.run), "argv": argv}, ensure_ascii=False)
        (launch / "launch.json").write_text(content, encoding="utf-8")
        return launch

    def program(self, launch, config, stdout=subprocess.PIPE, **environment):
        command = [
            sys.executable,
            launch / "slurm" / "supervise.py",
            self.signals,
            self.folder / "pointer",
            config,
        ]
        how = {
            "stdout": stdout,
            "stderr": subprocess.PIPE,
            "cwd": self.folder,
            "timeout": 60,
        }
        return subprocess.run(command, env=self.environment(**environment), **how)

    def node(self, script, *words, **variables):
        """Run node.sh, with this script as its Python."""
        self.write("a python", script)
        python = str(self.commands / "a python")
        local = str(self.folder)
        given = {
            "PATH": os.environ["PATH"],
            "TITAN_DISP_PYTHON": python,
            "TITAN_DISP_LOCAL": local,
            **variables,
        }
        command = ["bash", ROOT / "slurm" / "node.sh", *words]
        return subprocess.run(
            command, env=given, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    def batch(self, *words, script="pretrain", **environment):
        """Run a batch script until the last process that has its output ends.

        ``python3`` is the supervisor's Python, or a test's stand-in for it.
        """
        self.write("sleep", "exec /bin/sleep 0.1")
        if not (self.commands / "python3").exists():
            self.write("python3", f'exec {sys.executable} "$@"')
        given = {"HOME": self.folder, **environment}
        if script == "sweep":
            given |= {"SLURM_ARRAY_JOB_ID": 7, "SLURM_ARRAY_TASK_ID": 0}
        command = [
            "bash",
            ROOT / "slurm" / f"{script}.sbatch",
            *(words or ["config.toml"]),
        ]
        done = subprocess.run(
            command,
            env=self.environment(**given),
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout


# The number of the batch script, for a command of its supervisor.
SCRIPT = "$(cut -d' ' -f4 /proc/$PPID/stat)"


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def beat(allowed, start="7.0", doing="save", **more):
    content = {"start": start, "step": 5, "doing": doing, "allowed_seconds": allowed}
    content |= more
    return f"echo '{json.dumps(content)}' > FOLDER/run/heartbeat.json; "


def dies(*nodes):
    """What srun says if a task on the first node is killed, and then the tasks on the
    others.
    """
    return (
        "".join(f"echo 'srun: error: {node}: task 2: Killed' >&2; " for node in nodes)
        + "exit 1"
    )


def row(name, state, reason, **given):
    return name, state, reason, given


COMMANDS = {"python", "srun", "sbcast", "scancel", "scontrol", "sinfo", "squeue"}
SLURM_ASKED = [("stop", 5, "the file RUN/stop", "7.0", "file")]  # through the stop file
SAVED = "saved at step 5 and stopped: "
DIED = "failure 1 of at most 4 in a row without a new checkpoint (no checkpoint yet): a rank or a node died"
COMPLETING = {"JobState": "COMPLETING", "Reason": "None", "PreemptTime": "None"}
PREEMPTED = {**COMPLETING, "PreemptTime": "2026-01-01T00:00"}
AT_LIMIT = {**COMPLETING, "Reason": "TimeLimit"}
ODD_COUNTERS = (
    b"",
    b"[]",
    b'{"failures": ',
    b'{"other": 1}',
    b'{"failures": null, "step": null}',
)
TAKEN = "by another job (host n9, SLURM job {}.0.abcdef)"
SEVEN = "the number of visible GPUs is 7, expected 8"
MANY = "2 of 4 nodes fail their check, which counts as a failure of the job and not of the nodes: "
LACK = dict.fromkeys(FOUR, (7, []))
HALF = {**LACK, "n3": (8, []), "n4": (8, [])}
UNLIKE = {**FOUR, "n1": (), "n2": (9, [])}
MOST = "node n{}: the number of visible GPUs is {}, but most nodes have 8"
THREE = {node: FOUR[node] for node in ("n1", "n3", "n4")}
SLEEP = "exec sleep 60"
READ = "reading to the position, {} of 9 GB"
FIVE = range(1, 6)
ONE_HANGS = {
    "reports": THREE,
    "srun": f"cat FOLDER/bin/reports; {SLEEP}",
    "CHECK_SECONDS": "2",
}
DOWN = "echo 'n1 allocated'; echo 'n3 down*'"
NOBODY = "failed as a whole (srun's status 1): no node answered"
TWO_DOWN = "printf 'n1 down*\\nn2 idle~\\nn3 failing\\n'"
LATE = f'[ $(wc -l < "$0.calls") -gt 1 ] || exit 1; {Cluster.SHOW}'
FIX = "the config could not be checked (status 1); the lines above say why. Not requeued: fix the config or the environment"
GIVEN_UP = "GIVEN UP after failure 1 in a row without a new checkpoint (newest checkpoint: step 4). The last one: "
FIX_IT = "the lines above say why. Not requeued: fix it, and submit again"
ELSEWHERE = f'{supervise.LAUNCH}"/in/the/container/launch/7.0.abcdef"'
LOST = "the environment /a/env.tar could not be unpacked on every node"
ARCHIVE = {"ENV_ARCHIVE": "/a/env.tar", "sbcast": "exit 0"}
HANGS = {"squeue": "echo 7.batch", "kill_wait": 20, "CHECK_SECONDS": "0.3"}
SPARE = {"SPARES": "1"}
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
EIO = "OSError: [Errno 5] Input/output error: '/scratch/run/checkpoint/step-8'"
PEER = "RuntimeError: Connection closed by peer"
USR1 = "echo USR1 > FOLDER/signals; sleep 0.2; exit 1"
ENDS = f"{beat(60)}sleep 1; rm FOLDER/run/heartbeat.json; {SLEEP}"
GARBAGE = "echo '{' > FOLDER/run/heartbeat.json; sleep 0.2"
SIGNALLED = f"echo USR1 > FOLDER/signals; {SLEEP}"
LEFT = 'case "$*" in *steps*) echo 7.0;; *) echo 0:01;; esac'
UNKNOWN = LEFT.replace("echo 0:01", "exit 1")
LONG_SAVE = {"srun": SIGNALLED, "squeue": LEFT, "SBATCH_SIGNAL": "B:USR1@1"}
LOCKED = {
    "lock": "6.0.abcdef",
    "counters": b'{"failures": 2, "step": 4}',
    "checkpoints": [4],
}
TAKEN_BY_6 = "job 6 uses the run folder. Not requeued"
SICK = {**FOUR, "n3": (8, ["GPU 3 returns wrong matrix products"])}

SCENARIOS = {
    "supervise": [
        row(
            "a stop file",
            "end",
            "stop exists, so nothing was trained. Remove the file to continue",
            stop=b"\xff",
        ),
        row(
            "short",
            "end",
            "is 300 s, and SLURM signals the job 300 s before",
            exit=2,
            job={"TimeLimit": "00:05:00"},
        ),
        row(
            "a wrong config",
            "end",
            FIX,
            exit=2,
            python="exit 1",
            checkpoints=[0],
            job={"TimeLimit": "00:05:01"},
        ),
        row(
            "spares",
            "end",
            "SPARES is 4, and no node is left to train",
            exit=2,
            SPARES="4",
        ),
        row(
            "requeued by SLURM",
            "end",
            supervise.REQUEUED,
            srun=Cluster.REPORTS + "exit 1",
            job={"Restarts": "1"},
        ),
        # The counters and the stop file of a run belong to the job that holds the lock
        # of its folder. A second job is not requeued, because it would start three more
        # times. Bad nodes are no failure of the other's run.
        row("another's run", "end", TAKEN_BY_6, exit=2, python="exit 3", **LOCKED),
        row(
            "another's run, at a restart",
            "end",
            TAKEN_BY_6,
            exit=2,
            python="exit 3",
            restart=1,
            **LOCKED,
        ),
        row(
            "another's run, a bad node",
            "end",
            TAKEN_BY_6,
            exit=2,
            python="exit 3",
            reports=SICK,
            **LOCKED,
        ),
        # The ranks find the run folder locked and fail, and the job gets a signal in
        # the meantime.
        row(
            "another's run, meanwhile",
            "end",
            TAKEN_BY_6,
            exit=2,
            srun=Cluster.REPORTS + USR1,
            **LOCKED,
        ),
        row(
            "no retries",
            "give up",
            GIVEN_UP,
            exit=1,
            srun="exit 1",
            RETRIES="none",
            checkpoints=[4, "x"],
        ),
    ],
    "check_time_limit": [
        row("unknown", "unpack", "start 7.0 on n[1-4]", job={"TimeLimit": ""})
    ],
    "unpack": [
        row("sbcast fails", "requeue", LOST, **{**ARCHIVE, "sbcast": "exit 1"}),
        row(
            "signalled",
            "decide",
            "signalled before training",
            signals="USR1",
            **ARCHIVE,
        ),
        # Neither is a step of the job, so they are ended without waiting.
        row("sbcast hangs", "requeue", LOST, **{**HANGS, **ARCHIVE, "sbcast": SLEEP}),
        row("srun gets no step", "requeue", LOST, srun=SLEEP, **HANGS, **ARCHIVE),
    ],
    "freeze": [
        row(
            "an unreadable config",
            "end",
            f"status 2); {FIX_IT}",
            exit=2,
            python="exit 2",
            fresh=True,
        ),
        row(
            "a lost folder",
            "end",
            "on this node: [Errno 2]",
            exit=2,
            python=f"echo '{ELSEWHERE}'",
            fresh=True,
        ),
        row(
            "at a restart",
            "requeue",
            "say why (not counted)",
            restart=1,
            python="exit 2",
            fresh=True,
        ),
    ],
    "check_nodes": [
        row(
            "signalled",
            "decide",
            "signalled before training",
            srun=SIGNALLED,
            ended=True,
        ),
        # All nodes have the same number of GPUs, so only the job's request shows that
        # one is missing.
        row(
            "asked for",
            "requeue",
            f"n1: {SEVEN}",
            reports=LACK,
            SLURM_GPUS_PER_NODE="8",
            NPROC="gpu",
        ),
        # SLURM knows on which node srun cannot start.
        row(
            "down",
            "requeue",
            f"{NOBODY}; SLURM says that n3",
            srun="exit 1",
            sinfo=DOWN,
            blamed=["n3"],
        ),
        # Of two halves the one with more GPUs is right, since they do not come from
        # nowhere.
        row(
            "half",
            "requeue",
            f"{MANY}{MOST.format(1, 7)}; {MOST.format(2, 7)}",
            reports=HALF,
        ),
        row(
            "unlike the others",
            "requeue",
            f"{MANY}{MOST.format(1, 0)}; {MOST.format(2, 9)}",
            reports=UNLIKE,
        ),
        row(
            "one hangs",
            "requeue",
            "cannot train: node n2: it did not answer",
            blamed=["n2"],
            ended=True,
            **ONE_HANGS,
        ),
    ],
    "prepare": [
        row(
            "signalled",
            "decide",
            "signalled before training",
            signals="USR1",
            python="sleep 60 & wait",
        ),
        row(
            "trained",
            "requeue",
            "checked (status 1); the lines above say why",
            python="exit 1",
            checkpoints=[1],
        ),
        row(
            "hangs",
            "requeue",
            "the config could not be checked (status None)",
            restart=1,
            python="sleep 60 & wait",
            CHECK_SECONDS="0.5",
        ),
        row(
            "own lock",
            "requeue",
            "failure 3 of",
            python="exit 3",
            restart=1,
            **{**LOCKED, "lock": "7.0.abcdef"},
        ),
        row(
            "free lock",
            "requeue",
            "failure 3 of",
            python="exit 1",
            restart=1,
            **{**LOCKED, "lock": "5.0"},
        ),
        row(
            "a job's stop",
            "train",
            "the config can start on these nodes",
            stop=b"6.2\n",
        ),
    ],
    "train": [
        row(
            "signalled",
            "decide",
            "signalled before training",
            signals="USR1",
            srun=SLEEP,
        )
    ],
    "decide": [
        row(
            "complete",
            "end",
            "the run is complete: step 9",
            events=[("resume", 4), ("complete", 9)],
            signals="USR1",
        ),
        row(
            "USR1",
            "requeue",
            SAVED + "SLURM sent USR1",
            signals="USR1",
            events=SLURM_ASKED,
        ),
        row(
            "rank 1 was signalled",
            "requeue",
            SAVED + "another rank",
            events=[("stop", 5, "another rank was asked")],
        ),
        row(
            "a user's stop",
            "end",
            "stopped at step 5: the file RUN/stop",
            events=SLURM_ASKED,
        ),
        row(
            "budget",
            "end",
            "stopped at step 5: budget.",
            events=[("stop", 5, "budget.stop", "7.0", "budget")],
        ),
        row(
            "refused",
            "end",
            "refused to start: odd. Not requeued",
            exit=2,
            events=[("refused", 0, "odd")],
        ),
        row(
            "no reason",
            "end",
            "stopped at step 5: ",
            lines=b'{"event": "stop", "step": 5, "job": "7.0"}\n',
        ),
        # The last line was joined to an unfinished one.
        row(
            "odd lines",
            "requeue",
            DIED,
            lines=b'\xff\xfe\nnull\n7\n{"ev',
            events=[("complete", 9)],
        ),
        row(
            "of others",
            "requeue",
            DIED,
            events=[("complete", 9, "", "7.1"), ("complete", 9, "", "6.0")],
        ),
        row(
            "nothing",
            "requeue",
            DIED + " without a message (srun's status 7)",
            status=7,
        ),
        # scancel, the time limit and PreemptMode=CANCEL all set COMPLETING and send
        # TERM.
        row(
            "scancel after USR1",
            "end",
            "the job was cancelled",
            signals="USR1 TERM",
            job=COMPLETING,
        ),
        row(
            "cancelled before training",
            "end",
            "the job was cancelled",
            status=None,
            signals="TERM",
            job=COMPLETING,
        ),
        # scancel sets CANCELLED before that.
        row(
            "cancelled",
            "end",
            "the job was cancelled",
            signals="TERM",
            job={"JobState": "CANCELLED"},
        ),
        *[
            row(
                state,
                "requeue",
                SAVED,
                signals="TERM",
                events=SLURM_ASKED,
                job={"JobState": state},
            )
            for state in (
                "PREEMPTED",
                "REQUEUED",
                "SIGNALING",
                "STOPPED",
                "SUSPENDED",
                "TIMEOUT",
            )
        ],
        row(
            "USR1 limit",
            "requeue",
            "asked to stop (USR1)",
            signals="USR1 TERM",
            job=AT_LIMIT,
        ),
        row("preempted", "requeue", "(TERM)", signals="TERM", job=PREEMPTED),
        row("lost nodes", "requeue", DIED, job=COMPLETING),
        row(
            "late answer",
            "end",
            "the job was cancelled",
            signals="TERM",
            job=COMPLETING,
            scontrol=LATE,
        ),
        row("no time to train", "requeue", "failure 1 of", status=None, signals="USR1"),
        row(
            "TERM before training",
            "requeue",
            "(TERM) before training began",
            status=None,
            signals="TERM",
        ),
        row(
            "preempted before",
            "requeue",
            "(USR1) before",
            status=None,
            signals="USR1",
            job=PREEMPTED,
        ),
        # SLURM_RESTART_COUNT alone does not show a requeue: a job that submitted this
        # one may have set it.
        row(
            "requeued by SLURM",
            "end",
            "SLURM has requeued the job itself",
            restart=2,
            job={"Restarts": "3"},
        ),
        row("as often as known", "requeue", DIED, restart=3, job={"Restarts": "3"}),
        row("fewer than known", "requeue", DIED, restart=4, job={"Restarts": "3"}),
        row(
            "saves nothing",
            "requeue",
            "failure 1 of",
            events=[("stop", 5)],
            config={"checkpoint": {"enable": False}},
        ),
        row(
            "only loads",
            "requeue",
            "nothing is",
            events=[("stop", 5)],
            config={"checkpoint": {"load_only": True}},
        ),
        row(
            "folder",
            "requeue",
            "checkpoint: step 4)",
            config={"checkpoint": {"folder": "other"}},
            checkpoints=[4],
        ),
        *[
            row(f"counters {text}", "requeue", DIED, counters=text)
            for text in ODD_COUNTERS
        ],
        row(
            "counters of an earlier version",
            "requeue",
            "failure 3 of",
            counters=b'{"failures": 2, "step": 4, "again": 0, "reason": "x"}',
            **{"counters in": "requeue.json"},
        ),
        # Forgets it
        row(
            "a good end",
            "requeue",
            SAVED,
            events=[("stop", 5, "SIGUSR1")],
            counters=b'{"failures": 1}',
        ),
        row(
            "odd config.json",
            "requeue",
            DIED,
            config={"checkpoint": None, "comm": None},
        ),
        row(
            "another job's folder", "end", "Not requeued", exit=2, error=TAKEN.format(6)
        ),
        row("its own folder", "requeue", "failure 1 of", error=TAKEN.format(7)),
    ],
    "train; decide": [
        row(
            "the second in a row",
            "requeue",
            "failure 2 of",
            srun="exit 1",
            counters=b'{"failures": 1, "step": -1}',
        ),
        row(
            "the fifth",
            "requeue",
            "failure 5 of",
            srun="exit 1",
            counters=b'{"failures": 4}',
            RETRIES="now,10,30,60,60,60,60,60,60",
        ),
        # twice the warning
        row("short of time", "requeue", DIED, srun="exit 1", squeue="echo 9:59"),
        row("signalled", "requeue", "asked to stop (USR1)", srun=USR1),
        row(
            "signalled, and a user's stop",
            "requeue",
            "asked to stop (USR1)",
            srun=USR1,
            stop=b"",
        ),
        row(
            "signalled on a full disk",
            "requeue",
            "asked to stop (USR1)",
            srun=USR1,
            full=True,
        ),
        row(
            "long save",
            "requeue",
            "saved in time; 0 s before the time limit, the last",
            ended=True,
            **LONG_SAVE,
        ),
        row(
            "without squeue",
            "requeue",
            "saved in time; 0 s before the",
            ended=True,
            **LONG_SAVE | {"squeue": UNKNOWN},
        ),
        row(
            "silent",
            "check nodes",
            "at step 5 (save), and 0 s are",
            srun=beat(0.3) + SLEEP,
            ended=True,
        ),
        # Altogether, it takes longer than allowed, but each heartbeat tells of progress.
        row(
            "reading to the position",
            "check nodes",
            "at step 5 (reading to the position, 5 of 9 GB), and 1 s are",
            srun="".join(f"{beat(0.9, doing=READ.format(i))}sleep 0.4; " for i in FIVE)
            + SLEEP,
            ended=True,
        ),
        # Python hangs before rank 0 has written a heartbeat, or after rank 0 has
        # removed it at the end.
        row(
            "no heartbeat",
            "check nodes",
            "s at its start or end, and 1 s",
            srun=SLEEP,
            quiet=0.6,
            ended=True,
        ),
        row(
            "no heartbeat at the end",
            "check nodes",
            "s at its start or end, and 1 s",
            srun=ENDS,
            quiet=1.4,
            ended=True,
        ),
        # It says so more often than it is allowed to be silent.
        row(
            "silent while it waits for another rank",
            "check nodes",
            "s are allowed. Before that, all wait for rank 3 for 5 s",
            srun="".join(
                f"{beat(1, waits_for=f'all wait for rank 3 for {i} s')}sleep 0.2; "
                for i in FIVE
            )
            + SLEEP,
            ended=True,
        ),
        row(
            "the rank that was waited for",
            "check nodes",
            "Before that, all wait for rank 3",
            srun=f"{beat(60, waits_for='all wait for rank 3')}sleep 0.3; "
            "rm FOLDER/run/heartbeat.json; sleep 0.2; exit 1",
        ),
        row(
            "a rank is no longer waited for",
            "check nodes",
            "/run/logs/7.0. Starting again",
            srun=f"{beat(60, waits_for='all wait')}sleep 0.3; {beat(60)}sleep 0.3; exit 1",
        ),
        row(
            "a beat, then garbage",
            "check nodes",
            DIED,
            srun=f"{beat(60)}sleep 0.3; {GARBAGE}; exit 1",
        ),
        row(
            "a beat of another start",
            "check nodes",
            DIED,
            srun=f"{beat(0, '6.0')}sleep 0.5; exit 1",
        ),
        # SLURM's state decides which node is to blame,
        row(
            "no spares",
            "requeue",
            f"{DIED} without a message (srun's status 1)",
            srun="exit 1",
            sinfo="echo n2 drained",
            blamed=["n2"],
            dropped="n2",
        ),
        row(
            "too few spares",
            "requeue",
            "SLURM says that n1, n3 cannot run jobs",
            srun="exit 1",
            sinfo=TWO_DOWN,
            blamed=["n1", "n3"],
            dropped="n1 n3",
            **SPARE,
        ),
        row(
            "a spare node",
            "check nodes",
            "SLURM says that n3 cannot run jobs. Starting again in this job",
            error=PEER,
            srun="exit 1",
            sinfo=DOWN,
            blamed=["n3"],
            dropped="n3",
            **SPARE,
        ),
        # and no text does: storage fails on all nodes, and a rank complains of its
        # peer. The check of the nodes before the next start finds a bad GPU.
        *[
            row(text, "check nodes", text, error=text, srun=dies("n3"), **SPARE)
            for text in (ECC, EIO, PEER)
        ],
        row("a rank that died", "check nodes", DIED, srun=dies("n3", "n1"), **SPARE),
    ],
}


@pytest.mark.timeout(50)
@pytest.mark.parametrize(
    ("methods", "state", "reason", "given"),
    [
        pytest.param(kind, *values, id=f"{kind}: {name}")
        for kind, rows in SCENARIOS.items()
        for name, *values in rows
    ],
)
def test_scenarios(cluster, capsys, methods, state, reason, given):
    """What SLURM, its commands and the run folder hold decides the next state.

    given: scripts of commands, variables, and what is found. exit: the status of an
    end; ended: the step was killed; blamed: nodes that count as failed; dropped: nodes
    that the job goes on without.
    """
    cluster.reports(given.get("reports", FOUR))
    for name in COMMANDS & given.keys():
        cluster.write(name, given[name])
    if "config" in given:
        cluster.keep("config.json", given["config"])
        cluster.checkpoints = (given["config"]["checkpoint"] or {}).get(
            "folder", "checkpoint"
        )
    cluster.checkpoint(*given.get("checkpoints", ()))
    cluster.signals.write_text(given.get("signals", "").replace(" ", "\n"))
    cluster.job |= given.get("job", {})
    if "error" in given:
        cluster.error(given["error"], time=2)
    for name, file in {
        "stop": "stop",
        "counters": given.get("counters in", "job.json"),
        "lines": "events.jsonl",
    }.items():
        if name in given:
            (cluster.run / file).write_bytes(given[name])
    for event in given.get("events", ()):
        cluster.event(*event)
    if "full" in given:
        (cluster.run / "stop.partial").symlink_to("/dev/full")
    variables = {name: given[name] for name in given if name.isupper()}
    pointer = cluster.folder / "pointer"
    pointer.touch()
    supervisor = cluster.supervisor(
        restart=given.get("restart", 0), pointer=pointer, **variables
    )
    if "fresh" in given:  # one that has not read its config
        supervisor.run = ""
        supervisor.launch = {}
    for name, usual in (("status", 1), ("quiet", 1800.0), ("kill_wait", 0.5)):
        setattr(supervisor, name, given.get(name, usual))
    if "lock" in given:
        cluster.lock(given["lock"])
    for method in methods.split("; "):
        if method in ("unpack", "freeze", "check_nodes", "prepare", "train"):
            outcome = supervisor.enter(method, getattr(supervisor, method))
        else:
            outcome = getattr(supervisor, method)()
    if methods == "supervise":
        last = cluster.transitions()[-1]
        outcome = Outcome(last["state"], last["reason"], outcome)
    assert (outcome.state, outcome.status) == (state, given.get("exit", 0))
    assert reason in outcome.reason
    failures = int((re.findall("^failure (\\d) of", outcome.reason) or ["0"])[0])
    if TAKEN_BY_6 in outcome.reason:
        assert cluster.kept("job.json") == json.loads(given["counters"])
        assert not (cluster.run / "outcome.txt").exists()
    elif (cluster.run / "job.json").exists():
        assert cluster.kept("job.json")["failures"] == failures
    else:
        assert failures == 0
    if state == "requeue":
        assert outcome.pause == (
            120 if "fresh" in given else [0, 120, 600, 1800, 3600, 3600][failures]
        )
    if methods == "supervise":
        assert not cluster.calls("scontrol", "requeue")
        # the next start needs it
        assert pointer.exists() is (reason == supervise.REQUEUED)
    assert cluster.blamed() == given.get("blamed", [])
    assert " ".join(sorted(supervisor.dropped)) == given.get("dropped", "")
    out = capsys.readouterr().out
    ended = given.get("ended", False)
    stop = cluster.run / "stop"
    # The ranks look for the stop file. A user's own one is not changed.
    asked = (
        "asking all ranks to save and stop" in out
        and not {"full", "lock"} & given.keys()
    )
    assert ("so the ranks are not asked to stop: No space left on device" in out) is (
        "full" in given
    )
    expected = given.get("stop", b"7.0\n" if asked else None)
    assert (stop.read_bytes() if stop.exists() else None) == expected
    assert cluster.calls("scancel") == ended * ["--signal=KILL 7.0"]  # not 7.batch
    assert ("; the step is ended" in out) is (ended and "train" in methods)
    assert ("ended, because it took" in out) is ("CHECK_SECONDS" in given)


class TestFailures:
    @pytest.mark.parametrize(
        ("starts", "failures"),
        [
            # Any checkpoint that was not there before is progress, whatever its step.
            ([([], [4, 8]), ([8], [6]), ([], [8]), ([], [])], [1, 1, 1, 2]),
            # No start would get any further: twice it counts as progress, and then as a
            # failure.
            ([([], [4, 8]), *4 * [([8], [8])]], [1, 1, 1, 2, None]),
            ([([], [4, 8]), *3 * [([8], []), ([], [8])]], [1, 2, 1, 2, 1, 2, None]),
            # Each is damaged once.
            (
                [
                    ([], [8]),
                    *[s for k in range(8, 40, 8) for s in (([k], [k]), ([], [k + 8]))],
                ],
                9 * [1],
            ),
        ],
    )
    def test_damaged_checkpoints(self, cluster, starts, failures):
        """Each start sets damaged checkpoints aside, saves others and dies.

        None: given up.
        """
        folder = cluster.run / "checkpoint"
        (folder / "step-99").mkdir(parents=True)  # unfinished: no progress
        for restart, ((damaged, saved), expected) in enumerate(
            zip(starts, failures, strict=True)
        ):
            for step in damaged:
                (folder / f"step-{step}").rename(folder / f"damaged-{step}-{restart}")
            for step in saved:
                cluster.checkpoint(step)
                cluster.event("checkpoint", step, job=f"7.{restart}")
            outcome = cluster.decide(restart=restart, RETRIES="10,30")
            assert outcome.state == ("requeue" if expected else "give up")
            assert expected is None or cluster.kept("job.json")["failures"] == expected

    def test_a_run_folder_that_cannot_be_written(self, cluster):
        """Failures are then counted by SLURM's restarts since it could, and end at a
        limit if it never could.
        """
        supervisor = cluster.supervisor(restart=29)
        supervisor.forget()  # at a good stop
        (cluster.run / "job.json.partial").mkdir()
        outcomes = [cluster.decide(restart=restart) for restart in (30, 31, 32)]
        assert "(job.json cannot be written: Is a directory)" in outcomes[0].reason
        supervisor = cluster.supervisor(restart=30)
        supervisor.train()
        outcomes.append(supervisor.decide())
        (cluster.run / "job.json").unlink()
        outcomes += [cluster.decide(restart=restart) for restart in (2, 3)]
        # A file that cannot be read has failures that nobody knows.
        (cluster.run / "job.json").mkdir()
        outcomes += [cluster.decide(restart=restart) for restart in (49, 50)]
        assert "(job.json: Is a directory) (not counted)" in outcomes[-2].reason
        assert [o.state for o in outcomes] == [
            *("requeue", "requeue", "give up"),
            "requeue",  # not again in the job
            *("requeue", "give up"),
            *("requeue", "give up"),
        ]

    def test_what_a_report_reads_of_them(self, cluster):
        cluster.keep("requeue.json", {"failures": 2, "step": -1})
        assert read_failures(cluster.run)["failures"] == 2
        supervisor = cluster.supervisor()
        supervisor.count_failure("node n3 died")
        failures = read_failures(cluster.run)
        assert (failures["failures"], failures["reason"]) == (3, "node n3 died")
        supervisor.forget()
        assert read_failures(cluster.run) == {}


class TestWhatRanksLeave:
    def test_the_first_error(self, cluster):
        cluster.error("of another start", time=1, start="6.0")
        assert supervise.first_error(str(cluster.run), "7.0") == ""
        cluster.error("\n the second\n", time=30)
        first = cluster.error("the first\nand its traceback", time=20)
        first.with_name("other.json").write_text(first.read_text().replace("20", "1"))
        odd = [
            ("\n", {"timestamp": "1"}),
            ("m", {"timestamp": "soon"}),
            (7, {"timestamp": "1"}),
            ("m", {}),
        ]
        broken = [
            {"message": {"message": message, "extraInfo": when}}
            for message, when in odd
        ]
        broken = ['{"mess', *map(json.dumps, [*broken, [], {}, {"message": "text"}])]
        for rank, content in enumerate(broken):
            cluster.of_rank("error.json", content, node=20, rank=1 + rank)
        error = supervise.first_error(str(cluster.run), "7.0")
        assert error == f"the first ({first})"

    def test_a_rank_that_is_killed_leaves_no_message(self, cluster):
        lost = "RuntimeError: Read error [10.0.0.2]:2: Connection reset by peer"
        where = cluster.error(lost, time=20)
        cluster.of_rank("stderr.log", "", node=20)
        for rank in range(2):
            cluster.of_rank("stderr.log", "", node=3, rank=rank)
        error = supervise.first_error(str(cluster.run), "7.0")
        assert error == (
            f"{lost} ({where}). Without a message, perhaps killed: node 3 rank 0, "
            "node 3 rank 1"
        )

    DUMP = """a line\nTimeout (0:01:00)!\nThread 0x01 (most recent call first):\n  File "/lib/threading.py", line 9 in wait
Thread 0x02 (most recent call first):\n  File "/a/checkpoint.py", line 213 in save\n  File "/a/train.py", line 7 in <module>\n"""

    def test_where_the_ranks_stood(self, cluster):
        """The reason names the newest frame of the main thread, which Python's
        faulthandler prints last.
        """
        long = cluster.of_rank("stderr.log", self.DUMP, rank=1)
        other = cluster.of_rank("stderr.log", "", node=1)
        other.write_bytes(
            (self.DUMP.replace("213", "5") + self.DUMP).encode() + b"\xff"
        )
        # The older of two dumps is not where a rank stands.
        none = (
            "no dump",
            self.DUMP.replace("Timeout (", "Fatal"),
            "Timeout (",
            self.DUMP + "Timeout (0:02:00)!\n",
        )
        for rank, text in enumerate(none):
            cluster.of_rank("stderr.log", text, node=1, rank=1 + rank)
        cluster.of_rank("stderr.log", self.DUMP, start="6.0")
        other.with_name("stdout.log").write_text(self.DUMP)
        (cluster.run / "logs" / "7.0" / "node-1" / "stderr.log").symlink_to("nowhere")
        supervisor = cluster.supervisor()
        supervisor.stalled = "rank 0 has been silent"
        supervisor.status = 1
        expected = "node 0 rank 1: save in checkpoint.py:213; node 1 rank 0: save in checkpoint.py:213"
        assert f"rank 0 has been silent ({expected})" in supervisor.decide().reason
        long.write_text(self.DUMP + "x" * (1 << 16))  # its end alone is read
        assert supervise.stacks(str(cluster.run), "7.0").startswith("node 1 rank 0")


class TestNodes:
    CAN = Outcome("prepare", "4 of 4 nodes can train")

    def test_all_can_train(self, cluster):
        nodes = cluster.run / "nodes"
        cluster.reports(FOUR)
        assert (
            cluster.supervisor(NPROC="gpu", SLURM_GPUS_PER_NODE="h100:8").check_nodes()
            == self.CAN
        )
        (kept,) = nodes.iterdir()
        assert kept.name == "7.0.json"
        assert json.loads(kept.read_text()) == {n: report(n, 8, []) for n in FOUR}
        assert cluster.calls("srun") == [
            f"{STEP.format(0)} bash {ROOT}/slurm/node.sh check"
        ]
        nodes.rename(cluster.run / "others")
        nodes.write_text("no folder")
        assert cluster.supervisor().check_nodes() == self.CAN

    def test_the_names_of_the_nodes(self, cluster):
        """If SLURM does not expand its list of nodes, the unexpanded list must not be
        blamed as if it were a node.
        """
        cluster.reports(FOUR)
        cluster.write(
            "scontrol",
            f'[ $(grep -c hostnames "$0.calls") -gt 2 ] || exit 1; {cluster.SHOW}',
        )
        assert cluster.supervisor().check_nodes() == self.CAN
        cluster.write("scontrol", "exit 1")
        outcomes = []
        for restart in (0, 1):
            supervisor = cluster.supervisor(restart=restart)
            outcomes += [
                supervisor.enter("a state", method)
                for method in (supervisor.check_nodes, supervisor.train)
            ]
        assert all(
            o.reason.endswith(": scontrol show hostnames n[1-4] failed (status 1)")
            for o in outcomes
        )
        assert [o.state for o in outcomes] == [
            "requeue",
            "requeue",
            "requeue",
            "give up",
        ]
        assert (cluster.blamed(), len(cluster.calls("srun"))) == ([], 1)

    def test_gpus_asked_for(self):
        """A node may have fewer ranks than GPUs."""
        for name, value, gpus in (
            ("PER", "H100:4", 4),
            ("PER", "a100:2,v100:2", None),
            ("ON", "2", 2),
        ):
            for nproc, expected in (("gpu", gpus), ("1", 1)):
                given = {f"SLURM_GPUS_{name}_NODE": value, "TITAN_DISP_NPROC": nproc}
                assert supervise.gpus_asked(given) == expected

    def test_a_node_that_fails_twice_is_excluded(self, cluster):
        problems = ["GPU 3 returns wrong matrix products", "/tmp is full"]
        cluster.reports({**FOUR, "n3": (8, problems)})
        for restart, bad in ((0, []), (1, ["n3"])):
            supervisor = cluster.supervisor(restart=restart)
            said = supervisor.check_nodes().reason
            reason = f"cannot train: node n3: {', '.join(problems)}; 4 are needed"
            assert said.endswith(reason)
            assert supervisor.bad_nodes() == bad

    def test_what_else_srun_prints(self, cluster):
        """It may print labels, colours, two reports on a line, a line without an end,
        and bytes that are not text.
        """
        cluster.reports(FOUR)
        file = cluster.commands / "reports"
        _, n1, n2, n3, n4 = file.read_bytes().splitlines()
        noise = b"\x1b[32m\xe2\x86 \xff\x00 a broken line\r\n"
        mark = supervise.NODE_REPORT.encode()
        file.write_bytes(
            noise
            + b"0: \x1b[1m"
            + n1
            + b"\x1b[0m\n"
            + n2
            + n3
            + b"\n"
            + mark
            + b"7\n"
            + n4
        )
        assert cluster.supervisor(CHECK_SECONDS=5).check_nodes() == self.CAN


class TestPrepare:
    def test_how_titan_disp_is_asked(self, cluster):
        """The default is one rank per GPU on each node.

        Its Python may be in a container that srun starts.
        """
        words = f"--job.config_file config.toml --job.dump_folder {cluster.run} --training.steps 9"
        supervisor = cluster.supervisor("--training.steps", "9")
        del supervisor.environment["TITAN_DISP_NPROC"]
        assert supervisor.prepare() == Outcome(
            "train", "the config can start on these nodes"
        )
        assert cluster.calls("python") == [
            f"-m titan_disp.cluster.job_check --nodes 4 --nproc gpu {words}"
        ]
        supervisor = cluster.supervisor(
            "--training.steps", "9", SRUN_ARGS="--container-image='/my images/a.sqsh'"
        )
        assert supervisor.prepare() == Outcome(
            "train", "the config can start on these nodes"
        )
        on_n1 = "--nodes=1 --ntasks=1 --nodelist=n1 --mem=0 --cpu-bind=none --container-image=/my images/a.sqsh"
        assert cluster.calls("srun") == [
            f"{on_n1} bash {ROOT}/slurm/node.sh prepare --nodes 4 --nproc 1 {words}"
        ]

    def test_what_titan_disp_says_of_a_config(
        self, cluster, sample, monkeypatch, capsys
    ):
        from titan_disp.cluster import job_check, node_health
        from titan_disp.errors import EXIT_CODE, IN_USE_EXIT_CODE
        from titan_disp.run.lock import Lock

        run = cluster.folder / "läufe" / os.fsdecode(b"\xff")
        config = cluster.folder / "config.toml"
        config.write_text(DEMO.read_text())
        (cluster.folder / "launch.json").write_text(
            '{"code": "another", "packages": {"torch": "99"}}'
        )
        options = ["--job.config_file", str(config), *command(DEMO, sample, run)[7:]]

        def main(nodes="1", nproc="1"):
            monkeypatch.setattr(
                "sys.argv", ["job", "--nodes", nodes, "--nproc", nproc, *options]
            )
            job_check.main()

        main()
        said = r"another installation: (the code of titan_disp|torch 99 then, [\d.]+\S* now)"
        assert len(set(re.findall(said, capsys.readouterr().out))) == 2
        # One rank on each of three nodes: the batch of 16 cannot be divided.
        for nproc, said in (
            ("8x", "TITAN_DISP_NPROC is '8x', expected gpu or a"),
            ("1", ".* is not a positive mult"),
        ):
            with pytest.raises(SystemExit, match=str(EXIT_CODE)):
                main("3", nproc)
            assert re.match(f"titan-disp: error: {said}", capsys.readouterr().err)
        lock = Lock(run)
        with pytest.raises(SystemExit, match=str(IN_USE_EXIT_CODE)):
            main()
        lock.close()
        assert node_health.REPORT == supervise.NODE_REPORT


def test_a_job_submitted_by_hand(cluster, sample, monkeypatch):
    """Its first start writes the launch folder.

    A restart takes scripts and config from there, whatever has changed.
    """
    from titan_disp.cluster import freeze

    config = cluster.folder / "config.toml"
    run = cluster.folder / "läufe" / os.fsdecode(b"\xff")
    config.write_text(DEMO.read_text())

    def frozen(run, name):
        """Return the options of a start of this name, and what freeze says of it."""
        options = ["--job.config_file", str(config), *command(DEMO, sample, run)[7:]]
        monkeypatch.setattr("sys.argv", ["freeze", "--name", name, *options])
        # any bytes of a path
        with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())) as out:
            freeze.main()
        return options, out.buffer.getvalue().strip()

    options, said = frozen(run, "7.0.abcdef")
    launch = run / "launch" / "7.0.abcdef"
    pointer = cluster.folder / "home" / "7"
    assert freeze.installation_changes(launch / "config.toml") == []
    (cluster.folder / "said").write_bytes(
        b"0: a banner\n0: %b\x1b[0m\n0: the container has ended\n" % said
    )
    cluster.write("python", "cat FOLDER/said")
    first = cluster.supervisor(pointer=pointer)
    first.run = ""
    first.launch = {}
    assert first.freeze() == Outcome("check nodes", f"this job runs {launch}")
    assert cluster.calls(
        "python",
        "-m titan_disp.cluster.freeze --name 7.0 --job.config_file config.toml",
    )
    assert first.run == str(run)
    assert first.argv == [
        f"{launch}/config.toml",
        *options[2:],
        "--job.dump_folder",
        str(run),
    ]
    assert (
        (launch / "slurm" / "site.sh")
        .read_text()
        .startswith("# shellcheck shell=bash\n# ")
    )
    assert first.script("node.sh") == ["bash", f"{launch}/slurm/node.sh"]
    assert os.fsdecode(pointer.read_bytes()) == str(launch)

    # A requeued job may lack the pointer: its newest launch counts. Of these, two are
    # of an earlier job with its number, two are other jobs', and the last one is
    # unfinished.
    for when, name in enumerate(
        (
            "7.0.aaaaaa",
            "7.0.bbbbbb",
            "17.0.abcdef",
            "71.0.abcdef",
            "7.1.cccccc.partial-5",
        )
    ):
        file = cluster.run / "launch" / name / "launch.json"
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (when, when))
    assert frozen(cluster.run, "7.1.dddddd")[1].endswith(b'/7.0.bbbbbb"')
    if os.geteuid() == 0:  # somebody else's does not count
        os.chown(cluster.run / "launch" / "7.0.bbbbbb", 1, 1)
        assert frozen(cluster.run, "7.1.dddddd")[1].endswith(b'/7.0.aaaaaa"')
    assert frozen(cluster.run, "8.1.dddddd")[1].endswith(b'/8.1.dddddd"')

    config.write_text("edited")
    again = supervise.Supervisor(
        ["x"], "", "", environment=cluster.environment(), here=f"{launch}/slurm"
    )
    assert (again.run, again.argv, again.freeze().state) == (
        first.run,
        first.argv,
        "check nodes",
    )
    assert Path(again.argv[0]).read_text() == DEMO.read_text()
    # a checkout in a folder of this name
    scripts = cluster.folder / "launch" / "titan-disp" / "slurm"
    assert (
        supervise.Supervisor(
            ["c.toml"], "", "", environment=cluster.environment(), here=str(scripts)
        ).launch
        == {}
    )


def test_any_bytes_in_any_locale(cluster):
    """In the C locale, Python 3.6 reads and writes ASCII.

    Newer ones do so without coercion and without UTF-8 mode.
    """
    cluster.run = cluster.folder / "läufe"
    launch = cluster.launch("λ.toml", parent="läunch")
    cluster.job.update(JobName="λ", TimeLimit="00:01:00")
    given = {
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
        "SLURM_JOB_NODELIST": "n[1-4] \u03bb",
    }
    done = cluster.program(launch, "λ.toml", **given)
    assert done.returncode == supervise.INTENDED + 2, done.stderr
    assert b"the time limit is 60 s" in done.stdout
    assert [p.name for p in cluster.folder.glob("l*ufe/*")] == ["supervisor.jsonl"]


def test_a_setting_that_is_no_number(cluster):
    for name, (expected, *values) in {
        "RETRIES": (f"none or minutes such as {supervise.RETRIES}", "2 10", "2,", "-1"),
        "SPARES": ("a whole number", "abc", "-1", "1.5"),
        "ENDPOINT": (
            "HOST, :PORT or HOST:PORT",
            "n1:high",
            "n1:0",
            "fe80::1",
            "n1:65536",
            ":65536",
        ),
        "CHECK_SECONDS": ("a number", "nan", "inf", "-1"),
        "NPROC": ("gpu or the ranks per node", "abc", "0", "-1", "1.5"),
    }.items():
        for value in values:
            with pytest.raises(
                supervise.Failure,
                match=f"^TITAN_DISP_{name} is {value!r}, expected {expected}$",
            ):
                cluster.supervisor(**{name: value})


class TestTrain:
    def test_how_it_is_started(self, cluster, monkeypatch):
        # A local SLURM may run beside the tests.
        monkeypatch.setattr(supervise, "is_free", lambda port: True)
        cluster.write("srun", "env > FOLDER/environment")

        def seen(**given):
            assert cluster.supervisor(**given).train() == Outcome(
                "decide", "training ended with status 0"
            )
            return set((cluster.folder / "environment").read_text().splitlines())

        # 128 would fail on the last node.
        unequal = {"SLURM_CPUS_ON_NODE": "128", "SLURM_JOB_CPUS_PER_NODE": "128(x3),64"}
        variables = seen(SRUN_ARGS="--mpi=none --cpus-per-task=32", **unequal)
        node = f"bash {ROOT}/slurm/node.sh train {cluster.run} --job.config_file config.toml --job.dump_folder {cluster.run}"
        assert cluster.calls("srun") == [
            f"{STEP.format(1)} --mpi=none --cpus-per-task=32 {node}"
        ]
        shutdown = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        assert {"TITAN_DISP_ENDPOINT=n1:20007", f"{shutdown}=300"} <= variables
        # The site knows better.
        assert f"{shutdown}=5" in seen(TORCH_ELASTIC_SHUTDOWN_TIMEOUT=5)
        for endpoint, expected in (
            ("10.0.0.1:33000", "10.0.0.1:33000"),
            ("10.0.0.1", "10.0.0.1:20007"),
            (":33000", "n1:33000"),
            ("[fe80::1]", "[fe80::1]:20007"),
        ):
            assert f"TITAN_DISP_ENDPOINT={expected}" in seen(ENDPOINT=endpoint)

    def test_how_long_before_the_limit_slurm_signals(self, cluster):
        """sbatch takes its option before its variable, and the variable before the
        script's line.
        """
        options = ["--nodes=2", "--signal=B:USR1@900", "--comment=x@y"]
        for variable, sbatch, seconds in (
            ("", [], 300),
            ("B:USR1@600", [], 600),
            ("USR1@0", [], 1),
            ("B:USR1@600", options, 900),
        ):
            supervisor = cluster.supervisor(SBATCH_SIGNAL=variable)
            supervisor.launch["sbatch"] = sbatch
            assert supervisor.lead == seconds

    PIPES = (
        "heartbeat.json",
        "events.jsonl",
        "stop",
        "nodes.json",
        "job.json",
        "supervisor.jsonl",
    )

    @pytest.mark.timeout(50)
    def test_a_run_folder_that_hangs(self, cluster, capsys):
        """Any process that opens a file there hangs, the supervisor too.

        Pipes that nobody writes to stand for the files.
        """
        pipes = " ".join(self.PIPES)
        # Renamed: a file that is missing for a moment would be a run that has said its
        # last word.
        hang = f"cd FOLDER; mkdir pipes; cd pipes; mkfifo {pipes}; sleep 1; mv -f {pipes} FOLDER/run"
        cluster.write("srun", f"{beat(1.4)} {hang}; exec sleep 60")
        supervisor = cluster.supervisor(CHECK_SECONDS=0)
        supervisor.check_seconds = 2
        supervisor.patience = 0.3
        assert supervisor.supervise() == 1
        assert "requeue 7" in cluster.calls("scontrol", "requeue")
        assert cluster.calls("scancel") == ["--signal=KILL 7.0"]
        assert "at step 5 (save), and 1 s are allowed" in supervisor.stalled
        told = f"requeue: decide: no answer within 2 s; does the file system of {cluster.run} hang? (not counted)"
        assert told in capsys.readouterr().out
        for name in self.PIPES:  # let the threads go
            os.close(os.open(cluster.run / name, os.O_RDWR | os.O_NONBLOCK))


class TestRequeue:
    @pytest.mark.parametrize(
        ("listed", "before", "hours", "update"),
        [
            # The user's own excluded nodes stay excluded, even those that were bad too:
            # SLURM replaces the whole list. A clock may have been put back.
            (
                "n[7-9]",
                None,
                {"n2": 1, "n3": -48, "n5": -2, "n6": 24.01, "n8": 1},
                "n7,n8,n9,n2,n5",
            ),
            (
                "n7,n8,n9,n2,n5",
                {"job": "7", "excluded": ["n2", "n5"]},
                {"n2": 2, "n5": 3, "n8": 2},
                None,
            ),
            (
                "n7,n8,n9,n2,n5",
                {"job": "7", "excluded": ["n2", "n5"]},
                {"n2": 25, "n5": 3, "n8": 26},
                "n7,n8,n9,n5",
            ),
            ("(null)", None, {"n2": 1}, "n2"),
            ("n2", {"job": "7", "excluded": ["n2"]}, {}, ""),
            # If a user submits the run again, the nodes excluded there are the user's.
            ("n2", {"job": "6", "excluded": ["n2"]}, {"n3": 1}, "n2,n3"),
            ("n2", {"job": "7"}, {}, None),  # one that names nobody
        ],
    )
    def test_bad_nodes_for_a_day(self, cluster, listed, before, hours, update):
        cluster.write("scontrol", cluster.PERMITS)
        cluster.job["ExcNodeList"] = listed
        cluster.bad(**hours)
        if before:
            cluster.keep("job.json", before)
        supervisor = cluster.supervisor()
        supervisor.last_wait = 0
        assert supervisor.requeue() == 1
        assert cluster.calls("scontrol", "requeue") == ["requeue 7"]
        expected = [] if update is None else [f"update JobId=7 ExcNodeList={update}"]
        assert cluster.calls("scontrol", "update") == expected
        if update is not None:
            # the user's
            added = [
                node
                for node in update.split(",")
                if hours.get(node, 99) < 24 and node != "n8"
            ]
            assert cluster.kept("job.json")["excluded"] == added

    EXCLUDE = ["update JobId=7 ExcNodeList=n2"]

    @pytest.mark.parametrize(
        ("requeue", "more", "job", "calls", "updates", "said"),
        [
            # slurmctld answers at the third try.
            (
                '[ $(grep -c ^requeue "$0.calls") -eq 3 ]',
                "",
                {},
                3,
                EXCLUDE,
                "a pause of 0 s if SLURM permits it\n",
            ),
            # A node died during the check; the next start is left alone.
            (
                "exit 1",
                "",
                {"Restarts": "1"},
                0,
                EXCLUDE,
                "a pause of 0 s if SLURM permits it\n",
            ),
            # slurmctld has requeued the job, but scontrol timed out. A second job would
            # use the same run folder.
            (
                'sed -i s/Restarts=0/Restarts=1/ "$0.job"; exit 1',
                "",
                {"Restarts": "0"},
                1,
                EXCLUDE,
                "a pause of 0 s if SLURM permits it\n",
            ),
            # slurmctld may be busy, so it is asked four times.
            (
                "true",
                "update) exit 1;; ",
                {},
                1,
                4 * EXCLUDE,
                "stay as they are: submit the job again with --exclude=n2\n",
            ),
            # If the list cannot be expanded, no node is removed from it.
            (
                "true",
                "",
                {"ExcNodeList": "n[7-9]"},
                1,
                [],
                "stay as they are: scontrol show hostnames n[7-9] failed (status 1)\n",
            ),
        ],
    )
    def test_requeued(self, cluster, capsys, requeue, more, job, calls, updates, said):
        cluster.job |= job
        show = '"show job") cat "$0.job";; "show hostnames") exit 1'
        cluster.write(
            "scontrol",
            f'case "$1" in requeue) {requeue}; exit;; {more}esac; case "$1 $2" in {show};; esac',
        )
        cluster.bad(n2=0)
        assert cluster.supervisor().requeue() == 1
        assert cluster.calls("scontrol", "requeue") == calls * ["requeue 7"]
        assert cluster.calls("scontrol", "update") == updates
        assert (cluster.run / "job.json").exists() is (updates == self.EXCLUDE)
        text = capsys.readouterr().out
        assert text.count("scontrol requeue failed (status 1)") == max(0, calls - 1)
        assert text.endswith(said)

    def test_refused(self, cluster, capsys):
        """The reason is in the job's log and in the run folder, unless that is
        another job's.
        """
        for owner in ("6", "7"):
            cluster.lock(f"{owner}.0")
            assert cluster.supervisor().requeue(reason="failure 1") == 1
            refused = "NOT REQUEUED: SLURM refused it. Submit again. failure 1\n"
            assert capsys.readouterr().out.endswith(refused)
            assert (cluster.run / "outcome.txt").exists() is (owner == "7")
        outcome = (cluster.run / "outcome.txt").read_text()
        assert re.match("titan-disp: 20[-:TZ0-9]+ job 7: NOT REQUEUED: SLURM", outcome)

    TASK = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}

    def test_only_this_task_of_an_array_is_asked_about_requeued_and_ended(
        self, cluster
    ):
        cluster.write("scontrol", 'case "$1" in show) cat "$0.job";; esac')
        cluster.write("squeue", "echo 7_2.0; echo 7_2.batch")
        cluster.bad(n2=0)
        supervisor = cluster.supervisor(of_array=True, **self.TASK)
        assert supervisor.requeue() == 1
        assert set(cluster.calls("scontrol")) == {
            "show job 7_2",
            "requeue 7_2",
            "update JobId=7_2 ExcNodeList=n2",
        }
        process = subprocess.Popen(["sleep", "60"])
        cluster.write("scancel", f"kill {process.pid}")
        supervisor.end_step(process)
        assert process.poll() == -signal.SIGTERM
        assert cluster.calls("squeue") == ["--noheader --job=7_2 --steps --format=%i"]
        assert cluster.calls("scancel") == ["--signal=KILL 7_2.0"]
        assert cluster.supervisor(**self.TASK).requeue() == 1
        assert cluster.calls("scontrol", "requeue") == ["requeue 7_2", "requeue 7"]


# What SLURM 22.05.8 says of a job of --nodes=2 --comment='a TimeLimit=b' --job-name='my
# run'.
SHOWN = """JobId=7 JobName=my run
   Priority=4294901754 Nice=5 Account=(null) QOS=(null)
   RunTime=00:00:00 TimeLimit=00:10:00 TimeMin=00:01:00
   Partition=debug AllocNode:Sid=localhost:4197
   Command=/a checkout/slurm/pretrain.sbatch c.toml --job.description Partition=b
   Comment=a TimeLimit=b\x20

"""


def test_words_of_a_user_are_no_fields(cluster):
    supervisor = cluster.supervisor()
    (cluster.commands / "scontrol.job").write_text(SHOWN)
    fields = supervisor.show_job()
    assert (fields["TimeLimit"], fields["Partition"]) == ("00:10:00", "debug")


def test_the_program(cluster, monkeypatch, capsys):
    # Where a call names no other encoding, as in the locale C.
    monkeypatch.setattr(
        supervise, "open", functools.partial(open, encoding="ascii"), raising=False
    )
    met = []
    handlers = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)

    def supervised(self):
        met.append((self.argv, self.signals, self.pointer, self.address))
        for number in (signal.SIGUSR1, signal.SIGTERM):
            handlers[number](number, None)
        met.append(self.heard)
        return 5

    def main(*words):
        monkeypatch.setattr(sys, "argv", ["supervise.py", *words])
        return supervise.main(), capsys.readouterr().out

    monkeypatch.setattr(supervise.Supervisor, "supervise", supervised)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    file = cluster.run / "points.json"
    file.write_bytes(
        '{"points": [{"argv": []}, {"argv": ["läufe.toml", "--a=b"]}]}'.encode()
    )
    assert main("s", "p", "c.toml", "--sig", "x")[0] == 5
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert main("s", "p", "--of-array", str(file))[0] == 5
    assert met == [
        (["c.toml", "--sig", "x"], "s", "p", "7"),
        ["USR1", "TERM"],
        (["läufe.toml", "--a=b"], "s", "p", "7_1"),
        ["USR1", "TERM"],
    ]
    for text in ('{"points": []}', "{}", ""):
        file.write_text(text)
        status, said = main("s", "p", "--of-array", str(file))
        assert (
            status,
            f"error: task '1' of the array has no point in {file}: " in said,
        ) == (2, True)


def test_another_config_for_a_launch_folder(cluster):
    """Its scripts run what they were written with.

    A restart in the folder, whose command has the config as given, may.
    """
    launch = cluster.launch("c.toml")
    (launch / "launch.json").rename(cluster.folder / "kept")
    # unreadable, so the batch script requeues the job
    assert cluster.program(launch, "other.toml").returncode == 1
    (cluster.folder / "kept").rename(launch / "launch.json")
    done = cluster.program(launch, "other.toml")
    assert done.returncode == supervise.INTENDED + 2
    assert (
        f"{launch}/slurm runs c.toml. To run something else, submit slurm/pretrain.sbatch"
        in done.stdout.decode()
    )
    cluster.job["TimeLimit"] = "00:00:01"
    assert (
        b"the time limit is 1 s"
        in cluster.program(launch, "other.toml", SLURM_RESTART_COUNT="1").stdout
    )


@pytest.mark.parametrize("log", ["/dev/full", "closed"])
def test_a_log_that_cannot_be_written(cluster, log):
    cluster.job["TimeLimit"] = "00:00:01"
    read, write = os.pipe()
    os.close(read)
    with open(write if log == "closed" else log, "w") as file:
        done = cluster.program(cluster.launch("c.toml"), "c.toml", file)
    assert done.returncode == supervise.INTENDED + 2, done.stderr
    assert cluster.transitions()[-1]["state"] == "end"


@pytest.mark.parametrize(
    ("signals", "restart", "requeues"), [("USR1", 0, 1), ("TERM", 0, 0), ("", 50, 0)]
)
def test_a_batch_script_that_is_gone(cluster, monkeypatch, signals, restart, requeues):
    cluster.signals.write_text(signals)
    cluster.write("scontrol", cluster.PERMITS)
    monkeypatch.setattr(os, "_exit", exit := mock.Mock())
    supervise.watch(-1, cluster.supervisor(restart=restart))
    assert (exit.call_args_list[0], len(cluster.calls("scontrol", "requeue"))) == (
        mock.call(1),
        requeues,
    )
    assert re.search(
        " job 7: the batch script was killed.* the job is (not )?requeued\\n",
        (cluster.run / "outcome.txt").read_text(),
    )


def test_time_left(cluster):
    said = {
        "0:00": 0,
        "1:00": 60,
        "10:00:00": 36000,
        "2-01:00:01": 176401,
        "UNLIMITED": math.inf,
        "INVALID": 0,  # of a job that is beyond its limit
        "NOT_SET": 300,
    }
    for squeue, left in {
        **{f"echo {text}": left for text, left in said.items()},
        "exit 1": 300,
    }.items():
        cluster.write("squeue", squeue)
        assert cluster.supervisor().time_left(300) == left


def test_names_and_ports_do_not_come_again(cluster, monkeypatch):
    monkeypatch.setattr(supervise, "is_free", lambda port: True)
    first, second = (
        supervise.Supervisor([], "", "", environment=cluster.environment())
        for _ in range(2)
    )
    assert first.start != second.start
    for restart, port in ((0, 20007), (3, 23034)):
        supervisor = cluster.supervisor(restart=restart)
        supervisor.used = ["n1"]
        assert supervisor.endpoint() == f"n1:{port}"
    first.begin()
    first.used = ["n1"]
    assert first.endpoint() == "n1:20108"


def test_a_port_that_another_process_uses(cluster, monkeypatch):
    supervisor = cluster.supervisor()
    supervisor.used = ["n1"]
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        _, port = other.getsockname()
        supervisor.port = str(port)
        with pytest.raises(
            supervise.Failure, match=f"uses port {port}, on which the ran"
        ):
            supervisor.endpoint()
    supervisor.port = None
    # A local SLURM may run beside the tests, so no fixed port is taken here.
    monkeypatch.setattr(supervise, "is_free", lambda port: port != 20007)
    assert supervisor.endpoint() == "n1:20008"


class TestSupervise:
    def test_a_run_that_fails_once(self, cluster, capsys):
        """A new start has a name of its own, so that the events of the former do not
        count.
        """
        began = time.time()
        event = json.dumps({"event": "complete", "step": 9, "job": "NAME"})
        cluster.reports(
            FOUR,
            f"echo '{event}' | sed s/NAME/$TITAN_DISP_START/ >> FOLDER/run/events.jsonl; exit 1",
        )
        # whose first start has another name in its environment
        supervisor = cluster.supervisor()
        assert supervisor.supervise() == 0
        told = cluster.transitions()
        again = ["check nodes", "prepare", "train", "decide"]
        assert [record["state"] for record in told] == [
            "unpack",
            "freeze",
            *again,
            *again,
            "end",
        ]
        assert told[0]["reason"] == "start 7.0 on n[1-4]"
        assert told[6]["reason"].endswith(". Starting again in this job")
        assert [
            {record["start"] for record in part} for part in (told[:7], told[7:])
        ] == [{"7.0"}, {supervisor.start}]
        assert len(cluster.calls("python")) == 1  # the config has been checked
        last = told[-1]
        assert (last["job"], last["restart"], last["reason"]) == (
            "7",
            0,
            "the run is complete: step 9",
        )
        line = capsys.readouterr().out.splitlines()[-1]
        said = datetime.strptime(
            line, "titan-disp: %Y-%m-%dT%H:%M:%SZ end: the run is complete: step 9"
        )
        for when in (
            datetime.fromisoformat(last["time"]),
            said.replace(tzinfo=timezone.utc),
        ):
            assert -1 < when.timestamp() - began < 60

    def test_a_spare_node_takes_the_place_of_one_that_is_down(self, cluster):
        cluster.write("sinfo", "echo 'n2 down*'")
        cluster.reports(FOUR, "exit 1")
        supervisor = cluster.supervisor(SPARES=1)
        supervisor.train()
        assert cluster.calls("srun")[0].startswith(
            "--nodes=3 --ntasks=3 --nodelist=n1,n2,n3 "
        )
        assert supervisor.decide().state == "check nodes"
        supervisor.begin()
        cluster.reports(THREE)
        supervisor.check_nodes()
        assert supervisor.used == ["n1", "n3", "n4"]
        supervisor.trained = False
        supervisor.prepare()
        assert " --nodes 3 --nproc" in cluster.calls("python")[-1]

    def test_an_error_of_its_own_is_a_failure_like_any_other(
        self, cluster, monkeypatch
    ):
        monkeypatch.setattr(
            supervise.Supervisor, "check_nodes", lambda self: os.stat("/nowhere")
        )
        cluster.write("scontrol", cluster.PERMITS)
        assert cluster.supervisor().supervise() == 1
        # after a pause
        assert cluster.calls("scontrol", "update") == [
            "update JobId=7 StartTime=now+120"
        ]
        last = cluster.transitions()[-1]
        assert last["state"] == "requeue"
        assert "check nodes: FileNotFoundError: [Errno 2]" in last["reason"]


def test_the_oldest_python_that_is_promised_can_read_the_supervisor():
    text = (ROOT / "slurm" / "supervise.py").read_text()
    assert "Python >= 3.6" in text
    ast.parse(text, feature_version=(3, 6))


class TestUnpack:
    def test_unpacked(self, cluster):
        cluster.write("sbcast", "exit 0")
        supervisor = cluster.supervisor(LOCAL="/local", ENV_ARCHIVE="/a/env.tar")
        assert supervisor.unpack() == Outcome(
            "freeze", "the environment is on every node"
        )
        folder = f"/local/titan-disp-{supervisor.start}"
        assert cluster.calls("sbcast") == [f"--force /a/env.tar {folder}.tar"]
        assert cluster.calls("srun") == [
            f"{STEP.format(1)} bash {ROOT}/slurm/unpack.sh {folder}.tar"
        ]
        assert supervisor.environment["TITAN_DISP_PYTHON"] == f"{folder}/bin/python"

    def test_what_dead_jobs_left_on_a_node_is_removed(self, cluster, tmp_path):
        local = tmp_path / "local"
        archive = tmp_path / "local" / "titan-disp-7.1.ab12cd.tar"
        unpacked = local / "titan-disp-7.1.ab12cd"
        others = {"titan-disp-6", "titan-disp-x", "titan-disp-cache-0"}
        kept = {*others, unpacked.name}
        dead = "titan-disp-5.0.0123ef"
        for name in (*others, dead, "titan-disp-7", "titan-disp-7.0.ab12cd"):
            (local / name).mkdir(parents=True)
        (local / f"{dead}.tar").touch()
        (tmp_path / "env" / "bin").mkdir(parents=True)
        for listed, more in (
            ("exit 1", {dead, f"{dead}.tar"}),
            ("echo 6; echo 7", set()),
        ):
            cluster.write("squeue", listed)
            subprocess.run(
                ["tar", "-cf", archive, "-C", tmp_path / "env", "."], check=True
            )
            shutil.rmtree(unpacked, ignore_errors=True)
            subprocess.run(
                ["bash", ROOT / "slurm" / "unpack.sh", archive],
                env=cluster.environment(),
                check=True,
            )
            assert {path.name for path in local.iterdir()} == kept | more
        assert (unpacked / "bin").is_dir()

    def test_nodes_that_share_the_folder_of_the_environment(self, cluster, tmp_path):
        """The second node must not remove what the first one unpacks."""
        archive = tmp_path / "titan-disp-7.1.ab12cd.tar"
        unpacked = archive.with_suffix("")
        unpacked.mkdir()
        done = subprocess.run(
            ["bash", ROOT / "slurm" / "unpack.sh", archive],
            env=cluster.environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        assert f"nodes share {tmp_path}: set TITAN_DISP_LOCAL" in done.stdout
        assert unpacked.is_dir()


class TestPack:
    """Of what starts have left in a run folder, old folders become archives."""

    JOBS = (
        'echo "7 a"; echo "8 FOLDER/run/launch/20260101-000000-8/slurm/pretrain.sbatch"'
    )
    SUBMITTED = [f"20260101-00000{i}-{8 + i}" for i in range(8)]
    STARTS = [f"{i}.0.00000{i}" for i in range(1, 9)]

    @pytest.fixture
    def run(self, cluster):
        """Eight starts, of which that of job 7 runs and that of job 1 was the first."""
        for folder, names in (
            ("logs", self.STARTS),
            ("launch", self.SUBMITTED),
        ):
            for i, name in enumerate([*names, "something else"]):
                file = cluster.run / folder / name / "node-0" / "a log"
                file.parent.mkdir(parents=True)
                file.write_text(name)
                os.utime(cluster.run / folder / name, (i, i))
        shutil.copytree(ROOT / "slurm", cluster.run / "launch/20260101-000001-9/slurm")
        os.utime(cluster.run / "launch" / "20260101-000001-9", (1, 1))
        return cluster.run

    def pack(self, cluster, jobs, start="7.0.000007"):
        cluster.write("squeue", jobs)
        script = cluster.run / "launch" / "20260101-000001-9" / "slurm" / "pack.sh"
        subprocess.run(
            ["bash", script, cluster.run, start], env=cluster.environment(), check=True
        )

    def folders(self, run, name):
        return {path.name for path in (run / name).iterdir() if path.is_dir()}

    def test_the_newest_stay_and_so_does_what_is_in_use(self, cluster, run):
        self.pack(cluster, self.JOBS)
        assert self.folders(run, "logs") == {*self.STARTS[3:], "something else"}
        launch = {*self.SUBMITTED[3:], "something else"}
        # of a job that waits, and of this script
        launch |= {"20260101-000000-8", "20260101-000001-9"}
        assert self.folders(run, "launch") == launch
        archive = run / "launch" / "20260101-000002-10.tar"
        assert archive.stat().st_mode & 0o77 == 0
        for name, old in (("logs", "1.0.000001"), ("launch", "20260101-000002-10")):
            with tarfile.open(run / name / f"{old}.tar") as packed:
                content = packed.extractfile(f"{old}/node-0/a log").read().decode()
            assert content == old

    def test_a_start_that_runs_is_never_packed(self, cluster, run):
        """Start 1 is this one, and job 3 runs; start 2 was an earlier one of this job."""
        (run / "logs" / "2.0.000002").rename(run / "logs" / "1.0.000002")
        self.pack(cluster, "echo 3 b; echo 1 a", start="1.0.000001")
        expected = {*self.STARTS, "something else"} - {"2.0.000002"}
        assert self.folders(run, "logs") == expected
        assert (run / "logs" / "1.0.000002.tar").exists()

    def test_without_an_answer_of_slurm_nothing_is_packed(self, cluster, run):
        before = sorted(run.rglob("*"))
        self.pack(cluster, "exit 1")
        assert sorted(run.rglob("*")) == before

    def test_a_script_that_was_killed_while_it_packed(self, cluster, run):
        """Once while it wrote an archive, and once while it deleted the folder."""
        half = run / "logs" / "1.0.000001.tar.1.0.00000a.partial"
        half.write_text("half")
        os.utime(half, (1, 1))
        self.pack(cluster, self.JOBS)
        assert not half.exists()
        whole = (run / "logs" / "1.0.000001.tar").read_bytes()
        (run / "logs" / "1.0.000001").mkdir()
        os.utime(run / "logs" / "1.0.000001", (1, 1))
        self.pack(cluster, self.JOBS)
        assert (run / "logs" / "1.0.000001.tar").read_bytes() == whole
        assert "1.0.000001" not in self.folders(run, "logs")

    def test_another_job_that_packs_at_the_same_time_loses_nothing(self, cluster, run):
        """It has begun to delete the folder while this one packs it."""
        name = "1.0.000001"
        cluster.write(
            "tar",
            f"""case $3 in
            {name})
              /bin/tar -cf {name}.tar {name}
              rm -r {name}/*;;
            esac
            exec /bin/tar "$@" """,
        )
        self.pack(cluster, self.JOBS)
        with tarfile.open(run / "logs" / f"{name}.tar") as packed:
            assert f"{name}/node-0/a log" in packed.getnames()
        assert name not in self.folders(run, "logs")
        assert not list(run.glob("logs/*.partial"))

    def test_a_full_disk_is_not_filled_with_half_archives(self, cluster, run):
        cluster.write("tar", 'echo half >"$2"; exit 2')
        self.pack(cluster, self.JOBS)
        assert self.folders(run, "logs") == {*self.STARTS, "something else"}
        assert not list(run.rglob("*.tar*"))

    def test_training_begins_it(self, cluster):
        cluster.write("squeue", self.JOBS)
        for i, name in enumerate(self.STARTS):
            (cluster.run / "logs" / name).mkdir(parents=True)
            os.utime(cluster.run / "logs" / name, (i, i))
        supervisor = cluster.supervisor()
        supervisor.train()
        end = time.monotonic() + 20
        while (cluster.run / "logs" / "1.0.000001").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        assert (cluster.run / "logs" / "1.0.000001.tar").exists()


class TestNode:
    @pytest.mark.parametrize("what", ["check", "train"])
    def test_a_container_that_cleans_the_environment(self, cluster, what):
        passed = {
            "SLURMD_NODENAME": "n7",
            "SLURM_JOB_ID": "7",
            "NCCL_NET": "AWS Libfabric",
            "TITAN_DISP_SITE": "/a site",
            "CXI_FORK_SAFE": "1",
            "RDMAV_FORK_SAFE": "2",
            "IBV_FORK_SAFE": "3",
            "HSA_FORCE_FINE_GRAIN_PCIE": "4",
            "RCCL_MSCCL_ENABLE": "5",
            "CUDA_DEVICE_MAX_CONNECTIONS": "6",
        }
        others = {
            "LD_LIBRARY_PATH": "/of/the/host",
            "WANDB_API_KEY": "secret",
            "TITAN_DISP_NOTIFY": "https://secret",
        }
        needed = {
            "TITAN_DISP_NPROC": "1",
            "TITAN_DISP_START": "7.0",
            "TITAN_DISP_ENDPOINT": "n1:1",
        }
        needed |= {
            "SLURM_NODEID": "6",
            "SLURM_NNODES": "8",
            "TITAN_DISP_PREFIX": "env -i 'IMAGE=my image.sif'",
        }
        script = f'echo "{"|".join(f"${name}" for name in (*passed, "IMAGE", *others))}"; echo "$@"'
        told = cluster.node(
            script, what, "/run", "--an", "argument", **passed, **others, **needed
        )
        assert (
            told.splitlines()[0]
            == "n7|7|AWS Libfabric|/a site|1|2|3|4|5|6|my image.sif|||"
        )
        assert told.rstrip().endswith("--an argument")

    def test_options_of_torchrun_from_the_users_shell_do_not_count(self, cluster):
        variables = {"SLURM_NODEID": "0", "SLURM_NNODES": "2", "PET_STANDALONE": "1"}
        needed = {"NPROC": "1", "START": "7.0", "ENDPOINT": "n1:1"}
        variables |= {f"TITAN_DISP_{name}": value for name, value in needed.items()}
        script = 'echo "standalone: ${PET_STANDALONE-unset}"'
        assert (
            cluster.node(script, "train", "/run", **variables) == "standalone: unset\n"
        )

    @pytest.mark.parametrize(
        ("host", "warning"),
        [
            ("127.0.0.1", ""),
            ("[::1]", ""),
            # a name that has no address anywhere (RFC 2606)
            ("gpu1.invalid", "gpu1.invalid, where the ranks meet, has no address here"),
        ],
    )
    def test_a_first_node_without_an_address(self, cluster, capfd, host, warning):
        variables = {"SLURM_NODEID": "1", "SLURM_NNODES": "2"}
        needed = {"NPROC": "1", "START": "7.0", "ENDPOINT": f"{host}:20007"}
        variables |= {f"TITAN_DISP_{name}": value for name, value in needed.items()}
        told = cluster.node("echo torchrun", "train", "/run", **variables)
        assert told == "torchrun\n"  # it starts all the same: the name may appear late
        assert capfd.readouterr().err.partition("warning: ")[2].strip() == warning

    def test_a_cache_of_somebody_else(self, cluster, tmp_path):
        cache = tmp_path / f"titan-disp-cache-{os.getuid()}"
        cache.mkdir(mode=0o777)
        script = 'echo "$TRITON_CACHE_DIR"'
        assert cluster.node(script, "check").strip() == f"{cache}/triton"
        assert cache.stat().st_mode & 0o777 == 0o700
        cache.rename(tmp_path / "theirs")
        cache.symlink_to(tmp_path / "theirs")
        said, used = cluster.node(script, "check").splitlines()
        assert f"{cache} belongs to somebody else" in said
        assert used.startswith(f"{cache}-")
        assert Path(used).parent.stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize("number", [0, 6])
    def test_what_torchrun_is_asked_for(self, cluster, tmp_path, monkeypatch, number):
        """torch parses it.

        Node 6 has rank 6, and waits for the other nodes at least as long as ranks do.
        """
        from torch.distributed.run import config_from_args, parse_args
        from torchtitan.config import JobConfig

        given = {
            "NPROC": "8",
            "START": "7.1",
            "ENDPOINT": "gpu8:20007",
        }
        given = {f"TITAN_DISP_{name}": value for name, value in given.items()}
        given |= {"SLURM_NODEID": str(number), "SLURM_NNODES": "80"}
        if number:  # a step on fewer nodes than the job has
            given |= {"SLURM_NNODES": "99", "SLURM_STEP_NUM_NODES": "80"}
        prefix = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
        told = cluster.node(
            f'printf "%s\\0" "${prefix}" "$@"',
            "train",
            f"{tmp_path}/a run",
            "--job.config_file",
            "a config.toml",
            **given,
        )
        template, *words, _ = told.split("\0")
        monkeypatch.setenv(prefix, template)
        assert words[:2] == ["-m", "torch.distributed.run"]
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
        config, _, arguments = config_from_args(parse_args(words[2:]))
        assert (
            config.min_nodes,
            config.max_nodes,
            config.nproc_per_node,
            config.max_restarts,
        ) == (80, 80, 8, 0)
        assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == (
            "static",
            "gpu8:20007",
            "7.1",
        )
        assert config.rdzv_configs["rank"] == number
        # torch 2.11 has none, and waits for 30 s
        assert getattr(config, "shutdown_timeout", 300) == 300
        assert config.rdzv_configs["timeout"] >= JobConfig().comm.init_timeout_seconds
        assert (tmp_path / "a run" / "logs" / "7.1" / f"node-{number}").is_dir()
        assert arguments[-2:] == ["--job.config_file", "a config.toml"]
        # nothing stands before the lines of rank 0
        assert (config.log_line_prefix_template, config.role) == ("${role_name}", "")
        # rank 0 is on the first node, and speaks in the job's log
        assert ("--tee" in words) is (number == 0)


@pytest.mark.parametrize("name", ["USR1", "TERM"])
@pytest.mark.parametrize("script", ["pretrain", "sweep"])
def test_the_script_forwards_signals_and_the_status(cluster, script, name):
    """It runs in a folder whose path has a space, with a site file that reads an unset
    variable, and in an array on a full disk.
    """
    words = ["config.toml", "--job.dump_folder", str(cluster.run)]
    here = cluster.launch(*words, parent="a run") / "slurm"
    (here / "site.sh").write_text("set -e; echo $UNSET_BY_THE_SITE; export SITE=1\n")
    cluster.job["Command"] = f"{here}/{script}.sbatch config.toml"
    asked = (
        "for _ in {1..600}; do [ -e FOLDER/run/stop ] && break; /bin/sleep 0.1; done"
    )
    cluster.write(
        "srun",
        f'echo "$SITE $SLURM_EXPORT_ENV" >> FOLDER/site; kill -{name} {SCRIPT}; {asked}',
    )
    given = {"SITE": "/of/the/user/site.sh", "CHECK_SECONDS": 0, "RETRIES": "none"}
    given |= {"TMPDIR": "/only/on/the/login/node", "SLURM_EXPORT_ENV": "NONE"}
    if script == "sweep":
        # which cannot be written, as on a full disk
        cluster.write("mktemp", "echo FOLDER/missing/signals")
        given["SLURM_RESTART_COUNT"] = 1
        words = [str(cluster.run)]
    status, text = cluster.batch(*words, script=script, **given)
    assert status == 1
    assert f"{name} received: asking all ranks to save and stop" in text
    assert "GIVEN UP after failure 1 in a row" in text
    assert f"asked to stop ({name}) but not saved in time" in text
    assert re.match(r"7\.[01]\.\w+\n", (cluster.run / "stop").read_text())
    assert (cluster.folder / "site").read_text() == "1 ALL\n"


@pytest.mark.parametrize("script", ["pretrain", "sweep"])
class TestBothBatchScripts:
    @pytest.fixture(autouse=True)
    def _stand_ins(self, cluster, script):
        """The supervisor prints the signals so far and ends the job as intended."""
        cluster.job["Command"] = f"{ROOT}/slurm/{script}.sbatch a/b.sbatch"
        cluster.write("scontrol", cluster.PERMITS)
        cluster.write("python3", 'cat "$2"; exit 64')

    @pytest.mark.parametrize("name", ["USR1", "TERM"])
    def test_a_signal_before_the_scripts_are_read(self, cluster, script, name):
        cluster.write("scontrol", f"kill -{name} $PPID; {cluster.PERMITS}")
        status, log = cluster.batch(script=script)
        assert (status, log.split()) == (0, [name])

    @pytest.mark.parametrize("name", ["USR1", "TERM"])
    def test_a_signal_while_the_supervisor_runs(self, cluster, script, name):
        """It does not kill a supervisor that starts. The file of signals is not in the
        login node's folder, and is removed.
        """
        file = cluster.folder / "signals of the job"
        cluster.write(
            "mktemp", f'[ "$TMPDIR" = /tmp ] && touch "{file}" && echo "{file}"'
        )
        heard = 'until [ "$(cat "$2")" ]; do /bin/sleep 0.05; done'
        cluster.write("python3", f'kill -{name} $$ $PPID; {heard}; cat "$2"; exit 65')
        status, log = cluster.batch(script=script, TMPDIR="/only/on/the/login/node")
        assert (status, log.split()) == (1, [name])
        assert not file.exists()

    def test_slurm_answers_late(self, cluster, script):
        cluster.write("scontrol", LATE)
        assert cluster.batch(script=script)[0] == 0

    @pytest.mark.parametrize(
        ("state", "restart", "requeued"),
        [("RUNNING", 49, True), ("RUNNING", 50, False), ("CANCELLED", 1, False)],
    )
    def test_no_scripts_can_be_read(self, cluster, script, state, restart, requeued):
        cluster.job |= {"Command": f"/nowhere/{script}.sbatch", "JobState": state}
        status, log = cluster.batch(script=script, SLURM_RESTART_COUNT=restart)
        assert status == 1
        assert "the scripts cannot be read: /nowhere/common.sh" in log
        assert ("NOT REQUEUED" in log) is not requeued
        job = "7_0" if script == "sweep" else "7"
        assert cluster.calls("scontrol", "requeue") == [f"requeue {job}"] * requeued

    def test_no_scripts_can_be_read_and_slurm_refuses_twice(self, cluster, script):
        cluster.job["Command"] = f"/nowhere/{script}.sbatch"
        twice = '[ $(grep -c requeue "$0.calls") -gt 2 ] || exit 1'
        cluster.write(
            "scontrol", f'case "$1" in requeue) {twice}; exit 0;; esac; {cluster.SHOW}'
        )
        status, log = cluster.batch(script=script, SLURM_RESTART_COUNT=1)
        assert status == 1
        assert "NOT REQUEUED" not in log
        assert len(cluster.calls("scontrol", "requeue")) == 3

    @pytest.mark.parametrize(("answer", "requeues"), [(Cluster.SHOW, 0), ("", 1)])
    def test_a_first_start_that_cannot_read_its_scripts_ends(
        self, cluster, script, answer, requeues
    ):
        """sbatch has just read one of them, so the path is wrong for the others, unless
        SLURM does not say where they are.
        """
        cluster.job["Command"] = f"/a\nrun/{script}.sbatch config.toml"
        cluster.write("scontrol", f'case "$1" in requeue) exit 0;; esac; {answer}')
        status, log = cluster.batch(script=script)
        assert "the scripts cannot be read" in log
        assert status == 2 - requeues
        assert len(cluster.calls("scontrol", "requeue")) == requeues

    @pytest.mark.parametrize("restart", [0, 1])
    def test_a_launch_folder_of_somebody_else(self, cluster, script, restart):
        """In a group's folder, another user may put one in the place of the job's."""
        launch = cluster.launch("config.toml")
        (launch / "slurm" / "common.sh").write_text("touch FOLDER/run/taken")
        cluster.job["Command"] = f"{launch}/slurm/{script}.sbatch config.toml"
        theirs = launch.rename(launch.with_name("theirs"))
        launch.symlink_to(theirs)
        status, log = cluster.batch(script=script, SLURM_RESTART_COUNT=restart)
        assert f"error: {launch} belongs to somebody else" in log
        if os.geteuid() == 0:
            launch.unlink()
            theirs.rename(launch)
            os.chown(launch, 1, 1)
            status, log = cluster.batch(script=script, SLURM_RESTART_COUNT=restart)
            assert f"error: {launch} belongs to somebody else" in log
        assert status == 2
        assert not cluster.calls("python3")

    def test_the_launch_folder_of_a_requeued_job(self, cluster, script):
        """A file names it.

        At the first start, that is of an older job with this number; somebody else may
        have written it.
        """
        pointer = cluster.folder / ".titan-disp" / "launches" / "cluster-7"
        kept = cluster.folder / "kept" / "slurm"
        for folder in (kept, pointer.parent):
            folder.mkdir(parents=True)
        (kept / "common.sh").write_text("exit 5\n")
        for restart, mine, code in ((1, True, 5), (1, False, 0), (0, True, 0)):
            pointer.write_text(str(kept.parent))
            if not mine and os.geteuid() == 0:
                os.chown(pointer, 1, 1)
            if mine or os.geteuid() == 0:
                started = cluster.batch(script=script, SLURM_RESTART_COUNT=restart)
                assert started[0] == code
        assert not pointer.exists()


class TestBatchScript:
    @pytest.mark.parametrize(
        "state", ["unpack", "freeze", "check nodes", "prepare", "train", "decide"]
    )
    @pytest.mark.parametrize("victim", ["supervisor", "script"])
    def test_killed_in_any_state(self, cluster, state, victim):
        kill = f"kill -9 {'$PPID' if victim == 'supervisor' else SCRIPT}"
        kill = (
            f"[ -e FOLDER/killed ] || {{ touch FOLDER/killed; {kill}; /bin/sleep 2; }}"
        )
        at = dict.fromkeys(
            ("unpack", "freeze", "check nodes", "prepare", "train"), "true"
        ) | {state: kill}
        launch = cluster.launch("config.toml")
        say = f"mv FOLDER/launch.json {launch}; echo '{supervise.LAUNCH}{json.dumps(str(launch))}'"
        (launch / "launch.json").rename(cluster.folder / "launch.json")
        cluster.reports(FOUR)
        check = f"{at['check nodes']}; cat FOLDER/bin/reports"
        train = f"{at['train']}; touch FOLDER/trained; exit 1"
        cluster.write("sbcast", at["unpack"])
        cluster.write("srun", f'case "$*" in *check) {check};; *train*) {train};; esac')
        cluster.write(
            "python",
            f'case "$*" in *freeze*) {at["freeze"]}; {say};; *job_check*) {at["prepare"]};; esac',
        )
        decide = (
            f'[ "$1" = show ] && [ -e FOLDER/trained ] && {{ {kill}; }}'
            if state == "decide"
            else "true"
        )
        cluster.write("scontrol", f"{decide}; {cluster.PERMITS}")
        given = {
            "PYTHON": cluster.commands / "python",
            "NPROC": 1,
            "LOCAL": cluster.folder,
        }
        status, out = cluster.batch(
            ENV_ARCHIVE="/a/env.tar" if state == "unpack" else "", **given
        )
        assert status == (1 if victim == "supervisor" else -signal.SIGKILL), out
        assert cluster.calls("scontrol", "requeue") == ["requeue 7"], out
        assert (cluster.folder / "killed").exists()
        if victim == "script":
            assert "the batch script was killed; the job is requeued\n" in out

    def test_variables_that_nothing_reads(self, cluster):
        """Such as one of an earlier version, or a misspelled one."""
        cluster.write("python3", "exit 64")
        _, log = cluster.batch(TRITON="0", MAX_RETRIES="3", SITES="x")
        expected = "nothing reads these variables (slurm/pretrain.sbatch lists all): "
        assert f"{expected}TITAN_DISP_MAX_RETRIES TITAN_DISP_SITES\n" in log
        assert "nothing reads" not in cluster.batch(SPARES="1")[1]

    BROKEN = {"python3": "exit 1"}

    @pytest.mark.parametrize(
        ("given", "state", "commands", "code", "said"),
        [
            (
                {},
                "RUNNING",
                {"python3": "exit 127"},
                1,
                "the supervisor ended with status 127",
            ),
            (
                {},
                "RUNNING",
                {"python3": "kill -9 $$"},
                1,
                "the supervisor ended with status 137",
            ),
            ({}, "RUNNING", BROKEN, 1, "the supervisor ended with status 1"),
            (
                {"SLURM_RESTART_COUNT": 50},
                "RUNNING",
                BROKEN,
                None,
                "NOT REQUEUED (state RUNNING, restarts 50)",
            ),
            (
                {},
                "CANCELLED",
                BROKEN,
                None,
                "NOT REQUEUED (state CANCELLED, restarts 0)",
            ),
            ({}, "RUNNING", {"python3": "exit 66", "scontrol": LATE}, 2, ""),
            ({"SITE": "nowhere"}, "RUNNING", {}, 2, "error: no site file"),
            (
                {"SITE": "nowhere", "SLURM_RESTART_COUNT": 1},
                "RUNNING",
                {},
                1,
                "no site file",
            ),
            (
                {"PREFIX": "env 'a"},
                "RUNNING",
                {},
                2,
                "TITAN_DISP_PREFIX is env 'a, which cannot be split into words",
            ),
            (
                {"PREFIX": "env"},
                "RUNNING",
                BROKEN,
                1,
                "the supervisor ended with status 1",
            ),
            (
                {"SRUN_ARGS": "'a"},
                "RUNNING",
                {},
                2,
                "TITAN_DISP_SRUN_ARGS cannot be split into words: No closing",
            ),
            (
                {},
                "RUNNING",
                {"mktemp": "exit 1"},
                1,
                "no temporary file can be written here",
            ),
        ],
    )
    def test_what_goes_wrong_around_the_supervisor(
        self, cluster, given, state, commands, code, said
    ):
        """1: requeued, None: not requeued, 2: a user must mend it."""
        cluster.job["JobState"] = state
        for name, script in {"scontrol": cluster.PERMITS, **commands}.items():
            cluster.write(name, script)
        found, log = cluster.batch(**given)
        assert (found, len(cluster.calls("scontrol", "requeue"))) == (
            code or 1,
            int(code == 1),
        )
        assert said in log
