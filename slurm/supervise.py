#!/usr/bin/env python3
"""Supervise a SLURM job of pretrain.sbatch from its first second to its last (standard
library only, Python >= 3.6).

    supervise.py FILE CONFIG [overrides]
    supervise.py FILE --of-array POINTS      # CONFIG and overrides come from a sweep's points.json

A job passes through the states

    unpack -> freeze -> check nodes -> prepare -> train -> decide -> check nodes | requeue | end | give up

The method of ``Supervisor`` with a state's name returns an ``Outcome``: the next state
and the reason. Every transition is written as a line to RUN/supervisor.jsonl and to the
job's log.

RUN is the run's folder: docs/run_folder.md lists its files, which this program reads
and writes without importing titan_disp. The decision depends on what the run wrote to
RUN/events.jsonl, not on exit statuses, because torchrun and srun each change these.
slurm/README.md says what counts as a failure. The batch script writes the names of the
signals that it receives to FILE. In a launch folder (RUN/launch/NAME/slurm), CONFIG and
overrides come from launch.json there.
"""

import collections
import concurrent.futures
import contextlib
import fcntl
import functools
import glob
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from datetime import datetime, timezone

UNPACK = "unpack"
FREEZE = "freeze"
CHECK = "check nodes"
PREPARE = "prepare"
TRAIN = "train"
DECIDE = "decide"
FINAL = REQUEUE, END, GIVE_UP = "requeue", "end", "give up"
# These marks precede JSON that is meant for this program, on a line of output that may
# contain anything else.
NODE_REPORT = "titan-disp-node-report: "
LAUNCH = "titan-disp-launch: "
# exit status of titan_disp.cluster.job_check if another job uses the run folder
IN_USE = 3
# added to the exit status, so that common.sh can tell it from that of a killed program
INTENDED = 64
PAUSES = "2,10,30,60"  # minutes before a requeue, after so many failures in a row
# of a job whose failures cannot be counted (also in the batch scripts)
MOST_RESTARTS = 50
# These fields of scontrol take a whole line, and may contain anything, even the name of
# another field.
WHOLE_LINES = (
    "JobName",
    "Command",
    "SubmitLine",
    "WorkDir",
    "Comment",
    "AdminComment",
    "SystemComment",
    "Extra",
)
WHOLE_LINES += ("StdErr", "StdIn", "StdOut")
REQUEUED = "SLURM has requeued the job itself"
UNKNOWN = "[the options that you gave to sbatch]"
LATER_SIGNAL = "sbatch --signal=B:USR1@SECONDS and TITAN_DISP_SIGNAL_SECONDS=SECONDS"
# A command that submits the job again sets all variables but those of one start.
GIVEN = r"TITAN_DISP_(?!(START|RUN|ENDPOINT|HEAD|NOTIFY|SITE_FILE|LAUNCH_POINTER|PREFIX_WORDS)$)"
# Errors that point to the node on which they were raised.
SICK = r"(?i)\b((CUDA|HIP) error(?!: (device-side assert|out of memory|invalid))|ECC|Xid|(Input/output|Bus) error)\b"
# Errors that come from another rank's death.
PEER = r"(?i)closed by peer|reset by peer|broken pipe|remote process|NCCL error|ncclRemoteError"
TOP = 1 << 28  # bytes of the largest log that is rewritten to add a line at its top
HERE = os.path.dirname(os.path.abspath(__file__))
# No bytes in paths or in the output of commands may end the job, even if the locale is
# C.
TEXT = {"encoding": sys.getfilesystemencoding(), "errors": "surrogateescape"}


# The next state and the reason for it; the exit status if it is END or GIVE_UP; the
# seconds to wait if it is REQUEUE.
Outcome = collections.namedtuple("Outcome", "state reason status pause")
Outcome.__new__.__defaults__ = ("", 0, 0)


class Failure(Exception):
    """An error that makes this start of the job a failure; the message is the
    reason.
    """


def show(text):
    """Print a text in any locale, with escapes if necessary.

    A full disk or a closed pipe must not end the job.
    """
    encoding = sys.stdout.encoding or "ascii"
    with contextlib.suppress(OSError, ValueError):
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def say(text):
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    show(f"titan-disp: {now} {text}")


def read_json(path):
    """Return the JSON object in a file, or an empty one if it cannot be read."""
    content = None
    with contextlib.suppress(OSError, ValueError), open(path, **TEXT) as file:
        content = json.load(file)
    return content if isinstance(content, dict) else {}


def write(path, text):
    """Write a file atomically."""
    with open(path + ".partial", "w", **TEXT) as file:
        file.write(text)
    os.replace(path + ".partial", path)


def marked(lines, mark):
    """Return the JSON values after a mark, whatever srun or other nodes print around
    them; print all other lines.
    """
    values = []
    for line in lines:
        other, *texts = line.split(mark)
        if not texts:
            show(other.rstrip("\n"))
        for text in texts:
            with contextlib.suppress(ValueError):
                values.append(json.JSONDecoder().raw_decode(text)[0])
    return values


def seconds_of(limit):
    """Convert SLURM's [DAYS-][HOURS:]MINUTES:SECONDS to seconds; None means no limit
    (UNLIMITED).
    """
    found = re.match(r"^(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)$", limit)
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def json_lines(path):
    """Return the objects in a file of JSON lines, or none if it cannot be read."""
    found = []
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        for line in file:
            # a killed process may leave an unfinished line
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


def events(run, start, *kinds):
    """Return the events of these kinds that one start has written to events.jsonl."""
    mine = [
        event
        for event in json_lines(os.path.join(run, "events.jsonl"))
        if event.get("job") == start
    ]
    return [event for event in mine if event.get("event") in kinds]


def section(run, name):
    """Return a section of the run's config, or an empty one if it is not known."""
    options = read_json(os.path.join(run, "config.json")).get(name)
    return options if isinstance(options, dict) else {}


def newest_checkpoint(run):
    """Return the step of the newest complete checkpoint, or -1 if there is none."""
    folder = str(section(run, "checkpoint").get("folder") or "checkpoint")
    paths = glob.glob(os.path.join(glob.escape(run), folder, "step-*", ".metadata"))
    steps = [re.search(r"/step-([0-9]+)/[.]metadata$", path) for path in paths]
    return max([-1] + [int(step.group(1)) for step in steps if step])


def of_ranks(run, start, name):
    """Return (node's number, rank's folder, path) of the files that torchrun's ranks
    leave.
    """
    paths = glob.glob(
        os.path.join(glob.escape(run), "logs", start, "node-*", "**", name),
        recursive=True,
    )
    return [
        (int(re.search(r"/node-(\d+)/", path).group(1)), path.split(os.sep)[-2], path)
        for path in sorted(paths)
    ]


