#!/usr/bin/env python3
"""Supervise a SLURM job of pretrain.sbatch from its first second to its last (standard
library only, Python >= 3.6).

    supervise.py SIGNALS POINTER CONFIG [overrides]
    supervise.py SIGNALS POINTER --of-array POINTS   # CONFIG, overrides: in points.json

A job passes through the states

    unpack -> freeze -> check nodes -> prepare -> train -> decide -> check nodes | requeue | end | give up

The method of ``Supervisor`` with a state's name returns an ``Outcome``: the next state
and the reason. Every transition is written as a line to RUN/supervisor.jsonl and to the
job's log, and the last one to RUN/outcome.txt.

RUN is the run's folder: docs/run_folder.md lists its files, which this program reads
and writes without importing titan_disp. The decision depends on what the run wrote to
RUN/events.jsonl, not on exit statuses, because torchrun and srun each change these.
slurm/README.md says what counts as a failure. The batch script writes the names of the
signals that it receives to the file SIGNALS. The file POINTER contains the path of the
launch folder that the previous start used. If this program is in a launch folder
(RUN/launch/NAME/slurm), CONFIG and overrides come from launch.json there.
"""

import collections
import concurrent.futures
import contextlib
import glob
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import datetime, timezone

UNPACK = "unpack"
FREEZE = "freeze"
CHECK = "check nodes"
PREPARE = "prepare"
TRAIN = "train"
DECIDE = "decide"
REQUEUE = "requeue"
END = "end"
GIVE_UP = "give up"
FINAL = (REQUEUE, END, GIVE_UP)
# In the output of commands, these marks precede JSON for this program. The rest of the
# line may be anything.
NODE_REPORT = "titan-disp-node-report: "
LAUNCH = "titan-disp-launch: "
# Added to the exit status, so that common.sh can distinguish an intended end from that of
# a killed program.
INTENDED = 64
# for each number of failures in a row: minutes before a requeue, or "now" for a retry
# in the same job
RETRIES = "now,10,30,60,60,60"
UNITS = (1, 60, 3600, 86400)  # seconds
PORT = r"[1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5]"
ITEM = r"(?:now|\d{1,4})"  # of TITAN_DISP_RETRIES
# The variables of pretrain.sbatch with a form of their own, without TITAN_DISP_: the
# default, the pattern that a value matches, and what an error says is expected
Setting = collections.namedtuple("Setting", "default pattern expected")
SETTINGS = {
    "RETRIES": Setting(
        default=RETRIES,
        pattern=f"none|{ITEM}(?:,{ITEM})*",
        expected=f"none or minutes such as {RETRIES}",
    ),
    "SPARES": Setting("0", r"\d{1,9}", "a whole number"),
    "NPROC": Setting("gpu", r"gpu|[1-9]\d{0,3}", "gpu or the ranks per node"),
    "CHECK_SECONDS": Setting("600", r"\d{1,9}(?:[.]\d*)?", "a number"),
    "ENDPOINT": Setting(
        default="",
        pattern=rf"(\[.+\]|[^:]*)(?::({PORT}))?",
        expected="HOST, :PORT or HOST:PORT",
    ),
}
# what gloo, NCCL or RCCL reports if the process of another rank has ended
LOST_PEER = re.compile(
    r"[Cc]onnection (?:reset|closed|refused)|ncclRemoteError|remote process exited"
)
NAMED_RANKS = 8  # most ranks that a reason names: those of a node
NOW_OR_LATER = 2  # minutes before a requeue if a retry "now" is not possible
LEAD = 300  # seconds of sbatch --signal in the batch scripts
# most restarts of a job whose failures cannot be counted (also in the batch scripts)
MOST_RESTARTS = 50
# These fields of scontrol take a whole line, and may contain anything, even the name of
# another field.
WHOLE_LINES = "JobName Command SubmitLine WorkDir Comment AdminComment SystemComment Extra StdErr StdIn StdOut"
REQUEUED = "SLURM has requeued the job itself"
HERE = os.path.dirname(os.path.abspath(__file__))
# No bytes in paths or in the output of commands may end the job, even if the locale is
# C.
TEXT = {"encoding": sys.getfilesystemencoding(), "errors": "surrogateescape"}
# RUN/job.json: the job and its number of restarts when the file was written; failures
# in a row without a new checkpoint; the step of the newest checkpoint; how often a
# checkpoint of repeated steps ended such a row of failures; the last failure; the nodes
# that the job has excluded by itself
JOB = {
    "job": "",
    "restart": 0,
    "failures": 0,
    "step": -1,
    "again": 0,
    "reason": "",
    "excluded": [],
}


# The next state and the reason for it; the exit status if this state is END or GIVE_UP;
# the seconds to wait if this state is REQUEUE.
Outcome = collections.namedtuple("Outcome", "state reason status pause")
Outcome.__new__.__defaults__ = ("", 0, 0)


class Signalled(Exception):
    """The job was asked to stop before it trained."""


class Failure(Exception):
    """An error that makes this start a failure. The message is the reason."""


def check_settings(environment):
    """Return the match of each of ``SETTINGS`` in the environment, by name, or raise
    Failure if one is wrong. ``titan-disp submit`` calls this, too.
    """
    matches = {}
    for name, setting in SETTINGS.items():
        text = environment.get("TITAN_DISP_" + name) or setting.default
        matches[name] = re.match(f"^(?:{setting.pattern})$", text)
        if not matches[name]:
            raise Failure(f"TITAN_DISP_{name} is {text!r}, expected {setting.expected}")
    return matches


def show(text):
    """Print a text in any locale, with escapes if necessary.

    A full disk or a closed pipe must not end the job.
    """
    encoding = sys.stdout.encoding or "ascii"
    with contextlib.suppress(OSError, ValueError):
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def stamped(text):
    time_of_day = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"titan-disp: {time_of_day} {text}"


def say(text):
    show(stamped(text))


def read_json(path, passed_over=OSError):
    """Return the JSON object in a file, or {} if the file has none, or if it cannot be
    read because of an error of the type ``passed_over``.
    """
    content = None
    with contextlib.suppress(passed_over, ValueError), open(path, **TEXT) as file:
        content = json.load(file)
    return content if isinstance(content, dict) else {}


def write(path, text):
    """Write a file atomically."""
    with open(path + ".partial", "w", **TEXT) as file:
        file.write(text)
    os.replace(path + ".partial", path)


