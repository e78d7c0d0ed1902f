"""``python -m titan_disp.cluster.nodecheck``: can this node train? Started once per node, before training or by preflight.sbatch.

Prints a line with the node's report as JSON, see ``check_node``, and with ``--out`` writes it into a file; whoever started it
compares the nodes. With TorchTitan's arguments (``--job.config_file CONFIG …``) also what the config names is looked at from
this node.
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

from titan_disp.checks import tokenizer_of
from titan_disp.cluster.gpu_health import gpu_problems
from titan_disp.config import load_config
from titan_disp.data.files import check_hub, streams_from_hub
from titan_disp.data.sources import DataSet, data_sets
from titan_disp.errors import ConfigError
from titan_disp.run.folder import write_json

MINIMUM_DISK = 2 << 30  # bytes on the node's own disk: compiled kernels take some hundred MB, an environment some GB
REPORT = "titan-disp-node-report: "  # begins the line that holds the report (slurm/supervise.py reads it)
LINE = 1000  # bytes of it: srun passes on what is longer than 1024 in pieces, between which other nodes' lines come
BUSY = 0.9  # a GPU with less of its memory free than this has another user, or a dead one's leftovers


def node_name() -> str:
    """As SLURM calls it; several nodes may be one host. By default SLURM's name is the host's short one."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def in_order(nodes: Iterable[str]) -> list[str]:
    """n2 before n10."""
    return sorted(nodes, key=lambda name: (len(name), name))


def writable(folder: str) -> str | None:
    """Why nothing can be written in a folder, or None."""
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
    """Bytes free on a GPU (0: it does not compute), and why it cannot be used, or None."""
    try:
        free, total = torch.cuda.mem_get_info(index)
        if free < BUSY * total:
            return free, f"GPU {index} has {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
        ones = torch.ones(1024, 1024, device=f"cuda:{index}")
        if not torch.equal((ones @ ones).cpu(), torch.full((1024, 1024), 1024.0)):
            return 0, f"GPU {index} multiplies wrongly"
    except RuntimeError as error:
        return 0, f"GPU {index}: {str(error).splitlines()[0]}"
    return free, None


def input_problems(job_config: JobConfig) -> list[str]:
    """Why tokenizer or data cannot be read from this node. Data on the hub is asked for, which needs internet."""
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
    with open(files[0].url, "rb") as file:  # a file system may list what it cannot read
        file.read(1)


def check_node(
    local: str,
    shared: Sequence[str],
    readable: Sequence[str],
    gpus: int | None,
    job_config: JobConfig | None = None,
) -> dict[str, Any]:
    """This node's report: node; gpus: their names; free_gpu_bytes: of the fullest, 0 where one cannot compute; free_bytes: on
    ``local``; run_free_bytes: in the run folder; clock: when it was written, by this node; problems: in words.

    Args:
        local: folder on its own disk. shared: folders that must be writable. readable: files and folders that must be there.
        gpus: expected number; None: any.
        job_config: whose run folder must be writable, and whose data and tokenizer readable.
    """
    shared = list(shared)
    if job_config is not None:
        run = job_config.job.dump_folder
        checkpoints = os.path.join(run, job_config.checkpoint.folder)
        # An empty one that this made would change how the run starts.
        shared += [run, checkpoints] if os.path.isdir(checkpoints) else [run]
    problems = [problem for folder in (local, *shared) if (problem := writable(folder))]
    problems += [f"{path} is missing or not readable" for path in readable if not os.access(path, os.R_OK)]
    free = _free_disk(local)
    if free < MINIMUM_DISK:
        problems.append(f"{local} has {free / 1e9:.1f} GB free, expected {MINIMUM_DISK / 1e9:.1f}")
    count = torch.cuda.device_count()
    if gpus is not None and count != gpus:
        problems.append(f"{count} GPUs are visible, expected {gpus}")
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
    """A report as one line of ``LINE`` bytes at most: where it is longer, its problems are told short."""
    line = REPORT + json.dumps(report)
    text = "; ".join(report["problems"])
    while len(line) > LINE and text:
        text = text[: len(text) * 9 // 10]
        line = REPORT + json.dumps({**report, "problems": [f"{text} ..."]})
    return line


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--out", help="folder for the report, on a shared file system")
    parser.add_argument("--local", required=True, help="folder on the node's own disk")
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
