#!/usr/bin/env python3
"""Supervise a SLURM job of pretrain.sbatch from its first second to its last (standard library only, Python >= 3.6).

    supervise.py --signals FILE CONFIG [overrides]
    supervise.py --signals FILE --of-array POINTS      # CONFIG and overrides come from a sweep's points.json

One start of the job passes through the states

    unpack -> check nodes -> prepare -> train -> decide -> requeue | end | give up

Each state is a method of ``Supervisor`` that returns an ``Outcome``: the next state and the reason. Every transition is
written as a line to RUN/supervisor.jsonl (time, job, restart, state, reason) and to the job's log.

RUN is the run's folder: docs/run_folder.md lists its files, which this program reads and writes without importing titan_disp.
The decision depends on what the run wrote to RUN/events.jsonl, not on exit statuses, because torchrun and srun each
change these. A start that neither ends the run nor saves and stops counts as a failure in RUN/requeue.json; a new
complete checkpoint resets the count. The batch script writes the names of the signals that it receives to FILE.
"""

import argparse
import contextlib
import fcntl
import functools
import glob
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime, timezone

UNPACK, CHECK, PREPARE, TRAIN, DECIDE = "unpack", "check nodes", "prepare", "train", "decide"
REQUEUE, END, GIVE_UP = "requeue", "end", "give up"
# These marks precede JSON that is meant for this program, on a line of output that may contain anything else.
NODE_REPORT, RUN_FOLDER = "titan-disp-node-report: ", "titan-disp-run-folder: "
IN_USE = 3  # exit status of titan_disp.cluster.job_check if another job uses the run folder
DAY = 86400.0
# These fields of scontrol take a whole line, and may contain anything, even the name of another field.
WHOLE_LINES = ("JobName", "Command", "SubmitLine", "WorkDir", "Comment", "AdminComment", "SystemComment", "Extra")
WHOLE_LINES += ("StdErr", "StdIn", "StdOut")
NOTHING = ("", "(null)", "None", "N/A")  # what scontrol prints for a field that is not set
UNWRITTEN = "cannot be written, so only this log has the count"
# Variables that users set for a job (pretrain.sbatch describes them). A command that submits it again must set them, too,
# but not HEAD, because its first node will be another one.
VARIABLES = (
    *("SITE", "PYTHON", "PREFIX", "SRUN_ARGS", "ENV_ARCHIVE", "NPROC", "PORT", "LOCAL", "CHECK_NODES"),
    *("CHECK_SECONDS", "SIGNAL_SECONDS", "MAX_RETRIES", "RESUBMIT", "HOST_PYTHON"),
)
LEAD = 300  # seconds before the time limit: pretrain.sbatch's --signal
TOP = 1 << 28  # bytes of the largest log that is rewritten to add a line at its top
HERE = os.path.dirname(os.path.abspath(__file__))
# No bytes in paths or in the output of commands may end the job, even if the locale is C.
TEXT = {"encoding": sys.getfilesystemencoding(), "errors": "surrogateescape"}


class Outcome:
    """The next state and the reason for it, and the job's exit status if the state is END."""

    def __init__(self, state, reason="", status=0):
        self.state, self.reason, self.status = state, reason, status

    def __repr__(self):
        return f"Outcome({self.state!r}, {self.reason!r})"

    def __eq__(self, other):
        return (self.state, self.reason) == (other.state, other.reason)


class Failure(Exception):
    """An error that makes this start of the job a failure; the message is the reason."""


def show(text):
    """Print a text in any locale, with escapes if necessary."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:
        print(text.encode("ascii", "backslashreplace").decode(), flush=True)


def say(text):
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    show(f"titan-disp: {now} {text}")


def read_json(path, default):
    """Read the JSON value of a file; return ``default`` if it cannot be read or has another type."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError):
        return default
    return content if isinstance(content, type(default)) else default


def write_json(path, content):
    with open(path + ".partial", "w") as file:
        json.dump(content, file)
    os.replace(path + ".partial", path)


def marked(lines, mark):
    """Return the JSON values after a mark, whatever srun or other nodes print around them; print all other lines."""
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
    """Convert SLURM's time limit, [DAYS-]HOURS:MINUTES:SECONDS, to seconds; None means no limit (UNLIMITED)."""
    found = re.match(r"^(?:(\d+)-)?(\d+):(\d+):(\d+)$", limit)
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def requested_option(argv, name):
    """Return the last value of ``--name value`` or ``--name=value`` among the arguments, or None."""
    value = None
    for i, argument in enumerate(argv):
        if argument == "--" + name and i + 1 < len(argv):
            value = argv[i + 1]
        elif argument.startswith("--" + name + "="):
            value = argument.split("=", 1)[1]
    return value


def run_folder(config, overrides):
    """Find the run folder without importing anything: job.dump_folder in the overrides or the TOML file.

    The answer of TorchTitan, which ``prepare`` asks, takes precedence. This one is for what must be written before that.
    """
    folder = requested_option(overrides, "job.dump_folder") or requested_option(overrides, "job.dump-folder")
    if folder is None:
        with contextlib.suppress(OSError), open(config, **TEXT) as file:
            folder = dict(toml_strings(file)).get("job.dump_folder")
    return os.path.abspath(folder or "./outputs")