def marked(lines, mark):
    """Return the JSON values that follow a mark in lines, and print the lines without a
    mark.

    The rest of a marked line, and JSON that cannot be read, are dropped.
    """
    values = []
    for line in lines:
        before, *texts = line.split(mark)
        if not texts:
            show(before.rstrip("\n"))
        for text in texts:
            with contextlib.suppress(ValueError):
                values.append(json.JSONDecoder().raw_decode(text)[0])
    return values


def seconds_of(limit):
    """Return SLURM's [DAYS-][HOURS:]MINUTES:SECONDS in seconds, or None if it is a word
    such as UNLIMITED.
    """
    numbers = re.findall(r"\d+", limit)
    if not numbers:
        return None
    return sum(unit * int(numbers.pop()) for unit in UNITS[: len(numbers)])


def events(run, start, *names):
    """Return the events with these names that one start has written to events.jsonl, or
    [] if the file cannot be read.
    """
    chosen = []
    path = os.path.join(run, "events.jsonl")
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        for line in file:
            # A killed process may leave an unfinished line, and another program may
            # write any line.
            with contextlib.suppress(ValueError, TypeError, LookupError):
                event = json.loads(line)
                if event["job"] == start and event["event"] in names:
                    chosen.append(event)
    return chosen


def section(run, name):
    """Return a section of the run's config, or {} if it cannot be read."""
    options = read_json(os.path.join(run, "config.json")).get(name)
    return options if isinstance(options, dict) else {}


def newest_checkpoint(run):
    """Return the step of the newest complete checkpoint, or -1 if there is none."""
    folder = str(section(run, "checkpoint").get("folder") or "checkpoint")
    paths = glob.glob(os.path.join(glob.escape(run), folder, "step-*", ".metadata"))
    steps = re.findall(r"(?m)/step-([0-9]+)/[.]metadata$", "\n".join(paths))
    return max(map(int, steps), default=-1)


def of_ranks(run, start, name):
    """Return (node's number, rank's folder, path) of each file with this name that the
    ranks of a start have left in torchrun's log folders.
    """
    paths = glob.glob(
        os.path.join(glob.escape(run), "logs", start, "node-*", "**", name),
        recursive=True,
    )
    return [
        (re.search(r"/node-(\d+)/", path).group(1), path.split(os.sep)[-2], path)
        for path in sorted(paths)
    ]


def first_error(run, start):
    """Return the message of the rank that failed first, and the path of the message's
    file, as one text, or "".

    If that rank lost the connection to another rank, the text also names the ranks
    without a message, because a rank that is killed leaves none.
    """
    errors = []
    paths = [path for _, _, path in of_ranks(run, start, "error.json")]
    for path in paths:
        # A node that died may have left an unfinished file, which must not hide the
        # others.
        with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):
            message = read_json(path)["message"]
            text = message["message"].strip().splitlines()[0]
            when = int(message["extraInfo"]["timestamp"])
            errors.append((when, f"{text} ({path})"))
    _, text = min(errors, default=(0, ""))
    if LOST_PEER.search(text):
        failed = set(map(os.path.dirname, paths))
        silent = [
            f"node {node} rank {rank}"
            for node, rank, path in of_ranks(run, start, "stderr.log")
            if os.path.dirname(path) not in failed
        ]
        if 0 < len(silent) <= NAMED_RANKS:
            text += f". Without a message, perhaps killed: {', '.join(silent)}"
    return text


def stacks(run, start):
    """Return where the code of each silent rank was: "node 0 rank 1: save in
    checkpoint.py:213; …", or "".
    """
    places = []
    for node, rank, path in of_ranks(run, start, "stderr.log"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - (1 << 16)))
            # A dump of Python's faulthandler begins with "Timeout (".
            _, mark, dump = file.read().decode(errors="replace").rpartition("Timeout (")
            # The dump has the newest thread first and the main thread last.
            frame = re.search(
                r'File "(?:[^"]*/)?([^"]*)", line (\d+) in (\S+)',
                dump.rpartition("(most recent call first):")[2],
            )
            if mark and frame:
                name, line, function = frame.groups()
                places.append(f"node {node} rank {rank}: {function} in {name}:{line}")
    return "; ".join(places)


def gpus_asked(environment):
    """Return the GPUs per node that the job asked for or that its ranks need, or None
    if this is unknown.
    """
    names = ["SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"]
    # Without these two variables, the ranks run on CPUs, or the number of GPUs is
    # unknown.
    if any(name in environment for name in names):
        names.insert(0, "TITAN_DISP_NPROC")
    for name in names:
        # "8" or "h100:8"
        number = re.match(r"^(?:[a-zA-Z][^:]*:)*(\d+)$", environment.get(name, ""))
        if number:
            return int(number.group(1))
    return None


def judge_nodes(expected, reports, asked):
    """Return {node: problems} of the ``expected`` nodes that cannot train.

    ``reports``: {node: report} of the nodes that answered. ``asked``: the result of
    ``gpus_asked``.
    """
    counts = {node: len(report.get("gpus", [])) for node, report in reports.items()}
    by_size = sorted(counts.values(), reverse=True)
    usual = max(by_size, key=by_size.count, default=0)
    judged = {}
    for node in expected:
        if node not in reports:
            judged[node] = ["it did not answer"]
            continue
        problems = list(reports[node].get("problems", []))
        visible = f"the number of visible GPUs is {counts[node]}"
        if asked is not None and counts[node] < asked:
            problems.append(f"{visible}, expected {asked}")
        elif counts[node] != usual:
            problems.append(f"{visible}, but most nodes have {usual}")
        if problems:
            judged[node] = problems
    return judged


def within(seconds, function, default=None):
    """Return what a function returns, or ``default`` if it takes longer than
    ``seconds``. Raises what the function raises.
    """
    # No signal ends a call to a file system that hangs, so the function runs in a
    # thread, which may be left behind.
    future = concurrent.futures.Future()

    def resolve():
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=resolve, daemon=True).start()
    done, _ = concurrent.futures.wait([future], seconds)
    return future.result() if done else default


def task_of_array(path, environment):
    """Return CONFIG and overrides of this task of an array, which are its point in a
    sweep's points.json. Raises Failure if there is no such point.
    """
    number = environment.get("SLURM_ARRAY_TASK_ID", "")
    try:
        with open(path, encoding="utf-8") as file:
            return [
                str(word) for word in json.load(file)["points"][int(number)]["argv"]
            ]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise Failure(
            f"task {number!r} of the array has no point in {path}: {error!r}"
        ) from error


