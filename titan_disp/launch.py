"""``titan-disp train`` starts torchrun on one machine."""

import os
import sys
from pathlib import Path

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

    Returns:
        The exit status of the first rank that failed, or 0.

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
    )
    try:
        elastic_launch(settings, sys.executable)("-m", "titan_disp.train", *argv)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if reason := _last_error(logs, rank):
            print(reason, file=sys.stderr)
        print(
            f"titan-disp: rank {rank} failed with exit status {failure.exitcode}; logs of all ranks: {logs}",
            file=sys.stderr,
        )
        return failure.exitcode if 0 < failure.exitcode < 256 else 1
    return 0


def _last_error(logs: str, rank: int) -> str | None:
    """Return the error line of a rank other than 0, whose output is not on the console, or None if it has none."""
    if rank == 0:
        return None
    files = sorted(Path(logs).glob(f"*/attempt_*/{rank}/stderr.log"), key=lambda p: p.stat().st_mtime)
    lines = files[-1].read_text(errors="replace").splitlines() if files else []
    return next((line for line in reversed(lines) if line.startswith("titan-disp: error")), None)
