"""The batch script runs ``python -m titan_disp.cluster.job_check`` to check a job before it starts hundreds of ranks.

This command checks the config, data and tokenizer for this number of nodes, and that no other job uses the run folder.
It prints the run folder after a marker, because containers and srun may print other lines. If a check fails, the
command prints a message on stderr and exits with status 2, or with status 3 if another job uses the run folder.
``node_health`` checks the nodes.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from titan_disp.config import load_config
from titan_disp.config_checks import check_config, check_device, check_inputs
from titan_disp.errors import EXIT_CODE, IN_USE_EXIT_CODE, ConfigError, InUseError, UserError
from titan_disp.run.folder import lock_folder

RUN_FOLDER = "titan-disp-run-folder: "  # marks the line; the run folder follows as JSON (slurm/supervise.py reads it)


def prepare(argv: Sequence[str], nodes: int, nproc: str) -> Path:
    """Check that a config can start on ``nodes`` × ``nproc`` ranks, and return the absolute path of its run folder.

    Args:
        argv: TorchTitan's arguments.
        nodes: number of nodes.
        nproc: ranks per node, or "gpu" for one per GPU of this node.

    Raises:
        ConfigError: The run would fail at its start.
        InUseError: Another job uses the run folder.
    """
    job_config = load_config(argv)
    if nproc != "gpu" and not nproc.isdecimal():
        raise ConfigError(f"TITAN_DISP_NPROC is {nproc!r}, expected gpu or a number of ranks per node")
    per_node = torch.accelerator.device_count() if nproc == "gpu" else int(nproc)
    if per_node < 1:
        raise ConfigError(
            "no GPU is visible on this node: request GPUs from SLURM (--gpus-per-node or --gres), or set "
            "TITAN_DISP_NPROC to the number of ranks per node for a run on CPUs"
        )
    check_config(job_config, nodes * per_node)
    check_device(job_config)
    check_inputs(job_config)
    run = Path(job_config.job.dump_folder).absolute()
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock_folder(run).close()
    except OSError as error:
        raise ConfigError(f"job.dump_folder {str(run)!r} is not writable: {error}") from error
    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--nproc", default="gpu")
    args, rest = parser.parse_known_args()
    try:
        run = prepare(rest, args.nodes, args.nproc)
    except UserError as error:
        print(f"titan-disp: error: {error}", file=sys.stderr, flush=True)
        sys.exit(IN_USE_EXIT_CODE if isinstance(error, InUseError) else EXIT_CODE)
    print(RUN_FOLDER + json.dumps(os.fspath(run)), flush=True)


if __name__ == "__main__":
    main()