def toml_strings(lines):
    """Yield (dotted key, string) of a TOML file; only values on one line and without escapes are found."""
    pair = re.compile(r"""\s*([\w."' -]+?)\s*=\s*(?:"([^"]*)"|'([^']*)'|[^,"'{}]*)\s*,?""")
    section = ""
    for line in lines:
        header = re.match(r"""\s*\[([\w."' -]+)\]""", line)
        section = header.group(1) + "." if header else section
        inline = re.match(r"""\s*([\w."' -]+?)\s*=\s*\{""", line)
        prefix = section + (inline.group(1) + "." if inline else "")
        found = pair.match(line, inline.end() if inline else 0)
        while found:
            if found.lastindex > 1:
                yield re.sub(r"""["' ]""", "", prefix + found.group(1)), found.group(found.lastindex)
            found = pair.match(line, found.end()) if inline else None


def events(run, start):
    """Return the events that one start of the job has written to events.jsonl."""
    found = []
    with contextlib.suppress(OSError), open(os.path.join(run, "events.jsonl"), errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):  # a killed process may leave an unfinished line
                event = json.loads(line)
                if isinstance(event, dict) and event.get("job") == start:
                    found.append(event)
    return found


def checkpoint_options(run):
    """Return the section [checkpoint] of the run's config, or an empty one if it is not known."""
    options = read_json(os.path.join(run, "config.json"), {}).get("checkpoint")
    return options if isinstance(options, dict) else {}


def newest_checkpoint(run):
    """Return the step of the newest complete checkpoint, or -1 if there is none."""
    folder = checkpoint_options(run).get("folder")
    steps = [-1]
    for path in glob.glob(os.path.join(glob.escape(run), str(folder or "checkpoint"), "step-*", ".metadata")):
        name = os.path.basename(os.path.dirname(path))[len("step-") :]
        if name.isdigit():
            steps.append(int(name))
    return max(steps)


def first_error(run, start):
    """Return the message of the rank that failed first, from the files that torchrun's ranks leave, or None."""
    found = []
    for path in glob.glob(os.path.join(glob.escape(run), "logs", start, "**", "error.json"), recursive=True):
        # A node that died may have left an unfinished file, which must not hide the others.
        with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):
            message = read_json(path, {})["message"]
            found.append((int(message["extraInfo"]["timestamp"]), message["message"].strip().splitlines()[0], path))
    if not found:
        return None
    _, text, path = min(found)
    return f"{text} ({path})"


def stacks(run, start):
    """Return where the code of each silent rank was: "node 0 rank 1: save in checkpoint.py:213; …", or ""."""
    places = []
    for path in sorted(
        glob.glob(os.path.join(glob.escape(run), "logs", start, "node-*", "**", "stderr.log"), recursive=True)
    ):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - (1 << 16)))
            _, mark, dump = file.read().decode(errors="replace").rpartition("Timeout (")  # Python's faulthandler
            # The dump has the newest thread first and the main thread last.
            frame = re.search(r'File "([^"]*)", line (\d+) in (\S+)', dump.rpartition("(most recent call first):")[2])
            if mark and frame:
                parts = path.split(os.sep)
                node = next(part for part in parts if part.startswith("node-"))[len("node-") :]
                file_name, line, function = frame.groups()
                places.append(f"node {node} rank {parts[-2]}: {function} in {os.path.basename(file_name)}:{line}")
    return "; ".join(places)


def flight_records(run, since):
    """Return the first file that NCCL's flight recorder has written since then, and how many more there are, or ""."""
    comm = read_json(os.path.join(run, "config.json"), {}).get("comm")
    comm = comm if isinstance(comm, dict) else {}
    folder = os.path.join(run, str(comm.get("save_traces_folder", "comm_traces")))
    prefix = os.path.join(folder, str(comm.get("save_traces_file_prefix", "rank_")))
    found = []
    for path in glob.glob(glob.escape(prefix) + "*"):
        with contextlib.suppress(OSError, ValueError):  # other files
            rank = int(path[len(prefix) :])
            if os.path.getmtime(path) >= since:
                found.append((rank, path))
    return min(found)[1] + (f" and {len(found) - 1} more" if len(found) > 1 else "") if found else ""


def gpus_asked(environment):
    """Return the GPUs per node that the job asked for or that its ranks need, or None if nothing tells."""
    names = ["SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"]
    if any(name in environment for name in names):  # otherwise the ranks run on CPUs, or nothing is known
        names.insert(0, "TITAN_DISP_NPROC")
    for name in names:
        found = re.match(r"^(?:[a-zA-Z][^:]*:)*(\d+)$", environment.get(name, ""))  # "8" or "h100:8"
        if found:
            return int(found.group(1))
    return None


