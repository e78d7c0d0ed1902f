"""``python -m titan_disp.cluster.nodecheck``: can this node train? Started once per node before training.

Writes one JSON file per node, {"node", "gpus", "free_bytes", "clock", "problems"}; whoever started it compares them.
"""

import argparse
import json
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

MINIMUM_DISK = 2 << 30  # bytes on the node's own disk: compiled kernels take some hundred MB, an environment some GB
BUSY = 0.9  # a GPU with less of its memory free than this has another user, or a dead one's leftovers


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


def check_gpu(index: int) -> str | None:
    """Why a GPU cannot be used, or None: its memory is taken, or it computes nonsense."""
    try:
        free, total = torch.cuda.mem_get_info(index)
        if free < BUSY * total:
            return f"GPU {index} has {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
        ones = torch.ones(1024, 1024, device=f"cuda:{index}")
        if not torch.equal((ones @ ones).cpu(), torch.full((1024, 1024), 1024.0)):
            return f"GPU {index} multiplies wrongly"
    except RuntimeError as error:
        return f"GPU {index}: {str(error).splitlines()[0]}"
    return None


def check_node(local: str, shared: list[str], readable: list[str], gpus: int | None) -> dict[str, Any]:
    """This node's report.

    Args:
        local: folder on its own disk. shared: folders that must be writable. readable: files and folders that must be there.
        gpus: expected number; None: any.
    """
    problems = [problem for folder in (local, *shared) if (problem := writable(folder))]
    problems += [f"{path} is missing or not readable" for path in readable if not os.access(path, os.R_OK)]
    free = shutil.disk_usage(local).free if os.path.isdir(local) else 0
    if free < MINIMUM_DISK:
        problems.append(f"{local} has {free / 1e9:.1f} GB free, expected {MINIMUM_DISK / 1e9:.1f}")
    count = torch.cuda.device_count()
    if gpus is not None and count != gpus:
        problems.append(f"{count} GPUs are visible, expected {gpus}")
    problems += [problem for i in range(count) if (problem := check_gpu(i))]
    return {
        "node": os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
        "free_bytes": free,
        "clock": time.time(),
        "problems": problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="folder for the report, on a shared file system")
    parser.add_argument("--local", required=True, help="folder on the node's own disk")
    parser.add_argument("--writable", action="append", default=[])
    parser.add_argument("--readable", action="append", default=[])
    parser.add_argument("--gpus", type=int)
    args = parser.parse_args()
    report = check_node(args.local, args.writable, args.readable, args.gpus)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    partial = out / f".{report['node']}.partial"
    partial.write_text(json.dumps(report))
    os.replace(partial, out / f"{report['node']}.json")


if __name__ == "__main__":
    main()
