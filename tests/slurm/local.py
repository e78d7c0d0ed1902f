"""A real SLURM cluster on this machine, for tests: munged, slurmctld and one slurmd a node, all under one folder.

    with LocalSlurm(tmp_path, nodes=4) as slurm:
        job = slurm.sbatch("--nodes=2", "train.sbatch")
        slurm.wait(job, "COMPLETED")
        print(slurm.log(job))

``python -m tests.slurm.local`` starts one to try commands on. All nodes share this host's name and loopback, so a
rendezvous goes to 127.0.0.1. Nothing of a system-wide SLURM or munge is read or touched.
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
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from pathlib import Path

PACKAGES = ("munge", "slurm-wlm", "slurm-client", "slurmctld", "slurmd", "shellcheck")
COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "shellcheck")
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])  # the daemons are in sbin

# cred_expire: a requeued job may start when its old credential is void, 120 s by default. KillWait: from SIGTERM to
# SIGKILL. MinJobAge: how long `scontrol show job` knows a finished job. config_overrides: believe CPUs=2, whatever
# the host has.
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
    """Install SLURM, munge and shellcheck from Debian's or Ubuntu's archive where they are missing; needs root."""
    missing = [command for command in COMMANDS if shutil.which(command, path=PATH) is None]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RuntimeError(
            f"{', '.join(missing)} not found. Installing needs Debian/Ubuntu and root; see {__file__}, or as root: "
            f"apt-get install --no-install-recommends {' '.join(PACKAGES)}"
        )
    print(f"{', '.join(missing)} not found: installing {' '.join(PACKAGES)} with apt-get", flush=True)
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", "-o", "Dpkg::Use-Pty=0"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "PATH": PATH}
    policy = Path("/usr/sbin/policy-rc.d")  # exit 101: packages start no service. One that is there stays as it is.
    with ExitStack() as stack:
        if not policy.exists():
            policy.write_text("#!/bin/sh\nexit 101\n")
            policy.chmod(0o755)
            stack.callback(policy.unlink)
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
            _run(*apt, *command, env=environment, timeout=900)


class LocalSlurm:
    """``nodes`` SLURM nodes n1, n2, … of two CPUs each; a context manager that leaves no process behind.

    ``folder`` gets the configuration, the state, munge's key and socket, and a log of each daemon. Its path must be
    short (80 characters), for sockets are made in it. ``environment`` is for subprocesses that talk to the cluster.
    """

    def __init__(self, folder: str | Path, nodes: int = 4) -> None:
        self.folder = Path(folder).resolve()
        if len(str(self.folder)) > 80:
            raise ValueError(f"{self.folder} is too long for the sockets in it: give a folder of up to 80 characters")
        self.nodes = [f"n{i + 1}" for i in range(nodes)]
        self.environment = {k: v for k, v in os.environ.items() if not re.match("SLURM|SBATCH|SRUN|SALLOC|SCANCEL", k)}
        self.environment |= {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}
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

    def sbatch(self, *args: str | Path, env: dict[str, str] | None = None, cwd: str | Path | None = None) -> int:
        """Submit a job, with the variables of ``env`` added to its environment; returns its id."""
        return int(self._client("sbatch", "--parsable", *args, env=env, cwd=cwd).split(";")[0])

    def job(self, id: int) -> dict[str, str]:
        """The fields of ``scontrol show job``: JobState, Reason, Restarts, ExitCode, NodeList, StdOut, …"""
        text = self._client("scontrol", "show", "job", "--oneliner", str(id)).strip()
        return dict(re.findall(r"(?:^| )([A-Z][\w:/]*)=(.*?)(?= [A-Z][\w:/]*=|$)", text))

    def wait(self, id: int, states: str | Collection[str], timeout: float = 60, restarts: int = 0) -> dict[str, str]:
        """Wait until the job is in one of ``states``, requeued ``restarts`` times or more; returns its fields.

        Raises where the time is up, or at once where the job has ended in another state.
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
                raise TimeoutError(
                    f"job {id} is {job['JobState']} after {job['Restarts']} restarts, expected {' or '.join(states)} "
                    f"after {restarts} or more{'' if ended else f' within {timeout:g} s'}\n{fields}\n"
                    f"the end of {job['StdOut']}:\n{_tail(Path(job['StdOut']))}"
                )
            time.sleep(0.5)

    def signal(self, id: int, name: str) -> None:
        """Signal the batch shell alone, as ``sbatch --signal=B:…`` does."""
        self._client("scancel", f"--signal={name}", "--batch", str(id))

    def requeue(self, id: int) -> None:
        self._client("scontrol", "requeue", str(id))

    def cancel(self, id: int) -> None:
        self._client("scancel", str(id))

    def set_node(self, name: str, state: str) -> None:
        """``DOWN`` ends the node's jobs, or requeues them; ``RESUME`` brings it back."""
        self._client("scontrol", "update", f"NodeName={name}", f"State={state}", "Reason=test")

    def log(self, id: int) -> str:
        """What the job has written to its StdOut; empty before it has started."""
        path = Path(self.job(id)["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def _client(
        self,
        *command: str | Path,
        env: dict[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout: float = 60,
    ) -> str:
        return _run(*map(str, command), env=self.environment | (env or {}), cwd=cwd, timeout=timeout)

    def _start(self) -> None:
        install()
        _kill(lambda owner, name: not Path(f"/proc/{owner}").exists())  # what a killed Python has left
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "state").mkdir(exist_ok=True)
        key = self.folder / "munge.key"
        key.unlink(missing_ok=True)
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        port, *ports = _free_ports(1 + len(self.nodes))
        # The owner's pid and a port: unique among running clusters. Daemons and jobs carry it in their environment.
        self.name = f"titan{os.getpid()}x{port}"
        host = socket.gethostname().split(".")[0]
        user = pwd.getpwuid(os.geteuid()).pw_name
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={p} CPUs=2 State=UNKNOWN\n"
            for node, p in zip(self.nodes, ports, strict=True)
        ]
        config = CONFIG.format(name=self.name, host=host, port=port, user=user, folder=self.folder)
        (self.folder / "slurm.conf").write_text(config + "".join(lines))

        files = {f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("key", "pid", "seed")}
        munge_socket = self.folder / "munge.socket"
        # --force: sockets in a folder that is not open to all, as a test's temporary one, are an error without it.
        self._daemon("munged", "--foreground", "--force", f"--socket={munge_socket}", *files)
        self._until(munge_socket.is_socket, "munged")
        self._daemon("slurmctld", "-D", "-c")
        for node in self.nodes:
            self._daemon("slurmd", "-D", "-c", "-N", node, log=node)
        self._until(lambda: self._node_states() == ["idle"] * len(self.nodes), "the nodes")

    def _node_states(self) -> list[str]:
        with suppress(RuntimeError):  # slurmctld does not answer yet
            return self._client("sinfo", "--noheader", "--Node", "--format=%T").split()
        return []

    def _daemon(self, *command: str, log: str | None = None) -> None:
        """Start one in the foreground: a child, out of the terminal's Ctrl-C, that ends when Python is killed."""
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

    def _until(self, condition: Callable[[], bool], what: str, timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            dead = [log for log, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                why = f"{', '.join(dead)} ended" if dead else f"{what} not ready within {timeout:g} s"
                tails = [f"{log}.log:\n{_tail(self.folder / f'{log}.log')}" for log in self._daemons]
                raise RuntimeError("\n".join([f"SLURM in {self.folder} did not start: {why}", *tails]))
            time.sleep(0.1)

    def _stop(self) -> None:
        try:
            controller = self._daemons.get("slurmctld")
            if controller and controller.poll() is None:
                self._client("scancel", "--me", timeout=10)
                deadline = time.monotonic() + 10  # more than KillWait
                while self._client("squeue", "--noheader", timeout=10) and time.monotonic() < deadline:
                    time.sleep(0.2)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"jobs not cancelled, killed instead: {error}")
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


def _run(*command: str, env: dict[str, str], cwd: str | Path | None = None, timeout: float) -> str:
    done = subprocess.run(command, env=env, cwd=cwd, timeout=timeout, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
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


def _kill(chosen: Callable[[int, str], bool]) -> None:
    """SIGKILL every process of the clusters ``chosen(owner's pid, cluster's name)``, also one that left its parent."""
    while True:
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # ended, or another user's
                name = re.search(rb"(?:^|\0)SLURM_CLUSTER_NAME=(titan(\d+)x\d+)\0", (folder / "environ").read_bytes())
                if name and chosen(int(name[2]), name[1].decode()):
                    pids.append(int(folder.name))
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        LocalSlurm(folder) as slurm,
        suppress(KeyboardInterrupt),
    ):
        print(f"export SLURM_CONF={slurm.environment['SLURM_CONF']}\nCtrl-C stops the cluster.", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