def counted(number, noun, plural=None):
    """Return a number with its noun in the singular or plural, as titan_disp.errors does."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def judge_nodes(expected, reports, asked):
    """Return node -> problems of the nodes that cannot train.

    Args:
        expected: names of the nodes.
        reports: node -> its report.
        asked: GPUs per node that the job asked for, or None.
    """
    problems = {}
    counts = sorted((len(report.get("gpus", [])) for report in reports.values()), reverse=True)
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
            found.append(f"the number of visible GPUs is {count}, but most nodes have {usual}")
        if found:
            problems[node] = found
    return problems


def within(seconds, function, default=None):
    """Return or raise what a function does, or return ``default`` if it takes longer than ``seconds``.

    A call to a file system that hangs also hangs, and no signal ends it. So the function runs in a thread, which may be
    left behind.
    """
    found = []

    def call():
        try:
            found.append((function(), None))
        except Exception as error:
            found.append((default, error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    value, error = found[0] if found else (default, None)
    if error is not None:
        raise error
    return value


def gpus_of(tres):
    """Return the GPUs of a field of scontrol, or None: h100:8 of gres:gpu:h100:8 (before SLURM 23) or gres/gpu=h100:8."""
    parts = [re.match(r"^(?:gres[:/])?gpu[:=](.+)$", part) for part in tres.split(",")]
    return next((part.group(1) for part in parts if part), None)


def task_of_array(path, environment):
    """Return CONFIG and overrides of this task, which are its point in a sweep's points.json.

    Raises:
        Failure: the list cannot be read or has no such point.
    """
    number = environment.get("SLURM_ARRAY_TASK_ID", "")
    try:
        with open(path, encoding="utf-8") as file:
            return [str(word) for word in json.load(file)["points"][int(number)]["argv"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise Failure(
            f"task {number!r} of the array has no point in {path}: {type(error).__name__}: {error}"
        ) from error


def kill_group(process):
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


class Supervisor:
    """One start of a job.

    Attributes:
        argv: CONFIG and overrides.
        signals: the file to which the batch script writes signals.
        environment: the variables as SLURM and the site set them.
        run: the run folder, read from the config's text until ``prepare`` has asked TorchTitan.
    """

    def __init__(self, argv, signals, environment=None, of_array=False):
        self.argv, self.signals = list(argv), signals
        self.environment = dict(os.environ if environment is None else environment)
        names = ["TITAN_DISP_" + name for name in VARIABLES]
        self.given = [(name, self.environment[name]) for name in names if self.environment.get(name)]
        self.job = self.environment["SLURM_JOB_ID"]
        self.restart = int(self.environment.get("SLURM_RESTART_COUNT") or 0)
        self.start = f"{self.job}.{self.restart}"
        # The name of this job in SLURM's commands. One task of an array has the array's own number, which would mean
        # all tasks. (A job that a task has submitted inherits these variables, but is not a task.)
        task = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}"
        self.address = task.format(**self.environment) if of_array else self.job
        self.max_retries = self._whole("MAX_RETRIES", 3, 0)
        self.lead = self._whole("SIGNAL_SECONDS", LEAD, 1)
        self.check_seconds = self._seconds("CHECK_SECONDS", 600)
        # The port is computed from the job's number, so that two jobs on one node do not use the same one. It is below
        # Linux's ephemeral ports (32768).
        self.port = self._whole("PORT", 20000 + int(self.job) % 10000, 1, 65535)
        self.run = run_folder(argv[0], argv[1:])
        self.heard = None  # the signal that this process received itself
        self.fields, self.hosts = {}, []
        self.status = None  # srun's exit status, once training has ended
        # The times of the last transition and of the beginning of training, by the clock of the run folder's file system.
        self.noted = self.began = time.time()
        self.stalled = ""  # why this process ended training
        self.beat = ({}, time.monotonic())  # the newest heartbeat, and when it was first seen
        self.looking = None  # the thread that reads the heartbeat
        self.seen = False  # whether this start has had a heartbeat
        self.grace = 5.0  # seconds in which the ranks write where their code is
        # Seconds between two looks at signals, heartbeat and step; between two calls of scontrol, because slurmctld may
        # be busy or failing over; that a step may take to end; and that SLURM may take to end this script after it has
        # requeued the job.
        self.pause, self.requeue_pauses, self.kill_wait, self.last_wait = 0.5, (1, 2, 4, 8, 16), 60.0, 60.0
        self.quiet = 1800.0  # seconds without a heartbeat while Python and torchrun start or end
        self.patience = 20.0  # seconds that reading or writing a small file of the run folder may take

    def _setting(self, name, default):
        return self.environment.get("TITAN_DISP_" + name) or default

    def _whole(self, name, default, least, most=None):
        text = str(self._setting(name, default))
        if not re.match(r"^[0-9]{1,9}$", text) or not least <= int(text) <= (most or int(text)):
            up_to = f" to {most}" if most else ""
            raise Failure(f"TITAN_DISP_{name} is {text!r}, expected a whole number from {least}{up_to}")
        return int(text)

    def _seconds(self, name, default):
        text = str(self._setting(name, default))
        if not re.match(r"^[0-9]{1,9}([.][0-9]*)?$", text) or float(text) <= 0:
            raise Failure(f"TITAN_DISP_{name} is {text!r}, expected a number above 0")
        return float(text)

    # ---- the cluster's commands

    def call(self, *command, **options):
        """Run a quick command; return (status, stdout), with status 124 after a minute and 127 if it is missing."""
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=None if options.get("loud") else subprocess.DEVNULL,
                env=self.environment,
                timeout=60,
                **TEXT,
            )
        except subprocess.TimeoutExpired:
            return 124, ""
        except OSError as error:
            say(f"{command[0]}: {error}")
            return 127, ""
        return done.returncode, done.stdout

    def show_job(self):
        """Return the fields of ``scontrol show job``, or the last known ones if slurmctld does not answer."""
        status, text = self.call("scontrol", "show", "job", self.address)
        found = {}
        for line in text.replace(" JobName=", "\nJobName=", 1).splitlines() if status == 0 else ():
            name, _, value = line.strip().partition("=")
            if name in WHOLE_LINES:
                found[name] = value
            else:
                found.update(re.findall(r"(?:^|(?<=\s))([A-Za-z][\w:/]*)=(\S*)", line))
        self.fields = found or self.fields
        return self.fields

    def cancelled(self):
        """Tell whether scancel ended the job. A job at its time limit or preempted is COMPLETING too."""
        job = self.show_job()
        preempted = job.get("PreemptTime", "None") != "None"
        return job.get("JobState") in ("CANCELLED", "COMPLETING") and job.get("Reason") != "TimeLimit" and not preempted

    def requeued_already(self):
        """Tell whether SLURM has requeued this job, or even started it again, since this start began."""
        restarts = self.show_job().get("Restarts", "")
        return restarts.isdigit() and int(restarts) > self.restart

    def received(self):
        """Return all signals that the batch script or this process received, in order."""
        names = []
        with contextlib.suppress(OSError), open(self.signals) as file:
            names = file.read().split()
        return names + ([self.heard] if self.heard else [])

    def signalled(self):
        """Return the first signal received, or None."""
        return next(iter(self.received()), None)

    def hostnames(self, names):
        """Return the nodes of a list as SLURM writes it, such as gpu[01-80].

        Raises:
            Failure: SLURM does not answer.
        """
        for pause in (0,) + self.requeue_pauses:
            time.sleep(pause)
            status, text = self.call("scontrol", "show", "hostnames", names)
            if status == 0 and text.split():
                return text.split()
        tries = 1 + len(self.requeue_pauses)
        raise Failure(f"scontrol show hostnames {names} failed {tries} times (status {status})")

    def nodes(self):
        """Return the job's nodes in SLURM's order."""
        self.hosts = self.hosts or self.hostnames(self.environment["SLURM_JOB_NODELIST"])
        return self.hosts

    def python(self):
        """Return the command of the Python that has titan_disp, with its prefix."""
        return shlex.split(self._setting("PREFIX", "")) + [self._setting("PYTHON", "python")]

    def step(self, *command, **options):
        """Start a command on every node by srun.

        Each node gets one task, with all of the node's memory. The task also gets all cores, because no number is asked
        for: --cpus-per-task would be one number for all nodes, which fails on small nodes and leaves cores of large
        ones idle (--exact in srun(1)).
        """
        kill = options.pop("kill_on_bad_exit", True)
        command = self.srun("--ntasks-per-node=1", f"--kill-on-bad-exit={kill:d}") + list(command)
        return subprocess.Popen(command, env=self.environment, start_new_session=True, **options)

    def srun(self, *arguments):
        return ["srun", *arguments, "--mem=0", "--cpu-bind=none"] + shlex.split(self._setting("SRUN_ARGS", ""))

    def node(self, what, *arguments, **options):
        return self.step("bash", os.path.join(HERE, "node.sh"), what, *arguments, **options)

    def end_step(self, process):
        """End a step whose processes may hang: kill them, and then srun if it has not ended."""
        status, text = self.call("squeue", "--noheader", "--steps", "--job=" + self.address, "--format=%i")
        found = re.findall(r"(?m)^\s*(\d+(?:_\d+)?\.\d+)\s*$", text)  # without .batch, which is this process
        steps = found if status == 0 else []
        for name in steps:
            self.call("scancel", "--signal=KILL", name)
        if not steps:
            process.terminate()  # srun forwards it to the tasks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.kill_wait)
            return
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.kill_wait)

    # ---- states

    def check_time_limit(self):
        """End the job if its time limit is so short that no start could train; otherwise return None."""
        limit = seconds_of(self.show_job().get("TimeLimit", ""))
        if limit is not None and limit <= self.lead:
            return Outcome(
                END,
                f"the time limit is {limit} s, and SLURM signals the job {self.lead} s before it, so that every start would "
                "end before it has trained. Ask for a longer --time, or for a later signal with sbatch "
                "--signal=B:USR1@SECONDS and TITAN_DISP_SIGNAL_SECONDS=SECONDS",
                2,
            )
        return None

    def unpack(self):
        """Unpack the environment's archive, if there is one, on every node's own disk."""
        archive = self.environment.get("TITAN_DISP_ENV_ARCHIVE")
        if not archive:
            return Outcome(CHECK, "the environment is used where it is")
        local = os.path.join(self._setting("LOCAL", "/tmp"), "titan-disp-" + self.job)
        say(f"environment: {archive} to {local} on every node")
        tar = local + ".tar"
        copy = functools.partial(subprocess.Popen, ["sbcast", "--force", archive, tar], env=self.environment)
        extract = functools.partial(self.step, "bash", os.path.join(HERE, "unpack.sh"), tar)
        # sbcast is not a step, so it is killed as a process.
        for begin, end in ((copy, subprocess.Popen.kill), (extract, self.end_step)):
            process = begin()
            _, finished = self._await(process, self.check_seconds, end)
            if self.signalled():
                return Outcome(DECIDE, "signalled while the environment was unpacked")
            if process.returncode != 0 or not finished:
                return self.count_failure(f"the environment {archive} could not be unpacked on every node")
        self.environment["TITAN_DISP_PYTHON"] = local + "/bin/python"
        return Outcome(CHECK, "the environment is on every node")

    def check_nodes(self):
        """Ask every node what is wrong with it; the answers must come within ``check_seconds``."""
        if self._setting("CHECK_NODES", "1") == "0":
            return Outcome(PREPARE, "the check of the nodes is switched off")
        expected = self.nodes()
        reports, status = self._node_reports()
        if self.signalled():
            return Outcome(DECIDE, "signalled during the check of the nodes")
        problems = judge_nodes(expected, reports, gpus_asked(self.environment))
        if not problems:
            return Outcome(PREPARE, counted(len(expected), "node") + " can train")
        reason = "; ".join("node {}: {}".format(node, ", ".join(found)) for node, found in sorted(problems.items()))
        if not reports:
            reason = f"the check of the nodes failed as a whole (srun's status {status}): no node answered"
        elif len(problems) > max(1, len(expected) // 4):
            reason = (
                f"{len(problems)} of {len(expected)} nodes fail their check, which counts as the job's failure and not as "
                f"theirs: {reason}"
            )
        else:
            if not self.owner():
                self._remember(problems)
            reason = "nodes that cannot train: " + reason
        return self.count_failure(reason)

    def _node_reports(self):
        """Return (node -> report, srun's status). A node that hangs has no report, and the step is ended."""
        process = self.node("check", kill_on_bad_exit=False, stdout=subprocess.PIPE, **TEXT)
        lines, finished = self._await(process, self.check_seconds, self.end_step)
        if not finished and not self.signalled():
            say(f"the check of the nodes has taken {self.check_seconds:.0f} s and is ended")
        reports = {
            report["node"]: report
            for report in marked(lines, NODE_REPORT)
            if isinstance(report, dict) and isinstance(report.get("node"), str)
        }
        with contextlib.suppress(OSError):  # keep the reports for later
            folder = os.path.join(self.run, "nodes", self.start)
            os.makedirs(folder, exist_ok=True)
            for node, report in reports.items():
                write_json(os.path.join(folder, node + ".json"), report)
        return reports, process.returncode

    def _await(self, process, seconds, end):
        """Read a process's output until it ends; call ``end`` if a signal comes or its time is over.

        Returns:
            The lines of its output, and whether it ended by itself.
        """
        lines = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
        reader.start()
        deadline = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < deadline and not self.signalled():
            time.sleep(min(self.pause, 0.2))
        finished = process.poll() is not None
        if not finished:
            end(process)
        with contextlib.suppress(subprocess.TimeoutExpired):  # nothing ends a process whose file system hangs
            process.wait(self.kill_wait)
        reader.join(5)
        return lines, finished

    def _remember(self, problems):
        """Record which nodes failed."""
        times = self._failures_of_nodes()
        for node in problems:
            times[node] = times.get(node, []) + [time.time()]
        write_json(os.path.join(self.run, "bad_nodes.json"), times)

    def _failures_of_nodes(self):
        """Return node -> the times at which it failed within the last day."""
        times = {}
        for node, failures in read_json(os.path.join(self.run, "bad_nodes.json"), {}).items():
            recent = [t for t in failures if time.time() - t < DAY] if isinstance(failures, list) else []
            if recent:
                times[node] = recent
        return times

    def bad_nodes(self):
        """Return the nodes that have failed twice within a day."""
        return sorted(node for node, times in self._failures_of_nodes().items() if len(times) >= 2)

    def prepare(self):
        """Check the config once, rather than on every rank, and ask TorchTitan for the run's folder.

        If this fails before the run has ever trained, the config or the environment is wrong, and the job ends. Later
        they have worked before, so it is a failure like any other.
        """
        first = self.restart == 0 and newest_checkpoint(self.run) < 1  # 0: a seed checkpoint
        nodes = self.environment.get("SLURM_NNODES", "1")
        command = self.python() + ["-m", "titan_disp.cluster.job_check", "--nodes", nodes]
        if self._setting("SRUN_ARGS", ""):  # the interpreter may be in a container that srun starts
            command = self.srun("--nodes=1", "--ntasks=1", "--nodelist=" + self.nodes()[0]) + command
        command += ["--nproc", self._setting("NPROC", "gpu"), "--job.config_file"] + self.argv
        try:
            process = subprocess.Popen(
                command, env=self.environment, stdout=subprocess.PIPE, start_new_session=True, **TEXT
            )
            lines, finished = self._await(process, self.check_seconds, kill_group)
            status = process.returncode
        except OSError as error:  # there is no such interpreter
            lines, finished, status = [], True, error
        if self.signalled():
            return Outcome(DECIDE, "signalled while the config was checked")
        folders = marked(lines, RUN_FOLDER)
        if status == 0 and folders:
            self.run = folders[-1]
            if self.held():
                return Outcome(END, f"{self.stop_file()} exists, so nothing was trained. Remove the file to continue")
            return Outcome(TRAIN, "the config can start on these nodes")
        if status == IN_USE and self.restart == 0:  # at a restart, an earlier start of this job may still hold it
            return Outcome(END, "{} uses the run folder. Not requeued".format(self.owner() or "another job"), 2)
        if not finished:
            reason = f"the check of the config took more than {self.check_seconds:.0f} s"
        elif status == 0:
            reason = "the check of the config did not print the run folder: "
            reason += "is titan-disp there of the same version as slurm/supervise.py here?"
        else:
            reason = f"the config could not be checked (status {status}); the lines above say why"
        if first:
            return Outcome(END, reason + ". Not requeued: fix the config or the environment", 2)
        return self.count_failure(reason)

    def owner(self):
        """Return which other job holds the run folder's lock (run/folder.py), such as "job 6", or None.

        The state in the folder belongs to that job: its counters and its stop file must not be changed.
        """
        with contextlib.suppress(OSError), open(os.path.join(self.run, ".lock"), "r+", errors="replace") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                job = lock.read().rpartition("SLURM job ")[2].strip()
                return None if job == self.job else f"job {job}"
        return None

    def stop_file(self):
        return os.path.join(self.run, "stop")

    def held(self):
        """Tell whether a user has asked the run to stop. A stop file from a job contains the number of its start."""
        with contextlib.suppress(OSError), open(self.stop_file(), errors="replace") as file:
            return not re.match(r"^\d+\.\d+$", file.read().strip())
        return False

    def ask_to_stop(self):
        """Write the stop file atomically: an empty one, from a full disk, would look like a user's and hold the run."""
        if self.held() or self.owner():  # a user's file asks for the same
            return
        try:
            with open(self.stop_file() + ".partial", "w") as file:
                file.write(self.start + "\n")
            os.replace(self.stop_file() + ".partial", self.stop_file())
        except OSError as error:
            say(f"{self.stop_file()} cannot be written, so the ranks are not asked to stop: {error.strerror}")

    def train(self):
        """Run torchrun on every node until it ends, or until the run is silent for longer than it allows itself."""
        if self.signalled():
            return Outcome(DECIDE, "signalled before training")
        head = self._setting("HEAD", self.nodes()[0])
        self.environment["TITAN_DISP_ENDPOINT"] = f"{head}:{self.port}"
        self.environment["TITAN_DISP_RUN"] = self.run
        # torchrun gives ranks 30 s after a SIGTERM by default. Give them as long as SLURM's signal does.
        self.environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(self.lead))
        self.beat = ({}, time.monotonic())
        self.began = self.noted
        process = self.node("train", "--job.config_file", *self.argv)
        asked = False
        while process.poll() is None:
            if self.signalled() and not asked:
                asked = True
                say(f"{self.signalled()} received: asking all ranks to save and stop")
                within(self.patience, self.ask_to_stop)
            self.stalled = self.silence()
            if self.stalled:
                say(f"{self.stalled}; the step is ended")
                self.end_step(process)
                break
            time.sleep(self.pause)
        self.status = process.returncode if process.returncode is not None else 137  # as if srun had been killed
        return Outcome(DECIDE, f"training ended with status {self.status}")

    def silence(self):
        """Return why the run counts as stuck, or "".

        Rank 0 writes what it does and how long that may take (run/heartbeat.py).

        Only collective operations have their own time-outs; only this check notices a file system that hangs. The time
        since the content last changed is measured with this node's clock, because the file's time is a file server's.
        The file is read in a thread, because the read would hang with the file system.
        """
        if self.looking is None or not self.looking.is_alive():
            self.looking = threading.Thread(target=self._look, daemon=True)
            self.looking.start()
        self.looking.join(self.pause)
        beat, since = self.beat
        silent = time.monotonic() - since
        if beat.get("start") == self.start and isinstance(beat.get("allowed_seconds"), (int, float)):
            self.seen = True
            allowed, doing = beat["allowed_seconds"], "at step {} ({})".format(beat.get("step"), beat.get("doing"))
        elif self.seen or not self._setting("MODULE", ""):  # another module may not write heartbeats
            allowed, doing = self.quiet, "at its end" if self.seen else "at its start"
        else:
            return ""
        if silent > allowed + self.grace:
            return f"rank 0 has been silent for {silent:.0f} s {doing}, and {allowed:.0f} s are allowed"
        return ""

    def _look(self):
        beat = read_json(os.path.join(self.run, "heartbeat.json"), {})
        if beat != self.beat[0]:
            self.beat = (beat, time.monotonic())

    def decide(self):
        """Choose the next state from what this start has left in the run folder."""
        mine = events(self.run, self.start)
        last = next((e for e in reversed(mine) if e.get("event") in ("complete", "stop")), None)
        signalled = self.signalled()
        if last is not None and last["event"] == "complete":
            self.forget()
            return Outcome(END, "the run is complete: step {}".format(last["step"]))
        if self.requeued_already():  # a second requeue would fail, or end the next start
            return Outcome(END, "SLURM has requeued the job itself")
        if "TERM" in self.received() and self.cancelled():
            return Outcome(END, "the job was cancelled")
        if last is not None:
            reason = last.get("reason", "")
            asked, options = signalled or last.get("kind") == "signal", checkpoint_options(self.run)
            if asked and (options.get("enable") is False or options.get("load_only") is True):
                return self.count_failure(
                    "stopped at step {} ({}), and nothing is saved with this [checkpoint] section".format(
                        last["step"], reason
                    )
                )
            self.forget()
            if asked:
                return Outcome(REQUEUE, "saved at step {} and stopped: {}".format(last["step"], reason))
            return Outcome(END, "stopped at step {}: {}".format(last["step"], reason))
        if self.status is None:
            return self.count_failure(f"asked to stop ({signalled}) before training began")
        reason = first_error(self.run, self.start)
        if self.stalled:
            where = stacks(self.run, self.start)
            reason = self.stalled + (f" ({where})" if where else "")
        elif reason is None:
            reason = f"a rank or a node died without a message (srun's status {self.status}); see {self.run}/logs/{self.start}"
        records = flight_records(self.run, self.began)
        if records:
            reason += f"; NCCL's flight recorder: {records}"
        if signalled:
            reason = f"asked to stop ({signalled}) but not saved in time; {reason}"
        return self.count_failure(reason)

    def count_failure(self, reason):
        """Requeue, or give up after ``max_retries`` failures in a row without a new checkpoint.

        A checkpoint is new if its step is beyond all earlier ones. If damaged ones were set aside, a checkpoint that
        this start saved at or below that step is new too, but only ``max_retries`` times: otherwise a run whose
        checkpoints are always damaged would never end.
        """
        owner = self.owner()
        if owner:
            return Outcome(END, f"{owner} uses the run folder. Not requeued; {reason}", 2)
        path = os.path.join(self.run, "requeue.json")
        before = read_json(path, {})
        step = newest_checkpoint(self.run)
        failures, reached, again = before.get("failures", 0), before.get("step", -1), before.get("again", 0)
        if not (isinstance(failures, int) and isinstance(reached, int) and isinstance(again, int)) or step > reached:
            failures, reached, again = 0, step, 0
        elif again < self.max_retries and any(e.get("event") == "checkpoint" for e in events(self.run, self.start)):
            failures, again = 0, again + 1
        failures += 1
        try:
            write_json(path, {"failures": failures, "step": reached, "again": again, "reason": reason})
        except OSError as error:
            failures += self.uncounted()
            reason += f" ({path} {UNWRITTEN}: {error.strerror})"
        where = f"newest checkpoint: step {step}" if step >= 0 else "no checkpoint yet"
        if failures > self.max_retries:
            self.forget()  # a user who submits the job again has fixed something
            return Outcome(
                GIVE_UP,
                f"GIVEN UP after {counted(failures, 'failure')} in a row without a new checkpoint ({where}). The last one: "
                f"{reason}",
            )
        return Outcome(
            REQUEUE,
            f"failure {failures} of at most {counted(self.max_retries, 'retry', 'retries')} without a new checkpoint "
            f"({where}): {reason}",
        )

    def uncounted(self):
        """Return how many of the newest starts in a row have failed and could not write the counter.

        The job's log, which is in another place, has this. Without the log, SLURM's count of restarts is an upper bound.
        """
        try:
            with open(self.show_job().get("StdOut", ""), "rb") as file:
                file.seek(max(0, os.path.getsize(file.name) - (1 << 20)))
                text = file.read().decode(errors="replace")
        except OSError:
            return self.restart
        count = 0
        for line in reversed(re.findall(r"(?m)^titan-disp: \S+ requeue: (.*)$", text)):
            if UNWRITTEN not in line:
                break
            count += 1
        return count

    def forget(self):
        with contextlib.suppress(OSError):
            os.remove(os.path.join(self.run, "requeue.json"))

    # ---- ends

    def requeue(self):
        """Requeue the job; return 0 if another one was submitted, else 1 (SLURM ends a requeued job meanwhile)."""
        for i, pause in enumerate(self.requeue_pauses):
            status = 0
            if not self.requeued_already():  # otherwise the call would end the next start
                status, _ = self.call("scontrol", "requeue", self.address, loud=True)
            if status == 0 or self.requeued_already():  # the answer may have been lost
                say("requeued")
                self._exclude()
                time.sleep(self.last_wait)
                return 1
            say(f"scontrol requeue failed (status {status}), try {i + 1} of {len(self.requeue_pauses)}")
            time.sleep(pause)
        _, names, added = self.exclusion()
        command = self.resubmission(names)
        words = [f"{name}={shlex.quote(value)}" for name, value in self.given] + [shlex.quote(word) for word in command]
        if self._setting("RESUBMIT", "0") == "1":
            self.environment.pop("SLURM_RESTART_COUNT", None)  # SLURM does not set it at a first start
            status, text = self.call(*command, loud=True)
            if status == 0:
                say(f"this site does not permit requeueing: submitted again as {text.strip()}")
                self._remember_excluded("".join(re.findall(r"\d+", text)[:1]), added)
                return 0
        self.on_top(f"NOT REQUEUED: SLURM refused it. Submit the job again: {' '.join(words)}")
        return 1

    def exclusion(self):
        """Return (nodes that the job excludes now, nodes to exclude from now on, those of the latter that have failed).

        Nodes that this program has excluded (RUN/excluded.json) come off the list unless they are still bad. Those of
        the user stay.
        """
        listed = self.fields.get("ExcNodeList", "")
        try:
            now = [] if listed in NOTHING else self.hostnames(listed)
        except Failure as error:
            say(f"{error}: the excluded nodes stay as they are")
            return [listed], [listed], []

        def read():
            return read_json(os.path.join(self.run, "excluded.json"), {}), self.bad_nodes()

        before, bad = within(self.patience, read, ({}, []))
        own = [node for node in now if before.get("job") != self.job or node not in before.get("nodes", ())]
        added = [node for node in bad if node not in own]
        return now, own + added, added

    def _exclude(self):
        now, names, added = self.exclusion()
        if sorted(names) == sorted(now):
            return
        # SLURM changes this list of pending jobs only, and this job is pending from now on.
        for _ in range(8):
            status, _ = self.call("scontrol", "update", "JobId=" + self.address, "ExcNodeList=" + ",".join(names))
            if status == 0:
                self._remember_excluded(self.job, added)
                return
            time.sleep(self.pause)
        say("this SLURM does not let a job exclude nodes: submit it again with --exclude=" + ",".join(names))

    def _remember_excluded(self, job, nodes):
        path = os.path.join(self.run, "excluded.json")
        with contextlib.suppress(OSError):
            within(self.patience, lambda: write_json(path, {"job": job, "nodes": nodes}))

    def resubmission(self, excluded):
        """Return the sbatch command for a job like this one, as scontrol describes it, without these nodes."""
        fields = {name: value for name, value in self.fields.items() if value not in NOTHING}
        per_node = self.environment.get("SLURM_GPUS_PER_NODE")
        gres = gpus_of(fields.get("TresPerNode", ""))
        output = fields.get("StdOut", "")
        options = [
            ("job-name", fields.get("JobName")),
            ("account", fields.get("Account")),
            ("partition", fields.get("Partition")),
            ("qos", fields.get("QOS")),
            ("wckey", fields.get("WCKey", "").lstrip("*")),
            ("nodes", self.environment.get("SLURM_NNODES")),
            ("time", fields.get("TimeLimit")),
            ("time-min", fields.get("TimeMin")),
            ("gpus-per-node", per_node),
            ("gres", "gpu:" + gres if gres and not per_node else None),
            ("gpus", gpus_of(fields.get("TresPerJob", ""))),
            ("gpus-per-socket", gpus_of(fields.get("TresPerSocket", ""))),
            ("gpus-per-task", gpus_of(fields.get("TresPerTask", ""))),
            ("signal", f"B:USR1@{self.lead}" if self.lead != LEAD else None),
            ("constraint", fields.get("Features")),
            ("prefer", fields.get("Prefer")),
            ("reservation", fields.get("Reservation")),
            ("nodelist", fields.get("ReqNodeList")),
            ("exclude", ",".join(excluded)),
            ("licenses", fields.get("Licenses")),
            ("network", fields.get("Network")),
            ("switches", fields.get("Switches")),
            ("contiguous", fields.get("Contiguous") == "1"),
            ("nice", fields.get("Nice") if fields.get("Nice") != "0" else None),
            ("comment", fields.get("Comment")),
            ("mail-type", fields.get("MailType")),
            ("mail-user", fields.get("MailUser")),
            ("chdir", fields.get("WorkDir")),
            ("output", os.path.join(os.path.dirname(output), "%x-%j.out")),
            ("error", fields.get("StdErr") if fields.get("StdErr") != output else None),
        ]
        given = ["--" + name + ("" if value is True else f"={value}") for name, value in options if value]
        return ["sbatch"] + given + ["--export=ALL", os.path.join(HERE, "pretrain.sbatch")] + self.argv

    def on_top(self, text):
        """Put the reason at the top of the job's log. SLURM appends to this file, so it is changed in place.

        A very long log is not changed; the reason is also at its end.
        """
        say(text)
        path = self.fields.get("StdOut") or self.show_job().get("StdOut", "")
        with contextlib.suppress(OSError), open(path, "rb+") as file:  # as bytes, to keep a progress bar's \r
            if os.path.getsize(path) > TOP:
                return
            content = file.read()
            file.seek(0)
            file.write(f"titan-disp: {text}\n\n".encode("utf-8", "surrogateescape") + content)

    # ---- the state machine

    def note(self, outcome):
        """Write a transition to the job's log and to RUN/supervisor.jsonl."""
        say(f"{outcome.state}: {outcome.reason}")
        record = {"time": datetime.now(timezone.utc).isoformat(), "job": self.job, "restart": self.restart}
        record.update(state=outcome.state, reason=outcome.reason)

        def write():
            os.makedirs(self.run, exist_ok=True)
            with open(os.path.join(self.run, "supervisor.jsonl"), "a") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                self.noted = os.fstat(file.fileno()).st_mtime

        try:
            within(self.patience, write)
        except OSError as error:
            say(f"{self.run} cannot be written: {error}")

    def enter(self, state, method):
        """Run a state and return its outcome; it is a failure if the state raises or hangs with the file system."""
        limit = 3 * self.check_seconds + 4 * self.kill_wait
        if state == DECIDE:
            limit = min(self.check_seconds, self.lead / 2) if self.received() else self.check_seconds
        try:
            # Training has no limit, and does not wait for files.
            outcome = method() if state == TRAIN else within(limit, method)
            if outcome is not None:
                return outcome
            reason = f"{state}: no answer within {limit:.0f} s; does the file system of {self.run} hang?"
        except Failure as error:
            reason = f"{state}: {error}"
        except Exception as error:  # such as a lost file system; an error here must not end the run for good
            reason = f"{state}: {type(error).__name__}: {error}"
        return within(self.patience, lambda: self.count_failure(reason), Outcome(REQUEUE, reason + " (not counted)"))

    def supervise(self):
        """Run the states and return the job's exit status."""
        states = {
            UNPACK: self.unpack,
            CHECK: self.check_nodes,
            PREPARE: self.prepare,
            TRAIN: self.train,
            DECIDE: self.decide,
        }
        where = "start {} on {}".format(self.start, self.environment.get("SLURM_JOB_NODELIST"))
        outcome = self.check_time_limit() or Outcome(UNPACK, where)
        self.note(outcome)
        while outcome.state in states:
            outcome = self.enter(outcome.state, states[outcome.state])
            self.note(outcome)
        if outcome.state == REQUEUE:
            return self.requeue()
        if outcome.state == GIVE_UP:
            self.on_top(outcome.reason)
            return 1
        return outcome.status


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(
        "--signals", required=True, help="the file to which the batch script writes the names of signals"
    )
    parser.add_argument("--of-array", action="store_true", help="CONFIG is a sweep's list of points (points.json)")
    parser.add_argument("config")
    args, overrides = parser.parse_known_args()
    try:
        argv = task_of_array(args.config, os.environ) if args.of_array else [args.config] + overrides
        supervisor = Supervisor(argv, args.signals, of_array=args.of_array)
    except Failure as error:
        say(f"error: {error}")
        sys.exit(2)

    def hear(number, frame):
        supervisor.heard = signal.Signals(number).name[len("SIG") :]

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, hear)
    sys.exit(supervisor.supervise())


if __name__ == "__main__":
    main()
