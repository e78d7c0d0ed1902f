"""``python -m titan_disp.cluster.node_health`` checks whether this node can train.

It does not check the config, as ``titan_disp.config_checks`` does, and does not know the other nodes.
The batch script starts it once per node before training, and so does preflight.sbatch. It prints the node's report as
one line of JSON (``check_node`` describes it). With ``--out``, it also writes the report to a file. The batch host
compares the reports of all nodes. With TorchTitan's arguments (``--job.config_file CONFIG …``), it also checks that
this node can read the data and tokenizer of the config.
"""

import argparse
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchtitan.config import JobConfig

from titan_disp.cluster.gpu_health import gpu_problems
from titan_disp.config import load_config
from titan_disp.config_checks import tokenizer_of
from titan_disp.data.files import check_hub, streams_from_hub
from titan_disp.data.sources import DataSet, data_sets
from titan_disp.errors import ConfigError
from titan_disp.run.folder import write_json

MINIMUM_DISK = 2 << 30  # bytes on the node's own disk: compiled kernels take hundreds of MB, an environment several GB
REPORT = "titan-disp-node-report: "  # begins the line with the report (slurm/supervise.py reads it)
LINE = 1000  # most bytes per line: srun splits lines above 1024 bytes, and mixes the parts with lines of other nodes
BUSY = 0.9  # if a smaller fraction of a GPU's memory is free, another process uses it or has left memory behind


def node_name() -> str:
    """Return SLURM's name of this node, or the host's short name outside of SLURM.

    By default both are the same. The names differ if one host runs several nodes.
    """
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def in_order(nodes: Iterable[str]) -> list[str]:
    """Sort node names by length and then alphabetically, so that n2 comes before n10."""
    return sorted(nodes, key=lambda name: (len(name), name))


def writable(folder: str) -> str | None:
    """Return the reason why nothing can be written to a folder, or None if it is writable."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x" * (1 << 16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{folder} is not writable: {error.strerror}"
    return None


def check_gpu(index: int) -> tuple[int, str | None]:
    """Return the free bytes of a GPU (0 if it cannot compute), and the reason why it cannot be used, or None."""
    try:
        free, total = torch.cuda.mem_get_info(index)
        if free < BUSY * total:
            return free, f"GPU {index} has {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
        ones = torch.ones(1024, 1024, device=f"cuda:{index}")
        if not torch.equal((ones @ ones).cpu(), torch.full((1024, 1024), 1024.0)):
            return 0, f"GPU {index} returns wrong matrix products"
    except RuntimeError as error:
        return 0, f"GPU {index}: {str(error).splitlines()[0]}"
    return free, None


def input_problems(job_config: JobConfig) -> list[str]:
    """Return the reasons why this node cannot read the tokenizer or the data. Data on the hub needs internet access."""
    checks: list[Callable[[], object]] = [
        partial(tokenizer_of, job_config),
        *(partial(_read_data, data) for data in data_sets(job_config)),
    ]
    problems = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{error.filename} is not readable: {error.strerror}")
    return problems


def _read_data(data: DataSet) -> None:
    if streams_from_hub(data.dataset, data.path):
        check_hub(data.dataset, data.key)
        return
    files = data.files()
    with open(files[0].url, "rb") as file:  # a file system may list files that it cannot read
        file.read(1)


def check_node(
    local: str,
    shared: Sequence[str],
    readable: Sequence[str],
    gpus: int | None,
    job_config: JobConfig | None = None,
) -> dict[str, Any]:
    """Check this node.

    Args:
        local: folder on the node's own disk.
        shared: folders that must be writable.
        readable: files and folders that must be readable.
        gpus: expected number of GPUs; None allows any number.
        job_config: config whose run folder must be writable, and whose data and tokenizer must be readable.

    Returns:
        ``node``: its name. ``gpus``: names of its GPUs. ``free_gpu_bytes``: free memory of its fullest GPU, 0 if a GPU
        cannot compute. ``free_bytes``: free disk space for ``local``. ``run_free_bytes``: free space for the run
        folder. ``clock``: this node's time in seconds since the epoch. ``problems``: messages for the user.
    """
    shared = list(shared)
    if job_config is not None:
        run = job_config.job.dump_folder
        checkpoints = os.path.join(run, job_config.checkpoint.folder)
        # The checkpoint folder is not created here: an empty one would change how the run starts.
        shared += [run, checkpoints] if os.path.isdir(checkpoints) else [run]
    problems = [problem for folder in (local, *shared) if (problem := writable(folder))]
    problems += [f"{path} is missing or not readable" for path in readable if not os.access(path, os.R_OK)]
    free = _free_disk(local)
    if free < MINIMUM_DISK:
        problems.append(f"{local} has {free / 1e9:.1f} GB free, expected at least {MINIMUM_DISK / 1e9:.1f} GB")
    count = torch.cuda.device_count()
    if gpus is not None and count != gpus:
        problems.append(f"the number of visible GPUs is {count}, expected {gpus}")
    checked = [check_gpu(i) for i in range(count)]
    problems += [problem for _, problem in checked if problem]
    problems += gpu_problems() if count else []
    if job_config is not None:
        problems += input_problems(job_config)
    return {
        "node": node_name(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
        "free_gpu_bytes": min((free for free, _ in checked), default=0),
        "free_bytes": free,
        "run_free_bytes": _free_disk(job_config.job.dump_folder) if job_config is not None else 0,
        "clock": time.time(),
        "problems": problems,
    }


def _free_disk(folder: str) -> int:
    return shutil.disk_usage(folder).free if os.path.isdir(folder) else 0


def report_line(report: dict[str, Any]) -> str:
    """Return a report as one line of at most ``LINE`` bytes. The problems are cut if the line would be longer."""
    line = REPORT + json.dumps(report)
    text = "; ".join(report["problems"])
    while len(line) > LINE and text:
        text = text[: len(text) * 9 // 10]
        line = REPORT + json.dumps({**report, "problems": [f"{text} ..."]})
    return line


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--out", help="folder for the report, on a shared file system")
    parser.add_argument("--local", required=True, help="a folder on the node's own disk")
    parser.add_argument("--writable", action="append", default=[])
    parser.add_argument("--readable", action="append", default=[])
    parser.add_argument("--gpus", type=int)
    args, titan = parser.parse_known_args()
    job_config, unreadable = None, []
    try:
        job_config = load_config(titan) if titan else None
    except ConfigError as error:
        unreadable = [str(error)]
    report = check_node(args.local, args.writable, args.readable, args.gpus, job_config)
    report["problems"] += unreadable
    if args.out:
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / f"{report['node']}.json", report)
    line = report_line(report)
    if line != REPORT + json.dumps(report):
        print(f"{report['node']}: {'; '.join(report['problems'])}", file=sys.stderr, flush=True)
    print(line, flush=True)


if __name__ == "__main__":
    main()