def first_error(run, start):
    """Return (message of the rank that failed first, its node's number), or ("",
    None).
    """
    found = []
    for node, _, path in of_ranks(run, start, "error.json"):
        # A node that died may have left an unfinished file, which must not hide the
        # others.
        with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):
            message = read_json(path)["message"]
            text = message["message"].strip().splitlines()[0]
            found.append((int(message["extraInfo"]["timestamp"]), text, path, node))
    if not found:
        return "", None
    _, text, path, node = min(found)
    return f"{text} ({path})", node


def stacks(run, start):
    """Return where the code of each silent rank was: "node 0 rank 1: save in
    checkpoint.py:213; …", or "".
    """
    places = []
    for node, rank, path in of_ranks(run, start, "stderr.log"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - (1 << 16)))
            # Python's faulthandler
            _, mark, dump = file.read().decode(errors="replace").rpartition("Timeout (")
            # The dump has the newest thread first and the main thread last.
            frame = re.search(
                r'File "([^"]*)", line (\d+) in (\S+)',
                dump.rpartition("(most recent call first):")[2],
            )
            if mark and frame:
                name, line, function = frame.groups()
                places.append(
                    f"node {node} rank {rank}: {function} in "
                    f"{os.path.basename(name)}:{line}"
                )
    return "; ".join(places)


def flight_records(run, since):
    """Return rank -> file of what NCCL's flight recorder has written since then."""
    comm = section(run, "comm")
    prefix = os.path.join(run, str(comm.get("save_traces_folder", "comm_traces")))
    prefix = os.path.join(prefix, str(comm.get("save_traces_file_prefix", "rank_")))
    found = {}
    for path in glob.glob(glob.escape(prefix) + "*"):
        with contextlib.suppress(OSError, ValueError):  # other files
            rank = int(path[len(prefix) :])
            if os.path.getmtime(path) >= since:
                found[rank] = path
    return found


def gpus_asked(environment):
    """Return the GPUs per node that the job asked for or that its ranks need, or None
    if nothing tells.
    """
    names = ["SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"]
    # Otherwise the ranks run on CPUs, or nothing is known
    if any(name in environment for name in names):
        names.insert(0, "TITAN_DISP_NPROC")
    # "8" or "h100:8"
    found = [
        re.match(r"^(?:[a-zA-Z][^:]*:)*(\d+)$", environment.get(name, ""))
        for name in names
    ]
    return next((int(number.group(1)) for number in found if number), None)


