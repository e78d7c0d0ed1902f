"""``python -m titan_disp.cluster.node_health`` checks whether this node can train.

The command prints the node's report as one line of JSON, and also writes it to a file
if ``--out`` is given. With TorchTitan's arguments (``--job.config_file CONFIG …``), the
command also checks that this node can read the data and tokenizer of the config. Faulty
GPUs are found as far as their drivers report faults to users other than root
(slurm/README.md lists these faults).
"""

import argparse
import csv
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titan_disp.checks import tokenizer_of
from titan_disp.config.load import load_config
from titan_disp.config.types import JobConfig
from titan_disp.data.sources import DataSet, data_sets
from titan_disp.data.stores import check_hub
from titan_disp.errors import ConfigError
from titan_disp.files import open_files_problem
from titan_disp.run.storage import write_json

# bytes on the node's own disk: compiled kernels take hundreds of MB, an environment
# several GB
MINIMUM_DISK = 2 << 30
# Begins the line with the report (slurm/supervise.py reads it)
REPORT = "titan-disp-node-report: "
# most bytes per line: srun splits lines above 1024 bytes, and mixes the parts with
# lines of other nodes
LINE = 1000
# if a smaller fraction of a GPU's memory is free, another process uses the GPU or has
# left memory allocated
BUSY = 0.9
LIMIT = 60  # seconds for a vendor's tool, which hangs if the driver hangs
DAY = 86400.0
VERBS = Path("/sys/class/infiniband")  # has the cards of InfiniBand, RoCE and EFA
RECOVERY = "gpu_recovery_action"
# {field of nvidia-smi: (value of a healthy GPU, message for any other value)}
NVIDIA_FIELDS = {
    "ecc.errors.uncorrected.volatile.total": (
        "0",
        "{} uncorrectable memory errors since the driver was loaded",
    ),
    "remapped_rows.failure": ("No", "failed memory could not be remapped ({})"),
    "remapped_rows.pending": (
        "No",
        "remapping failed memory needs a reset of the GPU ({})",
    ),
    RECOVERY: ("None", "the driver asks for a recovery action ({})"),
}
UNKNOWN = ("N/A", "[N/A]", "[Not Supported]")
# Xids that no application causes: a double-bit error, a failed retirement of memory, a
# GPU that has fallen off the bus, an uncontained error, and a GSP (the GPU's own
# processor) that has failed or does not answer. Source: nverror.h of NVIDIA's open
# kernel modules.
HARDWARE_XIDS = (48, 64, 79, 95, 119, 120)
XID = re.compile(r"(?m)^(?:\[ *([\d.]+)\] )?NVRM: Xid \((PCI:[^)]*)\): (\d+), (.*)$")


def gpu_problems() -> list[str]:
    """Return a description of each fault of this node's GPUs.

    The list is empty if no vendor tool is installed.
    """
    try:
        nvidia = {field: _nvidia(field) for field in NVIDIA_FIELDS}
        problems = []
        for field, (sound, text) in NVIDIA_FIELDS.items():
            unsound = {
                gpu: value
                for gpu, value in nvidia[field].items()
                if value not in (sound, *UNKNOWN)
            }
            problems += [
                f"GPU {gpu}: {text.format(value)}" for gpu, value in unsound.items()
            ]
        problems += [
            f"GPU {gpu}: {count} uncorrectable errors"
            for gpu, count in _amd().items()
            if count
        ]
    except subprocess.TimeoutExpired as error:
        return [f"{error.cmd[0]} does not answer within {LIMIT} s"]
    # Newer drivers report the action that they require. With older drivers, only the
    # kernel log has Xids.
    if all(value in UNKNOWN for value in nvidia[RECOVERY].values()):
        problems += dict.fromkeys(_xids())
    return problems


