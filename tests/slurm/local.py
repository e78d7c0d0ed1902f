"""A real SLURM cluster on this machine, for tests: munged, slurmctld and one slurmd per node, all in one folder.

All nodes share this host's name and loopback interface, so that a rendezvous goes to 127.0.0.1. No system-wide SLURM or
munge is read or changed.
"""

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.distributed import free_port

PACKAGES = ("munge", "slurm-wlm", "slurm-client", "slurmctld", "slurmd")
COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch")
PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # where the daemons are
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}

# cred_expire: a requeued job starts 1 s after its old credential expires. The minimum is 5 s; a lower value means 120
# s. sched_interval, bf_interval: seconds between scheduling passes. KillWait: seconds from SIGTERM to SIGKILL.
# MinJobAge: how long `scontrol show job` knows a finished job. config_overrides: use CPUs=, whatever the host has.
# ReturnToService: with 2, a node that was set DOWN while its slurmd lives would be idle again within 0.1 s.
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
    """Install SLURM and munge if any of them is missing, on Debian or Ubuntu and as root."""
    if all(shutil.which(command, path=PATH) for command in COMMANDS):
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "PATH": PATH}
    policy = Path("/usr/sbin/policy-rc.d")  # with exit 101, packages start no service; an existing file is kept
    with ExitStack() as stack:
        if not policy.exists():
            stack.callback(policy.unlink, missing_ok=True)
            policy.write_text("#!/bin/sh\nexit 101\n")
            policy.chmod(0o755)
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
            _run("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *command, env=environment, timeout=900)


class LocalSlurm:
    """A context manager for a cluster of ``nodes`` nodes n1, n2, … with two CPUs each (n2: one).

    ``folder`` gets the configuration, the state, munge's key and a log of each daemon. Its path must be short (80
    characters) because of the sockets in it. ``environment`` is for subprocesses that talk to the cluster.
    """

    def __init__(self, folder: str | Path, nodes: int = 4) -> None:
        self.folder = Path(folder).resolve()
        self.port, self.ports = free_port(), {f"n{i + 1}": free_port() for i in range(nodes)}
        # The owner's pid and a port make the name unique among running clusters. Daemons and jobs have it in their
        # environment.
        self.name = f"titan{os.getpid()}x{self.port}"
        own = re.compile("S(LURMD?|BATCH|RUN|ALLOC|CANCEL|QUEUE|INFO)_")  # these would act as options
        self.environment = {key: value for key, value in os.environ.items() if not own.match(key)}
        self.environment |= {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "LocalSlurm":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(RuntimeError, subprocess.TimeoutExpired):  # jobs that cannot be cancelled are killed
            self._client("scancel", "--me", timeout=10)
            deadline = time.monotonic() + 10  # longer than KillWait
            while self._client("squeue", "--noheader", timeout=10) and time.monotonic() < deadline:
                time.sleep(0.2)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
        _kill(lambda owner, name: name == self.name)
        for daemon in self._daemons.values():
            daemon.wait()

    def sbatch(self, *args: object, env: Mapping[str, str] | None = None, cwd: str | Path | None = None) -> int:
        """Submit a job with the variables of ``env`` added to ``environment``. Returns its id."""
        return int(self._client("sbatch", "--parsable", *args, env=env, cwd=cwd).split(";")[0])

    def job(self, id: int) -> dict[str, str]:
        """Return the fields of ``scontrol show job``: JobState, Reason, Restarts, ExitCode, NodeList, StdOut, …"""
        line = self._client("scontrol", "show", "job", "--oneliner", id).strip()
        return dict(re.findall(r"(?:^| )([A-Z][\w:/]*)=(.*?)(?= [A-Z][\w:/]*=|$)", line))

    def wait(self, id: int, states: Collection[str], timeout: float = 60, restarts: int = 0) -> dict[str, str]:
        """Return the job's fields once it is in one of the states and was requeued at least ``restarts`` times."""
        states = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + timeout
        while (job := self.job(id))["JobState"] not in states or int(job["Restarts"]) < restarts:
            if job["JobState"] in ENDED or time.monotonic() > deadline:
                expected = f"{' or '.join(sorted(states))} after {restarts} restarts within {timeout:g} s"
                raise RuntimeError(f"expected {expected}: {job}\n{self.log(id)[-2000:]}")
            time.sleep(0.5)
        return job

    def signal(self, id: int, name: str) -> None:
        self._client("scancel", f"--signal={name}", "--batch", id)

    def cancel(self, id: int) -> None:
        self._client("scancel", id)

    def set_node(self, name: str, state: str) -> None:
        """Set a node's state. ``DOWN`` ends or requeues the node's jobs; ``RESUME`` brings it back."""
        self._client("scontrol", "update", f"NodeName={name}", f"State={state}", "Reason=test")

    def log(self, id: int) -> str:
        path = Path(self.job(id)["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def _client(
        self, *command: object, env: Mapping[str, str] | None = None, cwd: str | Path | None = None, timeout: float = 60
    ) -> str:
        return _run(*command, env={**self.environment, **(env or {})}, cwd=cwd, timeout=timeout)

    def _start(self) -> None:
        install()
        _kill(lambda owner, name: not Path(f"/proc/{owner}").exists())  # clusters whose Python process was killed
        # The state and the socket of an earlier cluster in this folder.
        shutil.rmtree(self.folder / "state", ignore_errors=True)
        munge = {kind: self.folder / f"munge.{kind}" for kind in ("socket", "key", "pid", "seed")}
        munge["socket"].unlink(missing_ok=True)
        (self.folder / "state").mkdir(parents=True)
        munge["key"].touch(0o600)
        munge["key"].write_bytes(os.urandom(1024))
        host = socket.gethostname().split(".")[0]
        user = pwd.getpwuid(os.geteuid()).pw_name
        config = CONFIG.format(name=self.name, host=host, port=self.port, user=user, folder=self.folder)
        for node, port in self.ports.items():
            cpus = 1 if node == "n2" else 2  # so that the nodes of a job may differ
            config += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} State=UNKNOWN\n"
        (self.folder / "slurm.conf").write_text(config)
        # slurmd loads a cgroup plugin although nothing here uses it, and v2's fails on a machine without systemd.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        # Without --force, a socket in a folder that is not open to all users, such as a test's, is an error.
        files = [f"--{kind}-file={munge[kind]}" for kind in ("key", "pid", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={munge['socket']}", *files)
        self._until(munge["socket"].is_socket)
        self._daemon("slurmctld", "-D", "-c")
        for node in self.ports:
            self._daemon("slurmd", "-D", "-c", "-N", node, log=node)
        self._until(lambda: self._node_states() == ["idle"] * len(self.ports))

    def _node_states(self) -> list[str]:
        with suppress(RuntimeError, subprocess.TimeoutExpired):  # slurmctld does not answer yet
            return self._client("sinfo", "--noheader", "--Node", "--format=%T", timeout=5).split()
        return []

    def _daemon(self, *command: str, log: str | None = None) -> None:
        """Start a daemon as a child that the terminal's Ctrl-C does not reach and that ends when Python is killed."""
        log = log or command[0]
        how = {"env": {**self.environment, "SLURM_CLUSTER_NAME": self.name}, "stdin": subprocess.DEVNULL}
        with (self.folder / f"{log}.log").open("wb") as file:
            how |= {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
            self._daemons[log] = subprocess.Popen(["setpriv", "--pdeathsig=TERM", *command], **how)

    def _until(self, condition: Callable[[], bool], timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self._daemons.values()):
                tails = [
                    f"{log}.log: {(self.folder / log).with_suffix('.log').read_text()[-2000:]}" for log in self._daemons
                ]
                raise RuntimeError("\n".join([f"SLURM in {self.folder} did not start", *tails]))
            time.sleep(0.1)


def _run(*command: object, env: Mapping[str, str], timeout: float, cwd: str | Path | None = None) -> str:
    args = [str(each) for each in command]
    done = subprocess.run(args, env=env, cwd=cwd, timeout=timeout, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(args)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def processes_with(text: str) -> dict[int, str]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            if text.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
    return found


def _kill(chosen: Callable[[int, str], bool]) -> None:
    for _ in range(100):
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended, or is another user's
                name = re.search(rb"\bSLURM_CLUSTER_NAME=(titan(\d+)x\d+)\0", (folder / "environ").read_bytes())
                if name and chosen(int(name[2]), name[1].decode()):
                    pids.append(int(folder.name))
                    os.kill(pids[-1], signal.SIGKILL)
        if not pids:
            return
        time.sleep(0.1)
    raise RuntimeError(f"processes {pids} survive SIGKILL")