def counted(number, noun, plural=None):
    """Return a number with its noun in the singular or plural, as titan_disp.errors
    does.
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def judge_nodes(expected, reports, asked):
    """Return node -> problems of the ``expected`` nodes that cannot train.

    ``asked``: GPUs per node, or None.
    """
    problems = {}
    counts = sorted(
        (len(report.get("gpus", [])) for report in reports.values()), reverse=True
    )
    usual = max(counts, key=counts.count) if counts else 0
    for node in expected:
        report = reports.get(node)
        if report is None:
            problems[node] = ["it did not answer"]
            continue
        found = list(report.get("problems", []))
        count = len(report.get("gpus", []))
        if asked is not None and count < asked:
            found.append(f"the number of visible GPUs is {count}, expected {asked}")
        elif count != usual:
            found.append(
                f"the number of visible GPUs is {count}, but most nodes have {usual}"
            )
        if found:
            problems[node] = found
    return problems


def within(seconds, function, default=None):
    """Return or raise what a function does, or return ``default`` if it takes longer
    than ``seconds``.
    """
    # No signal ends a call to a file system that hangs, so the function runs in a
    # thread, which may be left behind.
    future = concurrent.futures.Future()

    def call():
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    done, _ = concurrent.futures.wait([future], seconds)
    return future.result() if done else default


def task_of_array(path, environment):
    """Return CONFIG and overrides of this task, which are its point in a sweep's
    points.json, or raise Failure.
    """
    number = environment.get("SLURM_ARRAY_TASK_ID", "")
    try:
        with open(path, encoding="utf-8") as file:
            return [
                str(word) for word in json.load(file)["points"][int(number)]["argv"]
            ]
    except (OSError, ValueError, LookupError, TypeError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise Failure(
            f"task {number!r} of the array has no point in {path}: {cause}"
        ) from error


def kill_group(process):
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


class Supervisor:
    """One job until it ends or is requeued.

    ``argv``: CONFIG and overrides; ``here``: the folder of the scripts.
    """

    def __init__(self, argv, signals, environment=None, of_array=False, here=HERE):
        self.argv = list(argv)
        self.signals = signals
        self.environment = dict(os.environ if environment is None else environment)
        self.given = [
            item
            for item in sorted(self.environment.items())
            if re.match(GIVEN, item[0]) and item[1]
        ]
        self.job = self.environment["SLURM_JOB_ID"]
        self.restart = int(self.environment.get("SLURM_RESTART_COUNT") or 0)
        # The name of this job in SLURM's commands. One task of an array has the array's
        # own number, which would mean all tasks. (A job that a task has submitted
        # inherits these variables, but is not a task.)
        task = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}"
        self.address = task.format(**self.environment) if of_array else self.job
        self.max_retries = int(self._checked("MAX_RETRIES", 6))
        pauses = self._checked(
            "PAUSES", PAUSES, f"minutes such as {PAUSES}", r"^[0-9]{1,4}(,[0-9]{1,4})*$"
        )
        self.pauses = [int(minutes) for minutes in pauses.split(",")]
        self.spares = int(self._checked("SPARES", 0))
        try:
            self.srun_args = shlex.split(self._setting("SRUN_ARGS"))
        except ValueError as error:
            raise Failure(
                f"TITAN_DISP_SRUN_ARGS cannot be split into words: {error}"
            ) from error
        # of sbatch --signal
        self.lead = int(
            self._checked("SIGNAL_SECONDS", 300, "a whole number from 1", least=1)
        )
        self.check_seconds = float(
            self._checked(
                "CHECK_SECONDS", 600, "a number above 0", r"^\d{1,9}([.]\d*)?$", 1e-9
            )
        )
        self.here = here
        self.run = ""
        self.launch = {}
        self._read_launch(os.path.dirname(here))
        self.heard = None  # the signal that this process received itself
        # of the job: scontrol's fields, its nodes
        self.fields = {}
        self.hosts = []
        self.dropped = set()  # nodes of this job that have failed
        self.messages = []  # threads that tell somebody
        self.starts = 0
        self.trained = False
        # Seconds between two looks at signals, heartbeat and step; between calls of
        # scontrol, because slurmctld may be busy or failing over; that a step may take
        # to end; that SLURM may take to end this script after a requeue.
        self.pause = 0.5
        self.requeue_pauses = (1, 2, 4, 8, 16)
        self.kill_wait = 60.0
        self.last_wait = 60.0
        # seconds without a heartbeat while Python and torchrun start or end
        self.quiet = 1800.0
        # seconds that reading or writing a small file of the run folder may take
        self.patience = 20.0
        self.grace = 5.0  # seconds in which the ranks write where their code is
        # The times of the last transition and of the beginning of training, by the
        # clock of the run folder's file system.
        self.noted = self.began = time.time()
        self.begin()

    def begin(self):
        """Begin a start: at the beginning of the job, or after a failure within it."""
        # The number of a job may come again when SLURM's own count begins anew, but not
        # with these digits.
        self.start = f"{self.job}.{self.restart}.{os.urandom(3).hex()}"
        self.environment["TITAN_DISP_START"] = self.start
        self.starts += 1
        # Two jobs on one node must not use the same port, such as tasks of an array,
        # whose numbers are neighbours. Linux's ephemeral ports begin at 32768.
        own = (
            20000
            + (int(self.job) + 1009 * self.restart + 101 * (self.starts - 1)) % 10000
        )
        self.port = int(
            self._checked(
                "PORT", own, "a whole number from 1 to 65535", least=1, most=65535
            )
        )
        self.used = []  # the nodes that train
        self.status = None  # srun's exit status, once training has ended
        self.stalled = ""  # why this process ended training
        # the first task that srun says has failed: (node, what srun says)
        self.failed = None

    def _read_launch(self, folder):
        """Take the run folder, CONFIG and overrides from a launch folder
        (cluster/freeze.py), if this is one.
        """
        if re.search(r"/launch/(\d+[.]\d+[.][0-9a-f]{6}|\d{8}-\d{6}-\d+)$", folder):
            # The batch script starts again if this fails.
            with open(os.path.join(folder, "launch.json"), **TEXT) as file:
                self.launch = json.load(file)
            self.argv = self.launch["argv"]
            self.run = self.launch["run"]
            self.here = os.path.join(folder, "slurm")

    def file(self, *names):
        return os.path.join(self.run, *names)

    def _setting(self, name, default=""):
        return self.environment.get("TITAN_DISP_" + name) or default

    def _checked(
        self,
        name,
        default,
        expected="a whole number from 0",
        pattern="^[0-9]{1,9}$",
        least=0,
        most=10**9,
    ):
        text = str(self._setting(name, default))
        if not re.match(pattern, text) or not all(
            least <= float(number) <= most for number in text.split(",")
        ):
            raise Failure(f"TITAN_DISP_{name} is {text!r}, expected {expected}")
        return text

    # ---- the cluster's commands

    def call(self, *command, loud=False):
        """Run a quick command; return its status (127 if it cannot run or takes a
        minute) and, if it is 0, its stdout.
        """
        log = None if loud else subprocess.DEVNULL
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.environment,
                timeout=60,
                **TEXT,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            say(f"{command[0]}: {error}")
            return 127, ""
        return done.returncode, "" if done.returncode else done.stdout

    def show_job(self):
        """Return the fields of ``scontrol show job``, or the last known ones if
        slurmctld does not answer.
        """
        for pause in (0,) + self.requeue_pauses[:2]:
            time.sleep(pause)
            _, text = self.call("scontrol", "show", "job", self.address)
            if text:
                break
        found = {}
        for line in text.replace(" JobName=", "\nJobName=", 1).splitlines():
            name, _, value = line.strip().partition("=")
            if name in WHOLE_LINES:
                found[name] = value
            else:
                found.update(re.findall(r"(?:^|(?<=\s))([A-Za-z][\w:/]*)=(\S*)", line))
        self.fields = found or self.fields
        return self.fields

    def time_left(self, unknown=float("inf")):
        """Return the seconds until the job's time limit, without end if it has none;
        ``unknown`` without an answer.
        """
        text = self.call(
            "squeue", "--noheader", "--job=" + self.address, "--format=%L"
        )[1].strip()
        if not text:
            return unknown
        left = seconds_of(text)
        return float("inf") if left is None else left

    def requeued_already(self):
        """Tell whether SLURM has requeued this job, or even started it again, since
        this start began.
        """
        restarts = self.show_job().get("Restarts", "")
        return restarts.isdigit() and int(restarts) > self.restart

    def hear(self, number, _):
        self.heard = signal.Signals(number).name[len("SIG") :]

    def signalled(self):
        """Return all signals that the batch script or this process received, in
        order.
        """
        names = []
        with contextlib.suppress(OSError), open(self.signals) as file:
            names = file.read().split()
        return names + ([self.heard] if self.heard else [])

    def hostnames(self, names):
        """Return the nodes of a list as SLURM writes it, such as gpu[01-80], or raise
        Failure.
        """
        for pause in (0,) + self.requeue_pauses:
            time.sleep(pause)
            status, text = self.call("scontrol", "show", "hostnames", names)
            if text.split():
                return text.split()
        raise Failure(
            f"scontrol show hostnames {names} failed {1 + len(self.requeue_pauses)} "
            f"times (status {status})"
        )

    def nodes(self):
        """Return the job's nodes in SLURM's order, without those that have failed."""
        self.hosts = self.hosts or self.hostnames(
            self.environment["SLURM_JOB_NODELIST"]
        )
        return [node for node in self.hosts if node not in self.dropped]

    def needed(self):
        """Return how many nodes train: those of the job without its spares."""
        return (
            int(
                self.environment.get("SLURM_NNODES")
                or len(self.nodes()) + len(self.dropped)
            )
            - self.spares
        )

    def begin_process(self, command, **options):
        return subprocess.Popen(
            command, env=self.environment, start_new_session=True, **options
        )

    def begin_step(self, command, nodes=None, kill=True, **options):
        """Begin a command on these nodes, or on all, by srun: one task on each with all
        memory and cores.
        """
        # --cpus-per-task would be one number for all nodes: too large for some, and too
        # small for all cores of others.
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
        """End a step whose processes may hang: kill them, and then srun if it has not
        ended.
        """
        _, text = self.call(
            "squeue", "--noheader", "--steps", "--job=" + self.address, "--format=%i"
        )
        # without .batch, which is this process
        steps = re.findall(r"(?m)^\s*(\d+(?:_\d+)?\.\d+)\s*$", text)
        for name in steps:
            self.call("scancel", "--signal=KILL", name)
        if not steps:
            process.terminate()  # srun forwards it to the tasks
        try:
            process.wait(self.kill_wait)
        except subprocess.TimeoutExpired:
            process.kill()

    def tell(self, text):
        """Send a message to TITAN_DISP_NOTIFY, a command or the address of a webhook.

        It neither waits nor fails.
        """
        text = f"titan-disp: job {self.address}, {self.run or self.argv[0]}: {text}"
        target = self._setting("NOTIFY")
        if target:
            self.messages.append(
                threading.Thread(target=self._send, args=(target, text), daemon=True)
            )
            self.messages[-1].start()

    def _send(self, target, text):
        try:
            if re.match("https?://", target):
                body = json.dumps({"text": text}).encode()
                request = urllib.request.Request(
                    target, body, {"Content-Type": "application/json"}
                )
                urllib.request.urlopen(request, timeout=10).close()
            else:
                words = shlex.split(target) + [text]
                subprocess.run(
                    words,
                    stdin=subprocess.DEVNULL,
                    env=self.environment,
                    timeout=60,
                    check=True,
                )
        except Exception as error:
            # the address may hold a secret
            say(f"TITAN_DISP_NOTIFY failed: {type(error).__name__}")

    # ---- states

    def check_time_limit(self):
        """Return the first state, or the end if the time limit is so short that no
        start could train.
        """
        limit = seconds_of(self.show_job().get("TimeLimit", ""))
        if limit is not None and limit <= self.lead:
            reason = f"the time limit is {limit} s, and SLURM signals the job {self.lead} s before it, so that every "
            reason += "start would end before it has trained. Ask for a longer --time, or for a later signal with "
            return Outcome(END, reason + LATER_SIGNAL, 2)
        if self.needed() < 1:
            return Outcome(
                END,
                f"TITAN_DISP_SPARES is {self.spares}, and no node of the job is left to train",
                2,
            )
        return Outcome(
            UNPACK,
            f"start {self.start} on {self.environment.get('SLURM_JOB_NODELIST')}",
        )

    def unpack(self):
        """Unpack the environment's archive, if there is one, on every node's own
        disk.
        """
        archive = self.environment.get("TITAN_DISP_ENV_ARCHIVE")
        if not archive:
            return Outcome(FREEZE, "the environment is used where it is")
        # Nobody can guess the name, and make it before this job does.
        local = os.path.join(self._setting("LOCAL", "/tmp"), "titan-disp-" + self.start)
        say(f"environment: {archive} to {local} on every node")
        tar = local + ".tar"
        _, status = self._await(
            self.begin_process(["sbcast", "--force", archive, tar]), kill_group
        )
        if status == 0 and not self.signalled():
            _, status = self._await(
                self.begin_step(self.script("unpack.sh", tar)), self.end_step
            )
        if self.signalled():
            return Outcome(DECIDE, "signalled while the environment was unpacked")
        if status != 0:
            return self.count_failure(
                f"the environment {archive} could not be unpacked on every node"
            )
        self.environment["TITAN_DISP_PYTHON"] = local + "/bin/python"
        return Outcome(FREEZE, "the environment is on every node")

    def freeze(self):
        """Write what this job runs to RUN/launch, unless ``titan-disp submit`` has done
        so (cluster/freeze.py).
        """
        if not self.launch:
            folders, problem, _ = self._ask(
                "freeze", "--name", self.start, "--job.config_file", *self.argv
            )
            if self.signalled():
                return Outcome(DECIDE, "signalled while the config was read")
            if folders and not problem:
                try:
                    self._read_launch(folders[-1])
                    shutil.copyfile(
                        self.environment["TITAN_DISP_SITE_FILE"],
                        os.path.join(self.here, "site.sh"),
                    )
                # a container may have the run folder under another path
                except OSError as error:
                    problem = f"the launch folder cannot be used on this node: {error}"
            if problem and self.restart > 0:  # a file system may be unavailable
                return self.count_failure(problem)
            if problem or not folders:
                problem = problem or "the config could not be read"
                return Outcome(
                    END, problem + ". Not requeued: fix it, and submit again", 2
                )
            try:
                # which a requeued job reads
                pointer = self.environment["TITAN_DISP_LAUNCH_POINTER"]
                os.makedirs(os.path.dirname(pointer), exist_ok=True)
                write(pointer, folders[-1])
            except (OSError, KeyError) as error:
                say(
                    "a requeue will search the run folder for the launch folder, as "
                    f"its name cannot be kept: {error}"
                )
        return Outcome(CHECK, f"this job runs {self.here[: -len('/slurm')]}")

    def check_nodes(self):
        """Ask every node what is wrong with it; the answers must come within
        ``check_seconds``.
        """
        expected = self.nodes()
        needed = self.needed()
        if self._setting("CHECK_NODES", "1") == "0":
            return Outcome(PREPARE, "the check of the nodes is switched off")
        reports, status = self._node_reports(expected)
        if self.signalled():
            return Outcome(DECIDE, "signalled during the check of the nodes")
        problems = judge_nodes(expected, reports, gpus_asked(self.environment))
        able = [node for node in expected if node not in problems]
        reason = "; ".join(
            "node {}: {}".format(node, ", ".join(found))
            for node, found in sorted(problems.items())
        )
        if problems and not reports:
            down = self._down(expected)
            reason = f"the check of the nodes failed as a whole (srun's status {status}): no node answered"
            reason += (
                f"; SLURM says that {', '.join(down)} cannot run jobs" if down else ""
            )
            problems = {node: [reason] for node in down}
        elif len(problems) > max(1, len(expected) // 4):
            many = f"{len(problems)} of {len(expected)} nodes fail their check"
            reason = (
                f"{many}, which counts as the job's failure and not as theirs: {reason}"
            )
            problems = {}
        elif problems:
            reason = "nodes that cannot train: " + reason
        if problems and not self.owner():
            self._remember(problems)
        if len(able) >= needed:
            self.used = able[:needed]
            spare = f", {len(able) - needed} to spare" if self.spares else ""
            others = f" ({reason})" if reason else ""
            return Outcome(
                PREPARE, f"{counted(needed, 'node')} can train{spare}{others}"
            )
        return self.count_failure(
            reason
            or f"{counted(len(able), 'node')} of the {needed} that train are left"
        )

    def _down(self, nodes):
        """Return those of the nodes that SLURM itself calls down, drained, failing or
        not responding (*).
        """
        _, text = self.call(
            "sinfo",
            "--noheader",
            "--Node",
            "--nodes=" + ",".join(nodes),
            "--format=%N %T",
        )
        return sorted(
            set(re.findall(r"(?m)^(\S+) (?:\S*\*|down\S*|drain\S*|fail\S*)$", text))
        )

    def _node_reports(self, nodes):
        """Return (node -> report, srun's status).

        A node that hangs has no report, and the step is ended.
        """
        process = self.begin_step(
            self.script("node.sh", "check"),
            nodes,
            kill=False,
            stdout=subprocess.PIPE,
            **TEXT,
        )
        lines, status = self._await(process, self.end_step)
        if status is None and not self.signalled():
            say(
                f"the check of the nodes has taken {self.check_seconds:.0f} s and is "
                "ended"
            )
        found = [
            report for report in marked(lines, NODE_REPORT) if isinstance(report, dict)
        ]
        reports = {
            report["node"]: report
            for report in found
            if isinstance(report.get("node"), str)
        }
        with contextlib.suppress(OSError):  # keep the reports for later
            os.makedirs(self.file("nodes", self.start), exist_ok=True)
            for node, report in reports.items():
                write(
                    self.file("nodes", self.start, node + ".json"), json.dumps(report)
                )
        return reports, process.returncode

    def _await(self, process, end):
        """Return a process's lines and status: None if ``end`` ended it, at a signal or
        after ``check_seconds``.
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
        # nothing ends a process whose file system hangs
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.kill_wait)
        reader.join(5)
        return lines, status

    def _remember(self, problems):
        """Record which nodes failed."""
        times = self._failures_of_nodes()
        for node in problems:
            times[node] = times.get(node, []) + [time.time()]
        with contextlib.suppress(OSError):
            write(self.file("bad_nodes.json"), json.dumps(times))

    def _failures_of_nodes(self):
        """Return node -> the times at which it failed within the last day, also if the
        clock was put back.
        """
        kept = read_json(self.file("bad_nodes.json"))
        lists = {node: times for node, times in kept.items() if isinstance(times, list)}
        return {
            node: [t for t in times if abs(time.time() - t) < 86400]
            for node, times in lists.items()
        }

    def bad_nodes(self):
        """Return the nodes that have failed twice within a day."""
        return sorted(
            node for node, times in self._failures_of_nodes().items() if len(times) >= 2
        )

    def _ask(self, what, *arguments):
        """Run node.sh on the first node and print its output; return (what it marks,
        what is wrong or "", its status).
        """
        command = self.script("node.sh", what, *arguments)
        if self.srun_args:  # the interpreter may be in a container that srun starts
            command = (
                self.srun("--nodes=1", "--ntasks=1", "--nodelist=" + self.nodes()[0])
                + command
            )
        lines, status = self._await(
            self.begin_process(command, stdout=subprocess.PIPE, **TEXT), kill_group
        )
        wrong = ""
        if status is None:
            wrong = f"the check of the config took more than {self.check_seconds:.0f} s"
        elif status:
            wrong = f"the config could not be checked (status {status}); the lines above say why"
        return marked(lines, LAUNCH), wrong, status

    def prepare(self):
        """Check the config once, rather than on every rank."""
        nproc = self._setting("NPROC", "gpu")
        given = (
            "--nodes",
            str(self.needed()),
            "--nproc",
            nproc,
            "--job.config_file",
            *self.argv,
        )
        # A start within the job has the config of the former one.
        _, problem, status = (
            ([], "", 0) if self.trained else self._ask("prepare", *given)
        )
        if self.signalled():
            return Outcome(DECIDE, "signalled while the config was checked")
        if not problem:
            if self.held():
                return Outcome(
                    END,
                    f"{self.file('stop')} exists, so nothing was trained. Remove the file to continue",
                )
            return Outcome(TRAIN, "the config can start on these nodes")
        # At a restart, an earlier start of this job may still hold it.
        if status == IN_USE and self.restart == 0:
            return Outcome(
                END,
                "{} uses the run folder. Not requeued".format(
                    self.owner() or "another job"
                ),
                2,
            )
        # What has trained has worked before. The checkpoint of step 0 is a seed.
        if self.restart == 0 and newest_checkpoint(self.run) < 1:
            return Outcome(
                END, problem + ". Not requeued: fix the config or the environment", 2
            )
        return self.count_failure(problem)

    def owner(self):
        """Return which other job holds the run folder's lock (run/folder.py) and thus
        owns its state: "job 6", or None.
        """
        with (
            contextlib.suppress(OSError),
            open(self.file(".lock"), "r+", errors="replace") as lock,
        ):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                job = lock.read().rpartition("SLURM job ")[2].strip()
                return None if job == self.job else f"job {job}"
        return None

    def held(self):
        """Tell whether a user has asked the run to stop.

        A stop file from a job contains the name of its start.
        """
        with (
            contextlib.suppress(OSError),
            open(self.file("stop"), errors="replace") as file,
        ):
            return not re.match(r"^\d+\.\d+(\.[0-9a-f]{6})?$", file.read().strip())
        return False

    def ask_to_stop(self):
        """Write the stop file atomically: an empty one, from a full disk, would look
        like a user's and hold the run.
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

    def train(self):
        """Run torchrun on every node until it ends, or until the run is silent for
        longer than it allows itself.
        """
        if self.signalled():
            return Outcome(DECIDE, "signalled before training")
        self.used = self.used or self.nodes()[: self.needed()]
        self.environment["TITAN_DISP_ENDPOINT"] = (
            f"{self._setting('HEAD', self.used[0])}:{self.port}"
        )
        self.environment["TITAN_DISP_RUN"] = self.run
        # torchrun gives ranks 30 s after a SIGTERM by default (torch 2.11 always). Give
        # them as long as SLURM's signal does.
        self.environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(self.lead))
        # the newest heartbeat, and when it was first seen
        self.beat = ({}, time.monotonic())
        self.looking = None  # the thread that reads the heartbeat
        self.seen = False  # whether this start has had a heartbeat
        # Bytes of events.jsonl when it was last read; whether a step was skipped
        self.read = 0
        self.skips = False
        self.began = self.noted
        self.trained = True
        command = self.script("node.sh", "train", "--job.config_file", *self.argv)
        process = self.begin_step(command, self.used, stderr=subprocess.PIPE, **TEXT)
        reader = threading.Thread(
            target=self._listen, args=(process.stderr,), daemon=True
        )
        reader.start()
        deadline = None  # of the last save, once the ranks have been asked to stop
        while process.poll() is None:
            if self.signalled() and deadline is None:
                say(
                    f"{' and '.join(self.signalled())} received: asking all ranks to "
                    "save and stop"
                )
                within(self.patience, self.ask_to_stop)
                # 0 beyond the limit, where SLURM permits that
                left = self.time_left(self.lead) or self.lead
                # in which the step is killed and the job requeued
                last = min(45.0, self.lead / 2, left / 2)
                deadline = time.monotonic() + left - last
            self.stalled = self.silence()
            if deadline is not None and time.monotonic() > deadline:
                self.kill_wait = min(self.kill_wait, 10.0)
                self.stalled = (
                    f"{last:.0f} s before the time limit, the last save had not ended. "
                )
                self.stalled += f"Give it more time, with {LATER_SIGNAL}"
            if self.stalled:
                say(f"{self.stalled}; the step is ended")
                self.tell(self.stalled)
                self.end_step(process)
                break
            time.sleep(self.pause)
        reader.join(5)
        # as if srun had been killed
        self.status = process.returncode if process.returncode is not None else 137
        return Outcome(DECIDE, f"training ended with status {self.status}")

    def _listen(self, lines):
        """Pass on what srun prints, and keep which task failed first: srun ends the
        others because of that one.
        """
        for line in lines:
            show(line.rstrip("\n"))
            found = re.match(
                r"^srun: error: ([\w.-]+): tasks? [\d,-]+: (.+)$", line.strip()
            )
            if found and self.failed is None:
                self.failed = found.groups()

    def silence(self):
        """Return why the run counts as stuck, or "", from what rank 0 writes of itself
        (run/liveness.py).
        """
        # Collective operations have time-outs, but only this notices a file system that
        # hangs. Then reading hangs, too.
        if self.looking is None or not self.looking.is_alive():
            self.looking = threading.Thread(target=self._look, daemon=True)
            self.looking.start()
        self.looking.join(self.pause)
        beat, since = self.beat
        silent = time.monotonic() - since
        allowed = self.quiet
        doing = "at its end" if self.seen else "at its start"
        if beat.get("start") == self.start and isinstance(
            beat.get("allowed_seconds"), (int, float)
        ):
            self.seen = True
            allowed = beat["allowed_seconds"]
            doing = "at step {} ({})".format(beat.get("step"), beat.get("doing"))
        # another module may not write heartbeats
        elif not self.seen and self._setting("MODULE"):
            return ""
        if silent <= allowed + self.grace:
            return ""
        return f"rank 0 has been silent for {silent:.0f} s {doing}, and {allowed:.0f} s are allowed"

    def _look(self):
        beat = read_json(self.file("heartbeat.json"))
        if beat != self.beat[0]:
            # the file's own time is that of a file server
            self.beat = (beat, time.monotonic())
        with contextlib.suppress(OSError):
            size = os.path.getsize(self.file("events.jsonl"))
            if size == self.read or self.skips:
                return
            self.read = size
            self.skips = bool(events(self.run, self.start, "skip"))
            if self.skips:
                self.tell(
                    "a step was skipped, because its loss or gradient was not finite"
                )

    def decide(self):
        """Choose the next state from what this start has left in the run folder."""
        ends = events(self.run, self.start, "complete", "stop", "refused")
        last = ends[-1] if ends else {}
        kind = last.get("event")
        reason = last.get("reason", "")
        signals = self.signalled()
        if kind == "complete":
            self.forget()
            return Outcome(END, "the run is complete: step {}".format(last["step"]))
        # a second requeue would fail, or end the next start
        if self.requeued_already():
            return Outcome(END, REQUEUED)
        preempted = self.fields.get("PreemptTime", "None") != "None"
        ended = self.fields.get("JobState") in ("CANCELLED", "COMPLETING")
        # SLURM has just been asked. A job that is preempted or at its time limit is
        # COMPLETING, too.
        if (
            "TERM" in signals
            and ended
            and not preempted
            and self.fields.get("Reason") != "TimeLimit"
        ):
            return Outcome(END, "the job was cancelled")
        if kind == "refused":
            return Outcome(
                END,
                f"the run refused to start: {reason}. Not requeued: fix it, and submit again",
                2,
            )
        if kind == "stop":
            asked = signals or last.get("kind") == "signal"
            options = section(self.run, "checkpoint")
            stopped = "stopped at step {}".format(last["step"])
            if asked and (
                options.get("enable") is False or options.get("load_only") is True
            ):
                return self.count_failure(
                    f"{stopped} ({reason}), and nothing is saved with this "
                    "[checkpoint] section"
                )
            self.forget()
            if asked:
                return Outcome(
                    REQUEUE,
                    "saved at step {} and stopped: {}".format(last["step"], reason),
                )
            return Outcome(END, f"{stopped}: {reason}")
        if self.status is None:
            told = f"asked to stop ({signals[0]}) before training began"
            # A time limit that leaves no time to train would come again; a preemption
            # is no fault of the job.
            if self.trained or signals[0] == "TERM" or preempted:
                return Outcome(REQUEUE, told)
            return self.count_failure(told)
        error, number = first_error(self.run, self.start)
        other = re.search(r"by another job \(.*SLURM job (\w+)", error)
        # the locks of some file systems hold within one node only
        if other and other.group(1) != self.job:
            return Outcome(END, f"{error}. Not requeued", 2)
        records = flight_records(self.run, self.began)
        reason = self.stalled or error
        if self.stalled:
            where = stacks(self.run, self.start)
            reason += f" ({where})" if where else ""
        elif not error:
            said = (
                "node {}: {}".format(*self.failed)
                if self.failed
                else f"srun's status {self.status}"
            )
            reason = f"a rank or a node died without a message ({said}); see {self.run}/logs/{self.start}"
        if records:
            more = f" and {len(records) - 1} more" if len(records) > 1 else ""
            reason += f"; NCCL's flight recorder: {records[min(records)]}{more}"
        if signals:
            reason = f"asked to stop ({signals[0]}) but not saved in time; {reason}"
        culprit = self.culprit(error, number, records)
        if culprit and not signals and not self.owner():
            reason += f". This counts against node {culprit}"
            self._remember([culprit])
            if len(self.nodes()) > self.needed():
                self.dropped.add(culprit)
        return self.count_failure(reason, inside=True)

    def culprit(self, error, number, records):
        """Return the node that a failure of training points to, or None."""
        if re.search(SICK, error.rpartition(" (")[0]) and number < len(self.used):
            return self.used[number]
        per_node = gpus_asked(self.environment)
        # a rank that is dead or frozen writes no record of a time-out
        if records and per_node:
            silent = set(range(len(self.used))) - {rank // per_node for rank in records}
            return self.used[silent.pop()] if len(silent) == 1 else None
        if self.stalled or (error and not re.search(PEER, error)):
            return None
        # The others complain of their peer. They may be faster than srun, which names
        # the first task that ends.
        spoke = {node for node, _, _ in of_ranks(self.run, self.start, "error.json")}
        silent = [node for i, node in enumerate(self.used) if i not in spoke]
        if self.failed and self.failed[0] in silent:
            return self.failed[0]
        return silent[0] if spoke and len(silent) == 1 else None

    def count_failure(self, reason, inside=False):
        """Start again in this job (``inside``), requeue it, or give up after too many
        failures without a new checkpoint.
        """
        if not self.run:  # the config has not been read
            return self.not_counted(reason)
        owner = self.owner()
        if owner:
            return Outcome(
                END, f"{owner} uses the run folder. Not requeued; {reason}", 2
            )
        path = self.file("requeue.json")
        before = read_json(path)
        step = newest_checkpoint(self.run)
        failures = before.get("failures", 0)
        reached = before.get("step", -1)
        again = before.get("again", 0)
        if (
            not (
                isinstance(failures, int)
                and isinstance(reached, int)
                and isinstance(again, int)
            )
            or step > reached
        ):
            failures = 0
            reached = step
            again = 0
        elif again < self.max_retries and events(self.run, self.start, "checkpoint"):
            # It repeated steps after damaged checkpoints. A run whose checkpoints are
            # always damaged must end, however.
            failures = 0
            again = again + 1
        failures += 1
        try:
            write(
                path,
                json.dumps(
                    {
                        "failures": failures,
                        "step": reached,
                        "again": again,
                        "reason": reason,
                    }
                ),
            )
        except OSError as error:
            # Otherwise each would be the first, and this job would start again and
            # again
            inside = False
            failures += (
                self.uncounted() if self.restart < MOST_RESTARTS else self.max_retries
            )
            reason += f" ({path} cannot be written: {error.strerror})"
        where = f"newest checkpoint: step {step}" if step >= 0 else "no checkpoint yet"
        if failures > self.max_retries:
            self.forget()  # a user who submits the job again has fixed something
            told = f"GIVEN UP after {counted(failures, 'failure')} in a row without a new checkpoint ({where}). "
            return Outcome(GIVE_UP, f"{told}The last one: {reason}", 1)
        most = counted(self.max_retries, "retry", "retries")
        told = f"failure {failures} of at most {most} without a new checkpoint ({where}): {reason}"
        if inside and failures == 1 and self.can_start_again():
            return Outcome(CHECK, f"{told}. Starting again in this job")
        return Outcome(
            REQUEUE, told, pause=60 * self.pauses[min(failures, len(self.pauses)) - 1]
        )

    def not_counted(self, reason):
        """Requeue after a failure that cannot be counted in the run folder, as long as
        SLURM's restarts permit.
        """
        if self.restart >= MOST_RESTARTS:
            return Outcome(
                GIVE_UP,
                f"GIVEN UP after {self.restart} restarts. The last failure: {reason}",
                1,
            )
        return Outcome(REQUEUE, reason + " (not counted)", pause=60 * self.pauses[0])

    def can_start_again(self):
        """Tell whether this job can train again without being requeued: on its other
        nodes, and with time to train.
        """
        if (
            not self.trained
            or self.signalled()
            or self._setting("RESTART_IN_JOB", "1") == "0"
        ):
            return False
        self.dropped.update(self._down(self.nodes()))
        return len(self.nodes()) >= self.needed() and self.time_left() > 2 * self.lead

    def uncounted(self):
        """Return how often SLURM has restarted the job since this program could last
        write to the run folder.
        """
        lines = json_lines(self.file("supervisor.jsonl"))
        restarts = [
            line["restart"]
            for line in lines
            if line.get("job") == self.job and "restart" in line
        ]
        return self.restart - restarts[-1] if restarts else 0

    def forget(self):
        with contextlib.suppress(OSError):
            os.remove(self.file("requeue.json"))

    # ---- ends

    def requeue(self, pause=0):
        """Requeue the job; return 0 if another one was submitted, else 1 (SLURM ends a
        requeued job meanwhile).
        """
        for i, wait in enumerate(self.requeue_pauses):
            # If SLURM has requeued the job already, the call would end the next start.
            status = (
                0
                if self.requeued_already()
                else self.call("scontrol", "requeue", self.address, loud=True)[0]
            )
            if status == 0 or self.requeued_already():  # the answer may have been lost
                later = pause and self._update(f"StartTime=now+{pause}")
                say(
                    "requeued"
                    + (f", to start in {pause // 60} minutes" if later else "")
                )
                if pause and not later:
                    say("this SLURM does not let a job start later")
                self._exclude()
                time.sleep(self.last_wait)
                return 1
            say(
                f"scontrol requeue failed (status {status}), try {i + 1} of "
                f"{len(self.requeue_pauses)}"
            )
            time.sleep(wait)
        _, names, added = self.exclusion()
        command = self.resubmission(names)
        words = [f"{name}={shlex.quote(value)}" for name, value in self.given] + [
            shlex.quote(word) for word in command
        ]
        if self._setting("RESUBMIT", "0") == "1" and UNKNOWN not in command:
            # SLURM does not set it at a first start
            self.environment.pop("SLURM_RESTART_COUNT", None)
            status, text = self.call(*command, loud=True)
            if status == 0:
                say(
                    "this site does not permit requeueing: submitted again as "
                    f"{text.strip()}"
                )
                self._remember_excluded("".join(re.findall(r"\d+", text)[:1]), added)
                return 0
        self.on_top(
            f"NOT REQUEUED: SLURM refused it. Submit the job again: {' '.join(words)}"
        )
        return 1

    def _update(self, setting):
        """Change a setting of this job, which SLURM permits only for pending jobs: this
        one is pending from now on.
        """
        for _ in range(8):
            if (
                self.call("scontrol", "update", "JobId=" + self.address, setting)[0]
                == 0
            ):
                return True
            time.sleep(self.pause)
        return False

    def exclusion(self):
        """Return (nodes that the job excludes now, nodes to exclude from now on, those
        of the latter that have failed).
        """
        listed = self.fields.get("ExcNodeList", "")
        try:
            now = (
                []
                if listed in ("", "(null)", "None", "N/A")
                else self.hostnames(listed)
            )
        except Failure as error:
            say(f"{error}: the excluded nodes stay as they are")
            return [listed], [listed], []
        before, bad = within(
            self.patience,
            lambda: (read_json(self.file("excluded.json")), self.bad_nodes()),
            ({}, []),
        )
        # Nodes that this program has excluded come off the list unless they are still
        # bad.
        own = [
            node
            for node in now
            if before.get("job") != self.job or node not in before.get("nodes", ())
        ]
        added = [node for node in bad if node not in own]
        return now, own + added, added

    def _exclude(self):
        now, names, added = self.exclusion()
        if sorted(names) == sorted(now):
            return
        if self._update("ExcNodeList=" + ",".join(names)):
            self._remember_excluded(self.job, added)
        else:
            say(
                "this SLURM does not let a job exclude nodes: submit it again with --exclude="
                + ",".join(names)
            )

    def _remember_excluded(self, job, nodes):
        text = json.dumps({"job": job, "nodes": nodes})
        with contextlib.suppress(OSError):
            within(self.patience, lambda: write(self.file("excluded.json"), text))

    def resubmission(self, excluded):
        """Return the sbatch command for a job like this one, without these nodes.

        An array's task becomes its own job.
        """
        line = self.fields.get("SubmitLine", "")
        if not line:  # before 24.05
            sacct = (
                "sacct",
                "--noheader",
                "--allocations",
                "--parsable2",
                "--format=SubmitLine",
            )
            line = self.call(*sacct, "--jobs=" + self.address)[1].strip()
        try:
            line = shlex.split(line)
        except ValueError:
            line = line.split()
        script = next(
            (i for i, word in enumerate(line) if word.endswith(".sbatch")), None
        )
        options = self.launch.get("sbatch")
        if not options:
            known = re.sub(
                r"\0(--array[=\0]|-a\0?)[^\0]*",
                "",
                "".join("\0" + word for word in line[1:script]),
            )
            options = [UNKNOWN] if script is None else known.split("\0")[1:]
        exclude = ["--exclude=" + ",".join(excluded)] if excluded else []
        return [
            "sbatch",
            *options,
            *exclude,
            os.path.join(self.here, "pretrain.sbatch"),
            *self.argv,
        ]

    def on_top(self, text):
        """Put the reason at the top of the job's log, in place because SLURM appends to
        it, and at the end.
        """
        say(text)
        path = self.fields.get("StdOut") or self.show_job().get("StdOut", "")
        # as bytes, to keep a progress bar's \r
        with contextlib.suppress(OSError), open(path, "rb+") as file:
            if os.path.getsize(path) <= TOP:
                content = file.read()
                file.seek(0)
                file.write(
                    f"titan-disp: {text}\n\n".encode("utf-8", "surrogateescape")
                    + content
                )

    # ---- the state machine

    def note(self, outcome):
        """Write a transition to the job's log and to RUN/supervisor.jsonl."""
        text = f"{outcome.state}: {outcome.reason}"
        say(text)
        if outcome.state in FINAL:
            self.tell(text)
        record = {
            "time": datetime.now(timezone.utc).isoformat(),
            "job": self.job,
            "restart": self.restart,
        }
        record.update(start=self.start, state=outcome.state, reason=outcome.reason)
        if self.run:
            try:
                within(self.patience, lambda: self._append(json.dumps(record) + "\n"))
            except OSError as error:
                say(f"{self.run} cannot be written: {error}")

    def _append(self, line):
        os.makedirs(self.run, exist_ok=True)
        with open(self.file("supervisor.jsonl"), "a") as file:
            file.write(line)
            file.flush()
            self.noted = os.fstat(file.fileno()).st_mtime

    def enter(self, state, method):
        """Run a state and return its outcome; it is a failure if the state raises or
        hangs with the file system.
        """
        limit = 3 * self.check_seconds + 4 * self.kill_wait
        if state == DECIDE:
            limit = (
                min(self.check_seconds, self.lead / 2)
                if self.signalled()
                else self.check_seconds
            )
        try:
            # Training has no limit, and does not wait for files.
            outcome = method() if state == TRAIN else within(limit, method)
            if outcome is not None:
                return outcome
            reason = f"{state}: no answer within {limit:.0f} s; does the file system of {self.run} hang?"
        # such as a lost file system; an error here must not end the run for good
        except Exception as error:
            kind = "" if isinstance(error, Failure) else type(error).__name__ + ": "
            reason = f"{state}: {kind}{error}"
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
            outcome = self.enter(
                outcome.state, getattr(self, outcome.state.replace(" ", "_"))
            )
            self.note(outcome)
        if outcome.state == REQUEUE:
            return self.requeue(outcome.pause)
        if outcome.reason != REQUEUED:  # the next start needs the file
            with contextlib.suppress(OSError, KeyError):
                within(
                    self.patience,
                    functools.partial(
                        os.remove, self.environment["TITAN_DISP_LAUNCH_POINTER"]
                    ),
                )
        if outcome.status:
            self.on_top(outcome.reason)
        return outcome.status