def is_free(port):
    """Return whether a process can listen on a port of this node."""
    with socket.socket() as probe:
        # Connections that an ended process has left do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("", port))
            return True
    return False


def kill_group(process):
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


class Supervisor:
    """One job until it ends or is requeued.

    ``argv``: CONFIG and overrides. ``signals``, ``pointer``: the paths of the files
    SIGNALS and POINTER (see above). ``here``: the folder of the scripts.
    """

    def __init__(self, argv, signals, pointer, environment, of_array=False, here=HERE):
        self.argv = list(argv)
        self.signals = signals
        self.pointer = pointer
        self.environment = dict(environment)
        self.job = self.environment["SLURM_JOB_ID"]
        self.restart = int(self.environment.get("SLURM_RESTART_COUNT") or 0)
        # The name of this job in SLURM's commands. One task of an array has the same
        # number as the whole array, and this number would mean all tasks. (A job that a
        # task has submitted inherits these variables, but is not a task.)
        self.address = self.job
        if of_array:
            task = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}"
            self.address = task.format(**self.environment)
        self._read_settings()
        self.here = here
        self.run = ""
        self.launch = {}
        self._read_launch(os.path.dirname(here))
        self.heard = []  # the signals that this process received itself
        self.fields = {}  # the job's fields, from scontrol
        self.hosts = []  # the job's nodes
        # the nodes that SLURM called down after a failed start: the job goes on without
        # them
        self.dropped = set()
        self.starts = 0
        self.trained = False
        # seconds between two looks at signals, heartbeat and step
        self.pause = 0.5
        # seconds between calls of scontrol, as slurmctld may be busy or failing over
        self.requeue_pauses = (1, 2, 4, 8, 16)
        # seconds that a step may take to end
        self.kill_wait = 60.0
        # seconds that SLURM may take to end this script after a requeue
        self.last_wait = 60.0
        # seconds without a heartbeat while Python and torchrun start or end
        self.quiet = 1800.0
        # seconds that reading or writing a small file of the run folder may take
        self.patience = 20.0
        self.grace = 5.0  # seconds in which the ranks write where their code is
        self.begin()

    def _read_settings(self):
        """Read and check the variables that pretrain.sbatch lists. Raise Failure if one
        is wrong.
        """
        matches = check_settings(self.environment)
        self.retries = re.findall(ITEM, matches["RETRIES"].group())
        self.spares = int(matches["SPARES"].group())
        seconds = float(matches["CHECK_SECONDS"].group())
        self.check_seconds = seconds or 600.0
        self.checks_nodes = seconds > 0
        endpoint = matches["ENDPOINT"]
        self.head, self.port = endpoint.groups()
        try:
            self.srun_args = shlex.split(self._setting("SRUN_ARGS"))
        except ValueError as error:
            raise Failure(
                f"TITAN_DISP_SRUN_ARGS cannot be split into words: {error}"
            ) from error

    def begin(self):
        """Begin a start: at the beginning of the job, or after a failure within it."""
        # SLURM may give a new job the number of an old one, if SLURM's count has begun
        # anew. The random digits distinguish the starts.
        self.start = f"{self.job}.{self.restart}.{os.urandom(3).hex()}"
        self.environment["TITAN_DISP_START"] = self.start
        self.starts += 1
        self.used = []  # the nodes that train
        self.status = None  # srun's exit status, once training has ended
        self.stalled = ""  # why this process ended training
        self.beat = {}  # the newest heartbeat
        self.waits_for = ""  # which rank the others wait for, from the heartbeat
        self.beat_time = 0.0  # when this heartbeat, or none, was first seen

    def _read_launch(self, folder):
        """Read the run folder, CONFIG and overrides from a folder, if it is a launch
        folder (cluster/freeze.py).
        """
        if re.search(r"/launch/(\d+[.]\d+[.][0-9a-f]{6}|\d{8}-\d{6}-\d+)$", folder):
            # If this raises an error, the batch script requeues the job.
            with open(os.path.join(folder, "launch.json"), **TEXT) as file:
                self.launch = json.load(file)
            self.argv = self.launch["argv"]
            self.run = self.launch["run"]
            self.here = os.path.join(folder, "slurm")

    @property
    def lead(self):
        """Seconds before the time limit at which SLURM signals the job, from the options
        of sbatch (in launch.json) or from sbatch's variable.
        """
        options = [self.environment.get("SBATCH_SIGNAL", "")]
        options += self.launch.get("sbatch", [])
        seconds = re.findall(r"(?m)^(?:--signal=)?[\w:]+@(\d+)$", "\n".join(options))
        return int(([LEAD] + seconds)[-1]) or 1

    def file(self, *names):
        return os.path.join(self.run, *names)

    def _setting(self, name, default=""):
        return self.environment.get("TITAN_DISP_" + name) or default

    # ---- the cluster's commands

    def call(self, *command, loud=False):
        """Run a quick command, and return (status, stdout). The status is 127 if the
        command cannot run or takes a minute. The stdout is "" unless the status is 0.
        """
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=None if loud else subprocess.DEVNULL,
                env=self.environment,
                timeout=60,
                **TEXT,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            say(f"{command[0]}: {error}")
            return 127, ""
        return done.returncode, "" if done.returncode else done.stdout

    def insist(self, *command, tries=6):
        """Run a quick command until its status is 0, because slurmctld may be busy or
        failing over. Return what ``call`` returns.
        """
        for pause in ((0,) + self.requeue_pauses)[:tries]:
            time.sleep(pause)
            status, text = self.call(*command)
            if status == 0:
                break
        return status, text

    def show_job(self):
        """Return the fields of ``scontrol show job``, or the last known ones if
        slurmctld does not answer.
        """
        _, text = self.insist("scontrol", "show", "job", self.address, tries=3)
        fields = {}
        for line in text.replace(" JobName=", "\nJobName=", 1).splitlines():
            if line.strip().partition("=")[0] not in WHOLE_LINES.split():
                fields.update(re.findall(r"(?:^|(?<=\s))([A-Za-z][\w:/]*)=(\S*)", line))
        self.fields = fields or self.fields
        return self.fields

    def time_left(self, unknown=float("inf")):
        """Return the seconds until the job's time limit: infinity if it has none, and
        ``unknown`` if SLURM does not answer.
        """
        text = self.squeue("--format=%L")
        seconds = seconds_of(text)
        if seconds is not None:
            return seconds
        # INVALID is SLURM's word for a time below zero.
        return {"UNLIMITED": float("inf"), "INVALID": 0}.get(text, unknown)

    def squeue(self, *options):
        """Return the output of squeue about this job, or "" without an answer."""
        command = ("squeue", "--noheader", "--job=" + self.address)
        _, text = self.call(*command, *options)
        return text.strip()

    def requeued_already(self):
        """Return whether SLURM has requeued this job, or even started it again, since
        this start began.
        """
        restarts = self.show_job().get("Restarts", "")
        return restarts.isdigit() and int(restarts) > self.restart

    def hear(self, number, _):
        self.heard.append(signal.Signals(number).name[3:])  # without SIG

    def signalled(self):
        """Return all signals that the batch script or this process received, in
        order.
        """
        names = []
        with contextlib.suppress(OSError), open(self.signals) as file:
            names = file.read().split()
        return names + self.heard

    def hostnames(self, names):
        """Return the names of the nodes that SLURM writes in a short form, such as
        gpu[01-80]. Raises Failure if scontrol fails.
        """
        status, text = self.insist("scontrol", "show", "hostnames", names)
        if status:
            raise Failure(f"scontrol show hostnames {names} failed (status {status})")
        return text.split()

    def nodes(self):
        """Return the job's nodes in SLURM's order, without the ``dropped`` ones."""
        self.hosts = self.hosts or self.hostnames(
            self.environment["SLURM_JOB_NODELIST"]
        )
        return [node for node in self.hosts if node not in self.dropped]

    def needed(self):
        """Return how many nodes train: the number of the job's nodes minus its spares."""
        return int(self.environment["SLURM_NNODES"]) - self.spares

    def begin_process(self, command, **options):
        return subprocess.Popen(
            command, env=self.environment, start_new_session=True, **options
        )

    def begin_step(self, command, nodes=None, kill=True, **options):
        """Start a command on these nodes, or on all nodes, with srun. There is one task on
        each node, with all memory and cores of the node.
        """
        # --cpus-per-task would be one number for all nodes. It would be too large for
        # some nodes, and too small to use all cores of others.
        chosen = []
        if nodes not in (None, self.hosts):
            chosen = [
                f"--nodes={len(nodes)}",
                f"--ntasks={len(nodes)}",
                "--nodelist=" + ",".join(nodes),
            ]
        srun = self.srun(*chosen, "--ntasks-per-node=1", f"--kill-on-bad-exit={kill:d}")
        return self.begin_process(srun + command, **options)

    def srun(self, *arguments):
        return ["srun", *arguments, "--mem=0", "--cpu-bind=none", *self.srun_args]

    def script(self, name, *arguments):
        return ["bash", os.path.join(self.here, name), *arguments]

    def end_step(self, process):
        """Kill all steps of this job, whose processes may hang, and then srun if it has
        not ended.
        """
        steps = self.squeue("--steps", "--format=%i")
        # without .batch, which is this process
        for name in re.findall(r"(?m)^\s*(\d+(?:_\d+)?\.\d+)\s*$", steps):
            self.call("scancel", "--signal=KILL", name)
        process.terminate()  # srun forwards the signal to the tasks
        try:
            process.wait(self.kill_wait)
        except subprocess.TimeoutExpired:
            process.kill()

    # ---- states

    def check_time_limit(self):
        """Return the first state, or the end if the time limit is so short that no
        start could train.
        """
        problem = ""
        limit = seconds_of(self.show_job().get("TimeLimit", ""))
        if limit is not None and limit <= self.lead:
            problem = (
                f"the time limit is {limit} s, and SLURM signals the job {self.lead} s "
                "before it, so every start would end before it has trained. Ask "
                "for a longer --time, or for a later signal with "
                "SBATCH_SIGNAL=B:USR1@SECONDS"
            )
        elif self.needed() < 1:
            problem = (
                f"TITAN_DISP_SPARES is {self.spares}, and no node is left to train"
            )
        if problem:
            return Outcome(END, problem, 2)
        nodes = self.environment["SLURM_JOB_NODELIST"]
        return Outcome(UNPACK, f"start {self.start} on {nodes}")

    def unpack(self):
        """Unpack the environment's archive, if there is one, on every node's own
        disk.
        """
        archive = self._setting("ENV_ARCHIVE")
        if not archive:
            return Outcome(FREEZE, "the environment is used where it is")
        # Nobody can guess the name and create the folder before this job does.
        local = os.path.join(self._setting("LOCAL", "/tmp"), "titan-disp-" + self.start)
        say(f"environment: {archive} to {local} on every node")
        tar = local + ".tar"
        copying = self.begin_process(["sbcast", "--force", archive, tar])
        _, status = self._await(copying, kill_group)
        if status == 0:
            unpacking = self.begin_step(self.script("unpack.sh", tar))
            _, status = self._await(unpacking, self.end_step)
        if status != 0:
            return self.count_failure(
                f"the environment {archive} could not be unpacked on every node"
            )
        self.environment["TITAN_DISP_PYTHON"] = local + "/bin/python"
        return Outcome(FREEZE, "the environment is on every node")

    def freeze(self):
        """Write what this job runs to a launch folder (cluster/freeze.py), unless
        ``titan-disp submit`` has done so.
        """
        if not self.launch:
            folders, problem = self._ask(
                "freeze", "--name", self.start, "--job.config_file", *self.argv
            )
            if not problem:
                problem = self._use_launch(folders)
            if problem and self.restart > 0:  # a file system may be unavailable
                return self.count_failure(problem)
            if problem:
                reason = problem + ". Not requeued: fix it, and submit again"
                return Outcome(END, reason, 2)
        return Outcome(CHECK, f"this job runs {os.path.dirname(self.here)}")

    def _use_launch(self, folders):
        """Continue with the last one of these launch folders, and write its path to the
        file POINTER for a requeued job. Return what is wrong, or "".
        """
        if not folders:
            return "the config could not be read"
        try:
            self._read_launch(folders[-1])
            site = os.path.join(self.here, "site.sh")
            shutil.copyfile(self.environment["TITAN_DISP_SITE"], site)
        # a container may have the run folder under another path
        except OSError as error:
            return f"the launch folder cannot be used on this node: {error}"
        # Without the file POINTER, a requeued job searches the run folder.
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self.pointer), exist_ok=True)
            write(self.pointer, folders[-1])
        return ""

    def check_nodes(self):
        """Let every node check itself within ``check_seconds``. Then choose the nodes
        that train.
        """
        if not self.checks_nodes:
            return Outcome(PREPARE, "the check of the nodes is switched off")
        expected = self.nodes()
        reports, status = self._node_reports(expected)
        problems = judge_nodes(expected, reports, gpus_asked(self.environment))
        blamed = list(problems)
        reason = "; ".join(
            f"node {node}: {', '.join(problems[node])}" for node in sorted(problems)
        )
        if problems and not reports:
            blamed = self._down(expected)
            reason = (
                "the check of the nodes failed as a whole (srun's status "
                f"{status}): no node answered"
            )
            if blamed:
                reason += f"; SLURM says that {', '.join(blamed)} cannot run jobs"
        elif len(problems) > max(1, len(expected) // 4):
            blamed = []
            reason = (
                f"{len(problems)} of {len(expected)} nodes fail their check, which "
                f"counts as a failure of the job and not of the nodes: {reason}"
            )
        elif problems:
            reason = "nodes that cannot train: " + reason
        self._blame(blamed)
        needed = self.needed()
        able = [node for node in expected if node not in problems]
        text = f"{len(able)} of {len(expected)} nodes can train"
        if reason:
            text += f"; {reason}"
        if len(able) < needed:
            return self.count_failure(f"{text}; {needed} are needed")
        self.used = able[:needed]
        return Outcome(PREPARE, text)

    def _down(self, nodes):
        """Return the nodes among these that SLURM itself calls down, drained, failing or
        not responding (*).
        """
        chosen = "--nodes=" + ",".join(nodes)
        _, text = self.call("sinfo", "--noheader", "--Node", chosen, "--format=%N %T")
        return sorted(
            set(re.findall(r"(?m)^(\S+) (?:\S*\*|down\S*|drain\S*|fail\S*)$", text))
        )

    def _node_reports(self, nodes):
        """Return ({node: report}, srun's status).

        If a node hangs, the step is ended, and the node has no report.
        """
        process = self.begin_step(
            self.script("node.sh", "check"),
            nodes,
            kill=False,
            stdout=subprocess.PIPE,
            **TEXT,
        )
        lines, _ = self._await(process, self.end_step)
        reports = {
            report["node"]: report
            for report in marked(lines, NODE_REPORT)
            if isinstance(report, dict) and isinstance(report.get("node"), str)
        }
        with contextlib.suppress(OSError):  # keep the reports for later
            os.makedirs(self.file("nodes"), exist_ok=True)
            write(self.file("nodes", self.start + ".json"), json.dumps(reports))
        return reports, process.returncode

    def _await(self, process, end):
        """Return the lines and the status of a process. After ``check_seconds``, call
        ``end`` with the process. The status is then None. Raises Signalled if a signal
        has come, even if the process has ended.
        """
        lines = []
        reader = threading.Thread(
            target=lambda: lines.extend(process.stdout or ()), daemon=True
        )
        reader.start()
        deadline = time.monotonic() + self.check_seconds
        while (
            process.poll() is None
            and time.monotonic() < deadline
            and not self.signalled()
        ):
            time.sleep(min(self.pause, 0.2))
        status = process.poll()
        if status is None:
            end(process)
        # A process whose file system hangs cannot be ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.kill_wait)
        if self.signalled():
            raise Signalled
        if status is None:
            command = " ".join(process.args)
            say(f"ended, because it took {self.check_seconds:.0f} s: {command}")
        reader.join(5)
        return lines, status

    def _blame(self, nodes):
        """Record that these nodes failed now, unless another job uses the run folder."""
        if nodes and not self.owner():
            times = self._failures_of_nodes()
            for node in nodes:
                times.setdefault(node, []).append(time.time())
            with contextlib.suppress(OSError):
                write(self.file("nodes.json"), json.dumps(times))

    def _failures_of_nodes(self):
        """Return {node: times at which it failed} of the last day. If the clock was set
        back, times of the coming day count as well.
        """
        return {
            node: [when for when in times if abs(time.time() - when) < 86400]
            for node, times in read_json(self.file("nodes.json")).items()
            if isinstance(times, list)
        }

    def bad_nodes(self):
        """Return the nodes that have failed twice within a day."""
        times = self._failures_of_nodes()
        return sorted(node for node in times if len(times[node]) >= 2)

    def _ask(self, task, *arguments):
        """Run a task of node.sh on the first node and print its output. Return the values
        that the task has marked (``LAUNCH``), and what is wrong, or "".
        """
        command = self.script("node.sh", task, *arguments)
        if self.srun_args:  # the interpreter may be in a container that srun starts
            first = "--nodelist=" + self.nodes()[0]
            command = self.srun("--nodes=1", "--ntasks=1", first) + command
        process = self.begin_process(command, stdout=subprocess.PIPE, **TEXT)
        lines, status = self._await(process, kill_group)
        problem = ""
        if status != 0:
            problem = (
                f"the config could not be checked (status {status}); the lines above "
                "say why"
            )
        return marked(lines, LAUNCH), problem

    def prepare(self):
        """Check the config once, rather than on every rank."""
        if self.held():
            stop = self.file("stop")
            reason = (
                f"{stop} exists, so nothing was trained. Remove the file to continue"
            )
            return Outcome(END, reason)
        if self.trained:
            return Outcome(TRAIN, "the config has been checked by the previous start")
        _, problem = self._ask(
            "prepare",
            "--nodes",
            str(self.needed()),
            "--nproc",
            self._setting("NPROC", "gpu"),
            "--job.config_file",
            *self.argv,
        )
        if not problem:
            return Outcome(TRAIN, "the config can start on these nodes")
        # If the run has trained before, its config is right, and the problem may pass.
        # The checkpoint of step 0 is a seed, from before any training.
        first = self.restart == 0 and newest_checkpoint(self.run) < 1
        if first and not self.owner():
            reason = problem + ". Not requeued: fix the config or the environment"
            return Outcome(END, reason, 2)
        return self.count_failure(problem)

    def owner(self):
        """Return another job ("job 6") that holds the run folder's lock (run/lock.py) and
        thus owns its state, or None. SLURM is asked whether that job still runs.
        """
        job = str(read_json(self.file(".lock")).get("job")).split(".")[0]
        if not job.isdigit() or job == self.job:
            return None
        _, state = self.call("squeue", "--noheader", "--job=" + job, "--format=%T")
        return f"job {job}" if state.strip() in ("RUNNING", "SUSPENDED") else None

    def held(self):
        """Return whether a user has asked the run to stop.

        Only a stop file that a job wrote contains the name of a start.
        """
        path = self.file("stop")
        with contextlib.suppress(OSError), open(path, errors="replace") as file:
            return not re.match(r"^\d+\.\d+(\.[0-9a-f]{6})?$", file.read().strip())
        return False

    def ask_to_stop(self):
        """Write the stop file atomically. (An empty file, as a full disk leaves it,
        would look like a user's request, and no later start would train.)
        """
        if self.held() or self.owner():  # a user's file asks for the same
            return
        try:
            write(self.file("stop"), self.start + "\n")
        except OSError as error:
            say(
                f"{self.file('stop')} cannot be written, so the ranks are not asked "
                f"to stop: {error.strerror}"
            )

    def endpoint(self):
        """Return HOST:PORT on the first node that trains, where the ranks of this start
        meet. The port is free on this script's node, which is usually the same node.
        """
        # Two jobs on one node must not use the same port. Tasks of an array have
        # neighbouring numbers. Linux's ephemeral ports begin at 32768.
        number = int(self.job) + 1009 * self.restart + 101 * (self.starts - 1)
        first = int(self.port or 20000 + number % 10000)
        tries = 1 if self.port else 100
        for port in range(first, first + tries):
            if is_free(port):
                return f"{self.head or self.used[0]}:{port}"
        raise Failure(
            f"another process on this node uses port {first}, on which the ranks would "
            "meet (TITAN_DISP_ENDPOINT)"
        )

    def train(self):
        """Run torchrun on every node until torchrun ends, or until the run is silent
        for longer than its heartbeat allows.
        """
        if self.signalled():
            raise Signalled
        self.used = self.used or self.nodes()[: self.needed()]
        self.environment["TITAN_DISP_ENDPOINT"] = self.endpoint()
        # By default (in torch 2.11, always), torchrun gives ranks 30 s after a SIGTERM.
        # Here, they get as much time as SLURM's signal gives the job.
        self.environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(self.lead))
        self.trained = True
        command = self.script(
            "node.sh", "train", self.run, "--job.config_file", *self.argv
        )
        process = self.begin_step(command, self.used)
        self.begin_process(self.script("pack.sh", self.run, self.start))
        self.beat_time = time.monotonic()
        threading.Thread(target=self._follow, args=(process,), daemon=True).start()
        self._watch(process)
        # 137 is the status of a killed srun
        self.status = 137 if process.returncode is None else process.returncode
        return Outcome(DECIDE, f"training ended with status {self.status}")

    def _watch(self, process):
        """Wait for the end of training. After a signal, ask the ranks to stop. End the
        step if the run is silent, or if it still saves when the time limit is near.
        """
        deadline = None
        while process.poll() is None:
            if self.signalled() and deadline is None:
                names = " and ".join(self.signalled())
                say(f"{names} received: asking all ranks to save and stop")
                within(self.patience, self.ask_to_stop)
                # If SLURM lets a job run beyond its time limit, 0 seconds are left.
                remaining = self.time_left(self.lead) or self.lead
                # the last seconds, in which the step is killed and the job requeued
                last = min(45.0, self.lead / 2, remaining / 2)
                deadline = time.monotonic() + remaining - last
            self.stalled = self.silence()
            if deadline is not None and time.monotonic() > deadline:
                self.kill_wait = min(self.kill_wait, 10.0)
                self.stalled = (
                    f"{last:.0f} s before the time limit, the last save had not ended. "
                    "Give it more time, with SBATCH_SIGNAL=B:USR1@SECONDS"
                )
            if self.stalled:
                say(f"{self.stalled}; the step is ended")
                self.end_step(process)
                return
            time.sleep(self.pause)

    def _follow(self, process):
        """Read the heartbeat of rank 0 (run/liveness.py) while a process runs."""
        # This runs in a thread, which hangs if the file system does. The run is then
        # silent, which is the only sign of such a hang.
        while process.poll() is None:
            beat = read_json(self.file("heartbeat.json"))
            if beat:  # a rank that fails deletes the file
                self.waits_for = str(beat.pop("waits_for", ""))
            if beat != self.beat:
                # The file's own time is not used, because the file server's clock set
                # it.
                self.beat_time = time.monotonic()
                self.beat = beat
            time.sleep(self.pause)

    def silence(self):
        """Return why the run counts as stuck, or ""."""
        silent = time.monotonic() - self.beat_time
        allowed = self.beat.get("allowed_seconds")
        doing = f"at step {self.beat.get('step')} ({self.beat.get('doing')})"
        current = self.beat.get("start") == self.start
        if not (current and isinstance(allowed, (int, float))):
            allowed = self.quiet
            doing = "at its start or end"
        if silent <= allowed + self.grace:
            return ""
        return (
            f"rank 0 has been silent for {silent:.0f} s {doing}, and {allowed:.0f} s "
            "are allowed"
        )

    def decide(self):
        """Choose the next state by what this start has written to the run folder."""
        ends = events(self.run, self.start, "complete", "stop", "refused")
        last = ends[-1] if ends else {}
        name = last.get("event")
        signals = self.signalled()
        if name == "complete":
            self.forget()
            return Outcome(END, f"the run is complete: step {last['step']}")
        # Requeuing a second time would fail, or end the next start.
        if self.requeued_already():
            return Outcome(END, REQUEUED)
        preempted = self.fields.get("PreemptTime", "None") != "None"
        if "TERM" in signals and not preempted and self._cancelled():
            return Outcome(END, "the job was cancelled")
        if name == "refused":
            reason = last["reason"]
            text = f"the run refused to start: {reason}. Not requeued: fix it, and submit again"
            return Outcome(END, text, 2)
        if name == "stop":
            return self._stopped(last)
        if self.status is None:
            text = f"asked to stop ({signals[0]}) before training began"
            # If the time limit leaves no time to train, a requeued job could not train
            # either, so this is a failure. A preemption is not the job's fault.
            if self.trained or signals[0] == "TERM" or preempted:
                return Outcome(REQUEUE, text)
            return self.count_failure(
                f"{text}: SLURM signals a job before its time limit (sbatch --signal). "
                "If the start needs longer, submit again with more --sbatch time"
            )
        return self._failed()

    def _cancelled(self):
        """Return whether a job that got SIGTERM, and was not preempted, was cancelled."""
        # ``decide`` has just asked SLURM. A job at its time limit is COMPLETING, too.
        ended = self.fields.get("JobState") in ("CANCELLED", "COMPLETING")
        return ended and self.fields.get("Reason") != "TimeLimit"

    def _stopped(self, event):
        """Return the outcome of a start that has stopped on request."""
        step = event["step"]
        # RUN/stop, if this job has written it, is not the user's
        asked = " and ".join(self.signalled())
        reason = f"SLURM sent {asked}" if asked else event.get("reason", "")
        options = section(self.run, "checkpoint")
        saves = options.get("enable") is not False and not options.get("load_only")
        asked_by_slurm = self.signalled() or event.get("kind") == "signal"
        if asked_by_slurm and not saves:
            return self.count_failure(
                f"stopped at step {step} ({reason}), and nothing is saved with this "
                "[checkpoint] section"
            )
        self.forget()
        if asked_by_slurm:
            return Outcome(REQUEUE, f"saved at step {step} and stopped: {reason}")
        return Outcome(END, f"stopped at step {step}: {reason}")

    def _failed(self):
        """Return the outcome of a start that has neither completed nor stopped the
        run.
        """
        error = first_error(self.run, self.start)
        other = re.search(r"by another job \(.*SLURM job (\w+)", error)
        # If an earlier start of this same job holds the lock, a later try can succeed.
        if other and other.group(1) != self.job:
            return Outcome(END, f"{error}. Not requeued", 2)
        reason = self.stalled or error
        if self.stalled:
            places = stacks(self.run, self.start)
            reason += f" ({places})" if places else ""
        elif not error:
            reason = (
                f"a rank or a node died without a message (srun's status {self.status})"
                f"; see {self.file('logs', self.start)}"
            )
        if self.waits_for:
            reason += f". Before that, {self.waits_for}"
        signals = self.signalled()
        if signals:
            reason = f"asked to stop ({signals[0]}) but not saved in time; {reason}"
        # No error text says which node is faulty. SLURM may say it here, or the check of
        # the nodes may say it before the next start.
        down = self._down(self.nodes())
        if down:
            reason += f". SLURM says that {', '.join(down)} cannot run jobs"
            self._blame(down)
            self.dropped.update(down)
        return self.count_failure(reason, inside=True)

    def state(self):
        """Return the content of RUN/job.json, with the defaults of ``JOB`` for missing
        fields, and for fields that belong to another job. Raises OSError if the file
        cannot be read, because the failures so far must not be forgotten.
        """
        kept = read_json(self.file("job.json"), passed_over=FileNotFoundError)
        if not kept:  # earlier versions wrote this file
            kept = read_json(self.file("requeue.json"), passed_over=FileNotFoundError)
        sound = [name for name in JOB if isinstance(kept.get(name), type(JOB[name]))]
        state = {**JOB, **{name: kept[name] for name in sound}}
        if state["job"] != self.job:
            state.update(job=self.job, restart=0, excluded=[])
        return state

    def keep(self, state, **changes):
        """Write the state to RUN/job.json with these changes, or raise OSError."""
        text = json.dumps({**state, "restart": self.restart, **changes})
        write(self.file("job.json"), text)

    def forget(self):
        """Forget the failures in a row: the run has made progress or has ended."""
        with contextlib.suppress(OSError):
            self.keep(self.state(), failures=0, step=-1, again=0, reason="")

    def count_failure(self, reason, inside=False):
        """Start again in this job (``inside``), requeue it, or give up after too many
        failures without a new checkpoint.
        """
        if not self.run:  # the config has not been read
            return self.not_counted(reason)
        owner = self.owner()
        if owner:
            text = f"{owner} uses the run folder. Not requeued; {reason}"
            return Outcome(END, text, 2)
        try:
            state = self.state()
        except OSError as error:
            return self.not_counted(f"{reason} (job.json: {error.strerror})")
        step = newest_checkpoint(self.run)
        most = len(self.retries)
        if step > state["step"]:
            state.update(failures=0, step=step, again=0)
        elif state["again"] < most and events(self.run, self.start, "checkpoint"):
            # The start has repeated steps after damaged checkpoints, and saved. That is
            # progress, but a run whose checkpoints are always damaged must end.
            state.update(failures=0, again=state["again"] + 1)
        state["failures"] += 1
        failures = state["failures"]
        try:
            self.keep(state, reason=reason)
        except OSError as error:
            # If failures cannot be counted, each would look like the first one, and this
            # job would start again and again.
            inside = False
            failures += self.restart - state["restart"]
            reason += f" (job.json cannot be written: {error.strerror})"
        checkpoint = "no checkpoint yet"
        if step >= 0:
            checkpoint = f"newest checkpoint: step {step}"
        row = f"in a row without a new checkpoint ({checkpoint})"
        if failures > most:
            self.forget()  # if a user submits the job again, its failures count anew
            text = f"GIVEN UP after failure {failures} {row}. The last one: {reason}"
            return Outcome(GIVE_UP, text, 1)
        text = f"failure {failures} of at most {most + 1} {row}: {reason}"
        # job.json of an earlier job may have a larger number of restarts. ``failures``
        # may then be below 1.
        minutes = self.retries[max(failures - 1, 0)]
        if minutes == "now" and inside and self.can_start_again():
            return Outcome(CHECK, f"{text}. Starting again in this job")
        if minutes == "now":
            minutes = NOW_OR_LATER
        return Outcome(REQUEUE, text, pause=60 * int(minutes))

    def not_counted(self, reason):
        """Requeue after a failure that cannot be counted in the run folder, as long as
        SLURM's restarts permit.
        """
        if self.restart >= MOST_RESTARTS:
            text = f"GIVEN UP after {self.restart} restarts. The last failure: {reason}"
            return Outcome(GIVE_UP, text, 1)
        return Outcome(REQUEUE, reason + " (not counted)", pause=60 * NOW_OR_LATER)

    def can_start_again(self):
        """Return whether this job can train again without being requeued: whether it has
        enough nodes, and time to train.
        """
        return (
            self.trained
            and not self.signalled()
            and len(self.nodes()) >= self.needed()
            and self.time_left() > 2 * self.lead
        )

    # ---- ends

    def requeue(self, pause=0, reason=""):
        """Requeue the job, to start after ``pause`` seconds, and return 1, the exit
        status. SLURM usually ends this script before it returns.
        """
        for wait in self.requeue_pauses:
            # If SLURM has requeued the job already, the call would end the next start.
            if not self.requeued_already():
                status, _ = self.call("scontrol", "requeue", self.address, loud=True)
                # the answer may have been lost
                if status and not self.requeued_already():
                    say(f"scontrol requeue failed (status {status})")
                    time.sleep(wait)
                    continue
            if pause:
                self._update(f"StartTime=now+{pause}")
            say(f"requeued, with a pause of {pause} s if SLURM permits it")
            try:
                within(self.patience, self._exclude)
            except (Failure, OSError) as error:
                say(f"the excluded nodes stay as they are: {error}")
            time.sleep(self.last_wait)
            return 1
        self.conclude(f"NOT REQUEUED: SLURM refused it. Submit again. {reason}")
        return 1

    def _update(self, setting):
        """Change a setting of this job, and return whether SLURM accepted it. SLURM
        permits this only for pending jobs, such as this job after its requeue.
        """
        job = "JobId=" + self.address
        status, _ = self.insist("scontrol", "update", job, setting)
        return status == 0

    def _exclude(self):
        """Exclude the ``bad_nodes`` from the requeued job, and admit again nodes that this
        program excluded before. Nodes that the user excluded stay excluded.
        """
        listed = self.fields.get("ExcNodeList", "")
        excluded = []
        if listed not in ("", "(null)", "None", "N/A"):
            excluded = self.hostnames(listed)
        state = self.state()
        by_user = [node for node in excluded if node not in state["excluded"]]
        added = [node for node in self.bad_nodes() if node not in by_user]
        nodes = ",".join(by_user + added)
        if sorted(by_user + added) == sorted(excluded):
            return
        if not self._update("ExcNodeList=" + nodes):
            raise Failure(f"submit the job again with --exclude={nodes}")
        self.keep(state, excluded=added)

    def conclude(self, text):
        """Write how the job ends to the job's log and to RUN/outcome.txt."""
        say(text)
        with contextlib.suppress(OSError):
            within(self.patience, lambda: self._write_outcome(text))

    def _write_outcome(self, text):
        if self.run and not self.owner():
            text = stamped(f"job {self.address}: {text}\n")
            write(self.file("outcome.txt"), text)

    # ---- the state machine

    def note(self, outcome):
        """Write a transition to the job's log, to RUN/supervisor.jsonl and, if it is an
        end, to RUN/outcome.txt.
        """
        text = f"{outcome.state}: {outcome.reason}"
        if outcome.state in FINAL:
            self.conclude(text)
        else:
            say(text)
        record = {
            "time": datetime.now(timezone.utc).isoformat(),
            "job": self.job,
            "restart": self.restart,
            "start": self.start,
            "state": outcome.state,
            "reason": outcome.reason,
        }
        try:
            within(self.patience, lambda: self._append(json.dumps(record) + "\n"))
        except OSError as error:
            say(f"{self.run} cannot be written: {error}")

    def _append(self, line):
        if self.run:
            os.makedirs(self.run, exist_ok=True)
            with open(self.file("supervisor.jsonl"), "a") as file:
                file.write(line)

    def enter(self, state, method):
        """Run a state and return its outcome. If the state raises an error, or hangs
        because the file system hangs, this counts as a failure.
        """
        limit = 3 * self.check_seconds + 4 * self.kill_wait
        if state == DECIDE:
            limit = self.check_seconds
            if self.signalled():
                limit = min(limit, self.lead / 2)
        try:
            # Training has no time limit, and this process waits for no files meanwhile.
            outcome = method() if state == TRAIN else within(limit, method)
            if outcome is not None:
                return outcome
            reason = f"no answer within {limit:.0f} s; does the file system of {self.run} hang?"
        except Signalled:
            return Outcome(DECIDE, f"{state}: signalled before training")
        # for example a lost file system, which must not end the run for good
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        reason = f"{state}: {reason}"
        return within(
            self.patience, lambda: self.count_failure(reason), self.not_counted(reason)
        )

    def supervise(self):
        """Run the states and return the job's exit status."""
        outcome = self.check_time_limit()
        self.note(outcome)
        while outcome.state not in FINAL:
            if outcome.state == CHECK and self.status is not None:
                self.begin()
            method = getattr(self, outcome.state.replace(" ", "_"))
            outcome = self.enter(outcome.state, method)
            self.note(outcome)
        if outcome.state == REQUEUE:
            return self.requeue(outcome.pause, outcome.reason)
        if outcome.reason != REQUEUED:  # the next start needs the file
            with contextlib.suppress(OSError):
                within(self.patience, lambda: os.remove(self.pointer))
        return outcome.status


