"""``titan-disp train`` starts torchrun on this machine, and ``titan-disp submit``
starts sbatch.
"""

import contextlib
import dataclasses
import difflib
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from titan_disp.checks import check_device, check_inputs, check_ranks
from titan_disp.cluster.freeze import SCRIPTS, freeze
from titan_disp.cluster.plan import make_plan, render
from titan_disp.config.command_options import (
    Machine,
    SlurmOptions,
    SubmitOptions,
    TrainOptions,
    check_least,
)
from titan_disp.config.load import load_config
from titan_disp.config.types import JobConfig
from titan_disp.errors import CheckpointError, ConfigError, Problems, RefusedError
from titan_disp.files import cores
from titan_disp.run import dry
from titan_disp.run.folder import writing
from titan_disp.run.identity import check_identity, of_keys, read_identity
from titan_disp.run.integrity import checkpoints
from titan_disp.run.lock import process_fields
from titan_disp.run.reader import EVENTS, STOP, read_json_lines


@contextlib.contextmanager
def stop_signals(heard: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call ``heard`` at SIGINT, SIGTERM and SIGHUP, but not again within a second of
    the first signal.

    Signals that are ignored stay ignored, as SIGHUP under nohup.
    """
    first = None

    def once(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
        # timeout(1) signals a process and then its group
        elif time.monotonic() - first < 1:
            return
        heard(number, frame)

    with contextlib.ExitStack() as stack:
        # Outside of the main thread, Python forbids signal handlers
        with contextlib.suppress(ValueError):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    former = signal.signal(number, once)
                    stack.callback(signal.signal, number, former)
        yield


def launch(options: TrainOptions) -> int:
    """Check everything in this process, so that an error is printed once, then start
    the ranks.

    Returns 0, the exit status of the first rank that failed, or 128 plus the number of
    the signal that stopped the run.
    """
    check_least(options, nproc=1)
    job_config = load_config(options.argv)
    nproc = options.nproc or torch.accelerator.device_count() or 1
    ranks = nproc
    if dry.is_dry(job_config):
        nproc = 1
        ranks = dry.simulated_ranks()
    check_ranks(job_config, ranks)
    check_device(job_config)
    check_inputs(job_config)
    # torchrun sets one thread per rank. Here the ranks share the machine's cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // nproc)))
    if not sys.stdout.isatty():
        os.environ.setdefault("NO_COLOR", "1")
    with _log_folder(job_config) as logs:
        return _start_ranks(options.argv, job_config, nproc, logs)


@contextlib.contextmanager
def _log_folder(job_config: JobConfig) -> Iterator[str]:
    """Yield the folder of the ranks' logs, which is removed after a dry run."""
    if dry.is_dry(job_config):
        with tempfile.TemporaryDirectory(prefix="titan-disp-dry-") as folder:
            yield folder
    else:
        yield os.path.join(job_config.job.dump_folder, "logs")


def _start_ranks(
    argv: Sequence[str], job_config: JobConfig, nproc: int, logs: str
) -> int:
    """Run torchrun with a checked config, and return the exit status that ``launch``
    describes.
    """
    settings = LaunchConfig(
        # Lines have no prefix, because only one rank writes to the console.
        role="",
        log_line_prefix_template="${role_name}",
        logs_specs=DefaultLogsSpecs(log_dir=logs, tee=Std.ALL, local_ranks_filter={0}),
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=f"titan-disp-{os.getpid()}",
        rdzv_backend="c10d",
        # Addresses instead of names, because not every container can resolve localhost,
        # and not every laptop can resolve its own name.
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        # at other signals, torchrun would kill ranks that save for more than 30 seconds
        signals_to_handle="SIGQUIT",
    )
    stop = StopRanks()
    then = "begins anew, because checkpoint.enable is false"
    if job_config.checkpoint.enable:
        then = "resumes from the newest checkpoint, or begins anew if there is none"
    try:
        with stop_signals(stop.heard):
            elastic_launch(settings, sys.executable)("-m", "titan_disp.train", *argv)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if stop.number and failure.exitcode in (-signal.SIGTERM, -signal.SIGKILL):
            _say(
                f"titan-disp: {stop.name} ended the run, and not every rank ended by "
                f"itself. The same command {then}."
            )
            return 128 + stop.number
        status = f"rank {rank} failed with exit status {failure.exitcode}"
        if failure.exitcode == -signal.SIGKILL:
            status = (
                f"rank {rank} was killed (SIGKILL), perhaps because the machine has too "
                f"little memory. The same command {then}"
            )
        print(f"titan-disp: {status}; logs of all ranks: {logs}", file=sys.stderr)
        # On a full disk, the logs are empty, but error.json often still fits.
        reason = _last_error(logs, rank) or _first_line(failure)
        if reason and reason != _last_error(logs, 0):  # rank 0 has printed its own
            print(reason, file=sys.stderr)
        return failure.exitcode if 0 < failure.exitcode < 256 else 1
    if stop.number:
        _say(f"titan-disp: {stop.name} ended the run. The same command {then}.")
        return 128 + stop.number
    outcome = "the dry run has ended, and has written nothing"
    if not dry.is_dry(job_config):
        outcome = _outcome(job_config.job.dump_folder, then)
    _say(f"titan-disp: {outcome}")
    return 0


def _outcome(run: str, then: str) -> str:
    """Return how a run that no signal stopped has ended, and what to type next.

    ``then``: a phrase that says what the same command does next.
    """
    *_, last = [{}, *read_json_lines(os.path.join(run, EVENTS))]
    if last.get("event") == "complete":
        return f"the run is complete: step {last.get('step')}. Next: titan-disp report {shlex.quote(run)} --out report.html"
    if last.get("event") == "stop":
        remove = f"Remove {shlex.quote(os.path.join(run, STOP))}: the"
        first = {
            "budget": "Raise it: the",
            "file": remove,
            "seed": "Without it, the",
        }.get(last.get("kind", ""), "The")
        return f"stopped after step {last.get('step')}: {last.get('reason')}. {first} same command {then}."
    return "all ranks have ended"


class StopRanks:
    """Send SIGTERM to the ranks at the first signal, and kill them at a later one.

    The ranks have sessions of their own, so a terminal does not signal them.
    """

    def __init__(self) -> None:
        self.number = 0  # of the first signal; 0 if there was none

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    def heard(self, number: int, frame: FrameType | None) -> None:
        ranks = _ranks()
        if not ranks:  # the ranks have not started, or have ended
            raise SystemExit(128 + (self.number or number))
        if self.number:
            _signal(os.killpg, ranks, signal.SIGKILL)
            return
        self.number = number
        _signal(os.kill, ranks, signal.SIGTERM)
        _say(
            f"titan-disp: {self.name}: the ranks finish their step, save and end. A "
            "second signal kills them."
        )


def _signal(
    send: Callable[[int, int], None], processes: Iterable[int], number: int
) -> None:
    for process in processes:
        with contextlib.suppress(OSError):  # the process has ended
            send(process, number)


def _say(text: str) -> None:
    """Print to stderr, and ignore errors, because a terminal that was closed, or a tee
    that Ctrl-C has ended, must not stop a save.
    """
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        print(text, file=sys.stderr, flush=True)


def _ranks() -> list[int]:
    """Return the process ids of the ranks: running children of this process that lead a
    session, which is how torchrun starts ranks.
    """
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            state, parent, _, session = process_fields(folder.name)[:4]
            if state != "Z" and int(parent) == os.getpid() and session == folder.name:
                children.append(int(session))
    return children


def _first_line(failure: ProcessFailure) -> str | None:
    """Return the error that a rank has left for torchrun, or None."""
    if not failure.error_file_data:
        return None
    first, _, _ = str(failure.message).strip().partition("\n")
    return f"titan-disp: error: {first}"


def _last_error(logs: str, rank: int) -> str | None:
    """Return the last line with an error of titan-disp in the newest log of a rank, or
    None. ``logs`` has a folder for each start, in the layout of torchrun.
    """
    files = sorted(
        Path(logs).glob(f"*/attempt_*/{rank}/stderr.log"),
        key=lambda p: p.stat().st_mtime,
    )
    if not files:
        return None
    errors = re.findall(
        r"(?m)^titan-disp: error.*$", files[-1].read_text(errors="replace")
    )
    return errors[-1] if errors else None


SCRIPT = "pretrain.sbatch"
# Containers and archives have a Python of their own.
IMAGES = ("TITAN_DISP_PREFIX", "TITAN_DISP_SRUN_ARGS", "TITAN_DISP_ENV_ARCHIVE")
# If one of these is set, the nodes do not use this process's Python.
OTHER_PYTHON = ("TITAN_DISP_PYTHON", *IMAGES)


# The long options of sbatch, from the manuals of SLURM 23.11 and later versions
SBATCH_OPTIONS = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment
consolidate-segments constraint container container-id contiguous core-spec
cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency
distribution error exclude exclusive export export-file extra extra-node-info
get-user-env gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres
gres-flags hint hold ignore-pbs input job-name kill-on-invalid-dep licenses mail-type
mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill
no-requeue nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
ntasks-per-socket oom-kill-step open-mode output overcommit oversubscribe parsable
partition power prefer priority profile propagate qos quiet reboot requeue reservation
resv-ports segment signal sockets-per-node spread-job stepmgr switches test-only
thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid usage
use-min-nodes verbose wait wait-all-nodes wckey wrap
"""
# Those that need no value
SBATCH_FLAGS = """
contiguous exclusive get-user-env hold ignore-pbs nice no-kill no-requeue overcommit
oversubscribe parsable propagate quiet reboot requeue spread-job stepmgr test-only usage
use-min-nodes verbose wait
"""
# Those that titan-disp sets, with what to type instead
OWN_OPTIONS = {
    "nodes": "--nodes N",
    "gpus-per-node": "--gpus-per-node N",
    "export": "export NAME=VALUE in this shell, because the job gets all of its variables",
}
# From this similarity on, an unknown option is taken for a misspelled one. Other unknown
# options, such as container-image, may be those of a cluster's plugins.
MISSPELLED = 0.85


def check_sbatch_option(option: str) -> None:
    """Raise ConfigError if an option of sbatch is misspelled, such as "accuont=abc",
    lacks its value, or is one that titan-disp sets.
    """
    names = SBATCH_OPTIONS.split()
    name, equals, _ = option.lstrip("-").partition("=")
    # Without a value, sbatch would take the next option as the value.
    if name in names and name not in SBATCH_FLAGS.split() and not equals:
        raise ConfigError(
            f"--sbatch {option} has no value: write --sbatch {name}=VALUE, with the "
            "equals sign"
        )
    if name in OWN_OPTIONS:
        raise ConfigError(
            f"--sbatch {option}: {name} is set by titan-disp. Write {OWN_OPTIONS[name]}"
        )
    # sbatch accepts an option's beginning, too.
    if any(long_name.startswith(name) for long_name in names):
        return
    with_hyphens = name.replace("_", "-")
    similar = difflib.get_close_matches(with_hyphens, names, 1, MISSPELLED)
    if similar:
        raise ConfigError(
            f"sbatch has no option {name!r} (did you mean {similar[0]}?): change "
            f"--sbatch {option}"
        )


def seconds_of(time: str) -> int | None:
    """Return the seconds of an sbatch --time: MINUTES[:SECONDS], HOURS:MINUTES:SECONDS
    or DAYS-HOURS[:MINUTES[:SECONDS]]. Return None for other texts, such as UNLIMITED.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", time)
    if not match:
        return None
    days, clock = match.groups()
    numbers = [int(number) for number in clock.split(":")]
    if days is None and len(numbers) < 3:
        numbers.insert(0, 0)  # no hours
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def check_time_limit(options: Sequence[str]) -> None:
    """Raise ConfigError if SLURM would signal the job as soon as it starts, so that it
    would end before it has trained (slurm/supervise.py).
    """
    settings = [
        (SCRIPTS / SCRIPT).read_text(),
        f"signal={os.environ.get('SBATCH_SIGNAL', '')}",
        *(option.lstrip("-") for option in options),
    ]
    signals = re.findall(
        r"(?m)^(?:#SBATCH --)?signal=[\w:]+@(\d+)$", "\n".join(settings)
    )
    lead = int(signals[-1])
    for option in options:
        name, _, value = option.lstrip("-").partition("=")
        limit = seconds_of(value)
        if name == "time" and limit is not None and 0 < limit <= lead:
            raise ConfigError(
                f"--sbatch {option} is a time limit of {limit} s, and SLURM signals "
                f"the job {lead} s before it, so it would end before it has trained. "
                "Ask for a longer time, or for a later signal with --sbatch "
                "signal=B:USR1@SECONDS"
            )


def sbatch_options(options: SlurmOptions, more: Sequence[str] = ()) -> list[str]:
    """Return the command-line options of sbatch.

    ``more``: further options, without dashes. Raises ConfigError if an option is
    misspelled, lacks its value or is set here, if the time limit is too short, or if the path of the
    site or of Python has a comma.
    """
    for option in options.sbatch:
        check_sbatch_option(option)
    check_time_limit(options.sbatch)
    exported = ["ALL", f"TITAN_DISP_SITE={options.site}"]
    if not any(map(os.environ.get, OTHER_PYTHON)):
        exported.append(f"TITAN_DISP_PYTHON={sys.executable}")
    for setting in exported:
        if "," in setting:
            name, _, value = setting.partition("=")
            raise ConfigError(
                f"{name} is {value!r}, and sbatch ends the value at the comma: use a "
                "path without a comma"
            )
    words = [f"nodes={options.nodes}"]
    if options.gpus_per_node:
        words.append(f"gpus-per-node={options.gpus_per_node}")
    words += [*more, *options.sbatch, f"export={','.join(exported)}"]
    return [f"--{word.lstrip('-')}" for word in words]


def check_request(options: SlurmOptions) -> None:
    """Raise ConfigError if the number of nodes or GPUs is wrong, or a variable that
    slurm/pretrain.sbatch lists. The job itself would find the latter after its wait.
    """
    check_least(options, nodes=1, gpus_per_node=0)
    supervisor = runpy.run_path(str(SCRIPTS / "supervise.py"))
    try:
        supervisor["check_settings"](os.environ)
    except supervisor["Failure"] as error:
        raise ConfigError(str(error)) from error
    archive = os.environ.get("TITAN_DISP_ENV_ARCHIVE")
    if archive and not Path(archive).is_file():
        raise ConfigError(
            f"TITAN_DISP_ENV_ARCHIVE is {archive!r}, which is no file: set it to the .tar "
            "of the environment (slurm/README.md), or unset it"
        )


def _warn_without_gpus(options: SlurmOptions, site: Path) -> None:
    """Print a warning if neither a GPU nor a number of ranks is asked for, so that the
    job would end at once. A site may also set the number in a file that it includes.
    """
    name = "TITAN_DISP_NPROC"
    if (
        options.gpus_per_node == 0
        and not os.environ.get(name)
        and name not in site.read_text(errors="replace")
    ):
        print(
            f"warning: --gpus-per-node is 0, and neither this shell nor {site} sets "
            f"{name}, the number of ranks per node. On nodes without GPUs, the job "
            f"ends at once. Cancel it, export {name}=1, and submit again",
            flush=True,
        )


def _warn_without_python() -> None:
    """Print a warning if this machine lacks the job's Python, which is not in an image."""
    python = os.environ.get("TITAN_DISP_PYTHON")
    if python and not shutil.which(python) and not any(map(os.environ.get, IMAGES)):
        print(
            f"warning: TITAN_DISP_PYTHON is {python!r}, which this machine does not "
            "have. If the nodes lack it, too, the job cannot start",
            flush=True,
        )


def site_file(site: str) -> Path:
    """Return the file of a site, which is a name in slurm/sites or a path.

    Raises ConfigError if there is no such file.
    """
    for file in (Path(site), SCRIPTS / "sites" / f"{site}.sh"):
        if file.is_file():
            return file
    names = ", ".join(sorted(file.stem for file in (SCRIPTS / "sites").glob("*.sh")))
    raise ConfigError(f"--site is {site!r}, expected a file or one of {names}")


def command(
    options: SlurmOptions,
    arguments: Sequence[str],
    script: Path = SCRIPTS / SCRIPT,
    more: Sequence[str] = (),
) -> list[str]:
    """Return the sbatch command line of a script in slurm/."""
    return ["sbatch", *sbatch_options(options, more), str(script), *arguments]


def send(
    line: Sequence[str], dry_run: bool, undo: Callable[[], object] = lambda: None
) -> int:
    """Print an sbatch command, run it unless this is a dry run, and return the exit
    status.

    ``undo`` is called if sbatch says that it has not submitted the job, or if there is
    no sbatch. Then, ConfigError is raised.
    """
    print(f"\n{shlex.join(line)}", flush=True)
    if dry_run:
        return 0
    try:
        done = subprocess.run(
            line, env=os.environ, stderr=subprocess.PIPE, text=True, errors="replace"
        )
    except FileNotFoundError as error:
        undo()
        raise ConfigError(
            "there is no sbatch on this machine: submit from a login node, or use "
            "--dry-run"
        ) from error
    print(done.stderr, end="", file=sys.stderr, flush=True)
    # The message decides, because with --wait, sbatch's status is the job's. After a
    # time-out, the job may exist.
    if "submission failed" in done.stderr and "timed out" not in done.stderr:
        undo()
    return done.returncode


def _remove_launch(folder: Path, is_run_new: bool) -> None:
    """Remove a launch folder, and the folders above it that are empty now: RUN/launch,
    and if ``is_run_new``, RUN.
    """
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # not empty
        folder.parent.rmdir()
        if is_run_new:
            folder.parent.parent.rmdir()


def plan_job(job_config: JobConfig, machine: Machine, options: SlurmOptions) -> str:
    """Return the text of a job's plan.

    Raises ConfigError if inputs are missing, unless only the compute nodes have them. On
    a machine without sbatch, which may have other disks than the cluster, the plan only
    warns.
    """
    missing = Problems(collect=True)
    plan = make_plan(job_config, machine, missing=missing)
    if shutil.which("sbatch") is not None and not options.inputs_on_nodes:
        missing.refuse("If only the compute nodes have it, add --inputs-on-nodes")
    return render(plan)


def _look_at(run: Path) -> None:
    """Raise ConfigError if a run folder cannot be written. This is found out by creating
    and removing a temporary folder.

    On a machine without sbatch, which may have other disks than the cluster, only print
    a warning.
    """
    there = next(folder for folder in (run, *run.parents) if folder.exists())
    try:
        with writing(run), tempfile.TemporaryDirectory(dir=there):
            pass
    except ConfigError as error:
        if shutil.which("sbatch") is not None:
            raise
        print(f"warning: {error}", flush=True)


def _warn_of_refusal(job_config: JobConfig) -> None:
    """Print a warning if the newest checkpoint of the run folder has another loss or
    model, so that the job would end at once.

    The job itself reports a checkpoint that cannot be read.
    """
    section = job_config.checkpoint
    folder = Path(job_config.job.dump_folder) / section.folder
    with contextlib.suppress(OSError, CheckpointError):
        steps = checkpoints(folder)
        if not (section.enable and steps):
            return
        saved = read_identity(str(folder / f"step-{steps[-1]}"))
        try:
            check_identity(saved, of_keys(job_config), section.allow_other_loss)
        except RefusedError as error:
            print(f"warning: the job will refuse to start: {error}", flush=True)


def submit(options: SubmitOptions) -> int:
    """Print the plan, write what the job will run to RUN/launch, submit the job, and
    return sbatch's exit status.
    """
    check_request(options)
    job_config = load_config(options.argv)
    spares = os.environ.get("TITAN_DISP_SPARES") or "0"
    if int(spares) >= options.nodes:
        raise ConfigError(
            f"TITAN_DISP_SPARES is {spares!r}, expected a whole number below --nodes "
            f"{options.nodes}"
        )
    training = dataclasses.replace(options.machine, nodes=options.nodes - int(spares))
    nproc = os.environ.get("TITAN_DISP_NPROC", "")
    if nproc.isdecimal() and int(nproc):  # ranks per node, whatever its GPUs
        training = dataclasses.replace(training, gpus_per_node=int(nproc))
    print(plan_job(job_config, training, options), flush=True)
    _warn_of_refusal(job_config)
    site = site_file(options.site)
    _warn_without_gpus(options, site)
    _warn_without_python()
    if options.dry_run:
        _look_at(Path(job_config.job.dump_folder).absolute())
        return send(
            command(options, [options.config, *options.overrides]), dry_run=True
        )
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    is_run_new = not Path(job_config.job.dump_folder).exists()
    folder = freeze(job_config, options.argv, name, sbatch_options(options), site)
    frozen = json.loads((folder / "launch.json").read_text(errors="surrogateescape"))[
        "argv"
    ]
    return send(
        command(options, frozen, folder / "slurm" / SCRIPT),
        dry_run=False,
        undo=lambda: _remove_launch(folder, is_run_new),
    )
