"""The batch script runs ``python -m titan_disp.cluster.job_check`` to check a job
before it starts hundreds of ranks.

The command checks whether the config, data and tokenizer are right for this number of
nodes, and whether another job uses the run folder. If a check fails, the command prints
a message on stderr and exits with status 2, or with status 3 if another job uses the
run folder.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from titan_disp.checks import check_config, check_device, check_inputs
from titan_disp.cluster.freeze import installation_changes
from titan_disp.cluster.node_health import ranks_per_node
from titan_disp.config.batch import data_parallel_degree
from titan_disp.config.load import load_config
from titan_disp.config.types import JobConfig
from titan_disp.data.sources import training_sets
from titan_disp.data.stores import is_hub_name, parse_name
from titan_disp.errors import ConfigError, one_line_at_the_end
from titan_disp.run.folder import writing
from titan_disp.run.lock import abandoned
from titan_disp.run.reader import LOCK

FEW_NODES = 4  # a warning is given if more nodes stream from the hub; our choice
C4_FILES = 1024  # files of the training split
# Requests for files in 5 minutes, by Hugging Face's documentation
# (huggingface.co/docs/hub/rate-limits, "Resolvers").
WITHOUT_TOKEN = 3000  # per IP address, which the nodes of a cluster often share
FREE_ACCOUNT = 5000


def prepare(argv: Sequence[str], nodes: int, nproc: str) -> None:
    """Check that a config can start on ``nodes`` × ``nproc`` ranks.

    ``nproc`` is a number of ranks, or "gpu" for one rank per GPU of this node.
    """
    job_config = load_config(argv)
    if nproc != "gpu" and not nproc.isdecimal():
        raise ConfigError(
            f"TITAN_DISP_NPROC is {nproc!r}, expected gpu or a number of ranks per node"
        )
    per_node = ranks_per_node(nproc, torch.accelerator.device_count())
    if per_node < 1:
        raise ConfigError(
            "no GPU is visible on this node: request GPUs from SLURM (--gpus-per-node "
            "or --gres), or set TITAN_DISP_NPROC to the number of ranks per node for "
            "a run on CPUs"
        )
    check_config(job_config, nodes * per_node)
    check_device(job_config)
    check_inputs(job_config)
    run = Path(job_config.job.dump_folder).absolute()
    with writing(run):
        run.mkdir(parents=True, exist_ok=True)
        abandoned(run / LOCK)
    for changed in installation_changes(job_config.job.config_file):
        print(
            f"titan-disp: warning: the job was submitted with another installation: {changed}",
            flush=True,
        )


def hub_warnings(
    job_config: JobConfig, ranks: int, nodes: int | None = None
) -> list[str]:
    """Return a warning for each training data set that more than a few nodes would
    stream from the hub.
    """
    # A preflight does not know the number of nodes. Most nodes have 8 GPUs.
    nodes = nodes or -(-ranks // 8)
    if nodes <= FEW_NODES:
        return []
    warnings = []
    streams = data_parallel_degree(job_config, ranks)
    for data in training_sets(job_config):
        if not data.on_hub:
            continue
        # All ranks of a stream read each file that has documents of the stream. The
        # streams together read at most (files + streams) files.
        fetch = "DIR"
        count = f"{(C4_FILES + streams) * (ranks // streams):,} requests (one per file and rank that reads it)"
        if is_hub_name(data.dataset):
            fetch = parse_name(data.dataset, f"{data.key}.dataset").fetch_arguments
            count = f"at least {2 * ranks:,} requests (two per Parquet file and rank)"
        warnings.append(
            f"{data.key}.dataset {data.dataset!r} is streamed from the Hugging Face "
            f"hub by {ranks:,} ranks on {nodes} nodes. Every epoch takes {count}, "
            "most of them at once; every resume repeats them, and every broken "
            "connection adds one. By its documentation, the hub answers "
            f"{WITHOUT_TOKEN:,} requests in 5 minutes from one address without a "
            f"token, and {FREE_ACCOUNT:,} from a free account. Read a copy: "
            f"titan-disp data fetch {fetch}, and {data.path_key} = DIR"
        )
    return warnings


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--nproc", default="gpu")
    args, rest = parser.parse_known_args()
    with one_line_at_the_end():
        prepare(rest, args.nodes, args.nproc)


if __name__ == "__main__":
    main()