def watch(script, supervisor):
    """Requeue the job if the batch script is killed. Otherwise SLURM would end the job
    for good. (SLURM ends this program within moments.)
    """
    while os.getppid() == script:
        time.sleep(0.1)
    text = "the batch script was killed; the job is requeued"
    # SLURM sends TERM before it ends a job.
    if "TERM" in supervisor.signalled() or supervisor.restart >= MOST_RESTARTS:
        text = (
            f"the batch script was killed, after SIGTERM or {MOST_RESTARTS} restarts; "
            "the job is not requeued"
        )
    else:
        supervisor.call("scontrol", "requeue", supervisor.address)
    supervisor.conclude(text)
    os._exit(1)


def main():
    """Run the supervisor with this program's arguments, and return its exit status."""
    signals, pointer, *argv = sys.argv[1:]
    of_array = argv[0] == "--of-array"
    try:
        supervisor = Supervisor(
            argv, signals, pointer, environment=os.environ, of_array=of_array
        )
        if of_array and not supervisor.launch:
            supervisor.argv = task_of_array(argv[1], os.environ)
        if supervisor.launch and supervisor.restart == 0 and supervisor.argv != argv:
            raise Failure(
                f"{HERE} runs {' '.join(supervisor.argv)}. To run something else, submit "
                "slurm/pretrain.sbatch"
            )
    except Failure as error:
        say(f"error: {error}")
        return 2
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, supervisor.hear)
    threading.Thread(target=watch, args=(os.getppid(), supervisor), daemon=True).start()
    return supervisor.supervise()


if __name__ == "__main__":
    # sys.exit would end with 120 if Python cannot flush its output
    os._exit(INTENDED + main())
