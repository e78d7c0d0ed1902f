"""``titan-disp train`` starts torchrun on one machine."""

import contextlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from titan_disp.config import load_config
from titan_disp.config_checks import check_config, check_device, check_inputs


def launch(config: str, overrides: list[str], nproc: int | None) -> int:
    """Check everything in this process, so that an error is printed once, then start ``nproc`` ranks.

    Args:
        config: TOML file.
        overrides: TorchTitan's command-line options.
        nproc: number of ranks; by default one per GPU, or 1 without a GPU.

    SIGINT (Ctrl-C) or SIGTERM stops the run: the ranks finish their step, save and end. A second signal kills them.

    Returns:
        0, or the exit status of the first rank that failed, or 128 plus the number of the signal that stopped the run.

    Raises:
        ConfigError: A check failed. No rank has started.
    """
    argv = ["--job.config_file", config, *overrides]
    job_config = load_config(argv)
    nproc = nproc or torch.accelerator.device_count() or 1
    fake = job_config.comm.mode != "default"
    check_config(job_config, int(os.environ.get("NGPU", "1")) if fake else nproc)
    check_device(job_config)
    check_inputs(job_config)
    # torchrun sets one thread per rank. Here the ranks share the machine's cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    logs = os.path.join(job_config.job.dump_folder, "logs")
    settings = LaunchConfig(
        role="rank",  # so that lines on the console begin with [rank0]
        logs_specs=DefaultLogsSpecs(log_dir=logs, tee=Std.ALL, local_ranks_filter={0}),
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=f"titan-disp-{os.getpid()}",
        rdzv_backend="c10d",
        # Addresses, because not every container resolves localhost, and not every laptop its own name.
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        signals_to_handle="SIGHUP,SIGQUIT",  # torchrun would kill ranks that save for more than 30 seconds
    )
    stop = StopSignals()
    then = "The same command resumes from the newest checkpoint, or begins anew if there is none."
    if not job_config.checkpoint.enable:
        then = "The same command begins anew, because checkpoint.enable is false."
    try:
        with stop:
            elastic_launch(settings, sys.executable)("-m", "titan_disp.train", *argv)
    except ChildFailedError as error:
        if stop.number:
            print(f"titan-disp: {stop.name} ended the run before all ranks had saved. {then}", file=sys.stderr)
            return 128 + stop.number
        rank, failure = error.get_first_failure()
        if reason := _last_error(logs, rank):
            print(reason, file=sys.stderr)
        print(
            f"titan-disp: rank {rank} failed with exit status {failure.exitcode}; logs of all ranks: {logs}",
            file=sys.stderr,
        )
        return failure.exitcode if 0 < failure.exitcode < 256 else 1
    if stop.number:
        print(f"titan-disp: {stop.name} ended the run. {then}", file=sys.stderr)
        return 128 + stop.number
    return 0


class StopSignals:
    """Listen for SIGINT and SIGTERM while ranks train, and pass the first one on to them as SIGTERM.

    The ranks have sessions of their own, so a terminal does not signal them.

    Attributes:
        number: the signal that was heard first; 0 if there was none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._previous: dict[int, Any] = {}

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    def __enter__(self) -> None:
        with contextlib.suppress(ValueError):  # outside of the main thread, Python forbids signal handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._heard)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        ranks = _children()
        if not ranks:  # they have not started, or have ended
            raise SystemExit(128 + number)
        if not self.number:
            print(
                f"titan-disp: {signal.Signals(number).name}: the ranks finish their step, save and end. "
                "A second signal kills them.",
                file=sys.stderr,
            )
        for rank in ranks:
            with contextlib.suppress(OSError):
                if self.number:
                    os.killpg(rank, signal.SIGKILL)
                else:
                    os.kill(rank, signal.SIGTERM)
        self.number = self.number or number


def _children() -> list[int]:
    """Return the ranks, which this process's main thread has started, each with a session of its own."""
    pid = os.getpid()
    ranks = []
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with contextlib.suppress(OSError):  # it has ended
            if os.getsid(child) == child:
                ranks.append(child)
    return ranks


def _last_error(logs: str, rank: int) -> str | None:
    """Return the error line of a rank other than 0, whose output is not on the console, or None if it has none."""
    if rank == 0:
        return None
    files = sorted(Path(logs).glob(f"*/attempt_*/{rank}/stderr.log"), key=lambda p: p.stat().st_mtime)
    lines = files[-1].read_text(errors="replace").splitlines() if files else []
    return next((line for line in reversed(lines) if line.startswith("titan-disp: error")), None)