def watch(script, supervisor):
    """Requeue the job if the batch script is killed: SLURM then ends the job for good,
    and this program within moments.
    """
    while os.getppid() == script:
        time.sleep(0.1)
    # SLURM sends TERM before it ends a job.
    if "TERM" in supervisor.signalled() or supervisor.restart >= MOST_RESTARTS:
        supervisor.on_top(
            f"the batch script was killed, after SIGTERM or {MOST_RESTARTS} restarts; "
            "the job is not requeued"
        )
    else:
        supervisor.call("scontrol", "requeue", supervisor.address)
        supervisor.on_top("the batch script was killed; the job is requeued")
    os._exit(1)


def main():
    """Run the supervisor with this program's arguments, and return its exit status."""
    signals, *argv = sys.argv[1:]
    of_array = argv[0] == "--of-array"
    try:
        supervisor = Supervisor(argv, signals, of_array=of_array)
        if of_array and not supervisor.launch:
            supervisor.argv = task_of_array(argv[1], os.environ)
        words = supervisor.argv
        if words[0].startswith("-"):
            raise Failure(f"the first argument is {words[0]}, expected CONFIG")
        if supervisor.launch and supervisor.restart == 0 and words != argv:
            raise Failure(
                f"{HERE} runs {' '.join(words)}. To run something else, submit "
                "slurm/pretrain.sbatch"
            )
    except Failure as error:
        say(f"error: {error}")
        return 2
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, supervisor.hear)
    threading.Thread(target=watch, args=(os.getppid(), supervisor), daemon=True).start()
    status = supervisor.supervise()
    for message in supervisor.messages:
        message.join(10)
    return status


if __name__ == "__main__":
    # sys.exit would end with 120 if Python cannot flush its output
    os._exit(INTENDED + main())
