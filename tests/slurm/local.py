"""A real SLURM cluster on this machine, for tests: munged, slurmctld and one slurmd per
node, all in one folder.

``python -m tests.slurm.local`` starts a cluster to try commands on. All nodes share
this host's name and loopback interface, so that a rendezvous goes to 127.0.0.1. No
system-wide SLURM or munge is read or changed.
"""

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tests.command_line import faulty_python

PACKAGES = ("munge", "slurm-wlm", "slurm-client", "slurmctld", "slurmd")
COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch")
PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # where the daemons are
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "TIMEOUT",
}

# cred_expire: a requeued job starts 1 s after its old credential expires. The minimum
# is 5 s; a lower value means 120 s. sched_interval, bf_interval: seconds between
# scheduling passes. KillWait: seconds from SIGTERM to SIGKILL. MinJobAge: how long
# `scontrol show job` knows a finished job. config_overrides: use CPUs=, whatever the
# host has. ReturnToService: with 2, a node that was set DOWN while its slurmd lives
# would be idle again within 0.1 s.
CONFIG = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1
JobRequeue=1
KillWait=5
MinJobAge=3600
ReturnToService=1
SlurmdTimeout=30
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def install() -> None:
    """Install SLURM and munge from the distribution's archive if any of them is
    missing.
    """
    missing = ", ".join(
        command for command in COMMANDS if shutil.which(command, path=PATH) is None
    )
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RuntimeError(
            f"{missing} not found: as root on Debian or Ubuntu, apt-get install "
            f"{' '.join(PACKAGES)}"
        )
    print(
        f"{missing} not found: installing {' '.join(PACKAGES)} with apt-get", flush=True
    )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "PATH": PATH}
    # with exit 101, packages start no service; an existing file is kept
    policy = Path("/usr/sbin/policy-rc.d")
    with ExitStack() as stack:
        if not policy.exists():
            stack.callback(policy.unlink, missing_ok=True)
            policy.write_text("#!/bin/sh\nexit 101\n")
            policy.chmod(0o755)
        for command in (
            ["update"],
            ["install", "--yes", "--no-install-recommends", *PACKAGES],
        ):
            _run(
                "apt-get",
                "-qq",
                "-o",
                "DPkg::Lock::Timeout=300",
                *command,
                env=environment,
                timeout=900,
            )