def _output(*command: str) -> str:
    """Return what a command prints, or an empty string if it is missing or fails.

    Raises TimeoutExpired if the command hangs.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=LIMIT
        )
    except OSError:
        return ""
    if done.returncode:
        return ""
    return done.stdout


def _nvidia(field: str) -> dict[str, str]:
    """Return {GPU: value} of one field of nvidia-smi.

    Each field has its own query, because nvidia-smi rejects a query with any unknown
    field.
    """
    text = _output("nvidia-smi", f"--query-gpu=index,{field}", "--format=csv,noheader")
    return dict(
        row
        for row in csv.reader(text.splitlines(), skipinitialspace=True)
        if len(row) == 2
    )


def _amd() -> dict[str, int]:
    """Return the number of uncorrectable errors of each GPU, from amd-smi or the older
    rocm-smi.
    """
    counts = {}
    for gpu, text in _parts(r"(?m)^GPU: (\d+)$", _output("amd-smi", "metric", "--ecc")):
        counts[gpu] = re.findall(r"(?m)^ *TOTAL_UNCORRECTABLE_COUNT: (\d+)$", text)
    if not any(counts.values()):
        for gpu, text in _parts(
            r"(?m)^GPU\[(\d+)\]: +\tRAS INFO$", _output("rocm-smi", "--showrasinfo")
        ):
            # Each row has a block, its status, and the numbers of correctable and
            # uncorrectable errors.
            counts[gpu] = re.findall(r"(?m)^ *\w+ +\w+ +\d+ +(\d+) *$", text)
    return {gpu: sum(map(int, numbers)) for gpu, numbers in counts.items()}


def _parts(head: str, text: str) -> Iterable[tuple[str, str]]:
    """Split a text at the lines that match ``head``, and return, for each such line, its
    GPU and the text below it.
    """
    _, *parts = re.split(head, text)
    return zip(parts[::2], parts[1::2], strict=True)


def _xids() -> Iterator[str]:
    """Yield the last day's Xids (NVIDIA's error numbers) that mean faulty hardware,
    from dmesg, or from the journal if only root may run dmesg.
    """
    journal = (
        "journalctl",
        "--dmesg",
        "--since=-24h",
        "--output=cat",
        "--no-pager",
        "--quiet",
    )
    try:
        log = _output("dmesg") or _output(*journal)
    except subprocess.TimeoutExpired:  # a slow disk says nothing about the GPUs
        return
    for seconds, gpu, xid, text in XID.findall(log):
        # dmesg prints seconds since the node was booted.
        if int(xid) in HARDWARE_XIDS and (
            not seconds or time.monotonic() - float(seconds) < DAY
        ):
            yield f"GPU at {gpu}: Xid {xid} within a day: {text}"


def node_name() -> str:
    """Return SLURM's name of this node (one host may run several nodes), or the host's
    short name outside of SLURM.
    """
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def in_order(nodes: Iterable[str]) -> list[str]:
    """Sort node names by length and then alphabetically, so that n2 comes before
    n10.
    """
    return sorted(nodes, key=lambda name: (len(name), name))


def writable(folder: str) -> str | None:
    """Return the reason why nothing can be written to a folder, or None if it is
    writable.
    """
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
    """Return the free bytes of a GPU (0 if it cannot compute), and the reason why it
    cannot be used, or None.
    """
    try:
        free, total = torch.cuda.mem_get_info(index)
        if free < BUSY * total:
            return (
                free,
                f"GPU {index} has {free / 1e9:.0f} of {total / 1e9:.0f} GB free",
            )
        ones = torch.ones(1024, 1024, device=f"cuda:{index}")
        if not torch.equal((ones @ ones).cpu(), torch.full((1024, 1024), 1024.0)):
            return 0, f"GPU {index} returns wrong matrix products"
    except RuntimeError as error:
        return 0, f"GPU {index}: {str(error).splitlines()[0]}"
    return free, None


def input_problems(job_config: JobConfig) -> list[str]:
    """Return the reasons why this node cannot read the tokenizer or the data.

    Data on the hub needs internet access.
    """
    problems = []
    for check in (
        partial(tokenizer_of, job_config),
        *(partial(_read_data, data) for data in data_sets(job_config)),
    ):
        try:
            check()
        except ConfigError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{error.filename} is not readable: {error.strerror}")
    return problems


def _read_data(data: DataSet) -> None:
    if data.on_hub:
        check_hub(data.dataset, data.key)
        return
    first = data.files()[0]
    if not first.remote:
        # a file system may list files that it cannot read
        with open(first.url, "rb") as file:
            file.read(1)


def check_node(local: str, job_config: JobConfig | None = None) -> dict[str, Any]:
    """Check this node: a folder on its own disk, its GPUs, and what a config writes and
    reads.

    ``free_gpu_bytes`` of the report is the free memory of its fullest GPU, or 0 if a
    GPU cannot compute. ``free_bytes`` and ``run_free_bytes`` are the free space for
    ``local`` and for the run folder.
    """
    folders = [local]
    if job_config is not None:
        run = job_config.job.dump_folder
        checkpoints = os.path.join(run, job_config.checkpoint.folder)
        # The checkpoint folder is not created here, because an empty folder would
        # change how the run starts.
        folders += [run, checkpoints] if os.path.isdir(checkpoints) else [run]
    problems = [problem for folder in folders if (problem := writable(folder))]
    free = _free_disk(local)
    if free < MINIMUM_DISK:
        problems.append(
            f"{local} has {free / 1e9:.1f} GB free, expected at least "
            f"{MINIMUM_DISK / 1e9:.1f} GB"
        )
    count = torch.cuda.device_count()
    checked = [check_gpu(i) for i in range(count)]
    problems += [problem for _, problem in checked if problem]
    problems += gpu_problems() if count else []
    if few_files := open_files_problem(_ranks(count)):
        problems.append(few_files)
    if job_config is not None:
        problems += input_problems(job_config)
    return {
        "node": node_name(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
        "free_gpu_bytes": min((free for free, _ in checked), default=0),
        "free_bytes": free,
        "run_free_bytes": _free_disk(job_config.job.dump_folder)
        if job_config is not None
        else 0,
        "locked_memory_note": locked_memory_note(),
        "clock": time.time(),
        "problems": problems,
    }


def locked_memory_note() -> str | None:
    """Return what to do if a low limit on locked memory may break the network, or None.

    Network cards write to buffers that NCCL locks in the host's memory.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or not VERBS.exists():
        return None
    return (
        f"a process may lock {limit:,} bytes of memory (ulimit -l), expected unlimited: "
        "set LimitMEMLOCK=infinity of slurmd, memlock in /etc/security/limits.conf, or "
        "--ulimit memlock=-1 of the container"
    )


