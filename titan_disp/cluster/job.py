"""``python -m titan_disp.cluster.job``: what the batch script must know before it starts hundreds of ranks.

Checks the config, data and tokenizer for this number of nodes, and that no other job uses the run folder. Prints a line with
the run folder, marked, as containers and srun may print more. Where something must be mended: a message on stderr and exit
status 2; 3 where another job uses the run folder.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from titan_disp.checks import check_config, check_device, check_inputs
from titan_disp.config import load_config
from titan_disp.errors import EXIT_CODE, IN_USE_EXIT_CODE, ConfigError, InUseError
from titan_disp.run.folder import lock_folder

RUN_FOLDER = "titan-disp-run-folder: "  # stands before the run folder as JSON (slurm/supervise.py reads it)


def prepare(argv: Sequence[str], nodes: int, nproc: str) -> Path:
    """The absolute run folder of a config that can start on ``nodes`` × ``nproc`` ranks.

    Args:
        argv: TorchTitan's arguments. nproc: ranks per node, or "gpu" for one per GPU of this node.

    Raises:
        ConfigError: what would fail at the start.
    """
    job_config = load_config(argv)
    if nproc != "gpu" and not nproc.isdecimal():
        raise ConfigError(f"TITAN_DISP_NPROC is {nproc!r}, expected gpu or a number of ranks per node")
    per_node = torch.accelerator.device_count() if nproc == "gpu" else int(nproc)
    if per_node < 1:
        raise ConfigError(
            "no GPU is visible on this node: ask SLURM for them (--gpus-per-node or --gres), or set TITAN_DISP_NPROC to the "
            "number of ranks per node for a run on CPUs"
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
    except ConfigError as error:
        print(f"titan-disp: error: {error}", file=sys.stderr, flush=True)
        sys.exit(IN_USE_EXIT_CODE if isinstance(error, InUseError) else EXIT_CODE)
    print(RUN_FOLDER + json.dumps(os.fspath(run)), flush=True)


if __name__ == "__main__":
    main()