class LocalSlurm:
    """A context manager for a cluster of ``nodes`` nodes n1, n2, … with two CPUs each
    (n2: one).

    ``folder`` gets the configuration, the state, munge's key and socket, and a log of
    each daemon. Its path must be short (80 characters) because sockets are created in
    it. ``environment`` is for subprocesses that talk to the cluster. No process is left
    at the end.
    """

    def __init__(self, folder: str | Path, nodes: int = 4) -> None:
        self.folder = Path(folder).resolve()
        if len(str(self.folder)) > 80:
            raise ValueError(
                f"{self.folder} is too long for the sockets in it: give a folder of "
                "up to 80 characters"
            )
        self.nodes = [f"n{i + 1}" for i in range(nodes)]
        # These would act as options
        own = re.compile("S(LURMD?|BATCH|RUN|ALLOC|CANCEL|QUEUE|INFO)_")
        self.environment = {
            key: value for key, value in os.environ.items() if not own.match(key)
        }
        self.environment |= {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": PATH,
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "LocalSlurm":
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def sbatch(
        self,
        *args: object,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> int:
        """Submit a job with the variables of ``env`` added to ``environment``.

        Returns its id.
        """
        return int(
            self._client("sbatch", "--parsable", *args, env=env, cwd=cwd).split(";")[0]
        )

    def job(self, id: int) -> dict[str, str]:
        """Return the fields of ``scontrol show job``: JobState, Reason, Restarts,
        ExitCode, NodeList, StdOut, …
        """
        line = self._client("scontrol", "show", "job", "--oneliner", id).strip()
        return dict(
            re.findall(r"(?:^| )([A-Z][\w:/]*)=(.*?)(?= [A-Z][\w:/]*=|$)", line)
        )

    def wait(
        self, id: int, states: Collection[str], timeout: float = 60, restarts: int = 0
    ) -> dict[str, str]:
        """Wait until the job is in one of the states and was requeued at least
        ``restarts`` times. Returns its fields.
        """
        states = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + timeout
        while True:
            job = self.job(id)
            if job["JobState"] in states and int(job["Restarts"]) >= restarts:
                return job
            ended = job["JobState"] in ENDED
            if ended or time.monotonic() > deadline:
                fields = "\n".join(f"  {key}={value}" for key, value in job.items())
                raise (RuntimeError if ended else TimeoutError)(
                    f"expected within {timeout:g} s: {' or '.join(sorted(states))} "
                    f"after {restarts} restarts or more\n{fields}\nthe end of "
                    f"{job['StdOut']}:\n{_tail(Path(job['StdOut']))}"
                )
            time.sleep(0.5)

    def signal(self, id: int, name: str) -> None:
        """Signal only the batch shell, as ``sbatch --signal=B:…`` does."""
        self._client("scancel", f"--signal={name}", "--batch", id)

    def cancel(self, id: int) -> None:
        self._client("scancel", id)

    def update(self, *settings: str) -> None:
        """Change a job or a node.

        ``State=DOWN`` ends or requeues the node's jobs; ``State=RESUME`` brings it
        back.
        """
        self._client("scontrol", "update", *settings)

    def log(self, id: int) -> str:
        """Return what the job has written to its StdOut, or an empty text before it has
        started.
        """
        path = Path(self.job(id)["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def _client(
        self, *command: object, env: Mapping[str, str] | None = None, **how: Any
    ) -> str:
        return _run(*command, env={**self.environment, **(env or {})}, **how)

    def _start(self) -> None:
        install()
        # clusters whose Python process was killed
        _kill(lambda owner, name: not Path(f"/proc/{owner}").exists())
        # The state and the socket of an earlier cluster in this folder.
        shutil.rmtree(self.folder / "state", ignore_errors=True)
        (self.folder / "munge.socket").unlink(missing_ok=True)
        (self.folder / "state").mkdir(parents=True)
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        port, *ports = _free_ports(1 + len(self.nodes))
        # Unique among running clusters, because of the port. Daemons and jobs have it
        # in their environment.
        self.name = f"titan{os.getpid()}x{port}"
        host = socket.gethostname().split(".")[0]
        user = pwd.getpwuid(os.geteuid()).pw_name
        config = CONFIG.format(
            name=self.name, host=host, port=port, user=user, folder=self.folder
        )
        for node, port in zip(self.nodes, ports, strict=True):
            cpus = 1 if node == "n2" else 2  # so that the nodes of a job may differ
            config += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} State=UNKNOWN\n"
        (self.folder / "slurm.conf").write_text(config)
        # slurmd loads a cgroup plugin although nothing here uses it, and v2's fails on
        # a machine without systemd.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

        munge = {
            kind: f"{self.folder}/munge.{kind}"
            for kind in ("socket", "key", "pid", "seed")
        }
        files = [f"--{kind}-file={munge[kind]}" for kind in ("key", "pid", "seed")]
        # Without --force, a socket in a folder that is not open to all users, such as a
        # test's, is an error.
        self._daemon(
            "munged", "--foreground", "--force", f"--socket={munge['socket']}", *files
        )
        self._until(Path(munge["socket"]).is_socket, "munged")
        self._daemon("slurmctld", "-D", "-c")
        for node in self.nodes:
            self._daemon("slurmd", "-D", "-c", "-N", node, log=node)
        self._until(
            lambda: self._node_states() == ["idle"] * len(self.nodes), "the nodes"
        )

    def _node_states(self) -> list[str]:
        # slurmctld does not answer yet
        with suppress(RuntimeError, subprocess.TimeoutExpired):
            return self._client(
                "sinfo", "--noheader", "--Node", "--format=%T", timeout=5
            ).split()
        return []

    def _daemon(self, *command: str, log: str | None = None) -> None:
        """Start a daemon as a child that the terminal's Ctrl-C does not reach and that
        ends when Python is killed.
        """
        log = log or command[0]
        with (self.folder / f"{log}.log").open("wb") as file:
            self._daemons[log] = subprocess.Popen(
                ["setpriv", "--pdeathsig=TERM", *command],
                env={**self.environment, "SLURM_CLUSTER_NAME": self.name},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _until(
        self, condition: Callable[[], bool], what: str, timeout: float = 60
    ) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            dead = [
                log
                for log, daemon in self._daemons.items()
                if daemon.poll() is not None
            ]
            if dead or time.monotonic() > deadline:
                why = (
                    f"{', '.join(dead)} ended"
                    if dead
                    else f"{what} not ready within {timeout:g} s"
                )
                tails = [
                    f"{log}.log:\n{_tail(self.folder / f'{log}.log')}"
                    for log in self._daemons
                ]
                raise RuntimeError(
                    "\n".join([f"SLURM in {self.folder} did not start: {why}", *tails])
                )
            time.sleep(0.1)

    def _stop(self) -> None:
        try:
            if (
                "slurmctld" in self._daemons
                and self._daemons["slurmctld"].poll() is None
            ):
                self._client("scancel", "--me", timeout=10)
                deadline = time.monotonic() + 10  # longer than KillWait
                while (
                    self._client("squeue", "--noheader", timeout=10)
                    and time.monotonic() < deadline
                ):
                    time.sleep(0.2)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"jobs could not be cancelled and are killed: {error}")
        finally:
            for daemon in reversed(self._daemons.values()):
                daemon.terminate()
                with suppress(subprocess.TimeoutExpired):
                    daemon.wait(10)
            if self._daemons:
                _kill(lambda owner, name: name == self.name)
            for daemon in self._daemons.values():
                daemon.wait()
            self._daemons.clear()


def _run(
    *command: object,
    env: Mapping[str, str],
    timeout: float = 60,
    cwd: str | Path | None = None,
) -> str:
    args = [str(each) for each in command]
    done = subprocess.run(
        args, env=env, cwd=cwd, timeout=timeout, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(args)}: exit status "
            f"{done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def _tail(path: Path, lines: int = 20) -> str:
    if not path.exists():
        return "  (no such file)"
    with path.open(errors="replace") as file:
        return "".join(f"  {line}" for line in deque(file, lines))


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


def job_environment(folder: Path) -> dict[str, str]:
    """Return the variables of a job that trains on CPUs with the faults of
    tests/faulty_train.py, and waits for nothing.
    """
    settings = {
        "SITE": "local_cpu",
        "PYTHON": faulty_python(folder),
        "CHECK_SECONDS": "0",
        "RETRIES": "0,0,0,0,0,0",
        "LOCAL": str(folder),
    }
    return {f"TITAN_DISP_{name}": value for name, value in settings.items()}


def processes_with(text: str) -> dict[int, str]:
    """Return the commands, by pid, of the processes that have ``text`` (NAME=value) in
    their environment.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            if text.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (
                    (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
                )
    return found


def _kill(chosen: Callable[[int, str], bool]) -> None:
    """Kill all processes of the clusters for which ``chosen(owner's pid, cluster's
    name)``, including orphans.
    """
    for _ in range(100):
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended, or is another user's
                name = re.search(
                    rb"\bSLURM_CLUSTER_NAME=(titan(\d+)x\d+)\0",
                    (folder / "environ").read_bytes(),
                )
                if name and chosen(int(name[2]), name[1].decode()):
                    pids.append(int(folder.name))
                    os.kill(pids[-1], signal.SIGKILL)
        if not pids:
            return
        time.sleep(0.1)
    raise RuntimeError(f"processes {pids} survive SIGKILL")


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        LocalSlurm(folder),
    ):
        print(
            f"export SLURM_CONF={folder}/slurm.conf\nCtrl-C stops the cluster.",
            flush=True,
        )
        signal.pause()


if __name__ == "__main__":
    main()