def ranks_per_node(nproc: str, gpus: int) -> int:
    """Return the number of ranks on a node with ``gpus`` GPUs. ``nproc`` is a number
    of ranks, or "gpu" for one rank per GPU.
    """
    if nproc == "gpu":
        return gpus
    return int(nproc)


def _ranks(gpus: int) -> int:
    """Return the number of ranks of this job, if each node has ``gpus`` GPUs."""
    per_node = ranks_per_node(os.environ.get("TITAN_DISP_NPROC", "gpu"), gpus)
    return int(os.environ.get("SLURM_NNODES", "1")) * per_node


def _free_disk(folder: str) -> int:
    return shutil.disk_usage(folder).free if os.path.isdir(folder) else 0


def report_line(report: dict[str, Any]) -> str:
    """Return a report as one line of at most ``LINE`` bytes.

    The problems are cut if the line would be longer.
    """
    line = REPORT + json.dumps(report)
    text = "; ".join(report["problems"])
    while len(line) > LINE and text:
        text = text[: len(text) * 9 // 10]
        line = REPORT + json.dumps({**report, "problems": [f"{text} ..."]})
    return line


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--out", help="folder for the report, on a shared file system")
    parser.add_argument(
        "--local", required=True, help="a folder on the node's own disk"
    )
    args, titan = parser.parse_known_args()
    job_config = None
    unreadable = []
    try:
        job_config = load_config(titan) if titan else None
    except ConfigError as error:
        unreadable = [str(error)]
    report = check_node(args.local, job_config)
    report["problems"] += unreadable
    if args.out:
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / f"{report['node']}.json", report)
    line = report_line(report)
    if line != REPORT + json.dumps(report):
        print(
            f"{report['node']}: {'; '.join(report['problems'])}",
            file=sys.stderr,
            flush=True,
        )
    print(line, flush=True)


if __name__ == "__main__":
    main()
